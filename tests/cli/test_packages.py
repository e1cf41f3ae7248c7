"""Apps in packages: modules, factories, relative imports, and the app of wirecall.toml."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.cli import PATIENCE, running, wirecall
from wirecall.cli.failures import Exit

APP = """
from wirecall import App
from .prices import PRICES

app = App("acme", version="1")


@app.query
def price(sku: str) -> int:
    return PRICES[sku]


@app.command(destructive=False)
def charge(order: str) -> str:
    return f"charged {order}"
"""
FACTORY = """
from wirecall import App


def create_app() -> App:
    app = App("made")

    @app.query
    def price(sku: str) -> int:
        return 7

    return app


async def later() -> App:
    return create_app()


def broken() -> App:
    return [][1]


def nothing():
    return 5


def sized(size: int, *rest: int, color: str, name: str = "made") -> App:
    return create_app()
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A package with a relative import, a factory, and modules that fail."""
    files = {
        "acme/__init__.py": "",
        "acme/prices.py": 'PRICES = {"tea": 450}\n',
        "acme/shop.py": APP,
        "acme/made.py": FACTORY,
        "acme/deep.py": "from wirecall import App\nfrom .inner import table\napp = App('a')\n",
        "acme/inner/__init__.py": "",
        "acme/inner/table.py": "import json\n\nROWS = json.loads('{')\n",
        "acme/syntax.py": "from .inner.bad import x\n",
        "acme/inner/bad.py": "x = 1\nx = = 2\n",
        "acme/needs.py": "\nimport no_such_library\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def run(*words: str, cwd: Path, **variables: str) -> "subprocess.CompletedProcess[bytes]":
    return wirecall(*words, cwd=cwd, env={**os.environ, **variables})


@pytest.mark.parametrize(
    ("words", "price"),
    [
        (["acme.shop:app"], b"450\n"),
        (["acme.shop"], b"450\n"),
        (["acme/shop.py"], b"450\n"),
        (["acme/shop.py:app"], b"450\n"),
        (["acme.made:create_app", "--factory"], b"7\n"),
        (["--factory", "acme/made.py:create_app"], b"7\n"),
    ],
)
def test_app_in_a_package_is_called(project: Path, words: list[str], price: bytes) -> None:
    done = run("call", *words, "price", "sku=tea", cwd=project)
    assert (done.returncode, done.stdout) == (0, price), done.stderr.decode()


def test_app_in_a_package_is_found_from_its_own_folder(project: Path) -> None:
    done = run("call", "shop.py", "price", "sku=tea", cwd=project / "acme")
    assert done.stdout == b"450\n", done.stderr.decode()


@pytest.mark.parametrize(
    "verb",
    [
        ["list"],
        ["show", "price"],
        ["call", "price", "sku=tea"],
        ["batch", "calls.jsonl"],
        ["send", "message.json"],
        ["probe"],
        ["lock", "-o", "new.lock"],
        ["diff", "old.lock"],
        ["client", "-o", "generated.py"],
        ["bench", "price", "sku=tea", "--duration", "1s", "--over", "memory"],
        ["ledger", "stats"],
        ["doctor"],
        ["config", "check"],
        ["install", "--client", "cursor", "--print"],
    ],
    ids=lambda verb: verb[0],
)
@pytest.mark.parametrize("kind", ["module", "factory"])
def test_every_verb_uses_the_app_of_the_configuration(
    project: Path, verb: list[str], kind: str
) -> None:
    named = 'app = "acme.shop:app"'
    if kind == "factory":
        named = 'app = "acme.made:create_app"\nfactory = true'
    (project / "wirecall.toml").write_text(f"[server]\n{named}\n")
    (project / "calls.jsonl").write_text('{"method":"price","params":{"sku":"tea"}}\n')
    message = {"jsonrpc": "2.0", "id": 1, "method": "price", "params": {"sku": "tea"}}
    (project / "message.json").write_text(json.dumps(message))
    if verb[0] == "diff":
        assert run("lock", "-o", "old.lock", cwd=project).returncode == 0
    if verb[0] == "ledger":
        (project / "wirecall.toml").write_text(
            f'[server]\n{named}\n[ledger]\nurl = "sqlite:ledger.db"\n'
        )
        run("call", "charge", "order=7", "--key", "k-1", cwd=project)
        if kind == "factory":
            return  # it has no command, so there is no ledger to look at
    done = run(*verb, cwd=project)
    assert done.returncode == 0, done.stderr.decode()


def test_target_wins_over_the_configuration(project: Path) -> None:
    (project / "wirecall.toml").write_text('[server]\napp = "acme.shop:app"\n')
    (project / "other.py").write_text(
        "from wirecall import App\napp = App('o')\n@app.query\ndef price(sku: str) -> int:\n    return 9\n"
    )
    done = run("call", "other.py", "price", "sku=tea", cwd=project)
    assert done.stdout == b"9\n", done.stderr.decode()


def test_configuration_in_another_folder_finds_its_module(project: Path, tmp_path: Path) -> None:
    (project / "wirecall.toml").write_text('[server]\napp = "acme.shop:app"\n')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = run(
        "call",
        "price",
        "sku=tea",
        cwd=elsewhere,
        WIRECALL_CONFIG=str(project / "wirecall.toml"),
    )
    assert done.stdout == b"450\n", done.stderr.decode()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["acme.deep:app"], "why: acme/inner/table.py, line 3: JSONDecodeError: "),
        (["acme/deep.py"], "why: acme/inner/table.py, line 3: JSONDecodeError: "),
        (["acme.syntax"], "why: acme/inner/bad.py, line 2: invalid syntax"),
        (["acme.needs"], "next: install no_such_library for "),
        (["acme.needs"], "why: acme/needs.py, line 2: ModuleNotFoundError"),
        (["acme.shp:app"], "There is no module acme.shp.\n  why: the nearest is acme.shop"),
        (["acme.shop.app:x"], "why: acme.shop is a module, and not a package"),
        (["acme.made:create_app"], "if it makes the app: acme.made:create_app --factory"),
        (["acme.made"], "name a function that makes one: acme.made:create_app --factory"),
        (["acme.made", "--factory"], "--factory needs the name of a function"),
        (["acme.made:later", "--factory"], "it is an async function"),
        (["acme.made:nothing", "--factory"], "it returned int, and not an App"),
        (["acme.made:sized", "--factory"], "why: it cannot be called without size, color\n"),
        (["acme.made:sized", "--factory"], "next: give each of its parameters a default"),
        (["acme.made:none", "--factory"], "there is no such name in the file"),
        (["acme.made:broken", "--factory"], "why: acme/made.py, line 20: IndexError: "),
        (["acme.shop:app", "--factory"], "next: drop --factory"),
        (["acme"], "name the app in the package: acme:app"),
    ],
)
def test_app_that_cannot_be_loaded_says_where(project: Path, words: list[str], told: str) -> None:
    done = run("list", *words, cwd=project)
    assert done.returncode == Exit.USAGE
    assert told in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()


def test_app_in_the_folder_src_that_is_not_installed_is_named_by_its_file(project: Path) -> None:
    (project / "src").mkdir()
    (project / "acme").rename(project / "src" / "acme")
    done = run("list", "acme.shop:app", cwd=project)
    assert done.returncode == Exit.USAGE
    words = done.stderr.decode()
    assert "There is no module acme.\n  why: it is in the folder src" in words
    named = words.partition("or name the file: ")[2].partition(";")[0].strip()
    assert run("list", named, cwd=project).returncode == 0


@pytest.mark.parametrize(
    ("flags", "variables"), [(["--traceback"], {}), ([], {"WIRECALL_TRACEBACK": "1"})]
)
def test_traceback_is_printed_on_demand(
    project: Path, flags: list[str], variables: dict[str, str]
) -> None:
    done = run("list", "acme.deep:app", *flags, cwd=project, **variables)
    text = done.stderr.decode()
    assert done.returncode == Exit.USAGE
    assert text.index("Traceback") < text.index("ROWS = json.loads") < text.index("why: acme/inner")


def test_install_of_a_module_works_from_everywhere(project: Path, tmp_path: Path) -> None:
    done = run("install", "acme.shop:app", "--client", "cursor", "--print", cwd=project)
    entry = json.loads(done.stdout)["mcpServers"]["acme"]
    message = b'{"jsonrpc":"2.0","id":1,"method":"price","params":{"sku":"tea"}}\n'
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    served = subprocess.run(
        [entry["command"], *entry["args"]],
        input=message,
        env={**os.environ, **entry["env"]},
        cwd=elsewhere,
        capture_output=True,
        timeout=PATIENCE,
    )
    assert json.loads(served.stdout)["result"] == 450, served.stderr.decode()


def test_workers_serve_the_app_of_a_factory(project: Path) -> None:
    words = ["acme.made:create_app", "--factory", "--workers", "2", "--ledger", "sqlite:ledger.db"]
    with running("serve", *words, "--http", "127.0.0.1:0", cwd=project) as server:
        address = server.wait_for("Listening on").split()[-1]
        done = run("call", address, "price", "sku=tea", cwd=project)
        assert done.stdout == b"7\n", done.stderr.decode()
        server.end()

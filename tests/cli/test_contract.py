"""`lock`, `diff` and `client`: the contract of a server as a file, exit code 9 if callers break,
and a typed client.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli import SHOP, invoke, serving, wirecall
from wirecall.cli.failures import Exit

APP = (
    "from wirecall import App\napp = App('a')\n@app.query\ndef one(x: int) -> int:\n    return x\n"
)
BROKEN = APP.replace("x: int)", "x: int, y: int)")
WIDER = APP.replace("x: int)", "x: int, y: int = 1)")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in (("app", APP), ("broken", BROKEN), ("wider", WIDER)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_lock_file_from_a_shell(folder: Path) -> None:
    run = wirecall("lock", "app.py", cwd=folder)
    assert (run.returncode, run.stdout) == (0, b"contract.json\n")
    first = (folder / "contract.json").read_bytes()
    assert json.loads(first)["wirecall-contract"] == 1
    wirecall("lock", "app.py", cwd=folder, env={"PYTHONHASHSEED": "7"})
    assert (folder / "contract.json").read_bytes() == first
    assert wirecall("lock", "app.py", "-o", "-", cwd=folder).stdout == first


def test_diff_exits_with_9_if_callers_break(folder: Path) -> None:
    assert invoke("lock", "app.py").exit_code == 0
    assert invoke("diff", "contract.json", "app.py").exit_code == 0
    run = wirecall("diff", "contract.json", "broken.py", cwd=folder)
    assert run.returncode == Exit.FOUND
    assert [re.split("  +", line) for line in run.stdout.decode().splitlines()] == [
        ["LEVEL", "PLACE", "CHANGE"],
        ["breaking", "method one, argument y", "is required now"],
        ["breaking", "tool one, argument y", "is required now"],
    ]
    assert "2 breaking" in run.stderr.decode()


def test_json(folder: Path) -> None:
    invoke("lock", "app.py", "-o", "old.json")
    invoke("lock", "wider.py", "-o", "new.json")
    run = invoke("diff", "old.json", "new.json", "--json")
    document = json.loads(run.stdout)
    assert run.exit_code == 0
    assert document["ok"] is True
    assert (
        document["result"]["breaking"],
        document["result"]["careful"],
        document["result"]["fine"],
    ) == (0, 0, 2)
    assert {
        "level": "fine",
        "place": "method one, argument y",
        "text": "is new, and optional",
    } in document["result"]["changes"]


def test_accept_writes_the_new_contract(folder: Path) -> None:
    invoke("lock", "app.py")
    assert invoke("diff", "contract.json", "broken.py", "--accept").exit_code == 0
    assert invoke("diff", "contract.json", "broken.py").exit_code == 0
    run = invoke("diff", "app.py", "broken.py", "--accept")
    assert run.exit_code == Exit.USAGE
    assert "--accept writes a lock file" in run.stderr


def test_server_is_compared_by_both_protocols(folder: Path) -> None:
    invoke("lock", SHOP)
    with serving(SHOP) as address:
        for words in ([address], [f"{address}/mcp"], [address, "--as", "mcp"]):
            run = invoke("diff", "contract.json", *words)
            assert run.exit_code == 0, run.stdout
            assert "The contracts are equal." in run.stderr
            assert "Not compared: " in run.stderr
    assert invoke("diff", "contract.json", "--", sys.executable, SHOP).exit_code == 0


def test_contract_of_an_mcp_server_on_stdio(folder: Path) -> None:
    assert invoke("lock", "-o", "shop.json", "--", sys.executable, SHOP).exit_code == 0
    document = json.loads((folder / "shop.json").read_bytes())
    assert set(document["tools"]) == {"price", "charge", "refund"}
    assert "methods" not in document
    run = invoke("lock", "app.py", "--as", "rpc")
    assert run.exit_code == 0
    run = invoke("diff", "contract.json", "shop.json")
    assert run.exit_code == Exit.USAGE
    assert "no section in common" in run.stderr


def edited(folder: Path, **members: Any) -> None:
    invoke("lock", "app.py", "-o", "good.json")
    document = json.loads((folder / "good.json").read_bytes()) | members
    (folder / "contract.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("members", "what", "why"),
    [
        ({"wirecall-contract": 2}, "has another version", "expected version 1, got 2"),
        ({"wirecall-contract": None}, "is not a lock file", 'no member "wirecall-contract"'),
        ({"methods": {}}, "was edited", "its digest is not that of its offers"),
        ({"methods": 7}, "is damaged", "$.methods"),
        # The codes of errors become code in a generated client, and are numbers.
        (
            {"methods": {"f": {"params": {}, "errors": {"print()": "x"}}}},
            "is damaged",
            "matching regex",
        ),
    ],
)
def test_lock_file_that_cannot_be_used(
    folder: Path, members: dict[str, Any], what: str, why: str
) -> None:
    edited(folder, **members)
    run = invoke("diff", "contract.json", "app.py")
    assert run.exit_code == Exit.USAGE
    assert what in run.stderr
    assert why in run.stderr
    assert "wirecall lock TARGET -o contract.json" in run.stderr


@pytest.mark.parametrize(
    ("words", "exit", "what"),
    [
        (["diff", "nowhere.json", "app.py"], Exit.USAGE, "There is no lock file nowhere.json"),
        (["diff", ".", "app.py"], Exit.USAGE, "The lock file . cannot be read"),
        (["diff", "notes.txt", "app.py"], Exit.USAGE, "notes.txt is not a lock file"),
        (
            ["diff", "good.json", "http://127.0.0.1:1"],
            Exit.UNREACHABLE,
            "The server cannot be reached",
        ),
        (["diff", "good.json", "nowhere.py"], Exit.USAGE, "There is no file nowhere.py"),
        (
            ["lock", "app.py", "-o", "notes.txt"],
            Exit.USAGE,
            "notes.txt exists, and is not a lock file",
        ),
        (
            ["lock", "app.py", "-o", "no/folder.json"],
            Exit.USAGE,
            "no/folder.json cannot be written",
        ),
        (["lock", "--", "nosuchprogram"], Exit.UNREACHABLE, "did not start"),
    ],
)
def test_mistakes(folder: Path, words: list[str], exit: Exit, what: str) -> None:
    (folder / "notes.txt").write_text("notes")
    invoke("lock", "app.py", "-o", "good.json")
    run = invoke(*words)
    assert run.exit_code == exit, run.stderr
    assert what in run.stderr
    assert (folder / "notes.txt").read_text() == "notes"


def test_lock_replaces_a_lock_file_of_another_version(folder: Path) -> None:
    edited(folder, **{"wirecall-contract": 2})
    assert invoke("lock", "app.py").exit_code == 0
    assert invoke("diff", "contract.json", "app.py").exit_code == 0


# --- client ---------------------------------------------------------------------------------------


def test_client_from_a_shell(folder: Path) -> None:
    with serving(SHOP) as address:
        assert (
            wirecall("client", address, "-o", "shop_client.py", cwd=folder).stdout
            == b"shop_client.py\n"
        )
        script = (
            "import sys\n"
            "from shop_client import SyncShopClient\n"
            "with SyncShopClient(sys.argv[1], check=True) as shop:\n"
            "    charged = [shop.charge(order='7', cents=5, key='k') for _ in range(2)]\n"
            "    print(shop.price(sku='tea'), *charged)\n"
        )
        run = subprocess.run(
            [sys.executable, "-c", script, f"{address}/rpc"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    assert run.stdout == "450 {'order': '7', 'paid': 5} {'order': '7', 'paid': 5}\n", run.stderr


def test_client_is_the_same_from_a_file_a_server_and_a_lock_file(folder: Path) -> None:
    invoke("lock", SHOP)
    invoke("client", SHOP, "-o", "one.py")
    invoke("client", "contract.json", "-o", "two.py")
    with serving(SHOP) as address:
        invoke("client", address, "-o", "three.py")
    made = {name: (folder / f"{name}.py").read_bytes() for name in ("one", "two", "three")}
    assert made["one"] == made["two"] == made["three"]
    assert invoke("client", SHOP, "-o", "one.py").exit_code == 0  # a generated file is replaced


def test_client_of_an_mcp_server(folder: Path) -> None:
    run = invoke(
        "client", "-o", "shop_client.py", "--class", "Shop", "--json", "--", sys.executable, SHOP
    )
    assert json.loads(run.stdout)["result"]["protocol"] == "mcp"
    assert "class SyncShop(SyncCaller):" in (folder / "shop_client.py").read_text()
    assert (
        invoke("client", SHOP, "--as", "mcp", "--class", "Shop", "-o", "-").stdout
        == (folder / "shop_client.py").read_text()
    )


@pytest.mark.parametrize(
    ("words", "exit", "what"),
    [
        (["client", "app.py"], Exit.USAGE, "Missing option '-o'"),
        (
            ["client", "app.py", "-o", "wider.py"],
            Exit.USAGE,
            "wider.py exists, and is not a generated client",
        ),
        (["client", "app.py", "-o", "."], Exit.USAGE, ". exists, and is not a generated client"),
        (
            ["client", "app.py", "-o", "c.py", "--class", "a-b"],
            Exit.USAGE,
            "'a-b' cannot be the name of a class",
        ),
        (
            ["client", "app.py", "-o", "c.py", "--class", "class"],
            Exit.USAGE,
            "'class' cannot be the name of a class",
        ),
        (["client", "empty.py", "-o", "c.py"], Exit.USAGE, "There is nothing to call"),
        (
            ["client", "http://127.0.0.1:1", "-o", "c.py"],
            Exit.UNREACHABLE,
            "The server cannot be reached",
        ),
    ],
)
def test_mistakes_with_clients(folder: Path, words: list[str], exit: Exit, what: str) -> None:
    (folder / "empty.py").write_text("from wirecall import App\napp = App('a')\n")
    run = invoke(*words)
    assert run.exit_code == exit, run.stderr
    assert what in run.stderr
    assert (folder / "wider.py").read_text() == WIDER
    assert not (folder / "c.py").exists()

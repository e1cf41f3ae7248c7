"""`wirecall doctor`: each check, in the good case and in the bad one."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.cli import SHOP, invoke
from tests.client.peers import served
from tests.ports import free_port
from wirecall import App, __version__


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("WIRECALL_SECRET", "WIRECALL_MODE", "WIRECALL_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WIRECALL_SERVER_HTTP", f"127.0.0.1:{free_port()}")
    return tmp_path


def diagnosis() -> tuple[int, dict[str, list[tuple[str, str]]]]:
    """The exit code, and the findings by check."""
    result = invoke("doctor", "--json")
    found: dict[str, list[tuple[str, str]]] = {}
    for each in json.loads(result.stdout)["result"]["checks"]:
        found.setdefault(each["name"], []).append((each["level"], each["what"]))
    return result.exit_code, found


def test_healthy_machine() -> None:
    code, found = diagnosis()
    assert code == 0
    assert set(found) >= {
        "python",
        "packages",
        "config",
        "app",
        "ledger",
        "port",
        "clock",
        "secret",
    }
    assert {level for name, rows in found.items() for level, _ in rows if name != "files"} == {"ok"}


def test_table_has_next_steps_for_each_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIRECALL_LEDGER_URL", "redis://127.0.0.1:1/0")
    result = invoke("doctor")
    assert result.exit_code == 9
    assert "ledger    fail" in result.stdout
    assert "ledger: is it running, and is this its URL?" in result.stderr


def test_broken_configuration_is_one_finding_and_the_other_checks_continue() -> None:
    Path("wirecall.toml").write_text("[limits]\nbatch = 0\ndepth = 0\n")
    code, found = diagnosis()
    assert code == 9
    assert found["config"][0][0] == "fail"
    assert (
        "wirecall.toml:2: limits.batch must be a whole number above 0, got 0; it is one of 2"
        in found["config"][0][1]
    )
    assert found["port"][0][0] == "ok"


def test_app_that_cannot_be_loaded_and_one_that_can() -> None:
    Path("wirecall.toml").write_text('[server]\napp = "app.py"\n')
    Path("app.py").write_text("import nothing_of_that_name\n")
    code, found = diagnosis()
    assert code == 9
    assert "nothing_of_that_name" in found["app"][0][1]
    Path("app.py").write_text(Path(SHOP).read_text())
    code, found = diagnosis()
    assert found["app"] == [("ok", "shop 1.0, 3 methods, development mode")]
    assert found["ledger"][0][0] == "warn"  # in memory
    assert code == 0


def test_ledger_that_is_not_there_yet_and_one_with_unknown_outcomes() -> None:
    Path("wirecall.toml").write_text('[ledger]\nurl = "sqlite:data/ledger.db"\n')
    assert diagnosis()[1]["ledger"] == [
        ("ok", "data/ledger.db does not exist yet; it can be created")
    ]
    app = App("shop", ledger="sqlite:data/ledger.db")

    @app.command
    def crash() -> None:
        raise ValueError

    app.handle_sync('{"jsonrpc":"2.0","id":1,"method":"crash","params":{"idempotency_key":"a"}}')
    code, found = diagnosis()
    assert code == 0
    assert found["ledger"] == [
        ("ok", "sqlite:data/ledger.db, 1 record"),
        ("warn", "the outcome of 1 command is unknown"),
    ]


@pytest.mark.parametrize("mode", ["production", "development"])
def test_tasks_that_end_with_the_process(mode: str) -> None:
    app = f'from wirecall import App\napp = App("shop", mode="{mode}", ledger="memory:")\n'
    Path("wirecall.toml").write_text('[server]\napp = "app.py"\n')
    Path("app.py").write_text(app + "app.command(name='plain')(lambda: 1)\n")
    assert len(diagnosis()[1]["app"]) == 1
    Path("app.py").write_text(app + "app.query(name='render', task=True)(lambda: 1)\n")
    code, found = diagnosis()
    told = ("warn", "the ledger is in memory, so tasks end with the process: render")
    assert (told in found["app"], code) == (mode == "production", 0)
    Path("wirecall.toml").write_text(
        '[server]\napp = "app.py"\n[ledger]\nurl = "sqlite:ledger.db"\n'
    )
    assert told not in diagnosis()[1]["app"]


def test_ledger_in_a_folder_that_is_not_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("wirecall.toml").write_text('[ledger]\nurl = "sqlite:locked/ledger.db"\n')
    # Root may run the tests, and can write everywhere.
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    code, found = diagnosis()
    assert code == 9
    assert found["ledger"][0][0] == "fail"


def test_port_that_another_process_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        monkeypatch.setenv("WIRECALL_SERVER_HTTP", f"127.0.0.1:{other.getsockname()[1]}")
        code, found = diagnosis()
    assert code == 9
    assert found["port"][0][0] == "fail"


async def test_port_that_a_wirecall_server_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    async with served(App("shop")) as url:
        monkeypatch.setenv("WIRECALL_SERVER_HTTP", url.removeprefix("http://"))
        _, found = await asyncio.to_thread(diagnosis)
    assert found["port"][0][1].startswith("a wirecall server answers")


def test_open_address_needs_a_secret_and_production_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("wirecall.toml").write_text('[server]\napp = "app.py"\n[ledger]\nurl = "sqlite:l.db"\n')
    Path("app.py").write_text(Path(SHOP).read_text())
    monkeypatch.setenv("WIRECALL_SERVER_HTTP", f"0.0.0.0:{free_port()}")
    code, found = diagnosis()
    assert code == 0
    assert found["secret"][0][0] == found["app"][1][0] == "warn"
    monkeypatch.setenv("WIRECALL_SECRET", "0123456789abcdef" * 4)
    monkeypatch.setenv("WIRECALL_MODE", "production")
    _, found = diagnosis()
    assert {level for rows in (found["secret"], found["app"]) for level, _ in rows} == {"ok"}


def test_secrets_that_replace_each_other_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the environment, and in files that wirecall.toml names."""
    monkeypatch.setenv("WIRECALL_SECRET", "0123456789abcdef" * 4)
    monkeypatch.setenv("WIRECALL_SECRET_OTHER", "old" * 10)
    found = diagnosis()[1]["secret"]
    assert [level for level, _ in found] == ["ok", "fail"]
    assert found[1][1].startswith("WIRECALL_SECRET_OTHER can be guessed")
    monkeypatch.delenv("WIRECALL_SECRET")
    monkeypatch.delenv("WIRECALL_SECRET_OTHER")
    lines = ["[server]", 'secret = "file:new"', 'other_secret = "file:old"', ""]
    Path("wirecall.toml").write_text("\n".join(lines))
    Path("new").write_text("fedcba9876543210" * 4)
    Path("old").write_text("fedcba9876543210" * 4)
    found = diagnosis()[1]["secret"]
    assert [level for level, _ in found] == ["ok", "ok", "warn"]
    assert found[2][1] == "server.secret and server.other_secret are the same"
    Path("old").unlink()
    level, what = diagnosis()[1]["secret"][0]
    assert (level, "has no value" in what) == ("fail", True)


@pytest.mark.parametrize(("soft", "level"), [(4096, "ok"), (1024, "warn"), (64, "fail")])
def test_low_limit_of_open_files_is_reported(
    soft: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _which: (soft, 65_536))
    assert diagnosis()[1]["files"][0][0] == level


def test_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import PackageNotFoundError, version

    def missing(name: str) -> Any:
        if name in ("redis", "apsw", "uvicorn"):
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    Path("wirecall.toml").write_text(
        '[server]\nserver = "uvicorn"\n[ledger]\nurl = "redis://127.0.0.1:1/0"\n'
    )
    code, found = diagnosis()
    assert code == 9
    assert [level for level, _ in found["packages"]] == ["fail", "fail", "fail"]


def test_version_that_runs_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout on the path hides the installed one, whose metadata may be older."""
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "0.0.0")
    assert diagnosis()[1]["packages"][0][1].startswith(f"wirecall {__version__}, msgspec 0.0.0")


def test_clock_that_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wirecall.cli.doctor.time.time", lambda: 1_000_000.0)
    assert diagnosis()[1]["clock"][0][0] == "warn"


# --- the app, as MCP clients and models see it ----------------------------------------------------


def app_findings(source: str) -> list[tuple[str, str]]:
    Path("wirecall.toml").write_text('[server]\napp = "app.py"\n')
    Path("app.py").write_text(f'from wirecall import App, Context\n\napp = App("shop")\n{source}')
    code, found = diagnosis()
    assert code == 0
    return found["app"][1:]


def test_names_of_tools_with_dots_are_a_remark() -> None:
    """SEP-986: the specification allows them, and some model APIs do not.

    Only `tool_name=` makes one.
    """
    names = [f"orders.m{number}" for number in range(7)]
    source = "".join(f'app.query(name="{name}", tool_name="{name}")(lambda: 1)\n' for name in names)
    source += 'app.query(name="orders.dotted")(lambda: 1)\n'
    source += (
        'app.query(name="internal.only", expose=("rpc",))(lambda: 1)\n'
        'app.query(name="plain-name_2")(lambda: 1)\n'
    )
    shown = "orders.m0, orders.m1, orders.m2, orders.m3, orders.m4 and 2 more"
    assert app_findings(source) == [
        ("warn", f"some model APIs refuse dots in the names of tools: {shown}")
    ]


def test_app_without_anything_to_remark() -> None:
    assert app_findings('app.query(name="plain")(lambda: 1)\n') == []


USES = """
import random

@app.query
async def ask(ctx: Context) -> str:
    await ctx.log("info", "asking")
    return (await ctx.sample("Which?")).text

@app.prompt
async def greet(context: Context) -> str:
    return str(await context.roots())

@app.resource("test://a")
async def read(ctx: Context) -> str:
    await ctx.log("info", "reading")
    return "a"

@app.query
def plain(ctx: Context) -> list[int]:
    return random.sample(range(9), 2)  # not the context's

app.query(name="short")(lambda: 1)
app.query(name="built_in")(len)
"""


def test_features_that_mcp_deprecates_are_a_remark() -> None:
    """SEP-2577: roots, sampling and logging."""
    assert app_findings(USES) == [
        ("warn", "MCP 2026-07-28 deprecates logging: ctx.log in ask, resources/read:test://a"),
        ("warn", "MCP 2026-07-28 deprecates sampling: ctx.sample in ask"),
        ("warn", "MCP 2026-07-28 deprecates roots: ctx.roots in prompts/get:greet"),
    ]

"""What the console shows to be pasted, run exactly as it is shown, against a real server."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.console.processes import Running
from tests.console.requests import Browser
from tests.ports import free_port
from wirecall import connect
from wirecall.audit import verify
from wirecall.console.snippets import snippets
from wirecall.console.worker import Served
from wirecall.mcp import Text

APP = """
from wirecall import App

app = App("shop", audit="file:audit.jsonl", ledger="sqlite:shop.db")
paid = []


@app.query
def price(sku: str) -> int:
    return len(sku)


@app.command(destructive=False)
def charge(order: str, cents: int, note: dict[str, float] | None = None) -> str:
    paid.append(order)
    return f"{len(paid)} paid"
"""
# Where the command `wirecall` is.
PROGRAMS = Path(sys.executable).parent
PATIENCE = 120


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("shop")
    (folder / "shop.py").write_text(APP)
    words = ["--http", f"127.0.0.1:{free_port()}", "--console", "--console-port", "0"]
    with Running(folder, "serve", "shop.py", *words, "--capture", "bodies") as made:
        yield made


@pytest.fixture(scope="module")
def browser(running: Running) -> Browser:
    link = running.wait_for(r"Console: (\S+)")
    made = Browser(link.partition("/#")[0])
    assert made.sign_in(link)[0] == 200
    return made


def read(browser: Browser, path: str) -> Any:
    status, _, document = browser.ask("GET", path)
    assert status == 200, document
    return document


def pasted(text: str, folder: Path) -> str:
    """Run a line as a shell does; return what it printed."""
    path = f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        text,
        shell=True,
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, (text, done.stderr)
    return done.stdout


def program(text: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=folder, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, (text, done.stderr)
    return done.stdout


async def call_tool(url: str, key: str) -> str:
    async with connect(f"{url}/mcp", protocol="mcp") as client:
        order = {"order": 'the "first" one', "cents": 2**60 + 1, "note": {"1.10": 1.5}}
        called = await client.call_tool("charge", order, key=key)
    (block,) = called.content
    assert isinstance(block, Text)
    return block.text


@pytest.mark.parametrize("transport", ["rpc", "mcp"])
def test_snippets_of_a_command_are_answered_from_the_ledger(
    running: Running, browser: Browser, transport: str
) -> None:
    """A person who pastes one must not charge twice."""
    key = f"order-{transport}"
    if transport == "mcp":
        first = asyncio.run(call_tool(running.wait_for(r"Listening on (\S+)"), key))
    else:
        params = {"order": "it's 7", "cents": 12345678901234567, "note": {"a b": 2}}
        first = running.call("charge", idempotency_key=key, **params)["result"]
    (row,) = read(browser, f"/calls.json?filter=key:{key}")["rows"]
    commands = read(browser, f"/calls/{row['id']}.json")["commands"]
    for text in (
        pasted(commands["cli"], running.folder),
        pasted(commands["curl"], running.folder),
        program(commands["python"], running.folder),
    ):
        assert first in text
    rows = read(browser, f"/calls.json?filter=key:{key}")["rows"]
    assert [each["replayed"] for each in rows] == [True, True, True, False]


def test_snippets_of_a_query_make_the_call_again(running: Running, browser: Browser) -> None:
    running.call("price", sku="tea")
    row = read(browser, "/calls.json?filter=method:price")["rows"][0]
    commands = read(browser, f"/calls/{row['id']}.json")["commands"]
    assert pasted(commands["cli"], running.folder).strip() == "3"
    assert json.loads(pasted(commands["curl"], running.folder))["result"] == 3
    assert program(commands["python"], running.folder).strip() == "3"


ROW = {"method": "pay", "tool": None, "upstream": None, "key": "k"}
PASSED_ON = {**ROW, "method": "tools/call:bank.1f/pay", "tool": "bank.1f/pay", "upstream": "bank"}


@pytest.mark.parametrize(
    ("address", "row", "line"),
    [
        ("tcp://127.0.0.1:9", ROW, "wirecall call tcp://127.0.0.1:9 pay --key k"),
        ("unix:/run/s", {**ROW, "tool": "pay"}, "wirecall call unix:/run/s pay --key k --as mcp"),
        ("http://[::1]:9", PASSED_ON, "wirecall call 'http://[::1]:9/mcp/bank' pay --key k"),
        ("stdio", ROW, None),
    ],
)
def test_snippets_name_the_place_of_the_server(
    address: str, row: dict[str, Any], line: str | None
) -> None:
    found = snippets(Served("shop", 1, 0.0, address=address), row, None)
    assert found.get("cli") == line
    assert ("curl" in found) == address.startswith("http")
    params = json.loads(found["json"])["params"]
    if row["tool"] is None:
        assert params == {"idempotency_key": "k"}
    else:
        assert (params["name"], params["_meta"]["io.wirecall/idempotency-key"]) == ("pay", "k")


def test_console_notes_actions_in_the_trail_that_the_app_names(
    running: Running, browser: Browser
) -> None:
    """The command line does not name it, and no file does."""
    page = read(browser, "/audit.json?filter=sign")
    assert page["path"] == "audit.jsonl"
    assert [line["action"]["what"] for line in page["lines"]] == ["sign in"]
    body = {"params": '{"sku": "tea"}', "key": None}
    assert browser.ask("POST", "/methods/price/try", body)[0] == 200
    assert read(browser, "/audit.json?filter=try")["lines"][0]["method"] == "price"
    assert verify(running.folder / "audit.jsonl").ok


def test_console_names_a_first_call_that_works(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        f"{APP}\n\n@app.query\ndef stock(sku: str = 'tea') -> int:\n    return 12\n"
    )
    words = ["--http", f"127.0.0.1:{free_port()}", "--console", "--console-port", "0"]
    with Running(tmp_path, "serve", "shop.py", *words) as running:
        link = running.wait_for(r"Console: (\S+)")
        browser = Browser(link.partition("/#")[0])
        browser.sign_in(link)
        line = read(browser, "/now.json")["first_call"]
        assert line == read(browser, "/calls.json")["first_call"]
        assert pasted(line, tmp_path).strip() == "12"
        page = read(browser, "/calls.json")
        assert page["rows"][0]["method"] == "stock"
        assert page["first_call"] is None
        discovered = json.loads(pasted(read(browser, "/methods.json")["discover"], tmp_path))
        assert {"price", "stock"} <= {each["name"] for each in discovered["methods"]}

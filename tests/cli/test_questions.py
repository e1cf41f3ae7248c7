"""`call` beyond tools: resources, prompts, and the questions that a server asks while a call runs."""

import json
import sys
from pathlib import Path

import pytest

from tests.cli import SHOP, invoke, serving, wirecall
from tests.cli.terminals import typed
from wirecall.cli.failures import Exit, NotReached
from wirecall.cli.targets import FirstContact
from wirecall.client.client import Client
from wirecall.client.delivery import Options
from wirecall.client.exchange import Exchange
from wirecall.client.jsonrpc import JsonRpc
from wirecall.errors import NotSent

APP = """
from typing import Literal
import msgspec
from wirecall import App, Context
from wirecall.mcp import Elicited

app = App("asking")

class Order(msgspec.Struct):
    size: Literal["small", "large"]
    count: int
    note: str = ""

@app.tool
async def order(ctx: Context) -> str:
    answer = await ctx.elicit("Which one?", Order)
    return f"{answer.action} {msgspec.to_builtins(answer.content)}"

@app.tool
async def twice(ctx: Context) -> str:
    first = await ctx.elicit("First?", int)
    second = await ctx.elicit("Second?", Order)
    return f"{first.content} {second.content.size}"

@app.resource("a://picture", mime_type="image/png")
def picture() -> bytes:
    return b"123"

@app.resource("a://{name}/{path*}")
def file(name: str, path: str) -> str:
    return f"{name}: {path}"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "asking.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- resources and prompts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "stdout"),
    [
        (["shop://articles"], '{"tea":450,"coffee":700}\n'),
        (["shop://articles/tea"], '{"sku":"tea","cents":450}\n'),
        (["shop://articles/{sku}", "sku=tea"], '{"sku":"tea","cents":450}\n'),
        (
            ["reminder", "order=7"],
            "user: Write a friendly reminder that order 7 is not paid yet.\n",
        ),
    ],
)
def test_resources_and_prompts(words: list[str], stdout: str) -> None:
    assert invoke("call", SHOP, *words).stdout == stdout
    assert invoke("call", *words, "--", sys.executable, SHOP).stdout == stdout


def test_resources_and_prompts_of_a_server() -> None:
    with serving(SHOP) as address:
        document = json.loads(invoke("call", address, "shop://articles", "--json").stdout)
        contents = {
            "uri": "shop://articles",
            "mimeType": "application/json",
            "text": '{"tea":450,"coffee":700}',
        }
        assert document["result"] == [contents]
        assert document["resource"] == "shop://articles"
        document = json.loads(
            invoke("call", f"{address}/mcp", "reminder", "order=7", "--json").stdout
        )
        assert document["prompt"] == "reminder"
        assert [message["role"] for message in document["result"]["messages"]] == ["user"]


def test_bytes_and_paths(folder: Path) -> None:
    assert invoke("call", "asking.py", "a://picture").stdout == "[image/png, 3 bytes]\n"
    assert (
        json.loads(invoke("call", "asking.py", "a://picture", "--json").stdout)["result"][0]["blob"]
        == "MTIz"
    )
    run = invoke("call", "asking.py", "a://{name}/{path*}", "name=x y", "path=b/c")
    assert run.stdout == "x y: b/c\n", run.stderr


@pytest.mark.parametrize(
    ("words", "exit", "what"),
    [
        (["shop://articles/{sku}"], Exit.USAGE, "sku is missing"),
        (["shop://articles", "sku=tea"], Exit.USAGE, "There is no argument 'sku'"),
        (["shop://articles", "--key", "k"], Exit.USAGE, "shop://articles does not take --key"),
        (
            ["reminder", "order=7", "--background", "--ledger", "sqlite:l.db"],
            Exit.USAGE,
            "does not take --background",
        ),
        (["reminder"], Exit.USAGE, "order is missing"),
        (["reminder", "order=7", "--as", "rpc"], Exit.USAGE, "reminder is a prompt"),
        (["shop://nothing"], Exit.REMOTE, "Resource not found"),
        (["price", "sku=tea", "--answer", "nonsense"], Exit.USAGE, "'nonsense' is not an answer"),
    ],
)
def test_mistakes(folder: Path, words: list[str], exit: Exit, what: str) -> None:
    run = invoke("call", SHOP, *words)
    assert run.exit_code == exit, run.stderr
    assert what.lower() in run.stderr.lower()


# --- questions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("revision", ["2025-06-18", "2025-11-25", "2026-07-28"])
def test_answers_of_a_script(folder: Path, revision: str) -> None:
    words = ["--revision", revision, "--answer", "size=large", "--answer", "count=3"]
    run = wirecall("call", "asking.py", "order", *words, cwd=folder)
    assert run.stdout == b"accept {'size': 'large', 'count': 3, 'note': ''}\n", run.stderr


def test_answers_to_two_forms(folder: Path) -> None:
    answers = ["--answer", "value=7", "--answer", "size=small", "--answer", "count=1"]
    assert invoke("call", "asking.py", "twice", *answers).stdout == "7 small\n"


@pytest.mark.parametrize(
    ("answers", "what", "why"),
    [
        ([], "The server asks a question, and there is no terminal", "Which one?"),
        (
            ["size=large"],
            "The server asks a question, and there is no terminal",
            "--answer count=...",
        ),
        (["size=large", "cuont=3"], "There is no field 'cuont'", "did you mean count?"),
        (["size=huge", "count=3"], "size must be one of small, large", 'got "huge"'),
        (["size=large", "count=many"], "count must be a whole number", 'got "many"'),
    ],
)
def test_question_without_an_answer(folder: Path, answers: list[str], what: str, why: str) -> None:
    words = [word for answer in answers for word in ("--answer", answer)]
    run = invoke("call", "asking.py", "order", *words)
    assert run.exit_code == Exit.INTERRUPTED
    assert what in run.stderr
    assert why in run.stderr
    assert run.stdout == ""


def test_answer_that_is_not_asked_for(folder: Path) -> None:
    run = invoke("call", SHOP, "price", "sku=tea", "--as", "mcp", "--answer", "size=large")
    assert run.stdout == "450\n"
    assert "--answer size was not used: the server asked nothing." in run.stderr


def test_form_is_asked_field_by_field_on_a_terminal(folder: Path) -> None:
    lines = ["huge\n", "large\n", "\n", "two\n", "2\n", "\n"]
    code, shown = typed(folder, "call", "asking.py", "order", "--yes", lines=lines)
    assert code == 0, shown
    assert "? Which one?" in shown
    assert 'size must be one of small, large, got "huge"' in shown
    assert 'count must be a whole number, got "two"' in shown
    assert "accept {'size': 'large', 'count': 2, 'note': ''}" in shown


def test_end_of_the_input_declines(folder: Path) -> None:
    code, shown = typed(
        folder, "call", "asking.py", "order", "--yes", "--answer", "size=large", lines=["\x04"]
    )
    assert code == Exit.INTERRUPTED
    assert "The question was not answered." in shown


# --- the first contact ----------------------------------------------------------------------------


class Deaf:
    """A link to a server that cannot be reached, or is no longer reachable."""

    def __init__(self) -> None:
        self.sent = 0

    async def open(self) -> None: ...

    async def aclose(self) -> None: ...

    async def exchange(self, exchange: Exchange) -> None:
        self.sent += 1
        raise NotSent("Connection refused")


async def test_server_that_cannot_be_reached_is_not_tried_again() -> None:
    link = Deaf()
    async with Client(FirstContact(link), JsonRpc({"x": "query"}), Options()) as client:
        with pytest.raises(NotReached, match="Connection refused") as raised:
            await client.call("x")
    assert (link.sent, raised.value.ran) == (1, "no")


# --- show -----------------------------------------------------------------------------------------


def test_nested_types_are_a_tree(tmp_path: Path) -> None:
    (tmp_path / "trees.py").write_text(
        """
from __future__ import annotations
import msgspec
from wirecall import App
app = App("trees")

class Leaf(msgspec.Struct):
    colour: str
    size: int = 1

class Tree(msgspec.Struct):
    leaves: list[Leaf]
    under: dict[str, Leaf] = {}
    next: Tree | None = None

@app.query
def grow(tree: Tree, times: int = 2) -> Leaf | None:
    ...
"""
    )
    shown = invoke("show", str(tmp_path / "trees.py"), "grow").stdout
    names = [line for line in shown.splitlines() if line.startswith("  ")]
    tree = [(len(line) - len(line.lstrip()), line.split()[0]) for line in names]
    assert tree[:6] == [
        (2, "tree"),
        (4, "leaves"),
        (6, "colour"),
        (6, "size"),
        (4, "under"),
        (6, "*"),
    ]
    assert (4, "next") in tree
    assert tree[-2:] == [(2, "colour"), (2, "size")]  # of the result
    assert (2, "times") in tree

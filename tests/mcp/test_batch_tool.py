"""The batch tool: its definition, the form of its calls, references, order and answers."""

import asyncio
import base64
import itertools
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.calls import make_app
from tests.mcp.asgi import (
    BASIC,
    R1,
    R2,
    R3,
    R4,
    R5,
    REVISIONS,
    Exchange,
    enveloped,
    over_http,
    over_stdio,
    repeated,
    speak,
)
from tests.mcp.batches import entry, ref, results, run, send, shop
from tests.server.stage import settle, staged
from wirecall import App, BatchTool, DomainError, Limits, UsageError
from wirecall.auth import Identity, Tokens, digest
from wirecall.mcp import Image, ResourceLink, ToolResult

every_revision = pytest.mark.parametrize("revision", REVISIONS)

THREE = (
    entry("find_order", {"customer": "ada"}, "order"),
    entry(
        "charge",
        {"order": ref("order", "/orders/0/id"), "cents": ref("order", "/orders/0/total")},
        "pay",
    ),
    entry("receipt", {"order": ref("order", "/orders/0/id")}, "letter", after=["pay"]),
)


def shop_app(batch_tool: Any = "all", **options: Any) -> App:
    app = make_app(batch_tool=batch_tool, **options)
    shop(app)
    return app


async def definition(client: Any, name: str = "batch") -> Any:
    tools = (await client.result("tools/list"))["tools"]
    return next((tool for tool in tools if tool["name"] == name), None)


def keywords(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield every keyword of a schema, at any depth."""
    if isinstance(schema, dict):
        for name, value in schema.items():
            yield name, value
            yield from keywords(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from keywords(value)


# --- the definition -------------------------------------------------------------------------------


@every_revision
async def test_batch_tool_lists_the_tools_it_calls(revision: str) -> None:
    """A1: an enum of the tools, in a schema that strict clients and models accept."""
    async with over_stdio(shop_app("queries"), revision) as client:
        tool = await definition(client)
    schema = tool["inputSchema"]
    calls = schema["properties"]["calls"]
    assert calls["items"]["properties"]["tool"]["enum"] == ["find_order", "receipt"]
    assert (calls["minItems"], calls["maxItems"]) == (1, 50)
    assert schema["required"] == ["calls"]
    found = list(keywords(schema))
    assert not {"$ref", "$defs", "anyOf", "oneOf", "allOf"} & {name for name, _ in found}
    objects = [each for _, each in found if isinstance(each, dict) and each.get("type") == "object"]
    assert all("additionalProperties" in each for each in [schema, *objects])
    assert tool["_meta"]["io.wirecall/batch"] == {"version": 1, "calls": 50, "references": True}


async def test_batch_tool_shows_each_caller_its_own_tools() -> None:
    """A1: a tool whose scopes a caller lacks is not in its enum."""
    identities = {
        digest("few"): Identity("few"),
        digest("all"): Identity("all", scopes=frozenset({"reports"})),
    }
    enums = {}
    for token in ("few", "all"):
        app = make_app(batch_tool="queries", auth=Tokens(identities))
        shop(app)
        app.query(name="report", scopes="reports")(lambda: "secret")
        headers = {"authorization": f"Bearer {token}"}
        async with over_http(app, R5, headers=headers) as client:
            calls = (await definition(client))["inputSchema"]["properties"]["calls"]
        enums[token] = calls["items"]["properties"]["tool"]["enum"]
    assert enums == {
        "few": ["find_order", "receipt"],
        "all": ["find_order", "receipt", "report"],
    }


@pytest.mark.parametrize(
    ("declared", "hints"),
    [
        ("queries", (True, False, True)),
        ("all", (False, False, False)),
        (BatchTool(tools="all", destructive="allow"), (False, True, False)),
        (BatchTool(tools=["charge"], destructive="allow"), (False, False, False)),
        (BatchTool(tools=["receipt", "find_order"]), (True, False, True)),
    ],
)
async def test_batch_tool_derives_its_hints(declared: Any, hints: tuple[bool, bool, bool]) -> None:
    """A8: the hints follow from the tools that can be called."""
    async with over_stdio(shop_app(declared), R5) as client:
        shown = (await definition(client))["annotations"]
    names = ("readOnlyHint", "destructiveHint", "idempotentHint")
    assert tuple(shown[name] for name in names) == hints


async def test_batch_tool_changes_with_the_tools() -> None:
    """A8: `list_changed` when the tools change, and the next list has the new ones."""
    app = shop_app("queries")
    async with over_stdio(app, R4) as client:
        before = await definition(client)
        app.remove("receipt")
        heard = await client.hear()
        after = await definition(client)
    assert heard["method"] == "notifications/tools/list_changed"

    def names(tool: Any) -> Any:
        return tool["inputSchema"]["properties"]["calls"]["items"]["properties"]["tool"]["enum"]

    assert (names(before), names(after)) == (["find_order", "receipt"], ["find_order"])


async def test_batch_tool_without_tools_is_not_listed() -> None:
    """A1: an empty enum would be no schema."""
    app = make_app(batch_tool="queries")
    app.command(name="act")(lambda: None)
    async with over_stdio(app, R5) as client:
        assert await definition(client) is None


# --- declarations that are wrong --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: make_app(batch_tool="some"), ["'some'", '"queries"', '"all"']),
        (lambda: make_app(batch_tool=True), ["True", "BatchTool("]),
        (lambda: BatchTool(tools="queri"), ["'queri'", '"queries"']),
        (lambda: BatchTool(tools=[]), ["nothing", "tools="]),
        (lambda: BatchTool(tools=[1]), ["list of names", "tools="]),  # type: ignore[list-item]
        (lambda: BatchTool(calls=0), ["0", "calls=20"]),
        (lambda: BatchTool(calls="5"), ["'5'", "calls=20"]),  # type: ignore[arg-type]
        (lambda: BatchTool(destructive="no"), ["'no'", '"allow"']),  # type: ignore[arg-type]
        (lambda: BatchTool(name=""), ["''", "name="]),
        (lambda: BatchTool(tool=["x"]), ["'tool'", "tools="]),  # type: ignore[call-arg]
        (
            lambda: shop_app(BatchTool(tools=["find_orders"])).mcp(),
            ["'find_orders'", "'find_order'"],
        ),
        (lambda: shop_app(BatchTool(tools=["zzz"])).mcp(), ["'zzz'", "find_order, charge"]),
        (lambda: shop_app(BatchTool(tools="all", task="never")).mcp(), ["task"]),  # type: ignore[arg-type]
    ],
)
def test_batch_tool_refuses_a_wrong_declaration(make: Any, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_batch_tool_refuses_a_taken_name() -> None:
    """A collision is an error at start that names both places."""
    app = make_app(batch_tool="all")

    @app.query
    def batch() -> str:
        return "mine"

    with pytest.raises(UsageError) as caught:
        app.mcp()
    message = str(caught.value)
    assert "App('test', batch_tool=...)" in message
    assert re.search(r"test_batch_tool\.py:\d+", message)
    assert 'BatchTool(name="run_many")' in message


# --- references and order ---------------------------------------------------------------------------


@every_revision
@pytest.mark.parametrize("transport", ["http", "stdio"])
async def test_batch_tool_runs_dependent_calls_in_one(transport: str, revision: str) -> None:
    """A2, A4: references take parts of earlier results; answers are in input order."""
    app = make_app(batch_tool="all")
    done = shop(app)
    async with speak(transport, app, revision) as client:
        answer = await send(client, *THREE)
    found = results(answer)
    assert [(each["id"], each["tool"], each["ok"]) for each in found] == [
        ("order", "find_order", True),
        ("pay", "charge", True),
        ("letter", "receipt", True),
    ]
    assert found[1]["result"] == {"order": 7, "charged": 500}
    assert found[2]["result"] == "receipt of 7"
    assert done == ["charge 7 500"]
    assert not answer.get("isError")
    assert ("structuredContent" in answer) == (revision in (R3, R4, R5))


@every_revision
async def test_batch_tool_returns_what_is_asked_for(revision: str) -> None:
    """A4: `return` leaves results out, and errors always come back."""
    async with over_stdio(shop_app(), revision) as client:
        found = await run(client, *THREE, entry("receipt", {}, "bad"), wanted=["letter"])
    assert list(found) == ["letter", "bad"]
    assert found["bad"]["error"]["code"] == -32602


@every_revision
async def test_batch_tool_ids_default_to_positions(revision: str) -> None:
    """A1: an id is a string, by default the position."""
    async with over_stdio(shop_app(), revision) as client:
        found = await run(
            client,
            entry("find_order", {"customer": "ada"}),
            entry("receipt", {"order": ref("0", "/orders/1/id")}),
        )
    assert found["1"]["result"] == "receipt of 8"


async def test_batch_tool_takes_every_item_with_a_star() -> None:
    """A2: one * for an array step, as R1."""
    app = make_app(batch_tool="queries")
    shop(app)

    @app.query
    def total(cents: list[int]) -> int:
        return sum(cents)

    async with over_stdio(app) as client:
        found = await run(
            client,
            entry("find_order", {"customer": "ada"}, "a"),
            entry("total", {"cents": ref("a", "/orders/*/total")}, "b"),
            entry("total", {"cents": [ref("a", "/orders/0/total"), 1]}, "c"),
            entry("total", {"cents": [ref("b"), ref("c")]}, "d"),
        )
    assert [found[id].get("result") for id in "bcd"] == [520, 501, 1021]


async def test_batch_tool_passes_literals() -> None:
    """A2: `$literal` passes an object with `$ref` through."""
    app = make_app(batch_tool="queries")

    @app.query
    def echo(value: Any) -> Any:
        return {"value": value}

    literal = {"$literal": {"$ref": "nowhere#/x"}}
    async with over_stdio(app) as client:
        found = await run(client, entry("echo", {"value": literal}, "a"))
        escaped = '{"calls":[{"id":"a","tool":"echo","arguments":{"value":{"\\u0024literal":1}}}]}'
        hidden = await client.tool("batch", json.loads(escaped))
    assert found["a"]["result"] == {"value": {"$ref": "nowhere#/x"}}
    assert results(hidden)[0]["result"] == {"value": 1}


async def test_batch_tool_keeps_the_digits_of_numbers() -> None:
    """A2: values are cut out of the bytes of results; the other arguments keep their digits too."""
    app = make_app(batch_tool="queries")

    @app.query
    def digits(number: Any, other: Any = None) -> str:
        return f"{number} {other}"

    async with over_stdio(app) as client:
        found = await run(
            client,
            entry("digits", {"number": 1}, "a"),
            entry("digits", {"number": 12345678901234567890123, "other": ref("a")}, "b"),
        )
    assert found["b"]["result"] == "12345678901234567890123 1 None"


@every_revision
async def test_batch_tool_runs_queries_together_and_commands_in_order(revision: str) -> None:
    """A3: as arrays: an entry starts when its references and `after` are done."""
    app, stage = staged(batch_tool=BatchTool(tools="all", destructive="allow"))
    calls = [
        entry("command", {"name": "c1"}, "c1"),
        entry("query", {"name": "q1"}, "q1"),
        entry("command", {"name": "c2"}, "c2"),
        entry("query", {"name": "q2"}, "q2", after=["c2"]),
        entry("free", {"name": "f1"}, "f1"),
    ]
    async with over_stdio(app, revision) as client:
        sent = asyncio.ensure_future(run(client, *calls))
        for name in ("c1", "q1", "f1"):
            await stage.has_begun(name).wait()
        await settle()
        first = list(stage.log)
        for name in ("q1", "f1", "c1"):
            stage.gate(name).set()
        await stage.has_begun("c2").wait()
        await settle()
        assert "+q2" not in stage.log
        stage.gate("c2").set()
        stage.gate("q2").set()
        found = await sent
    assert sorted(first) == ["+c1", "+f1", "+q1"]
    assert stage.log.index("-c1") < stage.log.index("+c2")
    assert stage.log.index("-c2") < stage.log.index("+q2")
    assert list(found) == ["c1", "q1", "c2", "q2", "f1"]


# --- answers ----------------------------------------------------------------------------------------


@every_revision
async def test_batch_tool_sends_images_and_links_after_the_results(revision: str) -> None:
    """A4: images, audio and resource links follow, each with the id of its entry."""
    app = make_app(batch_tool="queries")

    @app.query
    def picture() -> ToolResult:
        return ToolResult(
            content=[Image(data=b"png", mime_type="image/png"), "a cat"],
        )

    @app.query
    def link() -> list[ResourceLink]:
        return [ResourceLink(uri="shop://cat", name="cat")]

    async with over_stdio(app, revision) as client:
        answer = await send(client, entry("picture", id="p"), entry("link", id="l"))
        hidden = await send(client, entry("picture", id="p"), entry("link", id="l"), wanted=["l"])
    found = results(answer)
    assert [each["result"] for each in found] == ["a cat", None]
    image = answer["content"][1]
    assert image["data"] == base64.b64encode(b"png").decode()
    assert image["_meta"]["io.wirecall/entry"] == "p"
    if revision in (R3, R4, R5):
        assert answer["content"][2]["type"] == "resource_link"
        assert answer["content"][2]["_meta"]["io.wirecall/entry"] == "l"
    assert [each["type"] for each in hidden["content"]].count("image") == 0


@every_revision
async def test_batch_tool_is_an_error_only_if_nothing_ran(revision: str) -> None:
    """A4: `isError`."""
    app = shop_app()
    bad = entry("receipt", {}, "bad")
    async with over_stdio(app, revision) as client:
        none = await send(client, bad, entry("receipt", {"order": ref("bad")}, "next"))
        some = await send(client, bad, entry("receipt", {"order": 1}, "good"))
    assert none["isError"] is True
    assert not some.get("isError")


async def test_batch_tool_reports_the_error_result_of_a_tool() -> None:
    """A4: a result with `isError` is the error of its entry, and a reference into it fails."""
    app = make_app(batch_tool="queries")

    @app.query
    def fails() -> ToolResult:
        return ToolResult(content=["no luck"], is_error=True)

    @app.query
    def echo(value: str) -> str:
        return value

    async with over_stdio(app) as client:
        found = await run(client, entry("fails", id="a"), entry("echo", {"value": ref("a")}, "b"))
    assert found["a"]["error"] == {"code": 40000, "message": "no luck"}
    assert found["b"]["error"]["data"]["type"] == "dependency_failed"


async def test_batch_tool_answer_stays_within_bytes_out() -> None:
    """A4: a result that has no room is an error of its entry; others and references are not hurt."""
    app = make_app(batch_tool="queries", limits=Limits(bytes_out=300_000))

    @app.query
    def long(size: int) -> str:
        return "x" * size

    @app.query
    def length(text: str) -> int:
        return len(text)

    async with over_stdio(app) as client:
        found = await run(
            client,
            entry("long", {"size": 100_000}, "a"),
            entry("long", {"size": 100_000}, "b"),
            entry("length", {"text": ref("b")}, "c"),
        )
    assert found["a"]["ok"]
    assert found["b"]["error"]["data"]["type"] == "limit_exceeded"
    assert found["b"]["error"]["data"]["ran"] == "yes"
    assert found["c"]["result"] == 100_000


# --- faults of entries ------------------------------------------------------------------------------

GOOD = entry("receipt", {"order": 1}, "good")
FAULTS: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    "an unknown tool": ([entry("recept", {}, "x")], "", "did you mean 'receipt'"),
    "a tool that resembles none": ([entry("ship", {}, "x")], "", "it calls 'find_order', "),
    "a reference to a later entry": (
        [entry("receipt", {"order": ref("good")}, "x"), GOOD],
        "reference_invalid",
        "comes later",
    ),
    "a reference to an unknown entry": (
        [entry("receipt", {"order": ref("nowhere", "/a")}, "x")],
        "reference_invalid",
        "no entry",
    ),
    "a reference to itself": (
        [entry("receipt", {"order": ref("x")}, "x")],
        "reference_invalid",
        "itself",
    ),
    "a cycle through after": (
        [
            entry("receipt", {"order": 1}, "x", after=["y"]),
            entry("receipt", {"order": 2}, "y", after=["good"]),
        ],
        "reference_invalid",
        "comes later",
    ),
    "a pointer that finds nothing": (
        [
            entry("find_order", {"customer": "ada"}, "a"),
            entry("receipt", {"order": ref("a", "/none")}, "x"),
        ],
        "reference_not_found",
        "nothing is at '/none': the result is an object with ",
    ),
    "a reference into an error": (
        [entry("receipt", {}, "a"), entry("receipt", {"order": ref("a")}, "x")],
        "dependency_failed",
        "nothing of this one ran; data.id names the entry that failed first",
    ),
    "a malformed reference": (
        [entry("receipt", {"order": {"$ref": 5}}, "x")],
        "reference_invalid",
        "$literal",
    ),
    "too many references": (
        [GOOD | {"id": "a"}, entry("receipt", {"order": [ref("a")] * 17}, "x")],
        "reference_limit",
        "16",
    ),
    "too many ids in after": (
        [entry("receipt", {"order": 1}, "x", after=["good"] * 17)],
        "reference_limit",
        "16",
    ),
    "a batch in a batch": (
        [entry("batch", {"calls": [GOOD]}, "x")],
        "batch_invalid",
        "cannot call a batch",
    ),
    "arguments that are no object": (
        [entry("receipt", [1], "x")],
        "",
        'arguments: expected an object {"NAME": VALUE}, got an array',
    ),
    "a key that is no key": (
        [entry("charge", {"order": 1, "cents": 2}, "x", idempotency_key="two words")],
        "idempotency_key_invalid",
        "without spaces",
    ),
}


@every_revision
@pytest.mark.parametrize("fault", FAULTS)
async def test_batch_tool_entry_fault_fails_only_its_entry(fault: str, revision: str) -> None:
    """A2, A12, R3, R4, R6: each fault has its error; nothing of the entry ran, the others do."""
    calls, kind, words = FAULTS[fault]
    if GOOD not in calls:
        calls = [*calls, GOOD]
    app = make_app(batch_tool="all")
    done = shop(app)
    async with over_stdio(app, revision) as client:
        found = await run(client, *calls)
    failed = found["x"]
    assert failed["ok"] is False
    assert failed["error"]["data"].get("type", "") == kind
    assert failed["error"]["data"].get("ran", "no") == "no"
    assert words in failed["error"]["message"], failed
    assert found["good"]["result"] == "receipt of 1"
    assert done == []


@pytest.mark.parametrize("arguments", [{"order": "LONG", "more": ref("0")}, "LONG"])
async def test_batch_tool_integer_that_is_too_long_fails_only_its_entry(arguments: Any) -> None:
    """Python reads no integer of so many digits."""
    app = make_app(batch_tool="all")
    shop(app)
    calls = [entry("receipt", {"order": 1}), entry("receipt", arguments)]
    message = enveloped("tools/call", {"name": "batch", "arguments": {"calls": calls}})
    body = json.dumps(message).replace('"LONG"', "9" * 5000).encode()
    exchange = Exchange(app.asgi(), "POST", {**BASIC, **repeated(message)}, body)
    good, bad = results((await exchange.json())["result"])
    assert good["result"] == "receipt of 1"
    assert bad["error"]["code"] == -32602
    assert "arguments: number out of range" in bad["error"]["message"]
    await app.aclose()


async def test_batch_tool_limits_what_references_fill_in() -> None:
    """R4: too much substituted, in one entry and in the whole batch."""
    app = make_app(batch_tool="queries")

    @app.query
    def long(size: int) -> str:
        return "x" * size

    @app.query
    def length(text: str) -> int:
        return len(text)

    many = [entry("length", {"text": ref("a")}, f"n{n}") for n in range(6)]
    async with over_stdio(app) as client:
        batch = await run(client, entry("long", {"size": 200_000}, "a"), *many, wanted=[])
        one = await run(
            client,
            entry("long", {"size": 300_000}, "a"),
            entry("length", {"text": ref("a")}, "b"),
            wanted=[],
        )
    assert {id: each["error"]["data"]["limit"] for id, each in batch.items()} == {
        "n5": "batch_bytes"
    }
    assert one["b"]["error"]["data"]["limit"] == "entry_bytes"


# --- faults of the whole ----------------------------------------------------------------------------

MALFORMED: dict[str, tuple[Any, str]] = {
    "no calls": ({}, "calls"),
    "an empty list": ({"calls": []}, "at least one call"),
    "calls that are no list": ({"calls": {"tool": "receipt"}}, "calls"),
    "an entry that is no object": ({"calls": ["receipt"]}, "calls[0]"),
    "an entry without a tool": ({"calls": [{"id": "a"}]}, "tool"),
    "an unknown member": ({"calls": [{"tool": "receipt", "args": {}}]}, "args"),
    "an unknown member beside": ({"calls": [GOOD], "parallel": True}, "parallel"),
    "an id that is a number": ({"calls": [{"tool": "receipt", "id": 1}]}, "calls[0].id"),
    "an id with a space": ({"calls": [GOOD | {"id": "a b"}]}, "without spaces"),
    "an id with a slash": ({"calls": [GOOD | {"id": "a/b"}]}, "without spaces"),
    "an empty id": ({"calls": [GOOD | {"id": ""}]}, "1 to 64"),
    "a long id": ({"calls": [GOOD | {"id": "a" * 65}]}, "1 to 64"),
    "a duplicate id": ({"calls": [GOOD, GOOD]}, "two calls have the id 'good'"),
    "the id of a position": ({"calls": [GOOD | {"id": "1"}, {"tool": "receipt"}]}, "two calls"),
    "return of an unknown id": ({"calls": [GOOD], "return": ["god"]}, "no call has the id 'god'"),
    "return that is no list": ({"calls": [GOOD], "return": "good"}, "return"),
    "too many calls": ({"calls": [{"tool": "receipt"}] * 51}, "at most 50 calls, got 51"),
}


@every_revision
@pytest.mark.parametrize("fault", MALFORMED)
async def test_batch_tool_refuses_a_malformed_batch(fault: str, revision: str) -> None:
    """A1: nothing runs, and the error names the place."""
    arguments, words = MALFORMED[fault]
    app = make_app(batch_tool="all")
    done = shop(app)
    async with over_stdio(app, revision) as client:
        answer = await client.call("tools/call", {"name": "batch", "arguments": arguments})
    told = json.dumps(answer)
    assert words in told
    assert "batch_invalid" in told
    if revision in (R1, R2, R3):
        assert answer["error"]["code"] == -32602
    else:
        assert answer["result"]["isError"] is True
    assert done == []


async def test_batch_tool_takes_null_for_absent_members() -> None:
    """A1: strict models write null for members that they leave out."""
    arguments = {
        "calls": [
            {
                "tool": "find_order",
                "id": None,
                "arguments": {"customer": "ada"},
                "after": None,
                "idempotency_key": None,
            },
            {"tool": "receipt", "arguments": None},
        ],
        "return": None,
    }
    async with over_stdio(shop_app()) as client:
        found = results(await client.tool("batch", arguments))
    assert [each["ok"] for each in found] == [True, False]


async def test_batch_tool_has_its_own_limit_of_calls() -> None:
    """A1: `calls`."""
    async with over_stdio(shop_app(BatchTool(tools="queries", calls=2)), R5) as client:
        tool = await definition(client)
        answer = await client.call(
            "tools/call", {"name": "batch", "arguments": {"calls": [GOOD] * 3}}
        )
    assert tool["inputSchema"]["properties"]["calls"]["maxItems"] == 2
    assert "at most 2 calls, got 3" in json.dumps(answer)


async def test_batch_tool_calls_only_its_tools() -> None:
    """A7: with "queries" a command is not there."""
    app = make_app(batch_tool="queries")
    done = shop(app)
    async with over_http(app, R5) as client:
        found = await run(client, entry("charge", {"order": 1, "cents": 2}, "a"), GOOD)
    message = found["a"]["error"]["message"]
    assert "this batch cannot call a tool 'charge'; it calls 'find_order'" in message
    assert "'charge'" not in message.partition("it calls")[2]
    assert done == []


async def test_batch_tool_has_another_name() -> None:
    app = shop_app(BatchTool(name="run_many", tools="queries", title="Run many"))
    async with over_stdio(app, R5) as client:
        tool = await definition(client, "run_many")
        found = results(await client.tool("run_many", {"calls": [GOOD]}))
    assert tool["title"] == "Run many"
    assert found[0]["ok"]


# --- all small graphs -------------------------------------------------------------------------------


def all_graphs(size: int) -> list[tuple[tuple[int, ...], ...]]:
    """Return every way in which entries can refer to earlier ones."""
    choices = [
        [each for n in range(later + 1) for each in itertools.combinations(range(later), n)]
        for later in range(size)
    ]
    return list(itertools.product(*choices))


async def test_batch_tool_gives_results_of_slow_evaluation_on_all_graphs() -> None:
    """A2, A3, R5, R6: an entry adds 1 to the sum of its targets; one entry fails. A link is a
    reference or `after`, and an entry is a query or a command.
    """
    app = make_app(batch_tool=BatchTool(tools="all", destructive="allow"))

    async def total(fail: bool, wait: bool, **values: int) -> int:
        if wait:
            await asyncio.sleep(0)
        if fail:
            raise DomainError(40001, "it fails")
        return 1 + sum(values.values())

    app.query(name="look")(total)
    app.command(name="act")(total)
    chance = random.Random(28)
    graphs = [graph for size in range(1, 6) for graph in all_graphs(size)]
    async with over_stdio(app) as client:
        for graph in graphs:
            failing = chance.randrange(-1, len(graph))
            calls = []
            expected: list[int | None] = []
            for number, targets in enumerate(graph):
                data = [target for target in targets if chance.random() < 0.7]
                arguments: dict[str, Any] = {f"v{each}": ref(f"e{each}") for each in data}
                arguments |= {"fail": number == failing, "wait": chance.random() < 0.5}
                after = [f"e{each}" for each in targets if each not in data]
                tool = chance.choice(["look", "act"])
                calls.append(entry(tool, arguments, f"e{number}", after=after))
                if number == failing or None in [expected[each] for each in targets]:
                    expected.append(None)
                else:
                    expected.append(1 + sum(expected[each] or 0 for each in data))
            answers = results(await send(client, *calls))
            assert [each.get("result") for each in answers] == expected, calls

"""Batches of MCP's client: references in waves at every revision, and the server's batch tool."""

from typing import Any

import msgspec
import pytest

from tests.client.graphs import add_graph, expected, graphs, observed, summing_app
from wirecall import App, Limits, connect, connect_sync, testing
from wirecall.client.exchange import Exchange, Link
from wirecall.errors import (
    BadAnswer,
    Busy,
    Declined,
    DomainError,
    OutcomeUnknown,
    ReferenceLimit,
    ReferenceNotFound,
    RpcError,
)
from wirecall.mcp.client.inbox import Form
from wirecall.mcp.client.results import Tool
from wirecall.mcp.revisions import REVISIONS
from wirecall.server.references import LIMITS
from wirecall.testing import Faults

AT_EACH_REVISION = pytest.mark.parametrize("revision", REVISIONS)
WITHOUT_ARRAYS = pytest.mark.parametrize(
    "revision", [name for name in REVISIONS if not REVISIONS[name].has_arrays]
)


def shop(**options: Any) -> tuple[App, list[tuple[int, int]]]:
    app = App("shop", **options)
    charged: list[tuple[int, int]] = []

    @app.query
    def find_order(customer: str) -> dict[str, Any]:
        return {"orders": [{"id": 7, "total": 500}, {"id": 8, "total": 1}]}

    @app.command(destructive=False)
    async def charge(order: int, cents: int) -> str:
        charged.append((order, cents))
        return f"charged {cents} for {order}"

    @app.query
    def receipt(order: int) -> str:
        return f"receipt of {order}"

    @app.query
    def count() -> int:
        return 3

    @app.query
    def echo(value: Any = None) -> dict[str, Any]:
        return {"value": value}

    @app.query
    def fails() -> None:
        raise DomainError(40001, "it fails")

    return app, charged


# --- waves ----------------------------------------------------------------------------------------


@AT_EACH_REVISION
async def test_batch_takes_parts_of_earlier_results_in_waves(revision: str) -> None:
    """R13, A13: the path points into the structured content, or into the text as JSON."""
    app, charged = shop()
    async with connect(app, protocol="mcp", revision=revision) as client, client.batch() as batch:
        order = batch.call_tool("find_order", {"customer": "ada"})
        cents = order.ref("/orders/0/total")
        paid = batch.call_tool("charge", {"order": order.ref("/orders/0/id"), "cents": cents})
        letter = batch.call_tool("receipt", {"order": order.ref("/orders/1/id")}, after=[paid])
        number = batch.call_tool("count")
        echoed = batch.call_tool("echo", {"value": [{"n": number.ref()}, paid.ref()]})
        ids = batch.call_tool("echo", {"value": order.ref("/orders/*/id")})
    # In arrays the calls of tools keep their order (R5), and the last one waits for the third.
    assert batch.wire == ("waves(4)" if revision == "2025-03-26" else "waves(3)")
    assert paid.result().text == "charged 500 for 7"
    assert letter.result().text == "receipt of 8"
    assert charged == [(7, 500)]
    text = {"value": [{"n": 3}, "charged 500 for 7"]}
    assert echoed.error is None
    assert wanted_of(echoed) == text
    assert wanted_of(ids) == {"value": [7, 8]}


def wanted_of(entry: Any) -> Any:
    """Return the structured content of an answer, or its text as JSON."""
    called = entry.result()
    if called.structured is not msgspec.UNSET:
        return called.structured
    return msgspec.json.decode(called.text)


@AT_EACH_REVISION
async def test_all_small_graphs_have_the_answers_of_the_oracle_in_waves(revision: str) -> None:
    """R6, R13."""
    async with connect(summing_app(), protocol="mcp", revision=revision) as client:
        for graph in graphs(3):
            for failing in range(-1, len(graph)):
                async with client.batch() as batch:
                    entries = add_graph(batch, graph, failing, call=batch.call_tool)
                found = observed(entries, lambda entry: wanted_of(entry)["sum"])
                assert found == expected(graph, failing), graph


@AT_EACH_REVISION
async def test_failed_tool_and_missing_part_fail_dependants(revision: str) -> None:
    """R6: also if the program reads the answer of the failed tool itself."""
    app, _ = shop()
    async with connect(app, protocol="mcp", revision=revision) as client, client.batch() as batch:
        failed = batch.call_tool("fails", check=False)
        hurt = batch.call_tool("receipt", {"order": failed.ref("/id")})
        order = batch.call_tool("find_order", {"customer": "ada"})
        nothing = batch.call_tool("receipt", {"order": order.ref("/orders/5")})
    assert failed.result().is_error
    assert isinstance(hurt.error, RpcError)
    assert (hurt.error.data["type"], hurt.error.data["code"]) == ("dependency_failed", 40001)
    assert isinstance(nothing.error, ReferenceNotFound)


async def test_array_carries_references_where_the_server_announces_them() -> None:
    """R13: at 2025-03-26 one array, with `_meta`; a lost one is sent again with the same keys."""
    app, charged = shop(references=True)
    faults = Faults(drop_reply=1)
    sent: list[Any] = []

    def wrap(link: Link) -> Link:
        inner = faults.on(link)

        class Seen:
            open = link.open
            aclose = link.aclose

            async def exchange(self, exchange: Exchange) -> None:
                sent.append(msgspec.json.decode(exchange.data))
                await inner.exchange(exchange)

        return Seen()

    clock = testing.FakeClock()
    async with (
        connect(app, protocol="mcp", revision="2025-03-26", wrap=wrap, clock=clock) as client,
        client.batch() as batch,
    ):
        order = batch.call_tool("find_order", {"customer": "ada"})
        paid = batch.call_tool("charge", {"order": order.ref("/orders/0/id"), "cents": 5})
        letter = batch.call_tool("receipt", {"order": order.ref("/orders/1/id")}, after=[paid])
        number = batch.call_tool("count", type=int)
        echoed = batch.call_tool("echo", {"value": number.ref()})
    assert (batch.wire, batch.reason) == ("array", "the server resolves references")
    assert paid.result().text == "charged 5 for 7"
    assert letter.result().text == "receipt of 8"
    assert wanted_of(echoed) == {"value": 3}
    assert charged == [(7, 5)]
    first, second = sent
    for message in (first, second):
        meta = message[1]["params"]["_meta"]
        path = "/structuredContent/orders/0/id"
        assert meta["io.wirecall/refs"] == {
            "/arguments/order": {"id": message[0]["id"], "path": path}
        }
        assert meta["io.wirecall/idempotency-key"] == paid.key
        assert message[2]["params"]["_meta"]["io.wirecall/after"] == [message[1]["id"]]


async def test_all_small_graphs_have_the_answers_of_the_oracle_in_an_array() -> None:
    """R6, R13."""
    app = summing_app(references=True)
    async with connect(app, protocol="mcp", revision="2025-03-26") as client:
        for graph in graphs(4):
            for failing in range(-1, len(graph)):
                async with client.batch() as batch:
                    entries = add_graph(batch, graph, failing, call=batch.call_tool)
                found = observed(entries, lambda entry: wanted_of(entry)["sum"])
                assert found == expected(graph, failing), graph
                assert batch.wire in ("array", "singles")


async def test_malformed_tool_result_fails_its_dependants() -> None:
    """R6: a call by `batch.call` does not read the result as that of a tool."""
    app, _ = shop()

    def wrap(link: Link) -> Link:
        class Wrong:
            open = link.open
            aclose = link.aclose

            async def exchange(self, exchange: Exchange) -> None:
                message = msgspec.json.decode(exchange.data)
                exchange.sent = True
                reply = {"jsonrpc": "2.0", "id": message["id"], "result": {"content": 5}}
                exchange.read(msgspec.json.encode(reply))

        return Wrong()

    async with (
        connect(app, protocol="mcp", revision="2025-06-18", wrap=wrap) as client,
        client.batch() as batch,
    ):
        odd = batch.call("tools/call", {"name": "count"})
        hurt = batch.call_tool("receipt", {"order": odd.ref()})
    assert odd.ok
    assert isinstance(hurt.error, RpcError)
    assert hurt.error.data["type"] == "dependency_failed"


async def test_confirm_sees_the_values_of_references() -> None:
    """A person who confirms a call sees what it will do."""
    app, charged = shop()
    seen: list[Any] = []

    def confirm(tool: Tool, arguments: dict[str, Any]) -> bool:
        seen.append((tool.name, arguments))
        return tool.name != "charge"

    async with connect(app, protocol="mcp", confirm=confirm, confirm_unknown=True) as client:
        batch = client.batch()
        order = batch.call_tool("find_order", {"customer": "ada"})
        paid = batch.call_tool("charge", {"order": order.ref("/orders/0/id"), "cents": 5})
        after = batch.call_tool("count", after=[paid])
        assert [entry async for entry in batch.stream()] == [order, paid, after]
    assert seen == [("find_order", {"customer": "ada"}), ("charge", {"order": 7, "cents": 5})]
    assert isinstance(paid.error, Declined)
    assert isinstance(after.error, RpcError) and after.error.ran == "no"
    assert charged == []


def test_sync_client_sends_references_in_waves() -> None:
    app, _ = shop()
    with connect_sync(app, protocol="mcp") as client:
        with client.batch() as batch:
            order = batch.call_tool("find_order", {"customer": "ada"})
            letter = batch.call_tool("receipt", {"order": order.ref("/orders/0/id")})
        assert letter.result().text == "receipt of 7"
        again = client.batch()
        entries = [again.call_tool("count", type=int) for _ in range(3)]
        assert {*again.stream()} == {*entries}
        assert [entry.result() for entry in entries] == [3, 3, 3]


async def test_tool_without_structured_content_gives_its_text() -> None:
    """A2: the text of a result is a string."""
    app = App("words")

    @app.query
    def say() -> str:
        return "5"

    @app.query
    def repeat(text: str) -> str:
        return text

    async with connect(app, protocol="mcp") as client, client.batch() as batch:
        said = batch.call_tool("say")
        again = batch.call_tool("repeat", {"text": said.ref()})
    assert again.result().text == "5"


# --- the batch tool -------------------------------------------------------------------------------


class Watched:
    """A link that keeps the calls of tools that pass through it."""

    def __init__(self, link: Link) -> None:
        self.open = link.open
        self.aclose = link.aclose
        self._link = link
        self.calls: list[Any] = []

    async def exchange(self, exchange: Exchange) -> None:
        message = msgspec.json.decode(exchange.data)
        if message.get("method") == "tools/call":
            self.calls.append(message["params"])
        await self._link.exchange(exchange)


def watching(calls: list[Watched]) -> Any:
    def wrap(link: Link) -> Link:
        calls.append(Watched(link))
        return calls[-1]

    return wrap


@WITHOUT_ARRAYS
async def test_batch_is_one_call_of_the_batch_tool(revision: str) -> None:
    """A13: references and keys travel with the entries."""
    app, charged = shop(batch_tool="all")
    links: list[Watched] = []
    async with (
        connect(app, protocol="mcp", revision=revision, wrap=watching(links)) as client,
        client.batch() as batch,
    ):
        order = batch.call_tool("find_order", {"customer": "ada"})
        cents = order.ref("/orders/0/total")
        paid = batch.call_tool("charge", {"order": order.ref("/orders/0/id"), "cents": cents})
        letter = batch.call_tool("receipt", {"order": order.ref("/orders/1/id")}, after=[paid])
        number = batch.call_tool("count", type=int)
        echoed = batch.call_tool("echo", {"value": [{"n": number.ref()}, paid.ref()]})
        ids = batch.call_tool("echo", {"value": order.ref("/orders/*/id")})
        tricky = batch.call_tool("echo", {"value": {"$ref": "x", "deep": [1]}})
    assert (batch.wire, batch.reason) == ("tool", "the server has a batch tool")
    assert paid.result().text == "charged 500 for 7"
    assert letter.result().text == "receipt of 8"
    assert number.result() == 3
    assert wanted_of(echoed) == {"value": [{"n": 3}, "charged 500 for 7"]}
    assert wanted_of(ids) == {"value": [7, 8]}
    assert wanted_of(tricky) == {"value": {"$ref": "x", "deep": [1]}}
    assert charged == [(7, 500)]
    [call] = links[0].calls
    assert call["name"] == "batch"
    sent = call["arguments"]["calls"]
    assert sent[1]["arguments"]["order"] == {"$ref": f"{order.id}#/orders/0/id"}
    assert sent[1]["idempotency_key"] == paid.key
    assert sent[2]["after"] == [str(paid.id)]


@WITHOUT_ARRAYS
async def test_all_small_graphs_have_the_answers_of_the_oracle_through_the_tool(
    revision: str,
) -> None:
    """A13, R6."""
    app = summing_app(batch_tool="queries")
    most = 4 if revision == "2026-07-28" else 3
    async with connect(app, protocol="mcp", revision=revision) as client:
        for graph in graphs(most):
            for failing in range(-1, len(graph)):
                async with client.batch() as batch:
                    entries = add_graph(batch, graph, failing, call=batch.call_tool)
                found = observed(entries, lambda entry: wanted_of(entry)["sum"])
                assert found == expected(graph, failing), graph
                assert batch.wire == ("tool" if len(graph) > 1 else "singles")


@WITHOUT_ARRAYS
async def test_entries_of_the_tool_get_what_single_calls_get(revision: str) -> None:
    """A13: content, structured content, errors and marks of each entry."""
    plain, _ = shop()
    many, _ = shop(batch_tool="all")

    def add(batch: Any) -> list[Any]:
        return [
            batch.call_tool("find_order", {"customer": "ada"}),
            batch.call_tool("count"),
            batch.call_tool("receipt", {"order": 5}),
            batch.call_tool("echo", {"value": {"result": 5}}),
            batch.call_tool("echo", {"value": None}),
            batch.call_tool("charge", {"order": 1, "cents": 2}),
            batch.call_tool("fails"),
            batch.call_tool("fails", check=False),
            batch.call_tool("receipt", {"order": "x"}),
            batch.call_tool("receipt", {}, check=revision < "2025-11-25"),
            batch.call_tool("receipt", {"order": 5}, type=str),
        ]

    def seen(entries: list[Any]) -> list[Any]:
        return [
            entry.result() if entry.error is None else (type(entry.error), entry.error.args)
            for entry in entries
        ]

    async with (
        connect(plain, protocol="mcp", revision=revision) as one,
        connect(many, protocol="mcp", revision=revision) as other,
    ):
        async with one.batch() as singles:
            expected_entries = add(singles)
        async with other.batch() as tool:
            entries = add(tool)
    assert (singles.wire, tool.wire) == ("singles", "tool")
    assert seen(entries) == seen(expected_entries)


async def test_lost_call_of_the_tool_is_sent_again_and_charges_once() -> None:
    """A13, R10: the same keys, and new ids."""
    app, charged = shop(batch_tool="all")
    links: list[Watched] = []
    faults = Faults(drop_reply=1)

    def wrap(link: Link) -> Link:
        links.append(Watched(faults.on(link)))
        return links[-1]

    clock = testing.FakeClock()
    async with connect(app, protocol="mcp", wrap=wrap, clock=clock) as client:
        await client.list_tools()
        faults.drop_reply = 1
        async with client.batch() as batch:
            order = batch.call_tool("find_order", {"customer": "ada"})
            paid = batch.call_tool("charge", {"order": order.ref("/orders/0/id"), "cents": 5})
            other = batch.call_tool("charge", {"order": 2, "cents": 6}, key="k-2")
    assert batch.wire == "tool"
    assert charged == [(7, 5), (2, 6)]
    assert paid.replayed and other.replayed and not order.replayed
    assert [entry.attempts for entry in (order, paid, other)] == [2, 2, 2]
    assert paid.result().text == "charged 5 for 7"
    keys = [
        [each.get("idempotency_key") for each in call["arguments"]["calls"]]
        for call in links[0].calls
    ]
    assert keys == [[None, paid.key, "k-2"]] * 2


async def test_entries_that_do_not_fit_the_tool_are_sent_alone() -> None:
    """A13: destructive tools, progress, keys that are off, shorter timeouts, other methods."""
    app, _ = shop(batch_tool="all")
    wiped: list[int] = []

    @app.command(destructive=True)
    def wipe() -> str:
        wiped.append(1)
        return "wiped"

    links: list[Watched] = []
    async with connect(app, protocol="mcp", wrap=watching(links)) as client:
        async with client.batch() as batch:
            entries = [
                batch.call_tool("count"),
                batch.call_tool("receipt", {"order": 1}),
                batch.call_tool("wipe"),
                batch.call_tool("count", progress=lambda *_: None),
                batch.call_tool("charge", {"order": 1, "cents": 1}, key=False),
                batch.call_tool("count", timeout=5),
                batch.call("tools/list"),
            ]
            missing = batch.call_tool("nothing")
        assert all(entry.ok for entry in entries)
        assert not missing.ok
        assert batch.wire == "tool"
        assert batch.reason.endswith("and 6 of the entries were sent alone")
        names = sorted(call["name"] for call in links[0].calls)
        assert names == ["batch", "charge", "count", "count", "nothing", "wipe"]
        async with client.batch() as linked:
            first = linked.call_tool("count")
            linked.call_tool("wipe", after=[first])
        assert linked.wire == "waves(2)"
    assert len(wiped) == 2


async def test_person_agrees_once_to_destructive_entries() -> None:
    """A7, A13: a client that can ask its user sends them through the tool."""
    app = App("risky", batch_tool="all")
    wiped: list[int] = []

    @app.command(destructive=True)
    def wipe(n: int) -> str:
        wiped.append(n)
        return "wiped"

    asked: list[str] = []

    def elicit(form: Form) -> dict[str, Any]:
        asked.append(form.message)
        return {}

    async with connect(app, protocol="mcp", elicit=elicit) as client, client.batch() as batch:
        entries = [batch.call_tool("wipe", {"n": n}) for n in range(3)]
    assert batch.wire == "tool"
    assert [entry.result().text for entry in entries] == ["wiped"] * 3
    assert (len(asked), sorted(wiped)) == (1, [0, 1, 2])


async def test_busy_entry_of_the_tool_is_sent_again_with_its_dependants() -> None:
    """R6."""
    app = App("busy", batch_tool="all")
    tries: list[int] = []

    @app.query
    def first() -> dict[str, int]:
        tries.append(1)
        if tries.count(1) < 3:
            raise Busy(ran="no", retry_after_ms=1)
        return {"n": 5}

    @app.query
    def second(value: int) -> int:
        return value

    @app.query
    def other() -> int:
        tries.append(10)
        return 1

    async with (
        connect(app, protocol="mcp", clock=testing.FakeClock()) as client,
        client.batch() as batch,
    ):
        one = batch.call_tool("first")
        two = batch.call_tool("second", {"value": one.ref("/n")}, type=int)
        three = batch.call_tool("other", type=int)
    assert batch.wire == "tool"
    assert (one.ok, two.result(), three.result()) == (True, 5, 1)
    assert sorted(tries) == [1, 1, 1, 10]


async def test_tool_that_is_gone_leaves_keys_with_references_unknown() -> None:
    """R10: the server lost its batch tool between two sends."""
    before, charged = shop(batch_tool="all")
    after, charged_after = shop()

    async with connect(after, protocol="mcp") as other:

        def wrap(link: Link) -> Link:
            class Changing:
                """Loses the answer of the first batch; then another server is there."""

                open = link.open
                aclose = link.aclose
                is_changed = False

                async def exchange(self, exchange: Exchange) -> None:
                    message = msgspec.json.decode(exchange.data)
                    if self.is_changed:
                        await other._delivery.link.exchange(exchange)
                    elif (message.get("params") or {}).get("name") == "batch":
                        self.is_changed = True
                        await Faults(drop_reply=1).on(link).exchange(exchange)
                    else:
                        await link.exchange(exchange)

            return Changing()

        clock = testing.FakeClock()
        async with (
            connect(before, protocol="mcp", clock=clock, wrap=wrap) as client,
            client.batch() as batch,
        ):
            order = batch.call_tool("find_order", {"customer": "ada"})
            paid = batch.call_tool("charge", {"order": order.ref("/orders/0/id"), "cents": 5})
            plain = batch.call_tool("receipt", {"order": 3})
    assert isinstance(paid.error, OutcomeUnknown)
    assert order.ok and plain.result().text == "receipt of 3"
    assert (charged, charged_after) == ([(7, 5)], [])
    assert batch.reason.endswith("which did not run 2 of the entries")


async def test_tool_that_cannot_ask_a_person_leaves_destructive_entries_to_single_calls() -> None:
    """A7, A13: at 2024-11-05 tools do not say that they destroy, and no person can be asked."""
    app = App("risky", batch_tool="all")
    wiped: list[int] = []

    @app.command(destructive=True)
    def wipe(n: int) -> int:
        wiped.append(n)
        return n

    @app.query
    def count() -> int:
        return 3

    async with (
        connect(app, protocol="mcp", revision="2024-11-05") as client,
        client.batch() as batch,
    ):
        number = batch.call_tool("count", type=int)
        first = batch.call_tool("wipe", {"n": number.ref()}, type=int)
        second = batch.call_tool("wipe", {"n": 4}, after=[first], type=int)
    assert [entry.result() for entry in (number, first, second)] == [3, 3, 4]
    assert wiped == [3, 4]
    assert batch.wire == "tool"
    assert batch.reason.endswith("which did not run 2 of the entries")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"content": []}, "cannot be read"),
        ({"content": [], "structuredContent": {"results": 5}}, "cannot be read"),
        ({"content": [], "structuredContent": {"results": []}}, "no single answer"),
        ({"content": [{"type": "text", "text": '{"results":[]}'}]}, "no single answer"),
    ],
)
async def test_answer_of_the_tool_that_is_wrong_fails_each_entry(answer: Any, why: str) -> None:
    app, _ = shop(batch_tool="queries")

    def wrap(link: Link) -> Link:
        class Wrong:
            open = link.open
            aclose = link.aclose

            async def exchange(self, exchange: Exchange) -> None:
                message = msgspec.json.decode(exchange.data)
                if (message.get("params") or {}).get("name") != "batch":
                    await link.exchange(exchange)
                    return
                exchange.sent = True
                reply = {"jsonrpc": "2.0", "id": message["id"], "result": answer}
                exchange.read(msgspec.json.encode(reply))

        return Wrong()

    async with connect(app, protocol="mcp", wrap=wrap) as client, client.batch() as batch:
        entries = [batch.call_tool("count"), batch.call_tool("count")]
    for entry in entries:
        assert isinstance(entry.error, BadAnswer)
        assert why in str(entry.error)
        assert entry.error.ran == "unknown"


async def test_stream_through_the_tool_yields_every_entry() -> None:
    app, _ = shop(batch_tool="queries")
    async with connect(app, protocol="mcp") as client:
        batch = client.batch()
        entries = [batch.call_tool("count"), batch.call_tool("count"), batch.call_tool("fails")]
        assert {entry async for entry in batch.stream()} == {*entries}
        assert batch.wire == "tool"


async def test_references_through_the_tool_have_the_limits_of_the_server() -> None:
    """R4."""
    app, _ = shop(batch_tool="queries")
    async with connect(app, protocol="mcp") as client, client.batch() as batch:
        first = batch.call_tool("echo", {"value": list(range(LIMITS.values + 1))})
        many = {f"v{number}": first.ref() for number in range(LIMITS.refs + 1)}
        wrong = [
            batch.call_tool("echo", {"value": many}),
            batch.call_tool("echo", after=[first] * (LIMITS.after + 1)),
            batch.call_tool("echo", {"value": first.ref("/value/*")}),
        ]
        last = first
        for _ in range(LIMITS.depth + 1):
            last = batch.call_tool("echo", after=[last])
    assert batch.wire == "tool"
    limits = [
        entry.error.data["limit"]
        for entry in [*wrong, last]
        if isinstance(entry.error, ReferenceLimit)
    ]
    assert limits == ["refs", "after", "values", "depth"]


async def test_batch_longer_than_the_tool_takes_is_several_calls() -> None:
    app, _ = shop(batch_tool="queries", limits=Limits(batch=3))
    links: list[Watched] = []
    async with (
        connect(app, protocol="mcp", wrap=watching(links)) as client,
        client.batch() as batch,
    ):
        entries = [batch.call_tool("receipt", {"order": n}) for n in range(7)]
    assert batch.wire == "tool"
    assert [entry.result().text for entry in entries] == [f"receipt of {n}" for n in range(7)]
    assert [len(call["arguments"]["calls"]) for call in links[0].calls] == [3, 3, 1]

"""The keys of a batch tool's entries: which they are, and what a batch that is sent again does."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.calls import make_app
from tests.mcp.asgi import KEY, R4, R5, REVISIONS, HttpClient, notification, over_http, over_stdio
from tests.mcp.batches import entry, ref, results, run
from tests.servers import Store
from tests.size import sized
from wirecall import App, BatchTool, Context, DomainError

every_revision = pytest.mark.parametrize("revision", REVISIONS)


class Till:
    """A shop whose price may change, and whose commands may fail or wait."""

    def __init__(self, **options: Any) -> None:
        self.app: App = make_app(
            batch_tool=BatchTool(tools="all", destructive="allow"), single_user=True, **options
        )
        self.price = 100
        self.is_closed = False
        self.paid: list[int] = []
        self.keys: list[str | None] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()

        @self.app.query
        def cents() -> int:
            return self.price

        @self.app.command
        async def pay(cents: int, ctx: Context) -> str:
            self.paid.append(cents)
            self.keys.append(ctx.idempotency_key)
            self.entered.set()
            await self.gate.wait()
            return f"paid {cents}"

        @self.app.command
        async def ship(text: str, ctx: Context) -> str:
            if self.is_closed:
                await ctx.progress(1)
                raise DomainError(40001, "closed")
            self.keys.append(ctx.idempotency_key)
            return f"shipped: {text}"

        @self.app.command(key="required")
        def strict(ctx: Context) -> str | None:
            return ctx.idempotency_key

        @self.app.command
        async def careful(ctx: Context) -> str:
            if self.is_closed:
                raise ValueError("before the commit point")
            await ctx.commit_point()
            self.paid.append(0)
            return "done"


def batch(prefix: str = "", **keys: str) -> list[dict[str, Any]]:
    """Return a query, a command that takes its result, and one that takes the command's."""
    return [
        entry("cents", id=f"{prefix}c"),
        entry("pay", {"cents": ref(f"{prefix}c")}, f"{prefix}p", **keys),
        entry("ship", {"text": ref(f"{prefix}p")}, f"{prefix}s"),
    ]


@every_revision
@pytest.mark.parametrize("place", ["meta", "snake", "camel", "arguments"])
async def test_batch_entry_key_is_that_of_the_batch_and_its_id(place: str, revision: str) -> None:
    """A6: its own key, else the outer key + "/" + id."""
    till = Till()
    places: dict[str, Any] = {
        "meta": {"meta": {KEY: "k-1"}},
        "snake": {"members": {"idempotency_key": "k-1"}},
        "camel": {"members": {"idempotencyKey": "k-1"}},
        "arguments": {},
    }
    arguments: dict[str, Any] = {"calls": batch(idempotency_key="own")}
    if place == "arguments":
        arguments["idempotency_key"] = "k-1"
    async with over_stdio(till.app, revision) as client:
        first = results(await client.tool("batch", arguments, **places[place]))
        again = results(await client.tool("batch", arguments, **places[place]))
    assert till.keys == ["own", "k-1/s"]
    assert [each.get("replayed") for each in first] == [None, None, None]
    assert [each.get("replayed") for each in again] == [None, True, True]
    assert [each["result"] for each in first] == [each["result"] for each in again]


async def test_batch_key_in_the_header() -> None:
    """A6: over HTTP the key may be in a header."""
    till = Till()
    async with over_http(till.app, R5) as client:
        for _ in range(2):
            found = await run(client, *batch(), headers={"idempotency-key": "h-1"})
    assert till.keys == ["h-1/p", "h-1/s"]
    assert found["p"]["replayed"]


async def test_batch_entry_without_a_key_that_needs_one() -> None:
    """A5, A6: `key="required"` holds inside a batch; the batch's key is enough."""
    till = Till()
    async with over_stdio(till.app) as client:
        refused = await run(client, entry("strict", id="a"))
        keyed = await run(client, entry("strict", id="a"), meta={KEY: "k"})
        long = await run(client, entry("strict", id="abc"), meta={KEY: "k" * 253})
    assert refused["a"]["error"]["data"]["type"] == "idempotency_key_required"
    assert keyed["a"]["result"] == "k/a"
    assert long["abc"]["error"]["data"]["type"] == "idempotency_key_invalid"


async def test_batch_sent_again_replays_what_ran_and_runs_the_rest() -> None:
    """A6: an entry that did nothing runs the second time."""
    till = Till()
    calls = [entry("pay", {"cents": 5}, "p"), entry("careful", id="c")]
    async with over_stdio(till.app) as client:
        till.is_closed = True
        first = await run(client, *calls, meta={KEY: "k"})
        till.is_closed = False
        again = await run(client, *calls, meta={KEY: "k"})
    assert first["c"]["error"]["code"] == -32603
    assert again["p"]["replayed"]
    assert again["c"]["result"] == "done"
    assert till.paid == [5, 0]


async def test_batch_replays_with_a_changed_query(store: Store) -> None:
    """R9: what a command was asked to do does not change with the answer of a query."""
    till = Till(ledger=store.url)
    async with over_stdio(till.app) as client:
        first = await run(client, *batch(), meta={KEY: "k"})
        till.price = 250
        again = await run(client, *batch(), meta={KEY: "k"})
        other = batch()
        other[1]["arguments"] = {"cents": 7}
        conflict = await run(client, *other, meta={KEY: "k"})
    assert (first["p"]["result"], again["p"]["result"]) == ("paid 100", "paid 100")
    assert again["c"]["result"] == 250
    assert conflict["p"]["error"]["data"]["type"] == "idempotency_key_conflict"
    assert till.paid == [100]


async def test_batch_is_replayed_by_another_process(tmp_path: Path) -> None:
    """A6: whichever process gets it."""
    url = f"sqlite:{tmp_path / 'ledger.db'}"
    found = []
    paid = []
    for _ in range(2):
        till = Till(ledger=url)
        async with over_http(till.app, R5) as client:
            found.append(await run(client, *batch(), meta={KEY: "k"}))
        paid += till.paid
    assert paid == [100]
    assert [each["p"].get("replayed") for each in found] == [None, True]


async def lose(till: Till, client: HttpClient, calls: list[dict[str, Any]]) -> None:
    """Send a batch, and leave while its command runs."""
    till.gate.clear()
    till.entered.clear()
    message = client.message("tools/call", {"name": "batch", "arguments": {"calls": calls}})
    exchange = client.post(message)
    await till.entered.wait()
    exchange.leave()
    await exchange.close()
    till.gate.set()


@pytest.mark.parametrize("revision", [R4, R5])
async def test_lost_batch_without_keys_is_recognised(revision: str) -> None:
    """A6: re-sent with new ids and without keys, in spite of a query that answers differently."""
    till = Till()
    async with over_http(till.app, revision) as client:
        await lose(till, client, batch())
        if revision == R4:  # a session does not end with its connection: the client cancels
            await client.notify("notifications/cancelled", {"requestId": 1})
        till.price = 250
        again = await run(client, *batch("new-"))
    assert again["new-p"]["result"] == "paid 100"
    assert again["new-p"]["replayed"]
    assert again["new-s"]["result"] == "shipped: paid 100"
    assert till.paid == [100]


async def test_delivered_batch_without_keys_runs_again() -> None:
    """A6: as with any call without a key, an equal one after a delivered answer is a new one."""
    till = Till()
    async with over_http(till.app, R5) as client:
        first = await run(client, *batch())
        again = await run(client, *batch())
    assert till.paid == [100, 100]
    assert "replayed" not in first["p"] | again["p"]


async def test_equal_entries_without_keys_are_two_calls() -> None:
    """A6: two equal orders in one batch are meant, and two are recognised after a loss."""
    till = Till()
    calls = [entry("pay", {"cents": 1}), entry("pay", {"cents": 1})]
    async with over_http(till.app, R5) as client:
        found = await run(client, *calls)
    assert till.paid == [1, 1]
    assert [each["ok"] for each in found.values()] == [True, True]
    assert len(set(till.keys)) == 2


async def test_equal_entries_with_one_key_share_a_run() -> None:
    """R11: the first runs, the other gets its outcome."""
    till = Till()
    calls = [
        entry("pay", {"cents": 1}, "a", idempotency_key="k"),
        entry("pay", {"cents": 1}, "b", idempotency_key="k"),
        entry("pay", {"cents": 2}, "c", idempotency_key="k"),
    ]
    async with over_stdio(till.app) as client:
        found = await run(client, *calls)
    assert till.paid == [1]
    assert found["b"]["replayed"]
    assert found["c"]["error"]["data"]["type"] == "idempotency_key_conflict"


async def test_audit_line_has_the_digest_of_filled_arguments(tmp_path: Path) -> None:
    """R9: the fingerprint of a command has no values, so its line has their digest as well."""
    path = tmp_path / "audit.jsonl"
    till = Till(audit=f"file:{path}")
    async with over_stdio(till.app) as client:
        for price in (100, 250):
            till.price = price
            await run(client, *batch())
        await run(client, entry("pay", {"cents": 100}))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    paid = [line for line in lines if line["method"] == "tools/call:pay"]
    assert len({line["digest"] for line in paid[:2]}) == 1
    assert len({line["filled"] for line in paid[:2]}) == 2
    assert paid[0]["filled"] == paid[2]["digest"]
    assert paid[2]["filled"] is None


@pytest.mark.parametrize("revision", [R4, R5])
async def test_batch_cut_at_any_moment_has_each_effect_once(revision: str) -> None:
    """A6: cut after any number of turns of the loop, sent again with new ids and without keys."""
    app = make_app(batch_tool=BatchTool(tools="all", destructive="allow"), single_user=True)
    effects: list[str] = []

    async def act(name: str, given: str = "") -> str:
        for _ in range(3):
            await asyncio.sleep(0)
        effects.append(name)
        return name

    app.command(name="first")(act)
    app.command(name="second")(act)

    def calls(number: int, prefix: str) -> dict[str, Any]:
        made = [
            entry("first", {"name": f"{number} first"}, f"{prefix}a"),
            entry("second", {"name": f"{number} second", "given": ref(f"{prefix}a")}, f"{prefix}b"),
        ]
        return {"name": "batch", "arguments": {"calls": made}}

    cuts = 0
    async with over_http(app, revision) as client:
        for turns in range(sized(small=60, full=300)):
            id = 1000 + turns
            exchange = client.post(client.message("tools/call", calls(turns, ""), id))
            for _ in range(turns):
                await asyncio.sleep(0)
            if exchange.status:  # the server has begun to answer
                await exchange.read()
                await exchange.close()
                continue
            cuts += 1
            exchange.leave()
            await exchange.close()
            if revision == R4:
                await client.post(notification("notifications/cancelled", {"requestId": id})).read()
            answers = results(await client.result("tools/call", calls(turns, "new-")))
            assert [each["ok"] for each in answers] == [True, True]
    doubled = [name for name, count in Counter(effects).items() if count != 1]
    assert doubled == []
    assert cuts > 10

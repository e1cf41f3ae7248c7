"""All workers in one place: the pages, the feed, `/metrics`, and a worker that ends."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import pytest

from tests.console.records import unknown
from tests.console.samples import parsed
from tests.console.shops import call, make_app, send
from wirecall import App
from wirecall.console import facts
from wirecall.console.calls import SENT
from wirecall.console.collect import Collector
from wirecall.console.conflicts import NO_BODY, NO_RECORD, SECRET
from wirecall.console.lines import Line
from wirecall.console.listener import _for_role, open_listener, shortened
from wirecall.console.metrics import LABELS, METRICS, MetricsListener, render
from wirecall.console.signin import Session
from wirecall.console.source import FeedEvent, ListenerSettings, NotFound, Refusal
from wirecall.console.tap import Tap
from wirecall.console.worker import Gone, Served, WorkerLink, describe, links_in
from wirecall.errors import KeyConflict, UsageError
from wirecall.ledger.base import RecordId
from wirecall.protocol.secrets import Secret
from wirecall.testing import client

PATIENCE = 60.0


class Server:
    """Two workers of one server, in this process, and what reads them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.served = Served("shop", os.getpid(), 0.0, "shop.py", "http://127.0.0.1:1")
        self.served.folder = str(folder)
        describe(self.served)
        self.apps: list[App] = []
        self.taps: list[Tap] = []
        self.trail = folder / "audit.jsonl"

    async def add(self) -> App:
        app, tap = make_app(
            "bodies", audit=f"file:{self.trail}", ledger=f"sqlite:{self.folder / 'ledger.db'}"
        )
        tap._folder = str(self.folder)
        await app.__aenter__()
        self.apps.append(app)
        self.taps.append(tap)
        return app


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    made = Server(tmp_path)
    await made.add()
    await made.add()
    yield made
    for app in made.apps:
        await app.aclose()


@pytest.fixture
async def collector(server: Server) -> AsyncIterator[Collector]:
    made = Collector(server.served, audit={"path": str(server.trail)})
    await made.open()
    yield made
    await made.aclose()


async def test_collector_merges_the_calls_of_all_workers(
    server: Server, collector: Collector
) -> None:
    for app in server.apps:
        await send(app, call(1, "price", sku="abc"))
        await send(app, call(2, "charge", cents=5, idempotency_key="k"))
    page = await collector.calls()
    assert page["total"] == 4 and page["lost"] == 0
    assert {row["worker"] for row in page["rows"]} == {tap.name for tap in server.taps}
    assert [row["n"] for row in page["rows"]] == [4, 3, 2, 1]
    only = await collector.calls("kind:command", limit=1)
    assert len(only["rows"]) == 1 and only["more"] == only["rows"][0]["id"]
    rest = await collector.calls("kind:command", before=only["more"])
    assert len(rest["rows"]) == 1 and rest["more"] is None
    with pytest.raises(Refusal):
        await collector.calls("metod:x")


async def test_collector_call_has_body_record_and_commands(
    server: Server, collector: Collector
) -> None:
    await send(server.apps[0], call(1, "charge", cents=5, card="4111", idempotency_key="k"))
    await send(server.apps[0], call(2, "charge", cents=5, card="4111", idempotency_key="k"))
    second, first = (await collector.calls())["rows"]
    page = await collector.call(first["id"])
    assert json.loads(page["body"]["params"]) == {"cents": 5, "card": "***"}
    assert json.loads(page["body"]["result"]) == {"paid": 5}
    assert "4111" not in json.dumps(page)
    assert [phase["name"] for phase in page["phases"]] == ["waited", "claimed", "ran", "encoded"]
    record = await collector.record(page["record"])
    assert record["key"] == "k" and record["state"] == "done"
    assert len(record["calls"]) == 2
    assert [line["outcome"] for line in record["audit"]] == ["ok", "ok"]
    assert (await collector.call(second["id"]))["original"] == first["id"]
    assert "--key k" in page["commands"]["cli"]
    assert json.loads(page["commands"]["json"])["params"]["idempotency_key"] == "k"
    with pytest.raises(NotFound):
        await collector.call("nothing-1")


async def test_collector_batch_is_whole_and_in_order(server: Server, collector: Collector) -> None:
    entries = [call(each, "look", sku="a") for each in range(12)]
    await send(server.apps[0], *entries)
    (batch,) = {row["batch"] for row in (await collector.calls())["rows"]}
    page = await collector.batch(batch)
    assert page["whole"] and page["missing"] == 0 and page["size"] == 12
    assert [entry["position"] for entry in page["entries"]] == list(range(12))
    assert any(entry["critical"] for entry in page["entries"])
    assert page["concurrency"] == server.apps[0].limits.concurrency
    for entry in page["entries"]:
        ends = [phase["start_ms"] + phase["ms"] for phase in entry["phases"]]
        assert max(ends) == pytest.approx(page["ms"], abs=0.01)


async def test_collector_keeps_the_rows_of_a_worker_that_ended(
    server: Server, collector: Collector
) -> None:
    await send(server.apps[0], call(1, "price", sku="a"))
    await send(server.apps[1], call(2, "price", sku="a"))
    await collector.read()
    await server.taps[0].aclose()
    page = await collector.calls()
    gone = {row["worker"]: row["gone"] for row in page["rows"]}
    assert gone == {server.taps[0].name: True, server.taps[1].name: False}
    now = await collector.now()
    assert now["totals"]["calls"] == 2, "a counter never goes back"
    assert sorted(worker["gone"] for worker in now["workers"]) == [False, True]


async def test_collector_now_has_numbers_of_every_method(
    server: Server, collector: Collector
) -> None:
    for app in server.apps:
        await send(app, call(1, "price", sku="abc"))
        await send(app, call(1, "prices"))
    now = await collector.now()
    methods = {each["method"]: each for each in now["methods"]}
    assert methods["price"]["calls"] == 2
    assert now["errors"][0]["code"] == -32601 and now["errors"][0]["count"] == 2
    assert len(now["sparks"]["calls"]) == 60
    assert now["ledger"]["unknown"] == 0 and now["person"] == []


async def test_collector_methods_have_annotations(server: Server, collector: Collector) -> None:
    methods = {each["name"]: each for each in (await collector.methods())["methods"]}
    assert methods["price"]["badges"][0] == "read-only"
    assert methods["charge"]["annotations"]["destructiveHint"] is None
    assert "destructive unstated" in methods["charge"]["badges"]
    assert methods["charge"]["params"]["properties"]["cents"]["type"] == "integer"


async def test_collector_methods_count_the_calls_of_both_protocols(
    server: Server, collector: Collector
) -> None:
    """A tool has another name if that of its method has a dot."""
    for app in server.apps:

        @app.query(name="v1.stock")
        def stock(sku: str) -> int:
            return 1

        @app.command(name="v1.order")
        def order(sku: str) -> str:
            return sku

    app = server.apps[0]
    async with client(app, protocol="mcp") as calls:
        await calls.call_tool("v1_stock", {"sku": "a"})
        await calls.call_tool("v1_order", {"sku": "a"})
    await send(app, call(1, "v1.stock", sku="a"))
    methods = {each["name"]: each for each in (await collector.methods())["methods"]}
    assert methods["v1.stock"]["calls"] == 2
    assert methods["v1.order"]["calls"] == 1
    for name, number in (("v1.stock", 2), ("v1.order", 1)):
        rows = ",".join(f'"{row}"' for row in methods[name]["rows"])
        assert len((await collector.calls(f"method:{rows}"))["rows"]) == number


async def test_collector_attempt_asks_for_the_name_and_keeps_the_text(
    server: Server, collector: Collector
) -> None:
    request = {"params": '{"cents": 12345678901234567890, "card":"1.10"}', "key": "t"}
    with pytest.raises(Refusal) as raised:
        await collector.attempt("charge", request, actor="ada")
    assert raised.value.document["error"]["type"] == "confirm"
    confirmed = {**request, "confirm": "charge"}
    first = await collector.attempt("charge", confirmed, actor="ada")
    assert '"cents": 12345678901234567890' in first["message"]
    assert json.loads(first["answer"])["result"] == {"paid": 12345678901234567890}
    assert not first["replayed"]
    assert (await collector.attempt("charge", confirmed, actor="ada"))["replayed"]
    lines = (await collector.audit("try"))["lines"]
    assert [line["caller"] for line in lines] == ["ada", "ada"]
    assert (await collector.verify_audit())["ok"]


async def test_collector_resolves_an_unknown_record(server: Server, collector: Collector) -> None:
    ledger = await server.apps[0].ledger()
    id = RecordId("", "charge", "order-4711")
    record = await unknown(ledger, id)
    # Each app in memory has its own ledger: only one worker may answer.
    await server.taps[1].aclose()
    await collector.read()
    page = await collector.ledger(state="unknown")
    assert page["counts"]["unknown"] == 1
    (brief,) = page["records"]
    shown = await collector.record(brief["id"])
    assert shown["can_resolve"] and shown["path"] == ["absent", "running", "unknown"]
    request = {
        "fence": record.fence,
        "state": "unknown",
        "verdict": "happened",
        "reason": "the bank has the payment",
        "tail": "r-4711",
        "result": '{"paid": 5}',
    }
    with pytest.raises(Refusal) as raised:
        await collector.resolve(brief["id"], {**request, "fence": 0}, actor="ada")
    assert raised.value.status == 409 and raised.value.document["record"]["state"] == "unknown"
    settled = await collector.resolve(brief["id"], request, actor="ada")
    assert settled["state"] == "done" and settled["record"]["resolved_by"] == "ada"
    with pytest.raises(Refusal) as raised:
        await collector.resolve(brief["id"], request, actor="bob")
    assert raised.value.status == 409
    readonly = Collector(server.served, readonly=True)
    await readonly.read()
    with pytest.raises(Refusal) as raised:
        await readonly.resolve(brief["id"], request, actor="ada")
    assert raised.value.status == 403
    await readonly.aclose()


async def next_rows(feed: AsyncIterator[FeedEvent]) -> FeedEvent:
    async with asyncio.timeout(PATIENCE):
        async for event in feed:
            if event.event == "rows":
                return event
    raise AssertionError("the feed has ended")


async def test_feed_sends_what_fits_and_resumes_without_a_gap(
    server: Server, collector: Collector
) -> None:
    feed = collector.feed("method:price")
    waiting = asyncio.create_task(next_rows(feed))
    await asyncio.sleep(0)
    await send(server.apps[0], call(1, "look", sku="a"))
    await send(server.apps[0], call(2, "price", sku="a"))
    event = await waiting
    assert [row["method"] for row in event.data["rows"]] == ["price"]
    assert event.data["lost"] == 0 and event.data["sampled"] == 1
    await feed.aclose()  # type: ignore[attr-defined]
    await send(server.apps[0], call(3, "price", sku="a"))
    await send(server.apps[1], call(4, "price", sku="a"))
    await collector.read()
    resumed = await next_rows(collector.feed("method:price", event.id))
    assert sorted(row["rpc_id"] for row in resumed.data["rows"]) == ["3", "4"]
    assert resumed.data["lost"] == 0


async def test_feed_of_another_process_says_that_rows_may_be_lost(collector: Collector) -> None:
    event = await next_rows(collector.feed("", "ffffff-12"))
    assert event.data["lost"] == -1 and event.data["rows"] == []


async def test_feed_says_how_many_rows_were_lost(server: Server, collector: Collector) -> None:
    feed = collector.feed()
    waiting = asyncio.create_task(next_rows(feed))
    await asyncio.sleep(0)
    server.taps[0].ring.last += 12  # as if rows had been overwritten
    await send(server.apps[0], call(1, "price", sku="a"))
    assert (await waiting).data["lost"] == 12


async def test_feed_samples_a_flood(server: Server, collector: Collector) -> None:
    feed = collector.feed()
    cursor = collector.kept.place
    for number in range(3 * SENT):
        await send(server.apps[0], call(number, "price", sku="a"))
    await collector.read()
    event = await next_rows(collector.feed("", cursor))
    assert event.data["sampled"] == 3 and len(event.data["rows"]) == SENT
    await feed.aclose()  # type: ignore[attr-defined]


async def test_feed_ends_when_the_console_stops(server: Server) -> None:
    collector = Collector(server.served)
    await collector.open()
    feed = collector.feed()
    events: list[str] = []

    async def read() -> None:
        events.extend([event.event async for event in feed])

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    await collector.aclose()
    async with asyncio.timeout(PATIENCE):
        await reading
    assert events[-1] == "end"


async def test_worker_refuses_a_question_that_it_does_not_know(server: Server) -> None:
    (first, *_) = links_in(str(server.folder))
    with pytest.raises(Refusal):
        await first.ask("secrets")
    first.close()
    assert (server.folder / f"{server.taps[0].name}.socket").exists()


async def test_worker_link_says_that_a_worker_is_gone(tmp_path: Path) -> None:
    with pytest.raises(Gone):
        await WorkerLink(tmp_path / "abc.socket").ask("numbers")


# --- /metrics -------------------------------------------------------------------------------------


async def test_metrics_are_summed_over_workers(server: Server, collector: Collector) -> None:
    for app, key in zip(server.apps, ("first", "second"), strict=True):
        await send(app, call(1, "price", sku="abc"))
        await send(app, call(2, "charge", cents=1, idempotency_key=key))
        await send(app, call(2, "charge", cents=1, idempotency_key=key))
        await send(app, call(3, 'no"such\n'))
    text = await render(collector)
    found = parsed(text)
    calls = {labels["method"]: value for labels, value in found["wirecall_calls_total"]}
    assert calls == {"price": 2, "charge": 4, "(other)": 2}
    errors = {labels["code"]: value for labels, value in found["wirecall_errors_total"]}
    assert errors == {"-32601": 2}
    replays = {labels["method"]: value for labels, value in found["wirecall_replays_total"]}
    assert replays["charge"] == 2
    assert found["wirecall_workers"] == [({}, 2)]
    buckets = [
        (labels["le"], value)
        for labels, value in found["wirecall_call_duration_seconds_bucket"]
        if labels["method"] == "price"
    ]
    assert buckets[-1] == ("+Inf", 2)
    assert [value for _, value in buckets] == sorted(value for _, value in buckets)
    trips = {
        labels["operation"]: value for labels, value in found["wirecall_ledger_round_trips_total"]
    }
    assert trips["claim"] == 4
    for name, (kind, _) in METRICS.items():
        assert f"# TYPE {name} {kind}\n" in text
        for labels, _ in found.get(name, []):
            assert set(labels) == set(LABELS.get(name, ()))


async def test_metrics_listener_asks_for_its_token(server: Server, collector: Collector) -> None:
    with pytest.raises(UsageError, match="without a token"):
        MetricsListener(collector, "0.0.0.0", 0, None)
    listener = MetricsListener(collector, "127.0.0.1", 0, "s3cret")
    await listener.open()
    try:
        async with aiohttp.ClientSession() as session:
            statuses = []
            for token in (None, "wrong", "s3cret"):
                headers = {} if token is None else {"Authorization": f"Bearer {token}"}
                async with session.get(listener.url, headers=headers) as answer:
                    statuses.append(answer.status)
                    text = await answer.text()
            assert statuses == [401, 401, 200]
            assert "wirecall_workers 2" in text
            async with session.post(listener.url, headers=headers) as answer:
                assert answer.status == 405
    finally:
        await listener.aclose()


# --- a key with other params ----------------------------------------------------------------------


async def test_collector_record_says_which_members_of_a_conflict_differ(
    server: Server, collector: Collector
) -> None:
    app = server.apps[0]
    numbers = count(1)

    @app.command(record_params=True)
    async def pay(cents: int, to: str, card: Annotated[str, Secret]) -> int:
        return cents

    async def conflict(method: str, first: dict[str, Any], second: dict[str, Any]) -> Any:
        key = f"key-{next(numbers)}"
        await send(app, call(1, method, idempotency_key=key, **first))
        answer = await send(app, call(2, method, idempotency_key=key, **second))
        assert answer["error"]["code"] == KeyConflict.CODE
        rows = (await collector.calls(f"key:{key}"))["rows"]
        (word,) = {(await collector.call(row["id"]))["record"] for row in rows}
        found = (await collector.record(word))["conflict"]
        assert found.pop("call") == rows[0]["id"]
        return found

    paid = {"cents": 5, "to": "ada", "card": "4111"}
    found = await conflict("pay", paid, {**paid, "cents": 6, "to": "bob"})
    assert found == {"differs": ["cents", "to"], "why": None}
    found = await conflict("pay", paid, {**paid, "card": "4222"})
    assert found == {"differs": [], "why": SECRET}
    found = await conflict("charge", {"cents": 5}, {"cents": 6})
    assert found == {"differs": [], "why": NO_RECORD}
    server.taps[0].capture = "facts"
    found = await conflict("pay", paid, {**paid, "cents": 7})
    assert found == {"differs": [], "why": NO_BODY}


# --- workers that are slow, or end ----------------------------------------------------------------


async def test_attempt_that_takes_long_says_so(
    server: Server, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "TRY_TIME", 0.01)
    go = asyncio.Event()

    async def handle(*_: object, **__: object) -> None:
        await go.wait()

    for app in server.apps:
        monkeypatch.setattr(app, "handle", handle)
    request = {"params": '{"cents": 1}', "key": "slow", "confirm": "charge"}
    with pytest.raises(Refusal) as refused:
        await collector.attempt("charge", request, actor="ada")
    assert refused.value.status == 504
    assert refused.value.document["error"]["type"] == "slow"


async def test_page_of_a_call_without_its_worker_has_no_log_records(
    server: Server, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = WorkerLink.ask

    async def gone(link: WorkerLink, what: str, **rest: Any) -> Any:
        if what == "lines":
            raise Gone("it has ended")
        return await ask(link, what, **rest)

    request = {"params": '{"cents": 1, "card": "1"}', "key": "t", "confirm": "charge"}
    id = (await collector.attempt("charge", request, actor="ada"))["call"]
    monkeypatch.setattr(WorkerLink, "ask", gone)
    assert (await collector.call(id))["lines"] == []


@pytest.mark.parametrize(
    ("error", "kind"), [(UsageError("old tables"), "ledger_down"), (KeyError("x"), "failed")]
)
async def test_worker_that_fails_to_answer_is_not_taken_for_dead(
    server: Server,
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    kind: str,
) -> None:
    async def ledger() -> None:
        raise error

    for app in server.apps:
        monkeypatch.setattr(app, "ledger", ledger)
    with pytest.raises(Refusal) as refused:
        await collector.ledger()
    assert refused.value.document["error"]["type"] == kind
    assert len(collector.workers.alive()) == 2


# --- the role "look" ------------------------------------------------------------------------------


async def test_console_readonly_hides_keys_in_the_names_of_records(
    server: Server, collector: Collector
) -> None:
    """A record's own name is its caller, its method and its key in base64."""
    keys = ["a-long-key-1", "a-long-key-2"]
    for key in keys:
        await send(server.apps[0], call(1, "charge", cents=5, idempotency_key=key))
    own = {each["id"] for each in (await collector.ledger())["records"]}
    listener = await open_listener(collector, ListenerSettings(port=0, readonly=True))
    opened = listener.signin.open(listener.link().partition("=")[2])
    assert opened is not None
    port = listener.url.rpartition(":")[2]
    fields = {"Cookie": f"wc_{port}={opened.cookie}", "X-Wirecall-Tab": opened.tab}
    async with aiohttp.ClientSession(headers=fields) as http:

        async def read(path: str) -> Any:
            async with http.get(listener.url + path) as answer:
                text = await answer.text()
            assert not any(word in text for word in (*own, *keys)), path
            return json.loads(text)

        first = await read("/ledger.json?limit=1")
        second = await read(f"/ledger.json?limit=1&after={first['next']}")
        ids = [page["records"][0]["id"] for page in (first, second)]
        assert len(set(ids)) == 2 and second["next"] is None
        for id in ids:
            page = await read(f"/ledger/{id}.json")
            assert (page["id"], page["method"]) == (id, "charge")
        calls = (await read("/calls.json"))["rows"]
        linked = [(await read(f"/calls/{row['id']}.json"))["record"] for row in calls]
        assert sorted(linked) == sorted(ids)
        for word in own:
            async with http.get(f"{listener.url}/ledger/{word}.json") as answer:
                assert answer.status == 404
    await listener.aclose()


async def test_console_readonly_hides_keys_in_log_records(
    server: Server, collector: Collector
) -> None:
    key = "a-long-key-1"
    await send(server.apps[0], call(1, "charge", cents=5, idempotency_key=key))
    row = (await collector.calls())["rows"][0]
    line = Line(row["call_id"], 0.0, "ERROR", "wirecall", f"charge failed, key {key}")
    server.taps[0].lines._lines.append(line)
    assert key in (await collector.call(row["id"]))["lines"][0]["text"]
    listener = await open_listener(collector, ListenerSettings(port=0, readonly=True))
    opened = listener.signin.open(listener.link().partition("=")[2])
    assert opened is not None
    shown = json.dumps(await listener._document(f"/calls/{row['id']}", {}, opened.session))
    assert "charge failed, key a-l" in shown and key not in shown
    await listener.aclose()


def test_export_for_the_role_look_has_nothing_of_a_torn_line() -> None:
    session = Session("a", "look", b"", b"", 0.0)
    lines = b'{"key":"a-long-key-1","n":1}\n{"key":"a-long-ke'
    shown = _for_role(lines, session).splitlines()
    assert [json.loads(line) for line in shown] == [
        {"key": "a-l…y-1", "n": 1},
        {"unreadable": 17},
    ]
    assert shortened({"unreadable": lines.decode()[-17:]}) == {"unreadable": '{"k…-ke'}

"""Processes with one secret and one ledger pass on to each other what their clients must receive."""

import asyncio
import os
import stat
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.calls import make_app
from tests.faults import eventually
from tests.mcp.asgi import (
    PATIENCE,
    R2,
    R4,
    HttpClient,
    notification,
    request,
    response,
)
from wirecall import App, Context
from wirecall.ledger.base import Bus, Ledger, LedgerDown, Mark, Receive, open_ledger
from wirecall.ledger.sqlite.ledger import SqliteLedger
from wirecall.mcp.server import others, sessions
from wirecall.mcp.server.changes import Hub
from wirecall.mcp.server.others import LOOK, EndedSession, Place, Relay, within
from wirecall.mcp.server.sessions import Sealer
from wirecall.protocol.sender import ANONYMOUS
from wirecall.transports.http_server import HttpServer

SECRET = "s3cret"


class Station:
    """A relay, and what it receives."""

    def __init__(self, ledger: Ledger, secrets: str, path: str = "/mcp") -> None:
        """`secrets` has several words while a secret is replaced."""
        self.heard: list[Any] = []
        self.hub = Hub()
        self.changes: list[Any] = []
        self.hub.notify_here = lambda *change: self.changes.append(change)  # type: ignore[method-assign]

        async def opened() -> Ledger:
            return ledger

        secret, *others = secrets.split()
        self.relay = Relay(Sealer(secret, others=others), opened)
        self.path = path
        self.is_busy = True
        self.relay.add(path, Place(self.hub, lambda: self.is_busy, self._take, self._take))

    def _take(self, *told: Any) -> None:
        self.heard.append(told)

    async def until(self, fact: Callable[[], bool]) -> None:
        async def holds() -> bool:
            return fact()

        await eventually(holds)


@asynccontextmanager
async def stations(folder: Path, *secrets: str) -> AsyncIterator[list[Station]]:
    """One for each secret, over one file; all of them listen."""
    ledgers = [await open_ledger(f"sqlite:{folder}/ledger.db") for _ in secrets]
    made = [Station(ledger, secret) for ledger, secret in zip(ledgers, secrets, strict=True)]
    for each in made:
        await each.relay.open()
    sockets = folder / "ledger.db-bus"

    async def all_listen() -> bool:
        count = sum(len(each.split()) for each in secrets)
        return sockets.exists() and len(list(sockets.glob("wirecall-*"))) == count

    await eventually(all_listen)
    try:
        yield made
    finally:
        for each in made:
            await each.relay.aclose()
        for ledger in ledgers:
            await ledger.aclose()


async def test_relay_delivers_messages_once_to_those_with_its_secret(tmp_path: Path) -> None:
    async with stations(tmp_path, "one", "one", "two") as [one, other, stranger]:
        await one.relay.pass_on("/mcp", "caller", "token", b"{}")
        await one.relay.pass_on("/mcp", "caller", "token", b"long" * 10_000)
        await one.relay.pass_on("/elsewhere", "caller", "token", b"{}")
        ended = EndedSession("caller", "id", 1)
        await one.relay.announce_end("/mcp", ended, 60)
        await other.until(lambda: len(other.heard) >= 3)
        other.relay._looks.set()  # the same marks again
        await other.until(lambda: not other.relay._looks.is_set())
        assert sorted(map(repr, other.heard)) == sorted(
            map(
                repr,
                [("caller", "token", b"{}"), ("caller", "token", b"long" * 10_000), (ended,)],
            )
        )
        assert await other.relay.is_ended(ended) and not await stranger.relay.is_ended(ended)
        assert (one.heard, stranger.heard) == ([], [])


async def test_relay_without_sessions_does_not_remember_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message is remembered for as long as its mark may be seen again."""
    monkeypatch.setattr(others, "LOOK_EVERY", 0.02)
    monkeypatch.setattr(others, "OVERLAP", 0.02)
    async with stations(tmp_path, "one", "one") as [one, other]:
        other.is_busy = False
        await one.relay.announce_end("/mcp", EndedSession("caller", "id", 1), 60)
        await other.until(lambda: len(other.heard) == 1)
        await other.until(lambda: not other.relay._taken)


def received(station: Station, ended: EndedSession, change: tuple[str, str]) -> bool:
    return (ended,) in station.heard and change in station.changes


# Two processes at each moment of a replacement.
ROTATION = [("old", "old new"), ("old new", "new old"), ("new old", "new")]


@pytest.mark.parametrize("secrets", ROTATION)
async def test_relay_reaches_processes_of_the_next_step_while_a_secret_is_replaced(
    secrets: tuple[str, str], tmp_path: Path
) -> None:
    async with stations(tmp_path, *secrets) as both:
        for number, (one, other) in enumerate((both, both[::-1])):
            ended = EndedSession("caller", f"id-{number}", 1)
            change = "updated", f"test://{number}"
            await one.relay.announce_end("/mcp", ended, 60)
            one.hub.notify(*change)
            await other.until(partial(received, other, ended, change))
            assert await other.relay.is_ended(ended)


async def test_relay_sends_changes_that_wait_together_and_once(tmp_path: Path) -> None:
    async with stations(tmp_path, "one", "one") as [one, other]:
        long = "test://" + "x" * 10_000
        for _ in range(100):
            for number in range(20):
                one.hub.notify("updated", f"test://{number}")
        one.hub.notify("updated", long)
        one.hub.notify("tools")
        await other.until(
            lambda: ("tools", None) in other.changes and ("updated", long) in other.changes
        )
        assert len(other.changes) == len(set(other.changes)) == 22


async def test_relay_takes_no_message_that_is_not_sealed_with_its_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with stations(tmp_path, "one", "one") as [one, other]:
        ledger = await open_ledger(f"sqlite:{tmp_path}/ledger.db")
        [channel] = other.relay._channels
        ended = EndedSession("ann", "id", 1)
        forged = Sealer("two").seal("relay", "", {"by": "x", "at": "/mcp", "ended": ended}, 60)
        bus = ledger.join(channel, lambda _: None)
        assert bus is not None
        for message in (forged, "", "A.B", "{}", "x" * 7000):
            await bus.send(message)
        strange = Sealer("one").seal("relay", "", {"by": "x", "at": "/mcp", "ended": 3}, 60)
        await bus.send(strange)
        await ledger.mark(channel, Mark("ended.ann.id", forged.encode()), 60)
        await one.relay.pass_on("/mcp", "caller", "token", b"{}")
        await other.until(lambda: bool(other.heard))
        assert other.heard == [("caller", "token", b"{}")]
        assert not await other.relay.is_ended(ended)
        await bus.aclose()
        await ledger.aclose()
    assert {record.levelname for record in caplog.records} == {"WARNING"}


async def test_relay_looks_again_after_a_mark_that_is_not_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with stations(tmp_path, "one", "one") as [one, other]:
        ledger = await open_ledger(f"sqlite:{tmp_path}/ledger.db")
        [channel] = other.relay._channels
        await ledger.mark(channel, Mark("strange", b"\xff"), 60)
        bus = ledger.join(channel, lambda _: None)
        assert bus is not None
        await bus.send(LOOK)
        await other.until(lambda: "is not sealed" in caplog.text)
        # Too long for the bus: only a look finds it.
        await one.relay.pass_on("/mcp", "caller", "token", b"x" * 9000)
        await other.until(lambda: bool(other.heard))
        await bus.aclose()
        await ledger.aclose()


@pytest.mark.parametrize(
    "strange",
    [
        {"by": "x", "changes": None},
        {"by": "x", "changes": [["/mcp", "tools"]]},
        {"by": "x", "at": ["/mcp"]},
        {"by": "x", "name": ["list"]},
        {"by": "x", "at": "/mcp", "caller": 1, "session": 2, "message": 3},
        ["by"],
    ],
    ids=str,
)
async def test_relay_continues_after_any_message_of_another_version(
    strange: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with stations(tmp_path, "one", "one") as [one, other]:
        ledger = await open_ledger(f"sqlite:{tmp_path}/ledger.db")
        [channel] = other.relay._channels
        sealed = Sealer("one").seal("relay", "", strange, 60)
        bus = ledger.join(channel, lambda _: None)
        assert bus is not None
        await bus.send(sealed)
        await ledger.mark(channel, Mark("strange", sealed.encode()), 60)
        await bus.send(LOOK)
        await other.until(lambda: caplog.text.count("is not readable") >= 4)
        assert "do not arrive" not in caplog.text  # the bus was not left
        # Too long for the bus: only a look finds it.
        await one.relay.pass_on("/mcp", "caller", "token", b"x" * 9000)
        await other.until(lambda: bool(other.heard))
        await bus.aclose()
        await ledger.aclose()


async def test_relay_asks_for_the_marks_of_the_time_in_which_the_machine_slept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late answer is asked for again: a store counts back from the moment at which it answers."""
    slept = 0.0
    asked: list[float] = []
    monkeypatch.setattr(others, "clock", lambda: time.monotonic() + slept)
    read = SqliteLedger.marks

    async def marks(ledger: SqliteLedger, channel: str, within: float) -> Any:
        nonlocal slept
        asked.append(within)
        if len(asked) == 1:
            slept += 900
        return await read(ledger, channel, within)

    async with stations(tmp_path, "one") as [one]:
        await one.until(lambda: not one.relay._looks.is_set())
        asked.clear()
        monkeypatch.setattr(SqliteLedger, "marks", marks)
        slept += 300
        for least in (300, 1200):
            one.relay._looks.set()
            await one.until(lambda least=least: asked != [] and asked[-1] >= least)  # type: ignore[misc]
        one.relay._looks.set()
        await one.until(lambda: asked[-1] < 300)


async def test_relay_looks_again_after_a_look_that_failed_in_any_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError("the driver has a fault")

    async with stations(tmp_path, "one", "one") as [one, other]:
        with monkeypatch.context() as patch:
            patch.setattr(SqliteLedger, "marks", broken)
            other.relay._looks.set()
            await other.until(lambda: "were not looked for" in caplog.text)
        await one.relay.pass_on("/mcp", "caller", "token", b"x" * 9000)
        await other.until(lambda: bool(other.heard))


async def test_bus_of_a_file_survives_what_is_in_its_folder(tmp_path: Path) -> None:
    """A socket that a killed process left behind, one that never answers, and a long path."""
    import socket

    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    async with stations(folder, "one", "one") as [one, other]:
        here = os.getcwd()
        os.chdir(folder / "ledger.db-bus")  # the path of a socket is short
        try:
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(f"{one.relay._channels[0]}.1-dead")
            silent = socket.socket(socket.AF_UNIX)
            silent.bind(f"{one.relay._channels[0]}.2-silent")
            silent.listen(1)
        finally:
            os.chdir(here)
        await one.relay.pass_on("/mcp", "caller", "token", b"{}")
        await other.until(lambda: bool(other.heard))
        assert not (folder / "ledger.db-bus" / f"{one.relay._channels[0]}.1-dead").exists()
        assert stat.S_IMODE((folder / "ledger.db-bus").stat().st_mode) == 0o700
        silent.close()


async def test_bus_of_a_file_refuses_a_folder_that_is_not_ours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The others still find the marks."""
    (tmp_path / "elsewhere").mkdir(0o700)
    (tmp_path / "link.db-bus").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "open.db-bus").mkdir()
    (tmp_path / "open.db-bus").chmod(0o755)
    for name in ("link", "open"):
        ledger = await open_ledger(f"sqlite:{tmp_path}/{name}.db")
        heard: list[str | None] = []
        bus = ledger.join("c", heard.append)
        assert bus is not None

        async def is_refused(name: str = name) -> bool:
            return f"{name}.db-bus" in caplog.text

        await eventually(is_refused)
        assert heard == []
        with pytest.raises(LedgerDown):
            await bus.send("hello")
        await bus.aclose()
        await ledger.aclose()
    assert list((tmp_path / "elsewhere").iterdir()) == []


async def test_folder_of_a_bus_is_removed_with_its_last_process(tmp_path: Path) -> None:
    async with stations(tmp_path, "one", "one"):
        assert (tmp_path / "ledger.db-bus").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.db"]


@pytest.mark.parametrize("sets", [False, True])
async def test_relay_takes_a_setting_again_after_an_earlier_one_that_the_bus_has_lost(
    tmp_path: Path, sets: bool
) -> None:
    """Other messages, as a cancellation, are taken once."""
    async with stations(tmp_path, "one", "one") as [one, other]:
        buses = one.relay._buses
        one.relay._buses = []
        await one.relay.pass_on("/mcp", "caller", "token", b"1", sets=sets)
        one.relay._buses = buses
        await one.relay.pass_on("/mcp", "caller", "token", b"2", sets=sets)
        await other.until(lambda: bool(other.heard))
        if [data for *_, data in other.heard] == [b"2"]:  # else a busy machine has just looked
            other.relay._looks.set()
            expected = [b"2", b"1"]
            if sets:
                expected.append(b"2")
            await other.until(lambda: len(other.heard) >= len(expected))
            assert [data for *_, data in other.heard] == expected


async def test_relay_takes_its_own_setting_again_after_an_earlier_one_of_another(
    tmp_path: Path,
) -> None:
    async with stations(tmp_path, "one", "one") as [one, other]:
        one.relay._buses = []
        await one.relay.pass_on("/mcp", "caller", "token", b"1", sets=True)
        await other.relay.pass_on("/mcp", "caller", "token", b"2", sets=True)
        other.relay._looks.set()
        await other.until(lambda: [data for *_, data in other.heard] == [b"1", b"2"])


async def test_relay_recalls_what_a_session_has_set(tmp_path: Path) -> None:
    """The last of each name, in its order, and nothing that another program has written."""
    session = EndedSession("ann", "id", 1)
    stranger = EndedSession("bob", "id", 1)  # no two sessions have one id; this one claims it
    async with stations(tmp_path, "one", "one", "two") as [one, other, two]:
        for name, content in (("a", "1"), ("b", "2"), ("a", "3")):
            await one.relay.remember(session, name, content, 60)
        await one.relay.remember(stranger, "c", "4", 60)
        await two.relay.remember(session, "d", "5", 60)
        await one.relay.remember(session, "e", "6", 0.001)
        ledger = await open_ledger(f"sqlite:{tmp_path}/ledger.db")
        forged = Mark("f", Sealer("two").seal("relay", "", {"session": "ann.id"}, 60).encode())
        await ledger.mark(f"{one.relay._channels[0]}-id", forged, 60)
        await ledger.aclose()

        async def are_two() -> bool:
            return await other.relay.recall(session) == ["2", "3"]

        await eventually(are_two)
        assert await other.relay.recall(EndedSession("ann", "other", 1)) == []


# --- a bus that loses everything ------------------------------------------------------------------


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process reaches another, and each looks for marks all the time."""

    class Deaf:
        async def send(self, message: str) -> None:
            """It is lost."""

        async def aclose(self) -> None:
            """Nothing is open."""

    def join(_: SqliteLedger, __: str, hear: Receive) -> Bus:
        return Deaf()

    monkeypatch.setattr(SqliteLedger, "join", join)
    monkeypatch.setattr(others, "LOOK_EVERY", 0.02)


class Shop:
    """One process of a shop, as far as its clients can see."""

    def __init__(self, folder: Path) -> None:
        self.app = make_app(secret=SECRET, ledger=f"sqlite:{folder}/ledger.db")
        self.charged: list[int] = []
        self.asgi: HttpServer = self.app.asgi()
        self.waits = asyncio.Event()
        add_tools(self.app, self)


def add_tools(app: App, shop: Shop) -> None:
    @app.command
    async def charge(ctx: Context, amount: int) -> int:
        shop.waits.set()
        await ctx.progress(1)
        await asyncio.Event().wait()
        await ctx.commit_point()
        shop.charged.append(amount)
        return amount

    @app.query
    async def chatter(ctx: Context) -> str:
        for level in ("info", "error"):
            await ctx.log(level, "a line")
        return "said"

    @app.resource("test://wanted")
    def wanted() -> str:
        return "it"

    @app.tool
    async def ask(ctx: Context) -> str:
        shop.waits.set()
        answer = await ctx.elicit(
            "Who?", {"type": "object", "properties": {"name": {"type": "string"}}}
        )
        return f"hello {answer.content['name']}"


@asynccontextmanager
async def shops(folder: Path) -> AsyncIterator[tuple[Shop, Shop]]:
    a = Shop(folder)
    b = Shop(folder)
    await a.asgi.open()
    await b.asgi.open()
    try:
        yield a, b
    finally:
        await a.asgi.aclose()
        await b.asgi.aclose()


def at(shop: Shop, client: HttpClient) -> HttpClient:
    """The same session at another process."""
    other = HttpClient(shop.asgi, client.revision)
    other.session = client.session
    return other


async def opened(shop: Shop, revision: str = R4) -> HttpClient:
    client = HttpClient(shop.asgi, revision, {"elicitation": {}})
    await client.open()
    return client


async def status(client: HttpClient) -> int:
    return (await client.post(request("ping")).started()).status


def tool(name: str, id: int = 7, **arguments: Any) -> dict[str, Any]:
    params = {"name": name, "arguments": arguments, "_meta": {"progressToken": id}}
    return request("tools/call", params, id)


CANCELLED = notification("notifications/cancelled", {"requestId": 7})


@pytest.mark.usefixtures("deaf")
async def test_end_of_a_session_is_seen_although_no_message_arrives(tmp_path: Path) -> None:
    async with shops(tmp_path) as (a, b):
        client = await opened(a)
        stream = await client.listen().started()
        assert (await at(b, client).exchange("DELETE").started()).status == 204

        async def is_over() -> bool:
            return await status(client) == 404

        await eventually(is_over)
        assert await stream.message() is None
        await client.close()


@pytest.mark.usefixtures("deaf")
@pytest.mark.parametrize(("revision", "message"), [(R4, CANCELLED), (R2, [CANCELLED])])
async def test_cancellation_is_seen_although_no_message_arrives(
    tmp_path: Path, revision: str, message: Any
) -> None:
    """The call has not reached its commit point, so it never does."""
    async with shops(tmp_path) as (a, b):
        client = await opened(a, revision)
        called = client.post(tool("charge", amount=5))
        await asyncio.wait_for(a.waits.wait(), PATIENCE)
        assert (await at(b, client).post(message).started()).status == 202
        await called.started()
        while found := await called.message():
            assert found["method"] == "notifications/progress"
        assert a.charged == b.charged == []
        await client.close()


@pytest.mark.usefixtures("deaf")
@pytest.mark.parametrize("revision", [R4, "2025-06-18"])
async def test_answer_is_seen_although_no_message_arrives(tmp_path: Path, revision: str) -> None:
    async with shops(tmp_path) as (a, b):
        client = await opened(a, revision)
        called = await client.post(tool("ask")).started()
        question = await called.message()
        assert question is not None and question["method"] == "elicitation/create"
        answer = response(question["id"], {"action": "accept", "content": {"name": "Ann"}})
        assert (await at(b, client).post(answer).started()).status == 202
        final = await called.message()
        assert final is not None and final["result"]["content"][0]["text"] == "hello Ann"
        await client.close()


def subscribing(uri: str, prefix: str = "") -> dict[str, Any]:
    return request(f"resources/{prefix}subscribe", {"uri": uri})


async def test_process_that_starts_later_knows_what_a_session_has_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its subscriptions and its log level; also after it has forgotten the session."""
    unwanted = "test://unwanted"
    wanted = [f"test://{number}" for number in range(60)]  # more than an array may have
    async with shops(tmp_path) as (a, b):
        client = await opened(a)
        for uri in (unwanted, *wanted):
            assert "result" in await client.post(subscribing(uri)).json()
        assert "result" in await at(b, client).post(subscribing(unwanted, "un")).json()
        for level in ("info", "error"):
            setting = request("logging/setLevel", {"level": level})
            assert "result" in await at(b, client).post(setting).json()
        late = Shop(tmp_path)
        await late.asgi.open()
        monkeypatch.setattr(sessions, "MAX_SESSIONS", 1)
        there = at(late, client)
        for _ in range(2):
            called = await there.post(tool("chatter")).started()
            said = await called.message()
            assert said is not None and said["params"]["level"] == "error"
            stream = await there.listen().started()
            for uri in (unwanted, *wanted):
                late.app.updated(uri)
            for uri in wanted:
                news = await stream.message()
                assert news is not None and news["params"] == {"uri": uri}
            await stream.close()
            await (await opened(late)).close()  # so the first session is forgotten here
        await client.close()
        await late.asgi.aclose()


async def test_settings_that_cannot_be_read_are_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session is not served without them."""

    async def down(*_: Any) -> None:
        raise LedgerDown("away")

    async with shops(tmp_path) as (a, _):
        client = await opened(a)
        assert "result" in await client.post(subscribing("test://wanted")).json()
        late = Shop(tmp_path)
        await late.asgi.open()
        there = at(late, client)
        with monkeypatch.context() as patch:
            patch.setattr(SqliteLedger, "marks", down)
            assert [await status(there) for _ in range(2)] == [503, 503]
        stream = await there.listen().started()
        late.app.updated("test://wanted")
        news = await stream.message()
        assert news is not None and news["params"] == {"uri": "test://wanted"}
        await stream.close()
        await client.close()
        await late.asgi.aclose()


async def test_message_of_another_process_follows_the_settings_that_are_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session unsubscribes after they were read, and before they are taken."""
    monkeypatch.setattr(others, "OVERLAP", 0.0)  # so that the late process finds no older mark
    uri = "test://wanted"
    read = Relay.recall
    async with shops(tmp_path) as (a, _):
        client = await opened(a)
        assert "result" in await client.post(subscribing(uri)).json()
        late = Shop(tmp_path)
        await late.asgi.open()

        async def recall(relay: Relay, session: EndedSession) -> list[str]:
            found = await read(relay, session)
            undone = subscribing(uri, "un")
            place = relay._places["/mcp"]
            place.on_message(ANONYMOUS, client.session or "", msgspec.json.encode(undone))
            return found

        monkeypatch.setattr(Relay, "recall", recall)
        there = at(late, client)
        stream = await there.listen().started()
        late.app.updated(uri)
        late.app.changed("tools")
        news = await stream.message()
        assert news is not None and news["method"] == "notifications/tools/list_changed"
        await stream.close()
        await client.close()
        await late.asgi.aclose()


async def test_message_that_cannot_be_kept_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not 202: its client sends it again. A session that is new here is not served either."""

    async def down(*_: Any) -> None:
        raise LedgerDown("away")

    async with shops(tmp_path) as (a, b):
        client = await opened(a)
        late = await opened(a)
        there = at(b, client)
        assert await status(there) == 200
        with monkeypatch.context() as patch:
            patch.setattr(SqliteLedger, "mark", down)
            patch.setattr(SqliteLedger, "marked", down)
            for refused in (
                there.post(CANCELLED),
                there.post(response("1", {})),
                there.post(request("logging/setLevel", {"level": "info"})),
                there.exchange("DELETE"),
                at(b, late).post(request("ping")),
            ):
                answered = await refused.started()
                assert (answered.status, answered.header("retry-after")) == (503, "1")
            assert await status(there) == await status(client) == await status(late) == 200
        assert (await there.exchange("DELETE").started()).status == 204
        assert await status(at(b, late)) == 200
        for each in (client, late):
            await each.close()


async def test_stream_that_is_unknown_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with shops(tmp_path) as (a, _):
        client = await opened(a)
        called = await client.post(tool("ask")).started()
        first = await called.event()
        assert first is not None and first.id is not None
        for id, is_elsewhere in (("0" + first.id, True), (first.id.replace(".", "0."), False)):
            refused = await client.listen(id).started()
            assert refused.status == 400
            assert (b"began in another process" in await refused.read()) == is_elsewhere
        await client.post(CANCELLED).started()
        await client.close()


@pytest.mark.parametrize("ledger", ["memory:", "sqlite:"])
async def test_session_stays_ended_however_many_end_after_it(
    ledger: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_ENDED", 10)
    if ledger == "sqlite:":
        ledger = f"sqlite:{tmp_path}/ledger.db"
    app = make_app(
        authenticate=lambda headers: headers.get("authorization"), secret=SECRET, ledger=ledger
    )
    asgi = app.asgi()
    await asgi.open()

    async def session(caller: str) -> HttpClient:
        client = HttpClient(asgi, R4, headers={"authorization": caller})
        await client.open()
        return client

    bob = await session("bob")
    used = await session("ann")
    ended = [await session("ann") for _ in range(40)]
    for client in ended:
        assert (await client.exchange("DELETE").started()).status == 204
        await client.close()
    assert {await status(client) for client in ended} == {404}
    # One of another caller, and one in use here.
    assert (await status(bob), await status(used)) == (200, 200)
    assert await status(await session("ann")) == 200
    for client in (bob, used):
        await client.close()
    await asgi.aclose()


def test_list_of_ended_sessions_is_bounded() -> None:
    """A caller that ends many sessions revives none, and others keep theirs."""
    now = int(time.time() * 1000)
    ann = [EndedSession("ann", f"{number:03}", now + number) for number in range(100)]
    bob = EndedSession("bob", "of-bob", now - 1000)
    kept = within({each.name: each.opened for each in (bob, *ann)}, now - 5000, 20)
    assert len(kept) <= 20
    assert all(each.is_among(kept.get) for each in (bob, *ann))
    assert not EndedSession("ann", "newer", now + 1000).is_among(kept.get)
    assert not EndedSession("bob", "open", now - 2000).is_among(kept.get)
    many = {EndedSession(f"caller{number}", "id", now).name: now for number in range(100)}
    assert len(within(many, now - 5000, 20)) <= 20
    assert EndedSession("caller1", "id", now).is_among(within(many, now - 5000, 20).get)
    assert within(many, now + 1, 20) == {}

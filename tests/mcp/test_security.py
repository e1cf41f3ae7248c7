"""What an attacker, a careless client or a bad moment must not bring about."""

import asyncio
import gc
import json
import logging
import os
import socket
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.calls import make_app
from tests.faults import eventually
from tests.mcp.asgi import (
    BASIC,
    KEY,
    LEGACY,
    PATIENCE,
    PREFIX,
    R2,
    R4,
    R5,
    REVISIONS,
    Exchange,
    HttpClient,
    notification,
    over_http,
    over_stdio,
    request,
    response,
)
from wirecall import App, Context, Limits, RpcError, ToolAnnotations, UsageError
from wirecall.ledger.base import LedgerDown
from wirecall.mcp.headers import _is_same
from wirecall.mcp.server import changes, sessions, streams
from wirecall.mcp.server import workers as others
from wirecall.mcp.server.changes import Hub
from wirecall.mcp.server.sealed import BrokenSeal, Seals
from wirecall.mcp.server.sessions import Ended
from wirecall.mcp.server.workers import Workers
from wirecall.transports.request import Request as HttpRequest

every_revision = pytest.mark.parametrize("revision", REVISIONS)
READS = ToolAnnotations(readOnlyHint=True)
FORM = {"type": "object", "properties": {"name": {"type": "string"}}}


def who(headers: Mapping[str, str]) -> str | None:
    return headers.get("authorization")


# --- who may have an answer ------------------------------------------------------------------------------------------


class Bank:
    """A command that only members may call."""

    def __init__(self) -> None:
        self.members = {"ann", "bob"}
        self.paid: list[str] = []
        self.app = make_app(authenticate=who, middleware=[self.only_members])

        @self.app.command
        def pay(ctx: Context) -> str:
            self.paid.append(ctx.caller)
            return f"receipt of {ctx.caller}"

    async def only_members(self, ctx: Context, call_next: Any) -> Any:
        if ctx.caller not in self.members:
            raise RpcError(40300, "members only")
        return await call_next(ctx)


@every_revision
async def test_a_replay_is_authorized_again(revision: str) -> None:
    bank = Bank()
    async with over_http(bank.app, revision, headers={"authorization": "ann"}) as client:
        first = await client.tool("pay", meta={KEY: "k"})
        assert first["content"][0]["text"] == "receipt of ann"
        bank.members.remove("ann")
        refused = json.dumps(await client.call("tools/call", {"name": "pay"}, meta={KEY: "k"}))
        assert "members only" in refused and "receipt" not in refused
    assert bank.paid == ["ann"]


@every_revision
async def test_another_caller_with_the_same_key_runs_its_own_command(revision: str) -> None:
    bank = Bank()
    async with over_http(bank.app, revision, headers={"authorization": "ann"}) as ann:
        bob = HttpClient(ann.asgi, revision, headers={"authorization": "bob"})
        await bob.open()
        for client, name in ((ann, "ann"), (bob, "bob"), (ann, "ann")):
            assert (await client.tool("pay", meta={KEY: "k"}))["content"][0]["text"] == f"receipt of {name}"
        await bob.close()
    assert bank.paid == ["ann", "bob"]


async def test_the_same_on_rpc() -> None:
    bank = Bank()
    asgi = bank.app.asgi()
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "pay", "params": {"idempotency_key": "k"}}).encode()

    async def said(caller: str) -> str:
        exchange = Exchange(asgi, "POST", {**BASIC, "authorization": caller}, body, "/rpc")
        return (await exchange.read()).decode()

    assert "receipt of ann" in await said("ann")
    assert "receipt of bob" in await said("bob")
    bank.members.remove("ann")
    assert "members only" in await said("ann")
    assert bank.paid == ["ann", "bob"]
    await bank.app.aclose()


async def test_an_empty_name_is_nobody() -> None:
    """ANONYMOUS is "": who was asked for a name and gave none must not be taken for it."""
    bank = Bank()
    for headers in (BASIC, {**BASIC, "authorization": ""}, {**BASIC, "authorization": " \t"}):
        answered = await Exchange(bank.app.asgi(), "POST", headers, b"{}").started()
        assert answered.status == 401


async def test_a_header_that_is_doubled_is_not_taken_for_its_first_value() -> None:
    """Whatever header `authenticate` looks at: a proxy may have judged the other value."""
    app = make_app(authenticate=lambda headers: {"s3cret": "ann"}.get(headers["x-api-key"]))
    once = [*BASIC.items(), ("x-api-key", "s3cret")]
    message = json.dumps(request("ping")).encode()
    assert (await Exchange(app.asgi(), "POST", once, message).started()).status == 200
    twice = [*once, ("X-Api-Key", "other")]
    assert (await Exchange(app.asgi(), "POST", twice, message).started()).status == 401


async def test_authenticate_may_not_take_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    async def stuck(headers: Mapping[str, str]) -> str:
        await asyncio.Event().wait()
        return ""

    app = make_app(authenticate=stuck, limits=Limits(body_time=1))
    answered = await Exchange(app.asgi(), "POST", BASIC, b"{}").started()
    assert (answered.status, answered.header("retry-after")) == (503, "1")
    assert [record.levelname for record in caplog.records] == ["ERROR"]


# --- sealed texts ----------------------------------------------------------------------------------------------------


def test_a_sealed_text_is_for_one_use_one_caller_and_some_time() -> None:
    now = [1000.0]
    seals = Seals("secret", clock=lambda: now[0])
    sealed = seals.seal("session", "ann", {"a": 1}, 10)
    assert seals.open("session", "ann", sealed)[1] == b'{"a":1}'
    head, _, tail = sealed.partition(".")
    forged = [
        *("", ".", head, f"{head}.", f".{tail}", f"{sealed}.", f"{sealed}=", f"{head}={tail}", sealed.upper()),
        *(f"{head}.{tail}A", f"{head}A.{tail}", f" {sealed}", f"{sealed}\n", f"{head}\n.{tail}", "ü.ü", "\ud800.A", "\0"),
        *("A" * (1 << 20), f"{head}.{'A' * (1 << 20)}", f"{'A' * (1 << 20)}.{tail}", "." * 100_000),
        Seals("another").seal("session", "ann", {"a": 1}, 10),
        tail + "." + head,
    ]
    attempts = [("session", "ann", text) for text in forged]
    attempts += [("state", "ann", sealed), ("relay", "", sealed), ("session", "bob", sealed), ("session", "", sealed)]
    for use, caller, text in attempts:
        with pytest.raises(BrokenSeal):
            seals.open(use, caller, text)
    now[0] += 11
    with pytest.raises(BrokenSeal):
        seals.open("session", "ann", sealed)


async def test_a_state_is_no_session() -> None:
    app = make_app()

    @app.tool
    async def ask(ctx: Context) -> str:
        return str(await ctx.elicit("Who?", FORM))

    async with over_http(app, R5, capabilities={"elicitation": {}}) as client:
        state = (await client.tool("ask"))["requestState"]
        for session in (state, "ü" * 100, "A" * 20_000):
            answered = await client.post(request("ping"), {**BASIC, "mcp-session-id": session}).started()
            assert answered.status == 404


# --- what is kept is bounded, and one client's doings do not touch another's -------------------------------------------


@asynccontextmanager
async def asking(app: App, capabilities: Any = None) -> AsyncIterator[tuple[HttpClient, Exchange, Any]]:
    """A client of 2025-11-25 with a call that waits for its answer."""

    @app.tool
    async def ask(ctx: Context) -> str:
        answer = await ctx.elicit("Who?", FORM)
        return f"hello {answer.content['name']}"

    async with over_http(app, R4, capabilities=capabilities or {"elicitation": {}}) as client:
        waiting = client.post(client.message("tools/call", {"name": "ask"}, 7))
        yield client, waiting, await waiting.message()


async def test_many_sessions_do_not_cut_off_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 5)
    async with asking(make_app()) as (client, waiting, question):
        listening = await client.listen().started()
        await listening._part()
        for _ in range(20):
            other = HttpClient(client.asgi, R4)
            await other.open()
            await other.close()
        taken = await client.post(response(question["id"], {"action": "accept", "content": {"name": "Ann"}})).started()
        assert taken.status == 202
        assert (await waiting.message())["result"]["content"][0]["text"] == "hello Ann"
        endpoint = client.asgi.routes["/mcp"]  # type: ignore[attr-defined]
        assert len(endpoint.sessions) == 5


async def test_a_stream_that_cannot_be_opened_ends_no_other() -> None:
    app = make_app(limits=Limits(streams=1))
    app.query(name="look")(lambda: "seen")
    async with over_http(app, R4) as client:
        first = await client.listen().started()
        assert (await client.listen().started()).status == 503
        app.changed("tools")
        assert (await first.message())["method"] == "notifications/tools/list_changed"


async def test_the_end_of_a_session_is_the_end_of_its_questions() -> None:
    async with asking(make_app()) as (client, waiting, _):
        assert (await client.exchange("DELETE").started()).status == 204
        assert (await waiting.message())["result"]["isError"] is True


async def test_a_question_that_is_never_answered_ends() -> None:
    async with asking(make_app(limits=Limits(answer_time=1))) as (_, waiting, _question):
        assert (await waiting.message())["result"]["isError"] is True


@asynccontextmanager
async def traced() -> AsyncIterator[None]:
    """Count the memory that Python takes meanwhile."""
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


async def test_what_finished_streams_hold_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_KEPT", 50_000)
    app = make_app()

    @app.tool(annotations=READS)
    async def tell(ctx: Context) -> str:
        await ctx.log("error", "x" * 9000)
        return "told"

    async with over_http(app, R4) as client:
        ids = []
        for number in range(10):
            exchange = client.post(client.message("tools/call", {"name": "tell"}, number))
            ids.append((await exchange.events())[0].id)
        endpoint = client.asgi.routes["/mcp"]  # type: ignore[attr-defined]
        assert endpoint.shelf.size <= 50_000
        assert (await client.listen(ids[0]).started()).status == 400
        again = await client.listen(ids[-1]).started()
        assert [message.get("id") for message in await again.messages()] == [None, 9]


@pytest.mark.parametrize("revision", LEGACY)
async def test_a_client_that_does_not_read_holds_bytes_and_not_events(revision: str) -> None:
    """Limits.unread_bytes: however large an event is, the call waits once its client is that far behind."""
    app, told = make_app(limits=Limits(unread_bytes=50_000)), list[int]()

    @app.tool(annotations=READS)
    async def tell(ctx: Context) -> str:
        for number in range(30):
            told.append(number)
            await ctx.log("error", "x" * 9000)
        return "told"

    async with over_http(app, revision) as client:
        exchange = client.post(client.message("tools/call", {"name": "tell"}, 7))
        exchange.reads.clear()
        await exchange.started()
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(told) == 6  # five events are within the limit, the sixth is beyond it
        exchange.reads.set()
        answers = [message for message in await exchange.messages() if "id" in message]
    assert (answers[0]["result"]["content"][0]["text"], len(told)) == ("told", 30)


@pytest.mark.parametrize("revision", LEGACY)
async def test_small_events_wait_for_their_reader_too(revision: str) -> None:
    """An event costs more than its text, and none is forgotten before its reader was given it."""
    app = make_app()

    @app.tool(annotations=READS)
    async def tell(ctx: Context) -> str:
        for number in range(5000):
            await ctx.log("error", number)
        return "told"

    async with over_http(app, revision) as client:
        exchange = client.post(client.message("tools/call", {"name": "tell"}, 7))
        exchange.reads.clear()
        await exchange.started()
        for _ in range(100):
            await asyncio.sleep(0)
        exchange.reads.set()
        messages = await exchange.messages()
    assert [message["params"]["data"] for message in messages if "params" in message] == list(range(5000))


async def test_calls_without_a_reader_hold_no_more_than_all_streams_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_KEPT", 1_000_000)
    app, left, gate, told = make_app(), asyncio.Semaphore(0), asyncio.Event(), asyncio.Semaphore(0)

    @app.tool(annotations=READS)
    async def tell(ctx: Context) -> str:
        await ctx.log("error", "first")
        await left.acquire()
        for _ in range(20):
            await ctx.log("error", "x" * 90_000)
            await asyncio.sleep(0)
        told.release()
        await gate.wait()
        return "told"

    async with over_http(app, R4) as client, traced():
        before = tracemalloc.get_traced_memory()[0]
        for number in range(5):
            exchange = client.post(client.message("tools/call", {"name": "tell"}, number))
            await exchange.event()
            exchange.leave()
            left.release()
            async with asyncio.timeout(PATIENCE):
                await told.acquire()
        held = tracemalloc.get_traced_memory()[0] - before
        gate.set()
    assert held < 1_000_000 + 5 * 100_000 + 500_000  # the newest event of each call stays, and some is not about events


async def test_a_call_that_goes_on_without_its_caller_keeps_no_http_request() -> None:
    """Neither while it runs, nor when its events are kept for a reader that comes back."""
    app, left, gate = make_app(), asyncio.Event(), asyncio.Event()

    @app.tool(annotations=READS)
    async def tell(ctx: Context) -> str:
        await ctx.log("error", "first")
        await left.wait()
        await ctx.log("error", "second")
        await gate.wait()
        return "told"

    def requests() -> int:
        gc.collect()
        return sum(type(each) is HttpRequest for each in gc.get_objects())

    before = requests()
    async with over_http(app, R4) as client:
        exchange = client.post(client.message("tools/call", {"name": "tell"}, 7))
        await exchange.event()
        first = await exchange.event()
        exchange.leave()
        left.set()
        async with asyncio.timeout(PATIENCE):
            await exchange.task
        assert requests() == before
        gate.set()
        rest = await client.listen(first.id if first else None).messages()
        assert [message.get("id") for message in rest] == [None, 7]
        assert requests() == before


@pytest.mark.parametrize("revision", REVISIONS)
async def test_a_progress_token_is_bounded(revision: str) -> None:
    app = make_app()

    @app.tool(annotations=READS)
    async def tell(ctx: Context) -> str:
        await ctx.progress(1)
        return "told"

    async with over_http(app, revision) as client:
        assert (await client.tool("tell", meta={"progressToken": "t" * 1024}))["content"][0]["text"] == "told"
        error = await client.tool_error("tell", meta={"progressToken": "t" * 1025})
        assert error["code"] == -32602
        assert "params._meta.progressToken: expected str of length <= 1024" in error["data"]["reason"]
        long = await client.post({**client.message("tools/call", {"name": "tell"}), "id": "i" * 4301}).json()
        assert "id: longer than 4300 characters" in long["error"]["data"]["reason"]


@pytest.mark.parametrize("kind", ["callers", "sessions"])
async def test_one_caller_leaves_streams_to_the_others(kind: str) -> None:
    """Limits.streams_per_caller counts the streams of a caller, and those of a session if callers have no names."""
    more: Any = {"authenticate": lambda headers: headers.get("authorization")} if kind == "callers" else {}
    app = make_app(limits=Limits(streams=3, streams_per_caller=2), **more)
    told = asyncio.Event()

    @app.tool(annotations=READS)
    async def tell(ctx: Context) -> str:
        await ctx.log("error", "told")
        await told.wait()
        return "told"

    async with (
        over_http(app, R4, headers={"authorization": "ann"}) as ann,
        over_http(app, R4, headers={"authorization": "bob"}) as bob,
    ):
        bob.asgi = ann.asgi  # one server, two clients
        await bob.open()
        held = [ann.post(ann.message("tools/call", {"name": "tell"}, number)) for number in range(2)]
        for exchange in held:
            await exchange.event()
        assert (await ann.listen().started()).status == 503
        assert (await bob.listen().started()).status == 200
        told.set()
        for exchange in held:
            await exchange.messages()
        assert (await ann.listen().started()).status == 200


async def test_a_stream_forgets_what_was_read_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_BYTES", 50_000)
    app = make_app()

    @app.tool(annotations=READS)
    async def tell(ctx: Context) -> str:
        for _ in range(20):
            await ctx.log("error", "x" * 9000)
        return "told"

    async with over_http(app, R4) as client:
        exchange = client.post(client.message("tools/call", {"name": "tell"}, 7))
        events = await exchange.events()
        assert len([event for event in events if event.data]) == 21
        name = (events[0].id or "").partition(".")[0]
        for last in (events[1].id, f"{name}.{'9' * 5000}", f"{name}.999", f"{name}.-1", f"{name}.", name):
            assert (await client.listen(last).started()).status == 400
        rest = await client.listen(events[-2].id).started()
        assert [message["id"] for message in await rest.messages()] == [7]


@pytest.mark.parametrize("revision", LEGACY)
async def test_subscriptions_are_bounded(monkeypatch: pytest.MonkeyPatch, revision: str) -> None:
    monkeypatch.setattr(changes, "MAX_SUBSCRIPTIONS", 3)
    monkeypatch.setattr(changes, "MAX_SUBSCRIBED", 100)
    app = make_app()

    @app.resource("test://{name}")
    def thing(name: str) -> str:
        return name

    async with over_http(app, revision) as client:
        assert (await client.error("resources/subscribe", {"uri": f"test://{'x' * 100}"}))["code"] == -32600
        for name in ("a", "b", "c", "c"):
            assert await client.result("resources/subscribe", {"uri": f"test://{name}"}) == {}
        assert (await client.error("resources/subscribe", {"uri": "test://d"}))["code"] == -32600


async def test_an_array_is_answered_within_the_limit() -> None:
    """Limits.bytes_out is about the whole reply; who does not fit is told so."""
    app = make_app(limits=Limits(bytes_out=10_000))

    @app.query
    def much() -> str:
        return "x" * 4000

    calls = [request("tools/call", {"name": "much"}, number) for number in range(5)]
    async with over_http(app, R2) as client, over_stdio(app, R2) as pipe:
        pipe.write(calls)
        for answers in (await client.post(calls).json(), await pipe.line()):
            assert [answer["id"] for answer in answers] == [0, 1, 2, 3, 4]
            assert ["result" in answer for answer in answers] == [True, True, False, False, False]
            assert answers[4]["error"]["data"]["limit"] == "bytes_out"


@pytest.mark.parametrize("way", ["http", "stdio"])
async def test_an_array_keeps_no_more_than_one_reply_may_hold(way: str) -> None:
    """J11: an answer that does not fit is dropped as soon as it is there. A command that ran says so, and has its record."""
    app, effects = make_app(limits=Limits(bytes_out=1_000_000)), list[int]()

    @app.command
    def much() -> str:
        effects.append(1)
        return "x" * 900_000

    calls = [request("tools/call", {"name": "much", "_meta": {KEY: f"k-{number}"}}, number) for number in range(50)]
    async with over_http(app, R2) as client, over_stdio(app, R2) as pipe:
        tracemalloc.start()
        try:
            if way == "stdio":
                pipe.write(calls)
            answers = await (client.post(calls).json() if way == "http" else pipe.line())
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert ["result" in answer for answer in answers] == [True, *[False] * 49]
        assert {answer["error"]["data"]["ran"] for answer in answers[1:]} == {"yes"}
        assert peak < 25_000_000
        again = await client.post({**calls[49], "id": 99}).json()
        assert again["error"]["code"] == 41010 and len(effects) == 50


def test_a_number_in_a_header_is_compared_exactly() -> None:
    big = 2**53
    assert _is_same(str(big + 1), big + 1) and not _is_same(str(big + 1), big) and not _is_same(str(big), big + 1)
    assert _is_same("1.50", 1.5) and _is_same("1", 1.0) and not _is_same("9" * 10_000, 9)


# --- workers ---------------------------------------------------------------------------------------------------------


def worker(folder: Path | None, secret: str, heard: list[Any]) -> Workers:
    def take(*told: Any) -> None:
        heard.append(told)

    return Workers(Hub(), Seals(secret), shared=True, on_end=take, on_message=take, folder=folder)


async def test_a_folder_that_is_not_ours_is_not_used(tmp_path: Path) -> None:
    open_to_all, elsewhere, link, file = (tmp_path / name for name in ("open", "elsewhere", "link", "file"))
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    elsewhere.mkdir(0o700)
    link.symlink_to(elsewhere)
    file.touch()
    for folder in (open_to_all, link, file):
        with pytest.raises((UsageError, FileExistsError)):
            await worker(folder, "s", []).open()
    assert list(elsewhere.iterdir()) == []


@asynccontextmanager
async def workers(folder: Path, *secrets: str) -> AsyncIterator[list[tuple[Workers, list[Any]]]]:
    heard: list[list[Any]] = [[] for _ in secrets]
    made = [worker(folder, secret, told) for secret, told in zip(secrets, heard, strict=True)]
    for each in made:
        await each.open()
    try:
        yield list(zip(made, heard, strict=True))
    finally:
        for each in made:
            await each.aclose()


async def test_workers_hear_each_other_whatever_lies_in_their_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A socket that a killed worker left behind, one that never answers, garbage, and what another secret has sealed."""
    folder = tmp_path / "relay"
    async with workers(folder, "one", "one", "two") as [(one, _), (_, heard), (stranger, strange)]:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(folder / f"1-dead{others.SOCKET}"))
        with socket.socket(socket.AF_UNIX) as silent:
            silent.bind(str(folder / f"2-silent{others.SOCKET}"))
            silent.listen(1)
            victim = next(path for path in folder.glob(f"{os.getpid()}-*{others.SOCKET}") if path != one._path)
            for garbage in (b"", b"\xff\xfe", b"A.B", b"{}", b"x" * 100_000):
                _, writer = await asyncio.open_unix_connection(victim)
                writer.write(garbage)
                writer.close()
            stranger.pass_on("caller", "strange", b"{}")
            one.pass_on("caller", "token", b"{}")

            async def told() -> bool:
                return bool(heard) and not (folder / f"1-dead{others.SOCKET}").exists()

            await eventually(told)
        assert (heard, strange) == ([("caller", "token", b"{}")], [])
    assert all(record.levelname == "WARNING" for record in caplog.records)


async def test_what_waits_for_other_workers_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others, "MAX_WAITING", 100_000)
    monkeypatch.setattr(others, "PATIENCE", 0.2)
    async with workers(tmp_path / "relay", "one") as [(one, _)]:
        with socket.socket(socket.AF_UNIX) as stuck:
            stuck.bind(str(tmp_path / "relay" / f"1-stuck{others.SOCKET}"))
            stuck.listen(1)
            for _ in range(100):
                one.pass_on("caller", "token", b"x" * 10_000)
            assert len(one._tasks) < 10
            await asyncio.wait(one._tasks, timeout=PATIENCE)
        assert one._waiting == 0


async def test_marks_are_bounded_and_what_has_ended_stays_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that opens and ends sessions all day fills no disk, and revives neither its sessions nor those of others."""
    monkeypatch.setattr(others, "MAX_MARKS", 20)
    monkeypatch.setattr(others, "MARKS_ADDED", 10)
    now = int(time.time() * 1000)
    ended = [Ended("bob", "of-bob", now - 1000), *(Ended("ann", f"{number:03}", now + number) for number in range(100))]
    async with workers(tmp_path / "relay", "one", "one") as [(one, _), (other, _)]:
        for each in ended:
            one.tell_ended(each)
        assert len(list((tmp_path / "relay" / others.MARKS).iterdir())) <= 30
        assert all(other.know_ended(each) for each in ended)
        assert other.know_ended(Ended("ann", "open", now + 50))  # the price is paid by the caller that ends so many
        assert not other.know_ended(Ended("ann", "newer", now + 1000))
        assert not other.know_ended(Ended("bob", "open", now - 2000))


async def test_marks_of_many_callers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others, "MAX_MARKS", 20)
    monkeypatch.setattr(others, "MARKS_ADDED", 10)
    now = int(time.time() * 1000)
    ended = [Ended(f"caller{number}", "id", now + number) for number in range(100)]
    async with workers(tmp_path / "relay", "one") as [(one, _)]:
        for each in ended:
            one.tell_ended(each)
        assert len(list((tmp_path / "relay" / others.MARKS).iterdir())) <= 30
        assert all(one.know_ended(each) for each in ended)
        assert not one.know_ended(Ended("caller1", "id", now + 1000))


@pytest.mark.parametrize("shared", [False, True])
async def test_a_session_stays_ended_however_many_end_after_it(
    shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_ENDED", 10)
    monkeypatch.setattr(others, "MAX_MARKS", 10)
    monkeypatch.setattr(others, "MARKS_ADDED", 5)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    more: Any = {"secret": "s3cret"} if shared else {}
    app = make_app(authenticate=lambda headers: headers.get("authorization"), **more)
    asgi = app.asgi()
    await asgi.open()

    async def session(caller: str) -> HttpClient:
        client = HttpClient(asgi, R4, headers={"authorization": caller})
        await client.open()
        return client

    async def status(client: HttpClient) -> int:
        return (await client.post(request("ping")).started()).status

    bob, used = await session("bob"), await session("ann")
    ended = [await session("ann") for _ in range(40)]
    for client in ended:
        assert (await client.exchange("DELETE").started()).status == 204
        await client.close()
    assert {await status(client) for client in ended} == {404}
    assert (await status(bob), await status(used)) == (200, 200)  # of another caller; and in use here
    assert await status(await session("ann")) == 200
    for client in (bob, used):
        await client.close()
    await asgi.aclose()


async def test_folders_of_workers_that_were_killed_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without a living worker and without a mark that still matters; no other folder of that name is touched."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = """
import asyncio, os, signal, sys, time
from wirecall.mcp.server.changes import Hub
from wirecall.mcp.server.sealed import Seals
from wirecall.mcp.server.sessions import Ended
from wirecall.mcp.server.workers import Workers

async def main():
    one = Workers(Hub(), Seals(sys.argv[1]), shared=True, on_end=print, on_message=print)
    await one.open()
    if sys.argv[2] != "none":
        one.tell_ended(Ended("ann", "id", int((time.time() - float(sys.argv[2])) * 1000)))
    print(one._folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    left = {}
    for name, mark in (("young", "60"), ("old", str(3 * 86_400)), ("killed", "none")):
        killed = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code, name, mark),
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdout=asyncio.subprocess.PIPE,
        )
        told, _ = await killed.communicate()
        left[name] = Path(told.decode().strip())
    assert left["killed"].exists()  # the last that was killed
    strange = tmp_path / "wirecall-1-strange"
    strange.mkdir()
    alive, fresh = worker(None, "alive", []), worker(None, "fresh", [])
    await alive.open()
    await fresh.open()
    assert [name for name, path in left.items() if path.exists()] == ["young"]
    assert strange.exists() and alive._folder.exists()
    await alive.aclose()
    await fresh.aclose()
    assert sorted(tmp_path.iterdir()) == sorted([strange, left["young"]])


async def test_a_session_ends_although_no_mark_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    app = make_app(secret="s3cret")
    asgi = app.asgi()
    await asgi.open()
    client = HttpClient(asgi, R4)
    await client.open()
    (folder,) = tmp_path.iterdir()
    (folder / others.MARKS).rmdir()  # somebody tidies up
    assert (await client.exchange("DELETE").started()).status == 204
    assert (await client.post(request("ping")).started()).status == 404
    await client.close()
    await asgi.aclose()


# --- whoever leaves, whenever ----------------------------------------------------------------------------------------


class Till:
    """Commands that pass their commit point on entry, in the middle, and in a thread; and a query that streams."""

    def __init__(self) -> None:
        self.paid: list[str] = []
        self.app = app = make_app()

        @app.command
        async def at_once(ctx: Context) -> str:
            await asyncio.sleep(0)
            await ctx.progress(1)
            await asyncio.sleep(0)
            self.paid.append("at once")
            await asyncio.sleep(0)
            return "paid"

        @app.command
        async def later(ctx: Context) -> str:
            await ctx.log("error", "thinking")
            await asyncio.sleep(0)
            await ctx.commit_point()
            await asyncio.sleep(0)
            self.paid.append("later")
            await ctx.progress(1)
            return "paid"

        @app.command(blocking=True)
        def threaded() -> str:
            self.paid.append("threaded")
            return "paid"


async def none_left() -> bool:
    return len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("way", ["leave", "deaf", "cancel"])
@pytest.mark.parametrize("tool", ["at_once", "later", "threaded"])
@every_revision
async def test_whoever_leaves_at_any_moment_finds_one_effect_and_leaves_nothing_behind(
    revision: str, tool: str, way: str
) -> None:
    """45 combinations, each at eight moments: the request ends, a retry gets the one outcome, no task is left."""
    for turns in range(0, 24, 3):
        till = Till()
        meta = {KEY: "k", "progressToken": 1, f"{PREFIX}logLevel": "debug"}
        async with over_http(till.app, revision) as client:
            exchange = client.post(client.message("tools/call", {"name": tool}, 7, meta))
            if way == "deaf":
                exchange.reads.clear()
            for _ in range(turns):
                await asyncio.sleep(0)
            if way == "cancel" and revision != R5:
                await client.notify("notifications/cancelled", {"requestId": 7})
            else:
                exchange.leave()
            exchange.reads.set()  # servers let those go on who write to nobody
            again = await client.tool(tool, meta={KEY: "k"})
            done, _ = await asyncio.wait([exchange.task], timeout=PATIENCE)
            assert done and not exchange.task.cancelled() and exchange.task.exception() is None
        assert again["content"][0]["text"] == "paid"
        assert len(till.paid) == 1, (turns, till.paid)
        await eventually(none_left)


async def test_nothing_runs_on_when_the_server_is_closed() -> None:
    """Calls of older revisions outlive their clients, but not the server."""
    app, cancelled = make_app(), asyncio.Event()

    @app.tool(annotations=READS)
    async def wait(ctx: Context) -> None:
        await ctx.log("error", "begun")
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    asgi = app.asgi()
    client = HttpClient(asgi, R4)
    await client.open()
    exchange = client.post(client.message("tools/call", {"name": "wait"}, 7))
    await exchange.event()
    exchange.leave()
    asgi.stop(0.4)
    await asgi.aclose()
    assert cancelled.is_set()
    await client.close()
    await eventually(none_left)


# --- what is told, and what is not -----------------------------------------------------------------------------------


@every_revision
async def test_no_text_of_an_exception_is_on_the_wire(revision: str, caplog: pytest.LogCaptureFixture) -> None:
    app = make_app()

    def broken(*_: Any) -> Any:
        raise ValueError("hunter2")

    @app.tool
    def tool(password: str = "") -> str:
        return str(broken())

    @app.prompt
    def prompt() -> str:
        return str(broken())

    @app.resource("test://{name}")
    def resource(name: str) -> str:
        return str(broken())

    @app.completion("test://{name}", "name")
    def complete(value: str) -> list[str]:
        return [str(broken())]

    calls: list[tuple[str, Any]] = [
        ("tools/call", {"name": "tool", "arguments": {"password": "correct horse"}}),
        ("prompts/get", {"name": "prompt"}),
        ("resources/read", {"uri": "test://x"}),
        (
            "completion/complete",
            {"ref": {"type": "ref/resource", "uri": "test://{name}"}, "argument": {"name": "name", "value": ""}},
        ),
    ]
    async with over_http(app, revision) as client, over_stdio(app, revision) as pipe:
        for each in (client, pipe):
            for method, params in calls:
                told = json.dumps(await each.call(method, params))
                assert "hunter2" not in told and "Traceback" not in told and "ValueError" not in told
    assert "correct horse" not in caplog.text  # params are never logged


async def test_who_asks_whether_we_are_ready_is_not_told_where_the_ledger_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app()

    async def away() -> Any:
        raise LedgerDown("PostgreSQL at db.internal refused shop")

    monkeypatch.setattr(app, "ledger", away)
    probe = Exchange(app.asgi(), "GET", BASIC, path="/readyz")
    told = await probe.read()
    assert probe.status == 503 and b"db.internal" not in told
    assert "db.internal" in caplog.text


async def test_tokens_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The caller's name is, as in the ledger; what proves it is not."""
    caplog.set_level(logging.DEBUG)
    names = {"Bearer t0ken": "ada"}
    app = make_app(authenticate=lambda headers: names.get(headers.get("authorization", "")), secret="top s3cret")

    @app.command
    def pay() -> None:
        raise ValueError

    async with over_http(app, R4, headers={"authorization": "Bearer t0ken"}) as client:
        await client.tool("pay", meta={KEY: "k"})
        await client.post(notification("notifications/cancelled", {"requestId": 7})).started()
        assert client.session is not None and client.session not in caplog.text
    assert "pay failed" in caplog.text and "caller ada" in caplog.text
    assert "t0ken" not in caplog.text and "s3cret" not in caplog.text

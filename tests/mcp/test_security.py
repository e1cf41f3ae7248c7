"""Harm that an attacker, a careless client or bad timing must not cause."""

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

import pytest

from tests import rsgi
from tests.calls import make_app
from tests.faults import eventually
from tests.mcp.asgi import (
    BASIC,
    KEY,
    PATIENCE,
    PREFIX,
    R4,
    R5,
    Exchange,
    HttpClient,
    notification,
    over_http,
    over_stdio,
    request,
)
from tests.mcp.lab import FORM, READS, every_revision, who
from wirecall import Context, Limits, RpcError
from wirecall.ledger.base import LedgerDown
from wirecall.mcp.server.sessions import Sealer

# --- owners of an answer --------------------------------------------------------------------------


@pytest.fixture(autouse=True, params=rsgi.INTERFACES)
def interface(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here runs over both interfaces."""
    monkeypatch.setattr(rsgi, "interface", request.param)


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
async def test_replay_is_authorized_again(revision: str) -> None:
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
            assert (await client.tool("pay", meta={KEY: "k"}))["content"][0][
                "text"
            ] == f"receipt of {name}"
        await bob.close()
    assert bank.paid == ["ann", "bob"]


async def test_replay_on_rpc_is_authorized_again() -> None:
    bank = Bank()
    asgi = bank.app.asgi()
    body = json.dumps(
        {"jsonrpc": "2.0", "id": 1, "method": "pay", "params": {"idempotency_key": "k"}}
    ).encode()

    async def said(caller: str) -> str:
        exchange = Exchange(asgi, "POST", {**BASIC, "authorization": caller}, body, "/rpc")
        return (await exchange.read()).decode()

    assert "receipt of ann" in await said("ann")
    assert "receipt of bob" in await said("bob")
    bank.members.remove("ann")
    assert "members only" in await said("ann")
    assert bank.paid == ["ann", "bob"]
    await bank.app.aclose()


async def test_empty_caller_name_is_refused() -> None:
    """ANONYMOUS is "": a caller without valid credentials must not become the anonymous caller."""
    bank = Bank()
    for headers in (BASIC, {**BASIC, "authorization": ""}, {**BASIC, "authorization": " \t"}):
        answered = await Exchange(bank.app.asgi(), "POST", headers, b"{}").started()
        assert answered.status == 401


async def test_header_that_is_doubled_is_not_taken_for_its_first_value() -> None:
    """Whatever header `authenticate` looks at: a proxy may have checked the other value."""
    app = make_app(authenticate=lambda headers: {"s3cret": "ann"}.get(headers["x-api-key"]))
    once = [*BASIC.items(), ("x-api-key", "s3cret")]
    message = json.dumps(request("ping")).encode()
    assert (await Exchange(app.asgi(), "POST", once, message).started()).status == 200
    twice = [*once, ("X-Api-Key", "other")]
    assert (await Exchange(app.asgi(), "POST", twice, message).started()).status == 401


async def test_authenticate_has_a_time_limit(caplog: pytest.LogCaptureFixture) -> None:
    async def stuck(headers: Mapping[str, str]) -> str:
        await asyncio.Event().wait()
        return ""

    app = make_app(authenticate=stuck, limits=Limits(body_time=1))
    answered = await Exchange(app.asgi(), "POST", BASIC, b"{}").started()
    assert (answered.status, answered.header("retry-after")) == (503, "1")
    assert [record.levelname for record in caplog.records] == ["ERROR"]


# --- sealed strings -------------------------------------------------------------------------------


def test_sealed_string_is_for_one_use_one_caller_and_a_limited_time() -> None:
    now = [1000.0]
    seals = Sealer("secret", clock=lambda: now[0])
    sealed = seals.seal("session", "ann", {"a": 1}, 10)
    opened = seals.open("session", "ann", sealed)
    assert opened is not None and bytes(opened.value) == b'{"a":1}'
    head, _, tail = sealed.partition(".")
    forged = [
        *(
            "",
            ".",
            head,
            f"{head}.",
            f".{tail}",
            f"{sealed}.",
            f"{sealed}=",
            f"{head}={tail}",
            sealed.upper(),
        ),
        *(
            f"{head}.{tail}A",
            f"{head}A.{tail}",
            f" {sealed}",
            f"{sealed}\n",
            f"{head}\n.{tail}",
            "ü.ü",
            "\ud800.A",
            "\0",
        ),
        *("A" * (1 << 20), f"{head}.{'A' * (1 << 20)}", f"{'A' * (1 << 20)}.{tail}", "." * 100_000),
        Sealer("another").seal("session", "ann", {"a": 1}, 10),
        tail + "." + head,
    ]
    attempts = [("session", "ann", text) for text in forged]
    attempts += [
        ("state", "ann", sealed),
        ("relay", "", sealed),
        ("session", "bob", sealed),
        ("session", "", sealed),
    ]
    for use, caller, text in attempts:
        assert seals.open(use, caller, text) is None, (use, caller, text[:100])
    now[0] += 11
    assert seals.open("session", "ann", sealed) is None


async def test_state_is_not_accepted_as_a_session() -> None:
    app = make_app()

    @app.tool
    async def ask(ctx: Context) -> str:
        return str(await ctx.elicit("Who?", FORM))

    async with over_http(app, R5, capabilities={"elicitation": {}}) as client:
        state = (await client.tool("ask"))["requestState"]
        for session in (state, "ü" * 100, "A" * 20_000):
            answered = await client.post(
                request("ping"), {**BASIC, "mcp-session-id": session}
            ).started()
            assert answered.status == 404


# --- disconnects at any moment --------------------------------------------------------------------


class Till:
    """Commands that pass their commit point on entry, in the middle, and in a thread; and a query
    that streams.
    """

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
async def test_disconnect_at_any_moment_keeps_one_effect_and_leaves_no_task(
    revision: str, tool: str, way: str
) -> None:
    """45 combinations, each at eight moments: the request ends, a retry gets the outcome, no task
    remains.
    """
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
            exchange.reads.set()  # servers accept writes to a closed connection
            again = await client.tool(tool, meta={KEY: "k"})
            done, _ = await asyncio.wait([exchange.task], timeout=PATIENCE)
            assert done and not exchange.task.cancelled() and exchange.task.exception() is None
        assert again["content"][0]["text"] == "paid"
        assert len(till.paid) == 1, (turns, till.paid)
        await eventually(none_left)


async def test_call_does_not_outlive_a_closed_server() -> None:
    """Calls of older revisions outlive their clients, but not the server."""
    app = make_app()
    cancelled = asyncio.Event()

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


# --- secrets in answers ---------------------------------------------------------------------------


@every_revision
async def test_exception_text_is_never_sent(
    revision: str, caplog: pytest.LogCaptureFixture
) -> None:
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
            {
                "ref": {"type": "ref/resource", "uri": "test://{name}"},
                "argument": {"name": "name", "value": ""},
            },
        ),
    ]
    async with over_http(app, revision) as client, over_stdio(app, revision) as pipe:
        for each in (client, pipe):
            for method, params in calls:
                told = json.dumps(await each.call(method, params))
                assert (
                    "hunter2" not in told and "Traceback" not in told and "ValueError" not in told
                )
    assert "correct horse" not in caplog.text  # params are never logged


async def test_readyz_does_not_reveal_the_url_of_the_ledger(
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
    app = make_app(
        authenticate=lambda headers: names.get(headers.get("authorization", "")),
        secret="top s3cret",
    )

    @app.command
    def pay() -> None:
        raise ValueError

    async with over_http(app, R4, headers={"authorization": "Bearer t0ken"}) as client:
        await client.tool("pay", meta={KEY: "k"})
        await client.post(notification("notifications/cancelled", {"requestId": 7})).started()
        assert client.session is not None and client.session not in caplog.text
    assert "pay failed" in caplog.text and "caller ada" in caplog.text
    assert "t0ken" not in caplog.text and "s3cret" not in caplog.text

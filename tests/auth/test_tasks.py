"""The identity of a task's caller: the ledger keeps it, for a server that adopts the task."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec.structs import replace

from tests.auth import RESOURCE, Clock
from tests.calls import make_app
from tests.mcp.asgi import KEY, R5, Client, speak
from tests.mcp.task_talk import DECLARED, OVER, get, start, until
from wirecall import App, Context
from wirecall.auth import Access, Identity, Jwt
from wirecall.ledger.base import RecordId
from wirecall.testing.auth import AuthorizationServer


async def test_adopted_task_has_the_identity_of_its_first_server(tmp_path: Path) -> None:
    clock = Clock()
    seen = asyncio.Queue[Identity | None]()
    issuer = AuthorizationServer(clock=clock)

    def server(*, hangs: bool) -> App:
        jwt = Jwt(issuer.issuer, resource=RESOURCE, jwks=issuer.jwks, clock=clock)
        app = make_app(ledger=f"sqlite:{tmp_path}/ledger.db", auth=Access(jwt, clock=clock))

        @app.command(task=True, on_crash="rerun", lease=3600.0, scopes="orders:write")
        async def pay(ctx: Context) -> str:
            seen.put_nowait(ctx.identity)
            if hangs:
                await asyncio.Event().wait()
            return ctx.caller

        return app

    @asynccontextmanager
    async def talk(app: App, token: str) -> AsyncIterator[Client]:
        headers = {"authorization": f"Bearer {token}"}
        async with (
            asyncio.timeout(60),
            app,
            speak("http", app, R5, capabilities=DECLARED, headers=headers) as client,
        ):
            yield client

    caller = f"{issuer.issuer} alice"
    first = server(hangs=True)
    token = issuer.token(
        "alice", resource=RESOURCE, scopes="orders:write", client="page", lifetime=60, team="red"
    )
    async with talk(first, token) as client:
        task = await start(client, "pay", meta={KEY: "k"})
        given = await seen.get()
        # The server vanishes without cleaning up, as if it were killed: its claim on the task
        # lapses.
        ledger = await first.ledger()
        while (
            not (record := await ledger.get(RecordId(caller, "tools/call:pay", "k")))
            or not record.committed
        ):
            await get(client, task)
        await ledger.lapse(record.token)
    assert given is not None
    assert given.claims["team"] == "red"
    # The claims may hold anything about a person, so they are not kept.
    kept = Identity("alice", "page", issuer.issuer, frozenset({"orders:write"}), {}, clock.now + 60)
    assert replace(given, claims={}) == kept

    clock.now += 3600.0  # the token of the call has expired, and another one asks for the task
    later = issuer.token("alice", resource=RESOURCE, scopes="orders:write audit", client="phone")
    async with talk(server(hangs=False), later) as client:
        got = await until(client, task, *OVER)
        adopted = await seen.get()
    assert (got["status"], got["result"]["content"][0]["text"]) == ("completed", caller)
    assert adopted == kept

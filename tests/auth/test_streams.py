"""A stream of changes ends with the token that opened it, and its client reconnects with another
one.
"""

import asyncio

import pytest

from tests.auth import NOW, Clock, Shop
from tests.client.peers import PATIENCE, served, until
from tests.mcp.asgi import R4, R5, Exchange, HttpClient
from wirecall import App, connect
from wirecall.auth import Access, Identity

LEEWAY = 30  # seconds for which the shop accepts a token after its expiry


async def stream(client: HttpClient) -> Exchange:
    """Open the standing stream of a session, or at 2026-07-28 a subscription."""
    await client.open()
    if client.revision == R4:
        return await client.listen().started()
    return await client.post(
        client.message("subscriptions/listen", {"notifications": {"toolsListChanged": True}})
    ).started()


@pytest.mark.parametrize("revision", [R4, R5])
async def test_stream_ends_with_its_token_and_the_others_stay(revision: str) -> None:
    shop = Shop()
    tokens = {"short": shop.token(exp=NOW - LEEWAY + 0.1), "long": shop.token(exp=NOW + 3600)}
    clients = {
        name: HttpClient(shop.server, revision, headers={"authorization": f"Bearer {token}"})
        for name, token in tokens.items()
    }
    short = await stream(clients["short"])
    long = await stream(clients["long"])
    assert (short.status, long.status) == (200, 200)
    got = await short.messages()  # all, up to its end
    # At 2026-07-28 the answer says that the server has ended the stream ("Graceful Closure").
    assert [("result" in each) for each in got] == ([False, True] if revision == R5 else [])
    shop.app.changed("tools")
    if revision == R5:
        assert (await long.message())["method"] == "notifications/subscriptions/acknowledged"
    assert (await long.message())["method"] == "notifications/tools/list_changed"
    await long.close()


@pytest.mark.parametrize("revision", [R4, R5])
async def test_client_reconnects_with_a_new_token(revision: str) -> None:
    clock = Clock()
    accepted = {"first"}

    def verify(token: str) -> Identity | None:
        if token not in accepted:
            return None
        return Identity("alice", expires=clock() + 0.05 if token == "first" else None)

    async def token() -> str:
        given.append("first" if not given else "second")
        return given[-1]

    given: list[str] = []
    app = App("shop", auth=Access(verify, clock=clock))

    @app.tool
    def price() -> int:
        return 3

    async with (
        served(app) as url,
        connect(f"{url}/mcp", protocol="mcp", auth=token, revision=revision) as client,
        client.listen(tools=True) as changes,
    ):
        accepted = {"second"}
        await until(lambda: given == ["first", "second"])
        received = asyncio.create_task(changes.__anext__())

        def is_received() -> bool:
            """Announce a change until the client is back and receives it."""
            app.changed("tools")
            return received.done()

        await until(is_received)
        assert (await asyncio.wait_for(received, PATIENCE)).kind == "tools"

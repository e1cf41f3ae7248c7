"""At 2025-11-25 a server may refuse a call until the user has visited a page (-32042, SEP-1036)."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.calls import make_app
from tests.mcp.asgi import R3, R4, R5
from tests.mcp.scripted import (
    Answer,
    Reply,
    Scripted,
    Seen,
    event,
    newest,
    older,
    refusal,
    result,
    text,
)
from wirecall import Context, connect
from wirecall.errors import BadAnswer, RpcError, VisitRequired
from wirecall.mcp import Elicited
from wirecall.mcp.client.client import McpClient
from wirecall.mcp.client.inbox import Visit

URL = "https://mcp.example.com/connect"


def elicitation(id: str = "e-1", url: str = URL) -> dict[str, Any]:
    return {"mode": "url", "elicitationId": id, "url": url, "message": "Sign in first."}


def refused(message: Any, *elicitations: Any) -> Reply:
    return refusal(
        message,
        -32042,
        "This request requires more information.",
        {"elicitations": list(elicitations)},
    )


class Desk:
    """A server that refuses calls until `is_open` says otherwise, and the user who visits its
    pages.
    """

    def __init__(
        self, is_open: Callable[["Desk"], bool], *, fresh_ids: bool = False, agrees: Any = True
    ) -> None:
        self.calls: list[Any] = []
        self.visits: list[Visit] = []
        self.news: asyncio.Queue[str | None] = asyncio.Queue()  # events of the standing stream
        self.completed: set[str] = set()
        self._is_open = is_open
        self._fresh_ids = fresh_ids
        self._agrees = agrees

    def visit(self, visit: Visit) -> Any:
        self.visits.append(visit)
        return self._agrees

    def complete(self, id: str) -> None:
        """The user has finished, and the server reports it."""
        self.completed.add(id)
        params = {"elicitationId": id}
        told = {"jsonrpc": "2.0", "method": "notifications/elicitation/complete", "params": params}
        self.news.put_nowait(event(told))

    def __call__(self, message: Any, seen: Seen) -> Any:
        if seen.verb == "GET":
            return Reply(events=[], more=self.news.get)
        if seen.method not in ("tools/call", "prompts/get", "resources/read", "vendor/do"):
            return older(lambda message, _: result(message, {}), R4)(message, seen)
        self.calls.append(message)
        if self._is_open(self):
            found: dict[str, Any] = {
                "prompts/get": {"messages": []},
                "resources/read": {"contents": []},
            }
            return result(message, found.get(seen.method, text("done")))
        return refused(message, elicitation(f"e-{len(self.calls) if self._fresh_ids else 1}"))


@asynccontextmanager
async def client_of(answer: Answer, **options: Any) -> AsyncIterator[tuple[Scripted, McpClient]]:
    given = {"revision": R4, **options}
    async with Scripted(answer) as server, connect(server.url, protocol="mcp", **given) as client:
        yield server, client


async def call(desk: Desk, method: str = "tools/call", **options: Any) -> Any:
    async with client_of(desk, **{"elicit_url": desk.visit, **options}) as (_, client):
        try:
            return await client.call(
                method, {"name": "pay", "uri": "test://a", "arguments": {"cents": 5}}
            )
        finally:
            desk.news.put_nowait(None)


@pytest.mark.parametrize("method", ["tools/call", "prompts/get", "resources/read", "vendor/do"])
@pytest.mark.parametrize("agrees", [True, Elicited("accept")])
async def test_visit_is_made_and_the_call_is_repeated(method: str, agrees: Any) -> None:
    desk = Desk(lambda desk: bool(desk.visits), agrees=agrees)
    assert await call(desk, method) is not None
    (visit,) = desk.visits
    assert (visit.url, visit.host, visit.message) == (URL, "mcp.example.com", "Sign in first.")
    first, second = desk.calls
    assert first["params"] == second["params"] and first["id"] != second["id"]


async def test_client_waits_until_the_server_reports_the_visit_as_complete() -> None:
    """A handler may return as soon as the page is open. The user is asked once."""

    def is_open(desk: Desk) -> bool:
        if len(desk.calls) == 2:
            desk.complete("unknown")  # ids that are not known are ignored
            desk.complete("e-1")
        return bool(desk.completed) and len(desk.calls) > 2

    desk = Desk(is_open)
    assert (await call(desk))["content"]
    assert (len(desk.calls), len(desk.visits)) == (3, 1)


async def test_server_that_names_another_visit_each_time_gets_the_first_one_complete() -> None:
    def is_open(desk: Desk) -> bool:
        if len(desk.calls) == 2:
            desk.complete("e-1")
        return len(desk.calls) > 2

    desk = Desk(is_open, fresh_ids=True)
    assert (await call(desk))["content"]
    assert [visit.elicitation_id for visit in desk.visits] == ["e-1"]


async def test_visit_that_is_complete_before_the_handler_returns_is_not_waited_for() -> None:
    desk = Desk(lambda desk: False)
    heard = asyncio.Event()

    async def visit(asked: Visit) -> bool:
        desk.visits.append(asked)
        desk.complete(str(asked.elicitation_id))
        desk.news.put_nowait(
            event(
                {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info"}}
            )
        )
        await heard.wait()  # the message behind the report
        return True

    with pytest.raises(VisitRequired):  # the user has finished, and the server still refuses
        await call(desk, elicit_url=visit, on_log=lambda _: heard.set())
    assert (len(desk.calls), len(desk.visits)) == (2, 1)


async def test_visit_that_is_never_reported_ends_with_the_time_of_the_call() -> None:
    desk = Desk(lambda desk: False)
    with pytest.raises(VisitRequired) as error:
        await call(desk, timeout=2.0)
    assert error.value.ran == "no"
    # The first, one at once, and one after the wait.
    assert (len(desk.calls), len(desk.visits)) == (3, 1)


async def test_visits_to_several_pages_are_made_one_after_another() -> None:
    visits: list[str] = []

    def answer(message: Any, _: Seen) -> Reply:
        pages = [elicitation("a", f"{URL}/a"), elicitation("b", f"{URL}/b")]
        return result(message, text("done")) if visits else refused(message, *pages)

    def visit(asked: Visit) -> bool:
        visits.append(asked.url)
        return True

    async with client_of(older(answer), elicit_url=visit) as (_, client):
        assert (await client.call_tool("pay")).text == "done"
    assert visits == [f"{URL}/a", f"{URL}/b"]


@pytest.mark.parametrize("agrees", [False, Elicited("decline"), Elicited("cancel")])
async def test_visit_that_is_declined_raises(agrees: Any) -> None:
    desk = Desk(lambda desk: False, agrees=agrees)
    with pytest.raises(VisitRequired) as error:
        await call(desk)
    assert (error.value.ran, len(desk.calls), len(desk.visits)) == ("no", 1, 1)


async def test_client_without_a_handler_gets_the_error() -> None:
    desk = Desk(lambda desk: False)
    with pytest.raises(VisitRequired) as error:
        await call(desk, elicit_url=None)
    assert error.value.data == {"elicitations": [elicitation()]}
    assert (error.value.ran, len(desk.calls)) == ("no", 1)


@pytest.mark.parametrize("revision", [R3, R5])
async def test_visits_exist_only_at_2025_11_25(revision: str) -> None:
    desk = Desk(lambda desk: False)
    wrap = newest if revision == R5 else lambda answer: older(answer, revision)
    answer = wrap(lambda message, _: refused(message, elicitation()))
    async with client_of(answer, revision=revision, elicit_url=desk.visit) as (server, client):
        with pytest.raises(VisitRequired):
            await client.call_tool("pay")
    assert (server.methods().count("tools/call"), desk.visits) == (1, [])


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"elicitations": None},
        {"elicitations": [5]},
        {"elicitations": [{"url": URL}]},  # an id is mandatory
        {"elicitations": [{**elicitation(), "elicitationId": 7}]},
        {"elicitations": [{**elicitation(), "mode": "form"}]},  # only pages
    ],
)
async def test_visit_without_an_address_is_a_bad_answer(data: Any) -> None:
    desk = Desk(lambda desk: False)
    answer = older(lambda message, _: refusal(message, -32042, "visit", data))
    async with client_of(answer, elicit_url=desk.visit) as (_, client):
        with pytest.raises(BadAnswer, match="does not say where") as error:
            await client.call_tool("pay")
    assert (error.value.ran, desk.visits) == ("no", [])


async def test_visit_list_that_is_empty_is_the_error_itself() -> None:
    desk = Desk(lambda desk: False)
    async with client_of(older(lambda message, _: refused(message)), elicit_url=desk.visit) as (
        server,
        client,
    ):
        with pytest.raises(VisitRequired):
            await client.call_tool("pay")
    assert server.methods().count("tools/call") == 1


@pytest.mark.parametrize(
    "url",
    ["http://example.com/", "file:///etc/passwd", "javascript:alert(1)", "", "https:", "http://["],
)
async def test_visit_handler_does_not_get_addresses_that_a_browser_must_not_open(url: str) -> None:
    desk = Desk(lambda desk: False)
    answer = older(lambda message, _: refused(message, elicitation(url=url)))
    async with client_of(answer, elicit_url=desk.visit) as (_, client):
        with pytest.raises(BadAnswer, match="expected https"):
            await client.call_tool("pay")
    assert desk.visits == []


@pytest.mark.parametrize(
    ("url", "is_good"),
    [("http://localhost:8420/x", True), ("http://[::1]/x", True), (URL, True), ("ftp://a", False)],
)
@pytest.mark.parametrize("revision", [R4, R5])
async def test_visit_addresses_are_checked_alike_in_a_question_of_the_server(
    url: str, is_good: bool, revision: str
) -> None:
    app = make_app()
    visits = list[Visit]()

    @app.query
    async def sign_in(ctx: Context) -> str:
        return (await ctx.elicit_url("Sign in", url)).action

    def visit(asked: Visit) -> bool:
        visits.append(asked)
        return True

    async with connect(app, protocol="mcp", revision=revision, elicit_url=visit) as client:
        if is_good:
            assert (await client.call_tool("sign_in")).text == "accept"
        else:
            with pytest.raises((RpcError, BadAnswer)):
                await client.call_tool("sign_in")
    assert len(visits) == is_good

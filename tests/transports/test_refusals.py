"""The log has requests that are refused before a call begins: with the reason, without secrets, and
not endlessly.
"""

import json
import logging
from typing import Any

import pytest

from tests import rsgi
from tests.calls import call, make_app
from tests.clock import LoopClock
from tests.server.stage import settle
from tests.transports import Pairs, ask
from wirecall import Limits
from wirecall.auth import Access
from wirecall.errors import Unauthorized
from wirecall.logs import JsonFormatter
from wirecall.server.identity import Identity
from wirecall.transports.http_server import HttpServer
from wirecall.transports.refusals import BURST, PERIOD

SECRET = "s3cret-t0ken"


@pytest.fixture(autouse=True, params=rsgi.INTERFACES)
def interface(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here runs over both interfaces."""
    monkeypatch.setattr(rsgi, "interface", request.param)


def guarded() -> HttpServer:
    """A server whose verifier quotes in its refusals what it was given."""

    def verify(token: str) -> Identity:
        if token != "good":
            raise Unauthorized(f"there is no token {token}")
        return Identity("ada")

    app = make_app(auth=Access(verify), limits=Limits(bytes_in=100))
    app.query(name="one")(lambda: 1)
    app.query(name="secret", scopes="orders:write")(lambda: 1)
    return app.asgi()


GOOD = [("Authorization", "Bearer good")]

REFUSED: list[tuple[int, Pairs, bytes, str]] = [
    (401, [], call("one"), "expected Authorization: Bearer TOKEN"),
    (
        401,
        [("Authorization", f"Bearer {SECRET}"), ("Cookie", f"a={SECRET}")],
        call("one"),
        "there is no token [removed]",
    ),
    (403, GOOD, call("secret"), "expected orders:write"),
    (
        403,
        [*GOOD, ("Origin", "https://evil.example")],
        call("one"),
        "'https://evil.example' may not call",
    ),
    (413, GOOD, call("one", {"text": "x" * 200}), "longer than 100 bytes"),
    (415, [*GOOD, ("Content-Type", "text/plain")], call("one"), "got text/plain"),
]


@pytest.mark.parametrize(("status", "headers", "body", "reason"), REFUSED)
@pytest.mark.parametrize("path", ["/rpc", "/mcp"])
async def test_refusal_is_logged_with_its_reason_and_without_secrets(
    path: str,
    status: int,
    headers: Pairs,
    body: bytes,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if path == "/mcp" and b"secret" in body:
        params: Any = {"name": "secret", "arguments": {}, "_meta": {}}
        body = call("tools/call", params)
    extra = [("X-Request-Id", "r-1"), ("Accept", "application/json, text/event-stream")]
    server = guarded()
    reply = await ask(server, path, body, headers=[*headers, *extra])
    assert reply.status == status
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    line = JsonFormatter().format(record)
    fact = json.loads(line)
    assert (fact["outcome"], fact["status"], fact["request_id"]) == ("refused", status, "r-1")
    assert reason in fact["reason"]
    assert f"POST {path} refused with {status}: " in fact["message"]
    assert SECRET not in line
    await server.aclose()


async def test_refusals_of_one_kind_are_limited_and_then_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = LoopClock(monkeypatch)
    server = guarded()
    for _ in range(BURST + 7):
        await ask(server, body=call("one"))
    await ask(server, body=call("one"), headers=[*GOOD, ("Content-Type", "text/plain")])
    statuses = [record.__dict__["status"] for record in caplog.records]
    assert statuses == [401] * BURST + [415]
    caplog.clear()
    clock.advance(PERIOD + 1)
    await settle()
    assert [record.getMessage() for record in caplog.records] == [
        "7 more requests were refused with 401 within 60 s"
    ]
    assert caplog.records[0].__dict__["count"] == 7
    caplog.clear()
    await ask(server, body=call("one"))
    assert [record.__dict__["status"] for record in caplog.records] == [401]
    await server.aclose()


async def test_refusals_that_were_counted_are_reported_when_the_server_stops(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = guarded()
    for _ in range(BURST + 2):
        await ask(server, body=call("one"))
    await server.aclose()
    assert caplog.records[-1].__dict__["count"] == 2


async def test_other_answers_are_not_logged_as_refusals(caplog: pytest.LogCaptureFixture) -> None:
    server = guarded()
    await ask(server, body=call("one"), headers=GOOD)
    await ask(server, "/nowhere", headers=GOOD)
    await ask(server, "/healthz", method="GET")
    await server.aclose()
    assert caplog.records == []

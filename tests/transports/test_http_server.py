"""The rules of HTTP, by a driver in this process."""

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec import Raw

from tests import rsgi
from tests.calls import batch, call
from tests.transports import (
    LOCAL,
    PATIENCE,
    Client,
    Pairs,
    Reply,
    ask,
    make_server,
    piece,
    scope_of,
    until_left,
)
from wirecall import Limits
from wirecall.errors import Gone, Unauthorized
from wirecall.protocol.messages import Data, Id
from wirecall.protocol.receipt import Receipt
from wirecall.protocol.sender import Sender
from wirecall.transports.headers import Headers
from wirecall.transports.health import health_endpoints
from wirecall.transports.http_server import HttpServer
from wirecall.transports.request import HttpRequest
from wirecall.transports.rpc_endpoint import rpc_endpoint

ADD = call("add", {"a": 1, "b": 2})
HELLO = call(
    "initialize",
    {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "n", "version": "1"},
    },
)
NOTIFICATION = b'{"jsonrpc":"2.0","method":"nobody"}'


# For tests whose client does not read, or is cut.
only_asgi = pytest.mark.parametrize("interface", ["asgi"], indirect=True)


@pytest.fixture(autouse=True, params=rsgi.INTERFACES)
def interface(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here runs over both interfaces."""
    monkeypatch.setattr(rsgi, "interface", request.param)


class Handler:
    """Stands for `App.handle`: records its arguments."""

    def __init__(
        self, answer: bytes | None = b'{"ok":true}', replays: list[Id] | None = None
    ) -> None:
        self.calls: list[tuple[bytes, str, str | None]] = []
        self.answer = answer
        self.replays = replays or []

    async def __call__(
        self, data: Data, sender: Sender, replayed: list[Id] | None, key: str | None
    ) -> bytes | None:
        assert isinstance(data, bytes)
        self.calls.append((data, sender.caller, key))
        if replayed is not None:
            replayed.extend(self.replays)
        return self.answer


def server_of(handle: Handler | None = None, **options: Any) -> HttpServer:
    return HttpServer({"/rpc": rpc_endpoint(handle or Handler()), **health_endpoints()}, **options)


# --- /rpc -----------------------------------------------------------------------------------------


async def test_message_is_answered_with_200_or_204_j7() -> None:
    server = make_server(Limits())
    reply = await ask(server, body=ADD)
    assert (reply.status, reply.headers["content-type"], reply.json["result"]) == (
        200,
        "application/json",
        3,
    )
    assert reply.headers["content-length"] == str(len(reply.body))
    reply = await ask(server, body=NOTIFICATION)
    assert (reply.status, reply.body, reply.is_complete) == (204, b"", True)
    assert "content-length" not in reply.headers


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b"\xff", b"7", call("nothing")])
async def test_messages_with_a_jsonrpc_answer_get_200(body: bytes) -> None:
    reply = await ask(make_server(Limits()), body=body)
    assert (reply.status, reply.json["error"]["code"] in (-32700, -32600, -32601)) == (200, True)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "HEAD"])
async def test_other_methods_are_405(method: str) -> None:
    handle = Handler()
    reply = await ask(server_of(handle), method=method)
    assert (reply.status, reply.headers["allow"], handle.calls) == (405, "POST", [])
    reply = await ask(server_of(), "/healthz", method="POST")
    assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    ("media", "status"),
    [
        ("application/json", 200),
        ("Application/JSON ; charset=utf-8", 200),
        ("application/json;charset=utf-8", 200),
        ('application/json; charset="UTF-8"; profile=x', 200),
        ("application/json; charset=utf-16", 415),
        ("application/json;charset=latin-1", 415),
        ("application/json; charset=utf-8; charset=utf-7", 415),
        ("application/json; charset=", 415),
        ("text/plain", 415),
        ("application/json-seq", 415),
        ("", 415),
    ],
)
async def test_media_type_is_json_in_utf_8(media: str, status: int) -> None:
    handle = Handler()
    assert (await ask(server_of(handle), headers=[("Content-Type", media)])).status == status
    assert len(handle.calls) == (status == 200)
    reply = await ask(make_server(Limits()), "/mcp", HELLO, headers=[("Content-Type", media)])
    assert reply.status == status, reply.body


@pytest.mark.parametrize(
    ("media", "status"),
    [
        ("application/json-rpc", 200),
        ("Application/Json-RPC; charset=utf-8", 200),
        ("application/jsonrequest", 200),
        ("application/json-rpc; charset=utf-16", 415),
        ("application/json-rpc2", 415),
        ("application/x-www-form-urlencoded", 415),
        ("text/plain;charset=UTF-8", 415),
    ],
)
async def test_rpc_endpoint_accepts_the_media_types_of_json_rpc(media: str, status: int) -> None:
    reply = await ask(make_server(Limits()), body=ADD, headers=[("Content-Type", media)])
    assert reply.status == status
    assert reply.json["id"] == (1 if status == 200 else None)
    reply = await ask(make_server(Limits()), "/mcp", HELLO, headers=[("Content-Type", media)])
    assert reply.status == 415


async def without_type(server: HttpServer, body: bytes, *headers: tuple[str, str]) -> Reply:
    client = Client(piece(body))
    async with asyncio.timeout(PATIENCE):
        await rsgi.drive(
            server, scope_of("POST", "/rpc", [*LOCAL, *headers]), client.receive, client.send
        )
    return client.reply


async def test_rpc_endpoint_accepts_json_without_a_media_type() -> None:
    server = make_server(Limits())
    assert (await without_type(server, ADD)).json["result"] == 3
    assert (await without_type(server, b" [" + ADD + b"]")).json[0]["result"] == 3
    assert (await without_type(server, ADD, ("Content-Type", ""))).json["result"] == 3
    deep = await without_type(server, b"[" * 5000 + b"]" * 5000)
    assert (deep.status, deep.json["error"]["data"]["limit"]) == (200, "depth")


@pytest.mark.parametrize("body", [b"", b"a=1", b"7", b'"x"', ADD[:-1], ADD + ADD, b"\xff"])
async def test_rpc_endpoint_refuses_other_bodies_without_a_media_type(body: bytes) -> None:
    handle = Handler()
    reply = await without_type(server_of(handle), body)
    assert (reply.status, reply.json["id"], handle.calls) == (415, None, [])


@pytest.mark.parametrize(
    "mark",
    [
        ("Origin", "http://localhost"),
        ("Sec-Fetch-Mode", "no-cors"),
        ("Sec-Fetch-Site", "none"),
        ("sec-fetch-x", ""),
    ],
)
async def test_rpc_endpoint_requires_a_media_type_from_a_browser(mark: tuple[str, str]) -> None:
    handle = Handler()
    reply = await without_type(server_of(handle), ADD, mark)
    assert (reply.status, reply.json["id"], handle.calls) == (415, None, [])
    assert (await ask(server_of(handle), body=ADD, headers=[mark])).status == 200


async def test_http_refusals_have_the_id_null_on_rpc_only() -> None:
    """JSON-RPC 2.0, section 5: an id that could not be read is null. MCP leaves it out."""

    async def nobody(_headers: Any) -> str | None:
        return None

    for server, method, headers, status in (
        (server_of(), "GET", (), 405),
        (server_of(), "POST", [("Content-Type", "text/plain")], 415),
        (server_of(), "POST", [("Origin", "http://evil.example")], 403),
        (server_of(), "POST", [("Content-Encoding", "gzip")], 415),
        (server_of(limits=Limits(header_bytes=9)), "POST", (), 431),
        (server_of(limits=Limits(bytes_in=9)), "POST", (), 413),
        (server_of(authenticate=nobody), "POST", (), 401),
    ):
        reply = await ask(server, method=method, body=ADD, headers=headers)
        assert (reply.status, list(reply.json)[-1], reply.json["id"]) == (status, "id", None)
    assert "id" not in (await ask(make_server(Limits()), "/mcp", method="PUT")).json
    assert "id" not in (await ask(server_of(), "/nowhere")).json


@pytest.mark.parametrize(
    ("coding", "status"),
    [
        ("identity", 200),
        ("Identity", 200),
        ("", 200),
        ("gzip", 415),
        ("identity, gzip", 415),
        ("br", 415),
        ("x", 415),
    ],
)
async def test_encoded_body_is_415(coding: str, status: int) -> None:
    handle = Handler()
    reply = await ask(server_of(handle), body=ADD, headers=[("Content-Encoding", coding)])
    assert (reply.status, len(handle.calls)) == (status, status == 200)
    assert reply.headers.get("accept-encoding") == ("identity" if status == 415 else None)
    reply = await ask(make_server(Limits()), "/mcp", HELLO, headers=[("Content-Encoding", coding)])
    assert reply.status == status, reply.body


async def test_transfer_coding_other_than_chunked_is_501() -> None:
    handle = Handler()
    for coding in ("gzip, chunked", "gzip", "chunked, chunked"):
        reply = await ask(server_of(handle), body=ADD, headers=[("Transfer-Encoding", coding)])
        assert (reply.status, reply.headers["connection"], handle.calls) == (501, "close", [])
    assert (
        await ask(server_of(handle), body=ADD, headers=[("Transfer-Encoding", "Chunked")])
    ).status == 200


async def test_key_of_a_single_call_may_be_a_header() -> None:
    handle = Handler()
    await ask(server_of(handle), body=ADD, headers=[("Idempotency-Key", " order-1 ")])
    assert handle.calls == [(ADD, "", "order-1")]
    reply = await ask(server_of(handle), body=batch(ADD), headers=[("Idempotency-Key", "order-1")])
    assert (reply.status, reply.json["error"]["code"], reply.json["id"]) == (200, -32602, None)
    assert (
        await ask(
            server_of(handle),
            body=ADD,
            headers=[("Idempotency-Key", "1"), ("idempotency-key", "2")],
        )
    ).status == 400
    assert len(handle.calls) == 1


async def test_answers_from_the_ledger_are_marked() -> None:
    assert "idempotent-replayed" not in (await ask(server_of(), body=ADD)).headers
    reply = await ask(server_of(Handler(replays=[1])), body=ADD)
    assert reply.headers["idempotent-replayed"] == "true"
    reply = await ask(server_of(Handler(replays=[1, 'a"ü😀\n'])), body=batch(ADD))
    assert reply.headers["idempotent-replayed"].isascii()
    assert json.loads(reply.headers["idempotent-replayed"]) == [1, 'a"ü😀\n']
    huge = Raw(b"1e400")  # J14: an id that only its bytes keep
    assert (await ask(server_of(Handler(replays=[huge])), body=batch(ADD))).headers[
        "idempotent-replayed"
    ] == "[1e400]"
    # Aiohttp refuses an answer with a field of more than 8190 bytes.
    for size, is_marked in ((70, True), (100, False)):
        reply = await ask(
            server_of(Handler(replays=[f"{number:0{size}}" for number in range(50)])),
            body=batch(ADD),
        )
        assert (reply.status, "idempotent-replayed" in reply.headers) == (200, is_marked)


# --- the body -------------------------------------------------------------------------------------


async def test_body_in_pieces_is_put_together() -> None:
    handle = Handler()
    await ask(
        server_of(handle), client=Client(piece(ADD[:5], True), piece(b"", True), piece(ADD[5:]))
    )
    assert handle.calls[0][0] == ADD
    sized = [("content-length", str(len(ADD)))]
    await ask(server_of(handle), headers=sized, client=Client(piece(ADD, True)))
    assert handle.calls[1][0] == ADD, "all of it is there, whatever the server says"


@pytest.mark.parametrize(
    ("headers", "events"),
    [
        ([("content-length", "101")], []),
        ([("content-length", "9" * 400)], []),
        ([], [piece(b" " * 101)]),
        ([], [piece(b" " * 60, True), piece(b" " * 60, True)]),
    ],
)
async def test_body_over_the_limit_is_413_and_not_read_to_its_end_j11(
    headers: Pairs, events: list[Any]
) -> None:
    handle = Handler()
    reply = await ask(
        server_of(handle, limits=Limits(bytes_in=100)), headers=headers, client=Client(*events)
    )
    assert (reply.status, reply.json["id"], reply.headers["connection"]) == (413, None, "close")
    assert reply.json["error"]["code"] == -32600
    assert reply.json["error"]["data"] | {"reason": ""} == {
        "type": "limit_exceeded",
        "reason": "",
        "limit": "bytes_in",
        "max": 100,
    }
    assert handle.calls == []


@pytest.mark.parametrize("length", ["x", "-1", "1_0", "٣", ""])
async def test_content_length_that_is_not_a_number_is_400(length: str) -> None:
    server = server_of()
    client = Client(piece(b""))
    scope = scope_of("POST", "/rpc", [*LOCAL, ("content-type", "application/json")])
    scope["headers"].append((b"content-length", length.encode()))
    await server(scope, client.receive, client.send)
    assert client.reply.status == 400


async def test_body_with_two_lengths_is_400() -> None:
    """RFC 9112, section 6.3: a proxy in front may have cut the body elsewhere."""
    handle = Handler()
    both = [("content-length", str(len(ADD))), ("transfer-encoding", "chunked")]
    reply = await ask(server_of(handle), body=ADD, headers=both)
    assert (reply.status, reply.headers["connection"], handle.calls) == (400, "close", [])


async def test_body_that_does_not_arrive_is_408() -> None:
    handle = Handler()
    for events in ([], [piece(b"{", True)]):
        reply = await ask(server_of(handle, limits=Limits(body_time=1)), client=Client(*events))
        assert (reply.status, reply.headers["connection"], handle.calls) == (408, "close", [])


async def test_body_without_an_end_runs_nothing() -> None:
    """A client that left does not read the answer; a client that sent something other than chunks
    does.
    """
    handle = Handler()
    for events in ([], [piece(ADD[:9], True)]):
        reply = await ask(server_of(handle), client=Client(*events, leaves=True))
        assert (reply.status, reply.headers["connection"], handle.calls) == (400, "close", [])


# --- guards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:1",
        "127.0.0.1",
        "127.0.0.1:65535",
        "[::1]",
        "[::1]:8420",
        " localhost ",
    ],
)
@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_loopback_host_is_always_accepted(host: str, method: str) -> None:
    assert (await ask(server_of(), method=method, host=[("Host", host)])).status in (200, 405)
    origin = [("Origin", f"http://{host.strip()}")]
    assert (await ask(server_of(), method=method, headers=origin)).status in (200, 405)


@pytest.mark.parametrize(
    "host",
    [
        *(
            "evil.example",
            "localhost.evil.example",
            "evil.example:80",
            "localhost@evil.example",
            "127.0.0.1.evil.example",
        ),
        *(
            "localhost:x",
            "localhost:80:80",
            "localhost/",
            "localhost evil",
            "::1",
            "127.1",
            "0.0.0.0",
            "[::1",
            "[::2]",
            "ü.eu",
        ),
    ],
)
async def test_other_hosts_are_403_for_every_method_and_path(host: str) -> None:
    handle = Handler()
    for method in ("POST", "GET", "DELETE", "OPTIONS", "HEAD"):
        for path in ("/rpc", "/nowhere"):
            reply = await ask(server_of(handle), path, method=method, host=[("Host", host)])
            assert reply.status == 403
            assert "Host" in reply.message and "hosts=[...]" in reply.message
            assert ("id" in reply.json) == (path == "/rpc")
            reply = await ask(
                server_of(handle), path, method=method, headers=[("Origin", f"http://{host}")]
            )
            assert reply.status == 403
            assert "Origin" in reply.message and "origins=[...]" in reply.message
    assert handle.calls == []


async def test_request_needs_one_host_and_at_most_one_origin() -> None:
    one = ("host", "localhost")
    other = ("host", "localhost:1")
    for host in ([], [one, one], [one, other], [("host", "")], [("host", "  ")]):
        assert (await ask(server_of(hosts=["*"]), host=host)).status == 400
    origin = ("origin", "http://localhost")
    assert (await ask(server_of(), headers=[origin, origin])).status == 400


@pytest.mark.parametrize(
    "origin",
    ["null", "", "localhost", "http://", "http://localhost http://evil.example", "://evil.example"],
)
async def test_invalid_origin_is_403(origin: str) -> None:
    assert (await ask(server_of(), headers=[("Origin", origin)])).status == 403


async def test_hosts_and_origins_can_be_added() -> None:
    server = server_of(
        hosts=["API.example.com", "*.example.org", "example.net:8443"],
        origins=["https://App.example/"],
    )
    server.allow_host("::2")
    for host, status in {
        "api.example.com": 200,
        "api.example.com:99": 200,
        "a.b.example.org:1": 200,
        "example.org": 403,
        "notexample.org": 403,
        "example.net:8443": 200,
        "example.net": 403,
        "[::2]:80": 200,
        "app.example": 403,
    }.items():
        for _ in range(2):  # what was judged once is remembered
            assert (await ask(server, host=[("host", host)])).status == status, host
            assert (await ask(server, headers=[("origin", f"https://{host}")])).status == (
                200 if host == "app.example" else status
            ), host
    assert (await ask(server, headers=[("origin", "http://app.example")])).status == 403, (
        "another scheme is another origin"
    )


async def test_star_allows_any() -> None:
    evil: Pairs = [("origin", "http://evil.example")]
    assert (await ask(server_of(hosts=["*"]), host=[("host", "evil.example")])).status == 200
    assert (await ask(server_of(hosts=["*"]), headers=evil)).status == 403, "a name is not a page"
    assert (await ask(server_of(origins=["*"]), headers=evil)).status == 200


async def test_stream_without_a_pause_does_not_block_the_loop() -> None:
    """A server drops writes to a client that has left, so a write never waits: the disconnect must
    be noticed.
    """
    written = 0

    async def flood(request: HttpRequest) -> None:
        nonlocal written
        await request.body()
        await request.open_stream()
        asyncio.get_running_loop().call_soon(client.left.set)
        while written < 1000:
            await request.write(b"x" * 65536)
            written += 1

    client = Client(piece(b""))
    await ask(HttpServer({"/flood": flood}), "/flood", client=client)
    assert written < 1000


# --- pages of other origins -----------------------------------------------------------------------

PAGE = ("origin", "https://app.example")
ASKED = ("access-control-request-method", "POST")


def cors(headers: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in headers.items()
        if name.startswith("access-control-") or name == "vary"
    }


EXPOSED = "Mcp-Session-Id, WWW-Authenticate, Idempotent-Replayed, Retry-After, X-Request-Id"


async def test_browser_may_ask_first() -> None:
    """extensions.md 2.17: before authentication, as a browser sends no secret with the question."""
    handle = Handler()
    server = server_of(handle, origins=["https://app.example"], authenticate=lambda headers: None)
    names = "Authorization, content-type,idempotency-key , mcp-session-id, Mcp-Param-Region"
    names += ", last-event-id, traceparent, x-request-id"
    fields = [PAGE, ASKED, ("Access-Control-Request-Headers", names + ", x-other, cookie, mcp-\tx")]
    for path in ("/rpc", "/readyz"):
        reply = await ask(server, path, method="OPTIONS", headers=fields)
        assert (reply.status, reply.body) == (204, b"")
        assert cors(reply.headers) == {
            "vary": "Origin",
            "access-control-allow-origin": "https://app.example",
            "access-control-expose-headers": EXPOSED,
            "access-control-allow-methods": "POST, GET, DELETE",
            "access-control-allow-headers": names.lower().replace(" ", "").replace(",", ", "),
            "access-control-max-age": "600",
        }
    assert handle.calls == []
    assert (await ask(server, "/nowhere", method="OPTIONS", headers=fields)).status == 404
    assert (await ask(server, method="OPTIONS", headers=[PAGE])).status == 401, (
        "this is not the question of a browser"
    )


async def test_page_that_may_call_may_read_every_answer() -> None:
    server = server_of(origins=["https://App.example/"])
    fields = {
        "vary": "Origin",
        "access-control-allow-origin": "https://app.example",
        "access-control-expose-headers": EXPOSED,
    }
    for path, method, status in (
        ("/rpc", "POST", 200),
        ("/rpc", "GET", 405),
        ("/nowhere", "POST", 404),
    ):
        reply = await ask(server, path, ADD, method=method, headers=[PAGE])
        assert (reply.status, cors(reply.headers)) == (status, fields)
    server = server_of(origins=["https://app.example"], authenticate=lambda headers: None)
    reply = await ask(server, body=ADD, headers=[PAGE])
    assert (reply.status, cors(reply.headers)) == (401, fields)
    server = make_server(Limits(), origins=["https://app.example"])
    client = Client(piece(b""))
    asking = asyncio.create_task(ask(server, "/polite", headers=[PAGE], client=client))
    await client.answered.wait()
    server.stop()
    assert cors((await asking).headers) == fields, "a stream is an answer"


@pytest.mark.parametrize(
    "origin", ["https://other.example", "http://app.example", "https://app.example:8443", "null"]
)
async def test_other_pages_are_refused_and_read_nothing(origin: str) -> None:
    server = server_of(origins=["https://app.example"])
    for method in ("OPTIONS", "POST"):
        reply = await ask(server, body=ADD, method=method, headers=[("origin", origin), ASKED])
        assert (reply.status, cors(reply.headers)) == (403, {"vary": "Origin"})


async def test_cors_headers_are_missing_without_origins() -> None:
    """Requests of local pages are let in, as before; to read the answer, a page has to be named."""
    for headers in ([], [("origin", "http://localhost:5173"), ASKED]):
        assert cors((await ask(server_of(), body=ADD, headers=headers)).headers) == {}
        reply = await ask(server_of(), method="OPTIONS", headers=headers)
        assert (reply.status, cors(reply.headers)) == (405, {})
        named = server_of(origins=["https://app.example"])
        assert cors((await ask(named, body=ADD, headers=headers)).headers) == {"vary": "Origin"}
    named = server_of(origins=["http://localhost:5173"])
    assert (await ask(named, method="OPTIONS", headers=headers)).status == 204


async def test_star_is_answered_with_the_origin_and_never_with_credentials() -> None:
    reply = await ask(server_of(origins=["*"]), body=ADD, headers=[PAGE])
    assert cors(reply.headers)["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-credentials" not in reply.headers


async def test_cache_of_hosts_is_bounded() -> None:
    server = server_of(hosts=["*"])
    for number in range(600):
        assert (await ask(server, host=[("host", f"h{number}.example")])).status == 200
    assert len(server._guard._good_hosts) <= 256


async def test_header_over_the_limit_is_431() -> None:
    server = server_of(limits=Limits(header_bytes=1000))
    assert (await ask(server, headers=[("x", "y" * 900)])).status == 200
    assert (await ask(server, headers=[("x", "y" * 1000)])).status == 431
    assert (await ask(server, headers=[("x", "y")] * 200)).status == 431


async def test_probes_do_not_need_host_or_credentials_but_are_closed_to_pages() -> None:
    server = server_of(authenticate=lambda headers: None)
    for path in ("/healthz", "/readyz"):
        for host in ([], [("host", "10.0.0.7:8420")]):
            assert (await ask(server, path, method="GET", host=host)).status == 200
        assert (
            await ask(server, path, method="GET", headers=[("origin", "http://evil.example")])
        ).status == 403


async def test_unready_and_stopping_are_503() -> None:
    async def ready() -> str | None:
        return reason

    server = HttpServer(health_endpoints(ready))
    reason: str | None = "the ledger is away"
    reply = await ask(server, "/readyz", method="GET")
    assert (reply.status, reply.json["reason"]) == (503, reason)
    reason = None
    assert (await ask(server, "/readyz", method="GET")).status == 200
    server.stop()
    assert (await ask(server, "/readyz", method="GET")).status == 503
    assert (await ask(server, "/healthz", method="GET")).status == 200


async def test_unknown_path_lists_the_paths_that_exist() -> None:
    reply = await ask(server_of(), "/RPC")
    assert reply.status == 404
    assert all(path in reply.message for path in ("/rpc", "/healthz", "/readyz"))


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://localhost:8420/rpc", 200),
        ("https://LOCALHOST/rpc", 200),
        ("http://evil.example/rpc", 403),
        ("http://localhost@evil.example/rpc", 403),
        ("http://evil.example@localhost/rpc", 403),
        ("http:///rpc", 400),
        ("http://localhost", 404),
        ("http://localhost/nowhere", 404),
    ],
)
async def test_host_of_an_absolute_target_is_checked_like_the_host_header(
    target: str, status: int
) -> None:
    handle = Handler()
    reply = await ask(server_of(handle), target, ADD)
    assert (reply.status, len(handle.calls)) == (status, status == 200)


async def test_mounted_application_knows_its_paths() -> None:
    client = Client(piece(ADD))
    scope = {
        **scope_of("POST", "/api/rpc", [*LOCAL, ("content-type", "application/json")]),
        "root_path": "/api",
    }
    await server_of()(scope, client.receive, client.send)
    assert client.reply.status == 200


# --- callers --------------------------------------------------------------------------------------


async def test_caller_is_the_name_that_authenticate_returns() -> None:
    async def slow(headers: Mapping[str, str]) -> str | None:
        return {"Bearer a": "alice"}.get(headers["AUTHORIZATION"])

    def plain(headers: Mapping[str, str]) -> str | None:
        return {"Bearer a": "alice"}.get(headers.get("authorization", ""))

    for authenticate in (slow, plain):
        handle = Handler()
        server = server_of(handle, authenticate=authenticate)
        assert (await ask(server, body=ADD, headers=[("Authorization", "Bearer a")])).status == 200
        assert handle.calls == [(ADD, "alice", None)]
        reply = await ask(server, body=ADD, headers=[("Authorization", "Bearer b")])
        assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
        twice = [("Authorization", "Bearer a")] * 2
        assert (await ask(server, body=ADD, headers=twice)).status == 400
        assert len(handle.calls) == 1


async def test_authenticate_may_set_its_own_www_authenticate(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(headers: Mapping[str, str]) -> str:
        raise Unauthorized("the token is old", www_authenticate='Bearer error="invalid_token"')

    reply = await ask(server_of(authenticate=refuse))
    assert (reply.status, reply.headers["www-authenticate"]) == (
        401,
        'Bearer error="invalid_token"',
    )
    assert reply.message == "the token is old"
    assert [record.getMessage() for record in caplog.records] == [
        "POST /rpc refused with 401: the token is old"
    ]


async def test_authenticate_that_fails_is_500_without_detail(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(headers: Mapping[str, str]) -> str:
        raise ValueError("secret detail")

    for authenticate in (broken, lambda headers: 7):
        caplog.clear()
        handle = Handler()
        reply = await ask(server_of(handle, authenticate=authenticate))
        assert (reply.status, reply.json["error"]["code"], handle.calls) == (500, -32603, [])
        assert b"secret" not in reply.body
        assert caplog.records[0].exc_info and caplog.records[0].levelno == logging.ERROR


# --- answers and streams --------------------------------------------------------------------------


@only_asgi
async def test_endpoint_that_fails_is_500_or_a_stream_that_is_cut(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken(request: HttpRequest) -> None:
        if request.method == "POST":
            await request.open_stream()
            await request.write(b"data: 1\n\n")
        raise ValueError("secret detail")

    server = HttpServer({"/": broken})
    reply = await ask(server, "/", method="GET")
    assert (reply.status, b"secret" in reply.body) == (500, False)
    reply = await ask(server, "/")
    assert (reply.status, reply.is_complete, reply.body) == (200, False, b"data: 1\n\n")
    assert [record.exc_info is not None for record in caplog.records] == [True, True]


async def test_events_of_a_stream_are_sent_at_once() -> None:
    async def stream(request: HttpRequest) -> None:
        await request.open_stream([("Mcp-Session-Id", "7")])
        assert request.started
        await request.write(b"data: 1\n\n")
        await request.close_stream()

    reply = await ask(HttpServer({"/": stream}), "/")
    assert reply.headers == {
        "content-type": "text/event-stream",
        "cache-control": "no-store",
        "x-accel-buffering": "no",
        "mcp-session-id": "7",
    }
    assert (reply.body, reply.is_complete) == (b"data: 1\n\n", True)


@only_asgi
async def test_large_answer_is_sent_in_pieces() -> None:
    for size in (0, 1, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, 512 << 10, 3 * (256 << 10) + 5):
        body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
        client = Client(piece(b""))
        reply = await ask(server_of(Handler(body)), client=client)
        assert (reply.body == body, reply.headers["content-length"], reply.is_complete) == (
            True,
            str(size),
            True,
        )
        assert all(len(event["body"]) <= 256 << 10 for event in client.sent[1:])


async def test_streams_are_counted() -> None:
    async def stream(request: HttpRequest) -> None:
        await request.open_stream()
        await until_left(request)

    server = HttpServer({"/": stream}, limits=Limits(streams=2))
    clients = [Client(piece(b"")), Client(piece(b""))]
    tasks = [asyncio.create_task(ask(server, "/", client=client)) for client in clients]
    for client in clients:
        await client.answered.wait()
    reply = await ask(server, "/")
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    clients[0].left.set()
    await tasks[0]
    third = Client(piece(b""), leaves=True)
    assert (await ask(server, "/", client=third)).status == 200
    clients[1].left.set()
    await tasks[1]


async def test_watched_client_that_leaves_is_reported_once() -> None:
    seen: list[str] = []
    watched = asyncio.Event()

    async def wait(request: HttpRequest) -> None:
        await request.body()
        request.receipt = Receipt()
        request.receipt.listen(lambda written: seen.append("written" if written else "lost"))
        left = asyncio.Event()
        request.watch(left.set)
        watched.set()
        await left.wait()
        seen.append(f"left {request.has_left}")
        with pytest.raises(Gone):
            await request.respond(200, b"{}")

    client = Client(piece(b"", True), piece(b""))
    task = asyncio.create_task(ask(HttpServer({"/": wait}), "/", client=client))
    await watched.wait()
    client.left.set()
    await task
    assert seen == ["lost", "left True"]


class ClosedTransport(Client):
    """A client that has left, as uvloop reports it to a server that writes."""

    def __init__(self, report: str) -> None:
        super().__init__(piece(b""))
        self._report = report

    async def send(self, event: Any) -> None:
        raise RuntimeError(self._report)


@only_asgi
@pytest.mark.parametrize(
    ("report", "logged"),
    [
        ("unable to perform operation on <TCPTransport closed=True>; the handler is closed", []),
        ("a mistake of middleware", ["POST / failed"]),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_transport_that_is_closed_is_a_client_that_has_left(
    is_stream: bool, report: str, logged: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Not a failure of the server, with a traceback in its log."""

    async def answer(request: HttpRequest) -> None:
        if is_stream:
            await request.open_stream()
        await request.respond(200, b"{}")

    await ask(HttpServer({"/": answer}), "/", client=ClosedTransport(report))
    assert [record.getMessage() for record in caplog.records] == logged


async def test_watched_client_that_waits_for_its_answer_gets_it() -> None:
    seen: list[str] = []

    async def answer(request: HttpRequest) -> None:
        await request.body()
        request.receipt = Receipt()
        request.receipt.listen(lambda written: seen.append("written" if written else "lost"))
        request.watch(lambda: seen.append("left"))
        await asyncio.sleep(0)
        await request.respond(200, b"{}")

    assert (await ask(HttpServer({"/": answer}), "/")).body == b"{}"
    await asyncio.sleep(0)  # a watcher that still ran would report now
    assert seen == ["written"]


@only_asgi
async def test_writing_to_a_closed_connection_is_noticed() -> None:
    seen: list[str] = []

    async def stream(request: HttpRequest) -> None:
        await request.body()
        await request.open_stream()
        await request.write(b"1")
        client.left.set()
        try:
            await request.write(b"2")
        except Gone as error:
            seen.append(str(error))
            raise

    client = Client(piece(b""))
    assert (await ask(HttpServer({"/": stream}), "/", client=client)).body == b"1"
    assert seen == ["the client has left"]


@only_asgi
async def test_writing_to_a_client_that_does_not_read_ends() -> None:
    seen: list[str] = []

    async def stream(request: HttpRequest) -> None:
        await request.open_stream()
        client.reading.clear()
        try:
            await request.write(b"1")
        except Gone as error:
            seen.append(str(error))

    client = Client(piece(b""))
    await ask(HttpServer({"/": stream}, limits=Limits(write_time=1)), "/", client=client)
    assert seen == ["the client did not read for 1 s"]


async def test_fast_path_makes_no_timer_and_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_of()
    client = Client(piece(ADD))
    scope = scope_of("POST", "/rpc", [*LOCAL, ("content-type", "application/json")])
    loop = asyncio.get_running_loop()
    for name in ("call_at", "call_later", "call_soon", "create_task", "create_future"):
        monkeypatch.setattr(loop, name, lambda *args, **options: pytest.fail("it waits"))
    running = server(scope, client.receive, client.send)
    with pytest.raises(StopIteration):
        running.send(None)
    monkeypatch.undo()
    assert client.reply.status == 200


# --- lifespan -------------------------------------------------------------------------------------


class Life:
    """The server's side of the lifespan protocol."""

    def __init__(self, server: HttpServer) -> None:
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.task = asyncio.ensure_future(
            server({"type": "lifespan"}, self.events.get, self.answers.put)
        )

    async def report(self, name: str) -> str:
        await self.events.put({"type": f"lifespan.{name}"})
        async with asyncio.timeout(30):
            return str((await self.answers.get())["type"])


async def test_lifespan_opens_and_closes() -> None:
    seen: list[Any] = []

    async def startup() -> None:
        seen.append("open")

    async def shutdown(seconds: float) -> None:
        seen.append(seconds)

    life = Life(server_of(startup=startup, shutdown=shutdown))
    assert await life.report("startup") == "lifespan.startup.complete"
    assert await life.report("shutdown") == "lifespan.shutdown.complete"
    assert seen[0] == "open" and 0 < seen[1] <= 8
    await life.task


async def test_failed_startup_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def startup() -> None:
        raise ValueError("no ledger")

    assert await Life(server_of(startup=startup)).report("startup") == "lifespan.startup.failed"
    assert caplog.records[0].exc_info


@only_asgi
async def test_stopping_asks_streams_to_end_and_cuts_those_that_do_not() -> None:
    closed = asyncio.Event()

    async def polite(request: HttpRequest) -> None:
        await request.open_stream()
        await request.stopping.wait()
        await request.close_stream()

    async def stubborn(request: HttpRequest) -> None:
        await request.open_stream()
        await asyncio.Event().wait()

    async def shutdown(seconds: float) -> None:
        closed.set()

    server = HttpServer({"/polite": polite, "/stubborn": stubborn}, shutdown=shutdown)
    clients = {path: Client(piece(b"")) for path in server.routes}
    tasks = [
        asyncio.create_task(ask(server, path, client=client)) for path, client in clients.items()
    ]
    for client in clients.values():
        await client.answered.wait()
    server.stop(1.0)
    await server.aclose()
    polite_reply, stubborn_reply = [await task for task in tasks]
    assert (polite_reply.is_complete, stubborn_reply.is_complete, closed.is_set()) == (
        True,
        False,
        True,
    )
    assert (await ask(server, "/polite")).status == 503


async def test_closing_reports_requests_and_an_application_that_outlast_their_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun = asyncio.Event()
    ended = asyncio.Event()

    async def work(_request: HttpRequest) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def shutdown(_seconds: float) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    server = HttpServer({"/work": work}, shutdown=shutdown)
    asking = asyncio.create_task(ask(server, "/work"))
    await begun.wait()
    server.stop(0.01)
    await server.aclose()
    asking.cancel()
    assert ended.is_set()
    assert [record.getMessage().split(" within")[0] for record in caplog.records] == [
        "stopping with 1 requests in flight",
        "the application did not close",
    ]


async def test_cancel_as_the_application_closes_is_not_lost() -> None:
    async def shutdown(_seconds: float) -> None:
        closing.cancel()

    closing = asyncio.create_task(HttpServer({}, shutdown=shutdown).aclose())
    with pytest.raises(asyncio.CancelledError):
        await closing


def test_headers_are_a_mapping() -> None:
    headers = Headers([("a", " 1 "), ("b", "\xfc"), ("a", "2")])
    assert (dict(headers), len(headers), headers.all("A"), headers["B"]) == (
        {"a": "1, 2", "b": "ü"},
        2,
        ["1", "2"],
        "ü",
    )
    assert (headers.get("c"), headers.get("c", "x"), "A" in headers, "ü€" in headers) == (
        None,
        "x",
        True,
        False,
    )


async def test_request_that_is_ended_by_the_stop_ends_quietly() -> None:
    """Servers print a traceback for each one that raises.

    Before the stop a cancellation is intended, and propagates.
    """
    entered = asyncio.Event()

    async def wait(request: HttpRequest) -> None:
        entered.set()
        await asyncio.Event().wait()

    server = HttpServer({"/wait": wait})
    for is_stopping in (False, True):
        entered.clear()
        asking = asyncio.create_task(ask(server, "/wait"))
        await asyncio.wait_for(entered.wait(), 10)
        if is_stopping:
            server.stop()
        asking.cancel()
        await asyncio.wait([asking], timeout=10)
        assert asking.cancelled() is not is_stopping


# --- RSGI -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("interface", ["rsgi"], indirect=True)
async def test_websocket_is_closed_over_rsgi() -> None:
    class Socket:
        closed = False

        def close(self, status: int | None, /) -> None:
            self.closed = True

    socket = Socket()
    scope = rsgi.Scope(scope_of("GET", "/mcp", LOCAL))
    scope.proto = "ws"
    await server_of().__rsgi__(scope, socket)
    assert socket.closed


@pytest.mark.parametrize("interface", ["rsgi"], indirect=True)
@pytest.mark.parametrize("address", ["", "/run/shop.socket", "127.0.0.1:1", "[fe80::1%2]:1"])
async def test_long_answer_is_sent_where_no_socket_is_found(address: str) -> None:
    """As over a socket of the file system: the process cannot wait for such a client, but it
    answers.
    """

    async def stream(request: HttpRequest) -> None:
        await request.body()
        await request.open_stream()
        for _ in range(8):
            await request.write(b"x" * 65_536)
        await request.close_stream()

    async def broken(request: HttpRequest) -> None:
        await request.open_stream()
        raise ValueError("as planned")

    server = HttpServer({"/": stream, "/broken": broken})
    for path, length in (("/", 8 * 65_536), ("/broken", 0)):
        client = Client(piece(b""))
        scope = rsgi.Scope(scope_of("POST", path, LOCAL))
        scope.client = address
        protocol = rsgi.Protocol(client.receive, client.send, None)
        await server.__rsgi__(scope, protocol)
        await protocol.end()
        assert len(client.reply.body) == length

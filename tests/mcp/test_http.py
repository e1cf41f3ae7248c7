"""Streamable HTTP: media types, hosts, bodies and versions, and what is refused before anything
runs.
"""

import base64
import json
from typing import Any

import pytest

from tests import rsgi
from tests.mcp.asgi import (
    BASIC,
    PREFIX,
    R1,
    R2,
    R3,
    R4,
    R5,
    Exchange,
    enveloped,
    hello,
    notification,
    over_http,
    repeated,
    request,
    response,
)
from tests.mcp.lab import Lab, call, every_revision, legacy, pairs, refused
from wirecall import Limits

# --- media types ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True, params=rsgi.INTERFACES)
def interface(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here runs over both interfaces."""
    monkeypatch.setattr(rsgi, "interface", request.param)


@every_revision
@pytest.mark.parametrize(
    "media", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""]
)
async def test_body_that_is_not_json_is_415(revision: str, media: str | None) -> None:
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        message = client.message("tools/call", {"name": "look"})
        headers = {n: v for n, v in client.headers(message).items() if n != "content-type"}
        answered = await client.post(
            message, {**headers, **({} if media is None else {"content-type": media})}
        ).started()
    assert (answered.status, lab.ran) == (415, [])


@every_revision
@pytest.mark.parametrize(
    "media",
    ["application/json; charset=utf-8", "Application/JSON", "application/json;charset=UTF-8"],
)
async def test_content_type_may_spell_json_in_several_forms(revision: str, media: str) -> None:
    async with over_http(Lab().app, revision) as client:
        assert await client.result("tools/list", headers={"content-type": media})


@every_revision
@pytest.mark.parametrize(
    "accept", ["application/json", "text/event-stream", "text/html", "image/*"]
)
async def test_accept_must_list_both_kinds_of_answer(revision: str, accept: str) -> None:
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        message = client.message("tools/call", {"name": "look"})
        answered = await client.post(
            message, {**client.headers(message), "accept": accept}
        ).started()
    assert (answered.status, lab.ran) == (406, [])


@pytest.mark.parametrize(
    "accept", ["*/*", "application/*, text/*", "TEXT/EVENT-STREAM;q=0.5,application/json;q=0.9"]
)
async def test_accept_may_use_other_forms(accept: str) -> None:
    async with over_http(Lab().app, R4) as client:
        assert await client.result("tools/list", headers={"accept": accept})


async def test_get_must_accept_a_stream() -> None:
    async with over_http(Lab().app, R4) as client:
        answered = await client.exchange(
            "GET", {**client.headers(), "accept": "application/json"}
        ).started()
    assert answered.status == 406


@pytest.mark.parametrize("method", ["PUT", "PATCH", "HEAD", "OPTIONS"])
async def test_other_methods_are_405(method: str) -> None:
    async with over_http(Lab().app, R4) as client:
        answered = await client.exchange(method).started()
    assert answered.status == 405
    assert "POST" in (answered.header("allow") or "")


# --- Host and Origin (matrix 1.12, trap 49) -------------------------------------------------------

EVIL = [
    {"host": "evil.example.com"},
    {"host": "localhost.evil.example.com"},
    {"host": "evil.example.com:8420"},
    {"origin": "http://evil.example.com"},
    {"origin": "https://localhost.evil.example.com"},
    {"origin": "http://localhost@evil.example.com"},
    {"origin": "http://evil.example.com/http://localhost"},
    {"origin": "null"},
    {"origin": "localhost"},
    {"origin": ""},
]


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
@pytest.mark.parametrize("evil", EVIL)
async def test_host_names_of_others_are_403_for_every_method(
    method: str, evil: dict[str, str]
) -> None:
    lab = Lab()
    async with over_http(lab.app, R4) as client:
        body = (
            json.dumps(request("tools/call", {"name": "look"})).encode()
            if method == "POST"
            else b""
        )
        answered = await client.exchange(method, {**client.headers(), **evil}, body).started()
        assert "id" not in json.loads(await answered.read())
    assert (answered.status, lab.ran) == (403, [])


FRIENDS = [
    {"host": "127.0.0.1:8420"},
    {"host": "[::1]:1"},
    {"host": "LOCALHOST"},
    {"origin": "http://localhost:5173"},
    {"origin": "https://127.0.0.1"},
    {"origin": "http://[::1]:9"},
]


@pytest.mark.parametrize("friend", FRIENDS)
async def test_host_names_of_the_loopback_are_ours(friend: dict[str, str]) -> None:
    async with over_http(Lab().app, R4) as client:
        assert await client.result("tools/list", headers=friend)


async def test_doubled_hosts_and_origins_are_400() -> None:
    async with over_http(Lab().app, R4) as client:
        for name, value in (("host", "evil.example.com"), ("origin", "http://evil.example.com")):
            message = request("tools/list")
            given = pairs({**client.headers(), "origin": "http://localhost"}, (name, value))
            assert (await client.post(message, given).started()).status == 400


# --- bodies ---------------------------------------------------------------------------------------

UNREADABLE = [
    (b"", -32700),
    (b"{", -32700),
    (b'{"jsonrpc":"2.0","id":1,"method":"tools/list"', -32700),
    (b'{"jsonrpc":"2.0","id":1,"method":"tools/list"}{}', -32700),
    (b'{"jsonrpc":"2.0","id":1,"method":"tools/\xff\xfe"}', -32700),
    ('{"jsonrpc":"2.0","id":1,"method":"tools/list"}'.encode("utf-16"), -32700),
    (b'"text"', -32600),
    (b"null", -32600),
    (b"{}", -32600),
    (b'{"jsonrpc":"2.0"}', -32600),
    (b'{"jsonrpc":"2.0","id":1}', -32600),
    (b'{"jsonrpc":"1.0","id":1,"method":"tools/list"}', -32600),
    (b'{"id":1,"method":"tools/list"}', -32600),
    (b'{"jsonrpc":"2.0","id":1,"method":5}', -32600),
    (b'{"jsonrpc":"2.0","id":1,"result":{},"error":{"code":1,"message":""}}', -32600),
]


@every_revision
async def test_invalid_message_is_400(revision: str) -> None:
    async with over_http(Lab().app, revision) as client:
        for body, code in UNREADABLE:
            answered = await client.post(body).started()
            told = await answered.json()
            assert (body, answered.status, told["error"]["code"]) == (body, 400, code)
            if revision in (R4, R5):
                assert "id" not in told or told["id"] is not None  # trap 15


@every_revision
@pytest.mark.parametrize("id", [None, True, False, 1.5, [], {}])
async def test_invalid_ids_are_400(revision: str, id: Any) -> None:
    """Trap 13: `id: null` is not a notification, and not a request."""
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        message = {**client.message("tools/call", {"name": "look"}), "id": id}
        assert await refused(client.post(message)) == (400, -32600)
    assert lab.ran == []


@every_revision
@pytest.mark.parametrize("id", [0, -1, "", "1", 2**53, 2**63, 10**30, "ü\n"])
async def test_ids_are_echoed_with_their_type(revision: str, id: Any) -> None:
    """Trap 16."""
    async with over_http(Lab().app, revision) as client:
        for method in ("tools/list", "no/such"):
            answer = await client.call(method, id=id)
            assert (answer["id"], type(answer["id"])) == (id, type(id))


@every_revision
@pytest.mark.parametrize("params", [[], ["look"], "look", 5])
async def test_params_must_be_an_object(revision: str, params: Any) -> None:
    """Matrix 1.2: no params by position."""
    async with over_http(Lab().app, revision) as client:
        status, code = await refused(client.post(request("tools/call", params)))
    assert (status, code) in ((400, -32600), (400, -32602))


@every_revision
async def test_body_that_is_too_long_is_413(revision: str) -> None:
    lab = Lab(limits=Limits(bytes_in=2000))
    async with over_http(lab.app, revision) as client:
        message = client.message("tools/call", {"name": "look", "arguments": {"x": "y" * 3000}})
        data = json.dumps(message).encode()
        told = {**client.headers(message), "content-length": str(len(data))}
        assert (await client.exchange("POST", told, data).started()).status == 413
        pieces = [data[start : start + 500] for start in range(0, len(data), 500)]
        assert (
            await client.exchange("POST", client.headers(message), pieces).started()
        ).status == 413
    assert lab.ran == []


async def test_body_may_arrive_in_pieces() -> None:
    async with over_http(Lab().app, R4) as client:
        data = json.dumps(request("tools/list")).encode()
        answered = await client.exchange(
            "POST", None, [data[:9], b"", data[9:20], data[20:]]
        ).json()
    assert answered["result"]["tools"]


async def test_body_that_does_not_arrive_is_408() -> None:
    async with over_http(Lab(limits=Limits(body_time=1)).app, R5) as client:
        stalled = Exchange(client.asgi, "POST", BASIC, iter([b"{"]))
        stalled._chunks = []  # the body never arrives
        assert (await stalled.started()).status == 408


async def test_deep_body_is_refused() -> None:
    deep = b'{"jsonrpc":"2.0","id":1,"result":' + b"[" * 500 + b"]" * 500 + b"}"
    async with over_http(Lab().app, R4) as client:
        assert (await client.post(deep).started()).status == 400


# --- the version header ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "version", ["1999-01-01", "v9", "", "2025-11-25, 2025-11-25", "2025-11-25 x"]
)
@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
async def test_unknown_version_is_400(version: str, method: str) -> None:
    """Matrix 1.1: MUST 400, whatever is sent with it."""
    lab = Lab()
    async with over_http(lab.app, R4) as client:
        headers = {**client.headers(), "mcp-protocol-version": version}
        if method != "POST":
            assert (await client.exchange(method, headers).started()).status == 400
            return
        for message in (
            request("tools/call", {"name": "look"}),
            notification("notifications/initialized"),
            response("x"),
        ):
            assert (await client.post(message, headers).started()).status == 400
    assert lab.ran == []


@every_revision
async def test_doubled_version_is_400(revision: str) -> None:
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        message = client.message("tools/call", {"name": "look"})
        own = {n: v for n, v in client.headers(message).items() if n != "mcp-protocol-version"}
        told = pairs(own, ("mcp-protocol-version", revision), ("mcp-protocol-version", revision))
        assert (await client.post(message, told).started()).status == 400
    assert lab.ran == []


async def test_initialize_may_have_headers_of_other_revisions() -> None:
    """Trap 21: a version header, and `Mcp-Method` on requests that do not need it, are ignored."""
    async with over_http(Lab().app, R4) as client:
        told = {**BASIC, "mcp-protocol-version": R3, "mcp-method": "wrong"}
        answered = await client.post(hello(R2), told).started()
        assert (await answered.json())["result"]["protocolVersion"] == R2
        assert await client.result(
            "tools/list", headers={"mcp-method": "tools/call", "mcp-name": "x"}
        )


# --- headers of 2026-07-28 (matrix 1.11, 2.5; traps 22, 28 to 32) ---------------------------------


WRONG = [
    {"mcp-method": "tools/list"},
    {"mcp-method": "TOOLS/CALL"},
    {"mcp-method": ""},
    {"mcp-method": None},
    {"mcp-name": "other"},
    {"mcp-name": "Look"},
    {"mcp-name": ""},
    {"mcp-name": None},
    {"mcp-name": "=?base64?bG9vaw?="},
    {"mcp-name": "=?base64?bG9v*aw==?="},
    {"mcp-name": "=?base64?/w==?="},
    {"mcp-name": "=?BASE64?bG9vaw==?="},
    {"mcp-name": "=?base64?bG9vaw=="},
    {"mcp-protocol-version": R4},
    {"mcp-protocol-version": "v999.0.0"},
    {"mcp-protocol-version": ""},
    {"mcp-protocol-version": None},
]


@pytest.mark.parametrize("wrong", WRONG)
async def test_headers_that_do_not_repeat_the_body_are_refused(
    wrong: dict[str, str | None],
) -> None:
    lab = Lab()
    async with over_http(lab.app) as client:
        headers = {**client.headers(call()), **wrong}
        answered = await client.post(
            call(), {n: v for n, v in headers.items() if v is not None}
        ).started()
        told = await answered.json()
    assert (answered.status, told["id"], told["error"]["code"], lab.ran) == (400, 5, -32020, [])


@pytest.mark.parametrize("name", ["mcp-method", "mcp-name", "mcp-protocol-version"])
async def test_doubled_headers_are_refused(name: str) -> None:
    lab = Lab()
    async with over_http(lab.app) as client:
        headers = client.headers(call())
        assert (
            await client.post(call(), pairs(headers, (name, headers[name]))).started()
        ).status == 400
    assert lab.ran == []


@pytest.mark.parametrize(
    "right",
    [
        {"mcp-name": "  look\t"},
        {"MCP-NAME": "look"},
        {"mcp-name": "=?base64?bG9vaw==?="},
        {"mcp-method": " tools/call "},
    ],
)
async def test_headers_may_differ_in_blanks_case_of_names_and_base64(right: dict[str, str]) -> None:
    async with over_http(Lab().app) as client:
        names = {name.lower() for name in right}
        headers = {n: v for n, v in client.headers(call()).items() if n not in names}
        assert (await client.post(call(), {**headers, **right}).json())["result"]


def base64ed(text: str) -> str:
    return f"=?base64?{base64.b64encode(text.encode()).decode()}?="


@pytest.mark.parametrize(
    ("method", "member", "name"),
    [("prompts/get", "name", "grüße"), ("resources/read", "uri", "test://ä b")],
)
async def test_headers_carry_special_names_as_base64(method: str, member: str, name: str) -> None:
    message = enveloped(method, {member: name})
    async with over_http(Lab().app) as client:
        told = {**BASIC, **repeated(message), "mcp-name": base64ed(name)}
        assert "result" in await client.post(message, told).json()


@pytest.mark.parametrize("method", ["tools/list", "server/discover", "no/such"])
async def test_methods_without_a_name_need_no_name_header(method: str) -> None:
    async with over_http(Lab().app) as client:
        answer = await client.call(method)
        assert answer.get("error", {}).get("code") in (None, -32601)


LADDER = [
    (
        "no envelope beats everything",
        request("no/such", {}, 5),
        {"mcp-protocol-version": R5},
        400,
        -32602,
    ),
    (
        "no capabilities",
        request("no/such", {"_meta": {f"{PREFIX}protocolVersion": "v9"}}, 5),
        {},
        400,
        -32602,
    ),
    (
        "headers beat the version",
        enveloped("no/such", id=5, version="v9"),
        {"mcp-protocol-version": R5},
        400,
        -32020,
    ),
    (
        "the version beats the method",
        enveloped("no/such", id=5, version="v9"),
        repeated({"method": "no/such"}, "v9"),
        400,
        -32022,
    ),
    ("the method", enveloped("no/such", id=5), repeated({"method": "no/such"}), 404, -32601),
    (
        "a body with an envelope is modern without headers",
        enveloped("tools/list", id=5),
        {},
        400,
        -32020,
    ),
    (
        "whatever the header says",
        enveloped("tools/list", id=5),
        {"mcp-protocol-version": R4},
        400,
        -32020,
    ),
]


@pytest.mark.parametrize(
    ("message", "headers", "status", "code"),
    [row[1:] for row in LADDER],
    ids=[row[0] for row in LADDER],
)
async def test_checks_run_in_the_specified_order(
    message: Any, headers: dict[str, str], status: int, code: int
) -> None:
    """Trap 22; every error echoes the id."""
    async with over_http(Lab().app) as client:
        answered = await client.post(message, {**BASIC, **headers}).started()
        told = await answered.json()
    assert (answered.status, told["error"]["code"], told["id"]) == (status, code, 5)


PARAMS: list[tuple[dict[str, Any], dict[str, str], bool]] = [
    ({}, {}, True),
    ({"place": "eu"}, {"mcp-param-place": "eu"}, True),
    ({"place": "eu"}, {"mcp-param-place": " eu "}, True),
    ({"place": "eu"}, {"mcp-param-place": base64ed("eu")}, True),
    ({"place": "zürich"}, {"mcp-param-place": base64ed("zürich")}, True),
    ({"place": " edge "}, {"mcp-param-place": base64ed(" edge ")}, True),
    ({"place": "=?base64?eA==?="}, {"mcp-param-place": base64ed("=?base64?eA==?=")}, True),
    ({"place": "=?base64?eA=="}, {"mcp-param-place": "=?base64?eA=="}, True),
    ({"place": "eA==?="}, {"mcp-param-place": "eA==?="}, True),
    ({"place": ""}, {"mcp-param-place": ""}, True),
    ({"place": None}, {}, True),
    ({"count": 42}, {"mcp-param-count": "42"}, True),
    ({"count": -7}, {"mcp-param-count": "-7"}, True),
    ({"count": 9007199254740991}, {"mcp-param-count": "9007199254740991"}, True),
    ({"deep": True}, {"mcp-param-deep": "true"}, True),
    ({"deep": False}, {"mcp-param-deep": "false"}, True),
    ({"place": "eu", "count": 1}, {"mcp-param-place": "eu", "mcp-param-count": "1"}, True),
    ({"place": "eu"}, {}, False),
    ({"place": "eu"}, {"mcp-param-place": "us"}, False),
    ({"place": "eu"}, {"mcp-param-place": "EU"}, False),
    ({"place": "eu"}, {"mcp-param-place": ""}, False),
    ({"place": "Hello"}, {"mcp-param-place": "=?base64?SGVsbG8?="}, False),
    ({"place": "Hello"}, {"mcp-param-place": "=?base64?SGV*sbG8=?="}, False),
    ({"place": ""}, {}, False),
    ({}, {"mcp-param-place": "eu"}, False),
    ({"count": 42}, {"mcp-param-count": "43"}, False),
    ({"count": 42}, {"mcp-param-count": "4_2"}, False),
    ({"count": 42}, {}, False),
    ({"deep": True}, {"mcp-param-deep": "1"}, False),
    ({"deep": True}, {"mcp-param-deep": "True"}, False),
    ({"deep": False}, {}, False),
]


@pytest.mark.parametrize(("arguments", "headers", "agree"), PARAMS)
async def test_marked_arguments_are_repeated(
    arguments: dict[str, Any], headers: dict[str, str], agree: bool
) -> None:
    lab = Lab()
    message = call("region", **arguments)
    async with over_http(lab.app) as client:
        answered = await client.post(message, {**client.headers(message), **headers}).started()
        told = await answered.json()
    if agree:
        assert answered.status == 200 and "result" in told, told
    else:
        assert (answered.status, told["error"]["code"], lab.ran) == (400, -32020, [])


async def test_doubled_argument_header_is_refused() -> None:
    message = call("region", place="eu")
    async with over_http(Lab().app) as client:
        told = pairs(client.headers(message), ("mcp-param-place", "eu"), ("mcp-param-place", "eu"))
        assert await refused(client.post(message, told)) == (400, -32020)


@legacy
async def test_headers_of_2026_07_28_are_ignored_at_older_revisions(revision: str) -> None:
    async with over_http(Lab().app, revision) as client:
        assert await client.tool(
            "region", {"place": "eu"}, headers={"mcp-param-place": "us", "mcp-name": "x"}
        )


# --- the rest of 2026-07-28 -----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_methods_other_than_post_are_refused_at_2026_07_28(method: str) -> None:
    async with over_http(Lab().app) as client:
        answered = await client.exchange(method, {**BASIC, "mcp-protocol-version": R5}).started()
    assert (answered.status, answered.header("allow")) == (405, "POST")


async def test_response_is_refused_at_2026_07_28() -> None:
    """Matrix 2.4: array or response => 400."""
    async with over_http(Lab().app) as client:
        assert (await client.post(response("x")).started()).status == 400


async def test_notification_is_taken_without_headers_and_checked_with_them() -> None:
    """Open point 9: accept without; validate if present."""
    message = notification(
        "notifications/cancelled", {"requestId": 1, "_meta": {f"{PREFIX}protocolVersion": R5}}
    )
    async with over_http(Lab().app) as client:
        answered = await client.post(message, {**BASIC, "mcp-protocol-version": R5}).started()
        assert (answered.status, await answered.read()) == (202, b"")
        wrong = {**BASIC, "mcp-protocol-version": R5, "mcp-method": "tools/call"}
        assert await refused(client.post(message, wrong)) == (400, -32020)


async def test_sessions_and_event_ids_are_ignored_and_never_made() -> None:
    async with over_http(Lab().app) as client:
        await client.tool("look", headers={"mcp-session-id": "nobody", "last-event-id": "9"})
        assert client.last is not None and client.last.status == 200
        assert client.last.header("mcp-session-id") is None


async def test_requests_share_no_state_at_2026_07_28() -> None:
    """Matrix 1.1: a server infers nothing from earlier requests."""
    async with over_http(Lab().app, capabilities={"sampling": {}}) as client:
        await client.tool("many", {"count": 1}, meta={f"{PREFIX}logLevel": "debug"})
        assert len(client.heard) == 1
        await client.tool("many", {"count": 1})
        assert len(client.heard) == 1


@pytest.mark.parametrize("revision", [R1, R2, R3, R4])
async def test_revision_without_a_session_and_a_header_is_2025_03_26(revision: str) -> None:
    """Without any sign of a revision: 2025-03-26.

    With a version header of an older revision: that one.
    """
    async with over_http(Lab().app) as client:
        bare = await client.post(request("tools/list"), BASIC).json()
        assert (
            "annotations" in bare["result"]["tools"][0]
            and "title" not in bare["result"]["tools"][0]
        )
        told = await client.post(
            request("tools/list"), {**BASIC, "mcp-protocol-version": revision}
        ).json()
        assert ("annotations" in told["result"]["tools"][0]) == (revision != R1)

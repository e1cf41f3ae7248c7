"""What each of the five revisions has (V8): tables written from the specification, not from our
code.

A column is a revision, from 2024-11-05 to 2026-07-28; `+` says that it has the thing, `-` that it
does not.
"""

import asyncio
import json
from typing import Any

import pytest
from msgspec import Struct

from tests.calls import make_app
from tests.mcp.asgi import (
    BASIC,
    EVERY_WAY,
    LEGACY,
    PREFIX,
    R1,
    R2,
    R3,
    R4,
    R5,
    REVISIONS,
    TRANSPORTS,
    LineClient,
    enveloped,
    hello,
    notification,
    over_http,
    over_stdio,
    repeated,
    request,
    speak,
)
from wirecall import App, Context, ToolAnnotations
from wirecall.mcp import Audio, Embedded, Image, Message, ResourceLink, Text, ToolResult

every_way = pytest.mark.parametrize(("transport", "revision"), EVERY_WAY)


class Point(Struct):
    x: int
    y: int


def zoo() -> App:
    """An app that has one of everything."""
    app = make_app(instructions="Be kind.")
    reads = ToolAnnotations(readOnlyHint=True)

    @app.tool(annotations=reads, title="A point")
    def point(x: int = 1) -> Point:
        """Give a point."""
        return Point(x, 2)

    @app.tool(annotations=reads)
    def content(kind: str) -> ToolResult:
        kinds: dict[str, Any] = {
            "text": Text(text="hi"),
            "image": Image(data=b"\x00\x01", mime_type="image/png"),
            "resource": Embedded(uri="test://e", text="inside", mime_type="text/plain"),
            "audio": Audio(data=b"\x02", mime_type="audio/wav"),
            "resource_link": ResourceLink(uri="test://linked", name="linked"),
        }
        return ToolResult(content=[kinds.get(kind, "no such kind")])

    @app.tool(annotations=reads)
    async def steps(ctx: Context) -> str:
        await ctx.progress(1, total=2, message="half")
        return "done"

    @app.resource("test://text", title="A text", mime_type="text/plain")
    def text() -> str:
        return "hello"

    @app.resource("test://item/{id}", title="An item")
    def item(id: str) -> str:
        return id

    @app.prompt(title="A greeting")
    def greet(who: str) -> list[Message]:
        """Say hello."""
        return [
            Message("user", f"hello {who}"),
            Message("user", ResourceLink(uri="test://linked", name="linked")),
        ]

    @app.completion("greet", "who")
    def who(value: str) -> list[str]:
        return [name for name in ("ann", "bob") if name.startswith(value)]

    return app


def has(cells: str, revision: str) -> bool:
    """Reads a row of a table."""
    return cells.split()[REVISIONS.index(revision)] == "+"


# --- methods (matrix 1.4) -------------------------------------------------------------------------

REF = {"type": "ref/prompt", "name": "greet"}

# fmt: off
METHODS: list[tuple[str, Any, str]] = [
    #                                                                     R1 R2 R3 R4 R5
    ("server/discover", None,                                            "-  -  -  -  +"),
    ("ping", None,                                                       "+  +  +  +  -"),
    ("tools/list", None,                                                 "+  +  +  +  +"),
    ("tools/call", {"name": "point"},                                    "+  +  +  +  +"),
    ("prompts/list", None,                                               "+  +  +  +  +"),
    ("prompts/get", {"name": "greet", "arguments": {"who": "ann"}},      "+  +  +  +  +"),
    ("resources/list", None,                                             "+  +  +  +  +"),
    ("resources/templates/list", None,                                   "+  +  +  +  +"),
    ("resources/read", {"uri": "test://text"},                           "+  +  +  +  +"),
    ("resources/subscribe", {"uri": "test://text"},                      "+  +  +  +  -"),
    ("resources/unsubscribe", {"uri": "test://text"},                    "+  +  +  +  -"),
    ("completion/complete", {"ref": REF, "argument": {"name": "who", "value": "a"}}, "+  +  +  +  +"),
    ("logging/setLevel", {"level": "error"},                             "+  +  +  +  -"),
    ("tasks/get", {"taskId": "1"},                                       "-  -  -  -  -"),
    ("tasks/list", None,                                                 "-  -  -  -  -"),
    ("sampling/createMessage", {"messages": [], "maxTokens": 1},         "-  -  -  -  -"),
    ("roots/list", None,                                                 "-  -  -  -  -"),
    ("elicitation/create", {"message": "?", "requestedSchema": {}},      "-  -  -  -  -"),
    ("rpc.discover", None,                                               "-  -  -  -  -"),
    ("no/such", None,                                                    "-  -  -  -  -"),
]
# fmt: on


@pytest.mark.parametrize("revision", REVISIONS)
@pytest.mark.parametrize(("method", "params", "cells"), METHODS, ids=[row[0] for row in METHODS])
async def test_method_exists_at_the_revisions_of_the_table(
    method: str, params: Any, cells: str, revision: str
) -> None:
    async with over_http(zoo(), revision) as client:
        answer = await client.call(method, params, id="m-1")
    assert answer["id"] == "m-1"
    assert client.last is not None
    if has(cells, revision):
        assert "result" in answer, answer
        assert client.last.status == 200
    else:
        assert answer["error"]["code"] == -32601
        assert client.last.status == (404 if revision == R5 else 200)


@pytest.mark.parametrize("revision", REVISIONS)
async def test_methods_on_stdio_are_the_same(revision: str) -> None:
    # Plain JSON-RPC on the same lines has that one.
    rows = [row for row in METHODS if row[0] != "rpc.discover"]
    async with over_stdio(zoo(), revision) as client:
        for method, params, cells in rows:
            answer = await client.call(method, params)
            told = "result" if "result" in answer else answer["error"]["code"]
            assert (method, told) == (method, "result" if has(cells, revision) else -32601)


@pytest.mark.parametrize("revision", LEGACY)
async def test_listen_exists_only_at_the_newest_revision(revision: str) -> None:
    async with over_http(zoo(), revision) as client:
        assert (await client.error("subscriptions/listen", {"notifications": {}}))["code"] == -32601


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_initialize_with_an_envelope_is_a_request_of_the_newest_revision(
    transport: str,
) -> None:
    """Matrix 2.5, step 6, and trap 20."""
    async with speak(transport, zoo(), R5) as client:
        answer = await client.call("initialize", hello()["params"], id=3)
    assert (answer["id"], answer["error"]["code"]) == (3, -32601)


@every_way
@pytest.mark.parametrize("method", ["notifications/roots/list_changed", "notifications/unheard_of"])
async def test_notifications_are_never_answered(transport: str, revision: str, method: str) -> None:
    async with speak(transport, zoo(), revision) as client:
        await client.notify(method)
        assert await client.result("tools/list")
        if isinstance(client, LineClient):
            assert client.unasked.empty()


# --- beginning (matrix 1.1) -----------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("revision", LEGACY)
async def test_initialize_echoes_a_known_version(transport: str, revision: str) -> None:
    async with speak(transport, zoo(), revision) as client:
        assert client.info["protocolVersion"] == revision
        assert client.info["instructions"] == "Be kind."
        assert {"name", "version"} <= client.info["serverInfo"].keys()


@pytest.mark.parametrize(
    "offer", ["1999-01-01", "2024-10-07", "2025-11-26", "9999-12-31", "", "latest", "2025-3-26", R5]
)
async def test_initialize_answers_an_unknown_version_with_our_newest_handshake_revision(
    offer: str,
) -> None:
    """A success, not an error; 2026-07-28 has no handshake, so the server does not offer it there
    (traps 19 and 20).
    """
    async with over_http(zoo(), R5) as http, over_stdio(zoo(), R5) as stdio:
        answered = await http.post(hello(offer), BASIC).started()
        for answer in (await answered.json(), await stdio.exchange(hello(offer))):
            assert answer["result"]["protocolVersion"] == R4
    assert answered.header("mcp-session-id")


@pytest.mark.parametrize(
    "params", [None, {}, {"capabilities": {}}, {"protocolVersion": 5}, {"protocolVersion": None}]
)
async def test_initialize_without_a_version_is_refused(params: Any) -> None:
    async with over_http(zoo(), R5) as client:
        answered = await client.post(
            request("initialize", params, 4), {**client.headers(), "mcp-protocol-version": R4}
        ).started()
        assert answered.header("mcp-session-id") is None
        told = await answered.json()
        assert (told["id"], told["error"]["code"]) == (4, -32602)


async def test_initialize_on_stdio_may_be_preceded_only_by_ping() -> None:
    client = LineClient(zoo(), R4)
    await client.open(handshake=False)
    try:
        assert (await client.exchange(request("ping", id=1)))["result"] == {}
        assert (await client.exchange(request("tools/list", id=2)))["error"]["code"] == -32600
        assert (await client.exchange(hello(R3, id=3)))["result"]["protocolVersion"] == R3
        assert (await client.exchange(request("tools/list", id=4)))["result"]
    finally:
        await client.close()


async def test_initialize_that_fails_leaves_the_pipe_open_for_another() -> None:
    client = LineClient(zoo(), R4)
    await client.open(handshake=False)
    try:
        assert (await client.exchange(request("initialize", {}, 1)))["error"]["code"] == -32602
        assert (await client.exchange(hello(R2, id=2)))["result"]["protocolVersion"] == R2
        assert (await client.exchange(hello(R4, id=3)))["error"]["code"] == -32600
    finally:
        await client.close()


@pytest.mark.parametrize("revision", LEGACY)
async def test_pipe_serves_both_eras(revision: str) -> None:
    """Matrix 2.1: the version is bound to the message at 2026-07-28, to the process before."""
    async with over_stdio(zoo(), revision) as client:
        modern = await client.exchange(enveloped("tools/list", id="m"))
        older = await client.exchange(request("tools/list", id="o"))
    assert modern["result"]["resultType"] == "complete"
    assert "resultType" not in older["result"]


# --- the envelope ---------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("version", [*LEGACY, "v999.0.0", "", "2026-07-29"])
async def test_envelope_with_a_version_that_has_a_handshake_is_refused(
    transport: str, version: str
) -> None:
    message = enveloped("tools/list", id=9, version=version)
    async with speak(transport, zoo(), R5) as client:
        if isinstance(client, LineClient):
            answer = await client.exchange(message)
        else:
            answered = await client.post(
                message, {**client.headers(message), **repeated(message, version)}
            ).started()
            assert answered.status == 400
            answer = await answered.json()
    assert (answer["id"], answer["error"]["code"]) == (9, -32022)
    assert answer["error"]["data"]["supported"] == [R5]
    assert answer["error"]["data"]["requested"] == version


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    "meta",
    [
        {f"{PREFIX}protocolVersion": R5},
        {f"{PREFIX}protocolVersion": R5, f"{PREFIX}clientCapabilities": None},
        {f"{PREFIX}protocolVersion": R5, f"{PREFIX}clientCapabilities": []},
        {f"{PREFIX}protocolVersion": 5, f"{PREFIX}clientCapabilities": {}},
        {f"{PREFIX}protocolVersion": R5, f"{PREFIX}clientCapabilities": {}, "progressToken": 1.5},
        {f"{PREFIX}protocolVersion": R5, f"{PREFIX}clientCapabilities": {}, "progressToken": True},
        {
            f"{PREFIX}protocolVersion": R5,
            f"{PREFIX}clientCapabilities": {},
            f"{PREFIX}logLevel": "loud",
        },
    ],
)
async def test_envelope_that_lacks_something_is_invalid(transport: str, meta: Any) -> None:
    """Matrix 1.1: -32602, and HTTP 400."""
    message = request("tools/list", {"_meta": meta}, 5)
    async with speak(transport, zoo(), R5) as client:
        if isinstance(client, LineClient):
            answer = await client.exchange(message)
        else:
            answered = await client.post(message).started()
            assert answered.status == 400
            answer = await answered.json()
    assert (answer["id"], answer["error"]["code"]) == (5, -32602)


@pytest.mark.parametrize(
    "params", [None, {}, {"_meta": {}}, {"_meta": {f"{PREFIX}clientCapabilities": {}}}]
)
async def test_discover_without_a_version_is_invalid(params: Any) -> None:
    async with over_stdio(zoo(), R5) as client:
        assert (await client.exchange(request("server/discover", params, 6)))["error"][
            "code"
        ] == -32602
    async with over_http(zoo(), R5) as client:
        answered = await client.post(request("server/discover", params, 6)).started()
        assert (answered.status, (await answered.json())["error"]["code"]) == (400, -32602)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_client_may_omit_its_name(transport: str) -> None:
    async with speak(transport, zoo(), R5) as client:
        found = await client.result("server/discover")
    assert found["supportedVersions"] == [R5]
    assert found["instructions"] == "Be kind."
    assert {"tools", "prompts", "resources"} <= found["capabilities"].keys()


# --- capabilities ---------------------------------------------------------------------------------

# fmt: off
CAPABILITIES = {
    "tools":       "+  +  +  +  +",
    "prompts":     "+  +  +  +  +",
    "resources":   "+  +  +  +  +",
    "logging":     "+  +  +  +  +",
    "completions": "-  +  +  +  +",
    "tasks":       "-  -  -  -  -",
}
# fmt: on


@every_way
async def test_capabilities_are_those_of_the_revision(transport: str, revision: str) -> None:
    async with speak(transport, zoo(), revision) as client:
        found = (client.info or await client.result("server/discover"))["capabilities"]
    assert {name for name in CAPABILITIES if name in found} == {
        n for n, cells in CAPABILITIES.items() if has(cells, revision)
    }
    assert (
        found["tools"]["listChanged"]
        is found["prompts"]["listChanged"]
        is found["resources"]["listChanged"]
        is True
    )
    assert found["resources"]["subscribe"] is True


UNOFFERED = [
    ("prompts/list", None),
    ("prompts/get", {"name": "x"}),
    ("resources/list", None),
    ("resources/templates/list", None),
    ("resources/read", {"uri": "test://x"}),
    ("tools/list", None),
    ("tools/call", {"name": "x"}),
]


@every_way
async def test_methods_of_undeclared_capabilities_are_not_found(
    transport: str, revision: str
) -> None:
    """Matrix 1.2: -32601 also answers a method of a capability that the server does not advertise."""
    async with speak(transport, make_app(), revision) as client:
        declared = (client.info or await client.result("server/discover"))["capabilities"]
        assert not {"tools", "prompts", "resources", "completions"} & declared.keys()
        answers = {method: await client.call(method, params) for method, params in UNOFFERED}
    assert {
        method: answer.get("error", {}).get("code") for method, answer in answers.items()
    } == dict.fromkeys(answers, -32601)


# --- what results carry (matrix 1.10, 2.5) --------------------------------------------------------

CACHED = (
    "server/discover",
    "tools/list",
    "prompts/list",
    "resources/list",
    "resources/templates/list",
    "resources/read",
)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_results_of_the_newest_revision_have_a_result_type(transport: str) -> None:
    async with speak(transport, zoo(), R5) as client:
        for method, params, cells in METHODS:
            if not has(cells, R5):
                continue
            found = await client.result(method, params)
            assert found["resultType"] == "complete"
            assert found["_meta"][f"{PREFIX}serverInfo"]["name"] == "test"
            if method in CACHED:
                assert isinstance(found["ttlMs"], int) and found["ttlMs"] >= 0
                assert found["cacheScope"] in ("public", "private")
            else:
                assert not {"ttlMs", "cacheScope"} & found.keys()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("revision", LEGACY)
async def test_results_of_older_revisions_have_no_new_members(
    transport: str, revision: str
) -> None:
    """Trap 26."""
    async with speak(transport, zoo(), revision) as client:
        for method, params, cells in METHODS:
            if not has(cells, revision):
                continue
            found = await client.result(method, params)
            assert not {"resultType", "ttlMs", "cacheScope", "_meta"} & found.keys()
            if method in (
                "ping",
                "logging/setLevel",
                "resources/subscribe",
                "resources/unsubscribe",
            ):
                assert found == {}


@pytest.mark.parametrize("method", CACHED)
async def test_results_for_one_caller_are_cached_as_private(method: str) -> None:
    """Matrix 1.10: `public` may be served to anyone."""
    app = zoo()
    app._authenticate = lambda headers: "ann"
    async with over_http(app, R5) as client:
        found = await client.result(
            method, {"uri": "test://text"} if method == "resources/read" else None
        )
    assert found["cacheScope"] == "private"


@every_way
async def test_request_for_a_task_is_ignored_by_a_server_without_tasks(
    transport: str, revision: str
) -> None:
    """Matrix 1.7: tasks are not declared, so the call is an ordinary one."""
    async with speak(transport, zoo(), revision) as client:
        found = await client.tool("point", members={"task": {"ttl": 60_000}})
    assert "task" not in found and found["content"]


# --- members and kinds (matrix 1.6) ---------------------------------------------------------------

# fmt: off
TOOL_MEMBERS = {
    "inputSchema":  "+  +  +  +  +",
    "description":  "+  +  +  +  +",
    "annotations":  "-  +  +  +  +",
    "title":        "-  -  +  +  +",
    "outputSchema": "-  -  +  +  +",
    "execution":    "-  -  -  -  -",
}
CONTENT = {
    "text":          "+  +  +  +  +",
    "image":         "+  +  +  +  +",
    "resource":      "+  +  +  +  +",
    "audio":         "-  +  +  +  +",
    "resource_link": "-  -  +  +  +",
}
# fmt: on


@every_way
async def test_tool_is_described_with_the_members_of_the_revision(
    transport: str, revision: str
) -> None:
    async with speak(transport, zoo(), revision) as client:
        tool = next(t for t in (await client.result("tools/list"))["tools"] if t["name"] == "point")
    assert {m for m in TOOL_MEMBERS if m in tool} == {
        m for m, cells in TOOL_MEMBERS.items() if has(cells, revision)
    }
    assert tool["inputSchema"]["type"] == "object"


@pytest.mark.parametrize("revision", REVISIONS)
async def test_titles_are_sent_from_2025_06_18_on(revision: str) -> None:
    async with over_http(zoo(), revision) as client:
        found = [
            (await client.result("prompts/list"))["prompts"][0],
            (await client.result("resources/list"))["resources"][0],
            (await client.result("resources/templates/list"))["resourceTemplates"][0],
        ]
    assert ["title" in entry for entry in found] == [revision not in (R1, R2)] * 3


@every_way
@pytest.mark.parametrize("kind", CONTENT)
async def test_content_of_an_unknown_kind_is_never_sent(
    kind: str, transport: str, revision: str
) -> None:
    """Unknown members are tolerated by the schemas, unknown kinds of content are not."""
    async with speak(transport, zoo(), revision) as client:
        blocks = (await client.tool("content", {"kind": kind}))["content"]
    assert [block["type"] for block in blocks] == [kind if has(CONTENT[kind], revision) else "text"]
    if kind == "resource_link" and blocks[0]["type"] == "text":
        assert "test://linked" in blocks[0]["text"]


@pytest.mark.parametrize("revision", REVISIONS)
async def test_prompts_contain_only_known_kinds_of_content(revision: str) -> None:
    async with over_http(zoo(), revision) as client:
        found = (await client.result("prompts/get", {"name": "greet", "arguments": {"who": "x"}}))[
            "messages"
        ]
    assert found[0] == {"role": "user", "content": {"type": "text", "text": "hello x"}}
    assert found[1]["content"]["type"] == (
        "resource_link" if has(CONTENT["resource_link"], revision) else "text"
    )


@every_way
async def test_structured_content_is_sent_from_2025_06_18_on(transport: str, revision: str) -> None:
    async with speak(transport, zoo(), revision) as client:
        found = await client.tool("point", {"x": 5})
    assert found["content"][0]["type"] == "text"  # for clients that read only text
    assert found.get("structuredContent") == (None if revision in (R1, R2) else {"x": 5, "y": 2})


@every_way
async def test_progress_has_a_message_from_2025_03_26_on(transport: str, revision: str) -> None:
    async with speak(transport, zoo(), revision) as client:
        await client.tool("steps", meta={"progressToken": "t"})
        told = client.told("notifications/progress")
    expected = {"progressToken": "t", "progress": 1, "total": 2, "message": "half"}
    if revision == R1:
        del expected["message"]
    assert told == [expected]


# --- errors (matrix 1.2, 1.6) ---------------------------------------------------------------------

# fmt: off
ERRORS = [
    #                                                               R1     R2     R3     R4     R5
    ("tools/call", {"name": "nobody"},                            "-32602 -32602 -32602 -32602 -32602"),
    ("tools/call", {"name": "point", "arguments": {"x": "one"}},  "-32602 -32602 -32602 result result"),
    ("tools/call", {"name": "point", "arguments": {"z": 1}},      "-32602 -32602 -32602 result result"),
    ("tools/call", {"name": 5},                                   "-32602 -32602 -32602 -32602 -32602"),
    ("tools/call", {},                                            "-32602 -32602 -32602 -32602 -32602"),
    ("tools/call", {"name": "point", "arguments": [1]},           "-32602 -32602 -32602 -32602 -32602"),
    ("prompts/get", {"name": "nobody"},                           "-32602 -32602 -32602 -32602 -32602"),
    ("prompts/get", {"name": "greet"},                            "-32602 -32602 -32602 -32602 -32602"),
    ("resources/read", {"uri": "test://nowhere"},                 "-32002 -32002 -32002 -32002 -32602"),
    ("tools/list", {"cursor": "mine"},                            "-32602 -32602 -32602 -32602 -32602"),
    ("completion/complete", {"ref": {"type": "ref/prompt", "name": "no"},
                             "argument": {"name": "a", "value": ""}},
                                                                  "-32602 -32602 -32602 -32602 -32602"),
]
# fmt: on


@every_way
async def test_errors_have_the_codes_of_the_revision(transport: str, revision: str) -> None:
    wrong = []
    async with speak(transport, zoo(), revision) as client:
        for method, params, cells in ERRORS:
            answer = await client.call(method, params)
            if "error" in answer:
                found = str(answer["error"]["code"])
            elif answer["result"].get("isError"):
                found = "result"
            else:
                found = "success"
            expected = cells.split()[REVISIONS.index(revision)]
            if found != expected:
                wrong.append((method, params, found, expected))
    assert not wrong


@pytest.mark.parametrize("revision", LEGACY)
async def test_log_level_that_is_bad_is_invalid_params(revision: str) -> None:
    async with over_http(zoo(), revision) as client:
        assert (await client.error("logging/setLevel", {"level": "loud"}))["code"] == -32602


@every_way
async def test_resource_that_is_not_there_is_named(transport: str, revision: str) -> None:
    async with speak(transport, zoo(), revision) as client:
        error = await client.error("resources/read", {"uri": "test://nowhere"})
    assert error["data"]["uri"] == "test://nowhere"


@pytest.mark.parametrize("revision", REVISIONS)
@pytest.mark.parametrize("id", [b"1e400", b"1e5", b"1.50", b"9" * 400])
async def test_invalid_message_is_answered_with_the_digits_of_its_id(
    revision: str, id: bytes
) -> None:
    """No float holds 1e400, and Python writes some of these numbers with other digits."""
    broken = b'{"jsonrpc":"2.0","id":' + id + b"}"
    async with over_http(make_app(), revision) as client:
        answered = await client.post(broken).started()
        assert answered.status == 400
        assert (await answered.read()).startswith(
            b'{"jsonrpc":"2.0","id":' + id + b',"error":{"code":-32600,'
        )
    async with over_stdio(make_app(), revision) as client:
        client.write(broken)
        assert (await client.line())["error"]["code"] == -32600


@pytest.mark.parametrize("revision", LEGACY)
@pytest.mark.parametrize("broken", [b"{", b"[]", b'"text"', b"17", b'{"jsonrpc":"2.0"}'])
async def test_invalid_message_is_answered_with_the_id_of_the_revision(
    revision: str, broken: bytes
) -> None:
    """Trap 15: null until 2025-06-18, where schemas require an id; omitted later, where they forbid
    null.
    """
    async with over_stdio(zoo(), revision) as client:
        client.write(broken)
        told = await client.line()
    assert told["error"]["code"] == (-32700 if broken == b"{" else -32600)
    assert ("id" in told, told.get("id")) == ((False, None) if revision == R4 else (True, None))


ODD: list[Any] = [
    None,
    True,
    0,
    -1.5,
    10**40,
    "",
    "x" * 300,
    "\x00",
    "\ud83d\ude00",
    [],
    [[]],
    {},
    {"": None},
    {"_meta": 5},
]


def bent(message: Any) -> list[Any]:
    """The message with each of its members, at any depth, left out or replaced by something odd."""
    found: list[Any] = [*ODD]
    for name in list(message) if isinstance(message, dict) else ():
        rest = {other: value for other, value in message.items() if other != name}
        found.append(rest)
        found += [{**rest, name: inner} for inner in bent(message[name])]
    return found


CALLS: list[tuple[str, Any]] = [
    *((method, params or {}) for method, params, _ in METHODS),
    ("initialize", hello()["params"]),
    (
        "tools/call",
        {
            "name": "content",
            "arguments": {"kind": "text"},
            "inputResponses": {"a": {}},
            "requestState": "s",
        },
    ),
    (
        "completion/complete",
        {
            "ref": REF,
            "argument": {"name": "who", "value": ""},
            "context": {"arguments": {"a": "b"}},
        },
    ),
]


@pytest.mark.parametrize("revision", REVISIONS)
async def test_server_survives_any_message(revision: str) -> None:
    """A bad message is its sender's fault, so the answer is not 500 and not -32603."""
    wrong = []
    async with over_http(zoo(), revision) as client:
        for method, params in CALLS:
            message = client.message(method, params)
            headers = client.headers(message)
            for odd in bent(message):
                answered = await client.post(odd, headers).started()
                body = await answered.read()
                if (
                    answered.status not in (200, 202, 400, 404)
                    or b"-32603" in body
                    or (body == b"") != (answered.status == 202)
                ):
                    wrong.append((odd, answered.status, body))
    assert not wrong, (len(wrong), wrong[:3])


@pytest.mark.parametrize("revision", REVISIONS)
async def test_server_survives_any_line(revision: str) -> None:
    """The same on a pipe: every line is answered or ignored, and the next one is served."""
    async with over_stdio(zoo(), revision) as client:
        for method, params in CALLS:
            for odd in bent(client.message(method, params)):
                client.write(odd)
                await asyncio.sleep(0)  # a full pipe blocks its writer
            assert await client.result("tools/list", id=f"after {method}")
        await client.end()
        told = [client.unasked.get_nowait() for _ in range(client.unasked.qsize())]
    assert not [line for line in told if "-32603" in json.dumps(line)]


async def test_methods_of_another_revision_say_so() -> None:
    async with over_http(zoo(), R5) as client:
        error = await client.error("ping")
    assert R5 in error["data"]["reason"]


async def test_notification_of_a_request_method_does_not_run() -> None:
    """A tool call without an id does not run; the server answers with an error where the transport
    allows it.
    """
    app = make_app()
    ran = []

    @app.command
    def add(x: int) -> int:
        ran.append(x)
        return x

    for revision in REVISIONS:
        async with over_http(app, revision) as client:
            message = client.message("tools/call", {"name": "add", "arguments": {"x": 1}})
            del message["id"]
            answered = await client.post(message).started()
            assert (answered.status, (await answered.json())["error"]["code"]) == (400, -32600)
        async with over_stdio(app, revision) as pipe:
            pipe.write(message)
            pipe.write(notification("notifications/unheard_of"))
            assert await pipe.result("tools/list")
    assert not ran

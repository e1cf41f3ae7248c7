"""Extensions of MCP (SEP-2133): both sides declare them, and their methods refuse in the order of
the specification.
"""

import asyncio
import json
from types import MappingProxyType
from typing import Any

import pytest
from msgspec import Struct

from tests.calls import call, make_app, result
from tests.client.peers import served
from tests.mcp.asgi import (
    BASIC,
    EVERY_WAY,
    PREFIX,
    R3,
    R4,
    R5,
    TRANSPORTS,
    enveloped,
    over_http,
    over_stdio,
    repeated,
    request,
    speak,
)
from tests.mcp.scripted import Scripted, newest, older
from tests.mcp.scripted import result as reply
from wirecall import App, Context, UsageError, connect, connect_sync
from wirecall.errors import MethodNotFound, NotCapable
from wirecall.mcp.revisions import STATELESS
from wirecall.mcp.server.peer import Peer
from wirecall.mcp.types import Params

every_way = pytest.mark.parametrize(("transport", "revision"), EVERY_WAY)
every_transport = pytest.mark.parametrize("transport", TRANSPORTS)

LOYALTY = "com.example/loyalty"
BELL = "org.example/bell"
CARRIES = (R4, R5)  # the revisions that have extensions


class Points(Struct):
    member: str
    points: int


def shop(**options: Any) -> App:
    """An app with its own extension, and a tool that returns what the server knows about its
    client.
    """
    app = make_app(extensions={LOYALTY: {"tiers": ["gold"]}}, **options)

    @app.extension_method("loyalty/points", extension=LOYALTY)
    def points(member: str, since: int = 2020, *, ctx: Context) -> Points:
        settings = ctx.client.extension(LOYALTY)
        assert settings is not None
        return Points(f"{member} of {settings.get('club', 'no club')}", since)

    @app.query
    def client(ctx: Context) -> dict[str, Any]:
        return {
            "name": ctx.client.name,
            "version": ctx.client.version,
            "loyalty": ctx.client.extension(LOYALTY),
            "other": ctx.client.extension("com.example/other"),
        }

    return app


# --- the server declares --------------------------------------------------------------------------


@every_way
async def test_server_declares_its_extensions_where_the_revision_has_them(
    transport: str, revision: str
) -> None:
    async with speak(transport, shop(), revision) as client:
        declared = (client.info or await client.result("server/discover"))["capabilities"]
    assert declared.get("extensions") == (
        {LOYALTY: {"tiers": ["gold"]}} if revision in CARRIES else None
    )


@every_way
async def test_server_without_extensions_declares_none(transport: str, revision: str) -> None:
    async with speak(transport, make_app(), revision) as client:
        declared = (client.info or await client.result("server/discover"))["capabilities"]
    assert "extensions" not in declared


@pytest.mark.parametrize(
    "id",
    [
        "com.example/x",
        "example/x",
        "a/b",
        "io.modelcontextprotocol/ui",
        "com.ex-ample.a1/My_ext-2.v3",
        "C0.D/9",
    ],
)
def test_extension_ids_in_the_grammar_are_accepted(id: str) -> None:
    with connect_sync(
        App("test", extensions={id: {}}), protocol="mcp", extensions={id: {}}
    ) as client:
        assert client.extension(id) == {}


@pytest.mark.parametrize(
    "id",
    [
        "loyalty",  # the prefix is mandatory
        "/loyalty",
        "com.example/",
        "com..example/x",
        ".com/x",
        "com./x",
        "1com/x",  # a label begins with a letter
        "com.2example/x",
        "com.example-/x",  # and ends with a letter or a digit
        "com._example/x",
        "com.example/-x",  # a name begins and ends with a letter or a digit
        "com.example/x.",
        "com.example/a/b",
        "com.example/a b",
        "com.example/ü",
        "com.example/x\n",
        "",
        5,
    ],
)
def test_extension_ids_outside_the_grammar_are_refused_on_both_sides(id: Any) -> None:
    with pytest.raises(UsageError, match="is not the id of an extension"):
        App("test", extensions={id: {}})
    with pytest.raises(UsageError, match="is not the id of an extension"):
        connect(App("test"), protocol="mcp", extensions={id: {}})


@pytest.mark.parametrize(
    ("extensions", "match"),
    [
        ([LOYALTY], "must be a dict, got list"),
        ({LOYALTY: None}, "must be an object, got NoneType"),
        ({LOYALTY: True}, "must be an object, got bool"),
        ({LOYALTY: {"clock": object()}}, "cannot be written as JSON"),
    ],
)
def test_extension_settings_that_are_not_json_objects_are_refused_on_both_sides(
    extensions: Any, match: str
) -> None:
    with pytest.raises(UsageError, match=match):
        App("test", extensions=extensions)
    with pytest.raises(UsageError, match=match):
        connect(App("test"), protocol="mcp", extensions=extensions)


def test_extension_settings_that_change_later_do_not_change_the_declaration() -> None:
    settings: dict[str, Any] = {"tiers": ["gold"]}
    app = App("test", extensions={LOYALTY: settings})
    settings["tiers"].append("silver")
    with connect_sync(app, protocol="mcp") as client:
        assert client.extension(LOYALTY) == {"tiers": ["gold"]}


def test_extensions_may_be_any_mapping() -> None:
    frozen = MappingProxyType({LOYALTY: MappingProxyType({"club": "north"})})
    with connect_sync(shop(), protocol="mcp", extensions=frozen) as client:
        assert client.call_tool("client").structured["loyalty"] == {"club": "north"}


# --- the client declares --------------------------------------------------------------------------


@every_way
async def test_handler_sees_the_client_and_its_extensions(transport: str, revision: str) -> None:
    declared = {"extensions": {LOYALTY: {"club": "north"}}}
    async with speak(transport, shop(), revision, declared) as client:
        meta = {f"{PREFIX}clientInfo": {"name": "test", "version": "1"}} if revision == R5 else {}
        told = await client.tool("client", meta=meta)
    assert json.loads(told["content"][0]["text"]) == {
        "name": "test",
        "version": "1",
        "loyalty": {"club": "north"} if revision in CARRIES else None,
        "other": None,
    }


@pytest.mark.parametrize("info", [None, 5, [], {"name": 7, "version": None}])
async def test_client_that_does_not_name_itself_is_served(info: Any) -> None:
    async with over_http(shop()) as client:
        told = await client.tool("client", meta={f"{PREFIX}clientInfo": info})
        assert told["structuredContent"]["name"] is None


async def test_client_name_that_is_long_is_cut() -> None:
    async with over_http(shop()) as client:
        told = await client.tool(
            "client", meta={f"{PREFIX}clientInfo": {"name": "n" * 5000, "version": "1"}}
        )
    assert told["structuredContent"]["name"] == "n" * 100


async def test_client_is_not_described_for_plain_json_rpc() -> None:
    assert result(await shop().handle(call("client"))) == {
        "name": None,
        "version": None,
        "loyalty": None,
        "other": None,
    }


async def test_session_extensions_are_known_to_another_worker() -> None:
    """2025-11-25 over HTTP: the session id carries what was negotiated, so a process that did not
    negotiate serves it.
    """
    first, second = (shop(secret="shared") for _ in range(2))
    async with over_http(
        first, R4, capabilities={"extensions": {LOYALTY: {"club": "north"}}}
    ) as client:
        client.asgi = second.asgi()
        told = await client.tool("client")
    assert told["structuredContent"]["loyalty"] == {"club": "north"}
    assert told["structuredContent"]["name"] == "test"


async def test_session_keeps_the_extensions_of_the_server_first() -> None:
    """A session id is a header: extensions that do not fit count as not declared."""
    many = {f"com.example/x{number}": {"text": "x" * 500} for number in range(10)}
    async with over_http(
        shop(), R4, capabilities={"extensions": {**many, LOYALTY: {"club": "north"}}}
    ) as client:
        assert len(client.headers()["mcp-session-id"]) < 6000
        assert (await client.result("loyalty/points", {"member": "ann"}))[
            "member"
        ] == "ann of north"
    huge = {LOYALTY: {"text": "x" * 5000}}
    async with over_http(shop(), R4, capabilities={"extensions": huge}) as client:
        assert (await client.error("loyalty/points", {"member": "ann"}))["code"] == -32021


# --- methods of an extension ----------------------------------------------------------------------


@every_way
async def test_extension_method_is_served_where_the_revision_has_extensions(
    transport: str, revision: str
) -> None:
    async with speak(
        transport, shop(), revision, {"extensions": {LOYALTY: {"club": "north"}}}
    ) as client:
        answer = await client.call("loyalty/points", {"member": "ann"})
        if revision in CARRIES:
            told = answer["result"]
            assert (told["member"], told["points"]) == ("ann of north", 2020)
            assert (told.get("resultType"), f"{PREFIX}serverInfo" in told.get("_meta", {})) == (
                ("complete", True) if revision == R5 else (None, False)
            )
        else:
            assert (answer["error"]["code"], revision in answer["error"]["message"]) == (
                -32601,
                True,
            )


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({}, "params.member: missing"),
        ({"member": 5}, "params.member: expected str, got int"),
        ({"member": "ann", "since": "x"}, "params.since: expected int, got str"),
        ({"member": "ann", "unknown": 1}, "params.unknown: unknown name"),
    ],
)
@every_transport
async def test_extension_params_are_typed_like_those_of_any_handler(
    transport: str, params: Any, reason: str
) -> None:
    for revision in CARRIES:
        async with speak(transport, shop(), revision, {"extensions": {LOYALTY: {}}}) as client:
            error = await client.error("loyalty/points", params)
        assert (error["code"], error["data"]["reason"]) == (-32602, reason)


@pytest.mark.parametrize(
    "declared",
    [
        {},
        {"extensions": {}},
        {"extensions": {"com.example/other": {}}},
        {"extensions": {LOYALTY: None}},  # settings are an object
        {"extensions": {LOYALTY: True}},
        {"extensions": 1},
        {"experimental": {LOYALTY: {}}},
    ],
)
@every_transport
async def test_client_that_has_not_declared_the_extension_is_refused(
    transport: str, declared: Any
) -> None:
    for revision in CARRIES:
        async with speak(transport, shop(), revision, declared) as client:
            error = await client.error("loyalty/points", {"member": "ann"})
            assert (error["code"], error["data"]["requiredCapabilities"]) == (
                -32021,
                {"extensions": {LOYALTY: {}}},
            )
            if transport == "http" and revision == R5:
                assert client.last.status == 400


async def test_extensions_are_declared_by_each_request_at_2026_07_28() -> None:
    async with over_http(shop()) as client:
        declared: dict[str, Any] = {f"{PREFIX}clientCapabilities": {"extensions": {LOYALTY: {}}}}
        assert "result" in await client.call("loyalty/points", {"member": "ann"}, meta=declared)
        assert (await client.error("loyalty/points", {"member": "ann"}))["code"] == -32021


async def test_extension_method_refuses_in_the_specified_order() -> None:
    """Not found, envelope, headers, extension, params: each with all later faults present, too."""
    app = shop()
    ringing = [False]
    app.mcp().offer(BELL, {}, revisions=STATELESS, is_needed=lambda: ringing[0])
    app.mcp().add("bells/ring", ring, Ring, extension=BELL)
    bad_params = {"times": "x"}
    no_envelope = request("bells/ring", bad_params)
    undeclared = enveloped("bells/ring", bad_params)
    declared = enveloped("bells/ring", bad_params, capabilities={"extensions": {BELL: {}}})
    bad_headers = {**BASIC, **repeated(undeclared), "mcp-method": "wrong"}
    good_headers = {**BASIC, **repeated(undeclared)}

    async with over_http(app) as client:

        async def refused(message: Any, headers: Any) -> tuple[int, int]:
            answered = await client.post(message, headers).started()
            return answered.status, (await answered.json())["error"]["code"]

        assert await refused(no_envelope, bad_headers) == (404, -32601)
        ringing[0] = True
        assert await refused(no_envelope, bad_headers) == (400, -32602)
        assert await refused(undeclared, bad_headers) == (400, -32020)
        assert await refused(undeclared, good_headers) == (400, -32021)
        assert await refused(declared, good_headers) == (200, -32602)


class Ring(Params, frozen=True, kw_only=True):
    times: int


async def ring(peer: Peer) -> object:
    return {"resultType": "rung", "rang": "ding " * peer.params.times}


@every_way
async def test_extension_of_the_server_is_declared_when_needed(
    transport: str, revision: str
) -> None:
    """It may belong to some revisions only, and be declared only while the app needs it."""
    app = make_app()
    needed = [False]
    app.mcp().offer(BELL, {"loud": True}, revisions=STATELESS, is_needed=lambda: needed[0])
    app.mcp().add("bells/ring", ring, Ring, extension=BELL)
    async with speak(transport, app, revision, {"extensions": {BELL: {}}}) as client:
        assert (await client.error("bells/ring", {"times": 2}))["code"] == -32601
        needed[0] = True
        answer = await client.call("bells/ring", {"times": 2})
        if revision == R5:
            assert (await client.result("server/discover"))["capabilities"]["extensions"] == {
                BELL: {"loud": True}
            }
            assert (answer["result"]["resultType"], answer["result"]["rang"]) == (
                "rung",
                "ding ding ",
            )
            assert (await client.error("bells/ring", {"times": "x"}))["data"]["reason"].startswith(
                "params.times: "
            )
        else:
            assert (answer["error"]["code"], revision in answer["error"]["message"]) == (
                -32601,
                True,
            )


# --- declaring a method ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "extension", "match"),
    [
        ("loyalty/points", "com.example/other", "declares these extensions: com.example/loyalty"),
        ("tools/points", LOYALTY, "belongs to the protocol"),
        ("ping", LOYALTY, "belongs to the protocol"),
        ("notifications/points", LOYALTY, "belongs to the protocol"),
        ("rpc.points", LOYALTY, "belongs to the protocol"),
        ("loyalty points", LOYALTY, "printable ASCII"),
        ("loyalty/pünkte", LOYALTY, "printable ASCII"),
        ("price", LOYALTY, "a method of JSON-RPC has the same name"),
        ("loyalty/known", LOYALTY, "registered already"),
    ],
)
def test_extension_method_that_is_invalid_is_refused(name: str, extension: str, match: str) -> None:
    app = make_app(extensions={LOYALTY: {}})
    app.query(name="price")(lambda: 1)
    app.extension_method("loyalty/known", extension=LOYALTY)(lambda: None)
    with pytest.raises(UsageError, match=match):
        app.extension_method(name, extension=extension)(lambda: None)


def test_method_of_json_rpc_cannot_take_the_name_of_an_extension_s_method() -> None:
    """On stdio one pipe carries both."""
    app = make_app(extensions={LOYALTY: {}})
    app.extension_method("points", extension=LOYALTY)(lambda: None)
    with pytest.raises(UsageError, match="a method of an MCP extension has the same name"):
        app.query(name="points")(lambda: 1)
    app.query(name="points", expose=("mcp",))(lambda: 1)


def test_result_that_is_not_an_object_is_refused_where_the_function_says_so() -> None:
    app = make_app(extensions={LOYALTY: {}})

    def number() -> int:
        return 1

    with pytest.raises(UsageError, match="every result of MCP is an object"):
        app.extension_method("loyalty/number", extension=LOYALTY)(number)


@pytest.mark.parametrize("value", [5, "text", [1], {"_meta": 5}])
async def test_result_that_is_not_an_object_is_a_failure_of_the_function(
    value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(extensions={LOYALTY: {}})
    app.extension_method("loyalty/odd", extension=LOYALTY)(lambda: value)
    async with over_http(app, capabilities={"extensions": {LOYALTY: {}}}) as client:
        assert (await client.error("loyalty/odd"))["code"] == -32603
    assert "loyalty/odd failed" in caplog.text


async def test_extension_result_may_have_members_of_the_protocol() -> None:
    """None is an empty object; the extension's own result type and `_meta` stay, each once."""
    app = make_app(extensions={LOYALTY: {}})
    app.extension_method("loyalty/none", extension=LOYALTY)(lambda: None)
    app.extension_method("loyalty/typed", extension=LOYALTY)(
        lambda: {"a": 1, "resultType": "pending"}
    )
    app.extension_method("loyalty/meta", extension=LOYALTY)(
        lambda: {"a": 1, "_meta": {"x": 1}, "resultType": "pending"}
    )
    server = {f"{PREFIX}serverInfo": {"name": "test", "version": "0.0.0"}}
    async with over_http(app, capabilities={"extensions": {LOYALTY: {}}}) as client:
        assert await client.result("loyalty/none") == {"resultType": "complete", "_meta": server}
        for name, meta in (("loyalty/typed", server), ("loyalty/meta", {"x": 1, **server})):
            body = await client.post(client.message(name)).read()
            assert (body.count(b'"resultType"'), body.count(b'"_meta"')) == (1, 1)
            assert await client.result(name) == {"resultType": "pending", "_meta": meta, "a": 1}


async def test_extension_method_may_be_registered_while_the_app_serves() -> None:
    app = shop()
    async with over_stdio(app, capabilities={"extensions": {LOYALTY: {}}}) as client:
        assert (await client.error("loyalty/late"))["code"] == -32601
        app.extension_method("loyalty/late", extension=LOYALTY)(lambda: {"late": True})
        assert (await client.result("loyalty/late"))["late"] is True


async def test_extension_method_can_be_cancelled_and_has_a_time_limit() -> None:
    app = make_app(extensions={LOYALTY: {}})
    entered = asyncio.Event()
    over = asyncio.Event()

    @app.extension_method("loyalty/wait", extension=LOYALTY)
    async def wait() -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            over.set()

    @app.extension_method("loyalty/slow", extension=LOYALTY, timeout=0.01)
    async def slow() -> None:
        await asyncio.Event().wait()

    async with over_stdio(app, R4, capabilities={"extensions": {LOYALTY: {}}}) as client:
        client.write(client.message("loyalty/wait", id="w"))
        async with asyncio.timeout(60):
            await entered.wait()
            await client.notify("notifications/cancelled", {"requestId": "w"})
            await over.wait()
        assert (await client.error("loyalty/slow"))["code"] == 50410


async def test_middleware_sees_a_method_of_an_extension() -> None:
    app = shop()
    seen = []

    @app.middleware
    async def note(ctx: Context, call_next: Any) -> Any:
        seen.append((ctx.method, ctx.client.extension(LOYALTY)))
        return await call_next(ctx)

    async with over_http(app, capabilities={"extensions": {LOYALTY: {"club": "north"}}}) as client:
        await client.result("loyalty/points", {"member": "ann"})
    assert seen == [("loyalty/points", {"club": "north"})]


async def test_extension_method_asks_its_client_only_where_the_revision_allows_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = make_app(extensions={LOYALTY: {}})

    @app.extension_method("loyalty/ask", extension=LOYALTY)
    async def ask(ctx: Context) -> dict[str, Any]:
        return {"places": [root.uri for root in await ctx.roots()]}

    can: dict[str, Any] = {"roots": {}, "extensions": {LOYALTY: {}}}
    replies = {"roots/list": {"roots": [{"uri": "file:///home"}]}}
    async with over_stdio(app, R4, capabilities=can, replies=replies) as client:
        assert (await client.result("loyalty/ask"))["places"] == ["file:///home"]
    async with over_stdio(app, R5, capabilities=can) as client:
        assert (await client.error("loyalty/ask"))["code"] == -32603
    assert "only tools, prompts and resources can ask" in caplog.text


# --- our client -----------------------------------------------------------------------------------


async def test_our_client_declares_its_extensions_in_every_request() -> None:
    async with Scripted(
        newest(lambda message, _: reply(message, {"resultType": "complete"}))
    ) as server:
        async with connect(server.url, extensions={LOYALTY: {"club": "north"}}) as client:
            await client.call("loyalty/points")
        declared = [
            one.body["params"]["_meta"][f"{PREFIX}clientCapabilities"] for one in server.seen
        ]
    assert declared == [{"extensions": {LOYALTY: {"club": "north"}, f"{PREFIX}tasks": {}}}] * 2
    assert server.seen[-1].headers["mcp-method"] == "loyalty/points"


@pytest.mark.parametrize("revision", [R3, R4])
async def test_our_client_declares_its_extensions_in_the_handshake(revision: str) -> None:
    async with Scripted(older(lambda message, _: reply(message, {}), revision)) as server:
        async with connect(server.url, revision=revision, extensions={LOYALTY: {}}):
            pass
        (greeting,) = [one.body["params"] for one in server.seen if one.method == "initialize"]
    assert greeting["capabilities"].get("extensions") == ({LOYALTY: {}} if revision == R4 else None)


@pytest.mark.parametrize("way", ["memory", "http"])
@pytest.mark.parametrize("revision", [R3, *CARRIES])
async def test_our_client_calls_methods_of_extensions(way: str, revision: str) -> None:
    app = shop()
    async with served(app) as url:
        target: Any = f"{url}/mcp" if way == "http" else app
        async with connect(
            target, protocol="mcp", revision=revision, extensions={LOYALTY: {"club": "north"}}
        ) as client:
            assert client.extension("com.example/other") is None
            if revision in CARRIES:
                assert client.extension(LOYALTY) == {"tiers": ["gold"]}
                points = await client.call("loyalty/points", {"member": "ann"}, type=Points)
                assert points == Points("ann of north", 2020)
            else:
                assert client.extension(LOYALTY) is None
                with pytest.raises(MethodNotFound):
                    await client.call("loyalty/points", {"member": "ann"})
        if revision in CARRIES:
            async with connect(target, protocol="mcp", revision=revision) as client:
                with pytest.raises(NotCapable) as refused:
                    await client.call("loyalty/points", {"member": "ann"})
                assert refused.value.data["requiredCapabilities"] == {"extensions": {LOYALTY: {}}}
                assert refused.value.ran == "no"


def test_blocking_client_has_the_same_extensions() -> None:
    with connect_sync(shop(), protocol="mcp", extensions={LOYALTY: {}}) as client:
        assert client.extension(LOYALTY) == {"tiers": ["gold"]}
        assert client.call("loyalty/points", {"member": "ann"}, type=Points) == Points(
            "ann of no club", 2020
        )


async def test_client_that_is_not_open_does_not_know_extensions() -> None:
    assert connect(shop(), protocol="mcp").extension(LOYALTY) is None


def test_extensions_are_not_for_plain_json_rpc() -> None:
    with pytest.raises(UsageError, match="extensions: not for JSON-RPC"):
        connect("http://127.0.0.1:1/rpc", extensions={LOYALTY: {}})

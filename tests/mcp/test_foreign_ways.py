"""What foreign clients and servers do differently, and how our messages explain it."""

import asyncio
import json
import subprocess
import sys
from typing import Any

import jsonschema
import msgspec
import pytest

from tests.calls import make_app
from tests.cli import HELLO, invoke
from tests.mcp.asgi import KEY, R3, R4, R5, Refusal, speak
from wirecall import App, Context, Limits, RpcError, UsageError, connect, connect_sync, jsonrpc
from wirecall.contract.generate import generated
from wirecall.contract.lock import of_app
from wirecall.protocol.messages import ErrorObject, remote_error

PATIENCE = 60
FORM = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
DECLARED: dict[str, Any] = {"elicitation": {}}
NO_HANDLER = {"elicitation/create": Refusal(-32601, "Method not found")}


# --- a client that declares elicitation and has no handler ----------------------------------------


def asking() -> tuple[App, list[str]]:
    app = make_app()
    done = list[str]()

    @app.command
    async def careful(ctx: Context) -> None:
        await ctx.elicit("Which colour?", FORM)
        await ctx.commit_point()

    @app.command
    async def hasty(ctx: Context) -> None:
        done.append("hasty")
        await ctx.elicit("Which colour?", FORM)

    @app.command(key="off")
    async def unrecorded(ctx: Context) -> None:
        done.append("unrecorded")
        await ctx.elicit("Which colour?", FORM)

    return app, done


@pytest.mark.parametrize("transport", ["http", "stdio"])
@pytest.mark.parametrize("revision", [R3, R4])
@pytest.mark.parametrize(
    ("name", "ran"), [("careful", "no"), ("hasty", "yes"), ("unrecorded", "unknown")]
)
async def test_question_without_a_handler_is_named_in_the_error(
    transport: str, revision: str, name: str, ran: str
) -> None:
    app, done = asking()
    async with (
        asyncio.timeout(PATIENCE),
        speak(transport, app, revision, DECLARED, NO_HANDLER) as client,
    ):
        answer = await client.tool(name, meta={KEY: "k"} if name != "unrecorded" else None)
    assert answer["isError"] is True
    for part in ("Method not found", "'Which colour?'", "elicitation/create"):
        assert part in answer["content"][0]["text"]
    told = answer["_meta"]["io.wirecall/error"]
    assert (told["code"], RpcError(told["code"], "", told.get("data")).ran) == (-32601, ran)
    assert done == ([] if name == "careful" else [name])


# --- codes of other servers -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "data", "ran"),
    [
        (-32000, None, "unknown"),
        (-32000, {"ran": "yes"}, "yes"),
        (-32050, None, "unknown"),
        (-32601, None, "no"),
        (-32100, None, "yes"),
        (7, None, "yes"),
    ],
)
def test_server_error_of_another_server_does_not_say_that_the_call_ran(
    code: int, data: Any, ran: str
) -> None:
    assert (
        remote_error(ErrorObject(code, "failed", msgspec.UNSET if data is None else data)).ran
        == ran
    )


async def test_client_takes_32000_for_an_unknown_outcome() -> None:
    class Foreign:
        access = None
        limits = Limits()
        registry: tuple[()] = ()

        async def _enter(self) -> None: ...
        async def _leave(self) -> None: ...
        def _announced(self) -> None: ...

        async def handle(self, data: bytes, **_: Any) -> bytes:
            return jsonrpc.make_error(json.loads(data)["id"], -32000, "execution reverted")

    server: Any = Foreign()
    async with asyncio.timeout(PATIENCE), connect(server) as client:
        with pytest.raises(RpcError) as raised:
            await client.call("send")
    assert raised.value.ran == "unknown"


# --- output schemas -------------------------------------------------------------------------------


class Part(msgspec.Struct):
    sku: str


class Order(msgspec.Struct):
    parts: list[Part]
    parent: "Order | None" = None


class Flat(msgspec.Struct):
    total: int


def referred(schema: Any) -> set[str]:
    text = json.dumps(schema)
    return {name for name in schema.get("$defs", {}) if f'"#/$defs/{name}"' in text}


@pytest.mark.parametrize("revision", [R3, R4, R5])
async def test_output_schema_has_no_unused_definitions_at_old_revisions(revision: str) -> None:
    app = make_app()

    @app.query
    def flat() -> Flat:
        return Flat(3)

    @app.query
    def order() -> Order:
        return Order([Part("tea")], Order([]))

    @app.query
    def several() -> list[Order]:
        return [Order([Part("tea")])]

    async with asyncio.timeout(PATIENCE), speak("http", app, revision) as client:
        tools = {tool["name"]: tool for tool in (await client.result("tools/list"))["tools"]}
        for name, tool in tools.items():
            schema = tool["outputSchema"]
            assert set(schema.get("$defs", {})) == referred(schema)
            jsonschema.validate((await client.tool(name))["structuredContent"], schema)
        if revision != R5:
            assert "$defs" not in tools["flat"]["outputSchema"]
            assert set(tools["order"]["outputSchema"]["$defs"]) == {"Order", "Part"}


# --- framing on stdio -----------------------------------------------------------------------------


def test_stdio_names_content_length_framing_in_its_error() -> None:
    body = jsonrpc.make_request("initialize", {}, 1)
    framed = b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    command = [sys.executable, "-m", "wirecall", "serve", HELLO, "--stdio"]
    run = subprocess.run(
        command, input=framed * 2, capture_output=True, timeout=PATIENCE, check=False
    )
    answers = [json.loads(line) for line in run.stdout.splitlines()]
    reasons = [
        answer["error"]["data"]["reason"]
        for answer in answers
        if answer.get("error", {}).get("code") == -32700
    ]
    assert len(reasons) == 2
    assert all(
        "Content-Length framing is not supported" in reason and "newline" in reason
        for reason in reasons
    )


@pytest.mark.parametrize("data", [b"{", b'{"a":"content-length: 1"', b"content"])
async def test_broken_json_is_not_called_framing(data: bytes) -> None:
    assert b"framing" not in (await make_app().handle(data) or b"")


# --- one word for the dialect ---------------------------------------------------------------------


def test_connect_takes_rpc_and_its_old_word() -> None:
    app = make_app()
    app.query(name="price")(lambda: 450)
    for protocol in ("rpc", "jsonrpc", None):
        with connect_sync(app, protocol=protocol) as client:
            assert client.revision is None
            assert client.call("price") == 450
    wrong: Any = "json"
    with pytest.raises(UsageError, match=r'use protocol="rpc" or protocol="mcp"'):
        connect(app, protocol=wrong)


def test_cli_takes_rpc_and_its_old_word() -> None:
    for word in ("rpc", "jsonrpc"):
        run = invoke("list", HELLO, "--as", word, "--json")
        assert run.exit_code == 0, run.output
        assert json.loads(run.output)["result"]
    assert "[rpc|mcp]" in invoke("list", "--help").output


def test_generated_client_has_the_word_and_the_old_one_works() -> None:
    app = make_app()
    app.query(name="price")(lambda: 450)
    module = generated(of_app(app), "rpc")
    assert '    PROTOCOL = "rpc"' in module
    assert generated(of_app(app), "jsonrpc") == module
    names: dict[str, Any] = {}
    exec(
        compile(module.replace('PROTOCOL = "rpc"', 'PROTOCOL = "jsonrpc"'), "module", "exec"), names
    )

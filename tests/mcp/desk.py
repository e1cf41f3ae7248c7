"""Tools that ask, and what a client answers: for the tests of questions."""

from typing import Any

import pytest
from msgspec import Struct

from tests.calls import make_app
from tests.mcp.asgi import (
    TRANSPORTS,
    Client,
)
from wirecall import App, Context, ToolAnnotations
from wirecall.mcp import Message, Text

READS = ToolAnnotations(readOnlyHint=True)
ALL: dict[str, Any] = {"sampling": {}, "elicitation": {"form": {}, "url": {}}, "roots": {}}
FORM = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}

every_transport = pytest.mark.parametrize("transport", TRANSPORTS)


class Name(Struct):
    name: str


def desk() -> App:
    """Tools that ask."""
    app = make_app()

    @app.tool(annotations=READS)
    async def elicit(ctx: Context) -> str:
        answer = await ctx.elicit("Who?", FORM, key="user_name")
        return f"{answer.action} {answer.content}"

    @app.tool(annotations=READS)
    async def typed(ctx: Context) -> str:
        answer = await ctx.elicit("Who?", Name, key="user_name")
        return answer.content.name if answer.action == "accept" else answer.action

    @app.tool(annotations=READS)
    async def url(ctx: Context) -> str:
        return (await ctx.elicit_url("Sign in", "https://example.com/in")).action

    @app.tool(annotations=READS)
    async def sample(ctx: Context) -> str:
        found = await ctx.sample(
            [Message("user", "Think"), Message("assistant", Text(text="Hm"))],
            max_tokens=7,
            system="Be brief",
        )
        return f"{found.role} {found.model} {found.text}"

    @app.tool(annotations=READS)
    async def with_tools(ctx: Context) -> str:
        return (
            await ctx.sample("Think", tools=[{"name": "add", "inputSchema": {"type": "object"}}])
        ).text

    @app.tool(annotations=READS)
    async def with_choice(ctx: Context) -> str:
        return (await ctx.sample("Think", toolChoice={"mode": "none"})).text

    @app.tool(annotations=READS)
    async def with_context(ctx: Context) -> str:
        return (await ctx.sample("Think", includeContext="thisServer")).text

    @app.tool(annotations=READS)
    async def without_context(ctx: Context) -> str:
        return (await ctx.sample("Think", includeContext="none")).text

    @app.tool(annotations=READS)
    async def roots(ctx: Context) -> str:
        return " ".join(root.uri for root in await ctx.roots())

    @app.tool(annotations=READS)
    async def all(ctx: Context) -> str:
        name, thought, places = await ctx.ask(
            ctx.elicit("Who?", FORM), ctx.sample("Think"), ctx.roots()
        )
        return f"{name.content['name']} {thought.text} {places[0].uri}"

    @app.tool(annotations=READS)
    async def rounds(ctx: Context) -> str:
        names = [(await ctx.elicit(f"Name {number}?", FORM)).content["name"] for number in range(3)]
        return " ".join(names)

    @app.tool(annotations=READS)
    async def told(ctx: Context) -> str:
        await ctx.progress(1)
        answer = await ctx.elicit("Who?", FORM, key="user_name")
        await ctx.progress(2)
        return str(answer.action)

    @app.tool(annotations=READS)
    async def stubborn(ctx: Context) -> str:
        try:
            answer = await ctx.elicit("Who?", FORM, key="user_name")
        except Exception:
            return "caught"
        return str(answer.action)

    @app.prompt
    async def greet(ctx: Context) -> str:
        answer = await ctx.elicit("Who?", FORM, key="user_name")
        return f"hello {answer.content['name']}"

    @app.resource("test://private")
    async def private(ctx: Context) -> str:
        answer = await ctx.elicit("Who?", FORM, key="user_name")
        return f"for {answer.content['name']}"

    return app


ANN = {"action": "accept", "content": {"name": "Ann"}}
THOUGHT = {
    "role": "assistant",
    "model": "m-1",
    "content": {"type": "text", "text": "deep"},
    "stopReason": "endTurn",
}
ROOTS = {"roots": [{"uri": "file:///home", "name": "home"}]}
REPLIES = {"elicitation/create": ANN, "sampling/createMessage": THOUGHT, "roots/list": ROOTS}

CASES = {
    "elicit": "accept {'name': 'Ann'}",
    "typed": "Ann",
    "sample": "assistant m-1 deep",
    "roots": "file:///home",
    "all": "Ann deep file:///home",
    "rounds": "Ann Ann Ann",
    "told": "accept",
}


def text(result: Any) -> Any:
    return result["content"][0]["text"]


async def answered(client: Client, method: str, params: Any, **more: Any) -> Any:
    """The result of a call of 2026-07-28, in as many rounds as it takes."""
    given = dict(params)
    for _ in range(10):
        result = await client.result(method, given, **more)
        if result["resultType"] != "input_required":
            return result
        assert not {"ttlMs", "cacheScope"} & result.keys()
        given = {
            **params,
            "inputResponses": {k: REPLIES[q["method"]] for k, q in result["inputRequests"].items()},
        }
        if "requestState" in result:
            given["requestState"] = result["requestState"]
    raise AssertionError("it asks for ever")

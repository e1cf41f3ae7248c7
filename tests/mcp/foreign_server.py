"""A server of FastMCP or of the official SDK for Python, as a separate process, for our client to
talk to.

python -m tests.mcp.foreign_server fastmcp               stdin and stdout
python -m tests.mcp.foreign_server sdk --port 8420       http://127.0.0.1:8420/mcp
"""

import argparse
from typing import Any

from pydantic import BaseModel


class Name(BaseModel):
    name: str


def fastmcp_server() -> Any:
    from fastmcp import Context, FastMCP

    server = FastMCP("strange")
    offer(server, Context)
    return server


def sdk_server() -> Any:
    from mcp.server.mcpserver import Context, MCPServer

    server = MCPServer("strange", log_level="ERROR")
    offer(server, Context)
    return server


def offer(server: Any, context: Any) -> None:
    """The same for both: they look alike."""
    from mcp_types import ToolAnnotations

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def fail(what: str) -> str:
        """Do not do it."""
        raise ValueError(f"{what} does not work")

    async def steps(ctx: Any) -> str:
        """Tell how far it is."""
        for step in (1, 2):
            await ctx.report_progress(step, 2, f"step {step}")
        return "both steps"

    async def hello(ctx: Any) -> str:
        """Ask for a name."""
        answer = await ctx.elicit("Who are you?", Name)
        return f"Hello, {answer.data.name}" if answer.action == "accept" else "Hello, whoever"

    def note(id: str) -> str:
        """A note."""
        return f"note {id}"

    def greet(who: str) -> str:
        """A greeting."""
        return f"Say hello to {who}"

    for asking in (steps, hello):
        asking.__annotations__["ctx"] = context
        server.tool()(asking)
    server.tool(annotations=ToolAnnotations(read_only_hint=True))(add)
    server.tool(annotations=ToolAnnotations(destructive_hint=True))(fail)
    server.resource("note://{id}")(note)
    server.prompt()(greet)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("kind", choices=["fastmcp", "sdk"])
    options.add_argument("--port", type=int)
    options.add_argument(
        "--transport", default="streamable-http", help="or sse, that of 2024-11-05, at /sse"
    )
    given = options.parse_args()
    server = fastmcp_server() if given.kind == "fastmcp" else sdk_server()
    banner = {"show_banner": False} if given.kind == "fastmcp" else {}
    if given.port is None:
        server.run("stdio", **banner)
    else:
        quiet = {"log_level": "error"} if given.kind == "fastmcp" else {}
        server.run(given.transport, host="127.0.0.1", port=given.port, **banner, **quiet)


if __name__ == "__main__":
    main()

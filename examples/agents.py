"""The official MCP client calls a wirecall server, loses an answer, and calls again: one effect,
and no key was sent.

pip install mcp                      the official SDK, which wirecall does not need
python examples/agents.py            the client, which starts the server
python examples/agents.py --serve    the server alone, on stdin and stdout
"""

import asyncio
import sys
from pathlib import Path

try:
    import mcp
except ImportError:
    raise SystemExit("This example needs the official SDK: pip install mcp") from None

from wirecall import App

app = App("warehouse")
shipped: list[str] = []


@app.command(destructive=False)
async def ship(order: str) -> str:
    """Ship an order; the carrier takes a moment to confirm it."""
    shipped.append(order)
    await asyncio.sleep(0.5)
    return f"order {order}, parcel {len(shipped)}"


@app.query
def parcels() -> int:
    """Return the number of parcels so far."""
    return len(shipped)


async def main() -> None:
    server = mcp.StdioServerParameters(
        command=sys.executable, args=[str(Path(__file__)), "--serve"]
    )
    async with mcp.Client(server) as client:

        async def call(tool: str, timeout: float | None = None, **arguments: str) -> str:
            (content,) = (
                await client.call_tool(tool, arguments, read_timeout_seconds=timeout)
            ).content
            return content.text if content.type == "text" else content.type

        try:
            await call("ship", order="7", timeout=0.2)
        except mcp.MCPError as error:
            print("the answer is lost:", error.message)
        print("the same call again:", await call("ship", order="7"))
        print("another one:", await call("ship", order="7"))
        print("parcels:", await call("parcels"))


if __name__ == "__main__":
    if "--serve" in sys.argv:
        app.run("stdio")
    else:
        asyncio.run(main())

"""The official MCP client makes three calls that need each other in one request.

pip install mcp                           the official SDK, which wirecall does not need
python examples/agent_batch.py            the client, which starts the server
python examples/agent_batch.py --serve    the server alone, on stdin and stdout
"""

import asyncio
import json
import sys
from pathlib import Path

from wirecall import App

app = App("shop", batch_tool="all")
charged: list[int] = []


@app.query
def find_orders(customer: str) -> list[dict[str, int]]:
    """Return the open orders of a customer, the newest first."""
    return [{"id": 7, "cents": 450}, {"id": 3, "cents": 1200}]


@app.command(destructive=False)
async def charge(order: int, cents: int) -> dict[str, str]:
    """Charge an order, and return its receipt number."""
    charged.append(order)
    return {"receipt": f"R-{order}-{cents}"}


@app.query
def letter(receipt: str) -> str:
    """Return the letter for a receipt."""
    return f"Thank you! Your receipt is {receipt}."


@app.query
def charges() -> int:
    """Return the number of charges so far."""
    return len(charged)


# Each call takes what it needs from the result of an earlier one. "return" names the results that
# the model wants to read.
BATCH = {
    "calls": [
        {"id": "orders", "tool": "find_orders", "arguments": {"customer": "ada"}},
        {
            "id": "pay",
            "tool": "charge",
            "arguments": {
                "order": {"$ref": "orders#/0/id"},
                "cents": {"$ref": "orders#/0/cents"},
            },
        },
        {"id": "letter", "tool": "letter", "arguments": {"receipt": {"$ref": "pay#/receipt"}}},
    ],
    "return": ["letter"],
}


async def main() -> None:
    try:
        import mcp
    except ImportError:
        raise SystemExit("This example needs the official SDK: pip install mcp") from None

    server = mcp.StdioServerParameters(
        command=sys.executable, args=[str(Path(__file__)), "--serve"]
    )
    async with mcp.Client(server) as client:
        print("tools:", *(tool.name for tool in (await client.list_tools()).tools))
        (content,) = (await client.call_tool("batch", BATCH)).content
        assert content.type == "text"
        for answer in json.loads(content.text)["results"]:
            print(f"{answer['id']}: {answer.get('result', answer.get('error'))}")


if __name__ == "__main__":
    if "--serve" in sys.argv:
        app.run("stdio")
    else:
        asyncio.run(main())

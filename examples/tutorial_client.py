"""The client of docs/tutorial.md, with FastMCP: python examples/tutorial_client.py"""

import asyncio
import subprocess
import sys
from pathlib import Path

from fastmcp import Client

SERVE = [
    sys.executable,
    "-m",
    "wirecall",
    "serve",
    str(Path(__file__).with_name("tutorial_server.py")),
]


async def buy(url: str) -> None:
    tea = {"order": "7", "cents": 500}
    try:
        async with Client(url) as client:
            await client.call_tool("charge", tea, timeout=0.2)
    except Exception as error:
        print("no answer:", type(error).__name__)
    async with Client(url) as client:
        again = await client.call_tool("charge", tea)
        print("the same call again:", again.data, "cents paid")
        more = await client.call_tool("charge", tea)
        print("one more purchase:", more.data, "cents paid")


def main() -> None:
    with subprocess.Popen([*SERVE, "--http", "127.0.0.1:0"], stderr=subprocess.PIPE) as server:
        assert server.stderr is not None
        line = next(line for line in server.stderr if b"Listening on" in line)
        port = int(line.rpartition(b":")[2])
        asyncio.run(buy(f"http://127.0.0.1:{port}/mcp"))
        server.terminate()


if __name__ == "__main__":
    main()

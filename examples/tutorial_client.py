"""The client of docs/tutorial.md, with FastMCP: python examples/tutorial_client.py"""

import asyncio
import subprocess
import sys
from pathlib import Path

from fastmcp import Client

SERVER = Path(__file__).with_name("tutorial_server.py")
SERVE = [sys.executable, "-m", "wirecall", "serve", str(SERVER), "--http", "127.0.0.1:0"]


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
    with subprocess.Popen(SERVE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        said = ""
        while "Listening on" not in said:
            said = server.stderr.readline()
            if not said:
                sys.exit("the server has ended")
            print(said, end="", file=sys.stderr)
        asyncio.run(buy(f"http://127.0.0.1:{said.rpartition(':')[2].strip()}/mcp"))
        server.terminate()


if __name__ == "__main__":
    main()

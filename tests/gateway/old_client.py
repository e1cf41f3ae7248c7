"""The official client for Python, 1.x or 2.x, in a separate environment.

    python old_client.py '{"url": "http://...", "calls": [...]}'
    python old_client.py '{"command": [...], "calls": [...]}'

Each call is `{"name": ..., "arguments": {...}, "timeout": 3.0}`. Prints one line of JSON: the names
of the tools, and for each call its text, or the class of its error.
"""

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import mcp
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamablehttp_client  # type: ignore[attr-defined]


async def main(wanted: dict[str, Any]) -> None:
    async with AsyncExitStack() as stack:
        if "url" in wanted:
            streams = await stack.enter_async_context(streamablehttp_client(wanted["url"]))
        else:
            first, *rest = wanted["command"]
            server = mcp.StdioServerParameters(command=first, args=rest)
            streams = await stack.enter_async_context(stdio_client(server))
        session: Any = await stack.enter_async_context(mcp.ClientSession(*streams[:2]))
        await session.initialize()
        tools = [tool.name for tool in (await session.list_tools()).tools]
        answers = []
        for call in wanted["calls"]:
            limit = timedelta(seconds=call.get("timeout", 60.0))
            try:
                found = await session.call_tool(call["name"], call["arguments"], limit)
                answers.append({"text": found.content[0].text, "is_error": found.isError})
            except Exception as error:
                answers.append({"failed": type(error).__name__})
        print(json.dumps({"tools": tools, "answers": answers}))


asyncio.run(main(json.loads(sys.argv[1])))

"""The memory of a real server after many calls whose clients left in the middle of long answers."""

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.faults import eventually
from tests.mcp.asgi import BASIC, PATIENCE, R4, hello, request
from tests.mcp.heavy import LIMITS, LONG
from tests.size import sized

MIB = 1 << 20
# Seconds that a test may take: a busy machine sends some hundred megabytes slowly.
LIFETIME = 10 * PATIENCE
# Copies of an answer that is being made and sent, the server's buffers, and memory that the
# allocator keeps.
BESIDE = 256 * MIB

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Heavy:
    """The server of `tests.mcp.heavy`."""

    def __init__(
        self, process: asyncio.subprocess.Process, url: str, http: aiohttp.ClientSession
    ) -> None:
        self._process = process
        self._url = url
        self._http = http

    def resident(self) -> int:
        """Bytes of memory that the process has."""
        told = Path(f"/proc/{self._process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", told)
        assert found is not None
        return int(found[1]) * 1024

    async def kept(self) -> int:
        async with self._http.post(f"{self._url}/rpc", json=request("kept", {}, 1)) as answer:
            size: int = (await answer.json())["result"]
            return size

    async def is_empty(self) -> bool:
        return await self.kept() == 0

    async def open(self) -> str:
        async with self._http.post(f"{self._url}/mcp", json=hello(R4), headers=BASIC) as answer:
            return answer.headers["mcp-session-id"]

    async def cut(self, session: str, number: int) -> None:
        """Call the tool, and leave after the first bytes of its answer."""
        call = json.dumps(
            request("tools/call", {"name": "tell", "arguments": {"number": number}}, number)
        ).encode()
        fields = {**BASIC, "mcp-session-id": session}
        async with self._http.post(f"{self._url}/mcp", data=call, headers=fields) as answer:
            await answer.content.readany()
            answer.close()


@asynccontextmanager
async def heavy(server: str) -> AsyncIterator[Heavy]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.mcp.heavy", server),
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        # Freed answers go back to the system at once, so the figure is what the server keeps.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(LIFETIME), aiohttp.ClientSession() as http:
            url = (await process.stdout.readline()).decode().strip()
            yield Heavy(process, url, http)
    finally:
        process.kill()
        await process.wait()


@linux
@pytest.mark.parametrize("server", ["granian", "uvicorn"])
async def test_stream_store_keeps_the_memory_of_a_server_bounded_after_many_cut_calls(
    server: str,
) -> None:
    """Many sessions of one caller, and answers of 3 MB that were cut: more than ten times what may
    be kept.
    """
    async with heavy(server) as served:
        sessions = [await served.open() for _ in range(4)]
        await served.cut(sessions[0], 0)
        before = served.resident()
        most = 0
        for number in range(1, sized(small=96, full=192)):
            await served.cut(sessions[number % 4], number)
            most = max(most, await served.kept())
        assert most <= LIMITS.resume_bytes_per_caller + 2 * LONG + MIB, (
            "the limit, and an answer that is being read"
        )
        assert served.resident() - before < LIMITS.resume_bytes_per_caller + BESIDE
        await eventually(served.is_empty)  # its time is over
        assert served.resident() - before < BESIDE

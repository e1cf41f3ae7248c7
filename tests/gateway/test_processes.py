"""No process of a server remains: after many sessions of clients, and when the gateway is killed."""

import asyncio
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.client.peers import until
from tests.gateway.bench import BOTH
from tests.gateway.fronts import counter, effects, introduction, message_of, started, wrap_words
from tests.gateway.process import GatewayProcess
from tests.size import sized

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SESSIONS = sized(small=20, full=1000)
# One of so many sessions has its own child.
OWN = 10
TOGETHER = 8
MARK = "WIRECALL_TEST_MARK"


def launched(file: Path) -> list[str]:
    """The server that counts, started by a launcher, beside a process that ignores the end of stdin."""
    return ["sh", "-c", f"sleep 1000 < /dev/null & {shlex.join(counter(file))}; :"]


def processes(mark: str) -> list[int]:
    """The servers with this mark, and what they have started."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            marked = f"{MARK}={mark}\0".encode() in (entry / "environ").read_bytes()
        except OSError:  # it has ended
            continue
        if marked:
            found.append(int(entry.name))
    return found


class Sessions:
    """Clients of a gateway, one after another."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url = url
        self._http = http

    async def _post(self, name: str, message: bytes, session: str | None) -> tuple[Any, str | None]:
        headers = dict(BOTH)
        if session is not None:
            headers["Mcp-Session-Id"] = session
        async with self._http.post(f"{self._url}/mcp/{name}", data=message, headers=headers) as got:
            body = await got.read()
            return (json.loads(body) if body else None), got.headers.get("Mcp-Session-Id")

    async def live(self, name: str) -> int:
        """Greet, call a tool and leave; return the process that answered."""
        _, session = await self._post(name, message_of("initialize", introduction(), 1), None)
        assert session is not None
        await self._post(name, message_of("notifications/initialized"), session)
        call = message_of("tools/call", {"name": "look"}, 2)
        answer, _ = await self._post(name, call, session)
        headers = {"Mcp-Session-Id": session}
        async with self._http.delete(f"{self._url}/mcp/{name}", headers=headers) as got:
            assert got.status == 204
        return int(answer["result"]["pid"])


async def test_gateway_leaves_no_process_after_many_sessions_and_a_kill(tmp_path: Path) -> None:
    """Trap 6: children of sessions end with them; a gateway that is killed leaves none, not even a
    grandchild that ignores the end of its stdin.
    """
    file = tmp_path / "effects"
    file.touch()
    mark = str(tmp_path)
    child = {"command": launched(file), "env": {MARK: mark}}
    upstreams = {"shared": child, "own": {**child, "share": "session"}}
    gateway = GatewayProcess(tmp_path / "gateway", upstreams)
    await asyncio.to_thread(gateway.start)
    try:
        async with aiohttp.ClientSession() as http:
            sessions = Sessions(gateway.url, http)
            places = asyncio.Semaphore(TOGETHER)

            async def one(number: int) -> tuple[str, int]:
                name = "shared" if number % OWN else "own"
                async with places:
                    return name, await sessions.live(name)

            told = await asyncio.gather(*(one(number) for number in range(SESSIONS)))
        shared = {pid for name, pid in told if name == "shared"}
        own = [pid for name, pid in told if name == "own"]
        assert len(shared) == 1 and len(set(own)) == len(own) == SESSIONS // OWN
        # Of both upstreams the launcher, the server and the process beside it: the gateway keeps a
        # session for itself, which reads the lists.
        await until(lambda: len(processes(mark)) == 6)
        assert shared < set(processes(mark))
        gateway.kill()
        await until(lambda: not processes(mark))
    finally:
        gateway.end()
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_wrap_that_is_killed_leaves_no_grandchild(tmp_path: Path) -> None:
    """Trap 6: the processes that the server has started end too, while a command runs."""
    file = tmp_path / "effects"
    mark = str(tmp_path)
    words = wrap_words("--ledger", f"sqlite:{tmp_path}/ledger.db", "--", *launched(file))
    for _ in range(sized(small=1, full=20)):
        before = effects(file)
        async with started(*words, env={MARK: mark}) as process:
            await process.greet()
            params = {"name": "pay", "arguments": {"then": "mute", "to": str(before)}}
            await process.send(message_of("tools/call", params, 9))
            await until(lambda before=before: effects(file) > before)  # type: ignore[misc]
            assert len(processes(mark)) >= 3
            process.process.kill()
            await process.ended()
        await until(lambda: not processes(mark))

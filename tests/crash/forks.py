"""Servers that a fork server starts and a test kills, and a client of one."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path

import msgspec
from msgspec import Struct

import tests
from tests.crash.task_child import TOOL
from tests.mcp.asgi import KEY, Json, enveloped

TASKS = "io.modelcontextprotocol/tasks"
DECLARED: Json = {"extensions": {TASKS: {}}, "elicitation": {}}


class Server:
    """A process that serves lines, and a client of it."""

    def __init__(
        self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pid = pid
        self._reader = reader
        self._writer = writer
        self._ids = count(1)

    def go(self) -> None:
        self._writer.write(b"\n")

    async def call(
        self, method: str, params: Json, capabilities: Json | None = None
    ) -> Json | None:
        """Return the answer; None if the server ends before it."""
        declared = DECLARED if capabilities is None else capabilities
        message = enveloped(method, params, next(self._ids), capabilities=declared)
        with suppress(ConnectionError):
            self._writer.write(json.dumps(message).encode() + b"\n")
            while line := await self._reader.readline():
                told: Json = json.loads(line)
                if told.get("id") == message["id"]:
                    return told
        return None

    async def result(self, method: str, params: Json) -> Json:
        told = await self.call(method, params)
        assert told is not None and "result" in told, told
        result: Json = told["result"]
        return result

    async def begin(self, key: str) -> str:
        """Call the tool, and return the id of the task that it becomes."""
        told = await self.result("tools/call", called(key))
        assert told["resultType"] == "task", told
        return str(told["taskId"])

    async def until(self, task: str, *statuses: str) -> Json:
        while True:
            told = await self.result("tasks/get", {"taskId": task})
            if told["status"] in statuses:
                return told

    async def answer(self, task: str) -> None:
        given = {"sure": {"action": "accept", "content": {"sure": True}}}
        await self.call("tasks/update", {"taskId": task, "inputResponses": given})

    async def ended(self) -> None:
        with suppress(ConnectionError):
            while await self._reader.readline():
                continue
        self._writer.close()

    async def kill(self, number: int = signal.SIGKILL) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)
        await self.ended()


def called(key: str) -> Json:
    return {"name": TOOL, "arguments": {"name": key}, "_meta": {KEY: key}}


class Forks:
    """The fork server that a module such as `task_child` is."""

    def __init__(self, log: Path, module: str) -> None:
        self.log = log
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(log, "ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                cwd=Path(tests.__file__).parents[1],
                pass_fds=[theirs.fileno()],
                stderr=stderr,
            )

    async def start(self, order: Struct, *, waits: bool = False) -> Server:
        """Start a server; one that waits opens nothing before `go`."""
        mine, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._orders, [msgspec.json.encode(order)], [theirs.fileno()])
        reader, writer = await asyncio.open_connection(sock=mine)
        server = Server(int(await reader.readline()), reader, writer)
        if not waits:
            server.go()
        return server

    def close(self) -> None:
        self._orders.close()
        self._process.wait()

"""Servers and clients of other projects meet through the gateway: `make servers`.

    python -m tests.gateway.real                     everything
    python -m tests.gateway.real time memory         some servers

Eight servers stand behind `/mcp/NAME` and behind `wrap`. Clients of five revisions list, call, get
an error, cancel, ask for progress, lose an answer and send the call again, and call after their
server was killed. Then the answers to more than 30 messages are compared with and without `wrap`,
member by member, and the official clients for Python (1.x and 2.x) and TypeScript (1.x and 2.x)
call each server. Exit code 1 if anything was wrong.
"""

import asyncio
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import mcp
from aiohttp import web
from mcp.client.stdio import stdio_client

from tests.environments import environment
from tests.gateway.fronts import (
    PATIENCE,
    Client,
    counter,
    effects,
    enveloped,
    introduction,
    message_of,
    started,
    wrap_words,
)
from tests.gateway.process import GatewayProcess
from tests.gateway.real_servers import (
    OLDER,
    Call,
    Server,
    all_servers,
    answers,
    differences,
    talk,
)
from tests.mcp.node import installed, node
from wirecall import connect
from wirecall.gateway.pipe import Wrap
from wirecall.gateway.upstream import Origin
from wirecall.mcp.revisions import NAMES
from wirecall.transports.arrivals import CONFIRM_AFTER

NEWEST = NAMES[-1]
TYPESCRIPT = ("@modelcontextprotocol/sdk@1.32.2", "@modelcontextprotocol/client@2.4.0")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TOKEN = "a token of the client"
REPLAYED = "io.wirecall/replayed"
# Seconds in which a call whose client has left takes effect, if it reached the server.
REACHED = 1.0
# Seconds after which a call is cancelled.
CANCEL_AFTER = 0.05
# Calls of which one is certainly lost, unless this machine is far too slow.
TRIES = 5
BOTH = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}


async def until(condition: Callable[[], bool], patience: float = PATIENCE) -> bool:
    """Wait until a condition holds; return whether it does."""
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


# --- doors ----------------------------------------------------------------------------------------


class Door(Protocol):
    """A client of one revision in front of one server."""

    @property
    def reports(self) -> list[Any]:
        """The progress that was reported."""

    async def ask(self, method: str, params: dict[str, Any]) -> Any: ...
    async def lose(self, call: Call, has_acted: Callable[[], bool]) -> bool:
        """Lose the answer to a call; return False if it may count as received."""

    async def cancel(self, call: Call) -> None: ...
    async def kill(self) -> None: ...


class HttpDoor:
    """A client of `/mcp/NAME`."""

    def __init__(self, gateway: GatewayProcess, server: str, revision: str) -> None:
        self._gateway = gateway
        self._server = server
        self._revision = revision
        self._url = f"{gateway.url}/mcp/{server}"
        self._ids = itertools.count(1)
        self._session: str | None = None
        self.reports: list[Any] = []
        self._http = aiohttp.ClientSession()

    async def greet(self) -> None:
        if self._revision == NEWEST:
            return
        await self.ask("initialize", introduction(self._revision))
        await self._tell("notifications/initialized", {})

    async def aclose(self) -> None:
        await self._http.close()

    def _fields(self, method: str, params: dict[str, Any]) -> dict[str, str]:
        fields = {**BOTH, "MCP-Protocol-Version": self._revision}
        if method == "initialize":
            del fields["MCP-Protocol-Version"]
        if self._session is not None:
            fields["Mcp-Session-Id"] = self._session
        if self._revision == NEWEST:
            fields["Mcp-Method"] = method
            if "name" in params:
                fields["Mcp-Name"] = params["name"]
        return fields

    def _message(self, method: str, params: dict[str, Any], id: int | None) -> bytes:
        if self._revision == NEWEST:
            params = enveloped(params)
        return message_of(method, params, id)

    async def _tell(self, method: str, params: dict[str, Any]) -> None:
        data = self._message(method, params, None)
        async with self._http.post(self._url, data=data, headers=self._fields(method, params)):
            pass

    async def ask(self, method: str, params: dict[str, Any], id: int | None = None) -> Any:
        number = next(self._ids) if id is None else id
        data = self._message(method, params, number)
        async with (
            asyncio.timeout(PATIENCE),
            self._http.post(self._url, data=data, headers=self._fields(method, params)) as answer,
        ):
            text = await answer.text()
            self._session = answer.headers.get("Mcp-Session-Id") or self._session
        lines = [text]
        if answer.content_type == "text/event-stream":
            lines = [line[5:] for line in text.splitlines() if line.startswith("data:")]
        for line in lines:
            message = json.loads(line) if line.strip() else {}
            if message.get("method") == "notifications/progress":
                self.reports.append(message["params"])
            elif message.get("id") == number:
                return message
        raise AssertionError(f"no answer to {method}: {text[:500]}")

    async def _send_and_leave(self, call: Call, id: int, staying: Awaitable[object]) -> bool:
        """Send a call, stay for a while, and close the connection without reading.

        Return whether the answer is lost for certain: one that lies unread with its client for
        `CONFIRM_AFTER` seconds counts as received, and this process may have been slow.
        """
        fields = self._fields("tools/call", call)
        data = self._message("tools/call", call, id)
        fields |= {"Host": "127.0.0.1", "Content-Length": str(len(data))}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        path = f"/mcp/{self._server}"
        with socket.create_connection(("127.0.0.1", self._gateway.port), PATIENCE) as connection:
            began = time.monotonic()
            connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
            await staying
            has_answer = bool(select.select([connection], [], [], 0)[0])
            return not has_answer or time.monotonic() < began + CONFIRM_AFTER

    async def lose(self, call: Call, has_acted: Callable[[], bool]) -> bool:
        return await self._send_and_leave(call, next(self._ids), until(has_acted, REACHED))

    async def cancel(self, call: Call) -> None:
        id = next(self._ids)
        if self._revision == NEWEST:  # a client that leaves cancels
            await self._send_and_leave(call, id, asyncio.sleep(CANCEL_AFTER))
            return
        asking = asyncio.create_task(self.ask("tools/call", call, id))
        await asyncio.sleep(CANCEL_AFTER)
        await self._tell("notifications/cancelled", {"requestId": id, "reason": "not needed"})
        # A call that is cancelled has no answer; one that was faster has.
        with suppress(AssertionError):
            await asking

    async def kill(self) -> None:
        pids = await asyncio.to_thread(self._pids)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert await until(lambda: not any(map(_lives, pids)))

    def _pids(self) -> list[int]:
        found: list[int] = self._gateway.status()[self._server]["pids"]
        return found


def _lives(pid: int) -> bool:
    """Return whether a process runs. A zombie does not, unless it has a thread that still ends."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


class PipeDoor:
    """A client of `wrap`, at the end of its pipe."""

    def __init__(self, wrap: Wrap, revision: str) -> None:
        self._wrap = wrap
        self._client = Client(wrap)
        self._revision = revision

    @property
    def reports(self) -> list[Any]:
        heard = [each for each in self._client.heard if "progress" in each.get("method", "")]
        return [each["params"] for each in heard]

    async def greet(self) -> None:
        if self._revision != NEWEST:
            await self._client.greet(self._revision)

    def _params(self, params: dict[str, Any]) -> dict[str, Any]:
        return enveloped(params) if self._revision == NEWEST else params

    async def ask(self, method: str, params: dict[str, Any]) -> Any:
        return await self._client.ask(method, self._params(params))

    async def lose(self, call: Call, has_acted: Callable[[], bool]) -> bool:
        await self._client.ask("tools/call", self._params(call), lose=True)
        return True

    async def cancel(self, call: Call) -> None:
        line = message_of("tools/call", self._params(call), "to be cancelled")
        asking = asyncio.create_task(self._client.line(line))
        await asyncio.sleep(CANCEL_AFTER)
        params = {"requestId": "to be cancelled", "reason": "not needed"}
        await self._client.tell("notifications/cancelled", params)
        await asking

    async def kill(self) -> None:
        upstream = self._client.front._relay.upstream
        if self._wrap._gateway is not None:  # between eras
            [upstream] = self._wrap._gateway.upstreams.values()
        for child in upstream.children:
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
        assert await until(lambda: not upstream.children)


# --- the steps ------------------------------------------------------------------------------------


async def list_tools(door: Door, server: Server) -> None:
    listed = (await door.ask("tools/list", {}))["result"]["tools"]
    assert server.call["name"] in [tool["name"] for tool in listed], listed


async def call(door: Door, server: Server) -> None:
    answer = await door.ask("tools/call", server.call)
    result = answer.get("result", {})
    assert result.get("content") and not result.get("isError"), answer


async def error(door: Door, server: Server) -> None:
    answer = await door.ask("tools/call", server.wrong)
    assert "error" in answer or answer["result"]["isError"] is True, answer


async def cancel(door: Door, server: Server) -> None:
    await door.cancel(server.slow or server.call)
    await call(door, server)


async def progress(door: Door, server: Server) -> None:
    params = {**(server.slow or server.call), "_meta": {"progressToken": TOKEN}}
    before = len(door.reports)
    answer = await door.ask("tools/call", params)
    assert "result" in answer, answer
    tokens = [report["progressToken"] for report in door.reports[before:]]
    assert all(token == TOKEN for token in tokens), tokens
    if server.slow is not None:
        assert tokens, "no progress was reported"


async def lost(door: Door, server: Server) -> None:
    """One effect, although the call was sent twice; a call of a tool that reads is served again."""
    if server.act is None or server.count is None:
        await door.lose(server.call, lambda: True)
        await call(door, server)
        return
    counted = server.count
    for _ in range(TRIES):
        await prepare(door, server)
        before = counted()

        def has_acted(before: int = before) -> bool:
            return counted() > before

        if await door.lose(server.act, has_acted):
            break
    is_reached = await until(has_acted, REACHED)
    answer = await door.ask("tools/call", server.act)
    came = "reached its server" if is_reached else "did not reach its server in time"
    assert server.count() == before + 1, f"{server.count() - before} effects; the first {came}"
    if is_reached:
        assert answer["result"]["_meta"][REPLAYED] is True, answer
    assert not answer["result"].get("isError"), answer


NAMED = {"entityNames": ["ann"]}


async def prepare(door: Door, server: Server) -> None:
    """Let the next call of a server take effect."""
    if server.name == "git":
        stage(server)
    if server.name == "memory":
        await door.ask("tools/call", {"name": "delete_entities", "arguments": NAMED})


def stage(server: Server) -> None:
    """Stage something to commit."""
    assert server.act is not None
    repository = Path(server.act["arguments"]["repo_path"])
    (repository / f"{time.time_ns()}").touch()
    subprocess.run(["git", "-C", str(repository), "add", "."], check=True)


async def killed(door: Door, server: Server) -> None:
    """The tools stay, and the next call is served."""
    before = (await door.ask("tools/list", {}))["result"]
    await door.kill()
    await call(door, server)
    after = (await door.ask("tools/list", {}))["result"]
    assert after["tools"] == before["tools"], after


STEPS: list[Callable[[Door, Server], Awaitable[None]]] = [
    list_tools,
    call,
    error,
    cancel,
    progress,
    lost,
    killed,
]


class Score:
    """How many steps were right, and which were not."""

    def __init__(self) -> None:
        self.right: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def take(self, part: str, what: str, work: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(2 * PATIENCE):
                await work
            self.right[part] += 1
        except Exception as error:
            self.wrong.append(f"{part}, {what}: {type(error).__name__}: {str(error)[:600]}")


# --- the matrix -----------------------------------------------------------------------------------


async def through_http(score: Score, gateway: GatewayProcess, server: Server) -> None:
    for revision in NAMES:
        door = HttpDoor(gateway, server.name, revision)
        try:
            await door.greet()
            for step in STEPS:
                what = f"{server.name} {revision} {step.__name__}"
                await score.take("/mcp/NAME", what, step(door, server))
        finally:
            await door.aclose()


async def through_wrap(score: Score, server: Server) -> None:
    for revision in NAMES:
        wrap = Wrap(
            Origin(name=server.name, command=server.words, env=server.env), ledger="memory:"
        )
        door = PipeDoor(wrap, revision)
        try:
            await door.greet()
            for step in STEPS:
                what = f"{server.name} {revision} {step.__name__}"
                await score.take("wrap", what, step(door, server))
        finally:
            await wrap.aclose(5.0)


async def exact(folder: Path, server: Server, revision: str) -> None:
    """Compare the answers to more than 30 messages with and without `wrap`."""
    lines = talk(server.call, revision)
    assert len(lines) >= 30
    told = []
    words = wrap_words("--ledger", f"sqlite:{folder}/{server.name}-{revision}.db", "--")
    for before in ([], words):
        async with started(*before, *server.words, env=server.env) as process:
            told.append(await answers(process, lines))
            if not before:
                process.process.kill()  # some do not end with their stdin
    if server.name == "thinking":  # its answers count its thoughts
        for each in told:
            for id in (41, "42"):
                each[id] = sorted(each[id]["result"])
    found = differences(*told)
    assert not found, "; ".join(found)


def spoken(server: Server) -> list[str]:
    """Return revisions of a server of which `wrap` translates none."""
    return [NAMES[0], NAMES[3], *([NEWEST] if server.has_newest else [])]


# --- clients of other projects --------------------------------------------------------------------


async def ours(target: Any, server: Server, revision: str) -> None:
    async with connect(target, protocol="mcp", revision=revision) as client:
        assert server.call["name"] in [tool.name for tool in await client.list_tools()]
        found = await client.call_tool(server.call["name"], server.call["arguments"])
        assert found.content and not found.is_error


async def python_two(words: list[str], server: Server) -> None:
    """The official client for Python, 2.x, in front of `wrap`."""
    parameters = mcp.StdioServerParameters(command=words[0], args=words[1:], env=server.env or None)
    async with (
        stdio_client(parameters) as (reader, writer),
        mcp.ClientSession(reader, writer) as session,
    ):
        await session.initialize()
        tools = [tool.name for tool in (await session.list_tools()).tools]
        assert server.call["name"] in tools
        found = await session.call_tool(server.call["name"], server.call["arguments"])
        assert found.content and not found.is_error


async def run_one(wanted: dict[str, Any]) -> dict[str, Any]:
    """Run the official client for Python, 1.x."""
    python = await asyncio.to_thread(environment, "mcp_older", OLDER)
    process = await asyncio.create_subprocess_exec(
        str(python),
        str(HERE / "old_client.py"),
        json.dumps(wanted),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    async with asyncio.timeout(2 * PATIENCE):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-1000:]
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


async def python_one(url: str, server: Server) -> None:
    found = await run_one({"url": url, "calls": [server.call, server.wrong]})
    assert server.call["name"] in found["tools"]
    good, bad = found["answers"]
    assert good.get("is_error") is False, good
    assert bad.get("is_error") is not False, bad


async def silent(target: dict[str, Any], file: Path) -> None:
    """1.x gives up without a word while the call runs, and its program calls again: one effect."""
    first = {"name": "pay", "arguments": {"to": "ann", "then": "wait"}, "timeout": 4.0}
    asking = asyncio.create_task(run_one({**target, "calls": [first, {**first, "timeout": 60.0}]}))
    assert await until(lambda: effects(file) == 1)
    # The second call is sent 4 s after the first, and the first answers after that.
    await asyncio.sleep(6.0)
    file.with_suffix(".go").touch()
    found = await asking
    assert "failed" in found["answers"][0], found
    assert found["answers"][1].get("text", "").startswith("paid"), found
    assert effects(file) == 1, effects(file)


async def typescript(url: str, sdk: int, revision: str, server: Server) -> None:
    modules = await asyncio.to_thread(installed, *TYPESCRIPT)
    wanted = {"modules": str(modules), "sdk": sdk, "revision": revision, "url": url}
    process = await asyncio.create_subprocess_exec(
        str(node()),
        str(ROOT / "tests" / "lost" / "client.mjs"),
        json.dumps(wanted),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    orders = [{"id": 1, "call": server.call}, {"id": 2, "call": server.wrong}]
    assert process.stdin is not None and process.stdout is not None
    try:
        found = {}
        for order in orders:
            process.stdin.write(json.dumps(order).encode() + b"\n")
            async with asyncio.timeout(PATIENCE):
                answer = json.loads(await process.stdout.readline())
            found[answer["id"]] = answer
    finally:
        process.stdin.close()
        await process.wait()
    assert not found[1]["result"].get("isError"), found[1]
    assert "error" in found[2] or found[2]["result"]["isError"], found[2]


# --- all of it ------------------------------------------------------------------------------------


@asynccontextmanager
async def a_page() -> AsyncIterator[str]:
    """Serve a page to the server that fetches pages; yield its address."""

    async def page(request: web.Request) -> web.Response:
        if request.path != "/page":
            raise web.HTTPNotFound
        return web.Response(text="<html><body><p>tea</p></body></html>", content_type="text/html")

    app = web.Application()
    app.router.add_get("/{path:.*}", page)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        yield f"http://127.0.0.1:{port}/page"
    finally:
        await runner.cleanup()


async def meet(folder: Path, names: list[str]) -> Score:
    score = Score()
    async with a_page() as page:
        behind = await asyncio.to_thread(all_servers, folder / "http", page)
        piped = await asyncio.to_thread(all_servers, folder / "wrap", page)
        if names:
            behind = [server for server in behind if server.name in names]
            piped = [server for server in piped if server.name in names]
        upstreams: dict[str, dict[str, Any]] = {}
        for server in behind:
            upstreams[server.name] = {"command": server.words}
            if server.env:
                upstreams[server.name]["env"] = server.env
        files = [folder / "silent-http", folder / "silent-wrap"]
        upstreams["counter"] = {"command": counter(files[0]), "cwd": str(ROOT)}
        gateway = GatewayProcess(folder / "gateway", upstreams)
        await asyncio.to_thread(gateway.start)
        try:
            await run_all(score, folder, gateway, behind, piped, files)
        finally:
            await asyncio.to_thread(gateway.end)
    return score


async def run_all(
    score: Score,
    folder: Path,
    gateway: GatewayProcess,
    behind: list[Server],
    piped: list[Server],
    files: list[Path],
) -> None:
    began = time.monotonic()

    def report(part: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {part}", flush=True)

    url = f"{gateway.url}/mcp/counter"
    ledger = f"sqlite:{folder}/silent.db"
    words = [*wrap_words("--ledger", ledger, "--"), *counter(files[1])]
    quiet = asyncio.gather(
        score.take("silence of Python 1.x", "/mcp/NAME", silent({"url": url}, files[0])),
        score.take("silence of Python 1.x", "wrap", silent({"command": words}, files[1])),
    )
    await asyncio.gather(*(through_http(score, gateway, server) for server in behind))
    report("/mcp/NAME")
    await asyncio.gather(*(through_wrap(score, server) for server in piped))
    report("wrap")
    for server in piped:
        await asyncio.gather(
            *(
                score.take("exact", f"{server.name} {name}", exact(folder, server, name))
                for name in spoken(server)
            )
        )
    report("exactness")
    for server, other in zip(behind, piped, strict=True):
        url = f"{gateway.url}/mcp/{server.name}"
        ledger = f"sqlite:{folder}/clients-{server.name}.db"
        words = [*wrap_words("--ledger", ledger, "--"), *other.words]
        name = server.name
        await asyncio.gather(
            score.take("our client", f"{name} newest", ours(url, server, NEWEST)),
            score.take("our client", f"{name} oldest", ours(url, server, NAMES[0])),
            score.take("official Python 1.x", name, python_one(url, server)),
            score.take("official Python 2.x", name, python_two(words, other)),
            score.take("TypeScript 1.x", name, typescript(url, 1, NAMES[3], server)),
            score.take("TypeScript 2.x", name, typescript(url, 2, NEWEST, server)),
        )
    report("clients of other projects")
    await quiet
    report("silence")


def main(names: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="wirecall-real-") as folder:
        score = asyncio.run(meet(Path(folder), names))
    for part, right in score.right.items():
        print(f"{part}: {right} right")
    for line in score.wrong:
        print(f"WRONG  {line}")
    print(f"{score.right.total()} right, {len(score.wrong)} wrong")
    return int(bool(score.wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What crosses the eras beside calls: tasks, changes of lists and resources, and log messages."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil  # type: ignore[import-untyped]
import pytest

from tests.client.conftest import nothing_is_left as nothing_is_left
from tests.client.peers import served, until
from tests.gateway.bench import BOTH, Bench, Held, newest
from tests.gateway.fronts import effects, enveloped, introduction, message_of
from wirecall import App, Context
from wirecall.errors import RpcError
from wirecall.gateway import UpstreamSettings
from wirecall.mcp.revisions import NAMES
from wirecall.server.identity import Identity

OLD = NAMES[3]
NEW = NAMES[-1]
PATIENCE = 60.0


async def verify(token: str) -> Identity | None:
    return Identity(token) if token in ("ann", "bob") else None


class Studio:
    """An app behind a gateway, with tasks, resources and log messages."""

    def __init__(self) -> None:
        self.app = App("studio", ledger="memory:", version="3")
        self.runs = 0
        self.go = asyncio.Event()
        app = self.app

        @app.command(task=True, key="off")
        async def render(film: str) -> str:
            self.runs += 1
            await self.go.wait()
            return f"{film}.mp4"

        @app.command(task=True, key="off")
        async def order(ctx: Context) -> str:
            answer = await ctx.elicit("sure?", bool)
            self.runs += 1
            return f"{answer.action} {answer.content}"

        @app.command(key="off")
        async def tell(ctx: Context) -> str:
            for level in ("debug", "info", "error"):
                await ctx.log(level, f"a {level}")
            return "told"

        @app.resource("shop://terms")
        def terms() -> str:
            return "terms"


@asynccontextmanager
async def studio(
    folder: Path, revision: str = NEW, **options: Any
) -> AsyncIterator[tuple[Bench, Studio]]:
    """A gateway in front of an app that is spoken to at one revision."""
    studio = Studio()
    names = options.pop("names", ("studio",))
    async with served(studio.app) as url:
        more = [UpstreamSettings(name, url=f"{url}/mcp", revision=revision) for name in names]
        async with Bench(folder, names=(), more=more, **options).serving() as bench:
            yield bench, studio


# --- tasks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/mcp/studio", "/mcp"])
async def test_task_of_a_new_server_is_passed_on_with_a_sealed_id(
    tmp_path: Path, path: str
) -> None:
    """Section 6: get, update and cancel go to the upstream that the id names."""
    async with studio(tmp_path) as (bench, behind), bench.client(path) as client:
        task = await client.start_tool("render", {"film": "dawn"})
        assert (await task.refresh()).status == "working"
        assert task.id is not None and "." in task.id
        other = await client.start_tool("render", {"film": "dusk"})
        await other.cancel()
        behind.go.set()
        assert (await client.task(task.id)).text == "dawn.mp4"
        assert behind.runs == 2


async def test_answers_to_the_questions_of_a_task_reach_it(tmp_path: Path) -> None:
    """Section 6: `tasks/update` goes to the upstream that the sealed id names, with the answers."""
    asked: list[str] = []

    async def elicit(question: Any) -> dict[str, bool]:
        asked.append(question.message)
        return {"value": True}

    async with studio(tmp_path) as (bench, behind), bench.client("/mcp", elicit=elicit) as client:
        task = await client.start_tool("order", {})
        assert (await task).text == "accept True"
    assert asked == ["sure?"] and behind.runs == 1


async def test_task_is_good_for_its_caller_alone(tmp_path: Path) -> None:
    """Section 8, confused deputy: another caller's id, a forged one and an upstream's own: -32602."""
    async with (
        studio(tmp_path, auth=verify) as (bench, behind),
        bench.client("/mcp/studio", auth="ann") as ann,
        bench.client("/mcp/studio", auth="bob") as bob,
    ):
        task = await ann.start_tool("render", {"film": "dawn"})
        for wrong in (task.id, "x" * 43, "x.y"):
            with pytest.raises(RpcError) as refused:
                await bob.call("tasks/get", {"taskId": wrong})
            assert refused.value.code == -32602
        behind.go.set()
        assert (await task).text == "dawn.mp4"


async def test_lost_call_that_became_a_task_is_the_same_task(tmp_path: Path) -> None:
    """The task is the answer of the command: it is recorded, and a key gets it again."""
    async with studio(tmp_path) as (bench, behind), bench.client("/mcp/studio") as client:
        first = await client.start_tool("render", {"film": "dawn"}, key="k")
        again = await client.start_tool("render", {"film": "dawn"}, key="k")
        assert first.id == again.id
        await until(lambda: behind.runs == 1)
        behind.go.set()
        assert (await again).text == "dawn.mp4" and behind.runs == 1


async def test_task_request_of_a_client_without_tasks_is_refused(tmp_path: Path) -> None:
    """SEP-2663: -32021, whatever the id is."""
    async with studio(tmp_path) as (bench, _):
        for method in ("tasks/get", "tasks/update", "tasks/cancel"):
            headers = {"MCP-Protocol-Version": NEW, "Mcp-Method": method, "Mcp-Name": "x"}
            message = message_of(method, enveloped({"taskId": "x", "inputResponses": {}}), 1)
            async with (
                aiohttp.ClientSession() as http,
                http.post(
                    f"{bench.url}/mcp/studio", data=message, headers={**BOTH, **headers}
                ) as answer,
            ):
                assert (answer.status, (await answer.json())["error"]["code"]) == (400, -32021)


async def test_task_of_one_upstream_is_refused_at_another(tmp_path: Path) -> None:
    """An id names its upstream, so it does not lead to a task of another one."""
    async with (
        studio(tmp_path, names=("a", "b")) as (bench, behind),
        bench.client("/mcp/a") as a,
        bench.client("/mcp/b") as b,
    ):
        task = await a.start_tool("render", {"film": "dawn"})
        with pytest.raises(RpcError) as refused:
            await b.call("tasks/get", {"taskId": task.id})
        assert refused.value.code == -32602
        behind.go.set()
        await task


async def test_old_client_gets_the_result_of_a_tool_with_tasks(tmp_path: Path) -> None:
    """A client with a handshake has not declared tasks, so the server answers with the result."""
    async with studio(tmp_path) as (bench, behind), bench.client(revision=OLD) as client:
        behind.go.set()
        assert (await client.call_tool("render", {"film": "dawn"})).text == "dawn.mp4"


async def test_task_of_a_client_that_has_not_declared_tasks_is_waited_for(tmp_path: Path) -> None:
    """Section 6: waited for, with progress; a server that makes a task for anybody."""
    more = [newest(tmp_path)]
    async with Bench(tmp_path, names=(), more=more).serving() as bench:
        _, session = await bench.post("/mcp/new", message_of("initialize", introduction(), 1))
        params = {"name": "slow", "arguments": {"polls": 2}, "_meta": {"progressToken": "t"}}
        told = await bench.stream("/mcp/new", message_of("tools/call", params, 2), session)
        reports = [each["params"] for each in told[:-1]]
        assert [each["progressToken"] for each in reports] == ["t", "t"]
        assert [each["message"] for each in reports] == ["2 to go", "1 to go"]
        assert told[-1]["result"]["content"] == [{"type": "text", "text": "slowly"}]
        assert effects(tmp_path / "new") == 1


# --- changes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/mcp/studio", "/mcp"])
@pytest.mark.parametrize("theirs", [OLD, NEW])
@pytest.mark.parametrize("ours", [OLD, NEW])
async def test_changes_reach_clients_of_both_eras(
    tmp_path: Path, ours: str, theirs: str, path: str
) -> None:
    """E: `list_changed` and updates of resources, in all four cells."""
    async with (
        studio(tmp_path, theirs) as (bench, behind),
        bench.client(path, revision=ours) as client,
        client.listen(tools=True, uris=["shop://terms"]) as changes,
    ):
        coming = aiter(changes)

        async def next_of(kind: str) -> Any:
            async with asyncio.timeout(PATIENCE):
                while (change := await anext(coming)).kind != kind:
                    pass
                return change

        await heard(behind, lambda: behind.app.updated("shop://terms"), next_of("updated"))
        before = {tool.name for tool in await client.list_tools()}

        @behind.app.query
        def more() -> int:
            return 1

        await heard(behind, lambda: behind.app.changed("tools"), next_of("tools"))
        assert {tool.name for tool in await client.list_tools()} - before == {"more"}


async def heard(behind: Studio, tell: Any, coming: Any) -> Any:
    """Tell a change until it arrives: a stream towards the app may begin late."""
    waiting = asyncio.ensure_future(coming)
    while not waiting.done():
        tell()
        await asyncio.wait([waiting], timeout=0.05)
    return waiting.result()


@pytest.mark.parametrize("theirs", [OLD, NEW])
async def test_subscription_of_one_client_outlives_that_of_another(
    tmp_path: Path, theirs: str
) -> None:
    """A shared session: its upstream keeps the subscription for the last client."""
    seen: dict[str, list[Any]] = {"a": [], "b": []}
    async with (
        studio(tmp_path, theirs) as (bench, behind),
        bench.client(revision=OLD, on_change=seen["a"].append) as a,
        bench.client(revision=OLD, on_change=seen["b"].append) as b,
    ):
        await a.subscribe("shop://terms")
        await b.subscribe("shop://terms")
        await a.unsubscribe("shop://terms")
        async with asyncio.timeout(PATIENCE):
            while not seen["b"]:
                behind.app.updated("shop://terms")
                await asyncio.sleep(0.05)
        assert not seen["a"]


async def test_prefixed_resource_is_updated_under_its_name_here(tmp_path: Path) -> None:
    """`NAME+uri`: a URI that two upstreams have is reported as clients know it."""
    seen: list[Any] = []
    async with (
        studio(tmp_path, names=("a", "b")) as (bench, behind),
        bench.client("/mcp", revision=OLD, on_change=seen.append) as client,
    ):
        await client.subscribe("a+shop://terms")
        async with asyncio.timeout(PATIENCE):
            while not seen:
                behind.app.updated("shop://terms")
                await asyncio.sleep(0.05)
        assert {change.uri for change in seen} == {"a+shop://terms"}


async def test_lists_are_read_again_after_a_restart_of_the_server(tmp_path: Path) -> None:
    """Section 6: a child that was started again may have other tools, and clients are notified."""
    (tmp_path / "bank.tools").write_text("[]")
    async with (
        Bench(tmp_path, names=("bank",)).serving() as bench,
        bench.client("/mcp/bank", revision=OLD) as client,
        client.listen(tools=True) as changes,
    ):
        before = len(await client.list_tools())
        more = [{"name": "more", "inputSchema": {"type": "object"}}]
        (tmp_path / "bank.tools").write_text(json.dumps(more))
        with pytest.raises(RpcError):
            await client.call_tool("pay", {"then": "die"})
        await client.call_tool("look")
        async with asyncio.timeout(PATIENCE):
            assert (await anext(aiter(changes))).kind == "tools"
        assert len(await client.list_tools()) == before + 1


async def test_list_is_read_again_when_its_time_is_over(tmp_path: Path) -> None:
    """Section 6: a server that does not notify says how long its list may be kept, and so does /mcp."""
    clock = Held()
    bench = Bench(tmp_path, names=(), more=[newest(tmp_path)], clock=clock)
    (tmp_path / "new.kept").write_text('{"ttlMs": 60000, "cacheScope": "public"}')
    headers = {"Mcp-Protocol-Version": NEW, "Mcp-Method": "tools/list"}

    async def listed(http: aiohttp.ClientSession) -> tuple[int, int, str]:
        message = message_of("tools/list", enveloped({}), 1)
        async with http.post(f"{bench.url}/mcp", data=message, headers=headers) as answer:
            found = (await answer.json())["result"]
        return len(found["tools"]), found["ttlMs"], found["cacheScope"]

    async with bench.serving(), aiohttp.ClientSession(headers=BOTH) as http:
        count, *kept = await listed(http)
        assert kept == [60_000, "public"]
        (tmp_path / "new.tools").write_text('[{"name": "more", "inputSchema": {}}]')
        clock.move(59.0)
        assert await listed(http) == (count, 1000, "public")
        clock.move(1.0)
        assert await listed(http) == (count + 1, 60_000, "public")


async def test_stream_of_changes_that_ends_at_once_begins_again_after_a_pause(
    tmp_path: Path,
) -> None:
    """Section 6: not with each request, and neither is the list read for each of them."""
    clock = Held()
    bench = Bench(tmp_path, names=(), more=[newest(tmp_path)], clock=clock)
    (tmp_path / "new.listen").touch()
    file = bench.file("new")

    def begun() -> int:
        return file.read_text().count("listen")

    async with bench.serving(), bench.client("/mcp/new", revision=NEW) as client:
        for _ in range(5):
            await client.call_tool("look")
        await until(lambda: clock.sleeping)
        assert begun() == 1
        clock.move(clock.sleeping[0][0] - clock.now)
        await until(lambda: begun() == 2)


# --- log messages ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/mcp/studio", "/mcp"])
@pytest.mark.parametrize("theirs", [OLD, NEW])
@pytest.mark.parametrize("ours", [OLD, NEW])
async def test_log_messages_have_a_level_for_each_client(
    tmp_path: Path, ours: str, theirs: str, path: str
) -> None:
    """E: two clients of one session with an upstream get what each of them has asked for."""
    seen: dict[str, list[str]] = {"debug": [], "error": []}

    def note(level: str) -> Any:
        return lambda log: seen[level].append(log.data)

    async with (
        studio(tmp_path, theirs) as (bench, _),
        bench.client(path, revision=ours, on_log=note("debug")) as much,
        bench.client(path, revision=ours, on_log=note("error")) as little,
    ):
        await much.set_log_level("debug")
        await little.set_log_level("error")
        assert (await much.call_tool("tell", {}, key="1")).text == "told"
        await until(lambda: "a error" in seen["debug"])
        assert seen["debug"] == ["a debug", "a info", "a error"]
        await little.call_tool("tell", {}, key="2")
        await until(lambda: "a error" in seen["error"])
        assert set(seen["error"]) == {"a error"}


# --- sessions that a client owns ------------------------------------------------------------------


async def test_session_that_a_client_owns_ends_with_the_client(tmp_path: Path) -> None:
    """Section 5: `share = "session"` ends on the client's DELETE, and its child with it."""
    bench = Bench(tmp_path, names=("bank",), own={"bank": {"share": "session"}})
    async with bench.serving():
        _, session = await bench.post("/mcp/bank", message_of("initialize", introduction(), 1))
        look = message_of("tools/call", {"name": "look"}, 2)
        looked, _ = await bench.post("/mcp/bank", look, session)
        before = (await bench.gateway.status())["upstreams"]["bank"]
        assert session is not None
        headers = {**BOTH, "Mcp-Session-Id": session}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.delete(f"{bench.url}/mcp/bank") as answer,
        ):
            assert answer.status == 204
        assert before["sessions"] == 2  # one was made for the introduction
        pid = looked["result"]["pid"]
        assert pid in before["pids"] and len(before["pids"]) == 2
        await until(lambda: not psutil.pid_exists(pid))
        after = (await bench.gateway.status())["upstreams"]["bank"]
        assert after["sessions"] == 1


async def test_owner_of_a_session_is_asked_and_notified_outside_of_calls(tmp_path: Path) -> None:
    """Section 6, old / old: server requests and unknown notifications, whether a call is open or not."""
    bench = Bench(tmp_path, names=("bank",), own={"bank": {"share": "session"}})
    async with bench.serving():
        _, session = await bench.post("/mcp/bank", message_of("initialize", introduction(), 1))
        assert session is not None
        headers = {"Accept": "text/event-stream", "Mcp-Session-Id": session}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.get(f"{bench.url}/mcp/bank") as standing,
        ):
            told = events(standing)
            await bench.post("/mcp/bank", message_of("x/tell", {"n": 1}), session)
            assert (await anext(told)) == {
                "jsonrpc": "2.0",
                "method": "x/told",
                "params": {"n": 0.1},
            }
            await bench.post("/mcp/bank", message_of("x/ask_later", {}), session)
            asked = await anext(told)
            assert asked["method"] == "roots/list"
            reply = {"jsonrpc": "2.0", "id": asked["id"], "result": {"roots": [7]}}
            await bench.post("/mcp/bank", json.dumps(reply).encode(), session)
            await until(lambda: "answered" in bench.file("bank").read_text())
        assert '{"roots": [7]}' in bench.file("bank").read_text()


async def events(stream: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """The messages of a stream."""
    async with asyncio.timeout(PATIENCE):
        async for line in stream.content:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


async def test_tool_that_was_renamed_after_its_list_goes_to_its_own_server(tmp_path: Path) -> None:
    """X5: a call goes by the table that clients have seen, never to "the next one"."""
    for name, tools in (("bank", ["send"]), ("shop", [])):
        entries = [{"name": tool, "inputSchema": {"type": "object"}} for tool in tools]
        (tmp_path / f"{name}.tools").write_text(json.dumps(entries))
    async with Bench(tmp_path).serving() as bench, bench.client("/mcp", revision=OLD) as client:
        assert "send" in {tool.name for tool in await client.list_tools()}
        # The server renames it, and another one gets a tool of its old name.
        (tmp_path / "bank.tools").write_text("[]")
        entry = [{"name": "send", "inputSchema": {"type": "object"}}]
        (tmp_path / "shop.tools").write_text(json.dumps(entry))
        await client.call_tool("send", {"to": "ann"})
        assert effects(tmp_path / "bank") == 1 and effects(tmp_path / "shop") == 0


@pytest.mark.parametrize("theirs", [OLD, NEW])
@pytest.mark.parametrize(("ours", "code"), [(OLD, -32002), (NEW, -32602)])
async def test_missing_resource_has_the_code_of_the_revision_of_the_client(
    tmp_path: Path, ours: str, theirs: str, code: int
) -> None:
    """G12, section 6: -32002 with a handshake, -32602 without; text and data are the server's."""
    own = newest(tmp_path, "bank") if theirs == NEW else None
    bench = Bench(tmp_path, names=() if own else ("bank",), more=[own] if own else [])
    async with bench.serving(), bench.client("/mcp/bank", revision=ours) as client:
        with pytest.raises(RpcError, match="no such") as caught:
            await client.read_resource("file:///none")
    assert caught.value.code == code and caught.value.data["their"] == 0.5

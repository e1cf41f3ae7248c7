"""`wirecall call --background` and `wirecall task`, against a server whose tools become tasks."""

import asyncio
import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli import HELLO, PATIENCE, SHOP, invoke, running, wirecall
from tests.mcp.scripted import refusal, text
from tests.mcp.task_servers import CANCELLED, CREATED, DONE, ERRORS, ID, TASKS, TIMES, Server, asking, task

TOOLS = {"tools": [{"name": "render", "inputSchema": {"type": "object"}, "annotations": {"destructiveHint": False}}]}
CAPABILITIES: dict[str, Any] = {"tools": {}, "extensions": {TASKS: {}}}
SOON: dict[str, Any] = {"pollIntervalMs": 1}


@contextmanager
def scripted(*states: Any, **more: Any) -> Iterator[Server]:
    """A server in a thread of its own."""
    begun: list[Server] = []
    is_ready, loop, over = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        given = {"created": {**CREATED, **SOON}, "capabilities": CAPABILITIES, "tools/list": TOOLS, **more}
        async with Server(*states, **given) as server:
            begun.append(server)
            is_ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert is_ready.wait(PATIENCE)
        yield begun[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def documents(*words: str) -> tuple[int, Any]:
    run = invoke(*words, "--json")
    return run.exit_code, json.loads(run.stdout)


# --- call --background -----------------------------------------------------------------------------------------------


def test_a_call_in_the_background_prints_the_id_of_its_task() -> None:
    with scripted(task()) as server:
        run = invoke("call", server.url, "render", "--background")
        assert (run.exit_code, run.stdout) == (0, f"{ID}\n")
        assert f"wirecall task wait {server.url} {ID}" in run.stderr
        code, document = documents("call", server.url, "render", "--background", "--key", "k")
        assert code == 0 and document == {
            "ok": True,
            "result": {"id": ID, "status": "working"},
            "method": "render",
            "key": "k",
            "revision": "2026-07-28",
        }
    assert "tasks/get" not in server.methods() and "tasks/cancel" not in server.methods()


def test_a_server_that_answers_at_once_gives_its_result() -> None:
    with scripted(task(), created=text("done")) as server:
        run = invoke("call", server.url, "render", "--background")
        assert (run.exit_code, run.stdout) == (0, "done\n") and "there is no task" in run.stderr
        code, document = documents("call", server.url, "render", "--background")
        assert code == 0 and document["result"] == {"id": None, "status": "completed", "result": "done"}


def test_a_call_that_is_not_started_fails_like_any_call() -> None:
    with scripted(task(), created=lambda message: refusal(message, 50910, "?", {"type": "outcome_unknown"})) as server:
        code, document = documents("call", server.url, "render", "--background", "--key", "k")
        assert code == 8 and document["error"]["key"] == "k" and "ledger resolve" in document["error"]["next"]
        assert documents("call", server.url, "render", "--background", "--key", "é")[1]["error"]["exit"] == 2
    assert documents("call", "http://127.0.0.1:9/mcp", "render", "--background")[0] == 4


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["call", SHOP, "charge", "order=7", "cents=5", "--background"], "The task would end with this command."),
        (["call", SHOP, "charge", "order=7", "cents=5", "--background", "--as", "rpc"], "JSON-RPC does not have tasks."),
        (["task", "wait", HELLO, ID, "--as", "rpc"], "JSON-RPC does not have tasks."),
        (["task", "show", HELLO, ID, "--revision", "2025-11-25"], "This client has no tasks."),
        (["task", "show", HELLO, ""], "The id of a task must have 1 to 4096 characters"),
    ],
)
def test_mistakes_are_reported_before_anything_is_sent(words: list[str], what: str) -> None:
    run = invoke(*words)
    assert run.exit_code == 2 and what in run.stderr


def test_a_call_that_waits_shows_the_result_of_its_task() -> None:
    with scripted(task(**SOON), DONE) as server:
        assert invoke("call", server.url, "render").stdout == "done\n"
        assert invoke("batch", server.url, input='{"method": "render"}\n').stdout == '{"line":1,"ok":true,"result":"done"}\n'


def test_ctrl_c_cancels_the_task_of_a_call_that_waits() -> None:
    asked = threading.Event()

    def refuse(message: Any) -> Any:
        asked.set()
        return refusal(message, -32601)

    waits = {"created": {**CREATED, "pollIntervalMs": 60_000}, "subscriptions/listen": refuse}
    with scripted(task(), **waits) as server, running("call", server.url, "render", "--timeout", "1h") as run:
        assert asked.wait(PATIENCE)
        assert run.end(signal.SIGINT)[0] == 130
        assert "tasks/cancel" in server.methods()


# --- task ------------------------------------------------------------------------------------------------------------


def test_show_prints_the_state() -> None:
    with scripted(task(statusMessage="half\x1b[31m")) as server:
        run = invoke("task", "show", server.url, ID)
        assert run.exit_code == 0
        assert run.stdout.splitlines() == [
            "working  half\\u001b[31m",
            f"  created {TIMES['createdAt']}",
            f"  updated {TIMES['lastUpdatedAt']}",
        ]
        code, document = documents("task", "show", server.url, ID)
        assert code == 0 and document["result"] == {
            "id": ID,
            "status": "working",
            "message": "half\x1b[31m",
            "created": TIMES["createdAt"],
            "updated": TIMES["lastUpdatedAt"],
            "ttlMs": 60000,
        }


def test_wait_prints_the_result_and_the_messages_on_the_way() -> None:
    with scripted(task(statusMessage="half", **SOON), DONE, task(statusMessage="half", **SOON), DONE) as server:
        run = invoke("task", "wait", server.url, ID)
        assert (run.exit_code, run.stdout) == (0, "done\n") and "half" in run.stderr
        assert documents("task", "wait", server.url, ID) == (0, {"ok": True, "result": "done", "task": ID})


@pytest.mark.parametrize(
    ("state", "exit", "kind"),
    [
        (task("completed", result={**text("broke"), "isError": True}), 5, "remote"),
        (task("failed", error=ERRORS[0]), 5, "remote"),
        (task("failed", error=ERRORS[1]), 8, "outcome_unknown"),
        (CANCELLED, 5, "task_cancelled"),
        (task("odd"), 10, "bad_answer"),
        (asking("a"), 10, "bad_answer"),
        (lambda message: refusal(message, -32602, "Task not found"), 5, "task_gone"),
    ],
)
def test_wait_ends_with_the_exit_code_of_the_outcome(state: Any, exit: int, kind: str) -> None:
    with scripted(state) as server:
        code, document = documents("task", "wait", server.url, ID)
    assert (code, document["error"]["exit"], document["error"]["type"]) == (exit, exit, kind)


def test_ctrl_c_ends_the_wait_and_not_the_task() -> None:
    asked = threading.Event()

    def working(_message: Any) -> Any:
        asked.set()
        return task(pollIntervalMs=60_000)

    with scripted(working) as server, running("task", "wait", server.url, ID) as run:
        assert asked.wait(PATIENCE)
        code, _, said = run.end(signal.SIGINT)
    assert code == 130 and f"wirecall task wait {server.url} {ID}" in said
    assert "tasks/cancel" not in server.methods()


def test_cancel_asks_and_shows_the_state_after_that() -> None:
    with scripted(CANCELLED) as server:
        run = invoke("task", "cancel", server.url, ID)
        assert (run.exit_code, run.stdout) == (0, "cancelled\n")
    with scripted(task()) as server:
        run = invoke("task", "cancel", server.url, ID)
        assert (run.exit_code, run.stdout) == (0, "working\n") and "may still finish" in run.stderr
    assert server.methods()[-2:] == ["tasks/cancel", "tasks/get"]
    gone = {"tasks/cancel": lambda message: refusal(message, -32602)}
    with scripted(task(), **gone) as server:
        assert documents("task", "cancel", server.url, ID)[1]["error"]["type"] == "task_gone"


CHILD = """
import json, sys
from pathlib import Path
for line in sys.stdin:
    message = json.loads(line)
    if message["method"] == "server/discover":
        told = {"supportedVersions": ["2026-07-28"], "capabilities": {"extensions": {"io.modelcontextprotocol/tasks": {}}}}
    elif message["method"] == "tasks/get":
        told = {"taskId": message["params"]["taskId"], "status": "completed", "result": {"content": []}}
    else:
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": {"resultType": "complete", **told}}), flush=True)
"""


def test_a_target_may_be_a_command_line(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(CHILD)
    run = wirecall("task", "show", ID, "--json", "--", sys.executable, str(tmp_path / "server.py"))
    assert json.loads(run.stdout)["result"] == {"id": ID, "status": "completed"}

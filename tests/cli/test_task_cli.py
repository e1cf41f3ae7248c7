"""`wirecall call --background` and `wirecall task`, against a server whose tools become tasks."""

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli import HELLO, PATIENCE, SHOP, invoke, running, serving, wirecall
from tests.cli.terminals import typed
from tests.mcp.scripted import refusal, text
from tests.mcp.task_servers import CANCELLED, CREATED, DONE, ERRORS, ID, TASKS, TIMES, Server, task
from wirecall.cli import terminal

TOOLS = {
    "tools": [
        {
            "name": "render",
            "inputSchema": {"type": "object"},
            "annotations": {"destructiveHint": False},
        }
    ]
}
CAPABILITIES: dict[str, Any] = {"tools": {}, "extensions": {TASKS: {}}}
SOON: dict[str, Any] = {"pollIntervalMs": 1}


@contextmanager
def scripted(*states: Any, **more: Any) -> Iterator[Server]:
    """Run a server in a separate thread."""
    begun: list[Server] = []
    is_ready = threading.Event()
    loop = asyncio.new_event_loop()
    over = asyncio.Event()

    async def serve() -> None:
        given = {
            "created": {**CREATED, **SOON},
            "capabilities": CAPABILITIES,
            "tools/list": TOOLS,
            **more,
        }
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


# --- call --background ----------------------------------------------------------------------------


def test_call_in_the_background_prints_the_id_of_its_task() -> None:
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


def test_background_call_that_is_answered_at_once_prints_the_result() -> None:
    with scripted(task(), created=text("done")) as server:
        run = invoke("call", server.url, "render", "--background")
        assert (run.exit_code, run.stdout) == (0, "done\n") and "there is no task" in run.stderr
        code, document = documents("call", server.url, "render", "--background")
        assert code == 0 and document["result"] == {
            "id": None,
            "status": "completed",
            "result": "done",
        }


def test_call_that_is_not_started_fails_like_any_call() -> None:
    with scripted(
        task(), created=lambda message: refusal(message, 50910, "?", {"type": "outcome_unknown"})
    ) as server:
        code, document = documents("call", server.url, "render", "--background", "--key", "k")
        assert (
            code == 8
            and document["error"]["key"] == "k"
            and "ledger resolve" in document["error"]["next"]
        )
        assert (
            documents("call", server.url, "render", "--background", "--key", "é")[1]["error"][
                "exit"
            ]
            == 2
        )
    assert documents("call", "http://127.0.0.1:9/mcp", "render", "--background")[0] == 4


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (
            ["call", SHOP, "charge", "order=7", "cents=5", "--background"],
            "The task would end with this command.",
        ),
        (
            ["call", SHOP, "charge", "order=7", "cents=5", "--background", "--as", "rpc"],
            "JSON-RPC does not have tasks.",
        ),
        (["task", "wait", HELLO, ID, "--as", "rpc"], "JSON-RPC does not have tasks."),
        (["task", "show", HELLO, ID, "--revision", "2025-11-25"], "This client has no tasks."),
        (["task", "show", HELLO, ""], "The id of a task must have 1 to 4096 characters"),
    ],
)
def test_mistakes_are_reported_before_anything_is_sent(words: list[str], what: str) -> None:
    run = invoke(*words)
    assert run.exit_code == 2 and what in run.stderr


def test_call_that_waits_shows_the_result_of_its_task() -> None:
    with scripted(task(**SOON), DONE) as server:
        assert invoke("call", server.url, "render").stdout == "done\n"
        assert (
            invoke("batch", server.url, input='{"method": "render"}\n').stdout
            == '{"line":1,"ok":true,"result":"done"}\n'
        )


def test_ctrl_c_cancels_the_task_of_a_call_that_waits() -> None:
    asked = threading.Event()

    def refuse(message: Any) -> Any:
        asked.set()
        return refusal(message, -32601)

    waits = {"created": {**CREATED, "pollIntervalMs": 60_000}, "subscriptions/listen": refuse}
    with (
        scripted(task(), **waits) as server,
        running("call", server.url, "render", "--timeout", "1h") as run,
    ):
        assert asked.wait(PATIENCE)
        assert run.end(signal.SIGINT)[0] == 130
        assert "tasks/cancel" in server.methods()


# --- task -----------------------------------------------------------------------------------------


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


def test_wait_prints_the_result_and_the_progress_messages() -> None:
    with scripted(
        task(statusMessage="half", **SOON), DONE, task(statusMessage="half", **SOON), DONE
    ) as server:
        run = invoke("task", "wait", server.url, ID)
        assert (run.exit_code, run.stdout) == (0, "done\n") and "half" in run.stderr
        assert documents("task", "wait", server.url, ID) == (
            0,
            {"ok": True, "result": "done", "task": ID},
        )


@pytest.mark.parametrize(
    ("state", "exit", "kind"),
    [
        (task("completed", result={**text("broke"), "isError": True}), 5, "remote"),
        (task("failed", error=ERRORS[0]), 5, "remote"),
        (task("failed", error=ERRORS[1]), 8, "outcome_unknown"),
        (CANCELLED, 5, "task_cancelled"),
        (task("odd"), 10, "bad_answer"),
        (lambda message: refusal(message, -32602, "Task not found"), 5, "task_gone"),
    ],
)
def test_wait_ends_with_the_exit_code_of_the_outcome(state: Any, exit: int, kind: str) -> None:
    with scripted(state) as server:
        code, document = documents("task", "wait", server.url, ID)
    assert (code, document["error"]["exit"], document["error"]["type"]) == (exit, exit, kind)


FORM = {
    "message": "Which one?",
    "requestedSchema": {
        "type": "object",
        "properties": {
            "size": {"type": "string", "enum": ["small", "large"]},
            "count": {"type": "integer"},
        },
        "required": ["size", "count"],
    },
}
VISIT = {
    "mode": "url",
    "message": "Log in.",
    "url": "https://bank.example/login",
    "elicitationId": "e",
}


def asking_for(**questions: Any) -> Any:
    requests = {
        key: {"method": "elicitation/create", "params": params} for key, params in questions.items()
    }
    return task("input_required", inputRequests=requests, **SOON)


def test_task_show_prints_the_open_questions() -> None:
    with scripted(asking_for(form=FORM, page=VISIT)) as server:
        run = invoke("task", "show", server.url, ID)
        assert run.exit_code == 0
        assert run.stdout.splitlines()[3:] == [
            "  asks: Which one?",
            "    size   one of small, large  required",
            "    count  a whole number       required",
            "  asks: Log in.",
            "    https://bank.example/login",
        ]
        assert (
            f"next: wirecall task wait {server.url} {ID} --answer size=... --answer count=..."
            in run.stderr
        )
        document = documents("task", "show", server.url, ID)[1]["result"]
    assert document["questions"] == [
        {"key": "form", "message": "Which one?", "schema": FORM["requestedSchema"]},
        {"key": "page", "message": "Log in.", "url": "https://bank.example/login"},
    ]


def test_task_wait_answers_questions_from_the_command_line() -> None:
    with scripted(asking_for(form=FORM), DONE) as server:
        run = invoke(
            "task", "wait", server.url, ID, "--answer", "size=large", "--answer", "count=2"
        )
        assert (run.exit_code, run.stdout) == (0, "done\n"), run.stderr
    (update,) = server.sent("tasks/update")
    assert update["inputResponses"] == {
        "form": {"action": "accept", "content": {"size": "large", "count": 2}}
    }


def test_task_wait_asks_on_the_terminal(tmp_path: Path) -> None:
    with scripted(asking_for(form=FORM), DONE) as server:
        code, shown = typed(tmp_path, "task", "wait", server.url, ID, lines=["large\n", "2\n"])
        assert code == 0 and "? Which one?" in shown and "done" in shown
    (update,) = server.sent("tasks/update")
    assert update["inputResponses"]["form"]["content"] == {"size": "large", "count": 2}


@pytest.mark.parametrize(
    ("question", "answers", "what", "next"),
    [
        (
            FORM,
            [],
            "The server asks a question, and there is no terminal.",
            "--answer size=... --answer count=...",
        ),
        (
            FORM,
            ["size=large"],
            "The server asks a question, and there is no terminal.",
            "--answer count=...",
        ),
        (
            FORM,
            ["size=huge", "count=1"],
            "size must be one of small, large.",
            "correct the value of --answer",
        ),
        (
            VISIT,
            [],
            "The server asks for a visit to a page, and there is no terminal.",
            "wirecall task wait",
        ),
    ],
)
def test_task_wait_leaves_a_question_open_that_it_cannot_answer(
    question: Any, answers: list[str], what: str, next: str
) -> None:
    """A decline would be an answer, and the task would end with it."""
    words = [word for answer in answers for word in ("--answer", answer)]
    with scripted(asking_for(form=question)) as server:
        code, document = documents("task", "wait", server.url, ID, *words)
    error = document["error"]
    assert (code, error["type"], error["message"]) == (130, "unanswered", what)
    assert next in error["next"]
    assert "tasks/update" not in server.methods()


def test_background_tool_that_asks_is_answered_by_the_next_command(tmp_path: Path) -> None:
    """The printed command lines are run as they stand."""
    (tmp_path / "asking.py").write_text(ASKING)
    with serving(str(tmp_path / "asking.py")) as address:
        begun = wirecall("call", address, "order", "--background", cwd=tmp_path)
        assert begun.returncode == 0, begun.stderr
        wait = begun.stderr.decode().partition("next: wirecall ")[2].split()
        assert wait[:2] == ["task", "wait"]
        refused = wirecall(*wait, cwd=tmp_path)
        assert refused.returncode == 130
        said = refused.stderr.decode()
        assert "The server asks a question" in said and "protocol" not in said
        again = said.partition("next: wirecall ")[2].replace("size=...", "size=large").split()
        done = wirecall(*again, cwd=tmp_path)
        assert done.stdout == b"a large one\n", done.stderr


ASKING = """
from typing import Literal
import msgspec
from wirecall import App, Context

app = App("asking")

class Order(msgspec.Struct):
    size: Literal["small", "large"]

@app.command(task=True)
async def order(ctx: Context) -> str:
    answer = await ctx.elicit("Which one?", Order)
    return f"a {answer.content.size} one"
"""


# --- a wait on a terminal -------------------------------------------------------------------------


WAITING = """
import os
from wirecall import App, Context

app = App("waiting")

@app.query
def price() -> int:
    with open(os.environ["GATE"]) as gate:  # until the test opens it
        gate.read()
    return 450

@app.command(task=True)
async def render(ctx: Context) -> str:
    import asyncio
    await ctx.progress(1, message="half")
    return await asyncio.to_thread(price) and "rendered"
"""


def watched(
    folder: Path, gate: Path, *words: str, until: bytes, term: str = "xterm"
) -> tuple[int, str]:
    """Run the command on a terminal, and open the gate when it shows a string."""
    ours, theirs = pty.openpty()
    environment = {
        **os.environ,
        "NO_COLOR": "1",
        "TERM": term,
        "PYTHONIOENCODING": "utf-8",
        "COLUMNS": "200",
    }
    command = [sys.executable, "-m", "wirecall", *words]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment
    ) as process:
        os.close(theirs)
        watchdog = threading.Timer(PATIENCE, process.kill)
        watchdog.start()
        shown = b""
        is_open = False
        while True:
            try:
                shown += os.read(ours, 65_536)
            except OSError:  # the command has ended
                break
            if until in shown and not is_open:
                is_open = True
                gate.write_text("go")
        process.wait()
        watchdog.cancel()
    os.close(ours)
    return process.returncode, shown.decode().replace("\r\n", "\n")


@pytest.mark.parametrize(
    ("way", "name", "until", "answer"),
    [("rpc", "price", "price  ", "450"), ("mcp", "render", " s  working", "rendered")],
)
def test_call_shows_a_spinner_on_a_terminal(
    way: str, name: str, until: str, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a second. It shows the status of a task, and vanishes before the result."""
    (tmp_path / "waiting.py").write_text(WAITING)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    monkeypatch.setenv("GATE", str(gate))
    with serving(str(tmp_path / "waiting.py")) as address:
        words = ["call", address, name, "--as", way, "--yes", "--timeout", "60s"]
        code, shown = watched(tmp_path, gate, *words, until=until.encode())
    assert code == 0, shown
    assert until in shown
    assert shown.rstrip().endswith(answer)


def test_call_without_a_terminal_shows_no_spinner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spinner that is due at once is not shown."""
    monkeypatch.setattr(terminal, "SPINNER_AFTER", 0.0)
    with scripted(task(statusMessage="half", **SOON), DONE) as server:
        run = invoke("call", server.url, "render")
    assert run.stdout == "done\n" and "\x1b" not in run.stderr and "working" not in run.stderr


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


def test_cancel_requests_it_and_shows_the_state_afterwards() -> None:
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
        extensions = {"io.modelcontextprotocol/tasks": {}}
        found = {"supportedVersions": ["2026-07-28"], "capabilities": {"extensions": extensions}}
    elif message["method"] == "tasks/get":
        id = message["params"]["taskId"]
        found = {"taskId": id, "status": "completed", "result": {"content": []}}
    else:
        continue
    result = {"resultType": "complete", **found}
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""


def test_target_may_be_a_command_line(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(CHILD)
    run = wirecall("task", "show", ID, "--json", "--", sys.executable, str(tmp_path / "server.py"))
    assert json.loads(run.stdout)["result"] == {"id": ID, "status": "completed"}

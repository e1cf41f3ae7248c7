"""`batch` and `send`: lines in, lines out."""

import asyncio
import json
import os
import pty
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli import HELLO, PATIENCE, SHOP, invoke, running, wirecall
from tests.cli.terminals import typed
from wirecall.cli.failures import Exit

SUM = b'{"jsonrpc":"2.0","method":"sum","params":[1,2,3],"id":1}\n'
LINES = b"""{"method": "price", "params": {"sku": "tea"}}
this is no JSON

{"method": "price", "params": {"sku": "milk"}, "id": "seven"}
{"params": {}}
{"method": "charge", "params": {"order": "1", "cents": 5}, "key": "k"}
{"method": "charge", "params": {"order": "1", "cents": 5}, "key": "k"}
{"method": "charge", "params": {"order": "1", "cents": 6}, "key": "k"}
{"method": "charge", "params": {"order": "1", "cents": 6}, "key": "two words"}
{"jsonrpc": "2.0", "method": "price", "params": {"sku": "coffee"}, "id": 9}
"""


def outcomes(stdout: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stdout.splitlines()]


@pytest.mark.parametrize("protocol", ["rpc", "mcp"])
def test_lines_have_their_outcomes_in_order(protocol: str) -> None:
    run = wirecall("batch", SHOP, "--as", protocol, stdin=LINES)
    found = outcomes(run.stdout)
    assert run.returncode == Exit.SOME_FAILED
    assert [outcome["line"] for outcome in found] == [1, 2, 4, 5, 6, 7, 8, 9, 10]
    assert [outcome["ok"] for outcome in found] == [
        True,
        False,
        False,
        False,
        True,
        True,
        False,
        False,
        True,
    ]
    assert found[0]["result"] == 450
    assert found[1]["error"]["message"] == "This line is not a call."
    assert (found[2]["id"], found[2]["error"]["code"]) == ("seven", 4040)
    assert found[5]["replayed"] is True
    assert found[6]["error"]["type"] == "idempotency_key_conflict"
    assert "is not a key" in found[7]["error"]["message"]
    assert (found[8]["id"], found[8]["result"]) == (9, 700)
    assert b"9 lines, 5 failed, 1 replayed" in run.stderr


def test_error_of_a_tool_says_its_reason_once() -> None:
    run = invoke("batch", SHOP, "--as", "mcp", input=b'{"method": "price"}\n{"method": "prize"}\n')
    missing, unknown = (outcome["error"] for outcome in outcomes(run.stdout_bytes))
    assert (missing["message"], missing["why"]) == ("arguments.sku: missing.", "code -32602")
    assert (unknown["message"], unknown["why"]) == (
        "Invalid params.",
        "there is no tool 'prize'; did you mean 'price'? (code -32602)",
    )
    assert "wirecall list" in unknown["next"]


def test_file_of_calls(tmp_path: Path) -> None:
    (tmp_path / "calls").write_bytes(LINES.splitlines(True)[0] * 2500)
    run = invoke("batch", SHOP, str(tmp_path / "calls"))
    assert run.exit_code == 0
    found = outcomes(run.stdout_bytes)
    assert [outcome["line"] for outcome in found] == list(range(1, 2501))
    assert {outcome["result"] for outcome in found} == {450}


def test_file_that_is_not_there() -> None:
    run = invoke("batch", SHOP, "nowhere.ndjson", "--json")
    assert run.exit_code == Exit.USAGE
    assert json.loads(run.stdout)["ok"] is False


def test_batch_may_be_empty() -> None:
    run = invoke("batch", SHOP, input=b"")
    assert (run.exit_code, run.stdout) == (0, "")


def test_tools_do_not_accept_a_list() -> None:
    run = invoke("batch", SHOP, "--as", "mcp", input=b'{"method": "price", "params": ["tea"]}\n')
    assert run.exit_code == Exit.SOME_FAILED
    assert "params by position" in run.stdout


def test_bar_is_shown_on_a_terminal_only(tmp_path: Path) -> None:
    (tmp_path / "calls").write_bytes(LINES.splitlines(True)[0] * 20)
    person, terminal = pty.openpty()
    command = [sys.executable, "-m", "wirecall", "batch", SHOP, str(tmp_path / "calls")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=terminal, stdin=subprocess.DEVNULL
    ) as process:
        os.close(terminal)
        out, _ = process.communicate(timeout=PATIENCE)
    seen = os.read(person, 65536).decode()
    os.close(person)
    assert len(outcomes(out)) == 20
    assert "Calls" in seen
    assert "20/20" in seen


def test_batch_reports_a_server_that_is_not_reachable() -> None:
    run = invoke(
        "batch", "http://127.0.0.1:9/rpc", "--timeout", "500ms", input=LINES.splitlines(True)[0] * 2
    )
    assert run.exit_code == Exit.UNREACHABLE
    assert [outcome["ok"] for outcome in outcomes(run.stdout_bytes)] == [False, False]


def test_batch_without_an_answer_names_the_time_that_its_user_gave() -> None:
    # The kernel accepts the connection, and no process reads it.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        run = invoke(
            "batch",
            f"http://127.0.0.1:{silent.getsockname()[1]}/rpc",
            "--timeout",
            "300ms",
            input=SUM,
        )
    (found,) = outcomes(run.stdout_bytes)
    assert (run.exit_code, found["error"]["type"]) == (Exit.SOME_FAILED, "timed_out")
    # Not the half that remains after rpc.discover.
    assert found["error"]["why"] == "no answer within 0.3 s"


@pytest.mark.parametrize("kind", ["address", "process"])
def test_send_without_an_answer_ends_at_its_deadline(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silence = ["--", sys.executable, "-c", "import signal; signal.pause()"]
        target = (
            silence if kind == "process" else [f"http://127.0.0.1:{silent.getsockname()[1]}/rpc"]
        )
        run = invoke("send", "--timeout", "200ms", *target, input=SUM)
    assert run.exit_code == Exit.UNKNOWN
    assert "The server has not answered every message." in run.stderr
    assert "no answer within 0.2 s" in run.stderr


def test_send_is_interrupted_as_its_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ending:
        """A process that has ended.

        Ctrl-C cancels in the loop iteration that sees its exit code.
        """

        def __init__(self, task: "asyncio.Task[Any]") -> None:
            self.task = task
            self.returncode: int | None = None
            self.stdout = asyncio.StreamReader()
            self.stderr = asyncio.StreamReader()
            self.stdin = self
            self.terminate = self.kill = self.close
            self.stdout.feed_eof()
            self.stderr.feed_eof()

        def close(self) -> None: ...

        async def wait(self) -> None:
            if self.returncode is None:
                self.returncode = 0
                self.task.cancel()

    async def start(*_: str, **__: Any) -> Ending:
        task = asyncio.current_task()
        assert task is not None
        return Ending(task)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    assert invoke("send", "--", "server", input=b"").exit_code == Exit.INTERRUPTED


def test_send_prints_one_line_per_answer_and_none_for_notifications() -> None:
    notification = b'{"jsonrpc":"2.0","method":"notify_hello","params":[7]}\n'
    run = wirecall("send", HELLO, stdin=SUM + notification + b"\ngarbage\n" + SUM)
    answers = outcomes(run.stdout)
    assert run.returncode == 0
    assert [answer.get("result") for answer in answers] == [6, None, 6]
    assert answers[1]["error"]["code"] == -32700


def test_send_accepts_a_file_and_an_app_by_name(tmp_path: Path) -> None:
    (tmp_path / "messages").write_bytes(SUM)
    run = invoke("send", f"{HELLO}:app", str(tmp_path / "messages"))
    assert json.loads(run.stdout) == {"jsonrpc": "2.0", "result": 6, "id": 1}


# --- input that arrives at its own pace -----------------------------------------------------------

PRICE = LINES.splitlines(True)[0]

WAITS = """
import asyncio, pathlib
from wirecall import App

app = App("waits")

@app.query
async def wait(path: str) -> str:
    while not pathlib.Path(path).exists():
        await asyncio.sleep(0.02)
    return "seen"

@app.query
def quick() -> str:
    return "quick"
"""


def test_lines_of_a_pipe_are_answered_while_it_is_open() -> None:
    with running("batch", SHOP) as run:
        for number in (1, 2):
            run.write(PRICE)
            assert json.loads(run.answer()) == {"line": number, "ok": True, "result": 450}
        run.write(PRICE.rstrip())  # a last line without an end is a line
        out, err = run.process.communicate(timeout=PATIENCE)
    assert json.loads(out)["line"] == 3
    assert "3 lines, 0 failed" in err


def test_pipe_that_is_full_at_once_is_read_in_whole_blocks() -> None:
    run = wirecall("batch", SHOP, stdin=b"\n" + PRICE * 2500)
    assert [outcome["line"] for outcome in outcomes(run.stdout)] == list(range(2, 2502))


def test_batch_that_waits_for_input_is_interrupted_and_reports_its_position() -> None:
    with running("batch", SHOP) as run:
        run.write(PRICE)
        run.answer()
        code, out, err = run.end(signal.SIGINT)
    assert (code, out) == (Exit.INTERRUPTED, "")
    assert err.endswith("✗ Interrupted.\n  why: 1 line answered, 0 failed\n")


def test_answer_does_not_wait_for_those_after_it(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    wait = {"method": "wait", "params": {"path": str(tmp_path / "go")}}
    with running("batch", str(tmp_path / "waits.py"), "--as", "mcp") as run:
        run.write(
            b'{"method": "quick"}\n' + json.dumps(wait).encode() + b"\n" + b'{"method": "quick"}\n'
        )
        assert json.loads(run.answer())["line"] == 1
        (tmp_path / "go").touch()
        assert [json.loads(run.answer())["line"] for _ in range(2)] == [2, 3]


def test_stream_prints_each_outcome_when_it_comes(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    wait = {"method": "wait", "params": {"path": str(tmp_path / "go")}}
    with running("batch", str(tmp_path / "waits.py"), "--as", "mcp", "--stream", "--json") as run:
        run.write(json.dumps(wait).encode() + b"\noops\n" + b'{"method": "quick"}\n')
        assert [json.loads(run.answer())["line"] for _ in range(2)] == [2, 3]
        (tmp_path / "go").touch()
        last = json.loads(run.answer())
        assert (last["line"], last["result"]) == (1, "seen")


def test_stream_on_a_terminal_has_a_line_for_each_outcome(tmp_path: Path) -> None:
    (tmp_path / "calls").write_bytes(LINES)
    code, shown = typed(tmp_path, "batch", SHOP, "calls", "--stream", lines=[])
    assert code == Exit.SOME_FAILED
    rows = shown.splitlines()
    assert "✓ line 1: 450" in rows
    assert "✓ line 10 (9): 700" in rows
    assert '↻ line 7: {"order":"1","paid":5}' in rows
    assert any(row.startswith("✗ line 2: This line is not a call.") for row in rows)
    assert len(rows) == 10
    code, shown = typed(tmp_path, "batch", SHOP, "calls", "--stream", "--json", lines=[])
    rows = [row for row in shown.splitlines() if row.startswith("{")]
    assert {json.loads(row)["line"] for row in rows} == {1, 2, *range(4, 11)}


LINKED = b"""{"id": "tea", "method": "price", "params": {"sku": "tea"}}
{"id": 2, "method": "charge", "params": {"order": "7"}, "key": "k", "refs": {"/cents": {"id": "tea"}}}
{"method": "price", "params": {"sku": "tea"}, "after": [2]}
{"id": "bad", "method": "charge", "params": {"order": "7"}, "refs": {"/cents": {"id": 2, "path": "/x"}}}
{"method": "price", "params": {"sku": "tea"}, "after": ["bad"]}
{"method": "price", "params": {"sku": "tea"}, "after": ["later"]}
{"id": "later", "method": "price", "params": {"sku": "tea"}, "refs": {"/sku": {"id": "tea"}}}
{"id": "tea", "method": "price", "params": ["tea"], "refs": {"/0": {"id": 2}}}
{"method": "price", "params": {"sku": "tea"}, "after": ["tea"]}
{"method": "price", "params": {"sku": "tea"}, "after": 5}
"""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", ["rpc", "mcp"])
def test_lines_use_results_of_earlier_lines(protocol: str, stream: bool) -> None:
    words = ["--stream"] if stream else []
    run = invoke("batch", SHOP, "--as", protocol, *words, input=LINKED)
    found = outcomes(run.stdout_bytes)
    if not stream:
        assert [each["line"] for each in found] == list(range(1, 11))
    by_line = {each["line"]: each for each in found}
    assert by_line[2]["result"] == {"order": "7", "paid": 450}
    assert by_line[3]["result"] == 450
    assert by_line[4]["error"]["type"] == "reference_not_found"
    data = by_line[5]["error"]["data"]
    assert (data["type"], data["line"], data["id"]) == ("dependency_failed", 4, "bad")
    for number, why in [
        (6, "no earlier line of this window has the id"),
        (7, "params has a value there"),
        (9, "2 lines have the id"),
        (10, "after: expected an array of ids"),
    ]:
        assert by_line[number]["error"]["type"] == "reference_invalid"
        assert why in by_line[number]["error"]["why"]
    assert not by_line[8]["ok"]


def test_calls_in_flight_at_an_interruption_are_reported(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    wait = {"method": "wait", "params": {"path": str(tmp_path / "never")}}
    with running("batch", str(tmp_path / "waits.py"), "--as", "mcp") as run:
        run.write(b'{"method": "quick"}\n' + json.dumps(wait).encode() + b"\n")
        run.answer()
        code, _, err = run.end(signal.SIGINT)
    assert code == Exit.INTERRUPTED
    assert "why: 1 line answered, 0 failed; 1 line may have run, or may still run" in err


def test_send_answers_while_its_input_is_open() -> None:
    with running("send", HELLO) as run:
        for _ in range(2):
            run.write(SUM)
            assert json.loads(run.answer())["result"] == 6


def test_send_prints_lines_of_any_length() -> None:
    says = "import sys; sys.stdout.write('first\\n' + 'x' * 40_000_000)"
    run = wirecall("send", "--", sys.executable, "-c", says)
    assert (run.returncode, run.stderr) == (0, b"")
    assert run.stdout == b"first\n" + b"x" * 40_000_000 + b"\n"


def test_send_to_a_process_that_has_ended_does_not_wait_for_its_input() -> None:
    with running("send", "--", "false") as run:
        assert run.process.wait(PATIENCE) == Exit.UNREACHABLE


def test_send_to_a_process_answers_while_its_input_is_open() -> None:
    with running("send", "--", sys.executable, SHOP) as run:
        for _ in range(2):
            run.write(b'{"jsonrpc":"2.0","method":"ping","id":1}\n')
            assert json.loads(run.answer())["id"] == 1

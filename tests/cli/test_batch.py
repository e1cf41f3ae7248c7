"""`batch` and `send`: lines in, lines out."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli import HELLO, PATIENCE, SHOP, invoke, wirecall
from wirecall.cli.exits import Exit

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
def test_every_line_has_its_outcome_in_order(protocol: str) -> None:
    run = wirecall("batch", SHOP, "--as", protocol, stdin=LINES)
    found = outcomes(run.stdout)
    assert run.returncode == Exit.SOME_FAILED
    assert [outcome["line"] for outcome in found] == [1, 2, 4, 5, 6, 7, 8, 9, 10]
    assert [outcome["ok"] for outcome in found] == [True, False, False, False, True, True, False, False, True]
    assert found[0]["result"] == 450
    assert found[1]["error"]["message"] == "This line is not a call."
    assert (found[2]["id"], found[2]["error"]["code"]) == ("seven", 4040)
    assert found[5]["replayed"] is True
    assert found[6]["error"]["type"] == "idempotency_key_conflict"
    assert "is not a key" in found[7]["error"]["message"]
    assert (found[8]["id"], found[8]["result"]) == (9, 700)
    assert b"9 lines, 5 failed, 1 replayed" in run.stderr


def test_a_file_of_calls(tmp_path: Path) -> None:
    (tmp_path / "calls").write_bytes(LINES.splitlines(True)[0] * 2500)
    run = invoke("batch", SHOP, str(tmp_path / "calls"))
    assert run.exit_code == 0
    found = outcomes(run.stdout_bytes)
    assert [outcome["line"] for outcome in found] == list(range(1, 2501))
    assert {outcome["result"] for outcome in found} == {450}


def test_a_file_that_is_not_there() -> None:
    run = invoke("batch", SHOP, "nowhere.ndjson", "--json")
    assert run.exit_code == Exit.USAGE
    assert json.loads(run.stdout)["ok"] is False


def test_nothing_is_a_batch_too() -> None:
    run = invoke("batch", SHOP, input=b"")
    assert (run.exit_code, run.stdout) == (0, "")


def test_tools_take_no_list() -> None:
    run = invoke("batch", SHOP, "--as", "mcp", input=b'{"method": "price", "params": ["tea"]}\n')
    assert run.exit_code == Exit.SOME_FAILED
    assert "params by position" in run.stdout


def test_a_bar_is_shown_on_a_terminal_only(tmp_path: Path) -> None:
    (tmp_path / "calls").write_bytes(LINES.splitlines(True)[0] * 20)
    person, terminal = pty.openpty()
    command = [sys.executable, "-m", "wirecall", "batch", SHOP, str(tmp_path / "calls")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal, stdin=subprocess.DEVNULL) as process:
        os.close(terminal)
        out, _ = process.communicate(timeout=PATIENCE)
    seen = os.read(person, 65536).decode()
    os.close(person)
    assert len(outcomes(out)) == 20
    assert "Calls" in seen
    assert "20/20" in seen


def test_if_nobody_is_there_the_batch_says_so() -> None:
    run = invoke("batch", "http://127.0.0.1:9/rpc", "--timeout", "500ms", input=LINES.splitlines(True)[0] * 2)
    assert run.exit_code == Exit.UNREACHABLE
    assert [outcome["ok"] for outcome in outcomes(run.stdout_bytes)] == [False, False]


def test_send_answers_line_by_line_and_is_silent_where_nothing_is_owed() -> None:
    notification = b'{"jsonrpc":"2.0","method":"notify_hello","params":[7]}\n'
    run = wirecall("send", HELLO, stdin=SUM + notification + b"\ngarbage\n" + SUM)
    answers = outcomes(run.stdout)
    assert run.returncode == 0
    assert [answer.get("result") for answer in answers] == [6, None, 6]
    assert answers[1]["error"]["code"] == -32700


def test_send_takes_a_file_and_an_app_by_name(tmp_path: Path) -> None:
    (tmp_path / "messages").write_bytes(SUM)
    run = invoke("send", f"{HELLO}:app", str(tmp_path / "messages"))
    assert json.loads(run.stdout) == {"jsonrpc": "2.0", "result": 6, "id": 1}

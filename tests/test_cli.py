"""The `wirecall` command, from a shell's side."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HELLO = str(ROOT / "examples" / "hello.py")
SUM = b'{"jsonrpc":"2.0","method":"sum","params":[1,2,3],"id":1}\n'


def wirecall(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", "from wirecall.cli import main; main()", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=60, check=False)


def test_version_and_help() -> None:
    import wirecall as package

    assert wirecall("--version").stdout.decode().strip() == f"wirecall {package.__version__}"
    shown = wirecall("--help").stdout.decode()
    assert "send" in shown
    assert "every command takes effect" in " ".join(shown.split())


def test_send_answers_line_by_line_and_is_silent_where_nothing_is_owed() -> None:
    notification = b'{"jsonrpc":"2.0","method":"notify_hello","params":[7]}\n'
    run = wirecall("send", HELLO, stdin=SUM + notification + b"\ngarbage\n" + SUM)
    answers = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.returncode == 0
    assert [answer.get("result") for answer in answers] == [6, None, 6]
    assert answers[1]["error"]["code"] == -32700


def test_send_takes_a_file_and_an_app_by_name(tmp_path: Path) -> None:
    (tmp_path / "messages").write_bytes(SUM)
    run = wirecall("send", f"{HELLO}:app", str(tmp_path / "messages"))
    assert json.loads(run.stdout) == {"jsonrpc": "2.0", "result": 6, "id": 1}


@pytest.mark.parametrize(
    ("source", "target", "told"),
    [
        (None, "nowhere.py", "There is no file"),
        ("x = 1", "file.py", "0 apps"),
        ("from wirecall import App\na = App('a')\nb = App('b')", "file.py", "2 apps: a, b"),
        ("x = 1", "file.py:x", "is a int"),
        ("x = 1", "file.py:y", "does not exist"),
        ("x = = 1", "file.py", "SyntaxError"),
        ("\n\nx = 1 / 0", "file.py", "ZeroDivisionError: division by zero (line 3)"),
        ("x = 1", "file.txt", "not a Python file"),
    ],
)
def test_a_target_that_cannot_be_used_is_told_in_three_lines(
    tmp_path: Path, source: str | None, target: str, told: str
) -> None:
    if source is not None:
        (tmp_path / target.partition(":")[0]).write_text(source)
    run = wirecall("send", str(tmp_path / target), stdin=SUM)
    shown = run.stderr.decode()
    assert run.returncode == 2
    assert told in shown
    assert "why:" in shown
    assert "fix:" in shown
    assert "Traceback" not in shown


def test_a_mistyped_verb() -> None:
    run = wirecall("sned")
    assert run.returncode == 2
    assert b"No such command 'sned'" in run.stderr

"""Text from servers and callers on a terminal: it is shown, and steers nothing."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import PATIENCE, invoke
from wirecall.audit import Audit, AuditEntry

# ESC and C1 controls, the marks of bidirectional text, and line breaks that would look like lines
# of ours.
STEERING = "\x1b[2J\x9b2J\x07\u202egnp.exe\u2066\u200f\u2028"
SHOWN = r"\u001b[2J\u009b2J\u0007\u202egnp.exe\u2066\u200f\u2028"

EVIL = f"""
from wirecall import App, DomainError
app = App("a")

@app.query(title={"x" + STEERING!r})
def one() -> str:
    return {"y" + STEERING!r}

@app.query
def two() -> str:
    raise DomainError(4000, {"no" + STEERING + chr(10) + "  next: rm -rf /"!r})
"""

# A server on stdio that prints the same text to stderr, and as a line that is not a message.
CHILD = f"""
import sys
sys.stderr.write({"err" + STEERING + chr(10)!r}); sys.stderr.flush()
for line in sys.stdin:
    sys.stdout.write({"out" + STEERING + chr(10)!r}); sys.stdout.flush()
"""


def on_terminal(*words: str, cwd: Path, stdin: bytes = b"") -> str:
    """Run the command with a terminal as stdout and stderr, and return all that it shows."""
    ours, theirs = pty.openpty()
    environment = {
        **os.environ,
        "NO_COLOR": "1",
        "TERM": "dumb",
        "PYTHONIOENCODING": "utf-8",
        "COLUMNS": "200",
    }
    command = [sys.executable, "-m", "wirecall", *words]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, cwd=cwd, env=environment
    ) as process:
        os.close(theirs)
        assert process.stdin is not None
        process.stdin.write(stdin)
        process.stdin.close()
        shown = b""
        while True:
            try:
                data = os.read(ours, 65_536)
            except OSError:  # the command has ended
                break
            if not data:
                break
            shown += data
        process.wait(PATIENCE)
    os.close(ours)
    return shown.decode().replace("\r\n", "\n")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "evil.py").write_text(EVIL)
    (tmp_path / "child.py").write_text(CHILD)
    return tmp_path


MESSAGE = b'{"jsonrpc":"2.0","method":"one","id":1}\n'
CHILD_WORDS = ["--", sys.executable, "child.py"]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["list", "evil.py"], ["x" + SHOWN]),
        # A title may have several lines.
        (["show", "evil.py", "one"], ["x" + SHOWN.removesuffix(r"\u2028")]),
        (["call", "evil.py", "one"], ["y" + SHOWN]),
        (["call", "evil.py", "two"], ["no" + SHOWN]),
        (["list", "--json", "evil.py"], ["x" + SHOWN]),
        (["show", "--json", "evil.py", "one"], ["x" + SHOWN]),
        (["call", "--json", "evil.py", "one"], ["y" + SHOWN]),
        (["call", "--json", "evil.py", "two"], ["no" + SHOWN]),
        (["batch", "evil.py", "-"], ["y" + SHOWN]),
        # JSON itself escapes the first one.
        (["send", "evil.py", "-"], [SHOWN.removeprefix(r"\u001b[2J")]),
        (["send", "-", *CHILD_WORDS], ["out" + SHOWN, "err" + SHOWN]),
        (["call", "--timeout", "5s", "one", *CHILD_WORDS], ["err" + SHOWN]),
    ],
)
def test_server_does_not_control_the_terminal(
    words: list[str], shown: list[str], place: Path
) -> None:
    told = on_terminal(*words, cwd=place, stdin=MESSAGE if words[0] in ("batch", "send") else b"")
    for text in shown:
        assert text in "".join(told.split())  # a table folds what does not fit
    assert not set(told) & set(STEERING) - set("2Jgnp.exe[")


def test_message_of_a_server_cannot_look_like_our_own_output(place: Path) -> None:
    lines = on_terminal("call", "evil.py", "two", cwd=place).splitlines()
    assert not [line for line in lines if line.startswith("  next: rm")]
    assert [line for line in lines if line.lstrip().startswith("next: rm")]


def test_result_is_written_to_a_pipe_unchanged(place: Path) -> None:
    assert invoke("call", str(place / "evil.py"), "one").stdout == f"y{STEERING}\n"
    assert (
        json.loads(invoke("call", "--json", str(place / "evil.py"), "one").stdout)["result"]
        == f"y{STEERING}"
    )


def test_caller_cannot_forge_a_line_of_an_audit_trail(tmp_path: Path) -> None:
    audit = Audit(str(tmp_path / "audit.jsonl"))
    audit.append(
        AuditEntry(
            time=1.7e9,
            caller=f"ada\n2023-11-14  ok  refund{STEERING}",
            method="charge",
            key="k",
            digest="",
            id=1,
            outcome="ok",
            code=None,
            replayed=False,
            duration_ms=1.5,
        )
    )
    audit.close()
    shown = invoke("audit", "tail", str(tmp_path / "audit.jsonl")).stdout
    assert shown.count("\n") == 1
    assert rf"ada\u000a2023-11-14  ok  refund{SHOWN}" in shown

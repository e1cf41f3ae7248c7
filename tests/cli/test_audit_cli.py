"""`wirecall audit`: shows the trail, and proves that it is unchanged (T6)."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli import PATIENCE, invoke
from wirecall.audit import Audit, AuditEntry


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def entry(key: str, **more: Any) -> AuditEntry:
    fields: dict[str, Any] = {
        "time": 1_700_000_000.5,
        "caller": "ada",
        "method": "charge",
        "key": key,
        "digest": "00",
        "id": 1,
        "outcome": "ok",
        "code": None,
        "replayed": False,
        "duration_ms": 1.5,
    }
    return AuditEntry(**fields | more)


def written(count: int, path: str = "audit.jsonl") -> Path:
    audit = Audit(path)
    for number in range(count):
        audit.append(entry(f"k{number}"))
    audit.close()
    return Path(path)


def test_intact_chain_is_verified_and_its_last_hash_printed() -> None:
    last = json.loads(written(5).read_text().splitlines()[-1])["hash"]
    result = invoke("audit", "verify", "audit.jsonl")
    assert result.exit_code == 0
    assert result.stdout == f"audit.jsonl: 5 lines, last hash {last}\n"


@pytest.mark.parametrize(
    ("change", "line", "what"),
    [
        (lambda lines: [*lines[:2], lines[2].replace("k2", "kX"), *lines[3:]], 3, "was edited"),
        (lambda lines: [*lines[:2], *lines[3:]], 3, "does not follow"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], 1, "does not follow"),
        (lambda lines: [*lines, "{"], 6, "not a line of an audit trail, or torn"),
    ],
)
def test_line_where_the_chain_breaks_is_reported_with_exit_code_9(
    change: Any, line: int, what: str
) -> None:
    path = written(5)
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
    result = invoke("audit", "verify", str(path))
    assert result.exit_code == 9
    assert result.stdout.startswith(f"audit.jsonl:{line}: {what}")
    assert f"breaks at line {line}" in result.stderr
    told = json.loads(invoke("audit", "verify", str(path), "--json").stdout)
    assert told["result"]["problems"][0]["line"] == line


def test_trail_of_wirecall_toml_is_the_default() -> None:
    written(2, "trail.jsonl")
    Path("wirecall.toml").write_text('[audit]\nfile = "trail.jsonl"\n')
    assert json.loads(invoke("audit", "verify", "--json").stdout)["result"]["lines"] == 2


def test_end_of_a_long_trail_is_shown() -> None:
    written(1000)
    told = json.loads(invoke("audit", "tail", "audit.jsonl", "-n", "3", "--json").stdout)["result"]
    assert [each["key"] for each in told] == ["k997", "k998", "k999"]
    lines = invoke("audit", "tail", "file:audit.jsonl").stdout.splitlines()
    assert len(lines) == 20
    assert lines[-1] == "2023-11-14 22:13:20.500+00:00  ok           charge  k999  ada  1.5 ms"


def test_name_of_a_caller_is_shown_and_not_obeyed() -> None:
    audit = Audit("audit.jsonl")
    audit.append(entry("a", caller="\x1b[2Jada"))
    audit.close()
    assert "\\u001b[2Jada" in invoke("audit", "tail", "audit.jsonl").stdout


def test_replays_errors_and_torn_lines_are_distinguished() -> None:
    audit = Audit("audit.jsonl")
    audit.append(entry("a", replayed=True))
    audit.append(entry("b", outcome="error", code=4020, caller=""))
    audit.close()
    with open("audit.jsonl", "a") as file:
        file.write('{"time": 1')
    shown = invoke("audit", "tail", "audit.jsonl").stdout.splitlines()
    assert "  replayed     charge  a  ada" in shown[0]
    assert "  error 4020   charge  b  -" in shown[1]
    assert shown[2] == '? not a line of an audit trail: {"time": 1'


def test_trail_is_followed_as_it_grows_until_ctrl_c() -> None:
    written(1)
    words = [sys.executable, "-m", "wirecall", "audit", "tail", "audit.jsonl", "-f", "--json"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    watchdog = threading.Timer(PATIENCE, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["key"] == "k0"
        audit = Audit("audit.jsonl")
        audit.append(entry("new"))
        assert json.loads(process.stdout.readline())["key"] == "new"
        audit.close()
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE) == 130
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


def test_lines_just_before_a_rotation_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    written(1)
    pauses = iter(range(3))

    def pause(_: float) -> None:
        if next(pauses) > 0:
            raise KeyboardInterrupt
        for rotate, key in ((None, "before"), (1, "after")):
            audit = Audit("audit.jsonl", rotate=rotate)
            audit.append(entry(key))
            audit.close()

    monkeypatch.setattr(time, "sleep", pause)
    shown = invoke("audit", "tail", "audit.jsonl", "-f", "--json").stdout.splitlines()
    assert [json.loads(line)["key"] for line in shown] == ["k0", "before", "after"]


@pytest.mark.parametrize("verb", ["tail", "verify"])
def test_trail_that_is_not_there(verb: str) -> None:
    result = invoke("audit", verb, "gone.jsonl")
    assert result.exit_code == 2
    assert "There is no audit trail gone.jsonl." in result.stderr
    assert "Which audit trail?" in invoke("audit", verb).stderr

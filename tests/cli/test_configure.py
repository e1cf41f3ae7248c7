"""`App.configure`, by which the command line replaces what an app says about itself; and which
verbs do so.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli import invoke
from wirecall import App, Limits, UsageError

WHY = ("--reason", "the bank was asked")

CALL = b'{"jsonrpc":"2.0","method":"one","id":1}'


def app() -> App:
    made = App("a")

    @made.query
    def one() -> int:
        return 1

    return made


def test_given_settings_are_replaced_and_the_others_stay() -> None:
    made = app()
    made.configure(limits=Limits(bytes_in=10))
    assert made.ledger_url == "memory:"
    assert json.loads(made.handle_sync(CALL) or b"")["error"]["data"]["limit"] == "bytes_in"
    made = app()
    made.configure(ledger="sqlite:x.db")
    assert made.ledger_url == "sqlite:x.db"


def test_configure_after_the_first_call_is_too_late() -> None:
    made = app()
    made.handle_sync(CALL)
    with pytest.raises(UsageError, match="serving already"):
        made.configure(ledger="memory:")


def test_ledger_that_a_command_cannot_use_is_refused() -> None:
    made = App("a", ledger="sqlite:x.db")

    @made.command(on_crash="transactional")
    def write() -> None: ...

    with pytest.raises(UsageError, match="shares transactions"):
        made.configure(ledger="memory:")
    with pytest.raises(UsageError, match="not the URL of a ledger"):
        made.configure(ledger="nowhere")


# --- an app in a file is called as it would be served ---------------------------------------------

SOURCE = """\
from pathlib import Path
from wirecall import App

app = App("shop")

@app.command
def charge(order: str) -> int:
    with Path("effects").open("a") as file:
        return file.write(order)
"""
TOML = """\
[ledger]
url = "sqlite:data/ledger.db"

[limits]
bytes_in = 400

[audit]
file = "data/audit.jsonl"
"""
LINE = '{"method":"charge","params":{"order":"7"},"key":"k"}'
RAW = '{"jsonrpc":"2.0","method":"charge","params":{"order":"7","idempotency_key":"k"},"id":1}'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WIRECALL_CONFIG", raising=False)
    Path("app.py").write_text(SOURCE)
    Path("wirecall.toml").write_text(TOML)
    return tmp_path


def charged(*more: str) -> Any:
    return json.loads(
        invoke("call", "app.py", "charge", "order=7", "--key", "k", "--json", *more).stdout
    )


def test_call_batch_and_send_use_the_ledger_of_wirecall_toml(folder: Path) -> None:
    """They used the app's own ledger in memory before, which forgot a key that was offered for a
    retry.
    """
    assert (charged()["replayed"], charged()["replayed"]) == (False, True)
    assert json.loads(invoke("batch", "app.py", input=LINE).stdout)["replayed"] is True
    assert json.loads(invoke("send", "app.py", input=RAW).stdout)["result"] == 1
    assert (folder / "effects").read_text() == "7"
    assert "charge" in invoke("ledger", "list").stdout


def test_call_batch_and_send_use_the_limits_and_the_audit_trail_of_wirecall_toml(
    folder: Path,
) -> None:
    charged()
    assert [
        json.loads(line)["key"]
        for line in (folder / "data" / "audit.jsonl").read_text().splitlines()
    ] == ["k"]
    refused = invoke("call", "app.py", "charge", f"order={'7' * 400}", "--json")
    assert json.loads(refused.stdout)["error"]["data"]["limit"] == "bytes_in"


def test_flag_overrides_wirecall_toml(folder: Path) -> None:
    for _ in range(2):
        assert charged("--ledger", "sqlite:other.db")["key"] == "k"
    assert charged()["replayed"] is False
    assert charged("--ledger", "memory:")["replayed"] is False
    assert (folder / "effects").read_text() == "777"


@pytest.mark.parametrize(
    "words", [["call", "app.py", "charge", "order=7"], ["batch", "app.py"], ["send", "app.py"]]
)
def test_mistake_in_wirecall_toml_is_reported_before_anything_runs(
    words: list[str], folder: Path
) -> None:
    Path("wirecall.toml").write_text("[ledger]\nurl = 'mysql://localhost/shop'\n")
    run = invoke(*words, input=LINE)
    assert run.exit_code == 2
    assert "wirecall.toml:2: ledger.url must be" in run.stderr
    assert not (folder / "effects").exists()


def test_command_of_unknown_outcome_names_the_ledger_that_it_is_in(folder: Path) -> None:
    Path("app.py").write_text(SOURCE.replace("with Path", "raise ValueError\n    with Path"))
    charged()
    told = charged()["error"]["next"]
    assert (
        "then: wirecall ledger resolve app.py --not-done --reason 'how you found out' charge k, or: "
        in told
    )
    assert invoke("ledger", "resolve", "app.py", "--not-done", *WHY, "charge", "k").exit_code == 0

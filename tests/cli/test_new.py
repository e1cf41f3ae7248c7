"""`wirecall new` and `wirecall completion`: what a newcomer types first."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import PATIENCE, invoke, wirecall


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_new_project_has_a_test_that_passes_and_a_valid_configuration() -> None:
    result = invoke("new", "shop")
    assert result.exit_code == 0
    assert "cd shop && wirecall dev" in result.stdout
    assert "cd 'my shop' && wirecall dev" in invoke("new", "my shop").stdout
    assert sorted(os.listdir("shop")) == [
        ".gitignore",
        "README.md",
        "app.py",
        "test_app.py",
        "wirecall.toml",
    ]
    words = [sys.executable, "-W", "error", "-m", "unittest"]
    tests = subprocess.run(
        words, cwd="shop", capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert tests.returncode == 0, tests.stderr
    assert "Ran 3 tests" in tests.stderr
    assert wirecall("config", "check", cwd="shop").returncode == 0


def test_generated_files_are_formatted_like_our_own() -> None:
    invoke("new", "shop")
    ruff = Path(sys.executable).with_name("ruff")
    for verb in (["format", "--check"], ["check"]):
        words = [str(ruff), *verb, "--isolated", "--config", "line-length=125", "shop"]
        run = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert run.returncode == 0, run.stdout


def test_new_project_has_a_command_that_takes_effect_once() -> None:
    invoke("new", "shop")
    words = ("call", "app.py", "charge", "order=7", "cents=450", "--key", "order-7", "--json")
    ledger = {"WIRECALL_MODE": "production"}
    first, second = (json.loads(wirecall(*words, cwd="shop", env=ledger).stdout) for _ in range(2))
    assert first["result"] == second["result"] == {"order": "7", "paid": 450}


def test_new_accepts_an_empty_folder_and_refuses_one_that_is_not_empty() -> None:
    Path("empty").mkdir()
    assert invoke("new", "empty").exit_code == 0
    Path("full").mkdir()
    Path("full/mine.txt").write_text("mine")
    result = invoke("new", "full")
    assert result.exit_code == 2
    assert "full is not empty." in result.stderr
    assert os.listdir("full") == ["mine.txt"]


def test_file_and_a_bad_name_are_refused() -> None:
    Path("taken").touch()
    assert "taken is a file." in invoke("new", "taken").stderr
    result = invoke("new", 'a"b')
    assert result.exit_code == 2
    assert not Path('a"b').exists()


@pytest.mark.parametrize(
    ("shell", "word"),
    [("bash", "complete -o"), ("zsh", "compdef"), ("fish", "complete --no-files")],
)
def test_completion_script_is_printed(shell: str, word: str) -> None:
    result = invoke("completion", shell)
    assert result.exit_code == 0
    assert word in result.stdout
    assert "_WIRECALL_COMPLETE" in result.stdout


def test_unknown_shell_gets_the_list_of_shells() -> None:
    result = invoke("completion", "tcsh")
    assert result.exit_code == 2
    assert "'bash', 'zsh', 'fish'" in result.stderr


def test_verbs_and_options_are_completed() -> None:
    def completed(words: str, count: int) -> list[str]:
        env = {"_WIRECALL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(count)}
        return wirecall(env=env).stdout.decode().splitlines()

    assert completed("wirecall led", 1) == ["plain,ledger"]
    assert "plain,resolve" in completed("wirecall ledger ", 2)
    assert "plain,--dry-run" in completed("wirecall install --d", 2)

"""The command as a whole: help, exit codes, mistakes on the command line."""

import json
import os
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import wirecall as package
from tests.cli import HELLO, ROOT, SHOP, invoke, wirecall
from wirecall.cli import VERBS
from wirecall.cli.failures import TEXTS, Exit

# The Python that needs most packages.
OLDEST = {"python_version": "3.11", "python_full_version": "3.11.0"}


def test_version_and_help_from_a_shell() -> None:
    assert wirecall("--version").stdout.decode() == f"wirecall {package.__version__}\n"
    run = wirecall("--help")
    shown = run.stdout.decode()
    assert run.returncode == 0
    assert all(f"  {verb} " in shown for verb in VERBS)
    assert all(f"  {int(code)} " in shown for code in TEXTS)


def test_exit_codes_are_explained() -> None:
    assert set(TEXTS) == set(Exit)


def test_command_without_a_verb_shows_the_help() -> None:
    run = invoke()
    assert run.exit_code == 2
    assert "Exit codes" in run.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_have_help(verb: str) -> None:
    run = invoke(verb, "--help")
    assert run.exit_code == 0
    assert "Usage: wirecall" in run.stdout


@pytest.mark.parametrize("words", [[], ["call"], ["ledger", "list"]])
def test_h_is_short_for_help(words: list[str]) -> None:
    run = invoke(*words, "-h")
    assert (run.exit_code, run.stdout) == (0, invoke(*words, "--help").stdout)


@pytest.mark.parametrize("verb", ["list", "show", "call", "batch", "send", "probe", "install"])
def test_help_of_a_verb_explains_its_target(verb: str) -> None:
    shown = invoke(verb, "--help").stdout
    assert all(text in shown for text in ("shop.py:app", "http://127.0.0.1:8420", "-- COMMAND ..."))


def test_help_does_not_import_asyncio_or_the_modules_of_verbs() -> None:
    script = (
        "import sys\n"
        "from wirecall.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(*sorted(sys.modules), file=sys.stderr)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stderr.split()
    assert not {"asyncio", "aiohttp", "rich", "logging", "json", "ssl", "importlib.metadata"} & set(
        loaded
    )


@pytest.mark.parametrize(
    ("words", "what", "why"),
    [
        (["clal"], "There is no verb 'clal'", "did you mean call?"),
        (["qqqq"], "There is no verb 'qqqq'", "expected one of new, dev"),
        (["call", "--bogus"], "No such option", ""),
        (["call"], "Which server?", "next: name a file, a module, an address, or -- a command"),
        (["show", "price"], "Which server?", "or [server] app in wirecall.toml"),
        (["call", SHOP], "Missing argument 'NAME'", ""),
        (["call", SHOP, "price", "--save"], "requires an argument", "next: wirecall call --help"),
        (["call", "price", "--"], "There is no command after `--`", ""),
        (["call", "ftp://x", "price"], "ftp://x is not a target", "http and https"),
        (["call", "ws://x/ rpc", "price"], "'ws://x/ rpc' is not an address", "a space"),
        (["send", "ws://x/rpc"], "wirecall send does not reach ws://x/rpc", "on stdio"),
        (["probe", "tcp://x:1"], "wirecall probe does not reach tcp://x:1", "http and https"),
        (["bench", "unix:/x", "price"], "wirecall bench does not reach unix:/x", "apps in a file"),
        (["install", "unix:/x", "--client", "cursor"], "wirecall install does not reach", "http"),
        (["call", SHOP, "price", "--timeout", "soon"], "'soon' is not a time", "above 0"),
        (["call", SHOP, "price", "--timeout", "0"], "'0' is not a time", "above 0"),
        (["call", SHOP, "price", "--header", "nonsense"], "'nonsense' is not a header", "colon"),
        (["call", SHOP, "price", "--as", "soap"], "'soap' is not one of", ""),
        (["call", SHOP, "price", "sku=tea", "--revision", "1999-01-01"], "1999-01-01", ""),
        (["serve", SHOP, "--http", "nowhere"], "'nowhere' is not an address", "HOST:PORT"),
        (["serve", SHOP, "--port", "1"], "wirecall serve has no --host and no --port", "--http"),
        (["dev", SHOP, "--host", "::1"], "next: wirecall dev TARGET --http 127.0.0.1:", "--http"),
        (["serve", SHOP, "--drain", "-1"], "'-1' is not a time", "0 or more"),
        (["serve", SHOP, "--grace", "-1"], "'-1' is not a time", "above 0"),
        (["serve", SHOP, "--drain", "0s", "--limit", "batch=0"], "admits nothing", ""),
        (["serve", SHOP, "--workers", "0"], "0 is not in the range", ""),
        (["serve", SHOP, "--limit", "bath=5"], "There is no limit 'bath'", "did you mean batch?"),
        (["serve", SHOP, "--limit", "batch=many"], "must be a number, got 'many'", ""),
        (["serve", SHOP, "--limit", "batch=0"], "admits nothing", ""),
        (["serve", SHOP, "--stdio", "--http", "127.0.0.1:1"], "--stdio serves one client", ""),
        (["serve", SHOP, "--ledger", "mongo:x"], "'mongo:x' is not the URL of a ledger", "memory:"),
        (
            ["serve", SHOP, "--workers", "2"],
            "2 workers cannot share a ledger in memory",
            "next: --ledger sqlite:PATH",
        ),
        (["serve", "http://127.0.0.1:1"], "is not a file", ""),
        (
            ["call", "http://127.0.0.1:1", "x", "--ledger", "memory:"],
            "--ledger is for an app in a file",
            "",
        ),
        (["dev", "nowhere.py"], "There is no file nowhere.py", ""),
        (
            ["serve", SHOP, "--audit", "x"],
            "'x' is not an audit trail",
            "next: --audit file:audit.jsonl",
        ),
        (["call", SHOP, "price", "--header", "A: b\nC: d"], "is not a header", "on one line"),
        (["call", SHOP, "price", "--args", "5"], "--args is not an object", "got 5"),
        (
            ["call", SHOP, "price", "qqqqqq=1"],
            "There is no argument 'qqqqqq'",
            "the only one is sku",
        ),
        (
            ["batch", SHOP, "nowhere"],
            "nowhere cannot be read",
            "next: give the path of a file, or -",
        ),
        (["ledger", "list", "sqlite:"], "The ledger sqlite: has no path", "next: sqlite:ledger.db"),
        (["audit", "tail", "."], ". is a folder", "an audit trail is a file"),
        (
            ["diff", SHOP, "contract.json", "--accept"],
            "--accept writes",
            f"next: wirecall diff contract.json {SHOP} --accept",
        ),
        (
            ["login", "http://127.0.0.1:1", "--client-secret-file", "x"],
            "x cannot be read",
            "why: No such file or directory",
        ),
        (["completion"], "Missing argument 'SHELL'", "bash, zsh, fish"),
    ],
)
def test_mistakes_are_reported_with_exit_code_2(words: list[str], what: str, why: str) -> None:
    run = invoke(*words)
    assert run.exit_code == Exit.USAGE, run.stderr
    assert what in run.stderr
    assert why in run.stderr
    assert "Traceback" not in run.stderr
    assert run.stdout == ""


def test_verbs_are_completed_without_being_loaded() -> None:
    script = (
        "import sys\n"
        "from wirecall.cli import main\n"
        "try: main(prog_name='wirecall')\n"
        "except SystemExit: pass\n"
        "print(*sorted(sys.modules), file=sys.stderr)"
    )
    environment = {
        **os.environ,
        "_WIRECALL_COMPLETE": "bash_complete",
        "COMP_WORDS": "wirecall se",
        "COMP_CWORD": "1",
    }
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
    )
    assert run.stdout.split() == ["plain,serve", "plain,send"]
    assert "wirecall.cli.serve" not in run.stderr.split()


@pytest.mark.parametrize(
    "words", [["clal"], ["call", "--bogus"], ["call", SHOP, "prise"], ["call", "nowhere.py", "x"]]
)
def test_json_is_one_document_also_on_failure(words: list[str]) -> None:
    run = invoke(*words, "--json")
    document = json.loads(run.stdout)
    assert document["ok"] is False
    assert document["error"]["exit"] == run.exit_code == 2
    assert document["error"]["message"]
    assert run.stderr == ""


def test_json_after_two_dashes_belongs_to_the_child_command() -> None:
    run = invoke("call", "x", "--", "nosuchprogram", "--json")
    assert run.stdout == ""
    assert run.exit_code == Exit.UNREACHABLE


def test_internal_error_says_that_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wirecall.cli.offers.listed", lambda *_: 1 / 0)
    run = invoke("list", HELLO)
    assert run.exit_code == Exit.FAULT
    assert "went wrong inside wirecall" in run.stderr
    assert "ZeroDivisionError" in run.stderr
    assert "Traceback" not in run.stderr


def test_internal_error_has_a_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wirecall.cli.offers.listed", lambda *_: 1 / 0)
    monkeypatch.setenv("WIRECALL_TRACEBACK", "1")
    assert "Traceback" in invoke("list", HELLO).stderr


def test_docs_have_every_verb_and_every_exit_code() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    assert all(
        f"| {int(code)} | {text.replace('--key', '`--key`')} |" in page
        for code, text in TEXTS.items()
    )
    assert all(f"wirecall {verb} " in page or f"`{verb}" in page for verb in VERBS)


def test_readme_counts_the_packages_of_a_plain_install() -> None:
    """As many as README says, and fewer than 20 besides uvloop, which only Linux and macOS get."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    packages = with_needed(needed, {"wirecall"})
    assert f"{len(packages)} packages in all" in (ROOT / "README.md").read_text()
    assert len(packages - {"uvloop"}) < 20


def with_needed(lines: list[str], found: set[str]) -> set[str]:
    """The packages of some requirements and all that these require, without extras."""
    for need in map(Requirement, lines):
        name = canonicalize_name(need.name)
        if name not in found and (
            need.marker is None or need.marker.evaluate({"extra": "", **OLDEST})
        ):
            found.add(name)
            with_needed(metadata.requires(name) or [], found)
    return found

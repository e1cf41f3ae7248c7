"""`[console]` and `[metrics]` of wirecall.toml beside the options of the command line."""

from pathlib import Path
from typing import Any

import pytest

from tests.cli import invoke
from wirecall.cli.failures import CliError, Exit
from wirecall.cli.watching import Watching, local_address, settings_in_force
from wirecall.config import Config, check_config, load_config

WHOLE = """\
[console]
enabled = true
port = 9000
readonly = true
capture = "bodies"

[metrics]
http = "0.0.0.0:9464"
token = "file:token"
"""


def config_of(folder: Path, text: str) -> Config:
    file = folder / "wirecall.toml"
    file.write_text(text)
    return load_config(file)


def test_watching_takes_what_the_file_states(tmp_path: Path) -> None:
    found = Watching().or_else(config_of(tmp_path, WHOLE))
    assert found == Watching(
        True, 9000, True, "bodies", None, "0.0.0.0:9464", f"file:{tmp_path / 'token'}"
    )


def test_watching_options_win_over_the_file(tmp_path: Path) -> None:
    config = config_of(tmp_path, WHOLE)
    stated = Watching(capture="facts", port=0, metrics="127.0.0.1:0")
    found = stated.or_else(config)
    assert (found.console, found.port, found.capture) == (True, 0, "facts")
    assert found.metrics == "127.0.0.1:0"
    assert Watching(console=False).or_else(config).console is False


def test_watching_is_off_by_default(tmp_path: Path) -> None:
    found = Watching().or_else(config_of(tmp_path, "[server]\nworkers = 2\n"))
    assert (found.console, found.metrics, found.capture) == (False, None, "facts")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"port": 1}, "--console-port is for --console."),
        ({"readonly": True}, "--console-readonly is for --console."),
        ({"console": False, "port": 1}, "--console-port is for --console."),
        ({"metrics_token": "env:X"}, "--metrics-token is for --metrics."),
    ],
)
def test_watching_refuses_an_option_without_effect(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(CliError, match=message):
        Watching(**given).or_else(config_of(tmp_path, "[server]\nworkers = 2\n"))


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("port = 65536", "console.port must be a port, or 0 for a free one, got 65536"),
        ('capture = "all"', 'console.capture must be "facts" or "bodies", got \'all\''),
        ("enabeld = true", "there is no key console.enabeld"),
    ],
)
def test_watching_settings_that_are_wrong(tmp_path: Path, line: str, what: str) -> None:
    file = tmp_path / "wirecall.toml"
    file.write_text(f"[console]\n{line}\n")
    _, problems = check_config(file)
    assert [(each.what, each.line) for each in problems] == [(what, 2)]


def test_watching_token_in_the_file_is_refused_and_not_shown(tmp_path: Path) -> None:
    """It would be in every copy of the file."""
    file = tmp_path / "wirecall.toml"
    file.write_text('[metrics]\nhttp = "0.0.0.0:1"\ntoken = "s3cret-4711"\n')
    _, (problem,) = check_config(file)
    assert problem.what == "metrics.token must be env:NAME or file:PATH, got another string"


def test_settings_in_force_name_their_origin(tmp_path: Path) -> None:
    text = '[ledger]\nurl = "postgresql://ada:4711@db/shop"\n[limits]\nbatch = 7\n'
    config = config_of(tmp_path, text)
    rows = {
        each["name"]: (each["value"], each["origin"])
        for each in settings_in_force(config, {"server.workers": 3})
    }
    assert rows["ledger.url"] == ("postgresql://ada:***@db/shop", f"{config.path}:2")
    assert rows["limits.batch"] == (7, f"{config.path}:4")
    assert rows["server.workers"] == (3, "the command line")
    assert rows["server.http"] == ("127.0.0.1:8420", "default")
    assert not any(name.startswith("gateway.") for name in rows)


def test_serve_says_that_no_console_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port of a console that is off is a mistake, as without a file."""
    (tmp_path / "shop.py").write_text('from wirecall import App\n\napp = App("shop")\n')
    (tmp_path / "wirecall.toml").write_text(WHOLE)
    words = ["--no-console", "--console-port", "1", "--http", "127.0.0.1:0"]
    monkeypatch.setenv("WIRECALL_CONFIG", str(tmp_path / "wirecall.toml"))
    result = invoke("serve", str(tmp_path / "shop.py"), *words)
    assert result.exit_code == Exit.USAGE
    assert "--console-port is for --console." in result.stderr


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "http://127.0.0.1:8420"),
        ("0.0.0.0", "http://127.0.0.1:8420"),
        ("::", "http://[::1]:8420"),
        ("shop.example", "http://shop.example:8420"),
    ],
)
def test_local_address_is_one_that_this_machine_reaches(host: str, address: str) -> None:
    assert local_address("http", host, 8420) == address

"""wirecall.toml: its values, their precedence, and the reports of mistakes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli import invoke
from wirecall import Limits
from wirecall.config import SETTINGS, ConfigError, check_config, load_config, variable
from wirecall.errors import UsageError

WHOLE = """\
# a server
[server]
app = "app.py:shop"
http = "0.0.0.0:9000"
workers = 4
server = "uvicorn"
grace = 2.5

[ledger]
url = "redis://localhost/0"

[limits]
batch = 200
body_time = 3

[audit]
file = "audit.jsonl"
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WIRECALL_CONFIG", raising=False)
    return tmp_path


def write(text: str, path: str = "wirecall.toml") -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
    return path


def test_config_without_a_file_has_default_values() -> None:
    config = load_config(environment={})
    assert config.path is None
    assert config.stated() == {}
    assert config.get("server.http") == "127.0.0.1:8420"
    assert config.limits() == Limits()


def test_config_reads_every_section() -> None:
    write(WHOLE)
    config = load_config()
    assert config.section("server") == {
        "app": "app.py:shop",
        "http": "0.0.0.0:9000",
        "workers": 4,
        "server": "uvicorn",
        "grace": 2.5,
    }
    assert config.get("ledger.url") == "redis://localhost/0"
    assert config.audit == "file:audit.jsonl"
    assert config.section("limits") == {"batch": 200, "body_time": 3.0}
    assert config.limits(Limits(depth=9)) == Limits(batch=200, body_time=3.0, depth=9)


def test_variable_wins_over_the_file_and_each_value_knows_its_origin() -> None:
    write(WHOLE)
    config = load_config(
        environment={
            "WIRECALL_LIMITS_BATCH": "7",
            "WIRECALL_SERVER_GRACE": "1",
            "WIRECALL_MODE": "x",
        }
    )
    assert config.values["limits.batch"].value == 7
    assert config.values["limits.batch"].origin == "WIRECALL_LIMITS_BATCH"
    assert config.values["server.grace"].value == 1.0
    assert config.values["server.http"].origin == "wirecall.toml:4"
    assert config.values["limits.depth"].origin == "default"


def test_paths_in_the_file_are_relative_to_it(here: Path) -> None:
    text = (
        '[server]\napp = "app.py"\n[ledger]\nurl = "sqlite:.wirecall/l.db"\n[audit]\n'
        'file = "/var/a.jsonl"\n'
    )
    named = write(text, "etc/shop.toml")
    assert load_config(named, {}).stated() == {
        "server.app": "etc/app.py",
        "ledger.url": "sqlite:etc/.wirecall/l.db",
        "audit.file": "/var/a.jsonl",
    }
    assert (
        load_config(None, {"WIRECALL_CONFIG": named, "WIRECALL_AUDIT_FILE": "a"}).get("audit.file")
        == "a"
    )


@pytest.mark.parametrize(
    ("text", "line", "what", "fix"),
    [
        ("[server]\n\nhtpp = 'x'\n", 3, "there is no key server.htpp", "did you mean server.http?"),
        (
            "[server]\nbogus = 1\n",
            2,
            "there is no key server.bogus",
            "use one of server.app, server.http, ",
        ),
        ("[serv]\n", 1, "there is no section serv", "did you mean server?"),
        (
            "[limits]\nbatch = '50'\n",
            2,
            "limits.batch must be a whole number above 0, got '50'",
            "batch = 50",
        ),
        (
            "[limits]\nbatch = 0\n",
            2,
            "limits.batch must be a whole number above 0, got 0",
            "batch = 50",
        ),
        (
            "[limits]\nbody_time = true\n",
            2,
            "limits.body_time must be a number of seconds above 0, got True",
            "body_time = 30",
        ),
        (
            "[server]\nhttp = 'x:99999'\n",
            2,
            "server.http must be a host and a port, got 'x:99999'",
            'http = "127.0.0.1:8420"',
        ),
        (
            "[server]\nserver = 'apache'\n",
            2,
            'server.server must be "granian", "granian-asgi" or "uvicorn", got \'apache\'',
            'server = "granian"',
        ),
        (
            "[server]\nhosts = 3\n",
            2,
            "server.hosts must be an array of names, got 3",
            "hosts = ['api.example.com']",
        ),
        (
            "[ledger]\nurl = 'mysql://x'\n",
            2,
            "ledger.url must be the URL of a ledger, got 'mysql://x'",
            'url = "sqlite:',
        ),
        (
            "# x\nserver = 3\n",
            2,
            "server must be a section, got 3",
            "[server] on its own line",
        ),
        ("limits.bacth = 3\n", 1, "there is no key limits.bacth", "did you mean limits.batch?"),
        (
            "x = '''\n[server]\n'''\n[audit]\nfile = 3\n",
            1,
            "there is no section x",
            "use one of server, ledger, limits, audit",
        ),
        (
            '[server]\napp = """\nhttp = 3\n"""\nhttp = 3\n',
            5,
            "server.http must be a host and a port, got 3",
            "http = ",
        ),
        (
            "[server]\nworkers = 2\n[ledger]\nurl = 'memory:'\n",
            2,
            "2 workers cannot share a ledger in memory",
            "use a ledger",
        ),
        ("[server\n", 1, "it is not TOML", "see https://toml.io"),
    ],
)
def test_mistake_is_reported_with_its_line(text: str, line: int, what: str, fix: str) -> None:
    write(text)
    _, problems = check_config(environment={})
    assert problems[0].line == line
    assert problems[0].where == f"wirecall.toml:{line}"
    assert problems[0].what.startswith(what)
    assert problems[0].fix.startswith(fix)
    with pytest.raises(ConfigError, match=f"wirecall.toml:{line}: "):
        load_config(environment={})


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("WIRECALL_LIMITS_BACTH", "1", "there is no such variable"),
        ("WIRECALL_LIMITS_BATCH", "many", "it must be a whole number above 0, got 'many'"),
        ("WIRECALL_SERVER_GRACE", "-1", "it must be a number of seconds above 0, got '-1'"),
        ("WIRECALL_SERVER_GRACE", "nan", "it must be a number of seconds above 0, got 'nan'"),
        ("WIRECALL_CONFIG", "gone.toml", "there is no such file"),
    ],
)
def test_mistake_in_a_variable_is_reported_with_its_name(name: str, value: str, what: str) -> None:
    _, problems = check_config(environment={name: value})
    assert [each.what for each in problems] == [what]
    assert problems[0].where == (value if name == "WIRECALL_CONFIG" else name)


def test_empty_variable_is_ignored_and_a_password_is_not_shown() -> None:
    assert (
        load_config(environment={"WIRECALL_SERVER_WORKERS": "", "WIRECALL_CONFIG": ""}).stated()
        == {}
    )
    _, problems = check_config(environment={"WIRECALL_LEDGER_URL": "mysql://me:secret@db/shop"})
    assert problems[0].what == "it must be the URL of a ledger, got 'mysql://me:***@db/shop'"


def test_file_that_is_not_text_is_reported() -> None:
    Path("wirecall.toml").write_bytes(b"# a\n# \xff\n")
    assert check_config(environment={})[1][0].where == "wirecall.toml:2"
    with pytest.raises(UsageError, match="cannot be read"):
        load_config(".", {})


def test_config_has_a_setting_and_a_valid_example_for_every_limit() -> None:
    assert {f"limits.{name}" for name in Limits.__struct_fields__} <= set(SETTINGS)
    for place, setting in SETTINGS.items():
        setting.read(setting.example)
        assert variable(place).startswith("WIRECALL_")


ROOT = Path(__file__).parents[2]
SHOWN = [
    block
    for page in ("docs/config.md", "docs/deploy.md")
    for block in re.findall(
        r"^```toml\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
    )
]


@pytest.mark.parametrize("text", [*SHOWN, (ROOT / "deploy" / "wirecall.toml").read_text()])
def test_documented_files_are_valid(text: str) -> None:
    write(text)
    assert check_config(environment={})[1] == []


# --- two ledgers ----------------------------------------------------------------------------------

POSTGRES = "postgresql://shop@db.internal/shop"


def test_config_refuses_a_file_and_a_variable_that_name_two_ledgers() -> None:
    write(f'[server]\napp = "app.py"\n\n[ledger]\nurl = "{POSTGRES}"\n')
    environment = {"WIRECALL_LEDGER_URL": "sqlite:/var/lib/shop/ledger.db"}
    with pytest.raises(ConfigError) as refused:
        load_config(environment=environment)
    (problem,) = refused.value.problems
    assert problem.where == "wirecall.toml:5"
    assert POSTGRES in problem.what
    assert "WIRECALL_LEDGER_URL is sqlite:/var/lib/shop/ledger.db" in problem.what
    assert problem.fix.startswith("remove one of them")


def test_config_shows_no_password_of_two_ledgers() -> None:
    write('[ledger]\nurl = "postgresql://shop:first@db/shop"\n')
    environment = {"WIRECALL_LEDGER_URL": "redis://:se@cond@db/0?password=third"}
    (problem,) = check_config(environment=environment)[1]
    assert not re.search("first|cond|third", problem.what)


@pytest.mark.parametrize(
    ("stated", "variable"),
    [
        (POSTGRES, POSTGRES),
        (POSTGRES, "postgresql://shop:secret@db.internal/shop"),
        (POSTGRES, "postgres://shop@db.internal/shop?password=secret"),
        ("sqlite:data/../ledger.db", "sqlite:ledger.db"),
        ("memory:", "memory:"),
    ],
)
def test_config_accepts_two_urls_of_one_ledger(stated: str, variable: str) -> None:
    """A password does not belong in a shared file, so the environment may add it."""
    write(f'[ledger]\nurl = "{stated}"\n')
    assert load_config(environment={"WIRECALL_LEDGER_URL": variable}).get("ledger.url") == variable


def test_config_compares_ledger_paths_from_the_folder_of_each_source(here: Path) -> None:
    named = write('[ledger]\nurl = "sqlite:ledger.db"\n', "etc/shop.toml")
    assert check_config(named, {"WIRECALL_LEDGER_URL": f"sqlite:{here}/etc/ledger.db"})[1] == []
    assert len(check_config(named, {"WIRECALL_LEDGER_URL": "sqlite:ledger.db"})[1]) == 1


def test_config_lets_the_command_line_decide_between_two_ledgers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(f'[ledger]\nurl = "{POSTGRES}"\n')
    Path("app.py").write_text(
        'from wirecall import App\napp = App("shop")\napp.query(name="one")(lambda: 1)\n'
    )
    monkeypatch.setenv("WIRECALL_LEDGER_URL", "sqlite:ledger.db")
    assert invoke("call", "app.py", "one", "--ledger", "memory:").exit_code == 0
    refused = invoke("call", "app.py", "one")
    assert refused.exit_code == 2
    assert "these are two ledgers" in refused.stderr


# --- the verbs ------------------------------------------------------------------------------------


def test_check_reports_that_all_is_well() -> None:
    write(WHOLE)
    Path("app.py").touch()
    result = invoke("config", "check", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "ok": True,
        "result": {"file": "wirecall.toml", "problems": []},
    }


def test_check_lists_every_problem_in_the_order_of_lines_and_exits_with_9() -> None:
    write("[server]\napp = 'gone.py'\nfoo = 1\n[limits]\nbatch = -1\n")
    result = invoke("config", "check")
    assert result.exit_code == 9
    assert [line.partition(": ")[0] for line in result.stdout.splitlines() if line[0] != " "] == [
        "wirecall.toml:2",
        "wirecall.toml:3",
        "wirecall.toml:5",
    ]
    told: dict[str, Any] = json.loads(invoke("config", "check", "--json").stdout)
    assert told["ok"] is True
    assert [each["line"] for each in told["result"]["problems"]] == [2, 3, 5]


def test_show_prints_the_origin_of_each_value_and_hides_passwords(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write("[limits]\nbatch = 9\n")
    monkeypatch.setenv("WIRECALL_LEDGER_URL", "redis://me:hunter2@localhost/0")
    rows = {
        row["name"]: row for row in json.loads(invoke("config", "show", "--json").stdout)["result"]
    }
    assert rows["limits.batch"] == {
        "name": "limits.batch",
        "value": 9,
        "from": "wirecall.toml:2",
        "variable": "WIRECALL_LIMITS_BATCH",
    }
    assert rows["ledger.url"]["value"] == "redis://me:***@localhost/0"
    assert rows["ledger.url"]["from"] == "WIRECALL_LEDGER_URL"
    assert rows["server.workers"]["from"] == "default"
    shown = invoke("config", "show").stdout
    assert "hunter2" not in shown
    assert "limits.depth the app's own" in " ".join(shown.split())


def test_show_of_a_broken_file_is_an_error_with_three_lines() -> None:
    write("[limits]\nbatch = 0\n")
    result = invoke("config", "show")
    assert result.exit_code == 2
    assert "wirecall.toml:2: limits.batch must be" in result.stderr
    assert "next: batch = 50" in result.stderr

"""The settings of a gateway: from a file and from Python, with the line and the fix of a mistake."""

import json
from pathlib import Path

import pytest

from tests.cli import invoke
from wirecall.config import FAMILIES, ConfigError, check_config, seconds_of
from wirecall.errors import UsageError
from wirecall.gateway import GatewaySettings, ToolSettings, UpstreamSettings
from wirecall.gateway.login import StoredLogin
from wirecall.gateway.origins import origin_of
from wirecall.gateway.references import References, read_secrets, write_secrets
from wirecall.gateway.settings import MAX_UPSTREAMS, load_settings
from wirecall.gateway.upstream import Origin

AUTH = '[auth]\nissuer = "https://auth.example.com"\nresource = "https://api.example.com/mcp"\n'
CHILD = '[upstream.files]\ncommand = ["files"]\n'
WHOLE = """\
[gateway]
http = "127.0.0.1:9000"
ledger = "sqlite:records.db"
single_user = false
names = "prefix"

[limits]
batch = 7

[audit]
file = "audit.jsonl"

[upstream.github]
command = ["npx", "-y", "server", "secret:github.arg"]
env = { TOKEN = "secret:github.TOKEN", HOME_PAGE = "file:page.txt" }
cwd = "work"
revision = "2025-11-25"
trust = "full"
share = "session"
timeout = "15m"
in_flight = 4
resend_after = "off"
idle = "10m"
required = true
allow = ["get_*", "create_issue"]
deny = ["get_secret"]

[upstream.github.tool.create_issue]
kind = "command"
key = "required"

[upstream.github.tool."files.read"]
kind = "query"

[upstream.remote]
url = "https://api.example.com/mcp"
auth = "bearer:env:API_TOKEN"
headers = { X-Team = "env:TEAM" }
timeout = 90
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


# --- from the file --------------------------------------------------------------------------------


def test_settings_read_every_key_of_the_file() -> None:
    settings = load_settings(write(WHOLE), {})
    github, remote = settings.upstreams
    assert (settings.http, settings.ledger) == ("127.0.0.1:9000", "sqlite:records.db")
    assert settings.single_user is False
    assert settings.names == "prefix"
    assert settings.limits.batch == 7
    assert settings.limits.bytes_in == 16 << 20
    assert settings.audit == "file:audit.jsonl"
    assert github == UpstreamSettings(
        "github",
        command=["npx", "-y", "server", "secret:github.arg"],
        env={"TOKEN": "secret:github.TOKEN", "HOME_PAGE": "file:page.txt"},
        cwd="work",
        revision="2025-11-25",
        trust="full",
        share="session",
        timeout=900,
        in_flight=4,
        resend_after=None,
        idle=600,
        required=True,
        allow=["get_*", "create_issue"],
        deny=["get_secret"],
        tools={
            "create_issue": ToolSettings(kind="command", key="required"),
            "files.read": ToolSettings(kind="query"),
        },
    )
    assert remote.url == "https://api.example.com/mcp"
    assert remote.timeout == 90
    assert remote.resend_after == 2


def test_settings_of_python_and_file_have_the_same_defaults() -> None:
    read = load_settings(write(CHILD), {})
    made = GatewaySettings([UpstreamSettings("files", command=["files"])])
    assert read == made
    assert made.is_single_user
    assert made.share_of(made.upstreams[0]) == "all"
    for key, setting in FAMILIES["upstream"].settings.items():
        default = getattr(made.upstreams[0], key)
        if key != "command":
            assert (tuple(default) if isinstance(default, tuple) else default) == (
                tuple(setting.default) if isinstance(setting.default, list) else setting.default
            )


def test_settings_take_values_of_the_environment_and_of_flags() -> None:
    path = write(f"[gateway]\nhttp = '127.0.0.1:1'\n{CHILD}")
    environment = {"WIRECALL_GATEWAY_HTTP": "127.0.0.1:2"}
    assert load_settings(path, environment).http == "127.0.0.1:2"
    flags = {"gateway.http": "127.0.0.1:3"}
    assert load_settings(path, environment, flags=flags).http == "127.0.0.1:3"
    with pytest.raises(ConfigError, match="--http: other machines reach"):
        load_settings(path, {}, flags={"gateway.http": "0.0.0.0:1"})


def test_paths_of_upstreams_are_relative_to_the_file(here: Path) -> None:
    upstream = """\
[upstream.files]
command = ["files"]
cwd = "work"
env = { A = "file:a.txt", B = "file:/b.txt", C = "env:c" }
[upstream.remote]
url = "https://api.example.com/mcp"
auth = "bearer:file:token.txt"
"""
    settings = load_settings(write(upstream, "etc/gateway.toml"), {})
    files, remote = settings.upstreams
    assert files.cwd == "etc/work"
    assert files.env == {"A": "file:etc/a.txt", "B": "file:/b.txt", "C": "env:c"}
    assert remote.auth == "bearer:file:etc/token.txt"
    assert settings.secrets == "etc/.wirecall/secrets.toml"


def test_auth_of_the_file_ends_the_mode_for_one_user() -> None:
    settings = load_settings(write(f"[gateway]\nhttp = '0.0.0.0:1'\n{AUTH}{CHILD}"), {})
    assert not settings.is_single_user
    assert settings.share_of(settings.upstreams[0]) == "caller"


# --- refusals at start ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "what", "fix"),
    [
        (f"{CHILD}{CHILD}", 3, "there are two sections [upstream.files]", "remove one of them"),
        (f"{CHILD}trsut = 'x'\n", 3, "there is no key upstream.files.trsut", "did you mean"),
        (f"[gateway]\nport = 1\n{CHILD}", 2, "there is no key gateway.port", "use one of gateway."),
        (
            f"[gateway]\n\nhttp = '0.0.0.0:8430'\n{CHILD}",
            3,
            "other machines reach 0.0.0.0:8430, and there is no section [auth]",
            'http = "127.0.0.1:8430", or add [auth]',
        ),
        (
            f"{AUTH}[gateway]\nsingle_user = true\n{CHILD}",
            5,
            "single_user takes all callers for one, and [auth] tells them apart",
            "remove single_user",
        ),
        (
            f"{CHILD}share = 'call'\n",
            3,
            'upstream files: share = "call" would start a process for each call',
            'share = "session"',
        ),
        ("[upstream.x]\n", 1, "upstream x: it has no command and no url", "command = ["),
        ("[upstream.x]\nurl = 'http://x'\ncommand = ['x']\n", 2, "upstream x: it has a comm", "re"),
        (f"{CHILD}headers = {{ A = 'b' }}\n", 3, "upstream files: headers are for a url", "remove"),
        (f"{CHILD}auth = 'none'\n", 3, "upstream files: auth is for a url", "remove it"),
        ("[upstream.x]\nurl = 'http://x'\ncwd = '.'\n", 3, "upstream x: cwd is for a com", "rem"),
        (
            "[upstream.x]\nurl = 'http://x'\nheaders = { Host = 'y' }\n",
            3,
            "upstream x: the gateway writes the header host itself",
            "remove it",
        ),
        ("[upstream.x]\nurl = 'ftp://x'\n", 2, "upstream.x.url must be an http address", 'url = "'),
        (f"{CHILD}timeout = 'soon'\n", 3, "upstream.files.timeout must be a duration", "timeout ="),
        (f"{CHILD}timeout = 0\n", 3, "upstream.files.timeout must be a duration", 'timeout = "1h"'),
        (f"{CHILD}idle = true\n", 3, "upstream.files.idle must be a duration", 'idle = "off"'),
        (f"{CHILD}required = 1\n", 3, "upstream.files.required must be true", "required = true"),
        ("[upstream.x]\ncommand = 'x -y'\n", 2, "upstream.x.command must be an array", "command ="),
        ("\n[upstream.'a b']\nurl = 'http://x'\n", 2, "'a b' is not a name for upstream", "[upstr"),
        ("upstream = 3\n", 1, "upstream must be a section, got 3", "[upstream.NAME] on its own"),
        ("[upstream]\nx = 3\n", 2, "upstream.x must be a section, got 3", "[upstream.x] on its"),
        (
            f"{CHILD}tool = 3\n",
            3,
            "upstream.files.tool must be a section, got 3",
            "[upstream.files",
        ),
        (
            f"{CHILD}[upstream.files.tool.'a.b']\nkind = 'both'\n",
            4,
            'upstream.files.tool.a.b.kind must be "query" or "command", got \'both\'',
            'kind = "command"',
        ),
    ],
)
def test_mistake_of_a_gateway_is_refused_with_its_line_and_its_fix(
    text: str, line: int, what: str, fix: str
) -> None:
    """G20: the bad input of a file."""
    write(text)
    with pytest.raises(ConfigError) as refused:
        load_settings(environment={})
    (problem,) = refused.value.problems
    assert (problem.where, problem.line) == (f"wirecall.toml:{line}", line)
    assert problem.what.startswith(what)
    assert problem.fix.startswith(fix)


def test_settings_need_an_upstream() -> None:
    with pytest.raises(ConfigError, match="a gateway needs an upstream"):
        load_settings(write("[gateway]\n"), {})
    many = "".join(f"[upstream.u{n}]\nurl = 'http://x'\n" for n in range(MAX_UPSTREAMS + 1))
    with pytest.raises(ConfigError, match="there are 65 upstreams"):
        load_settings(write(many), {})


def test_error_does_not_show_a_secret_in_the_wrong_place() -> None:
    write(
        "[upstream.x]\nurl = 'http://x'\nauth = 'canary'\nheaders = { 'A b' = 'canary' }\n"
        "[upstream.y]\ncommand = 'y --key canary'\nenv = { A = ['canary'] }\n"
    )
    _, problems = check_config(environment={})
    assert len(problems) == 4
    assert "canary" not in str(problems)


def test_two_ledgers_of_a_gateway_are_refused() -> None:
    write(f"[gateway]\nledger = 'sqlite:a.db'\n{CHILD}")
    with pytest.raises(ConfigError, match=r"gateway\.ledger is sqlite:a\.db, and WIRECALL_GATEWAY"):
        load_settings(environment={"WIRECALL_GATEWAY_LEDGER": "sqlite:b.db"})
    environment = {"WIRECALL_GATEWAY_LEDGER": "sqlite:b.db"}
    write(CHILD)
    assert load_settings(environment=environment).ledger == "sqlite:b.db"


# --- from Python ----------------------------------------------------------------------------------


def test_python_settings_are_refused_like_those_of_a_file() -> None:
    """G20: the same rules without a file."""
    child = UpstreamSettings("a", command=["a"])
    with pytest.raises(UsageError, match="there are two upstreams a"):
        GatewaySettings([child, child])
    with pytest.raises(UsageError, match="other machines reach"):
        GatewaySettings([child], http="0.0.0.0:1")
    with pytest.raises(UsageError, match='share = "call" would start'):
        UpstreamSettings("a", command=["a"], share="call")
    with pytest.raises(UsageError, match="is not a name for an upstream"):
        UpstreamSettings("a.b", command=["a"])
    with pytest.raises(UsageError, match=r'expected "none", "hints" or "full", got \'some\''):
        UpstreamSettings("a", command=["a"], trust="some")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="has no option 'comand'"):
        UpstreamSettings("a", comand=["a"])  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="a whole number above 0"):
        UpstreamSettings("a", command=["a"], in_flight=0)
    with pytest.raises(AttributeError):
        child.name = "b"  # type: ignore[misc]


def test_localhost_names_are_loopback() -> None:
    child = [UpstreamSettings("a", command=["a"])]
    for host in ("localhost", "127.0.0.1", "127.8.8.8", "[::1]"):
        assert GatewaySettings(child, http=f"{host}:1").is_single_user


def test_digest_depends_on_the_target_and_not_on_the_name() -> None:
    first = UpstreamSettings("a", command=["server", "x"])
    assert first.digest == UpstreamSettings("b", command=["server", "x"]).digest
    assert first.digest != UpstreamSettings("a", command=["server", "y"]).digest
    assert first.digest != UpstreamSettings("a", command=["server x"]).digest
    assert len(first.digest) == 6


def test_patterns_decide_which_tools_clients_get() -> None:
    upstream = UpstreamSettings("a", command=["a"], allow=["get_*", "[x]"], deny=["*secret*"])
    assert upstream.allows("get_page")
    assert upstream.allows("[x]")
    assert not upstream.allows("x")
    assert not upstream.allows("get_secret")
    assert not upstream.allows("set_page")


def test_durations_have_units() -> None:
    found = [seconds_of(each) for each in ("2s", "500ms", "1.5m", "1h", "2d", 7, 0.5)]
    assert found == [2, 0.5, 90, 3600, 172800, 7, 0.5]
    for wrong in ("", "0", "-1s", "1 h 2m", "inf", "1w", True):
        with pytest.raises(ValueError, match="is not a duration"):
            seconds_of(wrong)


# --- references -----------------------------------------------------------------------------------


def test_references_have_three_places_for_a_value() -> None:
    write("first\nsecond\n", "a.txt")
    write_secrets(Path(".wirecall/secrets.toml"), {"github": {"TOKEN": 'a"b\\c\n', "x.y": "1"}})
    references = References(variables={"A": "1"})
    texts = ("plain", "env:A", "file:a.txt", "secret:github.TOKEN", "secret:github.x.y")
    found = [references.value(each) for each in texts]
    assert found == ["plain", "1", "first", 'a"b\\c\n', "1"]


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("env:GONE", "the variable GONE is not set"),
        ("file:gone.txt", "it cannot be read: No such file"),
        ("file:empty.txt", "its first line is empty"),
        ("secret:github.GONE", "has no 'GONE' in its section"),
    ],
)
def test_reference_without_a_value_is_named(reference: str, why: str) -> None:
    write("\n", "empty.txt")
    with pytest.raises(UsageError, match=f"(?s){reference} has no value.*{why}.*fix: "):
        References(variables={}).value(reference)


def test_secrets_are_for_their_owner_only() -> None:
    """G21: the mode of the file and of its folder."""
    path = Path(".wirecall/secrets.toml")
    write_secrets(path, {"github": {"TOKEN": "canary"}, "empty": {}})
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert (path.parent / ".gitignore").read_text() == "*\n"
    assert read_secrets(path) == {"github": {"TOKEN": "canary"}}
    path.chmod(0o640)
    with pytest.raises(UsageError, match="Other users can read") as refused:
        read_secrets(path)
    assert "canary" not in str(refused.value)


@pytest.mark.parametrize("text", ["a = canary", "a = 'canary'", "[a]\nb = 3", "\xff"])
def test_secrets_of_another_shape_are_refused_without_their_values(text: str) -> None:
    path = Path("secrets.toml")
    path.write_bytes(text.encode("latin-1"))
    path.chmod(0o600)
    with pytest.raises(UsageError, match=r"is not TOML|has another shape") as refused:
        read_secrets(path)
    assert "canary" not in str(refused.value)


def test_upstream_has_the_values_of_its_references() -> None:
    write_secrets(
        Path(".wirecall/secrets.toml"),
        {"a": {"arg": "--key=1", "url": "https://x/mcp?key=1", "bad": "x\r\ny"}},
    )
    references = References(variables={"TOKEN": "t", "TEAM": "blue"})
    child = UpstreamSettings("a", command=["a", "secret:a.arg", "env:A"], env={"B": "env:TOKEN"})
    assert child.words(references) == ["a", "--key=1", "env:A"]
    assert child.variables(references) == {"B": "t"}
    remote = UpstreamSettings(
        "a", url="secret:a.url", auth="bearer:env:TOKEN", headers={"X-Team": "env:TEAM"}
    )
    assert remote.address(references) == "https://x/mcp?key=1"
    expected = {"X-Team": "blue", "Authorization": "Bearer t"}
    assert remote.request_headers(references) == expected
    with pytest.raises(UsageError, match="is not an address"):
        UpstreamSettings("a", url="env:TEAM").address(references)
    with pytest.raises(UsageError, match="the header X has several lines"):
        UpstreamSettings("a", url="http://x", headers={"X": "secret:a.bad"}).request_headers(
            references
        )


def test_origins_have_the_values_of_the_settings() -> None:
    references = References(variables={"TOKEN": "t"})
    child = UpstreamSettings(
        "a",
        command=["a"],
        env={"B": "env:TOKEN"},
        cwd="work",
        trust="none",
        timeout=9,
        in_flight=3,
        resend_after=None,
        tools={"x": ToolSettings(kind="query"), "y": ToolSettings(key="off")},
    )
    assert origin_of(child, references) == Origin(
        name="a",
        command=["a"],
        env={"B": "t"},
        cwd="work",
        trust="none",
        timeout=9,
        in_flight=3,
        resend_after="off",
        kinds={"x": "query"},
        keys={"y": "off"},
    )


@pytest.mark.parametrize(
    ("auth", "headers", "expected", "has_login"),
    [
        ("login", {}, {}, True),
        ("none", {}, {}, False),
        ("login", {"authorization": "Basic x"}, {"authorization": "Basic x"}, False),
    ],
)
def test_origins_of_addresses_have_one_kind_of_credentials(
    auth: str, headers: dict[str, str], expected: dict[str, str], has_login: bool
) -> None:
    upstream = UpstreamSettings("a", url="https://x/mcp", auth=auth, headers=headers)
    origin = origin_of(upstream, References(variables={"TOKEN": "t"}))
    assert origin.headers == expected
    assert origin.auth is (StoredLogin if has_login else None)


# --- the verbs ------------------------------------------------------------------------------------


def test_config_check_accepts_a_file_without_an_app() -> None:
    write(WHOLE)
    assert invoke("config", "check").exit_code == 0


def test_config_check_reports_values_that_contradict_each_other() -> None:
    write(f"[gateway]\nhttp = '0.0.0.0:1'\n{CHILD}share = 'call'\nfoo = 1\n")
    result = invoke("config", "check", "--json")
    assert result.exit_code == 9
    problems = json.loads(result.stdout)["result"]["problems"]
    assert [each["line"] for each in problems] == [2, 6]


def test_config_show_hides_plain_variables_and_headers() -> None:
    write(
        "[upstream.x]\nurl = 'https://me:canary@x/mcp'\n"
        "headers = { A = 'canary', B = 'env:B' }\nidle = 'off'\n"
    )
    result = invoke("config", "show")
    assert "canary" not in result.stdout
    assert "'B': 'env:B'" in result.stdout
    assert "upstream.x.idle" in result.stdout
    write("")
    assert "gateway." not in invoke("config", "show").stdout


def test_doctor_checks_the_gateway_of_a_file_without_an_app(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(f"[gateway]\nhttp = '127.0.0.1:0'\nledger = 'memory:'\n{CHILD}")
    checks = json.loads(invoke("doctor", "--json").stdout)["result"]["checks"]
    found = {each["name"]: each["what"] for each in checks}
    assert found["app"] == "a gateway with 1 upstream"
    assert found["port"] == "127.0.0.1:0 is free"
    assert found["ledger"].startswith("memory:")
    write("[upstream.x]\n")
    checks = json.loads(invoke("doctor", "--json").stdout)["result"]["checks"]
    assert {each["level"]: each["name"] for each in checks if each["level"] == "fail"} == {
        "fail": "config"
    }

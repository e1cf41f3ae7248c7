"""Clients' files as upstreams: every spelling, secrets as references, and what is not imported."""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.cli import invoke
from wirecall.config import check_config
from wirecall.errors import UsageError
from wirecall.gateway.guesses import looks_secret
from wirecall.gateway.imports import ClientFile, read_client_file
from wirecall.gateway.jsonc import NotJson, parse
from wirecall.gateway.references import References
from wirecall.gateway.settings import load_settings

CANARY = "canary-4711"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work = tmp_path / "work"
    home = tmp_path / "home"
    work.mkdir()
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("WIRECALL_CONFIG", raising=False)
    monkeypatch.chdir(work)
    return work


def read(tree: object, path: str = "mcp.json") -> ClientFile:
    text = tree if isinstance(tree, str) else json.dumps(tree)
    Path(path).write_text(text)
    return read_client_file(Path(path))


def values(entry: object) -> dict[str, Any]:
    """Return the values of one entry."""
    found = read({"mcpServers": {"x": entry}})
    assert found.left_out == []
    return found.imported[0].values


def reason(entry: object) -> str:
    """Return why an entry is not imported."""
    found = read({"mcpServers": {"x": entry}})
    assert found.imported == []
    return found.left_out[0].why


# --- shapes of files ------------------------------------------------------------------------------

CHILD = {"command": "npx", "args": ["-y", "server"]}
WORDS = {"command": ["npx", "-y", "server"]}


@pytest.mark.parametrize(
    ("path", "tree"),
    [
        ("claude.json", {"mcpServers": {"x": CHILD}, "theme": "dark"}),
        ("vscode.json", {"servers": {"x": {"type": "stdio", **CHILD}}, "inputs": []}),
        ("settings.json", {"mcp": {"servers": {"x": CHILD}}}),
        ("zed.json", {"context_servers": {"x": {"source": "custom", **CHILD}}}),
        (
            "old-zed.json",
            {"context_servers": {"x": {"command": {"path": "npx", "args": ["-y", "server"]}}}},
        ),
        ("opencode.json", {"mcp": {"x": {"type": "local", **WORDS}}}),
        ("gemini.json", {"mcp": {"allowed": ["x"]}, "mcpServers": {"x": CHILD}}),
        ("codex.toml", '[mcp_servers.x]\ncommand = "npx"\nargs = ["-y", "server"]\n'),
        ("windows.json", {"mcpServers": {"x": {"command": "cmd", "args": ["/c", *CHILD["args"]]}}}),
    ],
)
def test_import_reads_the_shape_of_each_client(path: str, tree: object) -> None:
    found = read(tree, path)
    assert [each.name for each in found.imported] == ["x"]
    expected = WORDS if path != "windows.json" else {"command": ["-y", "server"]}
    assert found.imported[0].values == expected


def test_import_takes_the_servers_of_this_project_from_claude_code(here: Path) -> None:
    other = {"mcpServers": {"other": CHILD}}
    tree = {"projects": {str(here): {"mcpServers": {"mine": CHILD}}, "/elsewhere": other}}
    assert [each.name for each in read(tree).imported] == ["mine"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{\n"mcpServers": {}, // mine\n}', "it is not JSON, line 2: it has a comment"),
        ('{"mcpServers": {"x": {}},}', "there is a comma before a closing bracket"),
        ('{"mcpServers": {"x": {}, "x": {}}}', "'x' is in one object twice"),
        ("{", "it is not JSON, line 1"),
        ('{"mcpServers": NaN}', "'NaN' is not a value of JSON"),
        ("[1]", "expected an object"),
        ('{"mcpServers": []}', "expected an object under 'mcpServers'"),
        ('{"theme": "dark"}', "expected one of mcpServers, servers, context_servers, mcp in it"),
        ('{"mcpServers": {}}', "it has no servers"),
        ("\udcff", "it is not UTF-8"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_file_that_cannot_be_read_is_named_and_stays_as_it_is(text: str, why: str) -> None:
    """G22: comments, another shape, no servers."""
    path = Path("mcp.json")
    data = text.encode(errors="surrogateescape")
    path.write_bytes(data)
    with pytest.raises(UsageError) as refused:
        read_client_file(path)
    assert str(refused.value).startswith("mcp.json stays as it is.\n")
    assert why in str(refused.value)
    assert path.read_bytes() == data


def test_comments_are_read_where_the_client_reads_them() -> None:
    text = '{\n// mine\n"servers": {"x": {"command": "a", /* b */ "args": ["//c"],},},\n}'
    assert read(text).imported[0].values == {"command": ["a", "//c"]}


def test_codex_file_that_is_not_toml_is_named() -> None:
    with pytest.raises(UsageError, match=r"codex\.toml stays as it is"):
        read("[mcp_servers", "codex.toml")


# --- entries --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry",
    [
        {"url": "https://api.example.com/mcp"},
        {"type": "http", "url": "https://api.example.com/mcp"},
        {"serverUrl": "https://api.example.com/mcp"},
        {"httpUrl": "https://api.example.com/mcp"},
        {"transport": {"type": "http", "url": "https://api.example.com/mcp"}},
        {"command": "npx", "args": ["-y", "mcp-remote", "https://api.example.com/mcp"]},
        {"command": "npx", "args": ["mcp-remote@latest", "https://api.example.com/mcp", "3334"]},
        {
            "command": "cmd",
            "args": ["/c", "npx", "mcp-remote", "https://api.example.com/mcp", "--debug"],
        },
        {
            "command": "/usr/bin/python3",
            "args": ["-m", "wirecall", "wrap", "--name", "x", "https://api.example.com/mcp"],
        },
    ],
)
def test_import_finds_the_address_of_an_entry(entry: object) -> None:
    assert values(entry) == {"url": "https://api.example.com/mcp"}


@pytest.mark.parametrize(
    "command",
    [
        ["/venv/bin/python", "-m", "wirecall", "wrap", "--name", "x", "--", "npx", "-y", "server"],
        ["wirecall", "wrap", "--name=x", "--trust", "none", "--", "npx", "-y", "server"],
        ["uvx", "wirecall", "wrap", "--", "npx", "-y", "server"],
        ["npx", "-y", "server"],
    ],
)
def test_import_takes_wirecall_wrap_off(command: list[str]) -> None:
    assert values({"command": command[0], "args": command[1:]}) == WORDS


def test_import_keeps_a_command_with_options_of_mcp_remote_that_it_does_not_know() -> None:
    args = ["mcp-remote", "https://api.example.com/mcp", "--resource", "https://y"]
    assert values({"command": "npx", "args": args}) == {"command": ["npx", *args]}


def test_import_reads_the_members_of_codex() -> None:
    text = """\
[mcp_servers.x]
url = "https://api.example.com/mcp"
bearer_token_env_var = "TOKEN"
http_headers = { X-Region = "eu-west-1" }
env_http_headers = { X-Team = "TEAM" }
enabled_tools = ["a", "b"]
disabled_tools = ["c"]
tool_timeout_sec = 60
"""
    assert read(text, "codex.toml").imported[0].values == {
        "url": "https://api.example.com/mcp",
        "auth": "bearer:env:TOKEN",
        "headers": {"X-Region": "eu-west-1", "X-Team": "env:TEAM"},
        "allow": ["a", "b"],
        "deny": ["c"],
    }


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"command": "x", "disabled": True}, "it is switched off in the client"),
        ({"command": "x", "enabled": False}, "it is switched off in the client"),
        ({"type": "sse", "url": "https://x/sse"}, "it speaks HTTP with SSE of 2024-11-05"),
        ({"source": "extension", "settings": {}}, "an extension of the client starts it"),
        ({}, "it has no command and no address"),
        ("npx", "expected an object"),
        ({"command": "x", "args": [["y"]]}, "expected strings under command"),
        ({"command": "x", "env": ["y"]}, "expected an object under env"),
        ({"command": "x", "args": ["${workspaceFolder}/a"]}, "its command has ${workspaceFolder}"),
        ({"command": "x", "cwd": "${workspaceFolder}"}, "its cwd is ${workspaceFolder}"),
        ({"url": "ftp://x"}, "its address is not http:// or https://"),
        ({"url": "https://x/mcp", "headers": {"Host": "y"}}, "upstream x: the gateway writes"),
    ],
)
def test_entry_that_would_not_work_is_not_imported(entry: object, why: str) -> None:
    assert reason(entry).startswith(why)


def test_names_that_a_section_cannot_have_are_changed_aloud() -> None:
    found = read({"mcpServers": {"My Server!": CHILD, "My.Server": CHILD, "ö": CHILD}})
    assert [each.name for each in found.imported] == ["My-Server", "server"]
    assert found.imported[0].notes == ["My Server! is called My-Server here"]
    assert found.left_out[0].why == "another entry has the name My-Server"


def test_import_notes_members_that_have_no_place_here() -> None:
    found = read({"mcpServers": {"x": {**CHILD, "envFile": ".env"}}})
    assert found.imported[0].notes == ["envFile was not imported: wirecall does not have it"]


def test_home_folder_of_the_client_is_this_one() -> None:
    entry = {"command": "a", "args": ["${userHome}/b", "${HOME}"], "cwd": "~/c"}
    home = os.environ["HOME"]
    assert values(entry) == {"command": ["a", f"{home}/b", home], "cwd": f"{home}/c"}


# --- secrets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "expected", "secrets"),
    [
        (
            {"command": "a", "env": {"API_TOKEN": CANARY, "LOG_LEVEL": "debug", "PORT": 8080}},
            {
                "command": ["a"],
                "env": {"API_TOKEN": "secret:x.API_TOKEN", "LOG_LEVEL": "debug", "PORT": "8080"},
            },
            {"API_TOKEN": CANARY},
        ),
        (
            {"command": "a", "env": {"A": "${TOKEN}", "B": "${env:B}", "C": "{env:C}", "D": "$D"}},
            {"command": ["a"], "env": {"A": "env:TOKEN", "B": "env:B", "C": "env:C", "D": "env:D"}},
            {},
        ),
        (
            {"command": "a", "env": {"A": "env:HOME", "B": "file:/etc/passwd"}},
            {"command": ["a"], "env": {"A": "secret:x.A", "B": "secret:x.B"}},
            {"A": "env:HOME", "B": "file:/etc/passwd"},
        ),
        (
            {"command": "a", "args": ["--token", CANARY, f"--api-key={CANARY}", "-v", "secret:b"]},
            {"command": ["a", "--token", "secret:x.arg2", "secret:x.arg3", "-v", "secret:x.arg5"]},
            {"arg2": CANARY, "arg3": f"--api-key={CANARY}", "arg5": "secret:b"},
        ),
        (
            {"command": "a", "args": ["--header", f"Authorization: Bearer {CANARY}", "-H", "X: y"]},
            {"command": ["a", "--header", "secret:x.arg2", "-H", "X: y"]},
            {"arg2": f"Authorization: Bearer {CANARY}"},
        ),
        (
            {"command": "a", "args": [f"--header=X-Api-Key: {CANARY}", "image:latest"]},
            {"command": ["a", "secret:x.arg1", "image:latest"]},
            {"arg1": f"--header=X-Api-Key: {CANARY}"},
        ),
        (
            {"command": "a", "args": ["postgresql://me:pw@db/shop"]},
            {"command": ["a", "secret:x.arg1"]},
            {"arg1": "postgresql://me:pw@db/shop"},
        ),
        (
            {"url": "https://x/mcp", "headers": {"Authorization": f"Bearer {CANARY}", "X": "blue"}},
            {"url": "https://x/mcp", "auth": "bearer:secret:x.bearer", "headers": {"X": "blue"}},
            {"bearer": CANARY},
        ),
        (
            {"url": "https://x/mcp", "headers": {"Authorization": "Bearer ${env:TOKEN}"}},
            {"url": "https://x/mcp", "auth": "bearer:env:TOKEN"},
            {},
        ),
        (
            {"url": "https://x/mcp", "headers": {"Authorization": f"Basic {CANARY}"}},
            {"url": "https://x/mcp", "headers": {"Authorization": "secret:x.Authorization"}},
            {"Authorization": f"Basic {CANARY}"},
        ),
        (
            {"url": f"https://x/mcp?apiKey={CANARY}"},
            {"url": "secret:x.url"},
            {"url": f"https://x/mcp?apiKey={CANARY}"},
        ),
        (
            {"url": "https://x/s/a1b2c3d4e5f6a7b8c9d0e1/mcp"},
            {"url": "secret:x.url"},
            {"url": "https://x/s/a1b2c3d4e5f6a7b8c9d0e1/mcp"},
        ),
        ({"url": "${MCP_URL}"}, {"url": "env:MCP_URL"}, {}),
        (
            {
                "command": "npx",
                "args": ["mcp-remote", "https://x/mcp", "--header", "Authorization:${AUTH}"],
                "env": {"AUTH": f"Bearer {CANARY}"},
            },
            {"url": "https://x/mcp", "auth": "bearer:secret:x.bearer"},
            {"bearer": CANARY},
        ),
        (
            {
                "command": "python3",
                "args": [
                    "-m",
                    "wirecall",
                    "wrap",
                    "--header",
                    "Authorization=env:WIRECALL_HEADER_1",
                    "env:WIRECALL_URL",
                ],
                "env": {"WIRECALL_HEADER_1": f"Bearer {CANARY}", "WIRECALL_URL": "https://x/mcp"},
            },
            {"url": "https://x/mcp", "auth": "bearer:secret:x.bearer"},
            {"bearer": CANARY},
        ),
    ],
)
def test_secret_becomes_a_reference(entry: object, expected: object, secrets: object) -> None:
    """G21: every place in which an entry has a secret."""
    found = read({"mcpServers": {"x": entry}}).imported[0]
    assert found.values == expected
    assert found.secrets == secrets
    assert CANARY not in found.toml()
    assert tomllib.loads(found.toml())["upstream"]["x"] == expected


def test_value_that_only_the_client_completes_is_named() -> None:
    entry = {"command": "a", "env": {"A": "${input:token}", "B": "x-${C}", "D": "${D:-1}"}}
    found = read({"mcpServers": {"x": entry}}).imported[0]
    assert found.values["env"] == {"A": "secret:x.A", "B": "secret:x.B", "D": "env:D"}
    assert found.secrets == {}
    assert [note.split()[0] for note in found.notes] == ["A", "B", "D"]


@pytest.mark.parametrize(
    ("name", "value", "is_secret"),
    [
        ("LOG_LEVEL", "debug", False),
        ("PORT", "8080", False),
        ("REGION", "eu-west-1", False),
        ("HOST", "localhost:5432", False),
        ("ROOT", "/home/me/docs", False),
        ("ROOT", "C:\\Users\\me", False),
        ("BASE_URL", "https://api.example.com/v1", False),
        ("TOKEN_LIMIT", "4096", False),
        ("USE_AUTH", "true", False),
        ("EMPTY_TOKEN", "", False),
        ("API_KEY", "blue", True),
        ("THING", "ghp_0123456789abcdef", True),
        ("THING", "q8fj2k1lz0", True),
        ("BASE_URL", "https://me:pw@api.example.com", True),
        ("DATABASE_URL", "postgresql://me:pw@db/shop", True),
        ("HOOK", "https://hooks.example.com/T0001/B0002abcdefghij0123", True),
    ],
)
def test_values_that_may_be_secret(name: str, value: str, is_secret: bool) -> None:
    assert looks_secret(name, value) is is_secret


# --- the verb -------------------------------------------------------------------------------------

CLAUDE = {
    "mcpServers": {
        "github": {"command": "npx", "args": ["github"], "env": {"TOKEN": CANARY}},
        "linear": {"url": "https://mcp.example.com/mcp"},
    }
}


def run(*words: str) -> dict[str, Any]:
    result = invoke("gateway", "import", *words, "--json")
    document: dict[str, Any] = json.loads(result.stdout)
    document["exit"] = result.exit_code
    return document


def claude(tree: object = CLAUDE) -> Path:
    path = Path.home() / ".config/Claude/claude_desktop_config.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(tree))
    return path


def test_import_shows_the_change_and_writes_nothing(here: Path) -> None:
    claude()
    result = invoke("gateway", "import", "--client", "claude-desktop")
    assert result.exit_code == 0
    assert "+[upstream.github]" in result.stdout
    assert ".wirecall/secrets.toml: github.TOKEN ***" in result.stderr
    assert "nothing was written: repeat with --write" in result.stderr
    assert CANARY not in result.output
    assert list(here.iterdir()) == []


def test_import_writes_a_file_that_the_gateway_takes() -> None:
    """G21: wirecall.toml and the report have no secret."""
    path = claude()
    before = path.read_bytes()
    document = run("--client", "claude-desktop", "--write")
    assert document["exit"] == 0
    assert document["result"]["imported"] == ["github", "linear"]
    assert document["result"]["secrets"]["names"] == ["github.TOKEN"]
    assert CANARY not in json.dumps(document)
    assert CANARY not in Path("wirecall.toml").read_text()
    assert Path(".wirecall/secrets.toml").stat().st_mode & 0o777 == 0o600
    github, linear = load_settings(environment={}).upstreams
    assert github.variables(References()) == {"TOKEN": CANARY}
    assert linear.url == "https://mcp.example.com/mcp"
    assert path.read_bytes() == before
    # Twice is harmless.
    text = Path("wirecall.toml").read_text()
    again = run("--client", "claude-desktop", "--write")
    assert again["result"]["changed"] is False
    assert again["result"]["known"] == ["github", "linear"]
    assert Path("wirecall.toml").read_text() == text


def test_import_adds_to_a_file_and_keeps_what_is_there() -> None:
    text = "# mine\r\n[upstream.github]\r\nurl = 'https://other.example.com/mcp'"
    Path("wirecall.toml").write_bytes(text.encode())
    Path(".wirecall").mkdir()
    Path("mcp.json").write_text(json.dumps(CLAUDE))
    document = run("mcp.json", "--write")
    assert document["exit"] == 9
    (left,) = document["result"]["left"]
    assert left["name"] == "github"
    assert "different upstream of this name" in left["why"]
    after = Path("wirecall.toml").read_bytes().decode()
    assert after.startswith(text + "\r\n\r\n[upstream.linear]\r\n")
    assert not Path(".wirecall/secrets.toml").exists()
    assert check_config(environment={})[1] == []


def test_import_updates_a_secret_that_has_changed() -> None:
    Path("mcp.json").write_text(json.dumps(CLAUDE))
    run("mcp.json", "--write")
    Path("mcp.json").write_text(json.dumps(CLAUDE).replace(CANARY, "new-value-1"))
    document = run("mcp.json", "--write")
    assert document["result"]["secrets"]["names"] == ["github.TOKEN"]
    assert References().value("secret:github.TOKEN") == "new-value-1"


def test_import_reads_several_files_and_names_those_it_cannot_read() -> None:
    Path("a.json").write_text(json.dumps(CLAUDE))
    Path("b.json").write_text("{} // a comment")
    Path("c.json").write_text('{"servers": {"c": {"command": "c"}}}')
    document = run("a.json", "b.json", "c.json")
    assert document["exit"] == 9
    assert document["result"]["imported"] == ["github", "linear", "c"]
    (left,) = document["result"]["left"]
    assert (left["file"], left["name"]) == ("b.json", None)
    assert "it has a comment" in left["why"]


def test_import_takes_only_the_named_servers() -> None:
    Path("mcp.json").write_text(json.dumps(CLAUDE))
    assert run("mcp.json", "--only", "linear")["result"]["imported"] == ["linear"]
    document = run("mcp.json", "--only", "lineal")
    assert (document["exit"], document["ok"]) == (2, False)


def test_entry_that_is_switched_off_is_not_a_finding() -> None:
    Path("mcp.json").write_text('{"mcpServers": {"a": {"command": "a", "disabled": true}}}')
    document = run("mcp.json")
    assert document["exit"] == 0
    assert document["result"]["left"][0]["is_wanted"] is True


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ((), "Which file?"),
        (("--client", "cursor"), "Cursor has no file here."),
        (("--client", "cursor", "x.json"), "--client and a file contradict each other."),
        (("--project", "x.json"), "--project needs --client."),
        (("gone.json",), "gone.json cannot be read."),
        (("broken.json",), "broken.json stays as it is."),
        (("good.json", "--to", "bad.toml"), "bad.toml:1: there is no section x"),
        (("good.json", "--to", "many.toml"), "There would be 65 upstreams."),
    ],
)
def test_import_refuses_wrong_usage(words: tuple[str, ...], what: str) -> None:
    Path("broken.json").write_text("{")
    Path("good.json").write_text('{"mcpServers": {"a": {"command": "a"}}}')
    Path("bad.toml").write_text("x = 1\n")
    many = "".join(f"[upstream.u{n}]\nurl = 'http://x'\n" for n in range(64))
    Path("many.toml").write_text(many)
    document = run(*words)
    assert document["exit"] == 2
    assert document["error"]["message"] == what


def test_import_refuses_secrets_that_others_can_read() -> None:
    Path("mcp.json").write_text(json.dumps(CLAUDE))
    Path(".wirecall").mkdir()
    Path(".wirecall/secrets.toml").write_text("")
    Path(".wirecall/secrets.toml").chmod(0o644)
    assert "Other users can read" in run("mcp.json", "--write")["error"]["message"]
    assert not Path("wirecall.toml").exists()


@pytest.mark.parametrize("client", ["codex", "zed", "gemini", "opencode", "vscode", "claude-code"])
def test_import_knows_where_clients_keep_their_files(client: str) -> None:
    files = {
        "codex": (".codex/config.toml", '[mcp_servers.a]\ncommand = "a"\n'),
        "zed": (".config/zed/settings.json", '{"context_servers": {"a": {"command": "a"}}}'),
        "gemini": (".gemini/settings.json", '{"mcpServers": {"a": {"command": "a"}}}'),
        "opencode": (".config/opencode/opencode.json", '{"mcp": {"a": {"command": ["a"]}}}'),
        "vscode": (".config/Code/User/mcp.json", '{"servers": {"a": {"command": "a"}}}'),
        "claude-code": (".claude.json", '{"mcpServers": {"a": {"command": "a"}}}'),
    }
    name, text = files[client]
    path = Path.home() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert run("--client", client)["result"]["imported"] == ["a"]


def test_gateway_group_names_its_verbs() -> None:
    assert "import" in invoke("gateway", "--help").stdout
    result = invoke("gateway", "imprt")
    assert result.exit_code == 2
    assert "did you mean import?" in result.stderr


# --- JSON with places -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1, 2.5, -3e2, true, null, "x\\u00e9\\n", {}, []], "b": {"c": ""}}',
        " [ ] ",
        '"\\ud800"',
    ],
)
def test_parser_reads_what_json_reads_and_knows_the_places(text: str) -> None:
    node = parse(text, comments=False)
    assert node.plain() == json.loads(text)
    assert text[node.start : node.end] == text.strip()


@pytest.mark.parametrize("text", ["", "{,}", "[1 2]", '{"a" 1}', "{1: 2}", "[1", '"\n"', "[1] x"])
def test_parser_refuses_what_is_not_json(text: str) -> None:
    for comments in (False, True):
        with pytest.raises(NotJson):
            parse(text, comments=comments)

"""`wirecall install --wrap`: the command of an entry changes and changes back, and nothing else."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from tests.cli import PATIENCE, invoke
from tests.client.peers import served
from wirecall import App, Context, connect
from wirecall.cli.wrap import wrap_command
from wirecall.gateway.wraps import VALUED, PlainServer, is_wrapped, unwrapped, wrapped

CANARY = "canary-4711"
WRAP = ["-m", "wirecall", "wrap", "--name"]
CURSOR = """\
{
  "theme":   "dark",
  "mcpServers": {
    "github": {
      "command": "npx",
      "args": ["-y",  "github"],
      "env": { "TOKEN": "canary-4711", "n": 1e2 }
    },
    "bare": {"command": "bare-server"},
    "empty": {"args": [ ], "command": "empty-server", "timeout": 0.10},
    "lines": {
      "command": "uvx",
      "args": [
        "lines",
        "--flag"
      ]
    },
    "web": {
      "url": "https://api.example.com/mcp",
      "headers": {"Authorization": "Bearer canary-4711", "X-Team": "blue"}
    },
    "key": {"url": "https://api.example.com/mcp?apiKey=canary-4711"}
  },
  "last": [1,2 , 3]
}"""
NAMES = ["github", "bare", "empty", "lines", "web", "key"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test its own home and folder, so that no real configuration changes."""
    home = tmp_path / "home"
    (tmp_path / "work").mkdir()
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.chdir(tmp_path / "work")
    return home


def cursor(text: str = CURSOR) -> Path:
    return write(".cursor/mcp.json", text)


def write(name: str, text: str) -> Path:
    path = Path.home() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


def install(*words: str, client: str = "cursor") -> dict[str, Any]:
    result = invoke("install", "--client", client, *words, "--yes", "--json")
    document: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == 0, document
    found: dict[str, Any] = document["result"]
    return found


def refused(*words: str, client: str = "cursor") -> dict[str, Any]:
    result = invoke("install", "--client", client, *words, "--yes", "--json")
    assert result.exit_code == 2
    error: dict[str, Any] = json.loads(result.stdout)["error"]
    return error


def entries(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())["mcpServers"]
    return found


# --- on -------------------------------------------------------------------------------------------


def test_wrap_changes_the_command_of_one_entry_and_no_other_byte() -> None:
    """G23: compared as text."""
    path = cursor()
    result = install("--wrap", "github")
    assert result["names"] == ["github"]
    after = path.read_text()
    command = json.dumps(sys.executable)
    expected = CURSOR.replace('"command": "npx"', f'"command": {command}').replace(
        '["-y",  "github"]',
        '["-m", "wirecall", "wrap", "--name", "github", "--", "npx", "-y",  "github"]',
    )
    assert after == expected


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("bare", ["--", "bare-server"]),
        ("empty", ["--", "empty-server"]),
        ("lines", ["--", "uvx", "lines", "--flag"]),
        (
            "web",
            [
                *("--header", "Authorization=env:WIRECALL_HEADER_1"),
                *("--header", "X-Team=env:WIRECALL_HEADER_2"),
                "https://api.example.com/mcp",
            ],
        ),
        ("key", ["env:WIRECALL_URL"]),
    ],
)
def test_wrap_changes_every_kind_of_entry(name: str, args: list[str]) -> None:
    path = cursor()
    install("--wrap", name)
    entry = entries(path)[name]
    assert entry["command"] == sys.executable
    assert entry["args"] == [*WRAP, name, *args]
    assert "url" not in entry
    assert CANARY not in " ".join(entry["args"])
    others = {other: each for other, each in entries(path).items() if other != name}
    before = {
        other: each for other, each in json.loads(CURSOR)["mcpServers"].items() if other != name
    }
    assert others == before


def test_wrap_keeps_headers_of_an_address_as_variables_of_the_file() -> None:
    """G24: they stay in the file of the client."""
    path = cursor()
    install("--wrap-all")
    found = entries(path)
    assert found["web"]["env"] == {
        "WIRECALL_HEADER_1": f"Bearer {CANARY}",
        "WIRECALL_HEADER_2": "blue",
    }
    assert "headers" not in found["web"]
    assert found["key"]["env"] == {"WIRECALL_URL": f"https://api.example.com/mcp?apiKey={CANARY}"}
    assert found["github"]["env"] == {"TOKEN": CANARY, "n": 100.0}


@pytest.mark.parametrize(
    "words", ['"--token", "canary-4711",', '"--header", "Authorization: Bearer canary-4711",']
)
def test_diff_does_not_show_secrets(words: str) -> None:
    cursor(CURSOR.replace('"lines",', words))
    for options in (("--dry-run",), (), ("--undo",)):
        result = install("--wrap-all", *options)
        assert "***" in result["diff"]
        assert CANARY not in json.dumps(result)


def test_wrap_of_a_typed_client_changes_the_type_of_an_address() -> None:
    text = '{"servers": {"a": {"type": "http", "url": "https://x/mcp"}}}'
    path = write(".config/Code/User/mcp.json", text)
    install("--wrap", "a", client="vscode")
    assert json.loads(path.read_text())["servers"]["a"]["type"] == "stdio"
    install("--wrap", "a", "--undo", client="vscode")
    assert path.read_text() == text


def test_wrap_keeps_the_indentation_of_arguments_on_lines() -> None:
    path = cursor()
    install("--wrap", "lines")
    assert '        "--",\n        "uvx",\n        "lines",\n' in path.read_text()


# --- off ------------------------------------------------------------------------------------------

COMMENTS = """\
// servers of mine
{
\t"servers": {
\t\t"git": {"type": "stdio", "command": "uvx", "args": [
\t\t\t"mcp-server-git", // the official one
\t\t]},
\t\t"web": { // remote
\t\t\t"url": "https://x.example/mcp", /* here */
\t\t\t"headers": { "A": "${env:TOKEN}" },
\t\t},
\t},
}
"""


@pytest.mark.parametrize(
    ("client", "name", "text"),
    [
        ("cursor", ".cursor/mcp.json", CURSOR),
        ("cursor", ".cursor/mcp.json", CURSOR.replace("\n", "\r\n")),
        ("cursor", ".cursor/mcp.json", "\ufeff" + CURSOR),
        ("cursor", ".cursor/mcp.json", json.dumps(json.loads(CURSOR))),
        ("windsurf", ".codeium/windsurf/mcp_config.json", CURSOR.replace('"url"', '"serverUrl"')),
        ("vscode", ".config/Code/User/mcp.json", COMMENTS),
        ("claude-desktop", ".config/Claude/claude_desktop_config.json", CURSOR),
    ],
)
def test_undo_restores_every_byte(client: str, name: str, text: str) -> None:
    """G23: line ends, a byte order mark, comments, one line."""
    path = write(name, text)
    before = path.read_bytes()
    folder = sorted(path.parent.iterdir())
    install("--wrap-all", client=client)
    assert path.read_bytes() != before
    install("--wrap-all", "--undo", client=client)
    assert path.read_bytes() == before
    assert sorted(path.parent.iterdir()) == folder


def test_comments_stay_in_a_file_whose_client_reads_them() -> None:
    path = write(".config/Code/User/mcp.json", COMMENTS)
    install("--wrap-all", client="vscode")
    after = path.read_text()
    for comment in ("// servers of mine", "// the official one", "// remote", "/* here */"):
        assert comment in after


def test_wrap_and_undo_twice_are_harmless() -> None:
    """G23: the second time changes nothing."""
    path = cursor()
    install("--wrap-all")
    once = path.read_bytes()
    again = install("--wrap-all")
    assert (again["changed"], again["names"], again["kept"]) == (False, [], NAMES)
    assert path.read_bytes() == once
    assert len(list(path.parent.glob("*.bak"))) == 1
    install("--wrap-all", "--undo")
    again = install("--wrap-all", "--undo")
    assert (again["changed"], again["kept"]) == (False, NAMES)
    assert path.read_text() == CURSOR


def test_undo_of_one_entry_keeps_the_others_wrapped() -> None:
    path = cursor()
    install("--wrap", "github")
    install("--wrap", "web", "--wrap", "bare")
    install("--wrap", "github", "--undo")
    found = entries(path)
    assert found["github"]["command"] == "npx"
    assert is_wrapped([found["web"]["command"], *found["web"]["args"]])
    assert list(path.parent.glob("*.bak"))
    install("--wrap-all", "--undo")
    assert path.read_text() == CURSOR


def test_undo_of_all_keeps_a_wrap_that_the_user_wrote() -> None:
    text = '{"mcpServers": {"a": {"command": "wirecall", "args": ["wrap", "--", "a"]}, "b": %s}}'
    path = cursor(text % '{"command": "b"}')
    before = path.read_text()
    install("--wrap-all")
    assert install("--wrap-all", "--undo")["names"] == ["b"]
    assert path.read_text() == before
    install("--wrap", "a", "--undo")
    assert entries(path)["a"] == {"command": "a", "args": []}


def test_undo_keeps_later_changes_of_the_file() -> None:
    path = cursor()
    install("--wrap", "github")
    path.write_text(path.read_text().replace('"dark"', '"light"'))
    install("--wrap", "github", "--undo")
    assert path.read_text() == CURSOR.replace('"dark"', '"light"')


def test_undo_keeps_later_changes_of_the_entry() -> None:
    path = cursor()
    install("--wrap-all")
    text = path.read_text().replace(f'"TOKEN": "{CANARY}"', '"TOKEN": "new"')
    path.write_text(text.replace('"--flag"', '"--other"').replace('"blue"', '"red"'))
    install("--wrap-all", "--undo")
    found = entries(path)
    assert found["github"] == {
        "command": "npx",
        "args": ["-y", "github"],
        "env": {"TOKEN": "new", "n": 100.0},
    }
    assert found["lines"] == {"command": "uvx", "args": ["lines", "--other"]}
    assert found["web"]["headers"] == {"Authorization": f"Bearer {CANARY}", "X-Team": "red"}
    assert found["bare"] == {"command": "bare-server"}


def test_undo_without_a_copy_takes_the_wrap_off() -> None:
    path = cursor()
    install("--wrap-all")
    for copy in path.parent.glob("*.bak"):
        copy.unlink()
    install("--wrap-all", "--undo")
    found = entries(path)
    before = json.loads(CURSOR)["mcpServers"]
    assert found.pop("bare") == {**before.pop("bare"), "args": []}
    assert found == before


def test_undo_ignores_a_damaged_copy() -> None:
    path = cursor()
    install("--wrap", "github")
    next(path.parent.glob("*.bak")).write_text("{")
    install("--wrap", "github", "--undo")
    assert path.read_text() == CURSOR


def test_copies_of_wraps_are_not_those_of_an_install_named_wrap() -> None:
    path = cursor()
    words = ("install", "--client", "cursor", "--name", "wrap", "--yes", "--", "sh")
    assert invoke(*words).exit_code == 0
    install("--wrap", "github")
    names = sorted(each.name for each in path.parent.glob("*.bak"))
    assert names == ["mcp.json.before--wrap.bak", "mcp.json.before-wrap.bak"]
    install("--wrap", "github", "--undo")
    install("--name", "wrap", "--undo")
    assert json.loads(path.read_text()) == json.loads(CURSOR)


def test_claude_code_entries_of_this_project_are_wrapped(tmp_path: Path) -> None:
    here = str(tmp_path / "work")
    tree = {
        "mcpServers": {"a": {"command": "user"}},
        "projects": {
            here: {"mcpServers": {"a": {"command": "mine"}}},
            "/elsewhere": {"mcpServers": {"a": {"command": "other"}}},
        },
    }
    text = json.dumps(tree, indent=2)
    path = write(".claude.json", text)
    install("--wrap", "a", client="claude-code")
    found = json.loads(path.read_text())
    assert found["mcpServers"]["a"]["args"][-1] == "user"
    assert found["projects"][here]["mcpServers"]["a"]["args"][-1] == "mine"
    assert found["projects"]["/elsewhere"] == tree["projects"]["/elsewhere"]  # type: ignore[index]
    install("--wrap", "a", "--undo", client="claude-code")
    assert path.read_text() == text


def test_gateway_page_shows_a_file_before_and_after() -> None:
    """The two files of docs/gateway.md are what the printed commands make of each other."""
    page = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text()
    before, after = re.findall(r"^```json\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"`wirecall (install --client cursor --wrap-all.*?)`", page)
    assert len(commands) == 2
    path = cursor(before)
    assert invoke(*commands[0].split(), "--yes").exit_code == 0
    assert path.read_text() == after.replace("/path/to/python", sys.executable)
    assert invoke(*commands[1].split(), "--yes").exit_code == 0
    assert path.read_text() == before


# --- nothing changes ------------------------------------------------------------------------------


def test_dry_run_shows_the_change_and_writes_nothing() -> None:
    path = cursor()
    result = invoke("install", "--client", "cursor", "--wrap", "github", "--dry-run")
    assert result.exit_code == 0
    assert '+      "args": ["-m", "wirecall", "wrap", "--name", "github", "--"' in result.stderr
    assert "would have wrapped github" in result.stdout
    assert path.read_text() == CURSOR
    assert [each.name for each in path.parent.iterdir()] == ["mcp.json"]


@pytest.mark.parametrize(
    ("text", "message", "why"),
    [
        (CURSOR + "\n// mine", "is not JSON", "line 26: it has a comment"),
        (CURSOR.replace("3]", "3,]"), "is not JSON", "a comma before a closing bracket"),
        ('{"mcpServers": []}', "does not look like a file of Cursor", "expected an object"),
        ('{"theme": 1}', "has no servers", "expected an object under 'mcpServers'"),
        ("", "Cursor has no servers here", "does not exist, or is empty"),
        ('{"mcpServers": {}}', "There is no entry github", "has no entries"),
        ('{"mcpServers": {"github": 3}}', "github cannot be changed", "expected an object"),
        (
            '{"mcpServers": {"github": {"command": ["a"]}}}',
            "github cannot be changed",
            "expected a string as its command",
        ),
        (
            '{"mcpServers": {"github": {"type": "sse", "url": "http://x"}}}',
            "github cannot be changed",
            "it speaks HTTP with SSE",
        ),
        ('{"mcpServers": {"github": {}}}', "github cannot be changed", "no command and no address"),
    ],
)
def test_file_that_cannot_be_wrapped_is_named_and_stays(text: str, message: str, why: str) -> None:
    """G22: comments, another shape, no servers."""
    path = cursor(text)
    error = refused("--wrap", "github")
    assert message in error["message"]
    assert why in error["why"]
    assert path.read_text() == text
    assert [each.name for each in path.parent.iterdir()] == ["mcp.json"]


def test_entries_that_cannot_be_wrapped_do_not_stop_the_others() -> None:
    path = cursor(
        '{"mcpServers": {"a": {"command": "a"}, "b": {"type": "sse", "url": "http://x"}}}'
    )
    result = install("--wrap-all")
    assert result["names"] == ["a"]
    assert list(result["left"]) == ["b"]
    assert entries(path)["b"] == {"type": "sse", "url": "http://x"}


def test_undo_of_a_wrap_without_a_command_is_refused() -> None:
    wrap = {"command": "wirecall", "args": ["wrap", "--name", "a"]}
    cursor(json.dumps({"mcpServers": {"a": wrap}}))
    assert "its command is not complete" in refused("--wrap", "a", "--undo")["why"]


@pytest.mark.parametrize(
    "words",
    [
        ("--wrap", "a", "--name", "b"),
        ("--wrap", "a", "--print"),
        ("--wrap-all", "--env", "A=1"),
        ("--wrap-all", "--wrap", "a"),
        ("--wrap", "a", "http://x"),
    ],
)
def test_wrap_refuses_options_of_a_new_entry(words: tuple[str, ...]) -> None:
    cursor()
    assert "--wrap" in refused(*words)["message"]


def test_wrap_asks_before_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    path = cursor()
    monkeypatch.setattr("wirecall.cli.wrapping.ask", lambda _question: False)
    result = invoke("install", "--client", "cursor", "--wrap", "github")
    assert result.exit_code == 130
    assert path.read_text() == CURSOR


def test_file_that_is_read_only_stays(home: Path) -> None:
    path = cursor()
    path.chmod(0o400)
    assert "it is read-only" in refused("--wrap", "github")["why"]
    assert path.read_text() == CURSOR


def test_permissions_of_the_file_stay() -> None:
    path = cursor()
    path.chmod(0o600)
    install("--wrap", "github")
    assert path.stat().st_mode & 0o777 == 0o600
    for copy in path.parent.glob("*.bak"):
        assert copy.stat().st_mode & 0o777 == 0o600


# --- the command line -----------------------------------------------------------------------------


def test_unwrapped_knows_the_options_of_wrap() -> None:
    own = [option for option in wrap_command.params if isinstance(option, click.Option)]
    assert {option.opts[0] for option in own} == {*VALUED}
    assert not any(option.is_flag for option in own)


@pytest.mark.parametrize(
    ("words", "server"),
    [
        ("--timeout 5m -- npx server", PlainServer(command=("npx", "server"))),
        ("--timeout=5m https://x/mcp", PlainServer(url="https://x/mcp")),
        ("npx -y server --name x", PlainServer(command=("npx", "-y", "server", "--name", "x"))),
        ("--name y server", PlainServer(command=("server",))),
    ],
)
def test_unwrapped_reads_what_a_user_wrote(words: str, server: PlainServer) -> None:
    assert unwrapped(["wirecall", "wrap", *words.split()], {}) == server


@pytest.mark.parametrize(
    "server",
    [
        PlainServer(command=("npx", "-y", "--", "x"), env={"A": "1"}),
        PlainServer(url="https://x/mcp"),
        PlainServer(url="https://x/mcp", headers={"A": "1", "B": "b=c"}),
        PlainServer(url="https://x/mcp?token=abcdef0123", headers={"A": "1"}),
    ],
)
def test_unwrapped_is_the_inverse_of_wrapped(server: PlainServer) -> None:
    wrap = wrapped("My Server", server)
    assert wrap.command[:6] == (sys.executable, *WRAP, "My-Server")
    assert unwrapped(wrap.command, wrap.env) == server


@pytest.mark.parametrize(
    ("line", "is_wrap"),
    [
        ("wirecall wrap -- x", True),
        ("/usr/local/bin/wirecall wrap https://x", True),
        ("C:\\venv\\Scripts\\python.exe -m wirecall wrap -- x", True),
        ("/venv/bin/python3.13 -m wirecall wrap -- x", True),
        ("uvx wirecall wrap -- x", True),
        ("uvx --from wirecall wirecall wrap -- x", True),
        ("wirecall serve wrap", False),
        ("npx wrap -- x", False),
        ("python -m other wrap", False),
        ("bash -c wirecall wrap", False),
        ("wirecall", False),
        ("", False),
    ],
)
def test_wrap_is_recognised_by_its_program(line: str, is_wrap: bool) -> None:
    assert is_wrapped(line.split()) is is_wrap


# --- the wrapped entries run ----------------------------------------------------------------------


def shop(seen: list[str]) -> App:
    app = App("shop", ledger="memory:")

    @app.query
    def who(ctx: Context) -> str:
        """Return the team of the request."""
        seen.append(ctx.headers["x-team"])
        return "fine"

    return app


async def ask(entry: dict[str, Any]) -> Any:
    """Start an entry as its client does, and call its tool."""
    command = [entry["command"], *entry["args"]]
    async with connect(
        command, protocol="mcp", env=entry.get("env", {}), timeout=PATIENCE
    ) as client:
        return (await client.call_tool("who")).structured


async def test_wrapped_address_gets_its_headers_and_its_key() -> None:
    """G24: the server gets them, and the command line does not have them."""
    seen: list[str] = []
    async with served(shop(seen)) as url:
        address = f"{url}/mcp?key={CANARY}"
        entry = {"url": address, "headers": {"X-Team": "blue"}}
        path = cursor(json.dumps({"mcpServers": {"shop": entry}}))
        install("--wrap", "shop")
        found = entries(path)["shop"]
        assert CANARY not in " ".join(found["args"])
        await ask(found)
    assert seen == ["blue"]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--header", f"Bearer {CANARY}", "http://x/mcp"), "This is not a --header."),
        (("--header", "A=env:GONE", "http://x/mcp"), "env:GONE has no value."),
        (("--header", "A=b", "--", "server"), "--header is for a URL."),
        (("env:GONE",), "env:GONE has no value."),
        (("env:HOME",), "env:HOME is not an address."),
        (("--nmae=notes", "--", "server"), "There is no option '--nmae'."),
        (("http://x/mcp", "--trust", "none"), "An address is the last word."),
    ],
)
def test_wrap_refuses_headers_and_addresses_that_have_no_value(
    words: tuple[str, ...], what: str
) -> None:
    result = invoke("wrap", *words)
    assert result.exit_code == 2
    assert what in result.stderr
    assert CANARY not in result.stderr

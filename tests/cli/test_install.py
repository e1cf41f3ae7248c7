"""`wirecall install`: an entry goes into a client's file and out again, and nothing else changes."""

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli import SHOP, invoke, wirecall
from wirecall.cli.client_files import CLIENTS

SERVED = ["-m", "wirecall", "serve", SHOP, "--stdio"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test its own home and folder, so that no real configuration changes."""
    home = tmp_path / "home"
    (tmp_path / "work").mkdir()
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.chdir(tmp_path / "work")
    return home


def told(*words: str) -> Any:
    result = invoke("install", *words, "--json")
    document = json.loads(result.stdout)
    assert document["ok"] is True, document
    return document["result"]


def refused(*words: str) -> dict[str, Any]:
    result = invoke("install", *words, "--json")
    assert result.exit_code == 2
    error: dict[str, Any] = json.loads(result.stdout)["error"]
    return error


FILES = {
    "claude-desktop": ".config/Claude/claude_desktop_config.json",
    "claude-code": ".claude.json",
    "cursor": ".cursor/mcp.json",
    "vscode": ".config/Code/User/mcp.json",
    "windsurf": ".codeium/windsurf/mcp_config.json",
}


@pytest.mark.parametrize("client", list(CLIENTS))
def test_file_is_written_where_each_client_looks_for_it(client: str, home: Path) -> None:
    result = told(SHOP, "--client", client)
    path = home / FILES[client]
    assert result["file"] == str(path)
    entry: dict[str, Any] = {"command": sys.executable, "args": SERVED}
    typed = {"type": "stdio"} if client in ("claude-code", "vscode") else {}
    member = "servers" if client == "vscode" else "mcpServers"
    assert json.loads(path.read_text()) == {member: {"shop": {**typed, **entry}}}


@pytest.mark.parametrize(
    ("platform", "path"),
    [
        ("darwin", "Library/Application Support/Claude/claude_desktop_config.json"),
        ("win32", "AppData/Roaming/Claude/claude_desktop_config.json"),
        ("linux", ".config/Claude/claude_desktop_config.json"),
    ],
)
def test_systems_keep_their_files_in_different_places(
    platform: str, path: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.delenv("APPDATA", raising=False)
    assert CLIENTS["claude-desktop"].path(in_project=False) == home / path


@pytest.mark.parametrize(
    ("client", "entry"),
    [
        (
            "claude-code",
            {"mcpServers": {"127-0-0-1": {"type": "http", "url": "http://127.0.0.1:8420/mcp"}}},
        ),
        ("cursor", {"mcpServers": {"127-0-0-1": {"url": "http://127.0.0.1:8420/mcp"}}}),
        (
            "vscode",
            {"servers": {"127-0-0-1": {"type": "http", "url": "http://127.0.0.1:8420/mcp"}}},
        ),
        ("windsurf", {"mcpServers": {"127-0-0-1": {"serverUrl": "http://127.0.0.1:8420/mcp"}}}),
    ],
)
@pytest.mark.parametrize("url", ["http://127.0.0.1:8420", "http://127.0.0.1:8420/mcp"])
def test_address_has_each_clients_own_form(client: str, entry: Any, url: str, home: Path) -> None:
    assert told(url, "--client", client, "--print") == entry
    assert not list(home.iterdir())


def test_address_of_one_server_of_a_gateway_keeps_its_name() -> None:
    url = "http://127.0.0.1:8430/mcp/github"
    found = told(url, "--client", "cursor", "--print")
    assert found == {"mcpServers": {"github": {"url": url}}}


def test_command_is_written_with_its_whole_path_and_variables() -> None:
    words = (
        "--client",
        "cursor",
        "--name",
        "files",
        "--env",
        "A=1",
        "--env",
        "B=x=y",
        "--print",
        "--json",
    )
    result = invoke("install", *words, "--", "sh", "-c", "server")
    entry = json.loads(result.stdout)["result"]["mcpServers"]["files"]
    assert os.path.isabs(entry["command"])
    assert entry["args"] == ["-c", "server"]
    assert entry["env"] == {"A": "1", "B": "x=y"}


def test_entry_names_the_wirecall_toml_beside_the_app() -> None:
    Path("app.py").write_text('from wirecall import App\napp = App("mine")\n')
    Path("wirecall.toml").touch()
    entry = told("app.py", "--client", "cursor", "--print")["mcpServers"]["mine"]
    assert entry["args"][3] == str(Path("app.py").resolve())
    assert entry["env"] == {"WIRECALL_CONFIG": str(Path("wirecall.toml").resolve())}


def test_written_entry_starts_a_server_that_speaks_mcp() -> None:
    entry = told(SHOP, "--client", "cursor")
    words = json.loads(Path(entry["file"]).read_text())["mcpServers"]["shop"]
    run = wirecall(
        "probe", "--revision", "2025-11-25", "--json", "--", words["command"], *words["args"]
    )
    assert run.returncode == 0, run.stdout
    assert json.loads(run.stdout)["result"]["revisions"] == {"2025-11-25": True}


# --- what else is in the file ---------------------------------------------------------------------

OTHERS = '{\n\t"theme": "dark",\n\t"mcpServers": {\n\t\t"other": {\n\t\t\t"url": "http://ö"\n\t\t}\n\t}\n}\n'


def existing(text: str = OTHERS, mode: int = 0o600) -> Path:
    path = Path.home() / ".cursor" / "mcp.json"
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def test_unknown_content_indentation_and_permissions_remain() -> None:
    path = existing(mode=0o640)
    result = told(SHOP, "--client", "cursor")
    tree = json.loads(path.read_text())
    assert list(tree) == ["theme", "mcpServers"]
    assert list(tree["mcpServers"]) == ["other", "shop"]
    assert '\n\t\t"other": {\n\t\t\t"url": "http://ö"' in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert Path(result["backup"]).read_text() == OTHERS
    assert stat.S_IMODE(Path(result["backup"]).stat().st_mode) == 0o640


def test_change_is_shown_as_a_diff_and_a_dry_run_writes_nothing() -> None:
    path = existing()
    result = invoke("install", SHOP, "--client", "cursor", "--dry-run")
    assert result.exit_code == 0
    assert f'+\t\t\t"command": "{sys.executable}",' in result.stderr
    assert path.read_text() == OTHERS
    assert os.listdir(path.parent) == ["mcp.json"]


def test_install_twice_changes_nothing() -> None:
    existing()
    assert told(SHOP, "--client", "cursor")["changed"] is True
    again = told(SHOP, "--client", "cursor")
    assert (again["changed"], again["diff"]) == (False, "")


def test_undo_removes_the_entry_and_keeps_later_changes() -> None:
    path = existing()
    told(SHOP, "--client", "cursor")
    tree = json.loads(path.read_text())
    tree["theme"] = "light"
    path.write_text(json.dumps(tree))
    result = told(SHOP, "--client", "cursor", "--undo")
    assert json.loads(path.read_text()) == {
        "theme": "light",
        "mcpServers": {"other": {"url": "http://ö"}},
    }
    assert result["backup"] is None
    assert (
        refused(SHOP, "--client", "cursor", "--undo")["message"]
        == "There is nothing to undo for shop."
    )


def test_undo_restores_the_replaced_entry_and_needs_only_the_name() -> None:
    path = existing('{"mcpServers": {"shop": {"url": "http://old"}}}')
    told(SHOP, "--client", "cursor")
    assert "command" in json.loads(path.read_text())["mcpServers"]["shop"]
    told("--client", "cursor", "--name", "shop", "--undo")
    assert json.loads(path.read_text()) == {"mcpServers": {"shop": {"url": "http://old"}}}


def test_install_twice_loses_nothing() -> None:
    path = existing('{"mcpServers": {"shop": {"url": "http://mine"}}}')
    told(SHOP, "--client", "cursor")
    second = told(SHOP, "--client", "cursor", "--env", "A=1")
    assert second["backup"].endswith("mcp.json.before-shop.2.bak")
    told(SHOP, "--client", "cursor", "--undo")
    assert "env" not in json.loads(path.read_text())["mcpServers"]["shop"]
    told(SHOP, "--client", "cursor", "--undo")
    assert json.loads(path.read_text()) == {"mcpServers": {"shop": {"url": "http://mine"}}}
    assert os.listdir(path.parent) == ["mcp.json"]


def test_undo_after_the_servers_were_all_removed_by_hand() -> None:
    path = existing('{"mcpServers": {"shop": {"url": "http://mine"}}}')
    told(SHOP, "--client", "cursor")
    path.write_text("{}")
    told(SHOP, "--client", "cursor", "--undo")
    assert json.loads(path.read_text()) == {"mcpServers": {"shop": {"url": "http://mine"}}}


def test_path_of_the_backup_is_printed() -> None:
    path = existing()
    result = invoke("install", SHOP, "--client", "cursor")
    assert f"Backup: {path}.before-shop.bak" in result.stderr


def test_line_endings_and_odd_strings_remain() -> None:
    path = existing("")
    path.write_bytes(b'{\r\n  "half": "\\ud800", "big": 123456789012345678901234567890\r\n}\r\n')
    told(SHOP, "--client", "cursor")
    assert path.read_bytes().startswith(
        b'{\r\n  "half": "\\ud800",\r\n  "big": 123456789012345678901234567890,\r\n  "mcpServers"'
    )
    assert path.read_bytes().count(b"\n") == path.read_bytes().count(b"\r\n")


def test_undo_is_separate_for_each_server() -> None:
    path = existing()
    told(SHOP, "--client", "cursor", "--name", "a")
    told(SHOP, "--client", "cursor", "--name", "b/../c")
    told("--client", "cursor", "--name", "a", "--undo")
    assert list(json.loads(path.read_text())["mcpServers"]) == ["other", "b/../c"]


def test_link_remains_a_link(home: Path) -> None:
    real = home / "dotfiles.json"
    real.write_text("{}")
    (home / ".claude.json").symlink_to(real)
    told(SHOP, "--client", "claude-code")
    assert (home / ".claude.json").is_symlink()
    assert "shop" in json.loads(real.read_text())["mcpServers"]


def test_file_of_a_project() -> None:
    told(SHOP, "--client", "claude-code", "--project")
    assert "shop" in json.loads(Path(".mcp.json").read_text())["mcpServers"]
    assert (
        "does not read a file of a project"
        in refused(SHOP, "--client", "windsurf", "--project")["message"]
    )


def test_install_asks_a_person_who_may_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    path = existing()
    monkeypatch.setattr("wirecall.cli.install.ask", lambda _question: False)
    assert invoke("install", SHOP, "--client", "cursor").exit_code == 130
    assert path.read_text() == OTHERS
    assert invoke("install", SHOP, "--client", "cursor", "--yes").exit_code == 0


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "what", "why"),
    [
        ('{\n  "a": 1\n  "b": 2}', "is not JSON.", "line 3, column 3"),
        # 3, the bracket; since Python 3.13 it is 2, the comma.
        ('{\n  "a": 1,\n}', "is not JSON.", "line "),
        ('{\n  // mine\n  "a": 1}', "is not JSON.", "line 2 has a comment"),
        ('{\n  "a": 1 /* mine */}', "is not JSON.", "line 2 has a comment"),
        ('{"a": 1, "a": 2}', "cannot be rewritten safely.", "'a' is in one object twice"),
        ('{"a": NaN}', "cannot be rewritten safely.", "it has NaN, which is not JSON"),
        ('{"a": 1e999}', "cannot be rewritten safely.", "1e999, which would be lost"),
        (
            '{"a": ' + "[" * 99999 + "]" * 99999 + "}",
            "cannot be rewritten safely.",
            "nested too deeply",
        ),
        ("[]", "does not look like a file of Cursor.", "an object"),
        (
            '{"mcpServers": []}',
            "does not look like a file of Cursor.",
            "an object under 'mcpServers'",
        ),
    ],
)
def test_file_that_cannot_be_parsed_is_not_changed(text: str, what: str, why: str) -> None:
    path = existing(text)
    error = refused(SHOP, "--client", "cursor")
    assert error["message"].endswith(what)
    assert why in error["why"]
    assert path.read_text() == text
    assert os.listdir(path.parent) == ["mcp.json"]


def test_lines_to_add_by_hand_are_printed() -> None:
    existing('{\n  // mine\n  "mcpServers": {}\n}')
    result = invoke("install", SHOP, "--client", "cursor", "--name", "shop")
    assert result.exit_code == 2
    told, _, lines = result.stderr.partition(
        "next: correct it, or add this by hand, to the object 'mcpServers':\n"
    )
    assert "why: line 2 has a comment" in told
    printed = json.loads(
        invoke("install", SHOP, "--client", "cursor", "--name", "shop", "--print").stdout
    )
    assert json.loads("{" + lines + "}") == printed["mcpServers"]
    assert refused(SHOP, "--client", "cursor", "--name", "shop")["entry"] == printed


def test_bytes_that_are_not_text_are_not_changed() -> None:
    path = existing("")
    path.write_bytes(b"\xff{}")
    assert refused(SHOP, "--client", "cursor")["why"] == "it is not UTF-8"


def test_read_only_file_is_not_changed() -> None:
    path = existing(mode=0o444)
    assert refused(SHOP, "--client", "cursor")["why"] == "it is read-only"
    assert path.read_text() == OTHERS
    assert os.listdir(path.parent) == ["mcp.json"]


def test_file_that_another_process_writes_during_install_is_not_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = existing()
    monkeypatch.setattr("wirecall.cli.install.ask", lambda _question: bool(path.write_text("{}")))
    result = invoke("install", SHOP, "--client", "cursor")
    assert result.exit_code == 2
    assert "has just been changed" in result.stderr
    assert path.read_text() == "{}"
    assert os.listdir(path.parent) == ["mcp.json"]


def test_link_to_itself_and_a_folder_in_the_way_are_reported(home: Path) -> None:
    (home / ".claude.json").symlink_to(home / ".claude.json")
    assert refused(SHOP, "--client", "claude-code")["why"] == "it is a link to itself"
    (home / ".cursor").write_text("a file where the folder should be")
    assert refused(SHOP, "--client", "cursor")["why"] == "Not a directory"
    (home / ".codeium/windsurf/mcp_config.json").mkdir(parents=True)
    assert refused(SHOP, "--client", "windsurf")["why"] == "Is a directory"


def test_link_to_a_file_that_is_not_there_yet_is_followed(home: Path) -> None:
    (home / ".claude.json").symlink_to(home / "dotfiles" / "claude.json")
    told(SHOP, "--client", "claude-code")
    assert (home / ".claude.json").is_symlink()
    assert "shop" in json.loads((home / "dotfiles" / "claude.json").read_text())["mcpServers"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--client", "cursor"), "Which server?"),
        (("gone.py", "--client", "cursor"), "There is no file gone.py."),
        (
            ("http://h/mcp", "--client", "claude-desktop"),
            "Claude Desktop takes no addresses from its file.",
        ),
        (
            ("http://h/mcp", "--client", "cursor", "--env", "A=1"),
            "--env is for servers that the client starts.",
        ),
        ((SHOP, "--client", "cursor", "--env", "A"), "'A' is not a variable."),
    ],
)
def test_mistakes_are_reported_before_anything_is_written(
    words: tuple[str, ...], message: str, home: Path
) -> None:
    assert refused(*words)["message"] == message
    assert not list(home.iterdir())


def test_unknown_client_gets_the_list_of_clients() -> None:
    result = invoke("install", SHOP, "--client", "netscape")
    assert result.exit_code == 2
    assert "claude-desktop" in result.stderr

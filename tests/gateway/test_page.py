"""The commands of docs/gateway.md, run exactly as they are printed, on the files of a new user."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.gateway.fronts import PATIENCE, ROOT, counter
from tests.ports import free_port

PAGE = ROOT / "docs" / "gateway.md"
# Verbs whose options stand elsewhere on the page.
VERBS = {
    "wirecall gateway import",
    "wirecall install",
    "wirecall login",
    "wirecall serve",
    "wirecall wrap",
}


def printed() -> set[str]:
    """Return the whole commands of the page: those without a word in capitals to replace."""
    found = set(re.findall(r"`(wirecall [^`]*)`", PAGE.read_text()))
    return {each for each in found if not re.search(r"\b[A-Z]{2,}\b", each)} - VERBS


class Shell:
    """Runs commands in one folder, and notes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ran: set[str] = set()
        places = [str(Path(sys.executable).parent), os.environ["PATH"]]
        self._env = {**os.environ, "HOME": str(folder / "home"), "PATH": os.pathsep.join(places)}
        self._env.pop("XDG_CONFIG_HOME", None)

    def run(self, command: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
        self.ran.add(command.removesuffix(" --write"))
        done = subprocess.run(
            command.split(),
            cwd=self.folder,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == code, (command, done.stdout, done.stderr)
        return done

    def start(self, command: str) -> "subprocess.Popen[bytes]":
        self.ran.add(command)
        return subprocess.Popen(
            command.split(),
            cwd=self.folder,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def test_page_of_the_gateway_prints_commands_that_work(tmp_path: Path) -> None:
    """G11, G23: an existing file is imported, checked, served, wrapped and unwrapped."""
    shell = Shell(tmp_path)
    program, *words = counter(tmp_path / "bank")
    text = json.dumps({"mcpServers": {"bank": {"command": program, "args": words}}})
    of_claude = tmp_path / "home/.config/Claude/claude_desktop_config.json"
    of_cursor = tmp_path / "home/.cursor/mcp.json"
    for path in (of_claude, of_cursor, tmp_path / "mcp.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    # From the file of a client to a gateway.
    shell.run("wirecall gateway import mcp.json")
    shell.run("wirecall gateway import --client claude-desktop")
    assert not (tmp_path / "wirecall.toml").exists()
    done = shell.run("wirecall gateway import --client claude-desktop --write")
    assert "next: wirecall gateway check" in done.stderr
    done = shell.run("wirecall gateway check")
    assert "bank: 2 tools, MCP 2025-11-25" in done.stderr
    assert [line.split()[:5] for line in done.stdout.splitlines()[1:]] == [
        ["bank", "pay", "pay", "command", "no"],
        ["bank", "look", "look", "query", "readOnlyHint"],
    ]
    shell.run("wirecall config check")
    shell.run("wirecall config show")
    with (tmp_path / "wirecall.toml").open("a") as file:
        file.write(f'\n[gateway]\nhttp = "127.0.0.1:{free_port()}"\n')
    process = shell.start("wirecall gateway run")
    try:
        assert serves_one(shell)
    finally:
        process.terminate()
        process.wait(PATIENCE)
    # A client's own file.
    shell.run("wirecall wrap --help")
    shell.run("wirecall install --client cursor --wrap-all")
    wrapped = json.loads(of_cursor.read_text())["mcpServers"]["bank"]
    assert wrapped["args"][:3] == ["-m", "wirecall", "wrap"]
    assert wrapped["args"][-len(words) :] == words
    shell.run("wirecall install --client cursor --wrap-all --undo")
    assert of_cursor.read_text() == of_claude.read_text() == text
    assert shell.ran == printed()


def serves_one(shell: Shell) -> bool:
    """Ask the gateway how it is until its server is up."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            done = shell.run("wirecall gateway status")
        except AssertionError:
            continue  # it does not answer yet
        columns, row = done.stdout.splitlines()
        assert columns.split()[:5] == ["upstream", "health", "since", "sessions", "pids"]
        if row.split()[:2] == ["bank", "up"]:
            return True
    return False

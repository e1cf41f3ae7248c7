"""The commands of docs/gateway.md, run exactly as they are printed, on the files of a new user."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
        # Where its gateway listens, in place of the address on the page.
        self.address = f"127.0.0.1:{free_port()}"
        places = [str(Path(sys.executable).parent), os.environ["PATH"]]
        self._env = {**os.environ, "HOME": str(folder / "home"), "PATH": os.pathsep.join(places)}
        self._env.pop("XDG_CONFIG_HOME", None)

    def run(self, command: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
        self.ran.add(command.removesuffix(" --write"))
        done = subprocess.run(
            command.replace("127.0.0.1:8430", self.address).split(),
            cwd=self.folder,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == code, (command, done.stdout, done.stderr)
        return done

    @contextmanager
    def started(self, command: str) -> Iterator[None]:
        """Run a command during the block."""
        self.ran.add(command)
        process = subprocess.Popen(
            command.split(),
            cwd=self.folder,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(PATIENCE)


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
        file.write(f'\n[gateway]\nhttp = "{shell.address}"\n')
    with shell.started("wirecall gateway run"):
        assert serves(shell, "bank") is not None
    # A client's own file.
    shell.run("wirecall wrap --help")
    shell.run("wirecall install --client cursor --wrap-all")
    wrapped = json.loads(of_cursor.read_text())["mcpServers"]["bank"]
    assert wrapped["args"][:3] == ["-m", "wirecall", "wrap"]
    assert wrapped["args"][-len(words) :] == words
    shell.run("wirecall install --client cursor --wrap-all --undo")
    assert of_cursor.read_text() == of_claude.read_text() == text
    assert shell.ran | ten_minutes(tmp_path / "minutes") == printed()


def ten_minutes(folder: Path) -> set[str]:
    """Take the first steps of the page; return the commands."""
    notes = folder / "notes.txt"
    of_cursor = folder / "home/.cursor/mcp.json"
    of_cursor.parent.mkdir(parents=True)
    words = [str(ROOT / "examples" / "notes_server.py"), str(notes)]
    text = json.dumps({"mcpServers": {"notes": {"command": sys.executable, "args": words}}})
    of_cursor.write_text(text)
    shell = Shell(folder)
    shell.run("wirecall gateway import --client cursor")
    shell.run("wirecall gateway import --client cursor --write")
    assert "'add_note' has no hints" in shell.run("wirecall gateway check", 9).stderr
    with (folder / "wirecall.toml").open("a") as file:
        file.write(f'\n[gateway]\nhttp = "{shell.address}"\n')
    address = "http://127.0.0.1:8430/mcp/notes"
    with shell.started("wirecall gateway run"):
        pid = serves(shell, "notes")
        assert pid is not None
        call = f"wirecall call {address} add_note text=rent --key rent-1 --yes"
        assert shell.run(call).stdout == "note 1\n"
        os.kill(pid, signal.SIGKILL)
        assert shell.run(call).stdout == "note 1\n"
        assert notes.read_text() == "rent\n"
        assert shell.run(f"wirecall call {address} process").stdout != f"{pid}\n"
        install = f"wirecall install --client cursor {address} --yes"
        shell.run(install)
        entry = json.loads(of_cursor.read_text())["mcpServers"]
        assert entry == {"notes": {"url": f"http://{shell.address}/mcp/notes"}}
        shell.run(f"{install} --undo")
        assert json.loads(of_cursor.read_text()) == json.loads(text)
    return shell.ran


def serves(shell: Shell, name: str) -> int | None:
    """Ask the gateway how it is until its server is up; return the pid of the server."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            done = shell.run("wirecall gateway status")
        except AssertionError:
            continue  # it does not answer yet
        columns, row = done.stdout.splitlines()
        assert columns.split()[:5] == ["upstream", "health", "since", "sessions", "pids"]
        if row.split()[:2] == [name, "up"]:
            return int(row.split()[4])
    return None

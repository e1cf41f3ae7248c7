"""MCP clients: where each keeps its servers, and what an entry looks like there.

    client           its own file                                        of a project         an address is
    claude-desktop   .../Claude/claude_desktop_config.json               -                    not taken from the file
    claude-code      ~/.claude.json                                      .mcp.json            {"type": "http", "url"}
    cursor           ~/.cursor/mcp.json                                  .cursor/mcp.json     {"url"}
    vscode           .../Code/User/mcp.json, under "servers"             .vscode/mcp.json     {"type": "http", "url"}
    windsurf         ~/.codeium/windsurf/mcp_config.json                 -                    {"serverUrl"}

"..." is %APPDATA% on Windows, ~/Library/Application Support on macOS, $XDG_CONFIG_HOME or ~/.config elsewhere.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from msgspec import Struct

from wirecall.cli.failures import Failure
from wirecall.cli.targets import Target
from wirecall.config import FILE, FILE_VARIABLE


class McpClient(Struct, frozen=True):
    """One client. In `home`, a leading `@` stands for the folder of applications' data."""

    title: str
    home: str
    project: str | None = None
    member: str = "mcpServers"
    is_typed: bool = False  # an entry says "type": "stdio" or "http"
    address: str | None = "url"
    restart: str = "restart it"

    def path(self, *, in_project: bool) -> Path:
        if not in_project:
            return _data() / self.home[2:] if self.home.startswith("@") else Path.home() / self.home
        if self.project is None:
            raise Failure(f"{self.title} has no file of a project.", "it knows only its own", "drop --project")
        return Path(self.project)

    def entry(self, target: Target, env: dict[str, str]) -> dict[str, Any]:
        """What the client is told about a server."""
        if target.kind == "url":
            return self._remote(target.text, env)
        command, *args = target.command if target.kind == "command" else _serving(target)
        told: dict[str, Any] = {"type": "stdio"} if self.is_typed else {}
        told |= {"command": shutil.which(command) or command, "args": args}
        env = _configured(target) | env
        return {**told, "env": env} if env else told

    def _remote(self, url: str, env: dict[str, str]) -> dict[str, Any]:
        if self.address is None:
            next = "add it in its settings under Connectors, or install the file: app.py"
            raise Failure(f"{self.title} takes no addresses from its file.", "it starts commands only", next)
        if env:
            raise Failure("--env is for servers that the client starts.", f"{url} runs already", "drop --env")
        return {**({"type": "http"} if self.is_typed else {}), self.address: url}


CLIENTS = {
    "claude-desktop": McpClient("Claude Desktop", "@/Claude/claude_desktop_config.json", address=None),
    "claude-code": McpClient("Claude Code", ".claude.json", ".mcp.json", is_typed=True, restart="start a new session"),
    "cursor": McpClient("Cursor", ".cursor/mcp.json", ".cursor/mcp.json"),
    "vscode": McpClient(
        "VS Code",
        "@/Code/User/mcp.json",
        ".vscode/mcp.json",
        "servers",
        is_typed=True,
        restart="run MCP: List Servers in it",
    ),
    "windsurf": McpClient(
        "Windsurf", ".codeium/windsurf/mcp_config.json", address="serverUrl", restart="refresh its MCP servers"
    ),
}


def _data() -> Path:
    """Where applications keep their data."""
    if sys.platform == "win32":
        return Path(os.environ.get("APPDATA") or Path.home() / "AppData" / "Roaming")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support"
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def _configured(target: Target) -> dict[str, str]:
    """The wirecall.toml beside a file is in force also where the client starts it."""
    file = Path(target.text).resolve().with_name(FILE)
    return {FILE_VARIABLE: str(file)} if target.kind == "file" and file.is_file() else {}


def _serving(target: Target) -> list[str]:
    """The command line that serves a file. All paths are whole: a client starts it in a folder of its own."""
    path = str(Path(target.text).resolve())
    return [sys.executable, "-m", "wirecall", "serve", f"{path}:{target.name}" if target.name else path, "--stdio"]

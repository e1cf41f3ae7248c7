"""Eight MCP servers of other projects, with a call, an error and an effect of each."""

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from msgspec import Struct

from tests.environments import environment
from tests.gateway.fronts import Process, enveloped, introduction, message_of
from tests.mcp.node import installed, node
from wirecall.mcp.revisions import NAMES

NPM = "2026.8.31"
PYTHON = [
    "mcp-server-time==2026.10.19",
    "mcp-server-fetch==2026.10.24",
    "mcp-server-git==2026.10.19",
    "mcp==2.3.0",
]
# This server, and the official client 1.x, which gives up without a word.
OLDER = ["mcp-server-sqlite==2025.4.25", "mcp==1.30.0"]

Call = dict[str, Any]


class Server(Struct):
    """A server on stdio."""

    name: str
    words: list[str]
    # A call that has the same result each time, and one that fails.
    call: Call
    wrong: Call
    # A call that takes effect, and how many effects there are. None: all its tools only read.
    act: Call | None = None
    count: Callable[[], int] | None = None
    env: dict[str, str] = {}
    # It speaks 2026-07-28 too.
    has_newest: bool = False
    # A call that reports progress and can be cancelled, if there is one.
    slow: Call | None = None


def tool(name: str, **arguments: Any) -> Call:
    return {"name": name, "arguments": arguments}


def npm_words(name: str, *more: str) -> list[str]:
    """Return the command line of a server of the protocol's own collection."""
    package = f"@modelcontextprotocol/server-{name}"
    script = installed(f"{package}@{NPM}") / package / "dist" / "index.js"
    return [str(node()), str(script), *more]


TIME_CALL = tool("convert_time", source_timezone="UTC", time="12:00", target_timezone="Asia/Tokyo")


def time_words(python: str = sys.executable) -> list[str]:
    return [python, "-m", "mcp_server_time", "--local-timezone", "UTC"]


def memory(folder: Path) -> Server:
    """Its entities are lines of a file; it drops those that it has."""
    file = folder / "memory.jsonl"

    def count() -> int:
        return len(file.read_text().splitlines()) if file.exists() else 0

    entity = {"name": "ann", "entityType": "person", "observations": ["tall"]}
    return Server(
        "memory",
        npm_words("memory"),
        call=tool("open_nodes", names=["nobody"]),
        wrong=tool("add_observations", observations=[{"entityName": "nobody", "contents": ["x"]}]),
        act=tool("create_entities", entities=[entity]),
        count=count,
        env={"MEMORY_FILE_PATH": str(file)},
    )


def everything() -> Server:
    return Server(
        "everything",
        npm_words("everything"),
        call=tool("echo", message="é 0.10"),
        wrong=tool("get-sum", a="no number", b=1),
        slow=tool("trigger-long-running-operation", duration=0.6, steps=3),
    )


def filesystem(folder: Path) -> Server:
    """Each edit adds a line to a file."""
    file = folder / "notes.txt"
    file.write_text("end")
    return Server(
        "filesystem",
        npm_words("filesystem", str(folder)),
        call=tool("list_allowed_directories"),
        wrong=tool("read_text_file", path="/etc/passwd"),
        act=tool("edit_file", path=str(file), edits=[{"oldText": "end", "newText": "a line\nend"}]),
        count=lambda: file.read_text().count("a line"),
    )


def thinking() -> Server:
    thought = {"thought": "x", "nextThoughtNeeded": False, "thoughtNumber": 1, "totalThoughts": 1}
    return Server(
        "thinking",
        npm_words("sequential-thinking"),
        call=tool("sequentialthinking", **thought),
        wrong=tool("sequentialthinking", thought=5),
    )


def git(folder: Path, python: str) -> Server:
    """Each commit takes what is staged; another one would be empty."""
    repository = folder / "repository"
    repository.mkdir()

    def run(*words: str) -> str:
        options = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
        done = subprocess.run(
            ["git", "-C", str(repository), *options, *words],
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout

    run("init", "--quiet")
    run("config", "user.name", "test")
    run("config", "user.email", "test@example.com")
    run("commit", "--quiet", "--allow-empty", "--message", "first")
    path = str(repository)
    return Server(
        "git",
        [python, "-m", "mcp_server_git", "--repository", path],
        call=tool("git_status", repo_path=path),
        wrong=tool("git_show", repo_path=path, revision="nothing"),
        act=tool("git_commit", repo_path=path, message="a commit"),
        count=lambda: int(run("rev-list", "--count", "HEAD")),
        has_newest=True,
    )


def sqlite(folder: Path, python: Path) -> Server:
    """It has no hints, so each of its tools is a command."""
    file = folder / "notes.db"
    with closing(sqlite3.connect(file)) as db:
        db.execute("CREATE TABLE notes (text)")
        db.commit()

    def count() -> int:
        with closing(sqlite3.connect(file)) as db:
            return int(db.execute("SELECT count(*) FROM notes").fetchone()[0])

    return Server(
        "sqlite",
        [str(python.with_name("mcp-server-sqlite")), "--db-path", str(file)],
        call=tool("list_tables"),
        wrong=tool("read_query"),
        act=tool("write_query", query="INSERT INTO notes VALUES ('a note')"),
        count=count,
    )


def all_servers(folder: Path, page: str) -> list[Server]:
    """Return all servers. `page` is an address that one of them reads."""
    folder.mkdir(parents=True, exist_ok=True)
    python = str(environment("mcp_servers", PYTHON))
    zone = tool("get_current_time", timezone="Nowhere")
    return [
        Server("time", time_words(python), call=TIME_CALL, wrong=zone, has_newest=True),
        Server(
            "fetch",
            [python, "-m", "mcp_server_fetch", "--ignore-robots-txt", "--allow-private-ips"],
            call=tool("fetch", url=page),
            wrong=tool("fetch", url=f"{page}/nothing"),
            has_newest=True,
        ),
        git(folder, python),
        sqlite(folder, environment("mcp_older", OLDER)),
        everything(),
        filesystem(folder),
        memory(folder),
        thinking(),
    ]


# --- exactness ------------------------------------------------------------------------------------


def talk(call: Call, revision: str) -> list[bytes]:
    """Messages of a client: most methods, odd members, good calls and bad ones."""
    is_newest = revision == NAMES[-1]

    def line(method: str, params: Any, id: Any) -> bytes:
        if is_newest:
            params = enveloped(params or {})
        return message_of(method, params, id)

    lines = []
    if not is_newest:
        lines.append(message_of("initialize", introduction(revision), 1))
        lines.append(message_of("notifications/initialized"))
    methods = ("ping", "tools/list", "prompts/list", "resources/list", "resources/templates/list")
    for method in methods:
        lines.append(line(method, None, f"{method} bare"))
        lines.append(line(method, {}, f"{method} empty"))
        lines.append(line(method, {"_meta": {"x": 0.5}}, f"{method} meta"))
    lines += [
        line("server/discover", {}, 39),
        line("x/unknown", {"a": 1}, 40),
        line("tools/call", call, 41),
        line("tools/call", {**call, "_meta": {"x": [1.0]}}, "42"),
        line("tools/call", {"name": "no such tool", "arguments": {}}, 43),
        line("tools/call", {"name": call["name"], "arguments": {}}, 44),
        line("tools/call", {}, 45),
        line("prompts/get", {"name": "none"}, 46),
        line("resources/read", {"uri": "x://none"}, 47),
        line("logging/setLevel", {"level": "error"}, 48),
        line("completion/complete", {"ref": {"type": "ref/prompt", "name": "x"}}, 49),
        line("resources/subscribe", {"uri": "x://none"}, 50),
        line("resources/unsubscribe", {"uri": "x://none"}, 51),
        line("tools/list", {"cursor": "none"}, 52),
        line("ping", None, 53),
    ]
    return lines


async def answers(process: Process, lines: list[bytes]) -> dict[Any, Any]:
    """The answers by id. Questions of the server are refused, other messages are left out."""
    found: dict[Any, Any] = {}
    for line in lines:
        await process.send(line)
        id = json.loads(line).get("id")
        while id is not None and id not in found:
            message = json.loads(await process.line())
            if "method" not in message:
                found[message.pop("id")] = message
            elif "id" in message:
                error = {"code": -32601, "message": "no"}
                refusal = {"jsonrpc": "2.0", "id": message["id"], "error": error}
                await process.send(json.dumps(refusal).encode())
    return found


def differences(direct: dict[Any, Any], wrapped: dict[Any, Any]) -> list[str]:
    """Compare the answers of a server with and without `wrap`, member by member."""
    # Ours: a call whose name is missing does not become a record.
    refused = wrapped.pop(45)
    found = []
    if refused["error"]["code"] != -32602 or "error" not in direct.pop(45):
        found.append(f"a call without a name: {refused}")
    found += [
        f"{id}: {answer} became {wrapped.get(id)}"
        for id, answer in direct.items()
        if wrapped.get(id) != answer
    ]
    return found

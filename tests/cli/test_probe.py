"""`wirecall probe`: what servers speak, ours and others, and the rules that some break (V1, V2)."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli import SHOP, invoke, wirecall
from tests.cli.probes import (
    EMPTY,
    SCRIPT,
    UNKNOWN,
    initialized,
    probed,
    problems,
    scripted,
    verdict,
)
from tests.client.peers import served
from wirecall import App
from wirecall.cli.probe import COST, NOISE, ROOM, LineWire
from wirecall.cli.targets import parse

REVISIONS = ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28"]


async def probed_apart(*words: str) -> tuple[int, dict[str, Any]]:
    """Probe from a separate process, while servers of the test run here."""
    run = await asyncio.to_thread(wirecall, "probe", "--json", *words)
    return run.returncode, verdict(run.stdout)


# --- ours -----------------------------------------------------------------------------------------


def check_ours(found: dict[str, Any]) -> None:
    assert found["revisions"] == dict.fromkeys(REVISIONS, True)
    assert found["arrays"] is True
    assert found["jsonrpc"] == {"spoken": True, "arrays": True, "methods": 3}
    assert found["features"] == {
        "tools": 3,
        "prompts": 1,
        "resources": 1,
        "completions": True,
        "logging": True,
    }
    assert found["server"]["name"] == "shop"
    assert found["keys"] is True
    assert found["problems"] == []


@pytest.mark.parametrize("words", [(SHOP,), ("--", sys.executable, SHOP)], ids=["file", "command"])
def test_probe_finds_everything_in_our_own_server(words: tuple[str, ...]) -> None:
    code, found = probed(*words)
    assert code == 0
    check_ours(found)


async def test_probe_finds_everything_in_our_own_server_over_http() -> None:
    async with served(parse(SHOP).app()) as url:
        code, found = await probed_apart(url)
        assert code == 0
        check_ours(found)
        assert found["addresses"] == [f"{url}/mcp", f"{url}/rpc"]
        _, found = await probed_apart(f"{url}/rpc")
        assert found["addresses"] == []
        assert not any(found["revisions"].values())
        assert found["jsonrpc"]["methods"] == 3


def test_probe_prints_a_table_and_advice() -> None:
    result = invoke("probe", SHOP)
    assert result.exit_code == 0
    assert "MCP 2025-03-26  yes, with arrays" in result.stdout
    assert "JSON-RPC        yes, with arrays, 3 methods" in result.stdout
    assert "wirecall batch --as rpc" in result.stderr


def test_probe_of_one_revision_or_one_protocol() -> None:
    code, found = probed(SHOP, "--revision", "2025-03-26")
    assert (code, found["revisions"], found["arrays"]) == (0, {"2025-03-26": True}, True)
    assert found["jsonrpc"]["spoken"] is False
    code, found = probed(SHOP, "--as", "rpc")
    assert (code, found["revisions"], found["jsonrpc"]["spoken"]) == (0, {}, True)


async def test_server_that_wants_credentials_is_exit_3_and_gets_them_by_header() -> None:
    def who(headers: Any) -> str | None:
        return "ada" if headers.get("authorization") == "Bearer s" else None

    async with served(App("private", authenticate=who)) as url:
        code, _ = await probed_apart(url)
        assert code == 3
        code, found = await probed_apart(url, "--header", "Authorization: Bearer s")
        assert code == 0
        assert all(found["revisions"].values())


# --- others ---------------------------------------------------------------------------------------


def test_valid_server_of_one_revision(tmp_path: Path) -> None:
    code, found = scripted(tmp_path, {}, "--as", "mcp")
    assert code == 0
    assert [name for name, spoken in found["revisions"].items() if spoken] == ["2025-11-25"]
    assert found["server"] == {"name": "other", "version": "1"}
    assert (
        "Batches go as single requests, side by side: the server takes no arrays."
        in found["advice"]
    )
    assert any("needs a handshake" in line for line in found["advice"])


def test_tools_without_keys_and_annotations_get_advice(tmp_path: Path) -> None:
    tools = '{"jsonrpc":"2.0","id":ID,"result":{"tools":[{"name":"a","inputSchema":{"type":"object"}}]}}'
    answers = {"initialize": initialized(capabilities={"tools": {}}), "tools/list": tools}
    code, found = scripted(tmp_path, answers)
    assert (code, found["features"], found["unannotated"]) == (0, {"tools": 1}, 1)
    assert any("does not honour idempotency keys" in line for line in found["advice"])


@pytest.mark.parametrize(
    ("answers", "what"),
    [
        (
            {"ping": EMPTY.replace('"jsonrpc":"2.0",', "")},
            "the answer to ping has no 'jsonrpc': '2.0'",
        ),
        (
            {"ping": EMPTY.replace("ID", '"x"')},
            "ping is answered under the id 'x', which is not the request's",
        ),
        (
            {"ping": EMPTY[:-1] + ',"error":{"code":1,"message":""}}'},
            "the answer to ping has not one of result and error",
        ),
        ({"ping": UNKNOWN}, "ping is not answered with an empty result"),
        ({"else": EMPTY}, "a method that does not exist is not answered with an error"),
        ({"else": UNKNOWN.replace("-32601", '"x"')}, "has no number 'code' and text 'message'"),
        (
            {"initialize": initialized(serverInfo=None)},
            "the result of initialize has no 'serverInfo'",
        ),
        (
            {"initialize": initialized(capabilities={"tools": {}})},
            "it declares tools, and tools/list gives no list",
        ),
    ],
)
def test_broken_rule_is_reported_with_exit_code_9(
    tmp_path: Path, answers: dict[str, str], what: str
) -> None:
    code, found = scripted(tmp_path, answers)
    assert code == 9
    assert any(what in problem for problem in problems(found)), problems(found)
    assert found["problems"][0]["where"] == ["2025-11-25"]


def test_server_that_exits_on_an_unknown_request_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "server.py"
    table = {"initialize": initialized(), "ping": EMPTY, "else": UNKNOWN}
    code = SCRIPT.format(answers=repr(table), noise="''").replace(
        "    answer =", "    assert method[:7] != 'server/'\n    answer ="
    )
    path.write_text(code)
    exit, found = probed("--as", "mcp", "--", sys.executable, str(path))
    assert exit == 9
    assert [name for name, spoken in found["revisions"].items() if spoken] == ["2025-11-25"]
    assert found["problems"][0]["where"] == ["2026-07-28"]
    assert "it breaks off: the server process ended with 1" in found["problems"][0]["what"]


def test_tool_without_a_schema_is_reported(tmp_path: Path) -> None:
    tools = '{"jsonrpc":"2.0","id":ID,"result":{"tools":[{"name":"a"}]}}'
    code, found = scripted(
        tmp_path, {"initialize": initialized(capabilities={"tools": {}}), "tools/list": tools}
    )
    assert (code, problems(found)) == (9, ["the tool 'a' has no inputSchema of type object"])


def test_text_on_stdout_is_reported_with_its_first_words(tmp_path: Path) -> None:
    code, found = scripted(tmp_path, {}, noise="Loading model...\n")
    assert (code, problems(found)) == (
        9,
        ["it prints text that is not JSON-RPC to stdout: 'Loading model...'"],
    )


def test_plain_json_rpc_without_arrays(tmp_path: Path) -> None:
    code, found = scripted(tmp_path, {"initialize": UNKNOWN, "ping": UNKNOWN}, "--as", "rpc")
    assert (code, found["jsonrpc"]["spoken"], found["jsonrpc"]["arrays"]) == (9, True, False)
    assert "section 6" in problems(found)[0]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--", sys.executable, "-c", "raise SystemExit('no licence')"), "no licence"),
        (("--", "/no/such/program"), "cannot be started"),
        (("http://127.0.0.1:1",), "127.0.0.1:1: Connection refused"),
        (("--timeout", "500ms", "--as", "rpc", "--", "sleep", "60"), "nothing came within 0.5 s"),
    ],
    ids=["ends", "does not start", "not there", "silent"],
)
def test_server_that_is_not_there_is_exit_4(words: tuple[str, ...], why: str) -> None:
    code, error = probed(*words)
    assert code == 4
    assert why in error["why"]
    assert ("did not start" in error["message"]) == ("cannot be started" in why)


# Counts how often it is started, prints where it listens, and never answers.
MUTE = """
import sys, time
print("Listening on port 80", file=sys.stderr, flush=True)
open(sys.argv[1], "a").write("started\\n")
for line in sys.stdin:
    open(sys.argv[1], "a").write(line)
"""


def test_server_that_never_answers_is_tried_twice(tmp_path: Path) -> None:
    code, error = probed("--timeout", "1s", "--", sys.executable, "-c", MUTE, str(tmp_path / "log"))
    started, *questions = (tmp_path / "log").read_text().splitlines()
    assert started == "started"  # once
    assert [json.loads(question)["method"] for question in questions] == [
        "initialize",
        "wirecall.probe/unknown",
    ]
    assert (code, error["message"]) == (4, "The server does not answer.")
    assert error["why"] == "nothing came within 1 s; its last words: Listening on port 80"
    assert "serves on stdio" in error["next"]


def test_server_that_ignores_only_the_first_request_is_found(tmp_path: Path) -> None:
    answers = {"initialize": "", "server/discover": "", "array": f"[{UNKNOWN},{UNKNOWN}]"}
    code, found = scripted(tmp_path, answers, "--timeout", "1500ms", "--revision", "2025-11-25")
    assert (code, problems(found)) == (9, ["it speaks neither MCP nor JSON-RPC"])


async def test_address_that_never_answers_is_asked_at_both_endpoints() -> None:
    asked: list[bytes] = []

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readline()).split()[1])
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        code, error = await probed_apart(url, "--timeout", "1s")
    assert (code, error["message"]) == (4, "The server does not answer.")
    assert set(asked) == {b"/mcp", b"/rpc"}
    assert len(asked) <= 4
    assert ".../mcp or .../rpc" in error["next"]


@pytest.mark.parametrize("line", ["y", '{"jsonrpc": "2.0", "method": "notifications/message"}'])
async def test_endless_output_of_a_server_is_kept_only_in_part(line: str) -> None:
    class Flood:
        async def open(self, on_line: Any, on_end: Any) -> None:
            self.on_line = on_line
            self.flood()

        def flood(self) -> None:
            for _ in range(200_000):
                self.on_line(line.encode())

        async def write(self, _line: bytes) -> None:
            self.flood()

    pipe: Any = Flood()
    wire = LineWire(pipe)
    await wire.open()
    reply = await wire.send({"jsonrpc": "2.0", "id": 1, "method": "x"}, {}, 0.05)
    assert reply.is_silent
    # What came before the message, and what came for it.
    assert len(reply.documents) <= 2 * ROOM // COST
    assert len(reply.noise) <= NOISE


def test_echo_is_not_a_server() -> None:
    code, error = probed("--", "cat")
    assert (code, error["message"]) == (10, "The server sends every message back.")
    assert error["why"] == "the answer to initialize is the request itself"


async def test_target_that_speaks_neither_protocol_is_reported() -> None:
    async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(
            b"HTTP/1.1 405 Nope\r\ncontent-type: text/html\r\ncontent-length: 6\r\n"
            b"connection: close\r\n\r\n<html>"
        )
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(page, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        code, found = await probed_apart(url)
    assert code == 9
    assert (
        problems(found)[0] == "it speaks neither MCP nor JSON-RPC; a POST is answered with HTTP 405"
    )


def test_mistyped_revision_is_suggested() -> None:
    code, error = probed(SHOP, "--revision", "2025-06-81")
    assert (code, error["why"]) == (2, "did you mean 2025-06-18?")

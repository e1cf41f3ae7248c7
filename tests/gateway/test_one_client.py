"""A gateway with one client, on stdin and stdout: its conversations are the client's own."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tests.client.conftest import nothing_is_left as nothing_is_left
from tests.client.peers import until
from tests.gateway.fronts import Process, counter, effects, introduction, message_of, started
from tests.gateway.process import settings

ASKING = """\
import sys
from pathlib import Path

from wirecall import App, Context

app = App("asking", ledger="memory:")


@app.query
async def where(ctx: Context) -> list[str]:
    return [str(root.uri) for root in await ctx.roots()]


@app.command
async def buy(ctx: Context) -> str:
    answer = await ctx.elicit("sure?", bool)
    return answer.action


app.run("stdio")
"""
# Asks for the roots right after its handshake, and writes down the answer.
EAGER = """\
import json, sys

def write(**members):
    print(json.dumps({"jsonrpc": "2.0", **members}), flush=True)

for line in sys.stdin:
    message = json.loads(line)
    if message.get("method") == "initialize":
        info = {"name": "eager", "version": "1"}
        version = message["params"]["protocolVersion"]
        write(
            id=message["id"],
            result={"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info},
        )
    elif message.get("method") == "notifications/initialized":
        write(id="early", method="roots/list")
    elif message.get("id") == "early":
        text = json.dumps(message.get("result", message.get("error")), separators=(",", ":"))
        with open(sys.argv[1], "a") as file:
            file.write(text + "\\n")
    elif "id" in message:
        write(id=message["id"], result={"tools": []})
"""
RUN = [sys.executable, "-m", "wirecall", "gateway", "run", "--stdio"]
DECLARED = {"roots": {"listChanged": True}, "elicitation": {}}


def configured(folder: Path, **upstreams: list[str]) -> Path:
    options = {name: {"command": command} for name, command in upstreams.items()}
    (folder / "wirecall.toml").write_text(settings(options, ledger="sqlite:gateway.db"))
    return folder


def asking(folder: Path) -> list[str]:
    file = folder / "asking.py"
    file.write_text(ASKING)
    return [sys.executable, str(file)]


async def greet(process: Process, capabilities: dict[str, Any]) -> None:
    await process.ask("initialize", {**introduction(), "capabilities": capabilities})
    await process.send(message_of("notifications/initialized"))


async def answered(process: Process, result: Any) -> Any:
    """Answer the next question of a server; return the question."""
    while True:
        message = json.loads(await process.line())
        if "method" in message and "id" in message:
            reply = {"jsonrpc": "2.0", "id": message["id"], "result": result}
            await process.send(json.dumps(reply).encode())
            return message


async def answer_to(process: Process, id: int) -> Any:
    while True:
        message = json.loads(await process.line())
        if message.get("id") == id and "method" not in message:
            return message


async def test_gateway_on_stdio_declares_what_its_client_declares(tmp_path: Path) -> None:
    """G12, old / old: each server is greeted once, with the name and capabilities of the client."""
    folder = configured(tmp_path, bank=counter(tmp_path / "bank"), shop=counter(tmp_path / "shop"))
    async with started(*RUN, cwd=folder) as process:
        await greet(process, DECLARED)
        await process.ask("tools/list")
    for name in ("bank", "shop"):
        [greeting] = [
            line.removeprefix("initialize ")
            for line in (tmp_path / name).read_text().splitlines()
            if line.startswith("initialize ")
        ]
        assert json.loads(greeting)["capabilities"] == DECLARED
        assert json.loads(greeting)["clientInfo"]["name"] == "test"


async def test_gateway_on_stdio_passes_questions_of_its_servers_on(tmp_path: Path) -> None:
    """G12, old / old: roots and elicitation reach the client inside its calls."""
    async with started(*RUN, cwd=configured(tmp_path, asking=asking(tmp_path))) as process:
        await greet(process, DECLARED)
        await process.send(message_of("tools/call", {"name": "where", "arguments": {}}, 7))
        question = await answered(process, {"roots": [{"uri": "file:///here"}]})
        assert question["method"] == "roots/list"
        found = await answer_to(process, 7)
        assert found["result"]["structuredContent"] == {"result": ["file:///here"]}
        await process.send(message_of("tools/call", {"name": "buy", "arguments": {}}, 8))
        question = await answered(process, {"action": "decline"})
        assert question["method"] == "elicitation/create"
        assert question["params"]["message"] == "sure?"
        assert (await answer_to(process, 8))["result"]["content"][0]["text"] == "decline"


async def test_gateway_on_stdio_passes_a_question_outside_of_calls_on(tmp_path: Path) -> None:
    """G12, old / old: a server that asks as soon as it is greeted waits for the client's greeting."""
    script = (tmp_path / "eager.py").as_posix()
    Path(script).write_text(EAGER)
    folder = configured(tmp_path, eager=[sys.executable, script, str(tmp_path / "answers")])
    async with started(*RUN, cwd=folder) as process:
        await greet(process, DECLARED)
        question = await answered(process, {"roots": [7]})
        assert question["method"] == "roots/list"
        await until(lambda: effects(tmp_path / "answers", '{"roots":[7]}') == 1)


async def test_gateway_on_stdio_passes_a_change_of_roots_on(tmp_path: Path) -> None:
    """G12: to every server that the client owns."""
    folder = configured(tmp_path, bank=counter(tmp_path / "bank"), shop=counter(tmp_path / "shop"))
    async with started(*RUN, cwd=folder) as process:
        await greet(process, DECLARED)
        await process.ask("tools/list")
        await process.send(message_of("notifications/roots/list_changed"))
        for name in ("bank", "shop"):
            notified = partial(effects, tmp_path / name, "notifications/roots/list_changed")
            await until(notified)

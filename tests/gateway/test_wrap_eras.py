"""`wirecall wrap` between a client and a server of two eras: section by section as behind `/mcp/NAME`."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import nothing_is_left as nothing_is_left
from tests.client.peers import until
from tests.gateway.fronts import (
    counter,
    effects,
    enveloped,
    introduction,
    started,
    wrap_words,
    wrapped,
)
from wirecall.mcp.revisions import NAMES

OLD = NAMES[:4]
NEWEST = NAMES[-1]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "effects"


def newest(file: Path) -> list[str]:
    """The command line of the server that speaks 2026-07-28 alone."""
    return [*counter(file), "newest"]


def name_of(answer: Any) -> Any:
    return answer["result"]["serverInfo"]["name"]


# --- an old client in front of a new server -------------------------------------------------------


@pytest.mark.parametrize("revision", OLD)
async def test_wrap_serves_an_old_client_in_front_of_a_new_server(
    file: Path, revision: str
) -> None:
    """G12: greeting, list, call, ping and log level; the server gets the envelope of the client."""
    async with wrapped(file, revision=None, command=newest(file)) as client:
        greeted = await client.greet(revision)
        assert name_of(greeted) == "counter"
        assert greeted["result"]["protocolVersion"] == revision
        listed = await client.ask("tools/list")
        assert [tool["name"] for tool in listed["result"]["tools"]] == ["pay", "look", "ask"]
        paid = await client.pay(to="ann")
        assert paid["result"]["content"] and "resultType" not in paid["result"]
        assert paid["result"]["x"] == 0.1
        assert (await client.ask("ping"))["result"] == {}
        assert "result" in await client.ask("x/echo")
    assert effects(file) == 1


async def test_wrap_gives_an_old_client_its_lost_answer_again(file: Path) -> None:
    """G12, G5: one effect."""
    async with wrapped(file, revision=None, command=newest(file)) as client:
        await client.greet()
        await client.pay(to="ann", lose=True)
        await until(lambda: effects(file) == 1)
        again = await client.pay(to="ann")
    assert again["result"]["_meta"]["io.wirecall/replayed"] is True
    assert effects(file) == 1


async def test_wrap_asks_an_old_client_what_a_new_server_wants_to_know(file: Path) -> None:
    """G12: `input_required` becomes a request; the next round has the answer and the state."""
    async with wrapped(file, revision=None, command=newest(file)) as client:
        words = {**introduction(), "capabilities": {"elicitation": {}}}
        await client.ask("initialize", words)
        await client.tell("notifications/initialized")
        asking = asyncio.create_task(client.ask("tools/call", {"name": "ask"}))
        question = await client.hears("elicitation/create")
        assert question["params"]["message"] == "sure?"
        result = {"action": "accept", "content": {"yes": True}}
        reply = {"jsonrpc": "2.0", "id": question["id"], "result": result}
        assert await client.line(json.dumps(reply).encode()) is None
        assert (await asking)["result"]["content"]
    rounds = [line for line in file.read_text().splitlines() if line.startswith("round")]
    assert rounds[1] == f"round their state {json.dumps({'elicitation/create': result})}"
    assert effects(file) == 1


async def test_wrap_keeps_the_tools_of_an_old_client_whose_new_server_dies(file: Path) -> None:
    """G12, G2: the outcome is unknown once, and the next call is served."""
    async with wrapped(file, revision=None, command=newest(file)) as client:
        await client.greet()
        died = await client.pay(to="ann", then="die")
        assert died["error"]["code"] == 50910
        assert (await client.ask("tools/call", {"name": "look"}))["result"]["pid"]


async def test_wrap_passes_the_progress_of_a_new_server_on_to_an_old_client(file: Path) -> None:
    """G12: under the client's own token."""
    async with wrapped(file, revision=None, command=newest(file)) as client:
        await client.greet()
        params = {"name": "pay", "arguments": {"to": "ann"}, "_meta": {"progressToken": "mine"}}
        await client.ask("tools/call", params)
        report = await client.hears("notifications/progress")
    assert report["params"]["progressToken"] == "mine"


# --- a new client in front of an old server -------------------------------------------------------


async def test_wrap_serves_a_new_client_in_front_of_an_old_server(file: Path) -> None:
    """G12: the server is greeted with a handshake in which nothing is declared."""
    async with wrapped(file, revision=None) as client:
        found = await client.ask("server/discover", enveloped({}))
        assert NEWEST in found["result"]["supportedVersions"]
        listed = await client.ask("tools/list", enveloped({}))
        assert listed["result"]["resultType"] == "complete"
        call = enveloped({"name": "pay", "arguments": {"to": "ann"}})
        await client.ask("tools/call", call, lose=True)
        await until(lambda: effects(file) == 1)
        again = await client.ask("tools/call", call)
        assert again["result"]["_meta"]["io.wirecall/replayed"] is True
        assert again["result"]["resultType"] == "complete"
    greetings = [line for line in file.read_text().splitlines() if line.startswith("initialize")]
    assert all('"capabilities": {}' in line for line in greetings[-1:])
    assert effects(file) == 1


async def test_wrap_serves_a_new_client_that_does_not_ask_what_the_server_is(file: Path) -> None:
    """G12: the first request is a call."""
    async with wrapped(file, revision=None) as client:
        paid = await client.ask("tools/call", enveloped({"name": "pay", "arguments": {}}))
        assert paid["result"]["resultType"] == "complete"
    assert effects(file) == 1


# --- no translation without need ------------------------------------------------------------------


async def test_wrap_does_not_translate_for_a_client_of_the_era_of_its_server(file: Path) -> None:
    """G12, X20: the envelope of the client arrives as it is, also its name."""
    async with wrapped(file, revision=None, command=newest(file)) as client:
        await client.ask("server/discover", enveloped({}))
        params = enveloped({"name": "ask", "arguments": {}})
        params["_meta"]["io.modelcontextprotocol/clientCapabilities"] = {"elicitation": {"x": 1}}
        asked = await client.ask("tools/call", params)
    assert asked["result"]["requestState"] == "their state", (
        "sealed by nothing: there is one client"
    )
    assert 'declared {"elicitation": {"x": 1}}' in file.read_text()


async def test_wrap_of_a_server_that_speaks_nothing_passes_its_refusal_on(tmp_path: Path) -> None:
    """G12: neither the handshake nor `server/discover`: the client gets the server's own words."""
    script = tmp_path / "refuses.py"
    script.write_text(
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    id = json.loads(line).get('id')\n"
        "    error = {'code': -32601, 'message': 'never'}\n"
        "    if id is not None:\n"
        "        print(json.dumps({'jsonrpc': '2.0', 'id': id, 'error': error}), flush=True)\n"
    )
    command = [counter(tmp_path)[0], str(script)]
    async with wrapped(tmp_path / "effects", revision=None, command=command) as client:
        answer = await client.ask("initialize", introduction())
    assert answer["error"] == {"code": -32601, "message": "never"}


# --- as a process ---------------------------------------------------------------------------------


@pytest.mark.parametrize("revision", [OLD[-1], NEWEST])
async def test_wrap_between_eras_leaves_no_process(file: Path, revision: str) -> None:
    """G12, G9: the program itself, until the end of its stdin."""
    file.touch()
    command = counter(file) if revision == NEWEST else newest(file)
    words = wrap_words("--ledger", f"sqlite:{file}.db", "--", *command)
    async with started(*words) as process:
        params: dict[str, Any] = {"name": "look", "arguments": {}}
        if revision == NEWEST:
            found = await process.ask("tools/call", enveloped(params))
        else:
            await process.greet(revision)
            found = await process.ask("tools/call", params)
        pid = found["result"]["pid"]
        process.close()
        assert await process.ended() == 0
    await until(lambda: not Path(f"/proc/{pid}").exists())

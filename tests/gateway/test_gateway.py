"""The gateway: several servers at one address, exact and merged, and each may fail alone."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec import Raw

from tests.client.conftest import nothing_is_left as nothing_is_left
from tests.client.peers import served, until
from tests.gateway.bench import BOTH, Bench, newest
from tests.gateway.fronts import (
    counter,
    effects,
    enveloped,
    introduction,
    message_of,
    started,
)
from tests.ports import free_port
from wirecall import App, Context
from wirecall.errors import InvalidParams, UpstreamUnavailable
from wirecall.gateway import UpstreamSettings, fronts
from wirecall.gateway import gateway as gateways
from wirecall.gateway.offers import Place, merged, shortened
from wirecall.mcp.revisions import NAMES
from wirecall.server.identity import Identity


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with Bench(tmp_path).serving() as bench:
        yield bench


# --- one upstream ---------------------------------------------------------------------------------


@pytest.mark.parametrize("revision", NAMES)
async def test_gateway_serves_one_upstream_at_every_revision(bench: Bench, revision: str) -> None:
    """G10: `/mcp/NAME` is the upstream: its name, its tools, its results; the newest is translated."""
    async with bench.client("/mcp/bank", revision=revision) as client:
        assert client.revision == revision
        assert client.server["name"] == "counter" and client.server["version"] == "7"
        assert [tool.name for tool in await client.list_tools()] == ["pay", "look"]
        paid = await client.call_tool("pay", {"to": "ann"})
        assert paid.content[0].text.startswith("paid")
        with pytest.raises(InvalidParams, match="their refusal"):
            await client.call_tool("pay", {"then": "refuse"})
    assert effects(bench.file("bank")) == 1


async def test_gateway_passes_unknown_members_on(bench: Bench) -> None:
    """G1: definitions keep members that the gateway does not know."""
    answer, session = await bench.post("/mcp/bank", message_of("initialize", introduction(), 1))
    assert answer["result"]["capabilities"]["x-own"] == {"a": 0.1}
    assert answer["result"]["instructions"] == "count"
    listed, _ = await bench.post("/mcp/bank", message_of("tools/list", None, 2), session)
    assert listed["result"]["tools"][0]["x-unknown"] == {"kept": 100.0}
    echo, _ = await bench.post("/mcp/bank", message_of("x/echo", {}, 3), session)
    assert echo["result"] == {"n": 1.5, "e": 100.0}


async def test_gateway_records_a_tool_under_one_name_at_both_addresses(bench: Bench) -> None:
    """G5, X17: a key that was used at `/mcp/bank` is the same command at `/mcp`."""
    async with bench.client("/mcp/bank") as client:
        await client.call_tool("pay", {"to": "ann"}, key="k")
    async with bench.client("/mcp") as client:
        again = await client.call_tool("bank__pay", {"to": "ann"}, key="k")
    assert again.meta["io.wirecall/replayed"] is True
    assert effects(bench.file("bank")) == 1


async def test_gateway_gives_an_answer_again_at_the_other_address(bench: Bench) -> None:
    """G5, X17: lost at `/mcp/bank`, sent again at `/mcp`: one effect."""
    file = bench.file("bank")
    arguments = {"to": "ann", "then": "wait"}
    _, session = await bench.post("/mcp/bank", message_of("initialize", introduction(), 1))
    assert session is not None
    call = message_of("tools/call", {"name": "pay", "arguments": arguments}, 2)
    await abandoned(bench, call, {"Mcp-Session-Id": session}, file)
    file.with_suffix(".go").touch()
    _, session = await bench.post("/mcp", message_of("initialize", introduction(), 1))
    call = message_of("tools/call", {"name": "bank__pay", "arguments": arguments}, 2)
    again, _ = await bench.post("/mcp", call, session)
    assert again["result"]["_meta"]["io.wirecall/replayed"] is True
    assert effects(file) == 1


async def test_gateway_does_not_replay_a_name_that_points_elsewhere(tmp_path: Path) -> None:
    """X17: the same key and name, and another server: two effects."""
    ledger = f"sqlite:{tmp_path / 'ledger.db'}"
    for place in ("one", "two"):
        folder = tmp_path / place
        folder.mkdir()
        bench = Bench(folder, names=("bank",), ledger=ledger)
        async with bench.serving(), bench.client("/mcp/bank") as client:
            paid = await client.call_tool("pay", {"to": "ann"}, key="k")
        assert "io.wirecall/replayed" not in (paid.meta or {})
        assert effects(folder / "bank") == 1


@pytest.mark.parametrize("pair", [(NAMES[-1], NAMES[0]), (NAMES[0], NAMES[-1])])
async def test_gateway_replays_in_the_words_of_another_revision(
    bench: Bench, pair: tuple[str, str]
) -> None:
    """X19: the record has the fullest form."""
    texts = []
    for revision in pair:
        async with bench.client("/mcp/bank", revision=revision) as client:
            paid = await client.call_tool("pay", {"to": "ann"}, key="k")
            texts.append(paid.content[0].text)
    assert texts[0] == texts[1] and effects(bench.file("bank")) == 1


async def test_gateway_shares_one_process_among_the_sessions_of_one_user(bench: Bench) -> None:
    """G10: two clients, one child; `share = "all"` is the default of one user."""
    pids = set()
    for _ in range(3):
        async with bench.client("/mcp/bank") as client:
            looked = await client.call_tool("look")
            assert not looked.is_error
        pids |= {*(await bench.gateway.status())["upstreams"]["bank"]["pids"]}
    assert len(pids) == 1


async def test_gateway_survives_the_death_of_an_upstream(bench: Bench) -> None:
    """G2: a child that was killed is started by the next call of a client that stays connected."""
    async with bench.client("/mcp/bank") as client:
        await client.call_tool("look")
        [pid] = (await bench.gateway.status())["upstreams"]["bank"]["pids"]
        os.kill(pid, signal.SIGKILL)
        link: Any = bench.gateway._conversations["bank", ""].result().link
        await until(lambda: not link.is_open)
        assert not (await client.call_tool("pay", {"to": "ann"})).is_error
        assert effects(bench.file("bank")) == 1


async def test_gateway_session_outlives_the_gateway(tmp_path: Path) -> None:
    """X21: the secret is kept beside the ledger, and only the user can read it."""
    async with Bench(tmp_path).serving() as bench:
        _, session = await bench.post("/mcp/bank", message_of("initialize", introduction(), 1))
    async with Bench(tmp_path).serving() as bench:
        answer, _ = await bench.post(
            "/mcp/bank", message_of("tools/call", {"name": "look"}, 2), session
        )
        assert "result" in answer
    secret = tmp_path / "ledger.db.secret"
    assert secret.stat().st_mode & 0o077 == 0


def test_gateways_that_start_at_the_same_time_have_one_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X21: the one that is later takes the secret of the other, and leaves no other file."""
    ledger = f"sqlite:{tmp_path / 'ledger.db'}"
    secrets: list[str | None] = []

    def drawn(count: int) -> bytes:
        """Start another gateway while the first makes its secret."""
        monkeypatch.undo()
        secrets.append(gateways._secret_beside(ledger))
        return bytes(count)

    monkeypatch.setattr(os, "urandom", drawn)
    secrets.append(gateways._secret_beside(ledger))
    assert secrets[0] == secrets[1] != bytes(32).hex()
    assert secrets[0] == gateways._secret_beside(ledger)
    assert [each.name for each in tmp_path.iterdir()] == ["ledger.db.secret"]


async def test_gateway_shares_the_secret_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X21: two gateways with two ledgers serve each other's sessions."""
    monkeypatch.setenv("WIRECALL_SECRET", "a secret of two gateways, long enough for both")
    hello = message_of("initialize", introduction(), 1)
    look = message_of("tools/call", {"name": "look"}, 2)
    for ledger in ("one.db", "two.db"):
        async with Bench(tmp_path, ledger=f"sqlite:{tmp_path / ledger}").serving() as bench:
            if ledger == "one.db":
                _, session = await bench.post("/mcp/bank", hello)
            answer, _ = await bench.post("/mcp/bank", look, session)
            assert "result" in answer
    assert not [*tmp_path.glob("*.secret")]


# --- one effect -----------------------------------------------------------------------------------


async def abandoned(bench: Bench, message: bytes, headers: dict[str, str], file: Path) -> None:
    """Send a call and leave when the server has acted, before the answer."""
    async with aiohttp.ClientSession() as http:
        sending = asyncio.create_task(
            http.post(f"{bench.url}/mcp/bank", data=message, headers={**BOTH, **headers})
        )
        await until(lambda: effects(file) == 1)
        sending.cancel()
        await asyncio.wait([sending])


@pytest.mark.parametrize("revision", [NAMES[3], NAMES[-1]])
async def test_gateway_gives_a_recorded_answer_without_its_server(
    tmp_path: Path, revision: str
) -> None:
    """G5: after a restart of the gateway, in front of a server that no longer starts."""
    script = tmp_path / "launch.py"
    script.write_text("import os, sys; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])")
    command = [sys.executable, str(script), *counter(tmp_path / "bank")[1:]]
    headers = {**BOTH, "Mcp-Protocol-Version": revision}
    wording: Any = dict
    if revision == NAMES[-1]:
        wording = enveloped
        headers |= {"Mcp-Method": "tools/call", "Mcp-Name": "pay"}

    async def pay(bench: Bench, to: str) -> Any:
        params = {"name": "pay", "arguments": {"to": to}}
        params["_meta"] = {"io.wirecall/idempotency-key": to}
        call = message_of("tools/call", wording(params), 2)
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(f"{bench.url}/mcp/bank", data=call) as answer,
        ):
            return await answer.json()

    more = [UpstreamSettings("bank", command=command)]
    async with Bench(tmp_path, names=(), more=more).serving() as bench:
        if revision != NAMES[-1]:
            greeting = message_of("initialize", introduction(), 1)
            _, session = await bench.post("/mcp/bank", greeting)
            assert session is not None
            headers["Mcp-Session-Id"] = session
        first = await pay(bench, "ann")
    script.write_text("import sys; sys.exit('no licence')")
    async with Bench(tmp_path, names=(), more=more).serving() as bench:
        again = await pay(bench, "ann")
        assert again["result"]["content"] == first["result"]["content"]
        assert again["result"].get("resultType") == first["result"].get("resultType")
        assert again["result"]["_meta"]["io.wirecall/replayed"] is True
        error = (await pay(bench, "bob"))["error"]
        assert (error["code"], error["data"]["ran"]) == (50210, "no")
        assert "no licence" in error["message"] and error["message"].count("bank: ") == 1
    assert effects(tmp_path / "bank") == 1


@pytest.mark.parametrize("revision", [NAMES[3], NAMES[-1]])
async def test_gateway_gives_an_answer_again_that_was_lost(bench: Bench, revision: str) -> None:
    """G5: the client leaves before the answer, in both eras; its repetition gets it, and runs not."""
    file = bench.file("bank")
    params = {"name": "pay", "arguments": {"to": "ann", "then": "wait"}}
    headers: dict[str, str] = {}
    if revision == NAMES[-1]:
        params = enveloped(params)
        headers = {
            "Mcp-Protocol-Version": revision,
            "Mcp-Method": "tools/call",
            "Mcp-Name": "pay",
        }
    else:
        _, session = await bench.post("/mcp/bank", message_of("initialize", introduction(), 1))
        assert session is not None
        headers = {"Mcp-Session-Id": session, "Mcp-Protocol-Version": revision}
    await abandoned(bench, message_of("tools/call", params, 2), headers, file)
    file.with_suffix(".go").touch()
    async with (
        aiohttp.ClientSession(headers={**BOTH, **headers}) as http,
        http.post(f"{bench.url}/mcp/bank", data=message_of("tools/call", params, 3)) as answer,
    ):
        again = await answer.json()
    assert again["result"]["_meta"]["io.wirecall/replayed"] is True
    assert effects(file) == 1


async def test_gateway_passes_a_cancellation_of_a_person_on(bench: Bench) -> None:
    """G7: over HTTP too; the call that is cancelled gets no answer, and is recorded."""
    file = bench.file("bank")
    _, session = await bench.post("/mcp/bank", message_of("initialize", introduction(), 1))
    params = {"name": "pay", "arguments": {"then": "wait"}}
    paying = asyncio.create_task(
        bench.post("/mcp/bank", message_of("tools/call", params, "c"), session)
    )
    await until(lambda: effects(file) == 1)
    cancel = {"requestId": "c", "reason": "the user has changed their mind"}
    await bench.post("/mcp/bank", message_of("notifications/cancelled", cancel), session)
    await until(lambda: effects(file, "notifications/cancelled") == 1)
    file.with_suffix(".go").touch()
    answer, _ = await paying
    assert answer is None


# --- callers --------------------------------------------------------------------------------------


async def test_gateway_keeps_authenticated_callers_apart(tmp_path: Path) -> None:
    """X13, X15: two callers have two conversations, and neither gets the other's answer."""

    async def verify(token: str) -> Identity | None:
        return Identity(token) if token in ("ann", "bob") else None

    bench = Bench(tmp_path, names=("bank",), auth=verify)
    async with bench.serving():
        texts = []
        for caller in ("ann", "bob"):
            async with bench.client("/mcp/bank", auth=caller) as client:
                paid = await client.call_tool("pay", {"to": "x"}, key="k")
                texts.append(paid.content[0].text)
        found = await bench.gateway.status()
    assert effects(bench.file("bank")) == 2 and texts[0] != texts[1]
    assert found["upstreams"]["bank"]["sessions"] >= 2 and found["single_user"] is False


async def test_gateway_does_not_pass_the_token_of_a_client_on(tmp_path: Path) -> None:
    """Section 8: a token ends at the gateway; an upstream, the ledger and `/status` do not see it."""
    canary = "canary-7f3a"

    async def verify(token: str) -> Identity | None:
        return Identity("ann") if token == canary else None

    seen: list[str] = []

    async def middleware(ctx: Context, call_next: Any) -> Any:
        seen.extend(f"{name}: {value}" for name, value in ctx.headers.items())
        return await call_next(ctx)

    behind = App("behind", ledger="memory:", middleware=[middleware])

    @behind.command(key="off")
    def pay() -> str:
        return "paid"

    async with served(behind) as url:
        more = [UpstreamSettings("behind", url=f"{url}/mcp")]
        bench = Bench(tmp_path, names=(), more=more, auth=verify)
        async with bench.serving(), bench.client("/mcp/behind", auth=canary) as client:
            assert not (await client.call_tool("pay")).is_error
            assert canary not in json.dumps(await bench.gateway.status())
    assert seen and not any(canary in each for each in seen)
    assert canary.encode() not in (tmp_path / "ledger.db").read_bytes()


@pytest.mark.parametrize("path", ["/mcp/bank", "/mcp"])
async def test_gateway_runs_the_commands_of_an_array_in_order(bench: Bench, path: str) -> None:
    """G8: at both addresses; answers in input order, and a key counts once."""
    _, session = await bench.post(path, message_of("initialize", introduction("2025-03-26"), 1))
    tool = "pay" if path == "/mcp/bank" else "bank__pay"
    key = {"io.wirecall/idempotency-key": "k"}
    entries = [
        message_of("tools/call", {"name": tool, "arguments": {"to": str(to)}}, to)
        for to in range(10)
    ]
    keyed = {"name": tool, "arguments": {"to": "key"}, "_meta": key}
    entries += [message_of("tools/call", keyed, id) for id in ("a", "b")]
    answers, _ = await bench.post(path, b"[" + b",".join(entries) + b"]", session)
    assert [answer["id"] for answer in answers] == [*range(10), "a", "b"]
    assert answers[-1]["result"]["_meta"]["io.wirecall/replayed"] is True
    lines = bench.file("bank").read_text().splitlines()
    paid = [line for line in lines if line.startswith("pay")]
    assert paid == [*(f"pay {to}" for to in range(10)), "pay key"]


# --- all of them ----------------------------------------------------------------------------------


async def test_gateway_merges_names_that_two_servers_have(bench: Bench) -> None:
    """G11, bad input: a name that two have is bare for neither; a call of it is refused with both."""
    async with bench.client() as client:
        names = [tool.name for tool in await client.list_tools()]
        assert names == ["bank__pay", "bank__look", "shop__pay", "shop__look"]
        await client.call_tool("shop__pay", {"to": "ann"})
        assert (effects(bench.file("bank")), effects(bench.file("shop"))) == (0, 1)
        with pytest.raises(InvalidParams, match="bank__pay or shop__pay"):
            await client.call_tool("pay", {})
        with pytest.raises(InvalidParams, match="there is no tool 'none'; there are: bank__pay"):
            await client.call_tool("none", {})
        with pytest.raises(InvalidParams, match=r"mean 'bank__pay'\? there are: bank__pay, bank_"):
            await client.call_tool("bank_pay", {})


@pytest.mark.parametrize("then", ["error", "refuse"])
async def test_gateway_names_the_server_of_an_error(bench: Bench, then: str) -> None:
    """Section 6: at `/mcp` the data name the upstream, also in a replay; at `/mcp/NAME` they do not."""
    told = []
    for path, name in [("/mcp", "bank__pay"), ("/mcp", "bank__pay"), ("/mcp/bank", "pay")]:
        _, session = await bench.post(path, message_of("initialize", introduction(), 1))
        meta = {"io.wirecall/idempotency-key": "k"}
        call = {"name": name, "arguments": {"then": then}, "_meta": meta}
        answer, _ = await bench.post(path, message_of("tools/call", call, 2), session)
        told.append(answer["error"])
    texts = {error["message"] for error in told}
    assert texts == {{"error": "their error", "refuse": "their refusal"}[then]}
    for error in told:
        error["data"].pop("replayed", None)
    named = {"their": 0.5, "upstream": "bank"}
    assert [error["data"] for error in told] == [named, named, {"their": 0.5}]


def library(name: str, scheme: str) -> App:
    """A server with a prompt, a template, and completions for both."""
    app = App(name, ledger="memory:")

    @app.prompt
    def greet(who: str) -> str:
        return f"{name} greets {who}"

    @app.completion("greet", "who")
    def people(value: str) -> list[str]:
        return [f"{value} of {name}"]

    @app.resource(f"{scheme}{{page}}")
    def page(page: str) -> str:
        return f"{name} has page {page}"

    @app.completion(f"{scheme}{{page}}", "page")
    def pages(value: str) -> list[str]:
        return [f"{value}1 of {name}"]

    return app


@pytest.mark.parametrize("revision", [NAMES[3], NAMES[-1]])
async def test_gateway_merges_prompts_templates_and_completions(
    tmp_path: Path, revision: str
) -> None:
    """G11, section 6: both prompts have a prefix; the longest beginning of a template decides."""
    async with (
        served(library("all", "book://")) as one,
        served(library("drafts", "book://drafts/")) as two,
    ):
        more = [
            UpstreamSettings("all", url=f"{one}/mcp"),
            UpstreamSettings("drafts", url=f"{two}/mcp"),
        ]
        bench = Bench(tmp_path, names=(), more=more)
        async with bench.serving(), bench.client(revision=revision) as client:
            prompts = [each.name for each in await client.list_prompts()]
            assert prompts == ["all__greet", "drafts__greet"]
            prompted = await client.get_prompt("drafts__greet", {"who": "ann"})
            assert prompted.messages[0].content.text == "drafts greets ann"
            templates = [each.uri_template for each in await client.list_resource_templates()]
            assert templates == ["book://{page}", "book://drafts/{page}"]
            for uri, text in [
                ("book://7", "all has page 7"),
                ("book://drafts/7", "drafts has page 7"),
            ]:
                [found] = await client.read_resource(uri)
                assert found.text == text
            people = await client.complete("all__greet", "who", "a")
            pages = await client.complete("book://drafts/{page}", "page", "2")
            assert (people.values, pages.values) == (["a of all"], ["21 of drafts"])


async def test_gateway_denies_tools(tmp_path: Path) -> None:
    """G11, bad input: a denied tool is not listed, and a call says so; also in an array."""
    own = {"shop": {"deny": ["look"]}}
    async with Bench(tmp_path, own=own).serving() as bench:
        async with bench.client() as client:
            names = [tool.name for tool in await client.list_tools()]
            assert names == ["bank__pay", "look", "shop__pay"]
            await client.call_tool("look")
            with pytest.raises(InvalidParams, match=r"denied here; there are: bank__pay, look, sh"):
                await client.call_tool("shop__look")
        _, session = await bench.post(
            "/mcp/shop", message_of("initialize", introduction("2025-03-26"), 1)
        )
        array = [
            message_of("tools/call", {"name": "look"}, 1),
            message_of("tools/call", {"name": "pay"}, 2),
        ]
        answers, _ = await bench.post("/mcp/shop", b"[" + b",".join(array) + b"]", session)
        assert answers[0]["error"]["code"] == -32602 and "result" in answers[1]
        again, _ = await bench.post("/mcp/shop", b"[" + b",".join(array) + b"]", session)
        assert again[0]["error"]["data"]["reason"].endswith("is denied here; there are: pay")


async def test_gateway_leaves_an_upstream_out_that_is_down(tmp_path: Path) -> None:
    """G11: the others are served; it is named in `_meta`; a call of its tools names it."""
    down = UpstreamSettings("down", command=["/no/such/program"])
    async with Bench(tmp_path, names=("bank",), more=[down]).serving() as bench:
        _, session = await bench.post("/mcp", message_of("initialize", introduction(), 1))
        listed, _ = await bench.post("/mcp", message_of("tools/list", None, 2), session)
        assert [tool["name"] for tool in listed["result"]["tools"]] == ["pay", "look"]
        assert listed["result"]["_meta"]["io.wirecall/missing"] == ["down"]
        async with bench.client() as client:
            with pytest.raises(UpstreamUnavailable, match=r"down: .*/no/such/program cannot be"):
                await client.call_tool("down__x", {})
            assert not (await client.call_tool("look")).is_error
        found = (await bench.gateway.status())["upstreams"]["down"]
        assert found["up"] is False and "cannot be started" in found["reason"]


async def test_gateway_leaves_an_upstream_out_that_is_mute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G11: lists wait for a moment; the others are listed and served."""
    monkeypatch.setattr(fronts, "LIST_TIME", 0.5)
    mute = UpstreamSettings("mute", command=[sys.executable, "-c", "input(); input(); input()"])
    async with Bench(tmp_path, names=("bank",), more=[mute]).serving() as bench:
        await until(lambda: bench.gateway.upstreams["bank"].is_up)
        async with bench.client(revision=NAMES[3]) as client:
            assert [tool.name for tool in await client.list_tools()] == ["pay", "look"]
            assert not (await client.call_tool("pay", {"to": "ann"})).is_error


async def test_gateway_tells_clients_when_an_upstream_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G11: `list_changed` follows, and its tools are listed again."""
    monkeypatch.setattr(gateways, "BACK_AFTER", 0.01)
    go = tmp_path / "go"
    script = "import os, sys\nif not os.path.exists(sys.argv[1]): sys.exit('not yet')\n"
    script += "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
    words = [sys.executable, "-c", script, str(go), *counter(tmp_path / "late")[1:]]
    late = UpstreamSettings("late", command=words)
    changes: list[Any] = []
    async with Bench(tmp_path, names=("bank",), more=[late]).serving() as bench:
        clock = Hurried()
        upstream = bench.gateway.upstreams["late"]
        upstream.clock = upstream.starts._clock = upstream.breaker._clock = clock
        options: dict[str, Any] = {"on_change": changes.append, "revision": NAMES[3]}
        async with bench.client(**options) as client:
            assert [tool.name for tool in await client.list_tools()] == ["pay", "look"]
            go.touch()
            await until(lambda: changes)
            names = [tool.name for tool in await client.list_tools()]
            assert names == ["bank__pay", "bank__look", "late__pay", "late__look"]


class Hurried:
    """A clock on which a minute takes a millisecond."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def time(self) -> float:
        return (time.monotonic() - self._began) * 60_000

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 60_000)


async def test_gateway_goes_by_the_table_that_its_clients_have_seen(tmp_path: Path) -> None:
    """X5: a tool that its server no longer has is refused, and never another one's."""
    own = {"bank": {"deny": ["pay"]}}
    async with Bench(tmp_path, own=own).serving() as bench, bench.client() as client:
        assert "pay" in [tool.name for tool in await client.list_tools()]
        await client.call_tool("pay", {"to": "ann"})
        assert effects(bench.file("shop")) == 1 and effects(bench.file("bank")) == 0
        with pytest.raises(InvalidParams, match="denied"):
            await client.call_tool("bank__pay", {})


async def test_gateway_serves_a_new_client_in_front_of_an_old_server(bench: Bench) -> None:
    """G12, new / old: discover, list and call at 2026-07-28, without questions."""
    headers = {"Mcp-Protocol-Version": NAMES[-1]}
    async with aiohttp.ClientSession(headers={**BOTH, **headers}) as http:

        async def ask(method: str, params: dict[str, Any], name: str | None = None) -> Any:
            own = {"Mcp-Method": method}
            if name is not None:
                own["Mcp-Name"] = name
            message = message_of(method, enveloped(params), 1)
            async with http.post(f"{bench.url}/mcp/bank", data=message, headers=own) as answer:
                return (await answer.json())["result"]

        found = await ask("server/discover", {})
        assert found["_meta"]["io.modelcontextprotocol/serverInfo"]["name"] == "counter"
        assert found["supportedVersions"] == [NAMES[-1]]
        listed = await ask("tools/list", {})
        assert listed["resultType"] == "complete" and len(listed["tools"]) == 2
        assert (listed["ttlMs"], listed["cacheScope"]) == (0, "private")
        paid = await ask("tools/call", {"name": "pay", "arguments": {"to": "ann"}}, "pay")
        assert paid["content"][0]["text"].startswith("paid") and paid["x"] == 0.1
        assert "ttlMs" not in paid
    seen = bench.file("bank").read_text()
    assert "clientCapabilities" not in seen.replace("initialize", "", 1)


async def test_gateway_passes_a_question_on_to_the_client_that_owns_the_session(
    tmp_path: Path,
) -> None:
    """G12, old / old: `share = "session"` declares what the client declares; its answer goes back."""
    bench = Bench(tmp_path, names=("bank",), own={"bank": {"share": "session"}})
    async with bench.serving():
        _, session = await bench.post("/mcp/bank", message_of("initialize", introduction(), 1))
        assert session is not None
        headers = {**BOTH, "Mcp-Session-Id": session}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(f"{bench.url}/mcp/bank", data=message_of("x/ask", {}, 2)) as stream,
        ):
            told: list[Any] = []
            async for line in stream.content:
                if not line.startswith(b"data: {"):
                    continue
                told.append(json.loads(line.removeprefix(b"data: ")))
                if told[-1].get("method") == "roots/list":
                    reply = {"jsonrpc": "2.0", "id": told[-1]["id"], "result": {"roots": [7]}}
                    await bench.post("/mcp/bank", json.dumps(reply).encode(), session)
        assert told[-1]["result"] == {"their": {"roots": [7]}, "id": "q-1"}
    greeted = bench.file("bank").read_text()
    assert '"capabilities": {"roots": {}}' in greeted and '"name": "test"' in greeted


async def test_gateway_serves_an_old_client_in_front_of_a_new_server(tmp_path: Path) -> None:
    """G12, old / new: the server gets the envelope of the gateway, the client no `resultType`."""
    async with Bench(tmp_path, names=(), more=[newest(tmp_path)]).serving() as bench:
        answer, session = await bench.post("/mcp/new", message_of("initialize", introduction(), 1))
        assert answer["result"]["serverInfo"]["name"] == "counter"
        listed, _ = await bench.post("/mcp/new", message_of("tools/list", None, 2), session)
        assert len(listed["result"]["tools"]) == 3
        paid, _ = await bench.post(
            "/mcp/new", message_of("tools/call", {"name": "pay"}, 3), session
        )
        assert paid["result"]["content"] and "resultType" not in paid["result"]


def test_merged_names_are_found_in_a_table() -> None:
    """G11: long names keep their end and a digest; URIs get the name of their server."""
    long = "x" * 60
    lists = {
        "a": [Raw(json.dumps({"name": long}).encode())],
        "b": [Raw(b'{"name": "one", "d": 0.10}'), Raw(b'{"title": "none"}')],
    }
    table = merged("tools", lists)
    [first, second] = table.places
    assert len(first) == 48 and first == shortened(long) and second == "one"
    assert table.find(first).name == long
    assert bytes(table.entries[1]) == b'{"name": "one", "d": 0.10}'
    same = [Raw(b'{"uri": "file:///a"}')]
    uris = merged("resources", {"a": same, "b": same})
    assert [*uris.places] == ["a+file:///a", "b+file:///a"]


def test_merged_definitions_lose_hidden_characters() -> None:
    """Section 8: control, direction and zero-width characters are removed at `/mcp`."""
    hidden = Raw(json.dumps({"name": "t", "description": "a\u200bb\u202ec\x07d"}).encode())
    [entry] = merged("tools", {"a": [hidden]}).entries
    assert json.loads(bytes(entry))["description"] == "abcd"


@pytest.mark.parametrize("sign", ["\u200b", "\u061c", "\u180e", "\x07", "\U000e0041", "\U000e0101"])
def test_merged_names_lose_hidden_characters(sign: str) -> None:
    """Section 8: a name that looks like that of another server is not its name."""
    theirs = f"pa{sign}y"
    lists = {
        "a": [Raw(b'{"name": "pay"}')],
        "b": [Raw(json.dumps({"name": theirs}).encode()), Raw(b'{"name": "other"}')],
    }
    table = merged("tools", lists)
    assert [*table.places] == ["a__pay", "b__pay", "other"]
    assert [json.loads(bytes(each))["name"] for each in table.entries] == [*table.places]
    assert table.find("b__pay") == Place("b", theirs)
    alone = merged("tools", {"b": lists["b"]})
    assert alone.find("pay") == Place("b", theirs)


# --- the command line -----------------------------------------------------------------------------


def configured(tmp_path: Path, more: str = "") -> Path:
    command = json.dumps(counter(tmp_path / "bank"))
    (tmp_path / "wirecall.toml").write_text(f"[upstream.bank]\ncommand = {command}\n{more}")
    return tmp_path


def run(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-m", "wirecall", "gateway", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=60.0,
    )


def test_gateway_check_prints_the_plan(tmp_path: Path) -> None:
    """G11: each tool, query or command, why, recorded or not; findings are exit code 9."""
    done = run(configured(tmp_path), "check", "--json")
    assert done.returncode == 0, done.stderr
    [pay, look] = json.loads(done.stdout)["result"]["tools"]
    assert (pay["kind"], pay["recorded"], pay["why"]) == ("command", True, "no readOnlyHint")
    assert (look["kind"], look["recorded"], look["why"]) == ("query", False, "readOnlyHint")
    down = '[upstream.down]\ncommand = ["/no/such/program"]\n'
    done = run(configured(tmp_path, down), "check")
    assert done.returncode == 9 and "down: /no/such/program cannot be started" in done.stderr


@pytest.mark.parametrize("has_file", [True, False])
def test_gateway_status_without_a_gateway_says_so(tmp_path: Path, has_file: bool) -> None:
    folder = configured(tmp_path) if has_file else tmp_path
    done = run(folder, "status", "--http", "127.0.0.1:9")
    assert done.returncode == 4 and "No gateway answers" in done.stderr
    assert "why: the server cannot be reached: 127.0.0.1:9: Connection refused" in done.stderr


@pytest.mark.parametrize(
    ("verb", "address", "words"),
    [
        ("run", "8430", "'8430' is not an address to serve."),
        ("run", "localhost:99999", "'localhost:99999' is not an address to serve."),
        ("status", "8430", "'8430' is not an address to serve."),
        ("run", "0.0.0.0:8430", "--http: other machines reach 0.0.0.0:8430"),
    ],
)
def test_gateway_refuses_an_address_that_it_cannot_serve(
    tmp_path: Path, verb: str, address: str, words: str
) -> None:
    """Section 8: an address that is not loopback needs `[auth]`, in the file and as an option."""
    done = run(configured(tmp_path), verb, "--http", address)
    assert done.returncode == 2 and words in done.stderr


@pytest.mark.parametrize("verb", ["run", "check"])
def test_gateway_in_a_folder_without_settings_says_so(tmp_path: Path, verb: str) -> None:
    done = run(tmp_path, verb)
    assert done.returncode == 2 and "There is no wirecall.toml in this folder." in done.stderr


def test_gateway_at_an_address_that_is_taken_names_the_option(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run(configured(tmp_path), "run", "--http", address)
    assert done.returncode == 2 and "use another port: --http HOST:PORT" in done.stderr


async def test_gateway_run_serves_one_client_on_stdio(tmp_path: Path) -> None:
    """G11: `--stdio` serves `/mcp` to one client."""
    folder = configured(tmp_path)
    words = [sys.executable, "-m", "wirecall", "gateway", "run", "--stdio"]
    async with started(*words, cwd=folder) as process:
        answer = await process.greet()
        assert answer["result"]["serverInfo"]["name"] == "gateway"
        listed = await process.ask("tools/list")
        assert [tool["name"] for tool in listed["result"]["tools"]] == ["pay", "look"]
        paid = await process.ask("tools/call", {"name": "pay", "arguments": {"to": "ann"}})
        assert "result" in paid and effects(tmp_path / "bank") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_gateway_run_ends_its_children_with_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    """G9, X6: with grace, and if the gateway is killed."""
    address = f"127.0.0.1:{free_port()}"
    words = [sys.executable, "-m", "wirecall", "gateway", "run", "--http", address]
    async with started(*words, cwd=configured(tmp_path)) as process:
        await until(lambda: effects(tmp_path / "bank", "notifications/initialized") == 1)
        shown = await asyncio.to_thread(run, tmp_path, "status", "--http", address, "--json")
        found = json.loads(shown.stdout)["result"]
        assert found["single_user"] is True
        [pid] = found["upstreams"]["bank"]["pids"]
        process.process.send_signal(number)
        await process.ended()
    await until(lambda: not Path(f"/proc/{pid}").exists())
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_gateway_status_over_http_has_every_upstream(bench: Bench) -> None:
    """G11: health, sessions, pids, in flight, breaker, starts, unknown records."""
    async with bench.client("/mcp/bank") as client:
        with pytest.raises(Exception, match="unknown"):
            await client.call_tool("pay", {"then": "die"})
    async with aiohttp.ClientSession() as http, http.get(f"{bench.url}/status") as answer:
        found = (await answer.json())["upstreams"]["bank"]
    assert found["unknown"] == 1 and found["breaker"] == "closed" and found["up"] is True


async def test_gateway_status_says_why_a_server_is_down(tmp_path: Path) -> None:
    """G11: in the table for people, with what is unknown."""
    more = [UpstreamSettings("down", command=["/no/such/program"])]
    async with Bench(tmp_path, names=("bank",), more=more).serving() as bench:
        await bench.gateway.reach_all()
        async with bench.client("/mcp/bank") as client:
            with pytest.raises(Exception, match="unknown"):
                await client.call_tool("pay", {"then": "die"})
        address = bench.url.removeprefix("http://")
        shown = await asyncio.to_thread(run, tmp_path, "status", "--http", address)
    assert "! down: /no/such/program cannot be started" in shown.stderr
    assert "! bank: 1 command with an unknown outcome: wirecall ledger list" in shown.stderr
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_gateway_ends_its_children(tmp_path: Path) -> None:
    """G9: after the gateway no process remains."""
    async with Bench(tmp_path).serving() as bench:
        async with bench.client("/mcp/bank") as client:
            await client.call_tool("look")
        pids = (await bench.gateway.status())["upstreams"]["bank"]["pids"]
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))

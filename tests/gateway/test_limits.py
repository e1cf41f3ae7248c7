"""Limits and security of a gateway, and servers that are bad from their first line on."""

import asyncio
import io
import json
import logging
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec import Raw

from tests.client.conftest import nothing_is_left as nothing_is_left
from tests.client.peers import served, until
from tests.gateway.bench import BOTH, Bench, Held
from tests.gateway.faulty import called, faulty
from tests.gateway.fronts import counter, effects, introduction, message_of, wrapped
from tests.ports import free_port
from wirecall import App, Context
from wirecall.gateway import UpstreamSettings, fronts, offers, plan
from wirecall.gateway.session import Wishes
from wirecall.gateway.upstream import FAILURES
from wirecall.server.identity import Identity

CANARY = "canary-7f3a"
MEGABYTES = 1 << 20


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with Bench(tmp_path, names=("bank",)).serving() as bench:
        yield bench


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "effects"


# --- servers that cannot serve --------------------------------------------------------------------


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["/no/such/program"], "/no/such/program cannot be started"),
        (python("import sys; sys.exit('no licence')"), "its last words: no licence"),
        (python("print('hello'); print('{}')"), "the server process ended with 0"),
        (
            # It reads the greeting: it may have ended before, and then nothing was read either.
            python("print('usage: x FILE'); input()"),
            "ended with 0; it printed 'usage: x FILE', which is not",
        ),
    ],
)
async def test_gateway_in_front_of_a_server_that_cannot_serve_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], words: str
) -> None:
    """Bad input: 50210 with the upstream, the reason and its last words; the plan has a finding."""
    monkeypatch.setattr("wirecall.gateway.upstream.ATTEMPT_PAUSE", 0.0)
    bad = UpstreamSettings("bad", command=command)
    async with Bench(tmp_path, names=(), more=[bad]).serving() as bench:
        answer, _ = await bench.post("/mcp/bad", message_of("initialize", introduction(), 1))
        error = answer["error"]
        assert (error["code"], error["data"]["ran"]) == (50210, "no")
        assert error["data"]["upstream"] == "bad" and words in error["message"]
        [finding] = (await plan.planned(bench.gateway)).findings
        assert finding.startswith("bad: ")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["/bin/sh", "-c", "cat >/dev/null"], "it did not answer initialize within"),
        (
            ["/bin/sh", "-c", "echo hello; cat >/dev/null"],
            " s; it printed 'hello', which is not a message of MCP",
        ),
        (["/bin/sh", "-c", "echo no key >&2; cat >/dev/null"], " s; its last words: no key"),
    ],
)
async def test_gateway_in_front_of_a_server_that_is_mute_says_what_it_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], words: str
) -> None:
    """Bad input: a program that waits for something else is down, and not only slow."""
    bad = UpstreamSettings("bad", command=command)
    async with Bench(tmp_path, names=(), more=[bad]).serving() as bench:
        # On a busy machine the program may print later.
        for seconds in (0.1, 1.0, 30.0):
            monkeypatch.setattr("wirecall.gateway.session.START_TIME", seconds)
            answer, _ = await bench.post("/mcp/bad", message_of("initialize", introduction(), 1))
            error = answer["error"]
            assert (error["code"], error["data"]["ran"]) == (50210, "no")
            if words in error["message"]:
                break
        assert words in error["message"] and error["data"]["upstream"] == "bad"
        status = (await bench.gateway.status())["upstreams"]["bad"]
        assert status["up"] is False and words in status["reason"]
        [finding] = (await plan.planned(bench.gateway)).findings
        assert finding.startswith("bad: it did not answer initialize within")


async def test_plan_names_a_server_as_soon_as_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G11: a person sees which servers answer while another one is mute."""
    monkeypatch.setattr("wirecall.gateway.session.START_TIME", 3600.0)
    mute = UpstreamSettings("mute", command=["/bin/sh", "-c", "cat >/dev/null"])
    answered: list[tuple[str, int, str]] = []
    async with Bench(tmp_path, names=("bank",), more=[mute]).serving() as bench:
        planning = asyncio.create_task(
            plan.planned(bench.gateway, lambda *found: answered.append(found))
        )
        await until(lambda: answered)
        planning.cancel()
        await asyncio.wait([planning])
    assert answered == [("bank", 2, "2025-11-25")]


async def test_process_that_does_not_answer_is_not_up(tmp_path: Path) -> None:
    """Bad input: a process that runs does not serve yet."""
    bad = UpstreamSettings("bad", command=["/bin/sh", "-c", "cat >/dev/null"])
    async with Bench(tmp_path, names=("bank",), more=[bad]).serving() as bench:
        upstream = bench.gateway.upstreams["bad"]
        await until(lambda: upstream.children and bench.gateway.upstreams["bank"].is_up)
        status = (await bench.gateway.status())["upstreams"]
        assert (status["bank"]["up"], status["bad"]["up"]) == (True, False)


async def test_breaker_opens_for_a_server_that_starts_and_ends(tmp_path: Path) -> None:
    """Bad input: five greetings in a row that fail are enough."""
    bad = UpstreamSettings("bad", command=["/bin/sh", "-c", "exit 3"])
    async with Bench(tmp_path, names=(), more=[bad]).serving() as bench:
        upstream = bench.gateway.upstreams["bad"]
        upstream.clock = upstream.starts._clock = upstream.breaker._clock = Held()
        hello = message_of("initialize", introduction(), 1)
        for _ in range(FAILURES):
            upstream.starts.forgive()
            await bench.post("/mcp/bad", hello)
        assert upstream.breaker.is_open
        answer, _ = await bench.post("/mcp/bad", hello)
        assert "it was not tried again yet: the server process" in answer["error"]["message"]


WITHOUT_LISTS = """
import json, sys

for line in sys.stdin:
    message = json.loads(line)
    result = {"content": []}
    if message["method"] == "initialize":
        info = {"name": "x", "version": "1"}
        version = message["params"]["protocolVersion"]
        result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    if message["method"] in ("initialize", "tools/call"):
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""


async def test_server_that_does_not_list_its_tools_has_commands_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad input: the plan and a call end, and the plan says why it lacks the tools."""
    monkeypatch.setattr("wirecall.gateway.gateway.START_TIME", 0.1)
    monkeypatch.setattr("wirecall.gateway.relay.START_TIME", 0.1)
    odd = UpstreamSettings("odd", command=python(WITHOUT_LISTS))
    async with Bench(tmp_path, names=(), more=[odd]).serving() as bench:
        [finding] = (await plan.planned(bench.gateway)).findings
        assert finding == "odd: it did not give its list of tools within 0.1 s"
        _, session = await bench.post("/mcp/odd", message_of("initialize", introduction(), 1))
        params = {"name": "x", "arguments": {}}
        answer, _ = await bench.post("/mcp/odd", message_of("tools/call", params, 2), session)
        assert answer["result"]["content"] == []
        assert bench.gateway.upstreams["odd"].use_of("x") == "once"


ODD = """
import json, sys

more = json.loads(sys.argv[1])
for line in sys.stdin:
    message = json.loads(line)
    method = message["method"]
    if "id" not in message or method == "logging/setLevel":
        continue
    result = {"tools": [], **more.get("list", {})}
    if method == "initialize":
        info = {"name": "x", "version": "1"}
        version = message["params"]["protocolVersion"]
        capabilities = {"tools": {}, "logging": {}}
        result = {"protocolVersion": version, "capabilities": capabilities, "serverInfo": info}
    elif "params" in more:
        method = "notifications/resources/updated"
        print(json.dumps({"jsonrpc": "2.0", "method": method, **more}), flush=True)
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""


def odd(**more: Any) -> UpstreamSettings:
    """A server that takes no level, and whose lists or notifications are odd."""
    return UpstreamSettings("odd", command=[*python(ODD), json.dumps(more)])


@pytest.mark.parametrize("ttl", [10**400, -(10**400), 0.5, "x", None])
async def test_list_that_may_be_kept_for_any_time_is_read(tmp_path: Path, ttl: object) -> None:
    """Bad input: a list is read although its time is missing, or one that no clock takes."""
    upstream = odd(list={"ttlMs": ttl, "cacheScope": "public"})
    async with Bench(tmp_path, names=("bank",), more=[upstream]).serving() as bench:
        _, session = await bench.post("/mcp", message_of("initialize", introduction(), 1))
        listed, _ = await bench.post("/mcp", message_of("tools/list", None, 2), session)
        assert "_meta" not in listed["result"]


@pytest.mark.parametrize("params", [{"uri": 5}, {"uri": None}, {}, [1]])
async def test_change_of_a_resource_without_its_name_is_dropped(
    tmp_path: Path, params: object
) -> None:
    """Bad input: the connection to the server stays, and its next message is read."""
    async with Bench(tmp_path, names=(), more=[odd(params=params)]).serving() as bench:
        _, session = await bench.post("/mcp/odd", message_of("initialize", introduction(), 1))
        ask = message_of("tools/list", None, 2)
        *_, listed = await bench.stream("/mcp/odd", ask, session)
        assert listed["result"] == {"tools": []}


async def test_level_that_a_server_does_not_take_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad input: the client that asks does not wait, and a session that is opened later does not."""
    async with Bench(tmp_path, names=("bank",), more=[odd()]).serving() as bench:
        await until(lambda: ("odd", "tools") in bench.gateway.seen)
        monkeypatch.setattr("wirecall.gateway.session.START_TIME", 0.1)
        _, session = await bench.post("/mcp", message_of("initialize", introduction(), 1))
        level = message_of("logging/setLevel", {"level": "debug"}, 2)
        answer, _ = await bench.post("/mcp", level, session)
        assert answer["result"] == {}
        [talk] = bench.gateway._talks(bench.gateway.upstreams["odd"])
        await talk.repeat(Wishes(Raw(b'{"level":"debug"}')))


async def test_reference_without_a_value_is_a_fault_of_one_upstream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G11: the others are served; it is served as soon as there is a value, without a restart."""
    monkeypatch.setattr("wirecall.gateway.upstream.ATTEMPT_PAUSE", 0.0)
    monkeypatch.delenv("TOKEN_OF_TEST", raising=False)
    own = {"bank": {"env": {"TOKEN": "env:TOKEN_OF_TEST"}}}
    remote = UpstreamSettings("remote", url="env:TOKEN_OF_TEST")
    async with Bench(tmp_path, own=own, more=[remote]).serving() as bench:
        hello = message_of("initialize", introduction(), 1)
        for name in ("bank", "remote"):
            answer, _ = await bench.post(f"/mcp/{name}", hello)
            error = answer["error"]
            assert (error["code"], error["data"]["ran"]) == (50210, "no")
            assert f"{name}: env:TOKEN_OF_TEST has no value" in error["message"]
            assert "fix: export TOKEN_OF_TEST=... where the server starts" in error["message"]
        answer, _ = await bench.post("/mcp/shop", hello)
        assert answer["result"]["serverInfo"]["name"] == "counter"
        findings = (await plan.planned(bench.gateway)).findings
        assert len([each for each in findings if "TOKEN_OF_TEST has no value" in each]) == 2
        monkeypatch.setenv("TOKEN_OF_TEST", "there")
        answer, _ = await bench.post("/mcp/bank", hello)
        assert answer["result"]["serverInfo"]["name"] == "counter"
        answer, _ = await bench.post("/mcp/remote", hello)
        assert "env:TOKEN_OF_TEST is not an address" in answer["error"]["message"]


async def test_reference_to_a_wrong_address_is_a_fault_of_one_upstream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G11: its error names the reference, and not the value, which may be secret."""
    monkeypatch.setenv("ADDRESS_OF_TEST", "http://[secret/mcp")
    odd = UpstreamSettings("odd", url="env:ADDRESS_OF_TEST")
    async with Bench(tmp_path, names=(), more=[odd]).serving() as bench:
        answer, _ = await bench.post("/mcp/odd", message_of("initialize", introduction(), 1))
        error = answer["error"]
        assert (error["code"], error["data"]["ran"]) == (50210, "no")
        assert "odd: env:ADDRESS_OF_TEST is not an address" in error["message"]
        assert "[secret" not in json.dumps(error)


async def test_token_that_has_changed_is_read_again_when_the_server_refuses_the_old_one(
    tmp_path: Path,
) -> None:
    """G21: without a restart, and the command that met the refusal runs once."""
    token = tmp_path / "token"
    token.write_text("first\n")
    async with faulty(tmp_path, auth=f"bearer:file:{token}") as (bench, server, session):
        server.token = "first"
        assert "result" in await called(bench, session, "look", "")
        server.token = "second"
        error = (await called(bench, session, "pay", ""))["error"]
        assert (error["code"], error["data"]["ran"]) == (50210, "no")
        assert "401" in error["message"]
        token.write_text("second\n")
        assert "result" in await called(bench, session, "pay", "")
        assert server.calls == ["look", "pay"]


async def test_list_waits_once_for_an_upstream_that_is_mute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G11: the next lists leave it out at once, until it has answered in the background."""
    monkeypatch.setattr("wirecall.gateway.gateway.BACK_AFTER", 0.01)
    go = tmp_path / "go"
    script = f'while [ ! -e {go} ]; do sleep 0.01; done; exec "$@"'
    slow = UpstreamSettings(
        "slow", command=["/bin/sh", "-c", script, "x", *counter(tmp_path / "n")]
    )
    async with Bench(tmp_path, names=("bank",), more=[slow]).serving() as bench:
        await until(lambda: bench.gateway.upstreams["bank"].is_up)
        _, session = await bench.post("/mcp", message_of("initialize", introduction(), 1))
        ask = message_of("tools/list", None, 2)
        for seconds in (0.1, 3600.0):
            monkeypatch.setattr(fronts, "LIST_TIME", seconds)
            listed, _ = await bench.post("/mcp", ask, session)
            assert listed["result"]["_meta"]["io.wirecall/missing"] == ["slow"]
        go.touch()
        await until(lambda: ("slow", "tools") in bench.gateway.seen)
        listed, _ = await bench.post("/mcp", ask, session)
        assert len(listed["result"]["tools"]) == 4 and "_meta" not in listed["result"]


@pytest.mark.parametrize(
    ("then", "words"),
    [
        ("garbage", "no answer within 0.1 s"),  # it may be what a server logs
        ("wrong_id", "answered id 99999, which was not asked"),
        ("die", "ended with 3"),
        ("big", "more than 16777216 bytes"),
        ("mute", "no answer within 0.1 s"),
    ],
)
async def test_wrap_answers_a_query_with_an_error_whose_answer_is_wrong(
    file: Path, then: str, words: str
) -> None:
    """Bad input: it is sent twice, and ends as an error with the reason."""
    timeout = 0.1 if then in ("garbage", "mute") else 60.0
    async with wrapped(file, kinds={"pay": "query"}, timeout=timeout) as client:
        error = (await client.pay(then=then, size=17 * MEGABYTES))["error"]
        assert error["code"] == 50210 and words in error["message"]
        assert error["data"]["upstream"] == "bank" and effects(file) == 2


async def test_wrap_keeps_the_link_of_a_query_that_is_answered_twice(file: Path) -> None:
    """Bad input: the first answer counts, or, if the second comes with it, neither."""
    async with wrapped(file, kinds={"pay": "query"}) as client:
        before = await client.pid()
        answer = await client.pay(then="twice")
        assert answer.get("error", {"code": 50210})["code"] == 50210
        assert await client.pid() == before


async def test_gateway_without_its_ledger_answers_queries(tmp_path: Path) -> None:
    """Bad input: commands get 50310, ran = no; nothing listens at the address of the ledger."""
    ledger = f"redis://127.0.0.1:{free_port()}"
    async with Bench(tmp_path, names=("bank",), ledger=ledger).serving() as bench:
        _, session = await bench.post("/mcp/bank", message_of("initialize", introduction(), 1))
        assert session is not None
        assert "result" in await called(bench, session, "look", "", "bank")
        error = (await called(bench, session, "pay", "", "bank"))["error"]
        assert (error["code"], error["data"]["ran"]) == (50310, "no")
        assert effects(bench.file("bank")) == 0


# --- what ends at the gateway ---------------------------------------------------------------------


async def test_gateway_keeps_no_token_and_no_arguments(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Section 8: an upstream, a log, a file and `/status` see neither the token nor, but for the
    upstream, the arguments."""
    caplog.set_level(logging.DEBUG)
    secret = "argument-91c2"

    async def verify(token: str) -> Identity | None:
        return Identity("ann") if token == CANARY else None

    seen: list[str] = []

    async def middleware(ctx: Context, call_next: Any) -> Any:
        seen.extend(f"{name}: {value}" for name, value in ctx.headers.items())
        return await call_next(ctx)

    behind = App("behind", ledger="memory:", middleware=[middleware])

    @behind.command(key="off")
    def pay(to: str) -> str:
        assert to == secret
        return "paid"

    async with served(behind) as url:
        more = [UpstreamSettings("behind", url=f"{url}/mcp")]
        bench = Bench(tmp_path, names=("bank",), more=more, auth=verify)
        async with bench.serving():
            for path in ("/mcp/behind", "/mcp/bank"):
                async with bench.client(path, auth=CANARY) as client:
                    paid = await client.call_tool("pay", {"to": secret})
                    assert not paid.is_error
            status = json.dumps(await bench.gateway.status())
            kept = [each for each in tmp_path.iterdir() if each != bench.file("bank")]
            stored = b"".join(each.read_bytes() for each in kept if each.is_file())
    lines = bench.file("bank").read_text()
    assert any("pay " in each for each in lines.splitlines()) and b"paid" in stored
    told = [*seen, *(record.getMessage() for record in caplog.records)]
    for text in (*told, lines, status, stored.decode(errors="replace")):
        assert CANARY not in text
    for text in (*told, status, stored.decode(errors="replace")):
        assert secret not in text


@pytest.mark.parametrize("tool", ["pay", "look"])
@pytest.mark.parametrize("then", ["status 301", "status 307", "link /elsewhere"])
async def test_gateway_asks_no_address_that_a_server_names(
    tmp_path: Path, tool: str, then: str
) -> None:
    """Section 8: redirects are not followed, and links to resources are not read."""
    async with faulty(tmp_path) as (bench, server, session):
        answer = await called(bench, session, tool, then)
        if then.startswith("link"):
            assert answer["result"]["content"][0]["uri"].endswith("/elsewhere")
        else:
            assert answer["error"]["code"] == 50210
        assert server.elsewhere == []


@pytest.mark.parametrize(
    "headers", [{"Host": "evil.example"}, {"Origin": "https://evil.example"}], ids=str
)
async def test_gateway_refuses_pages_of_other_sites(bench: Bench, headers: dict[str, str]) -> None:
    """Section 8: a page in a browser reaches neither the servers nor the state."""
    async with aiohttp.ClientSession(headers={**BOTH, **headers}) as http:
        for path in ("/mcp", "/mcp/bank"):
            message = message_of("initialize", introduction(), 1)
            async with http.post(f"{bench.url}{path}", data=message) as answer:
                assert answer.status in (403, 421)
        async with http.get(f"{bench.url}/status") as answer:
            assert answer.status in (403, 421)


async def test_gateway_takes_no_servers_over_http(bench: Bench) -> None:
    """Section 8: what is not in the settings is nowhere."""
    message = message_of("initialize", introduction(), 1)
    async with aiohttp.ClientSession(headers=BOTH) as http:
        for method, path in [("POST", "/mcp/other"), ("PUT", "/mcp/bank"), ("POST", "/status")]:
            async with http.request(method, f"{bench.url}{path}", data=message) as answer:
                assert answer.status in (404, 405)
    assert [*(await bench.gateway.status())["upstreams"]] == ["bank"]


async def test_gateway_writes_files_for_its_user_only(tmp_path: Path) -> None:
    """Section 8: ledger and secret are 0600, in a folder with 0700 that is new."""
    folder = tmp_path / "state"
    ledger = f"sqlite:{folder / 'ledger.db'}"
    async with Bench(tmp_path, names=("bank",), ledger=ledger).serving() as bench:
        async with bench.client("/mcp/bank") as client:
            await client.call_tool("pay", {"to": "ann"})
        found = [folder, *folder.rglob("*")]
        kept = [each for each in found if each.is_file() or each.is_dir()]
        wrong = [each for each in kept if each.stat().st_mode & 0o077]
    assert {"ledger.db", "ledger.db.secret"} <= {each.name for each in found}
    assert wrong == []


async def test_wrap_and_its_server_see_the_same_name(file: Path) -> None:
    """Section 8, parser difference: the name of a query is written by us."""
    async with wrapped(file) as client:
        answer = await client.ask("tools/call", b'{"name": "pay", "name": "look", "x": 1}')
        assert answer["result"]["lines"] and effects(file) == 0


# --- limits ---------------------------------------------------------------------------------------


async def test_gateway_refuses_a_message_above_sixteen_megabytes(bench: Bench) -> None:
    """Section 8: one of less is passed on."""
    sizes = {}
    _, session = await bench.post("/mcp/bank", message_of("initialize", introduction(), 1))
    assert session is not None
    for size in (15, 17):
        call = {"name": "look", "arguments": {"text": "x" * (size * MEGABYTES)}}
        data = io.BytesIO(message_of("tools/call", call, 2))
        async with (
            aiohttp.ClientSession(headers={**BOTH, "Mcp-Session-Id": session}) as http,
            http.post(f"{bench.url}/mcp/bank", data=data) as answer,
        ):
            sizes[size] = answer.status
    assert sizes == {15: 200, 17: 413}


def test_merged_lists_have_limits() -> None:
    """Section 8: 2,000 tools, of 64 KB each."""
    many = [Raw(b'{"name": "t%d"}' % number) for number in range(offers.MOST + 1)]
    long = Raw(json.dumps({"name": "long", "description": "x" * offers.MOST_BYTES}).encode())
    table = offers.merged("tools", {"a": [long, *many]})
    assert len(table.entries) == 2000 and "long" not in table.places


async def test_plan_names_the_tools_that_clients_do_not_get(tmp_path: Path) -> None:
    """Section 8: hidden characters and tools above a limit are findings; `/mcp/NAME` is exact."""
    hint = {"annotations": {"readOnlyHint": True}}
    tools = [
        {"name": "long", "description": "x" * offers.MOST_BYTES, **hint},
        {"name": "odd", "description": "a\u200bb", **hint},
        *({"name": f"t{number}", **hint} for number in range(offers.MOST)),
    ]
    (tmp_path / "bank.tools").write_text(json.dumps(tools))
    async with Bench(tmp_path, names=("bank",)).serving() as bench:
        findings = (await plan.planned(bench.gateway)).findings
        async with bench.client("/mcp/bank") as client:
            exact = {tool.name: tool.description for tool in await client.list_tools()}
    assert exact["odd"] == "a\u200bb" and len(exact) == offers.MOST + 4
    assert "bank: the tool 'odd' has hidden characters in its definition" in findings
    size = len(json.dumps(tools[0]))
    said = f"has a definition of {size:,} bytes, more than 65,536: /mcp leaves it out"
    assert f"bank: the tool 'long' {said}" in findings
    assert "/mcp takes 2,000 tools, and leaves 3 out" in findings


REFUSES_SECOND = """
import json, pathlib, sys

mark = pathlib.Path(sys.argv[1])
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    answer = {"error": {"code": -32000, "message": "one client only"}}
    if message["method"] != "initialize" or not mark.exists():
        info = {"name": "x", "version": "1"}
        result = {"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": info}
        answer = {"result": result}
    mark.touch()
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer}), flush=True)
"""


async def test_server_that_refuses_one_client_serves_the_other(tmp_path: Path) -> None:
    """G11: a refusal of `initialize` is an answer, and says nothing of other sessions."""
    command = [*python(REFUSES_SECOND), str(tmp_path / "mark")]
    one = UpstreamSettings("one", command=command, share="session")
    async with Bench(tmp_path, names=(), more=[one]).serving() as bench:
        upstream = bench.gateway.upstreams["one"]
        await until(lambda: upstream.is_up)
        _, session = await bench.post("/mcp/one", message_of("initialize", introduction(), 1))
        answer, _ = await bench.post("/mcp/one", message_of("tools/list", None, 2), session)
        assert answer["error"]["message"] == "one client only"
        assert upstream.is_up and not upstream.breaker.reason

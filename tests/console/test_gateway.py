"""The console of a gateway: its upstreams, a probe, a child that is killed, its metrics."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.console.browser import Looker
from tests.console.processes import Running
from tests.console.samples import parsed
from tests.gateway.bench import Bench
from tests.gateway.fronts import counter, effects, introduction, message_of
from tests.gateway.process import settings
from tests.ports import free_port
from wirecall.console.collect import Collector
from wirecall.console.metrics import render
from wirecall.console.source import Refusal
from wirecall.console.tap import Tap
from wirecall.console.worker import Served, describe
from wirecall.errors import RpcError
from wirecall.gateway import UpstreamSettings


@asynccontextmanager
async def watched(folder: Path) -> AsyncIterator[tuple[Bench, Collector]]:
    """Serve a gateway with two upstreams, of which one cannot be started, and watch it."""
    down = UpstreamSettings("down", command=["/no/such/program"])
    bench = Bench(folder, names=("bank",), more=[down])
    bench.gateway.configure(tap=Tap("facts", str(folder)))
    served = Served("gateway", os.getpid(), 0.0, folder=str(folder))
    describe(served)
    async with bench.serving():
        collector = Collector(served)
        await collector.open()
        try:
            yield bench, collector
        finally:
            await collector.aclose()


async def test_upstreams_of_a_gateway_have_their_state_and_figures(tmp_path: Path) -> None:
    async with watched(tmp_path) as (bench, collector), bench.client("/mcp/bank") as client:
        await client.call_tool("pay", {"to": "x"}, key="k")
        await client.call_tool("pay", {"to": "x"}, key="k")
        page = await collector.upstreams()
        assert page["is_gateway"]
        found = {each["name"]: each for each in page["upstreams"]}
        bank = found["bank"]
        assert (bank["up"], bank["transport"], bank["breaker"]) == (True, "stdio", "closed")
        assert (bank["in_flight"], bank["limit"], bank["queued"]) == (0, 32, 0)
        assert bank["calls"] == 2 and bank["p95_ms"] > 0
        assert bank["revisions"] and bank["client_revisions"]
        assert bank["age_s"] >= 0 and len(bank["pids"]) == 1
        rows = (await collector.calls(f'method:"*:{bank["label"]}/*"'))["rows"]
        assert [row["replayed"] for row in rows] == [True, False]
        assert (await collector.call(rows[0]["id"]))["original"] == rows[1]["id"]
        now = await collector.now()
        assert now["is_gateway"]


async def test_call_behind_a_gateway_says_what_was_translated(tmp_path: Path) -> None:
    """The counter of the upstream speaks revisions with a handshake only."""
    async with watched(tmp_path) as (bench, collector):
        async with bench.client("/mcp/bank", revision="2026-07-28") as client:
            for key in ("k", "k"):
                await client.call_tool("pay", {"to": "x"}, key=key)
            await client.call_tool("look")
        rows = (await collector.calls())["rows"]
        look, again, first = [await collector.call(row["id"]) for row in rows]
        assert [page["row"]["upstream"] for page in (look, again, first)] == ["bank"] * 3
        passed = first["passed"]
        assert (passed["upstream"], passed["was_sent"]) == ("bank", True)
        lines = {line["what"]: (line["client"], line["upstream"]) for line in passed["lines"]}
        assert lines["revision"][0] == "2026-07-28"
        assert passed["crosses"] == (lines["revision"][1] != "2026-07-28")
        assert passed["crosses"] == ("_meta" in lines)
        assert lines["id"][0] == first["row"]["rpc_id"] and int(lines["id"][1]) > 0
        assert not again["passed"]["was_sent"]
        assert [line["what"] for line in again["passed"]["lines"]] == ["revision"]
        assert look["passed"]["was_sent"] and look["row"]["kind"] == "query"


async def test_batch_behind_a_gateway_says_where_its_entries_went(tmp_path: Path) -> None:
    bench = Bench(tmp_path, names=("bank", "shop"))
    bench.gateway.configure(tap=Tap("facts", str(tmp_path)))
    served = Served("gateway", os.getpid(), 0.0, folder=str(tmp_path))
    describe(served)
    for name in ("bank", "shop"):
        bench.file(name).touch()
    async with bench.serving():
        collector = Collector(served)
        await collector.open()
        _, session = await bench.post(
            "/mcp", message_of("initialize", introduction("2025-03-26"), 1)
        )
        tools = ["bank__look"] * 9 + ["shop__look"] * 3
        calls = [
            message_of("tools/call", {"name": name, "arguments": {}}, id)
            for id, name in enumerate(tools)
        ]
        answers, _ = await bench.post("/mcp", b"[" + b",".join(calls) + b"]", session)
        assert all("result" in each for each in answers), answers
        rows = (await collector.calls())["rows"]
        (batch,) = {row["batch"] for row in rows}
        page = await collector.batch(batch)
        assert (page["size"], page["whole"], page["missing"]) == (12, True, 0)
        assert page["upstreams"] == {"bank": 9, "shop": 3}
        assert [entry["position"] for entry in page["entries"]] == [*range(12)]
        assert [entry["row"]["upstream"] for entry in page["entries"]] == (
            ["bank"] * 9 + ["shop"] * 3
        )
        await collector.aclose()


async def test_upstream_that_cannot_start_needs_a_person(tmp_path: Path) -> None:
    async with watched(tmp_path) as (_, collector):
        probed = await collector.probe("down", actor="ada")
        assert not probed["ok"] and probed["error"].startswith(
            "down: /no/such/program cannot be started"
        )
        assert not probed["upstream"]["up"]
        (person,) = [
            each for each in (await collector.now())["person"] if each["kind"] == "upstream"
        ]
        assert person["names"] == ["down"] and person["open"] == "/upstreams"
        with pytest.raises(Refusal, match="There is no upstream 'nothing'"):
            await collector.upstream("nothing")


async def test_upstream_probe_reads_its_tools_and_calls_none(tmp_path: Path) -> None:
    async with watched(tmp_path) as (bench, collector):
        probed = await collector.probe("bank", actor="ada")
        assert (probed["ok"], probed["tools"]) == (True, 2)
        tools = {each["name"]: each for each in probed["upstream"]["tools"]}
        assert (tools["pay"]["kind"], tools["pay"]["recorded"]) == ("command", True)
        assert (tools["look"]["kind"], tools["look"]["recorded"]) == ("query", False)
        assert tools["look"]["annotations"] == {"readOnlyHint": True}
        assert effects(bench.file("bank")) == 0


async def test_upstream_whose_child_was_killed_counts_its_starts(tmp_path: Path) -> None:
    async with watched(tmp_path) as (bench, collector), bench.client("/mcp/bank") as client:
        await client.call_tool("look")
        before = await collector.upstream("bank")
        os.kill(before["pids"][0], signal.SIGKILL)
        await client.call_tool("look")
        after = await collector.upstream("bank")
        assert after["pids"] != before["pids"]
        assert after["starts"] > before["starts"]
        found = parsed(await render(collector))
        up = {labels["upstream"]: value for labels, value in found["wirecall_upstream_up"]}
        assert up == {"bank": 1, "down": 0}
        starts = {
            labels["upstream"]: value for labels, value in found["wirecall_upstream_starts_total"]
        }
        assert starts["bank"] == after["starts"]


async def test_upstream_stderr_is_on_its_page_and_not_at_status(tmp_path: Path) -> None:
    """`/status` asks for no login."""
    speaks = "import sys; print('the secret is 4711', file=sys.stderr); sys.exit(3)"
    loud = UpstreamSettings("loud", command=["python3", "-c", speaks])
    bench = Bench(tmp_path, names=(), more=[loud])
    async with bench.serving():
        with pytest.raises(RpcError):
            async with bench.client("/mcp/loud", revision="2025-11-25"):
                pass
        state = bench.gateway.states()["loud"]
        assert state["stderr"] == ["the secret is 4711"]
        async with aiohttp.ClientSession() as http, http.get(f"{bench.url}/status") as answer:
            assert "stderr" not in (await answer.json())["upstreams"]["loud"]


def test_gateway_run_serves_its_console(looker: Looker, tmp_path: Path) -> None:
    bank = {"command": counter(tmp_path / "effects")}
    text = settings({"bank": bank}, ledger="sqlite:gateway.db", http=f"127.0.0.1:{free_port()}")
    (tmp_path / "wirecall.toml").write_text(text)
    words = ["--console", "--console-port", "0", "--metrics", "127.0.0.1:0"]
    with Running(tmp_path, "gateway", "run", *words) as running:
        running.wait_for("(bank: ready)")
        page = looker.page()
        page.goto(running.wait_for(r"Console: (\S+)"))
        page.get_by_role("navigation").get_by_role("link", name="Upstreams").click()
        page.get_by_role("link", name="bank").click()
        page.get_by_role("button", name="Probe").click()
        page.get_by_text("✓ answered after").wait_for()
        page.locator("table.tools td", has_text="pay").wait_for()
        page.get_by_role("link", name="Settings").click()
        page.get_by_role("heading", name="Server").wait_for()
        assert 'wirecall_upstream_up{upstream="bank"} 1\n' in running.scrape()
        looker.leave()
    assert effects(tmp_path / "effects") == 0

"""Arrays of 2025-03-26 in front of upstreams: every entry takes all steps of a call."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import nothing_is_left as nothing_is_left
from tests.gateway.bench import Bench
from tests.gateway.fronts import effects, introduction, message_of
from wirecall.audit import verify
from wirecall.middleware import RateLimit

PATHS = ["/mcp/bank", "/mcp"]


async def answers(bench: Bench, path: str, calls: list[dict[str, Any]]) -> list[Any]:
    """The answers to an array of calls of tools, whose ids are their positions."""
    _, session = await bench.post(path, message_of("initialize", introduction("2025-03-26"), 1))
    entries = [message_of("tools/call", params, id) for id, params in enumerate(calls)]
    found, _ = await bench.post(path, b"[" + b",".join(entries) + b"]", session)
    assert [each["id"] for each in found] == [*range(len(calls))]
    return list(found)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [1, 2, 49])
async def test_denied_tool_is_refused_in_an_array(tmp_path: Path, path: str, size: int) -> None:
    """X14, policy: the denied entries are refused, and only those."""
    bench = Bench(tmp_path, names=("bank",), own={"bank": {"deny": ["pay"]}})
    async with bench.serving():
        calls: list[dict[str, Any]] = [{"name": "pay", "arguments": {}}] * size
        found = await answers(bench, path, [*calls, {"name": "look"}])
        assert {each["error"]["code"] for each in found[:-1]} == {-32602}
        assert "denied" in found[0]["error"]["data"]["reason"] and "result" in found[-1]
    assert effects(tmp_path / "bank") == 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tool", ["pay", "look"])
async def test_rate_counts_the_entries_of_an_array(tmp_path: Path, path: str, tool: str) -> None:
    """X14, rates: commands and queries beyond the limit are refused one by one."""
    bench = Bench(tmp_path, names=("bank",))
    bench.gateway.middleware(RateLimit(3, per=3600, clock=lambda: 0.0))
    (tmp_path / "bank").touch()
    async with bench.serving():
        calls = [{"name": tool, "arguments": {"to": str(to)}} for to in range(10)]
        found = await answers(bench, path, calls)
    assert sum("result" in each for each in found) == 3
    refused = [each["error"] for each in found if "error" in each]
    assert {each["code"] for each in refused} == {42910}
    if tool == "pay":
        assert effects(tmp_path / "bank") == 3


@pytest.mark.parametrize("path", PATHS)
async def test_ledger_has_a_record_for_each_command_of_an_array(tmp_path: Path, path: str) -> None:
    """X14, ledger: a key counts once, and each entry has its own record."""
    bench = Bench(tmp_path, names=("bank",))
    async with bench.serving():
        meta = {"io.wirecall/idempotency-key": "k"}
        keyed = {"name": "pay", "arguments": {"to": "key"}, "_meta": meta}
        calls = [keyed, keyed, *({"name": "pay", "arguments": {"to": f"{n}"}} for n in range(8))]
        found = await answers(bench, path, calls)
        assert found[1]["result"]["_meta"]["io.wirecall/replayed"] is True
        records = await (await bench.gateway.ledger()).list(limit=100)
        assert len(records) == 9
        assert {each.id.method.rpartition("/")[2] for each in records} == {"pay"}
    assert effects(tmp_path / "bank") == 9


@pytest.mark.parametrize("path", PATHS)
async def test_audit_has_a_line_for_each_command_of_an_array(tmp_path: Path, path: str) -> None:
    """X14, audit: its method is the record's: upstream, digest of its target, tool."""
    trail = tmp_path / "audit.jsonl"
    bench = Bench(tmp_path, names=("bank",), audit=f"file:{trail}")
    async with bench.serving():
        label = bench.gateway.upstreams["bank"].origin.label
        calls = [{"name": "pay", "arguments": {"to": f"{to}"}} for to in range(5)]
        await answers(bench, path, [*calls, {"name": "look"}])
    lines = [json.loads(line) for line in trail.read_text().splitlines()]
    paid = [line for line in lines if line.get("method") == f"tools/call:{label}/pay"]
    assert len(paid) == 5 and len(lines) >= 5
    assert verify(trail).ok


@pytest.mark.parametrize("path", PATHS)
async def test_limits_hold_for_the_entries_of_an_array(tmp_path: Path, path: str) -> None:
    """X14, limits: a member twice is refused in its entry, and so is an entry that is not a call."""
    bench = Bench(tmp_path, names=("bank",))
    async with bench.serving():
        _, session = await bench.post(path, message_of("initialize", introduction("2025-03-26"), 1))
        entries = [
            message_of("tools/call", b'{"name": "pay", "arguments": {"a": 1, "a": 2}}', 1),
            b"7",
            message_of("tools/call", {"name": "pay", "arguments": {}}, 2),
        ]
        found, _ = await bench.post(path, b"[" + b",".join(entries) + b"]", session)
        assert [each["id"] for each in found] == [1, None, 2]
        assert found[0]["error"]["code"] == -32602 and found[1]["error"]["code"] == -32600
        assert "result" in found[2]
    assert effects(tmp_path / "bank") == 1

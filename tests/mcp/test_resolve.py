"""An operator settles a tool call with an unknown outcome, and the next retry gets that outcome."""

import pytest

from wirecall import App, Done, connect
from wirecall.errors import InternalError, OutcomeUnknown


@pytest.mark.parametrize("revision", ["2025-03-26", "2025-11-25", "2026-07-28"])
async def test_resolved_outcome_reaches_the_client(revision: str) -> None:
    runs: list[str] = []
    async with App("shop") as app:

        @app.command
        async def charge(order: str) -> dict[str, str]:
            runs.append(order)
            raise RuntimeError("in the middle")

        async with connect(app, protocol="mcp", revision=revision) as client:
            with pytest.raises(InternalError):
                await client.call_tool("charge", {"order": "7"}, key="k-1")
            with pytest.raises(OutcomeUnknown):
                await client.call_tool("charge", {"order": "7"}, key="k-1")
            verdict = Done({"order": "7"})
            reason = "the bank has the payment"
            assert await app.resolve("tools/call:charge", "k-1", verdict, reason=reason)
            settled = await client.call_tool("charge", {"order": "7"}, key="k-1")
        assert settled.text == '{"order":"7"}'
        assert settled.replayed
        assert runs == ["7"]


@pytest.mark.parametrize("revision", ["2025-03-26", "2025-11-25", "2026-07-28"])
async def test_reconcile_answer_becomes_the_result_of_a_tool(revision: str) -> None:
    async with App("shop") as app:

        @app.command(on_crash="reconcile", reconcile=lambda order: Done({"order": order}))
        async def charge(order: str) -> dict[str, str]:
            raise RuntimeError("in the middle")

        async with connect(app, protocol="mcp", revision=revision) as client:
            with pytest.raises(InternalError):
                await client.call_tool("charge", {"order": "7"}, key="k-1")
            reconciled = await client.call_tool("charge", {"order": "7"}, key="k-1")
        assert reconciled.text == '{"order":"7"}'

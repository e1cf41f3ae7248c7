"""What a gateway would do: each tool of each upstream, query or command, and what is odd about it."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw, Struct

from wirecall.errors import CallFailed, RpcError
from wirecall.gateway.offers import LONGEST, MOST, MOST_BYTES, has_hidden, merged
from wirecall.gateway.state import named_reason
from wirecall.mcp.revisions import HANDSHAKE
from wirecall.mcp.server.peer import Session

if TYPE_CHECKING:
    from wirecall.gateway.gateway import Gateway
    from wirecall.gateway.upstream import Upstream


class PlannedTool(Struct, frozen=True):
    """One tool of the plan."""

    upstream: str
    tool: str
    # Its name at `/mcp`.
    name: str
    kind: str
    why: str
    recorded: bool


class Plan(Struct):
    """What a gateway would do."""

    tools: list[PlannedTool] = []
    # The revision of each upstream that answers.
    revisions: dict[str, str] = {}
    findings: list[str] = []


async def planned(
    gateway: "Gateway", on_answer: Callable[[str, int, str], None] | None = None
) -> Plan:
    """Start each upstream once, and return the plan.

    `on_answer` is called with the name, the number of tools and the revision of each that answers.
    """
    plan = Plan()
    upstreams = list(gateway.upstreams.values())
    found = await asyncio.gather(
        *(_tools_of(gateway, upstream, plan, on_answer) for upstream in upstreams)
    )
    lists = {upstream.name: tools for upstream, tools in zip(upstreams, found, strict=True)}
    table = merged("tools", lists, prefixes=gateway.settings.names == "prefix")
    names = {(place.server, place.name): own for own, place in table.places.items()}
    for name, several in table.shared.items():
        plan.findings.append(f"several servers have the tool {name}: it is {' and '.join(several)}")
    if table.left_out:
        plan.findings.append(f"/mcp takes {MOST:,} tools, and leaves {table.left_out} out")
    for upstream in upstreams:
        for entry in lists[upstream.name]:
            _add(plan, upstream, entry, names)
    return plan


async def _tools_of(
    gateway: "Gateway",
    upstream: "Upstream",
    plan: Plan,
    on_answer: Callable[[str, int, str], None] | None,
) -> list[Raw]:
    """Return the tools of an upstream; a finding if it does not give them."""
    client = Session(HANDSHAKE[-1])
    try:
        tools = await gateway.entries(upstream, "tools", "", client)
        async with gateway.conversation(upstream, "", client) as conversation:
            revision = conversation.revision
    except (RpcError, CallFailed) as error:
        plan.findings.append(named_reason(upstream.name, error))
        return []
    if revision is not None:
        plan.revisions[upstream.name] = revision.name
        if on_answer is not None:
            on_answer(upstream.name, len(tools), revision.name)
    return tools


def _add(plan: Plan, upstream: "Upstream", entry: Raw, names: dict[tuple[str, str], str]) -> None:
    """Add a tool to the plan, and what is odd about it to the findings."""
    members: dict[str, Any] = msgspec.json.decode(entry)
    tool = str(members.get("name"))
    own = names.get((upstream.name, tool), tool)
    is_command = upstream.use_of(tool) == "once"
    key = upstream.origin.keys.get(tool, "auto")
    plan.tools.append(
        PlannedTool(
            upstream.name,
            tool,
            own,
            "command" if is_command else "query",
            _reason(upstream, tool, members),
            is_command and key != "off",
        )
    )
    where = f"{upstream.name}: the tool {tool!r}"
    if not isinstance(members.get("annotations"), dict):
        plan.findings.append(f"{where} has no hints, so it is a command")
    if len(tool) > LONGEST:
        plan.findings.append(f"{where} has {len(tool)} characters; at /mcp it is {own}")
    size = len(bytes(entry))
    if size > MOST_BYTES:
        limit = f"more than {MOST_BYTES:,}: /mcp leaves it out"
        plan.findings.append(f"{where} has a definition of {size:,} bytes, {limit}")
    if has_hidden(entry):
        plan.findings.append(f"{where} has hidden characters in its definition")


def _reason(upstream: "Upstream", tool: str, members: dict[str, Any]) -> str:
    """Return why a tool is a query or a command."""
    if tool in upstream.origin.kinds:
        return "the settings say so"
    if upstream.origin.trust == "none":
        return 'trust = "none"'
    hints = members.get("annotations")
    if not isinstance(hints, dict):
        return "no hints"
    if hints.get("readOnlyHint") is True:
        return "readOnlyHint"
    if upstream.origin.trust == "full" and hints.get("idempotentHint") is True:
        return "idempotentHint"
    return "no readOnlyHint"

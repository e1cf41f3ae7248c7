"""What a server offers, in one form for all protocols, with what it says about itself (T5).

An app in this process is asked directly, a server of JSON-RPC by `rpc.discover`, which ours answer with an OpenRPC document
and others mostly refuse, a server of MCP by its lists. Hints are a server's own words; what it does not say is `unstated`.
"""

from typing import Any, Literal

from msgspec import Struct

from wirecall import App
from wirecall.cli.failures import Exit, Failure, nearest
from wirecall.errors import ConnectionLost, MethodNotFound, TimedOut
from wirecall.protocol.params import KEY

Kind = Literal["query", "command", "method", "tool", "resource", "template", "prompt"]
CALLABLE = ("query", "command", "method", "tool")


class Hints(Struct, frozen=True, omit_defaults=True, rename="camel"):
    """What is said about a call's effects; None: nothing."""

    read_only: bool | None = None
    destructive: bool | None = None
    open_world: bool | None = None
    keyed: bool = False

    def marks(self) -> list[str]:
        """The words that stand in lists, the dangerous ones with a sign."""
        rows = (
            (self.read_only is True, "read-only"),
            (self.destructive is True, "! destructive"),
            (self.keyed, "keyed"),
            (self.open_world is True, "! open-world"),
            (not self.read_only and self.destructive is None, "? unstated"),
        )
        return [word for holds, word in rows if holds]


class Offer(Struct, frozen=True, omit_defaults=True):
    """One thing on offer."""

    kind: Kind
    name: str
    title: str = ""
    description: str = ""
    hints: Hints | None = None
    schema: dict[str, Any] | None = None  # of the arguments; None: the server does not tell
    output: dict[str, Any] | None = None

    @property
    def summary(self) -> str:
        return self.title or next(iter(self.description.strip().splitlines()), "")

    @property
    def marks(self) -> list[str]:
        return self.hints.marks() if self.hints else []


def find(offers: list[Offer], name: str, help: str) -> Offer:
    """The offer of a name, or who comes near it; `help` is the command that lists all of them."""
    for offer in offers:
        if offer.name == name:
            return offer
    near = nearest(name, [offer.name for offer in offers])
    why = f"did you mean {near}?" if near else "the server offers nothing like it"
    raise Failure(f"There is no {name!r}.", why, help, type="method_unknown")


async def offers_of(client: Any, app: App | None, protocol: str, *, callable_only: bool = False) -> list[Offer] | None:
    """All that is on offer; None if the server does not tell."""
    if app is not None:
        return of_app(app, protocol)
    try:
        return await (_of_mcp(client, callable_only) if protocol == "mcp" else _of_rpc(client))
    except (ConnectionLost, TimedOut) as error:  # only questions were asked: there is no outcome to be unknown
        next = "is it well, and does it speak this protocol? (--as rpc|mcp, --timeout)"
        raise Failure(
            "The server does not answer.", str(error), next, exit=Exit.UNREACHABLE, type="unreachable", ran="no"
        ) from error


# --- an app ---------------------------------------------------------------------------------------------------------


def of_app(app: App, protocol: str | None = None) -> list[Offer]:
    """What an app serves, by one protocol or by both."""
    from wirecall.mcp.server.catalog import annotations, input_schema, output_schema

    def method_offer(method: Any) -> Offer:
        told = annotations(method)
        hints = Hints(told["readOnlyHint"], told["destructiveHint"], told["openWorldHint"], method.is_command)
        kind: Kind = method.kind.value if "rpc" in method.expose else "tool"
        schema = _without_key(input_schema(method))
        return Offer(kind, method.name, method.title or "", method.description or "", hints, schema, output_schema(method))

    found = {
        name: method for name, method in app.registry.methods.items() if protocol != "mcp" and not name.startswith("rpc.")
    }
    found |= app.registry.tools if protocol != "jsonrpc" else {}
    offers = [method_offer(method) for method in found.values()]
    return offers if protocol == "jsonrpc" else offers + _beside(app)


def _beside(app: App) -> list[Offer]:
    from wirecall.mcp.revisions import REVISIONS

    catalog, newest = app.catalog(), list(REVISIONS.values())[-1]
    found = [_resource(entry.described(newest)) for entry in (*catalog.resources.values(), *catalog.templates.values())]
    return found + [_prompt(entry.described(newest)) for entry in catalog.prompts.values()]


# --- JSON-RPC -------------------------------------------------------------------------------------------------------


async def _of_rpc(client: Any) -> list[Offer] | None:
    try:
        document = await client.call("rpc.discover", query=True)
    except MethodNotFound:
        return None
    methods = document.get("methods") if isinstance(document, dict) else None
    if not isinstance(methods, list):
        return None
    components = document.get("components", {})
    return [
        _method(method, components) for method in methods if isinstance(method, dict) and isinstance(method.get("name"), str)
    ]


def _method(told: dict[str, Any], components: Any) -> Offer:
    params = [param for param in told.get("params") or () if isinstance(param, dict) and isinstance(param.get("name"), str)]
    schema = {
        "type": "object",
        "properties": {param["name"]: param.get("schema", {}) for param in params},
        "required": [param["name"] for param in params if param.get("required") is True],
        "additionalProperties": False,
        "components": components,
    }
    stated: Any = told.get("x-kind")
    is_ours = stated in ("query", "command")
    kind: Kind = stated if is_ours else "method"
    hints = _ours(kind, told) if is_ours else Hints(None, told.get("x-destructive"), told.get("x-open-world"))
    output = told["result"].get("schema") if isinstance(told.get("result"), dict) else None
    texts = (str(told.get("summary") or ""), str(told.get("description") or ""))
    return Offer(kind, told["name"], *texts, hints, _without_key(schema) if is_ours else schema, output)


def _ours(kind: Kind, told: dict[str, Any]) -> Hints:
    """Our servers tell only what a method states. The rest is what MCP would be told of the same method: the worst."""
    is_command = kind == "command"
    is_destructive = is_command and told.get("x-destructive") is not False
    return Hints(not is_command, is_destructive, told.get("x-open-world") is not False, is_command)


def _without_key(schema: dict[str, Any]) -> dict[str, Any]:
    """`--key` is how it is given."""
    properties = {name: member for name, member in (schema.get("properties") or {}).items() if name != KEY}
    return {**schema, "properties": properties, "required": [name for name in schema.get("required") or () if name != KEY]}


# --- MCP ------------------------------------------------------------------------------------------------------------


async def _of_mcp(client: Any, callable_only: bool) -> list[Offer]:
    has = client.capabilities
    found = [_tool(tool, client.honours_keys) for tool in await client.list_tools()] if "tools" in has else []
    if callable_only:
        return found
    import msgspec

    if "resources" in has:
        listed = [*await client.list_resources(), *await client.list_resource_templates()]
        found += [_resource(msgspec.to_builtins(entry)) for entry in listed]
    if "prompts" in has:
        found += [_prompt(msgspec.to_builtins(entry)) for entry in await client.list_prompts()]
    return found


def _tool(tool: Any, honours_keys: bool) -> Offer:
    said = tool.annotations
    keyed = KEY in (tool.input_schema.get("properties") or {}) or (honours_keys and not tool.read_only)
    hints = Hints(tool.read_only, tool.destructive, tool.open_world, keyed) if said else Hints(keyed=keyed)
    schema = _without_key(tool.input_schema) if honours_keys else tool.input_schema
    return Offer(
        "tool",
        tool.name,
        tool.title or (said.title if said else "") or "",
        tool.description or "",
        hints,
        schema,
        tool.output_schema,
    )


def _resource(told: dict[str, Any]) -> Offer:
    kind: Kind = "template" if "uriTemplate" in told else "resource"
    name = told.get("uriTemplate") or told["uri"]
    text = told.get("description") or ""
    return Offer(kind, name, told.get("title") or "", text, None, None, _media(told.get("mimeType")))


def _media(mime_type: str | None) -> dict[str, Any] | None:
    return {"contentMediaType": mime_type} if mime_type else None


def _prompt(told: dict[str, Any]) -> Offer:
    arguments = told.get("arguments") or []
    schema = {
        "type": "object",
        "properties": {a["name"]: {"type": "string", "description": a.get("description") or ""} for a in arguments},
        "required": [a["name"] for a in arguments if a.get("required")],
    }
    return Offer("prompt", told["name"], told.get("title") or "", told.get("description") or "", None, schema)

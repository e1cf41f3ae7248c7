"""The offers of a server: `wirecall list` shows all of them, `wirecall show` one.

Methods, tools, resources and prompts have one form for all protocols, with their stated effects
(T5). An app in this process is asked directly. A JSON-RPC server is asked by `rpc.discover`, which
wirecall servers answer with an OpenRPC document and most others refuse. An MCP server is asked by
its lists. A server states effects itself; others are `unstated`.
"""

from contextlib import suppress
from typing import Any, Literal, TypeAlias, get_args

import click
import msgspec
from msgspec import Struct

from wirecall.app import App
from wirecall.cli.arguments import described, example, limits, words
from wirecall.cli.failures import CliError
from wirecall.cli.targets import (
    Target,
    TargetCommand,
    Way,
    asking,
    opened,
    target_argument,
    unlisted,
    way_options,
)
from wirecall.cli.terminal import Printer, aligned, json_option, run
from wirecall.contract.lock import members, required
from wirecall.errors import MethodNotFound, RpcError, nearest
from wirecall.logs import escaped
from wirecall.mcp.types import TAGS_META
from wirecall.protocol.keys import marked_path, without_key
from wirecall.protocol.messages import JsonObject
from wirecall.protocol.params import KEY
from wirecall.server.method import Method

Kind: TypeAlias = Literal["query", "command", "method", "tool", "resource", "template", "prompt"]
CALLABLE = ("query", "command", "method", "tool")


class Effects(Struct, frozen=True, omit_defaults=True, rename="camel"):
    """The effects that a server states for a call; None if it does not state one."""

    read_only: bool | None = None
    destructive: bool | None = None
    open_world: bool | None = None
    keyed: bool = False


class Offer(Struct, frozen=True, omit_defaults=True):
    """One method, tool, resource or prompt."""

    kind: Kind
    name: str
    title: str = ""
    description: str = ""
    hints: Effects | None = None
    # The schema of the arguments; None if the server does not state it.
    schema: JsonObject | None = None
    output: JsonObject | None = None
    tags: list[str] = []
    # The name that MCP clients see, if it differs.
    tool_name: str = ""
    # When a call becomes a task, in words. Only an app in this process states it.
    task: str = ""
    # The place of the key among the arguments, besides the usual one.
    key_path: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The title, or the first line of the description."""
        return self.title or next(iter(self.description.strip().splitlines()), "")

    @property
    def marks(self) -> str:
        """The effects in words; a dangerous one begins with a mark."""
        return self.marks_with(world=True)

    def marks_with(self, *, world: bool) -> str:
        """Return the effects in words, with or without the mark of an open world."""
        if (has := self.hints) is None:
            return ""
        rows = (
            (has.read_only is True, "read-only"),
            (has.destructive is True, "! destructive"),
            (has.keyed, "keyed"),
            (world and has.open_world is True, "! open-world"),
            (not has.read_only and has.destructive is None, "? unstated"),
        )
        return " · ".join(word for holds, word in rows if holds)

    @property
    def is_callable(self) -> bool:
        """Whether it is called, and not read as a resource or got as a prompt."""
        return self.kind in CALLABLE

    @property
    def only_reads(self) -> bool:
        """Whether the server states that a call changes nothing."""
        return self.hints is not None and self.hints.read_only is True

    @property
    def takes_key(self) -> bool:
        """Whether a call takes an idempotency key."""
        return self.hints is not None and self.hints.keyed


def find(offers: list[Offer], name: str, nouns: str, help: str) -> Offer:
    """Return the offer of a name.

    An error suggests the nearest name; `help` is a command that lists all.
    """
    for offer in offers:
        if name == offer.name or (offer.tool_name and name == offer.tool_name):
            return offer
    why = "the server offers nothing like it"
    if near := nearest(name, [offer.name for offer in offers]):
        why = f"did you mean {near}?"
    raise CliError(f"There is no {nouns} {name!r}.", why, help, type="method_unknown")


async def offers_of(
    client: Any, app: App | None, protocol: str, *, callable_only: bool = False
) -> list[Offer] | None:
    """Return all offers; None if the server does not list them."""
    if app is not None:
        return of_app(app, protocol)
    with asking():
        if protocol == "mcp":
            return await _of_mcp(client, callable_only)
        return await _of_rpc(client)


async def listed(target: Target, way: Way) -> list[Offer]:
    """Return all offers of a target; for an app, those of both protocols unless one is chosen."""
    # No protocol lists everything: a method may be exposed by only one of them.
    if target.kind == "file" and way.protocol is None and way.revision is None:
        return of_app(target.app())
    protocol = way.protocol_to(target)
    async with opened(target, way) as client:
        offers = await offers_of(client, None, protocol)
    if offers is None:
        raise unlisted(target)
    return offers


# --- an app in this process -----------------------------------------------------------------------


def of_app(app: App, protocol: str | None = None) -> list[Offer]:
    """Return the offers of an app, for one protocol or for both."""
    from wirecall.mcp.revisions import REVISIONS

    methods: dict[str, Method] = {}
    if protocol != "mcp":
        plain = app.registry.methods.items()
        methods |= {name: method for name, method in plain if not name.startswith("rpc.")}
    if protocol != "rpc":
        methods |= app.registry.tools
    offers = [_of_method(app, method, protocol) for method in methods.values()]
    if protocol == "rpc":
        return offers
    # The newest revision describes the most.
    catalog = app.catalog()
    newest = list(REVISIONS.values())[-1]
    resources = [*catalog.resources.values(), *catalog.templates.values()]
    offers += [_resource(entry.described(newest)) for entry in resources]
    return offers + [_prompt(entry.described(newest)) for entry in catalog.prompts.values()]


def _of_method(app: App, method: Method, protocol: str | None) -> Offer:
    """Return a method of an app as one protocol lists it, or as both do."""
    from wirecall.mcp.server.catalog import annotations, input_schema, output_schema

    stated = annotations(method)
    kind: Kind = "tool"
    if "rpc" in method.expose:
        kind = method.kind.value
    name = method.name
    if protocol == "mcp" or kind == "tool":
        name = method.tool_name
    other = ""
    if protocol is None and method.name in app.registry.tools and method.tool_name != name:
        other = method.tool_name
    return Offer(
        kind,
        name,
        method.title or "",
        method.description or "",
        Effects(
            stated["readOnlyHint"],
            stated["destructiveHint"],
            stated["openWorldHint"],
            method.is_command,
        ),
        _without_key(input_schema(method)),
        output_schema(method),
        method.tags,
        other,
        _task_words(method),
        marked_path(input_schema(method)),
    )


def _task_words(method: Method) -> str:
    """Return when a call of an MCP client becomes a task; "" if it never does."""
    if method.task is None:
        return ""
    if method.task == "required":
        return "becomes a task, and needs a client that has tasks"
    if method.task is True or method.hands_over:
        return "becomes a task"
    return f"becomes a task after {method.task:g} s"


# --- a server of JSON-RPC -------------------------------------------------------------------------


async def _of_rpc(client: Any) -> list[Offer] | None:
    try:
        document = await client.call("rpc.discover", query=True)
    # Servers that lack it answer with many codes: -32601, -32600, -32700, -32004, 1.
    except RpcError:
        return None
    if not isinstance(document, dict) or not isinstance(document.get("methods"), list):
        return None
    components = document.get("components", {})
    return [_of_openrpc(method, components) for method in _named(document["methods"])]


def _of_openrpc(method: JsonObject, components: object) -> Offer:
    """Return a method of an OpenRPC document."""
    params = _named(method.get("params"))
    schema: JsonObject = {
        "type": "object",
        "properties": {param["name"]: param.get("schema", {}) for param in params},
        "required": [param["name"] for param in params if param.get("required") is True],
        "additionalProperties": False,
        "components": components,
    }
    destructive = method.get("x-destructive")
    open_world = method.get("x-open-world")
    kind: Kind = "method"
    effects = Effects(None, destructive, open_world)
    key_path: tuple[str, ...] = ()
    if method.get("x-kind") in ("query", "command"):
        # A wirecall server. It sends only stated effects; the others default to the worst, as in
        # MCP.
        kind = method["x-kind"]
        is_command = kind == "command"
        is_destructive = is_command and destructive is not False
        effects = Effects(not is_command, is_destructive, open_world is not False, is_command)
        key_path = marked_path(schema)
        schema = _without_key(schema)
    return Offer(
        kind,
        method["name"],
        str(method.get("summary") or ""),
        str(method.get("description") or ""),
        effects,
        schema,
        _result_schema(method),
        [tag["name"] for tag in _named(method.get("tags"))],
        key_path=key_path,
    )


def _result_schema(method: JsonObject) -> JsonObject | None:
    """Return the schema of a result in an OpenRPC document, if there is one."""
    result = method.get("result")
    schema = result.get("schema") if isinstance(result, dict) else None
    if isinstance(schema, dict):
        return schema
    return None


def _named(entries: object) -> list[JsonObject]:
    """Return the objects with a name among the entries of a list.

    Any server may have written it.
    """
    if not isinstance(entries, list):
        return []
    return [
        entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("name"), str)
    ]


# --- a server of MCP ------------------------------------------------------------------------------


async def _of_mcp(client: Any, callable_only: bool) -> list[Offer]:
    has = client.capabilities
    offers = []
    if "tools" in has:
        offers += [_of_tool(tool, client.honours_keys) for tool in await client.list_tools()]
    if callable_only:
        return offers
    if "resources" in has:
        resources = await client.list_resources()
        with suppress(MethodNotFound):  # many servers have resources without templates
            resources += await client.list_resource_templates()
        offers += [_resource(msgspec.to_builtins(entry)) for entry in resources]
    if "prompts" in has:
        offers += [_prompt(msgspec.to_builtins(entry)) for entry in await client.list_prompts()]
    return offers


def _of_tool(tool: Any, honours_keys: bool) -> Offer:
    """Return a tool of a server; a wirecall server honours keys."""
    stated = tool.annotations
    # A wirecall server takes a key for every tool that changes something; others only if they
    # declare it.
    keyed = KEY in members(tool.input_schema) or (honours_keys and not tool.read_only)
    title = tool.title
    effects = Effects(keyed=keyed)
    if stated:
        title = title or stated.title
        effects = Effects(tool.read_only, tool.destructive, tool.open_world, keyed)
    schema = tool.input_schema
    key_path: tuple[str, ...] = ()
    if honours_keys:
        key_path = marked_path(schema)
        schema = _without_key(schema)
    return Offer(
        "tool",
        tool.name,
        title or "",
        tool.description or "",
        effects,
        schema,
        tool.output_schema,
        _tags(tool.meta),
        key_path=key_path,
    )


def _without_key(schema: JsonObject) -> JsonObject:
    """Return the schema without the key, which `--key` gives."""
    schema = without_key(schema)
    properties = {name: member for name, member in members(schema).items() if name != KEY}
    needed: list[object] = []
    if required(schema):
        needed = [name for name in schema.get("required", ()) if name != KEY]
    return {**schema, "properties": properties, "required": needed}


def _resource(entry: JsonObject) -> Offer:
    kind: Kind = "resource"
    if "uriTemplate" in entry:
        kind = "template"
    name = entry.get("uriTemplate") or entry["uri"]
    output = None
    if entry.get("mimeType"):
        output = {"contentMediaType": entry["mimeType"]}
    title = entry.get("title") or ""
    description = entry.get("description") or ""
    tags = _tags(entry.get("_meta"))
    return Offer(kind, name, title, description, None, None, output, tags)


def _prompt(entry: JsonObject) -> Offer:
    arguments = entry.get("arguments") or []
    schema = {
        "type": "object",
        "properties": {
            a["name"]: {"type": "string", "description": a.get("description") or ""}
            for a in arguments
        },
        "required": [a["name"] for a in arguments if a.get("required")],
    }
    title = entry.get("title") or ""
    description = entry.get("description") or ""
    tags = _tags(entry.get("_meta"))
    return Offer("prompt", entry["name"], title, description, None, schema, None, tags)


def _tags(meta: JsonObject | None) -> list[str]:
    """Return the tags in the `_meta` of a definition.

    They are wirecall's, or those that FastMCP's servers send.
    """
    found = (meta or {}).get(TAGS_META)
    for key in ("fastmcp", "_fastmcp"):
        other = (meta or {}).get(key)
        if not found and isinstance(other, dict):
            found = other.get("tags")
    if not isinstance(found, list):
        return []
    return [tag for tag in found if isinstance(tag, str)]


# --- list and show --------------------------------------------------------------------------------


@click.command("list", cls=TargetCommand)
@target_argument
@click.option("--kind", type=click.Choice(get_args(Kind)), help="Only this kind.")
@click.option("--tag", help="Only entries with this tag.")
@click.option("--filter", "text", help="Only entries with this text in their name or description.")
@way_options
@json_option
def list_command(
    target: Target, kind: str | None, tag: str | None, text: str | None, way: Way, out: Printer
) -> None:
    """List the methods and tools, resources and prompts of TARGET.

    The hints come from the server: read-only, destructive, keyed (takes an idempotency key),
    open-world (reaches beyond the server), or unstated.

    \b
    wirecall list shop.py
    wirecall list http://127.0.0.1:8420/mcp
    wirecall list -- python server.py
    """
    everything = run(listed(target, way))
    offers = [each for each in everything if _matches(each, kind, tag, text)]
    is_usual = _are_all_open(everything)
    rows = [
        (each.kind, each.name, each.marks_with(world=not is_usual), each.summary) for each in offers
    ]
    out.result(offers, lambda: out.table(["KIND", "NAME", "HINTS", "SUMMARY"], rows))
    if offers and is_usual and not out.as_json:
        out.note("All of them may reach beyond the server (open-world): none says otherwise.")
    if out.as_json or offers:
        return
    if everything:
        out.note(f"None of {len(everything)} entries matches.")
    else:
        out.note("The server offers nothing.")


def _are_all_open(offers: list[Offer]) -> bool:
    """Return whether every call may reach beyond the server: then a mark on each says nothing."""
    effects = [each.hints for each in offers if each.is_callable and each.hints is not None]
    return len(effects) > 1 and all(has.open_world is True for has in effects)


def _matches(offer: Offer, kind: str | None, tag: str | None, text: str | None) -> bool:
    """Return whether an offer is of the kind, has the tag and contains the text."""
    if kind is not None and offer.kind != kind:
        return False
    if tag is not None and tag not in offer.tags:
        return False
    described = f"{offer.name} {offer.title} {offer.description}"
    return text is None or text.lower() in described.lower()


@click.command("show", cls=TargetCommand)
@target_argument
@click.argument("name")
@way_options
@json_option
def show_command(target: Target, name: str, way: Way, out: Printer) -> None:
    """Show the arguments and the result of NAME of TARGET, and how to call it.

    \b
    wirecall show shop.py charge
    """
    nouns = "method, tool, resource or prompt"
    offer = find(run(listed(target, way)), name, nouns, target.line("list"))
    lines = [*_head(offer), *_takes(offer), *_returns(offer)]
    if offer.is_callable:
        key = "--key auto" if offer.takes_key else ""
        lines += ["", target.line("call", offer.name, example(offer.schema or {}), key)]
    out.result(offer, "\n".join(map(escaped, lines)))


def _head(offer: Offer) -> list[str]:
    """Return the lines about an offer as a whole: its name, effects, descriptions and tags."""
    lines = [f"{offer.name}  ({', '.join(filter(None, (offer.kind, offer.marks)))})"]
    for text in (offer.title, offer.description):
        lines += [f"  {line}" for line in text.strip().splitlines()]
    if offer.tool_name:
        lines.append(f"  MCP name: {offer.tool_name}")
    if offer.tags:
        lines.append(f"  Tags: {', '.join(offer.tags)}")
    if offer.task:
        lines.append(f"  A call {offer.task}.")
    return lines


def _takes(offer: Offer) -> list[str]:
    """Return the lines about the arguments; none if the server does not state them."""
    if offer.schema is None:
        return []
    rows = described(offer.schema)
    if not rows:
        return ["", "Takes nothing"]
    return ["", "Takes", *(f"  {line}" for line in aligned(rows))]


def _returns(offer: Offer) -> list[str]:
    """Return the lines about the result; none if the server does not state it."""
    if offer.output is None:
        return []
    kind = offer.output.get("contentMediaType")
    if not kind:
        kind = words(offer.output, offer.output) + limits(offer.output, offer.output)
    rows = [
        (name, type, remark.removeprefix("required").strip())
        for name, type, remark in described(offer.output)
    ]
    return ["", f"Returns {kind}", *(f"  {line}" for line in aligned(rows))]

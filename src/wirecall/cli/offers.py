"""The methods, tools, resources and prompts of a server: `wirecall list` shows all of them, `wirecall show` one.

They have one form for all protocols, with their stated effects (T5). An app in this process is asked directly, a JSON-RPC
server by `rpc.discover`, which wirecall servers answer with an OpenRPC document and most others refuse, an MCP server by its
lists. A server states effects itself; the rest is `unstated`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import click
import msgspec
from msgspec import Struct

from wirecall.app import App
from wirecall.cli.arguments import described, example, words
from wirecall.cli.failures import CliError, Exit, Unreachable, nearest
from wirecall.cli.input import run
from wirecall.cli.output import Printer, json_option
from wirecall.cli.targets import Target, TargetCommand, Way, opened, target_argument, way_options
from wirecall.errors import ConnectionLost, MethodNotFound, TimedOut
from wirecall.logs import escaped
from wirecall.mcp.types import TAGS_META
from wirecall.protocol.messages import JsonObject
from wirecall.protocol.params import KEY

Kind = Literal["query", "command", "method", "tool", "resource", "template", "prompt"]
CALLABLE = ("query", "command", "method", "tool")


class Effects(Struct, frozen=True, omit_defaults=True, rename="camel"):
    """The effects that a server states for a call; None if it does not state one."""

    read_only: bool | None = None
    destructive: bool | None = None
    open_world: bool | None = None
    keyed: bool = False

    def marks(self) -> list[str]:
        """Return the marks for lists; a dangerous one begins with a sign."""
        rows = (
            (self.read_only is True, "read-only"),
            (self.destructive is True, "! destructive"),
            (self.keyed, "keyed"),
            (self.open_world is True, "! open-world"),
            (not self.read_only and self.destructive is None, "? unstated"),
        )
        return [word for holds, word in rows if holds]


class Offer(Struct, frozen=True, omit_defaults=True):
    """One method, tool, resource or prompt."""

    kind: Kind
    name: str
    title: str = ""
    description: str = ""
    hints: Effects | None = None
    schema: JsonObject | None = None  # of the arguments; None if the server does not state it
    output: JsonObject | None = None
    tags: list[str] = []

    @property
    def summary(self) -> str:
        return self.title or next(iter(self.description.strip().splitlines()), "")

    @property
    def marks(self) -> list[str]:
        return self.hints.marks() if self.hints else []


def find(offers: list[Offer], name: str, nouns: str, help: str) -> Offer:
    """Return the offer of a name. An error suggests the nearest name; `help` is the command that lists all of them."""
    for offer in offers:
        if offer.name == name:
            return offer
    near = nearest(name, [offer.name for offer in offers])
    why = f"did you mean {near}?" if near else "the server offers nothing like it"
    raise CliError(f"There is no {nouns} {name!r}.", why, help, type="method_unknown")


async def offers_of(client: Any, app: App | None, protocol: str, *, callable_only: bool = False) -> list[Offer] | None:
    """Return all offers; None if the server does not list them."""
    if app is not None:
        return of_app(app, protocol)
    with asking():
        return await (_of_mcp(client, callable_only) if protocol == "mcp" else _of_rpc(client))


@contextmanager
def asking() -> Iterator[None]:
    """Ask a server only for what it offers. Nothing is called, so no outcome is unknown if it does not answer."""
    try:
        yield
    except (ConnectionLost, TimedOut) as error:
        what, next_step = "The server does not answer.", "does it speak this protocol? (--as rpc|mcp, --timeout)"
        raise Unreachable(what, error, next_step, ran="no") from error


def unlisted(target: Target) -> CliError:
    """Return the error about a server of JSON-RPC that does not list its methods."""
    return CliError(
        "The server does not list its methods.",
        "it has no rpc.discover, the method of OpenRPC for that",
        f"{target.line('call', 'METHOD')} works all the same; for MCP: --as mcp",
        exit=Exit.REMOTE,
        type="no_discovery",
    )


def of_app(app: App, protocol: str | None = None) -> list[Offer]:
    """Return the offers of an app, for one protocol or for both."""
    from wirecall.mcp.revisions import REVISIONS
    from wirecall.mcp.server.catalog import annotations, input_schema, output_schema

    methods = {
        name: method for name, method in app.registry.methods.items() if protocol != "mcp" and not name.startswith("rpc.")
    }
    methods |= app.registry.tools if protocol != "jsonrpc" else {}
    offers = []
    for method in methods.values():
        stated = annotations(method)
        effects = Effects(stated["readOnlyHint"], stated["destructiveHint"], stated["openWorldHint"], method.is_command)
        kind: Kind = method.kind.value if "rpc" in method.expose else "tool"
        texts = method.title or "", method.description or ""
        schemas = _without_key(input_schema(method)), output_schema(method)
        offers.append(Offer(kind, method.name, *texts, effects, *schemas, method.tags))
    if protocol == "jsonrpc":
        return offers
    # The newest revision describes the most.
    catalog, newest = app.catalog(), list(REVISIONS.values())[-1]
    resources = [*catalog.resources.values(), *catalog.templates.values()]
    offers += [_resource(entry.described(newest)) for entry in resources]
    return offers + [_prompt(entry.described(newest)) for entry in catalog.prompts.values()]


async def _of_rpc(client: Any) -> list[Offer] | None:
    try:
        document = await client.call("rpc.discover", query=True)
    except MethodNotFound:
        return None
    methods = document.get("methods") if isinstance(document, dict) else None
    if not isinstance(methods, list):
        return None
    offers = []
    for method in methods:
        if not isinstance(method, dict) or not isinstance(method.get("name"), str):
            continue
        params = [each for each in method.get("params") or () if isinstance(each, dict) and type(each.get("name")) is str]
        schema = {
            "type": "object",
            "properties": {param["name"]: param.get("schema", {}) for param in params},
            "required": [param["name"] for param in params if param.get("required") is True],
            "additionalProperties": False,
            "components": document.get("components", {}),
        }
        kind: Kind = method["x-kind"] if method.get("x-kind") in ("query", "command") else "method"
        destructive, open_world = method.get("x-destructive"), method.get("x-open-world")
        effects = Effects(None, destructive, open_world)
        if kind != "method":
            # A wirecall server. It sends only stated effects; the others default to the worst, as in MCP.
            is_command = kind == "command"
            is_destructive = is_command and destructive is not False
            effects = Effects(not is_command, is_destructive, open_world is not False, is_command)
            schema = _without_key(schema)
        output = method["result"].get("schema") if isinstance(method.get("result"), dict) else None
        texts = str(method.get("summary") or ""), str(method.get("description") or "")
        tags = [tag["name"] for tag in method.get("tags") or () if isinstance(tag, dict) and type(tag.get("name")) is str]
        offers.append(Offer(kind, method["name"], *texts, effects, schema, output, tags))
    return offers


async def _of_mcp(client: Any, callable_only: bool) -> list[Offer]:
    has, honours_keys, offers = client.capabilities, client.honours_keys, []
    for tool in await client.list_tools() if "tools" in has else ():
        stated = tool.annotations
        # A wirecall server takes a key for every tool that changes something; others only if they declare it.
        keyed = KEY in (tool.input_schema.get("properties") or {}) or (honours_keys and not tool.read_only)
        effects = Effects(tool.read_only, tool.destructive, tool.open_world, keyed) if stated else Effects(keyed=keyed)
        schema = _without_key(tool.input_schema) if honours_keys else tool.input_schema
        title = tool.title or (stated.title if stated else "") or ""
        texts = title, tool.description or ""
        offers.append(Offer("tool", tool.name, *texts, effects, schema, tool.output_schema, _tags(tool.meta)))
    if callable_only:
        return offers
    if "resources" in has:
        listed = [*await client.list_resources(), *await client.list_resource_templates()]
        offers += [_resource(msgspec.to_builtins(entry)) for entry in listed]
    if "prompts" in has:
        offers += [_prompt(msgspec.to_builtins(entry)) for entry in await client.list_prompts()]
    return offers


def _without_key(schema: JsonObject) -> JsonObject:
    """Return the schema without the key, which `--key` gives."""
    properties = {name: member for name, member in (schema.get("properties") or {}).items() if name != KEY}
    return {**schema, "properties": properties, "required": [name for name in schema.get("required") or () if name != KEY]}


def _resource(entry: JsonObject) -> Offer:
    kind: Kind = "template" if "uriTemplate" in entry else "resource"
    name = entry.get("uriTemplate") or entry["uri"]
    output = {"contentMediaType": entry["mimeType"]} if entry.get("mimeType") else None
    texts = entry.get("title") or "", entry.get("description") or ""
    return Offer(kind, name, *texts, None, None, output, _tags(entry.get("_meta")))


def _prompt(entry: JsonObject) -> Offer:
    arguments = entry.get("arguments") or []
    schema = {
        "type": "object",
        "properties": {a["name"]: {"type": "string", "description": a.get("description") or ""} for a in arguments},
        "required": [a["name"] for a in arguments if a.get("required")],
    }
    texts = entry.get("title") or "", entry.get("description") or ""
    return Offer("prompt", entry["name"], *texts, None, schema, None, _tags(entry.get("_meta")))


def _tags(meta: JsonObject | None) -> list[str]:
    """Return the tags in the `_meta` of a definition: wirecall's, or those that FastMCP's servers send."""
    found = (meta or {}).get(TAGS_META)
    for key in ("fastmcp", "_fastmcp"):
        other = (meta or {}).get(key)
        found = found or (other.get("tags") if isinstance(other, dict) else None)
    return [tag for tag in found if isinstance(tag, str)] if isinstance(found, list) else []


# --- the verbs ------------------------------------------------------------------------------------------------------


@click.command("list", cls=TargetCommand)
@target_argument
@click.option("--kind", type=click.Choice(get_args(Kind)), help="Only this kind.")
@click.option("--tag", help="Only entries with this tag.")
@click.option("--filter", "text", help="Only entries with this text in their name or description.")
@way_options
@json_option
def list_command(target: Target, kind: str | None, tag: str | None, text: str | None, way: Way, out: Printer) -> None:
    """List the methods and tools, resources and prompts of TARGET.

    The server states the marks itself: read-only, destructive, keyed (takes an idempotency key), open-world (reaches
    beyond the server); unstated if it states nothing.

    \b
    wirecall list shop.py
    wirecall list http://127.0.0.1:8420/mcp
    wirecall list -- python server.py
    """
    everything = run(listed(target, way))
    offers = [
        each
        for each in everything
        if kind in (None, each.kind)
        and (tag is None or tag in each.tags)
        and (text is None or text.lower() in f"{each.name} {each.title} {each.description}".lower())
    ]
    rows = [(each.kind, each.name, " · ".join(each.marks), each.summary) for each in offers]
    out.result(offers, lambda: out.table(["KIND", "NAME", "HINTS", "SUMMARY"], rows))
    if not offers and not out.as_json:
        out.note(f"None of {len(everything)} entries matches." if everything else "The server offers nothing.")


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
    offer = find(run(listed(target, way)), name, "method, tool, resource or prompt", target.line("list"))
    marks = " · ".join(offer.marks)
    lines = [f"{offer.name}  ({offer.kind}{', ' if marks else ''}{marks})"]
    lines += [f"  {line}" for text in (offer.title, offer.description) for line in text.strip().splitlines()]
    lines += [f"  Tags: {', '.join(offer.tags)}"] if offer.tags else []
    if offer.schema is not None:
        rows = _rows(described(offer.schema))
        lines += ["", "Takes" if rows else "Takes nothing", *rows]
    if offer.output is not None:
        lines += ["", f"Gives {offer.output.get('contentMediaType') or words(offer.output, offer.output)}"]
        lines += _rows(
            [(name, kind, remark.removeprefix("required").strip()) for name, kind, remark in described(offer.output)]
        )
    if offer.kind in CALLABLE:
        key = "--key auto" if offer.hints and offer.hints.keyed else ""
        lines += ["", target.line("call", offer.name, example(offer.schema or {}), key)]
    out.result(offer, "\n".join(map(escaped, lines)))


def _rows(rows: list[tuple[str, str, str]]) -> list[str]:
    widths = [max((len(row[at]) for row in rows), default=0) for at in (0, 1)]
    return [f"  {name.ljust(widths[0])}  {kind.ljust(widths[1])}  {remark}".rstrip() for name, kind, remark in rows]


async def listed(target: Target, way: Way) -> list[Offer]:
    """Return all offers of a target; for an app, those of both protocols unless one is chosen."""
    # No protocol lists everything: methods may be exposed by one of them alone.
    if target.kind == "file" and way.protocol is None and way.revision is None:
        return of_app(target.app())
    protocol = way.protocol_to(target)
    async with opened(target, way) as client:
        offers = await offers_of(client, None, protocol)
    if offers is None:
        raise unlisted(target)
    return offers

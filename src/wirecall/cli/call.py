"""What a server offers, and calls of it: `wirecall list` shows all offers, `wirecall show` one, `wirecall call` makes a call
(or reads a resource, or gets a prompt), and `wirecall task` goes on with a call that runs in the background.

1. Methods, tools, resources and prompts have one form for all protocols, with their stated effects (T5). An app in this
   process is asked directly, a JSON-RPC server by `rpc.discover`, which wirecall servers answer with an OpenRPC document and
   most others refuse, an MCP server by its lists. A server states effects itself; the rest is `unstated`.
2. A call is checked before it is sent, and has a key with which it can be repeated.
"""

import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeVar, get_args
from urllib.parse import quote, urlsplit

import click
import msgspec
from msgspec import Struct

from wirecall.app import App
from wirecall.cli.arguments import Dialogue, answer_option, arguments, described, example, words
from wirecall.cli.failures import CliError, Exit, Interrupted, failure_of, nearest
from wirecall.cli.targets import (
    Target,
    TargetCommand,
    Way,
    app_of,
    asking,
    ledger_option,
    opened,
    ready,
    target_argument,
    unlisted,
    way_options,
)
from wirecall.cli.terminal import Printer, aligned, ask, json_option, pretty, readable, reading, result_of, run
from wirecall.client.delivery import mint_key
from wirecall.contract.lock import members, required
from wirecall.errors import CallFailed, MethodNotFound, OutcomeUnknown, RpcError, UsageError
from wirecall.logs import escaped
from wirecall.mcp.types import TAGS_META
from wirecall.protocol.messages import JsonObject
from wirecall.protocol.params import KEY

T = TypeVar("T")


# --- offers ---------------------------------------------------------------------------------------------------------

Kind = Literal["query", "command", "method", "tool", "resource", "template", "prompt"]
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
    schema: JsonObject | None = None  # of the arguments; None if the server does not state it
    output: JsonObject | None = None
    tags: list[str] = []

    @property
    def summary(self) -> str:
        return self.title or next(iter(self.description.strip().splitlines()), "")

    @property
    def marks(self) -> str:
        """The effects in words; a dangerous one begins with a sign."""
        if (has := self.hints) is None:
            return ""
        rows = (
            (has.read_only is True, "read-only"),
            (has.destructive is True, "! destructive"),
            (has.keyed, "keyed"),
            (has.open_world is True, "! open-world"),
            (not has.read_only and has.destructive is None, "? unstated"),
        )
        return " · ".join(word for holds, word in rows if holds)


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
    if not isinstance(document, dict) or not isinstance(document.get("methods"), list):
        return None
    offers = []
    for method in _named(document["methods"]):
        params = _named(method.get("params"))
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
        output = output if isinstance(output, dict) else None
        texts = str(method.get("summary") or ""), str(method.get("description") or "")
        tags = [tag["name"] for tag in _named(method.get("tags"))]
        offers.append(Offer(kind, method["name"], *texts, effects, schema, output, tags))
    return offers


def _named(entries: object) -> list[JsonObject]:
    """Return the objects with a name among the entries of a list. Any server may have written it."""
    listed = entries if isinstance(entries, list) else []
    return [entry for entry in listed if isinstance(entry, dict) and isinstance(entry.get("name"), str)]


async def _of_mcp(client: Any, callable_only: bool) -> list[Offer]:
    has, honours_keys, offers = client.capabilities, client.honours_keys, []
    for tool in await client.list_tools() if "tools" in has else ():
        stated = tool.annotations
        # A wirecall server takes a key for every tool that changes something; others only if they declare it.
        keyed = KEY in members(tool.input_schema) or (honours_keys and not tool.read_only)
        effects = Effects(tool.read_only, tool.destructive, tool.open_world, keyed) if stated else Effects(keyed=keyed)
        schema = _without_key(tool.input_schema) if honours_keys else tool.input_schema
        title = tool.title or (stated.title if stated else "") or ""
        texts = title, tool.description or ""
        offers.append(Offer("tool", tool.name, *texts, effects, schema, tool.output_schema, _tags(tool.meta)))
    if callable_only:
        return offers
    if "resources" in has:
        listed = await client.list_resources()
        with suppress(MethodNotFound):  # many servers have resources, and no templates of them
            listed += await client.list_resource_templates()
        offers += [_resource(msgspec.to_builtins(entry)) for entry in listed]
    if "prompts" in has:
        offers += [_prompt(msgspec.to_builtins(entry)) for entry in await client.list_prompts()]
    return offers


def _without_key(schema: JsonObject) -> JsonObject:
    """Return the schema without the key, which `--key` gives."""
    properties = {name: member for name, member in members(schema).items() if name != KEY}
    needed = [name for name in schema.get("required", ()) if name != KEY] if required(schema) else []
    return {**schema, "properties": properties, "required": needed}


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


# --- list and show ------------------------------------------------------------------------------------------------------


@click.command("list", cls=TargetCommand)
@target_argument
@click.option("--kind", type=click.Choice(get_args(Kind)), help="Only this kind.")
@click.option("--tag", help="Only entries with this tag.")
@click.option("--filter", "text", help="Only entries with this text in their name or description.")
@way_options
@json_option
def list_command(target: Target, kind: str | None, tag: str | None, text: str | None, way: Way, out: Printer) -> None:
    """List the methods and tools, resources and prompts of TARGET.

    The hints come from the server: read-only, destructive, keyed (takes an idempotency key), open-world (reaches beyond
    the server), or unstated.

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
    rows = [(each.kind, each.name, each.marks, each.summary) for each in offers]
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
    lines = [f"{offer.name}  ({', '.join(filter(None, (offer.kind, offer.marks)))})"]
    lines += [f"  {line}" for text in (offer.title, offer.description) for line in text.strip().splitlines()]
    lines += [f"  Tags: {', '.join(offer.tags)}"] if offer.tags else []
    if offer.schema is not None:
        rows = described(offer.schema)
        lines += ["", "Takes" if rows else "Takes nothing", *(f"  {line}" for line in aligned(rows))]
    if offer.output is not None:
        lines += ["", f"Returns {offer.output.get('contentMediaType') or words(offer.output, offer.output)}"]
        rows = [(name, kind, remark.removeprefix("required").strip()) for name, kind, remark in described(offer.output)]
        lines += [f"  {line}" for line in aligned(rows)]
    if offer.kind in CALLABLE:
        key = "--key auto" if offer.hints and offer.hints.keyed else ""
        lines += ["", target.line("call", offer.name, example(offer.schema or {}), key)]
    out.result(offer, "\n".join(map(escaped, lines)))


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


# --- the call -------------------------------------------------------------------------------------------------------


class Wanted(Struct, kw_only=True):
    """The call to make. `key` is filled in before the call is sent, so that it is known however the call ends."""

    name: str
    words: tuple[str, ...]
    whole: str | None
    key: str | None
    yes: bool
    background: bool
    ledger: str | None
    answers: tuple[str, ...]
    is_sent: bool = False
    is_kept: bool = True  # the key outlives this command
    is_honoured: bool = True  # the server says so of keys; in plain JSON-RPC it cannot, and the user knows


@click.command("call", cls=TargetCommand)
@target_argument
@click.argument("name")
@click.argument("words", nargs=-1, metavar="[ARGUMENT ...]")
@click.option("--args", "whole", metavar="JSON|@FILE|-", help="All arguments as one JSON object.")
@click.option(
    "--key", metavar="KEY|auto", help="Idempotency key: calls with the same key take effect once. auto creates one."
)
@click.option("--yes", is_flag=True, help="Do not ask before a destructive call.")
@click.option("--background", is_flag=True, help="MCP: start a task, print its id, and do not wait for it.")
@answer_option
@ledger_option
@way_options
@json_option
def call_command(target: Target, way: Way, out: Printer, **given: Any) -> None:
    """Call the method or tool NAME of TARGET, read the resource NAME, or get the prompt NAME.

    Arguments are name=text, name:=JSON, name=@file, name:=@file, a.b=1 for a member of a member, tag[]=x for a list.
    They are converted by the method's schema. A call that does not match the schema is not sent.

    \b
    wirecall call shop.py price sku=tea
    wirecall call http://127.0.0.1:8420 charge order=7 cents=450 --key order-7
    wirecall call search 'filter:={"lang": "en"}' -- python server.py
    wirecall call http://127.0.0.1:8420 render film=7 --background
    wirecall call http://127.0.0.1:8420/mcp shop://articles
    wirecall call http://127.0.0.1:8420/mcp close user=ada --answer sure=true
    """
    wanted = Wanted(**given)
    if wanted.key == "":
        raise CliError("The key is empty.", "a key tells one command from another", "--key order-7, or --key auto")
    try:
        show = run(_call(out, target, way, wanted))
    except Interrupted as stopped:
        stopped.why = "the call may have run, or may still run" if wanted.is_sent else "nothing was sent"
        raise _resumable(stopped, wanted.key, wanted) if wanted.key and wanted.is_sent else stopped from None
    show()


async def _call(out: Printer, target: Target, way: Way, wanted: Wanted) -> Callable[[], None]:
    """Make the call, and return the function that prints its result: while the client is open, stdout is the server's."""
    # 1. The way to the server. A tool that an app offers only over MCP is called over MCP.
    app, name = app_of(target, wanted.ledger), wanted.name
    questions = Dialogue(wanted.answers)
    is_uri = "://" in name
    if app is not None and way.protocol is None and name not in app.registry.methods:
        if is_uri or name in app.registry.tools or name in app.catalog().prompts:
            way = msgspec.structs.replace(way, protocol="mcp")
    elif target.kind == "url" and way.protocol is None and is_uri and not urlsplit(target.text).path:
        way = msgspec.structs.replace(way, protocol="mcp")  # a wirecall server, which has both
    if wanted.background:
        way = way.to_tasks()
        if app is not None and app.ledger_url.startswith("memory:"):
            why = "the app runs in this process, and its ledger is in memory"
            raise CliError("The task would end with this command.", why, "serve the app, or --ledger sqlite:PATH")
    protocol = way.protocol_to(target)
    handlers = {"elicit": questions.elicit, "elicit_url": questions.visit}
    async with opened(target, way, app=app, handlers=handlers) as client:
        # 2. The method or tool, if the server lists them.
        offer = Offer("method", name)
        offers = None if name.startswith("rpc.") else await offers_of(client, app, protocol, callable_only=True)
        if offers is not None:
            if protocol == "mcp" and not any(each.name == name and each.kind in CALLABLE for each in offers):
                listed = await offers_of(client, app, protocol) or []
                other = next((each for each in listed if each.name == name), None) or (
                    Offer("resource", name) if is_uri else None
                )
                if other is not None:
                    return await _fetch(out, client, other, wanted, target, questions)
            for each in of_app(app) if app is not None else ():
                if each.name == name and each.kind not in CALLABLE:
                    raise CliError(f"{name} is a {each.kind}.", "JSON-RPC has only methods", "drop --as rpc")
            offer = find([each for each in offers if each.kind in CALLABLE], name, "method or tool", target.line("list"))
        effects = offer.hints

        # 3. Its arguments, its key, and the user's consent. All of this may read from the terminal.
        with reading():
            params = arguments(wanted.words, wanted.whole, offer.schema, help=target.line("show", name))
            # A query of JSON-RPC has no place for a key; MCP has one beside the arguments, where it does no harm.
            if wanted.key and protocol == "jsonrpc" and effects and effects.read_only and not effects.keyed:
                raise CliError(f"{name} does not take a key.", "it only reads", "drop --key", type="params")
            question = f"! {name} may destroy data that cannot be brought back. Call it?"
            if effects and effects.destructive and not wanted.yes and ask(question) is False:
                raise CliError("Nothing was sent.", "you said no", exit=Exit.INTERRUPTED, type="declined", ran="no")
        wanted.is_kept = app is None or not app.ledger_url.startswith("memory:")
        if wanted.key and not wanted.is_kept:
            kept = "--ledger sqlite:PATH keeps it, or [ledger] url = ... in wirecall.toml."
            out.note(f"This app's ledger is in memory: it forgets the key when this command ends. {kept}", "warning")
        wanted.is_honoured = protocol == "jsonrpc" or client.honours_keys
        if wanted.key and not wanted.is_honoured and not (effects and effects.read_only):
            out.note("The server does not say that it honours keys: the same call may take effect again.", "warning")
        # A command without a key gets one: without it, a lost answer could not be retried.
        if wanted.key == "auto" or (wanted.key is None and effects and effects.keyed and isinstance(params, dict)):
            wanted.key = mint_key()
        if app is not None and wanted.key:
            await ready(app)

        # 4. The call: started, or as the only entry of a batch, which knows its key and whether it was replayed.
        def progress(done: float, total: float | None, message: str | None) -> None:
            out.note(f"  {done:g}{f' of {total:g}' if total else ''}{f'  {message}' if message else ''}")

        wanted.is_sent, begun, key = True, time.perf_counter(), wanted.key or False
        revision = {"revision": client.revision} if client.revision else {}
        try:
            if wanted.background:
                task = await client.start_tool(name, params, key=key, progress=progress)
            else:
                async with client.batch() as batch:
                    if protocol == "mcp":
                        entry = batch.call_tool(name, params, key=key, progress=progress)
                    else:
                        entry = batch.call(name, params or None, key=key)
        except UsageError as error:  # only the key can still be wrong
            failure = failure_of(error)
            failure.next = failure.next or "use 1 to 255 printable ASCII characters without spaces, or --key auto"
            raise failure from None
        except (CallFailed, RpcError) as error:
            raise questions.failure or _failed(error, wanted.key, offer, wanted, target) from None
        took = time.perf_counter() - begun
    _tell(out, questions)
    if wanted.background:
        more = ({"key": wanted.key} if wanted.key else {}) | revision
        if task.id is None:
            out.note("The server answered at once: there is no task.")
            value = await task
            document = {"id": None, "status": task.status, "result": result_of(value)}
            return partial(out.result, document, readable(value), method=name, **more)
        shown = f"   key {wanted.key}" if wanted.key else ""
        out.note(f"{name} goes on{shown}   next: {target.line('task wait', task.id)}", "ok")
        return partial(out.result, {"id": task.id, "status": task.status}, task.id, method=name, **more)
    if entry.error is not None:
        failure = _failed(entry.error, entry.key, offer, wanted, target)
        failure.facts |= {"replayed": True} if entry.replayed else {}
        raise failure
    if not out.as_json:
        shown = f"   key {entry.key}" if entry.key else ""
        replayed = "   replayed: it ran before and was not executed again" if entry.replayed else ""
        out.note(f"{name}  {took * 1000:.0f} ms{shown}{replayed}", "replayed" if entry.replayed else "ok")
    more = ({"key": entry.key} if entry.key else {}) | revision
    value = entry.result()
    return partial(out.result, result_of(value), readable(value), method=name, replayed=entry.replayed, **more)


def _tell(out: Printer, questions: Dialogue) -> None:
    """Raise the reason for which a question was declined; name the answers that the server did not ask for."""
    if questions.failure is not None:
        raise questions.failure
    for name in sorted(questions.unused):
        why = "the server asked for other fields" if questions.asked else "the server asked nothing"
        out.note(f"--answer {name} was not used: {why}.", "warning")


# --- resources and prompts --------------------------------------------------------------------------------------------

_PLACE = re.compile(r"\{(\+?)(\w+)(\*?)\}")  # of a URI template: {name}, {+name}, {name*}


async def _fetch(
    out: Printer, client: Any, offer: Offer, wanted: Wanted, target: Target, questions: Dialogue
) -> Callable[[], None]:
    """Read a resource, or get a prompt. Both only read, so they take no key."""
    for given, option in ((wanted.key, "--key"), (wanted.background, "--background")):
        if given:
            raise CliError(
                f"{offer.name} does not take {option}.", f"it is a {offer.kind}, which only reads", f"drop {option}"
            )
    schema = offer.schema
    if offer.kind != "prompt":
        names = [match[2] for match in _PLACE.finditer(offer.name)] if offer.kind == "template" else []
        properties = {name: {"type": "string"} for name in names}
        schema = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    with reading():
        params = arguments(wanted.words, wanted.whole, schema, help=target.line("show", offer.name))
    begun = time.perf_counter()
    try:
        with asking():
            if offer.kind == "prompt":
                prompted = await client.get_prompt(offer.name, params)
                messages = [{"role": each.role, "content": each.content.on_wire()} for each in prompted.messages]
                told = {"description": prompted.description} if prompted.description else {}
                value: Any = {**told, "messages": messages}
                text = "\n".join(f"{each.role}: {each.text or pretty(each.content.on_wire())}" for each in prompted.messages)
            else:
                # RFC 6570: a name stands for one segment, {+name} and {name*} for several.
                uri = _PLACE.sub(lambda at: quote(params[at[2]], safe="/" if at[1] or at[3] else ""), offer.name)
                contents = await client.read_resource(uri if offer.kind == "template" else offer.name)
                value = [each.contents() for each in contents]
                text = "\n".join(
                    each.text if each.text is not None else f"[{each.mime_type}, {len(each.blob or b'')} bytes]"
                    for each in contents
                )
    except RpcError as error:
        failure = failure_of(error)
        failure.next = target.line("show", offer.name) if offer.kind == "prompt" else target.line("list")
        raise failure from None
    _tell(out, questions)
    if not out.as_json:
        out.note(f"{offer.name}  {(time.perf_counter() - begun) * 1000:.0f} ms", "ok")
    revision = {"revision": client.revision} if client.revision else {}
    return partial(out.result, value, text, **{offer.kind.replace("template", "resource"): offer.name}, **revision)


# --- the outcome ----------------------------------------------------------------------------------------------------


def _failed(error: Exception, key: str | None, offer: Offer, wanted: Wanted, target: Target) -> CliError:
    failure = failure_of(error)
    if isinstance(error, OutcomeUnknown) and key:
        # The command line that settles the record, for an operator of its ledger.
        data = error.data if isinstance(error.data, dict) else {}
        method = str(data.get("record", "")).removesuffix(key).rstrip("/") or wanted.name
        where = wanted.ledger or (target.text if target.kind == "file" else "")
        words = ("wirecall ledger resolve", where, method, key, "--done, or --not-done")
        failure.next = f"find out whether it took effect, then: {' '.join(filter(None, words))}"
    if key:
        failure = _resumable(failure, key, wanted)
    elif failure.exit == Exit.UNKNOWN:
        hint = "; with --key it could be repeated safely" if wanted.is_honoured else ""
        failure.next = f"find out whether it took effect before you repeat it{hint}"
    if failure.exit == Exit.UNKNOWN and offer.hints and offer.hints.read_only:
        failure.next = "repeat it: it only reads"
    return failure


def _resumable(failure: CliError, key: str, wanted: Wanted) -> CliError:
    """Add the key with which the same call can be repeated."""
    failure.facts["key"] = key
    if failure.exit in (Exit.UNKNOWN, Exit.INTERRUPTED):
        failure.next = f"repeat it with --key {key}: it takes effect once"
        if not wanted.is_honoured:
            failure.next = (
                "find out whether it took effect before you repeat it: the server does not say that it honours keys"
            )
        elif not wanted.is_kept:
            failure.next = "find out whether it took effect: the app's ledger is in memory, and has forgotten the key"
    return failure


# --- tasks ----------------------------------------------------------------------------------------------------------

_ID = click.argument("id")


@click.group("task")
def task_command() -> None:
    """Look at a background call, wait for it, or cancel it.

    `wirecall call TARGET TOOL --background` starts one and prints its id. Tasks are an extension of MCP 2026-07-28; a
    server that keeps them in its ledger continues them after a restart.
    """


async def _with(target: Target, ledger: str | None, way: Way, id: str, work: Callable[[Any], Awaitable[T]]) -> T:
    """Reach the server of a task, and return the result of the work on it."""
    app = app_of(target, ledger)
    async with opened(target, way.to_tasks(), app=app) as client:
        if app is not None:
            await ready(app)
        try:
            return await work(client.task(id))
        except MethodNotFound as error:
            failure = failure_of(error)
            failure.what, failure.next = "The server does not have tasks.", "call the tool without --background"
            raise failure from None


@task_command.command("show", cls=TargetCommand)
@target_argument
@_ID
@ledger_option
@way_options
@json_option
def show_task(target: Target, id: str, ledger: str | None, way: Way, out: Printer) -> None:
    """Show the state of the task ID of TARGET.

    \b
    wirecall task show http://127.0.0.1:8420 786512e2-9e0d-44bd-8f29-789f320fe840
    """
    state = run(_with(target, ledger, way, id, lambda task: task.refresh()))
    times = [f"{word} {time}" for word, time in (("created", state.created), ("updated", state.updated)) if time]
    lines = [f"{state.status}  {state.message or ''}".rstrip(), *(f"  {time}" for time in times)]
    out.result(_document(state), "\n".join(map(escaped, lines)))


@task_command.command("wait", cls=TargetCommand)
@target_argument
@_ID
@ledger_option
@way_options
@json_option
def wait_task(target: Target, id: str, ledger: str | None, way: Way, out: Printer) -> None:
    """Wait until the task ID of TARGET is over, and print its result as `wirecall call` does.

    It waits as long as the task takes; --timeout is the time of one request. Ctrl-C ends the wait, and the task continues.
    """

    async def wait(task: Any) -> Any:
        async for state in task:
            if state.message:
                out.note(f"  {state.message}")
        return await task

    try:
        value = run(_with(target, ledger, way, id, wait))
    except Interrupted as stopped:
        stopped.why, stopped.next = "the task goes on", target.line("task wait", id)
        raise
    out.result(result_of(value), readable(value), task=id)


@task_command.command("cancel", cls=TargetCommand)
@target_argument
@_ID
@ledger_option
@way_options
@json_option
def cancel_task(target: Target, id: str, ledger: str | None, way: Way, out: Printer) -> None:
    """Ask TARGET to cancel the task ID, and show its state after that.

    The server decides: a task that is past the point of no return finishes.
    """

    async def cancel(task: Any) -> Any:
        await task.cancel()
        return await task.refresh()

    state = run(_with(target, ledger, way, id, cancel))
    out.result(_document(state), str(state.status))
    if state.status in ("working", "input_required"):
        out.note("The server was asked to cancel it. It may still finish.")


def _document(state: Any) -> JsonObject:
    told = {"message": state.message, "created": state.created, "updated": state.updated, "ttlMs": state.ttl_ms}
    return {"id": state.id, "status": state.status, **{name: value for name, value in told.items() if value is not None}}

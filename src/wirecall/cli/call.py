"""`wirecall call`: one call, checked before it leaves, with a key that can be used again."""

import time
from typing import Any

import click
from msgspec import UNSET, Struct

from wirecall import App
from wirecall.cli.arguments import arguments
from wirecall.cli.connecting import Interrupted, Way, opened, reading, run, way_options
from wirecall.cli.failures import Exit, Failure, failure_of
from wirecall.cli.offers import CALLABLE, Offer, find, of_app, offers_of
from wirecall.cli.output import Output, ask, json_option, pretty
from wirecall.cli.settings import app_of, ledger_option
from wirecall.cli.targets import Target, TargetCommand, target_argument
from wirecall.client.client import mint_key
from wirecall.errors import OutcomeUnknown, UsageError


class Wanted(Struct, kw_only=True):
    """What is to be called. `key` is filled in before the call leaves, so that it is known whatever happens then."""

    name: str
    words: tuple[str, ...]
    whole: str | None
    key: str | None
    yes: bool
    ledger: str | None
    has_left: bool = False
    is_kept: bool = True  # the key outlives this command


@click.command("call", cls=TargetCommand)
@target_argument()
@click.argument("name")
@click.argument("words", nargs=-1, metavar="[ARGUMENT ...]")
@click.option("--args", "whole", metavar="JSON|@FILE|-", help="All arguments as one JSON object.")
@click.option(
    "--key", metavar="KEY|auto", help="Idempotency key: with the same one it takes effect once. auto makes one up."
)
@click.option("--yes", is_flag=True, help="Do not ask before a destructive call.")
@ledger_option
@way_options
@json_option
def command(target: Target, way: Way, as_json: bool, **given: Any) -> None:
    """Call the method or tool NAME of TARGET.

    Arguments are name=text, name:=JSON, name=@file, name:=@file, a.b=1 for a member of a member, tag[]=x for a list.
    They are converted by the method's schema, and what does not fit it is not sent.

    \b
    wirecall call shop.py price sku=tea
    wirecall call http://127.0.0.1:8420 charge order=7 cents=450 --key order-7
    wirecall call search 'filter:={"lang": "en"}' -- python server.py
    """
    wanted = Wanted(**given)
    if wanted.key == "":
        raise Failure("The key is empty.", "a key tells one command from another", "--key order-7, or --key auto")
    try:
        run(_call(Output(as_json), target, way, wanted))
    except Interrupted as stopped:
        stopped.why = "it may have run, or may still" if wanted.has_left else "nothing was sent"
        raise _resumable(stopped, wanted.key, wanted) if wanted.key and wanted.has_left else stopped from None


async def _call(out: Output, target: Target, way: Way, wanted: Wanted) -> None:
    app = app_of(target, wanted.ledger)
    way = _way_to(app, way, wanted.name)
    protocol = way.protocol_to(target)
    async with opened(target, way, app=app) as client:
        offers = None if wanted.name.startswith("rpc.") else await offers_of(client, app, protocol, callable_only=True)
        offer = _offer(offers, wanted.name, target, app)
        with reading():
            params = arguments(wanted.words, wanted.whole, offer.schema, help=target.line("show", wanted.name))
            _refuse_key(offer, wanted, protocol)
            _confirm(offer, wanted)
        wanted.is_kept = app is None or not app.ledger_url.startswith("memory:")
        _warn(out, wanted)
        wanted.key = _key(offer, wanted, params)
        if app is not None and wanted.key:
            from wirecall.cli.ledgers import ready  # late: a query does without

            await ready(app)
        wanted.has_left, begun = True, time.perf_counter()
        entry = await _sent(client, protocol, wanted, params, out)
        took = time.perf_counter() - begun
        revision = {"revision": client.revision} if client.revision else {}
    if entry.error is not None:
        raise _failed(entry, offer, wanted, target)
    value = result_of(entry.result())
    key = {"key": entry.key} if entry.key else {}
    if not out.as_json:
        _tell(out, wanted.name, took, entry)
    out.result(value, readable(entry.result()), method=wanted.name, replayed=entry.replayed, **key, **revision)


def _way_to(app: App | None, way: Way, name: str) -> Way:
    """What an app offers as a tool of MCP alone is called that way."""
    is_tool = app is not None and name in app.registry.tools and name not in app.registry.methods
    return Way("mcp", way.revision, way.timeout, way.headers) if is_tool and way.protocol is None else way


def _offer(offers: list[Offer] | None, name: str, target: Target, app: App | None) -> Offer:
    if offers is None:
        return Offer("method", name)
    for offer in of_app(app) if app is not None else offers:
        if offer.name == name and offer.kind not in CALLABLE:
            raise Failure(f"{name} is a {offer.kind}.", "methods and tools are called", target.line("show", name))
    return find([offer for offer in offers if offer.kind in CALLABLE], name, target.line("list"))


def _refuse_key(offer: Offer, wanted: Wanted, protocol: str) -> None:
    """A query of JSON-RPC has no room for a key; MCP has one beside the arguments, where it does no harm."""
    if wanted.key and protocol == "jsonrpc" and offer.hints and offer.hints.read_only and not offer.hints.keyed:
        raise Failure(f"{offer.name} takes no key.", "it only reads: repeat it as it is", "drop --key", type="params")


def _confirm(offer: Offer, wanted: Wanted) -> None:
    if offer.hints and offer.hints.destructive and not wanted.yes:
        agreed = ask(f"! {offer.name} may destroy something that cannot be brought back. Call it?")
        if agreed is False:
            raise Failure("Nothing was sent.", "you said no", "", exit=Exit.INTERRUPTED, type="declined", ran="no")


def _warn(out: Output, wanted: Wanted) -> None:
    if wanted.key and not wanted.is_kept:
        kept = "--ledger sqlite:PATH keeps it, or [ledger] url = ... in wirecall.toml."
        out.note(f"This app's ledger is in memory: it forgets the key when this command ends. {kept}", "warning")


def _key(offer: Offer, wanted: Wanted, params: Any) -> str | None:
    """The user's key. For what takes one and was given none, one is made, as without it nothing is repeated."""
    is_keyed = offer.hints is not None and offer.hints.keyed and isinstance(params, dict)
    return mint_key() if wanted.key == "auto" or (wanted.key is None and is_keyed) else wanted.key


async def _sent(client: Any, protocol: str, wanted: Wanted, params: Any, out: Output) -> Any:
    """The call as the only entry of a batch, which tells its key and whether it was replayed."""
    key = wanted.key or False
    async with client.batch() as batch:
        try:
            if protocol == "mcp":
                return batch.call_tool(wanted.name, params, key=key, progress=lambda *told: _progress(out, *told))
            return batch.call(wanted.name, params or None, key=key)
        except UsageError as error:  # of the call, only its key is left to be wrong
            failure = failure_of(error)
            failure.next = failure.next or "use 1 to 255 printable ASCII characters without spaces, or --key auto"
            raise failure from None


def _progress(out: Output, done: float, total: float | None, message: str | None) -> None:
    out.note(f"  {done:g}{f' of {total:g}' if total else ''}{f'  {message}' if message else ''}")


# --- the outcome ----------------------------------------------------------------------------------------------------


def result_of(value: Any) -> Any:
    """A result as JSON. A tool's is its structured content, else its text, else its content as it came."""
    if not hasattr(value, "structured"):
        return value
    if value.structured is not UNSET:
        only = isinstance(value.structured, dict) and list(value.structured) == ["result"]
        return value.structured["result"] if only else value.structured  # before 2026-07-28 it has to be an object
    kinds = {type(item).__name__ for item in value.content}
    return value.text if kinds <= {"Text"} else [item.on_wire() for item in value.content]


def readable(value: Any) -> str:
    """A result for people: no pictures in base64."""
    if not hasattr(value, "structured") or value.structured is not UNSET:
        return pretty(result_of(value))
    return "\n".join(_block(item) for item in value.content)


def _block(item: Any) -> str:
    if hasattr(item, "mime_type") and isinstance(getattr(item, "data", None), bytes):
        return f"[{item.mime_type}, {len(item.data)} bytes]"
    return item.text if hasattr(item, "text") and item.text is not None else pretty(item.on_wire())


def _tell(out: Output, name: str, took: float, entry: Any) -> None:
    key = f"   key {entry.key}" if entry.key else ""
    if entry.replayed:
        out.note(f"{name}  {took * 1000:.0f} ms{key}   replayed: it ran before and was not executed again", "replayed")
    else:
        out.note(f"{name}  {took * 1000:.0f} ms{key}", "ok")


def _failed(entry: Any, offer: Offer, wanted: Wanted, target: Target) -> Failure:
    failure = failure_of(entry.error)
    if isinstance(entry.error, OutcomeUnknown) and entry.key:
        failure.next = f"find out whether it took effect, then: {_resolving(entry, wanted, target)}"
    if entry.replayed:
        failure.facts["replayed"] = True
    if failure.exit_code == Exit.UNKNOWN and offer.hints and offer.hints.read_only:
        failure.next = "repeat it: it only reads"
    elif failure.exit_code == Exit.UNKNOWN and not entry.key:
        failure.next = "find out whether it took effect before you repeat it; with --key it could be repeated safely"
    return _resumable(failure, entry.key, wanted) if entry.key else failure


def _resolving(entry: Any, wanted: Wanted, target: Target) -> str:
    """The command line that settles a record, for who has its ledger."""
    data = entry.error.data if isinstance(entry.error.data, dict) else {}
    method = str(data.get("record", "")).removesuffix(entry.key).rstrip("/") or wanted.name
    where = wanted.ledger or (target.text if target.kind == "file" else "")
    return " ".join(filter(None, ("wirecall ledger resolve", where, method, entry.key, "--done, or --not-done")))


def _resumable(failure: Failure, key: str, wanted: Wanted) -> Failure:
    """A failure that says by which key the same call is made again."""
    failure.facts["key"] = key
    if failure.exit_code in (Exit.UNKNOWN, Exit.INTERRUPTED):
        failure.next = f"repeat it with --key {key}: it takes effect once"
        if not wanted.is_kept:
            failure.next = "find out whether it took effect: the app's ledger is in memory, and has forgotten the key"
    return failure

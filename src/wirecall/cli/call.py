"""`wirecall call`: one call, checked before it is sent, with a key that can be used again; or a resource, or a prompt.

`wirecall task` goes on with the calls that `--background` has left to the server, by the ids that it prints.
"""

import re
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import click
import msgspec
from msgspec import Struct

from wirecall.cli.arguments import arguments
from wirecall.cli.failures import CliError, Exit, Interrupted, failure_of
from wirecall.cli.input import reading, run
from wirecall.cli.ledger import ledger_option, ready
from wirecall.cli.offers import CALLABLE, Offer, asking, find, of_app, offers_of
from wirecall.cli.output import Printer, ask, json_option, pretty, readable, result_of
from wirecall.cli.questions import Dialogue, answer_option
from wirecall.cli.targets import Target, TargetCommand, Way, app_of, opened, target_argument, way_options
from wirecall.client.delivery import mint_key
from wirecall.errors import CallFailed, OutcomeUnknown, RpcError, UsageError
from wirecall.logs import escaped
from wirecall.protocol.messages import JsonObject

T = TypeVar("T")


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


@click.command("call", cls=TargetCommand)
@target_argument
@click.argument("name")
@click.argument("words", nargs=-1, metavar="[ARGUMENT ...]")
@click.option("--args", "whole", metavar="JSON|@FILE|-", help="All arguments as one JSON object.")
@click.option(
    "--key", metavar="KEY|auto", help="Idempotency key: calls with the same key take effect once. auto creates one."
)
@click.option("--yes", is_flag=True, help="Do not ask before a destructive call.")
@click.option("--background", is_flag=True, help="MCP: print the id of the task that goes on, and do not wait for it.")
@answer_option
@ledger_option
@way_options
@json_option
def call_command(target: Target, way: Way, out: Printer, **given: Any) -> None:
    """Call the method or tool NAME of TARGET, read the resource NAME, or get the prompt NAME.

    Arguments are name=text, name:=JSON, name=@file, name:=@file, a.b=1 for a member of a member, tag[]=x for a list.
    They are converted by the method's schema. A call that does not fit the schema is not sent.

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
                raise CliError(f"{name} takes no key.", "it only reads: repeat it without one", "drop --key", type="params")
            question = f"! {name} may destroy data that cannot be brought back. Call it?"
            if effects and effects.destructive and not wanted.yes and ask(question) is False:
                raise CliError("Nothing was sent.", "you said no", exit=Exit.INTERRUPTED, type="declined", ran="no")
        wanted.is_kept = app is None or not app.ledger_url.startswith("memory:")
        if wanted.key and not wanted.is_kept:
            kept = "--ledger sqlite:PATH keeps it, or [ledger] url = ... in wirecall.toml."
            out.note(f"This app's ledger is in memory: it forgets the key when this command ends. {kept}", "warning")
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
            raise CliError(f"{offer.name} takes no {option}.", f"it is a {offer.kind}, which only reads", f"drop {option}")
    schema = offer.schema
    if offer.kind != "prompt":
        names = [match[2] for match in _PLACE.finditer(offer.name)] if offer.kind == "template" else []
        properties = {name: {"type": "string"} for name in names}
        schema = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    with reading():
        params = arguments(wanted.words, wanted.whole, schema, help=target.line("show", offer.name))
    begun = time.perf_counter()
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
    if failure.exit == Exit.UNKNOWN and offer.hints and offer.hints.read_only:
        failure.next = "repeat it: it only reads"
    elif failure.exit == Exit.UNKNOWN and not key:
        failure.next = "find out whether it took effect before you repeat it; with --key it could be repeated safely"
    return _resumable(failure, key, wanted) if key else failure


def _resumable(failure: CliError, key: str, wanted: Wanted) -> CliError:
    """Add the key with which the same call can be repeated."""
    failure.facts["key"] = key
    if failure.exit in (Exit.UNKNOWN, Exit.INTERRUPTED):
        failure.next = f"repeat it with --key {key}: it takes effect once"
        if not wanted.is_kept:
            failure.next = "find out whether it took effect: the app's ledger is in memory, and has forgotten the key"
    return failure


# --- tasks ----------------------------------------------------------------------------------------------------------

_ID = click.argument("id")


@click.group("task")
def task_command() -> None:
    """Look at a call that goes on in the background, wait for it, or cancel it.

    `wirecall call TARGET TOOL --background` starts one and prints its id. Tasks are an extension of MCP 2026-07-28; a
    server that keeps them in its ledger goes on with them after a restart.
    """


async def _with(target: Target, ledger: str | None, way: Way, id: str, work: Callable[[Any], Awaitable[T]]) -> T:
    """Reach the server of a task, and return the result of the work on it."""
    app = app_of(target, ledger)
    async with opened(target, way.to_tasks(), app=app) as client:
        if app is not None:
            await ready(app)
        return await work(client.task(id))


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

    It waits as long as the task takes; --timeout is the time of one request. Ctrl-C ends the wait, and the task goes on.
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

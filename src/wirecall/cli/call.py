"""`wirecall call`: makes a call, reads a resource, or gets a prompt.

A call is checked before it is sent, and has a key with which it can be repeated.
"""

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import quote, urlsplit

import click
import msgspec
from msgspec import Struct

from wirecall.app import App
from wirecall.cli.arguments import arguments
from wirecall.cli.failures import CliError, Exit, Interrupted, failure_of
from wirecall.cli.offers import Offer, find, of_app, offers_of
from wirecall.cli.questions import Dialogue, answer_option
from wirecall.cli.save import binaries, check_path, save
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
    way_options,
)
from wirecall.cli.terminal import (
    Printer,
    Spinner,
    ask,
    json_option,
    pretty,
    readable,
    reading,
    result_of,
    run,
    stated,
)
from wirecall.client.delivery import mint_key
from wirecall.errors import CallFailed, OutcomeUnknown, RpcError, UsageError
from wirecall.ledger.base import RecordId
from wirecall.logs import escaped
from wirecall.protocol.keys import own_key
from wirecall.protocol.messages import JsonObject
from wirecall.protocol.params import tool_name_of


class Wanted(Struct, kw_only=True):
    """The call to make.

    `key` is set before the call is sent, so that it is known however the call ends.
    """

    name: str
    words: tuple[str, ...]
    whole: str | None
    key: str | None
    yes: bool
    background: bool
    ledger: str | None
    answers: tuple[str, ...]
    save: str | None
    # The binary parts of the result.
    found: list[bytes] = []
    is_sent: bool = False
    # The key outlives this command.
    is_kept: bool = True
    # The server declares that it honours keys. JSON-RPC cannot declare it, and the user knows.
    is_honoured: bool = True


@click.command("call", cls=TargetCommand)
@target_argument
@click.argument("name")
@click.argument("words", nargs=-1, metavar="[ARGUMENT ...]")
@click.option("--args", "whole", metavar="JSON|@FILE|-", help="All arguments as one JSON object.")
@click.option(
    "--key",
    metavar="KEY|auto",
    help="Idempotency key: calls with the same key take effect once. auto creates one.",
)
@click.option("--yes", is_flag=True, help="Do not ask before a destructive call.")
@click.option(
    "--background", is_flag=True, help="MCP: start a task, print its id, and do not wait for it."
)
@click.option(
    "--save", metavar="FILE", help="Write the image, sound or bytes of the result into FILE."
)
@answer_option
@ledger_option
@way_options
@json_option
def call_command(target: Target, way: Way, out: Printer, **given: Any) -> None:
    """Call the method or tool NAME of TARGET, read the resource NAME, or get the prompt NAME.

    Arguments are name=text, name:=JSON, name=@file, name:=@file, a.b=1 for a member of a member,
    tag[]=x for a list. They are converted by the method's schema. A call that does not match the
    schema is not sent.

    \b
    wirecall call shop.py price sku=tea
    wirecall call http://127.0.0.1:8420 charge order=7 cents=450 --key order-7
    wirecall call search 'filter:={"lang": "en"}' -- python server.py
    wirecall call http://127.0.0.1:8420 render film=7 --background
    wirecall call http://127.0.0.1:8420/mcp draw shape=circle --save circle.png
    wirecall call http://127.0.0.1:8420/mcp shop://articles
    wirecall call http://127.0.0.1:8420/mcp close user=ada --answer sure=true
    """
    wanted = Wanted(**given)
    if wanted.key == "":
        raise CliError(
            "The key is empty.",
            "a key tells one command from another",
            "--key order-7, or --key auto",
        )
    if wanted.save is not None:
        check_path(wanted.save)
    try:
        show = run(_call(out, target, way, wanted))
    except Interrupted as stopped:
        stopped.why = "nothing was sent"
        if wanted.is_sent:
            stopped.why = "the call may have run, or may still run"
            if wanted.key:
                _add_key(stopped, wanted.key, wanted)
        raise stopped from None
    show()
    if wanted.save is not None:
        save(out, wanted.save, wanted.found)


async def _call(out: Printer, target: Target, way: Way, wanted: Wanted) -> Callable[[], None]:
    """Make the call, and return the function that prints its result.

    It prints after the client has released stdout.
    """
    # 1. The connection.
    app = app_of(target, wanted.ledger)
    way = _way_of_call(target, way, app, wanted)
    protocol = way.protocol_to(target)
    questions = Dialogue(wanted.answers)
    running = _Running(wanted.name)
    spinner = Spinner(running.describe)
    async with opened(target, way, app=app, handlers=handlers_of(questions, spinner)) as client:
        # 2. The method or tool, if the server lists them.
        offer = await _offer(client, app, protocol, target, wanted.name)
        if not offer.is_callable:
            return await _fetch(out, client, offer, wanted, target, questions)

        # 3. Its arguments, the user's consent, and its key.
        params = _confirmed_params(offer, protocol, target, wanted)
        _settle_key(out, client, app, offer, protocol, params, wanted)
        if app is not None and wanted.key:
            await ready(app)

        # 4. The call.
        def progress(done: float, total: float | None, message: str | None) -> None:
            with spinner.paused():
                out.note(_progress_line(done, total, message))

        wanted.is_sent = True
        running.begin(offer.name)
        revision = stated(revision=client.revision)
        try:
            with spinner:
                if wanted.background:
                    key = wanted.key or False
                    task = await client.start_tool(offer.name, params, key=key, progress=progress)
                else:
                    await running.call(client, protocol, params, wanted.key, progress)
        except UsageError as error:  # only the key can still be wrong
            failure = failure_of(error)
            allowed = "use 1 to 255 printable ASCII characters without spaces, or --key auto"
            failure.next = failure.next or allowed
            raise failure from None
        except (CallFailed, RpcError) as error:
            raise questions.failure or _failed(error, wanted.key, offer, wanted, target) from None
        took = running.seconds()

    # 5. Its outcome.
    raise_or_note_unused(out, questions)
    if wanted.background:
        return await _started(out, task, offer, wanted, target, revision)
    return _outcome(out, running.entry, took, offer, wanted, target, revision)


# --- the connection -------------------------------------------------------------------------------


def _way_of_call(target: Target, way: Way, app: App | None, wanted: Wanted) -> Way:
    """Return the connection options with the protocol that the call needs."""
    if way.protocol is None and _needs_mcp(target, app, wanted.name):
        way = msgspec.structs.replace(way, protocol="mcp")
    if not wanted.background:
        return way
    way = way.to_tasks()
    if app is not None and app.ledger_url.startswith("memory:"):
        raise CliError(
            "The task would end with this command.",
            "the app runs in this process, and its ledger is in memory",
            "serve the app, or --ledger sqlite:PATH",
        )
    return way


def _needs_mcp(target: Target, app: App | None, name: str) -> bool:
    """Return whether only MCP has the name, as far as the target shows it before it is asked."""
    is_uri = "://" in name
    if app is None:
        # An address without a path is that of a wirecall server, which has both protocols.
        return target.kind == "url" and is_uri and not urlsplit(target.text).path
    if name in app.registry.methods:
        return False
    return is_uri or name in app.registry.called or name in app.catalog().prompts


class _Running:
    """The call in flight, as the line of the spinner describes it."""

    def __init__(self, name: str) -> None:
        self.name = name
        # The entry of the batch that makes the call.
        self.entry: Any = None
        self._begun = 0.0

    def begin(self, name: str) -> None:
        self.name = name
        self._begun = time.perf_counter()

    async def call(
        self,
        client: Any,
        protocol: str,
        params: Any,
        key: str | None,
        progress: Callable[[float, float | None, str | None], None],
    ) -> None:
        """Make the call as the only entry of a batch.

        The entry knows its key and whether it was replayed.
        """
        async with client.batch() as batch:
            if protocol == "mcp":
                self.entry = batch.call_tool(self.name, params, key=key or False, progress=progress)
            else:
                self.entry = batch.call(self.name, params or None, key=key or False)

    def seconds(self) -> float:
        return time.perf_counter() - self._begun

    def describe(self) -> str:
        task = getattr(getattr(self.entry, "extra", None), "task", None)
        return f"{self.name}  {self.seconds():.0f} s{status_of(task)}"


def _progress_line(done: float, total: float | None, message: str | None) -> str:
    line = f"  {done:g}"
    if total:
        line += f" of {total:g}"
    if message:
        line += f"  {message}"
    return line


# --- the method or tool ---------------------------------------------------------------------------


async def _offer(client: Any, app: App | None, protocol: str, target: Target, name: str) -> Offer:
    """Return what the server offers under a name.

    Without a list of its offers, the name is that of a method.
    """
    offers = None
    if not name.startswith("rpc."):
        offers = await offers_of(client, app, protocol, callable_only=True)
    if offers is None:
        return Offer("method", name)
    callables = [each for each in offers if each.is_callable]
    if protocol == "mcp":
        name = _name_in(offers, app, name)
        if not any(each.name == name for each in callables):
            other = await _other_offer(client, app, protocol, name)
            if other is not None:
                return other
    if app is not None:
        for each in of_app(app):
            if each.name == name and not each.is_callable:
                what = f"{name} is a {each.kind}."
                raise CliError(what, "JSON-RPC has only methods", "drop --as rpc")
    return find(callables, name, "method or tool", target.line("list"))


def _name_in(offers: list[Offer], app: App | None, name: str) -> str:
    """Return the name under which MCP lists a tool.

    A wirecall server also accepts the name of its method.
    """
    listed = {offer.name for offer in offers}
    if name in listed:
        return name
    tool = None if app is None else app.registry.called.get(name)
    other = tool_name_of(name) if tool is None else tool.tool_name
    if other in listed:
        return other
    return name


async def _other_offer(client: Any, app: App | None, protocol: str, name: str) -> Offer | None:
    """Return the resource or the prompt of a name. A server need not list all its resources."""
    for each in await offers_of(client, app, protocol) or ():
        if each.name == name:
            return each
    if "://" in name:
        return Offer("resource", name)
    return None


# --- the arguments and the key --------------------------------------------------------------------


def _confirmed_params(offer: Offer, protocol: str, target: Target, wanted: Wanted) -> Any:
    """Return the params of a call that the user consents to. This may read from the terminal."""
    name = offer.name
    with reading():
        params = arguments(wanted.words, wanted.whole, offer.schema, help=target.line("show", name))
        # A query of JSON-RPC has no place for a key; MCP has one beside the arguments, where it
        # does no harm.
        if wanted.key and protocol == "rpc" and offer.only_reads and not offer.takes_key:
            what = f"{name} does not take a key."
            raise CliError(what, "it only reads", "drop --key", type="params")
        is_destructive = offer.hints is not None and offer.hints.destructive
        question = f"! {name} may destroy data that cannot be brought back. Call it?"
        if is_destructive and not wanted.yes and ask(question) is False:
            raise CliError(
                "Nothing was sent.", "you said no", exit=Exit.INTERRUPTED, type="declined", ran="no"
            )
    return params


def _settle_key(
    out: Printer,
    client: Any,
    app: App | None,
    offer: Offer,
    protocol: str,
    params: Any,
    wanted: Wanted,
) -> None:
    """Set the key of the call, and warn if it does not protect the call."""
    wanted.is_kept = app is None or not app.ledger_url.startswith("memory:")
    wanted.is_honoured = protocol == "rpc" or client.honours_keys
    if wanted.key and not wanted.is_kept:
        out.note(
            "This app's ledger is in memory: it forgets the key when this command ends. "
            "--ledger sqlite:PATH keeps it, or [ledger] url = ... in wirecall.toml.",
            "warning",
        )
    if wanted.key and not wanted.is_honoured and not offer.only_reads:
        out.note(
            "The server does not say that it honours keys: the same call may take effect again.",
            "warning",
        )
    # A command without a key gets one: without it, a lost answer could not be retried.
    needs_key = wanted.key is None and offer.takes_key and isinstance(params, dict)
    if wanted.key == "auto" or needs_key:
        wanted.key = own_key(params, offer.key_path) or mint_key()


# --- questions and progress -----------------------------------------------------------------------


def handlers_of(questions: Dialogue, spinner: Spinner) -> dict[str, Callable[[Any], Any]]:
    """Return the handlers of a client that answer from the command line and on the terminal."""

    def elicit(form: Any) -> Any:
        with spinner.paused():
            return questions.elicit(form)

    def visit(page: Any) -> bool:
        with spinner.paused():
            return questions.visit(page)

    return {"elicit": elicit, "elicit_url": visit}


def status_of(task: Any) -> str:
    """Return the status of a task and the server's message, after two spaces; "" if unknown."""
    if task is None or task.status is None:
        return ""
    if task.message:
        return escaped(f"  {task.status}: {task.message}")
    return escaped(f"  {task.status}")


def raise_or_note_unused(out: Printer, questions: Dialogue) -> None:
    """Raise the reason why a question was declined, or name the answers that were not used."""
    if questions.failure is not None:
        raise questions.failure
    for name in sorted(questions.unused):
        why = "the server asked nothing"
        if questions.asked:
            why = "the server asked for other fields"
        out.note(f"--answer {name} was not used: {why}.", "warning")


# --- resources and prompts ------------------------------------------------------------------------

# A place of a URI template: {name}, {+name}, {name*}.
_PLACE = re.compile(r"\{(\+?)(\w+)(\*?)\}")


async def _fetch(
    out: Printer, client: Any, offer: Offer, wanted: Wanted, target: Target, questions: Dialogue
) -> Callable[[], None]:
    """Read a resource, or get a prompt. Both only read, so they take no key."""
    for given, option in ((wanted.key, "--key"), (wanted.background, "--background")):
        if given:
            raise CliError(
                f"{offer.name} does not take {option}.",
                f"it is a {offer.kind}, which only reads",
                f"drop {option}",
            )
    schema = offer.schema
    fetch = _get_prompt
    help = target.line("show", offer.name)
    if offer.kind != "prompt":
        schema = _places(offer)
        fetch = _read_resource
    with reading():
        params = arguments(wanted.words, wanted.whole, schema, help=help)
    begun = time.perf_counter()
    try:
        with asking():
            value, text = await fetch(client, offer, params)
    except RpcError as error:
        failure = failure_of(error)
        failure.next = help
        if offer.kind != "prompt":
            failure.next = target.line("list")
        raise failure from None
    raise_or_note_unused(out, questions)
    if isinstance(value, list):  # the contents of a resource
        wanted.found = [each["blob"] for each in value if isinstance(each.get("blob"), bytes)]
    if not out.as_json:
        out.note(f"{offer.name}  {(time.perf_counter() - begun) * 1000:.0f} ms", "ok")
    named = {offer.kind.replace("template", "resource"): offer.name}
    return partial(out.result, value, text, **named, **stated(revision=client.revision))


def _places(offer: Offer) -> JsonObject:
    """Return the schema of the places in a URI template; a resource has none."""
    names = []
    if offer.kind == "template":
        names = [match[2] for match in _PLACE.finditer(offer.name)]
    return {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names},
        "required": names,
        "additionalProperties": False,
    }


async def _get_prompt(client: Any, offer: Offer, params: Any) -> tuple[Any, str]:
    """Return a prompt for programs and for people."""
    prompted = await client.get_prompt(offer.name, params)
    messages = [
        {"role": each.role, "content": each.content.on_wire()} for each in prompted.messages
    ]
    lines = [
        f"{each.role}: {each.text or pretty(each.content.on_wire())}" for each in prompted.messages
    ]
    value = {**stated(description=prompted.description), "messages": messages}
    return value, "\n".join(lines)


async def _read_resource(client: Any, offer: Offer, params: Any) -> tuple[Any, str]:
    """Return the contents of a resource for programs and for people."""
    uri = offer.name
    if offer.kind == "template":

        def filled(place: re.Match[str]) -> str:
            # RFC 6570: a name matches one segment, {+name} and {name*} match several.
            kept = "/" if place[1] or place[3] else ""
            return quote(params[place[2]], safe=kept)

        uri = _PLACE.sub(filled, uri)
    contents = await client.read_resource(uri)
    lines = []
    for each in contents:
        if each.text is not None:
            lines.append(each.text)
        else:
            lines.append(f"[{each.mime_type}, {len(each.blob or b'')} bytes]")
    return [each.contents() for each in contents], "\n".join(lines)


# --- the outcome ----------------------------------------------------------------------------------


async def _started(
    out: Printer, task: Any, offer: Offer, wanted: Wanted, target: Target, revision: JsonObject
) -> Callable[[], None]:
    """Return the function that prints the task of a background call."""
    facts = {"method": offer.name, **stated(key=wanted.key), **revision}
    if task.id is None:
        out.note("The server answered at once: there is no task.")
        value = await task
        document = {"id": None, "status": task.status, "result": result_of(value)}
        return partial(out.result, document, readable(value), **facts)
    line = f"{offer.name} continues"
    if wanted.key:
        line += f"   key {wanted.key}"
    out.note(f"{line}   next: {target.line('task wait', task.id)}", "ok")
    return partial(out.result, {"id": task.id, "status": task.status}, task.id, **facts)


def _outcome(
    out: Printer,
    entry: Any,
    took: float,
    offer: Offer,
    wanted: Wanted,
    target: Target,
    revision: JsonObject,
) -> Callable[[], None]:
    """Return the function that prints the result of a call, or raise its error."""
    if entry.error is not None:
        failure = _failed(entry.error, entry.key, offer, wanted, target)
        failure.facts |= stated(replayed=entry.replayed)
        raise failure
    if not out.as_json:
        line = f"{offer.name}  {took * 1000:.0f} ms"
        mark = "ok"
        if entry.key:
            line += f"   key {entry.key}"
        if entry.replayed:
            line += "   replayed: it ran before and was not executed again"
            mark = "replayed"
        out.note(line, mark)
    value = entry.result()
    wanted.found = binaries(value, offer.output)
    facts = {"method": offer.name, "replayed": entry.replayed, **stated(key=entry.key), **revision}
    return partial(out.result, result_of(value), readable(value), **facts)


def _failed(
    error: Exception, key: str | None, offer: Offer, wanted: Wanted, target: Target
) -> CliError:
    """Return the error of a call, with the next step for its key and its effects."""
    failure = failure_of(error)
    if isinstance(error, OutcomeUnknown) and key:
        # The command line that settles the record, for an operator of its ledger.
        from wirecall.cli.ledger import resolving

        where = [wanted.ledger] if wanted.ledger else []
        if not where and target.kind == "file":
            where = target.words()
        failure.next = resolving(where, _record_of(error, wanted.name, key))
    if key:
        _add_key(failure, key, wanted)
    elif failure.exit == Exit.UNKNOWN:
        failure.next = "find out whether it took effect before you repeat it"
        if wanted.is_honoured:
            failure.next += "; with --key it could be repeated safely"
    if failure.exit == Exit.UNKNOWN and offer.only_reads:
        failure.next = "repeat it: it only reads"
    return failure


def _record_of(error: OutcomeUnknown, method: str, key: str) -> RecordId:
    """Return the record that an error names as caller/method/key. Each part may have a slash."""
    record = ""
    if isinstance(error.data, dict):
        record = str(error.data.get("record", ""))
    before_key = record.removesuffix(f"/{key}")
    for name in (f"tools/call:{method}", method):
        if before_key == name:
            return RecordId("", name, key)
        if before_key.endswith(f"/{name}"):
            return RecordId(before_key.removesuffix(f"/{name}"), name, key)
    return RecordId("", before_key or method, key)


def _add_key(failure: CliError, key: str, wanted: Wanted) -> None:
    """Add the key with which the same call can be repeated."""
    failure.facts["key"] = key
    if failure.exit not in (Exit.UNKNOWN, Exit.INTERRUPTED):
        return
    if not wanted.is_honoured:
        failure.next = (
            "find out whether it took effect before you repeat it: "
            "the server does not say that it honours keys"
        )
    elif not wanted.is_kept:
        failure.next = (
            "find out whether it took effect: "
            "the app's ledger is in memory, and has forgotten the key"
        )
    else:
        failure.next = f"repeat it with --key {key}: it takes effect once"

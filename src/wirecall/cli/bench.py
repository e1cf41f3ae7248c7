"""`wirecall bench`: load on a server, and how long its answers take.

1. Options are checked before anything is sent, and so are the calls, as far as the server describes
   its methods. Then each kind of call is made once: a call that fails ends the command.
2. A warm-up, which does not count. Without `--rate` it makes calls as fast as possible, and half of
   that is the rate.
3. The load (`load`), and between its parts the same load on a bare server (`servers`), so that both
   meet the same machine.
4. The figures, and the thresholds: exit code 9 if one is passed.
"""

import asyncio
import math
import os
import selectors
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import click
import msgspec
from msgspec import Raw, Struct

from wirecall.app import App
from wirecall.cli.arguments import arguments
from wirecall.cli.failures import CliError, Exit, Interrupted, failure_of
from wirecall.cli.figures import Arrivals, Check, NotACheck, bars, milliseconds
from wirecall.cli.load import (
    CALL_NUMBER,
    FIRST,
    NUMBER,
    Call,
    Connection,
    Difference,
    Figures,
    Load,
    Mix,
    Relay,
    most_common,
)
from wirecall.cli.offers import CALLABLE, Offer, find, offers_of
from wirecall.cli.servers import Over, Place, bare, over_of, served
from wirecall.cli.targets import (
    Target,
    TargetCommand,
    Way,
    app_of,
    duration,
    ledger_option,
    opened,
    stored_auth,
    target_argument,
    way_options,
)
from wirecall.cli.terminal import (
    Advance,
    Printer,
    aligned,
    ask,
    count_of,
    json_option,
    progress,
    reading,
    run,
)
from wirecall.client.client import Client
from wirecall.client.delivery import Retry
from wirecall.errors import KeyRequired, RpcError
from wirecall.logs import escaped
from wirecall.protocol.messages import JsonObject, encode
from wirecall.protocol.params import tool_name_of
from wirecall.transports.headers import is_loopback

MOST_RATE = 100_000
MOST_SECONDS = 600.0
MOST_CUT = 50.0
MOST_BATCH = 10_000
# A loop with `select` has at most 1,024 files; a connection with a relay takes four.
MOST_CONNECTIONS = 200
CONNECTIONS = 16
# Calls in flight on a pipe, or in this process; an HTTP connection has one.
DEPTH = 64
# Parts of a run with a baseline, at least a second each; the bare server gets half of their time.
PARTS = 4
TICK = 0.2

Baseline = Literal["bare", "none"]


# --- options --------------------------------------------------------------------------------------


def _number(text: str, unit: str, most: float) -> float | None:
    """Return a number above 0, followed by its unit; None if the string is something else."""
    if not text.strip().endswith(unit):
        return None
    try:
        number = float(text.strip().removesuffix(unit))
    except ValueError:
        return None
    # NaN is not within the limits either.
    return number if 0 < number <= most else None


def _rate(text: str) -> float:
    rate = _number(text, "", MOST_RATE)
    if rate is None:
        why = f"expected a number above 0 and at most {MOST_RATE:,}, got {text!r}"
        raise CliError(f"--rate {text!r} cannot be used.", why, "--rate 500")
    return rate


def _cut(text: str) -> float:
    """Return a percentage as a share: the `type=` of an option."""
    percent = _number(text, "%", MOST_CUT)
    if percent is None:
        why = f"expected a share of the calls above 0% and at most {MOST_CUT:g}%, got {text!r}"
        raise CliError(f"--cut {text!r} cannot be used.", why, "--cut 1%")
    return percent / 100


def _seconds(text: str) -> float:
    seconds = duration(text)
    if seconds > MOST_SECONDS:
        raise CliError(
            f"--duration {text!r} cannot be used.",
            f"expected at most {MOST_SECONDS / 60:g} minutes, got {text!r}",
            "--duration 10s",
        )
    return seconds


def _warmup(text: str) -> float:
    if text.strip() in ("0", "0s"):
        return 0.0
    return min(duration(text), MOST_SECONDS)


def _checks(
    _context: click.Context, _option: click.Parameter, texts: tuple[str, ...]
) -> list[Check]:
    found = []
    for text in texts:
        try:
            found.append(Check.read(text))
        except NotACheck as error:
            what = f"--fail-if {text!r} cannot be read."
            raise CliError(what, error.why, f"--fail-if '{error.fix}'") from None
    return found


class Plan(Struct, kw_only=True):
    """The choices of the user."""

    name: str | None
    words: tuple[str, ...]
    whole: str | None
    mix: str | None
    rate: float | None
    seconds: float
    warmup: float
    connections: int | None
    batch: int
    sessions: Literal["keep", "churn"]
    keys: bool
    cut: float | None
    kind: Arrivals
    over: Over | None
    baseline: Baseline | None
    checks: list[Check]
    allow_remote: bool
    yes: bool
    ledger: str | None
    # Set during the run: the calls whose outcome is known, for a message after Ctrl-C.
    done: int = 0

    def check(self, target: Target, over: Over) -> None:
        """Refuse choices that contradict each other or the target."""
        self._check_calls(target)
        self._check_rate()
        is_local = _is_local(target)
        if not is_local and not self.allow_remote:
            raise CliError(
                f"{urlsplit(target.text).hostname} is not on this machine.",
                "load can stop a server, and a server of others is not yours to stop",
                "--allow-remote, if it is yours and its operator knows",
            )
        self._check_cut(target, is_local and over == "http")
        self._check_baseline(target, over, is_local)

    def _check_calls(self, target: Target) -> None:
        if (self.name is None) == (self.mix is None):
            got = "neither" if self.name is None else "both"
            why = f"expected a METHOD or --mix FILE, got {got}"
            raise CliError("Which method?", why, target.line("bench", "METHOD", "name=value"))
        if self.mix is not None and self.whole is not None:
            raise CliError("--args is for one METHOD.", "--mix has params", "drop --args")

    def _check_rate(self) -> None:
        if self.rate is None and not self.warmup:
            why = "without --rate, the warm-up finds one"
            raise CliError("There is no rate.", why, "--rate 500, or a longer --warmup")
        if self.rate is not None and self.rate * self.seconds < 1:
            why = f"{self.rate:g} calls/s for {self.seconds:g} s are less than one call"
            raise CliError("There is no call to make.", why, "a higher --rate or --duration")

    def _check_cut(self, target: Target, is_local_http: bool) -> None:
        if not self.cut:
            return
        if not is_local_http or target.text.startswith("https:"):
            raise CliError(
                "--cut drops connections of HTTP.",
                "expected a server on this machine at http://..., or an app in a file",
                "drop --cut, or give such a target",
            )
        if self.sessions == "churn":
            why = "with --sessions churn every call has a new connection already"
            raise CliError("--cut and --sessions churn exclude each other.", why, "drop one")

    def _check_baseline(self, target: Target, over: Over, is_local: bool) -> None:
        if self.baseline == "bare" and (over != "http" or not is_local):
            raise CliError(
                "There is no bare server to compare with.",
                "it serves HTTP on this machine, and the target does not",
                "drop --baseline",
            )
        if self.has_baseline(target, over):
            return
        for check in self.checks:
            if check.name == "ratio":
                why = "the ratio compares with a bare server, and there is none"
                raise CliError(f"{check.text!r} has no ratio.", why, "--baseline bare")

    def has_baseline(self, target: Target, over: Over) -> bool:
        """Return whether a bare server runs beside; by default for an app in a file over HTTP."""
        if self.baseline is None:
            return target.kind == "file" and over == "http"
        return self.baseline == "bare"


def _is_local(target: Target) -> bool:
    if target.kind != "url":
        return True
    host = urlsplit(target.text).hostname or ""
    return host == "localhost" or host.endswith(".localhost") or is_loopback(host)


@click.command("bench", cls=TargetCommand)
@target_argument
@click.argument("name", required=False, metavar="[METHOD]")
@click.argument("words", nargs=-1, metavar="[ARGUMENT ...]")
@click.option("--args", "whole", metavar="JSON|@FILE|-", help="All arguments as one JSON object.")
@click.option(
    "--mix",
    metavar="FILE.jsonl",
    help='Calls to choose from, one per line: {"method": ..., "params": {...}, "weight": 3}.',
)
@click.option(
    "--rate",
    type=_rate,
    metavar="N",
    help="Calls per second. [default: half of what the warm-up reaches]",
)
@click.option(
    "--duration",
    "seconds",
    type=_seconds,
    default="10s",
    metavar="TIME",
    help="How long the load lasts, at most 10m. [default: 10s]",
)
@click.option(
    "--warmup",
    type=_warmup,
    default="2s",
    metavar="TIME",
    help="Load before it, which does not count; 0 for none. [default: 2s]",
)
@click.option(
    "--connections",
    type=click.IntRange(1, MOST_CONNECTIONS),
    metavar="N",
    help=f"Connections, or processes on stdio. [default: {CONNECTIONS} over HTTP, else 1]",
)
@click.option(
    "--arrivals",
    "kind",
    type=click.Choice(["even", "random"]),
    default="even",
    help="Calls at equal distances, or as many independent users make them. [default: even]",
)
@click.option(
    "--batch",
    type=click.IntRange(1, MOST_BATCH),
    default=1,
    metavar="N",
    help="Send arrays of N calls.",
)
@click.option(
    "--sessions",
    type=click.Choice(["keep", "churn"]),
    default="keep",
    help="Keep connections, or open a new session for each call. [default: keep]",
)
@click.option(
    "--keys",
    is_flag=True,
    help="Give every command a key, send a tenth of them twice, and compare the answers.",
)
@click.option(
    "--cut",
    type=_cut,
    metavar="PERCENT",
    help="Drop the connection of so many calls, and send them again: 1%.",
)
@click.option(
    "--over",
    type=click.Choice(["http", "stdio", "memory"]),
    help="How an app in a file is reached. [default: http]",
)
@click.option(
    "--baseline",
    type=click.Choice(["bare", "none"]),
    help="Compare with a bare server. [default: bare for an app in a file, else none]",
)
@click.option(
    "--fail-if",
    "checks",
    multiple=True,
    callback=_checks,
    metavar="THRESHOLD",
    help="Exit code 9 if it holds: 'p99>20ms', 'errors>0', 'ratio>3'. May be repeated.",
)
@click.option("--allow-remote", is_flag=True, help="Allow a server that is not on this machine.")
@click.option("--yes", is_flag=True, help="Do not ask before destructive calls.")
@ledger_option
@way_options
@json_option
def bench_command(target: Target, way: Way, out: Printer, **given: Any) -> int:
    """Make calls to TARGET at a steady rate, and report how long the answers take.

    Latency counts from the moment at which a call is due, also if no connection was free then.
    An app in a file is served in its own process, with a new ledger, and compared with a bare
    server. Each kind of call is also made once before. Arguments are those of `wirecall call`;
    {n} in them is the number of the call.

    \b
    wirecall bench shop.py price sku=tea
    wirecall bench http://127.0.0.1:8420/mcp price sku=tea --rate 500 --fail-if 'p99>20ms'
    wirecall bench shop.py charge 'order={n}' cents=450 --keys --cut 1%
    wirecall bench shop.py --mix calls.jsonl --batch 20
    wirecall bench price sku=tea -- python server.py
    """
    plan = Plan(**given)
    target.check_no_link("bench")
    over = over_of(target, plan.over)
    plan.check(target, over)
    try:
        report = run(_bench(out, target, way, plan, over), new_loop=_precise_loop())
    except Interrupted as stopped:
        stopped.why = f"{count_of(plan.done, 'call')} were made"
        raise
    out.result(report.document(), report.text())
    if report.figures.lagged * 100 > report.figures.due and not out.as_json:
        shown = count_of(report.figures.lagged, "call")
        what = (
            f"This process was late for {shown}: the machine is busy, and the figures include it."
        )
        out.note(what, "warning")
    return report.exit()


def _precise_loop() -> "Callable[[], asyncio.AbstractEventLoop] | None":
    """Return a maker of event loops whose timers are exact.

    The default one rounds every sleep up to a millisecond, which would make each call late.
    """
    if os.name != "posix":
        return None
    return lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())


# --- calls ----------------------------------------------------------------------------------------


class Line(Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a mix."""

    method: str = ""
    tool: str = ""
    params: JsonObject | list[Any] | None = None
    weight: float = 1.0


_EXAMPLE = '{"method": "price", "params": {"sku": "tea"}, "weight": 3}'


def read_mix(path: str) -> list[tuple[str, Line]]:
    """Return the lines of a mix, each with its place for errors."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        why = error.strerror or str(error)
        raise CliError(f"{path} cannot be read.", why, "--mix FILE.jsonl") from None
    found = []
    for number, text in enumerate(data.splitlines(), 1):
        if not text.strip():
            continue
        place = f"{path}, line {number}"
        try:
            line = msgspec.json.decode(text, type=Line)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise CliError(f"{place} is not a call.", str(error), _EXAMPLE, type="mix") from None
        if bool(line.method) == bool(line.tool):
            why = "expected one of the members method and tool"
            raise CliError(f"{place} is not a call.", why, _EXAMPLE, type="mix")
        if not 0 < line.weight < math.inf:
            why = f"expected a weight above 0, got {line.weight:g}"
            raise CliError(f"{place} cannot be used.", why, _EXAMPLE, type="mix")
        found.append((place, line))
    if not found:
        raise CliError(f"{path} is empty.", "expected one call per line", _EXAMPLE, type="mix")
    return found


def _protocol_of(target: Target, way: Way, app: App | None, names: list[str]) -> Way:
    """Decide on the protocol. Tools that an app offers only over MCP are called over MCP."""
    protocol = way.protocol_to(target)
    if app is not None and way.protocol is None:
        known = app.registry.methods
        if any(name not in known and name in app.registry.called for name in names):
            protocol = "mcp"
    return msgspec.structs.replace(way, protocol=protocol)


class Chosen(Struct, frozen=True):
    """A call of the mix, and what the server says about its method."""

    call: Call
    offer: Offer | None = None


async def _chosen(client: Any, plan: Plan, target: Target, protocol: str) -> list[Chosen]:
    """Return the calls to make, checked by the server's description of its methods."""
    offers = await offers_of(client, None, protocol, callable_only=True)
    if offers is None and plan.keys:
        raise CliError(
            "--keys needs the list of methods.",
            "only commands take a key, and the server does not list its methods",
            "drop --keys",
        )
    if plan.mix is None:
        assert plan.name is not None
        offer = _offer(offers, plan.name, target)
        with reading():
            params = _params(plan.words, plan.whole, offer, plan.name, target)
        return [_as_call(plan.name, params, 1.0, offer, plan)]
    found = []
    for place, line in read_mix(plan.mix):
        name = line.method or line.tool
        whole = None if line.params is None else encode(line.params).decode()
        try:
            offer = _offer(offers, name, target)
            params = _params((), whole, offer, name, target)
        except CliError as error:
            error.what = f"{place}: {error.what}"
            raise
        found.append(_as_call(name, params, line.weight, offer, plan))
    return found


def _offer(offers: list[Offer] | None, name: str, target: Target) -> Offer | None:
    if offers is None:
        return None
    callable_ones = [offer for offer in offers if offer.kind in CALLABLE]
    # A wirecall server also accepts the name of a tool's method.
    names = {offer.name for offer in callable_ones}
    if name not in names and tool_name_of(name) in names:
        name = tool_name_of(name)
    return find(callable_ones, name, "method or tool", target.line("list"))


def _params(
    words: tuple[str, ...], whole: str | None, offer: Offer | None, name: str, target: Target
) -> Any:
    """Return the arguments, checked with a number of a call in place of each `{n}`."""
    schema = None if offer is None else offer.schema
    help = target.line("show", name)
    number = _unused_number(words, whole)

    def read(whole: str | None) -> Any:
        numbered = [word.replace(NUMBER, number) for word in words]
        if whole is not None:
            whole = whole.replace(NUMBER, number)
        try:
            values = arguments(tuple(numbered), whole, schema, help=help)
        except CliError as error:
            error.why = error.why.replace(number, NUMBER)
            raise
        return _with_places(values, number) or None

    try:
        return read(whole)
    except CliError:
        if whole is None or f'"{NUMBER}"' not in whole:
            raise
        # JSON has no other way to write it where the method takes a number.
        try:
            return read(whole.replace(f'"{NUMBER}"', NUMBER))
        except CliError:
            pass
        raise


def _unused_number(words: tuple[str, ...], whole: str | None) -> str:
    """Return a number that occurs in no argument."""
    number = FIRST
    while any(str(number) in each for each in (*words, whole or "")):
        number += 1
    return str(number)


def _with_places(value: Any, number: str) -> Any:
    """Return arguments with places for the number of the call, where this number is."""
    if isinstance(value, str):
        return value.replace(number, NUMBER)
    if isinstance(value, (int, float)) and value == int(number):
        return CALL_NUMBER
    if isinstance(value, list):
        return [_with_places(each, number) for each in value]
    if isinstance(value, dict):
        return {name: _with_places(each, number) for name, each in value.items()}
    return value


def _as_call(name: str, params: Any, weight: float, offer: Offer | None, plan: Plan) -> Chosen:
    is_keyed = False
    if offer is not None:
        name = offer.name
        takes_key = offer.hints is not None and offer.hints.keyed
        is_keyed = plan.keys and takes_key and not isinstance(params, list)
    return Chosen(Call(name, params, weight, is_keyed), offer)


def _consent(chosen: Sequence[Chosen], plan: Plan, target: Target) -> None:
    """Ask before destructive calls, and refuse `--keys` if no call takes a key."""
    for each in chosen:
        effects = None if each.offer is None else each.offer.hints
        is_destructive = effects is not None and effects.destructive
        if is_destructive and not plan.yes:
            name = each.call.name
            question = f"! {name} may destroy data that cannot be brought back. Call it many times?"
            with reading():
                agreed = ask(question)
            if agreed is False:
                raise CliError(
                    "Nothing was sent.",
                    "you said no",
                    exit=Exit.INTERRUPTED,
                    type="declined",
                    ran="no",
                )
    if plan.keys and not any(each.call.is_keyed for each in chosen):
        names = ", ".join(dict.fromkeys(each.call.name for each in chosen))
        raise CliError(
            "--keys has no command to give a key to.",
            f"expected a command with params by name, got {names}",
            f"drop --keys; {target.line('list')} shows which methods are keyed",
        )


async def _trial(client: Any, chosen: Sequence[Chosen], plan: Plan) -> dict[str, Raw]:
    """Make each call once; return the results by method. An error ends the command."""
    results: dict[str, Raw] = {}
    for each in chosen:
        call = each.call
        request = call.request(FIRST - 1)
        async with client.batch() as batch:
            add = batch.call_tool if client.revision else batch.call
            entry = add(call.name, request.params, key=request.key or False)
        if entry.error is not None:
            failure = failure_of(entry.error)
            if isinstance(entry.error, KeyRequired):
                failure.next = "--keys gives every command a key"
            failure.what = f"The first call of {call.name} failed: {failure.what}"
            raise failure
        results[call.name] = entry.raw
    if plan.batch > 1:
        await _try_array(client, [each.call for each in chosen], plan)
    return results


async def _try_array(client: Any, calls: list[Call], plan: Plan) -> None:
    """Send one array; refuse `--batch` if the server does not accept it."""
    refusal = "The server does not accept the array."
    fix = "drop --batch"
    if client.revision:
        fix = "--revision 2025-03-26, the only one with arrays, or drop --batch"
    # Checked before anything is sent: the client would send smaller arrays, or single calls.
    if not client.arrays.legal:
        raise CliError(refusal, client.arrays.reason, fix, type="batch")
    most = await _largest(client)
    if plan.batch > most:
        why = f"expected at most {count_of(most, 'call')}, got {plan.batch}"
        fix = f"--batch {most}, or a higher limit at the server: --limit batch={plan.batch}"
        raise CliError(refusal, why, fix, type="batch")
    async with client.batch() as batch:
        add = batch.call_tool if client.revision else batch.call
        for number in range(plan.batch):
            request = calls[number % len(calls)].request(number)
            add(request.call.name, request.params, key=request.key or False)
    if batch.wire != "array":
        raise CliError(refusal, batch.reason, fix, type="batch")


async def _largest(client: Any) -> int:
    """Return how many calls the server accepts in one array, as far as it says so."""
    most: int = client.arrays.chunk
    if client.revision is not None:
        return most
    try:
        document = await client.call("rpc.discover", query=True)
        return msgspec.convert(document, _Described).limits.batch or most
    except (RpcError, msgspec.ValidationError):
        return most


class _Limits(Struct):
    batch: int = 0


class _Described(Struct):
    """The part of an OpenRPC document that names the limits of a wirecall server."""

    limits: _Limits = msgspec.field(name="x-limits", default_factory=_Limits)


# --- the run --------------------------------------------------------------------------------------


class Report(Struct, kw_only=True):
    """What is printed."""

    plan: Plan
    target: str
    place: Place
    protocol: str
    revision: str | None
    connections: int
    calls: list[Call]
    rate: float
    # The calls per second of the warm-up, if it found the rate.
    capacity: float | None
    figures: Figures
    bare: Figures | None

    @property
    def ratio(self) -> float | None:
        """How many times the median of the bare server the median of the target is."""
        if self.bare is None or not self.bare.latencies.count:
            return None
        return self.figures.latencies.percentile(50) / self.bare.latencies.percentile(50)

    def found(self) -> dict[str, float]:
        """Return the figures that thresholds name."""
        figures = self.figures
        return {
            **figures.latencies.named(),
            "errors": figures.failed,
            "late": figures.late,
            "unsent": figures.unsent,
            "differ": figures.twins.differ + figures.cuts.differ,
            "rate": figures.rate,
            "ratio": self.ratio or 0.0,
        }

    def passed(self) -> list[Check]:
        """Return the thresholds that are passed."""
        found = self.found()
        return [check for check in self.plan.checks if check.holds(found, self.figures.due)]

    def exit(self) -> int:
        if self.passed() or self.figures.twins.differ:
            return Exit.FOUND
        return Exit.DONE

    def document(self) -> JsonObject:
        """Return the report for programs. Times are in milliseconds."""
        plan = self.plan
        figures = self.figures
        found = self.found()
        passed = self.passed()
        document: JsonObject = {
            "target": self.target,
            "protocol": self.protocol,
            "revision": self.revision,
            "over": self.place.over,
            "methods": [{"name": call.name, "weight": call.weight} for call in self.calls],
            "connections": self.connections,
            "batch": plan.batch,
            "sessions": plan.sessions,
            "arrivals": plan.kind,
            "seconds": round(figures.seconds, 3),
            "rate": {"asked": self.rate, "reached": round(figures.rate, 2)},
            "calls": {
                "due": figures.due,
                "answered": figures.answered,
                "failed": figures.failed,
                "unsent": figures.unsent,
            },
            "late": {
                "calls": figures.late,
                "waited": figures.waited,
                "lagged": figures.lagged,
                "latest": round(figures.latest * 1000, 3),
            },
            "latency": figures.latencies.named(),
            "histogram": figures.latencies.rows(),
            "errors": most_common(figures),
        }
        if self.capacity is not None:
            document["rate"]["capacity"] = round(self.capacity, 2)
        if plan.keys:
            document["keys"] = figures.twins
        if plan.cut:
            document["cut"] = figures.cuts
        if self.bare is not None and self.ratio is not None:
            document["baseline"] = {
                "server": "bare",
                "latency": self.bare.latencies.named(),
                "reached": round(self.bare.rate, 2),
                "ratio": round(self.ratio, 3),
            }
        document["checks"] = [
            {"check": check.text, "found": round(found[check.name], 4), "failed": check in passed}
            for check in plan.checks
        ]
        return document

    # --- for people -------------------------------------------------------------------------------

    def text(self) -> str:
        """Return the report for people."""
        rows = [
            ("rate", self._rate()),
            ("calls", self._calls()),
            ("late", self._late()),
            ("latency", self._latency(self.figures)),
            *self._baseline(),
            *self._keys(),
            *self._cuts(),
            *(("error", self._error(failure)) for failure in most_common(self.figures)),
        ]
        lines = [self._head(), *aligned(rows), ""]
        lines += aligned(
            [(f"{name:>18}", bar, count, share) for name, bar, count, share in self._bars()]
        )
        for check in self.plan.checks:
            word = "FAILED" if check in self.passed() else "ok"
            lines.append(f"{word:<6}  --fail-if '{check.text}': {self._value(check.name)}")
        return "\n".join(lines)

    def _bars(self) -> list[tuple[str, str, str, str]]:
        return bars(self.figures.latencies.rows())

    def _head(self) -> str:
        names = ", ".join(dict.fromkeys(call.name for call in self.calls))
        spoken = "JSON-RPC" if self.protocol == "rpc" else f"MCP {self.revision}"
        where = {"http": "over HTTP", "stdio": "on stdio", "memory": "in this process"}
        parts = [f"{spoken} {where[self.place.over]}", count_of(self.connections, "connection")]
        if self.plan.batch > 1:
            parts.append(f"arrays of {self.plan.batch} calls")
        if self.plan.sessions == "churn":
            parts.append("a new session for each call")
        if self.plan.cut:
            parts.append("through a relay")
        if self.place.ledger:
            parts.append(self.place.ledger)
        return f"{names} of {self.target}: {', '.join(parts)}"

    def _rate(self) -> str:
        text = f"{self.rate:,g} calls/s asked, {self.figures.rate:,.1f} reached"
        if self.capacity is not None:
            text += f"   (asked: half of the {self.capacity:,.0f} calls/s of the warm-up)"
        return text

    def _calls(self) -> str:
        figures = self.figures
        text = f"{figures.due:,} due, {figures.answered:,} answered, {figures.failed:,} failed"
        if figures.unsent:
            text += f", {figures.unsent:,} never sent: they count with their age at the end"
        return text

    def _late(self) -> str:
        figures = self.figures
        text = f"{figures.late:,} started more than 10 ms late"
        if figures.late:
            reasons = f"{figures.waited:,} waited for a connection, {figures.lagged:,} for this"
            text += f": {reasons} process; at most {milliseconds(figures.latest * 1000)}"
        return text

    def _latency(self, figures: Figures) -> str:
        named = figures.latencies.named()
        shown = [f"{name} {milliseconds(named[name])}" for name in named if name != "mean"]
        return "   ".join(shown)

    def _baseline(self) -> list[tuple[str, str]]:
        if self.bare is None or self.ratio is None:
            return []
        per_call = " per call" if self.plan.batch > 1 else ""
        ratio = f"ratio {self.ratio:.2f} of the medians{per_call}; both include this client"
        return [("bare", self._latency(self.bare)), ("", ratio)]

    def _keys(self) -> list[tuple[str, str]]:
        twins = self.figures.twins
        if not self.plan.keys:
            return []
        equal = twins.compared - twins.differ
        text = f"{twins.compared:,} pairs of calls with one key: {equal:,} equal answers"
        text += f", {twins.differ:,} different, {twins.replayed:,} marked as replays"
        if twins.unanswered:
            text += f"; {twins.unanswered:,} pairs lack an answer"
        return [("keys", text), *_shown(twins.example)]

    def _cuts(self) -> list[tuple[str, str]]:
        cuts = self.figures.cuts
        if not self.plan.cut:
            return []
        text = f"{cuts.cut:,} calls cut; sent again {cuts.with_key:,} with their key,"
        text += f" {cuts.without_key:,} without; {cuts.answered:,} answered, {cuts.failed:,} failed"
        known = f"marked as replays: {cuts.replayed:,}, which ran once"
        if fresh := cuts.answered - cuts.replayed:
            known += f"; not marked: {fresh:,}, which ran after the cut, and perhaps before it too"
        compared = "whether a call had its effect twice cannot be seen: the answers vary anyway"
        if cuts.compared:
            compared = f"answers like those without a cut: {cuts.compared - cuts.differ:,}"
            compared += f"; unlike them: {cuts.differ:,}"
        return [("cut", text), ("", known), ("", compared), *_shown(cuts.example)]

    @staticmethod
    def _error(failure: Any) -> str:
        name = failure.type if failure.code is None else str(failure.code)
        return f"{failure.count:,} x {name}: {' '.join(failure.message.split())[:160]}"

    def _value(self, name: str) -> str:
        found = self.found()[name]
        if name in self.figures.latencies.named():
            return f"{name} is {milliseconds(found)}"
        return f"{name} is {found:,.5g}"


def _shown(example: Difference | None) -> list[tuple[str, str]]:
    """Return the lines about two answers that should be equal."""
    if example is None:
        return []
    key = f" with key {example.key}" if example.key else ""
    return [
        ("", f"different answers of {example.method}{key}:"),
        ("", f"  {escaped(example.first):.200}"),
        ("", f"  {escaped(example.second):.200}"),
    ]


async def _bench(out: Printer, target: Target, way: Way, plan: Plan, over: Over) -> Report:
    _end_on_sigterm()
    names = [plan.name or ""]
    if plan.mix is not None:
        names = [line.method or line.tool for _, line in read_mix(plan.mix)]
    app = app_of(target, plan.ledger)
    way = _protocol_of(target, way, app, names)
    async with AsyncExitStack() as stack:
        place = await stack.enter_async_context(served(target, over, app, plan.ledger))
        client = await stack.enter_async_context(opened(place.target, way, app=place.app))
        protocol = way.protocol_to(place.target)
        chosen = await _chosen(client, plan, target, protocol)
        _consent(chosen, plan, target)
        results = await _trial(client, chosen, plan)
        calls = [each.call for each in chosen]
        revision = client.revision
        way = msgspec.structs.replace(way, revision=revision)
        connections = plan.connections or (CONNECTIONS if over == "http" else 1)
        connect = await _connector(place, way)
        load = await stack.enter_async_context(_load(plan, place, way, calls, connections, connect))
        beside: Load | None = None
        if plan.has_baseline(target, over):
            address = await stack.enter_async_context(bare(results, revision))
            other = Place(Target("url", address), "http")
            easy = msgspec.structs.replace(plan, cut=None, keys=False)
            opener = await _connector(other, way)
            unkeyed = [msgspec.structs.replace(call, is_keyed=False) for call in calls]
            context = _load(easy, other, way, unkeyed, connections, opener)
            beside = await stack.enter_async_context(context)
        report = Report(
            plan=plan,
            target=target.of(target.text),
            place=place,
            protocol=protocol,
            revision=revision,
            connections=connections,
            calls=calls,
            rate=plan.rate or 0.0,
            capacity=None,
            figures=Figures(),
            bare=None if beside is None else Figures(),
        )
        await _measure(out, report, load, beside)
    if not report.figures.answered:
        first = most_common(report.figures)[0]
        why = f"{count_of(first.count, 'call')}: {first.message}"
        raise CliError("No call was answered.", why, exit=Exit(first.exit), type=first.type)
    return report


def _end_on_sigterm() -> None:
    """Make SIGTERM end the command as Ctrl-C does, so that it ends its servers."""
    task = asyncio.current_task()
    assert task is not None
    with suppress(NotImplementedError, RuntimeError, ValueError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


async def _connector(place: Place, way: Way) -> Callable[[str | None], Client]:
    """Return a function that makes a client of the server, perhaps at another address."""
    from wirecall.client.connect import connect

    # A call that fails must be seen: the client does not repeat it.
    options: Any = {
        "protocol": way.protocol_to(place.target),
        "timeout": way.timeout,
        "retry": Retry(attempts=1),
    }
    if options["protocol"] == "mcp":
        options["revision"] = way.revision
    where: Any = list(place.target.command)
    if place.target.kind == "file":
        where = place.app
    if place.target.kind == "url":
        where = way.address(place.target)
        options["headers"] = way.headers
        options["auth"] = await stored_auth(where, way.headers)

    def make(url: str | None = None) -> Client:
        client: Client = connect(url or where, **options)
        return client

    return make


def _load(
    plan: Plan,
    place: Place,
    way: Way,
    calls: Sequence[Call],
    count: int,
    connect: Callable[[str | None], Client],
) -> Any:
    """Return a context manager of the load."""
    connections = []
    for _ in range(count):
        relay = None
        make = partial(connect, None)
        if plan.cut:
            relay = Relay(way.address(place.target))
            make = partial(_through, relay, connect)
        connections.append(Connection(make, churn=plan.sessions == "churn", relay=relay))
    depth = 1
    if place.over != "http" and plan.sessions == "keep":
        depth = DEPTH
    spare: Connection | None = None
    if plan.keys and place.over == "http":
        spare = Connection(partial(connect, None))
    load = Load(
        Mix(calls),
        connections,
        depth=depth,
        batch=plan.batch,
        twice=plan.keys,
        spare=spare,
        cut=plan.cut or 0.0,
    )
    return load.opened()


def _through(relay: Relay, connect: Callable[[str | None], Client]) -> Client:
    return connect(relay.url)


async def _measure(out: Printer, report: Report, load: Load, beside: Load | None) -> None:
    """Warm up, find the rate if it was not given, and run the load."""
    plan = report.plan
    try:
        if plan.rate is None:
            if not out.as_json:
                out.note(f"Finding a rate: {plan.warmup:g} s at full speed.")
            report.capacity = await load.at_full_speed(plan.warmup)
            if not report.capacity:
                why = "no call was answered in the second half of the warm-up"
                raise CliError("There is no rate to find.", why, "--rate N, or a longer --warmup")
            report.rate = max(float(f"{report.capacity / 2:.3g}"), 1.0)
            if not out.as_json:
                shown = f"{report.capacity:,.0f} calls/s; half of it is the rate"
                out.note(f"The server answers {shown}: {report.rate:,g} calls/s.")
        elif plan.warmup:
            await load.at_rate(report.rate, plan.warmup, Figures(), plan.kind)
        if beside is not None:
            await beside.at_rate(report.rate, min(plan.warmup or 0.5, 0.5), Figures())
        parts = 1
        if beside is not None:
            parts = max(1, min(PARTS, int(plan.seconds)))
        total = round(report.rate * plan.seconds * (1 + 0.5 * (beside is not None)))
        with progress(total, "Calls", hidden=out.as_json) as advance, _ticking(report, advance):
            for part in range(parts):
                seconds = plan.seconds / parts
                if beside is not None and report.bare is not None:
                    await beside.at_rate(report.rate, seconds / 2, report.bare, plan.kind, part)
                await load.at_rate(report.rate, seconds, report.figures, plan.kind, part)
                plan.done = report.figures.latencies.count
    except BaseExceptionGroup as group:
        # Of tasks side by side: the first error explains the others.
        raise group.exceptions[0] from None


@contextmanager
def _ticking(report: Report, advance: Advance) -> Iterator[None]:
    """Show the state of the run beside the bar while the block runs."""
    shown = 0

    async def tick() -> None:
        nonlocal shown
        while True:
            await asyncio.sleep(TICK)
            figures = report.figures
            report.plan.done = figures.latencies.count
            now = figures.latencies.count
            if report.bare is not None:
                now += report.bare.latencies.count
            p99 = milliseconds(figures.latencies.percentile(99) * 1000)
            advance(now - shown, f"p99 {p99}  {figures.failed} failed  {figures.late} late")
            shown = now

    task = asyncio.get_running_loop().create_task(tick())
    try:
        yield
    finally:
        task.cancel()

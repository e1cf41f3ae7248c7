"""`wirecall watch`: the calls of a running server, as they end.

It reads the Unix sockets of the server's processes, which only their user can reach. So it needs no
sign-in, and works without the console's pages. On a terminal it draws a table; into a pipe it
writes one line per call.
"""

import re
import sys
import time
from collections import deque
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wirecall.cli.failures import CliError, Exit, Unreachable, no_such
from wirecall.cli.terminal import LiveTable, count_of, is_terminal, print_read_json, run
from wirecall.console.filter import NAMES, FilterError, read_filter
from wirecall.errors import UsageError
from wirecall.logs import escaped
from wirecall.protocol.messages import Json, JsonObject

if TYPE_CHECKING:
    from wirecall.console.collect import Collector
    from wirecall.console.source import FeedEvent
    from wirecall.console.worker import Served

COLUMNS = ("TIME", "", "METHOD", "KIND", "OUTCOME", "MS", "CALLER", "KEY", "BATCH")
WIDTHS = (12, 1, 24, 7, 14, 9, 10, 16, 12)
# A word such as `method:x`, unlike http://... and app.py:name.
_TERM = re.compile(r"-?[A-Za-z_]+:(?!//)")
# Signs beside the words.
_SIGNS = {"ok": "✓", "error": "✗", "cancelled": "✗", "input required": "⧗", "undelivered": "!"}


@click.command("watch")
@click.argument("words", nargs=-1, metavar="[TARGET] [FILTER]...")
@click.option(
    "--last",
    type=click.IntRange(0),
    default=20,
    show_default=True,
    help="Also show this many calls that ended before.",
)
@click.option("--count", type=click.IntRange(1), help="End after this many calls.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per call.")
def watch_command(words: tuple[str, ...], last: int, count: int | None, as_json: bool) -> int:
    """Watch the calls of a server on this machine, until it ends or Ctrl-C.

    TARGET is the app's file or name, the server's address or that of its console, or its process
    id; without it, the only server that runs. The server must have been started by `wirecall dev`,
    or with --console or --metrics.

    FILTER keeps calls that fit all of its terms: method:charge status:error kind:command
    duration:>500ms code:422 key:order-* caller:ada replayed:yes since:10m, -term for the contrary,
    or any word.

    \b
    wirecall watch shop.py
    wirecall watch status:error duration:>500ms
    wirecall watch http://127.0.0.1:8420 --json | jq .method
    """
    target, filter = _split(words)
    try:
        read_filter(filter)
    except FilterError as error:
        raise CliError(str(error), f"in the filter {filter!r}", error.hint) from None
    server = find_server(target)
    try:
        return run(_watch(server, filter, last, count, as_json))
    except BrokenPipeError:
        # The reader has seen enough. Nothing more can be written, not even by Python's exit.
        sys.stdout = None
        return Exit.DONE


def _split(words: tuple[str, ...]) -> tuple[str | None, str]:
    """Return the target and the filter; a first word such as `method:x` belongs to the filter."""
    if not words:
        return None, ""
    first, *rest = words
    if _TERM.match(first) and not first.partition(":")[0].endswith(".py"):
        return None, _joined(words)
    return first, _joined(tuple(rest))


def _joined(words: tuple[str, ...]) -> str:
    """Return words as one filter. A shell has taken the quotes of a word with spaces."""
    quoted = []
    for word in words:
        name, colon, value = word.partition(":")
        if not any(space in word for space in " \t") or '"' in word:
            quoted.append(word)
        elif colon and name.lstrip("-").lower() in NAMES:
            quoted.append(f'{name}:"{value}"')
        else:
            quoted.append(f'"{word}"')
    return " ".join(quoted)


def find_server(target: str | None) -> "Served":
    """Return the server that a user names."""
    from wirecall.console.worker import local_servers

    try:
        servers = list(local_servers())
    except (UsageError, AttributeError) as error:
        raise CliError("Calls cannot be watched here.", str(error), "") from None
    start = "start one: wirecall dev app.py; or wirecall serve app.py --console"
    if not servers:
        raise Unreachable(
            "No server of this user can be watched.",
            "none runs with --console or --metrics, or in development",
            start,
        )
    if target is None:
        if len(servers) == 1:
            return servers[0]
        shown = ", ".join(f"{each.target or each.name} ({each.pid})" for each in servers)
        raise CliError(
            "Which server?", f"{len(servers)} run: {shown}", f"wirecall watch {servers[0].pid}"
        )
    found = [each for each in servers if _is_named(each, target)]
    if len(found) == 1:
        return found[0]
    if found:
        shown = ", ".join(f"{each.pid} at {each.address}" for each in found)
        raise CliError(
            f"{target!r} names {len(found)} servers.", shown, f"wirecall watch {found[0].pid}"
        )
    if target.startswith(("http://", "https://")):
        raise Unreachable(
            f"No server of this user at {target} can be watched.",
            "only a server on this machine can be, and only one with --console or --metrics",
            f"on its machine: ssh HOST wirecall watch; here: {start}",
        )
    names = [each.target or each.name for each in servers]
    raise no_such("server", target, names, start, exit=Exit.UNREACHABLE, type="unreachable")


def _is_named(server: "Served", target: str) -> bool:
    if target in (server.name, str(server.pid), server.target):
        return True
    given = target.rstrip("/").removesuffix("/rpc").removesuffix("/mcp").removesuffix("/metrics")
    places = [server.address, server.console or "", (server.metrics or "").removesuffix("/metrics")]
    same = given.replace("://localhost:", "://127.0.0.1:")
    if same in [place for place in places if place]:
        return True
    is_file = target.partition(":")[0].endswith(".py")
    return is_file and Path(target).name == Path(server.target).name


async def _watch(server: "Served", filter: str, last: int, count: int | None, as_json: bool) -> int:
    from wirecall.console.collect import open_collector

    collector = open_collector(server)
    await collector.open()
    try:
        if not collector.workers.alive():
            raise Unreachable(
                f"{server.name} does not answer.", "it is starting or ending", "try again"
            )
        show: _Lines | _Screen = _Lines(as_json)
        if not as_json and is_terminal(sys.stdout):
            show = _Screen(server)
        with show:
            return await _follow(collector, show, filter, last, count)
    finally:
        await collector.aclose()


async def _follow(
    collector: "Collector", show: "_Lines | _Screen", filter: str, last: int, count: int | None
) -> int:
    """Show calls until the server ends, or enough of them were shown."""
    left = count
    feed = collector.feed(filter)
    if last:
        before = list(reversed((await collector.calls(filter, limit=last))["rows"]))
        if left is not None:
            before = before[-left:]
            left -= len(before)
        show.rows(before)
        if left == 0:
            return Exit.DONE
    async for event in feed:
        if event.event == "rows":
            rows = event.data["rows"]
            if left is not None:
                rows = rows[:left]
                left -= len(rows)
            show.rows(rows)
            show.gaps(event)
            if left == 0:
                break
        elif event.event == "numbers":
            show.numbers(event.data)
            if not collector.workers.alive():
                click.echo("the server has ended", err=True)
                break
    return Exit.DONE


class _Lines:
    """One line per call, for a pipe."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def __enter__(self) -> "_Lines":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def rows(self, rows: list[JsonObject]) -> None:
        if self._as_json:
            print_read_json(rows)
        else:
            for row in rows:
                cells = cells_of(row)
                padded = [
                    escaped(cell).ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)
                ]
                click.echo("  ".join(padded).rstrip())
        sys.stdout.flush()

    def gaps(self, event: "FeedEvent") -> None:
        for line in gap_lines(event):
            click.echo(line, err=True)

    def numbers(self, data: JsonObject) -> None:
        pass


class _Screen:
    """A table of the last calls, for a terminal."""

    def __init__(self, server: "Served") -> None:
        self._server = server
        self._table = LiveTable(COLUMNS)
        self._cells: deque[tuple[str, ...]] = deque(maxlen=500)
        self._line = f"{server.name} at {server.address}"
        self._gap = ""

    def __enter__(self) -> "_Screen":
        self._table.__enter__()
        return self

    def __exit__(self, *rest: object) -> None:
        self._table.__exit__(*rest)

    def rows(self, rows: list[JsonObject]) -> None:
        self._cells.extend(map(cells_of, rows))
        self._draw()

    def gaps(self, event: "FeedEvent") -> None:
        for line in gap_lines(event):
            self._gap = f" · {line}"
        self._draw()

    def numbers(self, data: JsonObject) -> None:
        tiles = data["tiles"]
        unknown = data["unknown"]
        self._line = (
            f"{self._server.name} at {self._server.address} · "
            f"{tiles['calls_per_s']:.1f} calls/s · {tiles['errors_per_s']:.1f} errors/s · "
            f"p95 {tiles['p95_ms']:.1f} ms · {tiles['saved']} replayed"
        )
        if unknown:
            self._line += f" · {count_of(unknown, 'unknown record')}"
        self._draw()

    def _draw(self) -> None:
        shown = list(self._cells)[-self._table.height :]
        self._table.show(shown, self._line + self._gap)


def gap_lines(event: "FeedEvent") -> list[str]:
    """Return what the reader did not get, for people."""
    lines = []
    if event.data["lost"]:
        lines.append(f"lost {count_of(event.data['lost'], 'call')}")
    if event.data["sampled"] > 1:
        lines.append(f"sampled 1:{event.data['sampled']}")
    return lines


def cells_of(row: JsonObject) -> tuple[str, ...]:
    """Return a call as the cells of a line."""
    outcome = str(row["outcome"])
    sign = _SIGNS.get(outcome, "?")
    if row["replayed"] and outcome == "ok":
        outcome = "replayed"
        sign = "↻"
    if row["code"] is not None:
        outcome = f"{outcome} {row['code']}"
    if row["gone"]:
        outcome += " (gone)"
    batch = ""
    if row["size"] is not None:
        name = str(row["batch"]).partition("-")[2]
        batch = f"{name} {int(row['position']) + 1}/{row['size']}"
    return (
        _clock(row["at"]),
        sign,
        str(row["tool"] or row["method"]),
        str(row["kind"] or "?"),
        outcome,
        f"{row['ms']:.2f}",
        str(row["caller"] or "-"),
        str(row["key"] or "-"),
        batch,
    )


def _clock(at: Json) -> str:
    moment = datetime.fromtimestamp(float(at) if isinstance(at, (int, float)) else time.time())
    return moment.strftime("%H:%M:%S.%f")[:-3]

"""`wirecall probe`: what a server speaks, which rules it breaks, and what that means for its clients."""

import sys
from contextlib import redirect_stdout
from typing import Any

import click
import msgspec

from wirecall import __version__
from wirecall.cli.connecting import Way, way_options
from wirecall.cli.exits import Exit
from wirecall.cli.failures import Failure, nearest
from wirecall.cli.output import Output, count_of, json_option, progress
from wirecall.cli.probing import Echo, Prober, Seen
from wirecall.cli.running import run
from wirecall.cli.targets import Target, TargetCommand, target_argument
from wirecall.cli.wires import Wire, wire_to
from wirecall.errors import BadAnswer, CallFailed, ConnectionLost, NotSent, TimedOut
from wirecall.mcp.revisions import REVISIONS, Revision


@click.command("probe", cls=TargetCommand)
@target_argument()
@way_options
@json_option
def command(target: Target, way: Way, as_json: bool) -> Exit | None:
    """Find out what TARGET speaks: revisions of MCP, arrays, plain JSON-RPC, features. Exit code 9 if it breaks a rule.

    Nothing is called and nothing is read. --as and --revision look at one protocol, or one revision, only.

    \b
    wirecall probe http://127.0.0.1:8420
    wirecall probe -- npx -y some-server
    """
    seen = run(_probe(target, way))
    out = Output(as_json)
    told = {"target": target.text, **msgspec.to_builtins(seen), "advice": advice(seen)}
    out.result(told, lambda: _show(out, seen))
    return Exit.FOUND if seen.problems else None


async def _probe(target: Target, way: Way) -> Seen:
    app = target.app() if target.kind == "file" else None

    async def open(path: str) -> Wire:
        return wire_to(target, path, way.headers, app)

    prober = Prober(open, way.timeout, {"name": "wirecall probe", "version": __version__})
    wanted, plain = _wanted(way), way.protocol != "mcp" and way.revision is None
    try:
        # What handlers print in this process is not for stdout.
        with redirect_stdout(sys.stderr), progress(len(wanted) + plain, "Asking") as advance:
            return await prober.look(wanted, plain=plain, advance=advance)
    except (ConnectionLost, NotSent, TimedOut) as error:
        if isinstance(error, NotSent) and target.kind != "command":
            raise
        raise _unreached(error, target) from None
    except BadAnswer as error:
        is_echo = isinstance(error, Echo)
        what = "It sends back what it is sent." if is_echo else "What answers there speaks neither MCP nor JSON-RPC."
        raise Failure(what, str(error), _WHICH[target.kind], exit=Exit.PROTOCOL, type="bad_answer") from None
    finally:
        if app is not None:
            await app.aclose()


# What to do about a target that may be the wrong one.
_WHICH = {
    "command": "give the command line that serves on stdio: it may need an option for that",
    "url": "give the address of its endpoint: .../mcp or .../rpc",
    "file": "look into the file",
}


def _unreached(error: CallFailed, target: Target) -> Failure:
    is_silent = isinstance(error, TimedOut)
    did_start = not isinstance(error, NotSent) or not isinstance(error.__cause__, OSError)
    gone = "left before it answered" if did_start else "process did not start"
    what = "The server does not answer." if is_silent else f"The server {gone}."
    next = "run the command by itself to see more" if target.kind == "command" else "look into the server's log"
    next = f"{_WHICH[target.kind]}; --timeout if it is slow" if is_silent else next
    return Failure(what, str(error), next, exit=Exit.UNREACHABLE, type="unreachable")


def _wanted(way: Way) -> list[Revision]:
    if way.revision is None:
        return [] if way.protocol == "jsonrpc" else list(REVISIONS.values())
    if way.revision not in REVISIONS:
        near = nearest(way.revision, REVISIONS)
        why = f"the nearest is {near}" if near else f"there are {', '.join(REVISIONS)}"
        raise Failure(f"There is no revision {way.revision!r}.", why, f"--revision {near or '2025-11-25'}")
    return [REVISIONS[way.revision]]


# --- what it means --------------------------------------------------------------------------------------------------


def advice(seen: Seen) -> list[str]:
    """What a user of the server may want to know."""
    speaks_mcp = any(seen.revisions.values())
    lines = (
        (seen.jsonrpc.arrays, "Many calls in one message: wirecall batch --as rpc sends them as one array."),
        (
            speaks_mcp and not seen.arrays and not seen.jsonrpc.arrays,
            "Batches go as single requests, side by side: it takes no arrays.",
        ),
        (
            speaks_mcp and not seen.revisions.get("2026-07-28", True),
            "It needs a handshake: 2026-07-28, where every request stands for itself, is not spoken.",
        ),
        (
            speaks_mcp and bool(seen.features.get("tools")) and not seen.keys,
            "A lost answer stays lost: it does not honour idempotency keys, so only read-only tools are repeated.",
        ),
        (
            seen.unannotated > 0,
            f"{count_of(seen.unannotated, 'tool')} without a word about effects: taken for destructive.",
        ),
    )
    return [text for applies, text in lines if applies]


def _show(out: Output, seen: Seen) -> None:
    server = " ".join(str(seen.server[name]) for name in ("name", "version") if name in seen.server)
    rows = [("server", server or "unnamed")] if any(seen.revisions.values()) else []
    rows += [(f"MCP {name}", _spoken(name, spoken, seen)) for name, spoken in seen.revisions.items()]
    rows += [("JSON-RPC", _plain(seen))]
    rows += [("features", _features(seen.features))] if seen.features else []
    rows += [("keys", "honoured" if seen.keys else "not honoured")] if seen.features else []
    rows += [("ping", f"{seen.latency_ms} ms")] if seen.latency_ms is not None else []
    out.table(["ASKED", "FOUND"], rows)
    for problem in seen.problems:
        out.note(f"{', '.join(sorted(problem.where))}: {problem.what}", "failed")
    for line in advice(seen):
        out.note(line)


def _spoken(name: str, spoken: bool, seen: Seen) -> str:
    if spoken and name == "2025-03-26":
        return "yes, with arrays" if seen.arrays else "yes, without arrays"
    return "yes" if spoken else "no"


def _plain(seen: Seen) -> str:
    plain = seen.jsonrpc
    if not plain.spoken:
        return "no"
    methods = f", {count_of(plain.methods, 'method')}" if plain.methods is not None else ""
    return f"yes{', with arrays' if plain.arrays else ', without arrays'}{methods}"


def _features(features: dict[str, Any]) -> str:
    return ", ".join(name if value is True else count_of(value, name.removesuffix("s")) for name, value in features.items())

"""What one process answers about itself: its calls, its methods, its ledger.

A question is a JSON object whose member `ask` names it, and an answer is one as well. The console's
process asks all workers, and merges their answers (`console.collect`).
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from wirecall.console.pieces import Pieces
from wirecall.console.records import (
    brief,
    cursor_of,
    details,
    place_of_cursor,
    record_id,
    refusal_of,
)
from wirecall.console.source import NotFound, Refusal, WithUpstreams
from wirecall.errors import UsageError
from wirecall.ledger.base import LedgerDown, Only, RecordId, State, without_password
from wirecall.limits import Limits
from wirecall.logs import logger
from wirecall.mcp.server.catalog import input_schema
from wirecall.protocol.messages import Id, JsonObject
from wirecall.resolve import NotSettled, Resolution, settle
from wirecall.server.call import clock
from wirecall.server.method import Method, Mode
from wirecall.server.policy import needs_key
from wirecall.version import __version__

if TYPE_CHECKING:
    from wirecall.app import App
    from wirecall.console.tap import Tap

# Seconds for which the counts of the ledger are kept: some stores read a whole index for them.
COUNTS_FOR = 5.0
# Seconds for the ledger to answer a question of a page.
PATIENCE = 10.0
# Seconds that a person waits for the answer to a call.
TRY_TIME = 8.0

Answer = Callable[[JsonObject], Awaitable[JsonObject]]


class Facts:
    """Answers questions about one process."""

    def __init__(self, tap: "Tap", app: "App") -> None:
        self._tap = tap
        self._app = app
        self._gateway = app if isinstance(app, WithUpstreams) else None
        self._pieces = Pieces(tap.ring)
        self._counts: tuple[float, JsonObject] | None = None
        self._answers: dict[str, Answer] = {
            "numbers": self._numbers,
            "rows": self._rows,
            "batch": self._batch,
            "body": self._body,
            "counts": self._count_records,
            "records": self._records,
            "record": self._record,
            "resolve": self._resolve,
            "methods": self._methods,
            "try": self._try,
            "upstream": self._upstream,
            "probe": self._probe,
            "lines": self._lines,
            "settings": self._settings,
            "pause": self._pause,
        }

    async def answer(self, question: JsonObject) -> JsonObject:
        """Return the answer, or a document with `status` if the question is refused."""
        asked = self._answers.get(str(question.get("ask")))
        try:
            if asked is None:
                raise Refusal(400, _error("question", f"There is no {question.get('ask')!r}."))
            async with asyncio.timeout(PATIENCE):
                return await asked(question)
        except Refusal as refusal:
            return {"status": refusal.status, "document": refusal.document}
        except (LedgerDown, UsageError) as error:  # tables that must be migrated, for example
            return {"status": 503, "document": _error("ledger_down", str(error))}
        except TimeoutError:
            text = f"The ledger did not answer within {PATIENCE:g} s."
            return {"status": 503, "document": _error("ledger_down", text)}
        except Exception:
            # Without an answer, this process would look dead.
            logger.exception("the console asked, and there is no answer: %s", question.get("ask"))
            text = "The worker cannot answer this. Its log says why."
            return {"status": 500, "document": _error("failed", text)}

    # --- calls ------------------------------------------------------------------------------------

    async def _numbers(self, _: JsonObject) -> JsonObject:
        tap = self._tap
        tap.totals.count()
        return {
            "worker": tap.name,
            "pid": os.getpid(),
            "since": tap.since,
            "last": tap.ring.last,
            "missed": tap.totals.missed,
            "in_flight": self._app.in_flight,
            "queued": tap.queued,
            "methods": msgspec.to_builtins(tap.totals.methods, str_keys=True),
            "trips": msgspec.to_builtins(tap.trips),
            "upstreams": None if self._gateway is None else self._gateway.states(),
        }

    async def _rows(self, question: JsonObject) -> JsonObject:
        return {
            "worker": self._tap.name,
            "pid": os.getpid(),
            "last": self._tap.ring.last,
            # Adding it to a reading of the clock makes it a time.
            "offset": time.time() - clock(),
            "rows": self._pieces.after(int(question.get("after", 0))),
        }

    async def _batch(self, question: JsonObject) -> JsonObject:
        number = int(question["number"])
        rows = self._tap.ring.batch(number)
        waits = self._tap.plans.get(number, {})
        return {
            "offset": time.time() - clock(),
            "rows": rows,
            "waits": {str(position): list(found) for position, found in waits.items()},
            "concurrency": self._app.limits.concurrency,
        }

    async def _body(self, question: JsonObject) -> JsonObject:
        body = self._tap.bodies.get(int(question["number"]))
        return {
            "capture": self._tap.capture,
            "body": None if body is None else msgspec.to_builtins(body),
        }

    async def _lines(self, question: JsonObject) -> JsonObject:
        """Return the log records of a call."""
        found = self._tap.lines.of(str(question["call_id"]))
        return {"lines": msgspec.to_builtins(found)}

    # --- the servers behind a gateway -------------------------------------------------------------

    def _behind(self, question: JsonObject) -> tuple[WithUpstreams, str]:
        """Return the gateway, and the name of one of its upstreams."""
        name = str(question["name"])
        if self._gateway is None or name not in self._gateway.states():
            raise NotFound(f"upstream {name[:100]!r}", "open it from the list")
        return self._gateway, name

    async def _upstream(self, question: JsonObject) -> JsonObject:
        gateway, name = self._behind(question)
        return {**gateway.states()[name], "tools": gateway.tools_of(name)}

    async def _probe(self, question: JsonObject) -> JsonObject:
        gateway, name = self._behind(question)
        return await gateway.probe(name)

    # --- the ledger -------------------------------------------------------------------------------

    async def _count_records(self, _: JsonObject) -> JsonObject:
        if self._counts is None or clock() - self._counts[0] > COUNTS_FOR:
            ledger = await self._app.ledger()
            counts = await ledger.counts()
            oldest = None
            if counts.get(State.UNKNOWN):
                oldest = min(
                    record.started_at for record in await ledger.list(State.UNKNOWN, limit=500)
                )
            numbers = {state.value: counts.get(state, 0) for state in State}
            self._counts = clock(), {"counts": numbers, "oldest_unknown": oldest}
        return self._counts[1]

    async def _records(self, question: JsonObject) -> JsonObject:
        ledger = await self._app.ledger()
        limit = max(1, min(int(question.get("limit", 50)), 500))
        state = question.get("state")
        if state not in (None, *(each.value for each in State)):
            known = ", ".join(each.value for each in State)
            raise Refusal(400, _error("state", f"state: expected one of {known}, got {state!r}."))
        after = question.get("after")
        # One more than asked for: it shows whether a page follows.
        found = await ledger.list(
            State(state) if state else None,
            limit=limit + 1,
            after=place_of_cursor(after) if after else None,
            only=Only(question.get("method"), question.get("caller")),
        )
        following = None
        if len(found) > limit:
            found = found[:limit]
            following = cursor_of(found[-1])
        return {
            **await self._count_records(question),
            "records": [brief(record) for record in found],
            "next": following,
            "state": state,
        }

    async def _record(self, question: JsonObject) -> JsonObject:
        id = record_id(str(question["id"]))
        ledger = await self._app.ledger()
        record = await ledger.get(id)
        if record is None:
            raise NotFound(f"record {id}", "it may have been resolved, or its retention is over")
        found = details(record, self._declared(id))
        task = await ledger.task_of(id)
        if task is not None:
            from wirecall.mcp.server.task_state import summary

            found["task"] = summary(task)
        return found

    async def _resolve(self, question: JsonObject) -> JsonObject:
        """Settle a record by the rules of `wirecall.resolve`."""
        id = record_id(str(question["id"]))
        request: Any = question["request"]
        try:
            resolution = msgspec.convert(request, Resolution)
        except msgspec.ValidationError as error:
            raise Refusal(400, _error("request", f"The request does not fit: {error}")) from None
        ledger = await self._app.ledger()
        self._counts = None
        trail = self._app.trail
        try:
            settled = await settle(
                ledger,
                id,
                resolution,
                declared=self._declared(id),
                actor=str(question["actor"]),
                note=None if trail is None else trail.append,
            )
        except NotSettled as error:
            raise refusal_of(error, self._declared(id)) from error
        record = await ledger.get(id)
        shown = None
        if record is not None:
            shown = details(record, self._declared(id))
        return {"state": settled, "record": shown}

    def _declared(self, id: RecordId) -> Method | None:
        tool = id.method.removeprefix("tools/call:")
        if tool != id.method:
            return self._app.registry.called.get(tool)
        return self._app.registry.methods.get(id.method)

    # --- methods ----------------------------------------------------------------------------------

    async def _methods(self, _: JsonObject) -> JsonObject:
        registry = self._app.registry
        found = {id(each): each for each in (*registry.methods.values(), *registry.tools.values())}
        return {
            "mode": self._app.mode,
            "methods": [
                self._describe(method)
                for method in found.values()
                if not method.name.startswith("rpc.")
            ],
        }

    def _describe(self, method: Method) -> JsonObject:
        is_tool = "mcp" in method.expose
        returns = dict(method.signature.result_schema)
        return {
            "name": method.name,
            "tool_name": method.tool_name,
            # The methods of the rows about its calls, by both protocols.
            "rows": [method.name, f"tools/call:{method.record}"],
            "kind": method.kind.value,
            "tool": is_tool,
            "rpc": "rpc" in method.expose,
            "title": method.title,
            "description": method.description,
            "annotations": {
                "readOnlyHint": not method.is_command,
                "destructiveHint": method.destructive if method.is_command else False,
                "idempotentHint": method.idempotent if method.is_command else True,
                "openWorldHint": method.open_world,
            },
            "badges": _badges(method),
            "key": _key_rule(method, self._app.mode),
            "params": input_schema(method),
            "returns": returns,
        }

    async def _try(self, question: JsonObject) -> JsonObject:
        """Make one call, as an operator. The text of the params is passed on unchanged."""
        began = clock()
        seen: list[Id] = []
        try:
            async with asyncio.timeout(TRY_TIME):
                reply = await self._app.handle(str(question["message"]).encode(), replayed=seen)
        except TimeoutError:
            text = (
                f"The call has no answer after {TRY_TIME:g} s. A command that has begun continues."
            )
            raise Refusal(504, _error("slow", text)) from None
        return {
            "answer": None if reply is None else reply.decode(),
            "replayed": bool(seen),
            "ms": (clock() - began) * 1000,
            "last": self._tap.ring.last,
        }

    # --- settings ---------------------------------------------------------------------------------

    async def _settings(self, _: JsonObject) -> JsonObject:
        app = self._app
        trail = app.trail
        stated = "WIRECALL_MODE" if os.environ.get("WIRECALL_MODE") else "the app"
        usual = msgspec.structs.asdict(Limits())
        values = [
            {"name": "mode", "value": app.mode, "origin": stated},
            {
                "name": "ledger.url",
                "value": without_password(app.ledger_url),
                "origin": "the app",
            },
            *(
                {
                    "name": f"limits.{name}",
                    "value": value,
                    "origin": "default" if value == usual[name] else "the app",
                }
                for name, value in msgspec.structs.asdict(app.limits).items()
            ),
        ]
        if trail is not None:
            row = {"name": "audit.file", "value": str(trail.path), "origin": "the app"}
            values.insert(2, row)
        return {
            "name": app.name,
            "version": app.version,
            "wirecall": __version__,
            "capture": self._tap.capture,
            "paused": self._tap.is_paused,
            "values": values,
        }

    async def _pause(self, question: JsonObject) -> JsonObject:
        self._tap.is_paused = bool(question.get("paused"))
        return {"paused": self._tap.is_paused}


def _badges(method: Method) -> list[str]:
    """Return the words that warn a person before a call."""
    if not method.is_command:
        badges = ["read-only"]
    else:
        badges = ["writes"]
        if method.destructive is None:
            badges.append("destructive unstated")
        elif method.destructive:
            badges.append("destructive")
        if method.idempotent:
            badges.append("repeatable")
        badges.append(f"keyed {method.terms.retention / 3600:g}h")
    if method.open_world is None:
        badges.append("open-world unstated")
    elif method.open_world:
        badges.append("open-world")
    return badges


def _key_rule(method: Method, mode: Mode) -> str | None:
    if not method.is_command:
        return None
    assert mode in get_args(Mode)
    return "required" if needs_key(method, mode) else "optional"


def _error(kind: str, message: str) -> JsonObject:
    return {"error": {"type": kind, "message": message, "hint": ""}}


def check_folder(path: str) -> None:
    """Make a folder that only its owner can enter; refuse one that others can."""
    import stat

    os.makedirs(path, mode=0o700, exist_ok=True)
    found = os.lstat(path)
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_ours or found.st_mode & 0o077:
        raise UsageError(
            f"{path} belongs to another user, or other users may enter it.",
            "another user could read the calls",
            "remove it, or set TMPDIR to a folder of your own",
        )

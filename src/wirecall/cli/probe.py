"""`wirecall probe`: what a server speaks, which rules it breaks, and what that means for its clients."""

import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import click
import msgspec
from msgspec import Struct, field

from wirecall import __version__
from wirecall.cli.connecting import Way, run, way_options
from wirecall.cli.failures import Exit, Failure, nearest
from wirecall.cli.output import Output, count_of, json_option, progress
from wirecall.cli.targets import Target, TargetCommand, target_argument
from wirecall.cli.wires import JSON, Reply, Wire, answers, ids_of, wire_to
from wirecall.errors import BadAnswer, CallFailed, ConnectionLost, NotSent, Refused, TimedOut
from wirecall.mcp.headers import VERSION, repeated
from wirecall.mcp.revisions import REVISIONS, Revision
from wirecall.mcp.types import KEYS_CAPABILITY, PREFIX

SESSION = "mcp-session-id"
QUICK = 3.0  # seconds for an answer of a server that has answered before, or was silent before
AGAIN = 1.0  # and after it was silent in the same conversation
UNKNOWN = "wirecall.probe/unknown"
NO_METHOD, BAD_REQUEST, NO_JSON = -32601, -32600, -32700
_BARRED = (401, 403, 407)
_LISTS = {
    "tools": ("tools/list", "tools"),
    "prompts": ("prompts/list", "prompts"),
    "resources": ("resources/list", "resources"),
}


class Problem(Struct, frozen=True):
    """A rule that was broken, and in which conversations."""

    where: list[str]
    what: str


class Plain(Struct):
    """What is known of plain JSON-RPC."""

    spoken: bool = False
    arrays: bool = False
    methods: int | None = None  # by rpc.discover


class Seen(Struct):
    """All that was found out."""

    server: dict[str, Any] = {}
    revisions: dict[str, bool] = {}
    arrays: bool | None = None  # at 2025-03-26
    jsonrpc: Plain = field(default_factory=Plain)
    features: dict[str, Any] = {}
    keys: bool = False  # of the calls of a tool with one idempotency key, one runs
    unannotated: int = 0  # tools that do not say what they do to the world
    latency_ms: float | None = None
    problems: list[Problem] = []


Open = Callable[[str], Awaitable[Wire]]  # a new wire; the path is for addresses without one


class Echo(BadAnswer):
    """The other side sends back what it is sent, and so answers nothing."""


class Prober:
    """Asks one server. `open` makes wires; `patience` is how long the very first answer may take."""

    def __init__(self, open: Open, patience: float, me: Mapping[str, str]) -> None:
        self._open = open
        self._patience = patience
        self._me = dict(me)
        self._failures: list[tuple[str, CallFailed]] = []
        self._status: int | None = None  # of HTTP, the last one
        self._is_there = False  # it has said something
        self._is_given_up = False  # it has not, though it was asked more than once
        self._has_paths = False  # another endpoint of its may answer
        self._said = ""  # to people, on stderr
        self._first_patience = patience
        self.seen = Seen()

    async def look(self, revisions: list[Revision], *, plain: bool, advance: Callable[[int], None]) -> Seen:
        """Everything, the newest handshake first: whoever is there answers it, and so tells how quick it is."""
        ordered = sorted(revisions, key=lambda each: (each.is_stateless, each.name), reverse=True)
        ordered.sort(key=lambda each: each.is_stateless)
        for revision in ordered:
            if not self._is_given_up:
                await self._session("/mcp", revision.name, partial(self._revision, revision))
            advance(1)
        if plain and (self._has_paths or not self._is_given_up):
            await self._session("/rpc", "JSON-RPC", self._plain)
            advance(1)
        seen = self.seen
        seen.revisions = {name: seen.revisions.get(name, False) for name in REVISIONS if REVISIONS[name] in revisions}
        if not any(seen.revisions.values()) and not seen.jsonrpc.spoken:
            self._nothing()
        seen.problems += [Problem([where], f"it breaks off: {error}") for where, error in self._failures]
        return seen

    def _nothing(self) -> None:
        if self._failures:
            raise self._failures[0][1]
        if not self._is_there:
            said = f"; its last words: {self._said}" if self._said else ""
            raise TimedOut(f"nothing came within {self._first_patience:g} s{said}")
        status = f"; a POST is answered with HTTP {self._status}" if self._status else ""
        self.seen.problems.insert(0, Problem(["all"], f"it speaks neither MCP nor JSON-RPC{status}"))

    async def _session(self, path: str, where: str, work: "Callable[[Talk], Awaitable[None]]") -> None:
        """One conversation. Who cannot be reached is not asked again; who lets nobody in is left."""
        wire = await self._open(path)
        self._has_paths = wire.is_http
        talk = Talk(wire, where, self.seen.problems, self._patience)
        try:
            await wire.open()
            await work(talk)
        except (NotSent, Echo):
            raise
        except CallFailed as error:
            if error.status in _BARRED:
                raise
            if talk.is_judged:
                self._failures.append((where, error))
        finally:
            await wire.aclose()
            self._status = talk.status or self._status
            self._is_there |= not talk.is_unheard or bool(self.seen.problems)
            self._said = wire.said
            self._patience = min(self._patience, max(QUICK, 4 * (talk.first or 0)))

    # --- MCP ---------------------------------------------------------------------------------------------------------

    async def _revision(self, revision: Revision, talk: "Talk") -> None:
        capabilities = await (self._discovered if revision.is_stateless else self._initialized)(talk, revision)
        self.seen.revisions[revision.name] = capabilities is not None
        if capabilities is None and talk.is_unheard and not self._is_there:
            await talk.ask(UNKNOWN)
            self._is_given_up = talk.is_unheard
        if capabilities is None:
            return
        if not revision.is_stateless:
            await self._pinged(talk)
        await self._refused(talk)
        if not self.seen.features:
            self.seen.features = await self._features(talk, capabilities)
        if revision.has_arrays:
            self.seen.arrays = await self._arrays(talk)

    async def _initialized(self, talk: "Talk", revision: Revision) -> dict[str, Any] | None:
        """The capabilities, if the server agrees to the revision."""
        params = {"protocolVersion": revision.name, "capabilities": {}, "clientInfo": self._me}
        answer = await talk.ask("initialize", params)
        result = answer.result
        if not isinstance(result, dict):
            return None
        for member, kind in (("protocolVersion", str), ("capabilities", dict), ("serverInfo", dict)):
            talk.must(isinstance(result.get(member), kind), f"the result of initialize has no {member!r}")
        self.seen.server = self.seen.server or _dict(result.get("serverInfo"))
        if result.get("protocolVersion") != revision.name:
            return None
        session = {SESSION: answer.reply.headers[SESSION]} if SESSION in answer.reply.headers else {}
        talk.headers = {**session, **({VERSION: revision.name} if revision.has("http version header") else {})}
        await talk.tell("notifications/initialized")
        return _dict(result.get("capabilities"))

    async def _discovered(self, talk: "Talk", revision: Revision) -> dict[str, Any] | None:
        talk.envelope = {
            f"{PREFIX}protocolVersion": revision.name,
            f"{PREFIX}clientCapabilities": {},
            f"{PREFIX}clientInfo": self._me,
        }
        talk.repeats = revision.name
        result = (await talk.ask("server/discover", {})).result
        if not isinstance(result, dict) or "supportedVersions" not in result:
            return None
        listed = result["supportedVersions"]
        talk.must(isinstance(listed, list), "the result of server/discover has no list 'supportedVersions'")
        talk.must("resultType" in result, "a result has no 'resultType'")
        meta = _dict(result.get("_meta"))
        self.seen.server = self.seen.server or _dict(meta.get(f"{PREFIX}serverInfo") or result.get("serverInfo"))
        return _dict(result.get("capabilities")) if isinstance(listed, list) and revision.name in listed else None

    async def _pinged(self, talk: "Talk") -> None:
        begun = time.perf_counter()
        answer = await talk.ask("ping")
        took = (time.perf_counter() - begun) * 1000
        if talk.must(isinstance(answer.result, dict), "ping is not answered with an empty result"):
            self.seen.latency_ms = round(min(took, self.seen.latency_ms or took), 2)

    async def _refused(self, talk: "Talk") -> None:
        answer = await talk.ask(UNKNOWN)
        talk.must(answer.error is not None, "a method that does not exist is not answered with an error")

    async def _arrays(self, talk: "Talk") -> bool:
        """2025-03-26, base protocol: implementations must support receiving batches."""
        accepted = await talk.array("ping")
        talk.must(accepted, "an array of requests is not answered: 2025-03-26 obliges a server to take it")
        return accepted

    async def _features(self, talk: "Talk", capabilities: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {name: True for name in capabilities if name != "experimental"}
        self.seen.keys = KEYS_CAPABILITY in _dict(capabilities.get("experimental"))
        for name, (method, member) in _LISTS.items():
            if name not in capabilities:
                continue
            answer = await talk.ask(method)
            entries = _dict(answer.result).get(member)
            if (
                talk.must(isinstance(entries, list), f"it declares {name}, and {method} gives no list")
                and entries is not None
            ):
                found[name] = len(entries)
                self._check_entries(talk, name, entries)
        return found

    def _check_entries(self, talk: "Talk", name: str, entries: list[Any]) -> None:
        for entry in entries:
            called = _dict(entry).get("uri" if name == "resources" else "name")
            talk.must(isinstance(called, str), f"an entry of {name} has no name: {str(entry)[:60]}")
            if name == "tools":
                schema = _dict(entry).get("inputSchema")
                talk.must(_dict(schema).get("type") == "object", f"the tool {called!r} has no inputSchema of type object")
                self.seen.unannotated += not _dict(_dict(entry).get("annotations"))

    # --- plain JSON-RPC ----------------------------------------------------------------------------------------------

    async def _plain(self, talk: "Talk") -> None:
        plain = self.seen.jsonrpc
        mcp_too = any(self.seen.revisions.values())
        talk.is_judged = False  # until it is known to be meant
        answer = await talk.ask(UNKNOWN)
        plain.spoken = answer.code == NO_METHOD
        methods = _dict((await talk.ask("rpc.discover")).result).get("methods")
        if isinstance(methods, list):
            plain.spoken, plain.methods = True, len(methods)
        if not plain.spoken:
            return
        talk.is_judged = plain.methods is not None or not mcp_too
        plain.arrays = await talk.array(UNKNOWN)
        talk.must(plain.arrays, "an array of requests is not answered with an array (JSON-RPC 2.0, section 6)")
        for message, code, what in (
            (b"[]", BAD_REQUEST, "an empty array"),
            (b'{"jsonrpc"', NO_JSON, "text that is no JSON"),
        ):
            found = await talk.raw(message)
            talk.must(found == code, f"{what} is answered with {found}, not {code}")


# --- one conversation ---------------------------------------------------------------------------------------------------


class Answer(Struct):
    """The answer to one request; both are None if there was none."""

    reply: Reply
    result: Any = None
    error: dict[str, Any] | None = None

    @property
    def code(self) -> Any:
        return self.error.get("code") if self.error else None


class Talk:
    """Requests on one wire, and what every answer must be."""

    def __init__(self, wire: Wire, where: str, problems: list[Problem], patience: float) -> None:
        self.headers: dict[str, str] = {}
        self.envelope: dict[str, Any] = {}  # `_meta` of every request
        self.repeats = ""  # the revision whose headers repeat the body
        self.is_judged = True
        self.first: float | None = None  # seconds to the first answer
        self.status: int | None = None
        self._wire = wire
        self._where = where
        self._problems = problems
        self._patience = patience
        self._number = 0

    @property
    def is_unheard(self) -> bool:
        """Whether not one word has come."""
        return self.first is None and self.status is None

    def must(self, fact: bool, what: str) -> bool:
        """Note a rule that is broken, once."""
        if not fact and self.is_judged:
            known = next((each for each in self._problems if each.what == what), None)
            if known is None:
                self._problems.append(Problem([self._where], what))
            elif self._where not in known.where:
                known.where.append(self._where)
        return fact

    async def ask(self, method: str, params: dict[str, Any] | None = None) -> Answer:
        """A request, and its answer as far as there is one."""
        message = self._request(method, params)
        reply = await self._send(message)
        found = [entry for document in reply.documents for entry in answers(document)]
        own = [entry for entry in found if entry.get("id") == message["id"] and type(entry.get("id")) is int]
        if not own:
            self._check_missing(method, reply, found)
            return Answer(reply, error=_dict(found[0].get("error")) or None if found else None)
        self._check_shape(method, own, reply)
        error = own[0].get("error")
        return Answer(reply, own[0].get("result"), error if isinstance(error, dict) else None)

    async def tell(self, method: str) -> None:
        """A notification. Nothing may come for it but, over HTTP, a status that says that it was taken."""
        reply = await self._send({"jsonrpc": "2.0", "method": method})
        if self._wire.is_http:
            self.must(reply.status == 202, f"a notification is answered with HTTP {reply.status}, not 202")
        self.must(not reply.documents or (reply.status or 0) >= 400, "a notification is answered with a message")

    async def array(self, method: str) -> bool:
        """Whether two requests in an array are answered by their ids, in an array or a stream."""
        message = [self._request(method), self._request(method)]
        reply = await self._send(message)
        found = [entry.get("id") for document in reply.documents for entry in answers(document)]
        return all(entry["id"] in found for entry in message)

    async def raw(self, message: bytes) -> Any:
        """The code of the error that bytes are answered with."""
        reply = await self._send(message)
        found = [entry for document in reply.documents for entry in answers(document)]
        return _dict(found[0].get("error")).get("code") if found else "nothing"

    def _request(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        self._number += 1
        told = {**(params or {}), **({"_meta": self.envelope} if self.envelope else {})}
        message: dict[str, Any] = {"jsonrpc": "2.0", "id": self._number, "method": method}
        return {**message, "params": told} if told or params is not None else message

    async def _send(self, message: Any) -> Reply:
        headers = self.headers
        if self.repeats and isinstance(message, dict):
            headers = {**headers, **repeated(self.repeats, message["method"], message.get("params"), {})}
        begun = time.perf_counter()
        reply = await self._wire.send(message, headers, self._patience)
        if reply.status in _BARRED:
            raise Refused(f"the server answered HTTP {reply.status}", status=reply.status)
        if reply.is_echo(message):
            what = message["method"] if isinstance(message, dict) else "a message"
            raise Echo(f"what comes for {what} is the request itself")
        self.status = reply.status
        if reply.is_silent:
            self._patience = min(self._patience, AGAIN)
        elif self.first is None and ids_of(message):
            self.first = time.perf_counter() - begun
            self._patience = min(self._patience, QUICK)
        for text in reply.noise if not self._wire.is_http else ():
            self.must(False, f"it prints what is not JSON-RPC to stdout: {text!r}")
        return reply

    def _check_missing(self, method: str, reply: Reply, found: list[dict[str, Any]]) -> None:
        """An answer without our id may be a refusal of the whole message, which has null, or a status that says no."""
        if found and found[0].get("id") is not None:
            self.must(False, f"{method} is answered under the id {found[0].get('id')!r}, which is not the request's")
        elif self._wire.is_http and reply.status == 200 and reply.noise:
            raise BadAnswer(f"{method}: HTTP 200 with what is not JSON: {reply.noise[0]!r}")

    def _check_shape(self, method: str, own: list[dict[str, Any]], reply: Reply) -> None:
        entry = own[0]
        self.must(len(own) == 1, f"{method} is answered {len(own)} times")
        self.must(entry.get("jsonrpc") == "2.0", f"the answer to {method} has no 'jsonrpc': '2.0'")
        self.must(("result" in entry) != ("error" in entry), f"the answer to {method} has not one of result and error")
        if "error" in entry:
            error = _dict(entry["error"])
            sound = type(error.get("code")) is int and isinstance(error.get("message"), str)
            self.must(sound, f"the error of {method} has no number 'code' and text 'message'")
        if self._wire.is_http and (reply.status or 0) < 400:
            self.must(reply.media in (JSON, "text/event-stream"), f"an answer has the type {reply.media!r}, not {JSON}")


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


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

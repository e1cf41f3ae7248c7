"""`wirecall probe`: which protocols a server speaks, and which rules it breaks.

A `Prober` holds one conversation (`Talk`) per revision and one in plain JSON-RPC, each on its own
wire. A wire sends a message and returns a `Reply`: every JSON document that came for it, in order,
and all output that is not JSON. It does not judge them; a `Talk` does.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import redirect_stdout
from functools import partial
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

import click
import msgspec
from msgspec import Struct, field

from wirecall.app import App
from wirecall.auth.discovery import Network, asked, find_issuer, is_resource_of, resource_places
from wirecall.cli.failures import CliError, Exit, Unreachable, no_such
from wirecall.cli.targets import (
    Target,
    TargetCommand,
    Way,
    http_client,
    target_argument,
    way_options,
)
from wirecall.cli.terminal import Advance, Printer, count_of, json_option, progress, run
from wirecall.client.links import MemoryPipe
from wirecall.errors import (
    BadAnswer,
    CallFailed,
    ConnectionLost,
    NotAuthorized,
    NotSent,
    Refused,
    TimedOut,
)
from wirecall.mcp.headers import VERSION, repeated
from wirecall.mcp.revisions import REVISIONS, Revision
from wirecall.mcp.types import KEYS_CAPABILITY, PREFIX
from wirecall.protocol.messages import JsonObject, encode
from wirecall.transports.child import Child
from wirecall.transports.http_client import HttpClient
from wirecall.version import __version__

Weight: TypeAlias = Literal["error", "warning"]

JSON = "application/json"
EVENTS = "text/event-stream"
ANSWER_TYPES = (JSON, EVENTS, "application/json-rpc", "application/jsonrequest")
SESSION = "mcp-session-id"
ME = {"name": "wirecall probe", "version": __version__}
# A method that no server has.
UNKNOWN = "wirecall.probe/unknown"
NO_METHOD = -32601
BAD_REQUEST = -32600
NO_JSON = -32700
# Seconds for an answer after the server has answered, or was silent.
QUICK = 3.0
# The same after it was silent in the same conversation.
AGAIN = 1.0
# Characters of noise that are quoted.
SHOWN = 80
# Lines of noise that are kept.
NOISE = 5
# Bytes of lines for one message; more are dropped.
ROOM = 16 << 20
# Bytes of memory that a line takes besides its content.
COST = 200
_BARRED = (401, 403, 407)
_LISTS = {"tools": "tools/list", "prompts": "prompts/list", "resources": "resources/list"}


class BrokenRule(Struct, frozen=True):
    """A rule that the server breaks, and the conversations in which it does.

    A warning is about a rule that clients do not rely on. It does not fail a check, unless that is
    `--strict`.
    """

    where: list[str]
    what: str
    weight: Weight = "error"


class Plain(Struct):
    """The findings about plain JSON-RPC."""

    spoken: bool = False
    arrays: bool = False
    # The number of methods that rpc.discover lists.
    methods: int | None = None


class Protection(Struct):
    """The findings about authorization: where clients get tokens."""

    # The address of the protected resource metadata (RFC 9728).
    metadata: str
    resource: str = ""
    servers: list[str] = []
    scopes: list[str] = []
    problems: list[str] = []

    def summary(self) -> str:
        """Return the findings for people."""
        servers = ", ".join(self.servers) or "no authorization server"
        text = f"tokens of {servers} for {self.resource or 'nothing'}"
        if self.scopes:
            text += f", scopes {' '.join(self.scopes)}"
        return text


class Seen(Struct):
    """All findings."""

    server: JsonObject = {}
    revisions: dict[str, bool] = {}
    # Whether it takes arrays at 2025-03-26.
    arrays: bool | None = None
    jsonrpc: Plain = field(default_factory=Plain)
    # JSON-RPC is spoken at the path /, although the address has none.
    at_root: bool = False
    # Where it answers, if its address has no path.
    addresses: list[str] = []
    features: JsonObject = {}
    # It honours idempotency keys.
    keys: bool = False
    # The number of tools that do not state their effects.
    unannotated: int = 0
    latency_ms: float | None = None
    tokens: Protection | None = None
    problems: list[BrokenRule] = []


class Echo(BadAnswer):
    """The server sends every message back, and answers none."""


# --- wires ----------------------------------------------------------------------------------------


class Reply(Struct):
    """Everything that the server sent for one message."""

    documents: list[Any] = []
    noise: list[str] = []
    # The status and the media type of HTTP.
    status: int | None = None
    media: str = ""
    # Names may be in any case.
    headers: Mapping[str, str] = {}
    # An answer was due and did not come in time.
    is_silent: bool = False
    # The result or the error of the answer to a request.
    result: Any = None
    error: JsonObject | None = None
    # The answer has the id of the request.
    is_own: bool = False

    def answers(self) -> list[JsonObject]:
        """Return the answers in the documents, each of which is an answer or an array of them."""
        entries = [each for document in self.documents for each in _entries(document)]
        return [entry for entry in entries if isinstance(entry, dict) and "method" not in entry]

    def take(self, text: bytes, ids: list[Any]) -> bool:
        """Add a document, or noise.

        Returns whether it has an answer to one of these ids, or without an id.
        """
        try:
            self.documents.append(msgspec.json.decode(text))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            if len(self.noise) < NOISE:
                self.noise.append(text[:SHOWN].decode("utf-8", "replace"))
            return False
        return any(
            answer.get("id") in [*ids, None] for answer in Reply(self.documents[-1:]).answers()
        )


def _entries(document: Any) -> list[Any]:
    """Return the entries of an array, or the one document."""
    if isinstance(document, list):
        return document
    return [document]


def ids_of(message: object) -> list[Any]:
    """Return the ids that answers are due for; [None] for bytes that are not JSON."""
    if isinstance(message, bytes):
        return [None]
    if message == []:
        return [None]
    entries = _entries(message)
    return [entry["id"] for entry in entries if isinstance(entry, dict) and "id" in entry]


class HttpWire:
    """POSTs to one address: every message is separate."""

    is_http = True
    said = ""

    def __init__(self, http: HttpClient) -> None:
        self._http = http
        self.open = http.open
        self.aclose = http.aclose

    async def send(self, message: object, headers: Mapping[str, str], patience: float) -> Reply:
        """Send a message (bytes unchanged) and return its reply.

        A server that cannot be reached raises `CallFailed`.
        """
        body = message if isinstance(message, bytes) else encode(message)
        headers = {"Content-Type": JSON, "Accept": f"{JSON}, {EVENTS}", **headers}
        reply = Reply()
        ids = ids_of(message)
        try:
            async with (
                asyncio.timeout(patience),
                self._http.request("POST", body, headers) as answer,
            ):
                reply.status = answer.status
                reply.media = answer.media
                reply.headers = answer.headers
                if answer.media == EVENTS:
                    async for event in answer.events():
                        if event.data and reply.take(event.data.encode(), ids):
                            break
                elif (text := await answer.read()).strip():
                    reply.take(text, ids)
        except TimeoutError:
            reply.is_silent = True
        return reply


class LineWire:
    """Lines to a process, or to an app in this one: one conversation."""

    is_http = False

    def __init__(self, pipe: Child | MemoryPipe) -> None:
        self._pipe = pipe
        self._lines: asyncio.Queue[bytes | CallFailed] = asyncio.Queue()
        self._room = ROOM

    async def open(self) -> None:
        def receive(line: bytes) -> None:
            if self._room > 0:
                self._room -= len(line) + COST
                self._lines.put_nowait(line)

        await self._pipe.open(receive, self._lines.put_nowait)

    async def aclose(self) -> None:
        await self._pipe.aclose()

    @property
    def said(self) -> str:
        """The last line that the server printed on stderr, if it is known."""
        if isinstance(self._pipe, Child):
            return self._pipe.said
        return ""

    async def send(self, message: object, headers: Mapping[str, str], patience: float) -> Reply:
        """Send a message (bytes unchanged) and return its reply.

        A server that has ended raises `CallFailed`.
        """
        reply = Reply()
        ids = ids_of(message)
        self._room = ROOM
        await self._pipe.write(message if isinstance(message, bytes) else encode(message))
        try:
            async with asyncio.timeout(patience):
                while ids:
                    line = await self._lines.get()
                    if isinstance(line, CallFailed):
                        # The pipe is closed: the next message fails the same way.
                        self._lines.put_nowait(line)
                        raise line
                    # An echo is not an answer, but ends the wait.
                    if line.strip() and (reply.take(line, ids) or message in reply.documents[-1:]):
                        break
        except TimeoutError:
            reply.is_silent = True
        return reply


# --- one conversation -----------------------------------------------------------------------------


class Talk:
    """Requests on one wire, and the rules for every answer."""

    def __init__(
        self, wire: HttpWire | LineWire, where: str, problems: list[BrokenRule], patience: float
    ) -> None:
        self.headers: dict[str, str] = {}
        # The `_meta` of every request.
        self.envelope: JsonObject = {}
        # The revision whose headers repeat the body.
        self.repeats = ""
        self.is_judged = True
        # Seconds to the first answer.
        self.first: float | None = None
        self.status: int | None = None
        self._wire = wire
        self._where = where
        self._problems = problems
        self._patience = patience
        self._number = 0

    @property
    def is_silent(self) -> bool:
        """Whether the server has sent nothing yet."""
        return self.first is None and self.status is None

    def should(self, fact: bool, what: str) -> bool:
        """Note a broken rule that clients do not rely on, once."""
        return self.must(fact, what, "warning")

    def must(self, fact: bool, what: str, weight: Weight = "error") -> bool:
        """Note a broken rule, once."""
        if not fact and self.is_judged:
            known = next((each for each in self._problems if each.what == what), None)
            if known is None:
                self._problems.append(BrokenRule([self._where], what, weight))
            elif self._where not in known.where:
                known.where.append(self._where)
        return fact

    async def ask(self, method: str, params: JsonObject | None = None) -> Reply:
        """Send a request, check its answer against the rules, and return it."""
        message = self._request(method, params)
        reply, found = await self._send(message)
        own = [
            entry
            for entry in found
            if entry.get("id") == message["id"] and type(entry.get("id")) is int
        ]
        if own:
            self._judge(method, reply, own)
            return reply
        # An answer without our id may refuse the whole message, with the id null, or by an HTTP
        # status.
        if found and found[0].get("id") is not None:
            other = found[0]["id"]
            what = f"{method} is answered under the id {other!r}, which is not the request's"
            self.must(False, what)
        elif self._wire.is_http and reply.status == 200 and reply.noise:
            raise BadAnswer(f"{method}: HTTP 200 with a body that is not JSON: {reply.noise[0]!r}")
        if found:
            reply.error = _dict(found[0].get("error")) or None
        return reply

    def _judge(self, method: str, reply: Reply, own: list[JsonObject]) -> None:
        """Check the answers with the id of a request, and put the first one into the reply."""
        reply.is_own = True
        entry = own[0]
        error = _dict(entry.get("error"))
        self.must(len(own) == 1, f"{method} is answered {len(own)} times")
        self.must(entry.get("jsonrpc") == "2.0", f"the answer to {method} has no 'jsonrpc': '2.0'")
        self.must(
            ("result" in entry) != ("error" in entry),
            f"the answer to {method} has not one of result and error",
        )
        if "error" in entry:
            sound = type(error.get("code")) is int and isinstance(error.get("message"), str)
            self.must(sound, f"the error of {method} has no number 'code' and text 'message'")
        if self._wire.is_http and (reply.status or 0) < 400:
            what = f"an answer has the type {reply.media!r}, not {JSON}"
            self.must(reply.media in ANSWER_TYPES, what)
        reply.result = entry.get("result")
        if isinstance(entry.get("error"), dict):
            reply.error = error

    async def tell(self, method: str) -> None:
        """Send a notification. It has no answer; over HTTP, its status is 202."""
        reply, _ = await self._send({"jsonrpc": "2.0", "method": method})
        if self._wire.is_http:
            self.must(
                reply.status == 202, f"a notification is answered with HTTP {reply.status}, not 202"
            )
        self.must(
            not reply.documents or (reply.status or 0) >= 400,
            "a notification is answered with a message",
        )

    async def array(self, method: str) -> bool:
        """Return whether two requests in an array are answered, in an array or a stream."""
        message = [self._request(method), self._request(method)]
        _, found = await self._send(message)
        ids = [entry.get("id") for entry in found]
        return all(entry["id"] in ids for entry in message)

    async def raw(self, message: bytes) -> object:
        """Return the code of the error that answers these bytes."""
        _, found = await self._send(message)
        if not found:
            return "nothing"
        return _dict(found[0].get("error")).get("code")

    def _request(self, method: str, params: JsonObject | None = None) -> JsonObject:
        self._number += 1
        message: JsonObject = {"jsonrpc": "2.0", "id": self._number, "method": method}
        whole = {**(params or {})}
        if self.envelope:
            whole["_meta"] = self.envelope
        if whole or params is not None:
            message["params"] = whole
        return message

    async def _send(self, message: object) -> tuple[Reply, list[JsonObject]]:
        """Send a message; return the reply, and the answers in it."""
        headers = self.headers
        if self.repeats and isinstance(message, dict):
            headers = {
                **headers,
                **repeated(self.repeats, message["method"], message.get("params"), {}),
            }
        begun = time.perf_counter()
        reply = await self._wire.send(message, headers, self._patience)
        if reply.status in _BARRED:
            raise Refused(f"the server answered HTTP {reply.status}", status=reply.status)
        # A notification may return: a server can pass it on to all its clients.
        if ids_of(message) and message in reply.documents:
            what = "a message"
            if isinstance(message, dict):
                what = message["method"]
            raise Echo(f"the answer to {what} is the request itself")
        self.status = reply.status
        if reply.is_silent:
            self._patience = min(self._patience, AGAIN)
        elif self.first is None and ids_of(message):
            self.first = time.perf_counter() - begun
            self._patience = min(self._patience, QUICK)
        if not self._wire.is_http:
            for text in reply.noise:
                self.must(False, f"it prints text that is not JSON-RPC to stdout: {text!r}")
        return reply, reply.answers()


def _dict(value: object) -> JsonObject:
    if not isinstance(value, dict):
        return {}
    return value


# --- all conversations ----------------------------------------------------------------------------


class Prober:
    """Asks one server.

    `app` is the target's app, if it is a file. `Way.timeout` is for the first answer.
    """

    def __init__(self, target: Target, way: Way, app: App | None) -> None:
        self._target = target
        self._way = way
        self._app = app
        self._patience = way.timeout
        self._failures: list[tuple[str, CallFailed]] = []
        # The last status of HTTP.
        self._status: int | None = None
        # The server has sent something.
        self._is_there = False
        # The server has sent nothing, though it was asked more than once.
        self._is_given_up = False
        # Its last line on stderr.
        self._said = ""
        self.seen = Seen()

    async def look(self, revisions: list[Revision], *, plain: bool, advance: Advance) -> Seen:
        """Find out everything.

        The newest handshake is first: every MCP server answers it, and shows its speed.
        """
        ordered = sorted(revisions, key=lambda each: each.name, reverse=True)
        for revision in sorted(ordered, key=lambda each: each.is_stateless):
            advance(0, f"Asking in MCP {revision.name}")
            if not self._is_given_up:
                await self._session("/mcp", revision.name, partial(self._mcp, revision))
            advance(1)
        if plain and (self._target.kind == "url" or not self._is_given_up):
            advance(0, "Asking in JSON-RPC")
            await self._session("/rpc", "JSON-RPC", self._plain)
            has_no_path = self._target.kind == "url" and not urlsplit(self._target.text).path
            if has_no_path and self._is_there and not self._is_found:
                # Of servers that have one endpoint.
                await self._session("/", "JSON-RPC", self._plain)
                self.seen.at_root = self.seen.jsonrpc.spoken
            advance(1)
        seen = self.seen
        seen.revisions = {
            name: seen.revisions.get(name, False)
            for name in REVISIONS
            if REVISIONS[name] in revisions
        }
        if not self._is_found:
            seen.problems.insert(0, self._not_found())
        seen.problems += [
            BrokenRule([where], f"it breaks off: {error}") for where, error in self._failures
        ]
        return seen

    def _not_found(self) -> BrokenRule:
        """Return what a server does that speaks no protocol, or raise why that is not known."""
        if self._failures:
            raise self._failures[0][1]
        if not self._is_there:
            what = f"nothing came within {self._way.timeout:g} s"
            if self._said:
                what += f"; its last words: {self._said}"
            raise TimedOut(what)
        what = "it speaks neither MCP nor JSON-RPC"
        if self._status:
            what += f"; a POST is answered with HTTP {self._status}"
        return BrokenRule(["all"], what)

    @property
    def _is_found(self) -> bool:
        """Whether the server speaks one of the protocols."""
        return any(self.seen.revisions.values()) or self.seen.jsonrpc.spoken

    async def _session(
        self, path: str, where: str, work: Callable[[Talk], Awaitable[None]]
    ) -> None:
        """Hold one conversation.

        A server that cannot be reached, or refuses this caller, ends the probe.
        """
        wire = await self._wire(path)
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
            self._is_there |= not talk.is_silent or bool(self.seen.problems)
            self._said = wire.said
            # Its first answer shows how slow it is; a server that is silent would cost the whole
            # timeout each time.
            self._patience = min(self._patience, max(QUICK, 4 * (talk.first or 0)))

    async def _wire(self, path: str) -> HttpWire | LineWire:
        """Return a wire to the server. `path` is that of the endpoint, if its address has none."""
        if self._target.kind == "url":
            return HttpWire(await http_client(self._target.address(path), self._way.headers))
        if self._app is not None:
            return LineWire(MemoryPipe(self._app._connect, self._app._enter, self._app._leave))
        return LineWire(Child(self._target.command, stderr="keep"))

    # --- MCP --------------------------------------------------------------------------------------

    async def _mcp(self, revision: Revision, talk: Talk) -> None:
        opens = self._discovered if revision.is_stateless else self._initialized
        capabilities = await opens(talk, revision)
        self.seen.revisions[revision.name] = capabilities is not None
        if capabilities is None:
            # A server may ignore a handshake that it does not know. If it also ignores an unknown
            # method, the probe gives up.
            if talk.is_silent and not self._is_there:
                await talk.ask(UNKNOWN)
                self._is_given_up = talk.is_silent
            return
        if not revision.is_stateless:
            begun = time.perf_counter()
            answer = await talk.ask("ping")
            took = (time.perf_counter() - begun) * 1000
            if talk.must(
                isinstance(answer.result, dict), "ping is not answered with an empty result"
            ):
                self.seen.latency_ms = round(min(took, self.seen.latency_ms or took), 2)
        answer = await talk.ask(UNKNOWN)
        talk.must(
            answer.error is not None, "a method that does not exist is not answered with an error"
        )
        if not self.seen.features:
            self.seen.features = await self._features(talk, capabilities)
        # 2025-03-26, base protocol: implementations must support receiving batches.
        if revision.has_arrays:
            self.seen.arrays = await talk.array("ping")
            talk.should(
                self.seen.arrays,
                "an array of requests is not answered: 2025-03-26 obliges a server to take it",
            )

    async def _initialized(self, talk: Talk, revision: Revision) -> JsonObject | None:
        """Open a session; return the capabilities if the server agrees to the revision."""
        params = {"protocolVersion": revision.name, "capabilities": {}, "clientInfo": ME}
        answer = await talk.ask("initialize", params)
        result = answer.result
        if not isinstance(result, dict):
            return None
        for member, kind in (
            ("protocolVersion", str),
            ("capabilities", dict),
            ("serverInfo", dict),
        ):
            talk.must(
                isinstance(result.get(member), kind), f"the result of initialize has no {member!r}"
            )
        self.seen.server = self.seen.server or _dict(result.get("serverInfo"))
        if result.get("protocolVersion") != revision.name:
            return None
        talk.headers = {}
        if SESSION in answer.headers:
            talk.headers[SESSION] = answer.headers[SESSION]
        if revision.has("http version header"):
            talk.headers[VERSION] = revision.name
        await talk.tell("notifications/initialized")
        return _dict(result.get("capabilities"))

    async def _discovered(self, talk: Talk, revision: Revision) -> JsonObject | None:
        """Ask without a session; return the capabilities if the server supports the revision."""
        talk.envelope = {
            f"{PREFIX}protocolVersion": revision.name,
            f"{PREFIX}clientCapabilities": {},
            f"{PREFIX}clientInfo": ME,
        }
        talk.repeats = revision.name
        result = (await talk.ask("server/discover", {})).result
        if not isinstance(result, dict) or "supportedVersions" not in result:
            return None
        listed = result["supportedVersions"]
        talk.must(
            isinstance(listed, list),
            "the result of server/discover has no list 'supportedVersions'",
        )
        talk.must("resultType" in result, "a result has no 'resultType'")
        meta = _dict(result.get("_meta"))
        self.seen.server = self.seen.server or _dict(
            meta.get(f"{PREFIX}serverInfo") or result.get("serverInfo")
        )
        if not isinstance(listed, list) or revision.name not in listed:
            return None
        return _dict(result.get("capabilities"))

    async def _features(self, talk: Talk, capabilities: JsonObject) -> JsonObject:
        """Return the declared features; for tools, prompts and resources, how many are listed."""
        found: JsonObject = {name: True for name in capabilities if name != "experimental"}
        self.seen.keys = KEYS_CAPABILITY in _dict(capabilities.get("experimental"))
        for name, method in _LISTS.items():
            if name not in capabilities:
                continue
            entries = _dict((await talk.ask(method)).result).get(name)
            if not talk.must(
                isinstance(entries, list), f"it declares {name}, and {method} gives no list"
            ):
                continue
            found[name] = len(entries or ())
            member = "uri" if name == "resources" else "name"
            for entry in map(_dict, entries or ()):
                called = entry.get(member)
                talk.must(
                    isinstance(called, str), f"an entry of {name} has no name: {str(entry)[:60]}"
                )
                if name == "tools":
                    is_object = _dict(entry.get("inputSchema")).get("type") == "object"
                    talk.must(is_object, f"the tool {called!r} has no inputSchema of type object")
                    self.seen.unannotated += not _dict(entry.get("annotations"))
        return found

    # --- plain JSON-RPC ---------------------------------------------------------------------------

    async def _plain(self, talk: Talk) -> None:
        plain = self.seen.jsonrpc
        mcp_too = any(self.seen.revisions.values())
        talk.is_judged = False  # until it is clear that the server means to speak JSON-RPC
        answer = await talk.ask(UNKNOWN)
        code = (answer.error or {}).get("code")
        # Servers refuse an unknown method with many codes. One of MCP refuses it too, and says
        # nothing about plain JSON-RPC unless it names the method as the reason.
        plain.spoken = code == NO_METHOD or (answer.is_own and type(code) is int and not mcp_too)
        methods = _dict((await talk.ask("rpc.discover")).result).get("methods")
        if isinstance(methods, list):
            plain.spoken = True
            plain.methods = len(methods)
        if not plain.spoken:
            return
        # Every MCP server answers JSON-RPC; that does not promise arrays, unless it lists methods
        # too.
        talk.is_judged = plain.methods is not None or not mcp_too
        talk.should(
            code == NO_METHOD,
            f"an unknown method is answered with the code {code}, not {NO_METHOD}",
        )
        plain.arrays = await talk.array(UNKNOWN)
        talk.must(
            plain.arrays,
            "an array of requests is not answered with an array (JSON-RPC 2.0, section 6)",
        )
        for message, code, what in (
            (b"[]", BAD_REQUEST, "an empty array"),
            (b'{"jsonrpc"', NO_JSON, "text that is not JSON"),
        ):
            found = await talk.raw(message)
            talk.should(found == code, f"{what} is answered with {found}, not {code}")


# --- the verb -------------------------------------------------------------------------------------

# The next step for a target that may be the wrong one.
_WHICH = {
    "command": "give the command line that serves on stdio: it may need an option for that",
    "url": "give the address of its endpoint: .../mcp or .../rpc",
    "file": "check the file",
}


@click.command("probe", cls=TargetCommand)
@target_argument
@click.option("--strict", is_flag=True, help="Exit code 9 for warnings, too.")
@way_options
@json_option
def probe_command(target: Target, strict: bool, way: Way, out: Printer) -> Exit | None:
    """Find out which protocols TARGET speaks: revisions of MCP, arrays, plain JSON-RPC, features.

    Exit code 9 if it breaks a rule that clients rely on; a rule that they do not rely on is a
    warning. No method is called and no resource is read. --as and --revision probe only one
    protocol, or one revision.

    \b
    wirecall probe http://127.0.0.1:8420
    wirecall probe -- npx -y some-server
    """
    target.check_no_link("probe")
    seen = run(_probe(target, way))
    found = {"target": target.text, **msgspec.to_builtins(seen), "advice": advice(seen)}
    out.result(found, lambda: _show(out, seen))
    has_failed = any(strict or problem.weight == "error" for problem in seen.problems)
    if has_failed:
        return Exit.FOUND
    return None


async def _tokens(url: str) -> Protection | None:
    """Return a server's published authorization metadata, or None. No credentials are sent."""
    wire = HttpWire(HttpClient(url))
    await wire.open()
    try:
        reply = await wire.send({"jsonrpc": "2.0", "id": 1, "method": "ping"}, {}, QUICK)
    finally:
        await wire.aclose()
    challenge = asked([reply.headers.get("www-authenticate", "")])
    named = challenge.params.get("resource_metadata") if challenge else None
    network = Network(private=True)
    for place in resource_places(url, named):
        try:
            answer = await network.get(place, "its metadata")
        except NotAuthorized as error:
            return _broken(place, named, str(error))
        if answer.status != 200:
            continue
        # The rules that clients rely on.
        document = answer.document(dict)
        if document is None:
            return _broken(place, named, f"{place}: expected a JSON object")
        return await _protection(network, place, document, url)
    if named is None:
        return None
    return Protection(named, problems=["its challenge names metadata that does not exist"])


def _broken(place: str, named: str | None, problem: str) -> Protection | None:
    """Return metadata that cannot be read; None if no challenge names it."""
    if named is None:
        return None
    return Protection(place, problems=[problem])


async def _protection(network: Network, place: str, document: JsonObject, url: str) -> Protection:
    """Return the findings about the metadata of a protected resource."""
    found = Protection(place, str(document.get("resource", "")))
    for name, texts in (
        ("authorization_servers", found.servers),
        ("scopes_supported", found.scopes),
    ):
        listed = document.get(name) or []
        if isinstance(listed, list):
            texts.extend(each for each in listed if isinstance(each, str))
        else:
            got = type(listed).__name__
            found.problems.append(f"its metadata: {name}: expected a list, got {got}")
    if not is_resource_of(found.resource, url):
        found.problems.append(
            f"its metadata describes {found.resource!r}, so clients refuse it for {url}"
        )
    if not found.servers:
        found.problems.append("its metadata does not name an authorization server")
    for issuer in found.servers[:3]:
        try:
            metadata = await find_issuer(network, issuer)
        except NotAuthorized as error:
            found.problems.append(str(error))
            continue
        if "S256" not in (metadata.code_challenge_methods_supported or ()):
            found.problems.append(
                f"{issuer} does not offer PKCE with S256, and MCP clients refuse it"
            )
    return found


async def _probe(target: Target, way: Way) -> Seen:
    revisions = _revisions(way)
    plain = way.protocol != "mcp" and way.revision is None
    app = target.app() if target.kind == "file" else None
    try:
        # Handlers in this process may print.
        with redirect_stdout(sys.stderr), progress(len(revisions) + plain, "Asking") as advance:
            seen = await Prober(target, way, app).look(revisions, plain=plain, advance=advance)
            if target.kind == "url":
                seen.addresses = _addresses(target, seen)
            if target.kind == "url" and any(seen.revisions.values()):
                seen.tokens = await _tokens(target.address("/mcp"))
                if seen.tokens is not None:
                    broken = seen.tokens.problems
                    seen.problems += [BrokenRule(["authorization"], each) for each in broken]
            return seen
    except Refused as error:
        failure = await _barred(target, error)
        if failure is None:
            raise
        raise failure from None
    except (ConnectionLost, NotSent, TimedOut) as error:
        if isinstance(error, NotSent) and target.kind != "command":
            raise
        raise _unreachable(target, error) from None
    except BadAnswer as error:
        what = "The server speaks neither MCP nor JSON-RPC."
        if isinstance(error, Echo):
            what = "The server sends every message back."
        raise CliError(
            what, str(error), _WHICH[target.kind], exit=Exit.PROTOCOL, type="bad_answer"
        ) from None
    finally:
        if app is not None:
            await app.aclose()


def _addresses(target: Target, seen: Seen) -> list[str]:
    """Return where a server answers whose address has no path."""
    if urlsplit(target.text).path:
        return []
    found = []
    if any(seen.revisions.values()):
        found.append(target.address("/mcp"))
    if seen.jsonrpc.spoken:
        found.append(target.address("/" if seen.at_root else "/rpc"))
    return found


def _revisions(way: Way) -> list[Revision]:
    """Return the revisions of MCP to ask for."""
    if way.revision is not None:
        if way.revision not in REVISIONS:
            raise no_such("revision", way.revision, list(REVISIONS), "--revision 2025-11-25")
        return [REVISIONS[way.revision]]
    if way.protocol == "rpc":
        return []
    return list(REVISIONS.values())


async def _barred(target: Target, error: Refused) -> CliError | None:
    """Return the error of a server that asks for a token, if it says where to get one."""
    url = target.address("/mcp")
    found = await _tokens(url) if error.status == 401 else None
    if found is None:
        return None
    why = "; ".join([found.summary(), f"metadata at {found.metadata}", *found.problems])
    next_step = f"wirecall login {url}, or --header 'Authorization: Bearer ...'"
    return CliError(
        "The server asks for a token.", why, next_step, exit=Exit.AUTH, type="unauthorized"
    )


def _unreachable(target: Target, error: CallFailed) -> CliError:
    """Return the error of a server that ended, or does not answer."""
    if isinstance(error, TimedOut):
        next_step = f"{_WHICH[target.kind]}; --timeout if it is slow"
        return Unreachable("The server does not answer.", error, next_step)
    what = "The server ended before it answered."
    if isinstance(error, NotSent) and isinstance(error.__cause__, OSError):
        what = "The server process did not start."
    next_step = "check the server's log"
    if target.kind == "command":
        next_step = "run the command alone to see more"
    return Unreachable(what, error, next_step)


def advice(seen: Seen) -> list[str]:
    """Return the consequences for users of the server."""
    speaks_mcp = any(seen.revisions.values())
    has_arrays = seen.jsonrpc.arrays or seen.arrays
    stateless = seen.revisions.get("2026-07-28", True)
    lines = (
        (seen.at_root, "It speaks JSON-RPC at the path /: write the / at the end of its address."),
        (
            seen.jsonrpc.arrays,
            "Many calls in one message: wirecall batch --as rpc sends them as one array.",
        ),
        (
            speaks_mcp and not has_arrays,
            "Batches go as single requests, side by side: the server takes no arrays.",
        ),
        (
            speaks_mcp and not stateless,
            "It needs a handshake: it does not speak 2026-07-28, which works without sessions.",
        ),
        (
            speaks_mcp and bool(seen.features.get("tools")) and not seen.keys,
            "A lost answer stays lost: "
            "it does not honour idempotency keys, so only read-only tools are repeated.",
        ),
        (
            seen.unannotated > 0,
            f"{count_of(seen.unannotated, 'tool')} without stated effects: "
            "wirecall treats them as destructive.",
        ),
    )
    return [text for applies, text in lines if applies]


def _show(out: Printer, seen: Seen) -> None:
    out.table(["ASKED", "FOUND"], _rows(seen))
    for problem in seen.problems:
        sign = "failed" if problem.weight == "error" else "warning"
        out.note(f"{', '.join(sorted(problem.where))}: {problem.what}", sign)
    for line in advice(seen):
        out.note(line)


def _rows(seen: Seen) -> list[tuple[str, str]]:
    """Return all findings but the problems, for a table."""
    rows = []
    if any(seen.revisions.values()):
        names = [str(seen.server[name]) for name in ("name", "version") if name in seen.server]
        rows.append(("server", " ".join(names) or "unnamed"))
    for name, does in seen.revisions.items():
        arrays = bool(seen.arrays) if name == "2025-03-26" else None
        rows.append((f"MCP {name}", _spoken(does, arrays)))
    plain = seen.jsonrpc
    found = _spoken(plain.spoken, plain.arrays)
    if plain.spoken and plain.methods is not None:
        found += f", {count_of(plain.methods, 'method')}"
    rows.append(("JSON-RPC", found))
    if seen.addresses:
        rows.append(("addresses", ", ".join(seen.addresses)))
    if seen.features:
        features = [
            name if count is True else count_of(count, name.removesuffix("s"))
            for name, count in seen.features.items()
        ]
        rows.append(("features", ", ".join(features)))
        rows.append(("keys", "honoured" if seen.keys else "not honoured"))
    if seen.tokens is not None:
        rows.append(("tokens", seen.tokens.summary()))
    if seen.latency_ms is not None:
        rows.append(("ping", f"{seen.latency_ms} ms"))
    return rows


def _spoken(does: bool, arrays: bool | None) -> str:
    """Return whether a protocol is spoken, and with arrays if that is known."""
    if not does:
        return "no"
    if arrays is None:
        return "yes"
    return "yes, with arrays" if arrays else "yes, without arrays"

"""`wirecall probe`: the protocols a server speaks, the rules it breaks, and the consequences for its clients.

A `Prober` holds one conversation (`Talk`) per revision and one in plain JSON-RPC, each on a wire of its own. A wire sends a
message and returns a `Reply`: every JSON document that came for it, in order, and every text that is not JSON. It does not
judge them; a `Talk` does.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import click
import msgspec
from msgspec import Struct, field

from wirecall.app import App
from wirecall.auth.discovery import Network, asked, find_issuer, is_resource_of, resource_places
from wirecall.cli.failures import CliError, Exit, Unreachable, no_such
from wirecall.cli.targets import Target, TargetCommand, Way, http_client, target_argument, way_options
from wirecall.cli.terminal import Printer, count_of, json_option, progress, run
from wirecall.client.links import MemoryPipe
from wirecall.errors import BadAnswer, CallFailed, ConnectionLost, NotAuthorized, NotSent, Refused, TimedOut
from wirecall.mcp.headers import VERSION, repeated
from wirecall.mcp.revisions import REVISIONS, Revision
from wirecall.mcp.types import KEYS_CAPABILITY, PREFIX
from wirecall.protocol.messages import JsonObject, encode
from wirecall.transports.child import Child
from wirecall.transports.http_client import HttpClient
from wirecall.version import __version__

JSON, EVENTS = "application/json", "text/event-stream"
SESSION = "mcp-session-id"
ME = {"name": "wirecall probe", "version": __version__}
UNKNOWN = "wirecall.probe/unknown"  # a method that no server has
NO_METHOD, BAD_REQUEST, NO_JSON = -32601, -32600, -32700
QUICK = 3.0  # seconds for the answer of a server that has answered, or was silent, before
AGAIN = 1.0  # the same after it was silent in the same conversation
SHOWN = 80  # characters of noise that are quoted
NOISE = 5  # lines of noise that are kept
ROOM = 16 << 20  # bytes of lines for one message; everything beyond them is dropped
COST = 200  # bytes that a line takes besides its own
_BARRED = (401, 403, 407)
_LISTS = {"tools": "tools/list", "prompts": "prompts/list", "resources": "resources/list"}


class BrokenRule(Struct, frozen=True):
    """A rule that the server breaks, and the conversations in which it does."""

    where: list[str]
    what: str


class Plain(Struct):
    """The findings about plain JSON-RPC."""

    spoken: bool = False
    arrays: bool = False
    methods: int | None = None  # by rpc.discover


class Protection(Struct):
    """The findings about authorization: where clients get tokens."""

    metadata: str  # the address of the protected resource metadata (RFC 9728)
    resource: str = ""
    servers: list[str] = []
    scopes: list[str] = []
    problems: list[str] = []

    def told(self) -> str:
        scopes = f", scopes {' '.join(self.scopes)}" if self.scopes else ""
        return f"tokens of {', '.join(self.servers) or 'no authorization server'} for {self.resource or 'nothing'}{scopes}"


class Seen(Struct):
    """All findings."""

    server: JsonObject = {}
    revisions: dict[str, bool] = {}
    arrays: bool | None = None  # at 2025-03-26
    jsonrpc: Plain = field(default_factory=Plain)
    features: JsonObject = {}
    keys: bool = False  # it honours idempotency keys
    unannotated: int = 0  # tools that do not state their effects
    latency_ms: float | None = None
    tokens: Protection | None = None
    problems: list[BrokenRule] = []


class Echo(BadAnswer):
    """The server sends every message back, and answers none."""


# --- wires --------------------------------------------------------------------------------------------------------------


class Reply(Struct):
    """Everything that came for one message."""

    documents: list[Any] = []
    noise: list[str] = []
    status: int | None = None  # of HTTP
    media: str = ""
    headers: Mapping[str, str] = {}  # names in any case
    is_silent: bool = False  # an answer was due and did not come in time
    result: Any = None  # of the answer to a request, or None
    error: JsonObject | None = None

    def answers(self) -> list[JsonObject]:
        """Return the answers among the documents, which are answers themselves, or arrays of them."""
        entries = [each for one in self.documents for each in (one if isinstance(one, list) else [one])]
        return [entry for entry in entries if isinstance(entry, dict) and "method" not in entry]

    def take(self, text: bytes, ids: list[Any]) -> bool:
        """Add a document, or noise; return whether an answer to one of these ids, or to none at all, is there now."""
        try:
            self.documents.append(msgspec.json.decode(text))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            if len(self.noise) < NOISE:
                self.noise.append(text[:SHOWN].decode("utf-8", "replace"))
            return False
        return any(answer.get("id") in [*ids, None] for answer in Reply(self.documents[-1:]).answers())


def ids_of(message: object) -> list[Any]:
    """Return the ids that answers are due for; [None] for bytes that are not JSON."""
    if isinstance(message, bytes):
        return [None]
    entries = message if isinstance(message, list) else [message]
    owed = [entry["id"] for entry in entries if isinstance(entry, dict) and "id" in entry]
    return owed or ([None] if message == [] else [])


class HttpWire:
    """POSTs to one address: every message is on its own."""

    is_http = True
    said = ""

    def __init__(self, http: HttpClient) -> None:
        self._http = http
        self.open, self.aclose = http.open, http.aclose

    async def send(self, message: object, headers: Mapping[str, str], patience: float) -> Reply:
        """Send a message (bytes unchanged) and return its reply. A server that cannot be reached raises `CallFailed`."""
        body = message if isinstance(message, bytes) else encode(message)
        headers = {"Content-Type": JSON, "Accept": f"{JSON}, {EVENTS}", **headers}
        reply, ids = Reply(), ids_of(message)
        try:
            async with asyncio.timeout(patience), self._http.request("POST", body, headers) as answer:
                reply.status, reply.media, reply.headers = answer.status, answer.media, answer.headers
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
        def hear(line: bytes) -> None:
            if self._room > 0:
                self._room -= len(line) + COST
                self._lines.put_nowait(line)

        await self._pipe.open(hear, self._lines.put_nowait)

    async def aclose(self) -> None:
        await self._pipe.aclose()

    @property
    def said(self) -> str:
        """The last text that the server printed on stderr, if it is known."""
        return self._pipe.said if isinstance(self._pipe, Child) else ""

    async def send(self, message: object, headers: Mapping[str, str], patience: float) -> Reply:
        """Send a message (bytes unchanged) and return its reply. A server that has ended raises `CallFailed`."""
        reply, ids = Reply(), ids_of(message)
        self._room = ROOM
        await self._pipe.write(message if isinstance(message, bytes) else encode(message))
        try:
            async with asyncio.timeout(patience):
                while ids:
                    line = await self._lines.get()
                    if isinstance(line, CallFailed):
                        self._lines.put_nowait(line)  # the pipe is closed: the next message fails the same way
                        raise line
                    # An echo is not an answer, but ends the wait.
                    if line.strip() and (reply.take(line, ids) or message in reply.documents[-1:]):
                        break
        except TimeoutError:
            reply.is_silent = True
        return reply


# --- one conversation ---------------------------------------------------------------------------------------------------


class Talk:
    """Requests on one wire, and the rules for every answer."""

    def __init__(self, wire: HttpWire | LineWire, where: str, problems: list[BrokenRule], patience: float) -> None:
        self.headers: dict[str, str] = {}
        self.envelope: JsonObject = {}  # `_meta` of every request
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
        """Whether nothing has come yet."""
        return self.first is None and self.status is None

    def must(self, fact: bool, what: str) -> bool:
        """Note a broken rule, once."""
        if not fact and self.is_judged:
            known = next((each for each in self._problems if each.what == what), None)
            if known is None:
                self._problems.append(BrokenRule([self._where], what))
            elif self._where not in known.where:
                known.where.append(self._where)
        return fact

    async def ask(self, method: str, params: JsonObject | None = None) -> Reply:
        """Send a request, check its answer against the rules, and return it."""
        message = self._request(method, params)
        reply, found = await self._send(message)
        own = [entry for entry in found if entry.get("id") == message["id"] and type(entry.get("id")) is int]
        if not own:
            # An answer without our id may refuse the whole message, with the id null, or by an HTTP status.
            if found and found[0].get("id") is not None:
                self.must(False, f"{method} is answered under the id {found[0].get('id')!r}, which is not the request's")
            elif self._wire.is_http and reply.status == 200 and reply.noise:
                raise BadAnswer(f"{method}: HTTP 200 with a body that is not JSON: {reply.noise[0]!r}")
            reply.error = _dict(found[0].get("error")) or None if found else None
            return reply
        entry, error = own[0], _dict(own[0].get("error"))
        self.must(len(own) == 1, f"{method} is answered {len(own)} times")
        self.must(entry.get("jsonrpc") == "2.0", f"the answer to {method} has no 'jsonrpc': '2.0'")
        self.must(("result" in entry) != ("error" in entry), f"the answer to {method} has not one of result and error")
        if "error" in entry:
            sound = type(error.get("code")) is int and isinstance(error.get("message"), str)
            self.must(sound, f"the error of {method} has no number 'code' and text 'message'")
        if self._wire.is_http and (reply.status or 0) < 400:
            self.must(reply.media in (JSON, EVENTS), f"an answer has the type {reply.media!r}, not {JSON}")
        reply.result, reply.error = entry.get("result"), error if isinstance(entry.get("error"), dict) else None
        return reply

    async def tell(self, method: str) -> None:
        """Send a notification. It has no answer; over HTTP, its status is 202."""
        reply, _ = await self._send({"jsonrpc": "2.0", "method": method})
        if self._wire.is_http:
            self.must(reply.status == 202, f"a notification is answered with HTTP {reply.status}, not 202")
        self.must(not reply.documents or (reply.status or 0) >= 400, "a notification is answered with a message")

    async def array(self, method: str) -> bool:
        """Return whether two requests in an array are answered by their ids, in an array or a stream."""
        message = [self._request(method), self._request(method)]
        _, found = await self._send(message)
        ids = [entry.get("id") for entry in found]
        return all(entry["id"] in ids for entry in message)

    async def raw(self, message: bytes) -> object:
        """Return the code of the error that answers these bytes."""
        _, found = await self._send(message)
        return _dict(found[0].get("error")).get("code") if found else "nothing"

    def _request(self, method: str, params: JsonObject | None = None) -> JsonObject:
        self._number += 1
        whole = {**(params or {}), **({"_meta": self.envelope} if self.envelope else {})}
        message: JsonObject = {"jsonrpc": "2.0", "id": self._number, "method": method}
        return {**message, "params": whole} if whole or params is not None else message

    async def _send(self, message: object) -> tuple[Reply, list[JsonObject]]:
        """Send a message; return the reply, and the answers in it."""
        headers = self.headers
        if self.repeats and isinstance(message, dict):
            headers = {**headers, **repeated(self.repeats, message["method"], message.get("params"), {})}
        begun = time.perf_counter()
        reply = await self._wire.send(message, headers, self._patience)
        if reply.status in _BARRED:
            raise Refused(f"the server answered HTTP {reply.status}", status=reply.status)
        # A notification may come back: a server can pass it on to all its clients.
        if ids_of(message) and message in reply.documents:
            what = message["method"] if isinstance(message, dict) else "a message"
            raise Echo(f"the answer to {what} is the request itself")
        self.status = reply.status
        if reply.is_silent:
            self._patience = min(self._patience, AGAIN)
        elif self.first is None and ids_of(message):
            self.first = time.perf_counter() - begun
            self._patience = min(self._patience, QUICK)
        for text in reply.noise if not self._wire.is_http else ():
            self.must(False, f"it prints text that is not JSON-RPC to stdout: {text!r}")
        return reply, reply.answers()


def _dict(value: object) -> JsonObject:
    return value if isinstance(value, dict) else {}


# --- all conversations -------------------------------------------------------------------------------------------------


class Prober:
    """Asks one server. `app` is the target's app, if it is a file. The way's timeout is for the very first answer."""

    def __init__(self, target: Target, way: Way, app: App | None) -> None:
        self._target = target
        self._way = way
        self._app = app
        self._patience = way.timeout
        self._failures: list[tuple[str, CallFailed]] = []
        self._status: int | None = None  # of HTTP, the last one
        self._is_there = False  # it has sent something
        self._is_given_up = False  # it has sent nothing, though it was asked more than once
        self._said = ""  # its last text on stderr
        self.seen = Seen()

    async def look(self, revisions: list[Revision], *, plain: bool, advance: Callable[[int], None]) -> Seen:
        """Find out everything. The newest handshake comes first: every MCP server answers it, which shows its speed."""
        ordered = sorted(revisions, key=lambda each: each.name, reverse=True)
        for revision in sorted(ordered, key=lambda each: each.is_stateless):
            if not self._is_given_up:
                await self._session("/mcp", revision.name, partial(self._mcp, revision))
            advance(1)
        if plain and (self._target.kind == "url" or not self._is_given_up):
            await self._session("/rpc", "JSON-RPC", self._plain)
            advance(1)
        seen = self.seen
        seen.revisions = {name: seen.revisions.get(name, False) for name in REVISIONS if REVISIONS[name] in revisions}
        if not any(seen.revisions.values()) and not seen.jsonrpc.spoken:
            if self._failures:
                raise self._failures[0][1]
            if not self._is_there:
                said = f"; its last words: {self._said}" if self._said else ""
                raise TimedOut(f"nothing came within {self._way.timeout:g} s{said}")
            status = f"; a POST is answered with HTTP {self._status}" if self._status else ""
            seen.problems.insert(0, BrokenRule(["all"], f"it speaks neither MCP nor JSON-RPC{status}"))
        seen.problems += [BrokenRule([where], f"it breaks off: {error}") for where, error in self._failures]
        return seen

    async def _session(self, path: str, where: str, work: Callable[[Talk], Awaitable[None]]) -> None:
        """Hold one conversation. A server that cannot be reached, or refuses this caller, ends the probe."""
        wire: HttpWire | LineWire
        if self._target.kind == "url":
            wire = HttpWire(await http_client(self._target.address(path, keep_root=False), self._way.headers))
        else:
            wire = LineWire(
                MemoryPipe(self._app._connect, self._app._enter, self._app._leave)
                if self._app
                else Child(self._target.command, stderr="keep")
            )
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
            # Its first answer shows how slow it is; a server that is silent would cost the whole timeout each time.
            self._patience = min(self._patience, max(QUICK, 4 * (talk.first or 0)))

    # --- MCP ---------------------------------------------------------------------------------------------------------

    async def _mcp(self, revision: Revision, talk: Talk) -> None:
        capabilities = await (self._discovered if revision.is_stateless else self._initialized)(talk, revision)
        self.seen.revisions[revision.name] = capabilities is not None
        if capabilities is None:
            # A server may ignore a handshake that it does not know. One that ignores an unknown method too is given up.
            if talk.is_unheard and not self._is_there:
                await talk.ask(UNKNOWN)
                self._is_given_up = talk.is_unheard
            return
        if not revision.is_stateless:
            begun = time.perf_counter()
            answer = await talk.ask("ping")
            took = (time.perf_counter() - begun) * 1000
            if talk.must(isinstance(answer.result, dict), "ping is not answered with an empty result"):
                self.seen.latency_ms = round(min(took, self.seen.latency_ms or took), 2)
        answer = await talk.ask(UNKNOWN)
        talk.must(answer.error is not None, "a method that does not exist is not answered with an error")
        if not self.seen.features:
            self.seen.features = await self._features(talk, capabilities)
        if revision.has_arrays:  # 2025-03-26, base protocol: implementations must support receiving batches
            self.seen.arrays = await talk.array("ping")
            talk.must(self.seen.arrays, "an array of requests is not answered: 2025-03-26 obliges a server to take it")

    async def _initialized(self, talk: Talk, revision: Revision) -> JsonObject | None:
        """Open a session; return the capabilities if the server agrees to the revision."""
        params = {"protocolVersion": revision.name, "capabilities": {}, "clientInfo": ME}
        answer = await talk.ask("initialize", params)
        result = answer.result
        if not isinstance(result, dict):
            return None
        for member, kind in (("protocolVersion", str), ("capabilities", dict), ("serverInfo", dict)):
            talk.must(isinstance(result.get(member), kind), f"the result of initialize has no {member!r}")
        self.seen.server = self.seen.server or _dict(result.get("serverInfo"))
        if result.get("protocolVersion") != revision.name:
            return None
        session = {SESSION: answer.headers[SESSION]} if SESSION in answer.headers else {}
        talk.headers = {**session, **({VERSION: revision.name} if revision.has("http version header") else {})}
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
        talk.must(isinstance(listed, list), "the result of server/discover has no list 'supportedVersions'")
        talk.must("resultType" in result, "a result has no 'resultType'")
        meta = _dict(result.get("_meta"))
        self.seen.server = self.seen.server or _dict(meta.get(f"{PREFIX}serverInfo") or result.get("serverInfo"))
        return _dict(result.get("capabilities")) if isinstance(listed, list) and revision.name in listed else None

    async def _features(self, talk: Talk, capabilities: JsonObject) -> JsonObject:
        """Return the declared features; for tools, prompts and resources, how many are listed."""
        found: JsonObject = {name: True for name in capabilities if name != "experimental"}
        self.seen.keys = KEYS_CAPABILITY in _dict(capabilities.get("experimental"))
        for name, method in _LISTS.items():
            if name not in capabilities:
                continue
            entries = _dict((await talk.ask(method)).result).get(name)
            if not talk.must(isinstance(entries, list), f"it declares {name}, and {method} gives no list"):
                continue
            found[name] = len(entries or ())
            for entry in map(_dict, entries or ()):
                called = entry.get("uri" if name == "resources" else "name")
                talk.must(isinstance(called, str), f"an entry of {name} has no name: {str(entry)[:60]}")
                if name == "tools":
                    is_object = _dict(entry.get("inputSchema")).get("type") == "object"
                    talk.must(is_object, f"the tool {called!r} has no inputSchema of type object")
                    self.seen.unannotated += not _dict(entry.get("annotations"))
        return found

    # --- plain JSON-RPC ----------------------------------------------------------------------------------------------

    async def _plain(self, talk: Talk) -> None:
        plain = self.seen.jsonrpc
        mcp_too = any(self.seen.revisions.values())
        talk.is_judged = False  # until it is clear that the server means to speak JSON-RPC
        answer = await talk.ask(UNKNOWN)
        plain.spoken = (answer.error or {}).get("code") == NO_METHOD
        methods = _dict((await talk.ask("rpc.discover")).result).get("methods")
        if isinstance(methods, list):
            plain.spoken, plain.methods = True, len(methods)
        if not plain.spoken:
            return
        # A server of MCP answers JSON-RPC by its nature; that does not promise arrays, unless it lists methods too.
        talk.is_judged = plain.methods is not None or not mcp_too
        plain.arrays = await talk.array(UNKNOWN)
        talk.must(plain.arrays, "an array of requests is not answered with an array (JSON-RPC 2.0, section 6)")
        for message, code, what in (
            (b"[]", BAD_REQUEST, "an empty array"),
            (b'{"jsonrpc"', NO_JSON, "text that is not JSON"),
        ):
            found = await talk.raw(message)
            talk.must(found == code, f"{what} is answered with {found}, not {code}")


# --- the verb -----------------------------------------------------------------------------------------------------------

# The next step for a target that may be the wrong one.
_WHICH = {
    "command": "give the command line that serves on stdio: it may need an option for that",
    "url": "give the address of its endpoint: .../mcp or .../rpc",
    "file": "check the file",
}


@click.command("probe", cls=TargetCommand)
@target_argument
@way_options
@json_option
def probe_command(target: Target, way: Way, out: Printer) -> Exit | None:
    """Find out which protocols TARGET speaks: revisions of MCP, arrays, plain JSON-RPC, features.

    Exit code 9 if it breaks a rule. No method is called and no resource is read. --as and --revision probe only one
    protocol, or one revision.

    \b
    wirecall probe http://127.0.0.1:8420
    wirecall probe -- npx -y some-server
    """
    seen = run(_probe(target, way))
    found = {"target": target.text, **msgspec.to_builtins(seen), "advice": advice(seen)}
    out.result(found, lambda: _show(out, seen))
    return Exit.FOUND if seen.problems else None


async def _tokens(url: str) -> Protection | None:
    """Return what a server publishes about its authorization, or None. No credentials are sent."""
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
            return Protection(place, problems=[str(error)]) if named else None
        if answer.status != 200:
            continue
        # The rules that clients rely on.
        document = answer.document(dict)
        if document is None:
            return Protection(place, problems=[f"{place}: expected a JSON object"]) if named else None
        found = Protection(place, str(document.get("resource", "")))
        for name, texts in (("authorization_servers", found.servers), ("scopes_supported", found.scopes)):
            listed = document.get(name) or []
            if isinstance(listed, list):
                texts.extend(each for each in listed if isinstance(each, str))
            else:
                found.problems.append(f"its metadata: {name}: expected a list, got {type(listed).__name__}")
        if not is_resource_of(found.resource, url):
            found.problems.append(f"its metadata describes {found.resource!r}, so clients refuse it for {url}")
        if not found.servers:
            found.problems.append("its metadata does not name an authorization server")
        for issuer in found.servers[:3]:
            try:
                metadata = await find_issuer(network, issuer)
            except NotAuthorized as error:
                found.problems.append(str(error))
                continue
            if "S256" not in (metadata.code_challenge_methods_supported or ()):
                found.problems.append(f"{issuer} does not offer PKCE with S256, and MCP clients refuse it")
        return found
    return Protection(named, problems=["its challenge names metadata that does not exist"]) if named else None


async def _probe(target: Target, way: Way) -> Seen:
    # 1. The revisions to ask for.
    revisions = [] if way.protocol == "jsonrpc" else list(REVISIONS.values())
    if way.revision is not None and way.revision not in REVISIONS:
        raise no_such("revision", way.revision, list(REVISIONS), "--revision 2025-11-25")
    if way.revision is not None:
        revisions = [REVISIONS[way.revision]]
    plain = way.protocol != "mcp" and way.revision is None

    # 2. The questions. Handlers in this process may print.
    app = target.app() if target.kind == "file" else None

    try:
        with redirect_stdout(sys.stderr), progress(len(revisions) + plain, "Asking") as advance:
            seen = await Prober(target, way, app).look(revisions, plain=plain, advance=advance)
            if target.kind == "url" and any(seen.revisions.values()):
                seen.tokens = await _tokens(target.address("/mcp", keep_root=False))
                broken = seen.tokens.problems if seen.tokens is not None else ()
                seen.problems += [BrokenRule(["authorization"], each) for each in broken]
            return seen

    # 3. A server that cannot be probed.
    except Refused as error:
        url = target.address("/mcp", keep_root=False)
        found = await _tokens(url) if error.status == 401 else None
        if found is None:
            raise
        why = "; ".join([found.told(), f"metadata at {found.metadata}", *found.problems])
        next_step = f"wirecall login {url}, or --header 'Authorization: Bearer ...'"
        raise CliError("The server asks for a token.", why, next_step, exit=Exit.AUTH, type="unauthorized") from None
    except (ConnectionLost, NotSent, TimedOut) as error:
        is_command, is_unstarted = target.kind == "command", isinstance(error, NotSent)
        if is_unstarted and not is_command:
            raise
        what = "The server ended before it answered."
        next_step = "run the command by itself to see more" if is_command else "check the server's log"
        if is_unstarted and isinstance(error.__cause__, OSError):
            what = "The server process did not start."
        elif isinstance(error, TimedOut):
            what, next_step = "The server does not answer.", f"{_WHICH[target.kind]}; --timeout if it is slow"
        raise Unreachable(what, error, next_step) from None
    except BadAnswer as error:
        what = "The server speaks neither MCP nor JSON-RPC."
        what = "The server sends every message back." if isinstance(error, Echo) else what
        raise CliError(what, str(error), _WHICH[target.kind], exit=Exit.PROTOCOL, type="bad_answer") from None
    finally:
        if app is not None:
            await app.aclose()


def advice(seen: Seen) -> list[str]:
    """Return the consequences for users of the server."""
    speaks_mcp = any(seen.revisions.values())
    has_arrays = seen.jsonrpc.arrays or seen.arrays
    stateless = seen.revisions.get("2026-07-28", True)
    lines = (
        (seen.jsonrpc.arrays, "Many calls in one message: wirecall batch --as rpc sends them as one array."),
        (speaks_mcp and not has_arrays, "Batches go as single requests, side by side: the server takes no arrays."),
        (speaks_mcp and not stateless, "It needs a handshake: it does not speak 2026-07-28, which works without sessions."),
        (
            speaks_mcp and bool(seen.features.get("tools")) and not seen.keys,
            "A lost answer stays lost: it does not honour idempotency keys, so only read-only tools are repeated.",
        ),
        (
            seen.unannotated > 0,
            f"{count_of(seen.unannotated, 'tool')} without stated effects: wirecall treats them as destructive.",
        ),
    )
    return [text for applies, text in lines if applies]


def _show(out: Printer, seen: Seen) -> None:
    def spoken(does: bool, arrays: bool | None) -> str:
        return "no" if not does else "yes" if arrays is None else "yes, with arrays" if arrays else "yes, without arrays"

    server = " ".join(str(seen.server[name]) for name in ("name", "version") if name in seen.server)
    rows = [("server", server or "unnamed")] if any(seen.revisions.values()) else []
    for name, does in seen.revisions.items():
        rows.append((f"MCP {name}", spoken(does, bool(seen.arrays) if name == "2025-03-26" else None)))
    plain = seen.jsonrpc
    methods = f", {count_of(plain.methods, 'method')}" if plain.spoken and plain.methods is not None else ""
    rows.append(("JSON-RPC", spoken(plain.spoken, plain.arrays) + methods))
    if seen.features:
        counted = seen.features.items()
        names = [name if count is True else count_of(count, name.removesuffix("s")) for name, count in counted]
        rows += [("features", ", ".join(names)), ("keys", "honoured" if seen.keys else "not honoured")]
    rows += [("tokens", seen.tokens.told())] if seen.tokens is not None else []
    rows += [("ping", f"{seen.latency_ms} ms")] if seen.latency_ms is not None else []
    out.table(["ASKED", "FOUND"], rows)
    for problem in seen.problems:
        out.note(f"{', '.join(sorted(problem.where))}: {problem.what}", "failed")
    for line in advice(seen):
        out.note(line)

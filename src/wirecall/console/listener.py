"""The console's web server: its own port on the loopback, its pages, their JSON twins and the feed.

1. It listens on a loopback address, and refuses every other one. `Host` names the loopback
   (`transports.guard`).
2. Pages and their files are the same for every browser and hold no facts, so they need no session.
   Everything else needs the cookie and the value of the tab (`signin`).
3. GET changes nothing. POST needs JSON, `Sec-Fetch-Site: same-origin` and an `Origin` that equals
   `Host`. There is no CORS.
4. Every answer carries `HEADERS`. The policy allows the files of this server and nothing else.
5. A session with the role "look" cannot act, and sees callers and keys shortened. It knows records
   by other names (`aliases`).
6. Sign-ins and actions go into the audit trail (`Source.note_action`).
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl, unquote

import msgspec

from wirecall.console.aliases import Aliases
from wirecall.console.assets import Asset, assets
from wirecall.console.signin import SESSION_LIFE, Role, Session, SignIn, TooMany
from wirecall.console.source import FeedEvent, ListenerSettings, Refusal, Source
from wirecall.errors import UsageError
from wirecall.logs import announce
from wirecall.protocol.messages import Json, JsonObject
from wirecall.transports.headers import is_loopback
from wirecall.transports.http_server import HttpServer
from wirecall.transports.request import HttpError, HttpRequest
from wirecall.transports.serve import bind, serve_until

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'none'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types lit-html",
    )
)
HEADERS = (
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("permissions-policy", "camera=(), microphone=(), geolocation=(), payment=(), usb=()"),
)
FRESH = ("cache-control", "no-store")
FOREVER = ("cache-control", "public, max-age=31536000, immutable")
TAB = "x-wirecall-tab"
EXPORT = "/audit.ndjson"
NDJSON = "application/x-ndjson"
# Seconds for open streams when the console stops.
GRACE = 2.0
# The addresses of pages; each has a twin with `.json`, and that of `/` is `/now.json`.
PAGE = re.compile(
    r"/(calls(/[^/]+)?|batches/[^/]+|ledger(/[^/]+)?|methods(/.+/try)?|upstreams(/[^/]+)?|audit|settings)?"
)
RECORD_ACTION = re.compile(r"/ledger/([^/]+)/resolve")
UPSTREAM_ACTION = re.compile(r"/upstreams/([^/]+)/probe")
METHOD_ACTION = re.compile(r"/methods/(.+)/try")
# Characters of a caller or a key that the role "look" sees at each end.
ENDS = 3
HIDDEN = ("caller", "key")
# The same, and a line of the audit trail that cannot be read: it may hold them.
SHORTENED = (*HIDDEN, "unreadable")


async def open_listener(source: Source, settings: ListenerSettings) -> "Listener":
    """Open a console, and return it when it accepts connections."""
    listener = Listener(source, settings)
    await listener.open()
    return listener


class Refused(Exception):
    """An answer with an error. `type` is one word for programs."""

    def __init__(self, status: int, type: str, message: str, *, wait: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.wait = wait


class Listener:
    """One console that listens. `url` is its address."""

    def __init__(self, source: Source, settings: ListenerSettings) -> None:
        if not is_loopback(settings.host):
            raise UsageError(
                f"The console cannot listen on {settings.host}.",
                "it is for this machine alone: expected 127.0.0.1 or ::1",
                "reach it from another machine with: ssh -L 8421:127.0.0.1:8421 HOST",
            )
        self.url = ""
        self._source = source
        self._settings = settings
        self._role: Role = "look" if settings.readonly else "act"
        self.signin = SignIn(file=settings.sessions)
        self._aliases = Aliases()
        self._port = settings.port
        self._stop = asyncio.Event()
        self._server = HttpServer({}, fallback=self._answer, refusal_headers=HEADERS)
        self._running: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Listen; return when connections are accepted."""
        bound = bind(self._settings.host, self._settings.port, again=self._settings.shares)
        host, self._port = bound.getsockname()[:2]
        if ":" in host:
            host = f"[{host}]"
        self.url = f"http://{host}:{self._port}"
        is_open = asyncio.Event()
        self._running = asyncio.create_task(self._serve(bound, is_open.set))
        opened = asyncio.create_task(is_open.wait())
        await asyncio.wait({self._running, opened}, return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        if self._running.done():
            self._running.result()  # it raises

    async def _serve(self, bound: Any, serving: Callable[[], None]) -> None:
        with bound:
            await serve_until(
                self._server,
                bound,
                grace=GRACE,
                stop=self._stop,
                serving=serving,
                signals=False,
            )

    def link(self) -> str:
        """Return a new link for one sign-in."""
        return f"{self.url}/#link={self.signin.link(self._role)}"

    async def aclose(self) -> None:
        """End every stream, then close."""
        self._stop.set()
        if self._running is not None:
            with suppress(asyncio.CancelledError):
                await self._running

    # --- one request ------------------------------------------------------------------------------

    async def _answer(self, request: HttpRequest) -> None:
        request.add_headers(HEADERS)
        try:
            if request.method in ("GET", "HEAD"):
                await self._read(request)
            elif request.method == "POST":
                await self._change(request)
            else:
                raise Refused(405, "method", "ask with GET or POST")
        except Refused as error:
            fields = [FRESH]
            if error.wait is not None:
                fields.append(("retry-after", str(int(error.wait) + 1)))
            document = {"error": {"type": error.type, "message": str(error)}}
            await request.respond(error.status, msgspec.json.encode(document), headers=fields)
        except HttpError as error:  # of the body
            document = {"error": {"type": "request", "message": error.message}}
            fields = [FRESH, *error.headers]
            await request.respond(error.status, msgspec.json.encode(document), headers=fields)
        except Refusal as error:
            body = msgspec.json.encode(error.document)
            await request.respond(error.status, body, headers=[FRESH])

    async def _read(self, request: HttpRequest) -> None:
        """Answer GET."""
        path = request.path
        files = assets()
        if path in files.by_path:
            await _send_asset(request, files.by_path[path])
            return
        if PAGE.fullmatch(path) and not path.endswith(".json"):
            await request.respond(200, files.page, "text/html; charset=utf-8", [FRESH])
            return
        if path not in ("/feed", EXPORT) and not path.endswith(".json"):
            raise Refused(404, "address", f"there is no page {path[:100]!r}")
        session = self._session(request)
        given = dict(parse_qsl(request.query, keep_blank_values=True))
        if path == "/feed":
            await self._stream(request, session, given)
            return
        if path == EXPORT:
            await self._export(request, session, given.get("filter", ""))
            return
        document = await self._document(path.removesuffix(".json"), given, session)
        await self._send(request, session, document)

    async def _document(self, path: str, given: dict[str, str], session: Session) -> Json:
        """Return the facts of a page, as the role of a session sees them."""
        _, page, *rest = path.split("/", 2)
        name = unquote(rest[0]) if rest else ""
        if session.role == "act":
            return await self._facts(page, name, given)
        if page == "ledger" and name:
            name = self._aliases.word(name)
        elif page == "ledger" and given.get("after"):
            given = {**given, "after": self._aliases.word(given["after"])}
        facts = await self._facts(page, name, given)
        if page == "calls" and name:
            _shorten_lines(facts)
        document = shortened(facts)
        self._aliases.hide(page, document)
        return document

    async def _facts(self, page: str, name: str, given: dict[str, str]) -> Json:
        """Return the facts of a page, with whole keys."""
        source = self._source
        several: dict[str, Callable[[], Awaitable[Json]]] = {
            "now": source.now,
            "methods": source.methods,
            "settings": source.settings,
            "upstreams": source.upstreams,
            "calls": lambda: source.calls(
                given.get("filter", ""),
                limit=_number(given, "limit", 200, 1000),
                before=given.get("before"),
            ),
            "ledger": lambda: source.ledger(
                state=given.get("state") or None,
                method=given.get("method") or None,
                caller=given.get("caller") or None,
                limit=_number(given, "limit", 50, 500),
                after=given.get("after"),
            ),
            "audit": lambda: source.audit(
                given.get("filter", ""),
                limit=_number(given, "limit", 100, 1000),
                before=_number(given, "before", 0, 1 << 53) or None,
            ),
        }
        one: dict[str, Callable[[str], Awaitable[Json]]] = {
            "calls": source.call,
            "batches": source.batch,
            "ledger": source.record,
            "upstreams": source.upstream,
            "methods": lambda name: source.method(name.removesuffix("/try")),
        }
        if name and page in one:
            return await one[page](name)
        if not name and page in several:
            return await several[page]()
        raise Refused(404, "address", f"there is no page {f'/{page}'[:100]!r}")

    async def _stream(self, request: HttpRequest, session: Session, given: dict[str, str]) -> None:
        """Send the feed until the client leaves or the console stops."""
        events = self._source.feed(given.get("filter", ""), given.get("after") or None)
        await request.open_stream()
        over = asyncio.Event()
        request.watch(left=over.set)
        request.stopping.listen(over.set)
        ending = asyncio.create_task(over.wait())
        try:
            async for event in _until(events, ending):
                if session.role == "look":
                    event = msgspec.structs.replace(event, data=shortened(event.data))
                await request.write(_event(event))
            await request.close_stream(_event(FeedEvent("end", {"reason": "stopping"})))
        finally:
            ending.cancel()
            request.stopping.forget(over.set)

    async def _export(self, request: HttpRequest, session: Session, filter: str) -> None:
        """Send the lines of the audit trail as a file."""
        pieces = aiter(self._source.export_audit(filter))
        # Before the status is sent: the trail may not exist.
        first = await anext(pieces, b"")
        name = ("content-disposition", 'attachment; filename="audit.jsonl"')
        await request.open_stream([FRESH, name], NDJSON)
        await request.write(_for_role(first, session))
        async for piece in pieces:
            await request.write(_for_role(piece, session))
        await request.close_stream()
        await self._note(session.name, "export", "audit", "ok")

    async def _change(self, request: HttpRequest) -> None:
        """Answer POST."""
        headers = request.headers
        own = f"http://{headers.get('host', '')}"
        if headers.get("sec-fetch-site") != "same-origin" or headers.get("origin") != own:
            raise Refused(403, "origin", "only the console's own pages may change something")
        request.check_json()
        given = _decoded(await request.body())
        if request.path == "/session":
            await self._sign_in(request, given)
        elif request.path == "/session/link":
            await self._print_link(request)
        else:
            session = self._session(request)
            document = await self._act(request.path, given, session)
            await self._send(request, session, document)

    async def _act(self, path: str, given: JsonObject, session: Session) -> Json:
        """Do what a person asked for."""
        source = self._source
        if path == "/session/end":
            self.signin.close(session)
            await self._note(session.name, "sign out", "", "ok")
            return {"signed_in": False}
        if path == "/audit/verify":
            return await source.verify_audit()
        if session.role != "act":
            raise Refused(403, "role", "this console only shows: it runs with --console-readonly")
        if path == "/capture":
            paused = given.get("paused") is True
            document = await source.pause(paused)
            await self._note(session.name, "pause" if paused else "continue", "capture", "ok")
            return document
        if found := RECORD_ACTION.fullmatch(path):
            return await source.resolve(unquote(found[1]), given, actor=session.name)
        if found := UPSTREAM_ACTION.fullmatch(path):
            return await source.probe(unquote(found[1]), actor=session.name)
        if found := METHOD_ACTION.fullmatch(path):
            return await source.attempt(unquote(found[1]), given, actor=session.name)
        raise Refused(404, "address", f"there is no action {path[:100]!r}")

    # --- sign-in ----------------------------------------------------------------------------------

    def _attempt(self) -> None:
        try:
            self.signin.attempt()
        except TooMany as error:
            raise Refused(429, "attempts", str(error), wait=error.seconds) from None

    async def _sign_in(self, request: HttpRequest, given: JsonObject) -> None:
        self._attempt()
        secret = given.get("link")
        opened = self.signin.open(secret) if isinstance(secret, str) else None
        if opened is None:
            await self._note("anonymous", "sign in", request.client or "", "refused")
            raise Refused(
                403, "link", "this link was used already, or is too old: ask for another one"
            )
        await self._note(opened.session.name, "sign in", request.client or "", "ok")
        cookie = (
            f"wc_{self._port}={opened.cookie}; HttpOnly; SameSite=Strict; Path=/;"
            f" Max-Age={SESSION_LIFE:.0f}"
        )
        document = {"tab": opened.tab, "role": opened.session.role}
        await request.respond(
            200, msgspec.json.encode(document), headers=[FRESH, ("set-cookie", cookie)]
        )

    async def _print_link(self, request: HttpRequest) -> None:
        """Print another link where the server prints its lines: only its operator reads them."""
        self._attempt()
        announce(f"Console: {self.link()}")
        await request.respond(200, b'{"printed":true}', headers=[FRESH])

    def _session(self, request: HttpRequest) -> Session:
        """Return the session of a request, or refuse it."""
        headers = request.headers
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise Refused(403, "origin", "only the console's own pages may read this")
        session = self.signin.find(
            _cookie(headers.get("cookie", ""), f"wc_{self._port}"), headers.get(TAB, "")
        )
        if session is None:
            raise Refused(401, "session", "sign in with the link that the terminal printed")
        return session

    async def _note(self, actor: str, action: str, target: str, outcome: str) -> None:
        await self._source.note_action(actor, action, target, outcome)

    async def _send(self, request: HttpRequest, session: Session, document: Json) -> None:
        if session.role == "look":
            document = shortened(document)
        await request.respond(200, msgspec.json.encode(document), headers=[FRESH])


async def _send_asset(request: HttpRequest, asset: Asset) -> None:
    fields = [FOREVER, ("vary", "Accept-Encoding")]
    body = asset.body
    if "gzip" in request.headers.get("accept-encoding", ""):
        fields.append(("content-encoding", "gzip"))
        body = asset.packed
    await request.respond(200, body, asset.media, fields)


def shortened(value: Any) -> Any:
    """Return JSON with callers and keys shortened."""
    if isinstance(value, list):
        return [shortened(each) for each in value]
    if not isinstance(value, dict):
        return value
    made: JsonObject = {}
    for name, member in value.items():
        if name in SHORTENED and isinstance(member, str):
            made[name] = _short(member)
        elif name == "commands":
            made[name] = {}  # each of them has the key
        else:
            made[name] = shortened(member)
    return made


def _shorten_lines(call: Json) -> None:
    """Shorten the caller and the key of a call in its log records, which are text."""
    assert isinstance(call, dict)
    for name in HIDDEN:
        word = call["row"][name]
        for line in call["lines"]:
            if word:
                line["text"] = line["text"].replace(word, _short(word))


def _short(text: str) -> str:
    if len(text) <= 2 * ENDS + 1:
        return text
    return f"{text[:ENDS]}…{text[-ENDS:]}"


def _for_role(lines: bytes, session: Session) -> bytes:
    """Return lines of the audit trail; for the role "look", with callers and keys shortened."""
    if session.role == "act":
        return lines
    return b"".join(_shortened_line(line) + b"\n" for line in lines.splitlines())


def _shortened_line(line: bytes) -> bytes:
    """Return a line of the audit trail with callers and keys shortened; nothing of a torn one."""
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = {"unreadable": len(line)}
    return msgspec.json.encode(shortened(found))


def _event(event: FeedEvent) -> bytes:
    """Return a server-sent event, or a comment that keeps the connection open."""
    if event.event == "beat":
        return b": beat\n\n"
    lines = b"event: %s\ndata: %s\n\n" % (event.event.encode(), msgspec.json.encode(event.data))
    if event.id is not None:
        return b"id: %s\n%s" % (event.id.encode(), lines)
    return lines


async def _until(
    events: AsyncIterator[FeedEvent], ending: "asyncio.Task[Any]"
) -> AsyncIterator[FeedEvent]:
    """Yield events until another task ends; then close their iterator."""
    try:
        while not ending.done():
            coming = asyncio.ensure_future(anext(events, None))
            await asyncio.wait({coming, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                coming.cancel()
                with suppress(asyncio.CancelledError):
                    await coming
                return
            event = coming.result()
            if event is None:
                return
            yield event
    finally:
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()


def _cookie(header: str, name: str) -> str:
    """Return the value of a cookie, "" without it."""
    for part in header.split(";"):
        found, _, value = part.strip().partition("=")
        if found == name:
            return value
    return ""


def _number(given: dict[str, str], name: str, default: int, most: int) -> int:
    text = given.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 16):
        raise Refused(400, "number", f"{name}: expected a number up to {most}, got {text[:40]!r}")
    return min(int(text), most)


def _decoded(body: bytes) -> JsonObject:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(400, "json", f"the body: expected a JSON object: {error}") from None

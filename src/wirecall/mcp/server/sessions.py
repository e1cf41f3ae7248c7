"""Sessions of the revisions with a handshake over HTTP, and the sealed texts that clients keep for us.

A session's id is a sealed text (`Seals`) that carries what was negotiated, so any process with the same secret serves it.
Only calls in flight, streams and questions to the client stay in this process. So a session that is forgotten because there
are too many is read from its token again, and a session that has ended has to be remembered (`workers.EndedSession`).
"""

import base64
import hashlib
import hmac
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Container
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw, Struct

from wirecall.logs import logger
from wirecall.mcp.revisions import REVISIONS
from wirecall.mcp.server.peer import Session
from wirecall.mcp.server.workers import EndedSession, within
from wirecall.protocol.messages import JsonObject, encode
from wirecall.transports.request import HttpError

if TYPE_CHECKING:
    from wirecall.mcp.server.changes import Listener, Subscribed
    from wirecall.mcp.server.streams import Channel

LIFETIME = 86_400.0
MAX_SESSIONS = 10_000  # known here at a time
MAX_ENDED = 100_000
MAX_CHANNELS = 32  # of one session, open or waiting for a reader to come back

# Capabilities that matter to a server, and their modes: small enough for a header. So are the client's extensions, up to so
# many bytes of JSON.
MAX_EXTENSIONS = 2048
_USED = {"sampling": ("context", "tools"), "elicitation": ("form", "url"), "roots": ("listChanged",)}


class _Negotiated(Struct):
    """The negotiated state in a session's token."""

    revision: str
    capabilities: JsonObject
    opened: int = 0  # Unix time in milliseconds
    client: dict[str, str] | None = None


_decode = msgspec.json.Decoder(_Negotiated).decode


class Known:
    """A session, and the streams that this process keeps for it."""

    def __init__(self, session: Session, ended: EndedSession | None = None, until: float = 0.0) -> None:
        self.ended = ended  # its entry in the list of ended sessions
        self.until = until  # the end of its token
        self.id = "" if ended is None else ended.id
        self.session = session
        self.channels: dict[str, Channel] = {}  # the oldest first
        self._standing: Listener | None = None

    def stand(self, listener: "Listener | None") -> None:
        """Make a listener the standing stream, and end the one before."""
        # A message must go to one stream only (2025-11-25, transports, "Multiple Connections").
        if self._standing is not None:
            self._standing.close()
        self._standing = listener

    def leave(self, listener: "Listener") -> None:
        """Forget a standing stream that has ended."""
        if self._standing is listener:
            self._standing = None

    @property
    def is_busy(self) -> bool:
        """Return whether the session has a call, a question or a stream in this process."""
        return bool(self.session.calls) or self._standing is not None

    def keep(self, channel: "Channel") -> None:
        self.channels[channel.id] = channel
        while len(self.channels) > MAX_CHANNELS:
            del self.channels[next(iter(self.channels))]


class Sessions:
    """The sessions that this process knows. `is_ended` says whether another process has seen the end of one."""

    def __init__(
        self,
        seals: "Seals",
        is_ended: Callable[[EndedSession], bool],
        offered: Container[str],
        subscribed: "Subscribed",
    ) -> None:
        self._subscribed = subscribed
        self._seals = seals
        self._offered = offered  # extensions that the server has
        self._is_ended = is_ended
        self._known: OrderedDict[str, Known] = OrderedDict()
        self._verified: OrderedDict[tuple[str, str], str] = OrderedDict()  # callers and tokens; the ids of their sessions
        self._ended: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._known)

    def token(self, caller: str, session: Session) -> str:
        """Return a new session's id, good for its caller alone."""
        capabilities: JsonObject = {
            name: {mode: {} for mode in modes if mode in declared}
            for name, modes in _USED.items()
            if isinstance(declared := session.capabilities.get(name), dict)
        }
        # The extensions that the server has come first. One that does not fit counts as not declared: the specification
        # expects of both sides that they can do without.
        extensions, kept, room = session.extensions, dict[str, JsonObject](), MAX_EXTENSIONS
        for id in sorted(extensions, key=lambda id: id not in self._offered):
            size = len(encode({id: extensions[id]}))
            if size <= room:
                kept[id], room = extensions[id], room - size
        if len(kept) < len(extensions):
            logger.debug("%d extensions of a client do not fit into its session", len(extensions) - len(kept))
        if kept:
            capabilities["extensions"] = kept
        negotiated = _Negotiated(session.revision.name, capabilities, int(time.time() * 1000), session.client)
        return self._seals.seal("session", caller, negotiated, LIFETIME)

    def find(self, caller: str, token: str) -> Known:
        """Return the session behind a token; HttpError 404 if the caller has no such session, or it has ended."""
        # A token that was verified is looked up from then on: that takes 0.5 µs, and to open it 12.
        id = self._verified.get((caller, token), "")
        known = self._known.get(id)
        if known is not None and known.until >= self._seals.clock():
            self._known.move_to_end(id)
            return known
        # A client that gets 404 has to send `initialize` again (2025-11-25, transports, "Session Management").
        found = self._seals.open("session", caller, token)
        if found is None:
            raise HttpError(404, "no such session: send initialize")
        id = found.id
        known = self._known.get(id)
        if known is None:
            told = _decode(found.value)
            ended = EndedSession(hashlib.sha256(caller.encode()).hexdigest()[:16], id, told.opened)
            if ended.is_among(self._ended.get) or self._is_ended(ended):
                raise HttpError(404, "the session has ended: send initialize")
            session = Session(REVISIONS[told.revision], told.capabilities, client=told.client, id=id, caller=caller)
            known = self._known[id] = Known(session, ended, found.until)
            # Forget the session that was silent for longest. One that waits for its client's answer must not be forgotten,
            # or a caller that opens many sessions could cut off the others.
            if len(self._known) > MAX_SESSIONS:
                for _ in range(MAX_SESSIONS):
                    oldest, silent = next(iter(self._known.items()))
                    if not silent.is_busy:
                        break
                    self._known.move_to_end(oldest)
                self._subscribed.forget(self._known.popitem(last=False)[1].session)
        self._known.move_to_end(id)
        self._verified[caller, token] = id
        if len(self._verified) > MAX_SESSIONS:
            self._verified.popitem(last=False)
        return known

    def end(self, ended: EndedSession) -> None:
        """End a session, and remember that it has ended."""
        known = self._known.pop(ended.id, None)
        if known is not None:
            known.stand(None)
            known.session.abandon()
            self._subscribed.forget(known.session)
        self._ended[ended.name] = ended.opened
        if len(self._ended) > MAX_ENDED:
            self._ended = within(self._ended, int((time.time() - LIFETIME) * 1000), MAX_ENDED)


# --- sealed texts ----------------------------------------------------------------------------------------------------


class Sealed(Struct, array_like=True):
    """What a sealed text carries."""

    use: str
    caller: bytes  # a digest: the text does not reveal the caller's name
    until: float
    id: str  # random
    value: Raw


_decode_sealed = msgspec.json.Decoder(Sealed).decode


class Seals:
    """Seals and opens texts with one secret: session ids, and the state of calls that take several rounds.

    A sealed text is `payload.signature`, both in base64url. An attacker may have written a text that comes back, so `open`
    checks the signature first, then the use and the caller that the text was made for, and its age. The payload is not
    secret: it holds only values that the caller may see.
    """

    def __init__(self, secret: str | bytes, clock: Callable[[], float] = time.time) -> None:
        self._key = hashlib.sha256(secret.encode() if isinstance(secret, str) else secret).digest()
        self.name = hashlib.sha256(b"name" + self._key).hexdigest()[:12]  # does not reveal the secret
        self.clock = clock

    def seal(self, use: str, caller: str, value: object, lifetime: float) -> str:
        """Return a text that `open` accepts for this use and this caller, for `lifetime` seconds."""
        raw, until = Raw(msgspec.json.encode(value)), self.clock() + lifetime
        payload = msgspec.json.encode(Sealed(use, _digest(caller), until, os.urandom(12).hex(), raw))
        return _written(payload, hmac.digest(self._key, payload, "sha256"))

    def open(self, use: str, caller: str, sealed: str) -> Sealed | None:
        """Return what a sealed text carries; None if it is not good for this."""
        head, _, tail = sealed.partition(".")
        try:
            payload = base64.b64decode(head + "=" * (-len(head) % 4), b"-_", validate=True)
            signature = base64.b64decode(tail + "=" * (-len(tail) % 4), b"-_", validate=True)
        except ValueError:
            return None
        # One value has one text: base64 has several forms of the same bytes, and another could pass a list of texts.
        if _written(payload, signature) != sealed:
            return None
        # `compare_digest` takes the same time for every wrong signature, so the time does not help to guess one.
        if not hmac.compare_digest(hmac.digest(self._key, payload, "sha256"), signature):
            return None
        told = _decode_sealed(payload)
        return told if (told.use, told.caller) == (use, _digest(caller)) and told.until >= self.clock() else None


def _digest(caller: str) -> bytes:
    return hashlib.sha256(caller.encode()).digest()[:12]


def _written(payload: bytes, signature: bytes) -> str:
    return ".".join([base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in (payload, signature)])

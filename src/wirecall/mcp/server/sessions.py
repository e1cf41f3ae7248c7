"""Sessions of the revisions with a handshake over HTTP, and sealed strings that clients keep.

A session's id is a sealed string (`Sealer`) that carries the negotiated state, so any process with
the same secret serves it. Only calls in flight, streams and questions to the client stay in this
process. So a session that is forgotten because there are too many is read from its token again, and
the process has to remember ended sessions (`others.EndedSession`).
"""

import asyncio
import base64
import hashlib
import hmac
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw, Struct

from wirecall.logs import logger
from wirecall.mcp.revisions import REVISIONS
from wirecall.mcp.server.others import EndedSession, within
from wirecall.mcp.server.peer import Session
from wirecall.protocol.messages import JsonObject, encode
from wirecall.transports.request import HttpError

if TYPE_CHECKING:
    from wirecall.mcp.server.changes import Listener, Subscribed
    from wirecall.mcp.server.streams import Channel

# Seconds for which the token of a session is good.
LIFETIME = 86_400.0
# Sessions that this process knows at a time.
MAX_SESSIONS = 10_000
# Ended sessions that this process remembers.
MAX_ENDED = 100_000
# Seconds that a message waits for an answer that is being written to a reader that has come back.
DELIVERED_AFTER = 0.25
# Channels of one session, open or waiting for a reader to come back.
MAX_CHANNELS = 32

# Capabilities that matter to a server, and their modes: small enough for a header. So are the
# client's extensions, up to this many bytes of JSON.
MAX_EXTENSIONS = 2048
_USED = {
    "sampling": ("context", "tools"),
    "elicitation": ("form", "url"),
    "roots": ("listChanged",),
}


class _Negotiated(Struct):
    """The negotiated state in a session's token."""

    revision: str
    capabilities: JsonObject
    # Unix time in milliseconds.
    opened: int = 0
    client: dict[str, str] | None = None


_decode = msgspec.json.Decoder(_Negotiated).decode


class Known:
    """A session, and the streams that this process keeps for it."""

    def __init__(
        self, session: Session, ended: EndedSession | None = None, until: float = 0.0
    ) -> None:
        # Its entry in the list of ended sessions.
        self.ended = ended
        # When its token expires.
        self.until = until
        # Both are empty for a session that lives as long as its request.
        self.id = ""
        self.link: str | None = None
        if ended is not None:
            self.id = ended.id
            self.link = f"session {ended.id}"
        self.session = session
        # Whether this process knows what the session has set elsewhere. Messages of other processes
        # that arrive while it asks come after what it finds.
        self.is_met = False
        self.meeting = asyncio.Lock()
        self.late: list[bytes] | None = None
        # The streams of its requests by id, the oldest first.
        self.channels: dict[str, Channel] = {}
        # Channels whose readers have come back and are still connected.
        self.resumed: list[Channel] = []
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

    @contextmanager
    def resuming(self, channel: "Channel") -> Iterator[None]:
        """Count a reader of a channel that has come back."""
        self.resumed.append(channel)
        try:
            with channel.resuming():
                yield
        finally:
            self.resumed.remove(channel)

    async def delivered(self) -> None:
        """Wait a moment for the answers that are being written to readers that have come back.

        A client can read such an answer, and send its next message, before the server knows that
        the answer is written. The answer must not count as lost then.
        """
        delivering = [channel.delivered() for channel in self.resumed if channel.is_delivering]
        if delivering:
            with suppress(TimeoutError):
                async with asyncio.timeout(DELIVERED_AFTER):
                    await asyncio.gather(*delivering)

    def keep(self, channel: "Channel") -> None:
        self.channels[channel.id] = channel
        while len(self.channels) > MAX_CHANNELS:
            del self.channels[next(iter(self.channels))]


class Sessions:
    """The sessions that this process knows.

    `meet` learns from the others what a session has set; it returns False if the session has ended.
    """

    def __init__(
        self,
        sealer: "Sealer",
        meet: Callable[[Known], Awaitable[bool]],
        offered: Container[str],
        subscribed: "Subscribed",
    ) -> None:
        self._subscribed = subscribed
        self._sealer = sealer
        # Extensions that the server has.
        self._offered = offered
        self._meet = meet
        self._known: OrderedDict[str, Known] = OrderedDict()
        # Session ids by caller and token.
        self._verified: OrderedDict[tuple[str, str], str] = OrderedDict()
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
        extensions = self._short(session.extensions)
        if extensions:
            capabilities["extensions"] = extensions
        negotiated = _Negotiated(
            session.revision.name, capabilities, int(time.time() * 1000), session.client
        )
        return self._sealer.seal("session", caller, negotiated, LIFETIME)

    def _short(self, extensions: dict[str, JsonObject]) -> dict[str, JsonObject]:
        """Return the extensions of a client that fit into its token.

        Those that the server has come first. One that does not fit counts as not declared: the
        specification expects both sides to work without extensions.
        """
        kept: dict[str, JsonObject] = {}
        room = MAX_EXTENSIONS
        for id in sorted(extensions, key=lambda id: id not in self._offered):
            size = len(encode({id: extensions[id]}))
            if size <= room:
                kept[id] = extensions[id]
                room -= size
        if len(kept) < len(extensions):
            logger.debug(
                "%d extensions of a client do not fit into its session", len(extensions) - len(kept)
            )
        return kept

    async def find(self, caller: str, token: str) -> Known:
        """Return the session behind a token.

        Raises `HttpError` 404 if the caller has no such session, or it has ended.
        """
        # A token that was verified is only looked up after that, which takes 0.5 µs; opening it
        # takes 12.
        id = self._verified.get((caller, token), "")
        known = self._known.get(id)
        if known is not None and known.is_met and known.until >= self._sealer.clock():
            self._known.move_to_end(id)
            return known
        known = self._keep(caller, token, self._open(caller, token))
        if not known.is_met and not await self._meet(known):
            assert known.ended is not None
            self.end(known.ended)
            raise _over()
        return known

    def trust(self, caller: str, token: str) -> Known:
        """Return the same for a token that a process with our secret has just verified or made."""
        return self._keep(caller, token, self._open(caller, token))

    def _open(self, caller: str, token: str) -> "Sealed":
        # A client that gets 404 has to send `initialize` again (2025-11-25, transports, "Session
        # Management").
        found = self._sealer.open("session", caller, token)
        if found is None:
            raise HttpError(404, "no such session: send initialize")
        return found

    def _keep(self, caller: str, token: str, found: "Sealed") -> Known:
        id = found.id
        known = self._known.get(id)
        if known is None:
            known = self._known[id] = self._read(caller, found)
            if len(self._known) > MAX_SESSIONS:
                self._forget_one()
        self._known.move_to_end(id)
        self._verified[caller, token] = id
        if len(self._verified) > MAX_SESSIONS:
            self._verified.popitem(last=False)
        return known

    def _read(self, caller: str, token: "Sealed") -> Known:
        """Return the session that a token describes; `HttpError` 404 if it has ended."""
        ended = _entry_of(caller, token)
        if ended.is_among(self._ended.get):
            raise _over()
        negotiated = _decode(token.value)
        session = Session(
            REVISIONS[negotiated.revision],
            negotiated.capabilities,
            client=negotiated.client,
            id=token.id,
            caller=caller,
        )
        return Known(session, ended, token.until)

    def _forget_one(self) -> None:
        """Forget the session that was silent for longest.

        One that waits for its client's answer must not be forgotten, or a caller that opens many
        sessions could disconnect the others.
        """
        for _ in range(MAX_SESSIONS):
            oldest, silent = next(iter(self._known.items()))
            if not silent.is_busy:
                break
            self._known.move_to_end(oldest)
        self._subscribed.forget(self._known.popitem(last=False)[1].session)

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


def _entry_of(caller: str, token: "Sealed") -> EndedSession:
    """Return the entry of a session in the list of ended ones."""
    digest = hashlib.sha256(caller.encode()).hexdigest()[:16]
    return EndedSession(digest, token.id, _decode(token.value).opened)


def _over() -> HttpError:
    return HttpError(404, "the session has ended: send initialize")


# --- sealed strings -------------------------------------------------------------------------------


class Sealed(Struct, array_like=True):
    """The content of a sealed string."""

    use: str
    # A digest: the string does not reveal the caller's name.
    caller: bytes
    # When the string expires, in Unix time.
    until: float
    # A random value.
    id: str
    value: Raw


_decode_sealed = msgspec.json.Decoder(Sealed).decode


class Sealer:
    """Seals strings with the first of its secrets, and opens those of any.

    They are session ids, and the states of calls that take several rounds. A sealed string is
    `payload.signature`, both in base64url. An attacker may have written a string that a client
    sends back, so `open` checks the signature first, then the use and the caller that it was made
    for, and its age. The payload is not secret: it holds only values that the caller may see.
    """

    def __init__(
        self,
        secret: str | bytes,
        clock: Callable[[], float] = time.time,
        *,
        others: Sequence[str] = (),
    ) -> None:
        self._keys = tuple(map(_key_of, (secret, *others)))
        # One for each secret. They do not reveal it.
        self.names = tuple(hashlib.sha256(b"name" + key).hexdigest()[:12] for key in self._keys)
        self.clock = clock

    def seal(self, use: str, caller: str, value: object, lifetime: float) -> str:
        """Return a string that `open` accepts for this use and caller, for `lifetime` seconds."""
        raw = Raw(msgspec.json.encode(value))
        until = self.clock() + lifetime
        payload = msgspec.json.encode(
            Sealed(use, _digest(caller), until, os.urandom(12).hex(), raw)
        )
        return _written(payload, hmac.digest(self._keys[0], payload, "sha256"))

    def open(self, use: str, caller: str, sealed: str) -> Sealed | None:
        """Return the content of a sealed string.

        Returns None if it is not valid for this use and caller.
        """
        head, _, tail = sealed.partition(".")
        try:
            payload = base64.b64decode(head + "=" * (-len(head) % 4), b"-_", validate=True)
            signature = base64.b64decode(tail + "=" * (-len(tail) % 4), b"-_", validate=True)
        except ValueError:
            return None
        # One value has one string: base64 has several forms of the same bytes, and another could
        # evade a list of strings.
        if _written(payload, signature) != sealed:
            return None
        # `compare_digest` takes the same time for every wrong signature, so the time does not help
        # to guess one.
        if not any(
            hmac.compare_digest(hmac.digest(key, payload, "sha256"), signature)
            for key in self._keys
        ):
            return None
        found = _decode_sealed(payload)
        if found.use != use or found.caller != _digest(caller) or found.until < self.clock():
            return None
        return found


def _key_of(secret: str | bytes) -> bytes:
    return hashlib.sha256(secret.encode() if isinstance(secret, str) else secret).digest()


def _digest(caller: str) -> bytes:
    return hashlib.sha256(caller.encode()).digest()[:12]


def _written(payload: bytes, signature: bytes) -> str:
    return ".".join(
        [base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in (payload, signature)]
    )

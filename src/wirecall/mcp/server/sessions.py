"""The sessions of the older revisions, over HTTP.

A session's id is a sealed text (`sealed`) that carries what was negotiated, so any process with the same secret serves it.
What is only here is what cannot travel: calls under way, streams, questions to the client. So a session that is forgotten
because there are too many is read from its token again, and one that has ended has to be remembered.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from wirecall.mcp.revisions import REVISIONS
from wirecall.mcp.server.asking import Session
from wirecall.mcp.server.hub import Listener
from wirecall.mcp.server.sealed import BrokenSeal, Seals
from wirecall.mcp.server.streams import Channel
from wirecall.transports.request import HttpError

LIFETIME = 86_400.0
MAX_SESSIONS = 10_000  # known here at a time
MAX_ENDED = 100_000
MAX_CHANNELS = 32  # of one session, open or waiting for a reader to come back

# Capabilities that matter to a server, and their modes: small enough for a header.
_USED = {"sampling": ("context", "tools"), "elicitation": ("form", "url"), "roots": ("listChanged",)}


class _Negotiated(Struct):
    """What a session's token carries."""

    revision: str
    capabilities: dict[str, Any]


_decode = msgspec.json.Decoder(_Negotiated).decode


class Known:
    """A session, and what this process keeps for it."""

    def __init__(self, session: Session, id: str = "") -> None:
        self.id = id
        self.session = session
        self.channels: OrderedDict[str, Channel] = OrderedDict()
        self._standing: Listener | None = None

    def stand(self, listener: Listener | None) -> None:
        """A message goes to one stream: the newest standing one. The one before ends."""
        if self._standing is not None:
            self._standing.close()
        self._standing = listener

    def leave(self, listener: Listener) -> None:
        """A standing stream has ended."""
        if self._standing is listener:
            self._standing = None

    @property
    def is_busy(self) -> bool:
        """Whether something goes on here that its token does not know of: a call, a question, a stream."""
        return bool(self.session.calls) or self._standing is not None

    def keep(self, channel: Channel) -> None:
        self.channels[channel.id] = channel
        while len(self.channels) > MAX_CHANNELS:
            self.channels.popitem(last=False)


class Sessions:
    """Those that this process knows. `is_marked` says whether another has seen the end of one."""

    def __init__(self, seals: Seals, is_marked: Callable[[str], bool]) -> None:
        self._seals = seals
        self._is_marked = is_marked
        self._known: OrderedDict[str, Known] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def token(self, caller: str, session: Session) -> str:
        """A new session's id, good for its caller alone."""
        capabilities: dict[str, Any] = {
            name: {mode: {} for mode in modes if mode in declared}
            for name, modes in _USED.items()
            if isinstance(declared := session.capabilities.get(name), dict)
        }
        return self._seals.seal("session", caller, _Negotiated(session.revision.name, capabilities), LIFETIME)

    def find(self, caller: str, token: str) -> Known:
        """The session behind a token; HttpError 404 if it is none of this caller's, or has ended."""
        id, value = self._opened(caller, token)
        known = self._known.get(id)
        if known is None and self._is_marked(id):
            self.end(id)
        if id in self._ended:
            raise HttpError(404, "the session has ended: send initialize")
        if known is None:
            told = _decode(value)
            known = self._known[id] = Known(Session(REVISIONS[told.revision], told.capabilities), id)
            self._make_room()
        self._known.move_to_end(id)
        return known

    def id(self, caller: str, token: str) -> str:
        """What is known of a session outside of its token."""
        return self._opened(caller, token)[0]

    def end(self, id: str) -> None:
        known = self._known.pop(id, None)
        if known is not None:
            known.stand(None)
            known.session.abandon()
        self._ended[id] = None
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def _opened(self, caller: str, token: str) -> tuple[str, bytes]:
        try:
            return self._seals.open("session", caller, token)
        except BrokenSeal:
            raise HttpError(404, "no such session: send initialize") from None

    def _make_room(self) -> None:
        """Forget the session that was silent for longest. One that waits for its client's answer must not be forgotten, or
        whoever opens many sessions could cut off everybody else's."""
        if len(self._known) <= MAX_SESSIONS:
            return
        for _ in range(MAX_SESSIONS):
            id, known = next(iter(self._known.items()))
            if not known.is_busy:
                break
            self._known.move_to_end(id)
        self._known.popitem(last=False)

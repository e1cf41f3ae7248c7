"""A request of a client: which params a method takes, and what a request says of itself.

1. `PARAMS` names the params of each method. They are decoded once, and what is wrong with them is told with its place:
   `params.name: expected str, got int`.
2. At 2026-07-28 there is no handshake. Every request carries an envelope in `params._meta`: its revision and what its client
   can do. One that lacks it is a `BadEnvelope`, refused before anything runs.
"""

from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import InvalidParams, UnknownVersion
from wirecall.mcp.revisions import REVISIONS, STATELESS, Revision
from wirecall.mcp.server.asking import Id, Outlet, Peer, Session, Waiting
from wirecall.mcp.types import (
    LEVELS,
    PREFIX,
    CallTool,
    Complete,
    GetPrompt,
    Initialize,
    Listen,
    ListPage,
    Params,
    ReadResource,
    SetLevel,
    Subscribe,
)
from wirecall.protocol.messages import Envelope

PARAMS: dict[str, Any] = {
    "ping": Params,
    "server/discover": Params,
    "logging/setLevel": SetLevel,
    "tools/list": ListPage,
    "tools/call": CallTool,
    "prompts/list": ListPage,
    "prompts/get": GetPrompt,
    "resources/list": ListPage,
    "resources/templates/list": ListPage,
    "resources/read": ReadResource,
    "resources/subscribe": Subscribe,
    "resources/unsubscribe": Subscribe,
    "subscriptions/listen": Listen,
    "completion/complete": Complete,
}

_EMPTY = Raw(b"{}")
_DECODERS = {wanted: msgspec.json.Decoder(wanted) for wanted in {*PARAMS.values(), Initialize}}
_DECODE = {name: _DECODERS[wanted].decode for name, wanted in PARAMS.items()}


class Request(Struct):
    """One request of a client, on its way."""

    id: Id
    raw: Raw | UnsetType
    params: Any
    session: Session
    outlet: Outlet
    caller: str
    key: Any  # from the HTTP header
    position: int | None

    def call(self, waiting: Waiting) -> Peer:
        meta = self.params.meta
        token = UNSET if meta is UNSET else meta.token
        return Peer(self.session, self.outlet, self.caller, waiting, token, self.raw)


def params_of(message: Envelope, wanted: Any) -> Any:
    """The params of a message, as one of the types in `PARAMS`, or as those of `initialize`."""
    try:
        return _DECODERS[wanted].decode(_EMPTY if message.params is UNSET else message.params)
    except msgspec.ValidationError as error:
        raise InvalidParams(_explained(error)) from None
    except (RecursionError, msgspec.DecodeError) as error:
        raise InvalidParams(f"params: {error}") from None


def _explained(error: Exception) -> str:
    """msgspec's words, with the place first: `params.name: expected str, got int`."""
    what, _, where = str(error).partition(" - at `$")
    return f"params{where.rstrip('`')}: {what[:1].lower()}{what[1:]}".replace("`", "")


# --- requests that describe themselves (2026-07-28) ------------------------------------------------------------------


class BadEnvelope(InvalidParams):
    """The envelope of a request lacks what it must have: refused before anything runs, over HTTP with status 400."""


def described_params(message: Envelope) -> Params:
    """The params of a request that describes itself. Raises if it does not say what it must.

    They are decoded as those of their method, or as any params if they are not; what is wrong is told in its turn.
    """
    try:
        params: Params = _DECODE[message.method](message.params)  # type: ignore[arg-type]
    except (KeyError, TypeError, msgspec.ValidationError):
        try:
            params = Params() if message.params is UNSET else _DECODERS[Params].decode(message.params)
        except msgspec.ValidationError as error:
            raise BadEnvelope(_explained(error)) from None
    meta = params.meta
    if meta is UNSET or meta.version is UNSET or meta.capabilities is UNSET:
        raise BadEnvelope(f"params._meta must have {PREFIX}protocolVersion and {PREFIX}clientCapabilities")
    return params


def described_revision(params: Params) -> Revision:
    """The revision that a request names, if it is one that works like this, and its log level is one."""
    meta = params.meta
    assert meta is not UNSET and meta.version is not UNSET
    revision = REVISIONS.get(meta.version)
    if revision is None or not revision.is_stateless:
        supported = [revision.name for revision in STATELESS]
        raise UnknownVersion(f"{meta.version[:40]!r} is not served", supported=supported, requested=meta.version)
    if meta.level is not UNSET and meta.level not in LEVELS:
        raise BadEnvelope(f"{PREFIX}logLevel: expected one of {', '.join(LEVELS)}")
    return revision


def described_session(params: Params, calls: dict[Id, Any] | None = None) -> Session:
    """The session of a request that describes itself: it lives as long as the request."""
    revision = described_revision(params)
    meta = params.meta
    assert meta is not UNSET and meta.capabilities is not UNSET
    return Session(revision, meta.capabilities, level=None if meta.level is UNSET else meta.level, calls=calls)

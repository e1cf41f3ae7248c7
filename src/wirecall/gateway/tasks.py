"""Tasks of servers of 2026-07-28: their ids are sealed, and those who cannot ask are waited for.

1. A client gets a sealed id: it names the upstream, and is good for its caller alone. Requests about
   a task go to the upstream that its id names.
2. The gateway waits for a task whose client has not declared tasks. The status of the task is its
   progress.
"""

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import BadAnswer, BadInput
from wirecall.gateway.rounds import type_of
from wirecall.gateway.wire import META, members_of, raw_of
from wirecall.protocol.messages import UNREADABLE, ErrorObject, remote_error

if TYPE_CHECKING:
    from wirecall.gateway.session import Report, UpstreamSession
    from wirecall.mcp.server.sessions import Sealer

METHODS = frozenset({"tasks/get", "tasks/update", "tasks/cancel"})
# Seconds for which a client may keep the id of a task: a month.
LASTS = 30 * 86_400.0
# Seconds between two questions about a task: the usual ones, and the bounds.
USUAL = 1.0
SOONEST = 0.1
FURTHEST = 60.0

_USE = "gateway task"
_QUOTED = b'"task"'
_ID = "taskId"


class Named(Struct, array_like=True):
    """A task: the label of its upstream, and its id there."""

    label: str
    id: str


class _Progress(Struct, rename="camel"):
    """The members of a task's state that matter here."""

    task_id: str
    status: str
    status_message: str | None = None
    poll_interval_ms: Any = None
    result: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


_decode_named = msgspec.json.Decoder(Named).decode
_decode_progress = msgspec.json.Decoder(_Progress).decode
_decode_error = msgspec.json.Decoder(ErrorObject).decode
_decode_text = msgspec.json.Decoder(str).decode


def is_task(result: Raw) -> bool:
    """Return whether a call has become a task."""
    return bytes(result).find(_QUOTED) >= 0 and type_of(result) == "task"


def sealed(sealer: "Sealer", caller: str, label: str, result: Raw) -> Raw:
    """Return a new task as its client gets it."""
    members: dict[str, Any] = {**members_of(result)}
    try:
        id = _decode_text(members.get(_ID, b"null"))
    except UNREADABLE:
        raise BadAnswer("the server has made a task without an id") from None
    members[_ID] = sealer.seal(_USE, caller, Named(label, id), LASTS)
    return raw_of(members)


def named(sealer: "Sealer", caller: str, params: Raw | UnsetType) -> Named:
    """Return the task that a request is about; `BadInput` if this caller has no such task."""
    try:
        text = _decode_text(members_of(params).get(_ID, b"null"))
    except UNREADABLE:
        raise BadInput(f"params.{_ID}: expected a string", ran="no") from None
    found = sealer.open(_USE, caller, text)
    if found is None:
        raise BadInput(f"{_ID}: there is no such task, or it is no longer kept", ran="no")
    return _decode_named(found.value)


def with_id(text: Raw | UnsetType, id: object) -> Raw:
    """Return params or a result with another id of the task, if there is one."""
    members: dict[str, Any] = {**members_of(text)}
    if _ID in members:
        members[_ID] = id
    return raw_of(members)


async def outcome(
    session: "UpstreamSession", result: Raw, params: Raw | UnsetType, report: "Report | None"
) -> Raw:
    """Wait for the end of a task, and return its result.

    Raises the error of a task that has failed, and `BadAnswer` if it has no outcome.
    """
    envelope = members_of(members_of(params).get(META, UNSET))
    envelope.pop("progressToken", None)
    clock = session.upstream.clock
    steps = 0
    shown: str | None = None
    while True:
        state = _read(result)
        if state.status == "completed" and state.result is not UNSET:
            return state.result
        if state.status == "failed" and state.error is not UNSET:
            raise _error_of(state.error)
        if state.status != "working":
            raise BadAnswer(f"the task of the server is {state.status[:100]!r}, without an outcome")
        if report is not None and state.status_message not in (None, shown):
            shown = state.status_message
            steps += 1
            report(raw_of({"progress": steps, "message": shown}))
        await clock.sleep(_pause(state.poll_interval_ms))
        about = raw_of({_ID: state.task_id, META: raw_of({**envelope})})
        result = await session.ask("tasks/get", about)


def _read(result: Raw) -> _Progress:
    try:
        return _decode_progress(result)
    except UNREADABLE as error:
        raise BadAnswer(f"the state of a task cannot be read: {error}") from None


def _error_of(error: Raw) -> Exception:
    try:
        return remote_error(_decode_error(error))
    except UNREADABLE as misfit:
        return BadAnswer(f"the error of a task cannot be read: {misfit}")


def _pause(interval: object) -> float:
    """Return the seconds until the next question. The server's interval is a hint."""
    if not isinstance(interval, (int, float)):
        return USUAL
    return min(max(interval / 1000, SOONEST), FURTHEST)

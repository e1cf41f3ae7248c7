"""Calls of several rounds: a server of 2026-07-28 asks, and gets the next round with the answers.

    client without a handshake   gets the questions, with the state of the server inside a sealed one
    client with a handshake      is asked inside its call (`Bridge`), which then sends the next round
    `wrap`                       has one client, so the state is passed on as it is

1. A sealed state belongs to one caller, one upstream and one request: its method, its name and its
   arguments. It is good for `STATE` seconds, and does not outlive the record of a command.
2. The record of a command waits between two rounds, and the state has its key. So one state leads to
   one round, however often it is sent.
3. A round that asks has done nothing. If the client does not answer, the record is released.
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import (
    BadAnswer,
    BadInput,
    InvalidParams,
    InvalidRequest,
    NotCapable,
    RpcError,
    rebuilt,
)
from wirecall.gateway.wire import META, members_of, one_line, raw_of
from wirecall.mcp.server.peer import check_capability, sent
from wirecall.protocol.messages import UNREADABLE, encode
from wirecall.server.policy import fingerprint

if TYPE_CHECKING:
    from wirecall.limits import Limits
    from wirecall.mcp.server.peer import Outlet, Session
    from wirecall.mcp.server.sessions import Sealer

# Seconds for which a client may keep the state of a call that asks.
STATE = 3600.0
# Rounds of questions inside one call.
ROUNDS = 16
STATE_MEMBER = "requestState"
ANSWERS_MEMBER = "inputResponses"

_USE = "gateway state"
_QUOTED = b'"input_required"'
# Members that differ between the rounds of one request.
_VOLATILE = (STATE_MEMBER, ANSWERS_MEMBER, META, "idempotency_key", "idempotencyKey")
# The ids of questions differ in every process.
_numbers = count(int.from_bytes(os.urandom(4)) << 20)


class _Typed(Struct, rename="camel"):
    result_type: str = "complete"


class Question(Struct):
    """A request of a server in a result: it has no id."""

    method: str
    params: Raw = Raw(b"{}")


class _Asking(Struct, rename="camel"):
    """The questions of a server, and its state."""

    input_requests: dict[str, Question] = {}
    request_state: Raw | UnsetType = UNSET


_decode_typed = msgspec.json.Decoder(_Typed).decode
_decode_asking = msgspec.json.Decoder(_Asking).decode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_decode_text = msgspec.json.Decoder(str).decode


class Declined(InvalidRequest):
    """An error that ends a call which has not run: another server's own words, or a client's."""

    def __init__(self, error: RpcError) -> None:
        super().__init__(ran="no")
        self.code = error.code
        self.message = error.message
        self.data = error.data
        self.ran = "no"


def asks(result: Raw) -> bool:
    """Return whether a result is a question to the client."""
    return bytes(result).find(_QUOTED) >= 0 and type_of(result) == "input_required"


def type_of(result: Raw) -> str:
    """Return the type of a result."""
    try:
        return _decode_typed(result).result_type
    except UNREADABLE:
        return "complete"


# --- sealed states --------------------------------------------------------------------------------


class Leg(Struct):
    """What the client keeps between two rounds, inside a sealed state."""

    # The upstream and the request that it belongs to.
    about: str
    # The key of a command.
    key: str | None = None
    # The command has a record, which waits.
    has_record: bool = False
    # The state of the server, if it has one.
    state: Raw | UnsetType = UNSET


_decode_leg = msgspec.json.Decoder(Leg).decode


def about(label: str, method: str, params: Raw | UnsetType) -> str:
    """Return what distinguishes a request of one upstream from all others, in every round."""
    members = members_of(params)
    for name in _VOLATILE:
        members.pop(name, None)
    return f"{label} {method} {fingerprint(raw_of(members)).hex()}"


def paused(sealer: "Sealer", caller: str, leg: Leg, result: Raw, lifetime: float = STATE) -> bytes:
    """Return the questions of a server, with its state inside a sealed one."""
    members: dict[str, Any] = {**members_of(result)}
    leg.state = members.get(STATE_MEMBER, UNSET)
    members[STATE_MEMBER] = sealer.seal(_USE, caller, leg, min(lifetime, STATE))
    return encode(members)


def resumed(
    sealer: "Sealer", caller: str, label: str, method: str, params: Raw | UnsetType
) -> tuple[Raw, Leg, str]:
    """Return the params of a further round for the server, and what its state says.

    Raises `BadInput` if the state was not issued for this caller and this request, or is too old.
    """
    members: dict[str, Any] = {**members_of(params)}
    try:
        text = _decode_text(members.pop(STATE_MEMBER))
    except UNREADABLE:
        raise InvalidParams(f"params.{STATE_MEMBER}: expected a string", ran="no") from None
    found = sealer.open(_USE, caller, text)
    if found is None:
        raise BadInput(
            f"{STATE_MEMBER}: it was not issued for this caller, or has expired", ran="no"
        )
    leg = _decode_leg(found.value)
    if leg.about != about(label, method, params):
        raise BadInput(f"{STATE_MEMBER}: it belongs to another call", ran="no")
    if leg.state is not UNSET:
        members[STATE_MEMBER] = leg.state
    return raw_of(members), leg, text


# --- questions to a client with a handshake -------------------------------------------------------


class Bridge:
    """Asks a client with a handshake what a server without one wants to know, inside its call."""

    def __init__(
        self,
        session: "Session",
        outlet: "Outlet",
        limits: "Limits",
        place: Callable[[bool], AbstractContextManager[None]],
    ) -> None:
        self._session = session
        self._outlet = outlet
        self._limits = limits
        # Counts the call as one that waits for its client. It takes whether the call is in flight.
        self._place = place
        # A command counts as in flight.
        self.is_command = False
        self._asking: asyncio.Task[dict[str, Raw]] | None = None
        self._is_closed = False
        self._rounds = 0

    def close(self) -> None:
        """Stop asking: the client has cancelled the call."""
        self._is_closed = True
        if self._asking is not None:
            self._asking.cancel()

    async def next_round(self, params: Raw | UnsetType, result: Raw) -> Raw:
        """Ask the client, and return the params of the next round.

        Raises `BadAnswer` if the questions cannot be read, and `Declined` if the client does not
        answer them.
        """
        try:
            asked = _decode_asking(result)
            stated = [_decode_object(each.params) for each in asked.input_requests.values()]
        except UNREADABLE as error:
            raise BadAnswer(f"the questions of the server cannot be read: {error}") from None
        self._rounds += 1
        if self._rounds > ROUNDS:
            raise Declined(NotCapable(f"the server still asks after {ROUNDS} rounds"))
        members: dict[str, Any] = {**members_of(params)}
        members.pop(STATE_MEMBER, None)
        members[ANSWERS_MEMBER] = await self._answers(asked.input_requests, stated)
        if asked.request_state is not UNSET:
            members[STATE_MEMBER] = asked.request_state
        return raw_of(members)

    async def _answers(
        self, questions: dict[str, Question], stated: list[dict[str, Any]]
    ) -> dict[str, Raw]:
        """Return the client's answers to all questions of one round."""
        try:
            for question, params in zip(questions.values(), stated, strict=True):
                check_capability(self._session, question.method, params)
            with self._place(self.is_command):
                self._asking = asyncio.create_task(self._ask_all(questions))
                try:
                    await asyncio.wait([self._asking])
                finally:
                    self._asking.cancel()
            if self._is_closed or self._asking.cancelled():
                raise NotCapable("the client has cancelled the call")
            return self._asking.result()
        except RpcError as error:
            raise Declined(error) from None

    async def _ask_all(self, questions: dict[str, Question]) -> dict[str, Raw]:
        asking = [asyncio.ensure_future(self._ask(each)) for each in questions.values()]
        try:
            answers = await asyncio.gather(*asking)
        finally:
            for each in asking:
                each.cancel()
        return dict(zip(questions, answers, strict=True))

    async def _ask(self, question: Question) -> Raw:
        params = self._worded(question)
        try:
            return await ask_client(
                self._session, self._outlet, self._limits, question.method, params
            )
        except RpcError as error:
            if not error.is_remote:
                raise
            message = f"{error.message} (the client's answer to {question.method})"
            raise rebuilt(RpcError, error.code, message, error.data) from None

    def _worded(self, question: Question) -> Raw:
        """Return the params of a question in the words of the client's revision."""
        members: dict[str, Any] = {**members_of(question.params)}
        if question.method != "elicitation/create":
            return raw_of(members)
        if not self._session.revision.has("ask elicitation url"):
            members.pop("mode", None)
        elif members.get("mode") == b'"url"':
            members.setdefault("elicitationId", os.urandom(12).hex())
        return raw_of(members)


async def ask_client(
    session: "Session",
    outlet: "Outlet",
    limits: "Limits",
    method: str,
    params: Raw | UnsetType,
) -> Raw:
    """Send a request to a client through the stream of its call, and return its result.

    Raises the error that the client answers, or `NotCapable` if it does not answer.
    """
    id = f"gateway-{next(_numbers)}"
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[Raw | RpcError] = loop.create_future()
    session.asked[id] = None, answered
    left = loop.create_task(outlet.until_left(limits.away_time))
    head = b'{"jsonrpc":"2.0","id":%b,"method":%b' % (encode(id), encode(method))
    if params is not UNSET:
        head += b',"params":' + one_line(params)
    try:
        if not await sent(outlet.send(head + b"}")):
            raise NotCapable("the question could not be sent to the client", ran="no")
        coming: list[asyncio.Future[Any]] = [answered, left]
        await asyncio.wait(coming, timeout=limits.answer_time, return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            raise NotCapable("the client has not answered the question", ran="no")
        found = answered.result()
    finally:
        del session.asked[id]
        left.cancel()
    if isinstance(found, RpcError):
        raise found
    return found

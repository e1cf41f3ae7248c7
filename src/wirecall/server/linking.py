"""The entries of one JSON-RPC array that refer to each other, as `run_batch` begins them.

`run_batch` begins entries in array order, and a reference goes to an earlier entry. So every target
has begun, or is in the lane before its dependants: an entry that waits for its targets cannot block
them.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import CoroutineType
from typing import Any, Generic, TypeAlias, TypeVar

from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import InvalidParams, ReferenceInvalid, RpcError
from wirecall.protocol import messages as frames
from wirecall.protocol.messages import (
    Answer,
    Failure,
    Id,
    Invalid,
    Json,
    Message,
    Success,
)
from wirecall.server.call import Frame
from wirecall.server.method import Method
from wirecall.server.policy import fingerprint, identify
from wirecall.server.references import (
    LIMITS,
    NO_LINKS,
    Links,
    Planned,
    Room,
    blocked,
    call_digest,
    fill,
    make_plan,
    read_references,
    reference_digest,
)

Outcome: TypeAlias = "Answer | Coroutine[Any, Any, Answer | None] | None"
Begin: TypeAlias = Callable[[Frame, Message | Invalid, int], Outcome]
T = TypeVar("T")


class Outcomes(Generic[T]):
    """The outcomes of the entries of one batch, for the entries that wait for them."""

    def __init__(self, plan: Sequence[Planned]) -> None:
        # The entries that others wait for.
        self.targets = {each for planned in plan for each in planned.waits_for}
        self._outcomes: dict[int, T] = {}
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}

    def __getitem__(self, position: int) -> T:
        return self._outcomes[position]

    def note(self, position: int, outcome: T) -> None:
        """Keep the outcome of an entry, and wake those that wait for it."""
        self._outcomes[position] = outcome
        for waiter in self._waiting.pop(position, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, planned: Planned) -> None:
        """Wait until all targets of an entry have ended."""
        for target in planned.waits_for:
            if target not in self._outcomes:
                waiter = asyncio.get_running_loop().create_future()
                self._waiting.setdefault(target, []).append(waiter)
                await waiter


class Filled(Struct, frozen=True):
    """The params of an entry with the values of its references, and its fingerprint (R9)."""

    params: Raw | UnsetType
    digest: bytes


def without_links(message: Message | Invalid) -> Message | Invalid:
    """Return the request of an entry that has references, and any other message unchanged."""
    if isinstance(message, Invalid) and message.linked is not None:
        return message.linked.request
    return message


def scope_fault(method: Method) -> ReferenceInvalid | None:
    """Return the error of an entry with references if its scopes depend on its arguments."""
    if method.scopes is None or method.scopes.always:
        return None
    return ReferenceInvalid(
        f"the scopes of {method.name} depend on its arguments, "
        "so it takes no references: send it after their targets are answered",
        ran="no",
    )


class Linking:
    """Begins the entries of one batch, those with references after their targets."""

    def __init__(
        self,
        messages: Sequence[Message | Invalid],
        methods: Mapping[str, Method],
        begin: Begin,
        serve: Callable[[Frame, Message, Method, int, Filled], Coroutine[Any, Any, Answer | None]],
    ) -> None:
        self._methods = methods
        self._begin = begin
        self._serve = serve
        self._messages = [without_links(message) for message in messages]
        ids: list[Id | UnsetType] = [_target_id(message) for message in messages]
        links = [self._links(message) for message in messages]
        self._plan = make_plan(ids, links).entries
        self._answers: Outcomes[Answer | None] = Outcomes(self._plan)
        self._room = Room()

    @property
    def waits(self) -> dict[int, tuple[int, ...]]:
        """By the position of an entry with references, the positions that it waits for."""
        return {
            position: planned.waits_for
            for position, planned in enumerate(self._plan)
            if planned.waits_for
        }

    def _links(self, message: Message | Invalid) -> Links | RpcError:
        if not isinstance(message, Invalid) or message.linked is None:
            return NO_LINKS
        linked = message.linked
        try:
            links = read_references(
                _value(linked.refs), _value(linked.after), linked.request.params
            )
        except RpcError as error:
            return error
        method = self._methods.get(linked.request.method)
        if links.refs and method is not None:
            return scope_fault(method) or links
        return links

    def begin(self, frame: Frame, message: Message | Invalid, position: int) -> Outcome:
        """Return the outcome of an entry, or a coroutine of it, as `run_batch` asks."""
        planned = self._plan[position]
        outcome: Outcome
        if planned.error is not None:
            # An error of the method itself does not matter: nothing of the entry runs.
            outcome = self._begin(frame, _refused(message, planned.error), position)
        elif planned.waits_for:
            outcome = self._begin_linked(frame, message, position, planned)
        else:
            outcome = self._begin(frame, message, position)
        if position not in self._answers.targets:
            return outcome
        if type(outcome) is CoroutineType:
            return self._noting(position, outcome)
        assert outcome is None or isinstance(outcome, (Success, Failure))
        self._answers.note(position, outcome)
        return outcome

    async def _noting(
        self, position: int, outcome: Coroutine[Any, Any, Answer | None]
    ) -> Answer | None:
        answer = await outcome
        self._answers.note(position, answer)
        return answer

    async def _begin_linked(
        self, frame: Frame, message: Message | Invalid, position: int, planned: Planned
    ) -> Answer | None:
        """Wait for the targets, fill the params and serve the entry."""
        assert not isinstance(message, Invalid)
        await self._answers.wait(planned)
        try:
            method = self._methods.get(message.method)
            self._check_targets(planned)
            if method is None:
                return await _settled(self._begin(frame, message, position))
            filled = Filled(self._fill(message, planned), self._digest(position))
        except RpcError as error:
            return await _settled(self._begin(frame, _refused(message, error), position))
        return await self._serve(frame, message, method, position, filled)

    def _check_targets(self, planned: Planned) -> None:
        """Raise the error that a failed target causes (R6)."""
        for target in planned.waits_for:
            answer = self._answers[target]
            if isinstance(answer, Failure):
                error = answer.error
                data = error.data if error.data is not UNSET else None
                raise blocked(answer.id, RpcError(error.code, error.message, data))

    def _fill(self, message: Message, planned: Planned) -> Raw | UnsetType:
        if not planned.links.refs:
            return message.params
        sent = b"{}"
        if message.params is not UNSET:
            sent = bytes(message.params)
        results = [self._result(source) for source in planned.sources]
        return Raw(fill(sent, planned.links.refs, results, LIMITS, self._room))

    def _result(self, position: int) -> bytes:
        """Return the bytes of a result as the caller gets them (R8)."""
        answer = self._answers[position]
        assert isinstance(answer, Success)
        if isinstance(answer.result, Raw):
            return bytes(answer.result)
        return frames.encode(answer.result)

    def _digest(self, position: int) -> bytes:
        """Return the fingerprint of the params of an entry (R9)."""
        message = self._messages[position]
        assert not isinstance(message, Invalid)
        method = self._methods[message.method]
        _key, digest = _identity(message, method)
        planned = self._plan[position]
        targets = [self._call_digest(source) for source in planned.sources]
        return reference_digest(digest, planned.links.refs, targets)

    def _call_digest(self, position: int) -> bytes:
        message = self._messages[position]
        assert not isinstance(message, Invalid)
        method = self._methods.get(message.method)
        if method is None:  # it was removed a moment ago
            raise InvalidParams(f"there is no method {message.method!r}", ran="no")
        key, _digest = _identity(message, method)
        return call_digest(method.name, key, self._digest(position))


def _identity(message: Message, method: Method) -> tuple[str | None, bytes]:
    """Return the key of an entry, and the fingerprint of its params as sent."""
    key: str | None = None
    digest: bytes | None = None
    if method.is_command:
        key, digest = identify(
            message.params,
            UNSET,
            position=method.signature.key_position,
            place=method.key_place,
        )
    return key, digest or fingerprint(message.params, method.key_place)


def _target_id(message: Message | Invalid) -> Id | UnsetType:
    """Return the id under which an entry can be referred to."""
    if message.id is None:
        return UNSET
    return message.id


def _refused(message: Message | Invalid, error: RpcError) -> Invalid:
    """Return an entry whose references cannot be used."""
    id: Id = None
    if message.id is not UNSET:
        id = message.id
    request = without_links(message)
    return Invalid(error, id, method=request.method)


def _value(member: Raw | UnsetType) -> Json:
    if member is UNSET:
        return UNSET
    return frames.decode_any(member)


async def _settled(outcome: Outcome) -> Answer | None:
    if outcome is None or isinstance(outcome, (Success, Failure)):
        return outcome
    return await outcome

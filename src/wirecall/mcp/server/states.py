"""Calls of several rounds, on the side of the server (2026-07-28): what the client keeps for us between them.

1. A call that asks ends with `input_required`: its questions, and a sealed text, the state. Nothing of it stays here, so any
   worker can take the next round.
2. The next round is the same call with the answers and the state. The state holds the answers of all rounds before and the
   idempotency key of the first: a round that leaves the key out is the same command still.
3. A state belongs to one caller, one method and one set of arguments, and is good for `STATE_LIFETIME` seconds.
4. A state of a command leads to one outcome, however often it is sent. From the second round on the command has a record in
   the ledger: under its key, or, if it came without one, under a key that its first question made and the state carries. So
   the ledger answers a state that comes again with the outcome that it had. A state does not outlive the record.
5. A command takes answers only to the questions that its state asked. What only reads does nothing, and takes answers as
   they come, as the specification wishes.

The client's side of it is `rounds`.
"""

from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import BadInput
from wirecall.mcp.server.asking import Peer
from wirecall.mcp.server.sealed import BrokenSeal, Seals
from wirecall.mcp.types import Resumed
from wirecall.process import new_nonce
from wirecall.protocol.messages import encode
from wirecall.server.call import Call
from wirecall.server.method import Method
from wirecall.server.policy import fingerprint

STATE_LIFETIME = 3600.0  # a person may take this long to answer a question
INPUT_REQUIRED = b'{"resultType":"input_required"'  # how a result begins that is a question


class _State(Struct):
    digest: str
    key: str | None
    asked: list[str]
    answers: dict[str, dict[str, Any]]


class States:
    """Ends rounds with a state, and begins the next ones with it."""

    def __init__(self, seals: Seals) -> None:
        self._seals = seals

    def resume(self, call: Call, params: Resumed) -> None:
        """Give the call the answers of this round and of those before, and a way to ask."""
        peer: Peer = call.peer
        if params.state is not UNSET or params.responses is not UNSET:
            peer.continues = True
            peer.answers = self._answers(call, params)
        # No reference back to the call: a cycle for every call would keep the garbage collector busy.
        peer.pause = partial(self._pause, call.method, call.record, call.params, call.caller, call.key)

    def _answers(self, call: Call, params: Resumed) -> dict[str, dict[str, Any]]:
        given = {} if params.responses is UNSET else params.responses
        is_command = call.method.is_command
        if params.state is UNSET:
            if given and is_command:
                raise BadInput("inputResponses: this call has asked nothing; send the requestState of the call that asked")
            return given
        state = self._opened(call, params.state)
        if call.key not in (None, state.key):
            raise BadInput("requestState: the call began with another idempotency key, or without one")
        unasked = sorted(given.keys() - state.asked)
        if unasked and is_command:
            raise BadInput(f"inputResponses: {unasked[0][:100]!r} was not asked; expected {', '.join(state.asked)}")
        call.key = state.key
        return {**state.answers, **given}

    def _opened(self, call: Call, sealed: str) -> _State:
        try:
            _, value = self._seals.open("state", call.caller, sealed)
        except BrokenSeal:
            raise BadInput("requestState: not the one that was given for this call, or too old") from None
        state = msgspec.json.decode(value, type=_State)
        if state.digest != _digest(call.record, call.params):
            raise BadInput("requestState: it belongs to another call")
        return state

    def _pause(
        self,
        method: Method,
        record: str,
        params: Raw | UnsetType,
        caller: str,
        key: str | None,
        answers: dict[str, dict[str, Any]],
        questions: dict[str, Any],
    ) -> bytes:
        """The result of a round that asks."""
        lifetime = STATE_LIFETIME
        if method.is_command:
            key, lifetime = key or new_nonce().hex(), min(lifetime, method.terms.retention)
        state = _State(_digest(record, params), key, list(questions), answers)
        sealed = self._seals.seal("state", caller, state, lifetime)
        return encode({"resultType": "input_required", "inputRequests": questions, "requestState": sealed})


def _digest(record: str, params: Raw | UnsetType) -> str:
    """Which call a state belongs to: its method and its arguments."""
    return f"{record} {fingerprint(params).hex()}"

"""Calls of several rounds (2026-07-28): a result that is a question, and what goes back with the next round.

The next round is the same call with the answers, and with the server's state exactly as it came: it is nobody's business
what is in it. Where there was none, none goes back.
"""

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct

from wirecall.client.exchange import Entry
from wirecall.errors import BadAnswer
from wirecall.mcp.client.host import Host
from wirecall.mcp.client.inbox import Follower
from wirecall.protocol.replies import UNREADABLE

_MAY_ASK = frozenset({"tools/call", "prompts/get", "resources/read"})


class Question(Struct):
    """A request of the server's in a result: it has no id."""

    method: str
    params: Raw = Raw(b"{}")


class Asked(Struct, rename="camel"):
    """A result that is a question."""

    input_requests: dict[str, Question] = {}
    request_state: Any = UNSET

    async def answered(self, host: Host) -> dict[str, Any]:
        """The members of the next round's params. Raises what the host refuses."""
        answers = {key: await host.answer(asked.method, asked.params) for key, asked in self.input_requests.items()}
        state = {} if self.request_state is UNSET else {"requestState": self.request_state}
        return {**({"inputResponses": answers} if self.input_requests else {}), **state}


class Extra(Struct):
    """What an entry of MCP has beside its params."""

    read: Callable[[Entry], Any] | None = None  # makes the result of it
    follower: Follower | None = None
    asked: Asked | None = None  # what the last result asks for, if it was not the last
    round: dict[str, Any] = {}  # `inputResponses` and `requestState` of this attempt
    is_mended: bool = False


class _Kind(Struct, rename="camel"):
    result_type: str = "complete"  # what older servers leave out (2026-07-28, basic)


_kind_of = msgspec.json.Decoder(_Kind).decode
_asked_in = msgspec.json.Decoder(Asked).decode


def asked_by(entry: Entry) -> Asked | None:
    """What a result asks for, if it is not complete. One of an unknown kind is none at all (2026-07-28, basic)."""
    assert entry.raw is not None
    try:
        kind = _kind_of(entry.raw).result_type
        if kind == "complete":
            return None
        if kind != "input_required" or entry.method not in _MAY_ASK:
            raise BadAnswer(f"{entry.method}: a result of the unknown type {kind[:40]!r}")
        return _asked_in(entry.raw)
    except UNREADABLE as error:
        raise BadAnswer(f"{entry.method}: the result cannot be read: {error}") from None

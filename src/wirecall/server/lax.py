"""`App(strict=False)`: the dispatcher for clients that JSON-RPC 2.0 would refuse.

1. Requests may lack `"jsonrpc":"2.0"`, and `"params": null` means no params; `protocol.messages`
   reads them.
2. A notification gets no answer, even if it is refused: some clients take the answer for a failure.
   (Over HTTP the status is 200, for the same reason.)
3. A single request of JSON-RPC 1.0 is answered in the form of 1.0, and the id null makes it a
   notification. In an array all entries are of 2.0, because 1.0 does not have arrays.
"""

from collections.abc import Awaitable, Coroutine
from typing import Any

from msgspec import UNSET, Raw

from wirecall.errors import RpcError
from wirecall.protocol.messages import Data, Invalid, Message, as_bytes
from wirecall.protocol.old import OldRequest, as_notification, as_old_answer, read_old
from wirecall.server.call import Frame
from wirecall.server.dispatch import Dispatcher, Reply


class LaxDispatcher(Dispatcher):
    """A dispatcher that is not strict."""

    _strict = False

    def handle(
        self, data: Data, *rest: Any, **options: Any
    ) -> "bytes | Coroutine[Any, Any, bytes | None] | None":
        message = as_bytes(data)
        request: OldRequest | None = None
        if len(message) <= self._policy.limits.bytes_in:
            request = read_old(message)
        if request is None:
            return super().handle(message, *rest, **options)
        if request.has_null_id:
            message = as_notification(request)
        reply = super().handle(message, *rest, **options)
        if reply is None or isinstance(reply, bytes):
            return _in_old_form(reply)
        return _later_in_old_form(reply)

    def _refused(
        self, frame: Frame, message: Message | Invalid, position: int | None, error: RpcError
    ) -> Reply:
        reply = super()._refused(frame, message, position, error)
        if _has_notifications_alone(message):
            return None
        return reply


def _has_notifications_alone(message: Message | Invalid) -> bool:
    """Return whether a message gets no answer.

    Such a message is a notification, or an oversized batch of notifications alone.
    """
    if not isinstance(message, Invalid):
        return message.id is UNSET
    entries = message.entries
    return bool(entries) and all(
        not isinstance(entry, Raw) and entry.id is UNSET for entry in entries
    )


def _in_old_form(reply: bytes | None) -> bytes | None:
    if reply is None:
        return None
    return as_old_answer(reply)


async def _later_in_old_form(reply: Awaitable[bytes | None]) -> bytes | None:
    return _in_old_form(await reply)

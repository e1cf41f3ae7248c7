"""The bytes of an answer: a result or an error, in the words of a revision.

1. Results are made in the fullest form and encoded once. 2026-07-28 wants a `resultType` and the server's name in every
   one; they are put in front of the bytes, so only a result with a `_meta` of its own is taken apart again.
2. An id that could not be read is null in the older revisions and left out in the newer ones.
3. An error's message has its reason in it: most clients show nothing else, neither to people nor to models.
4. No reply is longer than `Limits.bytes_out`, be it one answer or an array of them (`Room`): an error takes the place of an
   answer that does not fit, as soon as that is made, so an array keeps no more than one reply may hold.
"""

import asyncio
from typing import Any

import msgspec
from msgspec import UNSET

from wirecall.errors import FixedError, InternalError, RpcError
from wirecall.mcp.revisions import Revision
from wirecall.mcp.server.arrays import Incoming
from wirecall.mcp.server.asking import Id
from wirecall.mcp.types import PREFIX
from wirecall.protocol.messages import ErrorObject, encode

INPUT_REQUIRED = b'{"resultType":"input_required"'  # how a result begins that is a question


class Answers:
    """Makes the answers of one server."""

    def __init__(self, info: dict[str, str], bytes_out: int) -> None:
        self._info = info
        self._bytes_out = bytes_out
        told = encode({f"{PREFIX}serverInfo": info})
        self._stamp = b'"resultType":"complete","_meta":' + told
        self._only_meta = b'"_meta":' + told

    def to(self, id: Id, result: Any, revision: Revision) -> bytes:
        """Return the answer to a request, with what the revision wants in every one. Raises if it is too long."""
        data = result if type(result) is bytes else encode(result)
        if revision.has_result_type:
            if data == b"{}":
                data = b"{" + self._stamp + b"}"
            elif data.startswith(INPUT_REQUIRED):
                data = b"{" + self._only_meta + b"," + data[1:]
            elif b'"_meta"' not in data:
                data = b"{" + self._stamp + b"," + data[1:]
            else:
                members = msgspec.json.decode(data)
                meta = {**members.get("_meta", {}), f"{PREFIX}serverInfo": self._info}
                data = encode({"resultType": "complete", **members, "_meta": meta})
        answer = success(id, data)
        if len(answer) > self._bytes_out:
            raise self.too_long()
        return answer

    def room(self, revision: Revision) -> "Room":
        """Return the room for the answers of one array."""
        return Room(self._bytes_out, self.too_long(), revision)

    def too_long(self) -> RpcError:
        reason = f"the answer is longer than {self._bytes_out} bytes"
        return InternalError(reason, type="limit_exceeded", limit="bytes_out", max=self._bytes_out, ran="yes")


class Room:
    """The bytes that the answers of one array may still take."""

    def __init__(self, left: int, too_long: RpcError, revision: Revision) -> None:
        self._left = left
        self._too_long = too_long
        self._revision = revision

    async def kept(self, entry: Incoming, answer: bytes | None) -> bytes | None:
        """Return the answer to an entry, or an error in place of one that does not fit."""
        if answer is None:
            return None
        if len(answer) > self._left:
            answer = failure(entry.id, self._too_long, self._revision)
            await asyncio.sleep(0)  # to make and to write it took a while: other calls get their turn
        self._left -= len(answer)
        return answer


def success(id: Id, result: bytes) -> bytes:
    """Return the answer that carries a result."""
    told = b"%d" % id if type(id) is int else encode(id)
    return b'{"jsonrpc":"2.0","id":' + told + b',"result":' + result + b"}"


def failure(id: Any, error: RpcError, revision: Revision | None) -> bytes:
    """Return the answer that reports an error. Without a revision, none was negotiated yet."""
    reason = error.data.get("reason") if isinstance(error, FixedError) and isinstance(error.data, dict) else None
    words = f"{error.message}: {reason}" if reason and not error.is_remote else error.message
    body = encode(ErrorObject(error.code, words, UNSET if error.data is None else error.data))
    if id is not None and id is not UNSET:
        return b'{"jsonrpc":"2.0","id":' + encode(id) + b',"error":' + body + b"}"
    if revision is None or revision.value("id of an unreadable message") == "null":
        return b'{"jsonrpc":"2.0","id":null,"error":' + body + b"}"
    return b'{"jsonrpc":"2.0","error":' + body + b"}"

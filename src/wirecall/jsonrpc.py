"""JSON-RPC 2.0 as pure functions on bytes, for use alone: no app, no event loop, no sockets.

    make_request, make_notification, make_batch         values -> bytes
    make_response, make_error, make_reply               values -> bytes
    parse_request, parse_batch                          bytes -> values
    parse_response, parse_response_batch                bytes -> values
    dispatch_line, dispatch_line_async                  bytes -> bytes or None

Parsing never raises on bad input: an unreadable message carries the error that answers it, or the
reason (J2).
"""

from collections.abc import Awaitable, Callable
from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import (
    EncodeError,
    InternalError,
    InvalidParams,
    InvalidRequest,
    MethodNotFound,
    RpcError,
)
from wirecall.limits import LIMITS, Limits
from wirecall.protocol.messages import (
    Data,
    ErrorObject,
    Id,
    Invalid,
    Json,
    JsonObject,
    Message,
    Success,
    as_bytes,
    check_params_shape,
    decode_any,
    decode_items,
    decode_raw,
    decode_value,
    encode,
    failure,
    make_batch,
    make_reply,
    opens_array,
    read,
    read_id,
)

__all__ = [
    "Batch",
    "ErrorObject",
    "InvalidParams",
    "InvalidRequest",
    "MethodNotFound",
    "Request",
    "Response",
    "ResponseBatch",
    "RpcError",
    "dispatch_line",
    "dispatch_line_async",
    "make_batch",
    "make_error",
    "make_notification",
    "make_reply",
    "make_request",
    "make_response",
    "parse_batch",
    "parse_request",
    "parse_response",
    "parse_response_batch",
]

Params: TypeAlias = list[Json] | JsonObject | None


# --- messages -------------------------------------------------------------------------------------


class Request(Struct, frozen=True):
    """A parsed request or notification, or the error that answers it (`error_envelope`).

    `params_json` and `id_json` are the bytes of the two members as they were sent; None if there is
    no such member, and for params of null, which count as none.

    `method`, `params` and `id` are its members, and `is_notification` says that it has no id.

    >>> parse_request(b'{"jsonrpc":"2.0","method":"note"}').is_notification
    True
    """

    method: str = ""
    params: Params = None
    id: Id = None
    is_notification: bool = False
    error_envelope: bytes | None = None
    params_json: bytes | None = None
    id_json: bytes | None = None


class Batch(Struct, frozen=True):
    """A parsed message: its requests in order, or one `framing_error` that answers all of it.

    `is_batch` says whether it was an array, and `requests` are its entries.

    >>> parse_batch(b"[]").framing_error
    b'{"jsonrpc":"2.0","error":{"code":-32600,"message":"Invalid Request","data":{"reason":"..."}},"id":null}'
    """

    is_batch: bool
    requests: list[Request]
    framing_error: bytes | None = None


class Response(Struct, frozen=True):
    """A parsed response: `result`, or `error`, or the reason why it is neither (`malformed`).

    `id` is that of the request.

    >>> parse_response(b'{"jsonrpc":"2.0","error":{"code":4020,"message":"no"},"id":7}').error.code
    4020
    """

    id: Id = None
    result: Json = None
    error: ErrorObject | None = None
    malformed: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it has a result."""
        return self.error is None and self.malformed is None


class ResponseBatch(Struct, frozen=True):
    """A parsed reply: its responses in the order of arrival.

    If it is not a reply, `malformed` has the reason.

    `is_batch` says whether it was an array, and `responses` are its entries.

    >>> parse_response_batch(b'{"jsonrpc":"2.0","result":3,"id":7}').is_batch
    False
    """

    is_batch: bool
    responses: list[Response]
    malformed: str | None = None


# --- builders -------------------------------------------------------------------------------------


def make_request(method: str, params: Params, id: Id) -> bytes:
    """Return a request; params of None are omitted.

    `method` is its name, `params` are a list or a dict, and `id` is the caller's.

    >>> make_request("add", [1, 2], 7)
    b'{"jsonrpc":"2.0","method":"add","params":[1,2],"id":7}'
    """
    return encode({"jsonrpc": "2.0", "method": method, **_given(params), "id": id})


def make_notification(method: str, params: Params = None) -> bytes:
    """Return a notification: a request that is not answered.

    `method` and `params` are those of `make_request`.

    >>> make_notification("note", {"text": "hello"})
    b'{"jsonrpc":"2.0","method":"note","params":{"text":"hello"}}'
    """
    return encode({"jsonrpc": "2.0", "method": method, **_given(params)})


def make_response(id: Id, result: object) -> bytes:
    """Return a successful response.

    `id` is that of the request, and `result` any JSON.

    >>> make_response(7, 3)
    b'{"jsonrpc":"2.0","result":3,"id":7}'
    """
    return encode(Success(result, id))


def make_error(id: Id, code: int, message: str, data: object = None) -> bytes:
    """Return an error response; data of None is omitted.

    `id` is that of the request, `code`, `message` and `data` are members of the error.

    >>> make_error(7, 4020, "not enough money")
    b'{"jsonrpc":"2.0","error":{"code":4020,"message":"not enough money"},"id":7}'
    """
    return encode(failure(id, RpcError(code, message, data)))


def _given(params: Params) -> JsonObject:
    if params is None:
        return {}
    return {"params": params}


# --- parsers --------------------------------------------------------------------------------------


def parse_request(data: Data, *, strict: bool = True) -> Request:
    """Parse one request or notification; an array is refused.

    `strict=False` is as in `parse_batch`.

    `data` is the message. It does not raise for a wrong one: `error_envelope` has the answer.

    >>> parse_request(b'{"jsonrpc":"2.0","method":"add","params":[1,2],"id":7}').method
    'add'
    >>> parse_request(b'{"jsonrpc":"2.0"}').error_envelope
    b'{"jsonrpc":"2.0","error":{"code":-32600,"message":"Invalid Request","data":{"reason":"..."}},"id":null}'
    """
    message = read(data, LIMITS, strict)
    if isinstance(message, list):
        return _request(Invalid(InvalidRequest("expected one request object, got an array")), None)
    return _request(message, _written_id(data, message))


def parse_batch(data: Data, *, strict: bool = True, max_batch: int = LIMITS.batch) -> Batch:
    """Parse a message of one request or of many; a bad entry does not affect the others.

    `strict=False` takes messages without `"jsonrpc": "2.0"`, and `"params": null`.

    `data` is the message, and `max_batch` the most entries that are allowed.

    >>> batch = parse_batch(b'[{"jsonrpc":"2.0","method":"add","id":1}, 5]')
    >>> [request.error_envelope is None for request in batch.requests]
    [True, False]
    """
    limits = LIMITS
    if max_batch != LIMITS.batch:
        limits = Limits(batch=max_batch)
    message = read(data, limits, strict)
    if isinstance(message, list):
        ids = _written_ids(data, message)
        return Batch(True, [_request(entry, id) for entry, id in zip(message, ids, strict=True)])
    request = _request(message, _written_id(data, message))
    if isinstance(message, Invalid) and message.id is None:
        return Batch(False, [], request.error_envelope)
    return Batch(False, [request])


def parse_response(data: Data) -> Response:
    """Parse one response; for anything else `malformed` has the reason.

    `data` is the message.

    >>> parse_response(b'{"jsonrpc":"2.0","result":3,"id":7}').result
    3
    """
    parsed = parse_response_batch(data)
    if parsed.malformed:
        return Response(malformed=parsed.malformed)
    if not parsed.is_batch:
        return parsed.responses[0]
    return Response(malformed="expected one response object, got an array")


def parse_response_batch(data: Data) -> ResponseBatch:
    """Parse a reply of one response or of many.

    `data` is the message.

    >>> [each.id for each in parse_response_batch(b'[{"jsonrpc":"2.0","result":3,"id":7}]').responses]
    [7]
    """
    try:
        raw = as_bytes(data)
        raw.decode()  # a `Raw` is not checked for UTF-8
        if not opens_array(raw):
            return ResponseBatch(False, [_response(decode_raw(raw))])
        items = decode_items(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return ResponseBatch(False, [], f"not JSON: {error}")
    if not items:
        return ResponseBatch(True, [], "an empty array is not a reply")
    return ResponseBatch(True, [_response(item) for item in items])


def _request(message: Message | Invalid, id_json: bytes | None) -> Request:
    if isinstance(message, Invalid):
        return Request(
            id=message.id,
            error_envelope=encode(failure(message.id, message.error)),
            id_json=id_json,
        )
    is_notification = message.id is UNSET
    id: Id = message.id if message.id is not UNSET else None
    params: Params = None
    params_json: bytes | None = None
    try:
        if message.params is not UNSET:
            params_json = bytes(message.params)
            check_params_shape(message.params)
            params = decode_any(message.params)
    except RpcError as error:
        silent = is_notification and not isinstance(error, InvalidRequest)
        return Request(
            message.method, None, id, silent, encode(failure(id, error)), params_json, id_json
        )
    return Request(message.method, params, id, is_notification, None, params_json, id_json)


_decode_members = msgspec.json.Decoder(dict[str, Raw]).decode


def _written_ids(data: Data, entries: list[Message | Invalid]) -> list[bytes | None]:
    """Return the ids of a batch as they were sent."""
    raw = as_bytes(data)
    if not _may_differ(raw):
        return [_encoded(entry) for entry in entries]
    ids: list[bytes | None] = []
    for entry, item in zip(entries, decode_items(raw), strict=True):
        ids.append(_id_in(item) if _has_id(entry) else None)
    return ids


def _written_id(data: Data, message: Message | Invalid) -> bytes | None:
    """Return the id of one message as it was sent."""
    raw = as_bytes(data)
    if _has_id(message) and _may_differ(raw):
        return _id_in(decode_raw(raw))
    return _encoded(message)


def _has_id(message: Message | Invalid) -> bool:
    """Return whether an id was read. An `Invalid` has None for one that is missing or broken."""
    return message.id is not UNSET and not (message.id is None and isinstance(message, Invalid))


def _may_differ(data: bytes) -> bool:
    """Return whether an id's bytes may differ from its value's.

    Only an escape and -0 have two spellings.
    """
    return b"\\" in data or b"-0" in data


def _id_in(raw: Raw) -> bytes:
    return bytes(_decode_members(raw)["id"])


def _encoded(message: Message | Invalid) -> bytes | None:
    if not _has_id(message):
        return None
    if isinstance(message.id, Raw):
        return bytes(message.id)
    return encode(message.id)


class _WireResponse(Struct):
    jsonrpc: Literal["2.0"]
    id: Raw
    result: Raw | UnsetType = UNSET
    error: ErrorObject | UnsetType = UNSET


_decode_response = msgspec.json.Decoder(_WireResponse).decode


def _response(raw: Raw) -> Response:
    try:
        wire = _decode_response(raw)
        id = read_id(wire.id)
        if wire.error is UNSET and wire.result is not UNSET:
            return Response(id, decode_value(wire.result))
        if wire.error is not UNSET and wire.result is UNSET:
            return Response(id, error=wire.error)
        return Response(id, malformed="a response has either a result or an error")
    except (msgspec.DecodeError, RecursionError, RpcError) as error:
        return Response(malformed=str(error))


# --- a server in one function ---------------------------------------------------------------------


def dispatch_line(
    data: Data, handler: Callable[[str, Params], object], *, strict: bool = True
) -> bytes | None:
    """Answer a message with a plain callable `(method, params) -> result`.

    The callable may raise `RpcError`.

    `data` is the message, and `handler` gets the method and the params of each call. Returns the
    reply, or None if nothing is owed. `strict=False` is as in `parse_batch`.

    >>> def add(method, params):
    ...     return sum(params)
    >>> dispatch_line(b'{"jsonrpc":"2.0","method":"add","params":[1,2],"id":7}', add)
    b'{"jsonrpc":"2.0","result":3,"id":7}'
    """
    batch = parse_batch(data, strict=strict)
    replies: list[bytes | None] = []
    for request in batch.requests:
        try:
            reply = request.error_envelope or make_response(
                request.id, handler(request.method, request.params)
            )
        except Exception as error:
            reply = _error_reply(request, error)
        if not request.is_notification:
            replies.append(reply)
    return batch.framing_error or make_reply(replies, batch.is_batch)


async def dispatch_line_async(
    data: Data, handler: Callable[[str, Params], Awaitable[object]], *, strict: bool = True
) -> bytes | None:
    """Answer a message with a coroutine function; the entries of a batch run one after another.

    `data`, `handler` and `strict` are those of `dispatch_line`.

    >>> async def add(method, params):
    ...     return sum(params)
    >>> message = b'{"jsonrpc":"2.0","method":"add","params":[1,2],"id":7}'
    >>> asyncio.run(dispatch_line_async(message, add))
    b'{"jsonrpc":"2.0","result":3,"id":7}'
    """
    batch = parse_batch(data, strict=strict)
    replies: list[bytes | None] = []
    for request in batch.requests:
        try:
            reply = request.error_envelope or make_response(
                request.id, await handler(request.method, request.params)
            )
        except Exception as error:
            reply = _error_reply(request, error)
        if not request.is_notification:
            replies.append(reply)
    return batch.framing_error or make_reply(replies, batch.is_batch)


def _error_reply(request: Request, error: Exception) -> bytes:
    if isinstance(error, RpcError):
        try:
            return encode(failure(request.id, error))
        except EncodeError as unencodable:
            error = unencodable
    import logging  # late: `import wirecall` stays light

    logging.getLogger("wirecall").error("%s failed", request.method, exc_info=error)
    return encode(failure(request.id, InternalError()))

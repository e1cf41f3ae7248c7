"""JSON-RPC 2.0 as pure functions on bytes: nothing here knows a socket, a loop, a clock or an App.

Entry points, for use alone:

    make_request, make_notification, make_response, make_error, make_batch, make_reply     values -> bytes
    parse_request, parse_batch, parse_response, parse_response_batch                       bytes -> values
    dispatch_line, dispatch_line_async                                                     bytes -> bytes or None

and, for the dispatcher, `read` (bytes -> envelopes with raw params) and `write` (outcomes -> bytes or None).

The rules of the file:

1. Parsing never raises on bad input. What cannot be read becomes an `Invalid` with the id it could save.
2. One typed decode for the good case. Only when it fails, the slow path takes the message apart entry by entry. Both
   paths give one verdict on every input; tests/test_json_verdicts.py freezes it.
3. Syntax outranks shape (J8): a message that is not JSON answers one -32700, whatever else is wrong with it.
4. Of duplicate members the last counts, as in every decoder our users meet; member names are compared byte by byte.
5. A number id whose digits a Python int or float would not give back is carried as its bytes (J14).
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated, Any, Literal, TypeAlias, final

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import (
    EncodeError,
    InternalError,
    InvalidParams,
    InvalidRequest,
    LimitExceeded,
    MethodNotFound,
    ParseError,
    RpcError,
    UsageError,
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

Id: TypeAlias = int | str | float | Raw | None
Params: TypeAlias = list[Any] | dict[str, Any] | None
Data: TypeAlias = bytes | bytearray | memoryview | str

# The default limits of a message; `policy.Limits` names them and gives the reasons.
MAX_BYTES = 1 << 20
MAX_DEPTH = 64
MAX_BATCH = 50

# Python reads and writes integers of up to 4,300 digits; an id, which is echoed and logged, may be as long as that.
MAX_ID = 4300


# --- messages -------------------------------------------------------------------------------------------------------


class Request(Struct, frozen=True):
    """A parsed request or notification, or the answer it deserves instead (`error_envelope`)."""

    method: str = ""
    params: Params = None
    id: Id = None
    is_notification: bool = False
    error_envelope: bytes | None = None


class Batch(Struct, frozen=True):
    """A parsed message: its requests in order, or one `framing_error` that answers all of it."""

    is_batch: bool
    requests: list[Request]
    framing_error: bytes | None = None


class ErrorObject(Struct, frozen=True, gc=False):
    """The `error` member of a response."""

    code: int
    message: str
    data: Any = UNSET


class Response(Struct, frozen=True):
    """A parsed response: `result`, or `error`, or the reason why it is neither (`malformed`)."""

    id: Id = None
    result: Any = None
    error: ErrorObject | None = None
    malformed: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.malformed is None


class ResponseBatch(Struct, frozen=True):
    """A parsed reply: its responses in the order of arrival, or the reason why it is not one (`malformed`)."""

    is_batch: bool
    responses: list[Response]
    malformed: str | None = None


class Envelope(Struct, frozen=True, gc=False):
    """A request on its way in, params still raw; `id` is UNSET for a notification.

    The typed decode takes integers and strings as ids. The slow path puts the rarer ones (fractions, huge integers) here.
    """

    jsonrpc: Literal["2.0"]
    method: str
    params: Raw | UnsetType = UNSET
    id: int | Annotated[str, msgspec.Meta(max_length=MAX_ID)] | UnsetType | None = UNSET


class LaxEnvelope(Struct, frozen=True, gc=False):
    """An envelope of a client that leaves out `jsonrpc`, or sends something else there (J10)."""

    method: str
    params: Raw | UnsetType = UNSET
    id: int | Annotated[str, msgspec.Meta(max_length=MAX_ID)] | UnsetType | None = UNSET


@final
class Invalid(Struct, frozen=True):
    """What arrived instead of a request: the error that answers it, and the id that could be read."""

    error: RpcError
    id: Id = None


@final
class Success(Struct, frozen=True, gc=False, tag_field="jsonrpc", tag="2.0"):
    """An answer on its way out; a `Raw` result is written as it stands."""

    result: Any
    id: Id


@final
class Failure(Struct, frozen=True, gc=False, tag_field="jsonrpc", tag="2.0"):
    """An error on its way out."""

    error: ErrorObject
    id: Id


Message: TypeAlias = Envelope | LaxEnvelope
Outcome: TypeAlias = Success | Failure


# --- builders -------------------------------------------------------------------------------------------------------


def make_request(method: str, params: Params, id: Id) -> bytes:
    """A request; params of None are left out."""
    return _make({"method": method}, params, {"id": id})


def make_notification(method: str, params: Params = None) -> bytes:
    """A notification: a request that is not answered."""
    return _make({"method": method}, params, {})


def make_response(id: Id, result: Any) -> bytes:
    """A successful response."""
    return encode(Success(result, id))


def make_error(id: Id, code: int, message: str, data: Any = None) -> bytes:
    """An error response; data of None is left out."""
    return encode(failure(id, RpcError(code, message, data)))


def make_batch(messages: Iterable[bytes]) -> bytes:
    """One array of ready messages. There is no empty batch in JSON-RPC 2.0: one that would be empty is not sent."""
    joined = b",".join(messages)
    if not joined:
        raise UsageError("An empty batch is not a message.", "JSON-RPC 2.0 answers [] with an error", "send nothing")
    return b"[%b]" % joined


def make_reply(envelopes: Iterable[bytes | None], is_batch: bool) -> bytes | None:
    """The reply to a message in manual mode (J9): None stands for a notification, and for a reply that nobody is owed."""
    owed = [envelope for envelope in envelopes if envelope]
    if not owed:
        return None
    return make_batch(owed) if is_batch else owed[0]


def _make(head: dict[str, Any], params: Params, tail: dict[str, Any]) -> bytes:
    middle = {} if params is None else {"params": params}
    return encode({"jsonrpc": "2.0", **head, **middle, **tail})


# --- parsers --------------------------------------------------------------------------------------------------------


def parse_request(data: Data, *, strict: bool = True) -> Request:
    """One request or notification; an array is refused."""
    message = read(data, strict=strict)
    if isinstance(message, list):
        message = Invalid(InvalidRequest("expected one request object, got an array"))
    return _request(message)


def parse_batch(data: Data, *, strict: bool = True, max_batch: int = MAX_BATCH) -> Batch:
    """A message of one request or of many; each entry stands for itself."""
    message = read(data, strict=strict, max_batch=max_batch)
    if isinstance(message, list):
        return Batch(True, [_request(entry) for entry in message])
    request = _request(message)
    if isinstance(message, Invalid) and message.id is None:
        return Batch(False, [], request.error_envelope)
    return Batch(False, [request])


def parse_response(data: Data) -> Response:
    """One response; anything else comes back as `malformed` with the reason."""
    parsed = parse_response_batch(data)
    if parsed.malformed or not parsed.is_batch:
        return parsed.responses[0] if parsed.responses else Response(malformed=parsed.malformed)
    return Response(malformed="expected one response object, got an array")


def parse_response_batch(data: Data) -> ResponseBatch:
    """A reply of one response or of many."""
    try:
        raw = _as_bytes(data)
        raw.decode()
        is_batch = _opens_array(raw)
        items = _decode_items(raw) if is_batch else [_decode_raw(raw)]
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return ResponseBatch(False, [], f"not JSON: {error}")
    if not items:
        return ResponseBatch(True, [], "an empty array is not a reply")
    return ResponseBatch(is_batch, [_response(item) for item in items])


def _request(message: Message | Invalid) -> Request:
    if isinstance(message, Invalid):
        return Request(id=message.id, error_envelope=encode(failure(message.id, message.error)))
    is_notification = message.id is UNSET
    id: Id = None if message.id is UNSET else message.id
    try:
        check_params_shape(message.params)
        params = None if message.params is UNSET else decode_any(message.params)
    except RpcError as error:
        silent = is_notification and not isinstance(error, InvalidRequest)
        return Request(message.method, None, id, silent, encode(failure(id, error)))
    return Request(message.method, params, id, is_notification)


class _WireResponse(Struct):
    jsonrpc: Literal["2.0"]
    id: Raw
    result: Raw | UnsetType = UNSET
    error: ErrorObject | UnsetType = UNSET


_decode_response = msgspec.json.Decoder(_WireResponse).decode


def _response(raw: Raw) -> Response:
    try:
        wire = _decode_response(raw)
        id = _read_id(wire.id)
        if wire.error is UNSET and wire.result is not UNSET:
            return Response(id, _decode_value(wire.result))
        if wire.error is not UNSET and wire.result is UNSET:
            return Response(id, error=wire.error)
        return Response(id, malformed="a response has either a result or an error")
    except (msgspec.DecodeError, RecursionError, RpcError) as error:
        return Response(malformed=str(error))


# --- a server in one function ---------------------------------------------------------------------------------------


def dispatch_line(data: Data, handler: Callable[[str, Params], Any], *, strict: bool = True) -> bytes | None:
    """Answer a message with a plain callable `(method, params) -> result` that may raise `RpcError`."""
    batch = parse_batch(data, strict=strict)
    if batch.framing_error is not None:
        return batch.framing_error
    return make_reply([_answer(request, handler) for request in batch.requests], batch.is_batch)


async def dispatch_line_async(
    data: Data, handler: Callable[[str, Params], Awaitable[Any]], *, strict: bool = True
) -> bytes | None:
    """The same for a coroutine function; the entries of a batch run one after another."""
    batch = parse_batch(data, strict=strict)
    if batch.framing_error is not None:
        return batch.framing_error
    return make_reply([await _answer_async(request, handler) for request in batch.requests], batch.is_batch)


def _answer(request: Request, handler: Callable[[str, Params], Any]) -> bytes | None:
    if request.error_envelope is not None:
        return None if request.is_notification else request.error_envelope
    try:
        reply = make_response(request.id, handler(request.method, request.params))
    except Exception as error:
        reply = _error_reply(request, error)
    return None if request.is_notification else reply


async def _answer_async(request: Request, handler: Callable[[str, Params], Awaitable[Any]]) -> bytes | None:
    if request.error_envelope is not None:
        return None if request.is_notification else request.error_envelope
    try:
        reply = make_response(request.id, await handler(request.method, request.params))
    except Exception as error:
        reply = _error_reply(request, error)
    return None if request.is_notification else reply


def _error_reply(request: Request, error: Exception) -> bytes:
    if isinstance(error, RpcError):
        try:
            return encode(failure(request.id, error))
        except EncodeError as unencodable:
            error = unencodable
    import logging  # late: `import wirecall` stays light

    logging.getLogger("wirecall").error("%s failed", request.method, exc_info=error)
    return encode(failure(request.id, InternalError()))


# --- reading --------------------------------------------------------------------------------------------------------

# "An envelope or a list of envelopes" in one decode is about three times faster than splitting the array first.
_decode_strict = msgspec.json.Decoder(Envelope | list[Envelope]).decode
_decode_lax = msgspec.json.Decoder(LaxEnvelope | list[LaxEnvelope]).decode
_decode_one = msgspec.json.Decoder(Envelope).decode
_decode_one_lax = msgspec.json.Decoder(LaxEnvelope).decode
_decode_items = msgspec.json.Decoder(list[Raw]).decode
_decode_members = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_raw = msgspec.json.Decoder(Raw).decode
_decode_value = msgspec.json.Decoder().decode
_decode_text = msgspec.json.Decoder(str).decode


def read(
    data: Data,
    strict: bool = True,
    max_bytes: int = MAX_BYTES,
    max_depth: int = MAX_DEPTH,
    max_batch: int = MAX_BATCH,
) -> Message | Invalid | list[Message | Invalid]:
    """Bytes to one message, to many, or to the `Invalid` that answers all of it. Lists are batches."""
    try:
        if type(data) is not bytes:
            data = _as_bytes(data)
        if len(data) > max_bytes:
            return Invalid(_too_large(len(data), max_bytes))
        read: Message | list[Any] = _decode_strict(data) if strict else _decode_lax(data)
        if not data.isascii():
            data.decode()  # raw slices and skipped members are not checked by the decoder
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return _salvage(data, strict, max_depth, max_batch)
    entries = read if type(read) is list else None
    # Depth n takes 2n brackets, so a short message needs no look. Each entry of a batch opens an object of its own, so
    # all of them but one, and the array around them, do not add to the depth.
    if len(data) > 2 * max_depth:
        openers = data.count(b"{") + data.count(b"[")
        if openers - (len(entries) if entries else 0) > max_depth and _is_deeper(data, max_depth):
            return Invalid(_too_deep(max_depth))
    if entries is not None and not 0 < len(entries) <= max_batch:
        return Invalid(_batch_error(len(entries), max_batch))
    return read


def _salvage(data: Data, strict: bool, max_depth: int, max_batch: int) -> Invalid | Message | list[Message | Invalid]:
    """The slow path: the message is broken, or some part of it is unusual. Syntax first, then each entry for itself."""
    try:
        data = _as_bytes(data)
        data.decode()
        if _is_deeper(data, max_depth):
            return Invalid(_too_deep(max_depth))
        if not _opens_array(data):
            return _salvage_entry(_decode_raw(data), strict)
        items = _decode_items(data)
    except UnicodeError:
        return Invalid(ParseError("the message is not UTF-8"))
    except RecursionError:
        return Invalid(_too_deep(max_depth))
    except msgspec.DecodeError as error:
        return Invalid(ParseError(str(error)))
    if not 0 < len(items) <= max_batch:
        return Invalid(_batch_error(len(items), max_batch))
    return [_salvage_entry(item, strict) for item in items]


def _salvage_entry(raw: Raw, strict: bool) -> Message | Invalid:
    try:
        return _decode_one(raw) if strict else _decode_one_lax(raw)
    except msgspec.ValidationError:
        pass
    try:
        members = _decode_members(raw)
    except msgspec.ValidationError:
        return Invalid(InvalidRequest(f"expected an object, got {_kind_of(raw)}"))
    try:
        id = _read_id(members["id"]) if "id" in members else UNSET
    except InvalidRequest as error:
        return Invalid(error)
    fault = _fault(members, strict)
    if fault:
        return Invalid(InvalidRequest(fault), None if id is UNSET else id)
    return Envelope("2.0", _decode_text(members["method"]), members.get("params", UNSET), id)


def _fault(members: dict[str, Raw], strict: bool) -> str:
    version = members.get("jsonrpc")
    if strict and (version is None or _kind_of(version) != "string" or _decode_text(version) != "2.0"):
        return 'the member "jsonrpc" must be "2.0"'
    if "method" not in members:
        return 'the member "method" is missing'
    if _kind_of(members["method"]) != "string":
        return f"method: expected a string, got {_kind_of(members['method'])}"
    return ""


def _read_id(raw: Raw) -> Any:
    """The id as a Python value that is written back with the same digits, or as its bytes (J14)."""
    kind = _kind_of(raw)
    if kind not in ("string", "number", "null"):
        raise InvalidRequest(f"id: expected a string, a number or null, got {kind}")
    text = bytes(raw)
    if len(text) > MAX_ID:
        raise InvalidRequest(f"id: longer than {MAX_ID} bytes")
    try:
        id = _decode_value(text)
    except msgspec.ValidationError:  # 1e400: a number, though no float
        return Raw(text)
    return id if kind != "number" or _encoder.encode(id) == text else Raw(text)


def check_params_shape(params: Raw | UnsetType) -> None:
    """JSON-RPC 2.0, section 4.2: params, if present, must be an array or an object."""
    if params is not UNSET and bytes(params)[:1] not in (b"[", b"{"):
        raise InvalidRequest(f"params: expected an array or an object, got {_kind_of(params)}")


def decode_any(raw: Raw) -> Any:
    """Raw params as plain Python values; a number that no float can hold is a fault of the params."""
    try:
        return _decode_value(raw)
    except msgspec.ValidationError as error:
        raise InvalidParams(f"params: {str(error).lower()}") from None
    except RecursionError:
        raise InvalidParams("params: nested too deeply") from None


_KINDS = {b'"': "string", b"{": "object", b"[": "array", b"t": "true", b"f": "false", b"n": "null"}


def _kind_of(raw: Raw) -> str:
    return _KINDS.get(bytes(raw)[:1], "number")


def _as_bytes(data: Data) -> bytes:
    return data.encode("utf-8", "surrogatepass") if isinstance(data, str) else bytes(data)


def _opens_array(data: bytes) -> bool:
    return data.lstrip(b" \t\r\n")[:1] == b"["


# --- depth ----------------------------------------------------------------------------------------------------------

_ONE_BRACKET = bytes.maketrans(b"{}", b"[]")
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"\\'))


def _is_deeper(data: bytes, limit: int) -> bool:
    """Whether an entry nests deeper than `limit`, in time linear in the data and without a Python loop over its bytes.

    Strings go first. In a skeleton of only brackets and quotes, a string without brackets is two quotes side by side,
    and they cancel; a quote that is left over tells of a string with brackets in it, and a backslash of an escaped
    quote: then a pattern removes the strings one by one. From pure brackets, each round takes the innermost level.
    """
    skeleton = data.translate(_ONE_BRACKET, _NOT_STRUCTURE).replace(b'""', b"")
    if b'"' in skeleton or b"\\" in skeleton:
        skeleton = _without_strings(data).translate(_ONE_BRACKET, _NOT_STRUCTURE)
    levels = limit + 1 if _opens_array(data) else limit  # the array of a batch is nobody's depth
    too_many = b"[" * (levels + 1)
    for _ in range(levels):
        if too_many in skeleton:
            return True
        rest = skeleton.replace(b"[]", b"")
        if len(rest) == len(skeleton):
            return False  # empty, or brackets that do not match: not deep, and for the decoder to refuse
        skeleton = rest
    return b"[]" in skeleton


def _without_strings(data: bytes) -> bytes:
    import re  # late: few messages come here

    # A string that never ends is taken to the end of the data: starting again at each of its quotes would be quadratic.
    return re.sub(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', b"", data, flags=re.DOTALL)


def _too_deep(limit: int) -> RpcError:
    return LimitExceeded(f"nested deeper than {limit} levels", limit="depth", maximum=limit)


def _too_large(count: int, limit: int) -> RpcError:
    return LimitExceeded(f"{count} bytes, {limit} are allowed", limit="bytes_in", maximum=limit, count=count)


def _batch_error(count: int, limit: int) -> RpcError:
    if count == 0:
        return InvalidRequest("an empty array is not a batch")
    return LimitExceeded(f"a batch of {count} entries, {limit} are allowed", limit="batch", maximum=limit, count=count)


# --- writing --------------------------------------------------------------------------------------------------------


def encode_hook(value: Any) -> Any:
    """What msgspec cannot encode by itself: pydantic models, without importing pydantic."""
    dump = getattr(value, "model_dump", None)
    if dump is None:
        raise TypeError(f"{type(value).__name__} cannot be written as JSON")
    return dump(mode="json")


def _plain_hook(value: Any) -> Any:
    return None if isinstance(value, Raw) else encode_hook(value)


_encoder = msgspec.json.Encoder(enc_hook=encode_hook)


def encode(value: Any) -> bytes:
    """A value as JSON on one line, or `EncodeError`; NaN and the infinities, for which msgspec writes null, included."""
    data = _encode(value)
    if b"null" in data:
        _check_finite(value)
    return data


def write(outcome: Outcome) -> bytes:
    """An answer as bytes."""
    try:
        data = _encoder.encode(outcome)
    except Exception as error:  # as in _encode; a call less on the way of every answer
        raise EncodeError(str(error)) from error
    if b"null" in data:
        _check_finite(_payload(outcome))
    return data


def write_batch(outcomes: list[Outcome]) -> bytes:
    """Answers as one array, in one encode."""
    data = _encode(outcomes)
    if b"null" in data:
        for outcome in outcomes:
            _check_finite(_payload(outcome))
    return data


def _payload(outcome: Outcome) -> Any:
    return outcome.result if isinstance(outcome, Success) else outcome.error.data


def _encode(value: Any) -> bytes:
    try:
        return _encoder.encode(value)
    except Exception as error:  # a hook, a property or a recursion of the value may raise anything
        raise EncodeError(f"{type(value).__name__}: {error}") from error


def _check_finite(value: Any) -> None:
    if value is not None and value is not UNSET and _has_non_finite(msgspec.to_builtins(value, enc_hook=_plain_hook)):
        raise EncodeError("NaN and infinity are not JSON")


def failure(id: Id, error: RpcError) -> Failure:
    """The wire form of an error."""
    return Failure(ErrorObject(error.code, error.message, UNSET if error.data is None else error.data), id)


def _has_non_finite(value: Any) -> bool:
    if type(value) is float:
        return value - value != 0.0  # NaN and the infinities alone
    if type(value) is dict:
        return any(map(_has_non_finite, value.values()))
    return type(value) in (list, tuple) and any(map(_has_non_finite, value))

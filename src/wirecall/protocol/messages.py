"""Bytes to messages and back, for servers and clients.

A server's `read` splits a message into envelopes with raw params, a client's `read_messages` into
answers with raw results. `write` encodes answers, and `encode` is the only function that turns a
value into JSON.
The rules of the file:

1. Reading never raises on bad input. An unreadable message becomes an `Invalid`, with its id if
   that could be read.
2. One typed decode for the good case. Only when it fails, the slow path reads the message entry by
   entry. Both paths give the same verdict on every input; tests/protocol/test_json_verdicts.py
   freezes it.
3. The last of duplicate members counts, as in every common decoder; member names are compared byte
   by byte.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, final

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.structs import force_setattr

from wirecall import errors
from wirecall.errors import (
    EncodeError,
    FixedError,
    InvalidParams,
    InvalidRequest,
    LimitExceeded,
    ParseError,
    ReferencesOff,
    RpcError,
    UsageError,
    rebuilt,
)
from wirecall.limits import Limits

Id: TypeAlias = int | str | float | Raw | None
Data: TypeAlias = bytes | bytearray | memoryview | str
# A JSON value, as it is decoded.
Json: TypeAlias = Any
JsonObject: TypeAlias = dict[str, Json]

# Python reads and writes integers of up to 4,300 digits; an id, which is echoed and logged, may be
# as long as that.
MAX_ID = 4300


class ErrorObject(Struct, frozen=True, gc=False):
    """The `error` member of a response.

    `code`, `message` and `data` are its members.

    >>> ErrorObject(4020, "not enough money").message
    'not enough money'
    """

    code: int
    message: str
    data: Json = UNSET


class Envelope(Struct, frozen=True, gc=False):
    """A received request with raw params; `id` is UNSET for a notification.

    The typed decode takes integers and strings as ids. The slow path adds fractions and huge
    integers.
    """

    jsonrpc: Literal["2.0"]
    method: str
    params: Raw | UnsetType = UNSET
    id: int | Annotated[str, msgspec.Meta(max_length=MAX_ID)] | UnsetType | None = UNSET
    # No value has this type, so a message with references takes the slow path, and others pay
    # nothing.
    refs: UnsetType = UNSET
    after: UnsetType = UNSET


class LaxEnvelope(Struct, frozen=True, gc=False):
    """An envelope of a client that omits `jsonrpc`, or sends another value (J10).

    Null params mean none.
    """

    method: str
    params: Raw | UnsetType = UNSET
    id: int | Annotated[str, msgspec.Meta(max_length=MAX_ID)] | UnsetType | None = UNSET
    refs: UnsetType = UNSET
    after: UnsetType = UNSET

    def __post_init__(self) -> None:
        if _is_null(self.params):
            force_setattr(self, "params", UNSET)


class Linked(Struct, frozen=True):
    """A batch entry that has `refs` or `after`: the request without them, and both as sent."""

    request: Envelope
    refs: Raw | UnsetType = UNSET
    after: Raw | UnsetType = UNSET


@final
class Invalid(Struct, frozen=True):
    """A message that is not a request: the error that answers it, and its id if that could be read.

    `entries` are those of a batch that has too many, decoded or not.
    """

    error: RpcError
    id: Id = None
    entries: "Sequence[Message | Invalid | Raw]" = ()
    # The entry, if it is invalid only where references are off.
    linked: Linked | None = None
    # Its method, if it is a request whose references are refused.
    method: str | None = None


@final
class Success(Struct, frozen=True, gc=False, tag_field="jsonrpc", tag="2.0"):
    """An answer to send; a `Raw` result is written unchanged."""

    result: object
    id: Id


@final
class Failure(Struct, frozen=True, gc=False, tag_field="jsonrpc", tag="2.0"):
    """An error to send."""

    error: ErrorObject
    id: Id


class Arrived(Struct, frozen=True):
    """A message from a server: an answer, or a request or notification (MCP alone has those)."""

    jsonrpc: Literal["2.0"]
    id: int | str | float | UnsetType | None = UNSET
    result: Raw | UnsetType = UNSET
    error: ErrorObject | UnsetType = UNSET
    method: str | UnsetType = UNSET
    params: Raw | UnsetType = UNSET
    # In a stream of answers: the answer came from the server's ledger.
    replayed: Json = UNSET

    @property
    def is_answer(self) -> bool:
        return self.method is UNSET


class Unreadable(Struct, frozen=True):
    """The reason why received data is not a message."""

    reason: str
    id: Json = UNSET


Message: TypeAlias = Envelope | LaxEnvelope
Answer: TypeAlias = Success | Failure
Received: TypeAlias = Arrived | Unreadable

# A decoder raises these for data that it cannot read: not JSON, not the type, not UTF-8, too deep.
UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)


# --- reading --------------------------------------------------------------------------------------

# "An envelope or a list of envelopes" in one decode is about three times faster than splitting the
# array first.
_decode_strict = msgspec.json.Decoder(Envelope | list[Envelope]).decode
_decode_lax = msgspec.json.Decoder(LaxEnvelope | list[LaxEnvelope]).decode
_decode_one = msgspec.json.Decoder(Envelope).decode
_decode_one_lax = msgspec.json.Decoder(LaxEnvelope).decode
_decode_received = msgspec.json.Decoder(Arrived | list[Arrived]).decode
_decode_arrived = msgspec.json.Decoder(Arrived).decode
decode_items = msgspec.json.Decoder(list[Raw]).decode
_decode_members = msgspec.json.Decoder(dict[str, Raw]).decode
decode_raw = msgspec.json.Decoder(Raw).decode
decode_value = msgspec.json.Decoder().decode
_decode_text = msgspec.json.Decoder(str).decode


def read(
    data: Data, limits: Limits, strict: bool = True
) -> Message | Invalid | list[Message | Invalid]:
    """Return the message in the data, or the list of them in a batch.

    An `Invalid` answers data that cannot be read as a whole.
    """
    if type(data) is not bytes:
        data = as_bytes(data)
    size = len(data)
    max_depth = limits.depth
    if size > limits.bytes_in:
        reason = f"{size} bytes, {limits.bytes_in} are allowed"
        return Invalid(LimitExceeded(reason, limit="bytes_in", maximum=limits.bytes_in, count=size))
    try:
        read: Message | list[Message | Invalid] = (
            _decode_strict(data) if strict else _decode_lax(data)
        )
        if not data.isascii():
            data.decode()  # raw slices and skipped members are not checked by the decoder
    except UNREADABLE:
        return _read_slowly(data, limits, strict)
    # A level takes two bytes as an array and five as an object (`{"":}`), so a short message needs
    # no check. Each batch entry opens one object, so all but one of these, and the outer array, do
    # not add to the depth.
    if size > 2 * max_depth and (size > 5 * max_depth or data.find(b"[") >= 0):
        openers = data.count(b"{")
        if type(read) is list:
            openers -= len(read) - 1
        if data.find(b"[", 1) >= 0:  # searching takes an eighth of the time of counting
            openers += data.count(b"[", 1)
        if openers > max_depth and _is_deeper(data, max_depth):
            return Invalid(_too_deep(max_depth))
    if type(read) is list and not 0 < len(read) <= limits.batch:
        return Invalid(_batch_error(len(read), limits.batch), entries=read)
    return read


def _read_slowly(
    data: bytes, limits: Limits, strict: bool
) -> Message | Invalid | list[Message | Invalid]:
    """Read a message that is broken, or unusual in some part.

    Syntax outranks shape (J8): a message that is not JSON gets one -32700, whatever else is wrong
    with it. Then each entry is read separately (JSON-RPC 2.0, section 6).
    """
    max_depth = limits.depth
    try:
        data.decode()
        if _is_deeper(data, max_depth):
            return Invalid(_too_deep(max_depth))
        if not opens_array(data):
            return _alone(_salvage(decode_raw(data), strict))
        items = decode_items(data)
    except UnicodeError:
        return Invalid(ParseError("the message is not UTF-8"))
    except RecursionError:
        return Invalid(_too_deep(max_depth))
    except msgspec.DecodeError as error:
        return Invalid(ParseError(_framing(data) or str(error)))
    if not 0 < len(items) <= limits.batch:
        return Invalid(_batch_error(len(items), limits.batch), entries=items)
    return [_salvage(item, strict) for item in items]


def _framing(data: bytes) -> str | None:
    """Return the reason if the data is a header of the framing that language servers use."""
    # The header comes first, or directly after a body without a newline.
    line = data.strip().lower()
    header = line.rpartition(b"}")[2].lstrip()
    if not (line.startswith(b"content-length:") or header.startswith(b"content-length:")):
        return None
    return (
        "Content-Length framing is not supported: "
        "send each message as one line of JSON that ends with a newline"
    )


def _salvage(raw: Raw, strict: bool) -> Message | Invalid:
    """Read one entry member by member."""
    try:
        if strict:
            return _decode_one(raw)
        return _decode_one_lax(raw)
    except msgspec.ValidationError:
        pass
    try:
        members = _decode_members(raw)
    except msgspec.ValidationError:
        return Invalid(InvalidRequest(f"expected an object, got {_kind_of(raw)}"))
    id: Json = UNSET
    try:
        # The id comes first: an error about another member is answered under it (JSON-RPC 2.0,
        # section 5).
        if "id" in members:
            id = read_id(members["id"])
        if strict and not _is_version_2(members.get("jsonrpc")):
            raise InvalidRequest('the member "jsonrpc" must be "2.0"')
        if "method" not in members:
            raise InvalidRequest('the member "method" is missing')
        if _kind_of(members["method"]) != "string":
            raise InvalidRequest(f"method: expected a string, got {_kind_of(members['method'])}")
    except InvalidRequest as error:
        if id is UNSET:
            return Invalid(error)
        return Invalid(error, id)
    params = members.get("params", UNSET)
    if not strict and _is_null(params):
        params = UNSET
    request = Envelope("2.0", _decode_text(members["method"]), params, id)
    if "refs" not in members and "after" not in members:
        return request
    if id is UNSET:
        return Invalid(ReferencesOff("a notification cannot have refs or after: send an id"))
    return Invalid(
        ReferencesOff("this server does not allow refs and after: send the calls one by one"),
        id,
        linked=Linked(request, members.get("refs", UNSET), members.get("after", UNSET)),
        method=request.method,
    )


def _alone(message: Message | Invalid) -> Message | Invalid:
    """Return a message that is not in an array, where references have no target (R1)."""
    if type(message) is Invalid and message.linked is not None:
        return Invalid(
            ReferencesOff("refs and after refer to other entries of an array: send an array"),
            message.id,
            method=message.method,
        )
    return message


def _is_version_2(version: Raw | None) -> bool:
    return version is not None and _kind_of(version) == "string" and _decode_text(version) == "2.0"


def ids_of(entries: "Sequence[Message | Invalid | Raw]", strict: bool) -> list[Id]:
    """Return the ids that answer the entries of a refused batch.

    An unreadable id is null, and a notification has none.
    """
    ids: list[Id] = []
    for entry in entries:
        if type(entry) is Raw:
            entry = _salvage(entry, strict)
        if entry.id is not UNSET:
            ids.append(entry.id)
    return ids


def read_messages(data: bytes) -> tuple[bool, list[Received]]:
    """Return whether data that a client received is an array, and the messages in it.

    Results stay raw.
    """
    try:
        read = _decode_received(data)
        if not data.isascii():
            data.decode()  # raw slices are not checked by the decoder
        if type(read) is list:
            return True, [_checked(message) for message in read]
        return False, [_checked(read)]
    except UNREADABLE:
        pass  # the whole message is broken, or single entries are
    try:
        data.decode()
        if opens_array(data):
            return True, [_read_received(item) for item in decode_items(data)]
        return False, [_read_received(decode_raw(data))]
    except UNREADABLE as error:
        why = str(error).removeprefix("JSON is malformed: ") or type(error).__name__
        return False, [Unreadable(f"text that is not JSON: {why}")]


def _read_received(item: Raw) -> Received:
    """Read one message that a client received."""
    try:
        return _checked(_decode_arrived(item))
    except msgspec.ValidationError as error:
        id: Json = UNSET
        value = decode_value(item)
        if isinstance(value, dict):
            id = value.get("id", UNSET)
        return Unreadable(f"a message that is not JSON-RPC: {error}", id)


def _checked(message: Arrived) -> Received:
    """Return a message if it is valid."""
    # An answer has an id, and either a result or an error (JSON-RPC 2.0, section 5). The id may be
    # missing beside an error: MCP's servers send one that way for a request that they could not
    # read.
    if message.method is UNSET and (message.id is UNSET and message.error is UNSET):
        return Unreadable("an answer without an id")
    if message.method is UNSET and (message.result is UNSET) == (message.error is UNSET):
        return Unreadable("an answer that does not have either a result or an error", message.id)
    return message


def read_id(raw: Raw) -> Json:
    """Return the id as a Python value, or as its bytes."""
    kind = _kind_of(raw)
    if kind not in ("string", "number", "null"):
        raise InvalidRequest(f"id: expected a string, a number or null, got {kind}")
    text = bytes(raw)
    if kind == "number" and len(text) > MAX_ID:
        raise InvalidRequest(f"id: longer than {MAX_ID} characters")
    try:
        id = decode_value(text)
    except msgspec.ValidationError:  # 1e400: a number that no float can hold
        return Raw(text)
    if isinstance(id, str) and len(id) > MAX_ID:
        raise InvalidRequest(f"id: longer than {MAX_ID} characters")
    # An answer repeats the digits of the request's id (J14): if a Python int or float would be
    # written differently, the bytes are kept. (-0 is 0.)
    if kind == "number" and _encoder.encode(id) != text:
        return Raw(text)
    return id


def check_params_shape(params: Raw | UnsetType) -> None:
    """Raise `InvalidRequest` for params that are not an array or an object.

    JSON-RPC 2.0, section 4.2.
    """
    if params is not UNSET and not bytes(params).startswith((b"[", b"{")):
        raise InvalidRequest(f"params: expected an array or an object, got {_kind_of(params)}")


def _is_null(params: Raw | UnsetType) -> bool:
    return params is not UNSET and bytes(params) == b"null"


def decode_any(raw: Raw) -> Json:
    """Return raw params as plain Python values.

    Raises `InvalidParams` for a number that no float can hold.
    """
    try:
        return decode_value(raw)
    except msgspec.ValidationError as error:
        raise InvalidParams(f"params: {str(error).lower()}") from None
    except RecursionError:
        raise InvalidParams("params: nested too deeply") from None


_KINDS = {b'"': "string", b"{": "object", b"[": "array", b"t": "true", b"f": "false", b"n": "null"}


def _kind_of(raw: Raw) -> str:
    return _KINDS.get(bytes(raw)[:1], "number")


def as_bytes(data: Data) -> bytes:
    if isinstance(data, str):
        return data.encode("utf-8", "surrogatepass")
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise UsageError(
            f"A message must be bytes or a string, got {type(data).__name__}.",
            fix="use json.dumps(message)",
        )
    return bytes(data)


def opens_array(data: bytes) -> bool:
    return data.lstrip(b" \t\r\n")[:1] == b"["


# --- depth ----------------------------------------------------------------------------------------

_ONE_BRACKET = bytes.maketrans(b"{}", b"[]")
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"\\'))


def _is_deeper(data: bytes, limit: int) -> bool:
    """Return whether an entry nests deeper than `limit`.

    It takes time linear in the data, without a loop over its bytes.
    """
    if len(data) <= 2 * limit:
        return False
    import re  # late: few messages come here

    # Step 1: keep only brackets and quotes. A string without brackets is two adjacent quotes, which
    # cancel. A remaining quote belongs to a string with brackets in it, a backslash to an escaped
    # quote: then a pattern removes the strings one by one.
    skeleton = data.translate(_ONE_BRACKET, _NOT_STRUCTURE).replace(b'""', b"")
    if b'"' in skeleton or b"\\" in skeleton:
        # An unterminated string extends to the end of the data: restarting at each quote would be
        # quadratic.
        without_strings = re.sub(
            rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', b"", data, flags=re.DOTALL
        )
        skeleton = without_strings.translate(_ONE_BRACKET, _NOT_STRUCTURE)
    levels = limit
    if opens_array(data):  # the array of a batch does not count
        levels += 1
    too_many = b"[" * (levels + 1)
    # Step 2: each round removes the innermost level, as long as that is a good part of the rest.
    rounds = 0
    is_wide = True
    while is_wide and rounds < levels:
        if too_many in skeleton:
            return True
        rest = skeleton.replace(b"[]", b"")
        if len(rest) == len(skeleton):
            return False  # empty, or unmatched brackets: not deep; the decoder refuses those
        is_wide = len(rest) < len(skeleton) * 7 / 8
        skeleton = rest
        rounds += 1
    # Step 3: every remaining pair has lost as many levels as there were rounds, and few remain. Sum
    # up the depth over them.
    depth = 0
    for up, down in re.findall(rb"(\[+)(\]*)", skeleton):
        depth += len(up)
        deepest = depth
        if down:
            deepest += rounds
        if deepest > levels:
            return True
        depth = max(0, depth - len(down))
    return False


def _too_deep(limit: int) -> RpcError:
    return LimitExceeded(f"nested deeper than {limit} levels", limit="depth", maximum=limit)


def _batch_error(count: int, limit: int) -> RpcError:
    if count == 0:
        return InvalidRequest("an empty array is not a batch")
    return LimitExceeded(
        f"a batch of {count} entries, {limit} are allowed",
        limit="batch",
        maximum=limit,
        count=count,
    )


# --- writing --------------------------------------------------------------------------------------


class CompleteResult:
    """A base of results that a function may return regardless of its declared type.

    MCP's content is one.
    """

    __slots__ = ()


class Unsendable:
    """Stands for a result that cannot be sent: encoding it raises its error.

    So the steps after a function treat a wrong result like one that JSON cannot carry, which for a
    command means that it has run.
    """

    def __init__(self, error: EncodeError) -> None:
        self.error = error


class Sound:
    """JSON that was read and is sound. It is written byte for byte, without another check."""

    __slots__ = ("data",)

    def __init__(self, data: bytes | Raw) -> None:
        self.data = data


def encode_hook(value: object) -> object:
    """Return a pydantic model as plain values, without importing pydantic.

    Raises `TypeError` for anything else.
    """
    if isinstance(value, Unsendable):
        raise value.error
    if isinstance(value, Sound):
        return Raw(value.data)
    dump: Callable[..., object] | None = getattr(value, "model_dump", None)
    if dump is None:
        raise TypeError(f"{type(value).__name__} cannot be written as JSON")
    return dump(mode="json", by_alias=True)  # with the names in the result's schema


_encoder = msgspec.json.Encoder(enc_hook=encode_hook)

# Writes answers in one encode. It expects ready results: constants, and `Raw` that `encode` has
# made.
write = _encoder.encode


# The same for several: one line each.
write_lines = _encoder.encode_lines


def encode(value: object) -> bytes:
    """Return a value as JSON on one line.

    Raises `EncodeError` if that is impossible, as for NaN and the infinities.

    A `Raw` value is decoded, since its bytes may not be JSON. If they are, and on one line, they are
    written as they stand. A `Raw` inside another value is trusted, unless it has a line break: a
    stdio message is one line, and so is an event.
    """
    if type(value) is Raw:
        text = bytes(value)
        try:
            value = decode_value(text)
        except UNREADABLE as error:
            raise EncodeError(f"a Raw that is not JSON: {error}") from error
        if 10 not in text and 13 not in text:
            return text
    if value is UNSET:
        raise EncodeError("UNSET is not a value")
    try:
        data = _encoder.encode(value)
    except EncodeError:
        raise
    except Exception as error:  # a hook, a property or a recursion of the value may raise anything
        raise EncodeError(f"{type(value).__name__}: {error}") from error
    # LF or CR, only from a `Raw`: the encoder does not write them. As numbers they are found 4
    # times faster.
    if 10 in data or 13 in data:
        data = encode(Raw(data))
    if data.find(b"null") >= 0:  # `in` takes twice as long: it first tests for a number
        _check_finite(value)
    return data


def _check_finite(value: object) -> None:
    """Raise `EncodeError` for a NaN or an infinity in a value: msgspec writes null for them."""
    if value is None or value is UNSET or type(value) is Raw:
        return
    try:
        left = [msgspec.to_builtins(value, enc_hook=_encode_without_raw)]
    except Exception as error:  # as in `encode`
        raise EncodeError(str(error)) from error
    while left:
        part = left.pop()
        if type(part) is float:
            if part - part != 0.0:  # for NaN and the infinities alone
                raise EncodeError("NaN and infinity are not JSON")
        elif type(part) is dict:
            left.extend(part.values())
        elif type(part) in (list, tuple):
            left.extend(part)


def _encode_without_raw(part: object) -> object:
    """Return None for a `Raw`, which is checked when it is made; else do as `encode_hook`."""
    if isinstance(part, (Raw, Sound)):
        return None
    return encode_hook(part)


class _Notification(Struct, frozen=True, gc=False, tag_field="jsonrpc", tag="2.0"):
    """A notification as it is sent."""

    method: str
    params: Any = UNSET


def notification(method: object, params: object = None) -> bytes:
    """Return a notification; UsageError if it would not be one (JSON-RPC 2.0, section 4)."""
    if not isinstance(method, str) or not method or method.startswith("rpc."):
        raise UsageError(
            f"{method!r} is not the method of a notification.",
            "it is a string, and names that begin with rpc. are reserved",
            'use a name such as "price.changed"',
        )
    if params is None:
        return encode(_Notification(method))
    if isinstance(params, (str, bytes)) or not isinstance(params, (Mapping, Sequence, Struct)):
        raise UsageError(
            f"{method}: params of type {type(params).__name__}.",
            "JSON-RPC carries an array or an object",
            "use a dict",
        )
    return encode(_Notification(method, params))


def make_batch(messages: Iterable[bytes]) -> bytes:
    """Join ready messages into one array.

    Raises `UsageError` for none, since JSON-RPC 2.0 has no empty batch.

    `messages` are requests, notifications or responses.

    >>> make_batch([make_request("a", None, 1), make_notification("b")])
    b'[{"jsonrpc":"2.0","method":"a","id":1},{"jsonrpc":"2.0","method":"b"}]'
    """
    ready = list(messages)
    if not all(ready) or not ready:
        raise UsageError(
            "An empty batch is not a message.",
            "JSON-RPC 2.0 answers [] with an error",
            "send nothing",
        )
    return b"[%b]" % b",".join(ready)


def make_reply(envelopes: Iterable[bytes | None], is_batch: bool) -> bytes | None:
    """Return the reply to a message in manual mode (J9).

    None stands for a notification, which gets no answer.

    `envelopes` are the answers in input order, and `is_batch` says whether the message was an
    array.

    >>> make_reply([None, make_response(2, "b")], is_batch=True)
    b'[{"jsonrpc":"2.0","result":"b","id":2}]'
    >>> make_reply([None], is_batch=True) is None
    True
    """
    owed = [envelope for envelope in envelopes if envelope]
    if not owed:
        return None
    if is_batch:
        return make_batch(owed)
    return owed[0]


def failure(id: Id, error: RpcError) -> Failure:
    """Return an error as it is sent."""
    data = error.data if error.data is not None else UNSET
    return Failure(ErrorObject(error.code, error.message, data), id)


_FIXED: list[type[FixedError]] = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, FixedError) and kind is not FixedError
]
_BY_TYPE = {(kind.CODE, kind.TYPE): kind for kind in _FIXED if kind.TYPE}
_BY_CODE = {kind.CODE: kind for kind in _FIXED if not kind.TYPE}


def remote_error(error: ErrorObject) -> RpcError:
    """Return a server's error as the exception for its code.

    The `data.type` of wirecall's servers distinguishes errors of one code.
    """
    data = error.data if error.data is not UNSET else None
    found: type[RpcError] | None = None
    if isinstance(data, dict) and isinstance(data.get("type"), str):
        found = _BY_TYPE.get((error.code, data["type"]))
    return rebuilt(found or _BY_CODE.get(error.code) or RpcError, error.code, error.message, data)

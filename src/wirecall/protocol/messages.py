"""Bytes to envelopes and back: the wire as the dispatcher sees it.

`read` takes a message apart into envelopes whose params are still raw, `write` and `write_batch` put answers together, and
`encode` is the one way in which a value becomes JSON.

The rules of the file:

1. Reading never raises on bad input. What cannot be read becomes an `Invalid` with the id it could save.
2. One typed decode for the good case. Only when it fails, the slow path takes the message apart entry by entry. Both
   paths give one verdict on every input; tests/protocol/test_json_verdicts.py freezes it.
3. Syntax outranks shape (J8): a message that is not JSON answers one -32700, whatever else is wrong with it.
4. Of duplicate members the last counts, as in every decoder our users meet; member names are compared byte by byte.
5. A number id whose digits a Python int or float would not give back is carried as its bytes (J14). (-0 is 0.)
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeAlias, final

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import EncodeError, InvalidParams, InvalidRequest, LimitExceeded, ParseError, RpcError, UsageError

Id: TypeAlias = int | str | float | Raw | None
Data: TypeAlias = bytes | bytearray | memoryview | str
JsonObject: TypeAlias = dict[str, Any]  # as it is decoded

# The default limits of a message; `policy.Limits` names them and gives the reasons.
MAX_BYTES = 1 << 20
MAX_DEPTH = 64
MAX_BATCH = 50

# Python reads and writes integers of up to 4,300 digits; an id, which is echoed and logged, may be as long as that.
MAX_ID = 4300


class ErrorObject(Struct, frozen=True, gc=False):
    """The `error` member of a response."""

    code: int
    message: str
    data: Any = UNSET


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
Answer: TypeAlias = Success | Failure


# --- reading --------------------------------------------------------------------------------------------------------

# "An envelope or a list of envelopes" in one decode is about three times faster than splitting the array first.
_decode_strict = msgspec.json.Decoder(Envelope | list[Envelope]).decode
_decode_lax = msgspec.json.Decoder(LaxEnvelope | list[LaxEnvelope]).decode
_decode_one = msgspec.json.Decoder(Envelope).decode
_decode_one_lax = msgspec.json.Decoder(LaxEnvelope).decode
decode_items = msgspec.json.Decoder(list[Raw]).decode
_decode_members = msgspec.json.Decoder(dict[str, Raw]).decode
decode_raw = msgspec.json.Decoder(Raw).decode
decode_value = msgspec.json.Decoder().decode
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
            data = as_bytes(data)
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
        data = as_bytes(data)
        data.decode()
        if _is_deeper(data, max_depth):
            return Invalid(_too_deep(max_depth))
        if not opens_array(data):
            return _salvage_entry(decode_raw(data), strict)
        items = decode_items(data)
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
        id = read_id(members["id"]) if "id" in members else UNSET
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


def read_id(raw: Raw) -> Any:
    """The id as a Python value that is written back with the same digits, or as its bytes (J14)."""
    kind = _kind_of(raw)
    if kind not in ("string", "number", "null"):
        raise InvalidRequest(f"id: expected a string, a number or null, got {kind}")
    text = bytes(raw)
    try:
        id = decode_value(text) if kind != "number" or len(text) <= MAX_ID else None
    except msgspec.ValidationError:  # 1e400: a number, though no float
        return Raw(text)
    if len(id if isinstance(id, str) else text) > MAX_ID:
        raise InvalidRequest(f"id: longer than {MAX_ID} characters")
    return id if kind != "number" or _encoder.encode(id) == text else Raw(text)


def check_params_shape(params: Raw | UnsetType) -> None:
    """JSON-RPC 2.0, section 4.2: params, if present, must be an array or an object."""
    if params is not UNSET and bytes(params)[:1] not in (b"[", b"{"):
        raise InvalidRequest(f"params: expected an array or an object, got {_kind_of(params)}")


def decode_any(raw: Raw) -> Any:
    """Raw params as plain Python values; a number that no float can hold is a fault of the params."""
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
    return data.encode("utf-8", "surrogatepass") if isinstance(data, str) else bytes(data)


def opens_array(data: bytes) -> bool:
    return data.lstrip(b" \t\r\n")[:1] == b"["


# --- depth ----------------------------------------------------------------------------------------------------------

_ONE_BRACKET = bytes.maketrans(b"{}", b"[]")
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"\\'))


def _is_deeper(data: bytes, limit: int) -> bool:
    """Return whether an entry nests deeper than `limit`, in time linear in the data and without a loop over its bytes."""
    if len(data) <= 2 * limit:
        return False
    # Step 1: only brackets and quotes stay. A string without brackets is two quotes side by side, and they cancel. A quote
    # that is left over belongs to a string with brackets in it, a backslash to an escaped quote: then a pattern removes
    # the strings one by one.
    skeleton = data.translate(_ONE_BRACKET, _NOT_STRUCTURE).replace(b'""', b"")
    if b'"' in skeleton or b"\\" in skeleton:
        skeleton = _without_strings(data).translate(_ONE_BRACKET, _NOT_STRUCTURE)
    levels = limit + 1 if opens_array(data) else limit  # the array of a batch does not count
    too_many = b"[" * (levels + 1)
    # Step 2: each round takes the innermost level away, as long as that is a good part of what is left.
    rounds, is_wide = 0, True
    while is_wide and rounds < levels:
        if too_many in skeleton:
            return True
        rest = skeleton.replace(b"[]", b"")
        if len(rest) == len(skeleton):
            return False  # empty, or brackets that do not match: not deep, and for the decoder to refuse
        is_wide = len(rest) < len(skeleton) * 7 / 8
        skeleton, rounds = rest, rounds + 1
    # Step 3: every pair that is left has lost as many levels as there were rounds, and they are few. Over them, the depth is
    # summed up.
    import re  # late: few messages come here

    depth = 0
    for up, down in re.findall(rb"(\[+)(\]*)", skeleton):
        depth += len(up)
        if depth + (rounds if down else 0) > levels:
            return True
        depth = max(0, depth - len(down))
    return False


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
    return dump(mode="json", by_alias=True)  # the names that the schema of the result has


def _plain_hook(value: Any) -> Any:
    return None if isinstance(value, Raw) else encode_hook(value)


_encoder = msgspec.json.Encoder(enc_hook=encode_hook)


def encode(value: Any) -> bytes:
    """A value as JSON on one line, or `EncodeError`; NaN and the infinities, for which msgspec writes null, included.

    A `Raw` value is taken apart and written anew: whoever made it may not have made JSON, or not on one line.
    """
    if type(value) is Raw:
        value = _unwrapped(value)
    if value is UNSET:
        raise EncodeError("UNSET is not a value")
    data = _encode(value)
    if b"null" in data:
        _check_finite(value)
    return data


def write(answer: Answer) -> bytes:
    """An answer as bytes."""
    try:
        data = _encoder.encode(answer)
    except Exception as error:  # as in _encode; a call less on the way of every answer
        raise EncodeError(str(error)) from error
    if b"null" in data:
        _check_finite(_payload(answer))
    return data


def write_batch(answers: list[Answer]) -> bytes:
    """Answers as one array, in one encode."""
    data = _encode(answers)
    if b"null" in data:
        for answer in answers:
            _check_finite(_payload(answer))
    return data


def _payload(answer: Answer) -> Any:
    return answer.result if isinstance(answer, Success) else answer.error.data


def _encode(value: Any) -> bytes:
    try:
        return _encoder.encode(value)
    except Exception as error:  # a hook, a property or a recursion of the value may raise anything
        raise EncodeError(f"{type(value).__name__}: {error}") from error


def _unwrapped(raw: Raw) -> Any:
    try:
        return decode_value(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise EncodeError(f"a Raw that is not JSON: {error}") from error


def _check_finite(value: Any) -> None:
    if value is None or value is UNSET or type(value) is Raw:
        return
    try:
        plain = msgspec.to_builtins(value, enc_hook=_plain_hook)
    except Exception as error:  # as in _encode
        raise EncodeError(str(error)) from error
    if _has_non_finite(plain):
        raise EncodeError("NaN and infinity are not JSON")


def make_batch(messages: Iterable[bytes]) -> bytes:
    """Join ready messages into one array. There is no empty batch in JSON-RPC 2.0: one that would be empty is not sent."""
    ready = list(messages)
    if not all(ready) or not ready:
        raise UsageError("An empty batch is not a message.", "JSON-RPC 2.0 answers [] with an error", "send nothing")
    return b"[%b]" % b",".join(ready)


def make_reply(envelopes: Iterable[bytes | None], is_batch: bool) -> bytes | None:
    """Return the reply to a message in manual mode (J9). None stands for a notification, and for a reply not owed."""
    owed = [envelope for envelope in envelopes if envelope]
    if not owed:
        return None
    return make_batch(owed) if is_batch else owed[0]


def failure(id: Id, error: RpcError) -> Failure:
    """The wire form of an error."""
    return Failure(ErrorObject(error.code, error.message, UNSET if error.data is None else error.data), id)


def _has_non_finite(value: Any) -> bool:
    left = [value]
    while left:
        value = left.pop()
        if type(value) is float:
            if value - value != 0.0:  # NaN and the infinities alone
                return True
        elif type(value) is dict:
            left.extend(value.values())
        elif type(value) in (list, tuple):
            left.extend(value)
    return False

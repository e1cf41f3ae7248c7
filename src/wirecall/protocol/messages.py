"""Bytes to messages and back, for servers and clients.

A server's `read` takes a message apart into envelopes whose params are still raw, a client's `read_messages` into answers
whose results are. `write` puts answers together, and `encode` is the one way in which a value becomes JSON. With a `Sending`
a transport reports that the answers to a message arrived, or were lost.

The rules of the file:

1. Reading never raises on bad input. An unreadable message becomes an `Invalid`, with its id if that could be read.
2. One typed decode for the good case. Only when it fails, the slow path takes the message apart entry by entry. Both
   paths give one verdict on every input; tests/protocol/test_json_verdicts.py freezes it.
3. Of duplicate members the last counts, as in every decoder our users meet; member names are compared byte by byte.
"""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, TypeAlias, final

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall import errors
from wirecall.errors import (
    EncodeError,
    FixedError,
    InvalidParams,
    InvalidRequest,
    LimitExceeded,
    ParseError,
    RpcError,
    UsageError,
    rebuilt,
)

Id: TypeAlias = int | str | float | Raw | None
Data: TypeAlias = bytes | bytearray | memoryview | str
Json: TypeAlias = Any  # a JSON value, as it is decoded
JsonObject: TypeAlias = dict[str, Json]

# Python reads and writes integers of up to 4,300 digits; an id, which is echoed and logged, may be as long as that.
MAX_ID = 4300


class Limits(Struct, frozen=True, kw_only=True):
    """Every limit of an app. A message beyond one of them is refused before anything runs (J11)."""

    # Entries in one batch. Fifty calls of a few milliseconds stay within the patience of a proxy.
    batch: int = 50
    # Bytes of one message. A message is held and decoded as a whole; a megabyte of params is a file, not a call.
    bytes_in: int = 1 << 20
    # Bytes of one reply. Ten times the message: fifty results of 200 KB, and no more memory per call than that.
    bytes_out: int = 10 << 20
    # Nesting of arrays and objects. Decoders recurse; 64 is deeper than documents people write and a tenth of the stack.
    depth: int = 64
    # Calls of one app in flight at once. Beyond, a caller loses less time when it is refused and retries.
    in_flight: int = 1024
    # The same for one authenticated caller. It counts only if it is less than `in_flight`: by default one caller may take
    # all places, because most servers have one.
    in_flight_per_caller: int = 1024
    # MCP calls of one session that wait for an answer of their client; beyond, `42910`. They are not in flight: a person may
    # take an hour. Twice the entries of one array that run side by side, and more questions than a person keeps in view.
    waiting_per_session: int = 32
    # The same for all sessions of one caller; the anonymous ones count as one caller. Each holds a task and its request.
    waiting_per_caller: int = 256
    # Seconds that a client may take to answer. It asks a person, and a person may be at lunch; no call waits for ever.
    answer_time: float = 3600.0
    # Seconds that a call waits for the answer of a client without any connection. A client that was cut off comes back at
    # once to read the rest (`Last-Event-ID`); one that stays away has left.
    away_time: float = 60.0
    # Tasks that run in one process at once. The others wait in the ledger for a place: they take hours, and hold none of
    # `in_flight`.
    tasks: int = 100
    # Tasks of one caller that have not ended, and that one process has begun or adopted; beyond, `42910`. Each is a row of
    # the ledger that holds its arguments. Ten times what runs at once, and more than a person starts.
    tasks_per_caller: int = 1000
    # Entries of one batch in flight side by side. One batch must not take all places of `in_flight`.
    concurrency: int = 16
    # Bytes of the header of an HTTP request. Twice the limit of common proxies; a header is kept until it is judged.
    header_bytes: int = 32 << 10
    # Seconds in which an HTTP request must have arrived, header and body each. A megabyte over a bad telephone line.
    body_time: float = 30.0
    # Seconds in which a client must read the bytes that are written to it. Then it is cut: unread bytes take our memory.
    write_time: float = 30.0
    # Streams (SSE) of one process open at once. Each holds a connection and a task, and a process has few thousand files.
    streams: int = 1000
    # Streams of one caller, or of one session of an anonymous caller. One caller must not take the places of all others;
    # an agent that makes a hundred calls side by side still sees the progress of each.
    streams_per_caller: int = 100
    # Bytes that the URIs of all MCP subscriptions of one caller take; beyond, `42910`. The anonymous callers count as one.
    # A caller may open any number of sessions, and each is full at 128 KB. This is 60 full ones, or 60,000 common URIs.
    subscribed_bytes: int = 8 << 20
    # Seconds that the lifespan of the app may take until it is entered: a database that does not answer must not look like
    # an app that starts slowly.
    start_time: float = 30.0
    # Bytes of one stream that its client has not read yet; then the call waits for the client. It times `streams` is all
    # that slow clients can hold: 256 MB.
    unread_bytes: int = 256 << 10

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value: object = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise UsageError(f"Limits({field}={value!r}): expected a number, got {type(value).__name__}.")
            if not value >= 1:
                raise UsageError(f"Limits({field}={value!r}) admits nothing.", fix="use a number above 0")


LIMITS = Limits()  # the default ones


class ErrorObject(Struct, frozen=True, gc=False):
    """The `error` member of a response."""

    code: int
    message: str
    data: Json = UNSET


class Envelope(Struct, frozen=True, gc=False):
    """A request on its way in, params still raw; `id` is UNSET for a notification.

    The typed decode takes integers and strings as ids. The slow path puts the rarer ones (fractions, huge integers) here.
    """

    jsonrpc: Literal["2.0"]
    method: str
    params: Raw | UnsetType = UNSET
    id: int | Annotated[str, msgspec.Meta(max_length=MAX_ID)] | UnsetType | None = UNSET


class LaxEnvelope(Struct, frozen=True, gc=False):
    """An envelope of a client that leaves out `jsonrpc`, or sends another value there (J10)."""

    method: str
    params: Raw | UnsetType = UNSET
    id: int | Annotated[str, msgspec.Meta(max_length=MAX_ID)] | UnsetType | None = UNSET


@final
class Invalid(Struct, frozen=True):
    """A message that is not a request: the error that answers it, and its id if that could be read."""

    error: RpcError
    id: Id = None


@final
class Success(Struct, frozen=True, gc=False, tag_field="jsonrpc", tag="2.0"):
    """An answer on its way out; a `Raw` result is written as it stands."""

    result: object
    id: Id


@final
class Failure(Struct, frozen=True, gc=False, tag_field="jsonrpc", tag="2.0"):
    """An error on its way out."""

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

    @property
    def is_answer(self) -> bool:
        return self.method is UNSET


class Unreadable(Struct, frozen=True):
    """A text that is not a message, and the reason."""

    reason: str
    id: Json = UNSET


Message: TypeAlias = Envelope | LaxEnvelope
Answer: TypeAlias = Success | Failure
Received: TypeAlias = Arrived | Unreadable

# A decoder raises these for data that it cannot read: not JSON, not the type, not UTF-8, too deep.
UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)


# --- reading --------------------------------------------------------------------------------------------------------

# "An envelope or a list of envelopes" in one decode is about three times faster than splitting the array first.
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


def read(data: Data, limits: Limits, strict: bool = True) -> Message | Invalid | list[Message | Invalid]:
    """Return the message in the data, the list of them in a batch, or the `Invalid` that answers all of it."""
    if type(data) is not bytes:
        data = as_bytes(data)
    size, max_depth = len(data), limits.depth
    if size > limits.bytes_in:
        reason = f"{size} bytes, {limits.bytes_in} are allowed"
        return Invalid(LimitExceeded(reason, limit="bytes_in", maximum=limits.bytes_in, count=size))
    try:
        read: Message | list[Message | Invalid] = _decode_strict(data) if strict else _decode_lax(data)
        if not data.isascii():
            data.decode()  # raw slices and skipped members are not checked by the decoder
    except UNREADABLE:
        pass
    else:
        # A level takes two bytes as an array and five as an object (`{"":}`), so a short message needs no check. Each entry
        # of a batch opens an object of its own, so all of them but one, and the array around them, do not add to the depth.
        if size > 2 * max_depth and (size > 5 * max_depth or data.find(b"[") >= 0):
            openers = data.count(b"{") - (len(read) - 1 if type(read) is list else 0)
            if data.find(b"[", 1) >= 0:  # looking takes an eighth of counting
                openers += data.count(b"[", 1)
            if openers > max_depth and _is_deeper(data, max_depth):
                return Invalid(_too_deep(max_depth))
        if type(read) is list and not 0 < len(read) <= limits.batch:
            return Invalid(_batch_error(len(read), limits.batch))
        return read

    # The slow path: the message is broken, or some part of it is unusual. Syntax outranks shape (J8): a message that is not
    # JSON gets one -32700, whatever else is wrong with it. Then each entry is read for itself (JSON-RPC 2.0, section 6).
    try:
        data.decode()
        if _is_deeper(data, max_depth):
            return Invalid(_too_deep(max_depth))
        if not opens_array(data):
            return _salvage(decode_raw(data), strict)
        items = decode_items(data)
    except UnicodeError:
        return Invalid(ParseError("the message is not UTF-8"))
    except RecursionError:
        return Invalid(_too_deep(max_depth))
    except msgspec.DecodeError as error:
        return Invalid(ParseError(str(error)))
    if not 0 < len(items) <= limits.batch:
        return Invalid(_batch_error(len(items), limits.batch))
    return [_salvage(item, strict) for item in items]


def _salvage(raw: Raw, strict: bool) -> Message | Invalid:
    """Read one entry member by member."""
    try:
        return _decode_one(raw) if strict else _decode_one_lax(raw)
    except msgspec.ValidationError:
        pass
    try:
        members = _decode_members(raw)
    except msgspec.ValidationError:
        return Invalid(InvalidRequest(f"expected an object, got {_kind_of(raw)}"))
    id: Json = UNSET
    try:
        # The id comes first: an error about another member is answered under it (JSON-RPC 2.0, section 5).
        if "id" in members:
            id = read_id(members["id"])
        version = members.get("jsonrpc")
        if strict and (version is None or _kind_of(version) != "string" or _decode_text(version) != "2.0"):
            raise InvalidRequest('the member "jsonrpc" must be "2.0"')
        if "method" not in members:
            raise InvalidRequest('the member "method" is missing')
        if _kind_of(members["method"]) != "string":
            raise InvalidRequest(f"method: expected a string, got {_kind_of(members['method'])}")
    except InvalidRequest as error:
        return Invalid(error, None if id is UNSET else id)
    return Envelope("2.0", _decode_text(members["method"]), members.get("params", UNSET), id)


def read_messages(data: bytes) -> tuple[bool, list[Received]]:
    """Return whether the text that a client received is an array, and the messages in it. A result stays raw."""
    try:
        read = _decode_received(data)
        if not data.isascii():
            data.decode()  # raw slices are not checked by the decoder
        return (True, [_checked(message) for message in read]) if type(read) is list else (False, [_checked(read)])
    except UNREADABLE:
        pass  # all of it is broken, or single entries are
    try:
        data.decode()
        is_array = opens_array(data)
        received: list[Received] = []
        for item in decode_items(data) if is_array else [decode_raw(data)]:
            try:
                received.append(_checked(_decode_arrived(item)))
            except msgspec.ValidationError as error:
                value = decode_value(item)
                id = value.get("id", UNSET) if isinstance(value, dict) else UNSET
                received.append(Unreadable(f"a message that is not JSON-RPC: {error}", id))
        return is_array, received
    except UNREADABLE as error:
        why = str(error).removeprefix("JSON is malformed: ") or type(error).__name__
        return False, [Unreadable(f"text that is not JSON: {why}")]


def _checked(message: Arrived) -> Received:
    """Return a message if it is sound."""
    # An answer has an id, and either a result or an error (JSON-RPC 2.0, section 5). The id may be missing beside an error:
    # MCP's servers send one that way for a request that they could not read.
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
    try:
        id = decode_value(text) if kind != "number" or len(text) <= MAX_ID else None
    except msgspec.ValidationError:  # 1e400: a number that no float can hold
        return Raw(text)
    if len(id if isinstance(id, str) else text) > MAX_ID:
        raise InvalidRequest(f"id: longer than {MAX_ID} characters")
    # An answer has the digits of the request's id (J14): where a Python int or float would be written with others, the bytes
    # are kept. (-0 is 0.)
    return id if kind != "number" or _encoder.encode(id) == text else Raw(text)


def check_params_shape(params: Raw | UnsetType) -> None:
    """Raise `InvalidRequest` for params that are neither array nor object (JSON-RPC 2.0, section 4.2)."""
    if params is not UNSET and not bytes(params).startswith((b"[", b"{")):
        raise InvalidRequest(f"params: expected an array or an object, got {_kind_of(params)}")


def decode_any(raw: Raw) -> Json:
    """Return raw params as plain Python values; raise `InvalidParams` for a number that no float can hold."""
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
        raise UsageError(f"A message must be bytes or a text, got {type(data).__name__}.", fix="use json.dumps(message)")
    return bytes(data)


def opens_array(data: bytes) -> bool:
    return data.lstrip(b" \t\r\n")[:1] == b"["


# --- depth ----------------------------------------------------------------------------------------------------------

_ONE_BRACKET = bytes.maketrans(b"{}", b"[]")
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"\\'))


def _is_deeper(data: bytes, limit: int) -> bool:
    """Return whether an entry nests deeper than `limit`, in time linear in the data and without a loop over its bytes."""
    if len(data) <= 2 * limit:
        return False
    import re  # late: few messages come here

    # Step 1: only brackets and quotes stay. A string without brackets is two quotes side by side, and they cancel. A quote
    # that is left over belongs to a string with brackets in it, a backslash to an escaped quote: then a pattern removes
    # the strings one by one.
    skeleton = data.translate(_ONE_BRACKET, _NOT_STRUCTURE).replace(b'""', b"")
    if b'"' in skeleton or b"\\" in skeleton:
        # A string that never ends is taken to the end of the data: starting again at each of its quotes would be quadratic.
        without_strings = re.sub(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', b"", data, flags=re.DOTALL)
        skeleton = without_strings.translate(_ONE_BRACKET, _NOT_STRUCTURE)
    levels = limit + 1 if opens_array(data) else limit  # the array of a batch does not count
    too_many = b"[" * (levels + 1)
    # Step 2: each round takes the innermost level away, as long as that is a good part of the rest.
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
    depth = 0
    for up, down in re.findall(rb"(\[+)(\]*)", skeleton):
        depth += len(up)
        if depth + (rounds if down else 0) > levels:
            return True
        depth = max(0, depth - len(down))
    return False


def _too_deep(limit: int) -> RpcError:
    return LimitExceeded(f"nested deeper than {limit} levels", limit="depth", maximum=limit)


def _batch_error(count: int, limit: int) -> RpcError:
    if count == 0:
        return InvalidRequest("an empty array is not a batch")
    return LimitExceeded(f"a batch of {count} entries, {limit} are allowed", limit="batch", maximum=limit, count=count)


# --- writing --------------------------------------------------------------------------------------------------------


class Whole:
    """A base of results that a function may return whatever its declared type is, such as MCP's content."""

    __slots__ = ()


class Unsendable:
    """Stands for a result that cannot be sent: encoding it raises its error. So the steps after a function treat a wrong
    result like one that JSON cannot carry, which for a command means that it has run."""

    def __init__(self, error: EncodeError) -> None:
        self.error = error


def encode_hook(value: object) -> object:
    """Return a pydantic model as plain values, without importing pydantic; raise `TypeError` for anything else."""
    if isinstance(value, Unsendable):
        raise value.error
    dump: Callable[..., object] | None = getattr(value, "model_dump", None)
    if dump is None:
        raise TypeError(f"{type(value).__name__} cannot be written as JSON")
    return dump(mode="json", by_alias=True)  # with the names that the schema of the result has


_encoder = msgspec.json.Encoder(enc_hook=encode_hook)

# Writes answers in one encode. It takes their results to be ready: constants, and `Raw` that `encode` has made.
write = _encoder.encode


def encode(value: object) -> bytes:
    """Return a value as JSON on one line; raise `EncodeError` where that is impossible, as for NaN and the infinities.

    A `Raw` value is decoded and written anew: its bytes may not be JSON, or not on one line. One inside of another value is
    trusted, unless it breaks the line: a message over stdio is one line, and so is an event.
    """
    if type(value) is Raw:
        try:
            value = decode_value(value)
        except UNREADABLE as error:
            raise EncodeError(f"a Raw that is not JSON: {error}") from error
    if value is UNSET:
        raise EncodeError("UNSET is not a value")
    try:
        data = _encoder.encode(value)
    except EncodeError:
        raise
    except Exception as error:  # a hook, a property or a recursion of the value may raise anything
        raise EncodeError(f"{type(value).__name__}: {error}") from error
    # LF or CR, from a `Raw` alone: the encoder writes neither. As numbers they are found in a quarter of the time.
    if 10 in data or 13 in data:
        data = encode(Raw(data))
    if data.find(b"null") >= 0:  # `in` takes twice as long: it tries whether the left side is a number
        _check_finite(value)
    return data


def _check_finite(value: object) -> None:
    """Raise `EncodeError` for a NaN or an infinity in a value: msgspec writes null for them."""
    if value is None or value is UNSET or type(value) is Raw:
        return
    try:
        left = [msgspec.to_builtins(value, enc_hook=lambda part: None if isinstance(part, Raw) else encode_hook(part))]
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


def make_batch(messages: Iterable[bytes]) -> bytes:
    """Join ready messages into one array; raise `UsageError` for none, since JSON-RPC 2.0 has no empty batch."""
    ready = list(messages)
    if not all(ready) or not ready:
        raise UsageError("An empty batch is not a message.", "JSON-RPC 2.0 answers [] with an error", "send nothing")
    return b"[%b]" % b",".join(ready)


def make_reply(envelopes: Iterable[bytes | None], is_batch: bool) -> bytes | None:
    """Return the reply to a message in manual mode (J9); None stands for a notification, which gets no answer."""
    owed = [envelope for envelope in envelopes if envelope]
    if not owed:
        return None
    return make_batch(owed) if is_batch else owed[0]


def failure(id: Id, error: RpcError) -> Failure:
    """Return an error as it is sent."""
    return Failure(ErrorObject(error.code, error.message, UNSET if error.data is None else error.data), id)


_FIXED: list[type[FixedError]] = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, FixedError) and kind is not FixedError
]
_BY_TYPE = {(kind.CODE, kind.TYPE): kind for kind in _FIXED if kind.TYPE}
_BY_CODE = {kind.CODE: kind for kind in _FIXED if not kind.TYPE}


def remote_error(error: ErrorObject) -> RpcError:
    """Return a server's error as the exception of its code, and of the `data.type` that our servers send along."""
    data = None if error.data is UNSET else error.data
    kind = data.get("type") if isinstance(data, dict) else None
    found: type[RpcError] | None = _BY_TYPE.get((error.code, kind)) if isinstance(kind, str) else None
    return rebuilt(found or _BY_CODE.get(error.code) or RpcError, error.code, error.message, data)


# --- the way of the answers -----------------------------------------------------------------------------------------

Listener: TypeAlias = Callable[[bool], None]  # True: written; False: lost


class Sending(Struct, eq=False):
    """The way of one message's answers. A transport ends it, and tells commands without a key how it ended.

    An answer is written when the transport has taken its last byte without an error. It is lost when its caller has gone
    before that. A stream that is resumed may still write what was lost.
    """

    _watch: Callable[[], None] | None = None  # begins to look whether the caller goes away, which costs something
    listeners: list[Listener] = []  # the calls that want to know; where there are none, no transport takes any trouble
    is_written: bool = False
    is_lost: bool = False

    def listen(self, listener: Listener) -> None:
        """Call the listener when the answers are written or lost, or now if they are lost already."""
        self.listeners.append(listener)
        if self.is_lost:
            listener(False)
        elif self._watch is not None:
            watch, self._watch = self._watch, None
            watch()

    def written(self) -> None:
        if not self.is_written:
            self.is_written, self._watch = True, None
            listeners, self.listeners = self.listeners, []  # they are not needed again, and may refer to this object
            for listener in listeners:
                listener(True)

    def lost(self) -> None:
        """Do nothing if the answers are written."""
        if not self.is_written and not self.is_lost:
            self.is_lost, self._watch = True, None  # a call that goes on does not keep the request of its caller
            for listener in self.listeners:
                listener(False)

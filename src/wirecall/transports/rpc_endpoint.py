"""`POST /rpc`: plain JSON-RPC over HTTP."""

from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from wirecall.errors import InvalidParams, LimitExceeded
from wirecall.protocol import messages as frames
from wirecall.protocol.messages import Data, Id
from wirecall.protocol.receipt import Receipt
from wirecall.protocol.sender import Sender
from wirecall.transports.request import (
    JSON,
    Endpoint,
    HttpError,
    HttpRequest,
    Pairs,
    replayed_mark,
)

if TYPE_CHECKING:
    from wirecall.transports.batch_stream import Begin

# Values of `Accept` that need no look: they take an array, and no stream.
PLAIN = frozenset({None, JSON, "*/*"})

# Media types of JSON-RPC in addition to application/json, from the drafts about JSON-RPC over HTTP.
RPC_TYPES = frozenset({"application/json-rpc", "application/jsonrequest"})


class Handle(Protocol):
    """Answers a message, at once or with the awaitable that it returns.

    It is a protocol because the app, which implements it, is in a layer above the transports.
    """

    def __call__(
        self, data: Data, sender: Sender, replayed: list[Id] | None, key: str | None, /
    ) -> "bytes | Awaitable[bytes | None] | None": ...


def rpc_endpoint(
    handle: Handle,
    *,
    strict: bool = True,
    begin: "Begin | None" = None,
    chunks_arrays: bool = False,
    announced: Mapping[str, Any] | None = None,
) -> Endpoint:
    """Return `POST /rpc`, plain JSON-RPC: the endpoint that passes each message to `handle`.

        200   any JSON-RPC answer, errors included
        204   only notifications: no answer is due (J7); 200 unless `strict`, as some clients need
        405   another method
        406   an array whose client accepts no form of its answers
        413   a body that is too long, with its JSON-RPC error
        415   another media type

    A request without a media type is accepted if its body is JSON and no browser sent it
    (`_announces_json`). Every error in the body of an answer has the id null: JSON-RPC 2.0, section
    5.

    `OPTIONS` returns `announced`, which `rpc.discover` returns as `x-wirecall` too (R12).

    `Idempotency-Key` is the key of a single call, for clients that keep it out of the params. It
    does not fit the entries of an array, so it is refused there. `Idempotent-Replayed: true` marks
    an answer that came from the ledger; for an array it is the JSON array of the ids of those
    answers, unless that is too long for a header.

    With `begin`, an array is answered by a stream if its `Accept` prefers that (`batch_stream`).
    `chunks_arrays` also sends other arrays in pieces.
    """

    silence = 200
    if strict:
        silence = 204

    async def rpc(request: HttpRequest) -> None:
        if request.method == "OPTIONS" and announced is not None:
            body = frames.encode({"x-wirecall": announced})
            await request.respond(200, body, headers=[("allow", "OPTIONS, POST")])
            return
        if request.method != "POST":
            raise HttpError(405, "send a JSON-RPC message with POST", [("allow", "POST")])
        is_announced = _announces_json(request)
        try:
            body = await request.body()
        except HttpError as error:
            if error.status != 413 or not error.data:
                raise
            await _refuse_long_body(request, error, error.data)
            return
        if not is_announced:
            _check_json(body)
        key = request.key()
        if key is not None and frames.opens_array(body):
            misplaced = InvalidParams(
                "Idempotency-Key is for a single call: use params.idempotency_key"
            )
            await request.respond(200, frames.encode(frames.failure(None, misplaced)))
            return
        accept = request.headers.first.get("accept")
        if (chunks_arrays or accept not in PLAIN) and frames.opens_array(body):
            from wirecall.transports import batch_stream  # late: few clients ask for a stream

            choice = batch_stream.choice_of(request, begin, chunks_arrays=chunks_arrays)
            if choice is not None and begin is not None:
                await batch_stream.stream_batch(request, body, begin, choice, silence)
                return
        replayed: list[Id] = []
        request.receipt = Receipt(request.follow)
        answer = handle(body, request.sender(), replayed, key)
        if not isinstance(answer, bytes):
            if answer is not None:
                answer = await answer
            if answer is None:
                await request.respond(silence)
                return
        marks: Pairs = ()
        if replayed:
            marks = replayed_mark(replayed, is_array=frames.opens_array(body))
        await request.respond(200, answer, headers=marks)

    return rpc


async def _refuse_long_body(
    request: HttpRequest, error: HttpError, data: Mapping[str, Any]
) -> None:
    """Answer a message that was not read: the id is null (JSON-RPC 2.0, section 5)."""
    refusal = LimitExceeded(error.message, limit=data["limit"], maximum=data["max"])
    request.report(error)
    await request.respond(413, frames.encode(frames.failure(None, refusal)), headers=error.headers)


def _announces_json(request: HttpRequest) -> bool:
    """Return whether the request names a media type of JSON-RPC; False if it names none.

    HttpError 415 if it names another one.

    A web page may send a body without a type to any server, without a preflight. Browsers mark such
    a request with `Origin` or `Sec-Fetch-*`; then the type is required, and a page of another
    origin needs a preflight (CORS).
    """
    first = request.headers.first
    if first.get("content-type") == JSON:  # nearly always
        return True
    media, _, _ = request.headers.get("content-type", "").partition(";")
    kind = media.strip().lower()
    if kind in RPC_TYPES:
        request.check_charset()
        return True
    is_from_page = "origin" in first or any(name.startswith("sec-fetch-") for name in first)
    if not kind and not is_from_page:
        return False
    request.check_json()
    return True


def _check_json(body: bytes) -> None:
    """Raise HttpError 415 for a body without a media type that is not a JSON array or object."""
    try:
        value = bytes(frames.decode_raw(body))
    except RecursionError:
        return  # JSON that is too deep: the answer names the limit
    except frames.UNREADABLE:
        value = b""
    if not value.startswith((b"{", b"[")):
        raise HttpError(
            415,
            f"Content-Type: expected {JSON}, got none, and a body that is not JSON",
            [("accept", JSON)],
        )

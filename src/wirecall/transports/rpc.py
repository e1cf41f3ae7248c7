"""Plain JSON-RPC over HTTP: `POST /rpc`, and the two questions a supervisor asks.

    200   anything that is a JSON-RPC answer, errors included
    204   nothing is owed: notifications alone (J7)
    405   another method; 415 another media type; 413 a body that is too long, with the JSON-RPC error that says so

`Idempotency-Key` is the key of a single call, for clients that keep it out of the params. It says nothing about the entries
of an array, so it is refused there. `Idempotent-Replayed: true` tells an answer that came from the ledger; for an array it
is the JSON array of the ids of those answers.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol

from wirecall.errors import InvalidParams, LimitExceeded, RpcError
from wirecall.protocol import messages as frames
from wirecall.protocol.messages import Data, Id
from wirecall.transports.request import Endpoint, HttpError, Pairs, Request

KEY_HEADER = "idempotency-key"
REPLAYED_HEADER = "idempotent-replayed"


class Handle(Protocol):
    """What answers a message: `App.handle`."""

    def __call__(
        self, data: Data, *, caller: str, replayed: list[Id] | None, key: str | None
    ) -> Awaitable[bytes | None]: ...


def rpc_endpoint(handle: Handle) -> Endpoint:
    """The endpoint that gives message by message to `handle`."""

    async def rpc(request: Request) -> None:
        if request.method != "POST":
            raise HttpError(405, "send a JSON-RPC message with POST", [("allow", "POST")])
        request.check_json()
        body = await _body(request)
        if body is None:
            return
        key = _key(request)
        array = frames.opens_array(body)
        if key is not None and array:
            await _refuse(request, 200, InvalidParams("Idempotency-Key is for a single call: use params.idempotency_key"))
            return
        replayed: list[Id] = []
        answer = await handle(body, caller=request.caller, replayed=replayed, key=key)
        if answer is None:
            await request.respond(204)
        else:
            await request.respond(200, answer, headers=_told(replayed, array) if replayed else ())

    return rpc


async def _body(request: Request) -> bytes | None:
    """The body, or None: it was too long, and is answered."""
    try:
        return await request.body()
    except HttpError as error:
        if error.status != 413 or not error.data:
            raise
        refusal = LimitExceeded(error.message, limit=error.data["limit"], maximum=error.data["max"])
        await _refuse(request, 413, refusal, error.headers)
        return None


def _key(request: Request) -> str | None:
    keys = request.headers.all(KEY_HEADER)
    if len(keys) > 1:
        raise HttpError(400, "more than one Idempotency-Key header")
    return keys[0] if keys else None


async def _refuse(request: Request, status: int, error: RpcError, headers: Pairs = ()) -> None:
    """JSON-RPC 2.0, section 5: an answer to what was not read has the id null."""
    await request.respond(status, frames.encode(frames.failure(None, error)), headers=headers)


def _told(replayed: list[Id], array: bool) -> Pairs:
    if not array:
        return [(REPLAYED_HEADER, "true")]
    ids = b"[" + b",".join(frames.encode(id) for id in replayed) + b"]"
    return [(REPLAYED_HEADER, _ascii(ids.decode()))]


def _ascii(text: str) -> str:
    """JSON in ASCII alone: a header carries nothing else."""
    return "".join(sign if sign < "\x7f" else "".join(f"\\u{unit:04x}" for unit in _utf16(sign)) for sign in text)


def _utf16(sign: str) -> list[int]:
    data = sign.encode("utf-16-be", "surrogatepass")
    return [int.from_bytes(data[i : i + 2], "big") for i in range(0, len(data), 2)]


def health_endpoints(ready: Callable[[], Awaitable[str | None]] | None = None) -> dict[str, Endpoint]:
    """`/healthz`: the process answers. `/readyz`: it wants work; `ready` gives the reason why not, or None."""

    async def healthz(request: Request) -> None:
        _check_read(request)
        await request.respond(200, b'{"status":"ok"}')

    async def readyz(request: Request) -> None:
        _check_read(request)
        reason = "stopping" if request.stopping.is_set() else await ready() if ready else None
        if reason is None:
            await request.respond(200, b'{"status":"ready"}')
        else:
            await request.respond(503, frames.encode({"status": "not ready", "reason": reason}))

    return {"/healthz": healthz, "/readyz": readyz}


def _check_read(request: Request) -> None:
    if request.method not in ("GET", "HEAD"):
        raise HttpError(405, "ask with GET", [("allow", "GET, HEAD")])

"""Plain JSON-RPC over HTTP: `POST /rpc`, and the probes of supervisors.

    200   any JSON-RPC answer, errors included
    204   notifications alone: no answer is due (J7)
    405   another method; 415 another media type; 413 a body that is too long, with the JSON-RPC error that says so

`Idempotency-Key` is the key of a single call, for clients that keep it out of the params. It does not fit the entries of an
array, so it is refused there. `Idempotent-Replayed: true` marks an answer that came from the ledger; for an array it is the
JSON array of the ids of those answers.
"""

import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from wirecall.errors import InvalidParams, LimitExceeded
from wirecall.protocol import messages as frames
from wirecall.protocol.messages import Data, Id
from wirecall.protocol.sending import Sending
from wirecall.transports.request import Endpoint, HttpError, HttpRequest, Pairs

if TYPE_CHECKING:
    from wirecall.server.identity import Identity

KEY_HEADER = "idempotency-key"
REPLAYED_HEADER = "idempotent-replayed"


class Handle(Protocol):
    """Answers a message: `App.handle` with the way of the answer."""

    def __call__(
        self,
        data: Data,
        *,
        caller: str,
        replayed: list[Id] | None,
        key: str | None,
        sending: Sending,
        identity: "Identity | None",
    ) -> Awaitable[bytes | None]: ...


def rpc_endpoint(handle: Handle) -> Endpoint:
    """Return the endpoint that passes message by message to `handle`."""

    async def rpc(request: HttpRequest) -> None:
        if request.method != "POST":
            raise HttpError(405, "send a JSON-RPC message with POST", [("allow", "POST")])
        request.check_json()
        try:
            body = await request.body()
        except HttpError as error:
            if error.status != 413 or not error.data:
                raise
            # JSON-RPC 2.0, section 5: the answer to a message that was not read has the id null.
            refusal = LimitExceeded(error.message, limit=error.data["limit"], maximum=error.data["max"])
            await request.respond(413, frames.encode(frames.failure(None, refusal)), headers=error.headers)
            return
        keys = request.headers.all(KEY_HEADER)
        if len(keys) > 1:
            raise HttpError(400, "more than one Idempotency-Key header")
        if keys and not keys[0].isascii():
            raise HttpError(400, "Idempotency-Key: expected ASCII characters only")
        if keys and frames.opens_array(body):
            misplaced = InvalidParams("Idempotency-Key is for a single call: use params.idempotency_key")
            await request.respond(200, frames.encode(frames.failure(None, misplaced)))
            return
        replayed: list[Id] = []
        sending = request.sending = Sending(request.watch)
        key = keys[0] if keys else None
        caller, identity = request.caller, request.identity
        answer = await handle(body, caller=caller, replayed=replayed, key=key, sending=sending, identity=identity)
        if answer is None:
            await request.respond(204)
            return
        headers: Pairs = ()
        if replayed:
            told = frames.encode(replayed).decode() if frames.opens_array(body) else "true"
            # A header carries ASCII alone: other characters are escaped as JSON does it.
            told = re.sub("[^ -~]", lambda sign: re.sub("(....)", r"\\u\1", sign[0].encode("utf-16-be").hex()), told)
            headers = [(REPLAYED_HEADER, told)]
        await request.respond(200, answer, headers=headers)

    return rpc


def health_endpoints(ready: Callable[[], Awaitable[str | None]] | None = None) -> dict[str, Endpoint]:
    """Return `/healthz`, which answers while the process does, and `/readyz`: `ready` gives the reason why not, or None."""

    async def healthz(request: HttpRequest) -> None:
        _check_read(request)
        await request.respond(200, b'{"status":"ok"}')

    async def readyz(request: HttpRequest) -> None:
        _check_read(request)
        reason = "stopping" if request.stopping.is_set() else await ready() if ready else None
        if reason is None:
            await request.respond(200, b'{"status":"ready"}')
        else:
            await request.respond(503, frames.encode({"status": "not ready", "reason": reason}))

    return {"/healthz": healthz, "/readyz": readyz}


def _check_read(request: HttpRequest) -> None:
    if request.method not in ("GET", "HEAD"):
        raise HttpError(405, "ask with GET", [("allow", "GET, HEAD")])

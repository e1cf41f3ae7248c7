"""What MCP's revisions have in common over HTTP.

1. A client takes both media types, since an answer may be either. No Accept header is as good as `*/*`.
2. A header field that decides something is there once.
3. Where a client's leaving is its cancellation, it is watched only while the work has to wait (`while_there`).
"""

import asyncio
from functools import lru_cache
from typing import Any

from msgspec import UNSET

from wirecall.errors import Gone, RpcError
from wirecall.mcp import headers
from wirecall.mcp.revisions import REVISIONS, Revision
from wirecall.mcp.server.results import failure
from wirecall.mcp.server.streams import Direct
from wirecall.stepping import resume
from wirecall.transports.request import JSON, HttpError, Request

KEY = "idempotency-key"
REPLAYED = "idempotent-replayed"
EVENTS = "text/event-stream"
BOTH = frozenset({JSON, EVENTS})


def check_media(request: Request) -> None:
    request.check_json()
    if not accepts(request, BOTH):
        raise HttpError(406, f"Accept: it must list {JSON} and {EVENTS}, an answer may be either")


def accepts(request: Request, media: frozenset[str]) -> bool:
    fields = request.headers
    accepted = ",".join(fields.all("accept")).encode() if fields.has_doubles else fields.first.get(b"accept")
    return not accepted or media <= _media(accepted)


@lru_cache(maxsize=256)  # clients send few different ones
def _media(accepted: bytes) -> frozenset[str]:
    """Those of our two media types that an Accept header lists."""
    kinds = {kind.partition(";")[0].strip().lower() for kind in accepted.decode("latin-1").split(",")}
    return frozenset(media for media in BOTH if kinds & {media, "*/*", media.partition("/")[0] + "/*"})


def single(request: Request, name: str) -> str | None:
    """A header field that decides something. Of two values a proxy in front may have judged the other one."""
    if headers.is_doubled(request.headers, name):
        raise HttpError(400, f"more than one {name} header")
    return request.headers.get(name)


def is_newer(version: str | None) -> bool:
    """Whether a version header names no older revision."""
    return version is not None and (version not in REVISIONS or REVISIONS[version].is_stateless)


def key_of(request: Request) -> Any:
    """The idempotency key that came as a header, or UNSET."""
    key = single(request, KEY)
    return UNSET if key is None else key


async def refuse(request: Request, error: RpcError, id: Any, revision: Revision, status: int = 400) -> None:
    """Answer with an error, and tell it by the status as well."""
    await request.respond(status, failure(None if id is UNSET else id, error, revision))


async def while_there(request: Request, work: Any, outlet: Direct) -> Any:
    """Await work whose client's leaving is its cancellation. Whoever leaves is watched only if the work has to wait."""
    try:
        awaited = work.send(None)
    except StopIteration as finished:
        return finished.value
    return await _watched(request, resume(work, awaited), outlet)


async def _watched(request: Request, work: Any, outlet: Direct) -> Any:
    this = asyncio.current_task()
    assert this is not None
    watcher = asyncio.get_running_loop().create_task(request.gone())

    def left(_: object) -> None:
        if not watcher.cancelled():
            watcher.exception()  # a transport that fails is as good as a client that has left
            outlet.cut()

    watcher.add_done_callback(left)
    outlet.on_cut = this.cancel
    try:
        return await work
    except asyncio.CancelledError:
        if outlet.is_cut and this.uncancel() == 0:
            raise Gone("the client has left") from None
        raise
    finally:
        outlet.on_cut = None
        watcher.cancel()

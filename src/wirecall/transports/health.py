"""The endpoints of supervisors: `/healthz` and `/readyz`."""

from collections.abc import Awaitable, Callable

from wirecall.protocol import messages as frames
from wirecall.transports.request import Endpoint, HttpError, HttpRequest

# Supervisors call these by address and without credentials.
PROBES = frozenset({"/healthz", "/readyz"})

Ready = Callable[[], Awaitable[str | None]]


def health_endpoints(ready: Ready | None = None) -> dict[str, Endpoint]:
    """Return `/healthz`, up while the process runs, and `/readyz`.

    `ready` returns why the server is not ready, or None.
    """

    async def healthz(request: HttpRequest) -> None:
        _check_read(request)
        await request.respond(200, b'{"status":"ok"}')

    async def readyz(request: HttpRequest) -> None:
        _check_read(request)
        reason = request.leaving
        if reason is None and ready is not None:
            reason = await ready()
        if reason is None:
            await request.respond(200, b'{"status":"ready"}')
        else:
            await request.respond(503, frames.encode({"status": "not ready", "reason": reason}))

    return {"/healthz": healthz, "/readyz": readyz}


def _check_read(request: HttpRequest) -> None:
    if request.method not in ("GET", "HEAD"):
        raise HttpError(405, "ask with GET", [("allow", "GET, HEAD")])

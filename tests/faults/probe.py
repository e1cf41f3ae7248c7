"""The probes of a supervisor."""

from tests.transports import ask
from wirecall import App


class Probe:
    """The probes of a supervisor over HTTP."""

    def __init__(self, app: App) -> None:
        self._server = app.asgi()

    async def status(self, path: str = "/readyz") -> int:
        return (await ask(self._server, path, method="GET")).status

    async def reason(self) -> str:
        reply = await ask(self._server, "/readyz", method="GET")
        assert reply.status == 503
        return str(reply.json["reason"])

    async def is_ready(self) -> bool:
        return await self.status() == 200

    async def is_not_ready(self) -> bool:
        return await self.status() == 503

"""The stored login of a server behind the gateway, if `wirecall login` has made one."""

from collections.abc import Mapping

from wirecall.files import login_folder
from wirecall.transports.http_client import Auth, HttpAnswer


class StoredLogin:
    """Sends the token of the stored login. Without a login it sends nothing.

    The login is read before the first request. One that is made later is read when the server
    refuses a request.
    """

    is_interactive = False

    def __init__(self, url: str) -> None:
        self._url = url
        self._auth: Auth | None = None
        self._was_read = False

    async def headers(self, method: str, url: str) -> Mapping[str, str]:
        """Return the headers that authorize a request."""
        if not self._was_read:
            await self._read()
        if self._auth is None:
            return {}
        return await self._auth.headers(method, url)

    async def answered(self, answer: HttpAnswer, sent: Mapping[str, str]) -> bool:
        """Take the answer to a request; return whether to send the request again."""
        if self._auth is not None:
            return await self._auth.answered(answer, sent)
        if answer.status not in (401, 403):
            return False
        await self._read()
        return self._auth is not None

    async def _read(self) -> None:
        """Read the login, if there is one."""
        self._was_read = True
        if not login_folder().is_dir():
            return
        from wirecall.auth import Stored  # late: few servers need it
        from wirecall.auth.client import authorization

        stored = Stored()
        assert stored.store is not None
        if await stored.store.logins(self._url):
            self._auth = authorization(stored, self._url)

"""The stored login of a server behind the gateway, if `wirecall login` has made one."""

from collections.abc import Mapping

from wirecall.files import login_folder
from wirecall.transports.http_client import Auth, HttpAnswer


class StoredLogin:
    """Sends the token of the stored login. Without a login it sends nothing."""

    is_interactive = False

    def __init__(self, url: str) -> None:
        self._url = url
        self._auth: Auth | None = None

    async def headers(self, method: str, url: str) -> Mapping[str, str]:
        """Return the headers that authorize a request."""
        auth = await self._found()
        if auth is None:
            return {}
        return await auth.headers(method, url)

    async def answered(self, answer: HttpAnswer, sent: Mapping[str, str]) -> bool:
        """Take the answer to a request; return whether to send the request again."""
        if self._auth is None:
            return False
        return await self._auth.answered(answer, sent)

    async def _found(self) -> Auth | None:
        """Return the login. It may be made while the gateway runs."""
        if self._auth is None and login_folder().is_dir():
            from wirecall.auth import Stored  # late: few servers need it
            from wirecall.auth.client import authorization

            stored = Stored()
            assert stored.store is not None
            if await stored.store.logins(self._url):
                self._auth = authorization(stored, self._url)
        return self._auth

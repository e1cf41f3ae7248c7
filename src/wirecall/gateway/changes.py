"""The stream on which a server of 2026-07-28 tells its changes (`subscriptions/listen`).

1. There is one stream for each conversation. It asks for the changes of all lists, and of the
   resources that clients have subscribed to. Another resource begins another stream.
2. A stream that has ended begins again after a pause; if its pipe has ended, with the next answer
   of the server, since a child is started by calls alone. Changes may have been missed by then, so
   the lists are read again.
3. A server that refuses the stream is not asked again.
"""

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from wirecall.aio import cancel_all
from wirecall.errors import CallFailed, RpcError
from wirecall.gateway import translate
from wirecall.gateway.wire import members_of, raw_of
from wirecall.logs import logger

if TYPE_CHECKING:
    from wirecall.gateway.session import UpstreamSession

LISTEN = "subscriptions/listen"
# Seconds before a stream begins again, at first and at most.
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0


class Changes:
    """The stream of one conversation."""

    def __init__(self, session: "UpstreamSession") -> None:
        self._session = session
        self._following: asyncio.Task[None] | None = None
        self._old: set[asyncio.Task[None]] = set()
        self._is_refused = False
        self._is_closed = False

    @property
    def is_over(self) -> bool:
        """Whether the stream has ended, and may begin again."""
        is_open = self._following is not None and not self._following.done()
        return not (is_open or self._is_refused or self._is_closed)

    def begin(self, uris: Collection[str]) -> None:
        """Begin a stream with these resources. The one before ends after that."""
        if self._is_refused or self._is_closed:
            return
        before = self._following
        was_open = before is not None and not before.done()
        is_first = before is None or was_open
        self._following = asyncio.get_running_loop().create_task(
            self._follow([*uris], is_first=is_first)
        )
        if before is not None and was_open:
            before.cancel()
            self._old.add(before)
            before.add_done_callback(self._old.discard)

    async def aclose(self) -> None:
        """End the stream."""
        self._is_closed = True
        await cancel_all(self._following, *self._old)

    async def _follow(self, uris: list[str], *, is_first: bool) -> None:
        """Follow streams, one after another, until one is refused or the pipe ends."""
        session = self._session
        wanted: dict[str, Any] = {
            f"{kind}ListChanged": True for kind in ("tools", "prompts", "resources")
        }
        if uris:
            wanted["resourceSubscriptions"] = sorted(uris)
        params = raw_of({"notifications": wanted, **members_of(translate.envelope())})
        pause = FIRST_PAUSE
        while True:
            if not is_first:
                session.on_renewed()
            is_first = False
            begun = session.upstream.clock.time()
            try:
                await session.stand(LISTEN, params)
            except RpcError as error:
                self._is_refused = True
                logger.debug("%s does not tell its changes: %s", session.upstream.name, error)
                return
            except CallFailed as error:
                logger.debug("a stream of %s ended: %s", session.upstream.name, error)
            # The next request makes another pipe, and begins another stream.
            if not session.link_is_there:
                return
            # Some servers end each stream at once.
            if session.upstream.clock.time() - begun > LONGEST_PAUSE:
                pause = FIRST_PAUSE
            await session.upstream.clock.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)

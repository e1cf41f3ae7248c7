"""The other processes with the same secret and ledger, any of which serves any request.

They are the workers of one host, and those of other hosts. An answer to a question belongs to the
process whose handler asked, a cancellation to the one that runs the call, a change to those that
have streams open; and a client with two connections meets two processes. So a process passes on
each message that it cannot use itself, and every other one checks whether it can. It sends:

    changes                    lists or resources have changed: the others notify their listeners
    ended                      a session has ended
    caller, session, message   a message of a session that belongs to another process, or to all

1. Messages go over the bus of the ledger, sealed with the secret: a process without it could
   otherwise speak for any caller. The name of the channel follows from the secret, so apps that
   share a ledger do not receive each other.
2. A change may be lost: a client that reads again sees it. Changes that wait for the bus are sent
   together, and one that waits already is not added again.
3. Everything else is a mark in the ledger first, and the bus only wakes the others. A process looks
   for marks when the bus was interrupted, and every `LOOK_EVERY` seconds while it has sessions. So
   it takes each message, if late. A message that cannot be marked is refused, and its client sends
   it again.
4. A process that meets a session for the first time asks the ledger whether it has ended, and what
   it has set: subscriptions and its log level are kept as long as its token is good.
5. A session that has ended stays ended, however many others a caller ends after it. A process
   remembers those that ended while it ran, and `within` bounds them: if too many have ended, one
   entry replaces all the sessions of the caller with the most: the opening of the newest of them.
   Every session that this caller opened until then counts as ended, unless this process knows that
   it is alive. So a caller that floods the list ends its own sessions early, and its client sends
   `initialize` again.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from wirecall.aio import clock_from_boot, start
from wirecall.ledger.base import MAX_MESSAGE, Bus, Ledger, LedgerDown, Mark
from wirecall.logs import logger
from wirecall.protocol.messages import JsonObject

if TYPE_CHECKING:
    from wirecall.mcp.server.changes import Hub
    from wirecall.mcp.server.sessions import Sealer

# Seconds between two looks at the marks of the others.
LOOK_EVERY = 5.0
# Seconds that the marks of two looks have in common: a mark counts from the moment at which it is
# written, and others see it a moment later.
OVERLAP = 10.0
# Seconds after which the answer to a look is late, well within `OVERLAP`.
LATE = 5.0
# Seconds for which a message is good. The clocks of hosts may differ.
LIFETIME = 3600.0
# Seconds for which the messages of sessions are kept.
KEPT = 600.0
# Seconds for which the end of a session is kept after the end of its token.
AFTER_TOKEN = 3600.0
# Seconds for which what a session has set is found: longer than any token is good.
SETTINGS_WITHIN = 100_000.0
# Changes that the bus has not taken yet.
MAX_PENDING = 1000
# Seconds before the next attempt to open the ledger, at first and at most.
SHORTEST = 0.1
LONGEST = 5.0
# Wakes the others: they look for marks.
LOOK = "look"

# Begins the name of a mark with a message that only sets something.
SETTING = "set."

# Stands for the digest of a caller in an entry for all callers.
EVERY_CALLER = "all"

Change = tuple[str, str, str | None]

# A store counts the time in which this machine sleeps.
clock = clock_from_boot()


class EndedSession(Struct, frozen=True):
    """A session that has ended."""

    # A digest of the caller's name.
    caller: str
    id: str
    # Unix time in milliseconds.
    opened: int

    @property
    def name(self) -> str:
        return f"{self.caller}.{self.id}"

    def is_among(self, opened: Callable[[str], int | None]) -> bool:
        """Return whether the list `opened` has the session.

        It may have an entry for all sessions of the caller instead.
        """
        if opened(self.name) is not None:
            return True
        return any((opened(several) or 0) >= self.opened for several in (self.caller, EVERY_CALLER))


def within(ended: Mapping[str, int], oldest: int, limit: int) -> dict[str, int]:
    """Return a list of ended sessions without those too old to matter, cut down to a limit.

    An entry without an id stands for every session of its caller that was opened until then.
    """
    kept = {name: opened for name, opened in ended.items() if opened >= oldest}
    while len(kept) > limit:
        (caller, number), *_ = Counter(name.partition(".")[0] for name in kept).most_common(1)
        if number == 1:  # every caller has one entry, so only an entry for all callers helps
            return {EVERY_CALLER: max(kept.values())}
        last = max(opened for name, opened in kept.items() if name.partition(".")[0] == caller)
        kept = {name: opened for name, opened in kept.items() if name.partition(".")[0] != caller}
        kept[caller] = last
    return kept


class Place(Struct):
    """An endpoint of this process, and what it does with messages of the others."""

    hub: "Hub"
    # Returns whether it has sessions.
    is_busy: Callable[[], bool]
    on_end: Callable[[EndedSession], None]
    on_message: Callable[[str, str, bytes], None]


class Relay:
    """One process among those with the same secret and ledger.

    While a secret is replaced, it writes to the channel of its first secret, and reads those of all.

    If it has no `ledger`, it is alone and sends nothing.
    """

    def __init__(
        self, sealer: "Sealer", ledger: "Callable[[], Coroutine[Any, Any, Ledger]] | None"
    ) -> None:
        self.is_shared = ledger is not None
        self._sealer = sealer
        self._open_ledger = ledger
        self._channels = [f"wirecall-{name}" for name in sealer.names]
        self._places: dict[str, Place] = {}
        # One for each channel, once this process has joined.
        self._buses: list[Bus] = []
        # Names this process among the others. Workers are copies of one process, so it has a name
        # when it opens.
        self._process = ""
        self._living: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._looks = asyncio.Event()
        # Changes that the bus has not taken yet, each once.
        self._pending: dict[Change, None] = {}
        # When the last look began.
        self._looked_at = 0.0
        # The marks that were taken, and when.
        self._taken: dict[str, float] = {}

    def add(self, path: str, place: Place) -> None:
        """Add an endpoint. The others have it at the same path."""
        self._places[path] = place

    async def open(self) -> None:
        """Begin to listen to the others, if there may be any. Nothing is waited for."""
        if self._open_ledger is None or self._living is not None:
            return
        loop = asyncio.get_running_loop()
        self._process = os.urandom(8).hex()
        self._looked_at = clock()
        self._living = start(loop, self._live(self._open_ledger))

        for path, place in self._places.items():

            def changed(kind: str, uri: str | None, path: str = path) -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(self._announce, (path, kind, uri))

            place.hub.beyond = changed

    async def aclose(self) -> None:
        """Leave the others. Changes that the bus has not taken are lost."""
        for place in self._places.values():
            place.hub.beyond = None
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=1)
        tasks = [task for task in (self._living, self._sending) if task is not None]
        self._living = None
        self._sending = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for bus in self._buses:
            await bus.aclose()
        self._buses = []

    # --- messages to the others -------------------------------------------------------------------

    async def pass_on(
        self, path: str, caller: str, token: str | None, data: bytes, *, sets: bool = False
    ) -> None:
        """Send the others a message of a session. `LedgerDown`: it cannot reach them now.

        `sets`: it does nothing but set something, so it may be taken twice.
        """
        if token is not None and self._open_ledger is not None:
            message = {"caller": caller, "session": token, "message": data.decode()}
            name = os.urandom(12).hex()
            if sets:
                name = f"{SETTING}{name}"
            await self._keep(name, {"at": path, **message}, KEPT)

    async def announce_end(self, path: str, session: EndedSession, lasts: float) -> None:
        """Notify the others that a session has ended, also those that start later.

        `lasts`: seconds for which its token would be good. `LedgerDown`: they cannot know it now.
        """
        if self._open_ledger is not None:
            lasts = max(lasts, 0) + AFTER_TOKEN
            await self._keep(_mark_of(session), {"at": path, "ended": session}, lasts)

    async def remember(self, session: EndedSession, name: str, content: str, lasts: float) -> None:
        """Keep what a session has set, for processes that meet it later.

        It replaces what has the same name. `LedgerDown`: it cannot be kept now.
        """
        if self._open_ledger is not None:
            message = {"session": session.name, "set": content}
            sealed = self._seal(message, max(lasts, LIFETIME))
            ledger = await self._open_ledger()
            mark = Mark(name, sealed.encode())
            await ledger.mark(f"{self._channels[0]}-{session.id}", mark, lasts, SETTINGS_WITHIN)

    async def recall(self, session: EndedSession) -> list[str]:
        """Return what a session has set, in that order."""
        if self._open_ledger is None:
            return []
        ledger = await self._open_ledger()
        found = list[str]()
        for channel in self._channels:
            for mark in await ledger.marks(f"{channel}-{session.id}", SETTINGS_WITHIN):
                message = self._opened(_text(mark))
                if message is not None and message.get("session") == session.name:
                    found.append(message["set"])
        return found

    async def is_ended(self, session: EndedSession) -> bool:
        """Return whether another process has seen the end of a session."""
        if self._open_ledger is None:
            return False
        ledger = await self._open_ledger()
        for channel in self._channels:
            mark = await ledger.marked(channel, _mark_of(session))
            # Another program that can write to the ledger must not end sessions.
            if mark is not None and self._opened(_text(mark)) is not None:
                return True
        return False

    async def _keep(self, name: str, message: JsonObject, lasts: float) -> None:
        assert self._open_ledger is not None
        sealed = self._seal({"name": name, **message}, max(lasts, LIFETIME))
        ledger = await self._open_ledger()
        self._taken[name] = clock()
        await ledger.mark(self._channels[0], Mark(name, sealed.encode()), lasts)
        if self._buses:
            with suppress(LedgerDown):  # the others look for the mark
                await self._buses[0].send(sealed if len(sealed) <= MAX_MESSAGE else LOOK)

    def _seal(self, message: JsonObject, lasts: float) -> str:
        return self._sealer.seal("relay", "", {"by": self._process, **message}, lasts)

    def _announce(self, change: Change) -> None:
        """Send a change without waiting for the bus."""
        is_full = len(self._pending) >= MAX_PENDING
        if self._living is None or (is_full and change not in self._pending):
            return
        self._pending[change] = None
        is_sending = self._sending is not None and not self._sending.done()
        if self._buses and not is_sending:
            self._sending = start(asyncio.get_running_loop(), self._send_changes())

    async def _send_changes(self) -> None:
        while self._pending and self._buses:
            changes = list(self._pending)
            sealed = self._seal({"changes": changes}, LIFETIME)
            while len(sealed) > MAX_MESSAGE and len(changes) > 1:
                changes = changes[: len(changes) // 2]
                sealed = self._seal({"changes": changes}, LIFETIME)
            for change in changes:
                del self._pending[change]
            try:
                if len(sealed) <= MAX_MESSAGE:
                    await self._buses[0].send(sealed)
                else:  # a URI that is too long for the bus
                    name = os.urandom(12).hex()
                    await self._keep(name, {"changes": changes}, KEPT)
            except LedgerDown as error:
                logger.warning("a change was not sent to other processes: %s", error)

    # --- messages of the others -------------------------------------------------------------------

    async def _live(self, open_ledger: "Callable[[], Coroutine[Any, Any, Ledger]]") -> None:
        """Join the bus as soon as the ledger can be reached, and look for marks."""
        pause = SHORTEST
        while True:
            try:
                ledger = await open_ledger()
                break
            except Exception as error:  # also `UsageError`: the path of a file is wrong
                if pause == SHORTEST:
                    logger.warning(
                        "messages of other processes do not arrive: the ledger: %s", error
                    )
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST)
        joined = [ledger.join(channel, self._receive) for channel in self._channels]
        self._buses = [bus for bus in joined if bus is not None]
        await self._send_changes()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY):
                    await self._looks.wait()
            is_asked = self._looks.is_set()
            self._looks.clear()
            if is_asked or any(place.is_busy() for place in self._places.values()):
                # A failed look ends nothing: the next one is for a longer time.
                try:
                    await self._look(await open_ledger())
                except LedgerDown:  # those who send commands log it
                    continue
                except Exception as error:
                    logger.warning("messages of other processes were not looked for: %r", error)
            else:  # whether a session has ended is asked when it comes
                self._have_looked(clock())

    def _receive(self, message: str | None) -> None:
        if message is None or message == LOOK:
            self._looks.set()
        else:
            self._take(message)

    async def _look(self, ledger: Ledger) -> None:
        """Take the marks since the last look that were not taken yet."""
        now = clock()
        for channel in self._channels:
            is_behind = False
            for mark in await ledger.marks(channel, now - self._looked_at + OVERLAP):
                is_setting = mark.name.startswith(SETTING)
                if mark.name not in self._taken:
                    self._take(_text(mark))
                    is_behind = is_behind or is_setting
                # It came over the bus before an earlier one, or it is our own. The last one counts.
                elif is_behind and is_setting:
                    del self._taken[mark.name]
                    self._take(_text(mark), is_own=True)
        # The store counts back from the moment at which it answers. So a late answer may lack the
        # oldest marks, and the next look asks for them again.
        if clock() - now < LATE:
            self._have_looked(now)

    def _have_looked(self, now: float) -> None:
        self._looked_at = now
        self._taken = {
            name: taken_at for name, taken_at in self._taken.items() if taken_at > now - 2 * OVERLAP
        }

    def _opened(self, sealed: str) -> JsonObject | None:
        """Return a message of another process; None if it is not sealed with our secret."""
        found = self._sealer.open("relay", "", sealed)
        if found is None:
            logger.warning("a message on the bus is not sealed with the secret of this server")
            return None
        message: JsonObject = msgspec.json.decode(found.value)
        return message

    def _take(self, sealed: str, *, is_own: bool = False) -> None:
        """Use a message of another process; with `is_own`, also one of this process."""
        message = self._opened(sealed)
        try:
            if message is not None and (is_own or message["by"] != self._process):
                self._use(message)
        # A process of another version may send anything, and the next message must be read.
        except Exception as error:
            logger.warning("a message of another process is not readable: %r", error)

    def _use(self, message: JsonObject) -> None:
        name = message.get("name")
        if name is not None:
            if name in self._taken:
                return
            self._taken[name] = clock()
        for path, kind, uri in message.get("changes", ()):
            if path in self._places:
                self._places[path].hub.notify_here(kind, uri)
        place = self._places.get(message.get("at", ""))
        if place is None:
            return
        if "ended" in message:
            place.on_end(msgspec.convert(message["ended"], EndedSession))
        elif "message" in message:
            place.on_message(message["caller"], message["session"], message["message"].encode())


def _text(mark: Mark) -> str:
    """Return the sealed message in a mark. Bytes that are not text were not sealed either."""
    return mark.content.decode(errors="replace")


def _mark_of(session: EndedSession) -> str:
    return f"ended.{session.name}"

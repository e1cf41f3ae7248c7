"""One server behind the gateway: how it is reached, whether it may be, and what its tools do.

1. A link to it is made by the call that needs one. A child that has ended is started by the next
   call: after `FIRST_PAUSE` seconds, doubled for each start after which it did not live long, up to
   `LONGEST_PAUSE`, and at most `STARTS` times a minute (`Starts`).
2. After `FAILURES` links in a row that could not be made, none is tried for `REST` seconds
   (`Breaker`). Errors of tools do not count.
3. Calls in flight are counted (`Places`). A call beyond them waits, and one beyond those that wait
   is refused.
4. The kind of a tool is read from its definition: a tool without `readOnlyHint` is a command.
   `trust` says which hints count.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from hashlib import sha256
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Raw, Struct

from wirecall.aio import Timeouts
from wirecall.client.delivery import Clock, RealClock
from wirecall.client.links import Pipe
from wirecall.errors import CallFailed, ConnectionLost, NotSent, UpstreamUnavailable, UsageError
from wirecall.gateway.link import RelayLineLink
from wirecall.gateway.session import START_TIME
from wirecall.mcp.client.links import McpHttpLink, McpLink, SsePipe
from wirecall.mcp.headers import Marks, marked
from wirecall.server.method import Method
from wirecall.transports.child import Child, OnEnd, OnLine
from wirecall.transports.http_client import Auth, HttpClient
from wirecall.transports.reaper import Reaper

Trust: TypeAlias = Literal["none", "hints", "full"]
# What may be done with a call of a tool: "once" is a command, "again" may be sent a second time.
Use: TypeAlias = Literal["once", "again"]

REAL: Clock = RealClock()

# Seconds before a child that has ended is started again, at first and at most.
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 30.0
# Starts of a child in one minute. A child that lives for a minute is a good start.
STARTS = 5
MINUTE = 60.0
# Children that may be started for several sessions before the first of them is greeted.
AT_ONCE = 16
# Seconds after which another attempt to make a link does not begin.
LINK_TIME = 10.0
# Attempts to make a link, and the longest pause between two of them.
ATTEMPTS = 3
ATTEMPT_PAUSE = 1.0
# Links in a row that fail before the breaker opens, and the seconds until it lets one pass.
FAILURES = 5
REST = 10.0
# Calls of one upstream in flight, and those that wait for a place.
IN_FLIGHT = 32
QUEUE = 128
# Bytes of one message from an upstream.
MAX_BYTES = 16 << 20
# Seconds: an idle connection that is older is not used for a call. Many servers close it after 5.
IDLE = 4.0
# Seconds of one call, also after its caller has left.
TIMEOUT = 3600.0
# Names of tools for which it is known whether clients get them.
MOST_NAMES = 10_000


class Origin(Struct, frozen=True, kw_only=True):
    """How one server is reached, and the rules for its calls."""

    name: str
    # The command line of a child, or the address of a server over HTTP.
    command: Sequence[str] = ()
    url: str = ""
    # Added to our own environment.
    env: dict[str, str] = {}
    cwd: str | None = None
    headers: dict[str, str] = {}
    # Returns the credentials for the address.
    auth: Callable[[str], Auth | None] | None = None
    # Of the target; "": made from it.
    digest: str = ""
    trust: Trust = "hints"
    timeout: float = TIMEOUT
    resend_after: float | Literal["off"] = 2.0
    in_flight: int = IN_FLIGHT
    # Whether clients get a tool.
    allows: Callable[[str], bool] = lambda _tool: True
    # Tools whose kind does not follow from their hints.
    kinds: dict[str, Literal["query", "command"]] = {}
    # Tools whose rule about keys is not "auto".
    keys: dict[str, Literal["auto", "required", "off"]] = {}
    # Returns the same with the values of its references. None: it has them.
    read: "Callable[[], Origin] | None" = None

    @property
    def label(self) -> str:
        """The name with a digest of the target: a name that points elsewhere has other records."""
        if self.digest:
            return f"{self.name}.{self.digest}"
        target = self.url or "\0".join(self.command)
        return f"{self.name}.{sha256(target.encode(errors='surrogatepass')).hexdigest()[:6]}"


# --- whether it may be reached --------------------------------------------------------------------


class Starts:
    """Decides when a child may be started again."""

    def __init__(self, clock: Clock = REAL) -> None:
        self._clock = clock
        # The starts of the last minute that count towards the limit.
        self._times: deque[float] = deque()
        self._last: float | None = None
        # Starts in a row after which the child did not live for a minute.
        self._short = 0
        # How often it was started in all, and when it last was, by the system's clock.
        self.count = 0
        self.at = 0.0
        # How it last ended.
        self.reason = ""
        # The child that was started last.
        self.newest: Child | None = None
        # Children that run and were not welcomed yet, the oldest first. Their starts do not count:
        # many sessions may begin at once.
        self.fresh: list[Child] = []

    def pause(self) -> float:
        """Return the seconds until the next start may be made."""
        now = self._clock.time()
        while self._times and self._times[0] <= now - MINUTE:
            self._times.popleft()
        if self._last is None or self._last <= now - MINUTE:
            self._short = 0
            return 0.0
        fresh = min(len(self.fresh), AT_ONCE)
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (self._short - fresh - 1))
        wait = self._last + pause - now
        if len(self._times) - fresh >= STARTS:
            wait = max(wait, self._times[0] + MINUTE - now)
        return max(0.0, wait)

    async def turn(self) -> None:
        """Wait until the child may be started, and count the start.

        Raises `NotSent` if that takes too long for a call.
        """
        pause = self.pause()
        if pause > LINK_TIME:
            raise NotSent(
                f"the server process was started {len(self._times)} times within a minute, "
                f"and may be started again in {pause:.0f} s; {self.reason}"
            )
        if pause > 0:
            await self._clock.sleep(pause)
        self._last = self._clock.time()
        self._times.append(self._last)
        self._short += 1
        self.count += 1
        self.at = time.time()

    def forgive(self) -> None:
        """Forget the starts before an end that the gateway itself has made."""
        self._times.clear()
        self._last = None

    def welcome(self) -> None:
        """Do not count the last start: its child is the first of a conversation, and was greeted."""
        if self.fresh:
            self.fresh.pop(0)
        if self._times:
            self._times.pop()
            self._short = max(1, self._short - 1)


class PacedChild:
    """A child process that waits for its turn before it starts."""

    def __init__(self, child: Child, starts: Starts, running: list[Child]) -> None:
        self.child = child
        self._starts = starts
        self._running = running
        self.write = child.write

    async def open(self, on_line: OnLine, on_end: OnEnd) -> None:
        await self._starts.turn()
        self._running.append(self.child)
        self._starts.newest = self.child
        self._starts.fresh.append(self.child)

        def ended(error: CallFailed) -> None:
            self._forget()
            self._starts.reason = str(error)
            on_end(error)

        try:
            await self.child.open(on_line, ended)
        except BaseException as error:
            self._forget()
            if isinstance(error, NotSent):
                self._starts.reason = str(error)
            raise

    async def aclose(self) -> None:
        await self.child.aclose()
        self._forget()

    def _forget(self) -> None:
        for children in (self._running, self._starts.fresh):
            if self.child in children:
                children.remove(self.child)


class Breaker:
    """Stops attempts to make a link after several failures in a row."""

    def __init__(self, clock: Clock = REAL) -> None:
        self._clock = clock
        self._failures = 0
        self._opened = 0.0
        # Why the last link failed.
        self.reason = ""

    @property
    def is_open(self) -> bool:
        """Return whether no link may be tried now."""
        return self.left > 0

    @property
    def left(self) -> float:
        """The seconds until a link may be tried; 0 if it may be now."""
        if self._failures < FAILURES:
            return 0.0
        return max(0.0, self._opened + REST - self._clock.time())

    def succeeded(self) -> None:
        self._failures = 0
        self.reason = ""

    def failed(self, reason: str) -> None:
        self._failures += 1
        self._opened = self._clock.time()
        self.reason = reason


class Places:
    """The calls of one upstream in flight, and those that wait for a place."""

    def __init__(self, most: int) -> None:
        self._free = asyncio.Semaphore(most)
        self._most = most
        self.taken = 0
        self.waiting = 0

    @asynccontextmanager
    async def one(self) -> "AsyncIterator[Slot]":
        """Hold a place in the block. Raises `NotSent` if too many calls wait for one."""
        await self.take()
        slot = Slot(self)
        try:
            yield slot
        finally:
            if slot.is_held:
                self.give_back()

    async def take(self) -> None:
        """Wait for a place. `give_back` must follow."""
        if self.waiting >= QUEUE:
            raise NotSent(f"{self._most} calls are in flight and {QUEUE} wait for a place")
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self.taken += 1

    def give_back(self) -> None:
        """Free a place."""
        self.taken -= 1
        self._free.release()


class Slot:
    """The place of one call, which is free for others while the call waits for its client."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self.is_held = True

    @asynccontextmanager
    async def aside(self) -> AsyncIterator[None]:
        """Give the place up in the block. Raises `NotSent` if there is none after it."""
        self._places.give_back()
        self.is_held = False
        yield
        await self._places.take()
        self.is_held = True


# --- its tools ------------------------------------------------------------------------------------


class Hints(Struct, rename="camel"):
    """The annotations of a tool that matter here. An untrusted server may send anything."""

    read_only_hint: Any = False
    idempotent_hint: Any = False


class ToolEntry(Struct, rename="camel"):
    """The members of a tool's definition that matter here."""

    name: str
    annotations: Hints | None = None
    input_schema: Raw = Raw(b"{}")


class _Tools(Struct, rename="camel"):
    tools: list[ToolEntry]
    next_cursor: str | None = None


class _Named(Struct):
    name: str


_decode_name = msgspec.json.Decoder(_Named).decode
decode_tools = msgspec.json.Decoder(_Tools).decode


# --- the server -----------------------------------------------------------------------------------


def _unread(error: NotSent) -> Pipe:
    """Fail to make a pipe: the address of the server is not known."""
    raise error


class Upstream:
    """One server behind the gateway."""

    def __init__(
        self, origin: Origin, *, reaper: Reaper | None = None, clock: Clock = REAL
    ) -> None:
        self.origin = origin
        self.name = origin.name
        self.starts = Starts(clock)
        self.breaker = Breaker(clock)
        self.places = Places(origin.in_flight)
        # The time limits of its calls.
        self.timeouts = Timeouts()
        # The tools that lists have named, by name. None: no list was read since the last change.
        self.tools: dict[str, ToolEntry] | None = None
        self.clock = clock
        self._reaper = reaper
        # Since when it has answered or failed, by the system's clock.
        self.since = time.time()
        self.is_up = False
        # A request over HTTP could not be sent, and none was answered since.
        self.is_cut = False
        # The ids of the extensions that it has declared.
        self.extensions: frozenset[str] = frozenset()
        # The names of its tools that clients do not get.
        self.denied: set[str] = set()
        # The methods of its tools that are commands, by name.
        self.methods: dict[str, Method] = {}
        # Those of its tools that only read, if middleware sees their calls.
        self.queries: dict[str, Method] = {}
        # Whether clients get a tool, by name: patterns take longer than the rest of a call.
        self._allowed: dict[str, bool] = {}
        # The arguments of a tool that headers repeat, by name, with the definition they are from.
        self._marks: dict[str, tuple[ToolEntry, Marks]] = {}
        # The children that run, the last one last.
        self.children: list[Child] = []

    def link(self) -> McpLink:
        """Return a new link to the server. Nothing is opened yet."""
        if self.origin.command:
            return RelayLineLink(self._child, MAX_BYTES)
        try:
            return self._web_link()
        except NotSent as error:
            return RelayLineLink(partial(_unread, error), MAX_BYTES)  # it fails when it is opened

    def _web_link(self) -> McpLink:
        """Return a link over HTTP. Raises `NotSent` if its address is unknown or wrong."""
        origin = self._read()
        auth: Auth | None = None
        if origin.auth is not None:
            auth = origin.auth(origin.url)
        http = partial(
            HttpClient, headers=origin.headers, max_bytes=MAX_BYTES, auth=auth, idle=IDLE
        )
        older = partial(RelayLineLink, partial(SsePipe, origin.url, http), MAX_BYTES)
        try:
            client = http(origin.url)
        except UsageError:
            # Its own words show the value of the reference, which may be secret.
            raise NotSent(f"{self.origin.url} is not an address of HTTP") from None
        return McpHttpLink(client, older, self.clock)

    def _read(self) -> Origin:
        """Return how the server is reached now. Raises `NotSent` if a reference has no value."""
        if self.origin.read is None:
            return self.origin
        try:
            return self.origin.read()
        except UsageError as error:
            lines = [line.strip().removesuffix(".") for line in str(error).splitlines()]
            raise NotSent("; ".join(lines)) from None

    def _child(self) -> Pipe:
        origin = self._read()
        child = Child(
            origin.command,
            env=origin.env,
            cwd=origin.cwd,
            max_bytes=MAX_BYTES,
            reaper=self._reaper,
        )
        return PacedChild(child, self.starts, self.children)

    def check(self) -> None:
        """Raise `UpstreamUnavailable` if no link may be tried now."""
        if self.breaker.is_open:
            raise self.unavailable(f"it was not tried again yet: {self.breaker.reason}")

    async def reach(
        self, make: Callable[[], Awaitable[object]], *, is_greeted: bool = True
    ) -> None:
        """Make a link, with further attempts; raise `UpstreamUnavailable` if that fails.

        If its server is not greeted yet, `rose` or `fell` must follow.
        """
        self.check()
        deadline = self.clock.time() + LINK_TIME
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with asyncio.timeout(START_TIME):
                    await make()
                if is_greeted:
                    self.rose()
                return
            except (CallFailed, TimeoutError) as error:
                reason = str(error) or f"it did not answer within {START_TIME:g} s"
                pause = random.uniform(0, ATTEMPT_PAUSE)
                is_last = attempt == ATTEMPTS or self.clock.time() + pause > deadline
                if is_last or isinstance(error, TimeoutError):
                    self.breaker.failed(reason)
                    self._note(is_up=False)
                    raise self.unavailable(reason) from error
            await self.clock.sleep(pause)

    def _note(self, *, is_up: bool) -> None:
        """Note whether the last link was made."""
        if is_up:
            self.breaker.succeeded()
        if is_up is not self.is_up:
            self.is_up = is_up
            self.since = time.time()

    def rose(self) -> None:
        """Note that a link was made, or that a request was answered."""
        self.is_cut = False
        self._note(is_up=True)

    def cut(self) -> None:
        """Note that a request over HTTP could not be sent: the next one needs a link first."""
        self.is_cut = True
        self._note(is_up=False)

    def fell(self, reason: str) -> None:
        """Note that a link was made, and no conversation."""
        self.breaker.failed(reason)
        self._note(is_up=False)

    def unavailable(self, reason: str) -> UpstreamUnavailable:
        """Return the error for a call that was not sent."""
        return UpstreamUnavailable(f"{self.name}: {reason}", upstream=self.name, ran="no")

    # --- its tools --------------------------------------------------------------------------------

    def learn(self, page: Raw, *, is_first: bool) -> str | None:
        """Take the tools of a page of a list; return the cursor of the next page."""
        try:
            found = decode_tools(page)
        except msgspec.DecodeError:
            return None  # the client gets the list as it is
        if is_first or self.tools is None:
            self.tools = {}
        self.tools.update({tool.name: tool for tool in found.tools})
        return found.next_cursor

    def use_of(self, name: str) -> Use:
        """Return whether a call of a tool is a command, or may be sent again."""
        stated = self.origin.kinds.get(name)
        if stated is not None:
            return "once" if stated == "command" else "again"
        tool = None
        if self.tools is not None:
            tool = self.tools.get(name)
        if tool is None or tool.annotations is None or self.origin.trust == "none":
            return "once"
        if tool.annotations.read_only_hint is True:
            return "again"
        if self.origin.trust == "full" and tool.annotations.idempotent_hint is True:
            return "again"
        return "once"

    def marks(self, tool: str) -> Marks:
        """Return the arguments of a tool that headers repeat."""
        entry = None
        if self.tools is not None:
            entry = self.tools.get(tool)
        if entry is None:
            return {}
        known = self._marks.get(tool)
        if known is None or known[0] is not entry:
            try:
                found = marked(msgspec.json.decode(entry.input_schema))
            except msgspec.DecodeError:
                found = {}
            known = self._marks[tool] = (entry, found)
        return known[1]

    def allows(self, tool: str) -> bool:
        """Return whether clients get a tool."""
        known = self._allowed.get(tool)
        if known is None:
            if len(self._allowed) >= MOST_NAMES:
                self._allowed.clear()
            known = self._allowed[tool] = self.origin.allows(tool)
        return known

    def allowed(self, tools: Sequence[Raw]) -> list[Raw]:
        """Return the definitions of the tools that clients get."""
        kept: list[Raw] = []
        for tool in tools:
            try:
                name = _decode_name(tool).name
            except msgspec.DecodeError:
                continue
            if self.allows(name):
                kept.append(tool)
            else:
                self.denied.add(name)
        return kept

    def lost(self, error: CallFailed) -> str:
        """Return why the answer of a call was lost."""
        if isinstance(error, ConnectionLost):
            return f"the connection ended before the answer: {error}"
        return str(error)

"""A client of the gateway on stdin and stdout, in front of one server: `wirecall wrap`.

    first request of the client     the server has its era    it has the other one
    initialize                      it is passed on           the server refuses it, and discovers
    server/discover                 it is passed on           the server refuses it
    another one, with an envelope   it discovers              it refuses

Client and server of one era meet in a `Relay`. In front of a server of the other era the client gets
a gateway with one upstream, whose conversations are the client's own (`PipeFront._cross`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, structs

from wirecall.app import App
from wirecall.errors import CallFailed, RpcError, UpstreamUnavailable
from wirecall.gateway.relay import Relay, Send, decode_called
from wirecall.gateway.session import DISCOVER, UpstreamSession, is_newest
from wirecall.gateway.upstream import MAX_BYTES, Origin, Upstream
from wirecall.jsonrpc import make_batch
from wirecall.limits import Limits
from wirecall.mcp.server import messages
from wirecall.mcp.server.messages import Answers, ClientAnswer, Incoming
from wirecall.protocol.messages import Envelope, Invalid
from wirecall.protocol.receipt import Receipt
from wirecall.protocol.sender import Sender
from wirecall.server.batch import run_batch
from wirecall.transports.reaper import Reaper

if TYPE_CHECKING:
    from wirecall.gateway.gateway import Gateway
    from wirecall.mcp.server.lines import StdioConnection

MakeGateway: TypeAlias = "Callable[[str], Awaitable[StdioConnection]]"
Answer: TypeAlias = "bytes | Coroutine[Any, Any, bytes | None] | None"

# The gateway takes what the server behind it takes.
LIMITS = Limits(bytes_in=MAX_BYTES, bytes_out=MAX_BYTES + (1 << 20), depth=256)


class _Answer(Struct):
    """The member of an answer that matters here."""

    result: Raw | UnsetType = UNSET


_decode_answer = msgspec.json.Decoder(_Answer).decode


class PipeFront:
    """One client at the other end of a pipe, in front of one server."""

    def __init__(
        self, relay: Relay, answers: Answers, limits: Limits, link: str, gateway: MakeGateway
    ) -> None:
        self._relay = relay
        # Makes what serves a client of another era.
        self._gateway = gateway
        # The server has the era of the client.
        self._is_met = False
        # The client has sent `initialize`.
        self._has_greeted = False
        # What serves the client, if the server has another era.
        self._crossing: asyncio.Task[StdioConnection] | None = None
        self._failure = answers.failure
        self._limits = limits
        # The name of the client at the other end of the pipe.
        self._link = link

    def handle(self, line: bytes, receipt: Receipt) -> Answer:
        """Return the answer to one line, or a coroutine that returns it."""
        if self._crossing is not None:
            return self._across(self._crossing, line, receipt)
        message = messages.read(line, self._limits)
        sender = Sender(link=self._link, receipt=receipt)
        if isinstance(message, Envelope) and message.id is not UNSET:
            if self._is_met:
                return self._relay.answer(message, sender)
            return self._meet(line, message, sender, receipt)
        if isinstance(message, list):
            try:
                entries = messages.admitted(message, self._relay.revision)
            except RpcError as error:
                return self._failure(None, error, self._relay.revision)
            return self._answer_array(entries, sender)
        if isinstance(message, Invalid):
            return self._failure(message.id, message.error, self._relay.revision)
        return self._take(message)

    # --- the first requests -----------------------------------------------------------------------

    async def _meet(
        self, line: bytes, message: Envelope, sender: Sender, receipt: Receipt
    ) -> bytes | None:
        """Answer a request of a client whose era the server may not have."""
        is_greeting = message.method == "initialize"
        if not is_greeting and not messages.has_envelope(message):
            return await self._relay.answer(message, sender)
        answer: bytes | None = None
        if is_greeting or message.method == DISCOVER:
            self._has_greeted = self._has_greeted or is_greeting
            answer = await self._relay.answer(message, sender)
            self._is_met = self._relay.revision is not None or _is_described(answer)
            # A client that has also sent `initialize` continues with that.
            if self._is_met or answer is None or self._has_greeted is not is_greeting:
                return answer
            if self._relay.session.is_mute:
                return answer  # the client does not wait for another greeting
        try:
            is_new = await self._relay.session.discovers()
        except (CallFailed, UpstreamUnavailable):
            return answer or await self._relay.answer(message, sender)
        # The client may also have sent its other greeting by now, or got its answer.
        is_decided = self._is_met or self._has_greeted is not is_greeting
        if is_new is not is_greeting or is_decided:
            self._is_met = self._is_met or (is_new and not is_greeting)
            return answer or await self._relay.answer(message, sender)
        if self._crossing is None:
            self._crossing = asyncio.create_task(self._cross())
        return await self._across(self._crossing, line, receipt)

    async def _cross(self) -> "StdioConnection":
        """Return what serves the client instead: a gateway in front of the server."""
        await self._relay.session.aclose()
        return await self._gateway(self._link)

    async def _across(
        self, crossing: "asyncio.Task[StdioConnection]", line: bytes, receipt: Receipt
    ) -> bytes | None:
        """Return the answer to a line of a client of another era."""
        connection = await asyncio.shield(crossing)
        answer = connection.handle(line, receipt)
        if answer is None or isinstance(answer, bytes):
            return answer
        return await answer

    # --- any request ------------------------------------------------------------------------------

    async def _take(self, message: Envelope | ClientAnswer) -> None:
        """Take a message that has no answer."""
        if isinstance(message, ClientAnswer):
            await self._relay.answered(message)
        else:
            await self._relay.take(message)

    async def _answer_array(self, entries: list[Incoming], sender: Sender) -> bytes | None:
        """Answer the messages of an array (2025-03-26): each takes all steps of a call."""

        async def begin(_: object, entry: Incoming, _position: int) -> bytes | None:
            if isinstance(entry, Invalid):
                return self._failure(entry.id, entry.error, self._relay.revision)
            if isinstance(entry, ClientAnswer) or entry.id is UNSET:
                await self._take(entry)
                return None
            return await self._relay.answer(entry, sender)

        answers: list[bytes | None] = await run_batch(
            None, entries, begin, self._is_command, concurrency=self._limits.concurrency
        )
        owed = [answer for answer in answers if answer is not None]
        if not owed:
            return None
        return make_batch(owed)

    def _is_command(self, entry: Incoming) -> bool:
        """Return whether an entry changes something: commands run in array order."""
        if not isinstance(entry, Envelope) or entry.method != "tools/call":
            return False
        try:
            name = decode_called(b"{}" if entry.params is UNSET else entry.params).name
        except msgspec.DecodeError:
            return False
        return self._relay.upstream.use_of(name) == "once"

    @property
    def _connection(self) -> "StdioConnection | None":
        """What serves a client of another era."""
        crossing = self._crossing
        if crossing is None or not crossing.done() or crossing.cancelled() or crossing.exception():
            return None
        return crossing.result()

    def ending(self) -> None:
        """End streams and open questions. Commands that run are awaited."""
        if self._connection is not None:
            self._connection.ending()

    async def aclose(self) -> None:
        """Stop sending changes. The server is ended after the commands that run (`Wrap.aclose`)."""
        if self._connection is not None:
            await self._connection.aclose()


def _is_described(answer: bytes | None) -> bool:
    """Return whether an answer to `server/discover` comes from a server of 2026-07-28."""
    if answer is None:
        return False
    result = _decode_answer(answer).result
    return result is not UNSET and is_newest(result)


class Wrap:
    """One server on stdin and stdout, with a ledger in front of it."""

    def __init__(self, origin: Origin, *, ledger: str) -> None:
        self.app = App(
            origin.name, ledger=ledger, mode="production", single_user=False, limits=LIMITS
        )
        self._origin = origin
        self._answers = Answers({"name": origin.name, "version": "0"}, LIMITS.bytes_out)
        self._reaper: Reaper | None = None
        self._relay: Relay | None = None
        # Serves a client of another era.
        self._gateway: Gateway | None = None

    def connect(self, send: Send, link: str) -> PipeFront:
        """Return the connection of the client. Called in the event loop."""
        self._reaper = Reaper()
        upstream = Upstream(self._origin, reaper=self._reaper)
        session = UpstreamSession(upstream)
        self._relay = Relay(session, self.app._serving, self._answers, send)
        self._relay.own()
        return PipeFront(self._relay, self._answers, LIMITS, link, partial(self._across, send))

    async def _across(self, send: Send, link: str) -> "StdioConnection":
        """Return the connection of a client of another era."""
        # Late: most clients do not need them.
        from wirecall.gateway.gateway import Gateway
        from wirecall.gateway.settings import GatewaySettings, UpstreamSettings
        from wirecall.gateway.wraps import plain_name

        origin = structs.replace(self._origin, name=plain_name(self._origin.name))
        target: dict[str, Any] = {"url": origin.url}
        if origin.command:
            target = {"command": origin.command}
        settings = GatewaySettings(
            [UpstreamSettings(origin.name, **target)],
            ledger=self.app.ledger_url,
            single_user=False,
            limits=LIMITS,
        )
        self._gateway = Gateway(settings, origins={origin.name: origin}, has_one_client=True)
        await self._gateway._enter()
        return self._gateway.connection_to(origin.name, send, link)

    async def aclose(self, grace: float) -> None:
        """Finish the commands that run, record them, and end the server."""
        try:
            if self._gateway is not None:
                await self._gateway.aclose(grace)
            await self.app.aclose(grace)
        finally:
            if self._relay is not None:
                await self._relay.aclose()
            if self._reaper is not None:
                await self._reaper.aclose()

    def run(self, grace: float) -> None:
        """Serve until the end of stdin, or a signal."""
        from wirecall.transports import stdio
        from wirecall.transports.pipe_name import pipe_name
        from wirecall.transports.serve import new_loop

        link = pipe_name(0, self._origin.label, self.app.ledger_url)
        stdio.serve(
            lambda send: self.connect(send, link),
            grace=grace,
            startup=self.app._enter,
            cleanup=self.aclose,
            limits=LIMITS,
            loop_factory=new_loop,
        )

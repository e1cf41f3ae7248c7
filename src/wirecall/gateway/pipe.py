"""A client of the gateway on stdin and stdout, in front of one server: `wirecall wrap`."""

from collections.abc import Coroutine
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET

from wirecall.app import App
from wirecall.errors import RpcError
from wirecall.gateway.relay import Relay, Send, decode_called
from wirecall.gateway.session import UpstreamSession
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

Answer: TypeAlias = "bytes | Coroutine[Any, Any, bytes | None] | None"

# The gateway takes what the server behind it takes.
LIMITS = Limits(bytes_in=MAX_BYTES, bytes_out=MAX_BYTES + (1 << 20), depth=256)


class PipeFront:
    """One client at the other end of a pipe, in front of one server."""

    def __init__(self, relay: Relay, answers: Answers, limits: Limits, link: str) -> None:
        self._relay = relay
        self._failure = answers.failure
        self._limits = limits
        # The name of the client at the other end of the pipe.
        self._link = link

    def handle(self, line: bytes, receipt: Receipt) -> Answer:
        """Return the answer to one line, or a coroutine that returns it."""
        message = messages.read(line, self._limits)
        sender = Sender(link=self._link, receipt=receipt)
        if isinstance(message, Envelope) and message.id is not UNSET:
            return self._relay.answer(message, sender)
        if isinstance(message, list):
            try:
                entries = messages.admitted(message, self._relay.revision)
            except RpcError as error:
                return self._failure(None, error, self._relay.revision)
            return self._answer_array(entries, sender)
        if isinstance(message, Invalid):
            return self._failure(message.id, message.error, self._relay.revision)
        return self._take(message)

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

    def ending(self) -> None:
        """Do nothing: commands that run are awaited."""

    async def aclose(self) -> None:
        """Do nothing: the server is ended after the commands that run (`Wrap.aclose`)."""


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

    def connect(self, send: Send, link: str) -> PipeFront:
        """Return the connection of the client. Called in the event loop."""
        self._reaper = Reaper()
        upstream = Upstream(self._origin, reaper=self._reaper)
        session = UpstreamSession(upstream)
        self._relay = Relay(session, self.app._serving, self._answers, send)
        self._relay.own()
        return PipeFront(self._relay, self._answers, LIMITS, link)

    async def aclose(self, grace: float) -> None:
        """Finish the commands that run, record them, and end the server."""
        try:
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

"""One call that is passed on, and what its end means: the failure table.

    observed                                       query                 command
    no link, breaker open, queue full              50210                 50210, ran: "no", released
    refused without a run (HTTP 3xx, 4xx)          50210                 50210, ran: "no", released
    -32700, -32600, -32601, -32602, -3202x         passed on             passed on, released
    an error whose data say ran: "no"              passed on             passed on, released
    another error, or a result with isError        passed on             passed on, recorded
    the write began, then no valid answer came     sent a second time      50910, unknown, with the reason

1. A command is claimed first, then the link is made, then its first byte is written. The provider
   of `Place` makes the link: until it returns, the run has done nothing, and a failure or a caller
   that leaves releases the record.
2. The answer is awaited for `timeout`, also if the caller has left.
3. Questions of a server (`input_required`) are not an outcome: the record is released, since the
   server has done nothing yet.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from msgspec import Raw, Struct, UnsetType

from wirecall.errors import (
    CallFailed,
    InvalidRequest,
    OutcomeUnknown,
    ProtocolError,
    RpcError,
)
from wirecall.gateway.session import Report, Sent, UpstreamSession
from wirecall.gateway.upstream import Upstream
from wirecall.protocol.messages import Sound
from wirecall.server.context import Context
from wirecall.server.method import Kind, Method, Terms
from wirecall.server.providers import Provider, Providers

# Codes with which a server refuses a request before it runs.
REFUSED = frozenset({-32700, -32600, -32601, -32602, -32020, -32021, -32022})
# Seconds for which an answer is kept, and the bytes of the longest one.
RETENTION = 900.0
MOST_STORED = 4 << 20
# Seconds after which the record of a dead process is free.
LEASE = 10.0
FORWARD = "forward"

_INPUT_REQUIRED = b'"input_required"'


class _Typed(Struct, rename="camel"):
    result_type: str = "complete"


_decode_typed = msgspec.json.Decoder(_Typed).decode


class Interim(InvalidRequest):
    """A result that is not an outcome: the server asks its client before it acts."""

    def __init__(self, result: Raw) -> None:
        super().__init__(ran="no")
        self.result = result


class Declined(InvalidRequest):
    """The error of a server that has not run the call, in its own words."""

    def __init__(self, error: RpcError) -> None:
        super().__init__(ran="no")
        self.code = error.code
        self.message = error.message
        self.data = error.data
        self.ran = "no"


class Forward(Struct, eq=False):
    """One call that is passed on."""

    session: UpstreamSession
    params: Raw | UnsetType
    report: Report | None
    # The request, once it is sent.
    sent: Sent | None = None
    # The error of the server, in its own words.
    error: RpcError | None = None

    async def send(self) -> Raw:
        """Send the call once, and return its result."""
        return await self.session.ask(
            "tools/call", self.params, report=self.report, on_sent=self.note
        )

    def note(self, sent: Sent) -> None:
        """Remember the request, so that it can be cancelled."""
        self.sent = sent


class Place(Struct, frozen=True):
    """A place among the calls of an upstream, and a link that is made."""

    forward: Forward


def forwarded(upstream: Upstream, tool: str) -> Method:
    """Return the method of a tool that is a command: it passes the call on, once."""

    async def place(ctx: Context) -> AsyncIterator[Place]:
        forward: Forward = ctx.values[FORWARD]
        try:
            async with upstream.places.one():
                await forward.session.ready()
                yield Place(forward)
        except CallFailed as error:
            raise upstream.unavailable(str(error)) from error

    async def run(place: Place) -> Any:
        return Sound(await once(upstream, place.forward))

    providers = Providers()
    providers.add(Provider(place, blocking=False))
    terms = Terms(
        retention=RETENTION,
        lease=LEASE,
        wait=upstream.origin.timeout,
        resend_after=upstream.origin.resend_after,
        max_stored_result=MOST_STORED,
    )
    method = Method(
        run,
        Kind.COMMAND,
        name=tool,
        raw=True,
        record=f"{upstream.origin.label}/{tool}",
        key=upstream.origin.keys.get(tool, "auto"),
        terms=terms,
        expose=("mcp",),
        reserved=True,
        find=providers.find,
    )
    method.prepare(providers)
    return method


async def once(upstream: Upstream, forward: Forward) -> bytes:
    """Send a command once; return its result, or raise what its end means."""
    timeout = upstream.origin.timeout
    try:
        async with asyncio.timeout(timeout):
            result = await forward.send()
    except RpcError as error:
        forward.error = error
        raise _ended(error) from None
    except TimeoutError:
        raise _unknown(upstream, f"{upstream.name}: no answer within {timeout:g} s") from None
    except CallFailed as error:
        is_sent = forward.sent is not None and forward.sent.exchange.sent
        if error.ran == "no" or not is_sent:
            raise upstream.unavailable(str(error)) from error
        raise _unknown(upstream, upstream.lost(error)) from error
    if asks(result):
        raise Interim(result)
    return bytes(result)


def _ended(error: RpcError) -> RpcError:
    """Return another server's error as the end of a command: a refusal, or its answer."""
    # A server that keeps records itself says whether the call ran.
    says_no = isinstance(error.data, dict) and error.data.get("ran") == "no"
    if error.code in REFUSED or says_no:
        return Declined(error)
    answer = ProtocolError(error.code, error.message, error.data)
    answer.ran = "yes"
    return answer


def _unknown(upstream: Upstream, reason: str) -> OutcomeUnknown:
    return OutcomeUnknown(reason, upstream=upstream.name, ran="unknown")


def asks(result: Raw) -> bool:
    """Return whether a result is a question to the client."""
    if bytes(result).find(_INPUT_REQUIRED) < 0:
        return False
    try:
        return _decode_typed(result).result_type == "input_required"
    except msgspec.DecodeError:
        return False

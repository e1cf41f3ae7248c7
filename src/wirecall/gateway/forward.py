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
3. Questions of a server (`input_required`) are not an outcome: the server has done nothing yet. The
   record waits for the next round of its client. It is released in front of one client (`wrap`),
   and stays while an older client is asked inside its call (`rounds`).
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

from msgspec import Raw, Struct, UnsetType

from wirecall.errors import (
    CallFailed,
    InvalidRequest,
    OutcomeUnknown,
    ProtocolError,
    RpcError,
)
from wirecall.gateway import tasks
from wirecall.gateway.rounds import STATE, Bridge, Declined, Leg, about, asks, paused
from wirecall.gateway.session import Report, Sent, UpstreamSession
from wirecall.gateway.upstream import Slot, Upstream
from wirecall.mcp.revisions import Revision
from wirecall.protocol.messages import Sound
from wirecall.server.call import InputRequired, Passed
from wirecall.server.context import Context
from wirecall.server.method import Kind, Method, Terms
from wirecall.server.providers import Provider, Providers

if TYPE_CHECKING:
    from wirecall.mcp.server.sessions import Sealer

# Codes with which a server refuses a request before it runs.
REFUSED = frozenset({-32700, -32600, -32601, -32602, -32020, -32021, -32022})
# Seconds for which an answer is kept, and the bytes of the longest one.
RETENTION = 900.0
MOST_STORED = 4 << 20
# Seconds after which the record of a dead process is free.
LEASE = 10.0
FORWARD = "forward"
ASK = "ask"


class Interim(InvalidRequest):
    """A result that is not an outcome: the server asks its client before it acts."""

    def __init__(self, result: Raw) -> None:
        super().__init__(ran="no")
        self.result = result


class Forward(Struct, eq=False):
    """One request that is passed on."""

    session: UpstreamSession
    method: str
    params: Raw | UnsetType
    report: Report | None
    caller: str
    # Seals the states of a server whose clients are several. None: there is one client.
    sealer: "Sealer | None" = None
    # Asks a client of another era. None: the client gets the questions itself.
    bridge: Bridge | None = None
    # The client has not declared tasks.
    awaits_tasks: bool = False
    # The revision of the client, if it is known.
    client: Revision | None = None
    # The state of a further round, and what it says.
    follows: str | None = None
    leg: Leg | None = None
    # The place among the calls of the upstream.
    slot: Slot | None = None
    # The request, once it is sent.
    sent: Sent | None = None
    # The error of the server, in its own words.
    error: RpcError | None = None

    async def send(self) -> Raw:
        """Send the request, and the rounds that the client answers inside it; return the result.

        Raises `TimeoutError` if a round has no answer within the `timeout` of the upstream.
        """
        params = self.params
        upstream = self.session.upstream
        timeout = upstream.origin.timeout
        while True:
            asking = self.session.ask(self.method, params, report=self.report, on_sent=self.note)
            with upstream.timeouts.within(timeout):
                result = await asking
            if self.bridge is not None and asks(result):
                assert self.slot is not None
                async with self.slot.aside():
                    params = await self.bridge.next_round(params, result)
                continue
            if self.awaits_tasks and tasks.is_task(result):
                async with asyncio.timeout(timeout):
                    return await tasks.outcome(self.session, result, params, self.report)
            return result

    def passed(self) -> Passed:
        """Return what a tap shows of it."""
        origin = self.session.upstream.origin
        server = self.session.revision
        passed = Passed(origin.name, has_token=self.report is not None)
        if self.sent is not None:
            passed.id = self.sent.id
            passed.has_headers = self.session.repeats_the_body
        if self.client is not None:
            passed.client_revision = self.client.name
        if server is not None:
            passed.revision = server.name
        if self.client is not None and server is not None:
            passed.crosses = self.client.is_stateless is not server.is_stateless
        return passed

    def note(self, sent: Sent) -> None:
        """Remember the request, so that it can be cancelled."""
        self.sent = sent

    def task(self, result: Raw) -> Raw:
        """Return a result as its client gets it: the id of a task is sealed."""
        if self.sealer is None or not tasks.is_task(result):
            return result
        return tasks.sealed(self.sealer, self.caller, self.session.upstream.origin.label, result)

    def questions(self, result: Raw, *, key: str | None = None, has_record: bool = False) -> bytes:
        """Return the questions of the server as its client gets them."""
        if self.sealer is None:
            return bytes(result)
        leg = Leg(about(self.session.upstream.origin.label, self.method, self.params), key)
        leg.has_record = has_record
        # The record judges the age of a state. Without one, the state must not outlive the record
        # that the next round makes.
        lifetime = STATE
        if key is not None and not has_record:
            lifetime = RETENTION
        return paused(self.sealer, self.caller, leg, result, lifetime)


class Place(Struct, frozen=True):
    """A place among the calls of an upstream, and a link that is made."""

    forward: Forward
    # The key of the command, stated or made. None: it has no record.
    key: str | None


def forwarded(upstream: Upstream, tool: str) -> Method:
    """Return the method of a tool that is a command: it passes the call on, once."""

    async def place(ctx: Context) -> AsyncIterator[Place]:
        forward: Forward = ctx.values[FORWARD]
        try:
            async with upstream.places.one() as forward.slot:
                await forward.session.ready()
                yield Place(forward, ctx.idempotency_key)
        except CallFailed as error:
            raise upstream.unavailable(str(error)) from error

    async def run(place: Place) -> Any:
        return Sound(await once(upstream, place.forward, place.key))

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
        # A server without hints has commands only, and must not stay unusable after a crash.
        repeats_unknown=False,
        find=providers.find,
    )
    method.prepare(providers)
    return method


def guarded(upstream: Upstream, tool: str) -> Method:
    """Return the method of a tool that only reads: middleware sees its calls."""

    async def run(ctx: Context) -> Any:
        ask: Callable[[], Awaitable[Raw]] = ctx.values[ASK]
        return Sound(bytes(await ask()))

    return Method(
        run,
        Kind.QUERY,
        name=tool,
        raw=True,
        record=f"{upstream.origin.label}/{tool}",
        expose=("mcp",),
        reserved=True,
    )


async def once(upstream: Upstream, forward: Forward, key: str | None) -> bytes:
    """Send a command once; return its result, or raise what its end means."""
    timeout = upstream.origin.timeout
    try:
        result = forward.task(await forward.send())
    except Declined:
        raise
    except RpcError as error:
        forward.error = error
        raise _ended(error) from None
    except TimeoutError:
        raise _unknown(upstream, f"no answer within {timeout:g} s") from None
    except CallFailed as error:
        is_sent = forward.sent is not None and forward.sent.exchange.sent
        if error.ran == "no" or not is_sent:
            raise upstream.unavailable(str(error)) from error
        raise _unknown(upstream, upstream.lost(error)) from error
    if not asks(result):
        return bytes(result)
    if forward.sealer is None:
        raise Interim(result)
    # Without a record, the rounds have a key from now on: one state leads to one round.
    questions = forward.questions(
        result, key=key or os.urandom(16).hex(), has_record=key is not None
    )
    raise InputRequired(questions)


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
    return OutcomeUnknown(f"{upstream.name}: {reason}", upstream=upstream.name, ran="unknown")

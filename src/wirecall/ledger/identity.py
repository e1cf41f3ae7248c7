"""The identity of a store, what processes doubt about it, and its acceptance by an operator.

Both are marks, so they are in the store, and all processes find them:

    identity    name and epoch of the store. The name is random and made with it; the epoch grows
                with every acceptance. It also names the stores that the operator has given up.
    doubts      one for each process that refuses commands: what it expected, what it met, and the
                commands that it had acknowledged and the store has no record of. A doubt counts
                for the epoch in which it arose, so an acceptance ends all of them.
"""

import time
from collections.abc import Iterable
from os import urandom
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct

from wirecall.ledger.base import (
    IDENTITY,
    IDENTITY_CHANNEL,
    MARKS_WITHIN,
    Claim,
    Ledger,
    LedgerDown,
    Mark,
    RecordId,
    State,
)

DOUBTS_CHANNEL = "wirecall.doubts"
# Seconds: a mark of an identity is kept for longer than any store.
FOREVER = 100 * 365 * 86_400.0
# Seconds that a lost command is kept once it was resolved.
RETENTION = 86_400.0

# empty: the store has no identity. other: it has another one. older: it was accepted less often, or
# has given fewer fences, than before. lost: it has no record of commands that were acknowledged.
# reported: another process has one of these doubts.
DoubtKind = Literal["empty", "other", "older", "lost", "reported"]


class Identity(Struct, frozen=True):
    """What a store is, since its last acceptance."""

    name: str
    # 0: it was never accepted. Otherwise about the second of its acceptance.
    epoch: int = 0
    # Identities of stores that it has replaced, by the word of an operator.
    replaces: tuple[str, ...] = ()
    accepted_by: str = ""
    reason: str = ""

    def follows(self, known: "Identity") -> bool:
        """Return whether an operator has accepted this store since a process knew another state."""
        if self.name == known.name:
            return self.epoch > known.epoch
        return known.name in self.replaces


class Lost(Struct, frozen=True):
    """A command that was acknowledged, and that the store does not have as done."""

    id: RecordId
    fingerprint: bytes


class Doubt(Struct, frozen=True):
    """Why a process refuses commands."""

    kind: DoubtKind
    # For people: what was expected, and what was found.
    expected: str
    found: str
    # The identity that the process knew.
    known: str
    # The store that it met, and its epoch.
    store: str = ""
    epoch: int = 0
    lost: tuple[Lost, ...] = ()
    # Host and process.
    process: str = ""

    def is_about(self, identity: Identity | None) -> bool:
        """Return whether the doubt is about this store, and still open."""
        if identity is None:
            return self.store == ""
        return self.store in ("", identity.name) and self.epoch == identity.epoch


_identities = msgspec.json.Decoder(Identity)
_doubts = msgspec.json.Decoder(Doubt)
T = TypeVar("T")


def new_identity() -> bytes:
    """Return the content of the identity mark of a new store."""
    return msgspec.json.encode(Identity(urandom(8).hex()))


def identity_of(content: bytes | None) -> Identity | None:
    """Return the identity that a mark holds."""
    if content is None:
        return None
    return _decoded(_identities, content)


def _decoded(decoder: msgspec.json.Decoder[T], content: bytes) -> T:
    """Return what a mark says. As long as that cannot be read, no command may run."""
    try:
        return decoder.decode(content)
    except msgspec.DecodeError as error:
        raise LedgerDown(
            f"what the ledger says about itself cannot be read ({error}): perhaps a newer wirecall "
            "has written it; upgrade this one"
        ) from error


async def report(ledger: Ledger, name: str, doubt: Doubt) -> None:
    """Write the doubt of a process into the store."""
    await ledger.mark(DOUBTS_CHANNEL, Mark(name, msgspec.json.encode(doubt)), MARKS_WITHIN)


async def doubts(ledger: Ledger, identity: Identity | None) -> dict[str, Doubt]:
    """Return the open doubts about a store, by the names of their marks."""
    marks = await ledger.marks(DOUBTS_CHANNEL, MARKS_WITHIN)
    found = {mark.name: _decoded(_doubts, mark.content) for mark in marks}
    return {name: doubt for name, doubt in found.items() if doubt.is_about(identity)}


def all_lost(found: Iterable[Doubt]) -> list[Lost]:
    """Return the lost commands of all doubts, each once and in order."""
    lost = {each.id: each for doubt in found for each in doubt.lost}
    return [lost[id] for id in sorted(lost)]


async def put_back(ledger: Ledger, lost: Iterable[Lost]) -> None:
    """Record lost commands as unknown, so that no retry runs them. A newer record stays."""
    for each in lost:
        claim = Claim(
            id=each.id,
            fingerprint=each.fingerprint,
            nonce=urandom(16),
            lease=1.0,
            retention=RETENTION,
            on_crash="unknown",
        )
        record = await ledger.claim(claim)
        if record.state is State.RUNNING and record.nonce == claim.nonce:
            await ledger.abandon(record.token)


async def accept(ledger: Ledger, found: Iterable[Doubt], operator: str, reason: str) -> Identity:
    """Accept a store as it is, and record the lost commands of these doubts as unknown.

    Lost commands come first: a process that sees the acceptance runs commands again.
    """
    open_doubts = list(found)
    await put_back(ledger, all_lost(open_doubts))
    seen = await ledger.see(new_identity())
    current = identity_of(seen.identity)
    assert current is not None
    given_up = {*current.replaces, *(doubt.known for doubt in open_doubts)} - {current.name, ""}
    accepted = Identity(
        current.name,
        max(current.epoch + 1, int(time.time())),
        tuple(sorted(given_up)),
        operator,
        reason,
    )
    mark = Mark(IDENTITY, msgspec.json.encode(accepted))
    await ledger.mark(IDENTITY_CHANNEL, mark, FOREVER)
    return accepted

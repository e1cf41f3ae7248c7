"""Helpers for the writer of an SQLite ledger."""

import threading
import uuid

from wirecall.ledger.base import Claim, RecordId
from wirecall.ledger.sqlite.ledger import SqliteLedger
from wirecall.ledger.sqlite.writer import Job, Writer


def writer_of(ledger: SqliteLedger) -> Writer:
    assert ledger._writer is not None
    return ledger._writer


def turn_of(ledger: SqliteLedger) -> None:
    """Wait until the thread has done all its jobs, without a turn of the event loop."""
    done = threading.Event()
    writer_of(ledger).send(Job(done.set, "nothing"))
    assert done.wait(10)


def claim(key: str) -> Claim:
    return Claim(
        id=RecordId("", "put", key),
        fingerprint=b"f",
        nonce=uuid.uuid4().bytes,
        lease=30,
        retention=60,
        on_crash="unknown",
    )

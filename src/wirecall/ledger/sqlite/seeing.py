"""What the file of an SQLite ledger says about itself."""

import os

import apsw

from wirecall.ledger.base import IDENTITY, IDENTITY_CHANNEL, Seen
from wirecall.ledger.sqlite.file import SQL

_NAMES = {"channel": IDENTITY_CHANNEL, "name": IDENTITY}


def see(identity: bytes | None, path: str, db: apsw.Cursor, _: int) -> Seen:
    """Return what the file says, in the transaction of a write; give it an identity if needed."""
    if identity is not None:
        db.execute(SQL["identify"], {**_NAMES, "content": identity})
    found = db.execute(SQL["identity"], _NAMES).get
    fence = db.execute(SQL["fence"]).get
    file = os.stat(path)
    return Seen(found, fence, f"{file.st_dev}:{file.st_ino}")

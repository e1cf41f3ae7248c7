"""What the file of an SQLite ledger says about itself."""

import apsw

from wirecall.ledger.base import IDENTITY, IDENTITY_CHANNEL, Seen
from wirecall.ledger.sqlite.file import SQL, LedgerFile

_NAMES = {"channel": IDENTITY_CHANNEL, "name": IDENTITY}


def identify(identity: bytes, db: apsw.Cursor, _: int) -> None:
    """Give the file an identity, unless it has one."""
    db.execute(SQL["identify"], {**_NAMES, "content": identity})


def see(file: LedgerFile, db: apsw.Cursor) -> Seen:
    """Return what an open file says; refuse one that was removed or replaced."""
    history = file.identify()
    found = db.execute(SQL["identity"], _NAMES).get
    return Seen(found, db.execute(SQL["fence"]).get, history)

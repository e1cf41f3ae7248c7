"""A server of another version in its own process, for tests of migrations.

    python -m tests.ledger.neighbour URL OLDER

It knows as many versions of the tables less as OLDER says. It runs commands one after another, each
with a new key and a second time as a replay, and prints a line for each. It ends with its stdin.
"""

import asyncio
import itertools
import sys
import threading

from wirecall import App
from wirecall.ledger.postgres import migration, queue
from wirecall.ledger.postgres.ledger import PostgresLedger
from wirecall.ledger.sqlite import file as sqlite_file
from wirecall.ledger.sqlite.ledger import SqliteLedger


def forget_versions(older: int) -> None:
    """Make this process one of an older wirecall."""
    if not older:
        return
    known = len(migration.parts()) - older
    for name in list(queue.SQL):
        kind, _, rest = name.partition(" ")
        if kind in ("schema", "index") and rest and int(rest.split(" ")[0]) > known:
            del queue.SQL[name]
    del sqlite_file.SCHEMA[-older:]
    # It does not look at its store, which may have no table for an identity.
    PostgresLedger.outlives = False
    SqliteLedger.outlives = False


async def serve(url: str, ended: threading.Event) -> None:
    app = App("shop", ledger=url, mode="production")

    @app.command
    async def put(value: int) -> int:
        return value

    async with app:
        for number in itertools.count():
            if ended.is_set():
                return
            data = (
                b'{"jsonrpc":"2.0","method":"put","id":1,'
                b'"params":{"value":%d,"idempotency_key":"n-%d"}}' % (number, number)
            )
            first = await app.handle(data)
            again = await app.handle(data)
            is_done = first == again == b'{"jsonrpc":"2.0","result":%d,"id":1}' % number
            print("done" if is_done else f"failed {first!r} {again!r}", flush=True)


if __name__ == "__main__":
    forget_versions(int(sys.argv[2]))
    stdin_ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        stdin_ended.set()

    threading.Thread(target=wait, daemon=True).start()
    asyncio.run(serve(sys.argv[1], stdin_ended))

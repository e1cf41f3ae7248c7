"""What only the SQLite ledger can meet."""

import sqlite3
from pathlib import Path

from tests.calls import call, error, make_app, result


async def test_another_copy_of_sqlite_that_removes_the_wal_is_noticed(tmp_path: Path) -> None:
    """Python's own sqlite3 drops the locks of apsw in the same process and, closing, takes the WAL with it.

    What is committed after that would be lost, so it is refused instead of acknowledged.
    """
    path = tmp_path / "ledger.db"
    app, effects = make_app(ledger=f"sqlite:{path}"), list[int]()

    @app.command
    def put(value: int) -> int:
        effects.append(value)
        return value

    async with app:
        assert result(await app.handle(call("put", {"value": 1}, key="one"))) == 1
        stranger = sqlite3.connect(path)
        stranger.execute("SELECT count(*) FROM wirecall_commands").fetchall()
        stranger.close()
        assert not Path(f"{path}-wal").exists()
        refused = error(await app.handle(call("put", {"value": 2}, key="two")))
        assert (refused["code"], refused["data"]["ran"]) == (50310, "no")
    assert effects == [1]

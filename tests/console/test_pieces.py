"""The newest rows as JSON: every reader gets each row, and rows are encoded once."""

import random
from typing import Any

import msgspec
import pytest

from wirecall.console.pieces import KEPT, Pieces
from wirecall.console.ring import SIZE, Ring
from wirecall.server.call import Mark
from wirecall.server.tapped import RawRow


def note(ring: Ring, count: int, mark: Mark | None = None) -> None:
    for _ in range(count):
        ring.note(1.0, mark or Mark(0.5), "price", 1, None, None, None)


class Reader:
    """Asks for the rows after those that it has, as a console does."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self.rows: list[Any] = []

    def read(self) -> int:
        """Take what is new; return how many rows came that it had."""
        last = self.rows[-1][0] if self.rows else 0
        found = msgspec.json.decode(self._pieces.after(last))
        fresh = [row for row in found if row[0] > last]
        self.rows += fresh
        return len(found) - len(fresh)

    @property
    def numbers(self) -> list[int]:
        return [row[0] for row in self.rows]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_give_every_row_to_every_reader(seed: int) -> None:
    chance = random.Random(seed)
    ring = Ring()
    pieces = Pieces(ring)
    readers = [Reader(pieces) for _ in range(3)]
    for _ in range(200):
        note(ring, chance.choice([0, 1, 7, 60, 400]))
        for reader in chance.sample(readers, chance.randrange(4)):
            reader.read()
        if chance.random() < 0.02:
            readers.append(Reader(pieces))
    for reader in readers:
        reader.read()
        numbers = reader.numbers
        assert numbers[-1] == ring.last
        # Rows that the ring has forgotten are a gap. No row comes twice, or in another order.
        assert numbers == sorted(set(numbers))
        assert numbers[-SIZE:][0] == numbers[-1] - min(SIZE, len(numbers)) + 1


def test_pieces_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring()
    pieces = Pieces(ring)
    readers = [Reader(pieces) for _ in range(3)]
    note(ring, 5)
    readers[0].read()
    note(ring, 3)
    looked: list[int] = []
    since = ring.since

    def noted(number: int) -> list[RawRow]:
        looked.append(number)
        return since(number)

    monkeypatch.setattr(ring, "since", noted)
    assert [reader.read() for reader in readers] == [0, 0, 0]
    # Each of them looks for rows after the last piece, and none looks at older ones.
    assert looked == [5, 8, 8]
    assert [reader.numbers for reader in readers] == [list(range(1, 9))] * 3


def test_pieces_keep_few_rows() -> None:
    ring = Ring()
    pieces = Pieces(ring)
    for _ in range(30):
        note(ring, 100)
        pieces.after(ring.last - 100)
        assert sum(piece.size for piece in pieces._kept) <= KEPT
    # A piece that is too large is made, and not kept.
    note(ring, SIZE)
    assert len(msgspec.json.decode(pieces.after(ring.last - SIZE))) == SIZE
    assert not pieces._kept


def test_pieces_of_a_batch_that_runs_are_not_kept() -> None:
    ring = Ring()
    pieces = Pieces(ring)
    mark = Mark(0.5, batch=1, size=2)
    note(ring, 1, mark)
    first = Reader(pieces)
    first.read()
    assert first.rows[0][2][6] == 0.0
    mark.ended = 2.0
    later = Reader(pieces)
    later.read()
    assert later.rows[0][2][6] == 2.0

"""The content of the last calls of a process: their params and their results, in bounded memory."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import TypeAlias

from msgspec import Struct

# Bodies that are kept, the bytes of each half of one, and those of all together.
BODIES = 256
LONGEST_BODY = 65_536
MOST_BYTES = 16 << 20

# The params, the result, and whether one of them was longer. Bytes, because one rare character
# makes a string four times as large.
_Kept: TypeAlias = tuple[bytes | None, bytes | None, bool]


class Body(Struct, frozen=True, gc=False):
    """The params and the result of one call, as JSON text without secrets."""

    params: str | None
    result: str | None
    # One of them was longer than is kept.
    cut: bool = False


class Bodies:
    """The bodies of the last calls, by the numbers of their rows."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._held = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Body]:
        return map(_shown, self._kept.values())

    def add(self, number: int, params: bytes | None, result: bytes | None, *, cut: bool) -> None:
        """Keep the body of a row; forget the oldest ones if they are too many or too large."""
        kept = (_beginning(params), _beginning(result), cut or _is_long(params) or _is_long(result))
        self._kept[number] = kept
        self._held += _size(kept)
        while len(self._kept) > BODIES or self._held > MOST_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._held -= _size(oldest)

    def get(self, number: int) -> Body | None:
        """Return the body of a row, if it is still kept."""
        kept = self._kept.get(number)
        return None if kept is None else _shown(kept)


def _beginning(data: bytes | None) -> bytes | None:
    return None if data is None else data[:LONGEST_BODY]


def _is_long(data: bytes | None) -> bool:
    return data is not None and len(data) > LONGEST_BODY


def _size(kept: _Kept) -> int:
    params, result, _ = kept
    return len(params or b"") + len(result or b"")


def _shown(kept: _Kept) -> Body:
    params, result, cut = kept
    return Body(_text(params), _text(result), cut)


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode(errors="replace")

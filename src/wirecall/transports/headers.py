"""The header fields of a request.

1. Where a header has a field twice, a lookup returns both values.
2. Handlers do not see the fields that carry credentials.
3. A field whose value the server's interface omitted is kept, with a value that no check accepts
   (`UNREADABLE`): a request without one of its fields may mean something else.
"""

import ipaddress
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias, overload

# Whether a request came over the loopback; or the server's and the client's host, to find that out.
Ends: TypeAlias = bool | tuple[str, str]

UNREADABLE = "\ufffd"

# Fields that carry credentials.
SECRET = frozenset({"authorization", "proxy-authorization", "cookie", "mcp-session-id"})
# Fields that proxies add to the requests that they forward. Names that begin with x-forwarded count
# too.
FORWARDING = frozenset({"forwarded", "via", "x-real-ip"})


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Return whether this is a loopback address."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:  # a name, or the path of a socket
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def _is_forwarding(name: str) -> bool:
    """Return whether proxies add this field to the requests that they forward."""
    return name in FORWARDING or name.startswith("x-forwarded")


class Headers(Mapping[str, str]):
    """The header fields of a request.

    Names are case-insensitive; values are stripped, as RFC 9110 requires.

    As a mapping it has one value for each name; several values are joined by commas (RFC 9110,
    section 5.3). So a lookup never returns one value after a proxy has checked the other.
    """

    __slots__ = ("ends", "first", "has_doubles", "pairs")

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        # The first value of each name. `dict` does this faster than any loop here.
        self.first = dict(reversed(pairs))
        # Whether a name occurs twice.
        self.has_doubles = len(self.first) != len(pairs)
        # All fields, names in lower case, values of one name in their order. A stream that stays
        # open should not keep its fields twice.
        self.pairs: Collection[tuple[str, str]]
        if self.has_doubles:
            self.pairs = pairs
        else:
            self.pairs = self.first.items()
        self.ends: Ends = False

    @overload
    def get(self, name: str, /) -> str | None: ...
    @overload
    def get(self, name: str, /, default: Any) -> Any: ...
    def get(self, name: str, /, default: Any = None) -> Any:
        """Return the value, or `default`."""
        if self.has_doubles:
            return self._joined(name, default)
        value = self.first.get(name.lower())
        if value is None:
            return default
        return value.strip(" \t")

    def _joined(self, name: str, default: Any) -> Any:
        """Return all values of a name, joined by commas, or `default`."""
        if name not in self:
            return default
        return ", ".join(self.all(name))

    def all(self, name: str) -> list[str]:
        """Return every value, in order."""
        wanted = name.lower()
        if wanted not in self.first:
            return []
        return [value.strip(" \t") for key, value in self.pairs if key == wanted]

    def shown(self) -> "Headers":
        """Return the fields that handlers may see.

        The others carry credentials, which would end up in logs.
        """
        return Headers(
            [field for field in self.pairs if field[0] not in SECRET and field[1] != UNREADABLE]
        )

    def is_forwarded(self) -> bool:
        """Return whether a proxy says that it forwarded the request."""
        return any(map(_is_forwarding, self.first))

    def is_direct(self) -> bool:
        """Return whether the request came over the loopback, and no proxy says it forwarded it."""
        if self.is_forwarded():
            return False
        if isinstance(self.ends, tuple):
            return all(map(is_loopback, self.ends))
        return self.ends

    def __getitem__(self, name: str) -> str:
        value = self.get(name)
        if value is None:
            raise KeyError(name)
        return value

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self.first

    def __iter__(self) -> Iterator[str]:
        return reversed(self.first)

    def __len__(self) -> int:
        return len(self.first)

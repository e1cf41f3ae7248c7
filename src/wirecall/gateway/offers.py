"""The lists of several servers as one: their names and addresses here, and where a call goes.

1. A name that one server has is used as it is. A name that two have is used for neither: both are
   `SERVER__name`, and a call of the bare name is refused with both.
2. A name of more than `LONGEST` characters keeps its end, with a digest: clients add their own
   beginnings, and models take 60 to 64 characters.
3. A URI that one server has is used as it is, and otherwise `SERVER+uri`.
4. Names are found in a table, and never taken apart.
5. Definitions and names lose control, direction and zero-width characters, with which a server
   could hide words from a person, or take the name of another tool.
"""

import base64
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec
from msgspec import Raw, Struct

from wirecall.errors import InvalidParams, suggested
from wirecall.gateway.wire import members_of, raw_of
from wirecall.protocol.messages import encode

LONGEST = 48
# Bytes of one definition, and definitions of all servers.
MOST_BYTES = 64 << 10
MOST = 2000
# Names in an error.
MOST_SHOWN = 20
# The member that names an entry of each list.
NAMED = {"tools": "name", "prompts": "name", "resources": "uri", "resourceTemplates": "uriTemplate"}

# Control characters but tab and line breaks, zero-width and bidirectional ones, tags, and the
# selectors of variants beyond those of usual text.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff"
    "\U000e0000-\U000e007f\U000e0100-\U000e01ef]"
)
_LITERAL = re.compile(r"[^{]*")


class Place(Struct, frozen=True):
    """Where an entry of a list is: a server, and its name there."""

    server: str
    name: str


class Merged(Struct):
    """One kind of list of all servers."""

    kind: str
    # What it was made from: the lists by server. A list that changes is another object.
    lists: Mapping[str, Sequence[Raw]] = {}
    entries: list[Raw] = []
    # By the name that clients use here.
    places: dict[str, Place] = {}
    # The names that two or more servers have, with the names that clients use instead.
    shared: dict[str, list[str]] = {}
    # The entries as JSON.
    encoded: bytes = b"[]"
    # How many entries are above `MOST`.
    left_out: int = 0

    def is_of(self, lists: Mapping[str, Sequence[Raw]]) -> bool:
        """Return whether it was made from these lists."""
        if lists.keys() != self.lists.keys():
            return False
        return all(lists[server] is known for server, known in self.lists.items())

    def find(self, name: str) -> Place:
        """Return where a name leads, or raise the error that says why it leads nowhere."""
        place = self.places.get(name)
        if place is not None:
            return place
        what = self.kind.removesuffix("s")
        if name in self.shared:
            several = " or ".join(self.shared[name])
            raise InvalidParams(
                f"several servers have the {what} {name[:100]!r}: use {several}", ran="no"
            )
        near = suggested(name, self.places)
        if near is None:
            raise InvalidParams(
                f"there is no {what} {name[:100]!r}; {there_are(self.places)}", ran="no"
            )
        raise InvalidParams(
            f"there is no {what} {name[:100]!r}; did you mean {near!r}? {there_are(self.places)}",
            ran="no",
            did_you_mean=near,
        )


def there_are(names: Iterable[str]) -> str:
    """Return the names that there are, for an error."""
    shown = list(names)
    more = ", ..." if len(shown) > MOST_SHOWN else ""
    return f"there are: {', '.join(shown[:MOST_SHOWN]) or 'none'}{more}"


def merged(kind: str, lists: Mapping[str, Sequence[Raw]], *, prefixes: bool = False) -> Merged:
    """Return the lists of several servers, by the names of the servers, as one."""
    member = NAMED[kind]
    found: list[tuple[str, str, Raw]] = []
    for server, entries in lists.items():
        for entry in entries:
            name = _name_in(entry, member)
            if name is not None and len(bytes(entry)) <= MOST_BYTES:
                found.append((server, name, entry))
    plain = {name: _HIDDEN.sub("", name) for _, name, _ in found}
    counts = Counter(name for _, name in {(server, plain[name]) for server, name, _ in found})
    whole = Merged(kind, lists, left_out=max(0, len(found) - MOST))
    for server, theirs, entry in found[:MOST]:
        name = own = plain[theirs]
        if member == "name":
            if prefixes or counts[name] > 1:
                own = f"{server}__{name}"
            own = shortened(own)
        elif counts[name] > 1:
            own = f"{server}+{name}"
        if own in whole.places:
            continue
        whole.places[own] = Place(server, theirs)
        if counts[name] > 1:
            whole.shared.setdefault(name, []).append(own)
        whole.entries.append(_shown(entry, member, theirs, own))
    whole.encoded = encode(whole.entries)
    return whole


def shortened(name: str) -> str:
    """Return a name that clients and models take."""
    if len(name) <= LONGEST:
        return name
    digest = base64.b32encode(sha256(name.encode()).digest()).decode().lower()[:6]
    return f"{name[-(LONGEST - 7) :]}_{digest}"


def beginning(template: str) -> str:
    """Return the literal beginning of a URI template."""
    found = _LITERAL.match(template)
    return found[0] if found else ""


def _name_in(entry: Raw, member: str) -> str | None:
    try:
        name = msgspec.json.decode(members_of(entry).get(member, b"null"))
    except msgspec.DecodeError:
        return None
    return name if isinstance(name, str) else None


def _shown(entry: Raw, member: str, name: str, own: str) -> Raw:
    """Return a definition as clients get it: under its name here, without hidden characters."""
    if own != name:
        members: dict[str, Any] = {**members_of(entry)}
        members[member] = own
        entry = raw_of(members)
    text = bytes(entry).decode()
    if _HIDDEN.search(text) is None and "\\u" not in text:
        return entry
    return Raw(encode(_cleaned(msgspec.json.decode(entry))))


def has_hidden(entry: Raw) -> bool:
    """Return whether a definition has characters that a person does not see."""
    return _HIDDEN.search(encode(msgspec.json.decode(entry)).decode()) is not None


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return _HIDDEN.sub("", value)
    if isinstance(value, list):
        return [_cleaned(each) for each in value]
    if isinstance(value, dict):
        return {name: _cleaned(each) for name, each in value.items()}
    return value

"""References between the entries of one batch: checks, plan, values and fingerprints.

Everything here is pure. Two notations use it: the members `refs` and `after` of a JSON-RPC array
(`read_references`), and the values `{"$ref": "ID#/pointer"}` in the arguments of a batch tool
(`extract`). The steps are the same for both:

    1 read     read_references, extract  a notation -> Links: references, and ids in `after`
    2 plan     make_plan                 Links of all entries -> Plan: which entry waits for which
    3 judge    blocked                   outcome of a target -> the error that it causes, or none
    4 fill     fill                      params as sent, results of the targets -> params
    5 identify reference_digest          the fingerprint of a call with references (R9)

Values are never decoded as a whole: they are cut out of the bytes of a result, so every number
keeps its digits.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import (
    DependencyFailed,
    DependencyUnknown,
    OutcomeUnknown,
    ReferenceInvalid,
    ReferenceLimit,
    ReferenceNotFound,
    RpcError,
)
from wirecall.protocol.messages import UNREADABLE, Id, Json, JsonObject

# The unescaped tokens of a JSON Pointer.
Tokens: TypeAlias = tuple[str, ...]

REF = "$ref"
LITERAL = "$literal"
EVERY = "*"

# Members of an object that an error names.
NAMED = 10


class ReferenceLimits(Struct, frozen=True, kw_only=True):
    """The limits of references (R4). An entry beyond one of them does not start."""

    # References of one entry. An entry with more params than that takes whole objects.
    refs: int = 16
    # Ids in `after` of one entry.
    after: int = 16
    # References in a row, from an entry back to one that has none.
    depth: int = 8
    # Values that the `*` of one entry visit.
    values: int = 1000
    # Bytes that are put into the params of one entry.
    entry_bytes: int = 256 << 10
    # The same for all entries of a batch: a short message must not make megabytes of params.
    batch_bytes: int = 1 << 20
    # Tokens of one pointer. It is the depth of a message.
    steps: int = 64


LIMITS = ReferenceLimits()


def announcement(limits: ReferenceLimits = LIMITS) -> JsonObject:
    """Return the statement of `rpc.discover` that a server resolves references (R12)."""
    return {"references": 1, "limits": msgspec.to_builtins(limits)}


class Reference(Struct, frozen=True):
    """One value that an entry takes from the result of an earlier one."""

    # Where the value goes, in the params of the entry.
    place: Tokens
    # The id of the entry that gives the value.
    target: Id
    # Where the value is, in the result of the target.
    path: Tokens


class Links(Struct, frozen=True):
    """What one entry needs from earlier ones."""

    refs: tuple[Reference, ...] = ()
    # The ids of entries that must have succeeded.
    after: tuple[Id, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.refs or self.after)


NO_LINKS = Links()


class Planned(Struct, frozen=True):
    """One entry of a plan."""

    links: Links = NO_LINKS
    # The position of the target of each reference, in the order of `links.refs`.
    sources: tuple[int, ...] = ()
    # The positions of all entries that must end first, each once.
    waits_for: tuple[int, ...] = ()
    # References in a row up to this entry.
    depth: int = 0
    # Set if the references are wrong: the entry is answered with it and does not start.
    error: RpcError | None = None


class Plan(Struct, frozen=True):
    """Which entry waits for which. Every entry waits for earlier ones only, so there is no cycle."""

    entries: tuple[Planned, ...]

    @property
    def depth(self) -> int:
        """The longest chain of references."""
        return max((each.depth for each in self.entries), default=0)

    @property
    def levels(self) -> list[list[int]]:
        """The positions by depth: the entries of a level need only the levels before it."""
        levels: list[list[int]] = [[] for _ in range(self.depth + 1)]
        for position, each in enumerate(self.entries):
            levels[each.depth].append(position)
        return levels


# --- pointers -------------------------------------------------------------------------------------


def read_pointer(pointer: object, name: str, limits: ReferenceLimits = LIMITS) -> Tokens:
    """Return the tokens of a JSON Pointer (RFC 6901); `name` is the place of it in errors."""
    if not isinstance(pointer, str):
        raise ReferenceInvalid(f"{name}: expected a JSON Pointer, got {kind_of(pointer)}", ran="no")
    if pointer == "":
        return ()
    if not pointer.startswith("/"):
        raise ReferenceInvalid(
            f"{name}: a JSON Pointer is empty or begins with '/', got {_short(pointer)!r}", ran="no"
        )
    if pointer.count("/") > limits.steps:
        raise _beyond("steps", limits.steps, f"{name}: {pointer.count('/')} steps")
    return tuple(_unescaped(token, name) for token in pointer[1:].split("/"))


def write_pointer(tokens: Sequence[str]) -> str:
    """Return the tokens as a JSON Pointer."""
    return "".join(f"/{token.replace('~', '~0').replace('/', '~1')}" for token in tokens)


def _unescaped(token: str, name: str) -> str:
    bare = token.replace("~0", "").replace("~1", "")
    if "~" in bare:
        raise ReferenceInvalid(
            f"{name}: '~' is written '~0' and '/' is written '~1' in a JSON Pointer, "
            f"got {_short(token)!r}",
            ran="no",
        )
    return token.replace("~1", "/").replace("~0", "~")


# --- step 1: reading ------------------------------------------------------------------------------


def read_references(
    refs: Json,
    after: Json,
    params: Raw | UnsetType,
    limits: ReferenceLimits = LIMITS,
) -> Links:
    """Return the references of an entry of a JSON-RPC array (R1, R2).

    `refs` and `after` are the members of the entry as plain values, UNSET if it has none.
    """
    ids = _read_after(after, limits)
    if refs is UNSET:
        return Links((), ids)
    if not isinstance(refs, dict):
        raise ReferenceInvalid(f"refs: expected an object, got {kind_of(refs)}", ran="no")
    check_number("refs", len(refs), limits)
    found = tuple(_read_reference(place, value, limits) for place, value in refs.items())
    _check_places([each.place for each in found], params)
    return Links(found, ids)


def check_number(
    name: Literal["refs", "after"], count: int, limits: ReferenceLimits = LIMITS
) -> None:
    """Raise `ReferenceLimit` if an entry has too many references, or ids in `after` (R4)."""
    most = limits.after
    what = f"after: {count} ids"
    if name == "refs":
        most = limits.refs
        what = f"refs: {count} references"
    if count > most:
        raise _beyond(name, most, what)


def _read_reference(place: str, value: Json, limits: ReferenceLimits) -> Reference:
    name = f"refs[{_short(place)!r}]"
    tokens = read_pointer(place, name, limits)
    if not tokens:
        raise ReferenceInvalid(
            f"{name}: a reference fills a member of params, not params as a whole", ran="no"
        )
    if not isinstance(value, dict) or value.keys() - {"path"} != {"id"}:
        raise ReferenceInvalid(
            f'{name}: expected an object {{"id": ..., "path": ...}}, got {kind_of(value)}', ran="no"
        )
    target = _read_id(value["id"], f"{name}.id")
    return Reference(tokens, target, read_pointer(value.get("path", ""), f"{name}.path", limits))


def _read_after(after: Json, limits: ReferenceLimits) -> tuple[Id, ...]:
    if after is UNSET:
        return ()
    if not isinstance(after, list):
        raise ReferenceInvalid(f"after: expected an array of ids, got {kind_of(after)}", ran="no")
    check_number("after", len(after), limits)
    return tuple(_read_id(each, f"after[{index}]") for index, each in enumerate(after))


def _read_id(id: Json, name: str) -> Id:
    if isinstance(id, bool) or not isinstance(id, (str, int, float)):
        raise ReferenceInvalid(
            f"{name}: expected a string or a number, got {kind_of(id)}", ran="no"
        )
    return id


def _check_places(places: Sequence[Tokens], params: Raw | UnsetType) -> None:
    """Raise `ReferenceInvalid` unless every place is an absent member of an object (R2)."""
    whole = b"{}"
    if params is not UNSET:
        whole = bytes(params)
    if not whole.startswith(b"{"):
        raise ReferenceInvalid("params: references need params by name, got an array", ran="no")
    for place in places:
        name = f"refs[{_short(write_pointer(place))!r}]"
        parent = _step_all(Raw(whole), place[:-1])
        if parent is None or not bytes(parent).startswith(b"{"):
            raise ReferenceInvalid(
                f"{name}: params has no object {write_pointer(place[:-1])!r} to fill", ran="no"
            )
        if place[-1] in _members(parent):
            raise ReferenceInvalid(
                f"{name}: params has a value there; leave the member out or the reference",
                ran="no",
            )
    for place in places:
        if any(place[:length] in places for length in range(1, len(place))):
            raise ReferenceInvalid(
                f"refs[{_short(write_pointer(place))!r}]: another reference fills the place "
                "that this one is in",
                ran="no",
            )


def extract(value: Json, limits: ReferenceLimits = LIMITS) -> tuple[Json, tuple[Reference, ...]]:
    """Return arguments without their `{"$ref": "ID#/pointer"}` values, and the references (A2).

    A member that is a reference is left out, and an item of an array becomes null. An object
    `{"$literal": X}` becomes X, and X is not searched.
    """
    found: list[Reference] = []
    rest = _extract(value, (), found, limits)
    if found and found[0].place == ():
        raise ReferenceInvalid("arguments: expected an object, got a reference", ran="no")
    return rest, tuple(found)


def _extract(value: Json, place: Tokens, found: list[Reference], limits: ReferenceLimits) -> Json:
    if isinstance(value, list):
        return [
            _extract(item, (*place, str(index)), found, limits) for index, item in enumerate(value)
        ]
    if not isinstance(value, dict):
        return value
    if value.keys() == {LITERAL}:
        return value[LITERAL]
    if REF in value:
        found.append(_read_inline(value, place, limits))
        if len(found) > limits.refs:
            raise _beyond("refs", limits.refs, f"arguments: more than {limits.refs} references")
        return None
    members = {}
    for name, each in value.items():
        count = len(found)
        inner = (*place, name)
        rest = _extract(each, inner, found, limits)
        is_reference = len(found) > count and found[-1].place == inner
        if not is_reference:
            members[name] = rest
    return members


def _read_inline(value: Json, place: Tokens, limits: ReferenceLimits) -> Reference:
    name = f"arguments{write_pointer(place)}"
    text = value[REF]
    if len(value) > 1 or not isinstance(text, str) or "#" not in text:
        raise ReferenceInvalid(
            f'{name}: a reference is {{"$ref": "ID#/pointer"}} and nothing else; '
            'to pass an object that has a member "$ref", wrap it: {"$literal": {...}}',
            ran="no",
        )
    id, _, pointer = text.partition("#")
    return Reference(place, id, read_pointer(pointer, name, limits))


# --- step 2: the plan -----------------------------------------------------------------------------


def make_plan(
    ids: Sequence[Id | UnsetType],
    links: Sequence[Links | RpcError],
    limits: ReferenceLimits = LIMITS,
) -> Plan:
    """Return which entry waits for which (R3, R4).

    `ids` are those of all entries, UNSET for a notification. An error among the `links` is that of
    an entry whose references could not be read.
    """
    positions: dict[bytes, list[int]] = {}
    for position, id in enumerate(ids):
        if id is not UNSET:
            positions.setdefault(name_of(id), []).append(position)
    planned: list[Planned] = []
    for position, each in enumerate(links):
        if isinstance(each, RpcError):
            planned.append(Planned(error=each))
            continue
        try:
            planned.append(_planned(each, position, positions, planned, limits))
        except RpcError as error:
            planned.append(Planned(error=error))
    return Plan(tuple(planned))


def _planned(
    links: Links,
    position: int,
    positions: Mapping[bytes, Sequence[int]],
    planned: Sequence[Planned],
    limits: ReferenceLimits,
) -> Planned:
    if not links:
        return Planned()
    sources = tuple(_find(each.target, position, positions) for each in links.refs)
    others = [_find(id, position, positions) for id in links.after]
    waits_for = tuple(dict.fromkeys((*sources, *others)))
    depth = 1 + max(planned[each].depth for each in waits_for)
    if depth > limits.depth:
        raise _beyond("depth", limits.depth, f"{depth} references in a row")
    return Planned(links, sources, waits_for, depth)


def _find(id: Id, position: int, positions: Mapping[bytes, Sequence[int]]) -> int:
    """Return the position of a target."""
    found = positions.get(name_of(id), ())
    shown = _short(name_of(id).decode())
    if not found:
        raise ReferenceInvalid(f"no entry of this batch has the id {shown}", ran="no")
    if found == [position]:
        raise ReferenceInvalid(f"the entry {shown} refers to itself", ran="no")
    if len(found) > 1:
        raise ReferenceInvalid(
            f"{len(found)} entries have the id {shown}; a target has an id that no other has",
            ran="no",
        )
    if found[0] > position:
        raise ReferenceInvalid(
            f"the entry {shown} comes later; a reference goes to an earlier entry", ran="no"
        )
    return found[0]


def name_of(id: Id) -> bytes:
    """Return an id as JSON: 1 and "1" are different ids."""
    return msgspec.json.encode(id)


# --- step 3: targets that failed ------------------------------------------------------------------


def blocked(id: Id, error: RpcError) -> RpcError:
    """Return the error of an entry whose target, named by its id, failed (R6).

    The first failure of a chain is passed on: its id and its code.
    """
    data = error.data if isinstance(error.data, dict) else {}
    kind = data.get("type")
    cause: object = id
    code = error.code
    if error.code == DependencyFailed.CODE and kind != ReferenceNotFound.TYPE and "code" in data:
        cause = data.get("id", id)
        code = data["code"]
    if kind in (OutcomeUnknown.TYPE, DependencyUnknown.TYPE):
        return DependencyUnknown(
            "the outcome of an entry that this one needs is unknown; "
            "send it again when that one is settled",
            ran="no",
            id=cause,
            code=code,
        )
    return DependencyFailed(
        "nothing of this one ran; data.id names the entry that failed first",
        ran="no",
        id=cause,
        code=code,
    )


# --- step 4: values -------------------------------------------------------------------------------


class Room(Struct):
    """The bytes that references may still put into the params of one batch."""

    left: int = LIMITS.batch_bytes


def fill(
    params: bytes,
    refs: Sequence[Reference],
    results: Sequence[bytes],
    limits: ReferenceLimits = LIMITS,
    room: Room | None = None,
) -> bytes:
    """Return params with the values of their references (R4, R6).

    `results` are the results of the targets as JSON, one for each reference. Raises
    `ReferenceNotFound` if a pointer finds nothing, and `ReferenceLimit` for too much.
    """
    visited = _Visited(limits.values)
    values: list[tuple[Tokens, Raw]] = []
    size = 0
    for reference, result in zip(refs, results, strict=True):
        value = _take(Raw(result), reference.path, visited)
        if value is None:
            path = _short(write_pointer(reference.path))
            raise ReferenceNotFound(
                f"nothing is at {path!r}: {_last_found(Raw(result), reference.path)}",
                ran="no",
                id=reference.target,
                path=path,
            )
        size += len(bytes(value))
        if size > limits.entry_bytes:
            raise _beyond("entry_bytes", limits.entry_bytes, "the values of one entry")
        values.append((reference.place, value))
    if room is not None:
        if size > room.left:
            raise _beyond("batch_bytes", limits.batch_bytes, "the values of one batch")
        room.left -= size
    return bytes(_put_all(Raw(params), values))


def find(result: bytes, path: Tokens, limits: ReferenceLimits = LIMITS) -> bytes | None:
    """Return the value at a path, None if there is nothing."""
    value = _take(Raw(result), path, _Visited(limits.values))
    if value is None:
        return None
    return bytes(value)


def _last_found(value: Raw, path: Tokens) -> str:
    """Describe the last value that a path finds in a result, for an error."""
    for index, token in enumerate(path):
        where = "the result"
        if index:
            where = repr(_short(write_pointer(path[:index])))
        if token == EVERY and bytes(value).startswith(b"["):
            return f"an item of {where} does not have it"
        inner = _step(value, token)
        if inner is None:
            return f"{where} is {_shape(value)}"
        value = inner
    raise AssertionError("the path finds something")


def _shape(value: Raw) -> str:
    """Describe a value by its members or its number of items."""
    if bytes(value).startswith(b"["):
        return f"an array, and its length is {len(_items(value))}"
    if bytes(value)[:1] in b"-0123456789":  # perhaps too long for Python
        return "a number"
    if not bytes(value).startswith(b"{"):
        return kind_of(msgspec.json.decode(value))
    members = list(_members(value))
    if not members:
        return "an object without members"
    names = ", ".join(repr(_short(name)) for name in members[:NAMED])
    if len(members) > NAMED:
        names += ", ..."
    return f"an object with {names}"


class _Visited(Struct):
    """Counts the values that the `*` of one entry visit."""

    most: int
    count: int = 0

    def add(self, number: int) -> None:
        self.count += number
        if self.count > self.most:
            raise _beyond("values", self.most, "the values that * takes")


def _take(value: Raw, path: Tokens, visited: _Visited) -> Raw | None:
    """Return the value at a path; a `*` on an array maps, and flattens one level as JMAP does."""
    for index, token in enumerate(path):
        is_map = token == EVERY and bytes(value).startswith(b"[")
        if is_map:
            return _take_each(value, path[index + 1 :], visited)
        inner = _step(value, token)
        if inner is None:
            return None
        value = inner
    return value


def _take_each(value: Raw, path: Tokens, visited: _Visited) -> Raw | None:
    items = _items(value)
    visited.add(len(items))
    taken: list[Raw] = []
    for item in items:
        found = _take(item, path, visited)
        if found is None:
            return None
        if bytes(found).startswith(b"["):
            inner = _items(found)
            visited.add(len(inner))
            taken.extend(inner)
        else:
            taken.append(found)
    return Raw(msgspec.json.encode(taken))


def _step_all(value: Raw, tokens: Tokens) -> Raw | None:
    for token in tokens:
        inner = _step(value, token)
        if inner is None:
            return None
        value = inner
    return value


def _step(value: Raw, token: str) -> Raw | None:
    """Return the member or the item of a value, None if it has none of that name."""
    if bytes(value).startswith(b"{"):
        return _members(value).get(token)
    if bytes(value).startswith(b"["):
        index = _index(token)
        if index is None:
            return None
        items = _items(value)
        if index < len(items):
            return items[index]
    return None


def _index(token: str) -> int | None:
    """Return a token as the index of an item: digits without zeros before them (RFC 6901)."""
    is_number = token.isascii() and token.isdigit() and len(token) < 10
    if not is_number or (token != "0" and token.startswith("0")):
        return None
    return int(token)


def _put_all(value: Raw, values: Sequence[tuple[Tokens, Raw]]) -> Raw:
    """Return a value with others put at their places."""
    by_token: dict[str, list[tuple[Tokens, Raw]]] = {}
    for place, each in values:
        by_token.setdefault(place[0], []).append((place[1:], each))
    if bytes(value).startswith(b"["):
        items = _items(value)
        for token, inner in by_token.items():
            items[int(token)] = _put(items[int(token)], inner)
        return Raw(msgspec.json.encode(items))
    members = _members(value)
    for token, inner in by_token.items():
        members[token] = _put(members.get(token), inner)
    return Raw(msgspec.json.encode(members))


def _put(value: Raw | None, values: Sequence[tuple[Tokens, Raw]]) -> Raw:
    place, first = values[0]
    if place == ():
        return first
    assert value is not None  # the places are checked
    return _put_all(value, values)


_decode_members = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_items = msgspec.json.Decoder(list[Raw]).decode


def _members(value: Raw) -> dict[str, Raw]:
    try:
        return _decode_members(value)
    except UNREADABLE:
        return {}


def _items(value: Raw) -> list[Raw]:
    try:
        return _decode_items(value)
    except UNREADABLE:
        return []


# --- step 5: the identity of a call with references -----------------------------------------------


def call_digest(method: str, key: str | None, digest: bytes) -> bytes:
    """Return the fingerprint of a call: its method, its key and the fingerprint of its params."""
    return sha256(msgspec.json.encode(["call", method, key, digest.hex()])).digest()


def reference_digest(digest: bytes, refs: Sequence[Reference], targets: Sequence[bytes]) -> bytes:
    """Return the fingerprint of params with references (R9).

    `digest` is that of the params as sent, and `targets` has the `call_digest` of the target of
    each reference. The ids and the values do not count: a batch that is sent again with new ids
    finds its first outcome, also if a query answers differently now.
    """
    if not refs:
        return digest
    places = sorted(
        (list(each.place), list(each.path), target.hex())
        for each, target in zip(refs, targets, strict=True)
    )
    return sha256(msgspec.json.encode(["references", digest.hex(), places])).digest()


# --- errors ---------------------------------------------------------------------------------------


def _beyond(limit: str, maximum: int, what: str) -> ReferenceLimit:
    return ReferenceLimit(f"{what}: at most {maximum} allowed", limit=limit, max=maximum, ran="no")


def kind_of(value: object) -> str:
    """Return the kind of a JSON value, for an error."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    for kind, name in ((dict, "an object"), (list, "an array"), (str, "a string")):
        if isinstance(value, kind):
            return name
    return "a number"


def _short(text: str) -> str:
    if len(text) <= 100:
        return text
    return f"{text[:100]}..."

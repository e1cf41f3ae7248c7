"""Messages that are passed on: written around members that keep their bytes."""

from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from wirecall.errors import InvalidParams
from wirecall.protocol.messages import encode

_EMPTY = Raw(b"{}")
# Of strings and numbers. `encode` is for values that may hold JSON of others.
_encode_scalar = msgspec.json.Encoder().encode
_decode_members = msgspec.json.Decoder(dict[str, Raw]).decode
_TOKEN = b'"progressToken"'
META = "_meta"


def request(id: int | None, method: str, params: Raw | UnsetType) -> bytes:
    """Return a request, or a notification if it has no id."""
    head = b'{"jsonrpc":"2.0",'
    if id is not None:
        head += b'"id":%d,' % id
    head += b'"method":' + _encode_scalar(method)
    if params is UNSET:
        return head + b"}"
    return head + b',"params":' + one_line(params) + b"}"


def answer(id: int | str, result: bytes) -> bytes:
    """Return the answer to a client's request."""
    return b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (_encode_scalar(id), result)


def one_line(text: bytes | Raw) -> bytes:
    """Return JSON without line breaks. Other bytes stay as they are."""
    data = bytes(text)
    if 10 in data or 13 in data:
        return msgspec.json.format(data, indent=-1)
    return data


def members_of(text: Raw | UnsetType) -> dict[str, Raw]:
    """Return the members of an object; none if there is no object."""
    if text is UNSET:
        return {}
    try:
        return _decode_members(text)
    except msgspec.DecodeError:
        return {}


def raw_of(members: dict[str, Any]) -> Raw:
    """Return an object with these members."""
    return Raw(encode(members))


def token_of(params: Raw | UnsetType) -> Raw | None:
    """Return the progress token of a request; None if it does not ask for progress."""
    if params is UNSET or bytes(params).find(_TOKEN) < 0:
        return None
    return members_of(members_of(params).get(META, _EMPTY)).get("progressToken")


def with_token(params: Raw | UnsetType, token: int | Raw) -> Raw:
    """Return params with another progress token in `_meta`."""
    members = members_of(params)
    meta = members_of(members.get(META, UNSET))
    meta["progressToken"] = Raw(b"%d" % token) if isinstance(token, int) else token
    members[META] = raw_of(meta)
    return raw_of(members)


def with_member(params: Raw | UnsetType, name: str, value: Raw) -> Raw:
    """Return params with another value of one member."""
    members = members_of(params)
    members[name] = value
    return raw_of(members)


def with_meta(result: Raw, marks: dict[str, Any]) -> Raw:
    """Return a result with further members of `_meta`."""
    members = members_of(result)
    meta: dict[str, Any] = {**members_of(members.get(META, UNSET)), **marks}
    members[META] = raw_of(meta)
    return raw_of(members)


def refuse_doubles(params: Raw | UnsetType) -> None:
    """Raise `InvalidParams` if an object in the params has a member twice.

    Two parsers may read two values, so what is recorded may not be what runs.
    """
    import json  # late: the one decoder that shows duplicate members

    if params is UNSET:
        return

    def pairs(found: list[tuple[str, object]]) -> None:
        names = [name for name, _ in found]
        if len({*names}) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidParams(f"params: the member {twice[:100]!r} occurs twice", ran="no")

    json.loads(bytes(params), object_pairs_hook=pairs, parse_int=str, parse_float=str)

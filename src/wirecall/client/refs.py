"""References in the params of a call: values that stand for parts of the results of other entries.

`entry.ref("/orders/0/id")` makes one, and a later call of the same batch takes it anywhere in its
params. `linked` decides how the batch is sent.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from msgspec import Struct

if TYPE_CHECKING:
    from wirecall.client.exchange import AnyEntry

# The unescaped tokens of a JSON Pointer.
Tokens: TypeAlias = tuple[str, ...]


class ResultRef:
    """A part of the result of an entry, as a value in the params of a later entry of its batch.

    It is not a struct, so no encoder takes it for a value: only its batch knows what it stands for.
    """

    __slots__ = ("entry", "pointer")

    # How many were made in this process: a batch without new ones does not look for them.
    made: ClassVar[int] = 0

    def __init__(self, entry: "AnyEntry", pointer: str) -> None:
        ResultRef.made += 1
        self.entry = entry
        self.pointer = pointer

    def __repr__(self) -> str:
        return f"<{self.pointer!r} of the result of {self.entry.method}>"


class Found(Struct, frozen=True, eq=False):
    """A reference in params."""

    place: Tokens
    ref: ResultRef
    # The place is an item of an array, and not a member of an object.
    is_item: bool


def take_refs(params: Any) -> tuple[Any, list[Found]]:
    """Return params without their references, and the references.

    A member that is a reference is left out, and an item of an array becomes null. Params without
    references are returned unchanged. So are params that contain themselves: they cannot be
    written as JSON, and the encoder says why.
    """
    found: list[Found] = []
    try:
        rest = _without(params, (), found)
    except RecursionError:
        return params, []
    if not found:
        return params, found
    return rest, found


def has_refs(params: Any) -> bool:
    """Return whether params contain a reference."""
    _, found = take_refs(params)
    return bool(found)


def _without(value: Any, place: Tokens, found: list[Found]) -> Any:
    if isinstance(value, Mapping):
        members = {}
        for name, each in value.items():
            inner = (*place, str(name))
            if isinstance(each, ResultRef):
                found.append(Found(inner, each, is_item=False))
            else:
                members[name] = _without(each, inner, found)
        return members
    if isinstance(value, (list, tuple)):
        items: list[Any] = []
        for index, each in enumerate(value):
            inner = (*place, str(index))
            if isinstance(each, ResultRef):
                found.append(Found(inner, each, is_item=True))
                items.append(None)
            else:
                items.append(_without(each, inner, found))
        return items
    return value

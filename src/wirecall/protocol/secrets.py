"""Params as operators may see them: without the values that a signature marks as `Secret`.

A plan is made once, when a method with `record_params=True` is registered. It follows the types of
the parameters into structs, dataclasses, typed dicts and models. A member whose annotation contains
`Secret` is hidden as a whole. Where a value could belong to several plans, too much is hidden
rather than too little.

What the console captures has one more rule, because a signature may not mark its secrets, and those
of other servers cannot: a member whose name says that it is secret is hidden too (`says_secret`).
"""

import re
import typing
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.protocol.params import Signature

HIDDEN = "***"

# Members that are not arguments of the function.
OUTSIDE = ("idempotency_key", "idempotencyKey", "_meta")


# `max_tokens` and `token_count` are numbers that a person wants to see.
_SAYS_SECRET = re.compile(
    r"(?i)(?:passwords?|passwd|passphrase|secrets?|token|credentials?|authorization|cookies?|cv[vc]"
    r"|(?:api|access|private|signing|encryption)[_-]?keys?)$"
)
# Quick to find: most results are not decoded for it. A name may be written with escapes.
_MAY_SAY = re.compile(
    rb'(?i)(?:passwords?|passwd|phrase|secrets?|token|credentials?|ation|cookies?|cv[vc]|keys?)"|\\u'
)


def says_secret(name: str) -> bool:
    """Return whether the name of a member says that its value is secret.

    >>> [says_secret(name) for name in ("clientSecret", "api_key", "max_tokens", "key")]
    [True, True, False, False]
    """
    return _SAYS_SECRET.search(name) is not None


def without_named(value: Any) -> Any:
    """Return JSON without the values of members whose names say that they are secret."""
    if isinstance(value, list):
        return [without_named(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: HIDDEN if _is_hidden(name, each) else without_named(each)
        for name, each in value.items()
    }


def text_without_named(data: bytes) -> bytes:
    """Return JSON text without the values of members whose names say that they are secret."""
    if not _MAY_SAY.search(data):
        return data
    return msgspec.json.encode(without_named(msgspec.json.decode(data)))


def _is_hidden(name: str, value: object) -> bool:
    # These say only whether there is one.
    is_shown = value is None or isinstance(value, bool)
    return not is_shown and says_secret(name)


class Secret(Struct, frozen=True):
    """Marks a value to hide from operators.

    It is a note: `Annotated[str, Secret]`. The ledger records "***" instead.

    >>> from typing import Annotated
    >>> @App("shop").command(record_params=True)
    ... def login(user: str, password: Annotated[str, Secret]) -> bool:
    ...     return True
    """


# True: hidden as a whole. A dict: the plans of its members by name. None: shown.
Plan: TypeAlias = "bool | dict[str, Plan] | None"


class Redactor:
    """The params of one method, as its records show them.

    With `by_name`, members are hidden also if their names say that they are secret.
    """

    def __init__(self, signature: Signature, most: int, *, by_name: bool = False) -> None:
        # Bytes.
        self._most = most
        self._by_names = by_name
        known: dict[object, dict[str, Plan]] = {}
        self._plans = [
            (each.name, (by_name and says_secret(each.name)) or plan_of(each.type, known))
            for each in signature.parameters
            if each.kind != "rest"
        ]
        self._rest: Plan = None
        for each in signature.parameters:
            if each.kind == "rest":
                self._rest = plan_of(each.type, known)

    def __call__(self, params: Raw | UnsetType) -> bytes:
        """Return params as JSON, without secrets; for params that are too long, their length."""
        if params is UNSET:
            return b"[]"
        if len(params) > self._most:
            return msgspec.json.encode(f"{len(params)} bytes, more than max_stored_result")
        value = msgspec.json.decode(params)
        shown: Any
        if isinstance(value, dict):
            shown = self._by_name(value)
        else:
            shown = self._by_position(value)
        if self._by_names:
            shown = without_named(shown)
        return msgspec.json.encode(shown)

    def _by_name(self, members: dict[str, Any]) -> dict[str, Any]:
        plans = dict(self._plans)
        return {
            name: hidden(plans.get(name, self._rest), value)
            for name, value in members.items()
            if name not in OUTSIDE
        }

    def _by_position(self, values: list[Any]) -> list[Any]:
        plans = [plan for _, plan in self._plans]
        plans += [self._rest] * (len(values) - len(plans))
        return [hidden(plan, value) for plan, value in zip(plans, values, strict=False)]


def hidden(plan: Plan, value: Any) -> Any:
    """Return a value without its secrets."""
    if plan is None or plan is False:
        return value
    if plan is True:
        return HIDDEN
    if isinstance(value, list):
        return [hidden(plan, each) for each in value]
    if isinstance(value, dict):
        return {name: hidden(_member_plan(plan, name, each), each) for name, each in value.items()}
    return value


def _member_plan(plan: dict[str, Plan], name: str, value: object) -> Plan:
    """Return the plan of a member.

    A name that the plan does not have may be a key of a dict whose values have the plan.
    """
    if name in plan:
        return plan[name]
    if isinstance(value, (dict, list)):
        return plan
    return None


def plan_of(hint: object, known: dict[object, dict[str, Plan]]) -> Plan:
    """Return what is hidden in values of a type.

    `known` has the types seen: a type may contain itself.
    """
    notes = getattr(hint, "__metadata__", ())
    if any(note is Secret or isinstance(note, Secret) for note in notes):
        return True
    # The latter are pydantic's.
    if hint is Secret or getattr(hint, "__name__", "") in ("SecretStr", "SecretBytes"):
        return True
    parts = typing.get_args(hint)
    if notes:
        parts = parts[:1]
    if parts:
        return _merged([plan_of(part, known) for part in parts])
    if not isinstance(hint, type) or hint.__module__ == "builtins":
        return None
    if hint not in known:
        known[hint] = {}
        known[hint].update(_members(hint, known))
    return known[hint] or None


def _members(kind: type, known: dict[object, dict[str, Plan]]) -> dict[str, Plan]:
    try:
        hints: Mapping[str, object] = typing.get_type_hints(kind, include_extras=True)
    except (NameError, TypeError):
        return {}
    plans: dict[str, Plan] = {}
    for name, hint in hints.items():
        plan = plan_of(hint, known)
        if plan is not None:
            for spelling in _spellings(kind, name):
                plans[spelling] = plan
    return plans


def _spellings(kind: type, name: str) -> set[str]:
    """Return the names that a member may have in JSON: its own, and its alias."""
    names = {name}
    for own, field in zip(
        getattr(kind, "__struct_fields__", ()),
        getattr(kind, "__struct_encode_fields__", ()),
        strict=False,
    ):
        if own == name:
            names.add(field)
    field = getattr(kind, "model_fields", {}).get(name)
    alias = getattr(field, "alias", None)
    if isinstance(alias, str):
        names.add(alias)
    return names


def _merged(plans: list[Plan]) -> Plan:
    if any(plan is True for plan in plans):
        return True
    members: dict[str, Plan] = {}
    for plan in plans:
        if isinstance(plan, dict):
            members |= plan
    return members or None

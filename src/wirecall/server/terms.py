"""The words of a declaration: what a method may say about itself, and what its reconcile function may answer.

Every method has a kind (P1): a query reads, a command changes something. The kind decides what a missing id, a
notification, a retry and a batch mean, so there is no third state and no default.
"""

import enum
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from msgspec import Struct

Execution: TypeAlias = Literal["sequential", "parallel"]
OnCrash: TypeAlias = Literal["unknown", "rerun", "reconcile", "transactional"]
Exposed: TypeAlias = Literal["rpc", "mcp"]
KeyRule: TypeAlias = Literal["optional", "required", "ask"]

EVERYWHERE: tuple[Exposed, ...] = ("rpc", "mcp")


class Kind(enum.Enum):
    """What a method does to the world."""

    QUERY = "query"
    COMMAND = "command"


class Terms(Struct, frozen=True, kw_only=True):
    """What a command declares about its own retries; docs/commands.md tells what each field means."""

    on_crash: OnCrash = "unknown"
    retention: float = 86_400
    lease: float = 30
    wait: float = 25
    max_stored_result: int = 262_144
    reconcile: Callable[..., Any] | None = None
    commit_point: bool = False  # the handler calls ctx.commit_point() itself


class Done(Struct, frozen=True):
    """A reconcile function's answer: the command took effect, with this result."""

    result: Any = None


class NotDone(Struct, frozen=True):
    """A reconcile function's answer: the command did not take effect and may run."""


class CannotTell(Struct, frozen=True):
    """A reconcile function's answer: nobody knows; the outcome stays unknown until an operator resolves it."""


class ToolAnnotations(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a tool says about itself, in MCP's words; what is not said has the specification's default (T1)."""

    title: str | None = None
    readOnlyHint: bool = False  # noqa: N815
    destructiveHint: bool | None = None  # noqa: N815
    idempotentHint: bool | None = None  # noqa: N815
    openWorldHint: bool | None = None  # noqa: N815

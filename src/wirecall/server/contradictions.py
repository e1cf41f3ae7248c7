"""What a declaration must not say: a contradiction is an error at registration, with its reason and a way out.

A check is a function that yields what is wrong with a method, as (why, fix). The first that is found is raised.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from wirecall.errors import UsageError
from wirecall.server.functions import is_generator
from wirecall.server.terms import EVERYWHERE, Execution, KeyRule, OnCrash, Terms

if TYPE_CHECKING:
    from wirecall.protocol.params import Signature
    from wirecall.server.method import Method

# Every method of every revision of MCP, and what later ones would be called.
MCP_METHODS = ("initialize", "ping")
MCP_FAMILIES = (
    "completion/",
    "elicitation/",
    "logging/",
    "notifications/",
    "prompts/",
    "resources/",
    "roots/",
    "sampling/",
    "server/",
    "subscriptions/",
    "tasks/",
    "tools/",
)

LONGEST_TOOL_NAME = 128
_NAME_MARKS = str.maketrans("_-.", "aaa")

Faults: TypeAlias = Iterator[tuple[str, str]]


def check(method: "Method", reserved: bool) -> None:
    """Refuse a method that contradicts itself. One of the protocol's own is `reserved`: its name may say so."""
    for why, fix in _faults(method, reserved):
        raise UsageError(f"{method.name or method.function!r} cannot be registered.", why, fix)


def check_reconciler(method: "Method", reconciler: "Signature") -> None:
    """Refuse a reconcile function that cannot be asked with the params of its command."""
    theirs, ours = ([p.name for p in s.parameters] for s in (reconciler, method.signature))
    if theirs != ours:
        raise UsageError(
            f"The reconcile function of {method.name} cannot be asked.",
            f"it takes ({', '.join(theirs)}), the command takes ({', '.join(ours)})",
            "give it the command's own parameters",
        )


def _faults(method: "Method", reserved: bool) -> Faults:
    yield from _in_name(method, reserved)
    for faults_in in (_in_kind, _in_running, _in_crash, _in_key, _in_amounts):
        yield from faults_in(method)
    yield from _in_serving(method, reserved)


def _in_name(method: "Method", reserved: bool) -> Faults:
    if not method.name:
        yield "a method needs a name", 'name="..."'
    if reserved:
        return
    # JSON-RPC 2.0, section 4.1: names that begin with "rpc." are reserved for the protocol and its extensions.
    if method.name.startswith("rpc."):
        yield 'names that begin with "rpc." belong to the protocol', "choose another name"
    # JSON-RPC and MCP share one line on stdio, so a method of the one must not have the name of a method of the other.
    if "rpc" in method.expose and (method.name in MCP_METHODS or method.name.startswith(MCP_FAMILIES)):
        yield "the name is that of a method of MCP", 'choose another name, or serve it as a tool alone: expose=("mcp",)'


def _in_kind(method: "Method") -> Faults:
    if method.is_command and method.notification_allowed:
        why = "a command without an id is never executed, so it cannot be a notification"
        yield why, "make it a query, or drop notification_allowed"
    if not method.is_command and method.destructive:
        yield "a query reads, so it cannot be destructive", "register it with @app.command"
    if not method.is_command and method.idempotent is False:
        yield "a query reads, so it can be repeated", "drop idempotent=False, or register it with @app.command"


def _in_running(method: "Method") -> Faults:
    if is_generator(method.function):
        yield (
            "a generator function gives a generator and not a result",
            "return a list, or tell by ctx.progress how far it is",
        )
    if any(parameter.name == "self" for parameter in method.signature.parameters):
        yield "a caller would have to send `self`", "register the method of an object: app.query(shop.price)"
    if method.blocking and method.is_async:
        why = "a coroutine function runs on the event loop, blocking=True is for plain functions"
        yield why, "drop blocking=True, or make the function a plain one"
    if method.timeout is not None and not _is_amount(method.timeout):
        yield "a timeout is a number of seconds above 0", "timeout=5"
    if method.timeout is not None and not (method.is_async or method.blocking):
        yield "a plain function cannot be interrupted", "make it async, or declare blocking=True"


def _in_crash(method: "Method") -> Faults:
    on_crash, reconcile = method.terms.on_crash, method.terms.reconcile
    if on_crash == "reconcile" and reconcile is None:
        fix = "reconcile=a function that takes the command's params and returns Done(result), NotDone() or CannotTell()"
        yield 'on_crash="reconcile" needs a function that tells what happened', fix
    if on_crash != "reconcile" and reconcile is not None:
        why = 'a reconcile function is asked only with on_crash="reconcile"'
        yield why, 'declare on_crash="reconcile", or drop the function'
    if on_crash not in get_args(OnCrash):
        yield _none_of(on_crash, OnCrash), 'on_crash="unknown"'


def _in_serving(method: "Method", reserved: bool) -> Faults:
    if method.execution is not None and method.execution not in get_args(Execution):
        yield _none_of(method.execution, Execution), 'execution="sequential"'
    if not method.expose or not {*method.expose} <= {*EVERYWHERE}:
        why = f"{method.expose!r}: a method is served as {' and '.join(EVERYWHERE)}, or as one of them"
        yield why, 'expose=("rpc",)'
    # MCP 2025-11-25, server/tools, "Tool Names".
    if "mcp" in method.expose and not reserved:
        plain = method.name.translate(_NAME_MARKS)
        if not (plain.isascii() and plain.isalnum() and len(plain) <= LONGEST_TOOL_NAME):
            why = f"the name of a tool has 1 to {LONGEST_TOOL_NAME} of the characters A-Z, a-z, 0-9, _, - and ."
            yield why, 'choose another name, or serve it over JSON-RPC alone: expose=("rpc",)'


def _in_key(method: "Method") -> Faults:
    if method.key not in get_args(KeyRule):
        yield _none_of(method.key, KeyRule), 'key="optional"'
    if not method.is_command and method.key != "optional":
        yield "only a command has an idempotency key", f'drop key="{method.key}", or make it a command'


def _in_amounts(method: "Method") -> Faults:
    for field in ("retention", "lease", "wait", "max_stored_result"):
        if not _is_amount(getattr(method.terms, field)):
            yield f"{field} must be a number above 0", f"{field}={getattr(Terms(), field)}"


def _none_of(value: Any, words: Any) -> str:
    return f"{value!r} is none of {', '.join(get_args(words))}"


def _is_amount(value: Any) -> bool:
    """A number above 0 that a store can hold: what is none must not be found out by the first command."""
    return (type(value) is int and 0 < value < 2**63) or (type(value) is float and value > 0)

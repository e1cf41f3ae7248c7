"""docs/errors.md, made from errors.py: `python -m tests.docs_errors` writes it, and a test compares.

Codes, types, names and what is said of Python's exceptions are those of the classes. Only what a reader should do about an
error stands here, by class: a new class without a row, and a row without a class, break the page.
"""

from collections.abc import Sequence
from pathlib import Path

from wirecall import errors
from wirecall.errors import CallFailed, FixedError, RpcError, WirecallError

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"

HEAD = """\
# Errors

Codes in -32768..-32000 are JSON-RPC's and MCP's. Ours are positive and shaped like HTTP statuses. Each of ours carries
`data.type` and `data.ran`, which says whether the command took effect: `"no"`, `"yes"` or `"unknown"`.
"""

FOOT = """\
Whatever a handler raises on purpose, `DomainError(code, message, data)`, travels as it is; a tool may raise
`ToolError("words for the model")`. In MCP both are results with `isError`; [mcp.md](mcp.md) tells which errors are not.

## In Python

All are in `wirecall.errors`. An error that a server answered reaches the client's caller as the class of its code. A call
without an answer is a `CallFailed`, whose `ran` says what is known about the call.
"""

# What it means, and what to do, by class.
EXPLAINED: dict[type[FixedError], tuple[str, str]] = {
    errors.ParseError: ("the message is not JSON", "mend the sender; `data.reason` says where"),
    errors.InvalidRequest: ("the JSON is not a request that may be made", "see `data.reason`"),
    errors.LimitExceeded: (
        "the message is larger than a limit",
        "split it; `data.limit` and `data.max` say which and how much",
    ),
    errors.MethodNotFound: ("there is no method of that name", "ask `rpc.discover`"),
    errors.InvalidParams: ("the params do not fit the method", "see `data.reason`: what and where"),
    errors.KeyRequired: ("a command in production came without a key", "add `params.idempotency_key`"),
    errors.KeyInvalid: ("the key is not 1 to 255 printable ASCII characters, or two were given", "correct it"),
    errors.BadInput: (
        "MCP: an answer to a question, or the state of a call, is not what was asked for or given",
        "begin the call anew",
    ),
    errors.InternalError: (
        "the handler failed, or its result could not be sent",
        "look in the log for the correlation id",
    ),
    errors.HeaderMismatch: (
        "MCP 2026-07-28: an HTTP header is missing, doubled, or says other things than the body",
        "`data.header` says which",
    ),
    errors.NotCapable: (
        "MCP: the call asks for something that the client has not declared",
        "declare it; `data.requiredCapabilities`",
    ),
    errors.UnknownVersion: ("MCP: the revision is not served", "take one of `data.supported`"),
    errors.KeyInProgress: (
        "the first call with this key is still running",
        "the same key again, after `retry_after_ms`",
    ),
    errors.ResultNotRetained: ("the command was done, its result is no longer kept", "nothing: it was done"),
    errors.KeyConflict: ("the key was used with other params", "a bug of the caller: one key per intent"),
    errors.Busy: ("too many calls are in flight", "again, after `retry_after_ms`"),
    errors.LedgerUnavailable: ("the ledger cannot be reached; nothing ran", "the same key again, later"),
    errors.DeadlineExceeded: (
        "the method did not answer within its timeout",
        "see `ran`; the same key again is safe",
    ),
    errors.OutcomeUnknown: (
        "it is not known whether the command took effect",
        "the same key again may become definite; or an operator resolves it",
    ),
}


def page() -> str:
    """The page as it should be."""
    return f"{HEAD}\n{_codes()}\n{FOOT}\n{_exceptions()}"


def fixed() -> list[type[FixedError]]:
    """The errors with a code of their own, in the order of errors.py, but those of one code together."""
    found = [kind for kind in _defined() if issubclass(kind, FixedError) and kind is not FixedError]
    codes = [kind.CODE for kind in found]
    return sorted(found, key=lambda kind: codes.index(kind.CODE))


def _codes() -> str:
    kinds = fixed()
    assert set(kinds) == set(EXPLAINED), "explain every error with a code in tests/docs_errors.py"
    names = [(str(kind.CODE), f"`{kind.TYPE}`" if kind.TYPE else "", f"`{kind.__name__}`") for kind in kinds]
    rows = [(*name, *EXPLAINED[kind]) for name, kind in zip(names, kinds, strict=True)]
    return _table(("Code", "`data.type`", "Class", "What it means", "What to do"), rows)


def _exceptions() -> str:
    plain = [kind for kind in _defined() if not issubclass(kind, RpcError) and kind is not WirecallError]
    rows = [(f"`{kind.__name__}`", _ran(kind), _sentence(kind)) for kind in plain]
    return _table(("Class", "`ran`", "What it means"), rows)


def _defined() -> list[type[WirecallError]]:
    values = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, WirecallError)]
    return [value for value in values if value.__module__ == errors.__name__]


def _ran(kind: type[WirecallError]) -> str:
    return f"`{kind.RAN}`" if issubclass(kind, CallFailed) else ""


def _sentence(kind: type[WirecallError]) -> str:
    return " ".join((kind.__doc__ or "").split())


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page())

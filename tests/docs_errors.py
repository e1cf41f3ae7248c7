"""Generates docs/errors.md from errors.py: `python -m tests.docs_errors` writes the page, and a
test compares it.

Codes, types, names and the sentences about Python's exceptions come from the classes. Only the
meaning and the fix of each error are written here. A class without a row and a row without a class
both fail.
"""

from collections.abc import Sequence
from pathlib import Path

from wirecall import errors
from wirecall.errors import CallFailed, FixedError, RpcError, WirecallError

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"

HEAD = """\
# Errors

JSON-RPC and MCP define the codes in -32768..-32000. wirecall's own codes are positive and resemble
HTTP statuses. Each of them carries `data.type` and `data.ran`. `data.ran` reports whether the
command took effect: `"no"`, `"yes"` or `"unknown"`.
"""

FOOT = """\
A handler raises `DomainError(code, message, data)` to send its own error, and a tool may raise
`ToolError("text for the model")`. Over MCP both become results with `isError`;
[mcp.md](mcp.md#what-a-tool-returns) lists the errors that stay JSON-RPC errors.
Choose codes outside -32768..-32000. If a command raises one of the reserved codes after its commit
point, the server adds `"ran": "yes"` to `data`, because to a client such a code means that nothing
ran.

## In Python

All classes are in `wirecall.errors`. If a server answers with an error, the client raises the class
of its code. If a call gets no answer, the client raises a `CallFailed`, and its `ran` reports
whether the call may have taken effect.
"""

# The meaning and the fix, by class.
EXPLAINED: dict[type[FixedError], tuple[str, str]] = {
    errors.ParseError: (
        "the message is not valid JSON",
        "fix the sender; `data.reason` names the position",
    ),
    errors.InvalidRequest: ("the message is not a valid request", "see `data.reason`"),
    errors.LimitExceeded: (
        "the message is larger than a limit",
        "split it; `data.limit` and `data.max` name the limit and its value",
    ),
    errors.ReferencesOff: (
        "batch: an entry has `refs` or `after`, and the server does not allow references",
        "turn them on with `App(references=True)`, or send the calls one after another",
    ),
    errors.MethodNotFound: (
        "there is no method with that name",
        "`data.did_you_mean` has the nearest name; call `rpc.discover` for the list",
    ),
    errors.InvalidParams: ("the params do not match the method", "see `data.reason`"),
    errors.KeyRequired: ("the command needs an idempotency key", "add `params.idempotency_key`"),
    errors.KeyInvalid: (
        "the key is not 1 to 255 printable ASCII characters, or the call has two keys",
        "fix the key",
    ),
    errors.BadInput: (
        "MCP: an answer does not match its question, or the state of the call is not valid",
        "start the call again",
    ),
    errors.ReferenceInvalid: (
        "batch: a reference is malformed, or does not go to one earlier request; "
        "nothing of this entry ran",
        "see `data.reason`",
    ),
    errors.ReferenceLimit: (
        "batch: references take more than a limit allows; nothing of this entry ran",
        "split the batch; `data.limit` and `data.max` name the limit and its value",
    ),
    errors.BatchInvalid: (
        "batch tool: its arguments are malformed, and nothing ran; or an entry calls a batch",
        "see `data.reason`",
    ),
    errors.InternalError: (
        "the handler failed, or its result could not be sent",
        "look up the correlation id in the server's log",
    ),
    errors.HeaderMismatch: (
        "MCP 2026-07-28: an HTTP header is missing, repeated, or contradicts the body",
        "fix the header in `data.header`",
    ),
    errors.NotCapable: (
        "MCP: the call needs a capability that the client has not declared",
        "declare those in `data.requiredCapabilities`",
    ),
    errors.VisitRequired: (
        "MCP 2025-11-25: the user has to visit a page before the call, "
        "and there is no handler for that, or they declined",
        "pass `elicit_url=` to `connect`; `data.elicitations` has the addresses",
    ),
    errors.UnknownVersion: (
        "MCP: the server does not support the revision",
        "use one of `data.supported`",
    ),
    errors.KeyInProgress: (
        "the first call of this command is still running",
        "retry after `retry_after_ms`, with the same key if it had one",
    ),
    errors.ResultNotRetained: (
        "the command took effect, but its result is not stored",
        "do not retry: it is done",
    ),
    errors.KeyConflict: (
        "the key was used with other params",
        "fix the caller: one key per intent",
    ),
    errors.DependencyFailed: (
        "batch: an entry that this one refers to has failed; nothing of this one ran",
        "see the error of the entry in `data.id`",
    ),
    errors.DependencyUnknown: (
        "batch: the outcome of an entry that this one refers to is unknown; "
        "nothing of this one ran",
        "retry the batch with the same keys when that entry is settled",
    ),
    errors.ReferenceNotFound: (
        "batch: a pointer finds nothing in the result of its entry; nothing of this one ran",
        "fix the path in `data.path`",
    ),
    errors.ConfirmRequired: (
        "batch tool: a destructive entry did not run, because no person has confirmed it",
        "call the tool without a batch, declare it with `destructive=False`, "
        'or use `BatchTool(destructive="allow")`',
    ),
    errors.Busy: (
        "too many calls are in flight, or all connections to the ledger are in use; nothing ran",
        "retry after `retry_after_ms`",
    ),
    errors.ResponseTooLarge: (
        "stream: the answers of this batch are longer than `Limits.bytes_out`; "
        "nothing of this entry ran",
        "send the entry in another batch; `data.limit` and `data.max` name the limit and its value",
    ),
    errors.UpstreamUnavailable: (
        "the server behind a gateway cannot be reached; nothing was sent to it, so nothing ran",
        "retry later; `data.upstream` names the server, and `data.reason` says what failed",
    ),
    errors.LedgerUnavailable: (
        "the server cannot reach its ledger, or it is not the one that the server knew; nothing ran",
        "retry later with the same key",
    ),
    errors.AuditUnavailable: (
        "the server must record each command in its audit trail, and cannot; nothing ran",
        "retry later with the same key",
    ),
    errors.DeadlineExceeded: (
        "the method did not finish within its timeout",
        "see `data.ran`; a retry with the same key is safe; `data.reason` names the method and the timeout",
    ),
    errors.OutcomeUnknown: (
        "the server does not know whether the command took effect",
        "retry later with the same key, or resolve the record by hand",
    ),
}


def page() -> str:
    """Return the page as it should be."""
    return f"{HEAD}\n{_codes()}\n{FOOT}\n{_exceptions()}"


def fixed() -> list[type[FixedError]]:
    """Return the errors that have their own code, in the order of errors.py, grouped by code."""
    found = [kind for kind in _defined() if issubclass(kind, FixedError) and kind is not FixedError]
    codes = [kind.CODE for kind in found]
    return sorted(found, key=lambda kind: codes.index(kind.CODE))


def _codes() -> str:
    kinds = fixed()
    assert set(kinds) == set(EXPLAINED), "explain every error with a code in tests/docs_errors.py"
    names = [
        (str(kind.CODE), f"`{kind.TYPE}`" if kind.TYPE else "", f"`{kind.__name__}`")
        for kind in kinds
    ]
    rows = [(*name, *EXPLAINED[kind]) for name, kind in zip(names, kinds, strict=True)]
    return _table(("Code", "`data.type`", "Class", "Meaning", "Fix"), rows)


def _exceptions() -> str:
    plain = [
        kind for kind in _defined() if not issubclass(kind, RpcError) and kind is not WirecallError
    ]
    rows = [(f"`{kind.__name__}`", _ran(kind), _sentence(kind)) for kind in plain]
    return _table(("Class", "`ran`", "Meaning"), rows)


def _defined() -> list[type[WirecallError]]:
    values = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, WirecallError)
    ]
    return [value for value in values if value.__module__ == errors.__name__]


def _ran(kind: type[WirecallError]) -> str:
    return f"`{kind.RAN}`" if issubclass(kind, CallFailed) else ""


def _sentence(kind: type[WirecallError]) -> str:
    doc = kind.__doc__ or ""
    kept = doc.split("\n\n")
    if ">>> " in doc:  # parameters and examples are in the reference
        kept = [kept[0], *(each for each in kept[1:] if not each.strip().startswith(("`", ">>>")))]
    return " ".join(" ".join(kept).split())


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page())

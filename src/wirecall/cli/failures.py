"""Errors for people, in three lines: what happened, why, and what to do next.

A verb raises a `Failure`, or lets an error of wirecall pass: `failure_of` knows what each of them means here. Nothing else
decides about exit codes. A traceback is for faults of wirecall only, and only if WIRECALL_TRACEBACK is set.
"""

import os
from collections.abc import Iterable
from enum import IntEnum
from typing import Any

import click

from wirecall import errors
from wirecall.errors import CallFailed, RpcError, UsageError


class Exit(IntEnum):
    """The codes; `TEXTS` is what `wirecall --help` prints about them."""

    DONE = 0
    FAULT = 1
    USAGE = 2
    AUTH = 3
    UNREACHABLE = 4
    REMOTE = 5
    UNKNOWN = 6
    SOME_FAILED = 7
    KEY = 8
    FOUND = 9
    PROTOCOL = 10
    INTERRUPTED = 130


TEXTS = {
    Exit.DONE: "done; a replayed answer is done too",
    Exit.FAULT: "a fault of wirecall itself, or its output cannot be written",
    Exit.USAGE: "wrong usage, or a file or an argument that cannot be used; nothing was sent",
    Exit.AUTH: "the server wants to know who calls, or refuses this caller",
    Exit.UNREACHABLE: "nobody answers there, or the server process did not start",
    Exit.REMOTE: "the server answered with an error",
    Exit.UNKNOWN: "timed out or cut off: the outcome is unknown; repeat with the same --key",
    Exit.SOME_FAILED: "some entries of the batch failed; each is on stdout",
    Exit.KEY: "refused because of the idempotency key",
    Exit.FOUND: "a check found problems; the check itself worked",
    Exit.PROTOCOL: "the other side does not keep to the protocol",
    Exit.INTERRUPTED: "interrupted by Ctrl-C, or a question was answered with no",
}


TRACEBACK_VARIABLE = "WIRECALL_TRACEBACK"


class Failure(click.ClickException):
    """What, why, next; `facts` are further members of the error in `--json` (code, data, key, ...)."""

    def __init__(
        self, what: str, why: str = "", next: str = "", *, exit: Exit = Exit.USAGE, type: str = "usage", **facts: Any
    ) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.next = next
        self.type = type
        self.facts = facts
        self._exit = exit

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return int(self._exit)

    def text(self) -> str:
        """As it is shown to people."""
        # A text of a server may have lines of its own: further in than ours, they cannot be taken for ours.
        lines = [_indented(self.what), *(f"  {name}: {_indented(text)}" for name, text in self._reasons() if text)]
        return "\n".join(lines)

    def document(self) -> dict[str, Any]:
        """As it is shown to programs."""
        told = {name: text for name, text in self._reasons() if text}
        return {"type": self.type, "message": self.what, **told, **self.facts, "exit": self.exit_code}

    def _reasons(self) -> tuple[tuple[str, str], ...]:
        return ("why", self.why), ("next", self.next)


def _indented(text: str) -> str:
    return text.replace("\n", "\n       ")


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that may have been meant."""
    from difflib import get_close_matches  # late: mistakes are rare

    return next(iter(get_close_matches(name, list(names), 1, 0.6)), None)


# --- what others raise ----------------------------------------------------------------------------------------------


def failure_of(error: BaseException) -> Failure:
    """Any error as one for people."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, click.ClickException):
        return _of_click(error)
    if isinstance(error, UsageError):
        return _of_usage(error)
    if isinstance(error, CallFailed):
        return _of_failed(error)
    if isinstance(error, RpcError):
        return _of_remote(error)
    return _of_fault(error)


def _of_click(error: click.ClickException) -> Failure:
    ctx = getattr(error, "ctx", None)
    path = ctx.command_path if ctx is not None else "wirecall"
    return Failure(" ".join(error.format_message().split()), next=f"{path} --help")


def _of_usage(error: UsageError) -> Failure:
    text, _, fix = str(error).partition("\n  fix: ")
    what, _, why = text.partition("\n  why: ")
    return Failure(what, why, fix)


AGAIN = "repeat it with the same --key: it takes effect once"

# By kind of failure, the most special first: exit code, type, what, next. The why is the error's own text.
_FAILED: tuple[tuple[type[CallFailed], Exit, str, str, str], ...] = (
    (errors.Declined, Exit.INTERRUPTED, "declined", "Nothing was sent.", "answer yes, or give --yes"),
    (
        errors.NotSent,
        Exit.UNREACHABLE,
        "unreachable",
        "The server cannot be reached.",
        "is it running, and is this its address?",
    ),
    (errors.TimedOut, Exit.UNKNOWN, "timed_out", "No answer came in time; the outcome is unknown.", AGAIN),
    (errors.ConnectionLost, Exit.UNKNOWN, "connection_lost", "The connection broke; the outcome is unknown.", AGAIN),
    (
        errors.Refused,
        Exit.PROTOCOL,
        "not_rpc",
        "What answers there does not speak JSON-RPC.",
        "give the address of its endpoint: .../rpc or .../mcp",
    ),
    (
        errors.BadAnswer,
        Exit.PROTOCOL,
        "bad_answer",
        "The server does not keep to the protocol.",
        "wirecall probe tells what it speaks",
    ),
    (errors.CallFailed, Exit.UNKNOWN, "failed", "The call failed.", AGAIN),
)

# HTTP statuses that say more than that something failed.
_STATUSES: dict[int, tuple[Exit, str, str, str]] = {
    401: (Exit.AUTH, "unauthorized", "The server wants to know who calls.", "--header 'Authorization: Bearer ...'"),
    403: (Exit.AUTH, "forbidden", "The server refuses this caller.", "--header with other credentials, or ask its operator"),
    413: (Exit.REMOTE, "too_large", "The server takes no message of this size.", "send less at once"),
    429: (Exit.REMOTE, "busy", "The server asks to come back later.", "wait, and repeat"),
    **dict.fromkeys((500, 502, 503, 504), (Exit.REMOTE, "server_error", "The server failed.", "look into the server's log")),
}


def _of_failed(error: CallFailed) -> Failure:
    facts: dict[str, Any] = {"ran": error.ran} | ({"status": error.status} if error.status else {})
    by_kind = next(row[1:] for row in _FAILED if isinstance(error, row[0]))
    exit, type, what, next_step = _STATUSES.get(error.status or 0, by_kind)
    return Failure(what, str(error).removeprefix("the server cannot be reached: "), next_step, exit=exit, type=type, **facts)


# By what a server answered: exit code and what to do next.
_REMOTE: tuple[tuple[type[RpcError], Exit, str], ...] = (
    (errors.KeyConflict, Exit.KEY, "use a new key for a new command, or repeat the first one with its own params"),
    (errors.KeyInProgress, Exit.KEY, "wait, and repeat it with the same --key"),
    (errors.KeyRequired, Exit.KEY, "--key auto, or --key with a value of your own"),
    (errors.KeyInvalid, Exit.KEY, "use 1 to 255 printable ASCII characters without spaces"),
    (errors.ResultNotRetained, Exit.KEY, "the command was done; ask the server for what it did"),
    (errors.OutcomeUnknown, Exit.KEY, "find out whether it took effect, then: wirecall ledger resolve"),
    (errors.DeadlineExceeded, Exit.UNKNOWN, AGAIN),
    (errors.MethodNotFound, Exit.REMOTE, "wirecall list shows what there is"),
    (errors.InvalidParams, Exit.REMOTE, "wirecall show tells what the method takes"),
    (errors.Busy, Exit.REMOTE, "wait, and repeat"),
    (errors.LedgerUnavailable, Exit.REMOTE, "nothing ran; repeat when the server's ledger is back"),
    (errors.InternalError, Exit.REMOTE, "the server's log tells what failed"),
    (errors.RpcError, Exit.REMOTE, ""),
)


def _of_remote(error: RpcError) -> Failure:
    exit, next_step = next(row[1:] for row in _REMOTE if isinstance(error, row[0]))
    data = error.data if isinstance(error.data, dict) else {}
    facts: dict[str, Any] = {"code": error.code, "ran": error.ran} | ({"data": error.data} if error.data is not None else {})
    kind = data.get("type") if isinstance(data.get("type"), str) else "remote"
    return Failure(_sentence(error.message), _told(error, data), next_step, exit=exit, type=kind or "remote", **facts)


def _sentence(text: str) -> str:
    """The server's words, as the first line of ours."""
    line = text.strip() or "The server answered with an error."
    return line if line[-1] in ".!?" else f"{line}."


def _told(error: RpcError, data: dict[str, Any]) -> str:
    from wirecall.protocol.messages import encode

    reason = data.get("reason")
    if isinstance(reason, str):
        return f"{reason} (code {error.code})"
    return f"code {error.code}" + (f", {encode(error.data).decode()}" if error.data is not None else "")


def _of_fault(error: BaseException) -> Failure:
    if os.environ.get(TRACEBACK_VARIABLE):
        import traceback

        traceback.print_exception(error)
    return Failure(
        "Something went wrong inside wirecall.",
        f"{type(error).__name__}: {error}",
        f"set {TRACEBACK_VARIABLE}=1, repeat, and report what it prints",
        exit=Exit.FAULT,
        type="fault",
    )

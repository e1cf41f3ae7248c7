"""Errors for people, in three lines: what happened, why, and what to do next.

A verb raises a `CliError`, or lets an error of wirecall pass: `failure_of` translates each of them.
Nothing else decides exit codes. A traceback is printed only for errors inside wirecall or in the
user's code, and only with `--traceback` or if WIRECALL_TRACEBACK is set.
"""

import errno
import os
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import click

from wirecall import errors
from wirecall.errors import CallFailed, RpcError, StartFailed, UsageError, nearest


class Exit(IntEnum):
    """The exit codes, which `wirecall --help` explains."""

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
    Exit.DONE: "done, also if the answer is a replay",
    Exit.FAULT: "wirecall itself failed, the app cannot start, or the output cannot be written",
    Exit.USAGE: "wrong usage, or a file or an argument that cannot be used; nothing was sent",
    Exit.AUTH: "the server asks for credentials, or refuses this caller",
    Exit.UNREACHABLE: "the server does not answer, or its process did not start",
    Exit.REMOTE: "the server answered with an error",
    Exit.UNKNOWN: "timed out or cut off: the outcome is unknown; repeat with the same --key",
    Exit.SOME_FAILED: "some entries of the batch failed; each is on stdout",
    Exit.KEY: "refused because of the idempotency key",
    Exit.FOUND: "a check found problems; the check itself worked",
    Exit.PROTOCOL: "the server does not follow the protocol",
    Exit.INTERRUPTED: "interrupted by Ctrl-C, or a question was answered with no",
}

TRACEBACK_VARIABLE = "WIRECALL_TRACEBACK"


class CliError(click.ClickException):
    """An error for people: what, why, next.

    `facts` are further members of the error in `--json` (code, data, key, ...).
    """

    def __init__(
        self,
        what: str,
        why: str = "",
        next: str = "",
        *,
        exit: Exit = Exit.USAGE,
        type: str = "usage",
        **facts: object,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.next = next
        self.type = type
        self.facts = facts
        self.exit = exit

    def text(self) -> str:
        """Return the error for people."""
        # A server's message may have several lines. They are indented further than ours, so they
        # cannot imitate ours.
        lines = [self.what]
        lines += [f"  {name}: {text}" for name, text in self._reasons().items()]
        return "\n".join(line.replace("\n", "\n       ") for line in lines)

    def document(self) -> dict[str, object]:
        """Return the error for programs."""
        return {
            "type": self.type,
            "message": self.what,
            **self._reasons(),
            **self.facts,
            "exit": int(self.exit),
        }

    def _reasons(self) -> dict[str, str]:
        """Return why it happened and what to do next, as far as they are known."""
        return {name: text for name, text in (("why", self.why), ("next", self.next)) if text}


def not_named(question: str, fix: str) -> CliError:
    """Return the error for a verb that needs something that the user has not named."""
    return CliError(question, "neither the command line nor wirecall.toml names one", fix)


class Interrupted(CliError):
    """The user pressed Ctrl-C, or said no."""

    def __init__(self, why: str = "", next: str = "") -> None:
        super().__init__("Interrupted.", why, next, exit=Exit.INTERRUPTED, type="interrupted")


class Unreachable(CliError):
    """The server does not answer, or its process did not start; `why` is the error that says so."""

    def __init__(self, what: str, why: object, next: str, **facts: object) -> None:
        super().__init__(what, str(why), next, exit=Exit.UNREACHABLE, type="unreachable", **facts)


class NotReached(CallFailed):
    """The first message did not reach a server.

    It is not retried: the address is probably wrong, and a user waits.
    """

    RAN = "no"


def no_such(noun: str, name: str, names: Sequence[str], next: str, **facts: Any) -> CliError:
    """Return the error about a name that does not exist.

    It names the one that was probably meant, or all.
    """
    if near := nearest(name, names):
        why = f"did you mean {near}?"
    elif not names:
        why = "there are none"
    elif len(names) == 1:
        why = f"the only one is {names[0]}"
    else:
        why = f"expected one of {', '.join(names)}"
    return CliError(f"There is no {noun} {name!r}.", why, next, **facts)


# --- errors of wirecall ---------------------------------------------------------------------------

AGAIN = "repeat it with the same --key: it takes effect once"
_ENDPOINT = "give the address of its endpoint: .../rpc or .../mcp"

# By kind of failure, the most specific first: exit code, type, what, next. The why is the error's
# message.
_FAILED: tuple[tuple[type[CallFailed], Exit, str, str, str], ...] = (
    (
        errors.Declined,
        Exit.INTERRUPTED,
        "declined",
        "Nothing was sent.",
        "answer yes, or give --yes",
    ),
    (
        errors.NotSent,
        Exit.UNREACHABLE,
        "unreachable",
        "The server cannot be reached.",
        "is it running at this address?",
    ),
    (
        NotReached,
        Exit.UNREACHABLE,
        "unreachable",
        "The server cannot be reached.",
        "is it running at this address?",
    ),
    (
        errors.TimedOut,
        Exit.UNKNOWN,
        "timed_out",
        "No answer came in time; the outcome is unknown.",
        AGAIN,
    ),
    (
        errors.ConnectionLost,
        Exit.UNKNOWN,
        "connection_lost",
        "The connection broke; the outcome is unknown.",
        AGAIN,
    ),
    (
        errors.Refused,
        Exit.PROTOCOL,
        "not_rpc",
        "The server at this address does not speak JSON-RPC.",
        _ENDPOINT,
    ),
    (
        errors.BadAnswer,
        Exit.PROTOCOL,
        "bad_answer",
        "The server does not follow the protocol.",
        "wirecall probe finds out which protocols it speaks",
    ),
    (
        errors.TaskGone,
        Exit.REMOTE,
        "task_gone",
        "The server does not know the task.",
        "check the id and the credentials; a server forgets a task some time after its end",
    ),
    (
        errors.TaskCancelled,
        Exit.REMOTE,
        "task_cancelled",
        "The task was cancelled.",
        "find out what it has done before you call the tool again",
    ),
    (errors.CallFailed, Exit.UNKNOWN, "failed", "The call failed.", AGAIN),
)

# HTTP statuses that show why the call failed.
_STATUSES: dict[int, tuple[Exit, str, str, str]] = {
    401: (
        Exit.AUTH,
        "unauthorized",
        "The server asks for credentials.",
        "wirecall login URL, or --header 'Authorization: Bearer ...'",
    ),
    403: (
        Exit.AUTH,
        "forbidden",
        "The server refuses this caller.",
        "--header with other credentials, or ask its operator",
    ),
    413: (
        Exit.REMOTE,
        "too_large",
        "The message is too large for the server.",
        "send less at once",
    ),
    429: (Exit.REMOTE, "busy", "The server is busy.", "wait, and repeat"),
    **dict.fromkeys(
        (500, 502, 503, 504),
        (Exit.REMOTE, "server_error", "The server failed.", "check the server's log"),
    ),
}

# By the error in a server's answer: exit code and next.
_REMOTE: tuple[tuple[type[RpcError], Exit, str], ...] = (
    (
        errors.KeyConflict,
        Exit.KEY,
        "use a new key for a new command, or repeat the first one with its own params",
    ),
    (errors.KeyInProgress, Exit.KEY, "wait, and repeat it, with the same --key if it had one"),
    (errors.KeyRequired, Exit.KEY, "--key auto, or --key with a value of your own"),
    (errors.KeyInvalid, Exit.KEY, "use 1 to 255 printable ASCII characters without spaces"),
    (errors.ResultNotRetained, Exit.KEY, "the command was done; ask the server for its effect"),
    (
        errors.OutcomeUnknown,
        Exit.KEY,
        "find out whether it took effect, then: wirecall ledger resolve",
    ),
    (errors.DeadlineExceeded, Exit.UNKNOWN, AGAIN),
    (errors.MethodNotFound, Exit.REMOTE, "wirecall list shows the methods"),
    (
        errors.InvalidParams,
        Exit.REMOTE,
        "wirecall show lists the arguments of a method, wirecall list the methods",
    ),
    (errors.Busy, Exit.REMOTE, "wait, and repeat"),
    (errors.LedgerUnavailable, Exit.REMOTE, "nothing ran; repeat when the server's ledger is back"),
    (
        errors.AuditUnavailable,
        Exit.REMOTE,
        "nothing ran; repeat when its audit trail can be written",
    ),
    (errors.InternalError, Exit.REMOTE, "check the server's log"),
    (errors.RpcError, Exit.REMOTE, ""),
)


# Disk full, quota used up, file too large, or device failure. Other files have their own errors.
_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def failure_of(error: BaseException) -> CliError:
    """Return any error as one for people."""
    if isinstance(error, CliError):
        return error
    if isinstance(error, click.ClickException):
        ctx = getattr(error, "ctx", None)
        path = ctx.command_path if ctx is not None else "wirecall"
        return CliError(" ".join(error.format_message().split()), next=f"{path} --help")
    if isinstance(error, UsageError):
        text, _, fix = str(error).partition("\n  fix: ")
        what, _, why = text.partition("\n  why: ")
        return CliError(what, why, fix)
    if isinstance(error, CallFailed):
        return _of_failed_call(error)
    if isinstance(error, RpcError):
        return _of_answer(error)
    if isinstance(error, OSError) and error.errno in _UNWRITTEN:
        why = error.strerror or str(error)
        next_step = "write it elsewhere"
        return CliError(
            "The output cannot be written.", why, next_step, exit=Exit.FAULT, type="output"
        )
    # `os.getcwd` does not name it.
    if isinstance(error, FileNotFoundError) and error.filename is None:
        return CliError(
            "The current folder does not exist.", "it was removed", "change to another folder: cd ~"
        )
    return _of_fault(error)


def _of_failed_call(error: CallFailed) -> CliError:
    """Return the error of a call that got no answer."""
    by_kind = next(row[1:] for row in _FAILED if isinstance(error, row[0]))
    exit, kind, what, next_step = _STATUSES.get(error.status or 0, by_kind)
    why = str(error).removeprefix("the server cannot be reached: ")
    if isinstance(error, errors.NotAuthorized):
        why = error.reason
        next_step = error.fix or next_step
    failure = CliError(what, why, next_step, exit=exit, type=kind, ran=error.ran)
    if error.status:
        failure.facts["status"] = error.status
    return failure


def _of_answer(error: RpcError) -> CliError:
    """Return the error that a server answered with, in the server's own words."""
    from wirecall.protocol.messages import encode

    exit, next_step = next(row[1:] for row in _REMOTE if isinstance(error, row[0]))
    data = error.data if isinstance(error.data, dict) else {}
    kind = data.get("type")
    reason = data.get("reason")
    what = error.message.removesuffix(f": {reason}").strip()
    what = what or "The server answered with an error."
    if what[-1] not in ".!?":
        what += "."
    why = f"code {error.code}"
    if isinstance(reason, str):
        if reason != error.message:  # a tool's error is the reason alone
            why = f"{reason} (code {error.code})"
    elif error.data is not None:
        why += f", {encode(error.data).decode()}"
    failure = CliError(what, why, next_step, exit=exit, type="remote", code=error.code)
    if kind and isinstance(kind, str):
        failure.type = kind
    failure.facts["ran"] = error.ran
    if error.data is not None:
        failure.facts["data"] = error.data
    return failure


def print_traceback(error: BaseException) -> bool:
    """Print the traceback of an error, if the user asked for it; return whether it was printed."""
    if os.environ.get(TRACEBACK_VARIABLE, "") in ("", "0"):
        return False
    import traceback

    traceback.print_exception(error)
    return True


def _of_fault(error: BaseException) -> CliError:
    """Return an error of the app's start, or one inside wirecall."""
    print_traceback(error)
    if isinstance(error, StartFailed):
        what, _, why = str(error).partition(": ")
        next_step = "remove the cause, and start again; --traceback shows the traceback"
        return CliError(f"{what}.", why, next_step, exit=Exit.FAULT, type="start")
    why = f"{type(error).__name__}: {error}"
    next_step = "repeat it with --traceback, and report the traceback"
    return CliError(
        "Something went wrong inside wirecall.", why, next_step, exit=Exit.FAULT, type="fault"
    )

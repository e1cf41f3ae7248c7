"""What the command's exit code says. Scripts that need more read `error.type` of `--json`."""

from enum import IntEnum


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

"""The log of wirecall: one record per call and per failed handler, and messages of handlers.

The logger is called `wirecall`. Like any library's, it does not log calls until the program enables
it. It does not hide failures: with no handler set up, Python prints warnings and errors to stderr.

    logging.getLogger("wirecall").setLevel(logging.INFO)
    handler.setFormatter(wirecall.logs.JsonFormatter())

Every record carries its facts as attributes, so that a formatter or a filter need not read
sentences: `correlation_id`, `method`, `kind`, `position` (in a batch, from 0), `batch` (the
`call_id` of a batch tool's call), `duration_ms`, `outcome`, `code` (of an error), `reason` (of a
refusal), `caller` and `idempotency_key`. Clients
count their ids from 1, so an id alone does not name a command: caller, method and key do, as in the
ledger. Params and results are not logged: they are the user's, and they may be secret. A message of
`ctx.log` is logged if its client does not want it, with the severity that fits its level.

The ids of a record: `correlation_id` is the JSON-RPC id, `call_id` is unique among the calls of all
processes, `trace_id` and `request_id` come from the caller if it sends them, and `host` and `pid`
name the process. `CURRENT` has the ids of the running call, so that the filter `CallIds` can add
them to the records of every other logger as well.

Callers choose method names, ids and keys, and exceptions quote them. None of these may forge a line
or control a terminal. So every record of this logger has control, bidi and other invisible
characters escaped (a newline is \\u000a), with any handler and formatter of the program.
"""

import logging
import os
import re
import sys
import traceback
import weakref
from collections.abc import Mapping
from contextvars import Context, ContextVar, copy_context
from functools import lru_cache
from typing import Any, Protocol

import msgspec
from msgspec import Struct

# The ids that a call may have.
IDS = ("correlation_id", "call_id", "trace_id", "request_id")
# The facts of a record, in the order of its JSON.
FIELDS = (
    *IDS,
    *("method", "kind", "position", "batch", "duration_ms", "outcome", "code", "reason"),
    *("status", "count", "client"),
    *("caller", "idempotency_key", "host", "pid"),
)

LONGEST_REQUEST_ID = 128
_TRACEPARENT = re.compile("([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")


# --- the ids of a call ----------------------------------------------------------------------------


class Named(Protocol):
    """Something that runs and has ids: a call, or an HTTP request."""

    def facts(self) -> Mapping[str, Any]:
        """Return the ids by their names in a record."""
        ...


CURRENT: ContextVar[Named | None] = ContextVar("wirecall", default=None)


class RequestIds(Struct, frozen=True):
    """The ids that an HTTP request carries."""

    request_id: str | None
    trace_id: str | None

    def facts(self) -> Mapping[str, Any]:
        return {"request_id": self.request_id, "trace_id": self.trace_id}


def request_id_of(value: str | None) -> str | None:
    """Return the value of an X-Request-Id field if it is printable ASCII, and not too long."""
    if not value or len(value) > LONGEST_REQUEST_ID:
        return None
    if not value.isascii() or not value.isprintable():
        return None
    return value


def trace_id_of(traceparent: object) -> str | None:
    """Return the trace id of a W3C traceparent (Trace Context, section 3.2); None if not valid."""
    if not isinstance(traceparent, str):
        return None
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None:
        return None
    version, trace, span, more = found.groups()
    if version == "ff" or (version == "00" and more is not None):
        return None
    if not trace.strip("0") or not span.strip("0"):
        return None
    return trace


@lru_cache
def host() -> str:
    """Return the name of this machine; in a container, of the container."""
    import socket  # late: `import wirecall` stays light

    return socket.gethostname()


def outside() -> Context:
    """Return a copy of the current context without a call, for work of the whole app."""
    context = copy_context()
    context.run(CURRENT.set, None)
    return context


def stamp(record: logging.LogRecord) -> None:
    """Add the names of the process to a record, and the ids of the running call.

    A record that already has the ids of a call keeps them.
    """
    record.host = host()
    record.pid = os.getpid()
    facts: Mapping[str, Any] = {}
    if getattr(record, "call_id", None) is None:
        running = CURRENT.get()
        if running is not None:
            facts = running.facts()
    for name in IDS:
        if getattr(record, name, None) is None:
            setattr(record, name, facts.get(name))


class CallIds(logging.Filter):
    """Adds to every record the ids of the call that made it: `handler.addFilter(CallIds())`.

    The attributes are `correlation_id`, `call_id`, `trace_id`, `request_id`, `host` and `pid`.
    Missing ones are None, so that a format may name them. A filter of a handler sees the records of
    all loggers.

    `name` is that of a logger, as for every filter.

    >>> handler = logging.StreamHandler()
    >>> handler.addFilter(CallIds())
    """

    def __init__(self, name: str = "") -> None:
        super().__init__(name)
        _note_reader(self, _filters)

    def filter(self, record: logging.LogRecord) -> bool:
        stamp(record)
        return super().filter(record)


class Watcher(Protocol):
    """Something that needs to know what reads the ids of the running call."""

    def ids_asked(self, has_filter: bool, has_formatter: bool, /) -> None: ...


_filters: "weakref.WeakSet[object]" = weakref.WeakSet()
_formatters: "weakref.WeakSet[object]" = weakref.WeakSet()
_watchers: "weakref.WeakSet[Watcher]" = weakref.WeakSet()


def watch_ids(watcher: Watcher) -> None:
    """Report now and after each change whether a `CallIds` or a `JsonFormatter` exists.

    Without a `CallIds`, plain queries need no ids.
    """
    _watchers.add(watcher)
    watcher.ids_asked(bool(_filters), bool(_formatters))


def _note_reader(reader: object, readers: "weakref.WeakSet[object]") -> None:
    """Add something that reads the ids, for as long as it lives."""
    # Before the next line: the set forgets the reader first, then this runs.
    weakref.finalize(reader, _notify_watchers)
    readers.add(reader)
    _notify_watchers()


def read_ids(reader: object) -> None:
    """Give the records of commands the ids of their call, for an object that reads them."""
    _note_reader(reader, _formatters)


def read_no_ids(reader: object) -> None:
    """Forget an object of `read_ids`."""
    _formatters.discard(reader)
    _notify_watchers()


def _notify_watchers() -> None:
    for watcher in list(_watchers):
        watcher.ids_asked(bool(_filters), bool(_formatters))


# --- the logger -----------------------------------------------------------------------------------


def escaped(text: str) -> str:
    """Return a string with every unprintable character escaped as in JSON.

    A newline is \\u000a.
    """
    if text.isprintable():
        return text
    signs = []
    for sign in text:
        if not sign.isprintable():
            units = sign.encode("utf-16-be", "surrogatepass").hex()
            sign = "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))
        signs.append(sign)
    return "".join(signs)


def printable(text: str) -> str:
    """Return lines for a terminal, with characters escaped that control it.

    Those that reverse the direction of text are among them.
    """
    if text.isprintable():
        return text
    return _STEERING.sub(lambda found: escaped(found[0]), text)


# Controls except newline and tab, C1 controls, line separators, and the marks of bidirectional
# text.
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


class Escaping(logging.Filter):
    """Escapes a record before any handler sees it, and adds the ids.

    It escapes the message, the facts and the traceback.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        stamp(record)
        message = record.getMessage()
        if not message.isprintable():
            # The "why" and "fix" lines of wirecall's own errors become one line without escapes.
            message = (
                message.replace(".\n  why: ", ": ")
                .replace(".\n  fix: ", "; fix: ")
                .replace("\n  fix: ", "; fix: ")
            )
            record.msg = escaped(message)
            record.args = ()
        for name in FIELDS:
            value = getattr(record, name, None)
            if isinstance(value, str):
                setattr(record, name, escaped(value))
        if record.exc_info and record.exc_info[1] is not None:
            pieces = [piece.strip("\n") for piece in traceback.format_exception(record.exc_info[1])]
            text = "\n".join(escaped(line) for piece in pieces for line in _indented(piece))
            # If nothing needed escaping, the formatter formats the exception in its own way.
            if text != "\n".join(pieces):
                record.exc_text = text
        return True


def _indented(piece: str) -> list[str]:
    """Return the lines of a piece of a traceback.

    The further lines of an exception's message are indented, so that they do not look like lines of
    the log.
    """
    first, *more = piece.split("\n")
    lines = [first]
    for line in more:
        if not line[:1].isspace():
            line = f"    {line}"
        lines.append(line)
    return lines


logger = logging.getLogger("wirecall")
logger.addFilter(Escaping())


def called(**facts: Any) -> None:
    """Log one call, served or refused."""
    logger.info("%(method)s %(outcome)s in %(duration_ms).3f ms", facts, extra=facts)


def failed(
    method: str,
    correlation_id: Any,
    error: BaseException,
    *,
    caller: str = "",
    key: str | None = None,
    ids: Mapping[str, Any] | None = None,
) -> None:
    """Log that a handler raised something that is not an answer.

    It may also have returned something that cannot be sent. Without `ids`, the record gets those of
    the running call.
    """
    facts = {
        "method": method,
        "correlation_id": correlation_id,
        "caller": caller or None,
        "idempotency_key": key,
    }
    named = [
        f"{name.removeprefix('idempotency_')} %({name})s"
        for name in _NAMING
        if facts[name] is not None
    ]
    logger.error(
        ", ".join(["%(method)s failed", *named]),
        facts,
        exc_info=error,
        extra={**facts, **(ids or {})},
    )


_NAMING = ("correlation_id", "caller", "idempotency_key")

# MCP's levels, which are those of RFC 5424, as Python severities.
SEVERITIES = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "notice": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "alert": logging.CRITICAL,
    "emergency": logging.CRITICAL,
}


def noted(level: str, data: object, name: str | None, **facts: Any) -> None:
    """Log a message of a handler, unless its level is switched off."""
    if logger.isEnabledFor(SEVERITIES[level]):
        words = "%(method)s: %(data)s"
        if name:
            words = "%(method)s, %(name)s: %(data)s"
        logger.log(SEVERITIES[level], words, {**facts, "name": name, "data": data}, extra=facts)


def is_json() -> bool:
    """Return whether this logger writes JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logger.handlers)


def announce(line: str) -> None:
    """Print a line about the server on stderr.

    If the log is JSON, log it, so that every line is JSON.
    """
    if is_json() and logger.isEnabledFor(logging.INFO):
        logger.info("%s", line)
    else:
        print(line, file=sys.stderr, flush=True)


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object, with the ids of the call that made it.

    `args` and `options` are those of `logging.Formatter`: `fmt`, `datefmt`, `style`, `validate` and
    `defaults`. They do not change the lines.

    >>> handler.setFormatter(JsonFormatter())
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _note_reader(self, _formatters)

    def format(self, record: logging.LogRecord) -> str:
        if not hasattr(record, "pid"):  # another logger's record, which no filter has seen
            stamp(record)
        document = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": escaped(record.getMessage()),
        }
        for name in FIELDS:
            value = getattr(record, name, None)
            if isinstance(value, str):
                document[name] = escaped(value)
            elif value is not None:
                document[name] = value
        if record.exc_info:
            text = record.exc_text or self.formatException(record.exc_info)
            document["exception"] = "\n".join(map(escaped, text.split("\n")))
        return msgspec.json.encode(document, enc_hook=str).decode()

"""The log of wirecall: one record per call, one for every handler that failed, and messages that no client wants.

The logger is called `wirecall`. Like any library's it says nothing about calls until the program that uses it asks for it;
a failure it does not hide: with no handler set up, Python prints warnings and errors to stderr.

    logging.getLogger("wirecall").setLevel(logging.INFO)
    handler.setFormatter(wirecall.logs.JsonFormatter())

Every record carries its facts as attributes, so that a formatter or a filter need not read sentences: `correlation_id`,
`method`, `kind`, `position` (in a batch, from 0), `duration_ms`, `outcome`, `code` (of an error), `caller` and
`idempotency_key`. Clients count their ids from 1, so an id alone names no command: caller, method and key do, as in the
ledger. Params and results are not logged: they are the user's, and they may be secret. A message of `ctx.log` is logged if
its client does not want it, with the severity that fits its level.

Callers choose method names, ids and keys, and exceptions quote them. So that none of these can forge a line or steer a
terminal, every record of this logger has control, bidi and other invisible characters escaped (a newline is \\u000a),
whatever handlers and formatters the program uses.
"""

import logging
import re
import traceback
from typing import Any

import msgspec

FIELDS = ("correlation_id", "method", "kind", "position", "duration_ms", "outcome", "code", "caller", "idempotency_key")


def escaped(text: str) -> str:
    """Return the text with every character that is not printable escaped as in JSON: a newline is \\u000a."""
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
    """Return a text of several lines for a terminal, with the characters escaped that steer it or turn its direction."""
    return text if text.isprintable() else _STEERING.sub(lambda found: escaped(found[0]), text)


# Controls but newline and tab, C1 controls, separators of lines, and the marks of bidirectional text.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


class Escaping(logging.Filter):
    """Escapes the message, the facts and the traceback of a record before any handler sees it."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if not message.isprintable():
            # The lines of an error of our own, "why" and "fix", become one line without escapes.
            message = message.replace(".\n  why: ", ": ").replace(".\n  fix: ", "; fix: ").replace("\n  fix: ", "; fix: ")
            record.msg, record.args = escaped(message), ()
        for name in FIELDS:
            value = getattr(record, name, None)
            if isinstance(value, str):
                setattr(record, name, escaped(value))
        if record.exc_info and record.exc_info[1] is not None:
            # A traceback has lines of its own. The further lines of what an exception says are indented, so that they do not
            # look like lines of the log.
            pieces = traceback.format_exception(record.exc_info[1])
            lines = []
            for piece in pieces:
                first, *more = piece.strip("\n").split("\n")
                lines += [first, *(line if line[:1].isspace() else f"    {line}" for line in more)]
            text = "\n".join(map(escaped, lines))
            # Where nothing was to be escaped, a formatter keeps its own way to show an exception.
            if text != "\n".join(piece.strip("\n") for piece in pieces):
                record.exc_text = text
        return True


logger = logging.getLogger("wirecall")
logger.addFilter(Escaping())


def called(**facts: Any) -> None:
    """Log one call, served or refused."""
    logger.info("%(method)s %(outcome)s in %(duration_ms).3f ms", facts, extra=facts)


def failed(method: str, correlation_id: Any, error: BaseException, *, caller: str = "", key: str | None = None) -> None:
    """Log that a handler raised something that is not an answer, or returned something that cannot be sent."""
    facts = {"method": method, "correlation_id": correlation_id, "caller": caller or None, "idempotency_key": key}
    named = [f"{name.removeprefix('idempotency_')} %({name})s" for name in _NAMING if facts[name] is not None]
    logger.error(", ".join(["%(method)s failed", *named]), facts, exc_info=error, extra=facts)


_NAMING = ("correlation_id", "caller", "idempotency_key")

# The levels of MCP, which are those of RFC 5424, as severities of Python.
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
        words = "%(method)s, %(name)s: %(data)s" if name else "%(method)s: %(data)s"
        logger.log(SEVERITIES[level], words, {**facts, "name": name, "data": data}, extra=facts)


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        document = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": escaped(record.getMessage()),
        }
        for name in FIELDS:
            value = getattr(record, name, None)
            if value is not None:
                document[name] = escaped(value) if isinstance(value, str) else value
        if record.exc_info:
            text = record.exc_text or self.formatException(record.exc_info)
            document["exception"] = "\n".join(map(escaped, text.split("\n")))
        return msgspec.json.encode(document, enc_hook=str).decode()

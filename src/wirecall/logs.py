"""What wirecall writes to the log: one record per call, and one for every handler that failed.

The logger is called `wirecall`. Like any library's it says nothing about calls until the program that uses it asks for it;
a failure it does not hide: with no handler set up, Python prints warnings and errors to stderr.

    logging.getLogger("wirecall").setLevel(logging.INFO)
    handler.setFormatter(wirecall.logs.JsonFormatter())

Every record carries its facts as attributes, so that a formatter or a filter need not read sentences: `correlation_id`,
`method`, `kind`, `position` (in a batch, from 0), `duration_ms`, `outcome` and `code` (of an error). Params and results are
not logged: they are the user's, and they may be secret.
"""

import logging
from typing import Any

import msgspec

logger = logging.getLogger("wirecall")

FIELDS = ("correlation_id", "method", "kind", "position", "duration_ms", "outcome", "code")


def called(**facts: Any) -> None:
    """One call, served or refused."""
    logger.info("%(method)s %(outcome)s in %(duration_ms).3f ms", facts, extra=facts)


def failed(method: str, correlation_id: Any, error: BaseException) -> None:
    """A handler raised something that is not an answer, or returned something that cannot be sent."""
    facts = {"method": method, "correlation_id": correlation_id}
    logger.error("%(method)s failed, correlation_id %(correlation_id)s", facts, exc_info=error, extra=facts)


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        facts = {name: _plain(getattr(record, name)) for name in FIELDS if getattr(record, name, None) is not None}
        document = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": _plain(record.getMessage()),
            **facts,
        }
        if record.exc_info:
            document["exception"] = _plain(self.formatException(record.exc_info))
        return msgspec.json.encode(document, enc_hook=str).decode()


def _plain(value: Any) -> Any:
    """A text that UTF-8 can carry: a file's name may hold what it cannot."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value

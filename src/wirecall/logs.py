"""What wirecall writes to the log: one record per call, and one for every handler that failed.

The logger is called `wirecall`. Like any library's it says nothing about calls until the program that uses it asks for it;
a failure it does not hide: with no handler set up, Python prints warnings and errors to stderr.

    logging.getLogger("wirecall").setLevel(logging.INFO)
    handler.setFormatter(wirecall.logs.JsonFormatter())

Every record carries its facts as attributes, so that a formatter or a filter need not read sentences: `correlation_id`,
`method`, `kind`, `position` (in a batch, from 0), `duration_ms`, `outcome`, `code` (of an error), `caller` and
`idempotency_key`. Clients count their ids from 1, so an id alone names no command: caller, method and key do, as in the
ledger. Params and results are not logged: they are the user's, and they may be secret.
"""

import logging
from typing import Any

import msgspec

logger = logging.getLogger("wirecall")

FIELDS = ("correlation_id", "method", "kind", "position", "duration_ms", "outcome", "code", "caller", "idempotency_key")


def called(**facts: Any) -> None:
    """One call, served or refused."""
    logger.info("%(method)s %(outcome)s in %(duration_ms).3f ms", facts, extra=facts)


def failed(method: str, correlation_id: Any, error: BaseException, *, caller: str = "", key: str | None = None) -> None:
    """A handler raised something that is not an answer, or returned something that cannot be sent."""
    facts = {"method": method, "correlation_id": correlation_id, "caller": caller or None, "idempotency_key": key}
    named = [f"{name.removeprefix('idempotency_')} %({name})s" for name in _NAMING if facts[name] is not None]
    logger.error(", ".join(["%(method)s failed", *named]), facts, exc_info=error, extra=facts)


_NAMING = ("correlation_id", "caller", "idempotency_key")


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

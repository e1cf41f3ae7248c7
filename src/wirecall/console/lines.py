"""The last log records that calls of this process made, for the page of a call.

With a handler at the root logger, Python would not print the warnings of a program that has set up
none, and `logging.basicConfig` would do nothing. So the records are seen where they are made. A
record of a logger that is switched off is never made.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from wirecall.logs import CURRENT, escaped, read_ids, read_no_ids
from wirecall.logs import logger as own

# Records that a process keeps, and the characters of each.
KEPT = 1024
LONGEST = 2000


class Line(Struct, frozen=True, gc=False):
    """One log record of a call."""

    call_id: str
    at: float
    level: str
    logger: str
    text: str


class LogLines(logging.Filter):
    """Keeps the records that are made while a call runs.

    Those of wirecall's own logger are seen where the logger filters them: they have their ids by
    then. Those of other loggers are seen where they are made.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[Line] = deque(maxlen=KEPT)
        self._before: Callable[..., logging.LogRecord] | None = None

    def open(self) -> None:
        """Begin to see records."""
        if self._before is None:
            self._before = logging.getLogRecordFactory()
            logging.setLogRecordFactory(self._make)
            own.addFilter(self)
            read_ids(self)

    def close(self) -> None:
        """See no more records."""
        own.removeFilter(self)
        read_no_ids(self)
        before = self._before
        self._before = None
        # Another library may have put its own factory in front of this one. It keeps calling it.
        if before is not None and logging.getLogRecordFactory() == self._make:
            logging.setLogRecordFactory(before)

    def filter(self, record: logging.LogRecord) -> bool:
        """Take a record of wirecall's own logger, and let it pass."""
        self._keep(record, getattr(record, "call_id", None))
        return True

    def _make(self, *args: Any, **named: Any) -> logging.LogRecord:
        make = self._before or logging.LogRecord
        record = make(*args, **named)
        running = CURRENT.get()
        if running is not None and self._before is not None and record.name != own.name:
            self._keep(record, running.facts().get("call_id"))
        return record

    def _keep(self, record: logging.LogRecord, call_id: object) -> None:
        if call_id is not None:
            self._lines.append(_line(record, str(call_id)))

    def of(self, call_id: str) -> list[Line]:
        """Return the records of a call, the oldest first."""
        return [line for line in self._lines if line.call_id == call_id]


def _line(record: logging.LogRecord, call_id: str) -> Line:
    try:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {record.exc_info[1]!r}"
    except Exception:  # of the program's own objects; `logging` itself reports it
        text = f"{record.msg!s:.200}" if isinstance(record.msg, str) else "(not readable)"
    return Line(call_id, record.created, record.levelname, record.name, escaped(text[:LONGEST]))

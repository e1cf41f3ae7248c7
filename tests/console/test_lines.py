"""The last log records of calls: which are kept, and what logging does besides."""

import logging
from pathlib import Path

import pytest

from tests.console.shops import call, make_app, send
from wirecall.console.lines import KEPT, LogLines
from wirecall.console.tap import Tap
from wirecall.logs import CURRENT
from wirecall.server.ids import Ids

SHOP = logging.getLogger("tests.shop")


@pytest.fixture
def lines() -> "LogLines":
    return LogLines()


async def test_lines_are_those_of_the_call_that_made_them(tmp_path: Path) -> None:
    """Of a command and of a query that fails; a record beside them belongs to no call."""
    app, tap = make_app()
    tap._folder = str(tmp_path)

    @app.command
    async def pay(cents: int) -> int:
        SHOP.warning("paying %d", cents)
        return cents

    async with app:
        for cents in (5, 6):
            await send(app, call(1, "pay", cents=cents))
        SHOP.warning("beside")
        await send(app, call(3, "fail", sku="a"))
        rows = tap.ring.since(0)
        found = [
            [line.text for line in tap.lines.of(str(row[7].call_id))] for row in rows if row[7]
        ]
    assert found[:2] == [["paying 5"], ["paying 6"]]
    (failure,) = found[2]
    assert failure.startswith("fail failed") and "ValueError('a')" in failure


def test_lines_keep_the_newest_and_escape_them(lines: LogLines) -> None:
    lines.open()
    ids = Ids("1")
    before = CURRENT.set(ids)
    try:
        for number in range(KEPT + 5):
            SHOP.warning("number %d\n\u202e", number)
    finally:
        CURRENT.reset(before)
        lines.close()
    kept = lines.of(ids.call_id)
    assert len(kept) == KEPT
    assert kept[0].text == "number 5\\u000a\\u202e"
    assert lines.of("another") == []


def test_lines_leave_logging_as_it_was(lines: LogLines) -> None:
    """With a handler at the root logger, Python would not print warnings of a program without one."""
    factory = logging.getLogRecordFactory()
    handlers = list(logging.getLogger().handlers)
    lines.open()
    assert logging.getLogger().handlers == handlers
    ids = Ids("1")
    before = CURRENT.set(ids)
    try:
        # A format that does not fit is reported where the record is written, as without the lines.
        SHOP.makeRecord("shop", logging.WARNING, "f", 1, "%d is not a number", ("x",), None)
    finally:
        CURRENT.reset(before)
        lines.close()
    assert [line.text for line in lines.of(ids.call_id)] == ["%d is not a number"]
    assert logging.getLogRecordFactory() is factory


def test_lines_close_below_the_factory_of_another_library(lines: LogLines) -> None:
    first = logging.getLogRecordFactory()
    lines.open()
    ours = logging.getLogRecordFactory()
    try:
        logging.setLogRecordFactory(lambda *args, **named: ours(*args, **named))
        lines.close()
        assert SHOP.makeRecord("a", 30, "f", 1, "text", (), None).getMessage() == "text"
    finally:
        logging.setLogRecordFactory(first)


def test_tap_without_a_console_keeps_no_lines() -> None:
    factory = logging.getLogRecordFactory()
    Tap("facts")
    assert logging.getLogRecordFactory() is factory


def test_lines_do_not_fail_the_call_that_logs(lines: LogLines) -> None:
    """`logging` reports an object that cannot be written, and the program continues."""

    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError("no words")

    lines.open()
    ids = Ids("1")
    before = CURRENT.set(ids)
    raising = logging.raiseExceptions
    logging.raiseExceptions = False
    try:
        SHOP.warning("found %r", Odd())
        SHOP.warning(Odd())
    finally:
        logging.raiseExceptions = raising
        CURRENT.reset(before)
        lines.close()
    assert [line.text for line in lines.of(ids.call_id)] == ["found %r", "(not readable)"]

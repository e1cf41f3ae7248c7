"""Without the parts of Unix that Windows lacks: modules that cannot be imported, and an event loop
that watches no pipes.
"""

import os
import subprocess
import sys

import pytest

from wirecall.cli.batch import InputLines
from wirecall.errors import Gone
from wirecall.protocol.receipt import Arrival, Receipt
from wirecall.transports.lines import HIGH, Output, ThreadedOutput, open_input

both_ways = pytest.mark.parametrize("portable", [False, True])


def test_modules_can_be_imported_without_the_modules_of_unix() -> None:
    script = """
import importlib, pkgutil, sys
for name in ("fcntl", "resource", "termios", "pty", "tty", "pwd", "grp", "syslog"):
    sys.modules[name] = None  # as if there were none
import wirecall
for module in pkgutil.walk_packages(wirecall.__path__, "wirecall."):
    if not module.name.endswith("__main__") and ".project" not in module.name:
        importlib.import_module(module.name)
print("done")
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert run.stdout == "done\n", run.stderr


@both_ways
async def test_pipe_delivers_everything_that_is_written(portable: bool) -> None:
    reader, writer = os.pipe()
    output = (ThreadedOutput if portable else Output)(writer, lambda: None)
    source = open_input(reader, portable=portable)
    sendings = [Receipt() for _ in range(50)]
    lines = [b"%d" % n * 4000 for n in range(50)]
    for line, receipt in zip(lines, sendings, strict=True):
        output.write(line, receipt)
    assert output.size > HIGH  # a pipe holds less
    read = b""
    while read.count(b"\n") < 50:
        read += await source.read()
    await output.shrink(0)
    assert read == b"".join(line + b"\n" for line in lines)
    assert all(receipt.arrival is Arrival.WRITTEN for receipt in sendings)
    await output.send(b"more")
    await output.shrink(0)
    output.close()
    os.close(writer)
    assert await source.read() == b"more\n"
    assert await source.read() == b""
    source.close()


@both_ways
async def test_peer_that_has_gone_is_noticed(portable: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    gone: list[bool] = []
    output = (ThreadedOutput if portable else Output)(writer, lambda: gone.append(True))
    receipt = Receipt()
    output.write(b"x" * HIGH, receipt)
    await output.shrink(0)
    assert (gone, receipt.arrival) == ([True], Arrival.LOST)
    with pytest.raises(Gone):
        await output.send(b"x")
    output.close()
    os.close(writer)


@both_ways
async def test_lines_of_an_input(portable: bool) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"one\n\ntwo\r\nthree")
    os.close(writer)
    with os.fdopen(reader, "rb") as source:
        lines = InputLines(source, portable=portable)
        found = []
        while block := await lines.block(10):
            found += block
    assert found == [(1, b"one"), (3, b"two"), (4, b"three")]

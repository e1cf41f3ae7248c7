"""What is kept about the process is true after a fork, in every thread, and for every loop."""

import asyncio
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from wirecall import process


async def test_the_running_loop_is_the_one_that_asyncio_tells() -> None:
    for _ in range(3):
        assert process.running_loop() is asyncio.get_running_loop()


def test_where_no_loop_runs_there_is_none_even_if_one_did_before() -> None:
    async def ask() -> asyncio.AbstractEventLoop:
        return process.running_loop()

    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(ask()) is loop
    with pytest.raises(RuntimeError, match="no running event loop"):
        process.running_loop()
    loop.close()
    other = asyncio.new_event_loop()
    assert other.run_until_complete(ask()) is other
    other.close()


def test_a_loop_that_went_on_in_another_thread_is_not_ours() -> None:
    async def ask() -> asyncio.AbstractEventLoop:
        return process.running_loop()

    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(ask()) is loop
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        assert asyncio.run_coroutine_threadsafe(ask(), loop).result(10) is loop
        with pytest.raises(RuntimeError, match="no running event loop"):
            process.running_loop()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


FORKED = """
import asyncio, os
from wirecall import process

async def main():
    before = {process.new_nonce() for _ in range(10)}
    assert process.running_loop() is asyncio.get_running_loop()
    child = os.fork()
    taken = {process.new_nonce() for _ in range(200)}
    if child:
        return os.waitpid(child, 0)[1], taken | before
    assert process.pid == os.getpid()
    try:
        process.running_loop()
    except RuntimeError:
        os.write(1, b"".join(taken).hex().encode())
        os._exit(0)
    os._exit(1)

status, ours = asyncio.run(main())
assert status == 0, status
os.write(1, b" " + b"".join(ours).hex().encode())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_a_child_has_its_own_number_no_loop_and_other_nonces() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=True)
    theirs, ours = (bytes.fromhex(part) for part in done.stdout.split())
    nonces = [part[start : start + 16] for part in (theirs, ours) for start in range(0, len(part), 16)]
    assert len(nonces) == 410 == len(set(nonces))


def test_no_nonce_is_given_twice_to_threads_that_race() -> None:
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: [process.new_nonce() for _ in range(2000)], range(8)))
    flat = [nonce for nonces in taken for nonce in nonces]
    assert len(set(flat)) == len(flat) == 16_000 and {len(nonce) for nonce in flat} == {16}

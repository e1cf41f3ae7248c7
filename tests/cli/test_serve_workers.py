"""Four workers, one PostgreSQL, many duplicates of each command at once: each takes effect once."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.servers import Postgres
from tests.size import sized

KEYS, DUPLICATES, WORKERS = sized(small=(50, 16, 4), full=(200, 64, 4))
PATIENCE = 300.0

APP = """
import os
from wirecall import App

app = App("effects", mode="production")

@app.command
async def take(order: str) -> dict:
    fd = os.open("effects", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{order} {os.getpid()}\\n".encode())  # one line, one write: whole, even if others write
    os.close(fd)
    return {"order": order, "by": os.getpid()}
"""


@pytest.fixture
def port(tmp_path: Path, postgres_server: Postgres) -> Iterator[int]:
    (tmp_path / "effects.py").write_text(APP)
    options = ["--http", "127.0.0.1:0", "--workers", str(WORKERS), "--ledger", postgres_server.url]
    options += ["--drain", "0"]
    command = [sys.executable, "-m", "wirecall", "serve", "effects.py", *options]
    with subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as server:
        assert server.stderr is not None
        try:
            # A worker may warn about the settings of its ledger first.
            lines = iter(server.stderr.readline, b"")
            found = next(filter(None, (re.search(rb"127\.0\.0\.1:(\d+)", line) for line in lines)))
            yield int(found[1])
        finally:
            server.send_signal(signal.SIGTERM)
            server.stderr.read()
            assert server.wait(30) == 0


async def send(session: aiohttp.ClientSession, url: str, number: int, key: int) -> dict[str, Any]:
    params = {"order": f"order-{key}", "idempotency_key": f"workers-{key}"}
    message = {"jsonrpc": "2.0", "id": number, "method": "take", "params": params}
    async with session.post(url, json=message) as answer:
        told: dict[str, Any] = await answer.json()
        return told


async def test_workers_run_every_command_once(port: int, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{port}/rpc"
    connector = aiohttp.TCPConnector(limit=DUPLICATES)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.timeout(PATIENCE):
        told: dict[int, list[Any]] = {}
        for key in range(KEYS):  # all duplicates of a command at once
            calls = [send(session, url, number, key) for number in range(DUPLICATES)]
            told[key] = [answer["result"] for answer in await asyncio.gather(*calls)]
    effects = Counter(line.split()[0] for line in (tmp_path / "effects").read_text().splitlines())
    assert effects == {f"order-{key}": 1 for key in range(KEYS)}
    assert all(answer == answers[0] for answers in told.values() for answer in answers)
    # More than one worker had its share.
    assert len({answers[0]["by"] for answers in told.values()}) > 1

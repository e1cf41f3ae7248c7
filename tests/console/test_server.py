"""The console of a real server: `wirecall serve --console`, with two workers and a real ledger."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.console.browser import Looker
from tests.ports import free_port
from wirecall.client.connect import connect

APP = """
from wirecall import App

app = App("shop")


@app.query
async def price(item: str) -> int:
    return len(item)


@app.command(destructive=False)
async def charge(order: str, cents: int) -> str:
    return f"charged {order}"
"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Run a server; yield its address and the link of its console."""
    (tmp_path / "shop.py").write_text(APP)
    address = f"127.0.0.1:{free_port()}"
    words = ["serve", "shop.py", "--http", address, "--workers", "2", "--ledger", "sqlite:shop.db"]
    words += ["--audit", "file:audit.jsonl", "--console", "--console-port", "0", "--grace", "3s"]
    process = subprocess.Popen(
        [sys.executable, "-m", "wirecall", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    link = ""
    seen = []
    for line in process.stderr:
        seen.append(line)
        if found := re.search(r"Console: (\S+)", line):
            link = found[1]
        if link and any("Listening" in each for each in seen):
            break
    assert link, seen
    drain = threading.Thread(target=process.stderr.read, daemon=True)
    drain.start()
    try:
        yield f"http://{address}/rpc", link
    finally:
        process.terminate()
        assert process.wait(60) == 0
        drain.join(60)
        process.stderr.close()


def call(url: str) -> None:
    import asyncio

    async def work() -> None:
        async with connect(url) as client:
            for _ in range(2):
                await client.call("charge", {"order": "7", "cents": 1}, key="order-7")

    asyncio.run(work())


def test_console_of_a_server_shows_its_calls_and_records(
    looker: Looker, served: tuple[str, str]
) -> None:
    url, link = served
    page = looker.page()
    page.goto(link)
    page.get_by_role("heading", name="Now").wait_for()
    page.keyboard.press("g")
    page.keyboard.press("c")
    page.get_by_role("heading", name="Nothing has been called yet").wait_for()
    thread = threading.Thread(target=call, args=(url,))
    thread.start()
    page.locator("td", has_text="replayed").first.wait_for()
    thread.join(60)
    assert page.locator("table.calls td.name a", has_text="charge").count() == 2
    page.get_by_role("link", name="Ledger").click()
    page.get_by_role("link", name="order-7").click()
    page.locator("svg.states g.now[data-state=done]").wait_for()
    page.get_by_label("Stored result").get_by_text("charged 7").wait_for()
    page.get_by_role("link", name="Methods").click()
    page.get_by_role("link", name="Try price").click()
    page.get_by_label("item", exact=False).first.fill("tea")
    page.get_by_role("button", name="Send").click()
    page.get_by_text("ran in").wait_for()
    page.get_by_label("Answer").get_by_text('"result": 3').wait_for()
    page.get_by_role("link", name="Audit").click()
    page.get_by_role("button", name="Verify the chain").click()
    page.get_by_text("verified up to line").wait_for()
    looker.leave()

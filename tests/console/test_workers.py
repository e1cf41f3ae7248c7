"""Workers that are slow, that end within a question, and that were killed."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from wirecall.console import worker
from wirecall.console import workers as module
from wirecall.console.source import Refusal
from wirecall.console.worker import WorkerLink
from wirecall.console.workers import GONE, Workers

PATIENCE = 60.0


class Scripted:
    """A worker on a socket, which answers as a test says."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.socket"
        self.asked: list[str] = []
        # Whether it answers; otherwise it hangs up.
        self.answers = True
        self.go = asyncio.Event()
        self.go.set()
        self.news = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                question = json.loads(line)
                self.asked.append(question["ask"])
                self.news.set()
                if not self.answers:
                    return
                await self.go.wait()
                numbers = {"worker": self.path.stem, "pid": 1, "since": 0.0}
                answer = {**numbers, "asked": question, "rows": [], "last": 0, "offset": 0.0}
                writer.write(json.dumps(answer).encode() + b"\n")
        finally:
            writer.close()

    async def asks(self, what: str) -> None:
        """Wait until it is asked."""
        async with asyncio.timeout(PATIENCE):
            while what not in self.asked:
                self.news.clear()
                await self.news.wait()


@pytest.fixture
async def scripted(tmp_path: Path) -> AsyncIterator[list[Scripted]]:
    found = [Scripted(tmp_path, name) for name in ("aaa", "bbb")]
    servers = [await asyncio.start_unix_server(each.serve, each.path) for each in found]
    yield found
    for each in servers:
        each.close()


async def test_link_whose_caller_leaves_gives_the_next_question_its_own_answer(
    scripted: list[Scripted],
) -> None:
    first = scripted[0]
    link = WorkerLink(first.path)
    first.go.clear()
    asking = asyncio.create_task(link.ask("record", id="one"))
    await first.asks("record")
    asking.cancel()
    await asyncio.wait([asking])
    first.go.set()
    assert (await link.ask("settings"))["asked"]["ask"] == "settings"
    link.close()


async def test_action_is_not_asked_of_another_worker(
    tmp_path: Path, scripted: list[Scripted]
) -> None:
    """The first one may have made the call before it ended."""
    workers = Workers(str(tmp_path), lambda _name: None)
    workers.find()
    for each in scripted:
        each.answers = False
    scripted[1].answers = True
    with pytest.raises(Refusal) as refused:
        await workers.ask("try", is_action=True, message="{}")
    assert refused.value.document["error"]["type"] == "no_answer"
    assert (scripted[0].asked, scripted[1].asked) == (["try"], [])
    # One that cannot be reached was not asked.
    scripted[0].path.rename(tmp_path / "elsewhere")
    fresh = Workers(str(tmp_path), lambda _name: None)
    scripted[0].path.touch()
    fresh.find()
    assert (await fresh.ask("try", is_action=True, message="{}"))["asked"]["message"] == "{}"
    workers.close()
    fresh.close()


async def test_worker_that_was_busy_is_watched_again(
    tmp_path: Path, scripted: list[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "PATIENCE", 0.01)
    monkeypatch.setattr(module, "AGAIN", 0.0)
    busy, other = scripted
    busy.go.clear()
    workers = Workers(str(tmp_path), lambda _name: None)
    workers.find()
    assert (await workers.ask("methods"))["worker"] == "bbb"
    assert [each.name for each in workers.alive()] == ["bbb"]
    monkeypatch.setattr(worker, "PATIENCE", PATIENCE)
    busy.go.set()
    async with asyncio.timeout(PATIENCE):
        while len(workers.alive()) < 2:
            workers.find()
            await asyncio.sleep(0)
    assert other.asked == ["methods"]
    workers.close()


async def test_workers_that_were_killed_are_counted_once(tmp_path: Path) -> None:
    """Their sockets stay in the folder."""
    for number in range(GONE + 3):
        (tmp_path / f"a{number:x}.socket").touch()
    workers = Workers(str(tmp_path), lambda _name: None)
    for _ in range(4):
        workers.find()
        await workers.read_numbers()
    assert workers.ended == GONE + 3
    assert len(workers) == GONE
    workers.close()

"""Batches over processes: a server is killed after each entry, and another one gets the batch again."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash import batch_child
from tests.crash.batch_child import BatchOrder
from tests.crash.forks import Forks, Server
from tests.mcp.asgi import KEY, PATIENCE
from tests.mcp.batches import entry, ref, results
from tests.servers import DURABLE, Store
from wirecall.ledger.base import RecordId
from wirecall.protocol.sender import ANONYMOUS

# A process that waits for the mark of a dead one waits this long.
LEASE = 1.0
COMMANDS = 3
EFFECTS = ["pay 100", "ship 100"]

on_each_store = pytest.mark.parametrize("store", DURABLE, indirect=True)


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    forks = Forks(tmp_path_factory.mktemp("forks") / "stderr", batch_child.__name__)
    yield forks
    forks.close()


def batch(name: str, prefix: str, key: str | None) -> dict[str, Any]:
    """Return the params of a call with a query and three commands, each of which needs the others."""
    calls = [
        entry("price", {"name": name}, f"{prefix}q"),
        entry("pay", {"name": name, "cents": ref(f"{prefix}q", "/cents")}, f"{prefix}p"),
        entry("ship", {"name": name, "cents": ref(f"{prefix}p", "/paid")}, f"{prefix}s"),
        entry("write", {"name": name, "parcel": ref(f"{prefix}s", "/parcel")}, f"{prefix}w"),
    ]
    params: dict[str, Any] = {"name": "batch", "arguments": {"calls": calls}}
    if key is not None:
        params["_meta"] = {KEY: key}
    return params


async def plain_call(server: Server, params: dict[str, Any]) -> Any:
    """Call as a client without tasks."""
    return await server.call("tools/call", params, capabilities={})


@on_each_store
@pytest.mark.parametrize("starts", ["before", "after"])
async def test_batch_killed_after_each_entry_has_each_effect_once(
    store: Store, forks: Forks, tmp_path: Path, starts: str
) -> None:
    """A6, R9: re-sent with its key, or with new ids and without keys, to a process that was there
    before the kill or starts after it. The price has changed since.
    """

    async def trial(die_after: int, key: str | None) -> list[str]:
        name = f"{starts}-{die_after}-{key is None}"
        order = BatchOrder(url=store.url, folder=str(tmp_path), die_after=die_after, lease=LEASE)
        other = BatchOrder(url=store.url, folder=str(tmp_path), lease=LEASE, price=999)
        first = await forks.start(order)
        second = await forks.start(other, waits=starts == "after")
        assert await plain_call(first, batch(name, "", key)) is None
        await first.ended()
        if starts == "after":
            second.go()
        prefix = "" if key else "new-"
        answer = await plain_call(second, batch(name, prefix, key))
        await second.kill()
        found = results(answer["result"])
        replayed = [each.get("replayed", False) for each in found]
        effects = (tmp_path / name).read_text().split("\n")[:-1]
        faults = []
        if effects != [*EFFECTS, f"write {name}-100"]:
            faults.append(f"{name}: effects {effects}")
        if found[3].get("result") != f"letter about {name}-100":
            faults.append(f"{name}: {found[3]}")
        if replayed != [False, *(number < die_after for number in range(COMMANDS))]:
            faults.append(f"{name}: replayed {replayed}")
        return faults

    async with asyncio.timeout(PATIENCE):
        trials = [
            trial(number, f"key-{starts}-{number}" if keyed else None)
            for number in range(1, COMMANDS + 1)
            for keyed in (True, False)
        ]
        faults = await asyncio.gather(*trials)
    assert [each for found in faults for each in found] == []


@on_each_store
async def test_batch_task_killed_after_each_entry_is_adopted(
    store: Store, forks: Forks, tmp_path: Path
) -> None:
    """A11: another process adopts the batch, replays the recorded entries and runs the rest."""
    async with asyncio.timeout(PATIENCE):
        for number in range(1, COMMANDS + 1):
            name = f"task-{number}"
            order = BatchOrder(url=store.url, folder=str(tmp_path), die_after=number, lease=LEASE)
            first = await forks.start(order)
            await first.call("tools/call", batch(name, "", name))
            await first.ended()
            store.age(RecordId(ANONYMOUS, "tools/call:batch", name), 31)
            other = BatchOrder(url=store.url, folder=str(tmp_path), lease=LEASE, price=999)
            second = await forks.start(other)
            # The key of the batch is that of its task.
            task = (await second.result("tools/call", batch(name, "", name)))["taskId"]
            ended = await second.until(task, "completed", "failed")
            await second.kill()
            assert (tmp_path / name).read_text().split("\n")[:-1] == [
                *EFFECTS,
                f"write {name}-100",
            ]
            found = results(ended["result"])
            assert found[3]["result"] == f"letter about {name}-100"
            assert [each.get("replayed", False) for each in found[1:]] == [
                position < number for position in range(COMMANDS)
            ]

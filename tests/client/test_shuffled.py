"""A server that answers out of order, twice, late, never, or with junk: no call gets the answer of
another.
"""

import asyncio
import random
import sys
from typing import Any

import pytest

from tests.client.peers import PATIENCE
from tests.size import sized
from wirecall import Retry, connect
from wirecall.errors import WirecallError

SHUFFLING = """
import json, os, random, sys

dice, held = random.Random(int(sys.argv[1])), []
say = lambda message: sys.stdout.write(json.dumps(message) + "\\n")
for line in sys.stdin:
    message = json.loads(line)
    for one in message if isinstance(message, list) else [message]:
        held.append({"jsonrpc": "2.0", "id": one["id"], "result": one["params"]["value"]})
    dice.shuffle(held)
    count = dice.randint(0, len(held))
    out, held = held[:count], held[count:]
    for answer in list(out):
        fate = dice.random()
        if fate < 0.1:
            out.append(answer)
        elif fate < 0.15:
            out.remove(answer)
        elif fate < 0.25:
            ids = [{**answer, "id": id, "result": "stolen"} for id in (None, str(answer["id"]), 999_999)]
            say(dice.choice([None, [], {}, "?", *ids, {"jsonrpc": "2.0", "id": answer["id"], "method": "x"}]))
    if dice.random() < 0.01:
        os._exit(3)
    for answer in [out] if isinstance(message, list) and dice.random() < 0.7 else out:
        say(answer)
    sys.stdout.flush()
"""


@pytest.mark.parametrize("coalesce", [None, 0.001])
async def test_call_does_not_get_the_answer_of_another(coalesce: float | None) -> None:
    dice = random.Random(7)
    count = 0

    async def single(client: Any, value: int) -> None:
        nonlocal count
        try:
            kind = dice.choice([{"query": True}, {"key": True}, {}])
            assert (
                await client.call(
                    "echo", {"value": value}, timeout=dice.choice([0.05, 0.2]), **kind
                )
                == value
            )
            count += 1
        except WirecallError:
            pass

    async def together(client: Any, value: int) -> None:
        async with client.batch() as batch:
            entries = [
                batch.call("echo", {"value": value + offset}, timeout=0.2) for offset in range(7)
            ]
        assert all(entry.is_settled for entry in entries)
        assert all(
            not entry.ok or entry.result() == value + offset for offset, entry in enumerate(entries)
        )

    async def cancelled(client: Any, value: int) -> None:
        call = asyncio.create_task(single(client, value))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])

    retry = Retry(attempts=3, first=0.001, silence=0.1)
    for seed in range(sized(small=2, full=40)):
        command = [sys.executable, "-c", SHUFFLING, str(seed)]
        connection = connect(command, discover=False, retry=retry, stderr="keep", coalesce=coalesce)
        async with connection as client, asyncio.timeout(PATIENCE):
            async with asyncio.TaskGroup() as group:
                for number in range(60):
                    work = dice.choice([single, single, single, together, cancelled])
                    group.create_task(work(client, 1000 * number))
            # A child that was slow to start may have answered none of them in time.
            while not count:
                await single(client, 0)

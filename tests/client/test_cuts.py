"""The cut test: commands whose connection is cut at a random moment, repeated by the client, take
effect once each.
"""

import asyncio
import random
from collections import Counter

import pytest

from tests.client.peers import CuttingProxy, served
from wirecall import App, Retry, connect

COMMANDS = 200
RETRY = Retry(attempts=1000, first=0.005, cap=0.05)


def bank(chance: random.Random) -> tuple[App, Counter[str], Counter[str]]:
    app = App("bank")
    begun = Counter[str]()
    done = Counter[str]()

    @app.command
    async def charge(order: str, cents: int) -> str:
        begun[order] += 1
        await asyncio.sleep(chance.random() * 0.004)
        done[order] += cents
        return f"{order} paid {cents}"

    return app, begun, done


@pytest.mark.parametrize("server", ["uvicorn", "granian"])
@pytest.mark.parametrize("seed", [1, 2])
async def test_commands_take_effect_once_each(server: str, seed: int) -> None:
    app, begun, done = bank(random.Random(seed))
    async with (
        served(app, server) as url,
        CuttingProxy(url, seed) as proxy,
        connect(f"{proxy.url}/rpc", timeout=60.0, retry=RETRY) as client,
    ):
        results = await asyncio.gather(
            *(client.call("charge", {"order": f"o{n}", "cents": n}) for n in range(COMMANDS))
        )
    assert proxy.cuts > COMMANDS / 10, "the proxy was too kind for this to prove anything"
    assert results == [f"o{n} paid {n}" for n in range(COMMANDS)]
    assert begun == Counter({f"o{n}": 1 for n in range(COMMANDS)})
    assert done == Counter({f"o{n}": n for n in range(COMMANDS)})


async def test_batches_of_commands_take_effect_once_each() -> None:
    app, begun, _ = bank(random.Random(3))
    async with (
        served(app) as url,
        CuttingProxy(url, 3, longest=5000) as proxy,
        connect(f"{proxy.url}/rpc", timeout=60.0, retry=RETRY) as client,
    ):
        batches = [client.batch() for _ in range(20)]
        for number, batch in enumerate(batches):
            for n in range(number * 10, number * 10 + 10):
                batch.call("charge", {"order": f"o{n}", "cents": n})
        await asyncio.gather(*(batch.__aexit__(None) for batch in batches))
    assert proxy.cuts > 5
    assert [entry.result() for batch in batches for entry in batch.entries] == [
        f"o{n} paid {n}" for n in range(200)
    ]
    assert begun == Counter({f"o{n}": 1 for n in range(200)})

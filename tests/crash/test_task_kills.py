"""Tasks over processes: servers that are killed, stopped, or start together, and the fate of their
tasks.

`EXPECTED` is the promise, written down from the design (tasks.md, commands.md) and not from runs.
No test waits until a lease expires: the test ages the record in the store. A process looks for
tasks to adopt when it starts.
"""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from msgspec import Struct

from tests.crash import task_child
from tests.crash.forks import Forks, called
from tests.crash.harness import Bench, Trial
from tests.crash.task_child import TOOL, TaskOrder, TaskStep
from tests.mcp.asgi import PATIENCE
from tests.servers import DURABLE, TRANSACTIONAL, Store, make_store
from tests.size import sized
from wirecall.ledger.base import RecordId
from wirecall.protocol.sender import ANONYMOUS
from wirecall.server.method import OnCrash

# How a task ends after its server was killed at a step, and how many effects it has then. The
# columns say what the tool declared; "point" means that its handler calls ctx.commit_point().
#
#   completed    with the effect that it names
#   unknown      it failed with 50910, outcome_unknown: an effect may have happened
#   ~ before it  the record has a lease, which must be over first
#   ? before it  the task has to be answered first
EXPECTED = """
step        | unknown, point | unknown      | rerun        | reconcile, point | transactional
before_row  | ~completed/1   | ~completed/1 | ~completed/1 | ~completed/1     | ~completed/1
row_written | ~completed/1   | ~completed/1 | ~completed/1 | ~completed/1     | ~completed/1
begun       | ~completed/1   | ~unknown/0   | ~completed/1 | ~completed/1     | ~completed/1
committed   | ~unknown/0     | -            | -            | ~completed/1     | -
effect_done | ~unknown/1     | ~unknown/1   | ~completed/2 | ~completed/1     | ~completed/1
waiting     | ?completed/1   | ?completed/1 | ?completed/1 | ?completed/1     | ?completed/1
answered    | completed/1    | completed/1  | completed/1  | completed/1      | completed/1
leg_claimed | ~completed/1   | ~completed/1 | ~completed/1 | ~completed/1     | ~completed/1
completed   | completed/1    | completed/1  | completed/1  | completed/1      | completed/1
"""

OVER = {"completed", "failed", "cancelled"}
FIRST_LEG = {"before_row", "row_written"}
# Of the first leg, or of one after an answer.
IN_HANDLER = {"begun", "committed", "effect_done", "completed"}

LEASE = 3600.0  # longer than any test
AT_ONCE = 6  # trials

SEED = int(os.environ.get("CRASH_SEED") or random.randrange(1 << 32))
_numbers = count()


class Case(Struct, frozen=True, kw_only=True):
    """Where a server dies, and what its tool declares."""

    step: TaskStep
    mode: OnCrash
    point: bool
    asks: bool
    expected: str


def read_cases(table: str) -> list[Case]:
    head, *rows = [
        [cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()
    ]
    cases = []
    for step, *cells in rows:
        for column, cell in zip(head[1:], cells, strict=True):
            mode, _, point = column.partition(", ")
            legs = [True]
            if step in FIRST_LEG:
                legs = [False]
            elif step in IN_HANDLER:
                legs = [False, True]
            for asks in legs:
                if cell != "-":
                    told = {
                        "step": step,
                        "mode": mode,
                        "point": bool(point),
                        "asks": asks,
                        "expected": cell,
                    }
                    cases.append(msgspec.convert(told, Case))
    return cases


CASES = read_cases(EXPECTED)


# --- servers --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    forks = Forks(tmp_path_factory.mktemp("forks") / "stderr", task_child.__name__)
    yield forks
    forks.close()


class Stores:
    """A ledger for every trial: a server adopts all the tasks of its ledger, so the trials must not
    share one.
    """

    def __init__(self, kind: str, folder: Path, request: pytest.FixtureRequest) -> None:
        self.kind = kind
        self._folder = folder
        self._request = request
        if kind != "sqlite":  # fixtures are not for several threads or tasks at once
            request.getfixturevalue(f"{kind}_server")

    def make(self) -> tuple[Store, Bench, Path]:
        number = next(_numbers)
        folder = self._folder / str(number)
        folder.mkdir()
        if self.kind != "postgres":
            store = make_store(self.kind, folder, self._request.getfixturevalue)
        else:
            server = self._request.getfixturevalue("postgres_server")
            server.run(f"CREATE DATABASE tasks{SEED}_{number}")
            store = Store(self.kind, server.url_of(f"tasks{SEED}_{number}"))
        return store, Bench(store, folder), folder

    def drop(self, store: Store) -> None:
        if self.kind == "postgres":
            name = store.url.partition("@/")[2].partition("?")[0]
            self._request.getfixturevalue("postgres_server").run(
                f"DROP DATABASE {name} WITH (FORCE)"
            )


@pytest.fixture(params=DURABLE)
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Stores:
    return Stores(request.param, tmp_path, request)


def age(store: Store, key: str) -> None:
    store.age(RecordId(ANONYMOUS, f"tools/call:{TOOL}", key), LEASE + 1)


# --- a server is killed ---------------------------------------------------------------------------


async def faults_of(case: Case, stores: Stores, forks: Forks) -> list[str]:
    """Kill a server at a step, let another one adopt its task, and compare the result with the
    promise.
    """
    store, bench, folder = stores.make()
    key = f"k{random.randrange(1 << 32)}"
    order = TaskOrder(
        url=store.url,
        mode=case.mode,
        folder=str(folder),
        point=case.point,
        asks=case.asks,
        die_at=case.step,
        lease=LEASE,
    )
    expected = case.expected.strip("~?")

    # Step 1: the first server dies.
    first = await forks.start(order)
    told = await first.call("tools/call", called(key))
    heard = told["result"]["taskId"] if told is not None else None
    if case.asks:
        assert heard is not None
        await first.until(heard, "input_required")
        if case.step == "waiting":
            os.kill(first.pid, signal.SIGKILL)
        else:
            await first.answer(heard)
    await first.ended()
    if case.expected.startswith("~"):
        age(store, key)

    # Step 2: the second one adopts the task. A client that has not received it calls again, and
    # gets it.
    second = await forks.start(msgspec.structs.replace(order, die_at=None))
    task = heard or await second.begin(key)
    state = await second.until(task, *OVER, "input_required")
    if is_asked := state["status"] == "input_required":
        await second.answer(task)
        state = await second.until(task, *OVER)
    again = await second.result("tasks/get", {"taskId": task})
    repeated = await second.begin(key)
    trial = Trial(ledger=store.kind, mode=case.mode, point=case.point, steps=())
    effects = bench.effects(trial, key)
    await second.kill(signal.SIGTERM)
    stores.drop(store)

    # Step 3: the checks.
    word = state["status"]
    if word == "failed" and (state["error"]["code"], state["error"]["data"]["ran"]) == (
        50910,
        "unknown",
    ):
        word = "unknown"
    faults = []
    if f"{word}/{len(effects)}" != expected:
        faults.append(f"{word}/{len(effects)} in place of {expected}")
    if is_asked != case.expected.startswith("?"):
        faults.append(f"asked again: {is_asked}")
    if word == "completed" and state["result"]["content"][0]["text"] not in effects:
        faults.append(
            f"the result {state['result']} names an effect that is not in the log: {effects}"
        )
    if again != {**state, "pollIntervalMs": again["pollIntervalMs"]}:
        faults.append(f"a task that has ended changed from {state} to {again}")
    if repeated != task and word != "unknown":
        faults.append("the key has another task")
    return [f"{store.kind} {case}: {fault}" for fault in faults]


def test_task_kills_cover_every_step_in_every_mode() -> None:
    assert {case.step for case in CASES} == {*get_args(TaskStep)}
    assert {case.mode for case in CASES} == {*get_args(OnCrash)}


@pytest.mark.long
async def test_task_outlives_its_server(
    stores: Stores, forks: Forks, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [case for case in CASES if case.mode != "transactional" or stores.kind in TRANSACTIONAL]
    cases = sized(small=random.Random(SEED).sample(cases, 8), full=cases)
    places = asyncio.Semaphore(AT_ONCE)

    async def judge(case: Case) -> list[str]:
        async with places:
            try:
                async with asyncio.timeout(PATIENCE):
                    return await faults_of(case, stores, forks)
            except Exception as error:  # the other trials continue
                return [f"{stores.kind} {case}: {error!r}"]

    found = await asyncio.gather(*map(judge, cases))
    wrong = [fault for faults in found for fault in faults]
    with capsys.disabled():
        print(
            f"\nCRASH_SEED={SEED} {stores.kind}: {len(cases)} servers of tasks killed, {len(wrong)} wrong"
        )
    assert not wrong, "\n".join([f"CRASH_SEED={SEED}", *wrong, forks.log.read_text()[-4000:]])


# --- servers start together, or stop --------------------------------------------------------------


@pytest.mark.parametrize("mode", ["unknown", "rerun"])
async def test_task_is_adopted_by_one_of_two_servers(
    mode: OnCrash, stores: Stores, forks: Forks
) -> None:
    for _ in range(sized(small=1, full=5)):
        store, bench, folder = stores.make()
        order = TaskOrder(
            url=store.url,
            mode=mode,
            folder=str(folder),
            point=mode == "unknown",
            holds=True,
            lease=LEASE,
        )
        keys = [f"k{number}" for number in range(8)]
        async with asyncio.timeout(PATIENCE):
            # Step 1: a server dies, and leaves tasks whose handlers have started. A task of "rerun"
            # is past its commit point then, so its next run is its second one.
            first = await forks.start(order)
            tasks = {key: await first.begin(key) for key in keys}
            while not all((folder / f"{key}.held").exists() for key in keys):
                await first.until(tasks[keys[0]], "working")
            await first.kill()
            for key in keys:
                age(store, key)

            # Step 2: two servers adopt them at the same moment.
            others = [
                await forks.start(msgspec.structs.replace(order, holds=False), waits=True)
                for _ in range(2)
            ]
            for server in others:
                server.go()
            for key, task in tasks.items():
                for server in others:
                    assert (await server.until(task, *OVER))["status"] == "completed"
                assert (
                    len(
                        bench.effects(
                            Trial(ledger=store.kind, mode=mode, point=order.point, steps=()), key
                        )
                    )
                    == 1
                )
            for server in others:
                await server.kill(signal.SIGTERM)
        stores.drop(store)


@pytest.mark.parametrize("mode", ["unknown", "transactional"])
async def test_server_that_stops_hands_its_task_to_the_next_one_at_once(
    mode: OnCrash, stores: Stores, forks: Forks
) -> None:
    if mode == "transactional" and stores.kind not in TRANSACTIONAL:
        mode = "reconcile"
    store, bench, folder = stores.make()
    order = TaskOrder(
        url=store.url,
        mode=mode,
        folder=str(folder),
        point=mode != "transactional",
        holds=True,
        lease=LEASE,
    )
    async with asyncio.timeout(PATIENCE):
        first = await forks.start(order)
        task = await first.begin("k")
        while not (folder / "k.held").exists():
            assert (await first.result("server/discover", {}))["resultType"] == "complete"
        await first.kill(signal.SIGTERM)
        # The lease would last for an hour.
        second = await forks.start(msgspec.structs.replace(order, holds=False))
        assert (await second.until(task, *OVER))["status"] == "completed"
        await second.kill(signal.SIGTERM)
    assert (
        len(bench.effects(Trial(ledger=store.kind, mode=mode, point=order.point, steps=()), "k"))
        == 1
    )
    stores.drop(store)

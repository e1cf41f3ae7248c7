"""Batches with references in every shape, and an oracle that knows their answers."""

from collections.abc import Callable, Iterator
from itertools import combinations, product
from typing import Any, TypeAlias

from wirecall import App, DomainError
from wirecall.client.client import Collected
from wirecall.errors import RpcError

# For each entry the earlier ones that it refers to.
Graph: TypeAlias = tuple[tuple[int, ...], ...]
Call: TypeAlias = Callable[..., Any]
FAILURE = 40001


def graphs(most: int) -> Iterator[Graph]:
    """Yield all graphs of up to `most` entries."""
    for count in range(1, most + 1):
        choices = [
            [
                chosen
                for size in range(position + 1)
                for chosen in combinations(range(position), size)
            ]
            for position in range(count)
        ]
        yield from product(*choices)


def summing_app(**options: Any) -> App:
    """An app whose methods add the results of others, or fail."""
    app = App("sums", **options)

    @app.query(name="sum")
    def total(values: dict[str, int], fail: bool) -> dict[str, int]:
        if fail:
            raise DomainError(FAILURE, "it fails")
        return {"sum": 1 + sum(values.values())}

    return app


def add_graph(
    batch: Collected, graph: Graph, failing: int, *, call: Call, only_after: bool = False
) -> list[Any]:
    """Add the entries of a graph to a batch.

    The references are members of an object inside the params. With `only_after` the entries wait
    for their targets, and take no value.
    """
    entries: list[Any] = []
    for position, targets in enumerate(graph):
        values = {f"v{target}": entries[target].ref("/sum") for target in targets}
        after: list[Any] = []
        if only_after:
            values = {}
            after = [entries[target] for target in targets]
        params = {"values": values, "fail": position == failing}
        entries.append(call("sum", params, after=after))
    return entries


def expected(graph: Graph, failing: int, *, only_after: bool = False) -> list[Any]:
    """Return what the oracle says: a sum, or what makes the error of each entry."""
    outcomes: list[Any] = []
    for position, targets in enumerate(graph):
        taken = [outcomes[target] for target in targets]
        if any(not isinstance(each, int) for each in taken):
            outcomes.append(("dependency_failed", failing, FAILURE, "no"))
        elif position == failing:
            outcomes.append(("it fails", FAILURE))
        elif only_after:
            outcomes.append(1)
        else:
            outcomes.append(1 + sum(taken))
    return outcomes


def observed(entries: list[Any], read: Callable[[Any], Any]) -> list[Any]:
    """Return the same of a batch that was sent. `read` makes the sum from an entry."""
    positions = {entry.id: position for position, entry in enumerate(entries)}
    outcomes: list[Any] = []
    for entry in entries:
        error = entry.error
        if error is None:
            outcomes.append(read(entry))
        elif isinstance(error, RpcError) and error.code == 42410:
            data = error.data
            outcomes.append((data["type"], positions[data["id"]], data["code"], error.ran))
        else:
            assert isinstance(error, RpcError)
            outcomes.append((error.message, error.code))
    return outcomes

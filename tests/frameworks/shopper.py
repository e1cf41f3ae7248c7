"""The task of every agent in this folder: ask for a price, charge an order, and repeat a call that
failed.

The modules `*_agent` run in an environment that has one framework and no wirecall, with the address
of a server and an order as their arguments. The framework's own fake model asks `next_call` for its
next step, as a model would decide it.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

RUNS = 3  # how often a person starts an agent that has failed
PATIENCE = 3.0  # seconds that a framework waits for the answer to one tool call

Call: TypeAlias = tuple[str, dict[str, Any]]


class Answer(NamedTuple):
    """The answer of a tool, as the model sees it."""

    tool: str
    is_error: bool
    text: str


def next_call(order: str, answers: Sequence[Answer]) -> Call | None:
    """Return the tool call that a model decides on; None if it is content."""
    charge = ("charge", {"order": order, "cents": 450})
    if not answers:
        return "price", {"sku": "tea"}
    last = answers[-1]
    if last.tool == "price":
        return charge
    if last.is_error and len(answers) < 6:
        return charge
    return None


class Shopping:
    """The answers of one run, and how often the run had to be started."""

    def __init__(self, url: str, order: str) -> None:
        self.url = url
        self.order = order
        self.runs = 0
        self.answers: list[Answer] = []

    def next_call(self, answers: Sequence[Answer]) -> Call | None:
        self.answers = list(answers)
        return next_call(self.order, answers)


def shop(agent: Callable[[Shopping], Awaitable[object]]) -> None:
    """Run an agent until it ends without an exception, and print the answers that its model has
    seen.
    """
    shopping = Shopping(sys.argv[1], sys.argv[2])

    async def run() -> None:
        failure: BaseException | None = None
        while shopping.runs < RUNS:
            shopping.runs += 1
            try:
                await agent(shopping)
                return
            except Exception as error:
                print(f"run {shopping.runs} failed: {error!r}", file=sys.stderr)
                failure = error
        raise SystemExit(f"the agent failed {RUNS} times: {failure!r}")

    asyncio.run(run())
    print(
        json.dumps(
            {"runs": shopping.runs, "answers": [answer._asdict() for answer in shopping.answers]}
        )
    )

"""`wirecall task`: calls that go on in the background, by the ids that `wirecall call --background` prints."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import click

from wirecall.cli.connecting import Way, opened, way_options
from wirecall.cli.failures import Interrupted
from wirecall.cli.input import run
from wirecall.cli.output import Printer, json_option, readable, result_of
from wirecall.cli.stores import ledger_option, ready
from wirecall.cli.targets import Target, TargetCommand, app_of, target_argument
from wirecall.logs import escaped
from wirecall.protocol.messages import JsonObject

T = TypeVar("T")

_ID = click.argument("id")


@click.group("task")
def command() -> None:
    """Look at a call that goes on in the background, wait for it, or cancel it.

    `wirecall call TARGET TOOL --background` starts one and prints its id. Tasks are an extension of MCP 2026-07-28; a
    server that keeps them in its ledger goes on with them after a restart.
    """


async def _with(target: Target, ledger: str | None, way: Way, id: str, work: Callable[[Any], Awaitable[T]]) -> T:
    """Reach the server of a task, and return the result of the work on it."""
    app = app_of(target, ledger)
    async with opened(target, way.to_tasks(), app=app) as client:
        if app is not None:
            await ready(app)
        return await work(client.task(id))


@command.command("show", cls=TargetCommand)
@target_argument
@_ID
@ledger_option
@way_options
@json_option
def show_command(target: Target, id: str, ledger: str | None, way: Way, out: Printer) -> None:
    """Show the state of the task ID of TARGET.

    \b
    wirecall task show http://127.0.0.1:8420 786512e2-9e0d-44bd-8f29-789f320fe840
    """
    state = run(_with(target, ledger, way, id, lambda task: task.refresh()))
    times = [f"{word} {time}" for word, time in (("created", state.created), ("updated", state.updated)) if time]
    lines = [f"{state.status}  {state.message or ''}".rstrip(), *(f"  {time}" for time in times)]
    out.result(_document(state), "\n".join(map(escaped, lines)))


@command.command("wait", cls=TargetCommand)
@target_argument
@_ID
@ledger_option
@way_options
@json_option
def wait_command(target: Target, id: str, ledger: str | None, way: Way, out: Printer) -> None:
    """Wait until the task ID of TARGET is over, and print its result as `wirecall call` does.

    It waits as long as the task takes; --timeout is the time of one request. Ctrl-C ends the wait, and the task goes on.
    """

    async def wait(task: Any) -> Any:
        async for state in task:
            if state.message:
                out.note(f"  {state.message}")
        return await task

    try:
        value = run(_with(target, ledger, way, id, wait))
    except Interrupted as stopped:
        stopped.why, stopped.next = "the task goes on", target.line("task wait", id)
        raise
    out.result(result_of(value), readable(value), task=id)


@command.command("cancel", cls=TargetCommand)
@target_argument
@_ID
@ledger_option
@way_options
@json_option
def cancel_command(target: Target, id: str, ledger: str | None, way: Way, out: Printer) -> None:
    """Ask TARGET to cancel the task ID, and show its state after that.

    The server decides: a task that is past the point of no return finishes.
    """

    async def cancel(task: Any) -> Any:
        await task.cancel()
        return await task.refresh()

    state = run(_with(target, ledger, way, id, cancel))
    out.result(_document(state), str(state.status))
    if state.status in ("working", "input_required"):
        out.note("The server was asked to cancel it. It may still finish.")


def _document(state: Any) -> JsonObject:
    told = {"message": state.message, "created": state.created, "updated": state.updated, "ttlMs": state.ttl_ms}
    return {"id": state.id, "status": state.status, **{name: value for name, value in told.items() if value is not None}}

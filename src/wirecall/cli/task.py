"""`wirecall task`: shows, awaits or cancels a background call."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import click
import msgspec
from msgspec import Struct

from wirecall.cli.arguments import described
from wirecall.cli.call import handlers_of, raise_or_note_unused, status_of
from wirecall.cli.failures import CliError, Interrupted, failure_of
from wirecall.cli.questions import Dialogue, answer_option
from wirecall.cli.targets import (
    Target,
    TargetCommand,
    Way,
    app_of,
    ledger_option,
    opened,
    ready,
    target_argument,
    way_options,
)
from wirecall.cli.terminal import (
    Printer,
    Spinner,
    aligned,
    json_option,
    readable,
    result_of,
    run,
    stated,
)
from wirecall.contract.lock import members, required
from wirecall.errors import BadAnswer, MethodNotFound
from wirecall.logs import escaped
from wirecall.protocol.messages import JsonObject

T = TypeVar("T")

_ID = click.argument("id")


class Question(Struct, frozen=True):
    """A question that a task waits for."""

    key: str
    message: str
    # The schema of a form.
    schema: JsonObject | None = None
    # The address of a page.
    url: str | None = None

    @property
    def document(self) -> JsonObject:
        """The question for programs."""
        more = stated(schema=self.schema, url=self.url)
        return {"key": self.key, "message": self.message, **more}

    @property
    def lines(self) -> list[str]:
        """The fields of the form, or the address of the page."""
        if self.url is not None:
            return [self.url]
        return aligned(described(self.schema or {}))

    @property
    def needed(self) -> list[str]:
        """The fields that must have an answer."""
        fields = members(self.schema or {})
        return [name for name in fields if name in required(self.schema or {})]


def asked_by(task: Any) -> list[Question]:
    """Return the questions that a task waits for.

    One that is not a form or a page is named by its method.
    """
    return [_question(key, request) for key, request in task.questions.items()]


def _question(key: str, request: Any) -> Question:
    """Return one question; any server may have written its params."""
    params = msgspec.json.decode(request.params)
    if not isinstance(params, dict):
        params = {}
    schema = params.get("requestedSchema")
    if not isinstance(schema, dict):
        schema = None
    url = params.get("url")
    if not isinstance(url, str):
        url = None
    return Question(key, str(params.get("message") or request.method), schema, url)


@click.group("task")
def task_command() -> None:
    """Look at a background call, wait for it, or cancel it.

    `wirecall call TARGET TOOL --background` starts one and prints its id. Tasks are an extension of
    MCP 2026-07-28; a server that keeps them in its ledger continues them after a restart.
    """


async def _with(
    target: Target,
    ledger: str | None,
    way: Way,
    id: str,
    work: Callable[[Any], Awaitable[T]],
    handlers: Mapping[str, Any] | None = None,
) -> T:
    """Reach the server of a task, and return the result of the work on it."""
    app = app_of(target, ledger)
    async with opened(target, way.to_tasks(), app=app, handlers=handlers) as client:
        if app is not None:
            await ready(app)
        try:
            return await work(client.task(id))
        except MethodNotFound as error:
            failure = failure_of(error)
            failure.what = "The server does not have tasks."
            failure.next = "call the tool without --background"
            raise failure from None


@task_command.command("show", cls=TargetCommand)
@target_argument
@_ID
@ledger_option
@way_options
@json_option
def show_task(target: Target, id: str, ledger: str | None, way: Way, out: Printer) -> None:
    """Show the state of the task ID of TARGET, and the questions that it waits for.

    \b
    wirecall task show http://127.0.0.1:8420 786512e2-9e0d-44bd-8f29-789f320fe840
    """

    async def look(task: Any) -> tuple[Any, list[Question]]:
        return await task.refresh(), asked_by(task)

    state, questions = run(_with(target, ledger, way, id, look))
    lines = [f"{state.status}  {state.message or ''}".rstrip()]
    if state.created:
        lines.append(f"  created {state.created}")
    if state.updated:
        lines.append(f"  updated {state.updated}")
    for question in questions:
        lines += [f"  asks: {question.message}", *(f"    {line}" for line in question.lines)]
    asked = stated(questions=[question.document for question in questions])
    out.result({**_document(state), **asked}, "\n".join(map(escaped, lines)))
    if questions:
        answers = " ".join(
            f"--answer {name}=..." for question in questions for name in question.needed
        )
        out.note(f"next: {target.line('task wait', id, answers)}")


@task_command.command("wait", cls=TargetCommand)
@target_argument
@_ID
@answer_option
@ledger_option
@way_options
@json_option
def wait_task(
    target: Target, id: str, answers: tuple[str, ...], ledger: str | None, way: Way, out: Printer
) -> None:
    """Wait until the task ID of TARGET is over, and print its result as `wirecall call` does.

    It waits as long as the task takes; --timeout is the time of one request. Ctrl-C ends the wait,
    and the task continues. The questions of the task are asked on the terminal, or answered by
    --answer. A question without an answer stays open.

    \b
    wirecall task wait http://127.0.0.1:8420 ID --answer size=large
    """
    questions = Dialogue(answers, declines=False)
    watched: Any = None
    spinner = Spinner(lambda: f"task{status_of(watched)}")

    async def wait(task: Any) -> Any:
        nonlocal watched
        watched = task
        with spinner:
            async for state in task:
                if state.message:
                    with spinner.paused():
                        out.note(f"  {state.message}")
            return await task

    try:
        value = run(_with(target, ledger, way, id, wait, handlers_of(questions, spinner)))
    except Interrupted as stopped:
        stopped.why = "the task continues"
        stopped.next = target.line("task wait", id)
        raise
    except BadAnswer:
        if questions.failure is None:
            raise
        raise _open_question(questions.failure, target, id) from None
    raise_or_note_unused(out, questions)
    out.result(result_of(value), readable(value), task=id)


def _open_question(failure: CliError, target: Target, id: str) -> CliError:
    """Return the error for a question without an answer: the command line that answers it."""
    if failure.next.startswith("--answer") or not failure.next:
        failure.next = target.line("task wait", id, failure.next)
    return failure


@task_command.command("cancel", cls=TargetCommand)
@target_argument
@_ID
@ledger_option
@way_options
@json_option
def cancel_task(target: Target, id: str, ledger: str | None, way: Way, out: Printer) -> None:
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
    more = {
        "message": state.message,
        "created": state.created,
        "updated": state.updated,
        "ttlMs": state.ttl_ms,
    }
    known = {name: value for name, value in more.items() if value is not None}
    return {"id": state.id, "status": state.status, **known}

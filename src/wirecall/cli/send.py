"""`wirecall send`: raw messages, untouched in both directions."""

import asyncio
import sys
from contextlib import redirect_stdout, suppress
from typing import BinaryIO

import click

from wirecall.app import App
from wirecall.cli.connecting import Way, http_client, way_options
from wirecall.cli.failures import CliError, Exit, Unreachable, failure_of
from wirecall.cli.input import CHUNK, Input, InputLines, run
from wirecall.cli.output import print_raw
from wirecall.cli.targets import Target, TargetCommand, app_of, target_argument
from wirecall.errors import ConnectionLost

LEAVE = 1.0  # seconds for a process to end by itself after it closed its stdout


@click.command("send", cls=TargetCommand)
@target_argument
@click.argument("messages", type=Input(), default="-", metavar="[MESSAGES|-]")
@way_options
def command(target: Target, messages: BinaryIO, way: Way) -> int:
    """Send messages to TARGET unchanged, one per line of MESSAGES (standard input by default), and print the answers.

    A message without an answer prints nothing. An app in a file receives them as JSON-RPC.

    \b
    echo '{"jsonrpc":"2.0","method":"sum","params":[1,2,3],"id":1}' | wirecall send examples/hello.py
    """
    stdout, app = sys.stdout, app_of(target)

    async def to_app(app: App) -> int:
        async with app:
            async for line in InputLines(messages).each():
                with redirect_stdout(sys.stderr):
                    reply = await app.handle(line)
                if reply is not None:
                    print_raw(reply + b"\n", stdout)
        return Exit.DONE

    try:
        if app is not None:
            return run(to_app(app))
        return run((_to_address if target.kind == "url" else _to_process)(target, messages, way))
    except TimeoutError:
        what, why = "The server has not answered every message.", f"within {way.timeout:g} s"
        raise CliError(what, why, "--timeout", exit=Exit.UNKNOWN, type="timed_out") from None


async def _to_address(target: Target, messages: BinaryIO, way: Way) -> int:
    worst = Exit.DONE
    http = await http_client(way.address(target), way.headers)
    await http.open()
    media = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    try:
        async for line in InputLines(messages).each():
            async with asyncio.timeout(way.timeout), http.request("POST", line, media) as answer:
                body = await answer.read()
            if body.strip():
                print_raw(body.rstrip(b"\n") + b"\n")
            if answer.status >= 400:
                click.echo(f"HTTP {answer.status}", err=True)
                worst = Exit.AUTH if answer.status in (401, 403) else Exit.REMOTE
    except ConnectionLost as error:
        failure = failure_of(error)
        failure.next = "find out whether it took effect before you send it again"
        raise failure from None
    finally:
        await http.aclose()
    return worst


async def _to_process(target: Target, messages: BinaryIO, way: Way) -> int:
    """Write lines to its stdin, close it, and print its output until it ends."""
    # A pipe for stderr too: what a server prints there must not steer the terminal either.
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(*target.command, stdin=pipe, stdout=pipe, stderr=pipe)
    except OSError as error:
        why = error.strerror or str(error)
        raise Unreachable(f"{target.command[0]} cannot be started.", why, "give a command that runs") from None
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None

    async def copy(source: asyncio.StreamReader, *, err: bool) -> bytes:
        last = b""
        while data := await source.read(CHUNK):  # not by lines: a line may have any length
            last = data[-1:]
            print_raw(data, err=err)
        if not err and last not in (b"", b"\n"):
            click.echo()
        return last

    output = asyncio.create_task(copy(process.stdout, err=False))
    errors = asyncio.create_task(copy(process.stderr, err=True))
    try:
        with suppress(ConnectionError):  # it has ended, or closed its stdin; its output is printed all the same
            async for line in InputLines(messages).each():
                process.stdin.write(line + b"\n")
                await process.stdin.drain()
            process.stdin.close()
        async with asyncio.timeout(way.timeout):
            said = await output
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), LEAVE)
        code = process.returncode
    finally:
        output.cancel()
        for end in (process.terminate, process.kill):
            if process.returncode is None:
                end()
                with suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), LEAVE)
        with suppress(TimeoutError):  # a grandchild may keep stderr open
            await asyncio.wait_for(errors, LEAVE)
    if code and not said:
        why, next_step = f"it ended with {code}, and printed nothing on stdout", "run the command by itself to see more"
        raise Unreachable("The server ended without an answer.", why, next_step)
    return Exit.DONE

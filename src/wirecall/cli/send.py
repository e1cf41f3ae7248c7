"""`wirecall send`: raw messages, untouched in both directions."""

import asyncio
import sys
from contextlib import redirect_stdout, suppress
from typing import BinaryIO

import click

from wirecall import App
from wirecall.cli.connecting import Way, address, run, way_options
from wirecall.cli.failures import Exit, Failure, failure_of
from wirecall.cli.lines import CHUNK, Lines
from wirecall.cli.output import Input, print_raw
from wirecall.cli.settings import app_of
from wirecall.cli.targets import Target, TargetCommand, target_argument
from wirecall.errors import ConnectionLost

LEAVE = 1.0  # seconds that a process has to end by itself, after its stdout has


@click.command("send", cls=TargetCommand)
@target_argument()
@click.argument("messages", type=Input(), default="-", metavar="[MESSAGES|-]")
@way_options
def command(target: Target, messages: BinaryIO, way: Way) -> int | None:
    """Send messages to TARGET as they are, one per line of MESSAGES (standard input by default), and print the answers.

    A message that is owed no answer prints nothing. An app in a file is spoken to in JSON-RPC.

    \b
    echo '{"jsonrpc":"2.0","method":"sum","params":[1,2,3],"id":1}' | wirecall send examples/hello.py
    """
    if app := app_of(target):
        run(_to_app(app, messages))
    elif target.kind == "url":
        return run(_to_address(address(target, way.protocol_to(target)), messages, way))
    else:
        run(_to_process(target, messages, way))
    return None


async def _to_app(app: App, messages: BinaryIO) -> None:
    stdout = sys.stdout
    async with app:
        async for line in Lines(messages).each():
            with redirect_stdout(sys.stderr):
                reply = await app.handle(line)
            if reply is not None:
                print_raw(reply + b"\n", stdout)


async def _to_address(url: str, messages: BinaryIO, way: Way) -> int:
    from wirecall.transports.http_client import HttpClient

    worst = Exit.DONE
    http = HttpClient(url, headers=way.headers)
    await http.open()
    media = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    try:
        async for line in Lines(messages).each():
            async with asyncio.timeout(way.timeout), http.request("POST", line, media) as answer:
                body = await answer.read()
            if body.strip():
                print_raw(body.rstrip(b"\n") + b"\n")
            if answer.status >= 400:
                click.echo(f"HTTP {answer.status}", err=True)
                worst = Exit.AUTH if answer.status in (401, 403) else Exit.REMOTE
    except TimeoutError:
        raise _silent(way) from None
    except ConnectionLost as error:
        failure = failure_of(error)
        failure.next = "find out whether it took effect before you send it again"
        raise failure from None
    finally:
        await http.aclose()
    return worst


async def _to_process(target: Target, messages: BinaryIO, way: Way) -> None:
    """Lines to its stdin; then its stdin is closed, and what it says until it ends is printed."""
    process = await _started(target)
    assert process.stdin is not None and process.stdout is not None
    said = b""

    async def listen() -> None:
        nonlocal said
        assert process.stdout is not None
        while data := await process.stdout.read(CHUNK):  # no lines: they may be of any length
            said = data[-1:]
            print_raw(data)
        if said not in (b"", b"\n"):
            click.echo()

    async def hear() -> None:
        assert process.stderr is not None
        while data := await process.stderr.read(CHUNK):
            print_raw(data, err=True)

    listening = asyncio.create_task(listen())
    hearing = asyncio.create_task(hear())
    try:
        with suppress(ConnectionError):  # it has ended, or does not listen; what it said is printed all the same
            async for line in Lines(messages).each():
                process.stdin.write(line + b"\n")
                await process.stdin.drain()
            process.stdin.close()
        async with asyncio.timeout(way.timeout):
            await listening
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), LEAVE)
        code = process.returncode
    except TimeoutError:
        raise _silent(way) from None
    finally:
        listening.cancel()
        await _ended(process)
        with suppress(TimeoutError):  # a grandchild may keep it open
            await asyncio.wait_for(hearing, LEAVE)
    if code and not said:
        why = f"it ended with {code}, and said nothing on stdout"
        next = "run the command by itself to see more"
        raise Failure("The server left without an answer.", why, next, exit=Exit.UNREACHABLE, type="unreachable")


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Asked to end, if it has not; made to, if it does not."""
    if process.returncode is None:
        process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), LEAVE)
    if process.returncode is None:
        process.kill()
        await process.wait()


async def _started(target: Target) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    try:
        return await asyncio.create_subprocess_exec(*target.command, stdin=pipe, stdout=pipe, stderr=pipe)
    except OSError as error:
        raise Failure(
            f"{target.command[0]} cannot be started.",
            error.strerror or str(error),
            "give a command that runs",
            exit=Exit.UNREACHABLE,
            type="unreachable",
        ) from None


def _silent(way: Way) -> Failure:
    return Failure(
        "The server has not answered all of it.",
        f"within {way.timeout:g} s",
        "--timeout",
        exit=Exit.UNKNOWN,
        type="timed_out",
    )

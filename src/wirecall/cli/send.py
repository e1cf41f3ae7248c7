"""`wirecall send`: raw messages, untouched in both directions."""

import asyncio
from typing import BinaryIO

import click

from wirecall import App
from wirecall.cli.target import load_app


@click.command("send")
@click.argument("target", metavar="FILE.py[:APP]")
@click.argument("messages", type=click.File("rb"), default="-", metavar="[MESSAGES]")
def command(target: str, messages: BinaryIO) -> None:
    """Send JSON-RPC messages to the app in FILE.py, one per line of MESSAGES (standard input by default).

    Each answer is one line on standard output; a message that is owed none prints nothing.

    \b
    echo '{"jsonrpc":"2.0","method":"sum","params":[1,2,3],"id":1}' | wirecall send examples/hello.py
    """
    asyncio.run(_send(load_app(target), messages))


async def _send(app: App, messages: BinaryIO) -> None:
    async with app:
        for line in messages:
            if line.strip():
                reply = await app.handle(line)
                if reply is not None:
                    click.echo(reply)

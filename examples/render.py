"""A long job that is killed in the middle and continues: a task of MCP 2026-07-28, kept in the
ledger.

    python examples/render.py                the story: start, kill -9, restart, result
    python examples/render.py --serve PORT   the server alone, with the ledger render.db in the current folder

Finished frames are files, so a run that takes over continues where the last one stopped
(`on_crash="rerun"`).
"""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from wirecall import App, Context, connect_sync

FRAMES = 20
app = App("studio", ledger="sqlite:render.db")


@app.command(task=True, on_crash="rerun", lease=1, destructive=False)
async def render(film: str, ctx: Context) -> str:
    """Render a film, frame by frame."""
    for number in range(FRAMES):
        if number not in frames(film):
            await asyncio.sleep(0.05)
            write(film, number, f"attempt {ctx.attempt}")
        await ctx.progress(number + 1, FRAMES, f"frame {number + 1} of {FRAMES}")
    return f"{film}: {FRAMES} frames, by {len(set(frames(film).values()))} processes"


def frames(film: str) -> dict[int, str]:
    """Return the frames that are done: their numbers, and the attempt that made each."""
    return {int(path.stem): path.read_text() for path in Path(film).glob("*.txt")}


def write(film: str, number: int, text: str) -> None:
    Path(film).mkdir(exist_ok=True)
    Path(film, f"{number}.txt").write_text(text)


def main(port: int) -> None:
    url = f"http://127.0.0.1:{port}/mcp"
    with serve(port) as server, connect_sync(url, protocol="mcp") as client:
        task = client.start_tool("render", {"film": "dawn"})
        while not frames("dawn"):
            time.sleep(0.01)
        server.kill()  # SIGKILL: nothing is cleaned up
    print("killed after some frames:", 0 < len(frames("dawn")) < FRAMES)
    assert task.id is not None
    with serve(port) as server, connect_sync(url, protocol="mcp") as client:
        # The id is enough: this client did not start the task.
        print(client.task(task.id).result().text)
        server.terminate()


def serve(port: int) -> "subprocess.Popen[bytes]":
    """Start the server, and wait until it answers."""
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(port)], stderr=subprocess.DEVNULL
    )
    while server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.05)
    return server


if __name__ == "__main__":
    if "--serve" in sys.argv:
        app.run("http", port=int(sys.argv[-1]))
    else:
        __file__ = os.path.abspath(__file__)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free = probe.getsockname()[1]
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            main(free)
            os.chdir("/")

"""Something long that is killed in the middle and goes on: a task of MCP 2026-07-28, kept in the ledger.

    python examples/render.py                the story: start, kill -9, restart, result
    python examples/render.py --serve PORT   the server alone, with the ledger render.db in the current folder

The frames that are done are files, so a run that takes over goes on where the last one stopped (`on_crash="rerun"`).
"""

import asyncio
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

from wirecall import App, Context, connect

FRAMES = 20
app = App("studio", ledger="sqlite:render.db")


@app.command(task=True, on_crash="rerun", lease=1, destructive=False)
async def render(film: str, ctx: Context) -> str:
    """Render a film, frame by frame."""
    folder = Path(film)
    folder.mkdir(exist_ok=True)
    for number in range(FRAMES):
        if not (frame := folder / f"{number}.txt").exists():
            await asyncio.sleep(0.05)
            frame.write_text(f"frame {number}, attempt {ctx.attempt}\n")
        await ctx.progress(number + 1, FRAMES, f"frame {number + 1} of {FRAMES}")
    attempts = {frame.read_text().split()[-1] for frame in folder.iterdir()}
    return f"{film}: {FRAMES} frames, by {len(attempts)} processes"


async def main(port: int) -> None:
    url = f"http://127.0.0.1:{port}/mcp"
    server = await serve(port)
    async with connect(url, protocol="mcp") as client:
        task = await client.start_tool("render", {"film": "dawn"})
        assert task.id is not None
        while not list(Path("dawn").glob("*.txt")):
            await asyncio.sleep(0.05)
    server.kill()  # SIGKILL: nothing is cleaned up
    await server.wait()
    print("killed after some frames:", 0 < len(list(Path("dawn").glob("*.txt"))) < FRAMES)

    server = await serve(port)
    async with connect(url, protocol="mcp") as client:  # any client that knows the id: this one, or another process
        result = await client.task(task.id)
        print(result.text)
    server.send_signal(signal.SIGTERM)
    await server.wait()


async def serve(port: int) -> asyncio.subprocess.Process:
    """Start the server, and wait until it answers."""
    command = (sys.executable, str(Path(__file__).resolve()), "--serve", str(port))
    server = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return server
        except OSError:
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    if "--serve" in sys.argv:
        app.run("http", port=int(sys.argv[-1]))
    else:
        with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free = probe.getsockname()[1]
            probe.close()
            os.chdir(folder)
            asyncio.run(main(free))
            os.chdir("/")

"""Agent frameworks call the shop, and lose an answer: `make frameworks`, or `make frameworks
ONLY=langchain`.

Each framework has its environment, with the versions that `PYTHON` and `NODE` pin. Its agent (see
`shopper`) buys tea twice. The connection of the first charge is cut after the effect and before the
answer. The framework, its model or its user sends the call again, and the order must be charged
once. The second purchase is a new one.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.environments import environment
from tests.faults.proxy import Proxy
from tests.mcp.node import installed, node
from wirecall import connect_sync

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATIENCE = 120.0  # seconds for one purchase
PRICE = 450

# certifi: langchain-core asks for the newest release, which may not be everywhere yet.
PYTHON = {
    "langchain": [
        "langchain==1.4.7",
        "langchain-core==1.7.2",
        "langchain-mcp-adapters==0.3.2",
        "mcp==1.30.0",
    ],
    "llama_index": ["llama-index-core==0.14.25", "llama-index-tools-mcp==0.6.0", "mcp==2.3.0"],
    "pydantic_ai": ["pydantic-ai-slim[mcp]==2.66.0", "mcp==2.3.0"],
    "openai_agents": ["openai-agents==0.24.0"],
    "google_adk": ["google-adk[mcp]==2.13.0"],
}
NODE = {
    "ai_sdk": ["ai@7.0.170", "@ai-sdk/mcp@2.0.97", "zod@4.1.13"],
    "mastra": ["@mastra/core@1.71.0", "@mastra/mcp@2.0.0", "ai@7.0.170", "zod@4.1.13"],
}


def agent_command(name: str) -> tuple[list[str], dict[str, str]]:
    """Return the command of an agent, and the environment variables that it needs."""
    if name in PYTHON:
        python = environment(name, PYTHON[name])
        return [str(python), "-W", "ignore", "-m", f"tests.frameworks.{name}_agent"], {
            "PYTHONPATH": str(ROOT)
        }
    modules = installed(*NODE[name])
    # Node looks for packages beside a module, so the module is copied to its packages.
    for file in ("shopper.mjs", f"{name}_agent.mjs"):
        (modules.parent / file).write_bytes((HERE / file).read_bytes())
    return [str(node()), str(modules.parent / f"{name}_agent.mjs")], {}


class Gate:
    """Waits for a charge, and cuts the connections of a proxy before the answer is sent."""

    def __init__(self) -> None:
        self.cuts = 0
        self.proxy: Proxy | None = None

    async def opened(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.proxy is not None:
            self.cuts += 1
            await asyncio.to_thread(self.proxy.cut)
        writer.close()


@contextmanager
def served(gate_port: int) -> Iterator[int]:
    """Run `wirecall serve` with the shop, and yield its port."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "wirecall",
            "serve",
            str(HERE / "shop.py"),
            "--http",
            "127.0.0.1:0",
            "--single-user",
        ]
        command += ["--ledger", f"sqlite:{folder}/ledger.db"]
        process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GATE": str(gate_port)},
            cwd=folder,
        )
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            address = next(
                (word for word in line.split() if word.startswith("http://127.0.0.1:")), None
            )
            assert address is not None, line + process.stderr.read()
            yield int(address.rstrip("/,").rpartition(":")[2])
        finally:
            process.terminate()
            process.wait(30)
            process.stderr.close()


async def run_agent(
    command: list[str], url: str, order: str, more: dict[str, str]
) -> dict[str, Any]:
    """Let an agent buy tea, and return what its model has seen."""
    process = await asyncio.create_subprocess_exec(
        *command,
        url,
        order,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **more},
        cwd=ROOT,
    )
    try:
        async with asyncio.timeout(PATIENCE):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise AssertionError(f"the agent did not end within {PATIENCE:g} s") from None
    lines = out.decode().strip().splitlines()
    assert process.returncode == 0 and lines, (
        f"the agent ended with {process.returncode}:\n{err.decode()[-3000:]}"
    )
    if "-v" in sys.argv:
        print(err.decode(), file=sys.stderr)
    found: dict[str, Any] = json.loads(lines[-1])
    return found


async def try_framework(name: str) -> str:
    """Let one framework buy twice, check the effects, and return a line about it."""
    command, more = await asyncio.to_thread(agent_command, name)
    gate = Gate()
    listener = await asyncio.start_server(gate.opened, "127.0.0.1", 0)
    async with listener:
        with (
            served(listener.sockets[0].getsockname()[1]) as port,
            Proxy(("127.0.0.1", port)) as gate.proxy,
        ):
            url = f"http://127.0.0.1:{gate.proxy.port}/mcp"
            begun = time.monotonic()
            first = await run_agent(command, url, "7", more)
            assert gate.cuts == 1, f"expected 1 cut connection, got {gate.cuts}"
            check(first, paid=PRICE)
            effects = await asyncio.to_thread(paid_for, port)
            assert effects == PRICE, (
                f"the lost answer: expected one charge of {PRICE}, got {effects} in all"
            )
            second = await run_agent(command, url, "7", more)
            check(second, paid=2 * PRICE)
            effects = await asyncio.to_thread(paid_for, port)
            assert effects == 2 * PRICE, (
                f"the intended repeat: expected {2 * PRICE} in all, got {effects}"
            )
    failed = sum(answer["is_error"] for answer in first["answers"])
    took = time.monotonic() - begun
    return (
        f"one effect: {first['runs']} runs of the agent, "
        f"{failed} failed tool calls in the last, {took:.1f} s"
    )


def paid_for(port: int) -> int:
    with connect_sync(f"http://127.0.0.1:{port}/rpc") as client:
        found: int = client.call("paid_for", {"order": "7"})
    return found


def check(found: dict[str, Any], paid: int) -> None:
    """Check what the model of an agent has seen in its last run."""
    price, *_, charge = found["answers"]
    assert price["tool"] == "price" and str(PRICE) in price["text"], found
    assert charge["tool"] == "charge" and not charge["is_error"] and str(paid) in charge["text"], (
        found
    )


def main(names: list[str]) -> int:
    known = [*PYTHON, *NODE]
    wrong = [name for name in names if name not in known]
    if wrong:
        print(
            f"there is no framework {wrong[0]!r}: choose from {', '.join(known)}", file=sys.stderr
        )
        return 2
    passed = 0
    chosen = names or known
    for name in chosen:
        try:
            print(f"{name}: {asyncio.run(try_framework(name))}", flush=True)
            passed += 1
        except (AssertionError, subprocess.SubprocessError, RuntimeError) as error:
            print(f"{name}: FAILED: {error}", flush=True)
    print(f"{passed} passed, {len(chosen) - passed} failed")
    return int(passed < len(chosen))


if __name__ == "__main__":
    sys.exit(main([name for name in sys.argv[1:] if name != "-v"]))

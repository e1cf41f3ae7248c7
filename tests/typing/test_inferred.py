"""What mypy and pyright infer for the README's own examples, and for their twins: an editor sees types, not `Any`.

The module that they read is made of the README's Python blocks, with a `reveal_type` for each row of the tables below. `Any`
stands in them for JSON values alone: what a method gives whose type the caller did not name.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mcp.node import installed, node

ROOT = Path(__file__).parents[2]
PYRIGHT = "pyright@1.1.414"
PATIENCE = 300.0

STATUSES = ["working", "input_required", "completed", "failed", "cancelled"]

# What an editor sees after the README's examples.
README = {
    "client": "SyncClient",
    'client.call("price", {"sku": "tea"})': "Any",
    'client.call("price", {"sku": "tea"}, type=int)': "int",
    'client.notify("touch")': "None",
    "client.batch()": "SyncBatch",
    "batch": "SyncBatch",
    "tea": "Entry[Any]",
    "tea.result()": "Any",
    "tea.attempts": "int",
    "tea.replayed": "bool",
    "agent": "SyncMcpClient",
    "agent.revision": "str | None",
    "tools": "list[Tool]",
    "tools[0].name": "str",
    "tools[0].read_only": "bool",
    'agent.call_tool("price", {"sku": "tea"})': "Called",
    'agent.call_tool("price", {"sku": "tea"}).structured': "Any",
    'agent.call_tool("price", {"sku": "tea"}).text': "str",
    'agent.call_tool("price", {"sku": "tea"}, type=int)': "int",
    'agent.start_tool("price", {"sku": "tea"})': "SyncTask[Called]",
    'agent.start_tool("price", {"sku": "tea"}, type=int).result()': "int",
    'agent.task("id")': "SyncTask[Called]",
    'agent.task("id").id': "str | None",
    'agent.task("id", type=int).result(timeout=5)': "int",
    'next(iter(agent.task("id"))).status': f"Literal{STATUSES}",
    "agent.list_resources()": "list[Resource]",
    "agent.list_resource_templates()": "list[Template]",
    "agent.list_prompts()": "list[Prompt]",
    'agent.get_prompt("greet")': "Prompted",
    'agent.read_resource("shop://orders/7")': "list[Embedded]",
    'agent.complete("greet", "name", "A").values': "list[str]",
    "agent.batch()": "SyncMcpBatch",
    'agent.batch().call_tool("price", {"sku": "tea"})': "Entry[Called]",
    'agent.batch().call_tool("price", {"sku": "tea"}, type=int).result()': "int",
    "next(agent.listen(tools=True)).kind": "Literal['tools', 'prompts', 'resources', 'updated']",
}
# The same without blocking: in a coroutine, with these clients.
TWINS = {
    'testing.client(app, protocol="mcp")': "McpClient",
    "testing.client(app)": "Client",
    'connect(app, protocol="jsonrpc")': "Client",
    'connect(["python", "server.py"])': "Client",
    'connect("http://127.0.0.1:8420/rpc")': "Client",
    'connect("http://127.0.0.1:8420/mcp", protocol="mcp")': "McpClient",
    "plain": "Client",
    'await plain.call("price", {"sku": "tea"})': "Any",
    'await plain.call("price", {"sku": "tea"}, type=int)': "int",
    'await plain.rpc.price(sku="tea")': "Any",
    "plain.batch()": "Batch",
    'plain.batch().call("price", type=int).result()': "int",
    "mcp": "McpClient",
    "await mcp.list_tools()": "list[Tool]",
    'await mcp.call_tool("price")': "Called",
    '(await mcp.call_tool("price")).structured': "Any",
    'await mcp.call_tool("price", type=int)': "int",
    'mcp.batch().call_tool("price").result()': "Called",
    'await mcp.start_tool("price")': "Task[Called]",
    'await (await mcp.start_tool("price", type=int))': "int",
    'mcp.task("id").status': f"Literal{STATUSES} | None",
    'await mcp.task("id")': "Called",
    'await mcp.task("id", type=int).result(timeout=5)': "int",
    '[state async for state in mcp.task("id")]': "list[TaskState]",
    "await mcp.listen(tools=True).__anext__()": "Change",
}
# What a type checker must not accept.
MISTAKES = ["client.list_tools()", "connect_sync(app, sampel=print)", 'client.call("price", 7)', "batch.call_tool('price')"]


def module() -> str:
    """Return the README's examples and the expressions of the tables as one module."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    reveals = [f"reveal_type({expression})" for expression in README]
    twins = [f"        reveal_type({expression})" for expression in TWINS]
    opened = 'connect(app) as plain, connect(app, protocol="mcp") as mcp'
    mistakes = [f"{mistake}  # mistake" for mistake in MISTAKES]
    lines = [*blocks, "from wirecall import connect", *reveals, f"async def twins() -> None:\n    async with {opened}:"]
    return "\n".join([*lines, *twins, *mistakes, ""])


def plain(shown: str) -> str:
    """Return a type without the modules of its names, and with its literals as one."""
    shown = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", shown.rstrip("?")).replace('"', "'")
    return re.sub(r"'\] \| Literal\['", "', '", shown)


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_an_editor_infers(checker: str, tmp_path: Path) -> None:
    file = tmp_path / "examples.py"
    file.write_text(module())
    found, faults = (mypy if checker == "mypy" else pyright)(file)
    wanted = {**README, **TWINS}
    assert dict(zip(wanted, found, strict=True)) == wanted
    lines = file.read_text().splitlines()
    assert [lines[line - 1] for line in sorted(set(faults))] == [f"{mistake}  # mistake" for mistake in MISTAKES]


def mypy(file: Path) -> tuple[list[str], list[int]]:
    """Return the types that mypy reveals, and the lines of what it refuses."""
    options = ["--strict", "--allow-untyped-defs", "--allow-untyped-calls", "--allow-any-generics", "--check-untyped-defs"]
    command = [
        sys.executable,
        "-m",
        "mypy",
        *options,
        "--cache-dir",
        str(ROOT / ".mypy_cache"),
        "--output",
        "json",
        str(file),
    ]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    ran = subprocess.run(
        command, cwd=file.parent, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    told = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert told, ran.stdout + ran.stderr
    revealed = [one["message"] for one in told if one["message"].startswith("Revealed type is")]
    faults = [one["line"] for one in told if one["severity"] == "error"]
    return [plain(re.sub(r'Revealed type is "(.*)"', r"\1", message)) for message in revealed], faults


def pyright(file: Path) -> tuple[list[str], list[int]]:
    """Return the types that pyright reveals, and the lines of what it refuses."""
    settings = {"extraPaths": [str(ROOT / "src")], "typeCheckingMode": "standard"}
    (file.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    program = installed(PYRIGHT) / "pyright" / "index.js"
    command = [str(node()), str(program), "--outputjson", "--pythonpath", sys.executable, str(file)]
    ran = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, timeout=PATIENCE, check=False)
    told = json.loads(ran.stdout)["generalDiagnostics"]
    revealed = [one["message"] for one in told if one["message"].startswith("Type of ")]
    faults = [one["range"]["start"]["line"] + 1 for one in told if one["severity"] == "error"]
    return [plain(re.sub(r'Type of ".*" is "(.*)"', r"\1", message, flags=re.DOTALL)) for message in revealed], faults

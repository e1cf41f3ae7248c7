"""Mypy and pyright on the README's examples and on generated clients: an editor sees types, not
`Any`.

Both checkers read one folder:

1. `examples.py` is made of the README's Python blocks, with a `reveal_type` for each row of the
   tables below. `Any` stands in them for JSON values alone: the result of a method whose type the
   caller did not name. The pages about authorization are separate modules.
2. Generated clients, which pass in mypy's strict mode, and `use.py`, which calls them.

A line that ends in `# mistake` is one that a checker must refuse, and it refuses no other.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.contract.contracts import NAMES, contract_of, pets
from tests.mcp.node import installed, node
from wirecall.contract.generate import generated
from wirecall.contract.lock import of_app

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
MISTAKES = [
    "client.list_tools()",
    "connect_sync(app, sampel=print)",
    'client.call("price", 7)',
    "batch.call_tool('price')",
    "app.query(titel='Price')",
    "app.query(on_crash='rerun')",
    "app.query(name=7)",
    "app.command(retention='a day')",
    "app.command(notification_allowed=True)",
    "app.command(on_crash='never')",
    "app.tool(annotations=7)",
    "app.tool(expose=('mcp',))",
    "app.prompt(lease=30)",
    "Router().command(wiat=5)",
]


def blocks_of(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def module() -> str:
    """Return the README's examples and the expressions of the tables as one module."""
    blocks = blocks_of(ROOT / "README.md")
    reveals = [f"reveal_type({expression})" for expression in README]
    twins = [f"        reveal_type({expression})" for expression in TWINS]
    opened = 'connect(app) as plain, connect(app, protocol="mcp") as mcp'
    mistakes = [f"{mistake}  # mistake" for mistake in MISTAKES]
    lines = [
        *blocks,
        "from wirecall import Router, connect",
        *reveals,
        f"async def twins() -> None:\n    async with {opened}:",
    ]
    return "\n".join([*lines, *twins, *mistakes, ""])


def plain(shown: str) -> str:
    """Return a type without the modules of its names, and with its literals as one."""
    shown = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", shown.rstrip("?")).replace('"', "'")
    return re.sub(r"'\] \| Literal\['", "', '", shown)


USE = """
from pets_client import Cat, Dog, PetsClient, SyncPetsClient


async def use() -> None:
    async with PetsClient("http://127.0.0.1:8420", check=True, timeout=5) as client:
        found: list[Cat | Dog] = await client.pets_greet(pet=Cat(name="Tom", class_=7), size="small")
        await client.buy(name="Tom", key="order-7")
        await client.pets_greet(pet="Tom")  # mistake
        await client.pets_greet(pet=Dog(name="Rex"), size="huge")  # mistake
        await client.pets_greet(pet=Dog(name="Rex"), key="k")  # mistake
        print(found[0].age)  # mistake


SyncPetsClient(["python", "server.py"]).forget()
"""


class Verdict(NamedTuple):
    """The verdict of a checker on a folder: the revealed types, in their order, and the file and
    line of each error.
    """

    revealed: list[str]
    errors: set[tuple[str, int]]


@pytest.mark.long
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_types_are_inferred_and_mistakes_are_found(checker: str, tmp_path: Path) -> None:
    odd = contract_of({name: {"type": "integer"} for name in NAMES}, errors={"5": "Gone"})
    sources = {
        "examples.py": module(),
        "authorization.py": "\n".join(blocks_of(ROOT / "docs" / "authorization.md")),
        "authorization_client.py": "\n".join(blocks_of(ROOT / "docs" / "authorization-client.md")),
        "pets_client.py": generated(of_app(pets()), "jsonrpc"),
        "tools_client.py": generated(of_app(pets()), "mcp"),
        "odd_client.py": generated(odd, "jsonrpc"),
        "use.py": USE,
    }
    for name, source in sources.items():
        (tmp_path / name).write_text(source)
    verdict = (mypy if checker == "mypy" else pyright)(tmp_path)
    wanted = {**README, **TWINS}
    assert dict(zip(wanted, verdict.revealed, strict=True)) == wanted
    assert verdict.errors == {
        (name, number)
        for name, source in sources.items()
        for number, line in enumerate(source.splitlines(), 1)
        if line.endswith("# mistake")
    }


def mypy(folder: Path) -> Verdict:
    # The functions of the README's examples need no annotations.
    loose = ("disallow_untyped_defs", "disallow_untyped_calls", "disallow_any_generics")
    options = "".join(f"{option} = false\n" for option in loose)
    (folder / "mypy.ini").write_text(f"[mypy]\nstrict = true\n[mypy-examples]\n{options}")
    cache = ("--cache-dir", str(ROOT / ".mypy_cache"))
    command = [
        sys.executable,
        "-m",
        "mypy",
        *cache,
        "--output",
        "json",
        *map(str, sorted(folder.glob("*.py"))),
    ]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    ran = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    told = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert told, ran.stdout + ran.stderr
    revealed = [
        match[1] for one in told if (match := re.match(r'Revealed type is "(.*)"', one["message"]))
    ]
    return Verdict(
        [plain(shown) for shown in revealed],
        {(Path(one["file"]).name, one["line"]) for one in told if one["severity"] == "error"},
    )


def pyright(folder: Path) -> Verdict:
    settings = {"extraPaths": [str(ROOT / "src")], "typeCheckingMode": "standard"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    program = installed(PYRIGHT) / "pyright" / "index.js"
    command = [str(node()), str(program), "--outputjson", "--pythonpath", sys.executable]
    ran = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    told = json.loads(ran.stdout)["generalDiagnostics"]
    revealed = [
        match[1]
        for one in told
        if (match := re.match(r'Type of ".*" is "(.*)"', one["message"], re.DOTALL))
    ]
    return Verdict(
        [plain(shown) for shown in revealed],
        {
            (Path(one["file"]).name, one["range"]["start"]["line"] + 1)
            for one in told
            if one["severity"] == "error"
        },
    )

"""mypy, in its strict mode, and pyright accept a generated client, and infer its types."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.test_generate import NAMES, contract_of, pets
from tests.mcp.node import installed, node
from tests.typing.test_inferred import PATIENCE, PYRIGHT, ROOT
from wirecall.contract.generate import generated
from wirecall.contract.lock import of_app

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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pets_client.py").write_text(generated(of_app(pets()), "jsonrpc"))
    (tmp_path / "tools_client.py").write_text(generated(of_app(pets()), "mcp"))
    odd = contract_of({name: {"type": "integer"} for name in NAMES}, errors={"5": "Gone"})
    (tmp_path / "odd_client.py").write_text(generated(odd, "jsonrpc"))
    (tmp_path / "use.py").write_text(USE)
    return tmp_path


MISTAKES = {("use.py", at) for at, line in enumerate(USE.splitlines(), 1) if line.endswith("# mistake")}


def test_mypy(folder: Path) -> None:
    cache = ["--cache-dir", str(ROOT / ".mypy_cache")]
    command = [sys.executable, "-m", "mypy", "--strict", *cache, "--output", "json", *map(str, folder.glob("*.py"))]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    told = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert told, ran.stdout + ran.stderr
    assert {(Path(one["file"]).name, one["line"]) for one in told if one["severity"] == "error"} == MISTAKES, told


def test_pyright(folder: Path) -> None:
    settings = {"extraPaths": [str(ROOT / "src")], "typeCheckingMode": "standard"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    program = installed(PYRIGHT) / "pyright" / "index.js"
    command = [str(node()), str(program), "--outputjson", "--pythonpath", sys.executable]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)
    told = json.loads(ran.stdout)["generalDiagnostics"]
    found = {(Path(one["file"]).name, one["range"]["start"]["line"] + 1) for one in told if one["severity"] == "error"}
    assert found == MISTAKES, told

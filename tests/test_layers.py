"""The layers: a module imports from the layers below its own, never from above, never from beside."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "wirecall"

LAYERS = [
    {"errors"},
    {"frames", "params", "ledger.base", "logs", "lanes", "mcp.revisions", "mcp.types", "mcp.sealed"},
    {"jsonrpc", "methods", "outcomes", "ledger.memory", "ledger.redis", "ledger.postgres", "ledger.sqlite_file"}
    | {"mcp.__init__", "mcp.headers", "mcp.hub", "mcp.relay"},
    {"policy", "runs", "openrpc", "tracing", "audit", "ledger.sqlite_rows", "mcp.catalog", "mcp.peer"},
    {"commands", "ledger.sqlite_writer", "mcp.gate", "transports.http_server", "transports.stdio"},
    {"ledger.sqlite", "mcp.streams", "transports.rpc_http", "transports.run_http"},
    {"dispatch"},
    {"mcp.server"},
    {"mcp.http", "mcp.lines"},
    {"app"},
    {"__init__"},
    {"cli.target"},
    {"cli.send"},
    {"cli.__init__"},
]
PACKAGES = {"ledger.__init__", "transports.__init__"}

# Modules that may use the event loop. Protocol code may not: it imports no asyncio, no socket and no clock.
PURE = {"errors", "frames", "jsonrpc", "params", "methods", "policy", "openrpc", "ledger.base"}
PURE |= {"mcp.revisions", "mcp.types", "mcp.catalog", "mcp.gate", "mcp.headers"}
FOREIGN = {
    "msgspec": None,  # everywhere
    "apsw": {"ledger.sqlite", "ledger.sqlite_file", "ledger.sqlite_rows", "ledger.sqlite_writer"},
    "redis": {"ledger.redis"},
    "psycopg": {"ledger.postgres"},
    "opentelemetry": {"tracing"},
    "click": {"cli.__init__", "cli.send", "cli.target"},
    "granian": {"transports.run_http"},
    "uvicorn": {"transports.run_http"},
}


def modules() -> dict[str, Path]:
    return {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in SOURCE.rglob("*.py")}


def imports(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever in the file it stands, but for type checkers' eyes only."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "wirecall":
            found |= {f"wirecall.{alias.name}" if alias.name in NAMES else "wirecall.__init__" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            package = node.module.removeprefix("wirecall.")
            names = {f"{package}.{alias.name}" for alias in node.names}
            if f"{package}.__init__" in modules():
                found |= {f"wirecall.{name if name in modules() else f'{package}.__init__'}" for name in names}
            else:
                found.add(node.module)
    return found


NAMES = {name.split(".")[0] for name in modules()}


def layer_of(module: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if module in layer)


def test_every_module_has_a_layer() -> None:
    assert {name for layer in LAYERS for name in layer} | PACKAGES >= set(modules())


@pytest.mark.parametrize("module", sorted(set(modules()) - PACKAGES))
def test_imports_go_down_only(module: str) -> None:
    for name in imports(modules()[module]):
        if name.startswith("wirecall."):
            below = name.removeprefix("wirecall.")
            assert layer_of(below) < layer_of(module), f"{module} imports {below}"


@pytest.mark.parametrize("module", sorted(modules()))
def test_what_comes_from_outside_is_imported_in_one_place(module: str) -> None:
    for name in imports(modules()[module]):
        root = name.split(".")[0]
        if root not in sys.stdlib_module_names and root != "wirecall":
            assert root in FOREIGN, f"{module} imports {root}"
            allowed = FOREIGN[root]
            assert allowed is None or module in allowed, f"{module} imports {root}"


@pytest.mark.parametrize("module", sorted(PURE))
def test_the_core_does_not_know_the_loop(module: str) -> None:
    assert not imports(modules()[module]) & {"asyncio", "socket", "time", "datetime", "threading"}


def test_import_wirecall_loads_msgspec_and_nothing_else_from_outside() -> None:
    script = "import sys; before = set(sys.modules); import wirecall; print(*sorted(set(sys.modules) - before))"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    loaded = {name.split(".")[0] for name in printed.split()} - set(sys.stdlib_module_names)
    # msgspec itself takes typing_extensions where it happens to be installed
    assert loaded - {"typing_extensions"} == {"msgspec", "wirecall"}
    assert not {"asyncio", "logging", "json", "apsw", "click"} & set(printed.split())

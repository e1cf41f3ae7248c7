"""The layers: a module imports from the layers below its own, never from above, never from beside."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "wirecall"

LAYERS = [
    {"digests", "functions", "tasks", "terms"},
    {"errors", "lanes", "logs", "process"} | {"mcp.revisions", "mcp.types", "mcp.sealed"} | {"transports.lines"},
    {"contradictions", "frames", "params", "ledger.base", "retries"}
    | {"mcp.__init__", "mcp.changes", "mcp.handshake", "mcp.host", "mcp.relay"}
    | {"transports.descriptors", "transports.http_workers", "transports.listeners", "transports.memory"}
    | {"transports.process", "transports.sse", "transports.waiting"},
    {"context", "options"},
    {"chores", "jsonrpc", "methods", "outcomes", "replies", "ledger.memory", "ledger.sqlite_file", "ledger.sqlite_jobs"}
    | {"ledger.postgres_errors", "ledger.postgres_rows", "ledger.redis_checks", "ledger.redis_scripts", "ledger.redis_wire"}
    | {"mcp.headers", "mcp.hub", "mcp.listening"}
    | {"transports.child", "transports.http_client"},
    {"policy", "runs", "openrpc", "tracing", "audit", "batches"}
    | {"ledger.postgres_pool", "ledger.redis_net", "ledger.sqlite_rows"}
    | {"mcp.catalog", "mcp.inbox", "mcp.offers", "mcp.other_workers", "mcp.peer", "mcp.sse_pipe"},
    {"endings", "handlers", "config", "coalescing", "declarations", "delivery", "kinds", "links"}
    | {"ledger.redis", "ledger.sqlite_commits", "ledger.sqlite_lock"}
    | {"ledger.postgres_lanes", "ledger.postgres_schema", "ledger.postgres_transaction"}
    | {"mcp.client_headers", "mcp.gate", "mcp.pages", "mcp.rounds", "mcp.states"}
    | {"transports.http_request", "transports.stdio"},
    {"claims", "leases", "transactions", "calls", "ledger.postgres", "ledger.sqlite_writer"}
    | {"mcp.answers", "mcp.line_link", "mcp.lists", "mcp.requests", "mcp.streams"}
    | {"transports.http_guard", "transports.rpc_http"},
    {"commands", "sync", "ledger.sqlite_turns"}
    | {"mcp.conversation", "mcp.http_link", "mcp.http_rules", "mcp.sessions", "mcp.subscriptions"}
    | {"transports.http_server"},
    {"dispatch", "ledger.sqlite_transaction"} | {"mcp.client"} | {"transports.http_fronts"},
    {"ledger.sqlite"} | {"mcp.calls"} | {"transports.run_http"},
    {"mcp.tools"},
    {"mcp.server"},
    {"mcp.http_handshake", "mcp.http_stateless", "mcp.lines"},
    {"mcp.http"},
    {"app"},
    {"client"},
    {"__init__", "testing"},
    # the command line
    {"cli.exits", "cli.schemas", "cli.settings", "cli.completion"},
    {"cli.failures", "cli.output"},
    {"cli.running", "cli.durations", "cli.targets", "cli.offers", "cli.arguments", "cli.new"},
    {"cli.audit", "cli.clients", "cli.connecting", "cli.lines", "cli.overrides", "cli.wires"},
    {"cli.ledgers"},
    {
        "cli.call",
        "cli.config",
        "cli.doctor",
        "cli.install",
        "cli.ledger",
        "cli.listing",
        "cli.probing",
        "cli.send",
        "cli.serve",
    },
    {"cli.batch", "cli.dev", "cli.probe", "cli.show"},
    {"cli.__init__"},
    {"__main__"},
]
PACKAGES = {"ledger.__init__", "transports.__init__"}

# Modules that may use the event loop. Protocol code may not: it imports no asyncio, no socket and no clock.
PURE = {"errors", "frames", "jsonrpc", "params", "methods", "policy", "openrpc", "ledger.base"}
PURE |= {"context", "contradictions", "functions", "terms"}
PURE |= {"mcp.revisions", "mcp.types", "mcp.catalog", "mcp.gate", "mcp.headers"}
PURE |= {"transports.lines"}
PURE |= {"mcp.answers", "mcp.calls", "mcp.pages", "mcp.requests", "mcp.states", "mcp.tools"}
FOREIGN = {
    "msgspec": None,  # everywhere
    "apsw": {f"ledger.sqlite{part}" for part in ("", "_commits", "_file", "_lock", "_rows", "_turns", "_writer")},
    "redis": {"ledger.redis", "ledger.redis_net", "ledger.redis_wire"},
    "psycopg": {f"ledger.postgres{part}" for part in ("", "_errors", "_lanes", "_pool", "_transaction")},
    "opentelemetry": {"tracing"},
    "click": {name for layer in LAYERS for name in layer if name.startswith("cli.")},
    "rich": {"cli.output"},
    "aiohttp": {"transports.http_client"},
    "granian": {"transports.http_fronts"},
    "uvicorn": {"transports.http_fronts"},
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

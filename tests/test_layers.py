"""The rooms of the source: a room imports only rooms of lower layers, and the imports inside a room
have no cycle.
"""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.layers import LAYERS

SOURCE = Path(__file__).parents[1] / "src" / "wirecall"

# What users import and start.
DOORS = {"__init__", "__main__"}
# The only rooms that import a package from outside the standard library.
FOREIGN = {
    "msgspec": {room for layer in LAYERS for room in layer},
    "apsw": {"ledger.sqlite"},
    "redis": {"ledger.redis"},
    "psycopg": {"ledger.postgres"},
    "psycopg_pool": {"ledger.postgres"},
    "opentelemetry": {"tracing"},
    "click": {"cli"},
    "rich": {"cli.terminal"},
    "aiohttp": {"transports.http_client", "testing.auth"},
    "granian": {"transports.serve"},
    "uvloop": {"transports.serve"},
    "uvicorn": {"transports.serve"},
    "pydantic": {"protocol.models", "protocol.model_schemas"},
    "pydantic_core": {"protocol.model_schemas"},
    "jwt": {"auth", "testing.auth"},
    "cryptography": {"auth", "testing.auth"},
    "keyring": {"auth.store"},
}
# Protocol code uses no event loop, no socket and no clock.
PURE = {"errors", "jsonrpc", "ledger.base", "mcp.headers", "mcp.revisions", "mcp.types", "protocol"}


def modules(source: Path = SOURCE) -> dict[str, Path]:
    names = {
        path: ".".join(path.relative_to(source).with_suffix("").parts)
        for path in source.rglob("*.py")
    }
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """Return every module that a file imports, late imports included, imports for type checkers
    left out.
    """
    tree = ast.parse(path.read_text())
    typing = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]
    skipped = {id(inner) for node in typing for inner in ast.walk(node)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                package = "wirecall.__init__" if node.module == "wirecall" else node.module
                found.add(whole if whole.removeprefix("wirecall.") in known else package)
    return found


def room_of(module: str) -> str:
    fitting = [room for layer in LAYERS for room in layer if f"{module}.".startswith(f"{room}.")]
    assert fitting, f"{module} is in no layer of tests/layers.py"
    return max(fitting, key=len)


def violations(source: Path) -> set[tuple[str, str]]:
    """Return the pairs of rooms of which the first imports the second and must not; ("x", "x") is a
    cycle inside x.
    """
    known = modules(source)
    layers = {room: number for number, layer in enumerate(LAYERS) for room in layer}
    inside: dict[str, set[str]] = {name: set() for name in known}
    found = set()
    for module in known.keys() - DOORS:
        for name in imports(known[module], known):
            other = name.removeprefix("wirecall.")
            if other == name or other in DOORS:
                continue
            room = room_of(module)
            below = room_of(other)
            if room == below:
                inside[module].add(other)
            elif layers[below] >= layers[room]:
                found.add((room, below))
    sorter = TopologicalSorter(inside)
    try:
        sorter.prepare()
    except ValueError as circle:
        room = room_of(circle.args[1][0])
        found.add((room, room))
    return found


def test_rooms_import_lower_rooms_only() -> None:
    assert not violations(SOURCE)


def test_rooms_of_the_table_are_the_rooms_of_the_source() -> None:
    rooms = {room for layer in LAYERS for room in layer}
    known = modules().keys() - DOORS
    assert rooms <= known
    assert {room_of(module) for module in known} == rooms


def test_rooms_of_the_table_are_in_the_docs() -> None:
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
    found: list[list[str]] = []
    for number, rooms in re.findall(r"^\| (\d*) ?\| (`[^|]+`) \| ", page, re.MULTILINE):
        if number:
            assert int(number) == len(found)
            found.append([])
        found[-1] += re.findall(r"`([\w.]+)`", rooms)
    assert found == LAYERS


def test_helpers_are_not_imported_from_test_modules() -> None:
    tests = Path(__file__).parent
    known = {f"tests.{name}": path for name, path in modules(tests).items()}
    assert [
        (module, name)
        for module, path in sorted(known.items())
        for name in imports(path, known)
        if name.startswith("tests.") and ".test_" in name and name.split(".test_")[0] != module
    ] == []


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        (
            {"server/dispatch.py": "def late():\n    from wirecall.app import App"},
            ("server", "app"),
        ),
        ({"server/dispatch.py": "import wirecall.mcp.server.http"}, ("server", "mcp.server")),
        ({"ledger/memory.py": "from wirecall.transports import stdio"}, ("ledger", "transports")),
        (
            {
                "server/a.py": "import wirecall.server.b",
                "server/b.py": "from wirecall.server import a",
            },
            ("server", "server"),
        ),
    ],
)
def test_rule_finds_a_planted_violation(
    tmp_path: Path, planted: dict[str, str], found: tuple[str, str]
) -> None:
    for name in ("app", "mcp/server/http", "transports/stdio", "server/dispatch", "ledger/memory"):
        (tmp_path / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.py").write_text("")
    for name, text in planted.items():
        (tmp_path / name).write_text(text)
    assert violations(tmp_path) == {found}


def test_packages_from_outside_are_imported_in_one_room_each() -> None:
    known = modules()
    for module, path in known.items():
        for root in (
            {name.split(".")[0] for name in imports(path, known)}
            - set(sys.stdlib_module_names)
            - {"wirecall"}
        ):
            assert any(f"{module}.".startswith(f"{room}.") for room in FOREIGN[root]), (
                module,
                root,
            )


def test_protocol_code_does_not_use_the_event_loop() -> None:
    known = modules()
    for module, path in known.items():
        if any(f"{module}.".startswith(f"{room}.") for room in PURE):
            assert not imports(path, known) & {
                "asyncio",
                "socket",
                "time",
                "datetime",
                "threading",
            }, module


def test_import_wirecall_loads_msgspec_and_nothing_else_from_outside() -> None:
    script = (
        "import sys; before = set(sys.modules); import wirecall; "
        "print(*sorted(set(sys.modules) - before))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    loaded = {name.split(".")[0] for name in printed.split()} - set(sys.stdlib_module_names)
    # msgspec itself takes typing_extensions where it happens to be installed
    assert loaded - {"typing_extensions"} == {"msgspec", "wirecall"}
    assert not {"asyncio", "logging", "json", "apsw", "click"} & set(printed.split())

"""Generates tests/README.md, from a behaviour to its tests: `python -m tests.docs_tests` writes it,
a test compares it.

A row is the first sentence of a test module. A folder without a sentence in `FOLDERS` fails.
"""

import ast
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE / "README.md"

HEAD = """\
# The tests

Find a behaviour in a table, and its file beside it. [docs/rules.md](../docs/rules.md) leads from a
rule to its tests.

    make test                                      all tests, with real SQLite, Redis and PostgreSQL
    make test TESTS="tests/mcp -k tasks"           some of them
    make test SIZE=full                            kills, races and models at their whole length
    make crash KILLS=3000                          kill processes at every step of a command
    make lost CUTS=1000                            cut connections at every step of an exchange
    make frameworks                                agent frameworks lose an answer

Modules that do not begin with `test_` hold what tests share: servers, clients, clocks, faults.
"""

FOLDERS = {
    "": "Apps, docs and examples as a whole",
    "auth": "Authorization, both sides",
    "cli": "The command line",
    "client": "The client: calls, batches, retries",
    "commands": "Commands: keys, replays, crashes, lost answers",
    "console": "The console: tap, pages, feed, resolve",
    "contract": "Contracts: lock, diff, generated clients",
    "crash": "Processes that are killed",
    "faults": "Stores and servers that fail",
    "gateway": "The gateway",
    "ledger": "Ledgers: models",
    "ledger/contract": "Ledgers: one contract for every store",
    "ledger/postgres": "The ledger in PostgreSQL",
    "ledger/redis": "The ledger in Redis",
    "ledger/sqlite": "The ledger in SQLite",
    "lost": "Answers that are lost",
    "mcp": "MCP, both sides",
    "protocol": "JSON, messages, params",
    "server": "One call from bytes to bytes",
    "transports": "HTTP, stdio and workers",
    "typing": "Types as editors see them",
}


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text, f"{path.name}: begin with a sentence about the behaviour that it tests"
    paragraph = text.partition("\n\n")[0]
    return " ".join(paragraph.split())


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    modules = sorted(HERE.rglob("test_*.py"))
    folders = {module.parent.relative_to(HERE).as_posix().removeprefix(".") for module in modules}
    unknown = sorted(folders - FOLDERS.keys())
    assert not unknown, f"name these folders in tests/docs_tests.py: {unknown}"
    for folder, title in FOLDERS.items():
        parts.append(f"\n## {title}\n\n| Behaviour | File |\n| --- | --- |\n")
        for module in sorted((HERE / folder).glob("test_*.py")):
            name = module.relative_to(HERE).as_posix()
            parts.append(f"| {first_sentence(module)} | [{name}]({name}) |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())

"""Lines that are easy to read: one thought per line, and few branches per function.

ruff checks the width of a line. These rules are the ones that it does not have.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
EVERYWHERE = ("src", "tests", "bench", "examples", "docs")

# The branches that a function may have without a reason.
MOST_BRANCHES = 20
# The functions of the source that may have more, each with its reason.
MOST_REASONS = 15
REASON = re.compile(r"\s*# complexity: \w+")

Function = ast.FunctionDef | ast.AsyncFunctionDef
BRANCHES = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.IfExp,
    ast.comprehension,
    ast.Assert,
)


def modules(*tops: str) -> Iterator[Path]:
    for top in tops:
        yield from sorted((ROOT / top).rglob("*.py"))


def is_folded(node: ast.AST) -> bool:
    """Return whether a statement assigns several values to several names: `a, b = x, y`.

    `a, b = b, a` is not one: it needs both values at the same time. Unpacking is not one either.
    """
    if not isinstance(node, ast.Assign) or len(node.targets) > 1:
        return False
    target = node.targets[0]
    value = node.value
    if not isinstance(target, ast.Tuple | ast.List) or not isinstance(value, ast.Tuple | ast.List):
        return False
    if any(isinstance(element, ast.Starred) for element in value.elts):
        return False
    read = {ast.unparse(inner) for inner in ast.walk(value) if isinstance(inner, ast.expr)}
    return not any(ast.unparse(element) in read for element in target.elts)


def is_nested(node: ast.AST) -> bool:
    """Return whether a conditional expression has another one inside."""
    if not isinstance(node, ast.IfExp):
        return False
    return any(isinstance(inner, ast.IfExp) for inner in ast.walk(node) if inner is not node)


def complexity(function: Function) -> int:
    """Count the branches of a function and of the functions inside it."""
    count = 1
    for node in ast.walk(function):
        if isinstance(node, BRANCHES):
            count += 1
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
    return count


def has_reason(function: Function, lines: list[str]) -> bool:
    """Return whether the comment directly above a function says why it has many branches."""
    first = min([function.lineno, *(each.lineno for each in function.decorator_list)])
    number = first - 2
    while number >= 0 and lines[number].lstrip().startswith("#"):
        if REASON.match(lines[number]):
            return True
        number -= 1
    return False


def folded(source: str) -> list[int]:
    """Return the lines of a module that assign several values."""
    return [node.lineno for node in ast.walk(ast.parse(source)) if is_folded(node)]  # type: ignore[attr-defined]


def nested(source: str) -> list[int]:
    """Return the lines of a module with nested conditional expressions."""
    return [node.lineno for node in ast.walk(ast.parse(source)) if is_nested(node)]  # type: ignore[attr-defined]


def complex_functions(source: str) -> dict[str, bool]:
    """Return the functions of a module with many branches, and whether they have a reason."""
    lines = source.splitlines()
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function) and complexity(node) > MOST_BRANCHES:
            found[f"{node.lineno} {node.name}: {complexity(node)}"] = has_reason(node, lines)
    return found


def needless_reasons(source: str) -> list[str]:
    """Return the functions of a module that have a reason and do not need it."""
    lines = source.splitlines()
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, Function)
        and has_reason(node, lines)
        and complexity(node) <= MOST_BRANCHES
    ]


def place(path: Path, where: object) -> str:
    return f"{path.relative_to(ROOT)}:{where}"


# --- the code of this repository ------------------------------------------------------------------


def test_statements_assign_one_value() -> None:
    assert [
        place(path, line) for path in modules(*EVERYWHERE) for line in folded(path.read_text())
    ] == []


def test_conditional_expressions_are_not_nested() -> None:
    assert [
        place(path, line) for path in modules(*EVERYWHERE) for line in nested(path.read_text())
    ] == []


def test_functions_with_many_branches_have_a_reason() -> None:
    found = {
        place(path, function): is_reasoned
        for path in modules("src")
        for function, is_reasoned in complex_functions(path.read_text()).items()
    }
    assert [function for function, is_reasoned in found.items() if not is_reasoned] == []
    assert len(found) <= MOST_REASONS, sorted(found)


def test_functions_with_few_branches_have_no_reason() -> None:
    assert [
        place(path, name) for path in modules("src") for name in needless_reasons(path.read_text())
    ] == []


# --- the rules ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    ["a, b = 1, 2", "[a, b] = 1, 2", "self.a, self.b = x, y", "(a, b), (c, d) = f(), g()"],
)
def test_rule_finds_several_values_in_one_statement(source: str) -> None:
    assert folded(f"first = 1\n{source}") == [2]


@pytest.mark.parametrize(
    "source",
    [
        "a, b = b, a",
        "a, b = b, a + b",
        "x[i], x[j] = x[j], x[i]",
        "a, b = pair",
        "a, b = f()",
        "a, b = *first, *second",
        "A, B = ALL = (1, 2)",
        "pair = 1, 2",
    ],
)
def test_rule_allows_swaps_and_unpacking(source: str) -> None:
    assert folded(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "x = 1 if a else 2 if b else 3",
        "x = 1 if (2 if a else b) else 3",
        "x = f(1 if a else 2) if b else 3",
    ],
)
def test_rule_finds_nested_conditional_expressions(source: str) -> None:
    assert nested(f"first = 1\n{source}") == [2]


def test_rule_allows_two_conditional_expressions_side_by_side() -> None:
    assert nested("x = (1 if a else 2) + (3 if b else 4)") == []


# Five branches: a loop, a condition of three parts, and an assert.
FIVE = "    for each in x:\n        if a and b and c:\n            pass\n    assert x\n"
LISTED = "    y = [a for a in x if a or b or c or d or e]\n"
LOOPS = "    async for a in x:\n        while a:\n            y = 1 if b else 2\n"
HANDLERS = "    try:\n        pass\n    except A:\n        pass\n    except B:\n        pass\n"


def function(body: str) -> ast.AsyncFunctionDef:
    found = ast.parse(f"async def f():\n{body}").body[0]
    assert isinstance(found, ast.AsyncFunctionDef)
    return found


@pytest.mark.parametrize(
    ("body", "count"), [("    pass", 1), (FIVE, 6), (LISTED, 6), (LOOPS, 4), (HANDLERS, 3)]
)
def test_complexity_counts_every_kind_of_branch(body: str, count: int) -> None:
    assert complexity(function(body)) == count


def test_complexity_counts_the_functions_inside() -> None:
    inside = "    def g():\n" + FIVE.replace("    ", "        ")
    assert complexity(function(FIVE + inside)) == 11


def test_rule_finds_a_function_with_many_branches() -> None:
    assert complex_functions(f"def f():\n{FIVE * 4}") == {"1 f: 21": False}
    short = FIVE * 3 + "    assert a or b or c or d\n"
    assert complex_functions(f"def f():\n{short}") == {}


@pytest.mark.parametrize(
    ("above", "is_reasoned"),
    [
        ("# complexity: one row per state", True),
        ("# complexity: one row per state,\n# in the order of the table", True),
        ("# complexity: one row per state\n@cache\n@other(1)", True),
        ("# complexity:", False),
        ("# complexity: one row per state\n", False),
        ("# one row per state", False),
        ("x = 1  # complexity: one row per state", False),
    ],
)
def test_rule_takes_a_reason_directly_above_a_function(above: str, is_reasoned: bool) -> None:
    found = complex_functions(f"{above}\ndef f():\n{FIVE * 4}")
    assert list(found.values()) == [is_reasoned]


def test_rule_finds_a_needless_reason() -> None:
    assert needless_reasons(f"# complexity: it was long\ndef f():\n{FIVE}") == ["f"]


@pytest.mark.parametrize(("width", "is_found"), [(110, False), (111, True)])
def test_ruff_finds_wide_lines(width: int, is_found: bool) -> None:
    line = "# " + "word " * 40
    checked = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--quiet", "--output-format=concise", "-"],
        input=line[: width - 1] + "x\n",
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ("E501" in checked.stdout) is is_found

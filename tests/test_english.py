"""Plain English in every text: error messages, docstrings, comments, docs, names of tests.

The subject of a sentence is a thing of the program, and the verb is active. The patterns find turns of phrase that hide the
subject or negate the noun. `LEFT` counts the places that are still to be rewritten, by folder: it may only shrink.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PATTERNS = [
    # As a subject or a question; "an operator who found out" is plain.
    r"\b[Ww]hoever\b|\bwhom\b|\bWho\b|(?<!operator )(?<!user )(?<!those )(?<!person )(?<!anyone )\bwho\b",
    r"\b(?:no|some|every)body\b",
    # A clause as the subject: "What is sent twice is refused."
    r"(?:^|[.;:] )(?:What|That) (?:is|was|has|may|must|can|cannot|comes|goes|came|they|it|a|an|the)\b(?! your)(?! why)",
    # The noun is negated instead of the verb: "5 is no limit." ("There is no method" is plain.)
    r"(?<!there )(?<!There )\b(?:is|are|was|were) no(?:ne)? (?!longer\b|more\b|other\b)",
    r"\b(?:is|are|was|be) told\b",
    r"\bas such\b",
    r"\bunder way\b",
    r"\bHear (?:that|what|in|of|the)\b",
]
PLAIN = re.compile("|".join(PATTERNS))

LEFT: dict[str, int] = {}


def texts(path: Path) -> Iterator[str]:
    """Yield the lines of a page, or the literals, docstrings and comments of a module.

    The literals of a test are its data and may say anything, so a test yields its name and docstrings instead.
    """
    source = path.read_text()
    if path.suffix == ".md":
        yield from source.splitlines()
        return
    is_test = path.is_relative_to(ROOT / "tests")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and not is_test):
            yield token.string
    for node in ast.walk(ast.parse(source)) if is_test else ():
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node.name.replace("_", " ")


def found(path: Path) -> list[str]:
    return [match[0] for text in texts(path) for match in PLAIN.finditer(text)]


def test_texts_are_plain() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
    modules = [path for top in ("src", "examples", "tests") for path in (ROOT / top).rglob("*.py")]
    modules.remove(Path(__file__))  # its comments quote the patterns
    counted: Counter[str] = Counter()
    for path in pages + modules:
        counted[path.relative_to(ROOT).as_posix()] += len(found(path))
    assert {name: count for name, count in counted.items() if count} == LEFT


@pytest.mark.parametrize(
    "text",
    [
        "Whoever calls it waits.",
        "nobody is owed one",
        "What is sent twice is refused.",
        "5 is no limit",
        "the caller is told so",
        "calls that are under way",
        "Hear that the ledger has answered.",
    ],
)
def test_the_patterns_find_the_old_dialect(text: str) -> None:
    assert PLAIN.search(text)


@pytest.mark.parametrize("text", ["there is no method 'x'", "the key is no longer kept", "The server refuses the call."])
def test_plain_sentences_pass(text: str) -> None:
    assert not PLAIN.search(text)

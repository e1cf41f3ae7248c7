"""Plain English in all prose: error messages, docstrings, comments, docs, names of tests.

The subject of a sentence is a thing of the program, and the verb is active. The patterns find turns
of phrase that hide the subject or negate the noun, and words that are not used here.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PATTERNS = [
    # As a subject or a question; "an operator who found out" is plain.
    r"\b[Ww]hoever\b|\bwhom\b|\bWho\b",
    r"(?<!operator )(?<!user )(?<!those )(?<!person )(?<!anyone )\bwho\b",
    r"\b(?:no|some|every)body\b",
    # A clause as the subject: "What is sent twice is refused."
    r"(?:^|[.;:] )(?:What|That) "
    r"(?:is|was|has|may|must|can|cannot|comes|goes|came|they|it|a|an|the)\b(?! your)(?! why)",
    # The noun is negated instead of the verb: "5 is no limit." ("There is no method" is plain.)
    r"(?<!there )(?<!There )\b(?:is|are|was|were) no(?:ne)? (?!longer\b|more\b|other\b)",
    r"\bas such\b",
    r"\bunder way\b",
]
WORDS = [
    r"tell(?:s|ing)? of",
    r"told",
    r"hear[sd]?",
    r"the ways? of",
    r"on (?:its|their) way",
    r"(?:in|at) the (?:very |last )?moment in which",
    r"in (?:that|this) moment",
    r"go(?:es)? on",
    r"went on",
    r"of (?:its|their) own",
    r"by (?:itself|themselves)",
    # "An entry is left out" is plain.
    r"(?:is|are|was|were) left(?! out\b)",
    r"that is left",
    r"for ever",
    r"anew",
    r"meanwhile",
    r"at hand",
    # "Neither a query nor a command" is plain; `without_code` takes it away.
    r"nor",
    # A string is a string. "A text file" is plain.
    r"a text(?! file\b)",
    r"texts",
    r"once more",
    r"at one go",
    r"as a rule",
    r"let(?:s|ting)? go of",
    r"comes? again",
    r"no further",
    r"in its turn",
    r"(?:is|are) to be",
    r"sees? to it",
    r"knows? (?:nothing )?of",
    r"made good",
    r"least of all",
    r"all the same",
]
DIALECT = re.compile("|".join(PATTERNS))
FOREIGN = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)

# Parts of identifiers that say what happens in words that are not used here.
NAMES = {"told", "hear", "hears", "heard", "tells"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Text = tuple[int, str]  # the number of its line, and the text


# --- what is read ---------------------------------------------------------------------------------


def prose(path: Path) -> list[Text]:
    """Return the lines of a page, or the comments, literals and names of tests of a module.

    The literals of a test are its data and may say anything, but for docstrings and the messages of
    assertions.
    """
    source = path.read_text()
    if path.suffix == ".py":
        strings = docstrings if path.is_relative_to(ROOT / "tests") else literals
        return [*comments(source), *strings(source), *names_of_tests(source)]
    lines = list(enumerate(source.splitlines(), 1))
    if path.suffix in (".sql", ".lua"):
        return [(number, line.partition("--")[2]) for number, line in lines]
    return lines


def comments(source: str) -> Iterator[Text]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def literals(source: str) -> Iterator[Text]:
    """Yield the strings of a module, docstrings included; a word alone is a name and not prose."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            # A line may end within a phrase; a paragraph does not.
            paragraphs = re.split(r"\n\s*\n", node.value)
            text = "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
            yield node.lineno, f'"{text}"'


def docstrings(source: str) -> Iterator[Text]:
    """Yield the docstrings of a module, and the messages of its assertions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function | ast.ClassDef | ast.Module):
            yield getattr(node, "lineno", 1), f'"{ast.get_docstring(node) or ""}"'
        elif isinstance(node, ast.Assert) and node.msg is not None:
            yield from ((node.lineno, text) for _, text in literals(ast.unparse(node.msg)))


def names_of_tests(source: str) -> Iterator[Text]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function) and node.name.startswith("test_"):
            yield node.lineno, node.name.replace("_", " ")


def identifiers(source: str) -> Iterator[Text]:
    """Yield the names that a module gives to functions, parameters, variables and members."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def without_code(text: str) -> str:
    """Return prose without the code that it quotes, and without the plain use of "nor"."""
    text = re.sub(r"``.+?``|`[^`]+`", "``", text)
    return re.sub(r"(?i)\bneither\b[^.;]*\bnor\b", "", text)


def strange(text: str) -> list[str]:
    """Return the turns of phrase in a text that are not plain."""
    text = without_code(text)
    return [match[0] for pattern in (DIALECT, FOREIGN) for match in pattern.finditer(text)]


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def pages() -> list[Path]:
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    found += (ROOT / "tests").rglob("*.md")
    for suffix in ("sql", "lua", "txt"):
        found += (ROOT / "src").rglob(f"*.{suffix}")
    return found


def modules(*tops: str) -> list[Path]:
    found = [path for top in tops for path in (ROOT / top).rglob("*.py")]
    return [path for path in found if path != Path(__file__)]  # it quotes the patterns


# --- the prose of this repository -----------------------------------------------------------------


def test_prose_is_plain() -> None:
    everything = pages() + modules("src", "tests", "bench", "examples", "docs")
    assert [
        f"{place(path, line)} {phrase}"
        for path in sorted(everything)
        for line, text in prose(path)
        for phrase in strange(text)
    ] == []


def test_identifiers_are_plain() -> None:
    assert [
        f"{place(path, line)} {name}"
        for path in sorted(modules("src"))
        for line, name in identifiers(path.read_text())
        if NAMES & set(name.lower().split("_"))
    ] == []


# --- the patterns ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "Whoever calls it waits.",
        "nobody is owed one",
        "What is sent twice is refused.",
        "5 is no limit",
        "calls that are under way",
        # The words that are not used here:
        "the client is told of the change",
        "it tells of the call what happened",
        "the caller is told so",
        "the others hear of it",
        "Hear that the ledger has answered.",
        "the way of the answers",
        "an answer on its way",
        "in the moment in which the last child ended",
        "the cancellation goes on",
        "a task of its own",
        "it ends by itself",
        "what is left of the lease",
        "it could wait for ever",
        "each is prepared anew",
        "another process resolved it meanwhile",
        "the answer at hand",
        "and it has no answer, nor will get it",
        "secret must be a text, got int",
        "tags must be texts",
        "the command is run once more",
        "lines that are read at one go",
    ],
)
def test_patterns_find_what_is_not_plain(text: str) -> None:
    assert strange(text)


@pytest.mark.parametrize(
    "text",
    [
        "there is no method 'x'",
        "the key is no longer kept",
        "The server refuses the call.",
        "it is neither a prompt nor a resource",
        "an entry of the list is left out",
        "name a text file with the secret",
        "the header of a request",
        "`Run.hear` ignores other events",
    ],
)
def test_plain_sentences_pass(text: str) -> None:
    assert not strange(text)


@pytest.mark.parametrize(
    "source",
    [
        "x = 1  # goes on",
        '"""It goes on."""',
        'def f():\n    """It goes on."""',
        'raise ValueError(f"it {x} goes on")',
        'x = ("it goes "\n    "on")',
        "def test_call_goes_on(): ...",
    ],
)
def test_prose_of_a_module_is_found(source: str, tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(source)
    assert [phrase for _, text in prose(module) for phrase in strange(text)] == ["goes on"]


@pytest.mark.parametrize(
    ("name", "text"), [("page.md", "It goes on."), ("x.sql", "SELECT 1 -- goes on")]
)
def test_prose_of_a_page_is_found(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert [phrase for _, text in prose(tmp_path / name) for phrase in strange(text)] == ["goes on"]


@pytest.mark.parametrize(
    "source",
    ["told = 1", "self._told = 1", "def hear(): ...", "def f(told): ...", "for heard in x: ..."],
)
def test_identifier_is_found(source: str) -> None:
    assert any(NAMES & set(name.lower().split("_")) for _, name in identifiers(source))

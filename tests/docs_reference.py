"""Generates the pages in docs/reference/ from the docstrings of the public names.

`python -m tests.docs_reference` writes them, and a test compares them. A docstring has paragraphs,
and at its end an example as a Python session. The comments above the fields of a `Struct` or a
`TypedDict` are the documentation of the fields.
"""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.public import MADE, TOPICS, Topic

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
WIDTH = 88
# The longest line of the formatter.
LINE = 100
# Members that are not for programs.
HIDDEN = ("on_wire", "contents", "catalog", "obtain", "open", "aclose", "rows")


class Field(NamedTuple):
    name: str
    type: str
    default: str
    comment: str


def resolve(name: str) -> Any:
    """Return the object with a whole name: wirecall.auth.Jwt."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def definition(thing: Any) -> ast.AST | None:
    """Return the syntax tree of a class or a function, without its decorators."""
    try:
        source = inspect.getsource(inspect.unwrap(thing))
    except (OSError, TypeError):
        return None
    return ast.parse(textwrap.dedent(source)).body[0]


def arguments(function: Any) -> list[str]:
    """Return the parameters of a function as its source has them, without `self`."""
    tree = definition(function)
    assert isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef)), function
    args = tree.args
    if args.posonlyargs and args.posonlyargs[0].arg in ("self", "cls"):
        args.posonlyargs.pop(0)
    elif args.args and args.args[0].arg in ("self", "cls"):
        args.args.pop(0)
    # One parameter in each part: a default may have commas.
    text = ast.unparse(args)
    parts = [""]
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [unquoted(part.strip()) for part in parts if part.strip()]


def unquoted(annotation: str) -> str:
    """Return an annotation without the quotes of a forward reference."""
    found = re.fullmatch(r"(\*{0,2}\w+: )'([^']*)'(.*)", annotation, re.DOTALL)
    if found is None:
        return annotation
    return found[1] + found[2] + found[3]


def fields(cls: type) -> list[Field]:
    """Return the fields of a class with the comments above them, those of its bases first."""
    found: dict[str, Field] = {}
    classes: list[Any] = [*getattr(cls, "__mro__", [cls]), *getattr(cls, "__orig_bases__", [])]
    if hasattr(cls, "__total__"):  # `own_fields` finds the bases of a TypedDict in the source
        classes = [cls]
    for each in reversed(classes):
        if not str(getattr(each, "__module__", "")).startswith("wirecall"):
            continue
        if each is not cls and not is_data(each):
            continue
        for field in own_fields(each):
            found[field.name] = field
    return list(found.values())


def is_data(cls: Any) -> bool:
    return hasattr(cls, "__struct_fields__") or hasattr(cls, "__total__")


def own_fields(cls: Any) -> Iterator[Field]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return
    tree = ast.parse(source).body[0]
    assert isinstance(tree, ast.ClassDef)
    for base in tree.bases:  # a TypedDict does not keep its bases
        name = base.id if isinstance(base, ast.Name) else ""
        inner = getattr(importlib.import_module(cls.__module__), name, None)
        if hasattr(inner, "__total__") and hasattr(cls, "__total__"):
            yield from own_fields(inner)
    lines = source.splitlines()
    for node in tree.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if node.target.id.startswith("_") or "ClassVar" in ast.unparse(node.annotation):
            continue
        comment: list[str] = []
        above = node.lineno - 2
        while lines[above].strip().startswith("#"):
            comment.insert(0, lines[above].strip().removeprefix("#").strip())
            above -= 1
        default = "" if node.value is None else ast.unparse(node.value)
        kind = ast.unparse(node.annotation)
        if kind[0] == kind[-1] == "'":
            kind = kind[1:-1]
        yield Field(node.target.id, kind, default, " ".join(comment))


def constructor(cls: type) -> Any:
    """Return the `__init__` of a class, or None if it has none."""
    made = inspect.getattr_static(cls, "__init__")
    return None if made is inspect.getattr_static(object, "__init__") else made


def signature(name: str, thing: Any) -> str:
    """Return the line that a program writes: name and parameters, without the types of fields."""
    if isinstance(thing, type):
        if "__struct_fields__" in vars(thing) or hasattr(thing, "__struct_fields__"):
            parts = [
                f"{each.name}: {each.type}" + (f" = {each.default}" if each.default else "")
                for each in fields(thing)
            ]
        elif (made := constructor(thing)) is not None:
            try:
                parts = arguments(made)
            except (AssertionError, TypeError):
                parts = []
        else:
            parts = []
        returns = ""
    else:
        parts = arguments(thing)
        tree = definition(thing)
        assert isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef))
        returns = "" if tree.returns is None else f" -> {ast.unparse(tree.returns)}"
        returns = returns.replace("'", "")
        if isinstance(tree, ast.AsyncFunctionDef):
            name = f"await {name}"
    line = f"{name}({', '.join(parts)}){returns}"
    if len(line) > WIDTH:
        inner = "".join(f"    {part},\n" for part in parts)
        line = f"{name}(\n{inner}){returns}"
    return f"```text\n{line}\n```\n"


def bases_of(thing: Any) -> list[Any]:
    """Return the bases of a class whose fields it has too."""
    if not isinstance(thing, type) or not hasattr(thing, "__struct_fields__"):
        return []
    return [
        base
        for base in thing.__mro__[1:]
        if base.__module__.startswith("wirecall") and hasattr(base, "__struct_fields__")
    ]


def paragraphs(thing: Any) -> list[str]:
    blocks = re.split(r"\n\n+", inspect.cleandoc(thing.__doc__ or ""))
    return [block for block in blocks if not block.startswith(">>> ")]


def described(thing: Any) -> str:
    """Return a docstring as Markdown: its paragraphs, and its examples as sessions."""
    text = inspect.cleandoc(getattr(thing, "__doc__", None) or "")
    blocks = re.split(r"\n\n+", text)
    # What a class shares with others: the paragraphs of its base behind the first.
    shared = [block for base in bases_of(thing) for block in paragraphs(base)[1:]]
    first_example = next(
        (place for place, block in enumerate(blocks) if block.startswith(">>> ")), len(blocks)
    )
    blocks[first_example:first_example] = shared
    parts: list[str] = []
    for block in blocks:
        if block.startswith(">>> "):
            parts.append(f"```pycon\n{block}\n\n```")
        elif block.startswith("    "):
            parts.append(f"```text\n{textwrap.dedent(block)}\n```")
        else:
            parts.append(block)
    return "\n\n".join(parts) + "\n"


def field_table(rows: list[Field]) -> str:
    lines = ["| Name | Type | Default | Meaning |", "| --- | --- | --- | --- |"]
    for row in rows:
        kind = row.type.replace("|", "\\|")
        default = f"`{row.default}`".replace("|", "\\|") if row.default else ""
        lines.append(f"| `{row.name}` | `{kind}` | {default} | {row.comment} |")
    return "\n".join(lines) + "\n"


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of a class, in the order of the source."""
    found: dict[str, Any] = {}
    for each in reversed(cls.__mro__):
        if each.__module__.startswith("wirecall"):
            found |= {
                name: value
                for name, value in vars(each).items()
                if not name.startswith("_") and name not in HIDDEN
            }
    for name, value in found.items():
        inner = getattr(value, "__func__", value)
        if isinstance(inner, property) or inspect.isfunction(inner):
            yield name, inner


def documented(cls: type, member: str) -> Any:
    """Return a member of a class, or of the base whose docstring it inherits."""
    for each in cls.__mro__:
        found = vars(each).get(member)
        if found is None:  # from 3.13 on, None has a docstring too
            continue
        inner = getattr(found, "__func__", found)
        if isinstance(inner, property):
            inner = inner.fget
        if getattr(inner, "__doc__", None):
            return inner
    return None


def entry(name: str, heading: str) -> str:
    """Return the section of one public name."""
    thing = resolve(name)
    short = name.rpartition(".")[2]
    parts = [f"{heading} {short}\n", f"`from {name.rpartition('.')[0]} import {short}`\n"]
    is_error = isinstance(thing, type) and issubclass(thing, BaseException)
    if name not in MADE:
        parts.append(signature(short, thing))
    parts.append(described(thing))
    if not isinstance(thing, type):
        return "\n".join(parts)
    rows = [row for row in fields(thing) if row.comment]
    if rows:
        parts.append(field_table(rows))
    for member, value in members(thing):
        if is_error and member not in vars(thing):
            continue
        parts.append(f"{heading}# {short}.{member}\n")
        if not isinstance(value, property):
            parts.append(signature(member, value))
        parts.append(described(documented(thing, member)))
    return "\n".join(parts)


def import_line(module: str, names: list[str]) -> str:
    """Return an import as the formatter writes it."""
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= LINE:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"


def page(topic: Topic) -> str:
    """Return one page as it should be."""
    by_module: dict[str, list[str]] = {}
    for name in topic.names:
        module, _, last = name.rpartition(".")
        by_module.setdefault(module, []).append(last)
    imports = "\n".join(import_line(module, names) for module, names in by_module.items())
    sections = [
        f"# {topic.title}\n",
        f"<!-- made by tests/docs_reference.py -->\n\n{topic.about}\n",
        f"```python\n{topic.prelude}{imports}\n```\n",
        *(entry(name, "##") for name in topic.names),
    ]
    text = "\n".join(sections)
    if topic.options:
        text += "\n## Options\n"
        for title, name in topic.options:
            text += f"\n### {title}\n\n{field_table(fields(resolve(name)))}"
    return re.sub(r"\n{3,}", "\n\n", text)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for topic in TOPICS:
        (FOLDER / f"{topic.file}.md").write_text(page(topic))


if __name__ == "__main__":
    main()

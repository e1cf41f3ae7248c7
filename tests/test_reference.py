"""The reference is complete: every public name, with its parameters and an example that runs."""

import inspect
import re

import pytest

import wirecall
from tests import docs_reference
from tests.public import MADE, TOPICS, Topic
from wirecall import auth, gateway, jsonrpc, mcp, middleware

NAMES = [name for topic in TOPICS for name in topic.names]
# Attributes of the tests alone, and what their type says already.
OBVIOUS = {"self", "cls"}


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.file)
def test_reference_page_is_up_to_date(topic: Topic) -> None:
    page = docs_reference.FOLDER / f"{topic.file}.md"
    assert page.read_text() == docs_reference.page(topic), "run: python -m tests.docs_reference"


def test_reference_has_no_other_page() -> None:
    found = {path.stem for path in docs_reference.FOLDER.glob("*.md")}
    assert found == {topic.file for topic in TOPICS}


def test_reference_has_every_public_name() -> None:
    public = {
        id(getattr(module, name))
        for module in (wirecall, jsonrpc, auth, mcp, middleware, gateway)
        for name in module.__all__
        if name != "jsonrpc"
    }
    documented = {id(docs_reference.resolve(name)) for name in NAMES}
    assert public <= documented
    assert len(NAMES) == len(set(NAMES))


def missing(name: str) -> list[str]:
    """Return the parameters of a public name that nothing explains."""
    thing = docs_reference.resolve(name)
    if name in MADE:
        return []
    text = docs_reference.described(thing)
    given = inspect.unwrap(docs_reference.constructor(thing) if isinstance(thing, type) else thing)
    commented = set[str]()
    if isinstance(thing, type):
        commented = {field.name for field in docs_reference.fields(thing) if field.comment}
    if isinstance(thing, type) and hasattr(thing, "__struct_fields__"):
        names = set(thing.__struct_fields__)
    elif inspect.isfunction(given):
        names = {
            parameter.name
            for parameter in inspect.signature(given).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        }
    else:
        names = set[str]()
    explained = {
        each for quoted in re.findall(r"`([^`]+)`", text) for each in re.findall(r"\w+", quoted)
    }
    return sorted(names - commented - explained - OBVIOUS)


@pytest.mark.parametrize("name", NAMES)
def test_reference_explains_every_parameter(name: str) -> None:
    assert missing(name) == []


@pytest.mark.parametrize("name", NAMES)
def test_reference_has_an_example_of_every_name(name: str) -> None:
    doc = docs_reference.resolve(name).__doc__ or ""
    assert re.search(r"^\s*>>> ", doc, re.MULTILINE), f"{name} has no example"


@pytest.mark.parametrize("name", NAMES)
def test_reference_explains_every_member(name: str) -> None:
    thing = docs_reference.resolve(name)
    if isinstance(thing, type) and not issubclass(thing, BaseException):
        bare = [
            member
            for member, _ in docs_reference.members(thing)
            if docs_reference.documented(thing, member) is None
        ]
        assert bare == []

"""Arguments as they are typed, and what the schema makes of them."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from wirecall.cli.arguments import arguments, described, example, words
from wirecall.cli.failures import CliError

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "whole": {"type": "integer"},
        "number": {"type": "number"},
        "flag": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
        "several": {"type": ["integer", "null"]},
        "size": {"enum": ["small", "large", 3]},
        "only": {"const": "this"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "counts": {"type": "array", "items": {"type": "integer"}},
        "place": {"$ref": "#/$defs/Place"},
        "far": {"$ref": "https://example.com/schema"},
        "free": {},
        "scores": {"type": "object", "additionalProperties": {"type": "integer"}},
    },
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "zip": {"type": "integer"}},
            "required": ["city"],
        }
    },
    "additionalProperties": False,
}


def read(*given: str, whole: str | None = None, schema: dict[str, Any] | None = SCHEMA) -> Any:
    return arguments(given, whole, schema, help="wirecall show x")


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("text=5", {"text": "5"}),
        ("text=", {"text": ""}),
        ("text=a=b:=c", {"text": "a=b:=c"}),
        ("whole=5", {"whole": 5}),
        ("whole=-5", {"whole": -5}),
        ("whole=123456789012345678901234567890", {"whole": 123456789012345678901234567890}),
        ("number=1.5", {"number": 1.5}),
        ("number=2", {"number": 2}),
        ("flag=true", {"flag": True}),
        ("maybe=5", {"maybe": 5}),
        ("maybe=null", {"maybe": None}),
        ("maybe=five", {"maybe": "five"}),
        ('maybe:="5"', {"maybe": "5"}),
        ("several=null", {"several": None}),
        ("several=7", {"several": 7}),
        ("size=small", {"size": "small"}),
        ("size=3", {"size": 3}),
        ("only=this", {"only": "this"}),
        ('tags=["a","b"]', {"tags": ["a", "b"]}),
        ("place.city=Rome", {"place": {"city": "Rome"}}),
        ('place={"city":"Rome","zip":1}', {"place": {"city": "Rome", "zip": 1}}),
        ("far=5", {"far": "5"}),
        ("scores.ada=5", {"scores": {"ada": 5}}),
        ("free=5", {"free": "5"}),
        ("free:=[1,{}]", {"free": [1, {}]}),
    ],
)
def test_values(word: str, value: Any) -> None:
    assert read(word) == value


def test_members_and_entries_are_collected() -> None:
    assert read("place.city=Rome", "place.zip=5", "tags[]=a", "tags[]=b", "counts[]=1") == {
        "place": {"city": "Rome", "zip": 5},
        "tags": ["a", "b"],
        "counts": [1],
    }


@pytest.mark.parametrize(
    ("word", "what", "why"),
    [
        ("whole=12.50", "whole must be a whole number", 'got "12.50"'),
        ("whole=five", "whole must be a whole number", 'got "five"'),
        ("whole=", "whole must be a whole number", 'got ""'),
        ("whole:=true", "whole must be a whole number", "got true"),
        ("number=one", "number must be a number", ""),
        ("flag=yes", "flag must be true or false", 'got "yes"'),
        ("size=medium", "size must be one of small, large, 3", 'got "medium"'),
        ("several=x", "several must be a whole number or null", ""),
        ("tags=a", "tags must be a list", ""),
        ("tags:=[1]", "tags[0] must be text", "got 1"),
        ("counts[]=x", "counts[] must be a whole number", ""),
        ("place.zip=x", "place.zip must be a whole number", ""),
        ("place.zip=5", "place.city is missing", "it must be text"),
        ("place=Rome", "place must be an object", ""),
        ('scores:={"ada": "5"}', "scores.ada must be a whole number", 'got "5"'),
        ("txet=5", "There is no argument 'txet'", "did you mean text?"),
        ("qqqqqq=5", "There is no argument 'qqqqqq'", "expected one of text, whole"),
        ("word", "'word' is not an argument", "there is no ="),
        ("free:={", "free is not JSON", "{"),
        pytest.param(
            f"free:={'[' * 100_000}", "free is not JSON", "[[... is nested too deeply", id="deep"
        ),
        ("text=@nowhere", "nowhere cannot be read", "No such file"),
    ],
)
def test_argument_that_does_not_match_is_reported_with_its_name(
    word: str, what: str, why: str
) -> None:
    with pytest.raises(CliError) as raised:
        read(word)
    assert what in raised.value.what
    assert why in raised.value.why
    assert raised.value.exit == 2


def test_required_arguments() -> None:
    with pytest.raises(CliError, match="order is missing"):
        read(
            schema={
                "type": "object",
                "properties": {"order": {"type": "string"}},
                "required": ["order"],
            }
        )


def test_strings_remain_strings_without_a_schema() -> None:
    assert read("a=5", "b:=5", schema=None) == {"a": "5", "b": 5}


def test_files(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("as it is\n")
    (tmp_path / "json").write_text('{"city": "Rome"}')
    (tmp_path / "binary").write_bytes(b"\xff")
    assert read(f"text=@{tmp_path / 'text'}", f"place:=@{tmp_path / 'json'}") == {
        "text": "as it is\n",
        "place": {"city": "Rome"},
    }
    with pytest.raises(CliError, match="is not text"):
        read(f"text=@{tmp_path / 'binary'}")


def test_whole_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "all").write_text('{"whole": 1, "flag": true}')
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"whole": 2}')))
    assert read("whole=3", whole=f"@{tmp_path / 'all'}") == {"whole": 3, "flag": True}
    assert read(whole="-") == {"whole": 2}
    assert read(whole="[1, 2]") == [1, 2]
    for text, told in (
        ("5", "not an object"),
        ("{", "not JSON"),
        ('{"whole": "x"}', "whole must be"),
    ):
        with pytest.raises(CliError, match=told):
            read(whole=text)


def test_schema_in_words() -> None:
    shown = {name: words(member, SCHEMA) for name, member in SCHEMA["properties"].items()}
    assert shown["maybe"] == "text or a whole number or null"
    assert shown["tags"] == "a list of text"
    assert shown["place"] == "an object"
    lists = {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}
    assert words(lists, SCHEMA) == "a list of lists of whole numbers"
    assert shown["free"] == "anything"
    assert example({"properties": {"a": {}, "b": {}}, "required": ["b"]}) == "b=..."
    rows = described(
        {"properties": {"a": {"type": "integer", "default": 1, "description": "How\nmany."}}}
    )
    assert rows == [("a", "a whole number", "default 1  How many.")]


def test_schema_in_words_has_what_stands_beside_a_reference() -> None:
    colour = {"$ref": "#/$defs/Colour"}
    schema: dict[str, Any] = {
        "properties": {"a": {**colour, "default": "red", "description": "Inside."}, "b": colour},
        "$defs": {"Colour": {"enum": ["red", "blue"], "description": "A colour."}},
    }
    assert described(schema) == [
        ("a", "one of red, blue", "default 'red'  Inside."),
        ("b", "one of red, blue", "optional  A colour."),
    ]


def test_types_that_contain_themselves() -> None:
    json_value = {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/$defs/Json"}}]
    }
    schema: dict[str, Any] = {
        "properties": {"a": {"$ref": "#/$defs/Json"}},
        "$defs": {"Json": json_value},
    }
    assert read('a=["x", ["y"]]', schema=schema) == {"a": ["x", ["y"]]}
    assert (
        words(schema["properties"]["a"], schema) == "text or a list of text or a list of anything"
    )
    schema = {
        "properties": {"a": {"$ref": "#/$defs/A"}},
        "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}]}},
    }
    with pytest.raises(CliError, match="cannot be followed"):
        read("a:=1", schema=schema)


def test_schema_that_refers_to_itself_accepts_anything() -> None:
    schema = {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"$ref": "#/$defs/A"}}}
    assert read("a=5", schema=schema) == {"a": "5"}
    assert json.dumps(words(schema["properties"]["a"], schema)) == '"anything"'

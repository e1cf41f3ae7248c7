"""JSON with the place of each value, so that one value of a file changes and all other bytes stay.

Some clients read JSON with comments and with commas before a closing bracket (VS Code, Zed). With
`comments=True` this parser reads them too.
"""

import json
import re
from typing import Any

import msgspec
from msgspec import Struct

from wirecall.errors import UsageError

_SPACE = re.compile(r"[ \t\r\n]*")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_WORD = re.compile(r"[-+.\w]+")


class NotJson(UsageError):
    """A file that is not the JSON which its client reads: where, and what is wrong."""

    def __init__(self, line: int, what: str, *, is_comment: bool = False) -> None:
        super().__init__(f"line {line}: {what}")
        self.line = line
        self.what = what
        self.is_comment = is_comment


class Node(Struct):
    """A value and its place in the text: from `start` to before `end`."""

    start: int
    end: int
    # A string, a number, a bool or None. Objects and arrays have the next two instead.
    value: Any = None
    members: "dict[str, Node] | None" = None
    items: "list[Node] | None" = None
    # Of a member: where its name begins.
    name_start: int = 0

    def plain(self) -> Any:
        """Return the value without places."""
        if self.members is not None:
            return {name: node.plain() for name, node in self.members.items()}
        if self.items is not None:
            return [node.plain() for node in self.items]
        return self.value

    def at(self, *path: str) -> "Node | None":
        """Return the value at a path of member names; None if there is none."""
        node: Node | None = self
        for name in path:
            if node is None or node.members is None:
                return None
            node = node.members.get(name)
        return node


def parse(text: str, *, comments: bool) -> Node:
    """Return the value of a document with all its places, or raise `NotJson`."""
    parser = _Parser(text, comments=comments)
    try:
        return parser.document()
    except RecursionError:
        raise NotJson(1, "it is nested too deeply") from None


class _Parser:
    def __init__(self, text: str, *, comments: bool) -> None:
        self._text = text
        self._at = 0
        self._comments = comments

    def document(self) -> Node:
        self._skip()
        found = self._value()
        self._skip()
        if self._at < len(self._text):
            raise self._wrong("expected the end of the file")
        return found

    def _value(self) -> Node:
        sign = self._text[self._at : self._at + 1]
        if sign == "{":
            return self._object()
        if sign == "[":
            return self._array()
        start = self._at
        pattern = _STRING if sign == '"' else _WORD
        match = pattern.match(self._text, start)
        if match is None:
            raise self._wrong("expected a value")
        try:
            value = msgspec.json.decode(match[0])
        except msgspec.DecodeError:
            value = self._lenient(match[0])
        self._at = match.end()
        return Node(start, self._at, value)

    def _lenient(self, text: str) -> Any:
        """Return a value that msgspec refuses and JSON has, such as half of a surrogate pair."""
        try:
            return json.loads(text, parse_constant=_refuse)
        except ValueError:
            raise self._wrong(f"{text[:20]!r} is not a value of JSON") from None

    def _object(self) -> Node:
        start = self._at
        members: dict[str, Node] = {}
        self._at += 1
        while not self._closes("}", is_first=not members):
            name = self._value()
            if not isinstance(name.value, str):
                raise self._wrong("expected a name in quotes")
            if name.value in members:
                raise self._wrong(f"{name.value!r} is in one object twice")
            self._skip()
            if self._text[self._at : self._at + 1] != ":":
                raise self._wrong("expected a colon")
            self._at += 1
            self._skip()
            member = self._value()
            member.name_start = name.start
            members[name.value] = member
        return Node(start, self._at, members=members)

    def _array(self) -> Node:
        start = self._at
        items: list[Node] = []
        self._at += 1
        while not self._closes("]", is_first=not items):
            items.append(self._value())
        return Node(start, self._at, items=items)

    def _closes(self, bracket: str, *, is_first: bool) -> bool:
        """Step to the next element, or over the closing bracket; return whether it was that."""
        self._skip()
        sign = self._text[self._at : self._at + 1]
        is_comma = sign == "," and not is_first
        if is_comma:
            self._at += 1
            self._skip()
            sign = self._text[self._at : self._at + 1]
            if sign == bracket and not self._comments:
                raise self._wrong("there is a comma before a closing bracket")
        if sign == bracket:
            self._at += 1
            return True
        if not is_first and not is_comma:
            raise self._wrong(f"expected a comma or {bracket}")
        return False

    def _skip(self) -> None:
        """Step over white space and comments."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None  # it may be empty
            self._at = match.end()
            comment = _COMMENT.match(self._text, self._at)
            if comment is None:
                return
            if not self._comments:
                raise self._wrong("it has a comment, and JSON has none", is_comment=True)
            self._at = comment.end()

    def _wrong(self, what: str, *, is_comment: bool = False) -> NotJson:
        line = self._text.count("\n", 0, self._at) + 1
        return NotJson(line, what, is_comment=is_comment)


def _refuse(word: str) -> None:
    raise ValueError(word)

"""The batch tool: its declaration, its definition in `tools/list`, and its arguments.

MCP has arrays of messages in one revision only. The batch tool brings them to all: its one call
runs many tools. `batch_run` runs them.

    BatchTool     what an app declares: App(batch_tool="queries" | "all" | BatchTool(...))
    BatchMethod   the tool itself, and which tools its callers may call
    read_form     the arguments of a call -> Form: entries in order, and the ids to return

1. The definition depends on the caller: it names the tools that this caller sees in its list. Its
   hints follow from these tools.
2. A fault of the form refuses the whole call, and nothing runs. A fault of one entry is the answer
   of that entry, and the others run.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, get_args

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import BatchInvalid, UsageError, suggested
from wirecall.limits import NamedOptions
from wirecall.mcp.revisions import Revision
from wirecall.mcp.types import BATCH_META
from wirecall.protocol.messages import JsonObject
from wirecall.protocol.params import KEY, explain, place_of
from wirecall.server.method import Kind, Method, Registry, TaskRule

Chosen: TypeAlias = Literal["queries", "all"]
Destructive: TypeAlias = Literal["ask", "allow"]

# An id is a part of keys ("KEY/ID") and of references ("ID#/pointer").
# Printable ASCII without "#" and "/", which separate the parts of a reference.
_ID = re.compile(r'[!"$-.0-~]+')
LONGEST_ID = 64


class BatchTool(Struct, metaclass=NamedOptions, frozen=True, kw_only=True):
    """A tool that calls other tools of the app: many calls in one, at every revision of MCP.

    `name` is its name for MCP clients, and `title` the one for people.

    >>> app = App("shop", batch_tool=BatchTool(tools="queries", calls=20))
    """

    name: str = "batch"
    # The tools that it calls: all that only read, all, or those of these names.
    tools: Chosen | Sequence[str] = "queries"
    # Calls in one batch. None: `Limits.batch`.
    calls: int | None = None
    # "ask": a person confirms destructive calls before anything runs.
    destructive: Destructive = "ask"
    # As that of a tool: a batch may become a task.
    task: TaskRule | None = None
    title: str | None = None
    # Replaces the description that a model reads.
    description: str | None = None

    def __post_init__(self) -> None:
        for wrong, why, fix in _faults(self):
            if wrong:
                raise UsageError("This batch tool cannot be declared.", why, fix)


def _faults(declared: BatchTool) -> Iterator[tuple[bool, str, str]]:
    given: Any = declared  # Python does not check the types of a Struct's members
    yield (
        not isinstance(given.name, str) or not given.name,
        f"name must be a string, got {given.name!r}",
        'use BatchTool(name="batch")',
    )
    words = " or ".join(f'"{word}"' for word in get_args(Chosen))
    use = f'use tools={words}, or a list of names: tools=["find_order", "charge"]'
    if isinstance(given.tools, str):
        yield given.tools not in get_args(Chosen), f"tools={given.tools!r} is not a choice", use
    else:
        is_list = isinstance(given.tools, Sequence) and all(
            isinstance(each, str) for each in given.tools
        )
        yield not is_list, f"tools must be {words} or a list of names, got {given.tools!r}", use
        yield is_list and not given.tools, "tools=[] would call nothing", use
    is_count = isinstance(given.calls, int) and not isinstance(given.calls, bool)
    yield (
        given.calls is not None and (not is_count or given.calls < 1),
        f"calls must be a number above 0, got {given.calls!r}",
        "use calls=20, or leave it out for Limits.batch",
    )
    yield (
        given.destructive not in get_args(Destructive),
        f"destructive={given.destructive!r} is not a choice",
        'use destructive="ask" (a person confirms them) or "allow"',
    )


def declared_batch_tool(value: object) -> BatchTool:
    """Return the declaration in `App(batch_tool=...)`."""
    if isinstance(value, BatchTool):
        return value
    if isinstance(value, str) and value in get_args(Chosen):
        return BatchTool(tools=value)
    raise UsageError(
        f"batch_tool={value!r} is not a batch tool.",
        "it says which tools one call of a batch may call",
        'use batch_tool="queries" (tools that only read), "all", or BatchTool(tools=["find_order"])',
    )


# --- the tool ---------------------------------------------------------------------------------------

_DESCRIPTION = """\
Calls several tools of this server in one request. Use it for calls that depend on each other, and \
for many calls at once.
A value {"$ref": "ID#/json/pointer"} in the arguments of a call takes that part of the result of an \
earlier call; a * in the pointer takes every item of an array. Calls that only read run \
concurrently, the others in the order given. "after" names calls that must have succeeded before. \
"return" names the calls whose results you need; errors always come back.
Example: {"calls": [{"id": "a", "tool": "FIRST", "arguments": {}}, {"id": "b", "tool": "SECOND", \
"arguments": {"item": {"$ref": "a#/items/0/id"}}}], "return": ["b"]}"""

_OUTPUT: JsonObject = {
    "type": "object",
    "properties": {
        "results": {
            "type": "array",
            "description": "One object for each call, in the order given.",
            "items": {
                "type": "object",
                "properties": {
                    "id": {"type": "string"},
                    "tool": {"type": "string"},
                    "ok": {"type": "boolean"},
                    "result": {"description": "The result of a call that succeeded."},
                    "replayed": {
                        "type": "boolean",
                        "description": "The call had run before, and this is its outcome.",
                    },
                    "error": {
                        "type": "object",
                        "properties": {
                            "code": {"type": "integer"},
                            "message": {"type": "string"},
                            "data": {},
                        },
                        "required": ["code", "message"],
                    },
                },
                "required": ["id", "tool", "ok"],
            },
        }
    },
    "required": ["results"],
}


class BatchMethod(Method):
    """The batch tool of an app.

    It changes nothing itself, so it is a query. Each of its entries is a call, and a command among
    them has a record.
    """

    is_batch = True

    def __init__(
        self,
        declared: BatchTool,
        function: Callable[..., object],
        registry: Registry,
        most: int,
    ) -> None:
        super().__init__(
            function,
            Kind.QUERY,
            name=declared.name,
            title=declared.title,
            description=declared.description or _DESCRIPTION,
            expose=("mcp",),
            output_schema=_OUTPUT,
            task=declared.task,
            raw=True,
        )
        self.declared = declared
        # The calls in one batch.
        self.most = declared.calls or most
        self._registry = registry

    def add(self, app: str) -> None:
        """Add the tool to the tools of its app; raise `UsageError` if that cannot be."""
        registry = self._registry
        for name in (self.name, self.tool_name):
            first = registry.called.get(name) or registry.methods.get(name)
            if first is not None:
                raise UsageError(
                    f"Two tools would be called {name!r}.",
                    f"the batch tool of App({app!r}, batch_tool=...) has this name, "
                    f"and so has {place_of(first.function)}",
                    'give one of them another name: batch_tool=BatchTool(name="run_many")',
                )
        chosen = self.declared.tools
        if not isinstance(chosen, str):
            for name in chosen:
                self._check_known(name)
        registry.add(self)

    def _check_known(self, name: str) -> None:
        known = [tool.tool_name for tool in self._registry.tools.values()]
        if name in self._registry.called:
            return
        near = suggested(name, known)
        fix = f"these are registered: {', '.join(known) or 'none'}"
        if near is not None:
            fix = f"use {near!r}"
        raise UsageError(f"The batch tool cannot call {name!r}.", "there is no such tool", fix)

    def find(self, name: str) -> Method | None:
        """Return a tool that the batch tool calls; None if it does not call it."""
        tool = self._registry.called.get(name)
        if tool is None or not self.calls(tool):
            return None
        return tool

    def called_by(self, arguments: Raw) -> Iterator[tuple[Method, Raw]]:
        """Yield the tool and the arguments of each entry whose tool exists."""
        for sent in read_form(arguments, self.most).calls:
            tool = self.find(sent.tool)
            if tool is not None:
                yield tool, Raw(b"{}") if sent.arguments is UNSET else sent.arguments

    def calls(self, tool: Method) -> bool:
        """Return whether the batch tool calls a tool."""
        chosen = self.declared.tools
        if tool.is_batch:
            return False
        if chosen == "all":
            return True
        if chosen == "queries":
            return not tool.is_command
        return tool.name in chosen or tool.tool_name in chosen

    def describe(self, tools: Sequence[Method], revision: Revision) -> JsonObject | None:
        """Return the definition for a caller that sees these tools; None if it can call nothing."""
        callable_tools = [tool for tool in tools if self.calls(tool)]
        if not callable_tools:
            return None
        described: JsonObject = {"name": self.tool_name}
        if self.title and revision.has("title"):
            described["title"] = self.title
        described["description"] = self.description
        described["inputSchema"] = self._input_schema(callable_tools)
        if revision.has("tool outputSchema"):
            described["outputSchema"] = _OUTPUT
        if revision.has("tool annotations"):
            described["annotations"] = self._annotations(callable_tools)
        # Schemas of older revisions allow additional members of a tool.
        described["_meta"] = {BATCH_META: {"version": 1, "calls": self.most, "references": True}}
        return described

    def _input_schema(self, tools: Sequence[Method]) -> JsonObject:
        """Return a schema of plain keywords.

        Strict clients and models refuse `$ref`, recursion, and `anyOf` at the top.
        """
        ids = {"type": "array", "items": {"type": "string"}}
        members: JsonObject = {
            "id": {
                "type": "string",
                "description": "A short name for this call, such as order. "
                "Default: its position, from 0.",
            },
            "tool": {"type": "string", "enum": [tool.tool_name for tool in tools]},
            "arguments": {
                "type": "object",
                "description": "The arguments of the tool. A value may be a reference "
                '{"$ref": "ID#/json/pointer"} into the result of an earlier call; '
                '{"$literal": X} passes X unchanged.',
                "additionalProperties": True,
            },
            "after": {**ids, "description": "Ids of earlier calls that must have succeeded."},
        }
        if any(tool.is_command for tool in tools):
            members[KEY] = {
                "type": "string",
                "description": "For a tool that changes something: a new random value for each "
                "separate thing you want done, and the same value if you send it again.",
            }
        calls: JsonObject = {
            "type": "array",
            "minItems": 1,
            "maxItems": self.most,
            "items": {
                "type": "object",
                "properties": members,
                "required": ["tool"],
                "additionalProperties": False,
            },
        }
        wanted = {**ids, "description": "Ids of the calls whose results you need. Default: all."}
        return {
            "type": "object",
            "properties": {"calls": calls, "return": wanted},
            "required": ["calls"],
            "additionalProperties": False,
        }

    def _annotations(self, tools: Sequence[Method]) -> JsonObject:
        """Return the hints that follow from the tools (A8).

        A destructive entry does not run before a person has confirmed it, unless the app allows
        it.
        """
        hints: JsonObject = {}
        if self.title:
            hints["title"] = self.title
        commands = [tool for tool in tools if tool.is_command]
        allows = self.declared.destructive == "allow"
        hints["readOnlyHint"] = not commands
        hints["destructiveHint"] = allows and any(map(is_destructive, tools))
        hints["idempotentHint"] = all(tool.idempotent for tool in commands)
        hints["openWorldHint"] = any(tool.open_world is not False for tool in tools)
        return hints


def is_destructive(tool: Method) -> bool:
    """Return whether the hints of a tool say that it may destroy something."""
    return tool.is_command and tool.destructive is not False


# --- the arguments of a call ------------------------------------------------------------------------


class Sent(Struct, frozen=True, forbid_unknown_fields=True):
    """One entry as it was sent. A member that is null counts as absent."""

    tool: str
    id: str | None = None
    arguments: Raw | UnsetType = UNSET
    after: list[str] | None = None
    idempotency_key: Any = None


class Form(Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of a call of the batch tool."""

    calls: list[Sent]
    # The ids whose results come back. None: all.
    wanted: list[str] | None = msgspec.field(default=None, name="return")
    # The key of the whole batch, which may also be beside the arguments.
    idempotency_key: Any = None

    @property
    def ids(self) -> list[str]:
        """The ids of the entries: their own, or their positions."""
        return [
            str(position) if sent.id is None else sent.id
            for position, sent in enumerate(self.calls)
        ]


_decode_form = msgspec.json.Decoder(Form).decode


def read_form(arguments: Raw | UnsetType, most: int) -> Form:
    """Return the arguments of a call; raise `BatchInvalid` for a fault of the whole (A1)."""
    try:
        form = _decode_form(b"{}" if arguments is UNSET else arguments)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BatchInvalid(explain(error, "arguments"), ran="no") from None
    count = len(form.calls)
    if not count:
        raise BatchInvalid("arguments.calls: expected at least one call, got none", ran="no")
    if count > most:
        raise BatchInvalid(
            f"arguments.calls: expected at most {most} calls, got {count}; send them in parts",
            limit="calls",
            max=most,
            ran="no",
        )
    seen: set[str] = set()
    ids = form.ids
    for position, id in enumerate(ids):
        if not _ID.fullmatch(id) or len(id) > LONGEST_ID:
            raise BatchInvalid(
                f"arguments.calls[{position}].id: expected 1 to {LONGEST_ID} printable ASCII "
                f"characters without spaces, '#' and '/', got {id[:LONGEST_ID]!r}",
                ran="no",
            )
        if id in seen:
            raise BatchInvalid(
                f"arguments.calls[{position}].id: two calls have the id {id!r}; give each its own",
                ran="no",
            )
        seen.add(id)
    for id in form.wanted or ():
        if id not in seen:
            raise BatchInvalid(
                f"arguments.return: no call has the id {id[:LONGEST_ID]!r}; "
                f"the ids are {', '.join(ids)[:200]}",
                ran="no",
            )
    return form

"""`McpClient`: a client with the methods of MCP, the same for all five revisions.

It uses `conversation`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, Literal, Never, TypeVar, Unpack, overload

from wirecall.client.client import Batch, CallOptions, Client, Collected, misplaced
from wirecall.client.delivery import Options
from wirecall.client.exchange import AnyEntry, Entry, Wire
from wirecall.client.sync import Loop, SyncBatch, SyncClient
from wirecall.errors import NotSent, UsageError
from wirecall.mcp.client import results
from wirecall.mcp.client.conversation import Conversation, Extra, Settings
from wirecall.mcp.client.inbox import Change, Changes, Follower, InputRequest, Kind, Progress
from wirecall.mcp.client.links import McpLink
from wirecall.mcp.client.results import (
    Called,
    Completion,
    Prompt,
    Prompted,
    Resource,
    Template,
    Tool,
)
from wirecall.mcp.client.tasks import Status, Task, TaskState
from wirecall.mcp.types import LEVELS, Embedded, Level
from wirecall.protocol.messages import JsonObject

T = TypeVar("T")


class ToolOptions(CallOptions, total=False):
    """The options of a tool call; `McpClient.call_tool` explains them."""

    check: bool
    progress: Progress | None
    tasks: bool


def _read_tool(entry: AnyEntry) -> Any:
    """Return the result in a tool's answer, or raise its error."""
    called = results.read_called(entry.raw, entry.extra.answer)
    entry.replayed = entry.replayed or called.replayed
    if called.is_error and entry.extra.check and (error := called.error()):
        raise error
    if entry.type is None:
        return called
    return results.as_type(called, entry.type)


class McpClient(Client):
    """A client of MCP.

    `revision`, `server`, `capabilities` and `instructions` describe the server.

    `connect(..., protocol="mcp")` makes it.

    >>> async def tools() -> list[str]:
    ...     async with connect(app, protocol="mcp") as client:
    ...         return [tool.name for tool in await client.list_tools()]
    >>> asyncio.run(tools())
    ['price']
    """

    def __init__(self, link: McpLink, settings: Settings, options: Options) -> None:
        self._conversation = Conversation(link, settings, options)
        super().__init__(options.wrap(link), self._conversation, options)

    @property
    def revision(self) -> str | None:
        """The negotiated revision of MCP; None: the client is not open."""
        revision = self._conversation.revision
        if revision is None:
            return None
        return revision.name

    @property
    def server(self) -> JsonObject:
        """The server's description of itself: its name, its version."""
        return self._conversation.server

    @property
    def capabilities(self) -> JsonObject:
        """The capabilities that the server declares."""
        return self._conversation.capabilities

    def extension(self, id: str) -> JsonObject | None:
        """Return the server's settings of an extension, perhaps `{}`.

        None: the server does not declare it.
        """
        return self._conversation.extension(id)

    @property
    def instructions(self) -> str | None:
        """The server's instructions for a model that uses it."""
        return self._conversation.instructions

    @property
    def honours_keys(self) -> bool:
        """Whether the server declares that it runs a tool once per idempotency key."""
        return self._conversation.honours_keys

    # --- tools ------------------------------------------------------------------------------------

    async def list_tools(
        self, *, order: Literal["safest"] | None = None, timeout: float | None = None
    ) -> list[Tool]:
        """Return all tools.

        `order="safest"` puts those first whose trusted annotations promise the least harm.
        """
        if order not in (None, "safest"):
            raise UsageError(
                f"order={order!r} is not known.", fix='use order="safest", or leave it out'
            )
        tools = await self._conversation.lists.read(Tool, timeout)
        return results.safest_first(tools, self._conversation.trusts) if order else tools

    @overload
    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        type: type[T],
        **options: Unpack[ToolOptions],
    ) -> T: ...
    @overload
    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        type: None = None,
        **options: Unpack[ToolOptions],
    ) -> Called: ...
    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        type: Any = None,
        **options: Unpack[ToolOptions],
    ) -> Any:
        """Call a tool. Raises an answer that is an error, unless `check=False`.

        `type` reads the structured content, or the text if there is none. `progress` receives
        (progress, total, message). `timeout`, `key` and `query` are as in `call`. If the server
        makes the call a task, the client waits for its result; `tasks=False` does not allow a task.
        """
        entry = self.tool_entry(name, arguments, type=type, **options)
        await self._delivery.run(entry)
        return entry.result()

    def tool_entry(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        type: Any = None,
        check: bool = True,
        progress: Progress | None = None,
        tasks: bool = True,
        timeout: float | None = None,
        key: str | bool | None = None,
        query: bool | None = None,
        **wrong: Never,
    ) -> AnyEntry:
        """Return a checked call of a tool, not sent yet."""
        if wrong:
            raise misplaced("call_tool", name, arguments, wrong, ToolOptions.__optional_keys__)
        if type is not None and not check:
            raise UsageError(
                "type= and check=False do not go together.",
                "an error is not of the type",
                "use one of them",
            )
        follower = None
        if progress is not None:
            follower = Follower(progress)
        extra = Extra(_read_tool, check, follower, tasks)
        params = {"name": name, "arguments": dict(arguments or {})}
        return self.entry(
            "tools/call", params, type=type, timeout=timeout, key=key, query=query, extra=extra
        )

    @overload
    async def start_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        type: type[T],
        **options: Unpack[ToolOptions],
    ) -> Task[T]: ...
    @overload
    async def start_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        type: None = None,
        **options: Unpack[ToolOptions],
    ) -> Task[Called]: ...
    async def start_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        type: Any = None,
        **options: Unpack[ToolOptions],
    ) -> Task[Any]:
        """Call a tool, and return when the call is a task.

        If the server answers at once, the task is over.

        The options are those of `call_tool`; `timeout` is the time for the server's answer. The
        task continues when its caller stops waiting.
        """
        entry = self.tool_entry(name, arguments, type=type, **options)
        entry.extra.is_background = True
        await self._delivery.run(entry)
        if entry.error is not None:
            raise entry.error
        return entry.extra.task or Task(self._conversation, entry, None)

    @overload
    def task(self, id: str, *, type: type[T], check: bool = True) -> Task[T]: ...
    @overload
    def task(self, id: str, *, type: None = None, check: bool = True) -> Task[Called]: ...
    def task(self, id: str, *, type: Any = None, check: bool = True) -> Task[Any]:
        """Return the task with an id from `start_tool`.

        The id may be from before a restart of this program. `type` and `check` are those of
        `call_tool`.
        """
        return self._conversation.task(self.tool_entry("", type=type, check=check), id)

    def batch(self) -> "McpBatch":
        """Return a block of calls to send together:

        `async with client.batch() as b: b.call_tool(...)`.
        """
        return McpBatch(self)

    # --- resources, prompts and the rest ----------------------------------------------------------

    async def list_prompts(self, *, timeout: float | None = None) -> list[Prompt]:
        """Return all prompts."""
        return await self._conversation.lists.read(Prompt, timeout)

    async def list_resources(self, *, timeout: float | None = None) -> list[Resource]:
        """Return all resources."""
        return await self._conversation.lists.read(Resource, timeout)

    async def list_resource_templates(self, *, timeout: float | None = None) -> list[Template]:
        """Return all resource templates."""
        return await self._conversation.lists.read(Template, timeout)

    async def read_resource(self, uri: str, *, timeout: float | None = None) -> list[Embedded]:
        """Return the contents of a resource.

        They are cached while the server allows it (2026-07-28).
        """
        return await self._conversation.read_resource(uri, timeout)

    async def get_prompt(
        self, name: str, arguments: Mapping[str, str] | None = None, *, timeout: float | None = None
    ) -> Prompted:
        """Return the messages of a prompt."""
        params: JsonObject = {"name": name}
        if arguments:
            params["arguments"] = dict(arguments)
        return await self._conversation.ask("prompts/get", params, results.read_prompted, timeout)

    async def complete(
        self,
        of: str,
        argument: str,
        value: str,
        *,
        context: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Completion:
        """Return completions for an argument of a prompt or of a template.

        `of` is the name of the prompt, or the URI of the template.
        """
        ref = {"type": "ref/prompt", "name": of}
        if "://" in of:
            ref = {"type": "ref/resource", "uri": of}
        params: JsonObject = {"ref": ref, "argument": {"name": argument, "value": value}}
        revision = self._conversation.revision
        if context and revision is not None and revision.has("completion context"):
            params["context"] = {"arguments": dict(context)}
        return await self._conversation.ask(
            "completion/complete", params, results.read_completion, timeout
        )

    async def ping(self, *, timeout: float | None = None) -> None:
        """Check that the server answers.

        2026-07-28 has no ping: there the client sends `server/discover`.
        """
        method = "ping"
        if self._conversation.is_stateless:
            method = "server/discover"
        await self.call(method, timeout=timeout)

    async def set_log_level(self, level: Level) -> None:
        """Request log messages from this level upwards; `on_log` receives them."""
        if level not in LEVELS:
            raise UsageError(
                f"{level!r} is not a log level.", "", f"use one of {', '.join(LEVELS)}"
            )
        await self._conversation.set_log_level(level)

    # --- changes ----------------------------------------------------------------------------------

    def listen(
        self,
        *,
        tools: bool = False,
        prompts: bool = False,
        resources: bool = False,
        uris: Iterable[str] = (),
    ) -> Changes:
        """Listen to changes of lists, and of the resources at `uris`:

        `async with client.listen(tools=True) as changes`.
        """
        wanted: dict[Kind, bool] = {"tools": tools, "prompts": prompts, "resources": resources}
        return self._conversation.changes(
            [kind for kind, is_wanted in wanted.items() if is_wanted], uris
        )

    async def subscribe(self, uri: str) -> None:
        """Report changes of this resource to `on_change` from now on."""
        await self._conversation.listen_to(self._conversation.subscribed() | {uri})

    async def unsubscribe(self, uri: str) -> None:
        """Undo `subscribe`."""
        await self._conversation.listen_to(self._conversation.subscribed() - {uri})


class McpCollected(Collected):
    """Collected calls of MCP: tools by `call_tool`, any other method by `call`."""

    _client: McpClient

    @overload
    def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        type: type[T],
        after: Sequence[AnyEntry] = (),
        **options: Unpack[ToolOptions],
    ) -> Entry[T]: ...
    @overload
    def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        type: None = None,
        after: Sequence[AnyEntry] = (),
        **options: Unpack[ToolOptions],
    ) -> Entry[Called]: ...
    def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        type: Any = None,
        after: Sequence[AnyEntry] = (),
        **options: Unpack[ToolOptions],
    ) -> AnyEntry:
        """Add a call of a tool; the options are those of `McpClient.call_tool`.

        Its arguments may contain parts of earlier results: `entry.ref("/orders/0/id")`. It runs
        only if the entries in `after` have succeeded.
        """
        return self._add(self._client.tool_entry(name, arguments, type=type, **options), after)

    async def _send(self) -> tuple[Wire, str]:
        client = self._client
        tools = [entry for entry in self.entries if entry.method == "tools/call"]
        if len(tools) < 2 or not client._conversation.may_have_batch_tool:
            return await super()._send()
        from wirecall.mcp.client.tool_batch import ToolBatch

        return await ToolBatch(client._delivery, client._conversation, self.entries).run()


class McpBatch(McpCollected, Batch):
    """Calls of MCP that are collected in a block and sent at its end, unless the block fails."""


# --- without an event loop ------------------------------------------------------------------------


class SyncMcpClient(SyncClient):
    """An `McpClient` whose methods block.

    `connect_sync(..., protocol="mcp")` makes it.

    >>> with connect_sync(app, protocol="mcp") as client:
    ...     client.call_tool("price", {"sku": "tea"}).text
    '450'
    """

    _client: McpClient

    @property
    def server(self) -> JsonObject:
        """The server's description of itself: its name, its version."""
        return self._client.server

    @property
    def capabilities(self) -> JsonObject:
        """The capabilities that the server declares."""
        return self._client.capabilities

    def extension(self, id: str) -> JsonObject | None:
        """Return the server's settings of an extension, perhaps `{}`.

        None: the server does not declare it.
        """
        return self._client.extension(id)

    @property
    def instructions(self) -> str | None:
        """The server's instructions for a model that uses it."""
        return self._client.instructions

    @property
    def honours_keys(self) -> bool:
        """Whether the server declares that it runs a tool once per idempotency key."""
        return self._client.honours_keys

    def list_tools(
        self, *, order: Literal["safest"] | None = None, timeout: float | None = None
    ) -> list[Tool]:
        """Return all tools, as `McpClient.list_tools` does."""
        return self._loop.run(self._client.list_tools(order=order, timeout=timeout))

    @overload
    def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        type: type[T],
        **options: Unpack[ToolOptions],
    ) -> T: ...
    @overload
    def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        type: None = None,
        **options: Unpack[ToolOptions],
    ) -> Called: ...
    def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        type: Any = None,
        **options: Unpack[ToolOptions],
    ) -> Any:
        """Call a tool, as `McpClient.call_tool` does.

        `progress` is called in the client's own thread.
        """
        return self._loop.run(self._client.call_tool(name, arguments, type=type, **options))

    @overload
    def start_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        type: type[T],
        **options: Unpack[ToolOptions],
    ) -> "SyncTask[T]": ...
    @overload
    def start_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        type: None = None,
        **options: Unpack[ToolOptions],
    ) -> "SyncTask[Called]": ...
    def start_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        type: Any = None,
        **options: Unpack[ToolOptions],
    ) -> "SyncTask[Any]":
        """Call a tool, and return as soon as the call is a task, as `McpClient.start_tool` does."""
        return SyncTask(
            self._loop.run(self._client.start_tool(name, arguments, type=type, **options)),
            self._loop,
        )

    @overload
    def task(self, id: str, *, type: type[T], check: bool = True) -> "SyncTask[T]": ...
    @overload
    def task(self, id: str, *, type: None = None, check: bool = True) -> "SyncTask[Called]": ...
    def task(self, id: str, *, type: Any = None, check: bool = True) -> "SyncTask[Any]":
        """Return the task with an id from `start_tool`, perhaps from before a restart."""
        return SyncTask(self._client.task(id, type=type, check=check), self._loop)

    def batch(self) -> "SyncMcpBatch":
        """Return a block of calls to send together:

        `with client.batch() as b: one = b.call_tool(...)`.
        """
        return SyncMcpBatch(self._client, self._loop)

    def list_prompts(self, *, timeout: float | None = None) -> list[Prompt]:
        """Return all prompts."""
        return self._loop.run(self._client.list_prompts(timeout=timeout))

    def list_resources(self, *, timeout: float | None = None) -> list[Resource]:
        """Return all resources."""
        return self._loop.run(self._client.list_resources(timeout=timeout))

    def list_resource_templates(self, *, timeout: float | None = None) -> list[Template]:
        """Return all resource templates."""
        return self._loop.run(self._client.list_resource_templates(timeout=timeout))

    def read_resource(self, uri: str, *, timeout: float | None = None) -> list[Embedded]:
        """Return the contents of a resource."""
        return self._loop.run(self._client.read_resource(uri, timeout=timeout))

    def get_prompt(
        self, name: str, arguments: Mapping[str, str] | None = None, *, timeout: float | None = None
    ) -> Prompted:
        """Return the messages of a prompt."""
        return self._loop.run(self._client.get_prompt(name, arguments, timeout=timeout))

    def complete(
        self,
        of: str,
        argument: str,
        value: str,
        *,
        context: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Completion:
        """Return completions for an argument, as `McpClient.complete` does."""
        return self._loop.run(
            self._client.complete(of, argument, value, context=context, timeout=timeout)
        )

    def ping(self, *, timeout: float | None = None) -> None:
        """Check that the server answers."""
        self._loop.run(self._client.ping(timeout=timeout))

    def set_log_level(self, level: Level) -> None:
        """Request log messages from this level upwards.

        `on_log` receives them in the client's own thread.
        """
        self._loop.run(self._client.set_log_level(level))

    def listen(
        self,
        *,
        tools: bool = False,
        prompts: bool = False,
        resources: bool = False,
        uris: Iterable[str] = (),
    ) -> "SyncChanges":
        """Listen to changes, as `McpClient.listen` does:

        `with client.listen(tools=True) as changes`.
        """
        changes = self._client.listen(tools=tools, prompts=prompts, resources=resources, uris=uris)
        return SyncChanges(changes, self._loop)

    def subscribe(self, uri: str) -> None:
        """Report changes of this resource to `on_change` from now on."""
        self._loop.run(self._client.subscribe(uri))

    def unsubscribe(self, uri: str) -> None:
        """Undo `subscribe`."""
        self._loop.run(self._client.unsubscribe(uri))


class SyncTask(Generic[T]):
    """A `Task` whose methods block."""

    def __init__(self, task: Task[T], loop: Loop) -> None:
        self._task = task
        self._loop = loop
        self.id = task.id

    @property
    def status(self) -> Status | None:
        """The last known status; None: not known yet."""
        return self._task.status

    @property
    def message(self) -> str | None:
        """The server's message about the status."""
        return self._task.message

    @property
    def questions(self) -> dict[str, InputRequest]:
        """The last known questions that the task waits for, by key."""
        return self._task.questions

    @property
    def is_over(self) -> bool:
        """Whether the task has ended, and the client has its result or error."""
        return self._task.is_over

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result, and return it like `call_tool`.

        The task continues after `timeout` seconds.
        """
        return self._loop.run(self._task.result(timeout))

    def __iter__(self) -> Iterator[TaskState]:
        states = self._task.watch()

        async def following() -> TaskState | None:
            return await anext(states, None)

        async def close() -> None:
            await states.aclose()

        try:
            while (state := self._loop.run(following())) is not None:
                yield state
        finally:
            with suppress(NotSent):  # closing the client ended the wait
                self._loop.run(close())

    def refresh(self) -> TaskState:
        """Ask the server for the state, and return it."""
        return self._loop.run(self._task.refresh())

    def cancel(self) -> None:
        """Ask the server to cancel the task. It may still finish: the server decides."""
        self._loop.run(self._task.cancel())


class SyncMcpBatch(McpCollected, SyncBatch):
    """Calls of MCP that are collected in a block and sent at its end, unless the block fails."""


class SyncChanges:
    """The changes that a program listens to, one after another."""

    def __init__(self, changes: Changes, loop: Loop) -> None:
        self._changes = changes
        self._loop = loop

    def __enter__(self) -> "SyncChanges":
        self._loop.run(self._changes.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._changes.__aexit__())

    def __iter__(self) -> Iterator[Change]:
        return self

    def __next__(self) -> Change:
        try:
            return self._loop.run(self._changes.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

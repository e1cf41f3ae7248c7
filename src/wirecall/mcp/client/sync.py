"""`SyncMcpClient`: the methods of `McpClient`, blocking."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar, Unpack, overload

from wirecall.client.sync import Loop, SyncBatch, SyncClient
from wirecall.mcp.client.changes import Change, Changes, Progress
from wirecall.mcp.client.client import McpClient, McpCollected, ToolOptions
from wirecall.mcp.client.results import Called, Completion, Prompt, Prompted, Resource, Template, Tool
from wirecall.mcp.types import Embedded, Level
from wirecall.protocol.messages import JsonObject

T = TypeVar("T")


class SyncMcpClient(SyncClient):
    """An `McpClient` whose methods block."""

    def __init__(self, client: McpClient) -> None:
        super().__init__(client)
        self._mcp = client

    @property
    def server(self) -> JsonObject:
        """What the server says it is: its name, its version."""
        return self._mcp.server

    @property
    def capabilities(self) -> JsonObject:
        """What the server says it can do."""
        return self._mcp.capabilities

    @property
    def instructions(self) -> str | None:
        """What the server says to a model that uses it."""
        return self._mcp.instructions

    @property
    def honours_keys(self) -> bool:
        """Whether the server says that of the calls of a tool with one idempotency key, one runs."""
        return self._mcp.honours_keys

    def list_tools(self, *, order: Literal["safest"] | None = None, timeout: float | None = None) -> list[Tool]:
        """Return all tools, as `McpClient.list_tools` does."""
        return self._loop.run(self._mcp.list_tools(order=order, timeout=timeout))

    @overload
    def call_tool(
        self, name: str, arguments: Mapping[str, Any] | None = None, *, type: type[T], **options: Unpack[ToolOptions]
    ) -> T: ...
    @overload
    def call_tool(
        self, name: str, arguments: Mapping[str, Any] | None = None, *, type: None = None, **options: Unpack[ToolOptions]
    ) -> Called: ...
    def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        type: Any = None,
        check: bool = True,
        timeout: float | None = None,
        key: str | bool | None = None,
        query: bool | None = None,
        progress: Progress | None = None,
    ) -> Any:
        """Call a tool, as `McpClient.call_tool` does. `progress` is called in the client's own thread."""
        return self._loop.run(
            self._mcp.call_tool(
                name, arguments, type=type, check=check, timeout=timeout, key=key, query=query, progress=progress
            )
        )

    def batch(self) -> "SyncMcpBatch":
        """Return a block of calls that leave together: `with client.batch() as b: one = b.call_tool(...)`."""
        return SyncMcpBatch(self._mcp, self._loop)

    def list_prompts(self, *, timeout: float | None = None) -> list[Prompt]:
        """Return all prompts."""
        return self._loop.run(self._mcp.list_prompts(timeout=timeout))

    def list_resources(self, *, timeout: float | None = None) -> list[Resource]:
        """Return all resources."""
        return self._loop.run(self._mcp.list_resources(timeout=timeout))

    def list_resource_templates(self, *, timeout: float | None = None) -> list[Template]:
        """Return all templates of resources."""
        return self._loop.run(self._mcp.list_resource_templates(timeout=timeout))

    def read_resource(self, uri: str, *, timeout: float | None = None) -> list[Embedded]:
        """Return the contents of a resource."""
        return self._loop.run(self._mcp.read_resource(uri, timeout=timeout))

    def get_prompt(self, name: str, arguments: Mapping[str, str] | None = None, *, timeout: float | None = None) -> Prompted:
        """Return the messages of a prompt."""
        return self._loop.run(self._mcp.get_prompt(name, arguments, timeout=timeout))

    def complete(
        self, of: str, argument: str, value: str, *, context: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> Completion:
        """Return what an argument may be, as `McpClient.complete` does."""
        return self._loop.run(self._mcp.complete(of, argument, value, context=context, timeout=timeout))

    def ping(self, *, timeout: float | None = None) -> None:
        """Hear from the server."""
        self._loop.run(self._mcp.ping(timeout=timeout))

    def set_log_level(self, level: Level) -> None:
        """Ask for log messages from this level upwards; `on_log` gets them, in the client's own thread."""
        self._loop.run(self._mcp.set_log_level(level))

    def listen(
        self, *, tools: bool = False, prompts: bool = False, resources: bool = False, uris: Iterable[str] = ()
    ) -> "SyncChanges":
        """Hear of changes, as `McpClient.listen` does: `with client.listen(tools=True) as changes`."""
        changes = self._mcp.listen(tools=tools, prompts=prompts, resources=resources, uris=uris)
        return SyncChanges(changes, self._loop)

    def subscribe(self, uri: str) -> None:
        """Tell `on_change` of changes of this resource from now on."""
        self._loop.run(self._mcp.subscribe(uri))

    def unsubscribe(self, uri: str) -> None:
        """End what `subscribe` began."""
        self._loop.run(self._mcp.unsubscribe(uri))


class SyncMcpBatch(McpCollected, SyncBatch):
    """Calls of MCP that are collected in a block and sent at its end; nothing is sent if the block fails."""

    def __init__(self, client: McpClient, loop: Loop) -> None:
        SyncBatch.__init__(self, client, loop)
        self._mcp = client


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

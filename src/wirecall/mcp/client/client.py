"""`McpClient`: the methods of MCP for those who use a server, the same for all five revisions; `connect_mcp` makes one.

How a conversation goes is told in `conversation`. This file has what users call, and decides for every call of a tool
whether it is confirmed first, whether it has a key, and whether it may be repeated:

1. What only reads is repeated: lists, resources, prompts, completions.
2. A tool is repeated if it is called with an idempotency key and the server says that it honours keys; for such a server a
   key is minted for every call. To any other server a key is harmless, but no reason to repeat.
3. A tool is repeated if its annotations say that it is read-only or idempotent, and they are trusted (`trust=`).
4. `confirm=` is awaited before a call of a tool that is destructive; that it declines is raised before anything is sent.
   Hints of a server that is not trusted can only make a tool more dangerous: with `confirm_unknown=True` all its tools that
   do not say that they are destructive are confirmed as well.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar, cast, overload

from msgspec import Raw

from wirecall.client.delivery import LEAST
from wirecall.client.exchange import Batch, Entry
from wirecall.client.links import Pipe
from wirecall.client.options import Options
from wirecall.client.retries import mint_key
from wirecall.errors import Declined, NotSent, UsageError, WirecallError
from wirecall.mcp.client import results as offers
from wirecall.mcp.client.changes import Change, Changes, Kind
from wirecall.mcp.client.conversation import Conversation, Way
from wirecall.mcp.client.host import Host
from wirecall.mcp.client.http_link import McpHttpLink
from wirecall.mcp.client.inbox import Follower
from wirecall.mcp.client.line_link import McpLineLink
from wirecall.mcp.client.lists import Lists
from wirecall.mcp.client.negotiate import Agreed
from wirecall.mcp.client.results import Called, Completion, Prompt, Prompted, Resource, Template, Tool
from wirecall.mcp.client.rounds import Extra
from wirecall.mcp.client.sse_pipe import SsePipe
from wirecall.mcp.types import LEVELS, PREFIX, Embedded, Level
from wirecall.protocol.params import KEY
from wirecall.transports.child import Child
from wirecall.transports.http_client import HttpClient
from wirecall.transports.memory import MemoryPipe

T = TypeVar("T")
Progress = Callable[[float, float | None, str | None], Any]


class McpClient(Conversation):
    """A client of MCP. `revision`, `server`, `capabilities` and `instructions` tell who it speaks with, and how."""

    def __init__(self, way: Way, options: Options, host: Host, *, confirm_unknown: bool = False, **more: Any) -> None:
        super().__init__(way, options, host, **more)
        self._confirm_unknown = confirm_unknown
        self._lists = Lists(self.call, self._clock.time)
        self._subscribed: Changes | None = None
        way.marks = lambda name: self._lists.marks.get(name, {})  # an older way has no headers to put them in

    async def open(self) -> None:
        """Open the connection, and agree on a revision. Who gave `on_change` hears of all lists from now on."""
        await super().open()
        if self._on_change is not None and self._is_stateless:
            await self._listen_to(())

    # --- lists -------------------------------------------------------------------------------------------------------

    async def list_tools(self, *, order: Literal["safest"] | None = None, timeout: float | None = None) -> list[Tool]:
        """All tools. `order="safest"` puts those first whose trusted annotations promise the least harm."""
        if order not in (None, "safest"):
            raise UsageError(f"order={order!r} is not known.", fix='use order="safest", or leave it out')
        tools: list[Tool] = await self._lists.read("tools/list", timeout)
        return offers.safest_first(tools, self._trusts) if order else tools

    async def list_prompts(self, *, timeout: float | None = None) -> list[Prompt]:
        """All prompts."""
        return await self._lists.read("prompts/list", timeout)

    async def list_resources(self, *, timeout: float | None = None) -> list[Resource]:
        """All resources."""
        return await self._lists.read("resources/list", timeout)

    async def list_resource_templates(self, *, timeout: float | None = None) -> list[Template]:
        """All templates of resources."""
        return await self._lists.read("resources/templates/list", timeout)

    async def _adopt(self, agreed: Agreed) -> None:
        await super()._adopt(agreed)
        repeats = agreed.revision.has("http headers repeat the body")
        self._lists.has_headers = repeats and isinstance(self._way, McpHttpLink)

    def _forget(self, change: Change | None = None) -> None:
        self._lists.forget(change)

    async def _refreshed(self, entry: Entry) -> bool:
        if entry.method != "tools/call" or not self._lists.has_headers:
            return False
        self._lists.forget(Change("tools"))
        try:
            await self.list_tools()
        except WirecallError:
            return False
        return True

    # --- tools -------------------------------------------------------------------------------------------------------

    @overload
    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        type: type[T],
        check: bool = True,
        timeout: float | None = None,
        key: str | bool | None = None,
        query: bool | None = None,
        progress: Progress | None = None,
    ) -> T: ...
    @overload
    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        type: None = None,
        check: bool = True,
        timeout: float | None = None,
        key: str | bool | None = None,
        query: bool | None = None,
        progress: Progress | None = None,
    ) -> Called: ...
    async def call_tool(self, name: str, arguments: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """Call a tool. An answer that is an error is raised, unless `check=False`.

        `type` reads the structured content, or the text where there is none. `progress` is told (progress, total, message).
        `timeout`, `key` and `query` are as in `call`.
        """
        entry = self.tool_entry(name, arguments, **options)
        await self._run(entry)
        return entry.result()

    def tool_entry(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        type: Any = None,
        check: bool = True,
        progress: Progress | None = None,
        **options: Any,
    ) -> Entry:
        """A call of a tool to be made."""
        if type is not None and not check:
            raise UsageError("type= and check=False do not go together.", "an error is not of the type", "use one of them")
        extra = Extra(read=_read_checked if check else _read_called, follower=Follower(progress) if progress else None)
        params = {"name": name, "arguments": dict(arguments or {})}
        return self.entry("tools/call", params, type=type, extra=extra, **options)

    def batch(self) -> "McpBatch":
        """Calls that leave together: `async with client.batch() as b: one = b.call_tool(...)`."""
        return McpBatch(self)

    async def _prepare(self, entry: Entry) -> None:
        if entry.method != "tools/call":
            entry.key = entry.key if isinstance(entry.key, str) else None
            entry.safe = entry.method.startswith(_READS) or entry.query is True
            return
        name = str((entry.params or {}).get("name"))
        tool = await self._lists.tool(name, entry.timeout) if self._options.trust or self._options.confirm else None
        if name in self._lists.left_out:
            raise NotSent(f"the tool {name!r} cannot be called over HTTP: its x-mcp-header are against the rules")
        if self._options.confirm is not None and self._needs_confirmation(tool):
            await self._confirmed(entry, tool or Tool(name))
        entry.key = self._key_of(entry)
        is_harmless = tool is not None and self._trusts(tool) and tool.idempotent
        entry.safe = entry.query is True or is_harmless or (entry.key is not None and self.honours_keys)

    async def _only_reads(self, entry: Entry) -> bool:
        if await super()._only_reads(entry):
            return True
        # Every call of a tool has a key here. Its annotations tell, trusted or not: a false one only lets it repeat less.
        with suppress(WirecallError):
            name = str((entry.params or {}).get("name"))
            tool = await self._lists.tool(name, max(entry.deadline - self._clock.time(), LEAST))
            return tool is not None and tool.read_only
        return False

    def _key_of(self, entry: Entry) -> str | None:
        """The caller's, or the model's among the arguments, or a new one where that helps."""
        if isinstance(entry.key, str):
            return entry.key
        arguments = (entry.params or {}).get("arguments")
        own = arguments.get(KEY) if isinstance(arguments, dict) else None
        if isinstance(own, str) and self.honours_keys:
            return own
        wanted = entry.key is True or (entry.key is None and self.honours_keys)
        return mint_key() if wanted else None

    def _trusts(self, tool: Tool) -> bool:
        trust = self._options.trust
        return bool(trust(tool)) if callable(trust) else bool(trust)

    async def _confirmed(self, entry: Entry, tool: Tool) -> None:
        agreed = self._options.confirm(tool, (entry.params or {}).get("arguments") or {})
        if inspect.isawaitable(agreed):
            agreed = await agreed
        if not agreed:
            raise Declined(f"{tool.name} was not confirmed")
        entry.deadline = self._clock.time() + entry.timeout  # a person may have taken their time

    def _needs_confirmation(self, tool: Tool | None) -> bool:
        if tool is not None and self._trusts(tool):
            return tool.destructive
        return self._confirm_unknown or (tool is not None and tool.annotations is not None and tool.destructive)

    # --- resources, prompts and the rest -----------------------------------------------------------------------------

    async def read_resource(self, uri: str, *, timeout: float | None = None) -> list[Embedded]:
        """The contents of a resource."""
        return cast(list[Embedded], await self._read("resources/read", {"uri": uri}, offers.read_contents, timeout))

    async def get_prompt(
        self, name: str, arguments: Mapping[str, str] | None = None, *, timeout: float | None = None
    ) -> Prompted:
        """The messages of a prompt."""
        params = {"name": name, **({"arguments": dict(arguments)} if arguments else {})}
        return cast(Prompted, await self._read("prompts/get", params, offers.read_prompted, timeout))

    async def complete(
        self, of: str, argument: str, value: str, *, context: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> Completion:
        """What an argument may be, of a prompt (by its name) or of a template (by its URI)."""
        ref = {"type": "ref/resource", "uri": of} if "://" in of else {"type": "ref/prompt", "name": of}
        params: dict[str, Any] = {"ref": ref, "argument": {"name": argument, "value": value}}
        if context and self._spoken is not None and self._spoken.has("completion context"):
            params["context"] = {"arguments": dict(context)}
        return cast(Completion, await self._read("completion/complete", params, offers.read_completion, timeout))

    async def ping(self, *, timeout: float | None = None) -> None:
        """Hear from the server. 2026-07-28 has no ping; what every server answers there is who it is."""
        await self.call("server/discover" if self._is_stateless else "ping", timeout=timeout)

    async def set_log_level(self, level: Level) -> None:
        """The least log messages that `on_log` wants to see."""
        if level not in LEVELS:
            raise UsageError(f"{level!r} is not a log level.", "", f"use one of {', '.join(LEVELS)}")
        self._level = level
        if self._is_stateless:
            self._seal({**self._envelope, f"{PREFIX}logLevel": level})
        else:
            await self.call("logging/setLevel", {"level": level})

    async def _read(self, method: str, params: Any, read: Callable[[Raw], Any], timeout: float | None) -> Any:
        entry = self.entry(method, params, timeout=timeout, extra=Extra(read=lambda entry: read(cast(Raw, entry.raw))))
        await self._run(entry)
        return entry.result()

    # --- changes -----------------------------------------------------------------------------------------------------

    def listen(
        self, *, tools: bool = False, prompts: bool = False, resources: bool = False, uris: Iterable[str] = ()
    ) -> Changes:
        """Changes of these lists, and of the resources at `uris`: `async with client.listen(tools=True) as changes`."""
        asked: dict[Kind, bool] = {"tools": tools, "prompts": prompts, "resources": resources}
        lists = [kind for kind, wanted in asked.items() if wanted]
        return Changes(lists, uris, begin=self._listening.begin, end=self._listening.end)

    async def subscribe(self, uri: str) -> None:
        """From now on, `on_change` is told of changes of this resource."""
        await self._listen_to({*(self._subscribed.uris if self._subscribed else ()), uri})

    async def unsubscribe(self, uri: str) -> None:
        """The end of `subscribe`."""
        await self._listen_to({*(self._subscribed.uris if self._subscribed else ())} - {uri})

    async def _listen_to(self, uris: Iterable[str]) -> None:
        """The new before the old, so that nothing is missed."""
        if self._on_change is None:
            raise UsageError(
                "Nobody would hear of changes.", fix="connect(..., on_change=...), or use client.listen(uris=...)"
            )
        old = self._subscribed
        lists = {"tools": True, "prompts": True, "resources": True} if self._is_stateless else {}
        self._subscribed = await self.listen(uris=uris, **lists).__aenter__()
        if old is not None:
            await old.__aexit__()


_READS = ("tools/list", "prompts/", "resources/", "completion/", "server/discover", "ping", "logging/")


class McpBatch(Batch):
    """A batch of MCP: tools by their names, any other method by `call`."""

    def __init__(self, client: McpClient) -> None:
        super().__init__(client)
        self._mcp = client

    async def __aenter__(self) -> "McpBatch":
        return self

    def call_tool(self, name: str, arguments: Mapping[str, Any] | None = None, **options: Any) -> Entry:
        """Add a call of a tool; the options are those of `McpClient.call_tool`."""
        return self._add(self._mcp.tool_entry(name, arguments, **options))


def _read_called(entry: Entry) -> Any:
    assert entry.raw is not None
    called = offers.read_called(entry.raw)
    entry.replayed = entry.replayed or called.replayed
    return called if entry.type is None else offers.as_type(called, entry.type)


def _read_checked(entry: Entry) -> Any:
    assert entry.raw is not None
    called = offers.read_called(entry.raw)
    entry.replayed = entry.replayed or called.replayed
    if error := called.error():
        raise error
    return called if entry.type is None else offers.as_type(called, entry.type)


# --- connecting ------------------------------------------------------------------------------------------------------


def connect_mcp(
    target: Any,
    options: Options,
    *,
    sample: Any = None,
    elicit: Any = None,
    elicit_url: Any = None,
    roots: Any = None,
    on_log: Any = None,
    on_change: Any = None,
    confirm_unknown: bool = False,
    identity: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stderr: Literal["pass", "keep"] = "pass",
) -> McpClient:
    """A client of MCP for a URL, a command line or an app, to be opened by `async with`.

    `sample`, `elicit`, `elicit_url` and `roots` answer what the server asks (see `mcp.host`); `on_log` is told its log
    messages, `on_change` its changes. `identity` is what the server is told of us. `env`, `cwd` and `stderr` are a child's.
    """
    host = Host(sample=sample, elicit=elicit, elicit_url=elicit_url, roots=roots)
    way = _way(target, options, env, cwd, stderr)
    told = identity or {"name": "wirecall", "version": _version()}
    return McpClient(way, options, host, identity=told, on_log=on_log, on_change=on_change, confirm_unknown=confirm_unknown)


def _way(
    target: Any, options: Options, env: Mapping[str, str] | None, cwd: str | None, stderr: Literal["pass", "keep"]
) -> Way:
    if isinstance(target, str):
        shared: dict[str, Any] = {"headers": options.headers, "max_bytes": options.max_bytes}
        older = lambda: McpLineLink(lambda: SsePipe(target, **shared))  # noqa: E731
        return McpHttpLink(HttpClient(target, **shared), older, options.clock)
    if isinstance(target, Sequence):
        command = list(target)

        def child() -> Pipe:
            return Child(command, env=env, cwd=cwd, max_bytes=options.max_bytes, stderr=stderr)

        child()  # a command line that is none is told here
        return McpLineLink(child)
    if not hasattr(target, "_connect"):
        raise UsageError(f"{target!r} is nothing to connect to.", fix="use a URL, a command line (a list), or an App")
    return McpLineLink(lambda: MemoryPipe(target._connect))


def _version() -> str:
    import wirecall

    return wirecall.__version__

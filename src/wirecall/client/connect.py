"""`connect`: a client for a server, wherever it is.

| Target | Way | Protocol, unless told by `protocol=` |
| --- | --- | --- |
| `"http://…"`, `"https://…"` | HTTP | MCP if the path ends in `/mcp`, else JSON-RPC |
| `["python", "server.py"]` | a child process on stdio | JSON-RPC |
| an `App` | memory | JSON-RPC |

A type checker cannot read an address: with `protocol="mcp"` it sees an `McpClient`, without it a `Client`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, Unpack, get_args, overload
from urllib.parse import urlsplit

from wirecall.client.client import Client, JsonRpc, SyncClient
from wirecall.client.delivery import Clock, Options, Retry
from wirecall.client.exchange import Link
from wirecall.client.links import HttpLink, LineLink, MemoryLink
from wirecall.errors import UsageError
from wirecall.transports.child import Child, Stderr
from wirecall.transports.http_client import Auth, HttpClient

if TYPE_CHECKING:
    from wirecall.app import App
    from wirecall.auth.client import Credentials
    from wirecall.mcp.client.client import McpClient, SyncMcpClient
    from wirecall.mcp.client.conversation import Confirm, Trust
    from wirecall.mcp.client.inbox import Change, Elicit, ElicitUrl, Log, Roots, Sample

Target: TypeAlias = "str | Sequence[str] | App"
Protocol: TypeAlias = Literal["jsonrpc", "mcp"]


class ConnectOptions(TypedDict, total=False):
    """The options of every client: `connect` explains them."""

    timeout: float
    retry: Retry | None
    headers: Mapping[str, str] | None
    auth: "Credentials | None"
    coalesce: float | None
    discover: bool
    max_bytes: int
    env: Mapping[str, str] | None
    cwd: str | None
    stderr: Stderr
    caller: str | None
    clock: Clock | None
    chance: Callable[[], float]
    wrap: Callable[[Link], Link] | None


class McpOptions(ConnectOptions, total=False):
    """The options of a client of MCP: `connect` explains them."""

    revision: str | None
    trust: "Trust"
    confirm: "Confirm | None"
    confirm_unknown: bool
    sample: "Sample | None"
    elicit: "Elicit | None"
    elicit_url: "ElicitUrl | None"
    roots: "Roots | None"
    on_log: "Callable[[Log], object] | None"
    on_change: "Callable[[Change], object] | None"
    identity: Mapping[str, Any] | None
    extensions: Mapping[str, Mapping[str, Any]] | None
    tasks: bool
    baggage: bool


@overload
def connect(target: Target, *, protocol: Literal["mcp"], **options: Unpack[McpOptions]) -> "McpClient": ...
@overload
def connect(target: Target, *, protocol: Literal["jsonrpc"] | None = None, **options: Unpack[ConnectOptions]) -> Client: ...
@overload
def connect(target: Target, *, protocol: Protocol | None = None, **options: Unpack[McpOptions]) -> Client: ...
def connect(target: Target, *, protocol: Protocol | None = None, **options: Any) -> Client:
    """Return a client, to be opened by `async with`.

    `timeout` (30 seconds) is the time of a call, all its attempts included; `retry` says how calls that may be repeated are
    repeated. `headers` go with every HTTP request, and `auth` gets tokens for them: `Browser()`, `ClientCredentials(...)`
    or another way of `wirecall.auth`, a token as a text, or an async function that returns one. `env` (added to ours), `cwd`
    and `stderr` ("pass" on, or only "keep" for errors) are a child's. `coalesce` merges calls of so many seconds into one
    array. `discover=False` does not ask the server which of its methods are commands. `max_bytes` (10 MB) is the largest
    answer that is read. `caller` names the caller of an app in memory, which is anonymous without it.

    MCP: `revision` pins one. `trust` says whether annotations of tools are believed, `confirm` is asked before destructive
    calls, with `confirm_unknown=True` also before calls of unknown tools. `sample`, `elicit`, `elicit_url` and `roots`
    answer what the server asks (see `mcp.client.inbox`); `on_log` gets its log messages, `on_change` its changes.
    `identity` describes this client to the server, and `extensions` declares those of MCP that your program supports:
    settings by id. `tasks=False` makes the server answer each call itself, without tasks that the client waits for.
    If the program traces with OpenTelemetry, every call tells the server of its span; `baggage=True` sends the current
    baggage as well.

    `clock`, `chance` and `wrap` are for tests: see `wirecall.testing`.
    """
    # An app is known by what the client needs of it: a program that calls a server elsewhere does not load one.
    if not isinstance(target, (str, Sequence)) and not hasattr(target, "handle"):
        raise UsageError(
            f"connect({target!r}): there is nothing to connect to.",
            fix='use a URL, a command line as a list ["python", "server.py"], or an App',
        )
    if isinstance(target, str) and "://" not in target:
        raise UsageError(
            f"{target!r} is not an address.",
            "a text is a URL, http://HOST:PORT/rpc or http://HOST:PORT/mcp",
            'use a URL, or for a server on stdio a command line as a list: ["python", "server.py"]',
        )
    if unknown := options.keys() - McpOptions.__optional_keys__:
        raise TypeError(f"connect() has no option {', '.join(sorted(unknown))}")
    given = {name: value for name, value in options.items() if value is not None}
    shared = Options(**{name: given.pop(name) for name in ConnectOptions.__optional_keys__ & given.keys()})
    auth: Auth | None = None
    if shared.auth is not None:
        from wirecall.auth.client import authorization

        if not isinstance(target, str):
            raise UsageError("auth= is for HTTP.", "a child process gets its credentials by env=", "drop it, or use a URL")
        if any(name.lower() == "authorization" for name in shared.headers):
            raise UsageError(
                "auth= and an Authorization header.", "both would authorize the same request", "drop one of them"
            )
        auth = authorization(shared.auth, target)
    http = partial(HttpClient, headers=shared.headers, max_bytes=shared.max_bytes, auth=auth)
    child = partial(Child, env=shared.env, cwd=shared.cwd, stderr=shared.stderr, max_bytes=shared.max_bytes)
    if isinstance(target, Sequence) and not isinstance(target, str):
        child(target)  # raises if it is not a command line

    if shared.caller:
        if isinstance(target, (str, Sequence)):
            raise UsageError(
                "caller= is for an app in memory.", "other servers know callers by credentials", "use auth= or headers="
            )
        if target.access is not None:
            raise UsageError(
                "caller= and App(auth=...).",
                "the tokens of requests name the callers of this app, and a client in memory has no token",
                "send HTTP requests to app.asgi() with a token of wirecall.testing.auth.AuthorizationServer",
            )

    if _protocol(target, protocol) == "mcp":
        from wirecall.mcp.client.client import McpClient
        from wirecall.mcp.client.conversation import Settings
        from wirecall.mcp.client.links import McpHttpLink, McpLineLink, McpLink, McpMemoryLink, SsePipe

        link: McpLink
        if isinstance(target, str):
            sse = partial(SsePipe, target, http)
            link = McpHttpLink(http(target), partial(McpLineLink, sse, shared.max_bytes), shared.clock)
        elif isinstance(target, Sequence):
            link = McpLineLink(partial(child, target), shared.max_bytes)
        else:
            link = McpMemoryLink(partial(target._connect, caller=shared.caller or ""), target._enter, target._leave)
        return McpClient(link, Settings(**given), shared)

    if names := [name for name, value in given.items() if value is not False]:
        raise UsageError(f"{', '.join(names)}: not for JSON-RPC.", "only MCP has it", 'use protocol="mcp", or drop it')
    kinds: dict[str, str] | None = None if shared.discover else {}
    plain: Link
    if isinstance(target, str):
        plain = HttpLink(http(target))
    elif isinstance(target, Sequence):
        plain = LineLink(partial(child, target), shared.max_bytes)
    else:
        handle = partial(target.handle, caller=shared.caller) if shared.caller else target.handle
        plain = MemoryLink(handle, target._enter, target._leave)
        kinds = {method.name: method.kind.value for method in target.registry}
    return Client(shared.wrap(plain), JsonRpc(kinds), shared)


@overload
def connect_sync(target: Target, *, protocol: Literal["mcp"], **options: Unpack[McpOptions]) -> "SyncMcpClient": ...
@overload
def connect_sync(
    target: Target, *, protocol: Literal["jsonrpc"] | None = None, **options: Unpack[ConnectOptions]
) -> SyncClient: ...
@overload
def connect_sync(target: Target, *, protocol: Protocol | None = None, **options: Unpack[McpOptions]) -> SyncClient: ...
def connect_sync(target: Target, *, protocol: Protocol | None = None, **options: Any) -> SyncClient:
    """Return the same client for scripts: `with connect_sync(...) as client`, or without `with`; safe from any thread."""
    if _protocol(target, protocol) == "mcp":
        from wirecall.mcp.client.client import SyncMcpClient

        return SyncMcpClient(connect(target, protocol="mcp", **options))
    return SyncClient(connect(target, protocol="jsonrpc", **options))


def _protocol(target: Target, protocol: Protocol | None) -> Protocol:
    if protocol not in (None, *get_args(Protocol)):
        raise UsageError(f"{protocol!r} is not a protocol.", fix='use protocol="jsonrpc" or protocol="mcp"')
    is_mcp = isinstance(target, str) and urlsplit(target).path.rstrip("/").endswith("/mcp")
    return protocol or ("mcp" if is_mcp else "jsonrpc")

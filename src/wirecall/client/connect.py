"""`connect`: a client for a server, wherever it is.

| Target | Transport | Protocol, unless `protocol=` names it |
| --- | --- | --- |
| `"http://…"`, `"https://…"` | HTTP | MCP if the path ends in `/mcp` or `/mcp/NAME`, else JSON-RPC |
| `"ws://…"`, `"wss://…"` | WebSocket | JSON-RPC |
| `["python", "server.py"]` | a child process on stdio | JSON-RPC |
| `"unix:/path"` | a Unix socket | JSON-RPC |
| `"tcp://HOST:PORT"` | TCP | JSON-RPC |
| an `App` | memory | JSON-RPC |

A type checker cannot read an address: with `protocol="mcp"` it sees an `McpClient`, without it a
`Client`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, Unpack, get_args, overload

from wirecall.client.client import Client
from wirecall.client.delivery import Clock, Options, Retry
from wirecall.client.exchange import Link
from wirecall.client.jsonrpc import JsonRpc
from wirecall.client.links import HttpLink, LineLink, MemoryLink
from wirecall.client.pushes import Pushes
from wirecall.client.sync import SyncClient
from wirecall.errors import UsageError, no_option
from wirecall.protocol.addresses import is_of_mcp
from wirecall.transports.child import Child, Stderr
from wirecall.transports.framing import FramingName, framing_of
from wirecall.transports.http_client import Auth, HttpClient, WebSocketPipe

if TYPE_CHECKING:
    from wirecall.app import App
    from wirecall.auth.client import Credentials
    from wirecall.mcp.client.client import McpClient, SyncMcpClient
    from wirecall.mcp.client.conversation import Confirm, Trust
    from wirecall.mcp.client.inbox import Change, Elicit, ElicitUrl, Log, Roots, Sample
    from wirecall.transports.sockets import SocketPipe

Target: TypeAlias = "str | Sequence[str] | App"
# "jsonrpc" is the old name of "rpc".
Protocol: TypeAlias = Literal["rpc", "mcp", "jsonrpc"]


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
    framing: FramingName
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
def connect(
    target: Target, *, protocol: Literal["mcp"], **options: Unpack[McpOptions]
) -> "McpClient": ...
@overload
def connect(
    target: Target,
    *,
    protocol: Literal["rpc", "jsonrpc"] | None = None,
    **options: Unpack[ConnectOptions],
) -> Client: ...
@overload
def connect(
    target: Target, *, protocol: Protocol | None = None, **options: Unpack[McpOptions]
) -> Client: ...
def connect(target: Target, *, protocol: Protocol | None = None, **options: Any) -> Client:
    """Return a client; open it with `async with`.

    `timeout` (30 seconds) covers all attempts of a call; `retry` configures how repeatable calls
    are repeated. `headers` are sent with every HTTP request, and `auth` gets tokens for them:
    `Browser()`, `ClientCredentials(...)` or another class of `wirecall.auth`, a token as a string,
    or an async function that returns one. `env` (added to ours), `cwd` and `stderr` ("pass" it on,
    or only "keep" it for errors) apply to a child process. `coalesce` merges calls of so many
    seconds into one array. `discover=False` does not ask the server which of its methods are
    commands. `max_bytes` (10 MB) is the largest answer that the client reads. `caller` names the
    caller of an app in memory, which is anonymous without it. `framing` ("lines", or
    "content-length" as language servers have it) applies to a child process and a socket.

    MCP: `revision` pins one. `trust` decides whether the client believes annotations of tools.
    `confirm` is awaited before destructive calls, with `confirm_unknown=True` also before calls of
    unknown tools. `sample`, `elicit`, `elicit_url` and `roots` answer the server's questions (see
    `mcp.client.inbox`); `on_log` receives its log messages, `on_change` its changes. `identity`
    describes this client to the server, and `extensions` declares the MCP extensions that your
    program supports: settings by id. `tasks=False` makes the server answer each call itself,
    without tasks that the client waits for. If the program traces with OpenTelemetry, every call
    sends its span to the server; `baggage=True` also sends the current baggage.

    `clock`, `chance` and `wrap` are for tests: see `wirecall.testing`.

    `target` is a URL, a command line as a list, a socket (`unix:/PATH`, `tcp://HOST:PORT`) or an
    `App`. `protocol` is "rpc", "jsonrpc" (a server that may be anything) or "mcp"; by default a URL
    that ends in `/mcp` or `/mcp/NAME` is one of MCP.

    Raises `UsageError` for a target or an option that cannot work. Calls raise `RpcError` for an
    error that the server answered with, and `CallFailed` if there was no answer.

    >>> app = App("shop")
    >>> @app.query
    ... def price(sku: str) -> int:
    ...     return 450
    >>> async def ask() -> int:
    ...     async with connect(app) as client:
    ...         return await client.call("price", {"sku": "tea"})
    >>> asyncio.run(ask())
    450
    """
    _check_target(target)
    for name in sorted(options.keys() - McpOptions.__optional_keys__):
        raise no_option("connect", name, ["protocol", *sorted(McpOptions.__optional_keys__)])
    given = {name: value for name, value in options.items() if value is not None}
    shared = Options(
        **{name: given.pop(name) for name in ConnectOptions.__optional_keys__ & given.keys()}
    )
    http = partial(
        HttpClient,
        headers=shared.headers,
        max_bytes=shared.max_bytes,
        auth=_authorization(target, shared),
    )
    child = partial(
        Child,
        env=shared.env,
        cwd=shared.cwd,
        stderr=shared.stderr,
        max_bytes=shared.max_bytes,
        framing=framing_of(shared.framing),
    )
    if isinstance(target, Sequence) and not isinstance(target, str):
        child(target)  # raises if it is not a command line
    if shared.caller:
        _check_caller(target)
    _check_framing(target, shared)
    if _protocol(target, protocol) == "mcp":
        _check_no_websocket(target)
        return _mcp_client(target, shared, given, http, child)
    if names := [name for name, value in given.items() if value is not False]:
        raise UsageError(
            f"{', '.join(names)}: not for JSON-RPC.",
            "only MCP has it",
            'use protocol="mcp", or drop it',
        )
    return _rpc_client(target, shared, http, child)


@overload
def connect_sync(
    target: Target, *, protocol: Literal["mcp"], **options: Unpack[McpOptions]
) -> "SyncMcpClient": ...
@overload
def connect_sync(
    target: Target,
    *,
    protocol: Literal["rpc", "jsonrpc"] | None = None,
    **options: Unpack[ConnectOptions],
) -> SyncClient: ...
@overload
def connect_sync(
    target: Target, *, protocol: Protocol | None = None, **options: Unpack[McpOptions]
) -> SyncClient: ...
def connect_sync(target: Target, *, protocol: Protocol | None = None, **options: Any) -> SyncClient:
    """Return a blocking client for scripts, with or without `with`; any thread may use it.

    `target`, `protocol` and the options are those of `connect`.

    >>> with connect_sync(app) as client:
    ...     client.call("price", {"sku": "tea"})
    450
    """
    if _protocol(target, protocol) == "mcp":
        from wirecall.mcp.client.client import SyncMcpClient

        return SyncMcpClient(connect(target, protocol="mcp", **options))
    return SyncClient(connect(target, protocol="rpc", **options))


# --- the parts of connect -------------------------------------------------------------------------


def _check_target(target: Target) -> None:
    # Recognise an app by its `handle`: a program that calls a remote server does not import `App`.
    if not isinstance(target, (str, Sequence)) and not hasattr(target, "handle"):
        raise UsageError(
            f"connect({target!r}): there is nothing to connect to.",
            fix='use a URL, a command line as a list ["python", "server.py"], or an App',
        )
    if isinstance(target, str) and "://" not in target and not _is_socket(target):
        raise UsageError(
            f"{target!r} is not an address.",
            "a string is a URL: http://HOST:PORT/rpc, http://HOST:PORT/mcp or ws://HOST:PORT/rpc, "
            "or a socket: unix:/PATH or tcp://HOST:PORT",
            'use a URL, or for a server on stdio a command line as a list: ["python", "server.py"]',
        )


def _check_no_websocket(target: Target) -> None:
    """Refuse MCP over a WebSocket."""
    if isinstance(target, str) and is_websocket(target):
        raise UsageError(
            f"{target!r}: MCP over a WebSocket.",
            "expected an address of HTTP: MCP defines no WebSocket",
            'use "http://HOST:PORT/mcp", or "ws://HOST:PORT/rpc" for JSON-RPC',
        )


def _is_socket(target: Target) -> bool:
    """Return whether a target is the address of a server on a socket."""
    return isinstance(target, str) and target.startswith(("unix:", "tcp://"))


def _socket(target: str, shared: Options) -> Callable[[], "SocketPipe"]:
    """Return a function that makes a connection to a server on a socket."""
    from wirecall.transports.sockets import SocketPipe, address_of

    framing = framing_of(shared.framing)
    return partial(SocketPipe, address_of(target), max_bytes=shared.max_bytes, framing=framing)


def _check_framing(target: Target, shared: Options) -> None:
    """Refuse `framing=` for a target whose transport has its own."""
    is_stream = _is_socket(target) or (isinstance(target, Sequence) and not isinstance(target, str))
    if not is_stream and shared.framing != "lines":
        raise UsageError(
            "framing= is for a child process and for sockets.",
            "a request over HTTP has its own Content-Length, and an app in memory needs none",
            "drop it, or use unix:/PATH, tcp://HOST:PORT or a command line",
        )


def _authorization(target: Target, shared: Options) -> Auth | None:
    """Return the object that authorizes requests by `auth=`."""
    if shared.auth is None:
        return None
    from wirecall.auth.client import authorization

    if not isinstance(target, str) or _is_socket(target):
        raise UsageError(
            "auth= is for HTTP.",
            "a child process gets its credentials by env=, and a socket has no header for a token",
            "drop it, or use a URL",
        )
    if any(name.lower() == "authorization" for name in shared.headers):
        raise UsageError(
            "auth= and an Authorization header.",
            "both would authorize the same request",
            "drop one of them",
        )
    if is_websocket(target):
        target = "http" + target[2:]
    return authorization(shared.auth, target)


def _check_caller(target: Target) -> None:
    """Refuse `caller=` for a target that knows its callers by their credentials."""
    if isinstance(target, (str, Sequence)):
        raise UsageError(
            "caller= is for an app in memory.",
            "other servers know callers by credentials",
            "use auth= or headers=",
        )
    if target.access is not None:
        raise UsageError(
            "caller= and App(auth=...).",
            "the tokens of requests name the callers of this app, "
            "and a client in memory has no token",
            "send HTTP requests to app.asgi() "
            "with a token of wirecall.testing.auth.AuthorizationServer",
        )


def _protocol(target: Target, protocol: Protocol | None) -> Literal["rpc", "mcp"]:
    if protocol not in (None, *get_args(Protocol)):
        raise UsageError(
            f"{protocol!r} is not a protocol.", fix='use protocol="rpc" or protocol="mcp"'
        )
    if protocol == "mcp":
        return "mcp"
    if protocol is not None or not isinstance(target, str) or _is_socket(target):
        return "rpc"
    if is_of_mcp(target):
        return "mcp"
    return "rpc"


def _mcp_client(
    target: Target,
    shared: Options,
    given: dict[str, Any],
    http: Callable[[str], HttpClient],
    child: Callable[[Sequence[str]], Child],
) -> "McpClient":
    from wirecall.mcp.client.client import McpClient
    from wirecall.mcp.client.conversation import Settings
    from wirecall.mcp.client.links import (
        McpHttpLink,
        McpLineLink,
        McpLink,
        McpMemoryLink,
        SsePipe,
    )

    link: McpLink
    if isinstance(target, str) and _is_socket(target):
        link = McpLineLink(_socket(target, shared), shared.max_bytes)
    elif isinstance(target, str):
        sse = partial(SsePipe, target, http)
        link = McpHttpLink(http(target), partial(McpLineLink, sse, shared.max_bytes), shared.clock)
    elif isinstance(target, Sequence):
        link = McpLineLink(partial(child, target), shared.max_bytes)
    else:
        connect_app = partial(target._connect, caller=shared.caller or "")
        link = McpMemoryLink(connect_app, target._enter, target._leave)
    return McpClient(link, Settings(**given), shared)


def _rpc_client(
    target: Target,
    shared: Options,
    http: Callable[..., HttpClient],
    child: Callable[[Sequence[str]], Child],
) -> Client:
    kinds: dict[str, str] | None = {}
    if shared.discover:
        kinds = None
    largest: int | None = None
    announced: object = None
    key_paths: dict[str, tuple[str, ...]] = {}
    pushes: Pushes | None = None
    link: Link
    if isinstance(target, str) and is_websocket(target):
        address = "http" + target[2:]
        HttpClient(address)  # raises if it is not an address
        pushes = Pushes()
        link = LineLink(
            lambda: WebSocketPipe(http(address, is_websocket=True)), shared.max_bytes, pushes.take
        )
    elif isinstance(target, str) and _is_socket(target):
        pushes = Pushes()
        link = LineLink(_socket(target, shared), shared.max_bytes, pushes.take)
    elif isinstance(target, str):
        link = HttpLink(http(target))
    elif isinstance(target, Sequence):
        pushes = Pushes()
        link = LineLink(partial(child, target), shared.max_bytes, pushes.take)
    else:
        handle = target.handle
        if shared.caller:
            handle = partial(handle, caller=shared.caller)
        link = MemoryLink(handle, target._enter, target._leave)
        kinds = {method.name: method.kind.value for method in target.registry}
        key_paths = {
            method.name: method.key_place.path
            for method in target.registry
            if method.key_place is not None
        }
        largest = target.limits.batch
        announced = target._announced()
    return Client(shared.wrap(link), JsonRpc(kinds, largest, announced, key_paths), shared, pushes)


def is_websocket(target: str) -> bool:
    """Return whether an address is that of a WebSocket."""
    return target.lower().startswith(("ws://", "wss://"))

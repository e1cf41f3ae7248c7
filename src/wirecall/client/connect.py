"""`connect`: a client for a server, wherever it is.

| Target | Way | Protocol, unless told by `protocol=` |
| --- | --- | --- |
| `"http://…"`, `"https://…"` | HTTP | MCP if the path ends in `/mcp`, else JSON-RPC |
| `["python", "server.py"]` | a child process on stdio | JSON-RPC |
| an `App` | memory | JSON-RPC |
"""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload
from urllib.parse import urlsplit

from wirecall.app import App
from wirecall.client.client import Client
from wirecall.client.links import HttpLink, LineLink, Link, MemoryLink
from wirecall.client.options import MAX_BYTES, TIMEOUT, Options
from wirecall.client.retries import Clock, RealClock, Retry
from wirecall.client.sync import SyncClient
from wirecall.errors import UsageError
from wirecall.transports.child import Child, Stderr
from wirecall.transports.http_client import HttpClient

if TYPE_CHECKING:
    from wirecall.mcp.client.client import McpClient

Target: TypeAlias = "str | Sequence[str] | App"
Protocol: TypeAlias = Literal["jsonrpc", "mcp"]


@overload
def connect(target: Target, *, protocol: Literal["mcp"], **options: Any) -> "McpClient": ...
@overload
def connect(target: Target, *, protocol: Literal["jsonrpc"], **options: Any) -> Client: ...
@overload
def connect(target: Target, *, protocol: None = None, **options: Any) -> Any: ...
def connect(
    target: Target,
    *,
    protocol: Protocol | None = None,
    timeout: float = TIMEOUT,
    retry: Retry | None = None,
    headers: Mapping[str, str] | None = None,
    coalesce: float | None = None,
    discover: bool = True,
    max_bytes: int = MAX_BYTES,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stderr: Stderr = "pass",
    revision: str | None = None,
    trust: Any = False,
    confirm: Any = None,
    clock: Clock | None = None,
    chance: Callable[[], float] = random.random,
    wrap: Callable[[Link], Link] | None = None,
    **more: Any,
) -> Any:
    """A client, to be opened by `async with`.

    `timeout` is the time of a call, all its attempts included; `retry` says how calls that may be repeated are repeated.
    `headers` go with every HTTP request; `env` (added to ours), `cwd` and `stderr` ("pass" on, or only "keep" for errors)
    are a child's. `coalesce` merges calls of so many seconds into one array. `discover=False` does not ask the server which
    of its methods are commands. `max_bytes` is the largest answer that is read. `revision`, `trust`, `confirm` and whatever
    `more` there is are MCP's. `clock`, `chance` and `wrap` are for tests: see `wirecall.testing`.
    """
    if not isinstance(target, (str, Sequence, App)):
        raise UsageError(
            f"connect({target!r}): there is nothing to connect to.",
            fix='use a URL, a command line as a list ("python", "server.py"), or an App',
        )
    if timeout <= 0:
        raise UsageError(f"timeout={timeout!r} has passed already.", fix="use a number above 0")
    options = Options(
        timeout=timeout,
        retry=retry or Retry(),
        headers=headers or {},
        coalesce=coalesce,
        discover=discover,
        max_bytes=max_bytes,
        revision=revision,
        trust=trust,
        confirm=confirm,
        clock=clock or RealClock(),
        chance=chance,
        wrap=wrap or (lambda link: link),
    )
    child: dict[str, Any] = {"env": env, "cwd": cwd, "stderr": stderr}
    if (protocol or _protocol_of(target)) == "mcp":
        from wirecall.mcp.client.client import connect_mcp

        return connect_mcp(target, options, **child, **more)
    if revision is not None or confirm is not None or trust or more:
        names = [*more, *(name for name in ("revision", "trust", "confirm") if getattr(options, name))]
        raise UsageError(f"{', '.join(names)}: not for JSON-RPC.", "only MCP has it", 'use protocol="mcp", or drop it')
    return _plain(target, options, child)


def connect_sync(target: Target, **options: Any) -> Any:
    """The same client for scripts: `with connect_sync(...) as client`, or without `with`; safe from any thread."""
    return SyncClient(partial(connect, target, **options))


def _protocol_of(target: Target) -> Protocol:
    if isinstance(target, str) and urlsplit(target).path.rstrip("/").endswith("/mcp"):
        return "mcp"
    return "jsonrpc"


def _plain(target: Target, options: Options, child: dict[str, Any]) -> Client:
    if isinstance(target, App):
        kinds = {method.name: method.kind.value for method in target.registry}
        return Client(options.wrap(MemoryLink(target.handle)), options, kinds)
    if isinstance(target, str):
        http = HttpClient(target, headers=options.headers, max_bytes=options.max_bytes)
        return Client(options.wrap(HttpLink(http)), options)
    begin = partial(Child, target, max_bytes=options.max_bytes, **child)
    begin()  # a command line that is none is told here
    return Client(options.wrap(LineLink(begin)), options)

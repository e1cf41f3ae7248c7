"""JSON-RPC 2.0 and MCP for Python: many calls in one message, every command takes effect once."""

from typing import TYPE_CHECKING, Any

from wirecall import jsonrpc
from wirecall.app import App
from wirecall.errors import (
    CallFailed,
    DomainError,
    ProtocolError,
    RpcError,
    ToolError,
    Unauthorized,
    UsageError,
    WirecallError,
)
from wirecall.limits import Limits
from wirecall.protocol.params import Header
from wirecall.protocol.secrets import Secret
from wirecall.routing import Router
from wirecall.server.context import Context
from wirecall.server.method import CannotTell, Done, Kind, NotDone, ToolAnnotations
from wirecall.version import __version__ as __version__

if TYPE_CHECKING:
    from wirecall.client.connect import connect, connect_sync
    from wirecall.client.delivery import Retry
    from wirecall.mcp.server.batch_tool import BatchTool

__all__ = [
    "App",
    "BatchTool",
    "CallFailed",
    "CannotTell",
    "Context",
    "DomainError",
    "Done",
    "Header",
    "Kind",
    "Limits",
    "NotDone",
    "ProtocolError",
    "Retry",
    "Router",
    "RpcError",
    "Secret",
    "ToolAnnotations",
    "ToolError",
    "Unauthorized",
    "UsageError",
    "WirecallError",
    "connect",
    "connect_sync",
    "jsonrpc",
]


def __getattr__(name: str) -> Any:
    """Import the client on first use: it needs the event loop."""
    if name in ("connect", "connect_sync"):
        from wirecall.client import connect as client

        return getattr(client, name)
    if name == "Retry":
        from wirecall.client.delivery import Retry

        return Retry
    if name == "BatchTool":
        from wirecall.mcp.server.batch_tool import BatchTool

        return BatchTool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

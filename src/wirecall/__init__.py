"""JSON-RPC 2.0 and MCP for Python: many calls in one message, every command takes effect once."""

from wirecall import jsonrpc
from wirecall.app import App
from wirecall.errors import DomainError, RpcError, ToolError, UsageError, WirecallError
from wirecall.methods import CannotTell, Context, Done, Kind, NotDone, ToolAnnotations
from wirecall.policy import Limits

__version__ = "0.1.0"

__all__ = [
    "App",
    "CannotTell",
    "Context",
    "DomainError",
    "Done",
    "Kind",
    "Limits",
    "NotDone",
    "RpcError",
    "ToolAnnotations",
    "ToolError",
    "UsageError",
    "WirecallError",
    "jsonrpc",
]

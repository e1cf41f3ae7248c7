"""The gateway: MCP clients in front of MCP servers that know nothing about retries."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wirecall.gateway.gateway import Gateway as Gateway
    from wirecall.gateway.settings import GatewaySettings as GatewaySettings
    from wirecall.gateway.settings import ToolSettings as ToolSettings
    from wirecall.gateway.settings import UpstreamSettings as UpstreamSettings

__all__ = ["Gateway", "GatewaySettings", "ToolSettings", "UpstreamSettings"]


def __getattr__(name: str) -> Any:
    """Import a class on first use: `wirecall wrap` must answer soon, and needs few of them."""
    if name == "Gateway":
        from wirecall.gateway.gateway import Gateway

        return Gateway
    if name in __all__:
        from wirecall.gateway import settings

        return getattr(settings, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

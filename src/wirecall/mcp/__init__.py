"""MCP: the kinds of content that a tool, a prompt or a resource may return."""

from wirecall.mcp.types import (
    Audio,
    Elicited,
    Embedded,
    Icon,
    Image,
    Message,
    ResourceLink,
    Root,
    Sampled,
    Text,
    ToolResult,
)

__all__ = [
    "Audio",
    "Elicited",
    "Embedded",
    "Icon",
    "Image",
    "Message",
    "ResourceLink",
    "Root",
    "Sampled",
    "Text",
    "ToolResult",
]

"""The gateway in front of other MCP servers."""

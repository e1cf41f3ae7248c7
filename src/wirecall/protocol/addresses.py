"""What the path of an address says about the server there."""

from urllib.parse import urlsplit


def is_of_mcp(url: str) -> bool:
    """Return whether the path of an address names MCP.

    It ends in `/mcp`, or in `/mcp/NAME`, which is one server of a gateway.

    >>> is_of_mcp("http://127.0.0.1:8430/mcp/github"), is_of_mcp("http://127.0.0.1:8420/rpc")
    (True, False)
    """
    segments = urlsplit(url).path.rstrip("/").split("/")
    return "mcp" in segments[-2:]

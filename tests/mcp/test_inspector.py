"""The command line of MCP Inspector reads the tools of `examples/everything.py` and calls the batch
tool. Its package is large, so these tests run at full size only.
"""

import json
import subprocess
from typing import Any

import pytest

from tests.mcp.everything import Everything
from tests.mcp.node import installed, node
from tests.size import IS_FULL

pytestmark = pytest.mark.skipif(not IS_FULL, reason="at full size: TEST_SIZE=full")

PACKAGE = "@modelcontextprotocol/inspector@2.12.0"
LAUNCHER = "@modelcontextprotocol/inspector/clients/launcher/build/index.js"
PATIENCE = 120.0  # seconds for one call of its command line
# The second call needs the result of the first.
CALLS = [
    {"id": "here", "tool": "structured_output", "arguments": {"place": "Paris"}},
    {"tool": "structured_output", "arguments": {"place": {"$ref": "here#/signs/0"}}},
]


def inspect(server: Everything, era: str, *words: str) -> Any:
    """Return what the command line prints; it must end with 0."""
    launcher = installed(PACKAGE) / LAUNCHER
    run = subprocess.run(
        [node(), launcher, "--cli", server.url, "--protocol-era", era, *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("era", ["legacy", "modern"])
def test_inspector_calls_the_batch_tool(era: str) -> None:
    """A13: dependent calls in one request, at the revisions of both eras."""
    with Everything() as server:
        words = ["--method", "tools/call", "--tool-name", "batch"]
        result = inspect(server, era, *words, "--tool-arg", f"calls={json.dumps(CALLS)}")
    first, second = result["structuredContent"]["results"]
    assert first["result"]["place"] == "Paris"
    assert second["result"]["place"] == first["result"]["signs"][0] == "dry"


def test_inspector_finds_no_error_in_the_schemas_of_tools() -> None:
    """With --strict it ends with 6 if a schema has an error."""
    with Everything() as server:
        listed = inspect(server, "auto", "--method", "tools/list", "--strict")
    assert "batch" in [tool["name"] for tool in listed["tools"]]

"""The batch tool of an app in a file: `--batch-tool`, `[server] batch_tool` and its variable."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.mcp.asgi import enveloped

APP = """
from wirecall import App

app = App("shop")


@app.query
def price(sku: str) -> int:
    return len(sku)


@app.command
def charge(order: str) -> None: ...
"""


def serve(folder: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Serve the app on stdio for one request of its tools."""
    (folder / "app.py").write_text(APP)
    return subprocess.run(
        [sys.executable, "-m", "wirecall", "serve", "app.py", "--stdio", *flags],
        input=json.dumps(enveloped("tools/list")) + "\n",
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
        env={**os.environ, **variables},
        check=False,
    )


def called(served: subprocess.CompletedProcess[str]) -> Any:
    """Return the tools that the batch tool calls; None without a batch tool."""
    tools = json.loads(served.stdout)["result"]["tools"]
    found = [tool for tool in tools if tool["name"] == "batch"]
    if not found:
        return None
    calls = found[0]["inputSchema"]["properties"]["calls"]
    return calls["items"]["properties"]["tool"]["enum"]


def test_batch_tool_is_a_flag_a_setting_and_a_variable(tmp_path: Path) -> None:
    assert called(serve(tmp_path)) is None
    assert called(serve(tmp_path, "--batch-tool", "all")) == ["price", "charge"]
    assert called(serve(tmp_path, WIRECALL_SERVER_BATCH_TOOL="all")) == ["price", "charge"]
    (tmp_path / "wirecall.toml").write_text('[server]\nbatch_tool = "queries"\n')
    assert called(serve(tmp_path)) == ["price"]
    assert called(serve(tmp_path, "--batch-tool", "all")) == ["price", "charge"]


@pytest.mark.parametrize("place", ["flag", "file"])
def test_wrong_batch_tool_names_the_choices(tmp_path: Path, place: str) -> None:
    if place == "flag":
        served = serve(tmp_path, "--batch-tool", "some")
    else:
        (tmp_path / "wirecall.toml").write_text('[server]\nbatch_tool = "some"\n')
        served = serve(tmp_path)
    assert served.returncode != 0
    assert "queries" in served.stderr
    assert "all" in served.stderr
    assert "Traceback" not in served.stderr


@pytest.mark.parametrize("transport", [["--stdio"], ["--http", "127.0.0.1:0"]])
def test_batch_tool_with_a_taken_name_does_not_start(tmp_path: Path, transport: list[str]) -> None:
    """A collision is an error at start, which names both places."""
    (tmp_path / "taken.py").write_text(APP.replace("def price", "def batch"))
    served = subprocess.run(
        [sys.executable, "-m", "wirecall", "serve", "taken.py", "--batch-tool", "all", *transport],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )
    assert served.returncode != 0
    assert "batch_tool" in served.stderr
    assert "taken.py:7" in served.stderr
    assert "Traceback" not in served.stderr

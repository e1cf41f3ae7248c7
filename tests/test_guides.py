"""The guides for programs of other MCP libraries: both servers of a page really run, and answer one
client alike.

The first `python` block of such a page is the server in the other library, the second is the same
server in wirecall. Each runs as a child process. (`test_docs.py` runs the guides for JSON-RPC
libraries: their pages compare the answers themselves.)
"""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from wirecall import RpcError, connect

DOCS = Path(__file__).parents[1] / "docs"
PATIENCE = 120.0  # seconds until a server of another library has started on a busy machine

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("price", {"sku": "tea"}),
    ("price", {"sku": "milk"}),
    ("order", {"sku": "tea", "count": 2}),
    ("order", {"sku": "tea", "count": 1}),
]


async def story(program: Path, revision: str) -> dict[str, Any]:
    """Return what a client sees of a server, as far as the two libraries mean the same."""
    async with connect(
        [sys.executable, str(program)], protocol="mcp", revision=revision, timeout=PATIENCE
    ) as client:
        heard: list[Any] = []
        calls = [
            await client.call_tool(
                name, arguments, check=False, progress=lambda *said: heard.append(said)
            )
            for name, arguments in CALLS
        ]
        with pytest.raises(RpcError) as missing:
            await client.read_resource("shop://nowhere")
        (article,) = await client.read_resource("shop://articles/tea")
        return {
            "server": (
                client.revision,
                client.server["name"],
                client.server["version"],
                client.instructions,
            ),
            "tools": [
                (
                    tool.name,
                    tool.description,
                    tool.read_only,
                    tool.destructive,
                    described(tool.input_schema),
                )
                for tool in await client.list_tools()
            ],
            "templates": [
                (each.uri_template, each.name, each.mime_type)
                for each in await client.list_resource_templates()
            ],
            "prompts": [
                (each.name, each.description, each.arguments)
                for each in await client.list_prompts()
            ],
            "calls": [
                (called.is_error, unwrapped(called.structured), own_text(called.text))
                for called in calls
            ],
            "progress": heard,
            "article": (article.uri, article.mime_type, re.sub(r"\s", "", article.text or "")),
            "missing": missing.value.data,
            "reminder": (await client.get_prompt("reminder", {"order": "7"})).messages,
        }


def described(schema: Any) -> Any:
    """Return names, types and what is required: the libraries differ in titles and in what they say
    of further arguments.
    """
    return {name: each["type"] for name, each in schema["properties"].items()}, sorted(
        schema["required"]
    )


def unwrapped(structured: Any) -> Any:
    """Return the value of a tool: other libraries wrap one that is not an object at 2026-07-28 as
    well.
    """
    return (
        structured["result"]
        if isinstance(structured, dict) and set(structured) == {"result"}
        else structured
    )


def own_text(text: str) -> str:
    """Return the text of a tool: the official SDK puts its own before an error, and breaks JSON
    into lines.
    """
    return re.sub(r"^Error executing tool \w+: |\s(?=[\s\"}])|(?<=:)\s", "", text)


@pytest.mark.parametrize("revision", ["2025-06-18", "2026-07-28"])
@pytest.mark.parametrize("page", ["from-fastmcp.md", "from-official-sdk.md"])
async def test_guide_servers_answer_alike(page: str, revision: str, tmp_path: Path) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL
    )
    stories = []
    for name, source in zip(("theirs", "ours"), blocks[:2], strict=True):
        program = tmp_path / f"{name}.py"
        program.write_text(source)
        stories.append(await story(program, revision))
    theirs, ours = stories
    assert "wirecall" not in blocks[0] and "from wirecall import" in blocks[1]
    assert [structured for _, structured, _ in ours["calls"][2:]] == [
        {"cents": 900, "left": 1},
        {"cents": 450, "left": 0},
    ]
    assert ours == theirs

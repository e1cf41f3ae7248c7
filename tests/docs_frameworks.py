"""Generates the pages in docs/frameworks/ from the programs that `make frameworks` runs.

`python -m tests.docs_frameworks` writes them, and a test compares them: the code of a page is the
program itself, and its versions are those that were tried.
"""

from pathlib import Path
from typing import NamedTuple

from tests.frameworks import shopper
from tests.frameworks.__main__ import HERE, NODE, PATIENCE, PYTHON

FOLDER = Path(__file__).parents[1] / "docs" / "frameworks"


class Framework(NamedTuple):
    """What a page says about a framework besides its program."""

    name: str
    file: str
    title: str
    # How its client behaves.
    about: str
    # The part that sends a call again if its answer was lost.
    repeats: str
    # The lines that connect it to a server.
    connect: str


FRAMEWORKS = [
    Framework(
        "langchain",
        "langchain",
        "LangChain",
        "Its MCP adapter opens a session for each tool call.",
        "the user: the agent ends with an exception, and is started again",
        "tools = await MultiServerMCPClient(\n"
        '    {"shop": {"transport": "streamable_http", "url": "http://127.0.0.1:8420/mcp"}}\n'
        ").get_tools()",
    ),
    Framework(
        "llama_index",
        "llama-index",
        "LlamaIndex",
        "Its MCP client opens a session for each tool call.",
        "the model: it sees the text of the exception",
        'tools = await McpToolSpec(BasicMCPClient("http://127.0.0.1:8420/mcp"))'
        ".to_tool_list_async()",
    ),
    Framework(
        "pydantic_ai",
        "pydantic-ai",
        "Pydantic AI",
        "It has one session for a run, and the run ends with the session.",
        "the user: the agent ends with an exception, and is started again",
        'agent = Agent(model, toolsets=[MCPToolset("http://127.0.0.1:8420/mcp", max_retries=3)])',
    ),
    Framework(
        "openai_agents",
        "openai-agents",
        "OpenAI Agents SDK",
        "Its own retries of tool calls are on (`max_retry_attempts`). With `cache_tools_list=True` it "
        "does not ask for the tools again on the session that was cut.",
        "the SDK itself, in a new session",
        "server = MCPServerStreamableHttp(\n"
        '    params={"url": "http://127.0.0.1:8420/mcp"},\n'
        "    cache_tools_list=True,\n    max_retry_attempts=3,\n)",
    ),
    Framework(
        "google_adk",
        "google-adk",
        "Google ADK",
        "Its toolset sends a call again once if its session has ended.",
        "the model: it sees the error after the toolset has tried once more",
        "tools = McpToolset(\n"
        "    connection_params=StreamableHTTPConnectionParams("
        'url="http://127.0.0.1:8420/mcp")\n)',
    ),
    Framework(
        "ai_sdk",
        "ai-sdk",
        "AI SDK",
        "Vercel's SDK gives a failed tool call back to the model.",
        "the model: it sees an error of the tool",
        "const client = await createMCPClient({\n"
        "  transport: { type: 'http', url: 'http://127.0.0.1:8420/mcp' },\n});\n"
        "const tools = await client.tools();",
    ),
    Framework(
        "mastra",
        "mastra",
        "Mastra",
        "Its MCP client declares elicitation, and opens a new session when the old one has failed.",
        "its client, in a new session",
        "const mcp = new MCPClient({\n"
        "  servers: { shop: { url: new URL('http://127.0.0.1:8420/mcp') } },\n});\n"
        "const tools = await mcp.listTools();",
    ),
]


def packages(framework: Framework) -> list[str]:
    return {**PYTHON, **NODE}[framework.name]


def page(framework: Framework) -> str:
    """Return the page of a framework."""
    is_python = framework.name in PYTHON
    program = HERE / f"{framework.name}_agent.{'py' if is_python else 'mjs'}"
    language = "py" if is_python else "js"
    versions = ", ".join(f"`{each}`" for each in packages(framework))
    return f"""# {framework.title}

<!-- made by tests/docs_frameworks.py -->

{framework.about} Tried with {versions}.

```{language}
{framework.connect}
```

**When an answer is lost**, who repeats the call: {framework.repeats}. The framework sends no
idempotency key. The server recognises the call by the answer that it could not deliver,
and replays it: the order is charged once. A second purchase with the same arguments is a new one,
because the answer to the one before was delivered. [The rules](../commands.md) are
the same for every client.

## The program

`make frameworks ONLY={framework.name}` runs this program against `wirecall serve`, and cuts the
connection of the first charge after its effect and before its answer. The framework's own fake
model
decides what a model would decide (`tests/frameworks/{
        "shopper.py" if is_python else "shopper.mjs"
    }`).

```{language}
{program.read_text().strip()}
```
"""


def index() -> str:
    """Return the page about all of them."""
    lines = [
        "| Framework | Tried | Who repeats a call whose answer was lost |",
        "| --- | --- | --- |",
        *(
            f"| [{each.title}]({each.file}.md) | {', '.join(packages(each)[:2])} | {each.repeats} |"
            for each in FRAMEWORKS
        ),
    ]
    table = "\n".join(lines)
    return f"""# Agent frameworks

<!-- made by tests/docs_frameworks.py -->

Each of these frameworks was tried with one task: ask for a price, charge an order, and lose the
answer of the charge. None of them sends an idempotency key, and each of them has a way to send
the
call again: a retry in its client, a model that tries again, or a user who starts the agent again.
The order was charged once in all of them.

{table}

`make frameworks` installs each in an environment, and runs the programs that the pages show. A
framework waits {shopper.PATIENCE:g} seconds for one answer there, and the whole purchase may take
{PATIENCE:g}.

## What helps every agent

* `wirecall serve shop.py --single-user` if all callers are one user, or `auth=` if they are not:
  a call without a key is recognised only if its caller is known ([commands.md](../commands.md)).
* `App(arguments="lenient")` takes arguments as models send them: `"5"` for an int.
* `App(batch_tool="queries")` gives the model one tool that calls others: many calls in one round
  trip ([batches.md](../batches.md#the-batch-tool)).
* `raise ToolError("...")` answers in words that the model reads.
"""


def pages() -> dict[str, str]:
    """Return all pages, by file name."""
    return {"index": index(), **{each.file: page(each) for each in FRAMEWORKS}}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / f"{name}.md").write_text(text)

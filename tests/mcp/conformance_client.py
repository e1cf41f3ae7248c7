"""The client that the official conformance suite tests: `python -m tests.mcp.conformance client`
runs it.

The suite starts one mock server per scenario and this program with its address. The environment has
the scenario's name, the revision and other settings. The program does what the scenario is about,
with the public API, and exits with code 0; the mock server judges it.
"""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from wirecall.auth import Browser, ClientCredentials, IdJag, MemoryStore, Workload
from wirecall.auth.grants import TokenWay
from wirecall.client.connect import connect
from wirecall.mcp.client.client import McpClient
from wirecall.transports.http_client import HttpClient

Scenario = Callable[[McpClient], Awaitable[None]]

PATIENCE = 20.0  # seconds for the whole run; the suite allows 30


async def initialize(client: McpClient) -> None:
    await client.list_tools()


async def tools_call(client: McpClient) -> None:
    await client.list_tools()
    await client.call_tool("add_numbers", {"a": 5, "b": 3})


async def elicitation_defaults(client: McpClient) -> None:
    await client.list_tools()
    await client.call_tool("test_client_elicitation_defaults")


async def sse_retry(client: McpClient) -> None:
    await client.list_tools()
    await client.call_tool("test_reconnection")


async def request_metadata(client: McpClient) -> None:
    await client.list_tools()


async def request_state(client: McpClient) -> None:
    tools = {tool.name for tool in await client.list_tools()}
    await asyncio.gather(
        client.call_tool("test_mrtr_echo_state"), client.call_tool("test_mrtr_unrelated")
    )
    for name in sorted(tools - {"test_mrtr_echo_state", "test_mrtr_unrelated"}):
        await client.call_tool(name)


async def standard_headers(client: McpClient) -> None:
    for tool in await client.list_tools():
        await client.call_tool(tool.name, check=False)
    for resource in await client.list_resources():
        await client.read_resource(resource.uri)
    for prompt in await client.list_prompts():
        await client.get_prompt(prompt.name)


async def custom_headers(client: McpClient) -> None:
    await client.list_tools()
    for call in json.loads(os.environ["MCP_CONFORMANCE_CONTEXT"])["toolCalls"]:
        await client.call_tool(call["name"], call["arguments"])


async def invalid_tool_headers(client: McpClient) -> None:
    for tool in await client.list_tools():
        await client.call_tool(tool.name, {"region": "us-west1", "query": "SELECT 1"})


async def no_dereferencing(client: McpClient) -> None:
    await client.list_tools()


async def preservation(client: McpClient) -> None:
    tools = {tool.name: tool for tool in await client.list_tools()}
    await client.call_tool(
        "json_schema_echo", {"schema": tools["json_schema_2020_12_tool"].input_schema}
    )


SCENARIOS: dict[str, Scenario] = {
    "initialize": initialize,
    "tools_call": tools_call,
    "elicitation-sep1034-client-defaults": elicitation_defaults,
    "sse-retry": sse_retry,
    "request-metadata": request_metadata,
    "sep-2322-client-request-state": request_state,
    "http-standard-headers": standard_headers,
    "http-custom-headers": custom_headers,
    "http-invalid-tool-headers": invalid_tool_headers,
    "json-schema-ref-no-deref": no_dereferencing,
    "json-schema-2020-12-preservation": preservation,
}


def accept(_form: Any) -> dict[str, Any]:
    """A person who presses "accept" and fills in nothing: the client supplies the defaults."""
    return {}


# --- authorization --------------------------------------------------------------------------------

# The client id that the suite expects.
METADATA_URL = "https://conformance-test.local/client-metadata.json"


async def visit(url: str) -> str | None:
    """A browser without a person: the mock server sends it back at once, and the address is all
    that counts.
    """
    page = HttpClient(url)
    await page.open()
    try:
        async with page.request("GET") as answer:
            return answer.headers["location"]
    finally:
        await page.aclose()


async def issuer_of(url: str) -> str:
    """The issuer of the scenario.

    Programs have it in their configuration, but the suite does not pass it.
    """
    parts = urlsplit(url)
    page = HttpClient(
        f"{parts.scheme}://{parts.netloc}/.well-known/oauth-protected-resource{parts.path}"
    )
    await page.open()
    try:
        async with page.request("GET") as answer:
            issuer: str = json.loads(await answer.read())["authorization_servers"][0]
            return issuer
    finally:
        await page.aclose()


async def way(scenario: str, url: str) -> TokenWay:
    """How the client gets a token in a scenario of authorization."""
    context = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}"))
    if scenario == "client-credentials-jwt":
        key = context["private_key_pem"]
        algorithm = context["signing_algorithm"]
        return ClientCredentials(
            context["client_id"], key=key, algorithm=algorithm, issuer=await issuer_of(url)
        )
    if scenario == "client-credentials-basic":
        return ClientCredentials(
            context["client_id"], secret=context["client_secret"], issuer=await issuer_of(url)
        )
    if scenario == "enterprise-managed-authorization":
        return IdJag(
            client_id=context["client_id"],
            client_secret=context["client_secret"],
            issuer=await issuer_of(url),
            id_token=context["idp_id_token"],
            idp=context["idp_token_endpoint"],
            idp_client_id=context["idp_client_id"],
        )
    if scenario == "wif-jwt-bearer":
        return Workload(context["valid_jwt"], context["client_id"], issuer=await issuer_of(url))
    known: dict[str, Any] = {}
    if scenario == "pre-registration":
        known = {name: context[name] for name in ("client_id", "client_secret", "issuer")}
    dpop = scenario.startswith("dpop")
    return Browser(visit=visit, store=MemoryStore(), metadata_url=METADATA_URL, dpop=dpop, **known)


async def authorized(client: McpClient) -> None:
    await client.list_tools()
    await client.call_tool("test-tool")


async def main(url: str) -> None:
    name = os.environ["MCP_CONFORMANCE_SCENARIO"]
    revision = os.environ["MCP_CONFORMANCE_PROTOCOL_VERSION"]
    options: dict[str, Any] = {
        "elicit": accept,
        "sample": lambda _: "42",
        "roots": ["file:///project"],
    }
    scenario = SCENARIOS.get(name, authorized)
    if name.startswith("auth/"):
        options["auth"] = await way(name.removeprefix("auth/"), url)
    async with (
        asyncio.timeout(PATIENCE),
        connect(url, protocol="mcp", revision=revision, **options) as client,
    ):
        await scenario(client)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[-1]))

"""`Header("Region")` marks an argument of a tool that HTTP clients repeat in a header (SEP-2243,
2026-07-28).
"""

import enum
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta, Struct

from tests import rsgi
from tests.calls import call as plain
from tests.calls import make_app, result
from tests.client.peers import served
from tests.mcp.asgi import REVISIONS, over_http, speak
from wirecall import App, Header, UsageError, connect
from wirecall.mcp.client.client import McpClient
from wirecall.mcp.headers import fault_of


@pytest.fixture(autouse=True, params=rsgi.INTERFACES)
def interface(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here runs over both interfaces."""
    monkeypatch.setattr(rsgi, "interface", request.param)


def store() -> App:
    app = make_app()

    @app.query
    def stock(
        region: Annotated[str, Meta(description="where to look", max_length=9), Header("Region")],
        shelf: Annotated[int, Header("Shelf")] = 0,
        *,
        is_fresh: Annotated[bool, Header("Fresh")] = False,
        kind: Annotated[Literal["tea", "milk"], Header("X-Kind")] = "tea",
        size: Annotated[Literal[1, 2], Header("size")] = 1,
        sku: str = "any",
    ) -> str:
        return f"{region} {shelf} {is_fresh} {kind} {size} {sku}"

    return app


MARKED = {
    "region": {
        "type": "string",
        "description": "where to look",
        "maxLength": 9,
        "x-mcp-header": "Region",
    },
    "shelf": {"type": "integer", "default": 0, "x-mcp-header": "Shelf"},
    "is_fresh": {"type": "boolean", "default": False, "x-mcp-header": "Fresh"},
    "kind": {"type": "string", "enum": ["tea", "milk"], "default": "tea", "x-mcp-header": "X-Kind"},
    "size": {"type": "integer", "enum": [1, 2], "default": 1, "x-mcp-header": "size"},
    "sku": {"type": "string", "default": "any"},
}


@pytest.mark.parametrize("revision", REVISIONS)
async def test_schema_of_a_tool_names_its_headers(revision: str) -> None:
    async with speak("stdio", store(), revision) as client:
        (tool,) = (await client.result("tools/list"))["tools"]
    assert tool["inputSchema"]["properties"] == MARKED
    assert fault_of(tool["inputSchema"]) is None  # by the rules that clients check


async def test_our_client_repeats_the_arguments_and_our_server_checks_them() -> None:
    async with served(store()) as url, connect(f"{url}/mcp", protocol="mcp") as client:
        assert isinstance(client, McpClient)
        await client.list_tools()
        called = await client.call_tool(
            "stock", {"region": "üb", "shelf": 7, "is_fresh": True, "kind": "milk"}
        )
        assert called.text == "üb 7 True milk 1 any"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"mcp-param-region": "eu"}, 200),
        ({"mcp-param-region": "=?base64?ZXU=?="}, 200),
        ({"mcp-param-region": "us"}, 400),
        ({}, 400),
        ({"mcp-param-region": "eu", "mcp-param-shelf": "1"}, 400),
    ],
)
async def test_headers_that_differ_from_the_body_are_refused(
    headers: dict[str, str], status: int
) -> None:
    async with over_http(store()) as client:
        answer = await client.call(
            "tools/call", {"name": "stock", "arguments": {"region": "eu"}}, headers=headers
        )
        assert client.last is not None
        assert (client.last.status, answer.get("error", {}).get("code")) == (
            status,
            None if status == 200 else -32020,
        )


async def test_mcp_endpoint_checks_the_headers_of_a_tool_that_replaced_another() -> None:
    app = store()
    asked = {"name": "stock", "arguments": {"region": "eu"}}
    async with over_http(app) as client:
        await client.result("tools/call", asked, headers={"mcp-param-region": "eu"})

        app.remove("stock")

        @app.query(name="stock")
        def unmarked(region: str) -> str:
            return f"now {region}"

        answer = await client.result("tools/call", asked)
        assert answer["content"][0]["text"] == "now eu"

        app.remove("stock")

        @app.query(name="stock")
        def marked_otherwise(region: Annotated[str, Header("Area")]) -> str:
            return f"then {region}"

        refused = await client.error("tools/call", asked, headers={"mcp-param-region": "eu"})
        assert refused["code"] == -32020
        answer = await client.result("tools/call", asked, headers={"mcp-param-area": "eu"})
        assert answer["content"][0]["text"] == "then eu"


async def test_plain_json_rpc_is_not_affected() -> None:
    assert result(await store().handle(plain("stock", {"region": "eu"}))) == "eu 0 False tea 1 any"


class Place(Struct):
    region: Annotated[str, Header("Region")]


class Region(enum.Enum):
    EU = "eu"


def optional(a: Annotated[str | None, Header("A")] = None) -> None: ...
def number(a: Annotated[float, Header("A")]) -> None: ...
def array(a: Annotated[list[str], Header("A")]) -> None: ...
def untyped(a: Annotated[Any, Header("A")]) -> None: ...
def mixed(a: Annotated[Literal["x", 1], Header("A")]) -> None: ...
def enumerated(a: Annotated[Region, Header("A")]) -> None: ...
def rest(*a: Annotated[str, Header("A")]) -> None: ...
def others(**a: Annotated[str, Header("A")]) -> None: ...
def inside_a_struct(a: Place) -> None: ...
def inside_a_list(a: list[Annotated[str, Header("A")]]) -> None: ...
def inside_a_union(a: Annotated[str, Header("A")] | None = None) -> None: ...
def two_at_once(a: Annotated[str, Header("A"), Header("B")]) -> None: ...
def empty(a: Annotated[str, Header("")]) -> None: ...
def blank(a: Annotated[str, Header("a b")]) -> None: ...
def line(a: Annotated[str, Header("a\n")]) -> None: ...
def colon(a: Annotated[str, Header("a:")]) -> None: ...
def umlaut(a: Annotated[str, Header("ü")]) -> None: ...
def same(a: Annotated[str, Header("Region")], b: Annotated[str, Header("region")]) -> None: ...


WHOLE = "one parameter as a whole"
NAME = "the name of a header"
TYPE = "fits into a header"


@pytest.mark.parametrize(
    ("function", "why"),
    [
        *(
            (function, TYPE)
            for function in (optional, number, array, untyped, mixed, enumerated, rest, others)
        ),
        *(
            (function, WHOLE)
            for function in (inside_a_struct, inside_a_list, inside_a_union, two_at_once)
        ),
        *((function, NAME) for function in (empty, blank, line, colon, umlaut)),
        (same, "another parameter has the same header"),
    ],
)
def test_mark_against_the_rules_is_refused_at_registration(function: Any, why: str) -> None:
    """2026-07-28, streamable-http, "Schema Extension": clients would leave the tool out."""
    with pytest.raises(UsageError, match=rf"(?s)cannot have Header\(.*{why}"):
        make_app().query(function)


def test_mark_beside_a_schema_by_hand_is_refused() -> None:
    def stock(region: Annotated[str, Header("Region")]) -> None: ...

    with pytest.raises(UsageError, match="write x-mcp-header there"):
        make_app().tool(input_schema={"type": "object"})(stock)

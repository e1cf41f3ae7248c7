"""Titles, icons, tags and `_meta` of apps, tools, prompts and resources, at the revisions that have
them.
"""

from pathlib import Path
from typing import Any, cast

import pytest

from tests.calls import call, result
from tests.cli import invoke
from wirecall import App, UsageError, connect
from wirecall.mcp import Icon
from wirecall.mcp.revisions import NAMES

ICONS = [
    Icon("https://example.org/shop.png", "image/png", ["48x48", "any"], "dark"),
    Icon("data:image/svg+xml;base64,PHN2Zy8+"),
]
ON_WIRE = [
    {
        "src": "https://example.org/shop.png",
        "mimeType": "image/png",
        "sizes": ["48x48", "any"],
        "theme": "dark",
    },
    {"src": "data:image/svg+xml;base64,PHN2Zy8+"},
]
LABELS: Any = {"icons": ICONS, "tags": ["money", "daily"], "meta": {"example.org/team": "till"}}
META = {"example.org/team": "till", "io.wirecall/tags": ["daily", "money"]}


def shop() -> App:
    app = App(
        "shop",
        version="1",
        title="The shop",
        website="https://example.org",
        icons=ICONS,
        ledger="memory:",
    )
    app.query(**LABELS)(price)
    app.command(**LABELS)(pay)
    app.tool(**LABELS, title="Look")(look)
    app.prompt(**LABELS)(greeting)
    app.resource("shop://stock", **LABELS)(stock)
    app.resource("shop://{sku}", **LABELS)(item)
    app.query(plain)
    return app


def price() -> int:
    return 5


def pay(cents: int) -> int:
    return cents


def look() -> str:
    return ""


def greeting() -> str:
    return "hello"


def stock() -> str:
    return ""


def item(sku: str) -> str:
    return sku


def plain() -> int:
    return 1


@pytest.mark.parametrize("revision", NAMES)
async def test_labels_are_sent_to_the_revisions_that_have_them(revision: str) -> None:
    """2025-06-18 adds `title` and `_meta`, 2025-11-25 adds `icons` and `websiteUrl` (schema.ts of
    each).
    """
    has_meta = revision >= "2025-06-18"
    has_icons = revision >= "2025-11-25"
    async with connect(shop(), protocol="mcp", revision=revision) as client:
        names = {"tools/list": "tools", "prompts/list": "prompts", "resources/list": "resources"}
        names["resources/templates/list"] = "resourceTemplates"
        for method, member in names.items():
            listed = (await client.call(method))[member]
            labelled = [entry for entry in listed if entry["name"] != "plain"]
            assert len(labelled) == (3 if member == "tools" else 1)
            for entry in labelled:
                assert entry.get("_meta") == (META if has_meta else None)
                assert entry.get("icons") == (ON_WIRE if has_icons else None)
            assert not any(
                word in entry
                for entry in listed
                if entry["name"] == "plain"
                for word in ("_meta", "icons")
            )
        server = client.server
        assert server["name"] == "shop" and server["version"] == "1"
        assert server.get("title") == ("The shop" if has_meta else None)
        assert server.get("websiteUrl") == ("https://example.org" if has_icons else None)
        assert server.get("icons") == (ON_WIRE if has_icons else None)


async def test_result_names_its_server_without_icons() -> None:
    async with connect(shop(), protocol="mcp") as client:
        called = await client.call_tool("price")
    assert called.meta == {"io.modelcontextprotocol/serverInfo": {"name": "shop", "version": "1"}}


async def test_openrpc_has_the_tags() -> None:
    document = result(await shop().handle(call("rpc.discover")))
    tags = {method["name"]: method.get("tags") for method in document["methods"]}
    assert tags == {
        "price": [{"name": "daily"}, {"name": "money"}],
        "pay": tags["price"],
        "plain": None,
    }


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"icons": ICONS[0]}, "icons of price must be a list of Icon, got Icon"),
        (
            {"icons": ["https://x.org/a.png"]},
            "icons of price must be a list of Icon, got str in it",
        ),
        (
            {"icons": [Icon("http://x.org/a.png")]},
            "src must be an https: address or a data:image/ URI",
        ),
        (
            {"icons": [Icon("javascript:alert(1)")]},
            "src must be an https: address or a data:image/ URI",
        ),
        (
            {"icons": [Icon("data:text/html,x")]},
            "src must be an https: address or a data:image/ URI",
        ),
        ({"icons": [Icon("https://x.org/a", "text/html")]}, "mime_type must be a type of images"),
        ({"icons": [Icon("https://x.org/a", sizes="48x48")]}, "sizes must be a list of strings"),
        ({"icons": [Icon("https://x.org/a", sizes=["48"])]}, "sizes must be a list of strings"),
        (
            {"icons": [Icon("https://x.org/a", theme=cast(Any, "blue"))]},
            'theme must be "light" or "dark"',
        ),
        ({"tags": "money"}, "tags of price must be a list of strings, got str"),
        ({"tags": [""]}, "tags of price must be strings that are not empty"),
        ({"tags": [5]}, "tags of price must be strings that are not empty"),
        ({"meta": {5: 1}}, "meta of price must be a dict with strings as its keys"),
        ({"meta": {"a": object()}}, "meta of price cannot be written as JSON"),
        ({"meta": {"io.wirecall/tags": []}}, "the key is reserved"),
        ({"meta": {"io.modelcontextprotocol/x": 1}}, "the key is reserved"),
    ],
)
def test_label_that_a_client_would_refuse_is_an_error_at_registration(
    labels: Any, expected: str
) -> None:
    with pytest.raises(UsageError) as caught:
        App("test").query(**labels)(price)
    assert expected in str(caught.value)
    with pytest.raises(UsageError):
        App("test").prompt(**labels)(greeting)
    with pytest.raises(UsageError):
        App("test").resource("shop://stock", **labels)(stock)


def test_website_is_an_address() -> None:
    with pytest.raises(UsageError, match="website must be an http: or https: address"):
        App("test", website="example.org")


def test_wirecall_list_takes_a_tag(tmp_path: Path) -> None:
    source = """
from wirecall import App
app = App("shop", ledger="memory:")
@app.query(tags=["money"])
def price() -> int:
    return 5
@app.query(meta={"fastmcp": {"tags": ["theirs"]}})
def plain() -> int:
    return 1
@app.prompt(tags=["money", "daily"])
def greeting() -> str:
    return "hello"
"""
    (tmp_path / "shop.py").write_text(source)
    for options, expected in (
        (["--tag", "money"], {"price", "greeting"}),
        (["--tag", "daily"], {"greeting"}),
        (["--tag", "money", "--as", "rpc"], {"price"}),
        (["--tag", "money", "--as", "mcp"], {"price", "greeting"}),
        (["--tag", "mon"], set()),
        (["--tag", "theirs", "--as", "mcp"], {"plain"}),  # as a server of FastMCP sends them
    ):
        told = invoke("list", str(tmp_path / "shop.py"), *options)
        assert told.exit_code == 0, told.output
        assert {
            name for name in ("price", "plain", "greeting") if name in told.output
        } == expected, options

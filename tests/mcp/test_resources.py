"""Resources, their templates, and prompts: what is read, and how both are described."""

import json
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from tests.calls import make_app
from tests.mcp.asgi import (
    EVERY_WAY,
    R1,
    R4,
    R5,
    REVISIONS,
    over_http,
    over_stdio,
    speak,
)
from wirecall import App, UsageError
from wirecall.errors import ResourceNotFound
from wirecall.mcp import Embedded, Image, Message

every_revision = pytest.mark.parametrize("revision", REVISIONS)
every_way = pytest.mark.parametrize(("transport", "revision"), EVERY_WAY)


# --- resources and templates ----------------------------------------------------------------------


def library() -> App:
    app = make_app()

    @app.resource("test://text", mime_type="text/plain", description="A text")
    def text() -> str:
        return "hello"

    @app.resource("test://bytes", mime_type="image/png")
    def data() -> bytes:
        return b"\x00\xff"

    @app.resource("test://several")
    def several() -> list[Embedded]:
        return [
            Embedded(uri="test://several/1", text="1"),
            Embedded(uri="test://several/2", blob=b"2"),
        ]

    @app.resource("test://book/{id}/page/{number}")
    def page(id: str, number: int) -> str:
        return f"{id}|{number + 0}"

    @app.resource("test://file/{+path}")
    async def file(path: str) -> str:
        return path

    @app.resource("test://tree/{path*}/leaf")
    async def leaf(path: str) -> str:
        return path

    @app.resource("test://broken")
    def broken() -> str:
        raise ValueError("secret detail")

    return app


@every_way
async def test_resources_are_read(transport: str, revision: str) -> None:
    async with speak(transport, library(), revision) as client:
        text = (await client.result("resources/read", {"uri": "test://text"}))["contents"]
        assert text == [{"uri": "test://text", "mimeType": "text/plain", "text": "hello"}]
        data = (await client.result("resources/read", {"uri": "test://bytes"}))["contents"]
        assert data == [{"uri": "test://bytes", "mimeType": "image/png", "blob": "AP8="}]
        several = (await client.result("resources/read", {"uri": "test://several"}))["contents"]
        assert [entry["uri"] for entry in several] == ["test://several/1", "test://several/2"]


READ = [
    ("test://book/a/page/7", "a|7"),
    ("test://book/a%20b/page/7", "a b|7"),
    ("test://book/%C3%BC/page/7", "ü|7"),
    ("test://book/ü/page/7", "ü|7"),
    ("test://book/100%25/page/7", "100%|7"),
    ("test://book/a..b/page/7", "a..b|7"),
    ("test://file/a/b/c.txt", "a/b/c.txt"),
    ("test://file/.hidden/a%20b", ".hidden/a b"),
    ("test://tree/a/leaf", "a"),
    ("test://tree/a/b/leaf", "a/b"),
]


@pytest.mark.parametrize("revision", [R1, R4, R5])
@pytest.mark.parametrize(("uri", "said"), READ)
async def test_templates_are_filled_in(revision: str, uri: str, said: str) -> None:
    async with over_stdio(library(), revision) as client:
        contents = (await client.result("resources/read", {"uri": uri}))["contents"]
    assert contents[0]["text"] == said
    assert contents[0]["uri"] == uri


NOWHERE = [
    "test://book//page/7",
    "test://book/a/b/page/7",
    "test://book/a/page/7/",
    "test://book/a/page/7?x",
    "test://texts",
    "test://tree/leaf",
    "x",
    "",
]


@every_revision
@pytest.mark.parametrize("uri", NOWHERE)
async def test_resource_that_does_not_exist_is_an_error(revision: str, uri: str) -> None:
    """Trap 17."""
    async with over_http(library(), revision) as client:
        error = await client.error("resources/read", {"uri": uri})
    assert (error["code"], error["data"]["uri"]) == (-32602 if revision == R5 else -32002, uri)


@every_way
async def test_resource_function_may_report_that_it_does_not_exist(
    transport: str, revision: str
) -> None:
    """The code is the revision's, as if no template matched (server/resources, "Error Handling")."""
    app = make_app()

    @app.resource("test://order/{id}")
    async def order(id: str) -> str:
        raise ResourceNotFound(f"there is no order {id}")

    async with speak(transport, app, revision) as client:
        error = await client.error("resources/read", {"uri": "test://order/7"})
    code = -32602 if revision == R5 else -32002
    assert error == {
        "code": code,
        "message": "there is no order 7",
        "data": {"uri": "test://order/7"},
    }


# Segments as a URI spells them. A handler that builds a path from one of them would leave its
# folder.
NO_SEGMENT = [
    "a%2Fb",
    "a%2fb",
    "..%2F..%2Fetc%2Fpasswd",
    "..",
    "%2e%2E",
    ".",
    "a%00b",
    "a\x00b",
    "..%5Cboot.ini",
    "a\\b",
    "a%0Ab",
    "a%7Fb",
    "%FF",
    "%C0%AF",
]
LEADS_OUT = [
    *(f"test://book/{segment}/page/7" for segment in NO_SEGMENT),
    *(f"test://file/{segment}" for segment in NO_SEGMENT),
    *(f"test://tree/a/{segment}/b/leaf" for segment in NO_SEGMENT),
    *(
        "test://file//etc/passwd",
        "test://file/a//b",
        "test://file/a/",
        "test://file/a/../b",
        "test://file/a?b",
        "test://file/a#b",
    ),
]


async def test_template_value_never_leads_out_of_its_folder() -> None:
    """RFC 3986 decodes segments one by one: no handler may take an encoded slash for a path."""
    async with over_http(library(), R4) as client:
        for uri in LEADS_OUT:
            error = await client.error("resources/read", {"uri": uri})
            assert (error["code"], error["data"]["uri"]) == (-32002, uri)


@every_revision
async def test_template_value_that_does_not_fit_is_an_error(revision: str) -> None:
    async with over_http(library(), revision) as client:
        assert (await client.error("resources/read", {"uri": "test://book/a/page/seven"}))[
            "code"
        ] in (-32602, -32002)


@every_revision
async def test_prompt_argument_that_does_not_fit_is_quoted_as_received(revision: str) -> None:
    app = make_app()

    @app.prompt
    def paint(colour: Literal["red", "blue"]) -> str:
        return colour

    async with over_http(app, revision) as client:
        error = await client.error("prompts/get", {"name": "paint", "arguments": {"colour": "RED"}})
    assert error["message"] == "Invalid params: arguments.colour: invalid enum value 'RED'"


@every_revision
async def test_resource_that_breaks_does_not_reveal_the_reason(revision: str) -> None:
    async with over_http(library(), revision) as client:
        error = await client.error("resources/read", {"uri": "test://broken"})
    assert error["code"] == -32603
    assert "secret" not in json.dumps(error)


@every_revision
async def test_resources_are_described(revision: str) -> None:
    async with over_http(library(), revision) as client:
        first = (await client.result("resources/list"))["resources"][0]
        assert first == {
            "uri": "test://text",
            "name": "text",
            "description": "A text",
            "mimeType": "text/plain",
        }
        templates = (await client.result("resources/templates/list"))["resourceTemplates"]
        assert [template["uriTemplate"] for template in templates] == [
            "test://book/{id}/page/{number}",
            "test://file/{+path}",
            "test://tree/{path*}/leaf",
        ]


def test_template_and_its_function_must_agree() -> None:
    with pytest.raises(UsageError):
        make_app().resource("test://{id}")(lambda: "")
    with pytest.raises(UsageError):
        make_app().resource("test://x")(lambda id: "")


# --- prompts --------------------------------------------------------------------------------------


def prompting() -> App:
    app = make_app()

    @app.prompt(description="Say it")
    def say(what: str, times: int = 1) -> list[Any]:
        return [what * times, Message("assistant", Image(data=b"\xff", mime_type="image/png"))]

    return app


@every_way
async def test_prompts_are_listed_and_filled_in(transport: str, revision: str) -> None:
    async with speak(transport, prompting(), revision) as client:
        listed = (await client.result("prompts/list"))["prompts"][0]
        assert (listed["name"], listed["description"]) == ("say", "Say it")
        assert [(a["name"], a["required"]) for a in listed["arguments"]] == [
            ("what", True),
            ("times", False),
        ]
        got = await client.result(
            "prompts/get", {"name": "say", "arguments": {"what": "ha", "times": "2"}}
        )
        assert got["messages"][0] == {"role": "user", "content": {"type": "text", "text": "haha"}}
        assert got["messages"][1]["content"] == {
            "type": "image",
            "data": "/w==",
            "mimeType": "image/png",
        }


@every_revision
@pytest.mark.parametrize(
    "arguments",
    [{}, {"what": 5}, {"what": "x", "times": "many"}, {"what": "x", "more": "y"}, ["x"]],
)
async def test_prompt_arguments_are_checked(revision: str, arguments: Any) -> None:
    async with over_http(prompting(), revision) as client:
        assert (await client.error("prompts/get", {"name": "say", "arguments": arguments}))[
            "code"
        ] == -32602


@every_revision
@pytest.mark.parametrize("text", ["nan", "inf", "Infinity", "-Infinity"])
async def test_string_that_is_not_a_finite_number_is_refused(revision: str, text: str) -> None:
    """msgspec and pydantic read such a string as a float that JSON cannot hold: the caller's
    mistake.
    """
    app = make_app()

    @app.prompt
    def plain(number: float) -> str:
        return str(number)

    @app.prompt
    def modelled(number: Annotated[float, Field(ge=-1)]) -> str:
        return str(number)

    @app.resource("test://{number}")
    def resource(number: float | None) -> str:
        return str(number)

    async with over_http(app, revision) as client:
        for name in ("plain", "modelled"):
            error = await client.error("prompts/get", {"name": name, "arguments": {"number": text}})
            assert (error["code"], "number: expected a" in error["message"]) == (-32602, True)
        assert (await client.error("resources/read", {"uri": f"test://{text}"}))["code"] == -32602


def test_name_must_be_unique() -> None:
    app = prompting()
    with pytest.raises(UsageError):
        app.prompt(name="say")(lambda: "")
    app.resource("test://x")(lambda: "")
    with pytest.raises(UsageError):
        app.resource("test://x")(lambda: "")

"""Lists, completion, logging, and subscriptions in both forms."""

import asyncio
import json
import threading
from typing import Any

import pytest

from tests.calls import make_app
from tests.mcp.asgi import (
    BASIC,
    EVERY_WAY,
    LEGACY,
    PATIENCE,
    PREFIX,
    R1,
    R4,
    R5,
    REVISIONS,
    TRANSPORTS,
    Exchange,
    HttpClient,
    LineClient,
    enveloped,
    hello,
    over_http,
    over_stdio,
    repeated,
    request,
    speak,
)
from wirecall import App, Context, ToolAnnotations, UsageError

every_revision = pytest.mark.parametrize("revision", REVISIONS)
every_way = pytest.mark.parametrize(("transport", "revision"), EVERY_WAY)
every_transport = pytest.mark.parametrize("transport", TRANSPORTS)
legacy = pytest.mark.parametrize("revision", LEGACY)

READS = ToolAnnotations(readOnlyHint=True)


# --- pages ----------------------------------------------------------------------------------------


def long_lists(count: int) -> App:
    app = make_app()
    for number in range(count):
        app.query(name=f"tool{number}")(lambda: "")
        app.prompt(name=f"prompt{number}")(lambda: "")
        app.resource(f"test://{number}", name=f"resource{number}")(lambda: "")
        app.resource(f"test://{number}/{{id}}", name=f"template{number}")(lambda id: "")
    return app


LISTS = {
    "tools/list": ("tools", "tool"),
    "prompts/list": ("prompts", "prompt"),
    "resources/list": ("resources", "resource"),
    "resources/templates/list": ("resourceTemplates", "template"),
}


async def whole_list(client: HttpClient, method: str, member: str) -> list[str]:
    names: list[str] = []
    params: Any = {}
    while True:
        page = await client.result(method, params)
        names += [entry["name"] for entry in page[member]]
        if "nextCursor" not in page:
            return names
        assert isinstance(page["nextCursor"], str) and page[member]
        params = {"cursor": page["nextCursor"]}


async def test_pages_add_up_to_the_whole_list() -> None:
    """More entries than a page holds: all of them, each once, in the order of their declaration."""
    app = long_lists(450)
    for revision in REVISIONS:
        async with over_http(app, revision) as client:
            for method, (member, word) in LISTS.items():
                assert await whole_list(client, method, member) == [
                    f"{word}{number}" for number in range(450)
                ]


async def test_list_that_fits_has_no_cursor() -> None:
    for count in (1, 200):
        async with over_http(long_lists(count)) as client:
            page = await client.result("tools/list")
            assert len(page["tools"]) == count
            assert "nextCursor" not in page


CURSORS: list[Any] = ["", "0", "200", "mine", "ZnJvbSAyMDA", "ü", "=", 5, {}, "ZnJvbSAtMQ=="]


@every_way
async def test_cursor_that_is_not_ours_is_refused(transport: str, revision: str) -> None:
    """Trap 54: an empty string is a cursor, but not one of ours."""
    async with speak(transport, long_lists(2), revision) as client:
        for cursor in CURSORS:
            assert (await client.error("tools/list", {"cursor": cursor}))["code"] == -32602, cursor


@every_revision
async def test_list_is_the_same_every_time(revision: str) -> None:
    async with over_http(long_lists(30), revision) as client:
        assert await client.result("tools/list") == await client.result("tools/list")


async def test_list_has_a_tool_that_was_added_later() -> None:
    app = long_lists(1)
    async with over_http(app, R4) as client:
        await client.result("tools/list")
        app.query(name="late")(lambda: "x")
        app.changed("tools")
        assert [tool["name"] for tool in (await client.result("tools/list"))["tools"]] == [
            "tool0",
            "late",
        ]
        assert await client.tool("late")


# --- completion -----------------------------------------------------------------------------------


def completing() -> App:
    app = make_app()

    @app.prompt
    def greet(who: str, how: str = "") -> str:
        return who + how

    @app.resource("test://{place}/{id}")
    def item(place: str, id: str) -> str:
        return place + id

    @app.completion("greet", "who")
    def names(value: str) -> list[str]:
        return [name for name in ("ann", "anna", "bob") if name.startswith(value)]

    @app.completion("greet", "how")
    def ways(value: str, known: dict[str, str]) -> list[str]:
        return [f"{value}{known.get('who', '?')}"]

    @app.completion("test://{place}/{id}", "id")
    async def ids(value: str) -> list[str]:
        return [str(number) for number in range(150)]

    return app


def ask(name: str, value: str = "", ref: Any = None, **context: str) -> dict[str, Any]:
    told = {"context": {"arguments": context}} if context else {}
    return {
        "ref": ref or {"type": "ref/prompt", "name": "greet"},
        "argument": {"name": name, "value": value},
        **told,
    }


ITEM = {"type": "ref/resource", "uri": "test://{place}/{id}"}


@every_way
async def test_completion_returns_matching_values(transport: str, revision: str) -> None:
    async with speak(transport, completing(), revision) as client:
        found = (await client.result("completion/complete", ask("who", "an")))["completion"]
        assert found["values"] == ["ann", "anna"]
        many = (await client.result("completion/complete", ask("id", ref=ITEM)))["completion"]
        assert (len(many["values"]), many["total"], many["hasMore"]) == (100, 150, True)
        empty = (await client.result("completion/complete", ask("place", ref=ITEM)))["completion"]
        assert empty["values"] == []


@pytest.mark.parametrize("revision", REVISIONS[2:])
async def test_completion_knows_the_other_arguments(revision: str) -> None:
    async with over_http(completing(), revision) as client:
        found = await client.result("completion/complete", ask("how", "x", who="ann"))
        assert found["completion"]["values"] == ["xann"]
        alone = await client.result("completion/complete", ask("how", "x"))
        assert alone["completion"]["values"] == ["x?"]


BAD_REFS: list[Any] = [
    {"type": "ref/prompt", "name": "nobody"},
    {"type": "ref/resource", "uri": "test://nowhere"},
    {"type": "ref/tool", "name": "greet"},
    {"type": "ref/tool", "uri": "test://{place}/{id}"},
    {"type": "ref/resource", "uri": "greet"},
    {"type": "ref/prompt", "name": "test://{place}/{id}"},
    {"type": "ref/prompt"},
    {"name": "greet"},
    "greet",
]


@pytest.mark.parametrize("revision", [R1, R4, R5])
@pytest.mark.parametrize("ref", BAD_REFS)
async def test_completion_of_an_unknown_name(revision: str, ref: Any) -> None:
    async with over_http(completing(), revision) as client:
        for argument in ("who", "id"):
            assert (await client.error("completion/complete", ask(argument, ref=ref)))[
                "code"
            ] == -32602


# --- logging --------------------------------------------------------------------------------------

LEVELS = ["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"]


def loud() -> App:
    app = make_app()

    @app.tool(annotations=READS)
    async def shout(ctx: Context) -> str:
        for level in LEVELS:
            await ctx.log(level, {"said": level}, logger="test")  # type: ignore[arg-type]
        return ""

    @app.tool(annotations=READS)
    async def wrong(ctx: Context) -> str:
        await ctx.log("loud", "x")  # type: ignore[arg-type]
        return ""

    return app


def said(client: Any) -> list[str]:
    return [params["level"] for params in client.told("notifications/message")]


@every_transport
@legacy
async def test_log_level_is_set_for_the_session(transport: str, revision: str) -> None:
    async with speak(transport, loud(), revision) as client:
        for number, level in enumerate(LEVELS):
            assert await client.result("logging/setLevel", {"level": level}) == {}
            client.heard.clear()
            await client.tool("shout")
            assert said(client) == LEVELS[number:]
            assert client.told("notifications/message")[0] == {
                "level": level,
                "logger": "test",
                "data": {"said": level},
            }


@every_transport
async def test_log_level_is_sent_with_each_request_at_2026_07_28(transport: str) -> None:
    async with speak(transport, loud(), R5) as client:
        for number, level in enumerate(LEVELS):
            client.heard.clear()
            await client.tool("shout", meta={f"{PREFIX}logLevel": level})
            await client.tool("shout")  # without one: MUST NOT emit (trap 42)
            assert said(client) == LEVELS[number:]


async def test_log_messages_that_a_client_does_not_want_go_to_the_server_s_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server sends each of them to one place: to the client, or to its own log."""
    caplog.set_level("DEBUG", "wirecall")
    async with over_http(loud(), R5) as client:
        await client.tool("shout", meta={f"{PREFIX}logLevel": "error"})
        assert said(client) == LEVELS[4:]
        noted = [record for record in caplog.records if "said" in record.getMessage()]
        assert [record.getMessage() for record in noted] == [
            f"tools/call:shout, test: {{'said': '{level}'}}" for level in LEVELS[:4]
        ]
        caplog.clear()
        await client.tool("shout")
        assert len([record for record in caplog.records if "said" in record.getMessage()]) == len(
            LEVELS
        )


async def test_log_level_of_one_session_does_not_affect_another() -> None:
    async with over_http(loud(), R4) as client:
        other = HttpClient(client.asgi, R4)
        await other.open()
        await client.result("logging/setLevel", {"level": "emergency"})
        await other.result("logging/setLevel", {"level": "debug"})
        await client.tool("shout")
        assert said(client) == ["emergency"]


@every_revision
async def test_log_level_that_is_invalid_is_an_error_of_the_tool(revision: str) -> None:
    async with over_http(loud(), revision) as client:
        assert (await client.tool("wrong"))["isError"]


# --- changes: the older form ----------------------------------------------------------------------


def changing() -> App:
    app = make_app()
    app.query(name="tool")(lambda: "")
    app.prompt(name="prompt")(lambda: "")
    app.resource("test://a")(lambda: "a")
    app.resource("test://b", name="b")(lambda: "b")
    return app


def from_thread(*calls: Any) -> None:
    """Make some calls in another thread."""

    def run() -> None:
        for call in calls:
            call()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@legacy
async def test_changes_are_sent_on_the_get_stream(revision: str) -> None:
    app = changing()
    async with over_http(app, revision) as client:
        stream = await client.listen().started()
        assert (stream.status, stream.header("content-type")) == (200, "text/event-stream")
        app.changed("tools")
        assert (await stream.message())["method"] == "notifications/tools/list_changed"
        from_thread(lambda: app.changed("prompts"))
        assert (await stream.message())["method"] == "notifications/prompts/list_changed"
        app.changed("resources")
        assert (await stream.message())["method"] == "notifications/resources/list_changed"


@legacy
async def test_changes_are_sent_on_a_pipe(revision: str) -> None:
    app = changing()
    async with over_stdio(app, revision) as client:
        await client.result("ping")
        app.changed("tools")
        assert (await client.hear())["method"] == "notifications/tools/list_changed"
        from_thread(lambda: app.changed("resources"))
        assert (await client.hear())["method"] == "notifications/resources/list_changed"


async def test_changes_are_not_sent_before_initialized() -> None:
    """Matrix 1.1: until then only pings and logs."""
    app = changing()
    client = LineClient(app, R4)
    await client.open(handshake=False)
    try:
        await client.exchange(hello(R4))
        app.changed("tools")
        await client.exchange(request("ping", id=1))
        assert client.heard == []
    finally:
        await client.close()


@every_transport
@legacy
async def test_resource_changes_are_sent_while_it_is_subscribed_to(
    transport: str, revision: str
) -> None:
    app = changing()
    async with speak(transport, app, revision) as client:
        stream = await client.listen().started() if isinstance(client, HttpClient) else None
        hear = client.hear if stream is None else stream.message
        assert await client.result("resources/subscribe", {"uri": "test://a"}) == {}
        app.updated("test://b")
        app.updated("test://a")
        told = await hear()
        assert (told["method"], told["params"]["uri"]) == (
            "notifications/resources/updated",
            "test://a",
        )
        assert await client.result("resources/unsubscribe", {"uri": "test://a"}) == {}
        app.updated("test://a")
        app.changed("tools")
        assert (await hear())["method"] == "notifications/tools/list_changed"


async def test_stream_that_was_closed_does_not_take_later_changes() -> None:
    app = changing()
    async with over_http(app, R4) as client:
        first = await client.listen().started()
        await first.close()
        second = await client.listen().started()
        app.changed("tools")
        assert (await second.message())["method"] == "notifications/tools/list_changed"


async def test_changes_of_one_list_are_merged_into_few_messages() -> None:
    app = changing()
    async with over_http(app, R4) as client:
        stream = await client.listen().started()
        for _ in range(10_000):
            app.changed("tools")
        app.changed("prompts")
        seen: list[str] = []
        while not seen or seen[-1] != "notifications/prompts/list_changed":
            seen.append((await stream.message())["method"])
        assert len(seen) < 100


def test_changes_may_be_reported_without_a_server() -> None:
    app = changing()
    app.changed("tools")
    app.updated("test://a")


def test_change_of_an_unknown_kind_raises() -> None:
    with pytest.raises(UsageError):
        changing().changed("nonsense")  # type: ignore[arg-type]


async def test_get_stream_has_no_logs_and_no_progress() -> None:
    app = loud()
    async with over_http(app, R4) as client:
        stream = await client.listen().started()
        await client.tool("shout", meta={"progressToken": 1})
        app.changed("tools")
        assert (await stream.message())["method"] == "notifications/tools/list_changed"


# --- changes: subscriptions/listen (matrix 1.9) ---------------------------------------------------

SUBSCRIPTION = f"{PREFIX}subscriptionId"
EVERYTHING = {
    "toolsListChanged": True,
    "promptsListChanged": True,
    "resourcesListChanged": True,
    "resourceSubscriptions": ["test://a"],
}


def listen(client: HttpClient, wanted: Any, id: Any = "l") -> Exchange:
    message = enveloped("subscriptions/listen", {"notifications": wanted}, id)
    return client.post(message, {**BASIC, **repeated(message)})


@pytest.mark.parametrize("id", [0, 7, "", "0", "text"])
async def test_subscription_is_named_by_its_request(id: Any) -> None:
    """Trap 16: with the JSON type it has, 0 and "" included."""
    app = changing()
    async with over_http(app) as client:
        stream = await listen(client, EVERYTHING, id).started()
        assert (stream.status, stream.header("content-type")) == (200, "text/event-stream")
        first = await stream.message()
        assert first["method"] == "notifications/subscriptions/acknowledged"
        assert first["params"]["notifications"] == EVERYTHING
        app.changed("tools")
        app.updated("test://a")
        for told in (first, await stream.message(), await stream.message()):
            named = told["params"]["_meta"][SUBSCRIPTION]
            assert (named, type(named)) == (id, type(id))
            assert "id" not in told


FILTERS: list[tuple[Any, Any]] = [
    ({}, {}),
    ({"toolsListChanged": True}, {"toolsListChanged": True}),
    ({"toolsListChanged": False, "promptsListChanged": True}, {"promptsListChanged": True}),
    ({"resourceSubscriptions": []}, {}),
    ({"resourceSubscriptions": ["test://a"]}, {"resourceSubscriptions": ["test://a"]}),
    ({"unheardOf": True, "resourcesListChanged": True}, {"resourcesListChanged": True}),
]


@every_transport
@pytest.mark.parametrize(("wanted", "honoured"), FILTERS)
async def test_subscription_acknowledges_the_accepted_filter(
    transport: str, wanted: Any, honoured: Any
) -> None:
    async with speak(transport, changing(), R5) as client:
        if isinstance(client, LineClient):
            client.write(enveloped("subscriptions/listen", {"notifications": wanted}, "l"))
            first = await client.hear()
            await client.notify("notifications/cancelled", {"requestId": "l"})
        else:
            first = await listen(client, wanted).message()
    told = {name: value for name, value in first["params"]["notifications"].items() if value}
    assert told == honoured


async def test_subscription_does_not_acknowledge_a_filter_for_impossible_changes() -> None:
    app = make_app()
    app.query(name="tool")(lambda: "")
    async with over_http(app) as client:
        first = await listen(client, EVERYTHING).message()
    assert first["params"]["notifications"] == {"toolsListChanged": True}


async def test_subscription_sends_only_requested_changes() -> None:
    app = changing()
    async with over_http(app) as client:
        prompts = listen(client, {"promptsListChanged": True}, 1)
        one = listen(client, {"resourceSubscriptions": ["test://b"]}, 2)
        await prompts.message()
        await one.message()
        for kind in ("tools", "resources", "prompts"):
            app.changed(kind)
        app.updated("test://a")
        from_thread(lambda: app.updated("test://b"))
        told = await prompts.message()
        assert (told["method"], told["params"]["_meta"]) == (
            "notifications/prompts/list_changed",
            {SUBSCRIPTION: 1},
        )
        told = await one.message()
        assert (told["method"], told["params"]["uri"]) == (
            "notifications/resources/updated",
            "test://b",
        )
        assert told["params"]["_meta"] == {SUBSCRIPTION: 2}


@pytest.mark.parametrize(
    "wanted",
    [
        {"toolsListChanged": "yes"},
        {"resourceSubscriptions": "test://a"},
        {"resourceSubscriptions": [1]},
        5,
    ],
)
async def test_subscription_with_an_invalid_filter_is_refused(wanted: Any) -> None:
    async with over_http(changing()) as client:
        answered = await listen(client, wanted).started()
        assert (await answered.json())["error"]["code"] == -32602


async def test_subscription_ends_when_its_client_disconnects() -> None:
    app = changing()
    async with over_http(app) as client:
        stream = listen(client, EVERYTHING)
        await stream.message()
        await stream.close()
        assert stream.task.done() and not stream.task.cancelled()
        app.changed("tools")
        assert await client.result("tools/list")


async def test_subscriptions_work_on_a_pipe() -> None:
    """Two at once, distinguished by their ids; a cancelled one is silent and is not answered."""
    app = changing()
    async with over_stdio(app) as client:
        for id in (0, "b"):
            client.write(
                enveloped("subscriptions/listen", {"notifications": {"toolsListChanged": True}}, id)
            )
            first = await client.hear()
            assert (first["method"], first["params"]["_meta"][SUBSCRIPTION]) == (
                "notifications/subscriptions/acknowledged",
                id,
            )
        app.changed("tools")
        heard = [(await client.hear())["params"]["_meta"][SUBSCRIPTION] for _ in range(2)]
        assert sorted(map(json.dumps, heard)) == ['"b"', "0"]
        await client.notify("notifications/cancelled", {"requestId": 0})
        await client.result("tools/list")
        app.changed("tools")
        assert (await client.hear())["params"]["_meta"][SUBSCRIPTION] == "b"
        await client.notify("notifications/cancelled", {"requestId": "b"})
        await client.result("tools/list")
        assert client.unasked.empty()


async def test_subscriptions_end_with_their_pipe() -> None:
    """Open point 6:

    `notifications/cancelled`, then the result; and at once, because no call is in flight.
    """
    app = changing()
    client = LineClient(app, R5, grace=2 * PATIENCE)
    await client.open()
    try:
        client.write(
            enveloped("subscriptions/listen", {"notifications": {"toolsListChanged": True}}, "l")
        )
        await client.hear()
        async with asyncio.timeout(PATIENCE):
            await client.end()
        assert (await client.hear())["method"] == "notifications/cancelled"
        final = await client.line()
    finally:
        await client.close()
    assert (final["id"], final["result"]["resultType"]) == ("l", "complete")
    assert final["result"]["_meta"][SUBSCRIPTION] == "l"

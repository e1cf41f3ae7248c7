"""The MCP client against our own server, at all five revisions, in memory, over HTTP and with a
child process.

test_client_rules.py has servers that behave oddly; test_foreign_servers.py has the servers of other
projects.
"""

import asyncio
import importlib.util
import random
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import Struct

from tests.client.conftest import nothing_is_left as nothing_is_left
from tests.client.peers import CuttingProxy, served, until
from tests.clock import LoopClock
from tests.mcp.asgi import LEGACY, R1, R2, R4, R5, REVISIONS
from tests.mcp.clients import PATIENCE, client_of
from tests.mcp.everything import PROGRAM, Everything
from wirecall import (
    App,
    Context,
    Limits,
    Retry,
    ToolAnnotations,
    ToolError,
    UsageError,
    connect,
    connect_sync,
)
from wirecall.errors import (
    BadAnswer,
    ConnectionLost,
    Declined,
    InvalidParams,
    KeyConflict,
    NotCapable,
    NotSent,
    RpcError,
    TimedOut,
)
from wirecall.mcp import Audio, Elicited, Image, Text, ToolResult
from wirecall.mcp.client.inbox import Change
from wirecall.mcp.client.results import Tool
from wirecall.testing import Faults

WAYS = ("memory", "http", "stdio")
COMMAND = [sys.executable, str(PROGRAM)]


def load_everything() -> App:
    spec = importlib.util.spec_from_file_location("everything_example", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    app: App = module.app
    return app


@pytest.fixture(scope="module", autouse=True)  # before the tests count their processes
def everything() -> Iterator[Everything]:
    with Everything() as server:
        yield server


@pytest.fixture(params=WAYS)
def target(request: pytest.FixtureRequest) -> Any:
    """Where `examples/everything.py` is reached."""
    if request.param == "http":
        return request.getfixturevalue("everything").url
    return COMMAND if request.param == "stdio" else load_everything()


@pytest.fixture
def shop() -> App:
    """Tools of every kind."""
    app = App("shop", version="7")
    app.calls = Counter()  # type: ignore[attr-defined]

    def count(name: str) -> int:
        app.calls[name] += 1  # type: ignore[attr-defined]
        return int(app.calls[name])  # type: ignore[attr-defined]

    @app.tool(annotations=ToolAnnotations(readOnlyHint=False, destructiveHint=True))
    def burn(what: str) -> str:
        count("burn")
        return f"{what} is gone"

    @app.command(destructive=False)
    def order(sku: str) -> int:
        return count(f"order {sku}")

    @app.query
    def price(sku: str) -> dict[str, Any]:
        count("price")
        return {"sku": sku, "cents": 5}

    @app.query
    def numbers() -> list[int]:
        return [1, 2, 3]

    @app.command
    def fail(code: int) -> None:
        raise ToolError("it did not work", {"why": "rain"}, code)

    @app.query
    async def wait(ctx: Context) -> str:
        count("waiting")
        try:
            await asyncio.sleep(PATIENCE)
        except asyncio.CancelledError:
            count("cancelled")
            raise
        return "too late"

    return app


def calls(app: App) -> "Counter[str]":
    counted: Counter[str] = app.calls  # type: ignore[attr-defined]
    return counted


# --- one story, everywhere ------------------------------------------------------------------------


class Weather(Struct):
    place: str
    celsius: float


def elicit(form: Any) -> Any:
    return {name: True if name == "ok" else "Ann" for name in form.requested_schema["properties"]}


async def sample(asked: Any) -> str:
    return f"42 to {asked.text}"


HANDLERS: dict[str, Any] = {"elicit": elicit, "sample": sample, "roots": ["file:///project"]}


@pytest.mark.parametrize("revision", REVISIONS)
async def test_client_runs_one_story_at_every_revision(target: Any, revision: str) -> None:
    """V7 and the methods of MCP: the same calls, the same answers, as far as the revision has them."""
    progress: list[tuple[float, float | None]] = []
    async with client_of(target, revision, **HANDLERS) as client:
        assert client.revision == revision and client.server["name"] == "everything"
        names = [tool.name for tool in await client.list_tools()]
        assert names[0] == "test_simple_text"
        assert (
            await client.call_tool("test_simple_text")
        ).text == "This is a simple text response for testing."
        weather = await client.call_tool("structured_output", {"place": "Paris"}, type=Weather)
        assert weather == Weather("Paris", 21.5)
        assert isinstance((await client.call_tool("test_image_content")).content[0], Image)
        sound = (await client.call_tool("test_audio_content")).content[0]
        assert isinstance(sound, Audio if revision >= R2 else Text)
        with pytest.raises(ToolError, match="intentionally"):
            await client.call_tool("test_error_handling")
        assert (await client.call_tool("test_error_handling", check=False)).is_error
        assert (
            await client.call_tool("custom_header", {"region": "nörth "})
        ).text == "Looked for all in nörth "
        done = await client.call_tool(
            "test_tool_with_progress", progress=lambda *got: progress.append(got[:2])
        )
        assert done.text == "Progress is complete" and progress == [(0, 100), (50, 100), (100, 100)]
        assert (await client.call_tool("test_reconnection")).text.endswith("successfully")
        assert (
            await client.call_tool("test_sampling", {"prompt": "you"})
        ).text == "LLM response: 42 to you"
        assert (
            await client.call_tool("test_input_required_result_list_roots")
        ).text == "Roots: file:///project"
        text = (await client.read_resource("test://static-text"))[0].text
        assert text is not None and text.startswith("This is the content")
        assert (await client.read_resource("test://static-binary"))[0].blob
        assert [one.name for one in await client.list_resource_templates()] == ["template"]
        assert len(await client.list_resources()) == 3
        prompted = await client.get_prompt("test_prompt_with_arguments", {"arg1": "a", "arg2": "b"})
        assert prompted.messages[0].text == "Prompt with arguments: arg1='a', arg2='b'"
        assert len(await client.list_prompts()) == 5
        completion = await client.complete("test_prompt_with_arguments", "arg1", "par")
        assert completion.values == ["paris", "park", "party"]
        await client.ping()
        with pytest.raises(RpcError) as missing:
            await client.read_resource("test://nowhere")
        assert missing.value.code == (-32602 if revision == R5 else -32002)


@pytest.mark.parametrize("revision", REVISIONS[2:])
async def test_forms_are_filled_in_in_both_eras(target: Any, revision: str) -> None:
    async with client_of(target, revision, **HANDLERS) as client:
        assert (
            await client.call_tool("test_input_required_result_elicitation")
        ).text == "Hello, Ann!"
        assert (
            await client.call_tool("test_input_required_result_multi_round")
        ).text == "Ann likes Ann"
        several = await client.call_tool("test_input_required_result_multiple_inputs")
        assert several.text == "accept: 42 to Generate a greeting (1 roots)"
        async with client.batch() as batch:
            many = [batch.call_tool("test_input_required_result_elicitation") for _ in range(3)]
        assert [entry.result().text for entry in many] == ["Hello, Ann!"] * 3


async def test_client_tries_the_newest_revision_first(target: Any) -> None:
    async with client_of(target) as client:
        assert client.revision == R5


@pytest.mark.parametrize("answer", [None, Elicited("cancel")])
async def test_form_may_be_declined(answer: Any) -> None:
    async with client_of(load_everything(), elicit=lambda _: answer) as client:
        said = await client.call_tool("test_input_required_result_elicitation")
        assert said.text == f"No name: {'decline' if answer is None else 'cancel'}"


async def test_client_that_declares_nothing_is_asked_nothing() -> None:
    async with client_of(load_everything(), R5) as client:
        with pytest.raises(RpcError) as refused:
            await client.call_tool("test_sampling", {"prompt": "?"})
        assert refused.value.code == -32021 and refused.value.ran == "no"


async def test_log_messages_arrive_at_the_level_that_was_set(target: Any) -> None:
    for revision in (R4, R5):
        logged: list[Any] = []

        async def on_log(log: Any, logged: list[Any] = logged) -> None:
            logged.append((log.level, log.logger, log.data))

        async with client_of(target, revision, on_log=on_log) as client:
            await client.set_log_level("warning")
            await client.call_tool("test_tool_with_logging")
            await client.call_tool("test_logging_tool")
            await until(lambda logged=logged: logged)  # type: ignore[misc]
            assert logged == [("warning", "storage", {"disk": "nearly full", "left": 0.07})]


def test_scripts_have_the_same_methods(everything: Everything) -> None:
    with connect_sync(everything.url, **HANDLERS) as client:
        assert client.call_tool("test_input_required_result_elicitation").text == "Hello, Ann!"
        with client.batch() as batch:
            entry = batch.call_tool("test_simple_text")
        assert entry.result().text and batch.wire == "singles"
        with client.listen(tools=True) as changes:
            client.call_tool("test_trigger_tool_change")
            assert next(iter(changes)) == Change("tools")


# --- changes --------------------------------------------------------------------------------------

WATCHED = "test://watched-resource"


@pytest.mark.parametrize("revision", [R2, R4, R5])
async def test_changes_reach_the_client_in_both_eras(target: Any, revision: str) -> None:
    async with client_of(target, revision) as client:
        async with client.listen(tools=True, uris=[WATCHED]) as changes:
            await client.call_tool("test_trigger_prompt_change")  # the client does not listen yet
            await client.call_tool("trigger_resource_update")
            assert await anext(changes) == Change("updated", WATCHED)
            await client.call_tool("test_trigger_tool_change")
            assert await anext(changes) == Change("tools")
        with pytest.raises(StopAsyncIteration):
            await anext(changes)


@pytest.mark.parametrize("revision", [R4, R5])
async def test_on_change_gets_changes_of_lists_and_of_subscribed_resources(
    target: Any, revision: str
) -> None:
    received: list[Change] = []
    async with client_of(target, revision, on_change=received.append) as client:
        await client.subscribe(WATCHED)
        await client.call_tool("trigger_resource_update")
        await until(lambda: received)
        await client.unsubscribe(WATCHED)
        await client.call_tool("trigger_resource_update")
        await client.call_tool("test_trigger_prompt_change")
        await until(lambda: len(received) > 1)
    assert received == [Change("updated", WATCHED), Change("prompts")]


async def test_client_checks_the_timeout_of_every_method(shop: App) -> None:
    async with client_of(shop) as client:
        for call in (
            client.list_tools(timeout=0),
            client.call_tool("price", timeout=-1),
            client.ping(timeout=0),
        ):
            with pytest.raises(UsageError, match="timeout must be greater than 0"):
                await call


async def test_client_that_is_not_open_says_so(shop: App) -> None:
    client = connect(shop, protocol="mcp")
    for call in (
        client.list_tools(),
        client.call_tool("price"),
        client.ping(),
        client.listen(uris=["x://y"]).__aenter__(),
    ):
        with pytest.raises(UsageError, match="The client is not open"):
            await call
    await client.aclose()


async def test_subscribing_without_a_callback_raises_with_a_fix(shop: App) -> None:
    async with client_of(shop) as client:
        with pytest.raises(UsageError, match="on_change"):
            await client.subscribe("x://y")


@pytest.mark.parametrize("revision", [R4, R5])
async def test_list_is_kept_for_its_time_unless_it_changes(shop: App, revision: str) -> None:
    sent: list[str] = []

    class Counting:
        def __init__(self, link: Any) -> None:
            self.open = link.open
            self.aclose = link.aclose
            self._link = link

        async def exchange(self, exchange: Any) -> None:
            sent.extend(entry.method for entry in exchange.entries)
            await self._link.exchange(exchange)

    async with (
        client_of(shop, revision, wrap=Counting) as client,
        client.listen(tools=True) as changes,
    ):
        for _ in range(3):
            await client.list_tools()
        # Older revisions do not name a time.
        assert sent.count("tools/list") == (1 if revision == R5 else 3)
        await until(lambda: shop.mcp().hub._listeners)
        shop.query(name="late")(lambda: 1)
        shop.changed("tools")
        assert await anext(changes) == Change("tools")
        assert "late" in [tool.name for tool in await client.list_tools()]
        assert sent.count("tools/list") == (2 if revision == R5 else 4)


# --- tools ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("revision", REVISIONS)
async def test_results_are_read_as_types(shop: App, revision: str) -> None:
    async with client_of(shop, revision) as client:
        assert await client.call_tool("numbers", type=list[int]) == [1, 2, 3]
        assert await client.call_tool("price", {"sku": "tea"}, type=dict[str, Any]) == {
            "sku": "tea",
            "cents": 5,
        }
        with pytest.raises(BadAnswer, match="not of the wanted type") as misfit:
            await client.call_tool("price", {"sku": "tea"}, type=dict[str, bool])
        assert misfit.value.ran == "yes"


@pytest.mark.parametrize("revision", [R2, R5])
async def test_tool_errors_keep_the_code_data_and_ran_of_the_server(
    shop: App, revision: str
) -> None:
    async with client_of(shop, revision) as client:
        with pytest.raises(RpcError, match="it did not work") as failed:
            await client.call_tool("fail", {"code": 40499})
        assert (failed.value.code, failed.value.data, failed.value.ran) == (
            40499,
            {"why": "rain"},
            "yes",
        )
        with pytest.raises(RpcError) as unknown:
            await client.call_tool("nothing")
        assert unknown.value.ran == "no"


@pytest.mark.parametrize("revision", REVISIONS)
@pytest.mark.parametrize(
    ("tool", "arguments"), [("order", {}), ("order", {"sku": 5}), ("price", {"sku": 5})]
)
async def test_arguments_that_do_not_fit_do_not_run_the_tool(
    shop: App, revision: str, tool: str, arguments: Any
) -> None:
    """The older revisions answer with an error, the newer ones with a result: for the caller it is
    the same.
    """
    async with client_of(shop, revision) as client:
        with pytest.raises(InvalidParams, match=r"(params|arguments)\.sku") as refused:
            await client.call_tool(tool, arguments)
    assert refused.value.ran == "no"
    assert not calls(shop)


@pytest.mark.parametrize("revision", [R1, R4])
async def test_client_that_cannot_be_asked_gets_ran_no(revision: str) -> None:
    """Until 2025-11-25 that is a result."""
    app = App("test", ledger="memory:")

    @app.command
    async def close(ctx: Context) -> str:
        await ctx.elicit("Sure?", {"type": "object", "properties": {}})
        return "closed"

    async with client_of(app, revision) as client:
        with pytest.raises(NotCapable) as refused:
            await client.call_tool("close")
    assert refused.value.ran == "no"


async def test_ran_is_unknown_for_a_server_that_does_not_report_it() -> None:
    """A result with `isError` may be about the arguments, or about effects of the tool."""
    app = App("test", ledger="memory:")
    app.tool(name="fail")(lambda: ToolResult(content=["it did not work"], is_error=True))
    async with client_of(app) as client:
        with pytest.raises(ToolError, match="it did not work") as failed:
            await client.call_tool("fail")
    assert failed.value.ran == "unknown"


@pytest.mark.parametrize("revision", REVISIONS)
async def test_lost_answer_is_requested_again_under_the_same_key(shop: App, revision: str) -> None:
    """Keys are minted for tools of a server that honours them, so that its commands may be repeated
    (T4).
    """
    faults = Faults(drop_reply=2)
    async with client_of(shop, revision, wrap=faults.on) as client:
        entry = client.tool_entry("order", {"sku": "tea"}, type=int)
        await client._delivery.run(entry)
        assert entry.result() == 1 and entry.replayed and entry.attempts == 3
    assert calls(shop)["order tea"] == 1


async def test_callers_key_is_kept_and_a_conflict_is_raised(shop: App) -> None:
    async with client_of(shop) as client:
        assert await client.call_tool("order", {"sku": "a"}, key="k-1", type=int) == 1
        assert (await client.call_tool("order", {"sku": "a"}, key="k-1")).replayed
        with pytest.raises(KeyConflict):
            await client.call_tool("order", {"sku": "b"}, key="k-1")
        assert (
            await client.call_tool("order", {"sku": "a", "idempotency_key": "k-1"}, type=int) == 1
        )
        assert await client.call_tool("order", {"sku": "a"}, type=int) == 2


async def test_lost_answer_without_a_key_is_unknown(shop: App) -> None:
    async with client_of(shop, wrap=Faults(drop_reply=1).on) as client:
        with pytest.raises(Exception, match="dropped") as lost:
            await client.call_tool("order", {"sku": "tea"}, key=False)
        assert lost.value.ran == "unknown"  # type: ignore[attr-defined]
    assert calls(shop)["order tea"] == 1


async def test_caller_that_stops_waiting_cancels_the_call(shop: App, clock: LoopClock) -> None:
    """Older revisions and pipes:

    `notifications/cancelled`. 2026-07-28 over HTTP: the stream is closed.
    """
    async with served(shop) as url:
        targets: list[Any] = [(shop, R4), (shop, R5), (f"{url}/mcp", R4), (f"{url}/mcp", R5)]
        for count, (target, revision) in enumerate(targets, 1):
            async with client_of(target, revision) as client:
                calling = asyncio.create_task(
                    client.call_tool("wait", timeout=PATIENCE / 2, key=False)
                )
                await until(lambda count=count: calls(shop)["waiting"] == count)  # type: ignore[misc]
                clock.advance(PATIENCE / 2)
                with pytest.raises(TimedOut):
                    await calling
                await until(lambda count=count: calls(shop)["cancelled"] == count)  # type: ignore[misc]


# --- trust ----------------------------------------------------------------------------------------


async def test_hints_count_if_the_server_is_trusted(shop: App) -> None:
    """T3, T4: read-only tools first, and only if the server that says so is trusted."""
    async with client_of(shop) as client:
        asked = [tool.name for tool in await client.list_tools()]
        assert [tool.name for tool in await client.list_tools(order="safest")] == asked
    async with client_of(shop, trust=True) as client:
        ordered = await client.list_tools(order="safest")
        assert [tool.read_only for tool in ordered] == sorted(
            (tool.read_only for tool in ordered), reverse=True
        )
        assert ordered[-1].destructive
    async with client_of(shop, trust=lambda tool: tool.name == "order") as client:
        assert (await client.list_tools(order="safest"))[0].name == "order"
        with pytest.raises(UsageError, match="safest"):
            await client.list_tools(order="nicest")  # type: ignore[arg-type]


async def test_destructive_call_is_confirmed_before_it_is_sent(shop: App) -> None:
    asked: list[tuple[str, Any]] = []

    async def confirm(tool: Tool, arguments: Any) -> bool:
        asked.append((tool.name, arguments))
        return bool(arguments.get("what") == "paper")

    async with client_of(shop, confirm=confirm, trust=True) as client:
        assert (await client.call_tool("burn", {"what": "paper"})).text == "paper is gone"
        with pytest.raises(Declined) as declined:
            await client.call_tool("burn", {"what": "house"})
        assert declined.value.ran == "no"
        await client.call_tool("order", {"sku": "tea"})
        await client.call_tool("price", {"sku": "tea"})
        async with client.batch() as batch:
            burnt = batch.call_tool("burn", {"what": "car"})
            priced = batch.call_tool("price", {"sku": "tea"})
        assert isinstance(burnt.error, Declined) and priced.ok
    assert asked == [
        ("burn", {"what": "paper"}),
        ("burn", {"what": "house"}),
        ("burn", {"what": "car"}),
    ]
    assert calls(shop)["burn"] == 1


async def test_untrusted_server_may_have_every_tool_confirmed(shop: App) -> None:
    asked: list[str] = []

    def confirm(tool: Tool, _: Any) -> bool:
        asked.append(tool.name)
        return False

    for unknown, expected in ((False, ["burn"]), (True, ["burn", "price"])):
        asked.clear()
        async with client_of(shop, confirm=confirm, confirm_unknown=unknown) as client:
            with pytest.raises(Declined):
                await client.call_tool("burn", {"what": "it"})
            if unknown:
                with pytest.raises(Declined):
                    await client.call_tool("price", {"sku": "tea"})
            else:
                await client.call_tool("price", {"sku": "tea"})
        assert asked == expected


# --- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("revision", REVISIONS)
async def test_batch_is_sent_as_its_revision_allows(shop: App, revision: str) -> None:
    """V7: one array at 2025-03-26, single requests elsewhere; each entry has its own outcome."""
    async with served(shop) as url:
        for target in (shop, f"{url}/mcp"):
            async with client_of(target, revision) as client:
                async with client.batch() as batch:
                    tea = batch.call_tool("price", {"sku": "tea"}, type=dict[str, Any])
                    bad = batch.call_tool("nothing")
                    listed = batch.call("tools/list")
                    batch.notify("notifications/roots/list_changed")
                    orders = [
                        batch.call_tool("order", {"sku": f"{revision}{target!r}{n}"}, type=int)
                        for n in range(5)
                    ]
                assert batch.wire == ("array" if revision == R2 else "singles")
                assert (
                    batch.reason == f"MCP {revision} {'has' if revision == R2 else 'has no'} arrays"
                )
                assert tea.result() == {"sku": "tea", "cents": 5} and isinstance(
                    bad.error, InvalidParams
                )
                assert (
                    len(listed.result()["tools"]) == 6
                    and [entry.result() for entry in orders] == [1] * 5
                )


async def test_array_is_cut_to_the_server_s_limit(shop: App) -> None:
    small = App("small", limits=Limits(batch=7))
    small.query(name="double")(lambda n: 2 * n)
    async with client_of(small, R2) as client, client.batch() as batch:
        entries = [batch.call_tool("double", {"n": n}, type=int) for n in range(20)]
    assert batch.wire == "arrays(3)" and [entry.result() for entry in entries] == [
        2 * n for n in range(20)
    ]


async def test_lost_array_is_repeated_with_its_keys(shop: App) -> None:
    async with client_of(shop, R2, wrap=Faults(drop_reply=1).on) as client, client.batch() as batch:
        entries = [batch.call_tool("order", {"sku": str(n)}, type=int) for n in range(9)]
    assert [entry.result() for entry in entries] == [1] * 9 and all(
        entry.replayed for entry in entries
    )
    assert {calls(shop)[f"order {n}"] for n in range(9)} == {1}


# --- when connections break -----------------------------------------------------------------------

COMMANDS = 200
RETRY = Retry(attempts=1000, first=0.005, cap=0.05)


@pytest.mark.parametrize(
    ("revision", "server"), [(R5, "uvicorn"), (R5, "granian"), (R4, "uvicorn"), (R2, "uvicorn")]
)
async def test_two_hundred_commands_take_effect_once_each(revision: str, server: str) -> None:
    """The cut test: each connection is cut somewhere, the client retries, and no effect happens
    twice.
    """
    chance = random.Random(revision)
    app = App("bank")
    begun = Counter[str]()

    @app.command
    async def charge(order: str, cents: int, ctx: Context) -> str:
        begun[order] += 1
        if cents % 3 == 0:
            await ctx.progress(1)  # a third of the answers are streams
        await asyncio.sleep(chance.random() * 0.004)
        return f"{order} paid {cents}"

    def follow(*_: Any) -> None: ...

    async with served(app, server) as url, CuttingProxy(url, seed=5, longest=6000) as proxy:
        proxy.is_kind = True
        async with client_of(f"{proxy.url}/mcp", revision, timeout=60.0, retry=RETRY) as client:
            proxy.is_kind = False
            work = [
                client.call_tool(
                    "charge",
                    {"order": f"o{n}", "cents": n},
                    progress=follow if n % 3 == 0 else None,
                )
                for n in range(COMMANDS)
            ]
            results = [called.text for called in await asyncio.gather(*work)]
            proxy.is_kind = True
    assert proxy.cuts > COMMANDS / 10, "the proxy was too kind for this to prove anything"
    assert results == [f"o{n} paid {n}" for n in range(COMMANDS)]
    assert begun == Counter({f"o{n}": 1 for n in range(COMMANDS)})


@pytest.mark.parametrize("revision", [R4, R5])
async def test_server_process_that_died_is_restarted_with_a_new_handshake(revision: str) -> None:
    async with client_of(COMMAND, revision, **HANDLERS) as client:
        way: Any = client._conversation.link
        assert (await client.call_tool("test_simple_text")).text
        way._pipe._process.kill()
        await until(lambda: way._pipe is None)
        assert (
            await client.call_tool("test_sampling", {"prompt": "you"})
        ).text == "LLM response: 42 to you"


@pytest.mark.parametrize("revision", LEGACY)
async def test_server_that_was_restarted_gets_a_new_session(shop: App, revision: str) -> None:
    async with served(shop) as url, client_of(f"{url}/mcp", revision) as client:
        way: Any = client._conversation.link
        first = way.session
        way.session = "of-a-server-that-is-no-more"
        found = await asyncio.gather(*(client.call_tool("price", {"sku": "tea"}) for _ in range(5)))
        assert [called.structured for called in found] == [found[0].structured] * 5
        assert way.session not in (first, None, "of-a-server-that-is-no-more")


async def test_subscriptions_are_sent_again_to_a_new_session(everything: Everything) -> None:
    async with client_of(everything.url, R4) as client, client.listen(uris=[WATCHED]) as changes:
        way: Any = client._conversation.link
        way.session = "gone"
        await client.call_tool("test_simple_text")
        assert await anext(changes) == Change("updated", WATCHED)  # it may have changed in between
        await client.call_tool("trigger_resource_update")
        assert await anext(changes) == Change("updated", WATCHED)


@pytest.mark.parametrize("revision", REVISIONS)
async def test_notification_has_no_result_to_read(target: Any, revision: str) -> None:
    async with client_of(target, revision) as client:
        await client.notify("notifications/roots/list_changed")
        async with client.batch() as batch:
            got = batch.notify("notifications/roots/list_changed")
        assert got.ok and got.result() is None


async def test_call_that_was_cancelled_in_memory_ends_with_the_client() -> None:
    app = App("shop")
    begun = asyncio.Event()

    @app.query
    async def wait() -> None:
        begun.set()
        await asyncio.Event().wait()

    async with client_of(app) as client:
        calling = asyncio.create_task(client.call_tool("wait"))
        await begun.wait()
        for id in range(1, 5):  # one of them is the id of the call
            await client.notify("notifications/cancelled", {"requestId": id})
        done, _ = await asyncio.wait([calling], timeout=0)
        assert not done  # the server does not answer it
    with pytest.raises(ConnectionLost, match="the client was closed"):
        await calling


async def test_server_that_cannot_be_reached_or_started_raises(shop: App) -> None:
    with pytest.raises(NotSent):
        async with client_of("http://127.0.0.1:9/mcp"):
            raise AssertionError
    with pytest.raises(NotSent, match="cannot be started"):
        async with client_of(["/no/such/program"]):
            raise AssertionError
    with pytest.raises(Exception, match="its last words: who needs a server"):
        async with client_of(
            [sys.executable, "-c", "raise SystemExit('who needs a server')"], stderr="keep"
        ):
            raise AssertionError
    with pytest.raises(UsageError, match="2025-11-25"):
        connect(shop, protocol="mcp", revision="2025-11-26")

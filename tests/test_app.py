"""The facade: lifecycle, handle_sync, discovery."""

import asyncio
import sys
from contextlib import suppress
from typing import Any

import jsonschema
import pytest

from tests.calls import batch, call, error, make_app, read, result
from wirecall import App, Context, UsageError


def test_handle_sync_steps_the_same_coroutine_and_refuses_to_wait() -> None:
    app = make_app()
    closed: list[str] = []

    @app.query
    async def quick(n: int) -> int:
        return n

    @app.query
    async def slow() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            closed.append("slow")

    @app.command
    async def slow_command() -> None:
        await asyncio.sleep(0)

    assert result(app.handle_sync(call("quick", [1]))) == 1
    assert [
        a["result"] for a in read(app.handle_sync(batch(call("quick", [1]), call("quick", [2]))))
    ] == [1, 2]
    for message in (
        call("slow"),
        batch(call("quick", [1]), call("slow"), call("slow")),
        call("slow_command"),
    ):
        with pytest.raises(UsageError, match=r"tried to wait[\s\S]*await app.handle"):
            app.handle_sync(message)
    assert closed == ["slow"] * 2
    assert result(app.handle_sync(call("quick", [3]))) == 3


async def test_handle_sync_inside_a_running_loop() -> None:
    app = make_app()

    @app.query
    async def wait() -> None:
        await asyncio.sleep(0)

    app.query(name="fine")(lambda: 1)
    app.command(name="put")(lambda: 2)
    assert result(app.handle_sync(call("fine"))) == 1
    assert result(app.handle_sync(call("put", key="k"))) == 2
    with pytest.raises(UsageError):
        app.handle_sync(batch(call("wait"), call("wait")))
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_handle_sync_does_not_report_an_interrupted_command_as_done() -> None:
    app = make_app()

    @app.command
    async def wait() -> None:
        await asyncio.sleep(0)

    with pytest.raises(UsageError):
        app.handle_sync(call("wait", key="k"))
    assert error(app.handle_sync(call("wait", key="k")))["data"]["type"] == "outcome_unknown"


async def test_ledger_opens_on_first_use_and_closes_with_the_app(tmp_path: Any) -> None:
    """P9 starts here: resources are lazy."""
    path = tmp_path / "deep" / "ledger.db"
    app = make_app(ledger=f"sqlite:{path}")
    app.query(name="read")(lambda: 1)
    app.command(name="put")(lambda: 2)
    async with app:
        await app.handle(call("read"))
        assert not path.exists()
        assert result(await app.handle(call("put", key="k"))) == 2
        assert path.exists()
    await app.aclose()
    ids: list[Any] = []
    async with app:  # an app that was closed opens again
        assert result(await app.handle(call("put", key="k", id=9), replayed=ids)) == 2
    assert ids == [9]


async def test_late_aclose_does_not_close_a_reopened_app(monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to close the ledger that was open when it finished, with the records of the new
    calls.
    """
    monkeypatch.setattr("wirecall.commands.commands.LAST_WORDS", 0.01)
    app = make_app()
    effects = list[int]()
    begun = asyncio.Event()
    go = asyncio.Event()

    @app.command
    async def stubborn() -> None:
        begun.set()
        while not go.is_set():
            with suppress(asyncio.CancelledError):
                await go.wait()

    app.command(name="put")(lambda: effects.append(1))
    async with asyncio.timeout(10):
        old = asyncio.create_task(app.handle(call("stubborn", key="k")))
        await begun.wait()
        patient = asyncio.create_task(app.aclose(10))
        await asyncio.sleep(0)
        await app.aclose(0)
        assert result(await app.handle(call("put", key="k"))) is None
        ledger = await app.ledger()
        go.set()
        await asyncio.gather(patient, old)
        assert await app.ledger() is ledger
        assert result(await app.handle(call("put", key="k"))) is None
        await app.aclose()
    assert effects == [1]


async def test_ledger_that_cannot_be_opened_refuses_commands_and_serves_queries(
    tmp_path: Any,
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    app = make_app(ledger=f"sqlite:{blocked}/ledger.db")
    ran: list[int] = []
    app.query(name="read")(lambda: 1)
    app.command(name="put")(lambda: ran.append(1))
    refused = error(await app.handle(call("put", key="k")))
    assert (refused["code"], refused["data"]["type"], refused["data"]["ran"]) == (
        50310,
        "ledger_unavailable",
        "no",
    )
    assert str(blocked) not in str(refused)
    assert result(await app.handle(call("read"))) == 1
    assert ran == []
    await app.aclose()


@pytest.mark.parametrize("url", ["", "ledger.db", "mysql://x", "sqlite"])
async def test_invalid_ledger_url_is_reported_at_once(url: str) -> None:
    if url == "":
        assert App("x", mode="development", ledger=url).ledger_url == "memory:"
        return
    with pytest.raises(UsageError, match="is not the URL of a ledger"):
        App("x", ledger=url)


# --- rpc.discover (J16) ---------------------------------------------------------------------------

OPENRPC = {
    "type": "object",
    "required": ["openrpc", "info", "methods"],
    "properties": {
        "openrpc": {"type": "string", "pattern": r"^1\.[0-9]+\.[0-9]+$"},
        "info": {"type": "object", "required": ["title", "version"]},
        "methods": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "params"],
                "properties": {
                    "paramStructure": {"enum": ["by-name", "by-position", "either"]},
                    "params": {"type": "array", "items": {"$ref": "#/$defs/content"}},
                    "result": {"$ref": "#/$defs/content"},
                },
            },
        },
        "components": {"type": "object", "properties": {"schemas": {"type": "object"}}},
    },
    "$defs": {
        "content": {
            "type": "object",
            "required": ["name", "schema"],
            "properties": {"required": {"type": "boolean"}, "schema": {"type": "object"}},
        }
    },
}


def test_discover_answers_an_openrpc_document() -> None:
    """J16."""
    import dataclasses

    @dataclasses.dataclass
    class Order:
        sku: str
        parent: "Order | None" = None

    globals()["Order"] = Order
    app = App("shop", version="1.2", mode="production", ledger="memory:")

    @app.query(title="Price of a thing")
    def price(sku: str, currency: str = "EUR") -> int:
        """The price of an article.

        In the smallest unit.
        """
        return 1

    @app.command
    def place(order: Order, ctx: Context) -> Order:
        return order

    document = result(app.handle_sync(call("rpc.discover")))
    jsonschema.validate(document, OPENRPC)
    assert document["info"] == {"title": "shop", "version": "1.2"}
    price_doc, place_doc = document["methods"]
    assert (price_doc["name"], price_doc["summary"]) == ("price", "Price of a thing")
    assert price_doc["description"].startswith("The price of an article.")
    assert [(p["name"], p["required"]) for p in price_doc["params"]] == [
        ("sku", True),
        ("currency", False),
    ]
    assert price_doc["result"]["schema"] == {"type": "integer"}
    assert (price_doc["x-kind"], place_doc["x-kind"]) == ("query", "command")
    assert [(p["name"], p["required"]) for p in place_doc["params"]] == [
        ("order", True),
        ("idempotency_key", True),
    ]
    # every reference leads somewhere, and the schema it leads to accepts what the method accepts
    reference = place_doc["params"][0]["schema"]["$ref"]
    assert reference == "#/components/schemas/place.Order"
    jsonschema.validate({"sku": "tea", "parent": {"sku": "box"}}, {**document, "$ref": reference})
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"sku": "tea", "parent": {"sku": 1}}, {**document, "$ref": reference})


async def test_missing_driver_is_reported_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    for name in [
        name for name in sys.modules if name.startswith(("wirecall.ledger.redis", "redis."))
    ]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        UsageError, match=r'with the extra redis, in a checkout: pip install "\.\[redis\]"'
    ):
        await App("shop", ledger="redis://localhost").ledger()


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"execution": "seqential"}, 'execution="sequential"'),
        ({"limits": {"batch": 100}}, "Limits\\(batch=100\\)"),
        ({"hosts": "api.example.com"}, r"hosts=\['api.example.com'\]"),
        ({"origins": "https://example.com"}, r"origins=\['https://example.com'\]"),
        ({"hosts": [""]}, "expected the name of a host, got ''"),
        ({"hosts": [None]}, "expected the name of a host, got None"),
        ({"hosts": ["https://api.example.com"]}, '"api.example.com"'),
        ({"hosts": ["a.example, b.example"]}, '"api.example.com"'),
        ({"origins": ["app.example.com"]}, '"https://app.example.com"'),
        ({"origins": ["https://app.example.com/page"]}, '"https://app.example.com"'),
        ({"origins": [None]}, "expected an origin, got None"),
    ],
)
def test_option_that_would_be_misread_is_refused(options: dict[str, Any], fix: str) -> None:
    """A mistyped execution would let commands run side by side; a string is a sequence too."""
    with pytest.raises(UsageError, match=fix):
        App("x", **options)


def test_hosts_and_origins_accept_valid_names() -> None:
    hosts = [
        "*",
        "*.example.com",
        "API.example.com:8443",
        "localhost",
        "10.0.0.1",
        "[::1]",
        "[::1]:80",
    ]
    App(
        "x",
        hosts=hosts,
        origins=[
            "*",
            "null",
            "https://App.example/",
            "http://[::1]:8080",
            "chrome-extension://abc",
        ],
    )


@pytest.mark.parametrize(
    ("ledger", "kind", "is_told"),
    [("memory:", "command", True), ("memory:", "query", False), ("sqlite:x.db", "command", False)],
)
@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_server_with_a_ledger_in_memory_warns(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    transport: Any,
    ledger: str,
    kind: str,
    is_told: bool,
) -> None:
    """A client sends commands again to the next process, which has no records of them."""
    monkeypatch.setattr("wirecall.transports.stdio.serve", lambda *_, **__: None)
    monkeypatch.setattr("wirecall.transports.serve.serve", lambda *_, **__: None)
    app = App("x", ledger=ledger)
    getattr(app, kind)(name="put")(lambda: 1)
    app.run(transport)
    assert ("the ledger is in memory" in caplog.text) is is_told


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ({"lifespan": 5}, "lifespan must be a function, got int"),
        ({"authenticate": "alice"}, "authenticate must be a function, got str"),
        ({"secret": 5}, "secret must be a string, got int"),
        ({"middleware": lambda ctx, call_next: None}, "middleware must be a list"),
    ],
)
def test_option_of_a_wrong_type_is_refused_when_the_app_is_made(option: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        App("x", **option)


@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_run_inside_an_event_loop_says_what_to_use(transport: Any) -> None:
    with pytest.raises(
        UsageError,
        match=r"inside a running event loop[\s\S]*await app\.serve\(\)` or app\.asgi\(\)",
    ):
        App("x").run(transport)


def test_message_that_is_not_a_string_is_refused() -> None:
    messages: list[Any] = [{"jsonrpc": "2.0", "method": "x", "id": 1}, 5]
    for each in messages:
        with pytest.raises(
            UsageError, match=r"must be bytes or a string, got (dict|int)[\s\S]*json\.dumps"
        ):
            App("x").handle_sync(each)

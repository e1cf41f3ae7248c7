"""Registration: what is declared, and what contradicts itself."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from msgspec import UNSET

from tests.calls import call, make_app, result
from wirecall import App, Context, Kind, Limits, Router, UsageError
from wirecall.ledger.base import RecordId, State
from wirecall.mcp.revisions import NOTIFICATIONS, REQUESTS
from wirecall.server.method import Method


def test_decorator_works_bare_and_with_arguments_and_returns_the_function() -> None:
    app = make_app()

    @app.query
    def bare(a: int) -> int:
        return a

    @app.query(name="other", title="Another")
    def named(a: int) -> int:
        return a

    @app.command
    def bare_command(a: int) -> int:
        return a

    @app.command(destructive=False, retention=60)
    def named_command(a: int) -> int:
        return a

    assert bare(1) == named(1) == bare_command(1) == named_command(1) == 1
    assert [method.name for method in app.registry] == [
        "rpc.discover",
        "bare",
        "other",
        "bare_command",
        "named_command",
    ]
    assert len(app.registry) == 5
    terms = app.registry.methods["named_command"].terms
    assert (terms.retention, terms.lease, terms.wait, terms.on_crash, terms.max_stored_result) == (
        60,
        30,
        25,
        "unknown",
        262_144,
    )


def test_method_is_a_query_or_a_command() -> None:
    """P1."""
    app = make_app()
    app.query(name="q")(lambda: 1)
    app.command(name="c")(lambda: 1)
    assert app.registry.methods["q"].kind is Kind.QUERY
    assert app.registry.methods["c"].kind is Kind.COMMAND
    assert {kind.value for kind in Kind} == {"query", "command"}


async def nothing() -> None: ...


def plain() -> None: ...


@pytest.mark.parametrize(
    ("kind", "function", "declared", "why"),
    [
        ("query", plain, {"name": "rpc.mine"}, "belong to the protocol"),
        ("command", plain, {"notification_allowed": True}, "cannot be a notification"),
        ("query", plain, {"destructive": True}, "cannot be destructive"),
        ("query", nothing, {"blocking": True}, "blocking=True is for plain functions"),
        ("query", nothing, {"timeout": 0}, "above 0"),
        ("query", nothing, {"timeout": float("nan")}, "above 0"),
        ("query", plain, {"timeout": 1}, "cannot be interrupted"),
        ("command", plain, {"on_crash": "reconcile"}, "needs a function"),
        ("command", plain, {"lease": 0}, "lease must be a number above 0"),
        ("command", plain, {"retention": -1}, "retention must be a number above 0"),
        ("command", plain, {"retention": 10**400}, "retention must be a number above 0"),
        ("command", plain, {"lease": 2**63}, "lease must be a number above 0"),
        ("command", plain, {"lease": "30"}, "lease must be a number above 0"),
        ("command", plain, {"lease": True}, "lease must be a number above 0"),
        ("command", plain, {"wait": None}, "wait must be a number above 0"),
        ("query", nothing, {"timeout": "5"}, "above 0"),
        ("command", plain, {"on_crash": "transactional"}, "memory"),
    ],
)
def test_contradiction_is_an_error_at_registration(
    kind: str, function: Any, declared: dict[str, Any], why: str
) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        getattr(make_app(), kind)(**declared)(function)
    assert "fix:" in str(caught.value)


def generator() -> Any:
    yield 1


async def agenerator() -> Any:
    yield 1


class Rows:
    def __call__(self) -> Any:
        yield 1

    def of(self, table: str) -> Any:
        return table


@pytest.mark.parametrize("kind", ["query", "command", "tool"])
@pytest.mark.parametrize("function", [generator, agenerator, partial(generator), Rows()])
def test_generator_is_refused(kind: str, function: Any) -> None:
    """Its call returns a generator that nothing would run."""
    with pytest.raises(UsageError, match=r"a generator and not a result[\s\S]*fix:"):
        getattr(make_app(), kind)(name="rows")(function)


@pytest.mark.parametrize("declare", ["resource", "prompt", "completion"])
def test_generator_is_refused_for_other_functions_too(declare: str) -> None:
    app = make_app()
    app.prompt(name="greet")(lambda who: who)
    named: dict[str, tuple[str, ...]] = {"resource": ("test://x",), "completion": ("greet", "who")}
    with pytest.raises(UsageError, match="a generator and not a result"):
        getattr(app, declare)(*named.get(declare, ()))(generator)


def test_unbound_method_is_refused() -> None:
    app = make_app()
    with pytest.raises(UsageError, match=r"`self`[\s\S]*fix: register the method of an object"):
        app.query(Rows.of)
    app.query(Rows().of)
    assert result(app.handle_sync(call("of", ["x"]))) == "x"


MCP_NAMES = [
    *REQUESTS,
    *NOTIFICATIONS,
    "sampling/createMessage",
    "roots/list",
    "elicitation/create",
    "tasks/get",
    "tools/mine",
]


@pytest.mark.parametrize("kind", ["query", "command"])
@pytest.mark.parametrize("name", sorted(MCP_NAMES))
def test_names_of_mcp_are_refused_for_json_rpc(kind: str, name: str) -> None:
    """On stdio both share one line."""
    with pytest.raises(UsageError, match=r"a method of MCP[\s\S]*fix:"):
        getattr(make_app(), kind)(name=name, expose=("rpc",))(plain)


def test_tool_may_be_called_ping() -> None:
    app = make_app()
    app.tool(name="ping")(plain)
    with pytest.raises(UsageError, match="a method of MCP"):
        app.query(name="initialize")(plain)


def test_tool_name_is_too_long_for_model_apis() -> None:
    """SEP-986: 64 characters are what all of them take."""
    for kind in ("query", "command", "tool"):
        with pytest.raises(UsageError, match=r"has 65 characters[\s\S]*fix:[\s\S]*tool_name="):
            getattr(make_app(), kind)(name="x" * 65)(plain)
        getattr(make_app(), kind)(name="x" * 65, tool_name="x")(plain)
    make_app().query(name="x" * 65, expose=("rpc",))(plain)


@pytest.mark.parametrize(
    "name", ["", "a b", "a/b", "a,b", "größe", "a:b", "x" * 65, "a\n", " a", "a€", "\U0001f600", 7]
)
def test_stated_tool_name_is_one_that_mcp_takes(name: Any) -> None:
    for kind in ("query", "command", "tool"):
        with pytest.raises(UsageError, match=r"tool_name|65 characters"):
            getattr(make_app(), kind)(name="plain", tool_name=name)(plain)


def test_tool_name_of_a_method_that_is_not_a_tool() -> None:
    with pytest.raises(UsageError, match=r"not served to them[\s\S]*drop tool_name"):
        make_app().query(tool_name="x", expose=("rpc",))(plain)


@pytest.mark.parametrize(
    "name", ["getUser", "DATA_EXPORT_v2", "admin.tools.list", "user-profile", "_", ".", "x" * 64]
)
def test_names_of_tools(name: str) -> None:
    make_app().tool(name=name)(plain)


@pytest.mark.parametrize(
    ("of", "argument", "why"),
    [
        ("greet", "whom", "greet has no argument 'whom'[\\s\\S]*who"),
        ("greeting", "who", "'greeting' is neither a prompt nor a resource template[\\s\\S]*greet"),
        ("test://{id}/x", "id", "neither a prompt nor a resource template"),
        ("test://{id}", "name", "has no argument 'name'"),
        ("test://fixed", "id", "neither a prompt nor a resource template"),
    ],
)
def test_completion_without_a_target_is_refused(of: str, argument: str, why: str) -> None:
    app = make_app()
    app.prompt(name="greet")(lambda who: who)
    app.resource("test://{id}")(lambda id: id)
    app.resource("test://fixed")(lambda: "")
    with pytest.raises(UsageError, match=why):
        app.completion(of, argument)(lambda typed: [typed])
    app.completion("greet", "who")(lambda typed: [typed])
    app.completion("test://{id}", "id")(lambda typed: [typed])


def test_methods_of_one_name_are_refused() -> None:
    app = make_app()
    app.query(plain)
    with pytest.raises(UsageError, match="already a method called 'plain'"):
        app.command(plain)


def test_nameless_callable_needs_a_name() -> None:
    class Adder:
        def __call__(self, a: int) -> int:
            return a + 1

    with pytest.raises(UsageError, match="needs a name"):
        make_app().query(Adder())
    app = make_app()
    app.query(name="add")(Adder())
    assert result(app.handle_sync(call("add", [1]))) == 2


@pytest.mark.parametrize("mode", ["prod", "", "Production"])
def test_unknown_mode_is_refused(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mode:
        with pytest.raises(UsageError, match="is not a mode"):
            App("x", mode=mode)  # type: ignore[arg-type]
    monkeypatch.setenv("WIRECALL_MODE", mode or "dev")
    with pytest.raises(UsageError, match="WIRECALL_MODE"):
        App("x")


def test_mode_and_ledger_have_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WIRECALL_MODE", raising=False)
    assert (App("x").mode, App("x").ledger_url) == ("development", "memory:")
    monkeypatch.setenv("WIRECALL_MODE", "production")
    assert (App("x").mode, App("x").ledger_url) == ("production", "sqlite:.wirecall/ledger.db")
    assert App("x", mode="development").mode == "development"


def test_context_is_injected_by_its_type_and_describes_the_call() -> None:
    app = make_app()
    seen: list[Context] = []

    @app.query(notification_allowed=True)
    def look(a: int, ctx: Context) -> None:
        seen.append(ctx)

    app.handle_sync(
        call("look", {"a": 1, "_meta": {"traceparent": "00-1-2-01", "x": 5}}, id="abc"),
        caller="ada",
    )
    app.handle_sync(
        b'[{"jsonrpc":"2.0","method":"look","params":[1]},{"jsonrpc":"2.0","method":"look","params":[2],"id":1.50}]'
    )
    first, second, third = seen
    assert (first.method, first.kind, first.id, first.caller, first.position) == (
        "look",
        Kind.QUERY,
        "abc",
        "ada",
        None,
    )
    assert (first.correlation_id, first.is_notification, first.idempotency_key) == (
        "abc",
        False,
        None,
    )
    assert first.meta == {"traceparent": "00-1-2-01", "x": 5}
    assert first.traceparent == "00-1-2-01"
    assert (first.attempt, first.fence, first.downstream_key, first.replayed) == (1, 0, None, False)
    with pytest.raises(UsageError, match="transactional"):
        _ = first.db
    assert (second.is_notification, second.position, second.meta, second.traceparent) == (
        True,
        0,
        {},
        None,
    )
    assert second.correlation_id == second.correlation_id
    assert isinstance(second.correlation_id, str)
    assert (third.position, third.correlation_id) == (1, "1.50")


@pytest.mark.parametrize("made", [App("x"), Router()], ids=["app", "router"])
def test_decorator_that_would_declare_nothing_is_refused(made: Any) -> None:
    def article(sku: str) -> str:
        return sku

    for verb in ("query", "command", "tool", "prompt"):
        with pytest.raises(
            UsageError, match=rf"@{verb}\('price'\): expected a function[\s\S]*@app.{verb}\(name="
        ):
            getattr(made, verb)("price")
    with pytest.raises(UsageError, match=r"@resource needs a URI[\s\S]*@app\.resource\("):
        made.resource(article)


def test_options_in_the_form_of_other_libraries_are_named() -> None:
    app: Any = App("x")
    with pytest.raises(
        UsageError, match=r"annotations must be ToolAnnotations, got dict[\s\S]*readOnlyHint=True"
    ):
        app.tool(annotations={"readOnlyHint": True})
    with pytest.raises(
        UsageError, match=r"expose must be a tuple, got 'mcp'[\s\S]*expose=\('mcp',\)"
    ):
        app.query(expose="mcp")


@pytest.mark.parametrize("made", [App("x"), Router()], ids=["app", "router"])
def test_option_that_a_decorator_does_not_have_is_refused(made: Any) -> None:
    wrong: list[tuple[Callable[..., Any], str, str]] = [
        (made.query, "titel", "title"),
        (made.command, "on_crashh", "on_crash"),
        (made.tool, "tag", "tags"),
        (made.prompt, "titel", "title"),
        (partial(made.resource, "shop://articles"), "mimetype", "mime_type"),
        (partial(made.extension_method, "com.example/x"), "timeouts", "timeout"),
        (made.provide, "block", "blocking"),
        (partial(made.include, Router()), "prefx", "prefix"),
        (partial(App, "x"), "ledgr", "ledger"),
        (Router, "preffix", "prefix"),
        (App("x").configure, "origin", "origins"),
        (App("x").run, "prot", "port"),
    ]
    for declare, option, meant in wrong:
        with pytest.raises(
            UsageError, match=rf"\w\(\) has no option '{option}'[\s\S]*use {meant}="
        ):
            declare(**{option: "x"})
    with pytest.raises(UsageError, match=r"query\(\) has no option 'wholly_new'\.$"):
        made.query(wholly_new=1)
    with pytest.raises(UsageError, match=r"completion\(\) has no option 'title'"):
        made.completion("review", "code", title="x")


def test_option_of_another_decorator_leads_to_that_one() -> None:
    app: Any = App("x")
    with pytest.raises(
        UsageError,
        match=r"query\(\) has no option 'retention'[\s\S]*command and tool can[\s\S]*@app\.command",
    ):
        app.query(retention=60)
    # The annotations of a tool would replace it silently.
    with pytest.raises(UsageError, match=r"tool\(\) has no option 'destructive'"):
        app.tool(destructive=True)
    with pytest.raises(
        UsageError, match=r"resource\(\) has no option 'uri'[\s\S]*without its name"
    ):
        app.resource(uri="shop://articles")


def test_option_without_its_name_is_named() -> None:
    app: Any = App("x")
    with pytest.raises(
        UsageError, match=r"include\(\) takes its options by name[\s\S]*use prefix='orders\.'"
    ):
        app.include(Router(), "orders.")
    with pytest.raises(
        UsageError, match=r"Router\(\) takes its options by name[\s\S]*use prefix='orders\.'"
    ):
        Router("orders.")  # type: ignore[call-arg]
    with pytest.raises(
        UsageError, match=r"App\(\) takes its options by name[\s\S]*use version='1\.0'"
    ):
        App("x", "1.0")  # type: ignore[call-arg]


# A program without a type checker passes values of any type.
AnyApp: Any = App
AnyRouter: Any = Router
AnyLimits: Any = Limits


@pytest.mark.parametrize(
    ("declare", "why"),
    [
        (lambda: AnyApp("x").query(name=5), r"query\(\): name must be a string, got int"),
        (lambda: AnyApp("x").tool(title=5), r"tool\(\): title must be a string"),
        (lambda: AnyRouter().prompt(name=5), r"prompt\(\): name must be a string"),
        (
            lambda: AnyApp("x").resource("shop://a", mime_type=5),
            r"resource\(\): mime_type must be a string",
        ),
        (lambda: AnyRouter(prefix=5), r"Router\(\): prefix must be a string"),
        (lambda: AnyApp("x").include(Router(), prefix=5), r"include\(\): prefix must be a string"),
        (lambda: AnyApp("x").include(App("y")), r"include\(\) takes a Router, got App"),
        (lambda: AnyApp(5), r"The name of an app must be a string, got int"),
        (lambda: AnyApp("x", version=1), r"App\(\): version must be a string"),
        (lambda: AnyApp("x", ledger=5), r"App\(\): ledger must be a string"),
        (lambda: AnyApp("x").configure(ledger=5), r"configure\(\): ledger must be a string"),
        (
            lambda: AnyApp("x", middleware=[5]),
            r"middleware: expected a function \(context, next\), got int",
        ),
        (lambda: AnyLimits(batch="10"), r"Limits\(batch='10'\): expected a number, got str"),
        (lambda: AnyLimits(batch=True), r"expected a number, got bool"),
        (
            lambda: AnyApp("x").run("http", port="80"),
            r"port must be a number from 0 to 65535, got '80'",
        ),
        (
            lambda: AnyApp("x").run("http", port=80.5),
            r"port must be a number from 0 to 65535, got 80\.5",
        ),
    ],
)
def test_value_of_a_wrong_type_is_named(declare: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        declare()


async def test_raw_method_gets_its_params_as_they_came() -> None:
    """A function that passes params on decodes nothing: digits, order and double members stay."""
    app = make_app()
    seen: list[bytes] = []

    async def relay(ctx: Context) -> str:
        seen.append(b"" if ctx.params is UNSET else bytes(ctx.params))
        return ctx.record

    app.registry.add(Method(relay, Kind.QUERY, name="relay", raw=True, record="relay.3f9a2c"))
    for params in (b'{"b":0.10,"a":1e2,"a":2}', b"[1, 2]", b""):
        member = b"" if not params else b',"params":' + params
        message = b'{"jsonrpc":"2.0","id":1,"method":"relay"' + member + b"}"
        assert result(await app.handle(message)) == "relay.3f9a2c"
        assert seen.pop() == params


async def test_raw_command_is_recorded_under_its_own_name() -> None:
    """The record's name is apart from the method's, and a key among the params still counts."""
    app = make_app()
    runs: list[object] = []

    async def pay(ctx: Context) -> int:
        runs.append(ctx.params)
        return len(runs)

    app.registry.add(Method(pay, Kind.COMMAND, name="pay", raw=True, record="bank.3f9a2c/pay"))
    for _ in range(2):
        assert result(await app.handle(call("pay", {"to": "ann"}, key="k"))) == 1
    ledger = await app.ledger()
    assert await ledger.get(RecordId("", "pay", "k")) is None
    record = await ledger.get(RecordId("", "bank.3f9a2c/pay", "k"))
    assert record is not None and record.state is State.DONE


def test_raw_method_needs_a_context_and_nothing_else() -> None:
    def plain(a: int) -> int:
        return a

    with pytest.raises(UsageError, match=r"got a function of \(a\)"):
        Method(plain, Kind.QUERY, raw=True)

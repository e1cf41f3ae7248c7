"""The scopes of a token: tools, resources, templates, prompts and methods, in every revision and on
/rpc.
"""

from typing import Any

import pytest

from tests.auth import METADATA, Shop, call, ran
from tests.mcp.asgi import LEGACY, R2, R4, HttpClient, enveloped, hello, repeated, request
from wirecall import App, Context, Router, connect
from wirecall.auth import Identity, Tokens, digest

LOYALTY: dict[str, Any] = {"extensions": {"com.example/loyalty": {}}}

# An operation, its params, and all the scopes that it asks for.
OPERATIONS: dict[str, tuple[str, Any, list[str]]] = {
    "a tool": ("tools/call", {"name": "price", "arguments": {"sku": "tea"}}, ["prices:read"]),
    "a command": (
        "tools/call",
        {"name": "order", "arguments": {"sku": "tea"}},
        ["orders:write", "orders:audit"],
    ),
    "a tool by argument": (
        "tools/call",
        {"name": "cancel", "arguments": {"id": "7"}},
        ["orders:7"],
    ),
    "a resource": ("resources/read", {"uri": "shop://news"}, ["news:read"]),
    "a template by argument": (
        "resources/read",
        {"uri": "shop://orders/123"},
        ["orders:read", "orders:123"],
    ),
    "a prompt": ("prompts/get", {"name": "greet", "arguments": {"name": "Ada"}}, ["prompts:use"]),
    "a completion": (
        "completion/complete",
        {
            "ref": {"type": "ref/prompt", "name": "greet"},
            "argument": {"name": "name", "value": "A"},
        },
        ["prompts:use"],
    ),
    "a method of an extension": ("loyalty/points", None, ["points:read"]),
}


def insufficient(scopes: list[str]) -> str:
    got = 'error="insufficient_scope", error_description="the token has too little scope"'
    return f'Bearer {got}, scope="{" ".join(scopes)}", resource_metadata="{METADATA}"'


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_operation_asks_for_all_its_scopes_at_once(operation: str) -> None:
    """The rules of SEP-2350: the challenge has every scope of the operation, also those that the
    token has already.
    """
    shop = Shop()
    method, params, scopes = OPERATIONS[operation]
    for granted in ("", "other:scope", *(" ".join(scopes[:n]) for n in range(1, len(scopes)))):
        answer = await shop.mcp(shop.token(granted), method, params, LOYALTY)
        assert (answer.status, answer.challenge) == (403, insufficient(scopes))
        assert answer.json["error"]["data"] == {"scopes": scopes}
        assert ran(shop.app) == []
    answer = await shop.mcp(shop.token(" ".join(scopes)), method, params, LOYALTY)
    assert answer.status == 200
    assert "result" in answer.json, answer.body


@pytest.mark.parametrize("revision", LEGACY)
@pytest.mark.parametrize(
    "operation",
    [name for name in OPERATIONS if name not in ("a completion", "a method of an extension")],
)
async def test_older_revisions_ask_for_the_same(revision: str, operation: str) -> None:
    shop = Shop()
    method, params, scopes = OPERATIONS[operation]
    few = HttpClient(
        shop.server, revision, headers={"authorization": f"Bearer {shop.token('few')}"}
    )
    await few.open()
    answered = await few.post(request(method, params)).started()
    assert (answered.status, answered.header("www-authenticate")) == (403, insufficient(scopes))
    assert ran(shop.app) == []
    await few.close()
    full = HttpClient(
        shop.server, revision, headers={"authorization": f"Bearer {shop.token(' '.join(scopes))}"}
    )
    await full.open()
    assert await full.result(method, params)
    await full.close()


async def test_array_of_mcp_is_refused_whole() -> None:
    shop = Shop()
    client = HttpClient(
        shop.server,
        R2,
        headers={"authorization": f"Bearer {shop.token('orders:write orders:audit')}"},
    )
    await client.open()
    entries = [
        request(*OPERATIONS[name][:2], id)
        for id, name in enumerate(("a command", "a tool", "a resource"))
    ]
    answered = await client.post(entries).started()
    scopes = ["orders:write", "orders:audit", "prices:read", "news:read"]
    assert (answered.status, answered.header("www-authenticate")) == (403, insufficient(scopes))
    assert ran(shop.app) == []
    await client.close()


async def test_array_of_rpc_is_refused_whole_and_runs_whole() -> None:
    shop = Shop()
    entries = [
        call("order", {"sku": "tea"}, 1),
        call("price", {"sku": "tea"}, 2),
        call("unknown", None, 3),
        7,
    ]
    answer = await shop.rpc(shop.token("orders:write orders:audit"), entries)
    assert (answer.status, answer.challenge) == (
        403,
        insufficient(["orders:write", "orders:audit", "prices:read"]),
    )
    assert ran(shop.app) == []
    answer = await shop.rpc(shop.token("orders:write orders:audit prices:read"), entries)
    assert answer.status == 200
    assert [entry.get("result") for entry in answer.json] == ["ordered tea", 3, None, None]


async def test_scopes_by_argument_see_the_values_of_the_handler() -> None:
    """`shop://orders/%37` is order 7 for the handler. A scope for "%37" would be another one."""
    shop = Shop()
    answer = await shop.mcp(
        shop.token("orders:read"), "resources/read", {"uri": "shop://orders/%37"}
    )
    assert answer.challenge == insufficient(["orders:read", "orders:7"])


async def test_invalid_params_are_refused_as_invalid_params() -> None:
    shop = Shop()
    answer = await shop.mcp(shop.token(), "resources/read", {"uri": "shop://orders/tea"})
    assert answer.json["error"]["code"] == -32602
    answer = await shop.mcp(shop.token(), "tools/call", {"name": "cancel", "arguments": {"id": 7}})
    assert answer.json["result"]["isError"]


async def test_scope_by_argument_does_not_get_into_the_header() -> None:
    """A string with a quote or a space is not a scope, so no token has it, and a challenge does not
    carry it.
    """
    shop = Shop()
    for id in ('1", realm="evil', "1 orders:2", "1\r\nx: y"):
        arguments = {"name": "cancel", "arguments": {"id": id}}
        answer = await shop.mcp(shop.token("orders:1 orders:2 realm"), "tools/call", arguments)
        assert (answer.status, answer.challenge) == (
            403,
            insufficient([]).replace('scope="", ', ""),
        )


async def test_broader_scope_stands_for_narrower_ones() -> None:
    shop = Shop(
        hierarchy={
            "orders:admin": ["orders:write"],
            "orders:write": ["orders:audit", "orders:read"],
        }
    )
    answer = await shop.rpc(shop.token("orders:admin"), call("whoami"))
    assert answer.json["result"]["scopes"] == [
        "orders:admin",
        "orders:audit",
        "orders:read",
        "orders:write",
    ]
    assert (await shop.rpc(shop.token("orders:admin"), call("order", ["tea"]))).status == 200
    assert (await shop.rpc(shop.token("orders:read"), call("order", ["tea"]))).status == 403
    # A hierarchy may be a function, and may be circular.
    shop = Shop(hierarchy=lambda scopes: ["prices:read"] if "staff" in scopes else [])
    assert (await shop.rpc(shop.token("staff"), call("price", ["tea"]))).status == 200
    shop = Shop(hierarchy={"a": ["b"], "b": ["a", "prices:read"]})
    assert (await shop.rpc(shop.token("a"), call("price", ["tea"]))).status == 200


# --- before anything happens ----------------------------------------------------------------------


async def test_scopes_are_checked_before_a_stream_begins() -> None:
    shop = Shop()

    @shop.app.tool(scopes="slow:use")
    async def slow(ctx: Context) -> str:
        await ctx.progress(1)
        return "done"

    message = enveloped("tools/call", {"name": "slow", "_meta": {"progressToken": 1}})
    answer = await shop.ask("POST", "/mcp", shop.token(), message, repeated(message))
    assert (answer.status, answer.headers["content-type"]) == (403, "application/json")
    answer = await shop.ask("POST", "/mcp", shop.token("slow:use"), message, repeated(message))
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream")


async def test_subscription_asks_for_the_scopes_of_its_resources() -> None:
    shop = Shop()
    params = {"notifications": {"resourceSubscriptions": ["shop://news", "shop://orders/1"]}}
    answer = await shop.mcp(shop.token("news:read"), "subscriptions/listen", params)
    assert (answer.status, answer.challenge) == (
        403,
        insufficient(["news:read", "orders:read", "orders:1"]),
    )
    # A resource that cannot be read does not hide the scopes of the others.
    params = {
        "notifications": {
            "resourceSubscriptions": ["shop://orders/tea", "shop://nothing", "shop://news"]
        }
    }
    answer = await shop.mcp(shop.token(), "subscriptions/listen", params)
    assert (answer.status, answer.challenge) == (403, insufficient(["news:read"]))
    client = HttpClient(shop.server, R4, headers={"authorization": f"Bearer {shop.token()}"})
    await client.open()
    answered = await client.post(request("resources/subscribe", {"uri": "shop://news"})).started()
    assert answered.status == 403
    await client.close()


@pytest.mark.parametrize("way", ["rpc", "mcp"])
async def test_replay_is_authorized_again(way: str) -> None:
    shop = Shop()
    full = shop.token("orders:write orders:audit")
    few = shop.token("orders:write")
    key = {"idempotency_key": "key-1"}

    async def order(token: str) -> Any:
        if way == "rpc":
            return await shop.rpc(token, call("order", {"sku": "tea", **key}))
        return await shop.mcp(
            token, "tools/call", {"name": "order", "arguments": {"sku": "tea", **key}}
        )

    assert (await order(full)).status == 200
    refused = await order(few)
    assert (refused.status, b"ordered" in refused.body) == (403, False)
    replayed = await order(full)
    assert (replayed.status, replayed.headers["idempotent-replayed"]) == (200, "true")
    assert ran(shop.app) == ["tea"]


# --- bound to the caller --------------------------------------------------------------------------


async def test_records_of_two_issuers_are_apart_although_their_subjects_are_the_same() -> None:
    app = App(
        "shop",
        auth=Tokens(
            {digest(name): Identity("alice", issuer=f"https://{name}.test") for name in ("a", "b")}
        ),
    )
    done: list[str] = []

    @app.command
    def order(sku: str, ctx: Context) -> str:
        done.append(ctx.caller)
        return ctx.caller

    shop = Shop()
    shop.server = app.asgi()
    for token in ("a", "b", "a"):
        answer = await shop.rpc(token, call("order", {"sku": "tea", "idempotency_key": "same"}))
        assert answer.json["result"] == f"https://{token}.test alice"
    assert done == ["https://a.test alice", "https://b.test alice"]


async def test_session_is_valid_for_its_caller_only() -> None:
    shop = Shop()
    opened = await shop.ask("POST", "/mcp", shop.token(), hello(R4))
    session = {"mcp-session-id": opened.headers["mcp-session-id"], "mcp-protocol-version": R4}
    for subject, status in (("mallory", 404), ("alice", 200)):
        answer = await shop.ask(
            "POST", "/mcp", shop.token(subject=subject), request("ping"), session
        )
        assert answer.status == status
    # Another token of the same caller continues the session.
    answer = await shop.ask("POST", "/mcp", shop.token("more:scope"), request("ping"), session)
    assert answer.status == 200
    answer = await shop.ask("DELETE", "/mcp", shop.token(subject="mallory"), None, session)
    assert answer.status == 404


async def test_task_is_valid_for_its_caller_and_its_scopes_only() -> None:
    shop = Shop()
    seen: list[Identity | None] = []

    @shop.app.command(task=True, scopes="reports:make")
    async def report(ctx: Context) -> str:
        seen.append(ctx.identity)
        return "the report"

    tasks: dict[str, Any] = {"extensions": {"io.modelcontextprotocol/tasks": {}}}
    made = await shop.mcp(shop.token("reports:make"), "tools/call", {"name": "report"}, tasks)
    task = {"taskId": made.json["result"]["taskId"]}
    assert (await shop.mcp(shop.token("reports:make", "mallory"), "tasks/get", task, tasks)).json[
        "error"
    ]["code"] == -32602
    refused = await shop.mcp(shop.token(), "tasks/get", task, tasks)
    assert (refused.status, refused.challenge) == (403, insufficient(["reports:make"]))
    assert (await shop.mcp(shop.token("reports:make"), "tasks/get", task, tasks)).status == 200
    assert [identity and identity.subject for identity in seen] == ["alice"]
    await shop.app.aclose()


async def test_base_scopes_are_required_by_every_operation() -> None:
    shop = Shop(scopes=["mcp:use"])
    for message in (
        hello(R4),
        request("ping"),
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
    ):
        answer = await shop.ask("POST", "/mcp", shop.token(), message, {"mcp-protocol-version": R4})
        assert (answer.status, answer.challenge) == (403, insufficient(["mcp:use"]))
    assert (
        await shop.ask("GET", "/mcp", shop.token(), None, {"mcp-protocol-version": R4})
    ).status == 403
    assert (await shop.mcp(shop.token(), "tools/list")).status == 403
    assert (await shop.mcp(shop.token("mcp:use"), "tools/list")).status == 200
    answer = await shop.mcp(shop.token(), "tools/call", OPERATIONS["a tool"][1])
    assert answer.challenge == insufficient(["mcp:use", "prices:read"])


# --- lists ----------------------------------------------------------------------------------------

LISTS = {
    "tools": "name",
    "resources": "uri",
    "resources/templates": "uriTemplate",
    "prompts": "name",
}


async def listed(shop: Shop, token: str) -> set[str]:
    found = set()
    for kind, member in LISTS.items():
        result = (await shop.mcp(token, f"{kind}/list")).json["result"]
        assert result["cacheScope"] == "private"
        found |= {
            entry[member] for entry in result["resourceTemplates" if "templates" in kind else kind]
        }
    return found


async def test_hide_leaves_out_of_lists_what_the_caller_may_not_use() -> None:
    everything = {
        "whoami",
        "price",
        "order",
        "cancel",
        "shop://news",
        "shop://orders/{id}",
        "greet",
    }
    shop = Shop(hide=True)
    # Scopes by argument are not known before the call, so the list shows operations that need them.
    assert await listed(shop, shop.token()) == {"whoami", "cancel", "shop://orders/{id}"}
    assert await listed(shop, shop.token("prices:read news:read")) == everything - {
        "order",
        "greet",
    }
    assert (
        await listed(
            shop, shop.token("prices:read orders:write orders:audit news:read prompts:use")
        )
        == everything
    )
    document = (await shop.rpc(shop.token("prices:read"), call("rpc.discover"))).json["result"]
    assert {method["name"] for method in document["methods"]} == {"whoami", "price"}
    open_shop = Shop()
    assert await listed(open_shop, open_shop.token()) == everything


async def test_scopes_and_tokens_do_not_apply_without_http() -> None:
    """On stdio and in memory the caller is the user of this machine (2025-03-26 and later:
    credentials come otherwise).
    """

    async with connect(Shop().app) as client:
        assert await client.call("price", {"sku": "tea"}) == 3


def test_identity_of_any_kind_has_a_name() -> None:
    assert Identity("alice").name == "alice"
    assert Identity("alice", "web", "https://a.test").name == "https://a.test alice"
    assert Identity(None, "web", "https://a.test").name == "https://a.test web"


async def test_scopes_of_an_include_are_added_to_those_of_each_declaration() -> None:
    shop = Shop()
    router = Router(prefix="stock.")
    counted = []

    @router.query(scopes="stock:list", tags=["list"])
    def count() -> int:
        counted.append("all")
        return 1

    @router.query(scopes=lambda id: f"stock:{id}")
    def look(id: str) -> str:
        counted.append(id)
        return id

    @router.query
    def free() -> None:
        counted.append("free")

    shop.app.include(router, scopes="stock", tags=["shop"])
    asked: dict[str, tuple[Any, list[str]]] = {
        "stock.count": (None, ["stock", "stock:list"]),
        "stock.look": ({"id": "7"}, ["stock", "stock:7"]),
        "stock.free": (None, ["stock"]),
    }
    for method, (params, scopes) in asked.items():
        for granted in ("", "stock", "stock stock:list stock:7"):
            answer = await shop.rpc(shop.token(granted), call(method, params))
            if {*scopes} <= {*granted.split()}:
                assert "result" in answer.json
            else:
                assert (answer.status, answer.json["error"]["data"]["scopes"]) == (403, scopes)
    assert counted == ["all", "7", "free", "free"]
    tools = (await shop.mcp(shop.token(""), "tools/list")).json["result"]["tools"]
    tags = {
        tool["name"]: tool["_meta"]["io.wirecall/tags"]
        for tool in tools
        if tool["name"].startswith("stock_")
    }
    assert tags == {"stock_count": ["list", "shop"], "stock_look": ["shop"], "stock_free": ["shop"]}

"""The public names by topic: what `docs_reference` documents, and `test_public` compares."""

from typing import NamedTuple


class Topic(NamedTuple):
    """One page of the reference."""

    file: str
    title: str
    about: str
    names: list[str]
    # Lines before the imports of the page's first block.
    prelude: str = ""
    # Tables of options: a title and the class that has them.
    options: tuple[tuple[str, str], ...] = ()


def of(module: str, *names: str) -> list[str]:
    return [f"{module}.{name}" for name in names]


# Programs get objects of these classes, and do not make them.
MADE = {
    "wirecall.Context",
    "wirecall.client.client.Client",
    "wirecall.client.sync.SyncClient",
    "wirecall.mcp.client.client.McpClient",
    "wirecall.mcp.client.client.SyncMcpClient",
    "wirecall.auth.Login",
    "wirecall.auth.Store",
    "wirecall.Kind",
}

TOPICS = [
    Topic(
        "app",
        "Apps and methods",
        "What a server is made of. [methods.md](../methods.md) is the introduction.",
        of("wirecall", "App", "Router", "Kind", "Limits", "ToolAnnotations", "BatchTool")
        + of("wirecall", "Header", "Secret"),
        options=(
            ("Options of `query`", "wirecall.routing.QueryOptions"),
            ("Options of `command`", "wirecall.routing.CommandOptions"),
            ("Options of `tool`", "wirecall.routing.ToolOptions"),
            ("Options of `prompt`", "wirecall.routing.PromptOptions"),
        ),
    ),
    Topic(
        "context",
        "The context of a call",
        "What a handler and middleware see of a call. [context.md](../context.md) has a table.",
        of("wirecall", "Context"),
        prelude="from wirecall import App\n",
    ),
    Topic(
        "commands",
        "Outcomes of commands",
        "What a reconcile function answers, and an operator. [commands.md](../commands.md) "
        "is the introduction.",
        of("wirecall", "Done", "NotDone", "CannotTell"),
        prelude="import asyncio\n\nfrom wirecall import App\n",
    ),
    Topic(
        "errors",
        "Errors",
        "What wirecall raises, and what handlers raise. [errors.md](../errors.md) lists all codes.",
        of("wirecall", "WirecallError", "UsageError", "RpcError", "DomainError", "ToolError")
        + of("wirecall", "ProtocolError", "CallFailed", "Unauthorized"),
        prelude="from wirecall import App, Retry, connect_sync\n",
    ),
    Topic(
        "client",
        "Clients",
        "Programs that call servers. [client.md](../client.md) and "
        "[mcp-client.md](../mcp-client.md) are the introductions.",
        of("wirecall", "connect", "connect_sync", "Retry")
        + of("wirecall.client.client", "Client")
        + of("wirecall.client.sync", "SyncClient")
        + of("wirecall.mcp.client.client", "McpClient", "SyncMcpClient"),
        prelude="import asyncio\n\nfrom wirecall import App\n",
        options=(
            ("Options of `connect`", "wirecall.client.connect.ConnectOptions"),
            ('Further ones with `protocol="mcp"`', "wirecall.client.connect.McpOptions"),
        ),
    ),
    Topic(
        "jsonrpc",
        "JSON-RPC as pure functions",
        "Bytes in, bytes out, without an app. [jsonrpc.md](../jsonrpc.md) is the introduction.",
        of("wirecall.jsonrpc", "dispatch_line", "dispatch_line_async", "parse_request")
        + of("wirecall.jsonrpc", "parse_batch", "parse_response", "parse_response_batch")
        + of("wirecall.jsonrpc", "make_request", "make_notification", "make_response")
        + of("wirecall.jsonrpc", "make_error", "make_batch", "make_reply", "Request", "Batch")
        + of("wirecall.jsonrpc", "Response", "ResponseBatch", "ErrorObject", "RpcError")
        + of("wirecall.jsonrpc", "InvalidRequest", "MethodNotFound", "InvalidParams"),
        prelude="import asyncio\n\nfrom wirecall import App, connect_sync\n",
    ),
    Topic(
        "mcp",
        "Values of MCP",
        "What tools, prompts and resources return besides data. [mcp.md](../mcp.md) is the "
        "introduction.",
        of("wirecall.mcp", "Text", "Image", "Audio", "Embedded", "ResourceLink", "ToolResult")
        + of("wirecall.mcp", "Message", "Icon", "Elicited", "Sampled", "Root"),
    ),
    Topic(
        "auth",
        "Authorization",
        "Tokens on both sides. [authorization.md](../authorization.md) is about servers, "
        "[authorization-client.md](../authorization-client.md) about clients.",
        of("wirecall.auth", "Access", "Jwt", "Introspection", "Tokens", "digest", "Verifier")
        + of("wirecall.auth", "Identity", "Browser", "ClientCredentials", "Workload", "IdJag")
        + of("wirecall.auth", "Stored", "Store", "FileStore", "KeyringStore", "MemoryStore")
        + of("wirecall.auth", "Login"),
        prelude="from wirecall import App\n",
    ),
    Topic(
        "middleware",
        "Middleware, logs and the audit trail",
        "What stands around calls, and what it writes. [operating.md](../operating.md) is the "
        "introduction.",
        of("wirecall.middleware", "RateLimit")
        + of("wirecall.tracing", "Tracing", "trace_meta")
        + of("wirecall.logs", "CallIds", "JsonFormatter")
        + of("wirecall.audit", "verify")
        + of("wirecall.config", "load_config", "check_config"),
        prelude="import logging\n\nfrom wirecall import App\n",
    ),
    Topic(
        "gateway",
        "Gateways",
        "A gateway from Python. [gateway.md](../gateway.md) is the introduction.",
        of("wirecall.gateway", "Gateway", "GatewaySettings", "UpstreamSettings", "ToolSettings"),
    ),
    Topic(
        "testing",
        "Testing",
        "For the tests of your program. [testing.md](../testing.md) is the introduction.",
        of("wirecall.testing", "client", "Faults", "FakeClock", "ledger", "assert_contract")
        + of("wirecall.testing.auth", "AuthorizationServer", "AuthFaults"),
        prelude="import asyncio\n\nfrom wirecall import App, testing\n",
    ),
]

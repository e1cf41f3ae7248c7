"""The rooms of the source, in layers: what `test_layers` asks and the picture of the docs shows."""

# A room is a module or a package. Of the names that fit a module, the longest is its room. A room
# imports only rooms of lower layers, which stand first.
LAYERS = [
    ["errors", "logs", "version"],
    ["limits"],
    ["protocol", "ledger.base", "files", "options", "aio", "answers"],
    ["server", "ledger", "transports", "mcp", "jsonrpc"],
    ["commands", "client", "audit", "tracing", "auth", "ratelimit", "routing"],
    ["mcp.server", "mcp.client", "mounting", "middleware"],
    ["resolve"],
    ["app", "config", "client.connect"],
    ["contract", "gateway", "console"],
    ["cli", "testing"],
]

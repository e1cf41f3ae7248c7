"""A call as something to paste: a command line, Python, curl, or the message."""

import shlex

import msgspec

from wirecall.console.worker import Served
from wirecall.protocol.messages import JsonObject


def snippets(served: Served, row: JsonObject, params: str | None) -> JsonObject:
    """Return four ways to make a call again. Without its params they have a place for them."""
    method = str(row["tool"] or row["method"])
    key = row["key"]
    address = served.address
    if not address.startswith("http"):
        address = "http://127.0.0.1:8420"
    shown = params
    if params is None:
        shown = "{}"
    try:
        value = msgspec.json.decode(shown or "{}")
    except msgspec.DecodeError:
        value = {}
    message: JsonObject = {"jsonrpc": "2.0", "id": 1, "method": row["method"], "params": value}
    if row["tool"] is not None:
        message |= {"method": "tools/call", "params": {"name": method, "arguments": value}}
    elif key is not None and isinstance(value, dict):
        message["params"] = {"idempotency_key": key, **value}
    text = msgspec.json.encode(message).decode()
    words = ["wirecall", "call", address, method]
    arguments = "..."
    if isinstance(value, dict):
        words += [f"{name}:={msgspec.json.encode(each).decode()}" for name, each in value.items()]
        arguments = ", ".join(f"{name}={each!r}" for name, each in value.items())
    keyed = ""
    if key is not None:
        words += ["--key", str(key)]
        keyed = f", key={str(key)!r}"
    path = "/mcp" if row["tool"] is not None else "/rpc"
    curl = ["curl", f"{address}{path}", "-H", "Content-Type: application/json", "-d", text]
    return {
        "cli": shlex.join(words),
        "python": f"client.call({method!r}, dict({arguments}){keyed})",
        "curl": shlex.join(curl),
        "json": text,
    }

"""A call as something to paste: a command line, a Python program, curl, or the message.

Each of them has the key of the call, so a command that was recorded is answered from the ledger. Each
goes to the endpoint of the call's protocol: the ledger distinguishes `charge` and `tools/call:charge`.
"""

import shlex
from typing import Any

import msgspec

from wirecall.console.worker import Served
from wirecall.mcp.types import KEY_META
from wirecall.protocol.messages import JsonObject

PROGRAM = """\
import asyncio

from wirecall import connect


async def main() -> None:
    async with connect({address!r}) as client:
        print(await client.{function}({name!r}, {params!r}{key}))


asyncio.run(main())
"""
# Addresses of servers that `wirecall call` and `connect` reach.
REACHED = ("http://", "https://", "tcp://", "unix:")


def snippets(served: Served, row: JsonObject, params: str | None) -> JsonObject:
    """Return ways to make a call again. A call whose params were not kept is sent without params.

    A server on stdio cannot be reached by others: there is only the message.
    """
    value: Any = {}
    try:
        value = msgspec.json.decode(params or "{}")
    except msgspec.DecodeError:
        params = None
    key = row["key"]
    name = str(row["method"])
    path = "/rpc"
    if row["tool"] is not None:
        name = str(row["tool"])
        path = "/mcp"
        if row["upstream"] is not None:
            # The ledger's name of the tool begins with the label of its server.
            name = name.partition("/")[2]
            path = f"/mcp/{row['upstream']}"
    text = msgspec.json.encode(_message(row, name, value)).decode()
    found: JsonObject = {"json": text}
    address = served.address
    if address.startswith(REACHED):
        if address.startswith("http"):
            address += path
        if isinstance(value, dict):
            found["cli"] = _command_line(address, name, params, value, key, path)
        found["python"] = PROGRAM.format(
            address=address,
            function="call" if row["tool"] is None else "call_tool",
            name=name,
            params=value,
            key="" if key is None else f", key={str(key)!r}",
        )
    if address.startswith("http"):
        found["curl"] = shlex.join(
            ["curl", address, "-H", "Content-Type: application/json", "-d", text]
        )
    return found


def discovery(served: Served) -> str | None:
    """Return how to read the OpenRPC document of a server."""
    if not served.address.startswith(REACHED):
        return None
    return shlex.join(["wirecall", "call", served.address, "rpc.discover"])


def first_call(served: Served, methods: list[JsonObject]) -> str | None:
    """Return a call for the beginning: one that reads, and needs no params."""
    names = (
        str(each["name"])
        for each in methods
        if each["rpc"] and each["kind"] == "query" and not each["params"].get("required")
    )
    name = next(names, None)
    if name is None or not served.address.startswith(REACHED):
        return discovery(served)
    return shlex.join(["wirecall", "call", served.address, name])


def _command_line(
    address: str, name: str, params: str | None, value: JsonObject, key: Any, path: str
) -> str:
    words = ["wirecall", "call", address, name]
    if value:
        # The text and not the value: numbers stay as they were sent.
        words += ["--args", str(params)]
    if key is not None:
        words += ["--key", str(key)]
    if path != "/rpc" and not address.startswith("http"):
        words += ["--as", "mcp"]
    return shlex.join(words)


def _message(row: JsonObject, name: str, value: Any) -> JsonObject:
    """Return the message of a call, with its key where the protocol has it."""
    key = row["key"]
    params = value
    if row["tool"] is not None:
        params = {"name": name, "arguments": value}
        if key is not None:
            params["_meta"] = {KEY_META: key}
    elif key is not None and isinstance(value, dict):
        params = {"idempotency_key": key, **value}
    method = row["method"]
    if row["tool"] is not None:
        method = "tools/call"
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}

"""Batches through the batch tool, for its tests: make them, send them, read their answers."""

import json
from typing import Any

from tests.mcp.asgi import Client
from wirecall import App

Json = dict[str, Any]


def entry(tool: str, arguments: Any = None, id: str | None = None, **more: Any) -> Json:
    """Return one entry of a batch."""
    made: Json = {"tool": tool}
    if id is not None:
        made["id"] = id
    if arguments is not None:
        made["arguments"] = arguments
    return {**made, **more}


def ref(id: str, pointer: str = "") -> Json:
    return {"$ref": f"{id}#{pointer}"}


async def send(client: Client, *calls: Json, wanted: list[str] | None = None, **more: Any) -> Json:
    """Send a batch, and return the result of the call."""
    arguments: Json = {"calls": list(calls)}
    if wanted is not None:
        arguments["return"] = wanted
    return await client.tool("batch", arguments, **more)


def results(result: Json) -> list[Json]:
    """Return the answers of the entries, from the text that every revision has."""
    text = result["content"][0]
    assert text["type"] == "text"
    found: list[Json] = json.loads(text["text"])["results"]
    if "structuredContent" in result:
        assert result["structuredContent"] == {"results": found}
    return found


async def run(client: Client, *calls: Json, wanted: list[str] | None = None, **more: Any) -> Json:
    """Send a batch, and return its answers by id."""
    answers = results(await send(client, *calls, wanted=wanted, **more))
    return {each["id"]: each for each in answers}


def shop(app: App) -> list[str]:
    """Add tools of a shop to an app, and return the list of what they have done."""
    done: list[str] = []

    @app.query
    def find_order(customer: str) -> Json:
        return {"customer": customer, "orders": [{"id": 7, "total": 500}, {"id": 8, "total": 20}]}

    @app.command(destructive=False)
    async def charge(order: int, cents: int) -> Json:
        done.append(f"charge {order} {cents}")
        return {"order": order, "charged": cents}

    @app.query
    def receipt(order: int) -> str:
        return f"receipt of {order}"

    @app.command
    def delete_order(order: int) -> str:
        done.append(f"delete {order}")
        return "deleted"

    return done

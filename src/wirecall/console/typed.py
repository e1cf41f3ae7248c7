"""The message of a call that a person makes on a page."""

import msgspec

from wirecall.console.source import Refusal
from wirecall.protocol.messages import JsonObject


def message_of(name: str, request: JsonObject) -> str:
    """Return the message of a person's call. The text of the params stays as it was typed."""
    text = str(request.get("params") or "{}")
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refusal(
            400, _problem(f"The params are not JSON: {error}", '{"name": "value"}')
        ) from None
    key = request.get("key")
    if key is not None:
        if not isinstance(value, dict):
            raise Refusal(400, _problem("A key needs params by name.", '{"name": "value"}'))
        inside = text.strip()[1:].lstrip()
        comma = "" if inside.startswith("}") else ","
        text = '{"idempotency_key":' + msgspec.json.encode(str(key)).decode() + comma + inside
    method = msgspec.json.encode(name).decode()
    return f'{{"jsonrpc":"2.0","id":1,"method":{method},"params":{text}}}'


def _problem(message: str, hint: str) -> JsonObject:
    return {"error": {"type": "params", "message": message, "hint": hint}}

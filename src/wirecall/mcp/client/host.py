"""What a server may ask of its client, and the handlers that answer: a model, a person, a list of folders.

A question has two forms on the wire. With a handshake it is a request of the server's; at 2026-07-28 it comes with a result
that is not complete, and the call is made again with the answers. `Host.answer` serves both. A question without a handler is
not declared as a capability, and is refused if a server asks it all the same.

    sample(Sampling) -> str or Sampled          sampling/createMessage
    elicit(Form) -> dict, Elicited or None      elicitation/create with a form; None declines
    elicit_url(Visit) -> bool or Elicited       elicitation/create with an address to go to
    roots, or roots() -> places                 roots/list

A handler is a function or a coroutine function.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import InvalidParams, MethodNotFound, RpcError
from wirecall.logs import logger
from wirecall.mcp.revisions import Revision
from wirecall.mcp.types import Elicited, Root, Sampled
from wirecall.protocol.messages import JsonObject

ROUNDS = 16  # of questions and answers in one call
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class InputRequest(Struct):
    """A request of the server's in a result, or in the state of a task: it has no id."""

    method: str
    params: Raw = Raw(b"{}")


class Form(Struct, frozen=True, rename="camel"):
    """A server asks a person to fill in a form: a flat object of plain values."""

    message: str = ""
    requested_schema: JsonObject = {}


class Visit(Struct, frozen=True, rename="camel"):
    """A server asks a person to go to an address. Show it to them in full before anything opens it."""

    message: str = ""
    url: str = ""
    elicitation_id: str | None = None

    @property
    def host(self) -> str:
        """The host in the address, or "" if it has none: a user looks at it before they agree."""
        try:
            return urlsplit(self.url).hostname or ""
        except ValueError:
            return ""


class Sampling(Struct, frozen=True, rename="camel"):
    """A server asks the client's model."""

    messages: list[JsonObject] = []
    max_tokens: int | None = None
    system_prompt: str | None = None
    temperature: float | None = None
    stop_sequences: list[str] = []
    model_preferences: JsonObject | None = None
    include_context: str | None = None
    tools: list[JsonObject] = []
    tool_choice: JsonObject | None = None
    metadata: JsonObject | None = None

    @property
    def text(self) -> str:
        """All the text in the messages."""
        contents = [message.get("content") for message in self.messages]
        blocks = [block for content in contents for block in (content if isinstance(content, list) else [content])]
        return "\n".join(block["text"] for block in blocks if isinstance(block, dict) and isinstance(block.get("text"), str))


T = TypeVar("T")
Sample: TypeAlias = Callable[[Sampling], str | Sampled | Awaitable[str | Sampled]]
Elicit: TypeAlias = Callable[[Form], JsonObject | Elicited | Awaitable[JsonObject | Elicited | None] | None]
ElicitUrl: TypeAlias = Callable[[Visit], bool | Elicited | Awaitable[bool | Elicited]]
Roots: TypeAlias = Iterable[object] | Callable[[], Iterable[object] | Awaitable[Iterable[object]]]


class Host(Struct, frozen=True, kw_only=True):
    """The handlers of one client."""

    sample: Sample | None = None
    elicit: Elicit | None = None
    elicit_url: ElicitUrl | None = None
    roots: Roots | None = None
    extensions: Mapping[str, JsonObject] = {}  # settings by id

    def capabilities(self, revision: Revision) -> JsonObject:
        """Return what is declared to a server: what there is a handler for, as far as the revision knows it; extensions."""
        handlers = {"form": self.elicit, "url": self.elicit_url}
        modes: JsonObject = {mode: {} for mode, handler in handlers.items() if handler}
        has_modes = revision.has("ask elicitation url")
        declared: JsonObject = {}
        if self.sample and revision.has("ask sampling/createMessage"):
            declared["sampling"] = {}
        if revision.has("ask elicitation/create") and (modes if has_modes else self.elicit):
            declared["elicitation"] = modes if has_modes else {}
        if self.roots is not None and revision.has("ask roots/list"):
            declared["roots"] = {}
        if self.extensions and revision.has("capability extensions"):
            declared["extensions"] = self.extensions
        return declared

    async def answer(self, method: str, params: Raw | UnsetType) -> JsonObject:
        """Return the answer to a question, or raise the refusal."""
        given = Raw(b"{}") if params is UNSET else params
        try:
            if method == "sampling/createMessage":
                return await self._sample(given)
            if method == "elicitation/create":
                return await self._elicit(given)
            if method != "roots/list":
                raise MethodNotFound(f"this client does not answer {method[:100]!r}")
            if self.roots is None:
                raise MethodNotFound("this client has no roots")
            places = await _awaited(self.roots() if callable(self.roots) else self.roots)
            roots = [place if isinstance(place, Root) else Root(str(place)) for place in places]
            return {"roots": [{"uri": root.uri, **({"name": root.name} if root.name else {})} for root in roots]}
        except msgspec.ValidationError as error:
            raise InvalidParams(f"params: {str(error).lower()}") from None
        except RpcError:
            raise
        except Exception as error:
            logger.exception("the handler of %s failed", method)
            raise RpcError(-32603, "Internal error") from error

    async def _sample(self, params: Raw) -> JsonObject:
        if self.sample is None:
            raise MethodNotFound("this client has no model to ask")
        said = await _awaited(self.sample(msgspec.json.decode(params, type=Sampling)))
        if isinstance(said, str):
            said = Sampled("assistant", {"type": "text", "text": said}, "unknown")
        if not isinstance(said, Sampled):
            raise TypeError(f"a handler of sampling must return a str or a Sampled, got {type(said).__name__}")
        stopped = {"stopReason": said.stop_reason} if said.stop_reason else {}
        return {"role": said.role, "content": said.content, "model": said.model or "unknown", **stopped}

    async def _elicit(self, params: Raw) -> JsonObject:
        mode = msgspec.json.decode(params, type=_Mode).mode
        if mode == "url" and self.elicit_url is not None:
            visit = msgspec.json.decode(params, type=Visit)
            # A server names the address, and a browser opens it: not a file or a script, and not where others can listen.
            scheme = visit.url.partition(":")[0].lower()
            if not visit.host or not (scheme == "https" or (scheme == "http" and visit.host in _LOOPBACK)):
                raise InvalidParams(f"url: expected https, or http to this machine, got {visit.url[:100]!r}")
            agreed = await _awaited(self.elicit_url(visit))
            if isinstance(agreed, Elicited):
                return {"action": agreed.action}
            return {"action": "accept" if agreed else "decline"}
        if mode != "form" or self.elicit is None:
            raise InvalidParams(f"this client has no elicitation of mode {mode[:40]!r}")
        form = msgspec.json.decode(params, type=Form)
        said = await _awaited(self.elicit(form))
        if said is None:
            said = Elicited("decline")
        if isinstance(said, dict):
            said = Elicited("accept", said)
        if not isinstance(said, Elicited):
            raise TypeError(f"a handler of elicitation must return a dict, an Elicited or None, got {type(said).__name__}")
        if said.action != "accept":
            return {"action": said.action}
        return {"action": "accept", "content": with_defaults(msgspec.to_builtins(said.content), form.requested_schema)}


class _Mode(Struct):
    mode: str = "form"


def with_defaults(content: Any, schema: JsonObject) -> JsonObject:
    """Return an accepted form with the defaults of the schema in the fields that were left out (2025-11-25)."""
    filled = dict(content) if isinstance(content, dict) else {}
    properties = schema.get("properties")
    for name, field in properties.items() if isinstance(properties, dict) else ():
        if name not in filled and isinstance(field, dict) and "default" in field:
            filled[name] = field["default"]
    return filled


async def _awaited(value: T | Awaitable[T]) -> T:
    return await value if inspect.isawaitable(value) else value

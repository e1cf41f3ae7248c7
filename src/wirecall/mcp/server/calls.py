"""Calls of an app's functions by MCP's methods: tools, prompts, resources and completions, and the shapes of their results.

    a tool       `call_result`      str, content, Struct, dict, ToolResult, ...  ->  content and structuredContent
    a prompt     `prompt_result`    str, Message, or several                     ->  messages
    a resource   `read_result`      str, bytes, Embedded, or several             ->  contents

1. A request becomes a `Call` and takes the dispatcher's steps like any other call: middleware, binding, ledger. Only the
   shape of the result differs. A call that asks its client returns its questions instead of a result, in any of the shapes.
2. A tool that changes something has one idempotency key, in whichever place the client put it: `_meta`, params, arguments or
   header. A result from the ledger is marked in its `_meta`.
3. A plain function that reads takes the short way: no call, no task and no coroutine (`at_once`).
4. A tool reports a failure as a result with `isError`, which the model reads; the protocol reports one as an error. The
   revision decides which of the two a failure is (`as_result`).
5. Results are made in the fullest form and encoded once; `project` takes away what older revisions do not know.
"""

import math
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import (
    EncodeError,
    InternalError,
    InvalidParams,
    KeyInProgress,
    KeyRequired,
    NotCapable,
    ResourceNotFound,
    RpcError,
)
from wirecall.logs import failed
from wirecall.mcp.revisions import Revision
from wirecall.mcp.server.catalog import Catalog, ResourceEntry, is_object_schema, is_structured, output_schema
from wirecall.mcp.server.messages import A_TASK, INPUT_REQUIRED, Answers, Id
from wirecall.mcp.server.peer import RETRY_AFTER_MS, Peer, Questions, check_capability
from wirecall.mcp.types import (
    ERROR_META,
    RECOGNISED_META,
    RECORDED_META,
    REPLAYED_META,
    TASKS,
    CallTool,
    Complete,
    Content,
    Embedded,
    GetPrompt,
    Listen,
    Message,
    Params,
    ReadResource,
    Resumed,
    Subscribe,
    ToolResult,
    block,
)
from wirecall.protocol.messages import JsonObject, encode
from wirecall.protocol.params import explain
from wirecall.server.call import Call, Detachable, Frame, InputRequired
from wirecall.server.method import Method
from wirecall.server.policy import identify

if TYPE_CHECKING:
    from wirecall.mcp.server.tasks import Tasks
    from wirecall.server.dispatch import Dispatcher

_NO_ARGUMENTS = Raw(b"{}")


class Calls:
    """Calls the functions of a catalog."""

    def __init__(
        self,
        catalog: Catalog,
        dispatcher: "Callable[[], Dispatcher]",
        questions: Questions,
        answers: Answers,
        *,
        is_public: bool,
    ) -> None:
        self._catalog = catalog
        self._is_public = is_public  # all callers are anonymous
        self._dispatcher = dispatcher
        self._questions = questions
        self._answers = answers
        self.tasks: Tasks | None = None
        self.shape = lru_cache(maxsize=None)(call_result)

    # --- tools -------------------------------------------------------------------------------------------------------

    async def call_tool(self, peer: Peer) -> object:
        """Return the result of `tools/call`, as the client's revision has it."""
        params, revision, dispatcher = peer.params, peer.session.revision, self._dispatcher()
        method = self._catalog.tools.get(params.name)
        if method is None:
            raise InvalidParams(f"there is no tool {params.name[:100]!r}")
        arguments, shape = _arguments(params), self.shape(method)
        marks, is_task = peer.marks, False
        if method.task is not None and revision.is_stateless:  # older revisions have no tasks
            is_task = TASKS in peer.session.extensions
            if method.task == "required" and not is_task:
                needed: JsonObject = {"extensions": {TASKS: {}}}
                raise NotCapable(f"{method.name} is a task: the client must declare {TASKS}", requiredCapabilities=needed)
        try:
            # A plain function that reads needs its arguments and nothing else.
            plain = dispatcher.call_plain(method, arguments, shape, peer.id)
            if plain is not None:
                result = plain if isinstance(plain, bytes) else await plain
            else:
                # Step 1: the key, which a command may have in five places.
                key, identity = None, None
                if method.is_command:
                    meta = UNSET if params.meta is UNSET else params.meta.key
                    header = UNSET if peer.key is None else peer.key
                    key, identity = identify(arguments, meta, params.idempotency_key, params.key, header)
                    if key is None and method.key in ("required", "ask"):
                        reason = f"{method.name} needs an idempotency_key: one value per intent, the same on every retry"
                        raise KeyRequired(reason, ran="no")
                # Step 2: the call, or the task that it becomes.
                if is_task:
                    assert self.tasks is not None
                    result, marks = await self.tasks.call(peer, method, arguments, shape, key, identity)
                else:
                    record = f"tools/call:{method.name}"
                    result = await self.run(peer, method, arguments, shape, record=record, key=key, identity=identity)
                # Step 3: if the ledger holds questions, another call with this key waits for answers. Only a client that can
                # give them is asked the same.
                if REPLAYED_META in marks and result.startswith(INPUT_REQUIRED):
                    if not revision.is_stateless:
                        reason = "the first call waits for its client"
                        raise KeyInProgress(reason, ran="no", retry_after_ms=RETRY_AFTER_MS)
                    for question in msgspec.json.decode(result)["inputRequests"].values():
                        check_capability(peer.session, question["method"], question["params"])
        except RpcError as error:
            result = as_result(error, method, revision)
        if result.startswith((INPUT_REQUIRED, A_TASK)) or (revision.structured == "any" and not marks):
            return result
        told = project(result, method, revision)
        if marks:
            told.meta = {**(told.meta or {}), **marks}
        return told

    def at_once(self, id: Id, params: Params, revision: Revision) -> "bytes | Coroutine[Any, Any, bytes] | None":
        """Return the answer to a call of a plain function that reads; None if the request is anything else.

        Nothing is sent before such an answer, and the function takes no context. So the call needs no session, stream, task
        or coroutine: at 2026-07-28 that makes 0.6 instead of 0.47 of a bare ASGI application.
        """
        if not isinstance(params, CallTool):
            return None
        method = self._catalog.tools.get(params.name)
        if method is None or method.is_async or not method.plain:
            return None
        arguments = _arguments(params)
        try:
            result = self._dispatcher().call_plain(method, arguments, self.shape(method), id)
        except RpcError as error:
            result = as_result(error, method, revision)
        if result is None:
            return None
        if not isinstance(result, bytes):
            return self._later(id, method, result, revision)
        told = result if revision.structured == "any" else project(result, method, revision)
        return self._answers.to(id, told, revision)

    async def _later(self, id: Id, method: Method, coming: Awaitable[bytes], revision: Revision) -> bytes:
        """Return the answer to a call of a plain function that returned an awaitable."""
        try:
            result = await coming
        except RpcError as error:
            result = as_result(error, method, revision)
        told = result if revision.structured == "any" else project(result, method, revision)
        return self._answers.to(id, told, revision)

    # --- prompts, resources and completions --------------------------------------------------------------------------

    async def get_prompt(self, peer: Peer) -> object:
        """Return the result of `prompts/get`."""
        name, texts, revision = peer.params.name, peer.params.arguments, peer.session.revision
        prompt = self._catalog.prompts.get(name)
        if prompt is None:
            raise InvalidParams(f"there is no prompt {name[:100]!r}")
        arguments = _from_texts(prompt.method, {} if texts is UNSET else texts)
        result = await self.run(peer, prompt.method, arguments, prompt_result(prompt.method))
        if result.startswith(INPUT_REQUIRED) or revision.structured == "any":
            return result
        told = msgspec.json.decode(result)
        messages = [{**message, "content": revision.known(message["content"])} for message in told["messages"]]
        return {**told, "messages": messages}

    async def read_resource(self, peer: Peer) -> object:
        """Return the result of `resources/read`."""
        uri, revision = peer.params.uri, peer.session.revision
        try:
            found = self._catalog.resource(uri)
            if found is None:
                raise ResourceNotFound
            resource, names = found
            arguments = _from_texts(resource.method, names)
            result = await self.run(peer, resource.method, arguments, read_result(resource, uri))
        except ResourceNotFound as error:
            raise RpcError(int(revision.value("resource not found") or 0), error.message, {"uri": uri}) from error
        if result.startswith(INPUT_REQUIRED) or not revision.has("caching"):
            return result
        # A result that depends on the user's answers is not one of its URI alone, and must not be kept (2026-07-28,
        # server/utilities/caching, "Cache Key").
        ttl_ms = 0 if peer.answers else resource.ttl_ms
        scope = b"public" if resource.is_public and self._is_public and not peer.answers else b"private"
        return result[:-1] + b',"ttlMs":%d,"cacheScope":"%s"}' % (ttl_ms, scope)

    async def complete(self, peer: Peer) -> object:
        """Return the result of `completion/complete`."""
        params: Complete = peer.params
        catalog, kind = self._catalog, params.ref.type
        of = params.ref.name if kind == "ref/prompt" else params.ref.uri
        is_known = of in catalog.prompts if kind == "ref/prompt" else of in catalog.resources or of in catalog.templates
        if not is_known or kind not in ("ref/prompt", "ref/resource"):
            raise InvalidParams(f"ref: there is no {kind.removeprefix('ref/')[:20]} {of[:100]!r}")
        method = catalog.completions.get((of, params.argument.name))
        if method is None:
            return completed([])
        arguments = [params.argument.value, params.context.arguments][: len(method.signature.parameters)]
        return await self.run(peer, method, Raw(encode(arguments)), completed)

    async def call_method(self, method: Method, peer: Peer) -> object:
        """Return the result of a method of an extension."""
        result = await self.run(peer, method, _NO_ARGUMENTS if peer.raw is UNSET else peer.raw, object_result(method))
        if b'"resultType"' in result or b'"_meta"' in result:
            members = msgspec.json.decode(result)
            if not isinstance(members.get("_meta", {}), dict):
                raise TypeError(f"{method.name}: _meta of its result must be an object")
            # An extension may have result types of its own. `Answers` finds one at the beginning of a result.
            result = encode({name: members[name] for name in sorted(members, key=lambda name: name != "resultType")})
        return result

    # --- any of them -------------------------------------------------------------------------------------------------

    def scopes(self, name: str, params: Params, raw: Raw | UnsetType) -> Sequence[str]:
        """Return the scopes that a request asks for. A request for something unknown asks for none, and is refused later."""
        catalog = self._catalog
        if isinstance(params, CallTool):
            tool = catalog.tools.get(params.name)
            return () if tool is None else _scopes(tool, lambda: _arguments(params))
        if isinstance(params, GetPrompt):
            prompt, texts = catalog.prompts.get(params.name), {} if params.arguments is UNSET else params.arguments
            return () if prompt is None else _scopes(prompt.method, lambda: _from_texts(prompt.method, texts))
        if isinstance(params, (ReadResource, Subscribe, Listen)):
            # A subscription tells of changes, so it asks for the same as reading, for each of its resources.
            uris = params.notifications.resource_subscriptions if isinstance(params, Listen) else [params.uri]
            found = [(entry.method, names) for entry, names in filter(None, map(catalog.resource, uris))]
            return [scope for method, names in found for scope in _scopes(method, partial(_from_texts, method, names))]
        if isinstance(params, Complete):
            # The arguments are not known yet, so only scopes that do not depend on them are asked for.
            of = params.ref.name if params.ref.type == "ref/prompt" else params.ref.uri
            entry = catalog.prompts.get(of) or catalog.resources.get(of) or catalog.templates.get(of)
            return () if entry is None or entry.method.scopes is None else entry.method.scopes.always
        own = catalog.methods.get(name)
        return () if own is None else _scopes(own.method, lambda: _NO_ARGUMENTS if raw is UNSET else raw)

    async def run(
        self,
        peer: Peer,
        method: Method,
        arguments: Raw,
        shape: Callable[[Any], object],
        *,
        record: str | None = None,
        key: str | None = None,
        identity: bytes | None = None,
        task: Detachable | None = None,
    ) -> bytes:
        """Return the result of a call, or the questions it waits for. `shape` makes the result of the function's value."""
        outlet = peer.outlet
        call = Call(
            method,
            Frame(peer.caller, peer=outlet.peer, sending=outlet.sending, identity=peer.identity, headers=peer.headers),
            id=peer.id,
            params=arguments,
            position=peer.position,
            key=key,
            keyless=method.is_command and method.key != "off",
            identity=identity,
            record=record or method.name,
            peer=peer,
            task=task,
            shape=shape,
        )
        # At 2026-07-28 a call may be a further round of one that has asked its client.
        params = peer.params
        if peer.session.revision.is_stateless and isinstance(params, Resumed):
            if params.state is not UNSET or params.responses is not UNSET:
                self._questions.resume(call, peer)
            # A further state is about the call. The peer does not keep the call itself: a cycle for every call would keep
            # the garbage collector busy.
            peer.about = method, call.record, call.params, call.key
        try:
            return bytes(await self._dispatcher().call(call))
        except InputRequired as pause:
            return pause.interim
        except RpcError as error:
            # A call without a key has no run that knows of its commit point. A question that is refused behind it comes too
            # late to say that nothing was done.
            if call.key is None and peer.is_committed and error.ran == "no":
                raise error.telling("unknown") from None
            raise
        finally:
            peer.close()
            if call.replayed:
                peer.outlet.replayed.append(peer.id)
                peer.marks[REPLAYED_META] = True
            if call.recognised:
                peer.marks[RECOGNISED_META] = True
            if not call.recorded:
                peer.marks[RECORDED_META] = False


def _arguments(params: CallTool) -> Raw:
    if params.arguments is UNSET:
        return _NO_ARGUMENTS
    if bytes(params.arguments)[:1] != b"{":
        raise InvalidParams("params.arguments: expected an object")
    return params.arguments


def _scopes(method: Method, arguments: Callable[[], Raw]) -> Sequence[str]:
    """Return the scopes of a call. If its arguments do not fit there are none to see, and the call does not run."""
    if method.scopes is None or method.scopes.always:
        return () if method.scopes is None else method.scopes.always
    try:
        return method.scopes.of(arguments())
    except InvalidParams:
        return ()


def _from_texts(method: Method, texts: Mapping[str, str]) -> Raw:
    """Return arguments that came as texts as JSON, from which the function's parameters are bound."""
    parameters = {p.name: p for p in method.signature.parameters}
    arguments: JsonObject = {}
    for name, text in texts.items():
        declared = parameters.get(name)
        wanted = str if declared is None else declared.type
        if declared is not None and declared.model is not None:
            arguments[name] = declared.model.read_text(text)
            continue
        if wanted in (str, Any):
            arguments[name] = text
            continue
        try:
            value = arguments[name] = msgspec.to_builtins(msgspec.convert(text, wanted, strict=False))
        except msgspec.ValidationError as error:
            raise InvalidParams(explain(error, f"arguments.{name}")) from None
        if isinstance(value, float) and not math.isfinite(value):  # msgspec reads the texts "nan" and "inf"
            raise InvalidParams(f"arguments.{name}: expected a finite number, got {text[:100]!r}")
    return Raw(encode(arguments)) if arguments else _NO_ARGUMENTS


# --- results: the values of functions as the members of MCP ---------------------------------------------------------


class CallResult(Struct, omit_defaults=True):
    """The result of `tools/call`, in the fullest form."""

    content: list[JsonObject]
    structured: Any = msgspec.field(default=UNSET, name="structuredContent")
    is_error: bool = msgspec.field(default=False, name="isError")
    meta: Any = msgspec.field(default=UNSET, name="_meta")


_decode_result = msgspec.json.Decoder(CallResult).decode
_PLAIN = frozenset({int, float, bool, dict})


def call_result(method: Method) -> Callable[[Any], CallResult]:
    """Return the function that makes a result of a tool's value."""
    declared = is_structured(method)

    def shape(value: Any) -> CallResult:
        blocks: list[JsonObject] = []
        meta: JsonObject | UnsetType = UNSET
        is_data, is_error = declared or isinstance(value, dict), False
        if type(value) not in _PLAIN:
            # Content is its own result; a `ToolResult` has every member of one.
            if isinstance(value, Content):
                return CallResult([value.on_wire()])
            if isinstance(value, (list, tuple)) and value and all(isinstance(item, Content) for item in value):
                return CallResult([item.on_wire() for item in value])
            if isinstance(value, ToolResult):
                blocks = [block(item) for item in value.content]
                is_error, meta = value.is_error, UNSET if value.meta is None else value.meta
                stated: Any = value  # a Struct that Python makes may have members of any type
                if type(stated.is_error) is not bool or not (stated.meta is None or isinstance(stated.meta, dict)):
                    got = f"is_error={stated.is_error!r:.100}, meta={stated.meta!r:.100}"
                    raise TypeError(f"a ToolResult has a bool as is_error, and a dict or None as meta, got {got}")
                is_data = value.structured is not UNSET
                value = value.structured if is_data else None
        data = encode(value) if is_data else b""
        # Structured content comes with a text as well, for clients that read only text (server/tools, "Structured Content").
        if not blocks and (is_data or value is not None):
            text = value if isinstance(value, str) else (data or encode(value)).decode()
            blocks = [{"type": "text", "text": text}]
        return CallResult(blocks, Raw(data) if is_data else UNSET, is_error, meta)

    return shape


def project(result: bytes, method: Method, revision: Revision) -> CallResult:
    """Return a tool's result in the words of a revision: unknown members are left out, unknown content becomes text."""
    told = _decode_result(result)
    told.content = [revision.known(item) for item in told.content]
    shape = revision.structured
    if shape is None:
        told.structured = UNSET
    elif shape == "object" and told.structured is not UNSET:
        schema = output_schema(method)
        if not isinstance(told.structured, dict) or (schema is not None and not is_object_schema(schema)):
            told.structured = {"result": told.structured} if schema is not None else UNSET
    return told


def prompt_result(method: Method) -> Callable[[Any], JsonObject]:
    """Return the function that makes a result of a prompt's value."""
    described = {"description": method.description} if method.description else {}

    def shape(value: Any) -> JsonObject:
        items = value if isinstance(value, (list, tuple)) else [value]
        messages = [item if isinstance(item, Message) else Message("user", item) for item in items]
        return {**described, "messages": [message.on_wire() for message in messages]}

    return shape


def read_result(resource: ResourceEntry, uri: str) -> Callable[[Any], JsonObject]:
    """Return the function that makes a result of a resource's value: text, bytes, or anything else as JSON."""

    def shape(value: Any) -> JsonObject:
        contents, mime_type = [], resource.mime_type
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, Embedded):
                found = item
            elif isinstance(item, bytes):
                found = Embedded(uri, blob=item, mime_type=mime_type or "application/octet-stream")
            elif isinstance(item, str):
                found = Embedded(uri, text=item, mime_type=mime_type or "text/plain")
            else:
                found = Embedded(uri, text=encode(item).decode(), mime_type=mime_type or "application/json")
            contents.append(found.contents())
        return {"contents": contents}

    return shape


def object_result(method: Method) -> Callable[[Any], object]:
    """Return the function that makes a result of the value of an extension's method: every result of MCP is an object."""

    def shape(value: Any) -> object:
        data = b"{}" if value is None else encode(value)
        if not data.startswith(b"{"):
            got = type(value).__name__
            raise TypeError(f"{method.name} must return an object (a dict, a Struct, a dataclass) or None, got {got}")
        return Raw(data)

    return shape


def completed(value: Iterable[object]) -> JsonObject:
    """Return the result of a completion."""
    # At most 100 values travel, the rest is only counted (server/utilities/completion, "Completion Results").
    values = [str(item) for item in value]
    return {"completion": {"values": values[:100], "total": len(values), "hasMore": len(values) > 100}}


def as_result(error: RpcError, method: Method, revision: Revision) -> bytes:
    """Return the result that reports an error to a model, as JSON. Raises the errors that belong to the protocol.

    A model sees only the text; code and data stay in `_meta`, from which our client restores the error and its `ran`.
    """
    if not revision.reports_in_result(error, asks_key=method.key == "ask"):
        raise error
    data = error.data
    text = str(data.get("reason", error.message)) if isinstance(data, dict) else error.message
    if isinstance(error, InvalidParams):
        text = re.sub(r"(^|; |needs )params\b", r"\1arguments", text)  # the place of each problem
        data = {**data, "reason": text} if isinstance(data, dict) else data
    elif isinstance(error, InternalError) and text != error.message:  # in development, a result that does not fit
        text = f"{error.message}: {text}"
    elif not isinstance(error, NotCapable):
        text = error.message
    told = {"code": error.code, **({} if data is None else {"data": data})}
    try:
        return encode(CallResult([{"type": "text", "text": text}], is_error=True, meta={ERROR_META: told}))
    except EncodeError as reason:  # the text and the data are the handler's own
        failed(method.name, None, reason)
        return as_result(InternalError(), method, revision)

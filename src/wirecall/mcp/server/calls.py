"""Calls of an app's functions by MCP's methods, and the shapes of their results.

    a tool      `call_result`    str, content, Struct, dict, ToolResult  ->  content, structuredContent
    a prompt    `prompt_result`  str, Message, or several                ->  messages
    a resource  `read_result`    str, bytes, Embedded, or several        ->  contents

1. A request becomes a `Call` and takes the dispatcher's steps like any other call: middleware,
   binding, ledger. Only the shape of the result differs. A call that asks its client returns its
   questions instead of a result, in any of the shapes.
2. A tool that changes something has one idempotency key, wherever the client put it: `_meta`,
   params, arguments or header. A result from the ledger is marked in its `_meta`.
3. A plain function that reads takes the short path: no call, no task and no coroutine (`at_once`).
4. A tool reports a failure as a result with `isError`, which the model reads; the protocol reports
   one as an error. The revision decides which of the two a failure is (`as_result`).
5. Results are made in the fullest form and encoded once; `project` takes away what older revisions
   do not know.
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
    ReferencesOff,
    ResourceNotFound,
    RpcError,
    suggested,
)
from wirecall.logs import failed
from wirecall.mcp.revisions import Revision
from wirecall.mcp.server.catalog import (
    Catalog,
    ResourceEntry,
    is_object_schema,
    is_structured,
    output_schema,
)
from wirecall.mcp.server.messages import A_TASK, INPUT_REQUIRED, Answers, Id
from wirecall.mcp.server.peer import RETRY_AFTER_MS, Peer, Questions, Session, check_capability
from wirecall.mcp.types import (
    AFTER_META,
    ERROR_META,
    RECOGNISED_META,
    RECORDED_META,
    REFS_META,
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
    Ref,
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
    from wirecall.mcp.server.batch_tool import BatchMethod
    from wirecall.mcp.server.task_run import TaskRunner
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
        # All callers are anonymous.
        self._is_public = is_public
        self.dispatcher = dispatcher
        self._questions = questions
        self._answers = answers
        # The server sets it: a call may become a task, and a task makes calls.
        self.task_runner: TaskRunner
        self.shape = lru_cache(maxsize=None)(call_result)

    # --- tools ------------------------------------------------------------------------------------

    async def call_tool(self, peer: Peer) -> object:
        """Return the result of `tools/call`, as the client's revision has it."""
        params = peer.params
        revision = peer.session.revision
        method = self._catalog.registry.called.get(params.name)
        if method is None:
            raise self._no_tool(params.name[:100])
        arguments = _arguments(params)
        shape = self.shape(method)
        marks = peer.marks
        # Older revisions have no tasks.
        is_task = method.task is not None and revision.is_stateless and _is_task(method, peer)
        try:
            # A plain function that reads needs its arguments and nothing else.
            plain = None
            if method.plain:
                plain = self.dispatcher().plain(method, arguments, shape, peer.id)
            if plain is not None:
                result = plain if isinstance(plain, bytes) else await plain
            else:
                # Step 1: the key, which a client may put in five places.
                key = None
                identity = None
                if method.is_command:
                    meta = UNSET if params.meta is UNSET else params.meta.key
                    header = UNSET if peer.key is None else peer.key
                    key, identity = identify(
                        arguments,
                        meta,
                        params.idempotency_key,
                        params.key,
                        header,
                        place=method.key_place,
                    )
                    if key is None and method.key in ("required", "ask"):
                        raise key_required(method)
                # Step 2: the call, or the task that it becomes.
                if is_task:
                    result, marks = await self.task_runner.call(
                        peer, method, arguments, shape, key, identity
                    )
                else:
                    record = f"tools/call:{method.record}"
                    result = await self.run(
                        peer, method, arguments, shape, record=record, key=key, identity=identity
                    )
                # Step 3: if the ledger holds questions, another call with this key waits for
                # answers.
                if REPLAYED_META in marks and result.startswith(INPUT_REQUIRED):
                    _check_can_answer(peer.session, result)
        except RpcError as error:
            result = as_result(error, method, revision)
        if peer.linked is not None:
            peer.linked.result = result
        if result.startswith((INPUT_REQUIRED, A_TASK)):
            return result
        if revision.structured == "any" and not marks:
            return result
        return project(result, method, revision, marks)

    def _no_tool(self, name: str) -> InvalidParams:
        """Return the error for an unknown tool.

        It does not suggest tools that lists may hide from the caller.
        """
        near = suggested(name, (tool.tool_name for tool in self.public_tools()))
        if near is None:
            return InvalidParams(f"there is no tool {name!r}")
        return InvalidParams(
            f"there is no tool {name!r}; did you mean {near!r}?", did_you_mean=near
        )

    def public_tools(self) -> list[Method]:
        """Return the tools that lists show to every caller."""
        return [tool for tool in self._catalog.tools.values() if tool.scopes is None]

    def at_once(
        self, id: Id, params: Params, revision: Revision
    ) -> "bytes | Coroutine[Any, Any, bytes] | None":
        """Return the answer to a call of a plain function that reads.

        Returns None if the request is anything else. Nothing is sent before such an answer, and the
        function takes no context. So the call needs no session, stream, task or coroutine: at
        2026-07-28 that makes 0.6 instead of 0.47 of a bare ASGI application.
        """
        if not isinstance(params, CallTool):
            return None
        method = self._catalog.registry.called.get(params.name)
        if method is None or method.is_async or not method.plain:
            return None
        check_alone(params)
        arguments = _arguments(params)
        try:
            result = self.dispatcher().plain(method, arguments, self.shape(method), id)
        except RpcError as error:
            result = as_result(error, method, revision)
        if result is None:
            return None
        if not isinstance(result, bytes):
            return self._later(id, method, result, revision)
        if revision.structured == "any":
            return self._answers.to(id, result, revision)
        return self._answers.to(id, project(result, method, revision), revision)

    async def _later(
        self, id: Id, method: Method, coming: Awaitable[bytes], revision: Revision
    ) -> bytes:
        """Return the answer to a call of a plain function that returned an awaitable."""
        try:
            result = await coming
        except RpcError as error:
            result = as_result(error, method, revision)
        if revision.structured == "any":
            return self._answers.to(id, result, revision)
        return self._answers.to(id, project(result, method, revision), revision)

    # --- prompts, resources and completions -------------------------------------------------------

    async def get_prompt(self, peer: Peer) -> object:
        """Return the result of `prompts/get`."""
        name = peer.params.name
        texts = peer.params.arguments
        revision = peer.session.revision
        prompt = self._catalog.prompts.get(name)
        if prompt is None:
            raise InvalidParams(f"there is no prompt {name[:100]!r}")
        arguments = _from_texts(prompt.method, {} if texts is UNSET else texts)
        result = await self.run(peer, prompt.method, arguments, prompt_result(prompt.method))
        if result.startswith(INPUT_REQUIRED) or revision.structured == "any":
            return result
        members = msgspec.json.decode(result)
        for message in members["messages"]:
            message["content"] = revision.known(message["content"])
        return members

    async def read_resource(self, peer: Peer) -> object:
        """Return the result of `resources/read`."""
        uri = peer.params.uri
        revision = peer.session.revision
        try:
            found = self._catalog.resource(uri)
            if found is None:
                raise ResourceNotFound
            resource, names = found
            arguments = _from_texts(resource.method, names)
            result = await self.run(peer, resource.method, arguments, read_result(resource, uri))
        except ResourceNotFound as error:
            raise RpcError(
                int(revision.value("resource not found") or 0), error.message, {"uri": uri}
            ) from error
        if result.startswith(INPUT_REQUIRED) or not revision.has("caching"):
            return result
        # A result that depends on the user's answers does not depend on its URI alone, and must not
        # be cached (2026-07-28, server/utilities/caching, "Cache Key").
        ttl_ms = resource.ttl_ms
        is_public = resource.is_public and self._is_public
        if peer.answers:
            ttl_ms = 0
            is_public = False
        scope = b"public" if is_public else b"private"
        return result[:-1] + b',"ttlMs":%d,"cacheScope":"%s"}' % (ttl_ms, scope)

    async def complete(self, peer: Peer) -> object:
        """Return the result of `completion/complete`."""
        params: Complete = peer.params
        catalog = self._catalog
        kind = params.ref.type
        if kind == "ref/prompt":
            of = params.ref.name
            is_known = of in catalog.prompts
        else:
            of = params.ref.uri
            is_known = of in catalog.resources or of in catalog.templates
        if not is_known or kind not in ("ref/prompt", "ref/resource"):
            raise InvalidParams(f"ref: there is no {kind.removeprefix('ref/')[:20]} {of[:100]!r}")
        method = catalog.completions.get((of, params.argument.name))
        if method is None:
            return completed([])
        given = [params.argument.value, params.context.arguments]
        arguments = given[: len(method.signature.parameters)]
        return await self.run(peer, method, Raw(encode(arguments)), completed)

    async def call_method(self, method: Method, peer: Peer) -> object:
        """Return the result of a method of an extension."""
        arguments = _NO_ARGUMENTS if peer.raw is UNSET else peer.raw
        result = await self.run(peer, method, arguments, object_result(method))
        if b'"resultType"' in result or b'"_meta"' in result:
            members = msgspec.json.decode(result)
            if not isinstance(members.get("_meta", {}), dict):
                raise TypeError(f"{method.name}: _meta of its result must be an object")
            # An extension may have its own result types. `Answers` expects one at the start of a
            # result.
            if "resultType" in members:
                members = {"resultType": members.pop("resultType"), **members}
            result = encode(members)
        return result

    # --- any of them ------------------------------------------------------------------------------

    def scopes(self, name: str, params: Params, raw: Raw | UnsetType) -> Sequence[str]:
        """Return the scopes that a request asks for.

        A request for something unknown asks for none, and is refused later.
        """
        catalog = self._catalog
        if isinstance(params, CallTool):
            tool = catalog.registry.called.get(params.name)
            if tool is not None and tool is catalog.batch:
                return _scopes_of_entries(catalog.batch, params)
            return _scopes(tool, lambda: _arguments(params))
        if isinstance(params, GetPrompt):
            prompt = catalog.prompts.get(params.name)
            if prompt is None:
                return ()
            texts = {} if params.arguments is UNSET else params.arguments
            return _scopes(prompt.method, lambda: _from_texts(prompt.method, texts))
        # A subscription reveals changes, so it needs the scopes of reading, for each of its
        # resources.
        if isinstance(params, Listen):
            uris = params.notifications.resource_subscriptions
            return [scope for uri in uris for scope in self._scopes_of_resource(uri)]
        if isinstance(params, (ReadResource, Subscribe)):
            return self._scopes_of_resource(params.uri)
        if isinstance(params, Complete):
            return self._scopes_of_completion(params.ref)
        own = catalog.methods.get(name)
        if own is None:
            return ()
        return _scopes(own.method, lambda: _NO_ARGUMENTS if raw is UNSET else raw)

    def _scopes_of_resource(self, uri: str) -> Sequence[str]:
        found = self._catalog.resource(uri)
        if found is None:
            return ()
        resource, names = found
        return _scopes(resource.method, partial(_from_texts, resource.method, names))

    def _scopes_of_completion(self, ref: Ref) -> Sequence[str]:
        """Return the scopes of a completion.

        The arguments are not known yet, so only scopes that do not depend on them are asked for.
        """
        catalog = self._catalog
        of = ref.name if ref.type == "ref/prompt" else ref.uri
        entry = catalog.prompts.get(of) or catalog.resources.get(of) or catalog.templates.get(of)
        if entry is None or entry.method.scopes is None:
            return ()
        return entry.method.scopes.always

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
        """Return the result of a call, or its questions.

        `shape` makes the result from the function's value.
        """
        call = Call(
            method,
            Frame(peer.sender),
            id=peer.id,
            params=arguments,
            position=peer.position,
            key=key,
            # A batch has no record itself, unless it is a task.
            keyless=(method.is_command and method.key != "off")
            or (method.is_batch and task is not None),
            digest=identity if peer.linked is None else peer.linked.digest or identity,
            record=record or method.record,
            peer=peer,
            task=task,
            shape=shape,
            has_references=peer.linked is not None and peer.linked.digest is not None,
        )
        # At 2026-07-28 a call may be a further round of one that has asked its client.
        params = peer.params
        if peer.session.revision.is_stateless and isinstance(params, Resumed):
            if params.state is not UNSET or params.responses is not UNSET:
                self._questions.resume(call, peer)
            # A further state is about the call. The peer does not keep the call itself: a cycle for
            # every call would keep the garbage collector busy.
            peer.about = method, call.record, call.params, call.key
        try:
            return bytes(await self.dispatcher().call(call))
        except InputRequired as pause:
            return pause.interim
        except RpcError as error:
            # A call without a key has no run that tracks its commit point. If a question is refused
            # after that point, the error must not say that nothing was done.
            if call.key is None and peer.is_committed and error.ran == "no":
                raise error.with_ran("unknown") from None
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


def batch_identity(peer: Peer, arguments: Raw) -> tuple[str | None, bytes | None]:
    """Return the key of a batch, and its fingerprint. It is where the key of a command may be."""
    params: CallTool = peer.params
    meta = UNSET if params.meta is UNSET else params.meta.key
    header = UNSET if peer.key is None else peer.key
    return identify(arguments, meta, params.idempotency_key, params.key, header)


def key_required(method: Method) -> KeyRequired:
    """Return the error of a call without the key that its command needs."""
    needed = "an idempotency_key"
    if method.key_place is not None:
        needed = method.key_place.shown
    return KeyRequired(
        f"{method.tool_name} needs {needed}: one value per intent, the same on every retry",
        ran="no",
    )


def _is_task(method: Method, peer: Peer) -> bool:
    """Return whether the client of a call takes a task as its answer.

    Raises `NotCapable` if it does not, and the tool is always a task.
    """
    if TASKS in peer.session.extensions:
        return True
    if method.task != "required":
        return False
    needed: JsonObject = {"extensions": {TASKS: {}}}
    raise NotCapable(
        f"{method.tool_name} is a task: the client must declare {TASKS}",
        requiredCapabilities=needed,
    )


def _check_can_answer(session: Session, result: bytes) -> None:
    """Raise unless a client can answer the questions of another call with the same key."""
    if not session.revision.is_stateless:
        reason = "the first call waits for its client"
        raise KeyInProgress(reason, ran="no", retry_after_ms=RETRY_AFTER_MS)
    for question in msgspec.json.decode(result)["inputRequests"].values():
        check_capability(session, question["method"], question["params"])


def check_alone(params: Params) -> None:
    """Refuse a request with references that is not in an array: they have no target (R1)."""
    meta = params.meta
    if meta is UNSET or (meta.refs is UNSET and meta.after is UNSET):
        return
    raise ReferencesOff(
        f"{REFS_META} and {AFTER_META} refer to other requests of an array: "
        "send an array, as MCP 2025-03-26 has it, or the values themselves",
        ran="no",
    )


def _arguments(params: CallTool) -> Raw:
    if params.arguments is UNSET:
        return _NO_ARGUMENTS
    if bytes(params.arguments)[:1] != b"{":
        raise InvalidParams("params.arguments: expected an object")
    return params.arguments


def _scopes(method: Method | None, arguments: Callable[[], Raw]) -> Sequence[str]:
    """Return the scopes of a call.

    If its arguments do not fit, it has none, and the call does not run.
    """
    if method is None or method.scopes is None:
        return ()
    if method.scopes.always:
        return method.scopes.always
    try:
        return method.scopes.of(arguments())
    except InvalidParams:
        return ()


def _scopes_of_entries(batch: "BatchMethod", params: CallTool) -> Sequence[str]:
    """Return the scopes of all entries of a batch, each once.

    They are checked before one of them runs. A malformed batch has none, and does not run.
    """
    asked: dict[str, None] = {}
    try:
        for tool, arguments in batch.called_by(_arguments(params)):
            entry = CallTool(name=tool.name, arguments=arguments)
            asked.update(dict.fromkeys(_scopes(tool, partial(_arguments, entry))))
    except InvalidParams:
        return ()
    return list(asked)


def _from_texts(method: Method, texts: Mapping[str, str]) -> Raw:
    """Convert arguments that arrive as strings to JSON.

    The function's parameters are bound from it.
    """
    parameters = {p.name: p for p in method.signature.parameters}
    arguments: JsonObject = {}
    for name, text in texts.items():
        declared = parameters.get(name)
        if declared is not None and declared.model is not None:
            arguments[name] = declared.model.read_text(text)
        elif declared is None or declared.type in (str, Any):
            arguments[name] = text
        else:
            arguments[name] = _from_text(name, text, declared.type)
    if not arguments:
        return _NO_ARGUMENTS
    return Raw(encode(arguments))


def _from_text(name: str, text: str, wanted: Any) -> Any:
    """Return an argument that arrived as a string, as the value of its type has it in JSON."""
    try:
        value = msgspec.to_builtins(msgspec.convert(text, wanted, strict=False))
    except msgspec.ValidationError as error:
        raise InvalidParams(explain(error, f"arguments.{name}")) from None
    # Msgspec reads the strings "nan" and "inf".
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidParams(f"arguments.{name}: expected a finite number, got {text[:100]!r}")
    return value


# --- results: the values of functions as members of MCP results -----------------------------------


class CallResult(Struct, omit_defaults=True):
    """The result of `tools/call`, in the fullest form."""

    content: list[JsonObject]
    structured: Any = msgspec.field(default=UNSET, name="structuredContent")
    is_error: bool = msgspec.field(default=False, name="isError")
    meta: Any = msgspec.field(default=UNSET, name="_meta")


_decode_result = msgspec.json.Decoder(CallResult).decode
_PLAIN = frozenset({int, float, bool, dict})


def call_result(method: Method) -> Callable[[Any], CallResult]:
    """Return the function that makes a result from a tool's value."""
    declared = is_structured(method)
    is_batch = method.is_batch

    def shape(value: Any) -> CallResult:
        if is_batch and isinstance(value, CallResult):
            return value
        if type(value) not in _PLAIN:
            # Content is its own result; a `ToolResult` has every member of one.
            if isinstance(value, Content):
                return CallResult([value.on_wire()])
            if isinstance(value, ToolResult):
                return _full_result(value)
            if isinstance(value, (list, tuple)) and _are_content(value):
                return CallResult([item.on_wire() for item in value])
        if declared or isinstance(value, dict):
            # Structured content is also sent as text, for clients that read only text
            # (server/tools, "Structured Content").
            data = encode(value)
            text = value if isinstance(value, str) else data.decode()
            return CallResult([{"type": "text", "text": text}], Raw(data))
        if value is None:
            return CallResult([])
        text = value if isinstance(value, str) else encode(value).decode()
        return CallResult([{"type": "text", "text": text}])

    return shape


def _are_content(items: Sequence[Any]) -> bool:
    return bool(items) and all(isinstance(item, Content) for item in items)


def _full_result(value: ToolResult) -> CallResult:
    """Return the result of a tool that returns every member of one."""
    blocks = [block(item) for item in value.content]
    stated: Any = value  # a Struct that Python makes may have members of any type
    has_meta = stated.meta is None or isinstance(stated.meta, dict)
    if type(stated.is_error) is not bool or not has_meta:
        got = f"is_error={stated.is_error!r:.100}, meta={stated.meta!r:.100}"
        raise TypeError(
            f"a ToolResult has a bool as is_error, and a dict or None as meta, got {got}"
        )
    meta = UNSET if value.meta is None else value.meta
    if value.structured is UNSET:
        return CallResult(blocks, UNSET, value.is_error, meta)
    data = encode(value.structured)
    if not blocks:
        structured = value.structured
        text = structured if isinstance(structured, str) else data.decode()
        blocks = [{"type": "text", "text": text}]
    return CallResult(blocks, Raw(data), value.is_error, meta)


def project(
    result: bytes, method: Method, revision: Revision, marks: JsonObject | None = None
) -> CallResult:
    """Return a tool's result for a revision, with additional members of `_meta`.

    Unknown members are omitted, unknown content becomes text.
    """
    projected = _decode_result(result)
    projected.content = [revision.known(item) for item in projected.content]
    if marks:
        projected.meta = {**(projected.meta or {}), **marks}
    if revision.structured is None:
        projected.structured = UNSET
    elif revision.structured == "object" and projected.structured is not UNSET:
        schema = output_schema(method)
        if schema is None:
            if not isinstance(projected.structured, dict):
                projected.structured = UNSET
        elif not isinstance(projected.structured, dict) or not is_object_schema(schema):
            projected.structured = {"result": projected.structured}
    return projected


def prompt_result(method: Method) -> Callable[[Any], JsonObject]:
    """Return the function that makes a result from a prompt's value."""
    described: JsonObject = {}
    if method.description:
        described["description"] = method.description

    def shape(value: Any) -> JsonObject:
        items = value if isinstance(value, (list, tuple)) else [value]
        return {**described, "messages": [_message(item).on_wire() for item in items]}

    return shape


def _message(item: Any) -> Message:
    if isinstance(item, Message):
        return item
    return Message("user", item)


def read_result(resource: ResourceEntry, uri: str) -> Callable[[Any], JsonObject]:
    """Return the function that makes a result from a resource's value.

    The value is text, bytes, or anything else as JSON.
    """
    mime_type = resource.mime_type

    def embedded(item: Any) -> Embedded:
        if isinstance(item, Embedded):
            return item
        if isinstance(item, bytes):
            return Embedded(uri, blob=item, mime_type=mime_type or "application/octet-stream")
        if isinstance(item, str):
            return Embedded(uri, text=item, mime_type=mime_type or "text/plain")
        text = encode(item).decode()
        return Embedded(uri, text=text, mime_type=mime_type or "application/json")

    def shape(value: Any) -> JsonObject:
        items = value if isinstance(value, (list, tuple)) else [value]
        return {"contents": [embedded(item).contents() for item in items]}

    return shape


def object_result(method: Method) -> Callable[[Any], object]:
    """Return the function that makes a result from the value of an extension's method.

    Such a result is always an object.
    """

    def shape(value: Any) -> object:
        data = b"{}" if value is None else encode(value)
        if not data.startswith(b"{"):
            raise TypeError(
                f"{method.name} must return an object (a dict, a Struct, a dataclass) or None, "
                f"got {type(value).__name__}"
            )
        return Raw(data)

    return shape


def completed(value: Iterable[object]) -> JsonObject:
    """Return the result of a completion."""
    # At most 100 values are sent, the rest is only counted (server/utilities/completion,
    # "Completion Results").
    values = [str(item) for item in value]
    return {
        "completion": {"values": values[:100], "total": len(values), "hasMore": len(values) > 100}
    }


def as_result(error: RpcError, method: Method, revision: Revision) -> bytes:
    """Return the result that reports an error to a model, as JSON.

    Raises the errors that belong to the protocol.
    """
    if not revision.reports_in_result(error, asks_key=method.key == "ask"):
        raise error
    return error_result(error, method.name)


def error_result(error: RpcError, name: str) -> bytes:
    """Return the result that reports an error of a tool to a model, as JSON.

    A model sees only the text; code and data stay in `_meta`, from which our client restores the
    error and its `ran`.
    """
    data = error.data
    reason = error.message
    if isinstance(data, dict):
        reason = str(data.get("reason", error.message))
    text = error.message
    if isinstance(error, InvalidParams):
        text = re.sub(r"(^|; |needs )params\b", r"\1arguments", reason)  # each problem's place
        if isinstance(data, dict):
            data = {**data, "reason": text}
    elif isinstance(error, NotCapable):
        text = reason
    # In development, a result that does not fit.
    elif isinstance(error, InternalError) and reason != error.message:
        text = f"{error.message}: {reason}"
    details: JsonObject = {"code": error.code}
    if data is not None:
        details["data"] = data
    try:
        return encode(
            CallResult([{"type": "text", "text": text}], is_error=True, meta={ERROR_META: details})
        )
    except EncodeError as unsendable:  # the handler wrote the text and the data
        failed(name, None, unsendable)
        return error_result(InternalError(), name)

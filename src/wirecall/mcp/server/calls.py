"""Calls of an app's functions by MCP's methods: prompts, resources and completions; tools have a file of their own.

A request becomes a `Call` and takes the dispatcher's steps like any other call: middleware, binding, ledger. What differs
is the shape of the result. A call that asks its client gives its questions instead of a result, in whatever shape that is.
"""

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from wirecall.errors import InvalidParams, RpcError
from wirecall.mcp.server.asking import Waiting
from wirecall.mcp.server.catalog import Catalog, completed, from_texts, known_messages, prompt_result, read_result
from wirecall.mcp.server.requests import Request
from wirecall.mcp.server.states import INPUT_REQUIRED, States
from wirecall.mcp.types import Complete, Resumed
from wirecall.protocol.limits import Limits
from wirecall.protocol.messages import encode
from wirecall.server.call import Call
from wirecall.server.context import InputRequired
from wirecall.server.dispatch import Dispatcher
from wirecall.server.method import Method


class Calls:
    """Runs what a catalog offers."""

    def __init__(self, catalog: Catalog, dispatcher: Callable[[], Dispatcher], states: States, limits: Limits) -> None:
        self._catalog = catalog
        self._dispatcher = dispatcher
        self._waiting = Waiting(limits, dispatcher)
        self._states = states

    def call(
        self,
        request: Request,
        method: Method,
        arguments: Raw,
        shape: Callable[[Any], Any],
        *,
        record: str | None = None,
        key: str | None = None,
    ) -> Call:
        """Return a call of a function, ready to run. `shape` makes its result of the function's value."""
        call = Call(
            method,
            self._dispatcher().frame(request.caller),
            id=request.id,
            params=arguments,
            position=request.position,
            key=key,
            record=record,
            peer=request.call(self._waiting),
            shape=shape,
        )
        if request.session.revision.is_stateless and isinstance(request.params, Resumed):
            self._states.resume(call, request.params)
        return call

    async def run(self, call: Call) -> bytes:
        """Return the result of a call, or the questions it waits for, as bytes."""
        try:
            return bytes(await self._dispatcher().call(call))
        except InputRequired as pause:
            return pause.interim
        finally:
            call.peer.close()

    # --- methods -----------------------------------------------------------------------------------------------------

    async def get_prompt(self, request: Request) -> Any:
        method = self._catalog.prompt(request.params.name).method
        texts = request.params.arguments
        arguments = from_texts(method, {} if texts is UNSET else texts)
        result = await self.run(self.call(request, method, arguments, prompt_result(method)))
        revision = request.session.revision
        if result.startswith(INPUT_REQUIRED) or revision.value("structured") == "any":
            return result
        return known_messages(msgspec.json.decode(result), revision)

    async def read_resource(self, request: Request) -> Any:
        uri, revision = request.params.uri, request.session.revision
        found = self._catalog.resource(uri)
        if found is None:
            raise RpcError(int(revision.value("resource not found") or 0), "Resource not found", {"uri": uri})
        resource, names = found
        arguments = from_texts(resource.method, names)
        result = await self.run(self.call(request, resource.method, arguments, read_result(resource, uri)))
        if result.startswith(INPUT_REQUIRED) or not revision.has("caching"):
            return result
        return result[:-1] + b',"ttlMs":0,"cacheScope":"private"}'

    async def complete(self, request: Request) -> Any:
        params: Complete = request.params
        of = params.ref.name if params.ref.type == "ref/prompt" else params.ref.uri
        self._check_ref(params.ref.type, of)
        method = self._catalog.completions.get((of, params.argument.name))
        if method is None:
            return completed([])
        arguments = [params.argument.value, params.context.arguments][: len(method.signature.parameters)]
        return await self.run(self.call(request, method, Raw(encode(arguments)), completed))

    def _check_ref(self, kind: str, of: str) -> None:
        known: dict[str, dict[str, Any]] = {
            "ref/prompt": self._catalog.prompts,
            "ref/resource": {**self._catalog.resources, **self._catalog.templates},
        }
        if of not in known.get(kind, {}):
            raise InvalidParams(f"ref: there is no {kind.removeprefix('ref/')[:20]} {of[:100]!r}")

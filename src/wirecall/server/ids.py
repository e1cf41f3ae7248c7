"""The ids of one call: its names in logs, spans and the audit trail.

The JSON-RPC id is unique for one client at best, since most clients count from 1. So a call has a
`call_id` as well, which this process makes when something asks for it: a plain query that nothing
observes has no ids.
"""

import sys
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.protocol.messages import Id, JsonObject
from wirecall.protocol.sender import HttpHeader

CorrelationId: TypeAlias = int | str | float


class _Meta(Struct):
    meta: JsonObject | UnsetType = msgspec.field(default=UNSET, name="_meta")


_decode_meta = msgspec.json.Decoder(_Meta).decode


class Ids(Struct, eq=False):
    """The ids of one call in logs, spans and the audit trail, each made when it is asked for.

    It does not refer to the call or to a task: `CURRENT` has it for as long as a task lives, and
    with either of them it would be a cycle for the garbage collector.
    """

    id: Id | UnsetType
    # The params of the request, with its `_meta`.
    params: Raw | UnsetType = UNSET
    headers: HttpHeader | None = None
    # The trace id of the span that was opened for this call.
    span: str | None = None
    _call_id: str | None = None

    @property
    def call_id(self) -> str:
        """A name for this call that is unique among all processes."""
        if self._call_id is None:
            from base64 import b32encode  # late: `import wirecall` stays light
            from os import urandom

            self._call_id = b32encode(urandom(10)).decode().lower()
        return self._call_id

    @property
    def made_call_id(self) -> str | None:
        """The `call_id`, if something has asked for it: a log record, for example."""
        return self._call_id

    @property
    def correlation_id(self) -> CorrelationId:
        """The id, or its characters if only those are exact; without an id, a made-up one."""
        if self.id is UNSET or self.id is None:
            return f"n-{self.call_id}"
        if isinstance(self.id, Raw):
            return bytes(self.id).decode()
        return self.id

    @property
    def meta(self) -> JsonObject:
        """The `_meta` object beside the params, or an empty one."""
        if self.params is UNSET:
            return {}
        try:
            meta = _decode_meta(self.params).meta
        except msgspec.ValidationError:  # params by position, or `_meta` that is not an object
            return {}
        return meta if meta is not UNSET else {}

    @property
    def traceparent(self) -> str | None:
        """The W3C trace context of the caller: the call's, or that of its HTTP request."""
        if self.params is not UNSET and b"traceparent" in bytes(self.params):
            given = self.meta.get("traceparent")
            if isinstance(given, str):
                return given
        if self.headers is None:
            return None
        return self.headers.get("traceparent")

    @property
    def trace_id(self) -> str | None:
        """The id of the trace that the call belongs to."""
        from wirecall.logs import trace_id_of  # late, too

        return (
            self.span
            or trace_id_of(self.traceparent)
            or _current_trace()
            or self._around("trace_id")
        )

    @property
    def request_id(self) -> str | None:
        """The X-Request-Id of the HTTP request, if it is a usable one."""
        from wirecall.logs import request_id_of  # late, too

        found: str | None = None
        if self.headers is not None:
            found = request_id_of(self.headers.get("x-request-id"))
        return found or self._around("request_id")

    def facts(self) -> JsonObject:
        """Return the ids by their names in a log record."""
        return {
            "correlation_id": self.correlation_id,
            "call_id": self.call_id,
            "trace_id": self.trace_id,
            "request_id": self.request_id,
        }

    def _around(self, name: str) -> Any:
        """Return an id of the HTTP request around a call without a header.

        A plain query does not get a header.
        """
        from wirecall.logs import CURRENT, RequestIds  # late, too

        around = CURRENT.get()
        if isinstance(around, RequestIds):
            return around.facts().get(name)
        return None


def _current_trace() -> str | None:
    """Return the trace id of OpenTelemetry's current span, in a program that uses OpenTelemetry."""
    telemetry = sys.modules.get("opentelemetry.trace")
    if telemetry is None:
        return None
    span = telemetry.get_current_span().get_span_context()
    if not span.is_valid:
        return None
    return f"{span.trace_id:032x}"

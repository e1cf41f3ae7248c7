"""Upstreams of the settings as origins, and the values of their references.

A reference is read when a server is started or reached, so a value that is missing is a fault of one
upstream, and one that has changed needs no restart of the gateway. Over HTTP, a server that refuses
the caller is asked again with the values that there are by then, if they differ.
"""

from collections.abc import Callable, Mapping
from typing import Any

from wirecall.config import is_reference
from wirecall.errors import UsageError
from wirecall.gateway.login import StoredLogin
from wirecall.gateway.references import References
from wirecall.gateway.settings import UpstreamSettings
from wirecall.gateway.upstream import Origin
from wirecall.transports.http_client import HttpAnswer


def origin_of(upstream: UpstreamSettings, references: References) -> Origin:
    """Return how an upstream is reached; `UsageError` if a reference has no value."""
    target: dict[str, Any]
    if upstream.url is None:
        target = {
            "command": upstream.words(references),
            "env": upstream.variables(references),
            "cwd": upstream.cwd,
        }
    else:
        headers = upstream.request_headers(references)
        target = {"url": upstream.address(references), "headers": headers}
        has_token = any(name.lower() == "authorization" for name in headers)
        if upstream.auth == "login" and not has_token:
            target["auth"] = StoredLogin
        elif upstream.auth.startswith("bearer:") or any(
            map(is_reference, upstream.headers.values())
        ):
            target["headers"] = {}
            target["auth"] = lambda _url: StatedHeaders(
                headers, lambda: upstream.request_headers(references)
            )
    return Origin(name=upstream.name, **target, **_rules(upstream))


def unread_origin(upstream: UpstreamSettings, references: References) -> Origin:
    """Return how an upstream is reached. Its references are read when it is."""
    return Origin(
        name=upstream.name,
        command=upstream.command,
        url=upstream.url or "",
        digest=upstream.digest,
        allows=upstream.allows,
        read=lambda: origin_of(upstream, references),
        **_rules(upstream),
    )


def _rules(upstream: UpstreamSettings) -> dict[str, Any]:
    """Return the rules for its calls.

    Several rules are for the gateway itself: `share`, `idle`, `required` and `revision`.
    """
    return {
        "trust": upstream.trust,
        "timeout": upstream.timeout,
        "resend_after": "off" if upstream.resend_after is None else upstream.resend_after,
        "in_flight": upstream.in_flight,
        "kinds": {
            name: tool.kind for name, tool in upstream.tools.items() if tool.kind is not None
        },
        "keys": {name: tool.key for name, tool in upstream.tools.items() if tool.key != "auto"},
    }


class StatedHeaders:
    """Sends headers whose values are references."""

    is_interactive = False

    def __init__(self, headers: Mapping[str, str], read: Callable[[], Mapping[str, str]]) -> None:
        self._headers = headers
        self._read = read

    async def headers(self, method: str, url: str) -> Mapping[str, str]:
        """Return the headers of a request."""
        return self._headers

    async def answered(self, answer: HttpAnswer, sent: Mapping[str, str]) -> bool:
        """Read the values again if the server refuses them; return whether they differ."""
        if answer.status not in (401, 403):
            return False
        try:
            self._headers = self._read()
        except UsageError:
            return False  # the server's refusal says enough
        return self._headers != sent

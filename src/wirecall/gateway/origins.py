"""Upstreams of the settings as origins, with the values of their references."""

from typing import Any

from wirecall.gateway.login import StoredLogin
from wirecall.gateway.references import References
from wirecall.gateway.settings import UpstreamSettings
from wirecall.gateway.upstream import Origin


def origin_of(upstream: UpstreamSettings, references: References) -> Origin:
    """Return how an upstream is reached; `UsageError` if a reference has no value.

    Several rules are for the gateway itself: `allow`, `deny`, `share`, `idle`, `required` and
    `revision`.
    """
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
    return Origin(
        name=upstream.name,
        trust=upstream.trust,
        timeout=upstream.timeout,
        resend_after="off" if upstream.resend_after is None else upstream.resend_after,
        in_flight=upstream.in_flight,
        kinds={name: tool.kind for name, tool in upstream.tools.items() if tool.kind is not None},
        keys={name: tool.key for name, tool in upstream.tools.items() if tool.key != "auto"},
        **target,
    )

"""The exchanges of `exchanges.txt`: every row of the specification's rules for a resource server."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.auth import RESOURCE, Shop, call, ran

PRM = 'resource_metadata="https://api.example.com/.well-known/oauth-protected-resource/mcp"'
PAGE = Path(__file__).parent / "exchanges.txt"


def exchanges() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield the place, the request line, its authorization and body, and the expected answer."""
    sent = ""
    for number, line in enumerate(PAGE.read_text().splitlines(), start=1):
        if line.startswith("--> "):
            sent = line[4:]
        elif line.startswith("<-- "):
            method, path, rest = sent.split(" ", 2)
            at = min(
                (index for mark in (' {"', ' [{"') if (index := rest.find(mark)) >= 0),
                default=len(rest),
            )
            yield (
                f"line {number}",
                f"{method} {path}",
                rest[:at],
                rest[at:].strip(),
                line[4:].replace("PRM", PRM),
            )


@pytest.fixture
def shop() -> Shop:
    return Shop(
        scopes=["mcp:use"],
        hierarchy={"everything": ["prices:all", "mcp:use"], "prices:all": ["prices:read"]},
    )


def tokens(shop: Shop) -> dict[str, str]:
    now = int(shop.clock.now)
    return {
        "good": shop.token("mcp:use"),
        "scopeless": shop.token(),
        "partly": shop.token("mcp:use orders:write"),
        "priced": shop.token("mcp:use prices:read"),
        "broad": shop.token("everything"),
        "expired": shop.token("mcp:use", exp=now - 31),
        "early": shop.token("mcp:use", nbf=now + 31),
        "opaque": "c2VjcmV0LXRva2Vu",
        "foreign": shop.token("mcp:use", resource="https://other.example.com/mcp"),
        "origin": shop.token("mcp:use", resource="https://api.example.com"),
        "nowhere": shop.token("mcp:use", aud=None),
        "several": shop.token("mcp:use", resource=["https://other.example.com", RESOURCE]),
    }


@pytest.mark.parametrize(("place", "line", "authorization", "body", "expected"), [*exchanges()])
async def test_exchange(
    shop: Shop,
    place: str,
    line: str,
    authorization: str,
    body: str,
    expected: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    method, path = line.split(" ")
    known = tokens(shop)
    for name, token in known.items():
        authorization = authorization.replace(f"{{{name}}}", token)
        path = path.replace(f"{{{name}}}", token)
    headers = [] if authorization == "-" else [("authorization", authorization)]
    message = body.encode() or call("whoami")
    answer = await shop.ask(method, path.partition("?")[0], None, message, headers)
    assert f"{answer.status} {answer.challenge}".strip() == expected, place
    assert ran(shop.app) == []
    # No answer and no log record has a token in it.
    got = answer.body.decode() + str(answer.headers) + caplog.text
    assert not [
        name for name, token in known.items() if token in got or token.rpartition(".")[2] in got
    ]

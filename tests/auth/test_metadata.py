"""The metadata of a protected resource (RFC 9728), and what is never taken from a request."""

import pytest

from tests.auth import METADATA, RESOURCE, Shop
from tests.transports import ask
from wirecall import App
from wirecall.auth import Access, Identity, Jwt, Tokens, digest

PATHS = ["/.well-known/oauth-protected-resource/mcp", "/.well-known/oauth-protected-resource"]


@pytest.mark.parametrize("path", PATHS)
async def test_metadata_names_the_resource_its_issuers_and_its_scopes(path: str) -> None:
    shop = Shop(scopes=["mcp:use", "offline_access"], title="The shop")
    answer = await shop.ask("GET", path)
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.json == {
        "resource": RESOURCE,
        "authorization_servers": ["https://auth.test"],
        "scopes_supported": [
            "mcp:use",
            "news:read",
            "orders:audit",
            "orders:write",
            "points:read",
            "prices:read",
            "prompts:use",
        ],
        "bearer_methods_supported": ["header"],
        "resource_name": "The shop",
    }
    assert answer.headers["cache-control"] == "public, max-age=300"


@pytest.mark.parametrize("origins", [(), ["https://app.example.com"]])
@pytest.mark.parametrize("origin", ["https://app.example.com", "https://elsewhere.example.com"])
async def test_metadata_is_the_only_document_that_pages_of_every_origin_read(
    origins: list[str], origin: str
) -> None:
    shop = Shop(origins=origins)
    for path in PATHS:
        answer = await shop.ask("GET", path, headers={"origin": origin})
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "*")
        asked = {
            "origin": origin,
            "access-control-request-method": "GET",
            "access-control-request-headers": "mcp-protocol-version",
        }
        answer = await shop.ask("OPTIONS", path, headers=asked)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (204, "*")
    answer = await shop.ask("POST", "/mcp", shop.token(), {}, {"origin": origin})
    assert (answer.status == 403) == (origin not in origins)


async def test_addresses_come_from_the_configuration_and_never_from_the_request() -> None:
    shop = Shop()
    forged = {
        "host": "api.example.com:666",
        "x-forwarded-host": "evil.example.com",
        "forwarded": "host=evil.example.com",
    }
    for path in ("/mcp", "/rpc"):
        answer = await shop.ask("POST", path, None, {}, forged)
        assert (answer.status, answer.challenge) == (401, f'Bearer resource_metadata="{METADATA}"')
    assert (await shop.ask("GET", PATHS[0], headers=forged)).json["resource"] == RESOURCE


@pytest.mark.parametrize(
    ("resource", "path"),
    [
        ("https://api.example.com", ""),
        ("https://api.example.com:8443/v1/mcp", "/v1/mcp"),
        ("http://127.0.0.1:8420/rpc", "/rpc"),
    ],
)
async def test_well_known_path_goes_between_host_and_path(resource: str, path: str) -> None:
    app = App("shop", auth=Jwt("https://auth.test", resource=resource, jwks={"keys": []}))
    origin = resource.removesuffix(path) if path else resource
    url = f"{origin}/.well-known/oauth-protected-resource{path}"
    reply = await ask(app.asgi(), body=b"{}")
    assert reply.headers["www-authenticate"] == f'Bearer resource_metadata="{url}"'
    assert (
        await ask(app.asgi(), f"/.well-known/oauth-protected-resource{path}", method="GET")
    ).json["resource"] == resource


async def test_metadata_is_missing_without_an_authorization_server() -> None:
    """RFC 9728 wants at least one authorization server, and fixed tokens have none."""
    app = App("shop", auth=Tokens({digest("secret"): Identity("ci")}))
    reply = await ask(app.asgi(), body=b"{}")
    assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
    assert (await ask(app.asgi(), PATHS[1], method="GET")).status == 404
    # A function can have both.
    app = App(
        "shop", auth=Access(lambda token: None, resource=RESOURCE, issuers=["https://auth.test"])
    )
    assert (await ask(app.asgi(), PATHS[1], method="GET")).json["authorization_servers"] == [
        "https://auth.test"
    ]


async def test_metadata_of_two_issuers_names_both() -> None:
    both = [
        Jwt(f"https://{name}.test", resource=RESOURCE, jwks={"keys": []}) for name in ("a", "b")
    ]
    reply = await ask(App("shop", auth=both).asgi(), PATHS[0], method="GET")
    assert reply.json["authorization_servers"] == ["https://a.test", "https://b.test"]

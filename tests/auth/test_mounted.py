"""Apps with auth= inside another application: clients find the metadata."""

import re

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from wirecall import App
from wirecall.auth import Jwt

RESOURCE = "https://localhost/shop/mcp"
WELL_KNOWN = "/.well-known/oauth-protected-resource"


def mounted(*more: str, resource: str = RESOURCE) -> TestClient:
    app = App("shop", auth=Jwt(issuer="https://auth.example.com", resource=resource))
    routes = [Mount(path, app.asgi()) for path in (*more, "/shop")]
    return TestClient(Starlette(routes=routes), base_url="https://localhost")


def challenge(web: TestClient, path: str) -> str:
    refused = web.post(path, json={"jsonrpc": "2.0", "id": 1, "method": "x"})
    assert refused.status_code == 401
    found = re.search(r'resource_metadata="([^"]+)"', refused.headers["www-authenticate"])
    assert found is not None
    return found[1]


@pytest.mark.parametrize("path", ["/shop/mcp", "/shop/rpc"])
def test_mounted_app_names_metadata_that_clients_reach(path: str) -> None:
    web = mounted()
    address = challenge(web, path)
    assert address == f"https://localhost/shop{WELL_KNOWN}/shop/mcp"
    read = web.get(address)
    assert read.status_code == 200
    assert read.json()["resource"] == RESOURCE
    assert read.headers["access-control-allow-origin"] == "*"


def test_mounted_app_can_serve_the_metadata_of_its_host() -> None:
    web = mounted(WELL_KNOWN)
    read = web.get(f"{WELL_KNOWN}/shop/mcp", headers={"origin": "https://page.example.com"})
    assert read.status_code == 200
    assert read.json()["resource"] == RESOURCE
    assert web.get(f"{WELL_KNOWN}/other").status_code == 404


def test_mounted_app_may_be_the_resource_as_a_whole() -> None:
    web = mounted(resource="https://localhost/shop")
    address = challenge(web, "/shop/mcp")
    assert address == f"https://localhost/shop{WELL_KNOWN}/shop"
    assert web.get(address).json()["resource"] == "https://localhost/shop"


def test_mounted_app_with_a_resource_elsewhere_keeps_its_address_and_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    web = mounted(resource="https://api.example.com/mcp")
    for _ in range(2):
        assert challenge(web, "/shop/mcp") == f"https://api.example.com{WELL_KNOWN}/mcp"
    [warning] = [each.getMessage() for each in caplog.records if "mounted" in each.getMessage()]
    assert warning.startswith("the app is mounted at /shop, and resource=")
    assert warning.endswith("use resource='https://api.example.com/shop/mcp'")


def test_mounted_app_that_clients_find_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    web = mounted(WELL_KNOWN)
    challenge(web, "/shop/mcp")
    assert web.get(f"{WELL_KNOWN}/other").status_code == 404
    assert not [each for each in caplog.records if "mounted" in each.getMessage()]

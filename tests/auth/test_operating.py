"""Authorization for operators: wirecall.toml, `wirecall doctor`, `wirecall probe`, and a real
server.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli import serving, wirecall
from tests.client.peers import served
from tests.ports import free_port
from wirecall import App
from wirecall.auth import Jwt
from wirecall.config import check_config, load_config
from wirecall.errors import UsageError
from wirecall.testing.auth import AuthorizationServer
from wirecall.transports.serve import ServerName

SETTINGS = """\
[server]
app = "app.py"

[auth]
issuer = "https://auth.example.com"
resource = "https://api.example.com/mcp"
audience = "shop"
scopes = ["mcp:use"]
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("WIRECALL_SECRET", "WIRECALL_MODE", "WIRECALL_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WIRECALL_SERVER_HTTP", f"127.0.0.1:{free_port()}")
    return tmp_path


@pytest.fixture
async def issuer() -> AsyncIterator[AuthorizationServer]:
    async with AuthorizationServer() as server:
        yield server


def test_section_auth_states_the_issuer() -> None:
    Path("wirecall.toml").write_text(SETTINGS)
    config = load_config()
    assert config.get("auth.issuer") == "https://auth.example.com"
    assert config.get("auth.scopes") == ["mcp:use"]


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        (
            '[auth]\nissuer = "https://auth.example.com"\n',
            "wirecall.toml:2",
            "auth.issuer needs auth.resource",
        ),
        (
            '[auth]\nscopes = ["a"]\nresource = "https://a.test/mcp"\n',
            "wirecall.toml:3",
            "auth.resource needs auth.issuer",
        ),
        (
            '[auth]\nissuer = "http://a.test"\nresource = "https://a.test/mcp"\n',
            "wirecall.toml:2",
            "auth.issuer must be",
        ),
    ],
)
def test_mistake_in_the_section_is_found_with_its_line(text: str, where: str, what: str) -> None:
    Path("wirecall.toml").write_text(text)
    _, problems = check_config()
    assert (problems[0].where, problems[0].what[: len(what)]) == (where, what)


def test_app_with_authenticate_cannot_have_the_section() -> None:
    app = App("shop", authenticate=lambda headers: "x")
    with pytest.raises(UsageError, match="contradict"):
        app.configure(auth=Jwt("https://auth.example.com", resource="https://api.example.com/mcp"))


def test_app_that_serves_mcp_already_cannot_get_auth() -> None:
    app = App("shop")
    app.asgi()
    with pytest.raises(UsageError, match="serving already"):
        app.configure(auth=lambda token: token)


async def diagnosis() -> list[tuple[str, str]]:
    """Return what `wirecall doctor` finds about authorization."""
    printed = (await asyncio.to_thread(wirecall, "doctor", "--json")).stdout
    checks = json.loads(printed)["result"]["checks"]
    return [(each["level"], each["what"]) for each in checks if each["name"] == "auth"]


@pytest.mark.parametrize("source", ["file", "app"])
async def test_doctor_fetches_the_keys(source: str, issuer: AuthorizationServer) -> None:
    resource = "https://api.example.com/mcp"
    if source == "file":
        Path("wirecall.toml").write_text(
            f'[auth]\nissuer = "{issuer.issuer}"\nresource = "{resource}"\n'
        )
    else:
        made = (
            "from wirecall import App\nfrom wirecall.auth import Jwt\n"
            f'app = App("a", auth=Jwt("{issuer.issuer}", '
        )
        Path("app.py").write_text(made + f'resource="{resource}"))\n')
        Path("wirecall.toml").write_text('[server]\napp = "app.py"\n')
    assert await diagnosis() == [("ok", f"{issuer.issuer} has 1 keys")]
    issuer.faults.down = True
    [(level, what)] = await diagnosis()
    assert (level, "there is no metadata" in what) == ("fail", True)


async def probed(*words: str) -> tuple[int, Any]:
    run = await asyncio.to_thread(wirecall, "probe", "--json", *words)
    return run.returncode, json.loads(run.stdout)


@pytest.mark.parametrize("server", ["uvicorn", "granian"])
async def test_probe_reports_where_tokens_come_from(
    server: ServerName, issuer: AuthorizationServer
) -> None:
    """The address of the server is known before its app is made: the resource of its tokens is that
    address.
    """

    def shop(url: str) -> App:
        return App("shop", auth=Jwt(issuer.issuer, resource=f"{url}/mcp", scopes="mcp:use"))

    async with served(shop, server) as url:
        resource = f"{url}/mcp"
        code, got = await probed(url)
        assert code == 3
        assert f"tokens of {issuer.issuer} for {resource}, scopes mcp:use" in got["error"]["why"]
        token = issuer.token("alice", resource=resource, scopes="mcp:use")
        code, got = await probed(url, "--header", f"Authorization: Bearer {token}")
        assert (code, got["result"]["tokens"]["servers"]) == (0, [issuer.issuer])
        issuer.faults.no_pkce = True
        code, got = await probed(url, "--header", f"Authorization: Bearer {token}")
        assert (code, "PKCE" in got["result"]["problems"][0]["what"]) == (9, True)


async def test_serve_accepts_the_tokens_of_the_section(issuer: AuthorizationServer) -> None:
    """The app declares scopes, and the operator names the issuer."""
    Path("app.py").write_text(
        'from wirecall import App\napp = App("shop")\n@app.query(scopes="prices:read")\n'
        "def price() -> int:\n    return 3\n"
    )
    resource = "https://api.example.com/mcp"
    Path("wirecall.toml").write_text(
        f'[auth]\nissuer = "{issuer.issuer}"\nresource = "{resource}"\nscopes = ["mcp:use"]\n'
    )
    token = issuer.token("alice", resource=resource, scopes="mcp:use prices:read")

    def ask(url: str, *words: str) -> tuple[int, bytes]:
        run = wirecall("call", url, "price", "--json", *words)
        return run.returncode, run.stdout

    with serving("app.py") as url:
        assert (await asyncio.to_thread(ask, url))[0] == 3
        code, got = await asyncio.to_thread(ask, url, "--header", f"Authorization: Bearer {token}")
        assert (code, json.loads(got)["result"]) == (0, 3)

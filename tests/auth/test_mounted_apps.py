"""Mounted apps and their callers: scopes are enforced, and other tokens are an error at once."""

import json
from typing import Any

import pytest

from tests.calls import call
from tests.mcp.asgi import BASIC, Exchange, enveloped, repeated
from wirecall import App, Context, UsageError
from wirecall.auth import Access, Identity, Jwt, Tokens, digest

ISSUER = "https://auth.example.com"
RESOURCE = "https://api.example.com/mcp"


def tokens() -> Tokens:
    """Return a verifier of three tokens; the name of each has its scopes."""
    return Tokens(
        {
            digest("none"): Identity("ada"),
            digest("base"): Identity("ada", scopes=frozenset({"stays:use"})),
            digest("all"): Identity("ada", scopes=frozenset({"stays:use", "stays:write"})),
        }
    )


def make_stays(auth: Any = None, **options: Any) -> App:
    stays = App("stays", mode="development", auth=auth, **options)

    @stays.query
    def search(city: str) -> str:
        return city

    @stays.command(scopes="stays:write", destructive=False)
    def book(city: str, ctx: Context) -> str:
        return f"{city} {ctx.caller}"

    @stays.query(scopes=lambda city: f"city:{city}")
    def secret(city: str) -> str:
        return city

    @stays.resource("stays://{city}")
    def page(city: str) -> str:
        return city

    return stays


def travel(auth: Any, stays: App, **options: Any) -> App:
    app = App("travel", mode="development", auth=auth, **options)

    @app.query
    def own() -> str:
        return "own"

    app.mount("stays", stays)
    return app


async def asked(app: App, token: str, method: str, params: Any) -> Any:
    """Return the status of a request and the scopes that its challenge names."""
    headers = {**BASIC, "authorization": f"Bearer {token}"}
    exchange = await Exchange(app.asgi(), "POST", headers, call(method, params), "/rpc").started()
    data = await exchange.json()
    return exchange.status, (data.get("error") or {}).get("data", {}).get("scopes")


async def test_mounted_app_enforces_its_base_scopes_for_its_methods_alone() -> None:
    verifier = tokens()
    app = travel(verifier, make_stays(Access(verifier, scopes="stays:use")))
    bonn = {"city": "bonn"}
    booked = {**bonn, "idempotency_key": "k"}
    assert await asked(app, "none", "own", None) == (200, None)
    assert await asked(app, "none", "stays.search", bonn) == (403, ["stays:use"])
    assert await asked(app, "base", "stays.search", bonn) == (200, None)
    assert await asked(app, "base", "stays.book", booked) == (403, ["stays:use", "stays:write"])
    assert await asked(app, "all", "stays.book", booked) == (200, None)
    assert await asked(app, "all", "stays.secret", bonn) == (403, ["stays:use", "city:bonn"])
    await app.aclose()


async def test_mounted_app_enforces_its_scopes_over_mcp() -> None:
    verifier = tokens()
    app = travel(verifier, make_stays(Access(verifier, scopes="stays:use")))
    statuses = {}
    served = app.asgi()
    for token in ("none", "base", "all"):
        for name in ("stays_search", "stays_book"):
            message = enveloped("tools/call", {"name": name, "arguments": {"city": "bonn"}})
            headers = {**BASIC, **repeated(message), "authorization": f"Bearer {token}"}
            body = json.dumps(message).encode()
            exchange = await Exchange(served, "POST", headers, body).started()
            statuses[token, name] = exchange.status
            await exchange.read()
    await app.aclose()
    assert statuses == {
        ("none", "stays_search"): 403,
        ("none", "stays_book"): 403,
        ("base", "stays_search"): 200,
        ("base", "stays_book"): 403,
        ("all", "stays_search"): 200,
        ("all", "stays_book"): 200,
    }


async def test_mounted_scopes_are_in_the_metadata_of_the_outer_app() -> None:
    verifier = Jwt(issuer=ISSUER, resource=RESOURCE)
    app = travel(verifier, make_stays(Access(verifier, scopes="stays:use")))
    assert app._declared_scopes() == ["stays:use", "stays:write"]


def test_mounted_app_without_auth_takes_the_callers_of_the_outer_one() -> None:
    app = travel(tokens(), make_stays())
    assert "stays.search" in app.registry.methods


OTHER = "https://other.example.com"


def other_issuer() -> tuple[Any, App]:
    return (
        Jwt(issuer=ISSUER, resource=RESOURCE),
        make_stays(Jwt(issuer=OTHER, resource=RESOURCE)),
    )


def more_issuers() -> tuple[Any, App]:
    """The outer app would let tokens in that the mounted one refuses."""
    inner = Jwt(issuer=ISSUER, resource=RESOURCE)
    return [inner, Jwt(issuer=OTHER, resource=RESOURCE)], make_stays(inner)


def no_auth() -> tuple[Any, App]:
    return None, make_stays(tokens())


def hierarchy() -> tuple[Any, App]:
    verifier = tokens()
    return verifier, make_stays(Access(verifier, hierarchy={"a": ["b"]}))


def names() -> tuple[Any, App]:
    verifier = tokens()
    return verifier, make_stays(Access(verifier, name=lambda identity: identity.subject))


def hidden() -> tuple[Any, App]:
    verifier = tokens()
    return verifier, make_stays(Access(verifier, hide=True))


def authenticated() -> tuple[Any, App]:
    return None, make_stays(authenticate=lambda headers: "ada")


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (other_issuer, rf"Jwt\(issuer='{OTHER}'\), the outer app with Jwt\(issuer='{ISSUER}'\)"),
        (more_issuers, r"the outer app with Jwt\(issuer=.*Jwt\(issuer="),
        (no_auth, "'stays' has auth=, and 'travel' has none"),
        (hierarchy, "a hierarchy= of scopes that the outer app does not have"),
        (names, "names callers with name="),
        (hidden, "hides entries from callers"),
        (authenticated, "'stays' has authenticate=, and 'travel' does not have the same"),
    ],
)
def test_mounted_app_with_other_callers_is_refused(case: Any, why: str) -> None:
    auth, stays = case()
    with pytest.raises(UsageError, match=why) as refused:
        travel(auth, stays)
    assert "verifier = Jwt(...), and pass it to both apps" in str(refused.value)


def test_mounted_app_is_checked_again_when_the_outer_auth_changes() -> None:
    verifier = tokens()
    app = travel(verifier, make_stays(verifier))
    with pytest.raises(UsageError, match="'travel' cannot mount 'stays'"):
        app.configure(auth=tokens())


def test_mounted_app_shares_one_authenticate_function() -> None:
    def who(headers: Any) -> str:
        return "ada"

    app = travel(None, make_stays(authenticate=who), authenticate=who)
    assert "stays.search" in app.registry.methods


async def test_scopes_of_a_mounted_app_need_auth_in_the_outer_one() -> None:
    with pytest.raises(UsageError, match=r"stays\.\w+ asks for scopes"):
        travel(None, make_stays()).asgi()

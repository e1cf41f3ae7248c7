"""The sender of a call as its token describes it, and the scopes that a method asks for.

1. A scope is a word of the authorization server's, such as "orders:write". A method names the scopes that its callers need,
   or a function of its arguments that returns them.
2. Scopes by arguments see the values that the handler would get. If the params do not fit the method there are none to see:
   such a call is refused at its binding and never runs.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Raw, Struct, UnsetType

from wirecall.errors import InvalidParams, Unauthorized, UsageError

if TYPE_CHECKING:
    from wirecall.protocol.params import Signature

ScopesOf: TypeAlias = Callable[..., str | Iterable[str]]
ScopeRule: TypeAlias = str | Sequence[str] | ScopesOf

SCOPE = r"[\x21\x23-\x5b\x5d-\x7e]+"  # a scope-token of RFC 6749, section 3.3; compiled when it is needed


class Identity(Struct, frozen=True):
    """The sender of a call, verified: a person or a program (`subject`), and the client that acts for it."""

    subject: str | None
    client: str | None = None
    issuer: str | None = None
    scopes: frozenset[str] = frozenset()
    claims: Mapping[str, Any] = {}
    expires: float | None = None  # Unix time

    @property
    def name(self) -> str:
        """The name under which ledger, sessions and audit know the caller. A subject is unique for its issuer only."""
        own = self.subject or self.client or ""
        return f"{self.issuer} {own}" if self.issuer and own else own

    @classmethod
    def of_claims(cls, claims: Mapping[str, Any], issuer: str) -> "Identity":
        """Return the identity that the claims of a token describe; `Unauthorized` without a subject or client."""
        # Keycloak and RFC 9068 have `scope` as a text, Okta `scp` as a list, Entra `scp` as a text.
        found: set[str] = set()
        for told in (claims.get("scope"), claims.get("scp")):
            words = told.split() if isinstance(told, str) else told if isinstance(told, list) else ()
            found.update(word for word in words if isinstance(word, str))
        # The client, by its names in RFC 9068, OpenID Connect, Okta and Entra.
        clients = [claims.get(name) for name in ("client_id", "azp", "cid", "appid")]
        client = next((told for told in clients if isinstance(told, str) and told), None)
        subject, expires = claims.get("sub"), claims.get("exp")
        subject = subject if isinstance(subject, str) and subject else None
        if subject is None and client is None:
            raise Unauthorized("the token names neither a subject nor a client")
        until = float(expires) if isinstance(expires, (int, float)) else None
        return cls(subject, client, issuer, frozenset(found), claims, until)


Permit: TypeAlias = Callable[[Identity, Collection[str]], None]  # raises unless the identity has all of these scopes


class Scopes:
    """The scopes of one method: `always` the same ones, or those that a function of its arguments returns."""

    def __init__(self, rule: ScopeRule, function: Callable[..., object], signature: "Signature", name: str) -> None:
        self.always: tuple[str, ...] = ()
        self._by: ScopesOf | None = None
        self._takes: tuple[str, ...] = ()
        self._signature = signature
        if not callable(rule):
            self.always = scope_names(f"scopes of {name}", rule)
            return
        import inspect  # late: `import wirecall` stays light

        self._by = rule
        self._called: inspect.Signature = inspect.signature(function)
        self._takes = tuple(inspect.signature(rule).parameters)
        known = [parameter.name for parameter in signature.parameters]
        if not {*self._takes} <= {*known}:
            raise UsageError(
                f"The scopes of {name} cannot be found.",
                f"their function takes ({', '.join(self._takes)}), the method takes ({', '.join(known)})",
                "give it parameters of the method, by the same names",
            )

    def of(self, params: Raw | UnsetType) -> Sequence[str]:
        """Return the scopes of a call with these params."""
        if self._by is None:
            return self.always
        try:
            args, keywords = self._signature.bind_all(params, None)
        except InvalidParams:
            return ()
        given = self._called.bind(*args, **keywords).arguments
        found = self._by(*[given[name] for name in self._takes])
        return (found,) if isinstance(found, str) else tuple(found)


def scope_names(option: str, given: object) -> tuple[str, ...]:
    """Return declared scopes; raise `UsageError` for a value that is not a scope, or a list of them."""
    names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(SCOPE, name):
            raise UsageError(
                f"{option}: {name!r} is not a scope.",
                "a scope is printable ASCII without spaces, quotes and backslashes (RFC 6749, section 3.3)",
                'use scopes="orders:read", or scopes=["orders:read", "orders:write"]',
            )
    return tuple(dict.fromkeys(map(str, names)))


def with_scopes(rule: ScopeRule | None, more: Sequence[str]) -> ScopeRule:
    """Return a rule that asks for more scopes besides its own."""
    if not callable(rule):
        return [*more, *scope_names("scopes", rule or ())]

    @wraps(rule)  # the parameters stay those of the rule
    def both(*args: object) -> list[str]:
        found = rule(*args)
        return [*more, *((found,) if isinstance(found, str) else found)]

    return both

"""The sender of a call as its token describes it, and the scopes that a method asks for.

1. A scope is a word of the authorization server's, such as "orders:write". A method names the
   scopes that its callers need, or a function of its arguments that returns them.
2. A function of scopes receives the values that the handler would get. If the params do not fit the
   method, it is not called: such a call is refused at its binding and never runs.
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

# A scope-token of RFC 6749, section 3.3; compiled when it is needed.
SCOPE = r"[\x21\x23-\x5b\x5d-\x7e]+"


class Identity(Struct, frozen=True):
    """The verified sender of a call: a person or a program, and the client that acts for it.

    `subject` is the person or the program.

    `client` is the program, `issuer` the authorization server, `scopes` are those of the token, and
    `claims` all that the token says.

    >>> Identity("ada", issuer="https://auth.example.com").name
    'https://auth.example.com ada'
    """

    subject: str | None
    client: str | None = None
    issuer: str | None = None
    scopes: frozenset[str] = frozenset()
    claims: Mapping[str, Any] = {}
    # Unix time.
    expires: float | None = None

    @property
    def name(self) -> str:
        """The caller's name in ledger, sessions and audit trail.

        A subject is unique only for its issuer.
        """
        own = self.subject or self.client or ""
        if self.issuer and own:
            return f"{self.issuer} {own}"
        return own

    @classmethod
    def of_claims(cls, claims: Mapping[str, Any], issuer: str) -> "Identity":
        """Return the identity that the claims of a token describe.

        Raises `Unauthorized` if they name no subject and no client.
        """
        # Keycloak and RFC 9068 have `scope` as a string, Okta `scp` as a list, Entra `scp` as a
        # string.
        scopes = frozenset([*_words(claims.get("scope")), *_words(claims.get("scp"))])
        # The client, by its names in RFC 9068, OpenID Connect, Okta and Entra.
        clients = [_name(claims.get(name)) for name in ("client_id", "azp", "cid", "appid")]
        client = next(filter(None, clients), None)
        subject = _name(claims.get("sub"))
        if subject is None and client is None:
            raise Unauthorized("the token names neither a subject nor a client")
        expires = claims.get("exp")
        until: float | None = None
        if isinstance(expires, (int, float)):
            until = float(expires)
        return cls(subject, client, issuer, scopes, claims, until)


def _words(claim: object) -> list[str]:
    """Return the words of a claim that is a string of them, or a list."""
    if isinstance(claim, str):
        return claim.split()
    if isinstance(claim, list):
        return [word for word in claim if isinstance(word, str)]
    return []


def _name(claim: object) -> str | None:
    """Return a claim that is a name; None if it is missing, empty or something else."""
    if isinstance(claim, str) and claim:
        return claim
    return None


# Raises unless the identity has all of these scopes.
Permit: TypeAlias = Callable[[Identity, Collection[str]], None]


class Scopes:
    """The scopes of one method.

    They are `always` the same ones, or those that a function of its arguments returns.
    """

    def __init__(
        self, rule: ScopeRule, function: Callable[..., object], signature: "Signature", name: str
    ) -> None:
        self.always: tuple[str, ...] = ()
        self._by: ScopesOf | None = None
        self._takes: tuple[str, ...] = ()
        self._signature = signature
        # The arguments of a tool have other readings. Each needs its scopes.
        self.is_lenient = False
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
                f"their function takes ({', '.join(self._takes)}), "
                f"the method takes ({', '.join(known)})",
                "give it parameters of the method, by the same names",
            )

    def with_base(self, base: Sequence[str]) -> "Scopes":
        """Return the same scopes and those that every method of an app asks for."""
        from copy import copy  # late: `import wirecall` stays light

        joined = copy(self)
        joined.always = tuple(dict.fromkeys((*base, *self.always)))
        return joined

    def of(self, params: Raw | UnsetType) -> Sequence[str]:
        """Return the scopes of a call with these params."""
        if self._by is None:
            return self.always
        return (*self.always, *self._asked(self._by, params))

    def _asked(self, rule: ScopesOf, params: Raw | UnsetType) -> Sequence[str]:
        """Return the scopes that the function of the arguments returns."""
        try:
            args, keywords = self._signature.bind_all(params, None)
        except InvalidParams:
            understood = None
            if self.is_lenient:
                understood = self._signature.understood(params)
            if understood is None:
                return ()
            args, keywords = self._signature.bind_all(understood, None)
        given = self._called.bind(*args, **keywords).arguments
        found = rule(*[given[name] for name in self._takes])
        if isinstance(found, str):
            return (found,)
        return tuple(found)


def scope_names(option: str, given: object) -> tuple[str, ...]:
    """Return declared scopes.

    Raises `UsageError` for a value that is not a scope, or a list of them.
    """
    names: tuple[object, ...] = (given,)
    if isinstance(given, Iterable) and not isinstance(given, str):
        names = tuple(given)
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(SCOPE, name):
            raise UsageError(
                f"{option}: {name!r} is not a scope.",
                "a scope is printable ASCII without spaces, quotes and backslashes "
                "(RFC 6749, section 3.3)",
                'use scopes="orders:read", or scopes=["orders:read", "orders:write"]',
            )
    return tuple(dict.fromkeys(map(str, names)))


def with_scopes(rule: ScopeRule | None, more: Sequence[str]) -> ScopeRule:
    """Return a rule that asks for additional scopes."""
    if not callable(rule):
        return [*more, *scope_names("scopes", rule or ())]

    @wraps(rule)  # the parameters stay those of the rule
    def both(*args: object) -> list[str]:
        found = rule(*args)
        if isinstance(found, str):
            return [*more, found]
        return [*more, *found]

    return both

"""`WWW-Authenticate`: why a server refuses a request, and what it asks for (RFC 9110, section 11.6.1; RFC 6750, section 3).

A header may hold several challenges, and an answer several headers. Parameters are read by a parser and not searched for in
the text: `x-scope="…"`, or `scope=` inside of a quoted text, is not the scope.
"""

import re
from collections.abc import Iterable

from msgspec import Struct

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_GAP = re.compile(r"[ \t,]*")
_PARAM = re.compile(rf'({_TOKEN})[ \t]*=[ \t]*(?:({_TOKEN})|"((?:[^"\\]|\\.)*)")')
_SCHEME = re.compile(rf"({_TOKEN})(?:[ \t]+[A-Za-z0-9._~+/-]+=*(?=[ \t]*(?:,|$)))?")  # with credentials as one word, or not
_QUOTED = re.compile(r"\\(.)")


class Challenge(Struct, frozen=True):
    """One challenge: its scheme in lower case, and its parameters by their names in lower case."""

    scheme: str
    params: dict[str, str]

    @property
    def scopes(self) -> frozenset[str]:
        return frozenset(self.params.get("scope", "").split())


def challenges(headers: Iterable[str]) -> list[Challenge]:
    """Return the challenges of all `WWW-Authenticate` headers; a header is read up to its first mistake."""
    found: list[Challenge] = []
    for text in headers:
        place, current = 0, None
        while (gap := _GAP.match(text, place)) and (place := gap.end()) < len(text):
            if current is not None and (param := _PARAM.match(text, place)):
                name, plain, quoted = param.groups()
                # Of a repeated parameter the first counts.
                current.params.setdefault(name.lower(), plain or _QUOTED.sub(r"\1", quoted or ""))
                place = param.end()
            elif scheme := _SCHEME.match(text, place):
                current = Challenge(scheme[1].lower(), {})
                found.append(current)
                place = scheme.end()
            else:
                break
    return found


def asked(headers: Iterable[str]) -> Challenge | None:
    """Return the challenge that asks for a token, if there is one."""
    return next((each for each in challenges(headers) if each.scheme in ("bearer", "dpop")), None)

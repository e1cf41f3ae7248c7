"""Which values of a client's file may be secrets. In doubt a value is one."""

import re
from urllib.parse import parse_qsl, urlsplit

_SECRET_NAME = re.compile(
    r"token|key|secret|passw|pwd|\bpass\b|_pass$|auth|credential|cookie|session|bearer|dsn"
    r"|connection|private|signature|webhook|\bpat\b|_pat$|cert",
    re.IGNORECASE,
)
# Beginnings of the tokens of well-known services.
_SECRET_VALUE = re.compile(
    r"^(sk-|pk-|rk_|ghp_|gho_|ghs_|ghu_|github_pat_|glpat-|xox[a-z]-|AKIA|ASIA|eyJ|ya29\.|AIza|npm_"
    r"|hf_|sk_|pk_|whsec_|lin_|ntn_|secret_|tvly-|fc-|ctx7sk|Bearer |Basic )",
)
# A header in one word, as programs take it: `Authorization: Bearer ...`.
_HEADER = re.compile(r"([A-Za-z][A-Za-z0-9-]+):\s*(\S.*)")
_HARMLESS = re.compile(
    r"(true|false|yes|no|on|off|null|none|\d{1,10}(\.\d+)?(ms|s|m|h)?"
    r"|[A-Za-z][A-Za-z_ -]{0,31}|[a-z]{2}(-[a-z]+)+-\d|\d+(\.\d+){1,3}|[\w.-]+:\d{1,5}"
    r"|(~|\.{0,2})?/[^\s]*|[A-Za-z]:[\\/].*|\d{4}-\d{2}-\d{2})"
)


def looks_secret(name: str, value: str) -> bool:
    """Return whether a value may be a secret. In doubt it is one."""
    if not value:
        return False
    if _SECRET_VALUE.search(value):
        return True
    if _SECRET_NAME.search(name) and not re.fullmatch(r"true|false|\d{1,4}", value):
        return True
    if "://" in value:
        return is_secret_address(value)
    return re.fullmatch(_HARMLESS, value) is None


def is_secret_word(before: str, word: str) -> bool:
    """Return whether a word of a command may be a secret. `before` is the word before it."""
    option, equals, value = word.partition("=")
    if equals and value and _SECRET_NAME.search(option):
        return looks_secret(option, value)
    if before.startswith("-") and "=" not in before and _SECRET_NAME.search(before):
        return not word.startswith("-") and looks_secret(before, word)
    if _SECRET_VALUE.search(value if equals else word):
        return True
    if _is_secret_header(word) or _is_secret_header(value):
        return True
    return "://" in word and is_secret_address(value if equals and "://" in value else word)


def _is_secret_header(text: str) -> bool:
    header = _HEADER.fullmatch(text)
    if header is None:
        return False
    name, value = header.groups()
    if _SECRET_VALUE.search(value):
        return True
    return bool(_SECRET_NAME.search(name)) and looks_secret(name, value)


def is_secret_address(url: str) -> bool:
    """Return whether an address has a password, a key among its parameters, or one in its path."""
    try:
        parts = urlsplit(url)
        has_password = parts.password is not None
    except ValueError:
        return True
    if has_password or "@" in parts.netloc:
        return True
    for name, value in parse_qsl(parts.query):
        if looks_secret(name, value):
            return True
    return any(_is_random(segment) for segment in parts.path.split("/"))


def _is_random(segment: str) -> bool:
    """Return whether a part of a path looks like a key: long, with digits among its letters."""
    kinds = (r"\d", "[A-Za-z]")
    return len(segment) >= 16 and all(re.search(kind, segment) for kind in kinds)

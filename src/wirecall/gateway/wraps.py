"""`wirecall wrap` as a command line: put it before the command of a server, and take it off.

    npx -y some-server             PYTHON -m wirecall wrap --name NAME -- npx -y some-server
    https://api.example.com/mcp    PYTHON -m wirecall wrap --name NAME URL

Headers of an address become variables, because other users of the machine can read command lines:
`--header Authorization=env:WIRECALL_HEADER_1`. So does an address with a key in it:
`env:WIRECALL_URL` instead of URL.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from msgspec import Struct

from wirecall.config import FAMILIES
from wirecall.gateway.guesses import is_secret_address

# The variables of headers, numbered from 1.
HEADER_VARIABLE = "WIRECALL_HEADER_"
# The variable of an address with a key in it.
URL_VARIABLE = "WIRECALL_URL"
# The beginnings of an address in place of a command.
ADDRESSES = ("http://", "https://", "env:")
# The options of `wirecall wrap` that take a value.
VALUED = ("--name", "--ledger", "--trust", "--resend-after", "--timeout", "--header")


def plain_name(name: str) -> str:
    """Return a name that an upstream can have."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-_")[:48] or "server"
    assert re.fullmatch(FAMILIES["upstream"].names, plain)
    return plain


class PlainServer(Struct, frozen=True):
    """What a command line starts or reaches: a command, or an address with its headers."""

    command: tuple[str, ...] = ()
    url: str | None = None
    headers: dict[str, str] = {}
    # The variables of the command.
    env: dict[str, str] = {}


def wrapped(name: str, server: PlainServer) -> PlainServer:
    """Return the command that wraps a server. Its variables contain the headers."""
    words = [sys.executable, "-m", "wirecall", "wrap", "--name", plain_name(name)]
    if server.url is None:
        return PlainServer(command=(*words, "--", *server.command), env=server.env)
    env = dict(server.env)
    for number, (header, value) in enumerate(server.headers.items(), start=1):
        variable = f"{HEADER_VARIABLE}{number}"
        words += ["--header", f"{header}=env:{variable}"]
        env[variable] = value
    if not is_secret_address(server.url):
        return PlainServer(command=(*words, server.url), env=env)
    env[URL_VARIABLE] = server.url
    return PlainServer(command=(*words, f"env:{URL_VARIABLE}"), env=env)


def is_wrapped(command: Sequence[str]) -> bool:
    """Return whether a command line begins with `wirecall wrap`."""
    return _start(command) is not None


def unwrapped(command: Sequence[str], env: Mapping[str, str]) -> PlainServer | None:
    """Return the server behind `wirecall wrap`; None if the command is another, or not complete."""
    start = _start(command)
    if start is None:
        return None
    words = list(command[start:])
    headers: dict[str, str] = {}
    rest = dict(env)
    while words:
        word = words.pop(0)
        if word == "--":
            return PlainServer(command=tuple(words), env=rest) if words else None
        option, equals, value = word.partition("=")
        if option in VALUED and word.startswith("--"):
            if not equals:
                value = words.pop(0) if words else ""
            if option == "--header":
                header, _, reference = value.partition("=")
                variable = reference.removeprefix("env:")
                headers[header] = rest.pop(variable, f"${{{variable}}}")
        elif not word.startswith("-"):
            if words or not word.startswith(ADDRESSES):
                return PlainServer(command=(word, *words), env=rest)
            url = word
            if word.startswith("env:"):
                variable = word.removeprefix("env:")
                url = rest.pop(variable, f"${{{variable}}}")
            return PlainServer(url=url, headers=headers, env=rest)
    return None


def _start(command: Sequence[str]) -> int | None:
    """Return the place of the word after `wirecall wrap`; None if the command is another."""
    words = list(command)
    for place, word in enumerate(words[:-1]):
        if words[place + 1] != "wrap":
            continue
        is_module = place >= 2 and words[place - 1] == "-m" and _program(words[0], "python")
        is_program = place <= 3 and _program(word, "wirecall") and not words[0].startswith("-")
        if word == "wirecall" and is_module:
            return place + 2
        if is_program and (place == 0 or _program(words[0], "uvx", "uv", "pipx")):
            return place + 2
    return None


def _program(word: str, *names: str) -> bool:
    """Return whether a word names a program, with or without its folder, version and suffix."""
    found = PurePath(word.replace("\\", "/")).name.lower().removesuffix(".exe")
    return any(re.fullmatch(rf"{name}[\d.]*", found) for name in names)

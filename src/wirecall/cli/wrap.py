"""`wirecall wrap`: one server on stdin and stdout, with a ledger in front of it.

It is a drop-in `command` in the file of an MCP client: everything is passed on as it is, a server
that ends is started again by the next call, and a command whose answer was lost is not run twice.
"""

import os
import re
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import click

from wirecall.cli.failures import CliError, no_such
from wirecall.cli.targets import duration
from wirecall.errors import UsageError

# Seconds for the commands that run when the client leaves.
GRACE = 10.0
# Characters of a name that is also the name of a file.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


# Options after the first word are those of the server.
@click.command(
    "wrap", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument(
    "words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="URL | COMMAND..."
)
@click.option("--name", metavar="NAME", help="Name of the server, and of its ledger.")
@click.option("--ledger", metavar="URL", help="Ledger. [default: a file in your state folder]")
@click.option(
    "--trust",
    type=click.Choice(["none", "hints", "full"]),
    default="hints",
    help="Which hints of the server count: a tool with readOnlyHint is not recorded. "
    "[default: hints]",
)
@click.option(
    "--resend-after",
    metavar="TIME|off",
    default="2s",
    help="An equal call this long after one that still runs is that call. [default: 2s]",
)
@click.option(
    "--timeout", metavar="TIME", default="1h", help="Of a call, also after its client has left."
)
@click.option(
    "--header",
    "headers",
    multiple=True,
    metavar="NAME=env:VARIABLE",
    help="Header of each request to URL; may be repeated. Others can read command lines, so its "
    "value is in a variable (env:) or in a file (file:PATH).",
)
def wrap_command(
    words: tuple[str, ...],
    name: str | None,
    ledger: str | None,
    trust: Literal["none", "hints", "full"],
    resend_after: str,
    timeout: str,
    headers: tuple[str, ...],
) -> None:
    """Serve one MCP server on stdin and stdout, and survive its end.

    Put it before the command of a server in your client's file. Each command takes effect once, and
    a lost answer is given again.

    \b
    wirecall wrap -- npx -y @modelcontextprotocol/server-memory
    wirecall wrap --name notes -- uvx notes-server --folder .
    wirecall wrap https://api.example.com/mcp
    wirecall wrap --header Authorization=env:API_AUTHORIZATION https://api.example.com/mcp
    """
    if words[0].startswith("-"):
        raise no_such("option", words[0].partition("=")[0], _options(), "wirecall wrap --help")
    from wirecall.gateway.login import StoredLogin
    from wirecall.gateway.pipe import Wrap
    from wirecall.gateway.upstream import Origin
    from wirecall.gateway.wraps import ADDRESSES

    is_address = words[0].startswith(ADDRESSES)
    if is_address and len(words) > 1:
        why = f"{words[1]} is behind it, and options of wrap are before it"
        raise CliError("An address is the last word.", why, "wirecall wrap --trust none URL")
    silence: float | Literal["off"] = "off"
    if resend_after != "off":
        silence = duration(resend_after)
    target: dict[str, Any] = {"command": words}
    if is_address:
        given = _headers(headers)
        target = {"url": _address(words[0]), "headers": given}
        if not any(each.lower() == "authorization" for each in given):
            target["auth"] = StoredLogin
    elif headers:
        raise CliError("--header is for a URL.", f"{words[0]} is a command", "drop --header")
    known = _checked_name(name) or _name_of(words)
    origin = Origin(
        name=known,
        trust=trust,
        resend_after=silence,
        timeout=duration(timeout),
        **target,
    )
    Wrap(origin, ledger=ledger or _ledger_of(known)).run(GRACE)


def _options() -> list[str]:
    """Return the options of the verb."""
    return [name for option in wrap_command.params for name in option.opts if name[0] == "-"]


def _address(word: str) -> str:
    """Return the address that a word is, or that the variable in it has."""
    if not word.startswith("env:"):
        return word
    from wirecall.gateway.references import References  # late: few addresses are variables

    url = References().value(word)
    if not url.startswith(("http://", "https://")):
        why = "expected http:// or https:// in the variable"
        raise CliError(f"{word} is not an address.", why, "correct the variable")
    return url


def _headers(given: tuple[str, ...]) -> dict[str, str]:
    """Return the headers of `--header`, with the values of their references."""
    if not given:
        return {}
    from wirecall.gateway.references import References  # late: few addresses need headers

    references = References()
    found = {}
    for text in given:
        name, equals, reference = text.partition("=")
        if not equals or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
            # The text may be a secret in the wrong place, so it is not shown.
            why = "expected a name, = and a reference"
            raise CliError("This is not a --header.", why, "--header Authorization=env:VARIABLE")
        found[name] = references.value(reference)
        if re.search(r"[\r\n\0]", found[name]):
            why = "a header has one line"
            raise CliError(f"The value of {name} has several lines.", why, "correct the variable")
    return found


def _checked_name(name: str | None) -> str | None:
    if name is not None and _NAME.fullmatch(name) is None:
        raise CliError(
            f"{name!r} cannot be a name.",
            "expected 1 to 64 of the characters A-Z, a-z, 0-9, ., _ and -, "
            "beginning with a letter or a digit",
            "--name github",
        )
    return name


def _name_of(words: tuple[str, ...]) -> str:
    """Return a name for a command line: a word of it, and a digest of all of it."""
    digest = sha256("\0".join(words).encode(errors="surrogatepass")).hexdigest()[:12]
    plain = [Path(word).name for word in words if not word.startswith("-")]
    word = re.sub(r"[^A-Za-z0-9._-]+", "-", plain[-1] if plain else "server").strip("-.")
    return f"{word[:40] or 'server'}-{digest}"


def state_folder() -> Path:
    """Return the folder of the ledgers (XDG Base Directory specification)."""
    return Path(
        os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state", "wirecall", "wrap"
    )


def _ledger_of(name: str) -> str:
    """Return the URL of the ledger of a server, in a folder that only the user can read."""
    folder = state_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
    except OSError as error:
        raise UsageError(
            f"The folder {folder} cannot be used.",
            str(error),
            "use --ledger sqlite:PATH, or set XDG_STATE_HOME",
        ) from error
    return f"sqlite:{folder / name}.db"

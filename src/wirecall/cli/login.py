"""`wirecall login`, `logout` and `auth`: the logins that the other verbs use."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wirecall.cli.failures import CliError, Exit
from wirecall.cli.targets import Protocol, Target, Way, address_argument, as_option
from wirecall.cli.terminal import Printer, count_of, json_option, run, stated
from wirecall.errors import NotAuthorized
from wirecall.logs import escaped
from wirecall.protocol.messages import JsonObject

if TYPE_CHECKING:
    from wirecall.auth import Login


def _address(target: Target, protocol: Protocol | None) -> str:
    """Return the address that the other verbs use: a login belongs to one address."""
    if target.kind != "url":
        raise CliError(
            f"{target.text} is not an address.",
            "a login is for a server on HTTP",
            "https://.../mcp",
        )
    return Way(protocol).address(target)


@click.command("login")
@address_argument
@as_option
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    metavar="SCOPE",
    help="Ask for this scope as well; may be repeated.",
)
@click.option(
    "--client-id", metavar="ID", help="The id by which the authorization server knows this program."
)
@click.option(
    "--client-secret-file",
    metavar="FILE",
    help="A file with the secret of --client-id; needs --issuer.",
)
@click.option(
    "--issuer", metavar="URL", help="The only authorization server that gets these credentials."
)
@click.option(
    "--endpoint",
    "endpoints",
    multiple=True,
    metavar="URL",
    help="Accept endpoints of --issuer at this origin, https://HOST; may be repeated.",
)
@click.option(
    "--metadata-url", metavar="URL", help="The address of a document that describes this program."
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="The local port that the browser returns to.",
)
@click.option(
    "--no-browser",
    is_flag=True,
    help="Print the address to open, and ask for the one that it leads to.",
)
@click.option("--dpop", is_flag=True, help="Bind the tokens to a key (RFC 9449).")
@click.option(
    "--private",
    is_flag=True,
    help="Let a public server name authorization servers in a private network.",
)
@json_option
def login_command(
    target: Target,
    protocol: Protocol | None,
    scopes: tuple[str, ...],
    client_secret_file: str | None,
    endpoints: tuple[str, ...],
    no_browser: bool,
    out: Printer,
    **given: Any,
) -> None:
    """Log in to TARGET with your browser, and keep the login for the other commands.

    The login is in a file that only you can read. wirecall refreshes it for as long as the
    authorization server allows.

    \b
    wirecall login https://api.example.com/mcp
    wirecall call https://api.example.com/mcp price sku=tea
    """
    from wirecall.auth import Browser
    from wirecall.auth.client import Authorization

    secret = None
    if client_secret_file is not None:
        secret = _secret(client_secret_file)
        if not (given["client_id"] and given["issuer"]):
            why = "the secret is for one client at one issuer"
            next_step = "--client-id ID --issuer https://auth.example.com"
            raise CliError("--client-secret-file needs --client-id and --issuer.", why, next_step)
    if endpoints and not given["issuer"]:
        why = "an endpoint is accepted for one issuer"
        raise CliError("--endpoint needs --issuer.", why, "--issuer https://accounts.example.com")

    async def show(url: str) -> str | None:
        """Let the user open the page elsewhere, and paste the address at its end."""
        click.echo(f"Open this address, and log in:\n\n{escaped(url)}\n", err=True)
        return str(
            click.prompt("The address that the browser shows then", err=True, prompt_suffix=":\n")
        ).strip()

    url = _address(target, protocol)
    way = Browser(
        scopes=[each for scope in scopes for each in scope.split()],
        client_secret=secret,
        endpoints={given["issuer"]: endpoints} if endpoints else {},
        visit=show if no_browser else None,
        **given,
    )
    if not no_browser:
        out.note(f"Your browser opens a page to log in at {url}.")
    try:
        kept = run(Authorization(way, url).login())
    except NotAuthorized as error:
        next_step = (
            "does this server ask for a login? "
            "If it does not register clients itself: --client-id ID"
        )
        what = f"Cannot log in at {url}."
        raise CliError(
            what, error.reason, error.fix or next_step, exit=Exit.AUTH, type="unauthorized"
        ) from None
    out.result(_document(kept), f"Logged in at {escaped(kept.server)} by {escaped(kept.issuer)}.")


def _secret(path: str) -> str:
    """Return the secret in a file."""
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        next_step = "name a text file with the secret"
        raise CliError(f"{path} cannot be read.", why, next_step) from None


@click.command("logout")
@address_argument
@as_option
@json_option
def logout_command(target: Target, protocol: Protocol | None, out: Printer) -> None:
    """Forget the logins at TARGET, and tell their authorization server to revoke the tokens."""
    from wirecall.auth import Stored
    from wirecall.auth.client import Authorization

    url = _address(target, protocol)
    ended = run(Authorization(Stored(), url).logout())
    if not ended:
        raise CliError(
            f"There is no login at {url}.", "nothing is kept for this address", "wirecall auth list"
        )
    faults = [fault for _, fault in ended if fault]
    documents = [
        {**_document(login), "revoked": not fault, **stated(why=fault)} for login, fault in ended
    ]
    text = f"{count_of(len(ended), 'login')} forgotten, {len(ended) - len(faults)} revoked."
    out.result(documents, text)
    for fault in faults:
        out.note(fault, "warning")


@click.group("auth")
def auth_command() -> None:
    """List the stored logins. `wirecall login` makes them, `wirecall logout` ends them."""


@auth_command.command("list")
@json_option
def list_logins(out: Printer) -> None:
    """List the stored logins, without their tokens."""
    from wirecall.auth import FileStore

    logins = run(FileStore().logins())
    rows = [
        (login.server, login.issuer, " ".join(login.scopes) or "-", _end(login)) for login in logins
    ]
    out.result(
        [_document(login) for login in logins],
        lambda: out.table(["SERVER", "ISSUER", "SCOPES", "ENDS"], rows),
    )
    if not logins:
        out.note("There is no login: wirecall login URL")


def _end(login: "Login") -> str:
    """Return when a login ends, for people."""
    if login.refresh_token:
        return "refreshed automatically"
    if login.expires is None:
        return "-"
    return _moment(login.expires)


def _moment(time_: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_))


def _document(login: "Login") -> JsonObject:
    """Return a login for programs, without its secrets."""
    document = {
        "server": login.server,
        "issuer": login.issuer,
        "client_id": login.client_id,
        "scopes": login.scopes,
        "refreshes": login.refresh_token is not None,
    }
    if login.expires is not None:
        document["expires"] = _moment(login.expires)
    return document

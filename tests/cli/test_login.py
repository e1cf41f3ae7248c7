"""`wirecall login`, `logout` and `auth list`, and the logins that all verbs use."""

import asyncio
import json
import os
import stat
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.auth.world import World, visit
from tests.cli import PATIENCE
from tests.client.peers import http
from wirecall.cli.failures import Exit

# A browser: it follows the redirect to the port of the command.
BROWSER = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1]).read()"


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with World() as made:
        yield made


class Command:
    """The command, with its own home folder."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "browser.py").write_text(BROWSER)
        self.environment = {
            **os.environ,
            "XDG_DATA_HOME": str(home),
            "BROWSER": f"{sys.executable} {home / 'browser.py'} %s",
        }

    async def start(self, *words: str) -> Process:
        command = (sys.executable, "-m", "wirecall", *words)
        return await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=self.environment
        )

    async def run(self, *words: str, stdin: bytes = b"") -> tuple[int | None, str, str]:
        async with asyncio.timeout(PATIENCE):
            process = await self.start(*words)
            out, err = await process.communicate(stdin)
            return process.returncode, out.decode(), err.decode()


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path)


@pytest.mark.long
async def test_login_serves_every_verb_until_the_logout(world: World, command: Command) -> None:
    code, out, err = await command.run("login", world.url, "--scope", "read write", "--json")
    assert (code, json.loads(out)["ok"]) == (0, True), err
    assert json.loads(out)["result"]["scopes"] == ["read", "write"]
    assert world.asked("/authorize")[0].query["scope"] == "read write"
    files = list((command.home / "wirecall" / "logins").iterdir())
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}

    assert (await command.run("call", world.url, "price"))[:2] == (0, "fine\n")
    code, out, _ = await command.run(
        "send", world.url, stdin=b'{"jsonrpc":"2.0","method":"price","id":7}\n'
    )
    assert (code, json.loads(out)["result"]) == (0, "fine")
    code, out, _ = await command.run("auth", "list", "--json")
    (listed,) = json.loads(out)["result"]
    assert (listed["server"], listed["issuer"]) == (world.url, world.base)
    assert "secret" not in out.replace(listed["client_id"], "")
    code, out, _ = await command.run("auth", "list")
    assert world.url in out
    assert "refreshed automatically" in out

    code, out, _ = await command.run("logout", world.url, "--json")
    assert [each["revoked"] for each in json.loads(out)["result"]] == [True]
    assert {request.form["token_type_hint"] for request in world.asked("/revoke")} == {
        "refresh_token",
        "access_token",
    }
    assert not world.tokens
    assert not world.refresh_tokens
    code, _, err = await command.run("call", world.url, "price")
    assert code == Exit.AUTH
    assert "wirecall login" in err
    assert (await command.run("logout", world.url))[0] == Exit.USAGE
    assert json.loads((await command.run("auth", "list", "--json"))[1])["result"] == []


async def test_login_without_a_browser_prints_the_address_and_reads_the_pasted_answer(
    world: World, command: Command
) -> None:
    async with asyncio.timeout(PATIENCE):
        process = await command.start("login", world.url, "--no-browser")
        assert process.stderr is not None
        assert process.stdin is not None
        while b"/authorize?" not in (line := await process.stderr.readline()):
            assert line
        back = await visit(line.decode().strip())
        assert back is not None
        out, err = await process.communicate(back.encode() + b"\n")
    assert process.returncode == 0, err
    assert out.decode() == f"Logged in at {world.url} by {world.base}.\n"
    assert b"secret" not in err


async def test_refused_login_names_the_command_that_makes_another(
    world: World, command: Command
) -> None:
    assert (await command.run("login", world.url))[0] == 0
    world.tokens.clear()
    world.refresh_tokens.clear()
    code, out, _ = await command.run("call", world.url, "price", "--json")
    error = json.loads(out)["error"]
    assert (code, error["type"], error["ran"]) == (Exit.AUTH, "unauthorized", "no")
    assert error["next"] == f"wirecall login {world.url}"


async def test_missing_scopes_name_the_command_that_asks_for_them(
    world: World, command: Command
) -> None:
    assert (await command.run("login", world.url))[0] == 0
    world.needs = frozenset({"orders:write"})
    code, out, _ = await command.run("call", world.url, "charge", "--json")
    assert code == Exit.AUTH
    assert json.loads(out)["error"]["next"] == f"wirecall login {world.url} --scope 'orders:write'"


async def test_scope_that_is_not_a_word_is_not_put_into_a_command(
    world: World, command: Command
) -> None:
    assert (await command.run("login", world.url))[0] == 0
    world.needs = frozenset({"x';touch"})
    code, out, _ = await command.run("call", world.url, "charge", "--json")
    assert code == Exit.AUTH
    assert "touch" not in json.loads(out)["error"]["next"]


async def test_header_is_used_instead_of_a_login(world: World, command: Command) -> None:
    assert (await command.run("login", world.url))[0] == 0
    world.tokens["mine"] = ""
    assert (
        await command.run("call", world.url, "price", "--header", "Authorization: Bearer mine")
    )[0] == 0
    assert world.asked("/rpc")[-1].headers["authorization"] == "Bearer mine"


async def test_login_that_fails_is_exit_3_and_keeps_nothing(world: World, command: Command) -> None:
    world.answer = {"iss": "https://evil.example"}
    code, out, _ = await command.run("login", world.url, "--json")
    error = json.loads(out)["error"]
    assert code == Exit.AUTH
    assert "names another issuer" in error["why"]
    assert json.loads((await command.run("auth", "list", "--json"))[1])["result"] == []


async def test_login_accepts_an_endpoint_elsewhere_by_name(world: World, command: Command) -> None:
    async with World() as other:
        other.answer = {"iss": ""}
        world.codes = other.codes
        world.issuer = {
            "authorization_endpoint": f"{other.base}/authorize",
            "authorization_response_iss_parameter_supported": None,
        }
        code, out, _ = await command.run("login", world.url, "--json")
        assert code == Exit.AUTH
        assert "--issuer ISSUER --endpoint ORIGIN" in json.loads(out)["error"]["next"]
        code, _, err = await command.run("login", world.url, "--endpoint", other.base)
        assert (code, "--endpoint needs --issuer" in err) == (Exit.USAGE, True)
        code, _, err = await command.run(
            "login", world.url, "--issuer", world.base, "--endpoint", other.base
        )
        assert code == 0, err


async def test_logout_works_at_a_server_without_revocation(world: World, command: Command) -> None:
    world.issuer = {"revocation_endpoint": None}
    assert (await command.run("login", world.url))[0] == 0
    code, out, err = await command.run("logout", world.url)
    assert (code, out) == (0, "1 login forgotten, 0 revoked.\n")
    assert "does not revoke tokens" in err


async def test_login_file_that_is_a_fifo_is_named_by_every_verb(
    world: World, command: Command
) -> None:
    assert (await command.run("login", world.url))[0] == 0
    (path,) = (command.home / "wirecall" / "logins").glob("*.json")
    path.unlink()
    os.mkfifo(path, 0o600)
    for words in (
        ("call", world.url, "price"),
        ("auth", "list"),
        ("logout", world.url),
        ("login", world.url),
    ):
        code, _, err = await command.run(*words)
        assert code == Exit.USAGE
        assert f"{path} is a FIFO" in err


async def test_file_of_logins_that_others_can_read_stops_every_verb(
    world: World, command: Command
) -> None:
    assert (await command.run("login", world.url))[0] == 0
    for path in (command.home / "wirecall" / "logins").glob("*.json"):
        path.chmod(0o644)
    code, _, err = await command.run("call", world.url, "price")
    assert code == Exit.USAGE
    assert "chmod go-rwx" in err


async def test_mistakes_are_named(world: World, command: Command) -> None:
    secret = command.home / "secret"
    secret.write_text("hush\n")
    for words, text in (
        (("login", "shop.py"), "is not an address"),
        (
            ("login", world.url, "--client-id", "me", "--client-secret-file", str(secret)),
            "needs --client-id and --issuer",
        ),
        (
            ("login", world.url, "--client-secret-file", str(command.home / "none")),
            "cannot be read",
        ),
    ):
        code, _, err = await command.run(*words)
        assert code == Exit.USAGE
        assert text in err
        assert "hush" not in err
    world.instead["/rpc"] = http(b"", "404 Not Found")
    world.instead["/.well-known/oauth-protected-resource/rpc"] = http(b"", "500 Oh No")
    assert (await command.run("login", world.url))[0] == Exit.AUTH

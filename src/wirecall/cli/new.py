"""`wirecall new`: a small project that runs: a query, a command, and a test that loses an answer."""

import os
import re
from pathlib import Path
from shlex import quote

import click

from wirecall.cli.failures import CliError
from wirecall.cli.output import Printer, json_option

APP = '''\
"""{name}: prices, and payments that happen once."""

from wirecall import App, Context, DomainError

app = App("{name}", version="0.1.0")

PRICES = {{"tea": 450, "coffee": 700}}
paid: dict[str, int] = {{}}


@app.query
def price(sku: str) -> int:
    """Price of an article, in cents."""
    if sku not in PRICES:
        raise DomainError(4040, f"there is no article {{sku!r}}", {{"articles": sorted(PRICES)}})
    return PRICES[sku]


@app.command(destructive=False)
async def charge(order: str, cents: int, ctx: Context) -> dict[str, int | str]:
    """Take money for an order. With the same idempotency key it is taken once, however often the call is sent."""
    await ctx.commit_point()  # from here on, the payment may have happened
    paid[order] = paid.get(order, 0) + cents
    return {{"order": order, "paid": paid[order]}}
'''

TOML = """\
# Checked by `wirecall config check`; `wirecall config show` prints the values in force.

[server]
app = "app.py"
http = "127.0.0.1:8420"

[ledger]
url = "sqlite:.wirecall/ledger.db" # the record of commands; survives restarts

# [audit]
# file = ".wirecall/audit.jsonl"

# [limits]
# batch = 50
"""

TEST = '''\
"""python -m unittest, or pytest."""

import unittest

from app import app, paid
from wirecall import RpcError
from wirecall.testing import Faults, client


class Shop(unittest.IsolatedAsyncioTestCase):
    async def asyncTearDown(self) -> None:
        await app.aclose()

    async def test_an_article_has_a_price(self) -> None:
        async with client(app) as shop:
            self.assertEqual(await shop.call("price", {"sku": "tea"}), 450)

    async def test_an_unknown_article_is_an_error(self) -> None:
        async with client(app) as shop:
            with self.assertRaises(RpcError) as caught:
                await shop.call("price", {"sku": "gold"})
        self.assertEqual(caught.exception.code, 4040)

    async def test_a_lost_answer_does_not_charge_twice(self) -> None:
        paid.clear()
        async with client(app, faults=Faults(drop_reply=1)) as shop:
            answer = await shop.call("charge", {"order": "7", "cents": 450}, key="order-7")
        self.assertEqual(answer, {"order": "7", "paid": 450})
        self.assertEqual(paid, {"7": 450})


if __name__ == "__main__":
    unittest.main()
'''

README = """\
# {name}

    wirecall dev                                    # serve, and restart when a file changes
    wirecall list app.py                            # the methods
    wirecall call app.py price sku=tea              # one call, without a server
    wirecall call http://127.0.0.1:8420 charge order=7 cents=450 --key order-7
    wirecall ledger list                            # the commands that ran, by key
    python -m unittest                              # the tests

Repeat the `charge` with the same key: the answer is the recorded one, and nothing is charged again.

    wirecall install app.py --client claude-code    # or cursor, vscode, windsurf, claude-desktop
"""

FILES = {"app.py": APP, "wirecall.toml": TOML, "test_app.py": TEST, "README.md": README, ".gitignore": ".wirecall/\n"}


@click.command("new")
@click.argument("folder", metavar="NAME")
@json_option
def command(folder: str, out: Printer) -> None:
    """Write a first project into the new folder NAME: a server, a test, a wirecall.toml.

    \b
    wirecall new shop && cd shop && wirecall dev
    """
    if not folder.strip():
        raise CliError("The name is empty.", "it is the folder of the project", "wirecall new shop")
    path = Path(os.path.normpath(folder))  # otherwise `x/..` is looked up before x exists
    name = path.resolve().name
    if not re.fullmatch(r"[A-Za-z0-9][\w .-]*", name):
        raise CliError(f"{name!r} is not a name for a project.", "use letters, digits, . _ and -", "wirecall new shop")
    if path.exists() and not path.is_dir():
        raise CliError(f"{path} is a file.", "a project is a folder", f"wirecall new {path}-app")
    if path.is_dir() and (found := sorted(each.name for each in path.iterdir())):
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        why = f"it has {', '.join(found[:3])}{more}"
        raise CliError(f"{path} is not empty.", why, "choose a new folder; nothing was written")
    try:
        path.mkdir(parents=True, exist_ok=True)
        for file, text in FILES.items():
            (path / file).write_text(text.format(name=name) if file in ("app.py", "README.md") else text, encoding="utf-8")
    except OSError as error:
        raise CliError(f"{path} cannot be written.", error.strerror or str(error), "choose another folder") from None
    out.result(
        {"folder": str(path), "files": list(FILES)},
        f"Made {path}: {', '.join(FILES)}\n  next: cd {quote(str(path))} && wirecall dev",
    )

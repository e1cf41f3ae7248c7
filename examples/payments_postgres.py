"""Payments whose effect and record commit in one transaction: exactly once, even if a process dies
in the middle.

    python examples/payments_postgres.py postgresql://localhost/shop

It serves http://127.0.0.1:8420/rpc and /mcp. `ctx.db` is the transaction that also writes the
ledger's record. The handler's writes through it commit together with the record, or not at all.
"""

import sys
from typing import Any

from wirecall import App, Context, DomainError

TABLES = """
CREATE TABLE IF NOT EXISTS accounts (name text PRIMARY KEY, cents bigint NOT NULL CHECK (cents >= 0));
CREATE TABLE IF NOT EXISTS payments (id bigserial PRIMARY KEY, payer text, payee text, cents bigint);
"""


def make_app(url: str) -> App:
    app = App("payments", version="1.0", mode="production", ledger=url)

    @app.command(on_crash="transactional", destructive=False)
    async def deposit(account: str, cents: int, ctx: Context) -> int:
        """Put money into an account, create it if it does not exist, and return its balance."""
        await ctx.db.execute(TABLES)
        query = """INSERT INTO accounts VALUES (%s, %s)
            ON CONFLICT (name) DO UPDATE SET cents = accounts.cents + excluded.cents RETURNING cents"""
        return await only(ctx.db, query, account, cents)

    @app.command(on_crash="transactional", destructive=False)
    async def pay(payer: str, payee: str, cents: int, ctx: Context) -> int:
        """Move money from one account to another, and return the number of the payment."""
        taken = await ctx.db.execute(
            "UPDATE accounts SET cents = cents - %s WHERE name = %s AND cents >= %s",
            (cents, payer, cents),
        )
        if taken.rowcount == 0:
            raise DomainError(4020, f"{payer} does not have {cents} cents")
        await ctx.db.execute(
            "UPDATE accounts SET cents = cents + %s WHERE name = %s", (cents, payee)
        )
        query = "INSERT INTO payments (payer, payee, cents) VALUES (%s, %s, %s) RETURNING id"
        return await only(ctx.db, query, payer, payee, cents)

    return app


async def only(db: Any, query: str, *values: Any) -> int:
    found = await (await db.execute(query, values)).fetchone()
    return int(found[0])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/payments_postgres.py postgresql://localhost/shop")
    make_app(sys.argv[1]).run("http")

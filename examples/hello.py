"""The smallest server: two queries, a notification, a command.

echo '{"jsonrpc":"2.0","method":"sum","params":[1,2,3],"id":1}' | wirecall send examples/hello.py
"""

from wirecall import App, Context

app = App("hello", version="1.0")

balance = {"tea": 1000}


@app.query
def sum(*numbers: int) -> int:
    """Add numbers."""
    total = 0
    for number in numbers:
        total += number
    return total


@app.query
def subt(minuend: int, subtrahend: int) -> int:
    """Subtract one number from another."""
    return minuend - subtrahend


@app.query(notification_allowed=True)
def notify_hello(times: int) -> None:
    """Receive a greeting as a notification, without an answer."""


@app.command
def charge(account: str, cents: int, ctx: Context) -> dict[str, int | str | None]:
    """Take money from an account, once per idempotency key."""
    balance[account] -= cents
    return {"account": account, "left": balance[account], "key": ctx.idempotency_key}

"""A shop: queries for prices, and payments that take effect once.

python examples/shop.py             MCP and JSON-RPC on stdin and stdout
python examples/shop.py http        http://127.0.0.1:8420/mcp and /rpc
"""

import sys

from wirecall import App, Context, DomainError

app = App("shop", version="1.0", instructions="Prices are in cents.")

PRICES = {"tea": 450, "coffee": 700}
paid: dict[str, int] = {}


@app.query(title="Price of an article", open_world=False)
def price(sku: str) -> int:
    """Return the price of an article, in cents."""
    if sku not in PRICES:
        raise DomainError(4040, f"there is no article {sku!r}", {"articles": sorted(PRICES)})
    return PRICES[sku]


@app.command(title="Charge an order", destructive=False)
async def charge(order: str, cents: int, ctx: Context) -> dict[str, int | str]:
    """Take money for an order. With one idempotency key it is taken once, however often the call is sent."""
    if cents > 10_000:
        raise DomainError(4020, "not enough money", {"available": 10_000})
    await ctx.commit_point()
    paid[order] = paid.get(order, 0) + cents
    return {"order": order, "paid": paid[order]}


@app.command(title="Give an order's money back", key="ask")
def refund(order: str) -> dict[str, int | str]:
    """Refund everything that was paid for an order."""
    return {"order": order, "refunded": paid.pop(order, 0)}


@app.resource("shop://articles", title="Articles", mime_type="application/json")
def articles() -> dict[str, int]:
    """All articles and their prices."""
    return PRICES


@app.resource("shop://articles/{sku}", mime_type="application/json")
def article(sku: str) -> dict[str, int | str]:
    """One article."""
    return {"sku": sku, "cents": price(sku)}


@app.prompt
def reminder(order: str) -> str:
    """Ask for a reminder of an unpaid order."""
    return f"Write a friendly reminder that order {order} is not paid yet."


@app.completion("shop://articles/{sku}", "sku")
def complete_sku(value: str) -> list[str]:
    return [sku for sku in PRICES if sku.startswith(value)]


if __name__ == "__main__":
    app.run("http" if sys.argv[1:] == ["http"] else "stdio")

"""A checkout for agents: the key of a command is among its arguments, as commerce protocols have it.

    wirecall serve examples/commerce.py

Such a protocol puts the key into `meta["idempotency-key"]` of a tool's arguments. `key_at` names
that place, so a checkout that is sent twice takes effect once.
"""

from typing import TypedDict

from wirecall import App, DomainError

PRICES = {"tea": 450, "coffee": 700}
orders: list[str] = []


class Line(TypedDict):
    """One article of an order."""

    sku: str
    count: int


class Order(TypedDict):
    """What was bought."""

    order: str
    cents: int


app = App("commerce", version="1.0", key_at="meta.idempotency-key")


@app.query(open_world=False)
def quote(lines: list[Line]) -> int:
    """Return the price of some articles, in cents."""
    unknown = [line["sku"] for line in lines if line["sku"] not in PRICES]
    if unknown:
        raise DomainError(4040, f"there is no article {unknown[0]!r}", {"articles": sorted(PRICES)})
    return sum(PRICES[line["sku"]] * line["count"] for line in lines)


# An agent that sends no key gets an error that says where it belongs.
@app.command(destructive=False, key="required")
def complete_checkout(lines: list[Line]) -> Order:
    """Buy some articles. With one key they are bought once, however often the call is sent."""
    cents = quote(lines)
    orders.append(f"order-{len(orders) + 1}")
    return {"order": orders[-1], "cents": cents}

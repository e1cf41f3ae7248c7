"""`wirecall list`: what a server offers."""

import click

from wirecall.cli.connecting import Way, opened, run, way_options
from wirecall.cli.failures import Exit, Failure
from wirecall.cli.offers import Offer, of_app, offers_of
from wirecall.cli.output import Output, json_option
from wirecall.cli.targets import Target, TargetCommand, target_argument

KINDS = ("query", "command", "method", "tool", "resource", "template", "prompt")


@click.command("list", cls=TargetCommand)
@target_argument()
@click.option("--kind", type=click.Choice(KINDS), help="Only these.")
@click.option("--filter", "text", help="Only what has this text in its name or description.")
@way_options
@json_option
def command(target: Target, kind: str | None, text: str | None, way: Way, as_json: bool) -> None:
    """List what TARGET offers: methods and tools, resources and prompts.

    The marks are what the server says about itself: read-only, destructive, keyed (takes an idempotency key), open-world
    (reaches beyond the server); unstated where it says nothing.

    \b
    wirecall list shop.py
    wirecall list http://127.0.0.1:8420/mcp
    wirecall list -- python server.py
    """
    everything = run(listed(target, way))
    offers = [offer for offer in everything if _wanted(offer, kind, text)]
    out = Output(as_json)
    out.result(offers, lambda: out.table(["KIND", "NAME", "HINTS", "SUMMARY"], [_row(offer) for offer in offers]))
    if not offers and not as_json:
        out.note(f"Nothing of {len(everything)} fits." if everything else "It offers nothing.")


async def listed(target: Target, way: Way) -> list[Offer]:
    """All offers of a target; an app's by both protocols, unless one was asked for."""
    if target.kind == "file" and way.protocol is None and way.revision is None:
        return of_app(target.app())
    protocol = way.protocol_to(target)
    async with opened(target, way) as client:
        offers = await offers_of(client, None, protocol)
    if offers is None:
        raise Failure(
            "The server does not tell what it offers.",
            "it has no rpc.discover, which OpenRPC asks for",
            f"{target.line('call', 'METHOD')} works all the same; for MCP: --as mcp",
            exit=Exit.REMOTE,
            type="no_discovery",
        )
    return offers


def _wanted(offer: Offer, kind: str | None, text: str | None) -> bool:
    words = f"{offer.name} {offer.title} {offer.description}".lower()
    return kind in (None, offer.kind) and (text is None or text.lower() in words)


def _row(offer: Offer) -> list[str]:
    return [offer.kind, offer.name, " · ".join(offer.marks), offer.summary]

"""`wirecall list` and `wirecall show`: the methods, tools, resources and prompts of a server, all of them or one."""

import click

from wirecall.cli.arguments import described, example, words
from wirecall.cli.connecting import Way, opened, way_options
from wirecall.cli.input import run
from wirecall.cli.offers import CALLABLE, Offer, find, of_app, offers_of, unlisted
from wirecall.cli.output import Printer, json_option
from wirecall.cli.targets import Target, TargetCommand, target_argument
from wirecall.logs import escaped

KINDS = ("query", "command", "method", "tool", "resource", "template", "prompt")


@click.command("list", cls=TargetCommand)
@target_argument
@click.option("--kind", type=click.Choice(KINDS), help="Only this kind.")
@click.option("--tag", help="Only entries with this tag.")
@click.option("--filter", "text", help="Only entries with this text in their name or description.")
@way_options
@json_option
def list_command(target: Target, kind: str | None, tag: str | None, text: str | None, way: Way, out: Printer) -> None:
    """List the methods and tools, resources and prompts of TARGET.

    The server states the marks itself: read-only, destructive, keyed (takes an idempotency key), open-world (reaches
    beyond the server); unstated if it states nothing.

    \b
    wirecall list shop.py
    wirecall list http://127.0.0.1:8420/mcp
    wirecall list -- python server.py
    """
    everything = run(listed(target, way))
    offers = [
        each
        for each in everything
        if kind in (None, each.kind)
        and (tag is None or tag in each.tags)
        and (text is None or text.lower() in f"{each.name} {each.title} {each.description}".lower())
    ]
    rows = [(each.kind, each.name, " · ".join(each.marks), each.summary) for each in offers]
    out.result(offers, lambda: out.table(["KIND", "NAME", "HINTS", "SUMMARY"], rows))
    if not offers and not out.as_json:
        out.note(f"None of {len(everything)} entries matches." if everything else "The server offers nothing.")


@click.command("show", cls=TargetCommand)
@target_argument
@click.argument("name")
@way_options
@json_option
def show_command(target: Target, name: str, way: Way, out: Printer) -> None:
    """Show the arguments and the result of NAME of TARGET, and how to call it.

    \b
    wirecall show shop.py charge
    """
    offer = find(run(listed(target, way)), name, "method, tool, resource or prompt", target.line("list"))
    marks = " · ".join(offer.marks)
    lines = [f"{offer.name}  ({offer.kind}{', ' if marks else ''}{marks})"]
    lines += [f"  {line}" for text in (offer.title, offer.description) for line in text.strip().splitlines()]
    lines += [f"  Tags: {', '.join(offer.tags)}"] if offer.tags else []
    if offer.schema is not None:
        rows = _rows(described(offer.schema))
        lines += ["", "Takes" if rows else "Takes nothing", *rows]
    if offer.output is not None:
        lines += ["", f"Gives {offer.output.get('contentMediaType') or words(offer.output, offer.output)}"]
        lines += _rows(
            [(name, kind, remark.removeprefix("required").strip()) for name, kind, remark in described(offer.output)]
        )
    if offer.kind in CALLABLE:
        key = "--key auto" if offer.hints and offer.hints.keyed else ""
        lines += ["", target.line("call", offer.name, example(offer.schema or {}), key)]
    out.result(offer, "\n".join(map(escaped, lines)))


def _rows(rows: list[tuple[str, str, str]]) -> list[str]:
    widths = [max((len(row[at]) for row in rows), default=0) for at in (0, 1)]
    return [f"  {name.ljust(widths[0])}  {kind.ljust(widths[1])}  {remark}".rstrip() for name, kind, remark in rows]


async def listed(target: Target, way: Way) -> list[Offer]:
    """Return all offers of a target; for an app, those of both protocols unless one is chosen."""
    # No protocol lists everything: methods may be exposed by one of them alone.
    if target.kind == "file" and way.protocol is None and way.revision is None:
        return of_app(target.app())
    protocol = way.protocol_to(target)
    async with opened(target, way) as client:
        offers = await offers_of(client, None, protocol)
    if offers is None:
        raise unlisted(target)
    return offers

"""`wirecall show`: one offer of a server, for people."""

import click

from wirecall.cli.arguments import described, example, words
from wirecall.cli.connecting import Way, run, way_options
from wirecall.cli.listing import listed
from wirecall.cli.offers import CALLABLE, find
from wirecall.cli.output import Printer, json_option
from wirecall.cli.targets import Target, TargetCommand, target_argument
from wirecall.logs import escaped


@click.command("show", cls=TargetCommand)
@target_argument
@click.argument("name")
@way_options
@json_option
def command(target: Target, name: str, way: Way, as_json: bool) -> None:
    """Show the arguments and the result of NAME of TARGET, and how to call it.

    \b
    wirecall show shop.py charge
    """
    offer = find(run(listed(target, way)), name, target.line("list"))
    marks = " · ".join(offer.marks)
    lines = [f"{offer.name}  ({offer.kind}{', ' if marks else ''}{marks})"]
    lines += [f"  {line}" for text in (offer.title, offer.description) for line in text.strip().splitlines()]
    if offer.schema is not None:
        rows = described(offer.schema)
        widths = [max((len(row[at]) for row in rows), default=0) for at in (0, 1)]
        lines += ["", "Takes" if rows else "Takes nothing"]
        lines += [f"  {name.ljust(widths[0])}  {kind.ljust(widths[1])}  {remark}".rstrip() for name, kind, remark in rows]
    if offer.output is not None:
        lines += ["", f"Gives {offer.output.get('contentMediaType') or words(offer.output, offer.output)}"]
    if offer.kind in CALLABLE:
        key = "--key auto" if offer.hints and offer.hints.keyed else ""
        lines += ["", target.line("call", offer.name, example(offer.schema or {}), key)]
    Printer(as_json).result(offer, "\n".join(map(escaped, lines)))

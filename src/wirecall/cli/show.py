"""`wirecall show`: one offer of a server, as people read it."""

import click

from wirecall.cli.arguments import Schema, described, example, words
from wirecall.cli.connecting import Way, run, way_options
from wirecall.cli.listing import listed
from wirecall.cli.offers import CALLABLE, Offer, find
from wirecall.cli.output import Output, json_option
from wirecall.cli.targets import Target, TargetCommand, target_argument
from wirecall.logs import escaped


@click.command("show", cls=TargetCommand)
@target_argument()
@click.argument("name")
@way_options
@json_option
def command(target: Target, name: str, way: Way, as_json: bool) -> None:
    """Show what NAME of TARGET takes and gives, and how it is called.

    \b
    wirecall show shop.py charge
    """
    offer = find(run(listed(target, way)), name, target.line("list"))
    Output(as_json).result(offer, _shown(offer, target))


def _shown(offer: Offer, target: Target) -> str:
    marks = " · ".join(offer.marks)
    lines = [f"{offer.name}  ({offer.kind}{', ' if marks else ''}{marks})"]
    lines += [f"  {line}" for text in (offer.title, offer.description) for line in text.strip().splitlines()]
    if offer.schema is not None:
        lines += ["", *_arguments(offer.schema)]
    if offer.output is not None:
        lines += ["", f"Gives {offer.output.get('contentMediaType') or words(offer.output, offer.output)}"]
    if offer.kind in CALLABLE:
        lines += ["", _command_line(offer, target)]
    return "\n".join(map(escaped, lines))


def _arguments(schema: Schema) -> list[str]:
    rows = described(schema)
    widths = [max((len(row[at]) for row in rows), default=0) for at in (0, 1)]
    lines = [f"  {name.ljust(widths[0])}  {kind.ljust(widths[1])}  {remark}".rstrip() for name, kind, remark in rows]
    return ["Takes", *lines] if rows else ["Takes nothing"]


def _command_line(offer: Offer, target: Target) -> str:
    key = "--key auto" if offer.hints and offer.hints.keyed else ""
    return target.line("call", offer.name, example(offer.schema or {}), key)

"""The contract of a server.

`wirecall lock` writes it to a file, `diff` finds the changes that break callers, and `client` makes
a typed client from it.
"""

import keyword
from collections import Counter
from pathlib import Path

import click
import msgspec

from wirecall.cli.failures import CliError, Exit
from wirecall.cli.targets import (
    Target,
    TargetCommand,
    Way,
    asking,
    factory_option,
    opened,
    parse,
    target_argument,
    unlisted,
    way_options,
)
from wirecall.cli.terminal import Printer, count_of, json_option, run
from wirecall.contract.changes import LEVELS, changes, shared
from wirecall.contract.generate import MARK, OWN, generated
from wirecall.contract.lock import SECTIONS, Contract, NotALock, of_app, of_client, read_lock

FILE = "contract.json"


@click.command("lock", cls=TargetCommand)
@target_argument
@click.option(
    "-o",
    "path",
    default=FILE,
    metavar="FILE",
    help=f"The lock file, or - for stdout. [default: {FILE}]",
)
@way_options
@json_option
def lock_command(target: Target, path: str, way: Way, out: Printer) -> None:
    """Write the contract of TARGET into a lock file: what its callers rely on.

    Equal offers give equal bytes, so the file can be committed, and `wirecall diff` compares a
    server with it.

    \b
    wirecall lock shop.py
    wirecall lock http://127.0.0.1:8420/mcp -o shop.json
    wirecall lock -o files.json -- npx -y some-server
    """
    contract = run(_read(target, way))
    if path == "-":
        out.result(msgspec.to_builtins(contract), contract.canonical().decode().rstrip("\n"))
        return
    try:
        if Path(path).exists():
            read_lock(path)
    except NotALock as error:
        # A lock file of another version, or a damaged one, is replaced; any other file is not.
        if error.is_foreign:
            why = str(error).partition("\n  why: ")[2].partition("\n")[0]
            next_step = f"choose another path: -o {FILE}"
            raise CliError(f"{path} exists, and is not a lock file.", why, next_step) from None
    write(path, contract.canonical())
    counts = {
        section: len(getattr(contract, section))
        for section in SECTIONS
        if getattr(contract, section) is not None
    }
    out.result({"file": path, "digest": contract.digest, **counts}, path)
    if not out.as_json:
        listed = ", ".join(
            count_of(number, section.removesuffix("s"))
            for section, number in counts.items()
            if number
        )
        out.note(f"{listed or 'The server offers nothing.'}   {contract.digest[:19]}", "ok")


class DiffCommand(TargetCommand):
    """A command whose second argument may be the words after `--`."""

    is_last = True


@click.command("diff", cls=DiffCommand)
@click.argument("old", type=parse, metavar="OLD")
@click.argument("new", type=parse, metavar="NEW")
@factory_option
@click.option("--accept", is_flag=True, help="Write the contract of NEW into the lock file OLD.")
@way_options
@json_option
def diff_command(old: Target, new: Target, accept: bool, way: Way, out: Printer) -> int | None:
    """Compare the contracts OLD and NEW, and report the changes that break callers of OLD.

    The exit code is 9 if there are some. Each contract is a lock file, or a TARGET whose contract
    is read now.

    \b
    wirecall diff contract.json shop.py
    wirecall diff contract.json http://127.0.0.1:8420 --json
    wirecall diff contract.json shop.py --accept
    wirecall diff files.json -- npx -y some-server
    """
    if accept and not _is_lock(old):
        next_step = f"wirecall lock {new.text} -o {FILE}"
        if _is_lock(new):
            next_step = f"wirecall diff {new.text} {old.text} --accept"
        raise CliError("--accept writes a lock file.", f"{old.text} is not a lock file", next_step)
    before = run(_read(old, way))
    after = run(_read(new, way))
    if not shared(before, after):
        why = f"{old.text} has {_sections(before)}; {new.text} has {_sections(after)}"
        raise CliError(
            "The contracts have no section in common.",
            why,
            "read both by one protocol: --as rpc, or --as mcp",
        )
    found = changes(before, after)
    skipped = _skipped(before, after)
    _warn(out, before, after, skipped)
    counts = Counter(change.level for change in found)
    if accept:
        write(old.of(old.text), after.canonical())
    is_broken = counts["breaking"] > 0 and not accept

    def show() -> None:
        if found:
            rows = [(each.level, each.place, each.text) for each in found]
            out.table(["LEVEL", "PLACE", "CHANGE"], rows)
        summary = ", ".join(f"{counts[level]} {level}" for level in LEVELS if counts[level])
        summary = summary or "The contracts are equal."
        if accept:
            summary += "   accepted"
        out.note(summary, "failed" if is_broken else "ok")

    document = {level: counts[level] for level in LEVELS} | {
        "accepted": accept,
        "notCompared": skipped,
        "changes": found,
    }
    out.result(document, show)
    if is_broken:
        return Exit.FOUND
    return None


def _skipped(before: Contract, after: Contract) -> list[str]:
    """Return the sections that only one of the contracts has, and that are not empty."""
    skipped = []
    for section in SECTIONS:
        both = (getattr(before, section), getattr(after, section))
        if None in both and any(both):
            skipped.append(section)
    return skipped


def _warn(out: Printer, before: Contract, after: Contract, skipped: list[str]) -> None:
    """Note why the comparison may not be complete."""
    if skipped:
        out.note(f"Not compared: {', '.join(skipped)}. Only one of the two has them.", "warning")
    if before.revision and after.revision and before.revision != after.revision:
        out.note(
            f"The revisions of MCP differ: {before.revision} and {after.revision}. "
            "--revision selects one.",
            "warning",
        )


@click.command("client", cls=TargetCommand)
@target_argument
@click.option(
    "-o", "path", required=True, metavar="FILE.py", help="The module to write, or - for stdout."
)
@click.option(
    "--class",
    "name",
    metavar="NAME",
    help="The name of the class. [default: from the server's name]",
)
@way_options
@json_option
def client_command(target: Target, path: str, name: str | None, way: Way, out: Printer) -> None:
    """Write a typed Python client of TARGET, which is a server or a lock file.

    The module has an async class and a blocking one, a struct for each type, and a method for each
    method or tool. It needs wirecall to run. Equal contracts give equal bytes.

    \b
    wirecall client http://127.0.0.1:8420 -o shop_client.py
    wirecall client contract.json -o shop_client.py --as mcp
    wirecall client -o files_client.py -- npx -y some-server
    """
    if name is not None and (not name.isidentifier() or keyword.iskeyword(name) or name in OWN):
        why = "expected a Python name that is not taken"
        raise CliError(f"{name!r} cannot be the name of a class.", why, "--class Shop")
    contract = run(_read(target, way))
    offers_only_tools = not contract.methods and contract.tools and way.protocol is None
    protocol = "rpc"
    if way.protocol == "mcp" or contract.methods is None or offers_only_tools:
        protocol = "mcp"
    made = generated(contract, protocol, name)
    if path == "-":
        out.result(made, made.rstrip("\n"))
        return
    if Path(path).exists() and not _starts_with(path, MARK):
        why = "`wirecall client` replaces only files that it has made"
        next_step = "choose another path: -o FILE.py"
        raise CliError(f"{path} exists, and is not a generated client.", why, next_step)
    write(path, made.encode())
    digest = contract.spoken(protocol).digest
    out.result({"file": path, "digest": digest, "protocol": protocol}, path)


def _starts_with(path: str, text: str) -> bool:
    try:
        return Path(path).read_bytes().startswith(text.encode())
    except OSError:
        return False


def _sections(contract: Contract) -> str:
    return ", ".join(each for each in SECTIONS if getattr(contract, each) is not None)


def _is_lock(target: Target) -> bool:
    # A module has the name of its app here: contract.lock could be a module, too.
    is_app = target.text.endswith(".py") or (target.is_module and bool(target.name))
    return target.kind == "file" and not is_app


async def _read(target: Target, way: Way) -> Contract:
    """Return the contract in a lock file, or that of a server."""
    if _is_lock(target):
        return read_lock(target.of(target.text))
    # No protocol lists everything that an app offers, so it is asked itself, unless the user
    # chooses a protocol.
    if target.kind == "file" and way.protocol is None and way.revision is None:
        return of_app(target.app())
    async with opened(target, way) as client:
        with asking():
            contract = await of_client(client)
    if contract is None:
        raise unlisted(target)
    return contract


def write(path: str, data: bytes) -> None:
    """Write a file that a verb makes."""
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise CliError(
            f"{path} cannot be written.",
            error.strerror or str(error),
            "choose another path: -o FILE",
        ) from None

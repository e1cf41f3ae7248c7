"""The contract of a server: `wirecall lock` writes it into a file, `diff` finds the changes that break callers, and
`client` makes a typed client of it."""

import keyword
from collections import Counter
from pathlib import Path

import click
import msgspec

from wirecall.cli.failures import CliError, Exit
from wirecall.cli.targets import Target, TargetCommand, Way, asking, opened, parse, target_argument, unlisted, way_options
from wirecall.cli.terminal import Printer, count_of, json_option, run
from wirecall.contract.changes import LEVELS, changes, shared
from wirecall.contract.generate import MARK, OWN, generated
from wirecall.contract.lock import SECTIONS, Contract, NotALock, of_app, of_client, read_lock

FILE = "contract.json"


@click.command("lock", cls=TargetCommand)
@target_argument
@click.option("-o", "path", default=FILE, metavar="FILE", help=f"The lock file, or - for stdout. [default: {FILE}]")
@way_options
@json_option
def lock_command(target: Target, path: str, way: Way, out: Printer) -> None:
    """Write the contract of TARGET into a lock file: what its callers rely on.

    Equal offers give equal bytes, so the file can be committed, and `wirecall diff` compares a server with it.

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
            why, next_step = str(error).partition("\n  why: ")[2].partition("\n")[0], f"choose another path: -o {FILE}"
            raise CliError(f"{path} exists, and is not a lock file.", why, next_step) from None
    write(path, contract.canonical())
    counts = {section: len(getattr(contract, section)) for section in SECTIONS if getattr(contract, section) is not None}
    out.result({"file": path, "digest": contract.digest, **counts}, path)
    if not out.as_json:
        listed = ", ".join(count_of(number, section.removesuffix("s")) for section, number in counts.items() if number)
        out.note(f"{listed or 'The server offers nothing.'}   {contract.digest[:19]}", "ok")


class DiffCommand(TargetCommand):
    """A command whose second argument may be the words after `--`."""

    is_last = True


@click.command("diff", cls=DiffCommand)
@click.argument("old", type=parse, metavar="OLD")
@click.argument("new", type=parse, metavar="NEW")
@click.option("--accept", is_flag=True, help="Write the contract of NEW into the lock file OLD.")
@way_options
@json_option
def diff_command(old: Target, new: Target, accept: bool, way: Way, out: Printer) -> int | None:
    """Compare the contracts OLD and NEW, and report the changes that break callers of OLD: then the exit code is 9.

    Each is a lock file, or a TARGET whose contract is read now.

    \b
    wirecall diff contract.json shop.py
    wirecall diff contract.json http://127.0.0.1:8420 --json
    wirecall diff contract.json shop.py --accept
    wirecall diff files.json -- npx -y some-server
    """
    if accept and not _is_lock(old):
        swapped = f"wirecall diff {new.text} {old.text} --accept"
        next_step = swapped if _is_lock(new) else f"wirecall lock {new.text} -o {FILE}"
        raise CliError("--accept writes a lock file.", f"{old.text} is not a lock file", next_step)
    before, after = run(_read(old, way)), run(_read(new, way))
    both = shared(before, after)
    if not both:
        why = f"{old.text} has {_sections(before)}; {new.text} has {_sections(after)}"
        raise CliError("The contracts have no section in common.", why, "read both by one protocol: --as rpc, or --as mcp")
    found = changes(before, after)
    left = [each for each in SECTIONS if each not in both and None in (getattr(before, each), getattr(after, each))]
    left = [each for each in left if getattr(before, each) or getattr(after, each)]
    if left:
        out.note(f"Not compared: {', '.join(left)}. Only one of the two has them.", "warning")
    if before.revision and after.revision and before.revision != after.revision:
        out.note(f"The revisions of MCP differ: {before.revision} and {after.revision}. --revision selects one.", "warning")
    counts = Counter(change.level for change in found)
    if accept:
        write(old.of(old.text), after.canonical())

    def show() -> None:
        if found:
            out.table(["LEVEL", "PLACE", "CHANGE"], [(each.level, each.place, each.text) for each in found])
        told = ", ".join(f"{counts[level]} {level}" for level in LEVELS if counts[level]) or "The contracts are equal."
        out.note(f"{told}{'   accepted' if accept else ''}", "failed" if counts["breaking"] and not accept else "ok")

    document = {level: counts[level] for level in LEVELS} | {"accepted": accept, "notCompared": left, "changes": found}
    out.result(document, show)
    return Exit.FOUND if counts["breaking"] and not accept else None


@click.command("client", cls=TargetCommand)
@target_argument
@click.option("-o", "path", required=True, metavar="FILE.py", help="The module to write, or - for stdout.")
@click.option("--class", "name", metavar="NAME", help="The name of the class. [default: from the server's name]")
@way_options
@json_option
def client_command(target: Target, path: str, name: str | None, way: Way, out: Printer) -> None:
    """Write a typed Python client of TARGET, which is a server or a lock file.

    The module has an async class and a blocking one, a struct for each type, and a method for each method or tool.
    It needs wirecall to run. Equal contracts give equal bytes.

    \b
    wirecall client http://127.0.0.1:8420 -o shop_client.py
    wirecall client contract.json -o shop_client.py --as mcp
    wirecall client -o files_client.py -- npx -y some-server
    """
    if name is not None and (not name.isidentifier() or keyword.iskeyword(name) or name in OWN):
        why = "expected a Python name that is not taken"
        raise CliError(f"{name!r} cannot be the name of a class.", why, "--class Shop")
    contract = run(_read(target, way))
    protocol = "mcp" if way.protocol == "mcp" or contract.methods is None else "jsonrpc"
    if protocol == "jsonrpc" and not contract.methods and contract.tools and way.protocol is None:
        protocol = "mcp"  # an app that offers nothing but tools
    made = generated(contract, protocol, name)
    if path == "-":
        out.result(made, made.rstrip("\n"))
        return
    if Path(path).exists() and not _starts_with(path, MARK):
        why, next_step = "`wirecall client` replaces only files that it has made", "choose another path: -o FILE.py"
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
    return target.kind == "file" and not target.text.endswith(".py")


async def _read(target: Target, way: Way) -> Contract:
    """Return the contract in a lock file, or that of a server."""
    if _is_lock(target):
        return read_lock(target.of(target.text))
    # No protocol lists everything that an app offers, so it is asked itself, unless the user chooses a protocol.
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
        raise CliError(f"{path} cannot be written.", error.strerror or str(error), "choose another path: -o FILE") from None

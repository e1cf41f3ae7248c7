"""`wirecall gateway import`: the servers of an MCP client as sections of `wirecall.toml`.

1. The client's file is only read.
2. Without `--write` the verb shows the change and writes nothing.
3. Secrets are written first, into a file that only their owner can read, so a reference in
   `wirecall.toml` always has its value. Neither the diff nor the report shows them.
"""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path

import click
from msgspec import Struct, field

from wirecall.cli.client_files import CLIENTS, ClientProgram
from wirecall.cli.failures import CliError, Exit, failure_of
from wirecall.cli.terminal import Printer, count_of, json_option
from wirecall.config import FILE, FILE_VARIABLE, Config, ConfigError, check_config
from wirecall.errors import UsageError
from wirecall.files import replace_file
from wirecall.gateway.imports import Imported, read_client_file
from wirecall.gateway.references import SECRETS, read_secrets, write_secrets
from wirecall.gateway.settings import MAX_UPSTREAMS, UpstreamSettings, upstream_of
from wirecall.protocol.messages import JsonObject

# Clients whose files are read and not written, beside those of `install`.
READ = {
    "zed": ClientProgram("Zed", ".config/zed/settings.json", ".zed/settings.json"),
    "codex": ClientProgram("Codex", ".codex/config.toml", ".codex/config.toml"),
    "gemini": ClientProgram("Gemini CLI", ".gemini/settings.json", ".gemini/settings.json"),
    "opencode": ClientProgram("OpenCode", ".config/opencode/opencode.json", "opencode.json"),
}
ALL = {**CLIENTS, **READ}


class Left(Struct, frozen=True):
    """A file or an entry that was not imported."""

    file: str
    name: str | None
    why: str
    next: str = ""
    # The user wants it so.
    is_wanted: bool = False


class ImportPlan(Struct):
    """What the verb would write, and what it leaves alone."""

    added: list[Imported] = field(default_factory=list)
    # Upstreams that wirecall.toml has already. Their secrets may have changed.
    known: list[Imported] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)


@click.command("import")
@click.argument("files", nargs=-1, metavar="[FILE]...")
@click.option("--client", type=click.Choice(list(ALL)), help="Read the file of this MCP client.")
@click.option("--project", is_flag=True, help="With --client: its file in this folder.")
@click.option(
    "--only", multiple=True, metavar="NAME", help="Import only this server; may be repeated."
)
@click.option("--to", metavar="FILE", help="The file to write. [default: wirecall.toml]")
@click.option("--write", is_flag=True, help="Write the change that is shown.")
@json_option
def import_command(
    files: tuple[str, ...],
    client: str | None,
    project: bool,
    only: tuple[str, ...],
    to: str | None,
    write: bool,
    out: Printer,
) -> Exit | None:
    """Read the servers of an MCP client into wirecall.toml.

    The client's file stays as it is. Secrets go to .wirecall/secrets.toml, which only you can read.
    Exit code 9 if a file or an entry was not imported.

    \b
    wirecall gateway import --client claude-desktop
    wirecall gateway import --client claude-desktop --write
    wirecall gateway import mcp.json --only github --write
    """
    paths = _paths(files, client, project=project)
    target = Path(to or os.environ.get(FILE_VARIABLE) or FILE)
    config = _config_of(target)
    plan = _plan(paths, config, only)

    # 1. The new content of both files.
    before = target.read_bytes().decode() if config.path else ""
    after = _with_sections(before, plan.added)
    secrets = target.parent / SECRETS
    old = read_secrets(secrets)
    new = _with_secrets(old, [*plan.known, *plan.added])
    changes = _changed(old, new)

    # 2. The change.
    diff = _diff(target, before, after)
    has_change = bool(diff or changes)
    if write and has_change:
        _write(target, after, secrets if changes else None, new)

    # 3. The report.
    document: JsonObject = {
        "file": str(target),
        "changed": write and has_change,
        "imported": [each.name for each in plan.added],
        "known": [each.name for each in plan.known],
        "left": plan.left,
        "notes": [f"{each.name}: {note}" for each in plan.added for note in each.notes],
        "secrets": {"file": str(secrets), "names": changes},
        "diff": diff,
    }

    def show() -> None:
        if diff:
            click.echo(diff, nl=False)
        _show(out, plan, changes, secrets, has_change=has_change, wrote=write)

    out.result(document, show)
    if any(not each.is_wanted for each in plan.left):
        return Exit.FOUND
    return None


def _show(
    out: Printer,
    plan: ImportPlan,
    changes: list[str],
    secrets: Path,
    *,
    has_change: bool,
    wrote: bool,
) -> None:
    """Print everything beside the diff."""
    for name in changes:
        out.note(f"{secrets}: {name} ***")
    for each in plan.added:
        for note in each.notes:
            out.note(f"{each.name}: {note}", "warning")
    for left in plan.left:
        named = left.file if left.name is None else left.name
        next_step = f"; {left.next}" if left.next else ""
        out.note(f"{named} was not imported: {left.why}{next_step}", "warning")
    if plan.known:
        out.note(f"already there: {', '.join(each.name for each in plan.known)}", "ok")
    servers = count_of(len(plan.added), "server")
    if has_change and wrote:
        out.note(f"imported {servers}; next: wirecall gateway check", "ok")
    elif has_change:
        out.note(f"{servers} to import; nothing was written: repeat with --write")


# --- the files ------------------------------------------------------------------------------------


def _paths(files: tuple[str, ...], client: str | None, *, project: bool) -> list[Path]:
    """Return the clients' files to read."""
    if client is None:
        if project:
            raise CliError("--project needs --client.", "it says whose file", "--client cursor")
        if not files:
            next_step = "wirecall gateway import --client claude-desktop, or name a file"
            raise CliError("Which file?", "no client and no file was given", next_step)
        return [Path(each) for each in files]
    if files:
        raise CliError(
            "--client and a file contradict each other.",
            "the client says where its file is",
            "drop one of them",
        )
    path = ALL[client].path(in_project=project)
    if not path.exists():
        what = f"{ALL[client].title} has no file here."
        raise CliError(what, f"there is no {path}", "name its file: wirecall gateway import FILE")
    return [path]


def _config_of(target: Path) -> Config:
    """Return the configuration that gets the sections; one with a mistake is refused."""
    if not target.exists():
        return Config(None, {})
    config, problems = check_config(target, {})
    if problems:
        raise ConfigError(problems)
    return config


def _plan(paths: list[Path], config: Config, only: tuple[str, ...]) -> ImportPlan:
    """Read the files, and decide about each entry."""
    plan = ImportPlan()
    seen: set[str] = set()
    for path in paths:
        try:
            found = read_client_file(path)
        except UsageError as error:
            failure = failure_of(error)
            if len(paths) == 1:
                raise
            plan.left.append(Left(str(path), None, failure.why, failure.next))
            continue
        for left in found.left_out:
            if not only or left.name in only:
                seen.add(left.name)
                plan.left.append(Left(str(path), left.name, left.why, is_wanted=left.is_wanted))
        for each in found.imported:
            if not only or each.name in only:
                seen.add(each.name)
                _decide(plan, path, each, config)
    if missing := [name for name in only if name not in seen]:
        known = ", ".join(sorted(seen)) or "other names"
        raise CliError(f"There is no server {missing[0]}.", f"the file has {known}", "--only NAME")
    if not plan.added and not plan.known and all(each.name is None for each in plan.left):
        first = plan.left[0]
        raise CliError(f"{first.file} stays as it is.", first.why, first.next)
    total = len(config.members.get("upstream", {})) + len(plan.added)
    if total > MAX_UPSTREAMS:
        why = f"a gateway takes {MAX_UPSTREAMS} upstreams"
        raise CliError(f"There would be {total} upstreams.", why, "import fewer: --only NAME")
    return plan


def _decide(plan: ImportPlan, path: Path, imported: Imported, config: Config) -> None:
    """Add an entry to the plan, unless its name is taken."""
    name = imported.name
    there: UpstreamSettings | None = None
    if name in config.members.get("upstream", {}):
        there = upstream_of(config, name)
    for each in plan.added:
        if each.name == name:
            there = each.settings()
    if there is None:
        plan.added.append(imported)
    elif _is_same(there, imported.settings()):
        plan.known.append(imported)
    else:
        why = "wirecall.toml or another file has a different upstream of this name"
        plan.left.append(Left(str(path), name, why, f"rename or remove [upstream.{name}]"))


def _is_same(there: UpstreamSettings, new: UpstreamSettings) -> bool:
    """Return whether both start or reach the same server in the same way."""
    keys = ("command", "url", "env", "cwd", "auth", "headers")
    return all(getattr(there, key) == getattr(new, key) for key in keys)


# --- the change -----------------------------------------------------------------------------------


def _with_sections(text: str, added: list[Imported]) -> str:
    """Return the file with the new sections at its end."""
    end = "\r\n" if "\r\n" in text else "\n"
    for each in added:
        if text and not text.endswith("\n"):
            text += end
        if text:
            text += end
        text += each.toml().replace("\n", end)
    return text


def _with_secrets(
    old: Mapping[str, Mapping[str, str]], added: list[Imported]
) -> dict[str, dict[str, str]]:
    new = {section: dict(values) for section, values in old.items()}
    for each in added:
        if each.secrets:
            new.setdefault(each.name, {}).update(each.secrets)
    return new


def _changed(
    old: Mapping[str, Mapping[str, str]], new: Mapping[str, Mapping[str, str]]
) -> list[str]:
    """Return the names of the secrets that are new or have another value."""
    return [
        f"{section}.{name}"
        for section, values in new.items()
        for name, value in values.items()
        if old.get(section, {}).get(name) != value
    ]


def _diff(target: Path, before: str, after: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(keepends=True),
        after.splitlines(keepends=True),
        str(target),
        f"{target} (new)",
    )
    return "".join(line.rstrip("\r\n") + "\n" for line in lines)


def _write(
    target: Path, after: str, secrets: Path | None, values: dict[str, dict[str, str]]
) -> None:
    """Write the secrets, then the file that refers to them."""
    try:
        if secrets is not None:
            write_secrets(secrets, values)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            replace_file(target.resolve(), after.encode(), like=target)
        else:
            target.write_bytes(after.encode())
    except OSError as error:
        why = error.strerror or str(error)
        raise CliError(f"{target} cannot be written.", why, "--to another file") from None

"""`wirecall install --wrap`: put `wirecall wrap` before entries of a client's file, and undo it.

1. Only the command of an entry changes, as text: comments, spaces and all other bytes stay. An entry
   with an address becomes one with a command. Its headers become variables, which stay in the file.
2. An entry that is wrapped stays as it is, so the verb can be repeated.
3. `--undo` takes `wirecall wrap` off. If nothing else in the entry has changed since, the entry gets
   its old bytes from the copy that the verb keeps beside the file. The last undo deletes the copies.
4. A file that its client cannot read either is named and not changed.
"""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import click
from msgspec import Struct, field

from wirecall.cli.client_files import ClientProgram, EntryFile
from wirecall.cli.failures import CliError, Interrupted
from wirecall.cli.terminal import Printer, ask
from wirecall.gateway.guesses import is_secret_address, is_secret_word, looks_secret
from wirecall.gateway.jsonc import Node, NotJson, parse
from wirecall.gateway.wraps import HEADER_VARIABLE, PlainServer, is_wrapped, unwrapped, wrapped
from wirecall.protocol.messages import JsonObject

# Not a name that an install gives to its copies: those do not begin with a dash.
_LABEL = "-wrap"
# Characters of a value that is not hidden: it would be found everywhere in a diff.
SHORT = 4
_ADDRESSES = ("url", "serverUrl", "httpUrl")


# The names of the members that lead to an entry.
Place: TypeAlias = tuple[str, ...]


class Edit(Struct, frozen=True):
    """A piece of the text to replace."""

    start: int
    end: int
    text: str


class Changes(Struct):
    """What happens to the entries."""

    changed: list[str] = field(default_factory=list)
    # They are as the user wants them.
    kept: list[str] = field(default_factory=list)
    # They cannot be changed, and why.
    left: dict[str, str] = field(default_factory=dict)


class Wrapping:
    """The change of the entries of one client's file."""

    def __init__(
        self, program: ClientProgram, path: Path, names: tuple[str, ...], *, undo: bool
    ) -> None:
        self._program = program
        self._names = names
        self._undo = undo
        self._file = EntryFile(path, program, ", ".join(names) or "all servers", _LABEL)
        if not self._file.text.strip():
            why = f"{self._file.path} does not exist, or is empty"
            raise CliError(
                f"{program.title} has no servers here.", why, "is it the right --client?"
            )
        self._changes = Changes()

    def run(self, out: Printer, *, dry_run: bool, yes: bool) -> None:
        """Show the change, make it if the user agrees, and report it."""
        file = self._file
        after = self._changed_text()
        # The diff may be in a log or in the context of a model.
        diff = _without_secrets(file.diff(after), [node for _, node in self._entries(file.text)])
        if not out.as_json:
            click.echo(diff or f"{file.path} stays as it is.", err=True, nl=not diff)
        wrote = bool(diff) and not dry_run
        if wrote:
            if not yes and ask(f"Write {file.path}?") is False:
                raise Interrupted("nothing was written")
            file.write(after, keep=not self._undo)
            if self._undo and not any(_has_wrap(node) for _, node in self._entries(after)):
                for path, _ in file.backups():
                    path.unlink(missing_ok=True)
        backup = file.backup
        if backup is not None and not backup.exists():
            backup = None
        changes = self._changes
        document: JsonObject = {
            "client": self._program.title,
            "file": str(file.path),
            "changed": wrote,
            "names": changes.changed,
            "kept": changes.kept,
            "left": changes.left,
            "backup": str(backup) if backup else None,
            "diff": diff,
        }
        out.result(document, f"{file.path}: {self._done(wrote=wrote, dry_run=dry_run)}")
        if out.as_json:
            return
        for name, why in changes.left.items():
            out.note(f"{name} stays as it is: {why}", "warning")
        if wrote:
            if backup is not None and not self._undo:
                out.note(f"Backup: {backup}")
            out.note(f"Now in {self._program.title}: {self._program.restart}.", "ok")

    def _done(self, *, wrote: bool, dry_run: bool) -> str:
        verb = "unwrapped" if self._undo else "wrapped"
        names = ", ".join(self._changes.changed)
        if wrote:
            return f"{verb} {names}"
        if dry_run and names:
            return f"would have {verb} {names}"
        return f"nothing to change, {verb} already: {', '.join(self._changes.kept) or 'none'}"

    # --- the entries ------------------------------------------------------------------------------

    def _entries(self, text: str) -> Iterator[tuple[Place, Node]]:
        """Yield the entries of the file, or of a copy of it."""
        program = self._program
        try:
            tree = parse(text, comments=program.has_comments)
        except NotJson as problem:
            why = f"line {problem.line}: {problem.what}"
            what = f"{self._file.path} is not JSON."
            raise CliError(what, why, "correct it; it stays as it is", type="not_json") from None
        places: list[Place] = [(program.member,)]
        if "claude.json" in self._file.path.name:
            # Claude Code has the entries of a project in the file of its user.
            places.append(("projects", str(Path.cwd()), program.member))
        has_place = False
        for place in places:
            node = tree.at(*place)
            if node is None:
                continue
            if node.members is None:
                what = f"{self._file.path} does not look like a file of {program.title}."
                why = f"expected an object under {program.member!r}"
                raise CliError(
                    what, why, "is it the right file? Then correct it; it stays as it is"
                )
            has_place = True
            for name, entry in node.members.items():
                yield (*place, name), entry
        if not has_place:
            what = f"{self._file.path} has no servers."
            why = f"expected an object under {program.member!r}"
            raise CliError(what, why, "is it the right file? It stays as it is")

    def _changed_text(self) -> str:
        """Return the new text of the file."""
        text = self._file.text
        entries = list(self._entries(text))
        known = [place[-1] for place, _ in entries]
        for name in self._names:
            if name not in known:
                why = f"{self._file.path} has {', '.join(known) or 'no entries'}"
                raise CliError(f"There is no entry {name}.", why, "--wrap NAME")
        edits: list[Edit] = []
        for place, node in entries:
            if not self._names or place[-1] in self._names:
                edits += self._edits_of(place, node, text)
        for edit in sorted(edits, key=lambda each: each.start, reverse=True):
            text = text[: edit.start] + edit.text + text[edit.end :]
        return text

    def _edits_of(self, place: Place, node: Node, text: str) -> list[Edit]:
        """Return the changes of one entry."""
        changes = self._changes
        name = place[-1]
        if _has_wrap(node) != self._undo:
            changes.kept.append(name)
            return []
        try:
            edits = self._undone(place, node, text) if self._undo else _wrap(name, node, text)
        except _Unfit as unfit:
            changes.left[name] = str(unfit)
            if name in self._names:
                raise CliError(
                    f"{name} cannot be changed.", str(unfit), "it stays as it is"
                ) from None
            return []
        (changes.changed if edits else changes.kept).append(name)
        return edits

    def _undone(self, place: Place, node: Node, text: str) -> list[Edit]:
        """Return the changes that take the wrap off: the old bytes if they still mean the same."""
        plain = _unwrapped_entry(node.plain(), self._program)
        copies = list(self._copies(place))
        for copy, before in copies:
            if _is_same(before.plain(), plain):
                return [Edit(node.start, node.end, copy[before.start : before.end])]
        is_own = any(before.plain() == node.plain() for _, before in copies)
        if is_own and not self._names:
            return []  # the user wrapped it, so `--wrap-all` has not changed it
        if "command" in plain:
            return _unwrap_in_place(node, text)
        return [Edit(node.start, node.end, _written(plain, node, text))]

    def _copies(self, place: Place) -> Iterator[tuple[str, Node]]:
        """Yield an entry as it is in the copies of the file, the newest first."""
        for _, copy in self._file.backups():
            try:
                entries = dict(self._entries(copy))
            except CliError:
                continue  # the copy is damaged
            if place in entries:
                yield copy, entries[place]


# --- one entry ------------------------------------------------------------------------------------


class _Unfit(Exception):
    """An entry that cannot be wrapped."""


def _words(plain: Any) -> list[str]:
    """Return the command line of an entry; none if it is an address or something else."""
    if not isinstance(plain, dict) or not isinstance(plain.get("command"), str):
        return []
    args = plain.get("args", [])
    if not isinstance(args, list) or not all(isinstance(word, str) for word in args):
        return []
    return [plain["command"], *args]


def _has_wrap(node: Node) -> bool:
    return is_wrapped(_words(node.plain()))


def _wrap(name: str, node: Node, text: str) -> list[Edit]:
    """Return the changes that put the wrap on."""
    plain = node.plain()
    if not isinstance(plain, dict):
        raise _Unfit("expected an object")
    if "command" not in plain:
        return _wrap_address(name, node, text)
    if not _words(plain):
        raise _Unfit("expected a string as its command and strings as its args")
    command = node.at("command")
    args = node.at("args")
    assert command is not None
    line = wrapped(name, PlainServer(command=(plain["command"],))).command
    edits = [Edit(command.start, command.end, _json(line[0]))]
    words = [_json(word) for word in line[1:]]
    if args is None:
        gap = _gap(node, text)
        edits.append(Edit(command.end, command.end, f',{gap}"args": [{", ".join(words)}]'))
    elif args.items:
        first = args.items[0].start
        # The words stand as the others do: each on its line, or all on one line.
        space = text[args.start + 1 : first]
        separator = f",{space}" if "\n" in space and "/" not in space else ", "
        edits.append(Edit(first, first, separator.join(words) + separator))
    else:
        edits.append(Edit(args.start, args.end, f"[{', '.join(words)}]"))
    return edits


def _wrap_address(name: str, node: Node, text: str) -> list[Edit]:
    """Return the changes that make an address a command, with its headers as variables."""
    member = next((each for each in _ADDRESSES if node.at(each)), None)
    plain = node.plain()
    headers = plain.get("headers", {})
    if member is None or not isinstance(plain[member], str):
        raise _Unfit("it has no command and no address")
    if str(plain.get("type", "http")) == "sse":
        raise _Unfit("it speaks HTTP with SSE of 2024-11-05, and wirecall speaks Streamable HTTP")
    if not isinstance(headers, dict) or not all(isinstance(v, str) for v in headers.values()):
        raise _Unfit("expected strings in its headers")
    if plain.get("env"):
        raise _Unfit("it has an address and env")
    if "args" in plain:
        raise _Unfit("it has an address and args")
    server = wrapped(name, PlainServer(url=plain[member], headers=headers))
    address = node.at(member)
    assert address is not None
    words = ", ".join(_json(word) for word in server.command[1:])
    line = f'"command": {_json(server.command[0])},{_gap(node, text)}"args": [{words}]'
    edits = [Edit(address.name_start, address.end, line)]
    env = f'"env": {_json(server.env)}'
    if found := node.at("headers"):
        edits.append(Edit(found.name_start, found.end, env))
    elif server.env:
        edits.append(Edit(address.end, address.end, f",{_gap(node, text)}{env}"))
    if found := node.at("type"):
        edits.append(Edit(found.start, found.end, '"stdio"'))
    return edits


def _unwrapped_entry(plain: JsonObject, program: ClientProgram) -> JsonObject:
    """Return an entry without its wrap. An address gets the members that its client has for one."""
    env = plain.get("env", {})
    server = unwrapped(_words(plain), env)
    if server is None:
        raise _Unfit("its command is not complete: expected a command after `wirecall wrap`")
    found = dict(plain)
    if server.url is None:
        found["command"] = server.command[0]
        found["args"] = list(server.command[1:])
        return found
    for member in ("command", "args", "env", "type"):
        found.pop(member, None)
    address: JsonObject = {"type": "http"} if program.is_typed else {}
    address[program.address or "url"] = server.url
    if server.headers:
        address["headers"] = server.headers
    if server.env:
        address["env"] = server.env
    return {**address, **found}


def _is_same(before: Any, after: JsonObject) -> bool:
    """Return whether an old entry means the same as one without its wrap."""
    if not isinstance(before, dict):
        return False

    def normal(entry: JsonObject) -> JsonObject:
        found = {key: value for key, value in entry.items() if value not in ([], {})}
        for name in _ADDRESSES:
            if name in found:
                found["url"] = found.pop(name)
                found.pop("type", None)
                break
        return found

    return normal(before) == normal(after)


def _unwrap_in_place(node: Node, text: str) -> list[Edit]:
    """Take the wrap off an entry that has changed since, and keep the text of its arguments."""
    command = node.at("command")
    args = node.at("args")
    assert command is not None
    assert args is not None
    items = args.items or []
    words = [item.value for item in items]
    place = words.index("--") + 1
    edits = [Edit(command.start, command.end, text[items[place].start : items[place].end])]
    if place + 1 < len(items):
        edits.append(Edit(items[0].start, items[place + 1].start, ""))
    else:
        edits.append(Edit(args.start, args.end, "[]"))
    return edits


def _without_secrets(diff: str, entries: list[Node]) -> str:
    """Return a diff without the values of entries that may be secrets."""
    secrets = {each for node in entries for each in _secrets(node.plain()) if len(each) > SHORT}
    for secret in sorted(secrets, key=len, reverse=True):
        for written in (_json(secret), json.dumps(secret)):
            diff = diff.replace(written[1:-1], "***")
    return diff


def _secrets(plain: Any) -> Iterator[str]:
    """Yield the values of an entry that may be secrets."""
    if not isinstance(plain, dict):
        return
    for member in ("env", "headers"):
        table = plain.get(member)
        for name, value in table.items() if isinstance(table, dict) else ():
            if isinstance(value, str) and (
                looks_secret(name, value) or name.startswith(HEADER_VARIABLE)
            ):
                yield value
    for name in _ADDRESSES:
        if isinstance(plain.get(name), str) and is_secret_address(plain[name]):
            yield plain[name]
    words = _words(plain)
    for before, word in pairwise(words):
        if is_secret_word(before, word):
            yield word


# --- text -----------------------------------------------------------------------------------------


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _gap(node: Node, text: str) -> str:
    """Return what is between two members of an entry: a new line, or a space."""
    first = next(iter((node.members or {}).values()), None)
    if first is None:
        return " "
    # Without the comments that may be there.
    lines = re.findall(r"\r?\n[ \t]*", text[node.start + 1 : first.name_start])
    return lines[-1] if lines else " "


def _written(plain: JsonObject, node: Node, text: str) -> str:
    """Return an entry as text, with the indentation of the one that it replaces."""
    gap = _gap(node, text)
    if "\n" not in gap:
        return _json(plain)
    lines = [f"{_json(name)}: {_json(value)}" for name, value in plain.items()]
    closing = text[: node.end - 1].rpartition("\n")[2]
    end = gap[: gap.index("\n") + 1] + closing[: len(closing) - len(closing.lstrip())]
    return "{" + ",".join(gap + line for line in lines) + end + "}"

"""What a server asks while a call runs: `--answer` answers it in a script, and the user on a terminal, field by field.

A handler of MCP's client must return an answer, and an error in it would reach the server. So a question that cannot be
answered is declined, and `Dialogue.failure` keeps the reason, which the verb raises when the call is over.
"""

import sys
from typing import Any

import click

from wirecall.cli.arguments import Misfit, arguments, check, read, resolved, words
from wirecall.cli.failures import CliError, Exit, no_such
from wirecall.cli.input import reading
from wirecall.cli.output import ask, is_terminal
from wirecall.logs import escaped
from wirecall.mcp.client.host import Form, Visit
from wirecall.mcp.types import Elicited
from wirecall.protocol.messages import JsonObject

answer_option = click.option(
    "--answer",
    "answers",
    multiple=True,
    metavar="FIELD=VALUE",
    help="MCP: the answer to a field of a form that the server asks for; may be repeated.",
)


class Dialogue:
    """The questions of one call, and the answers that the command line gives."""

    def __init__(self, answers: tuple[str, ...]) -> None:
        self.failure: CliError | None = None
        self.asked = False  # the server has sent a form
        self._answers = {word.partition("=")[0].removesuffix(":").split(".")[0].removesuffix("[]"): word for word in answers}
        if wrong := next((word for word in answers if "=" not in word or word.startswith(("=", ":="))), None):
            raise CliError(f"{wrong!r} is not an answer.", "expected a field and a value", "--answer size=large")
        self.unused = set(self._answers)

    def elicit(self, form: Form) -> JsonObject | Elicited:
        """Fill in a form: from the command line, then on the terminal."""
        self.asked = True
        schema = form.requested_schema
        stated = schema.get("properties")
        fields: JsonObject = stated if isinstance(stated, dict) else {}
        needed = [name for name in schema.get("required") or () if name in fields]
        try:
            # 1. Answers of the command line, each converted by the schema of its field.
            given = tuple(word for name, word in self._answers.items() if name in fields)
            free = {**schema, "required": [], "additionalProperties": True}
            content: Any = arguments(given, None, free, help="correct the value of --answer")
            self.unused -= fields.keys()

            # 2. The other fields, on the terminal.
            open = [name for name in fields if name not in content]
            if not (is_terminal(sys.stdin) and is_terminal(sys.stderr)):
                missing = [name for name in open if name in needed and "default" not in fields[name]]
                if missing and self.unused:
                    raise no_such("field", min(self.unused), list(fields), f"--answer {missing[0]}=...")
                if missing or not (content or not fields):
                    raise CliError(
                        "The server asks a question, and there is no terminal.",
                        escaped(form.message),
                        " ".join(f"--answer {name}=..." for name in missing or fields),
                    )
                return dict(content)
            with reading():
                if open or not fields:
                    click.echo(f"? {escaped(form.message)}", err=True)
                for name in open:
                    value = self._field(name, fields[name], schema, name in needed)
                    content |= {} if value is None else {name: value}
                if not fields and not click.confirm("Agree?", err=True):
                    return Elicited("decline")
            return dict(content)
        except click.Abort:
            click.echo(err=True)
            self.failure = _declined("The question was not answered.", "you ended the input")
        except CliError as error:
            self.failure = _declined(error.what, error.why, error.next)
        return Elicited("decline")

    def visit(self, visit: Visit) -> bool:
        """Ask the user to open a page. It is shown, and not opened."""
        question = f"{visit.message} The server asks you to visit {visit.url} on the host {visit.host}. Have you done so?"
        with reading():
            agreed = ask(question)
        if agreed is None:
            why = f"{escaped(visit.message)} {visit.url}".strip()
            self.failure = _declined("The server asks for a visit to a page, and there is no terminal.", why)
        return bool(agreed)

    @staticmethod
    def _field(name: str, field: Any, root: JsonObject, is_needed: bool) -> Any:
        """Ask for one field, until its value fits. None leaves it out: it is optional, or has a default."""
        found = resolved(field, root)
        about = [words(field, root), *([str(found["description"])] if found.get("description") else [])]
        may_skip = not is_needed or "default" in found
        about += [f"default {found['default']!r}" if "default" in found else "optional"] if may_skip else []
        while True:
            text = click.prompt(f"  {escaped(name)} ({escaped(', '.join(about))})", default="", show_default=False, err=True)
            if not text and may_skip:
                return None
            try:
                value = read(text, field, root, name)
                check(value, field, root, name)
                if text:
                    return value
                raise Misfit(name, words(field, root), "nothing")
            except Misfit as misfit:
                click.echo(f"  {escaped(name)} must be {escaped(misfit.args[1])}, got {escaped(misfit.args[2])}", err=True)


def _declined(what: str, why: str = "", next: str = "") -> CliError:
    return CliError(what, why, next, exit=Exit.INTERRUPTED, type="unanswered")

"""The answers to what a server asks while a call runs.

`--answer` gives them in a script; the terminal asks for the others, field by field.
"""

import sys
from typing import TYPE_CHECKING, Any

import click

from wirecall.cli.arguments import Misfit, arguments, check, read, resolved, words
from wirecall.cli.failures import CliError, Exit, no_such
from wirecall.cli.terminal import ask, is_terminal, reading
from wirecall.contract.lock import members, required
from wirecall.errors import InvalidParams
from wirecall.logs import escaped
from wirecall.mcp.types import Elicited
from wirecall.protocol.messages import JsonObject

if TYPE_CHECKING:
    from wirecall.mcp.client.inbox import Form, Visit

answer_option = click.option(
    "--answer",
    "answers",
    multiple=True,
    metavar="FIELD=VALUE",
    help="MCP: the answer to a field of a form that the server asks for; may be repeated.",
)


class Dialogue:
    """The questions of one call, and the answers that the command line gives.

    A handler of MCP's client must return an answer, and an error in it would reach the server. So a
    question without an answer is declined, and `failure` keeps the reason, which the verb raises
    when the call is over. The question of a task stays open instead (`declines=False`): the task
    waits for a command that has the answer.
    """

    def __init__(self, answers: tuple[str, ...], *, declines: bool = True) -> None:
        for word in answers:
            if "=" not in word or word.startswith(("=", ":=")):
                why = "expected a field and a value"
                raise CliError(f"{word!r} is not an answer.", why, "--answer size=large")
        self.failure: CliError | None = None
        # The server has sent a form.
        self.asked = False
        self._declines = declines
        # The words of the command line, by the field that they answer.
        self._answers = {
            word.partition("=")[0].removesuffix(":").split(".")[0].removesuffix("[]"): word
            for word in answers
        }
        # The fields that no form of the server has had.
        self.unused = set(self._answers)

    def elicit(self, form: "Form") -> JsonObject | Elicited:
        """Fill in a form: from the command line, then on the terminal."""
        self.asked = True
        try:
            content = self._given(form.requested_schema)
            if not (is_terminal(sys.stdin) and is_terminal(sys.stderr)):
                self._require_all(form, content)
                return content
            return self._asked(form, content)
        except click.Abort:
            click.echo(err=True)
            return self._unanswered("The question was not answered.", "you ended the input")
        except CliError as error:
            return self._unanswered(error.what, error.why, error.next)

    def _given(self, schema: JsonObject) -> JsonObject:
        """Return the answers of the command line, each converted by the schema of its field."""
        fields = members(schema)
        given = tuple(word for name, word in self._answers.items() if name in fields)
        free = {**schema, "required": [], "additionalProperties": True}
        content = arguments(given, None, free, help="correct the value of --answer")
        self.unused -= fields.keys()
        return dict(content)

    def _require_all(self, form: "Form", content: JsonObject) -> None:
        """Raise an error if the form needs more answers than the command line gives."""
        fields = members(form.requested_schema)
        needed = required(form.requested_schema)
        missing = [
            name
            for name, field in fields.items()
            if name in needed and name not in content and "default" not in field
        ]
        if missing and self.unused:
            raise no_such("field", min(self.unused), list(fields), f"--answer {missing[0]}=...")
        if missing or (fields and not content):
            raise CliError(
                "The server asks a question, and there is no terminal.",
                escaped(form.message),
                " ".join(f"--answer {name}=..." for name in missing or fields),
            )

    def _asked(self, form: "Form", content: JsonObject) -> JsonObject | Elicited:
        """Return the content with the other fields, for which it asks on the terminal."""
        schema = form.requested_schema
        fields = members(schema)
        open = [name for name in fields if name not in content]
        with reading():
            if open or not fields:
                click.echo(f"? {escaped(form.message)}", err=True)
            for name in open:
                value = self._field(name, fields[name], schema, name in required(schema))
                if value is not None:
                    content[name] = value
            if not fields and not click.confirm("Agree?", err=True):
                return Elicited("decline")
        return content

    def _unanswered(self, what: str, why: str, next: str = "") -> Elicited:
        """Keep the reason why a question has no answer, and decline it or leave it open."""
        self.failure = CliError(what, why, next, exit=Exit.INTERRUPTED, type="unanswered")
        if not self._declines:
            raise InvalidParams("the question stays open")
        return Elicited("decline")

    def visit(self, visit: "Visit") -> bool:
        """Ask the user to open a page. It is shown, and not opened."""
        question = (
            f"{visit.message} The server asks you to visit {visit.url} on the host {visit.host}. "
            "Have you done so?"
        )
        with reading():
            agreed = ask(question)
        if agreed is None:
            why = f"{escaped(visit.message)} {visit.url}".strip()
            self._unanswered(
                "The server asks for a visit to a page, and there is no terminal.", why
            )
        return bool(agreed)

    @staticmethod
    def _field(name: str, field: Any, root: JsonObject, is_needed: bool) -> Any:
        """Ask for one field until its value fits.

        None omits it: it is optional, or has a default.
        """
        found = resolved(field, root)
        may_skip = not is_needed or "default" in found
        about = [words(field, root)]
        if found.get("description"):
            about.append(str(found["description"]))
        if "default" in found:
            about.append(f"default {found['default']!r}")
        elif may_skip:
            about.append("optional")
        while True:
            text = click.prompt(
                f"  {escaped(name)} ({escaped(', '.join(about))})",
                default="",
                show_default=False,
                err=True,
            )
            if not text and may_skip:
                return None
            try:
                value = read(text, field, root, name)
                check(value, field, root, name)
                if text:
                    return value
                raise Misfit(name, words(field, root), "nothing")
            except Misfit as misfit:
                _, expected, got = misfit.args
                line = f"  {escaped(name)} must be {escaped(expected)}, got {escaped(got)}"
                click.echo(line, err=True)

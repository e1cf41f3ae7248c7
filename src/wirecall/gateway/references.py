"""References: values of `wirecall.toml` that are somewhere else, because they are secret.

| Reference | Value |
| --- | --- |
| `env:NAME` | the variable NAME of this process |
| `file:PATH` | the first line of a file |
| `secret:UPSTREAM.NAME` | an entry of `secrets.toml`, which only its owner can read |

Any other string is its own value. `References` keeps no values: each use reads the one
that there is now. Errors name the reference and never its value.
"""

import os
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path

from wirecall.config import is_reference
from wirecall.errors import UsageError
from wirecall.files import IS_PORTABLE, replace_file

# Beside wirecall.toml.
SECRETS = ".wirecall/secrets.toml"
_HEAD = """\
# Secrets of wirecall.toml: secret:github.TOKEN is TOKEN in the section [github].
# Only you can read this file. `wirecall gateway import` rewrites it without its comments.
"""
# Permissions of other users.
_OTHERS = 0o077


class References:
    """The values of references."""

    def __init__(
        self, secrets: str | os.PathLike[str] = SECRETS, variables: Mapping[str, str] | None = None
    ) -> None:
        self._secrets = Path(secrets)
        self._variables = os.environ if variables is None else variables

    def value(self, text: str) -> str:
        """Return the value of a reference; a plain string is its own value."""
        kind, colon, name = text.partition(":")
        if not colon or not is_reference(text):
            return text
        if kind == "env":
            return self._variable(name)
        if kind == "file":
            return _first_line(Path(name).expanduser())
        return self._secret(name)

    def values(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Return the values of several references by their names."""
        return {name: self.value(text) for name, text in texts.items()}

    def _variable(self, name: str) -> str:
        found = self._variables.get(name)
        if not found:
            raise UsageError(
                f"env:{name} has no value.",
                f"the variable {name} is not set, or empty",
                f"export {name}=... where the server starts",
            )
        return found

    def _secret(self, name: str) -> str:
        section, _, key = name.partition(".")
        found = read_secrets(self._secrets).get(section, {}).get(key)
        if found is None:
            raise UsageError(
                f"secret:{name} has no value.",
                f"{self._secrets} has no {key!r} in its section [{section}]",
                f'add it there: [{section}] {key_of(key)} = "..."',
            )
        return found


def _first_line(path: Path) -> str:
    """Return the first line of a file, without its end."""
    try:
        with path.open(encoding="utf-8") as file:
            line = file.readline().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        fix = "name a text file that this user can read"
        raise UsageError(f"file:{path} has no value.", f"it cannot be read: {why}", fix) from None
    if not line:
        raise UsageError(
            f"file:{path} has no value.", "its first line is empty", "write the value there"
        )
    return line


# --- the file of secrets --------------------------------------------------------------------------


def read_secrets(path: Path) -> dict[str, dict[str, str]]:
    """Return the secrets by upstream and name. A file that others can read is refused."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read()
    except FileNotFoundError:
        return {}
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageError(f"{path} cannot be read.", why, "let this user read it") from None
    if mode & _OTHERS and not IS_PORTABLE:
        why = f"expected mode 600, got {mode:o}"
        raise UsageError(f"Other users can read {path}.", why, f"chmod 600 {path}")
    try:
        tree = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        # The message of the decoder may quote a value, so only its place is shown.
        place = re.search(r"at line \d+", str(error))
        why = place[0] if place else "it is not UTF-8"
        raise UsageError(f"{path} is not TOML.", why, "see https://toml.io") from None
    for section, values in tree.items():
        if not isinstance(values, dict) or not all(isinstance(v, str) for v in values.values()):
            why = f"expected strings in sections, got something else at {section!r}"
            raise UsageError(f"{path} has another shape.", why, '[github] TOKEN = "..."')
    return tree


def write_secrets(path: Path, secrets: Mapping[str, Mapping[str, str]]) -> None:
    """Write the secrets into a file that only its owner can read.

    A new folder gets a `.gitignore` that keeps all of it out of a repository.
    """
    folder = path.parent
    if not folder.exists():
        folder.mkdir(mode=0o700, parents=True)
        (folder / ".gitignore").write_text("*\n")
    text = _HEAD
    for section, values in secrets.items():
        if values:
            lines = "".join(f"{key_of(name)} = {quoted(value)}\n" for name, value in values.items())
            text += f"\n[{key_of(section)}]\n{lines}"
    replace_file(path, text.encode())


# --- TOML -----------------------------------------------------------------------------------------

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def quoted(text: str) -> str:
    """Return a string of TOML."""

    def escaped(match: re.Match[str]) -> str:
        sign = match[0]
        return _ESCAPES.get(sign) or f"\\u{ord(sign):04x}"

    return '"' + re.sub(r'["\\\x00-\x1f\x7f]', escaped, text) + '"'


def key_of(name: str) -> str:
    """Return a key of TOML, in quotes if it needs them."""
    if re.fullmatch(r"[A-Za-z0-9_-]+", name):
        return name
    return quoted(name)

"""`wirecall call --save FILE`: writes the images, sounds and bytes of a result into files."""

import base64
import binascii
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wirecall.cli.arguments import branches, resolved
from wirecall.cli.failures import CliError, Exit
from wirecall.cli.terminal import Printer, result_of
from wirecall.contract.lock import members
from wirecall.protocol.messages import JsonObject


def check_path(path: str) -> None:
    """Raise before anything is sent if a file cannot be written."""
    file = Path(path)
    if file.is_dir():
        raise CliError(
            f"{path} is a folder.", "--save needs the name of a file", "--save picture.png"
        )
    if not file.parent.is_dir():
        raise CliError(f"There is no folder {file.parent}.", "nothing was sent", "create it first")


def save(out: Printer, path: str, found: list[bytes]) -> None:
    """Write binary parts into a file, or into numbered files if there are several."""
    if not found:
        raise CliError(
            "There is nothing to save.",
            "the result has no image, sound or bytes, and it was printed",
            "drop --save",
            exit=Exit.FAULT,
            ran="yes",
        )
    first = Path(path)
    for number, data in enumerate(found, 1):
        file = first
        if len(found) > 1:
            file = first.with_name(f"{first.stem}-{number}{first.suffix}")
        try:
            file.write_bytes(data)
        except OSError as error:
            raise CliError(
                f"{file} cannot be written.",
                error.strerror or str(error),
                exit=Exit.FAULT,
                ran="yes",
            ) from None
        unit = "bytes"
        if len(data) == 1:
            unit = "byte"
        out.note(f"{file}  {len(data)} {unit}", "ok")


def binaries(value: Any, output: JsonObject | None) -> list[bytes]:
    """Return the binary parts of a result: of its content, or of the members that are base64."""
    parts = [
        getattr(item, name, None)
        for item in getattr(value, "content", ())
        for name in ("data", "blob")
    ]
    found = [data for data in parts if isinstance(data, bytes)]
    if found or output is None:
        return found
    plain = result_of(value)
    schema = output
    # Before 2026-07-28 a result of MCP must be an object.
    if list(members(output)) == ["result"] and not isinstance(plain, dict):
        schema = members(output)["result"]
    return list(_decoded(plain, schema, output))


def _decoded(value: Any, schema: Any, root: JsonObject) -> Iterator[bytes]:
    """Yield the bytes in a value, by its schema."""
    found = resolved(schema, root)
    for part in branches(found, root):
        yield from _decoded(value, part, root)
    if isinstance(value, str) and found.get("contentEncoding") == "base64":
        try:
            yield base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            return
    elif isinstance(value, dict):
        declared = members(found)
        others = found.get("additionalProperties")
        for name in (*declared, *(name for name in value if name not in declared)):
            if name in value:
                yield from _decoded(value[name], declared.get(name, others), root)
    elif isinstance(value, list):
        first = found.get("prefixItems", ())
        for index, each in enumerate(value):
            member = found.get("items")
            if index < len(first):
                member = first[index]
            yield from _decoded(each, member, root)

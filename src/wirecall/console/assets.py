"""The files of the console's pages, from the package.

1. All files are served below one folder, whose name is the digest of all of them. So the pages may
   import each other by relative names, and a browser may keep every file without asking again.
2. Files are compressed once, when the first page is asked for.
3. `manifest.json` names the one file that another project wrote, with its licence and its digest.
"""

import gzip
import hashlib
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from msgspec import Struct

TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
# Stands for the folder of the files, in `index.html`.
FOLDER = "{folder}"


class Asset(Struct, frozen=True):
    """One file as it is served."""

    media: str
    body: bytes
    # The same, compressed by gzip.
    packed: bytes


class Assets(Struct, frozen=True):
    """All files by path, and the page that loads them."""

    # The folder of the files: "/static/DIGEST".
    folder: str
    by_path: dict[str, Asset]
    page: bytes


@cache
def assets() -> Assets:
    """Return the files, read once."""
    found = dict(_walk(files("wirecall.console") / "static", ""))
    digest = hashlib.sha256()
    for name, body in sorted(found.items()):
        digest.update(f"{name}\0{len(body)}\0".encode())
        digest.update(body)
    folder = f"/static/{digest.hexdigest()[:16]}"
    page = found.pop("index.html").replace(FOLDER.encode(), folder.encode())
    by_path = {}
    for name, body in found.items():
        _, dot, ending = name.rpartition(".")
        by_path[f"{folder}/{name}"] = Asset(TYPES[dot + ending], body, gzip.compress(body, mtime=0))
    return Assets(folder, by_path, page)


def _walk(folder: Traversable, prefix: str) -> "list[tuple[str, bytes]]":
    found = []
    for each in folder.iterdir():
        name = f"{prefix}{each.name}"
        if each.is_dir():
            found += _walk(each, f"{name}/")
        else:
            found.append((name, each.read_bytes()))
    return found

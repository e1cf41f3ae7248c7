"""The README that a package index shows: README.md with absolute links.

An index has no files beside the page, so a link to `docs/mcp.md` would lead nowhere. Here each
becomes an address in the repository, at the tag of the version that is built. The repository's
address is `Source` in `[project.urls]`.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# A link or a picture in Markdown, unless its target is an address or a heading of the page.
RELATIVE = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#)([^)\s]+)\)")
# The same in HTML, which README uses for a picture of two schemes.
IN_HTML = re.compile(r'\b(srcset|src|href)="(?!https?:|#)([^"\s]+)"')


def absolute(text: str, source: str, version: str) -> str:
    """Return a page whose links and pictures are found from everywhere."""

    def link(found: re.Match[str]) -> str:
        mark, label, target = found.groups()
        # The host shows a page as a page, and sends a picture as a picture.
        kind = "raw" if mark else "blob"
        return f"{mark}[{absolute(label, source, version)}]({source}/{kind}/v{version}/{target})"

    def attribute(found: re.Match[str]) -> str:
        name, target = found.groups()
        kind = "blob" if name == "href" else "raw"
        return f'{name}="{source}/{kind}/v{version}/{target}"'

    return IN_HTML.sub(attribute, RELATIVE.sub(link, text))


class CustomMetadataHook(MetadataHookInterface):
    """Hatchling finds the class by this name."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the README of the package."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        page = absolute(text, metadata["urls"]["Source"], metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": page}

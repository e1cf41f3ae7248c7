"""What the pages of the site need beyond their Markdown.

MkDocs calls these functions (`hooks:` in mkdocs.yml).

1. Pages link to files of the checkout outside of docs/, such as `../examples/shop.py`. The site has
   copies of these files.
2. A diagram in Mermaid would need a script of another host. The site shows the picture of the same
   table instead.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./([^)#]+)\)")
MERMAID = re.compile(r"^```mermaid\n.*?^```$", re.MULTILINE | re.DOTALL)
STATES = (
    "![The states of a run and the events between them; "
    "the tables below have the same content](pictures/run.svg)"
)


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside of docs/ that pages link to."""
    pages = [Path(page.abs_src_path).read_text() for page in files.documentation_pages()]
    for target in sorted({target for page in pages for _, target in OUTSIDE.findall(page)}):
        if (ROOT / target).is_file():
            files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page whose links lead to the copies.

    A folder has no copy, so its name stays without a link.
    """

    def link(found: re.Match[str]) -> str:
        if (ROOT / found[2]).is_file():
            return f"[{found[1]}]({found[2]})"
        return found[1]

    return MERMAID.sub(STATES, OUTSIDE.sub(link, markdown))

"""What the pages of the site need beyond their Markdown: MkDocs calls these functions (`hooks:` in mkdocs.yml).

Pages link to files of the checkout outside of docs/, such as `../examples/shop.py`. The site has copies of these files.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./([^)#]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside of docs/ that pages link to."""
    pages = [Path(page.abs_src_path).read_text() for page in files.documentation_pages()]
    for target in sorted({target for page in pages for _, target in OUTSIDE.findall(page)}):
        if (ROOT / target).is_file():
            files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page whose links lead to the copies; a folder has none, so its name stays without a link."""

    def link(found: re.Match[str]) -> str:
        return f"[{found[1]}]({found[2]})" if (ROOT / found[2]).is_file() else found[1]

    return OUTSIDE.sub(link, markdown)

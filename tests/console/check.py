"""Checks the types of the console's scripts with TypeScript: `make console-check`.

The scripts have their types in comments. They are copied beside a declaration of the vendored file,
which has none.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mcp.node import installed, node

TYPESCRIPT = "typescript@5.9.3"
STATIC = Path(__file__).parents[2] / "src" / "wirecall" / "console" / "static"
LIT = """\
export type TemplateResult = { readonly brand: unique symbol };
export function html(strings: TemplateStringsArray, ...values: unknown[]): TemplateResult;
export function svg(strings: TemplateStringsArray, ...values: unknown[]): TemplateResult;
export const nothing: unique symbol;
export function render(value: unknown, container: HTMLElement): unknown;
"""
OPTIONS = [
    *("--noEmit", "--allowJs", "--checkJs", "--strict", "--noUnusedLocals"),
    *("--target", "es2023", "--module", "es2022", "--moduleResolution", "bundler"),
    *("--lib", "es2023,dom,dom.iterable"),
]


def check() -> int:
    """Return the exit code of TypeScript."""
    modules = installed(TYPESCRIPT)
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "static"
        shutil.copytree(STATIC, copied)
        (copied / "lit-html.js").unlink()
        (copied / "lit-html.d.ts").write_text(LIT)
        program = modules / "typescript" / "bin" / "tsc"
        done = subprocess.run([node(), program, *OPTIONS, "app.js"], cwd=copied, timeout=300)
    return done.returncode


if __name__ == "__main__":
    sys.exit(check())

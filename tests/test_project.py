"""The pages for contributors: what they name exists, and their commands work."""

import re
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[1]
PAGES = ["CONTRIBUTING.md", "SECURITY.md", "VERSIONING.md"]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))

# A path of the repository has a folder or an ending: `src/wirecall/app.py`, `CHANGELOG.md`.
NAMED = re.compile(r"`((?:src|tests|docs|examples|bench|deploy)/[\w./-]*|[\w-]+\.(?:md|toml))`")
LINKED = re.compile(r"\]\((?!https?:)([^)#]+)")
TARGET = re.compile(r"\bmake ((?:[a-z]+ ?)+)")

# Files of users' projects, and no files of this one.
OF_USERS = {"wirecall.toml"}


@pytest.mark.parametrize("page", PAGES)
def test_project_page_names_files_that_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    named = {*NAMED.findall(text), *LINKED.findall(text)} - OF_USERS
    assert named, "a page that names no file leads nowhere"
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", [*PAGES, ".github/PULL_REQUEST_TEMPLATE.md"])
def test_project_page_names_targets_that_make_has(page: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = (ROOT / page).read_text()
    code = re.findall(r"`([^`\n]+)`|^    (.+)$", text, re.MULTILINE)
    commands = [inline or block for inline, block in code]
    named = {
        target
        for command in commands
        for words in TARGET.findall(command)
        for target in words.split()
    }
    assert named <= targets


def test_contributing_walks_name_what_the_code_has() -> None:
    """A walk leads through names of the code, so a renamed one must change the page."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = {
        "src/wirecall/mcp/revisions.py": ["NAMES"],
        "src/wirecall/mcp/server/server.py": ["class Server", "def add"],
        "src/wirecall/ledger/base.py": ["_MODULES", "class Ledger"],
        "src/wirecall/protocol/sender.py": ["class Sender"],
        "src/wirecall/protocol/receipt.py": ["class Receipt"],
        "src/wirecall/cli/__init__.py": ["VERBS"],
        "src/wirecall/cli/failures.py": ["class Exit"],
        "src/wirecall/cli/terminal.py": ["class Printer"],
    }
    for path, names in named.items():
        source = (ROOT / path).read_text()
        for name in names:
            assert name in source, path
            assert name.split()[-1] in text, name


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_issue_form_asks_for_something(form: Path) -> None:
    parsed = yaml.safe_load(form.read_text())
    assert parsed["name"]
    assert parsed["description"]
    fields = parsed["body"]
    assert any(field.get("validations", {}).get("required") for field in fields)
    ids = [field["id"] for field in fields]
    assert len(ids) == len(set(ids))


def test_editorconfig_and_ruff_agree_on_the_width() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    editor = (ROOT / ".editorconfig").read_text()
    width = re.search(r"^line-length = (\d+)$", project, re.MULTILINE)
    assert width is not None
    assert f"max_line_length = {width[1]}" in editor


def test_pre_commit_runs_the_check_of_the_project() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["entry"] for hook in hooks] == ["make check"]

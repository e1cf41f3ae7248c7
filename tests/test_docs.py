"""Every example in README and docs is run, and its shown output compared.

`python` blocks of a page run one after another in one namespace; `pycon` blocks are doctests in the
same namespace; in `console` blocks, each `$ command` is run by a shell and what is shown below it
is what it prints.
"""

import doctest
import gc
import logging
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import (
    docs_errors,
    docs_frameworks,
    docs_gateway,
    docs_picture,
    docs_rules,
    docs_run,
    docs_tests,
)
from tests.frameworks.__main__ import NODE, PYTHON

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("**/*.md")),
]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Commands that run the whole project, this test included.
TOO_LARGE = ("make ",)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Undo the logging that a page has set up, before the next test.

    A page has cycles, so its handlers and their filters remain until the collector has run.
    """
    before = {logger: (logger.level, list(logger.handlers)) for logger in all_loggers()}
    yield
    for logger in all_loggers():
        if logger in before:
            level, handlers = before[logger]
            logger.setLevel(level)
            logger.handlers[:] = handlers
        else:
            logger.handlers.clear()
    gc.collect()


def all_loggers() -> list[logging.Logger]:
    known = logging.Logger.manager.loggerDict.values()
    return [logging.getLogger(), *(each for each in known if isinstance(each, logging.Logger))]


# jsonrpcserver, which a guide compares with wirecall, reads its schema in a deprecated way when it
# is imported.
@pytest.mark.filterwarnings("ignore:(read|open)_text is deprecated:DeprecationWarning")
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.usefixtures("quiet")
def test_examples(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / page).read_text()
    namespace: dict[str, Any] = {"__name__": page}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, page, type(sys)(page))
    sys.modules[page].__dict__.update(namespace)
    namespace = sys.modules[page].__dict__
    for language, code in BLOCK.findall(text):
        if language == "python":
            exec(compile(code, page, "exec"), namespace)
        elif language == "pycon":
            check_session(code, page, namespace)
        elif language == "console":
            check_console(code)


def check_session(code: str, page: str, namespace: dict[str, Any]) -> None:
    session = doctest.DocTestParser().get_doctest(code, namespace, page, page, 0)
    session.globs = namespace  # not a copy: later blocks use the names of this one
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    report: list[str] = []
    runner.run(session, out=report.append, clear_globs=False)
    assert session.examples
    assert not report, "".join(report)


def check_console(code: str) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    for command, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", code, re.MULTILINE):
        if command.startswith(TOO_LARGE):
            continue
        run = subprocess.run(
            command,
            shell=True,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.stdout == expected, run.stderr


def test_testing_page_shows_tests_that_pass(tmp_path: Path) -> None:
    blocks = [
        code
        for language, code in BLOCK.findall((ROOT / "docs" / "testing.md").read_text())
        if language == "python"
    ]
    (tmp_path / "test_shop.py").write_text("\n".join(blocks))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "test_shop.py",
    ]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "3 passed" in run.stdout, run.stdout + run.stderr


def test_proxy_forwards_the_metadata_that_a_client_without_a_token_reads() -> None:
    passed = re.findall(
        r"location \^~ (\S+) \{\s+proxy_pass", (ROOT / "deploy" / "nginx.conf").read_text()
    )
    assert passed == ["/.well-known/oauth-protected-resource"]


def test_index_has_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    folder = ROOT / "docs"
    assert all(
        f"({path.relative_to(folder)})" in index
        for path in [*folder.glob("*.md"), *folder.glob("reference/*.md")]
        if path.name != "index.md"
    )
    frameworks = (folder / "frameworks" / "index.md").read_text()
    assert all(
        f"({path.name})" in frameworks
        for path in folder.glob("frameworks/*.md")
        if path.name != "index.md"
    )


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / target).exists(), target


def test_errors_page_is_up_to_date() -> None:
    assert docs_errors.PAGE.read_text() == docs_errors.page(), "run: python -m tests.docs_errors"


def test_docs_rules_page_has_every_cited_rule_and_its_tests() -> None:
    assert docs_rules.PAGE.read_text() == docs_rules.page(), "run: python -m tests.docs_rules"


def test_docs_tests_page_leads_to_every_test_module() -> None:
    assert docs_tests.PAGE.read_text() == docs_tests.page(), "run: python -m tests.docs_tests"


def test_states_of_runs_and_receipts_are_up_to_date() -> None:
    assert docs_run.PAGE.read_text() == docs_run.page(), "run: python -m tests.docs_run"


def test_docs_explain_every_setting_of_a_gateway() -> None:
    assert docs_gateway.PAGE.read_text() == docs_gateway.page(), "run: python -m tests.docs_gateway"


def test_pages_of_frameworks_show_the_programs_that_are_run() -> None:
    found = {path.stem: path.read_text() for path in docs_frameworks.FOLDER.glob("*.md")}
    assert found == docs_frameworks.pages(), "run: python -m tests.docs_frameworks"
    tried = {each.name for each in docs_frameworks.FRAMEWORKS}
    assert tried == {*PYTHON, *NODE}


@pytest.mark.parametrize("name", ["tutorial_server.py", "tutorial_client.py"])
def test_tutorial_shows_the_whole_programs_that_are_run(name: str) -> None:
    """A reader saves each block as the file that the page names, and runs it."""
    page = (ROOT / "docs" / "tutorial.md").read_text()
    _, _, code = (ROOT / "examples" / name).read_text().partition('"""\n\n')
    _, _, after = page.partition(f"Save this as `{name}`")
    _, first = BLOCK.findall(after)[0]
    assert first == code


def test_compared_page_names_the_versions_that_its_sessions_run_with() -> None:
    page = (ROOT / "docs" / "compared.md").read_text()
    pinned = dict(
        re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    assert re.search(r"as of [A-Z][a-z]+ 20\d\d", page)
    assert f"**FastMCP {pinned['fastmcp']}**" in page
    assert f"(`mcp` {pinned['mcp']})" in page
    for name in ("jsonrpcserver", "json-rpc", "pjrpc"):
        assert f"**{name} {pinned[name]}**" in page


def test_picture_of_a_run_is_up_to_date() -> None:
    assert docs_picture.PICTURE.read_text() == docs_picture.picture(), (
        "run: python -m tests.docs_picture"
    )


@pytest.mark.parametrize("name", ["architecture", "batch", "references"])
def test_other_pictures_are_up_to_date(name: str) -> None:
    script = ROOT / "docs" / "pictures" / "draw.py"
    assert script.with_name(f"{name}.svg").read_text() == runpy.run_path(str(script))[name](), (
        f"run: python {script}"
    )


def test_pictures_have_an_alt_text_and_a_dark_scheme() -> None:
    pages = [(ROOT / page).read_text() for page in PAGES]
    shown = [
        (text, name)
        for page in pages
        for text, name in re.findall(r"!\[(.*?)\]\((?:docs/)?(pictures/\S+\.svg)\)", page)
    ]
    assert {name for _, name in shown} == {
        f"pictures/{path.name}" for path in (ROOT / "docs" / "pictures").glob("*.svg")
    }
    for text, name in shown:
        assert len(text) > 20, name
        assert "prefers-color-scheme: dark" in (ROOT / "docs" / name).read_text(), name


def test_pictures_of_the_console_come_in_both_schemes() -> None:
    shown = re.findall(
        r"!\[(.*?)\]\(pictures/(\S+)\.png#only-(light|dark)\)",
        (ROOT / "docs/console.md").read_text(),
    )
    names = {path.stem: path for path in (ROOT / "docs" / "pictures").glob("*.png")}
    assert {name for _, name, _ in shown} == names.keys()
    for text, name, scheme in shown:
        assert len(text) > 20, name
        assert name.endswith(scheme)
        assert names[name].stat().st_size < 150_000, name


def test_docs_explain_every_member_of_a_context() -> None:
    from wirecall import Context

    page = (ROOT / "docs" / "context.md").read_text()
    explained = re.findall(r"^\| `ctx\.(\w+)", page, re.MULTILINE)
    assert sorted(explained) == [name for name in dir(Context) if not name.startswith("_")]


def test_docs_explain_every_field_of_limits() -> None:
    from wirecall import Limits

    page = (ROOT / "docs" / "operating.md").read_text()
    assert all(f"| `{field}` |" in page for field in Limits.__struct_fields__)


def test_docs_explain_every_term_of_a_command() -> None:
    from wirecall.server.method import Terms

    page = (ROOT / "docs" / "commands.md").read_text()
    assert all(
        f"| `{field}` |" in page for field in Terms.__struct_fields__ if field != "reconcile"
    )
    assert "reconcile=" in page

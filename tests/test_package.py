"""The package: its files, what an index shows of it, and the workflows that test and publish it."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from email.message import Message
from email.parser import Parser
from importlib import metadata as distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml  # type: ignore[import-untyped]
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHONS = ["3.11", "3.12", "3.13", "3.14", "3.15"]
PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))


@pytest.fixture(scope="module")
def wheel() -> Iterator[Path]:
    """The wheel, built from the checkout as an installer would build it."""
    pytest.importorskip("hatchling", reason="the wheel is built with hatchling")
    with TemporaryDirectory(prefix="wirecall-") as folder:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        yield next(Path(folder).glob("*.whl"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as files:
        name = next(name for name in files.namelist() if name.endswith("/METADATA"))
        return Parser().parsestr(files.read(name).decode())


def shown(metadata: Message) -> str:
    """Return the page that an index shows."""
    page = metadata.get_payload()
    assert isinstance(page, str)
    return page


def test_package_readme_has_absolute_links_to_files_that_exist(metadata: Message) -> None:
    base = PROJECT["project"]["urls"]["Source"]
    tag = f"v{metadata['Version']}"
    links = re.findall(r"(!?)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)]+)\)", shown(metadata))
    in_html = re.findall(r'\b(?:srcset|src)="([^"]+)"', shown(metadata))
    assert len(in_html) == 2
    links += [("!", link) for link in in_html]
    made = [(mark, link) for mark, link in links if link.startswith(f"{base}/")]
    assert len(made) > 10
    for mark, link in made:
        kind = "raw" if mark else "blob"
        start = f"{base}/{kind}/{tag}/"
        assert link.startswith(start)
        assert (ROOT / link.removeprefix(start).partition("#")[0]).exists(), link
    others = {link for _, link in links} - {link for _, link in made}
    assert all(link.startswith(("https://", "#")) for link in others)


def test_package_readme_is_the_readme_with_other_links(metadata: Message) -> None:
    def words(page: str) -> str:
        page = re.sub(r'(srcset|src)="[^"]+"', "", page)
        return re.sub(r"\]\([^)]+\)", "]", page).strip()

    assert words(shown(metadata)) == words((ROOT / "README.md").read_text())


def test_package_addresses_begin_with_the_source() -> None:
    urls = PROJECT["project"]["urls"]
    assert {"Source", "Documentation", "Changelog", "Issues"} <= set(urls)
    assert all(url.startswith(urls["Source"]) for url in urls.values())


def test_package_offers_extras_of_users_only(metadata: Message) -> None:
    offered = set(metadata.get_all("Provides-Extra", []))
    assert offered == {"auth", "keyring", "otel", "postgres", "redis"}


def test_package_wheel_has_the_library_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        tops = {name.split("/")[0] for name in files.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"wirecall"}


def test_package_names_every_python_that_is_tested() -> None:
    named = [
        line.rpartition(" ")[2]
        for line in PROJECT["project"]["classifiers"]
        if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", line)
    ]
    assert named == PYTHONS
    assert f"for other in {' '.join(PYTHONS)}; do" in (ROOT / ".ci" / "run").read_text()
    jobs = workflow("ci")["jobs"]
    assert jobs["posix"]["strategy"]["matrix"]["python"] == PYTHONS
    assert jobs["windows"]["strategy"]["matrix"]["python"] == PYTHONS


def test_package_states_what_tests_import_on_every_python() -> None:
    """A library that comes only with one that a Python lacks is missing there."""
    groups = PROJECT["dependency-groups"]
    wanted = [*PROJECT["project"]["dependencies"], *groups["test"], *groups["bench"]]
    for extra in PROJECT["project"]["optional-dependencies"].values():
        wanted += extra
    found: set[str] = set()
    newest = {"python_version": PYTHONS[-1], "python_full_version": f"{PYTHONS[-1]}.0"}
    waiting = [(Requirement(line), "") for line in wanted]
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({**newest, "extra": extra}):
            continue
        extras = {"", *requirement.extras}
        if name in found and extras == {""}:
            continue
        found.add(name)
        with suppress(distributions.PackageNotFoundError):
            for line in distributions.requires(name) or ():
                waiting += [(Requirement(line), each) for each in extras]
    # Tests of these are skipped where they are missing.
    optional = {canonicalize_name(Requirement(line).name) for line in wanted} - found
    provided = distributions.packages_distributions()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for module in imported(path):
            names = {canonicalize_name(each) for each in provided.get(module, ())}
            if names and not names & optional:
                assert names & found, f"{path}: {module} is in none of the groups"


def imported(path: Path) -> set[str]:
    """Return the names of the packages that a module imports when it is loaded."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def test_package_checks_run_before_anything_lands() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "make package" in (ROOT / ".ci" / "run").read_text()
    recipe = makefile.split("\npackage:")[1].split("\n\n")[0]
    assert "twine check --strict" in recipe
    assert "check-wheel-contents" in recipe


def workflow(name: str) -> Any:
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())


def test_ci_workflow_runs_tests_that_exist() -> None:
    jobs = workflow("ci")["jobs"]
    assert jobs["posix"]["strategy"]["matrix"]["os"] == ["ubuntu-latest", "macos-latest"]
    assert jobs["windows"]["runs-on"] == "windows-latest"
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    named = set(re.findall(r"(?:tests|examples|\.ci)/[\w./]+", text))
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
    groups = set(re.findall(r"--group (\w+)", text))
    assert groups and groups <= set(PROJECT["dependency-groups"])


def test_ci_workflow_of_windows_has_what_its_tests_run() -> None:
    """Its tests run without conftest.py, and with the packages of one group."""
    steps = workflow("ci")["jobs"]["windows"]["steps"]
    [command] = [step["run"] for step in steps if "pytest" in step.get("run", "")]
    assert "-p tests.patience" in command
    paths = [ROOT / name for name in re.findall(r"tests/[\w./]+", command)]
    files = [file for path in paths for file in ([path] if path.is_file() else path.glob("*.py"))]
    run = {name for file in files for name in re.findall(r'"-m", "(\w+)"', file.read_text())}
    assert "ruff" in run
    assert run <= {*PROJECT["dependency-groups"]["portable"], "wirecall"}


def test_release_workflow_publishes_without_a_password() -> None:
    publish = workflow("release")["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert "secrets." not in text and "password" not in text.partition("permissions")[2]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_picture_has_colours_for_every_viewer(picture: Path) -> None:
    """A viewer that knows neither variables nor colour schemes still shows ink on paper."""
    source = picture.read_text()
    ElementTree.fromstring(source)
    assert "var(" not in source
    light = re.sub(r"@media[^{]*\{(?:[^{}]|\{[^{}]*\})*\}", "", source)
    assert re.search(r"fill: ?#", light) or 'fill="#' in light


def test_server_without_a_wheel_skips_its_tests_with_the_reason(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text())
    pytester.makepyfile(
        """
        import pytest
        from tests import servers

        @pytest.fixture(scope="session")
        def server():
            return servers._package("no_such_server")

        def test_one(server): ...
        def test_two(server): ...
        def test_three():
            servers._package("no_such_server")
        """
    )
    result = pytester.runpytest_subprocess("-rs", "-p", "no:cacheprovider")
    result.assert_outcomes(skipped=3)
    result.stdout.fnmatch_lines(["*no_such_server is not installed: *wheel*Python*"])

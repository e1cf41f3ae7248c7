"""The files of the pages: complete in the wheel, small, and nothing of others but one file."""

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.mcp.node import installed
from wirecall.console.assets import assets

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "src" / "wirecall" / "console" / "static"
MANIFEST = json.loads((STATIC / "manifest.json").read_text())
# Bytes that a browser loads for all pages.
MOST = 150_000


@pytest.mark.parametrize("name", MANIFEST)
def test_assets_vendored_file_has_its_digest(name: str) -> None:
    entry = MANIFEST[name]
    assert hashlib.sha256((STATIC / name).read_bytes()).hexdigest() == entry["sha256"]
    assert (STATIC / entry["licence_file"]).read_text().startswith("BSD 3-Clause License")


@pytest.mark.parametrize("name", MANIFEST)
def test_assets_vendored_file_is_the_published_one(name: str) -> None:
    entry = MANIFEST[name]
    try:
        modules = installed(f"{entry['package']}@{entry['version']}")
    except (RuntimeError, subprocess.SubprocessError) as error:
        pytest.skip(f"npm cannot be reached: {str(error)[-300:]}")
    published = modules / entry["package"]
    assert (published / name).read_bytes() == (STATIC / name).read_bytes()
    assert (published / "LICENSE").read_bytes() == (STATIC / entry["licence_file"]).read_bytes()


def test_assets_every_script_of_others_is_in_the_manifest() -> None:
    for path in STATIC.rglob("*.js"):
        text = path.read_text()
        is_foreign = "@license" in text or "Copyright" in text
        assert is_foreign == (path.name in MANIFEST), path


def test_assets_name_no_other_host() -> None:
    allowed = {"http://www.w3.org/2000/svg"}
    for path in STATIC.rglob("*"):
        if path.is_file() and path.name not in (*MANIFEST, "lit-html.LICENSE.txt"):
            found = set(
                re.findall(r"(?:https?:)?//[a-z0-9][^\s\"'`<)]*\.[^\s\"'`<)]*", path.read_text())
            )
            assert found <= allowed, path


def test_assets_are_small() -> None:
    sent = [assets().page, *(each.packed for each in assets().by_path.values())]
    assert sum(map(len, sent)) <= MOST


def test_assets_views_are_short() -> None:
    for path in (STATIC / "views").glob("*.js"):
        assert len(path.read_text().splitlines()) <= 300, path.name


def test_assets_folder_changes_with_the_files() -> None:
    folder = assets().folder
    assert re.fullmatch("/static/[0-9a-f]{16}", folder)
    assert all(path.startswith(f"{folder}/") for path in assets().by_path)
    assert folder.encode() in assets().page


def test_assets_are_in_the_wheel(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "No module named hatchling" in done.stderr:
        pytest.skip("hatchling is not installed")
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        packed = set(wheel.namelist())
    for path in STATIC.rglob("*"):
        if path.is_file():
            assert f"wirecall/console/static/{path.relative_to(STATIC).as_posix()}" in packed

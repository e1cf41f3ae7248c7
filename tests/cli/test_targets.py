"""Files as targets: every mistake in one has a readable error."""

from pathlib import Path

import pytest

from tests.cli import invoke, wirecall
from wirecall import connect
from wirecall.cli.failures import Exit
from wirecall.cli.targets import Target, Way
from wirecall.mcp.client.client import McpClient

APP = "from wirecall import App\napp = App('a')\n@app.query\ndef one() -> int:\n    return 1\n"


@pytest.mark.parametrize(
    ("source", "target", "told"),
    [
        (None, "nowhere.py", "There is no file"),
        ("x = 1", "file.py", "has no app"),
        ("from wirecall import App\na = App('a')\nb = App('b')", "file.py", "2 apps: a, b"),
        ("x = 1", "file.py:x", "of type int"),
        ("x = 1", "file.py:y", "no such name"),
        ("\nx = = 1", "file.py", "line 2: invalid syntax\n       x = = 1"),
        ("\n\nx = 1 / 0", "file.py", "line 3: ZeroDivisionError: division by zero"),
        ("import nosuchmodule", "file.py", "install nosuchmodule"),
        ("import sys\nsys.exit(3)", "file.py", "__main__"),
        (
            "from wirecall import App\nApp('a', ledger='mongo:')",
            "file.py",
            "is not the URL of a ledger",
        ),
        ("x = 1", "file.txt", "not a Python file"),
    ],
)
def test_file_that_cannot_be_used(
    tmp_path: Path, source: str | None, target: str, told: str
) -> None:
    if source is not None:
        (tmp_path / target.partition(":")[0]).write_text(source)
    run = invoke("call", str(tmp_path / target), "one")
    assert run.exit_code == Exit.USAGE
    assert told in run.stderr
    assert "why:" in run.stderr
    assert "next:" in run.stderr
    assert "Traceback" not in run.stderr


def test_nearest_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP)
    run = wirecall("list", "shp.py", cwd=tmp_path)
    assert run.returncode == Exit.USAGE
    assert b"There is no file shp.py." in run.stderr
    assert b"the nearest is shop.py" in run.stderr


@pytest.mark.parametrize(
    ("path", "protocol"),
    [("/mcp", "mcp"), ("/mcp/", "mcp"), ("/a/mcp/bank", "mcp"), ("/rpc", "rpc"), ("/mcps", "rpc")],
)
def test_path_of_an_address_decides_about_its_protocol(path: str, protocol: str) -> None:
    """One server of a gateway is at /mcp/NAME."""
    url = f"http://127.0.0.1:8430{path}"
    assert Way(None).protocol_to(Target("url", url)) == protocol
    assert isinstance(connect(url), McpClient) is (protocol == "mcp")


def test_app_by_name(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(APP + "other = App('b')\n")
    assert invoke("call", f"{tmp_path / 'two.py'}:app", "one").stdout == "1\n"


def test_prints_of_a_file_and_its_handlers_are_not_part_of_the_answer(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(
        "print('loading')\n" + APP.replace("    return", "    print('at work')\n    return")
    )
    for words in (["call", "loud.py", "one"], ["call", "loud.py", "one", "--as", "mcp"]):
        run = wirecall(*words, cwd=tmp_path)
        assert run.stdout == b"1\n"
        assert b"loading" in run.stderr
        assert b"at work" in run.stderr

"""Files as targets: every mistake in one has a readable error."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli import invoke, running, serving, wirecall
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


@contextmanager
def linked(kind: str, tmp_path: Path) -> Iterator[str]:
    """Yield the address of a server on a link."""
    file = tmp_path / "shop.py"
    file.write_text(APP)
    if kind == "ws":
        with serving(str(file)) as address:
            yield f"{address.replace('http', 'ws', 1)}/rpc"
        return
    place = "127.0.0.1:0"
    if kind == "unix":
        place = str(tmp_path / "own" / "rpc.sock")
    with running("serve", str(file), f"--{kind}", place) as run:
        yield run.wait_for("Listening on").split()[-1]
        run.end()


@pytest.mark.parametrize("kind", ["ws", "tcp", "unix"])
def test_link_is_a_target(kind: str, tmp_path: Path) -> None:
    if kind == "unix" and not hasattr(socket, "AF_UNIX"):
        pytest.skip("Windows")
    calls = tmp_path / "calls.jsonl"
    calls.write_text('{"method":"one"}\n{"method":"one"}\n')
    with linked(kind, tmp_path) as address:
        assert invoke("call", address, "one").stdout == "1\n"
        assert "one" in invoke("list", address).stdout
        batch = invoke("batch", address, str(calls))
        assert batch.stdout.count('"result":1') == 2
    unreached = invoke("call", address, "one")
    assert unreached.exit_code == Exit.UNREACHABLE
    assert "is it running at this address?" in unreached.stderr


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

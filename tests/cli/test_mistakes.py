"""Mistakes of people and failures of machines: each has its own message and exit code, and never a
traceback.
"""

import asyncio
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli import PATIENCE, SHOP, invoke, running, serving, wirecall
from wirecall.cli import targets
from wirecall.cli.failures import Exit

APP = "from wirecall import App\napp = App('a')\n"


def shell(line: str, cwd: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """A command line with redirections; `wirecall` is the first word."""
    words = line.replace("wirecall", f"{sys.executable} -m wirecall", 1)
    environ = {**os.environ, **environment}
    run = subprocess.run(
        words,
        shell=True,
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert "Traceback" not in run.stderr
    return run


# --- targets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "what", "next"),
    [
        ("", "The target is empty", "app.py"),
        (".", ". is a folder", "app.py"),
        (os.devnull, f"{os.devnull} is not a file", "app.py"),
        ("localhost:8420", "There is no file localhost", "http://localhost:8420"),
        ("127.0.0.1:8420/rpc", "There is no file 127.0.0.1", "http://127.0.0.1:8420/rpc"),
        ("http://", "'http://' is not an address", "http://127.0.0.1:8420"),
        ("http:// x", "'http:// x' is not an address", "http://127.0.0.1:8420"),
        ("http://[::1", "'http://[::1' is not an address", "http://127.0.0.1:8420"),
        ("http://127.0.0.1:99999", "is not an address", "http://127.0.0.1:8420"),
    ],
)
def test_target_that_is_invalid(target: str, what: str, next: str) -> None:
    run = invoke("list", target)
    assert run.exit_code == Exit.USAGE
    assert what in run.stderr
    assert f"next: {next}" in run.stderr.replace("give the path of a Python file: ", "")


@pytest.mark.parametrize("words", ["list app.py", "new shop"])
def test_current_folder_that_was_removed(words: str, tmp_path: Path) -> None:
    run = shell(f"mkdir gone; cd gone; rmdir ../gone; wirecall {words}", tmp_path)
    assert run.returncode == Exit.USAGE
    assert "The current folder does not exist." in run.stderr


def test_scheme_may_be_written_in_capitals() -> None:
    run = invoke("list", "HTTP://127.0.0.1:1")
    assert run.exit_code == Exit.UNREACHABLE
    assert "why: 127.0.0.1:1: Connection refused\n" in run.stderr


@pytest.mark.parametrize(
    "raised", ["SystemExit(3)", "BaseException('odd')", "__import__('asyncio').CancelledError()"]
)
def test_file_that_raises_anything_cannot_be_loaded(tmp_path: Path, raised: str) -> None:
    (tmp_path / "app.py").write_text(f"raise {raised}")
    run = invoke("list", str(tmp_path / "app.py"))
    assert run.exit_code == Exit.USAGE
    assert "app.py cannot be loaded" in run.stderr
    assert "why: line 1: " in run.stderr


@pytest.mark.parametrize("bytes_", [b"\0\1\2", b"\xff\xfe x = 1"])
def test_binary_file_is_not_an_app(tmp_path: Path, bytes_: bytes) -> None:
    (tmp_path / "binary.py").write_bytes(bytes_)
    run = invoke("list", str(tmp_path / "binary.py"))
    assert run.exit_code == Exit.USAGE
    assert "cannot be loaded" in run.stderr
    assert "None" not in run.stderr
    assert "\ufffd" not in run.stderr


def test_line_that_is_not_utf_8_is_not_shown(tmp_path: Path) -> None:
    """Python 3.14 has such a line in its error, with signs of replacement."""
    line = "\\ufffd x = 1"
    (tmp_path / "app.py").write_text(f"raise SyntaxError('odd', ('app.py', 1, 1, '{line}'))\n")
    run = invoke("list", str(tmp_path / "app.py"))
    assert "line 1: odd\n" in run.stderr
    assert "\ufffd" not in run.stderr


def test_next_step_of_a_command_can_be_typed(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        APP + "@app.query\ndef one(n: int) -> int:\n    return n\napp.run('stdio')\n"
    )
    command = ("--", sys.executable, str(tmp_path / "app.py"))
    assert f"next: wirecall list {' '.join(command)}" in invoke("call", "two", *command).stderr
    assert (
        f"next: wirecall show one {' '.join(command)}"
        in invoke("call", "one", "n=x", *command).stderr
    )


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "what", "why"),
    [
        (["=tea"], "'=tea' is not an argument", "no name in front of ="),
        (["sku=tea", "sku=coffee"], "sku is given twice", "it takes one value"),
        (["sku:=tea"], "sku is not JSON", 'a string in JSON has quotes: "tea"'),
        (["sku:=[1"], "sku is not JSON", "[1 is not complete"),
        (["--args", "{"], "--args is not JSON", "{ is not complete"),
        (["--args", ""], "--args is not JSON", "it is empty"),
        (["sku=\udcff"], "is not UTF-8", "JSON is UTF-8"),
        (["sku=tea", "--key", "k"], "price does not take a key", "it only reads"),
        (["sku=tea", "--key", ""], "The key is empty", "tells one command from another"),
    ],
)
def test_argument_that_is_invalid(words: list[str], what: str, why: str) -> None:
    run = invoke("call", SHOP, "price", *words)
    assert run.exit_code == Exit.USAGE
    assert what in run.stderr
    assert why in run.stderr
    assert "next: " in run.stderr


def test_file_that_is_not_json_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\x00\x07")
    run = invoke("call", SHOP, "price", f"sku:=@{tmp_path / 'binary'}")
    assert run.exit_code == Exit.USAGE
    assert "why: it is not UTF-8\n" in run.stderr


def test_whole_number_may_be_written_as_1e3() -> None:
    assert json.loads(invoke("call", SHOP, "charge", "order=7", "cents=1e3").stdout)["paid"] == 1000


def test_invalid_key_is_reported_with_the_rule_for_keys() -> None:
    run = invoke("call", SHOP, "charge", "order=7", "cents=5", "--key", "a b")
    assert run.exit_code == Exit.USAGE
    assert "next: use 1 to 255 printable ASCII characters without spaces" in run.stderr


@pytest.mark.parametrize(
    ("name", "kind"), [("shop://articles", "resource"), ("reminder", "prompt")]
)
def test_name_that_json_rpc_does_not_have_is_reported_with_its_kind(name: str, kind: str) -> None:
    run = invoke("call", SHOP, name, "--as", "rpc")
    assert run.exit_code == Exit.USAGE
    assert f"{name} is a {kind}." in run.stderr
    assert "why: JSON-RPC has only methods" in run.stderr
    assert "next: drop --as rpc" in run.stderr


@pytest.mark.parametrize("verb", ["list", "probe"])
def test_revision_of_json_rpc_is_refused(verb: str) -> None:
    run = invoke(verb, SHOP, "--as", "rpc", "--revision", "2025-11-25")
    assert run.exit_code == Exit.USAGE
    assert "JSON-RPC has no revisions." in run.stderr


def test_resource_that_does_not_exist_leads_to_the_list() -> None:
    run = invoke("call", SHOP, "shop://nothing")
    assert run.exit_code == Exit.REMOTE
    assert f"next: wirecall list {SHOP}" in run.stderr


def test_bytes_of_another_locale_are_read_as_utf_8(tmp_path: Path) -> None:
    run = shell(
        f"wirecall call {SHOP} price sku=ü --json",
        tmp_path,
        LC_ALL="C",
        PYTHONUTF8="0",
        PYTHONCOERCECLOCALE="0",
    )
    assert run.returncode == Exit.REMOTE
    assert json.loads(run.stdout)["error"]["message"] == "there is no article 'ü'."


# --- ledgers and trails ---------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["call", "batch", "serve", "ledger"])
def test_ledger_that_is_a_folder(tmp_path: Path, verb: str) -> None:
    url = f"sqlite:{tmp_path}"
    words = {
        "call": ["call", SHOP, "charge", "order=7", "cents=5", "--ledger", url],
        "batch": ["batch", SHOP, "--ledger", url],
        "serve": ["serve", SHOP, "--ledger", url],
        "ledger": ["ledger", "list", url],
    }[verb]
    run = invoke(*words)
    assert run.exit_code == Exit.USAGE
    assert run.stderr.startswith(f"✗ The ledger {tmp_path} is a folder.")


@pytest.mark.parametrize(
    ("url", "package"),
    [("redis://127.0.0.1:1", "redis"), ("postgresql://127.0.0.1:1/shop", "psycopg")],
)
def test_ledger_whose_driver_is_not_installed(
    url: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    for words in (["serve", SHOP], ["call", SHOP, "charge", "order=7", "cents=5"]):
        run = invoke(*words, "--ledger", url)
        assert run.exit_code == Exit.USAGE
        assert f"{package} is not installed." in run.stderr
        assert "next: install wirecall with the extra " in run.stderr


def test_ledger_that_cannot_be_used_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").write_bytes(b"no database at all" * 100)
    run = invoke(
        "call", SHOP, "charge", "order=7", "cents=5", "--ledger", f"sqlite:{tmp_path / 'ledger.db'}"
    )
    assert run.exit_code == Exit.UNREACHABLE
    assert run.stderr.count("is not an SQLite file") == 1
    assert "fix:" not in run.stderr
    # Before the server listens.
    run = invoke("serve", SHOP, "--ledger", f"sqlite:{tmp_path / 'ledger.db'}")
    assert run.exit_code == Exit.UNREACHABLE
    assert "is not an SQLite file" in run.stderr


def test_path_of_a_ledger_is_not_its_url(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").touch()
    run = invoke("ledger", "list", str(tmp_path / "ledger.db"))
    assert run.exit_code == Exit.USAGE
    assert f"next: sqlite:{tmp_path / 'ledger.db'}" in run.stderr


def test_audit_trail_that_cannot_be_written_is_reported_before_the_server_listens(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    for path, why in (
        (tmp_path, "it is a folder"),
        (tmp_path / "file" / "trail", "cannot be written to"),
    ):
        run = invoke("serve", SHOP, "--audit", f"file:{path}")
        assert run.exit_code == Exit.USAGE
        assert "The audit trail" in run.stderr
        assert why in run.stderr


def test_lines_that_are_not_part_of_a_trail_are_marked(tmp_path: Path) -> None:
    (tmp_path / "trail").write_bytes(b'{}\n{"time":"x","method":5}\n\xff\x1b[31m\n')
    run = invoke("audit", "tail", str(tmp_path / "trail"))
    assert run.exit_code == Exit.DONE
    assert run.stdout.count("? not a line of an audit trail: ") == 3
    assert "\x1b" not in run.stdout


def test_project_beside_a_folder_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    run = invoke("new", str(tmp_path / "not-there" / ".."))
    assert run.exit_code == Exit.USAGE
    assert "is not empty" in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert invoke("new", "").exit_code == Exit.USAGE


# --- servers --------------------------------------------------------------------------------------


def test_port_in_use_is_reported_with_the_flags_of_the_command(tmp_path: Path) -> None:
    with running("serve", SHOP, "--http", "127.0.0.1:0") as first:
        address = first.wait_for("Listening on").split("//")[-1].strip()
        run = wirecall("serve", SHOP, "--http", address, cwd=tmp_path)
    assert run.returncode == Exit.USAGE
    assert f"Cannot listen on {address}." in run.stderr.decode()
    assert "next: use another port: --http HOST:PORT" in run.stderr.decode()


def test_dev_reports_that_it_waits_when_the_server_has_ended(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("x = = 1\n")
    with running("dev", "app.py", "--http", "127.0.0.1:0", cwd=tmp_path) as run:
        run.wait_for("restarts when a file changes")
        (tmp_path / "app.py").write_text(APP)
        run.wait_for("Listening on")
        assert run.end(signal.SIGINT)[0] == Exit.DONE


def test_process_that_leaves_without_an_answer_is_exit_4(tmp_path: Path) -> None:
    run = wirecall("send", "--", sys.executable, "-c", "raise SystemExit(3)", stdin=b"{}\n")
    assert run.returncode == Exit.UNREACHABLE
    assert b"it ended with 3" in run.stderr


def test_process_that_refuses_to_end_is_ended() -> None:
    deaf = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('[]', flush=True)"
    close = "import os; os.close(1); time.sleep(600)"
    run = wirecall("send", "--", sys.executable, "-c", f"{deaf}; {close}", stdin=b"{}\n")
    assert (run.returncode, run.stdout) == (Exit.DONE, b"[]\n")


@pytest.mark.parametrize("words", [["ls"], ["/no/such/program"]])
def test_probe_of_a_command_that_is_not_a_server_suggests_to_run_it(
    words: list[str], tmp_path: Path
) -> None:
    run = wirecall("probe", "--", *words, cwd=tmp_path)
    assert run.returncode == Exit.UNREACHABLE
    assert b"next: run the command alone" in run.stderr


def test_lost_line_of_a_batch_names_the_command_to_retry_it(tmp_path: Path) -> None:
    source = APP + "import os\n@app.command\ndef leave() -> int:\n    os._exit(9)\n"
    (tmp_path / "app.py").write_text(source + "if __name__ == '__main__':\n    app.run('stdio')\n")
    run = wirecall(
        "batch",
        "--",
        sys.executable,
        "app.py",
        stdin=b'{"method":"leave","key":"k-1"}\n',
        cwd=tmp_path,
    )
    error = json.loads(run.stdout)["error"]
    assert error["exit"] == Exit.UNKNOWN
    assert error["next"] == 'repeat the line with "key": "k-1": it takes effect once'


SLOW = "import asyncio\n@app.command\nasync def slow() -> None:\n    await asyncio.sleep(60)\n"


def test_key_without_a_lasting_record_is_not_offered_for_a_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wirecall.cli.targets.GRACE", 0.1)
    (tmp_path / "app.py").write_text(APP + SLOW)
    words = ("call", str(tmp_path / "app.py"), "slow", "--timeout", "300ms", "--json")
    error = json.loads(invoke(*words).stdout)["error"]
    assert (error["exit"], error["ran"]) == (Exit.UNKNOWN, "unknown")
    assert (
        error["next"]
        == "find out whether it took effect: the app's ledger is in memory, and has forgotten the key"
    )
    error = json.loads(invoke(*words, "--ledger", f"sqlite:{tmp_path}/ledger.db").stdout)["error"]
    assert error["next"] == f"repeat it with --key {error['key']}: it takes effect once"


FOREIGN = """
import json, sys
info = {"name": "foreign", "version": "1"}
offer = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info}
tools = {"tools": [{"name": "pay", "inputSchema": {"type": "object"}}]}
for line in sys.stdin:
    message = json.loads(line)
    if message["method"] == "tools/call":
        sys.exit(9)
    if "id" in message:
        known = {"initialize": {"result": offer}, "tools/list": {"result": tools}}
        answer = known.get(message["method"], {"error": {"code": -32601, "message": ""}})
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer}), flush=True)
"""


@pytest.mark.parametrize("key", [(), ("--key", "k-1")])
def test_key_that_the_server_does_not_honour_is_not_offered_for_a_retry(
    key: tuple[str, ...],
) -> None:
    """A server of MCP that does not say that it honours keys runs the same call again, with any
    key.
    """
    run = wirecall("call", "pay", *key, "--json", "--", sys.executable, "-c", FOREIGN)
    error = json.loads(run.stdout)["error"]
    assert (error["exit"], error["ran"]) == (Exit.UNKNOWN, "unknown")
    why = ": the server does not say that it honours keys" if key else ""
    assert error["next"] == f"find out whether it took effect before you repeat it{why}"
    assert (b"! The server does not say that it honours keys" in run.stderr) == bool(key)


def test_key_of_a_line_that_nothing_keeps_is_not_offered_for_a_retry(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP + SLOW)
    in_memory = ("--timeout", "300ms", str(tmp_path / "app.py"))
    for target, method in (
        (in_memory, "slow"),
        (("--as", "mcp", "--", sys.executable, "-c", FOREIGN), "pay"),
    ):
        run = wirecall("batch", *target, stdin=b'{"method":"%s","key":"k-1"}\n' % method.encode())
        error = json.loads(run.stdout)["error"]
        assert error["exit"] == Exit.UNKNOWN
        assert (
            error["next"]
            == "repeat the line if it only reads; else find out first whether it took effect"
        )


async def answering(text: bytes, *words: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command against a server that answers everything with one string and leaves."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n" + text
        )
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
        return await asyncio.to_thread(wirecall, words[0], url, *words[1:], stdin=b"{}\n")


async def test_invalid_answer_to_the_handshake_is_not_an_unknown_outcome() -> None:
    body = b'{"jsonrpc":"2.0","id":1,"result":{}}'
    run = await answering(
        b"content-length: %d\r\n\r\n%s" % (len(body), body), "list", "--revision", "2025-11-25"
    )
    assert run.returncode == Exit.PROTOCOL
    assert b"what answers initialize is not its result" in run.stderr
    assert b"--key" not in run.stderr


@pytest.mark.parametrize(
    ("words", "exit", "next"),
    [
        (["send"], Exit.UNKNOWN, b"find out whether it took effect before you send it again"),
        (["probe", "--as", "mcp"], Exit.UNREACHABLE, b"check the server's log"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
async def test_answer_that_is_cut_off(words: list[str], exit: int, next: bytes) -> None:
    run = await answering(b"content-length: 99\r\n\r\n{", *words)
    assert run.returncode == exit
    assert b"why: the connection broke before the end of the answer\n  next: " + next in run.stderr


def test_key_for_a_ledger_in_memory_prints_a_hint_for_a_lasting_ledger(tmp_path: Path) -> None:
    run = wirecall("call", SHOP, "charge", "order=7", "cents=1", "--key", "k", cwd=tmp_path)
    assert run.returncode == Exit.DONE
    assert b"--ledger sqlite:PATH keeps it, or [ledger] url = ... in wirecall.toml." in run.stderr


def test_address_of_another_machine_cannot_be_listened_on() -> None:
    run = invoke("serve", SHOP, "--http", "192.0.2.1:0")
    assert run.exit_code == Exit.USAGE
    assert "next: use an address of this machine" in run.stderr


def test_server_that_dies_during_a_command_has_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        APP + "import os\n@app.command\ndef leave() -> int:\n    os._exit(9)\n"
    )
    with serving(str(tmp_path / "app.py")) as url:
        run = invoke("call", url, "leave", "--key", "k-1", "--timeout", "2s")
    assert run.exit_code == Exit.UNKNOWN
    assert (
        f"{url.removeprefix('http://')}: Connection refused\n  next: repeat it with --key k-1"
        in run.stderr
    )
    assert "ssl" not in run.stderr


@pytest.mark.parametrize("protocol", ["rpc", "mcp"])
@pytest.mark.parametrize(
    "words", [["list"], ["show", "price"], ["call", "price", "sku=tea"]], ids=lambda words: words[0]
)
def test_echo_is_not_an_answer(words: list[str], protocol: str) -> None:
    run = invoke(*words, "--as", protocol, "--", "cat")
    assert run.exit_code == Exit.PROTOCOL
    assert "the server sent back the request itself" in run.stderr
    assert run.stdout == ""


@pytest.mark.parametrize("words", [["list"], ["call", "price"]], ids=lambda words: words[0])
def test_server_that_does_not_answer_is_not_an_unknown_outcome(words: list[str]) -> None:
    run = invoke(*words, "--as", "rpc", "--timeout", "300ms", "--json", "--", "sleep", "60")
    error = json.loads(run.stdout)["error"]
    assert (run.exit_code, error["message"], error["ran"]) == (
        Exit.UNREACHABLE,
        "The server does not answer.",
        "no",
    )


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [f"call {SHOP} price --args -", f"batch {SHOP}", f"send {SHOP}"])
def test_closed_stdin_is_reported(words: str, tmp_path: Path) -> None:
    run = shell(f"wirecall {words} <&-", tmp_path)
    assert run.returncode == Exit.USAGE
    assert "There is no standard input: it is closed." in run.stderr


def test_closed_outputs_are_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text('{"method":"price","params":{"sku":"tea"}}\n')
    assert shell(f"wirecall call {SHOP} price sku=tea 2>&-", tmp_path).stdout == "450\n"
    assert shell(f"wirecall batch {SHOP} lines >&-", tmp_path).returncode == Exit.DONE


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize(
    "words",
    [
        "--help",
        f"list {SHOP}",
        f"call {SHOP} price sku=tea",
        f"call {SHOP} price sku=tea --json",
        f"batch {SHOP}",
    ],
)
def test_full_disk_is_reported(words: str, tmp_path: Path) -> None:
    run = shell(f'echo \'{{"method":"x"}}\' | wirecall {words} > /dev/full', tmp_path)
    assert run.returncode == Exit.FAULT
    assert "The output cannot be written.\n  why: No space left on device" in run.stderr


def test_reader_that_leaves_before_a_process_ends_causes_no_error(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("{}\n")
    run = shell("wirecall send lines -- yes | head -1", tmp_path)
    assert (run.stdout, run.stderr) == ("y\n", "")


def test_reader_that_leaves_ends_an_endless_input_of_a_process(tmp_path: Path) -> None:
    run = shell("yes hi | wirecall send -- cat | head -1", tmp_path)
    assert (run.stdout, run.stderr) == ("hi\n", "")


def test_reader_that_leaves_early_causes_no_error(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text('{"method":"price","params":{"sku":"tea"}}\n' * 5000)
    run = shell(f"wirecall batch {SHOP} lines | head -1", tmp_path)
    assert run.stdout == '{"line":1,"ok":true,"result":450}\n'
    assert run.stderr == ""


@pytest.mark.parametrize(
    ("words", "sign", "told"),
    [
        (["call", SHOP, "refund", "order=7"], b"Call it?", b"nothing was sent"),
        (["call", SHOP, "price", "--args", "-"], b"reading", b"nothing was sent"),
        (["batch", SHOP], b"reading", b"Interrupted."),
        (["send", SHOP], b"reading", b"Interrupted."),
    ],
)
def test_ctrl_c_ends_a_command_that_waits_for_its_user(
    words: list[str], sign: bytes, told: bytes
) -> None:
    said, code = at_terminal(words, sign)
    assert code == Exit.INTERRUPTED
    assert told in said
    assert b"Ctrl-C again" not in said


def test_unanswered_confirmation_counts_as_no() -> None:
    said, code = at_terminal(["call", SHOP, "refund", "order=7"], b"Call it?", key=b"\x04")
    assert code == Exit.INTERRUPTED
    assert b"Nothing was sent." in said


# Prints a line when the command begins to wait for its user.
TELLING = """
import sys
from contextlib import contextmanager
from wirecall.cli import main, terminal

reading = terminal.reading

@contextmanager
def telling(**how):
    with reading(**how):
        print("reading", file=sys.stderr, flush=True)
        yield

terminal.reading = telling
main(sys.argv[1:])
"""


def at_terminal(words: list[str], sign: bytes, key: bytes = b"") -> tuple[bytes, int]:
    """Return the output on a terminal until the end.

    Press a key, or Ctrl-C, once, after a given string.
    """
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", TELLING, *words], stdin=follower, stdout=follower, stderr=follower
    )
    os.close(follower)
    said = b""
    pressed = False
    try:
        while chunk := _chunk(leader):
            said += chunk
            if not pressed and sign in said:
                pressed = True
                _until_asleep(process.pid)
                os.write(leader, key) if key else process.send_signal(signal.SIGINT)
        return said, process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def _until_asleep(pid: int) -> None:
    """Wait until the process sleeps in its read: just before, Python would not see a signal."""
    stat = Path(f"/proc/{pid}/stat")
    until = time.monotonic() + PATIENCE
    while (
        stat.exists()
        and stat.read_text().rpartition(")")[2].split()[0] != "S"
        and time.monotonic() < until
    ):
        time.sleep(0.01)


def _chunk(leader: int) -> bytes:
    if not select.select([leader], [], [], PATIENCE)[0]:
        return b""
    try:
        return os.read(leader, 4096)
    except OSError:  # EIO: the other end is closed
        return b""

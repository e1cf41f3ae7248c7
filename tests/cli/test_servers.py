"""Servers that the command starts, speaks to, or fails to speak to."""

import json
import os
import select
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.cli import SHOP, invoke, running, serving, wirecall
from wirecall.cli.failures import Exit

STDIO = ["--", sys.executable, "-m", "wirecall", "serve", SHOP, "--stdio"]

SLOW = """
import asyncio, time
from wirecall import App

def who(headers):
    return {"Bearer s3cret": "alice"}.get(headers.get("authorization"))

app = App("slow")
private = App("private", authenticate=who)

@app.command(destructive=False)
async def nap(seconds: float) -> str:
    print("napping", flush=True)
    await asyncio.sleep(seconds)
    return "slept"

@app.command(destructive=False)
def block(seconds: float) -> str:
    print("blocking", flush=True)
    time.sleep(seconds)
    return "slept"

@private.query
def secret() -> int:
    return 42
"""


@pytest.fixture
def slow(tmp_path: Path) -> str:
    (tmp_path / "slow.py").write_text(SLOW)
    return str(tmp_path / "slow.py")


@pytest.fixture(scope="module")
def shop() -> Iterator[str]:
    with serving(SHOP) as address:
        yield address


# --- a server that works --------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "/rpc", "/mcp"])
def test_calls_over_http(shop: str, path: str) -> None:
    words = [
        "call",
        shop + path,
        "charge",
        f"order=a{path}",
        "cents=5",
        "--key",
        f"k{path}",
        "--json",
    ]
    first, second = (json.loads(invoke(*words).stdout) for _ in range(2))
    assert first["result"] == second["result"] == {"order": f"a{path}", "paid": 5}
    assert (first["replayed"], second["replayed"]) == (False, True)


@pytest.mark.parametrize("path", ["/rpc", "/mcp"])
def test_lists_and_mistakes_over_http(shop: str, path: str) -> None:
    offers = {
        offer["name"]: offer
        for offer in json.loads(invoke("list", shop + path, "--json").stdout)["result"]
    }
    assert offers["price"]["hints"]["readOnly"] is True
    assert offers["charge"]["hints"]["keyed"] is True
    run = invoke("call", shop + path, "charge", "order=7", "cents=five")
    assert run.exit_code == Exit.USAGE
    assert "cents must be a whole number" in run.stderr


def test_batch_and_send_over_http(shop: str) -> None:
    lines = b'{"method":"price","params":{"sku":"tea"}}\n' * 3
    assert invoke("batch", shop, input=lines).stdout.count('"result":450') == 3
    message = b'{"jsonrpc":"2.0","method":"price","params":["tea"],"id":1}\n'
    assert json.loads(invoke("send", shop, input=message).stdout)["result"] == 450


def test_calls_on_stdio() -> None:
    run = wirecall("call", "price", "sku=tea", "--json", *STDIO)
    assert json.loads(run.stdout)["result"] == 450
    assert json.loads(run.stdout)["revision"] == "2026-07-28"
    assert (
        json.loads(invoke("call", "price", "sku=tea", "--json", "--as", "rpc", *STDIO).stdout)[
            "result"
        ]
        == 450
    )
    assert "destructive" in invoke("list", *STDIO).stdout
    message = b'{"jsonrpc":"2.0","method":"price","params":["tea"],"id":1}\n'
    assert json.loads(invoke("send", *STDIO, input=message).stdout)["result"] == 450


@pytest.mark.parametrize("server", ["granian", "granian-asgi", "uvicorn"])
def test_serve_stops_on_a_signal(server: str) -> None:
    with running(
        "serve", SHOP, "--http", "127.0.0.1:0", "--server", server, "--grace", "5s"
    ) as run:
        address = run.wait_for("Listening on").split()[-1]
        assert invoke("call", address, "price", "sku=tea").stdout == "450\n"
        assert run.end()[0] == 0


WAITING = """
import asyncio, sys
from wirecall import App

app = App("slow", ledger="sqlite:ledger.db")

@app.query
async def slow() -> str:
    print("begun", file=sys.stderr, flush=True)
    await asyncio.sleep(0.5)
    return "done"
"""


@pytest.mark.parametrize("words", [(), ("--workers", "2"), ("--server", "uvicorn")])
def test_serve_ignores_the_signals_of_log_rotation(words: tuple[str, ...], tmp_path: Path) -> None:
    """A signal that stops it comes afterwards: the calls in flight end."""
    (tmp_path / "app.py").write_text(WAITING)
    with (
        running("serve", "app.py", "--http", "127.0.0.1:0", *words, cwd=tmp_path) as run,
        ThreadPoolExecutor(1) as pool,
    ):
        address = run.wait_for("Listening on").split()[-1]
        run.process.send_signal(signal.SIGUSR1)
        assert "SIGUSR1 is ignored" in run.wait_for("SIGUSR1")
        answer = pool.submit(wirecall, "call", address, "slow")
        run.wait_for("begun")
        run.process.send_signal(signal.SIGTERM)
        assert answer.result(60).stdout == b"done\n"
        assert run.process.wait(60) == 0


def test_serve_outlives_its_terminal_under_nohup() -> None:
    with running("serve", SHOP, "--http", "127.0.0.1:0", ignored=signal.SIGHUP) as run:
        address = run.wait_for("Listening on").split()[-1]
        run.process.send_signal(signal.SIGHUP)
        assert invoke("call", address, "price", "sku=tea").stdout == "450\n"
        assert run.end()[0] == 0


def test_dev_ends_its_server_on_sighup(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(WAITING)
    with running("dev", "app.py", "--http", "127.0.0.1:0", cwd=tmp_path) as run:
        address = run.wait_for("Listening on").split()[-1]
        run.process.send_signal(signal.SIGHUP)
        assert run.process.wait(60) == 0
    assert invoke("call", address, "slow").exit_code == 4


def test_serve_replaces_the_apps_own_ledger_and_limits(tmp_path: Path) -> None:
    with serving(
        SHOP, "--ledger", f"sqlite:{tmp_path / 'ledger.db'}", "--limit", "batch=1"
    ) as address:
        assert invoke("call", address, "charge", "order=7", "cents=5", "--key", "k").exit_code == 0
        pair = (
            b'[{"jsonrpc":"2.0","method":"price","params":["tea"],"id":1},'
            b'{"jsonrpc":"2.0","method":"price","id":2}]\n'
        )
        assert (
            json.loads(invoke("send", address, input=pair).stdout)["error"]["data"]["limit"]
            == "batch"
        )
    assert (tmp_path / "ledger.db").exists()


@pytest.mark.parametrize("log", ["off", "text", "json"])
def test_serve_names_the_ledger_without_its_password(log: str) -> None:
    url = "postgresql://shop:secret@127.0.0.1:1/shop"
    with running("serve", SHOP, "--http", "127.0.0.1:0", "--ledger", url, "--log", log) as run:
        assert "postgresql://shop:***@127.0.0.1:1/shop" in run.wait_for("The ledger is")
        run.end()
    assert "secret" not in "".join(run.said)


def test_serve_refuses_two_ledgers_and_a_flag_decides(tmp_path: Path) -> None:
    (tmp_path / "wirecall.toml").write_text('[ledger]\nurl = "sqlite:file.db"\n')
    environment = {"WIRECALL_LEDGER_URL": "sqlite:variable.db"}
    refused = wirecall("serve", SHOP, "--http", "127.0.0.1:0", cwd=tmp_path, env=environment)
    assert refused.returncode == 2
    assert (
        b"wirecall.toml:2: ledger.url is sqlite:file.db, and WIRECALL_LEDGER_URL is sqlite:variable.db"
        in refused.stderr
    )
    words = ("serve", SHOP, "--http", "127.0.0.1:0", "--ledger", "sqlite:flag.db")
    with running(*words, cwd=tmp_path, env=environment) as run:
        assert run.wait_for("The ledger is").strip().endswith("sqlite:flag.db")
        assert run.end()[0] == 0


def test_serve_reads_wirecall_toml_and_flags_override_it(tmp_path: Path) -> None:
    (tmp_path / "wirecall.toml").write_text(f'''
[server]
app = "{SHOP}"
http = "127.0.0.1:1"

[ledger]
url = "sqlite:ledger.db"

[limits]
batch = 1
''')
    with running("serve", "--http", "127.0.0.1:0", cwd=tmp_path) as run:
        address = run.wait_for("Listening on").split()[-1]
        pair = (
            b'[{"jsonrpc":"2.0","method":"price","params":["tea"],"id":1},'
            b'{"jsonrpc":"2.0","method":"price","id":2}]\n'
        )
        assert (
            json.loads(invoke("send", address, input=pair).stdout)["error"]["data"]["limit"]
            == "batch"
        )
        assert run.end()[0] == 0


def test_page_of_an_allowed_origin_can_call_and_read() -> None:
    """The browser asks first, then sends the call (fetch.spec.whatwg.org, "CORS protocol")."""
    page = "https://app.example"
    with serving(SHOP, "--allow-origin", page) as address:
        asked = Request(
            f"{address}/mcp",
            None,
            {"Origin": page, "Access-Control-Request-Method": "POST"},
            method="OPTIONS",
        )
        message = b'{"jsonrpc":"2.0","method":"price","params":["tea"],"id":1}'
        sent = Request(
            f"{address}/rpc", message, {"Origin": page, "Content-Type": "application/json"}
        )
        for request, status in ((asked, 204), (sent, 200)):
            with urlopen(request) as answer:
                assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (
                    status,
                    page,
                )


def test_serve_without_a_target_or_a_file_that_names_one(tmp_path: Path) -> None:
    run = wirecall("serve", cwd=tmp_path)
    assert run.returncode == Exit.USAGE
    assert b"Which app?" in run.stderr


def test_workers_share_a_ledger(tmp_path: Path) -> None:
    with serving(SHOP, "--workers", "2", "--ledger", f"sqlite:{tmp_path / 'ledger.db'}") as address:
        words = ["call", address, "charge", "order=7", "cents=5", "--key", "k", "--json"]
        assert {json.dumps(json.loads(invoke(*words).stdout)["result"]) for _ in range(4)} == {
            '{"order": "7", "paid": 5}'
        }


def test_port_that_is_taken(shop: str) -> None:
    run = wirecall("serve", SHOP, "--http", shop.removeprefix("http://"))
    assert run.returncode == Exit.USAGE
    assert b"Cannot listen on" in run.stderr


def test_log_of_calls() -> None:
    with running("serve", SHOP, "--http", "127.0.0.1:0", "--log", "text") as run:
        address = run.wait_for("Listening on").split()[-1]
        invoke("call", address, "price", "sku=milk")
        assert "✗ price" in run.wait_for("error 4040")


def test_dev_restarts_when_a_file_changes(tmp_path: Path) -> None:
    source = (
        "from wirecall import App\napp = App('a')\n@app.query\ndef one() -> int:\n    return 1\n"
    )
    (tmp_path / "app.py").write_text(source)
    with running("dev", "app.py", "--http", "127.0.0.1:0", cwd=tmp_path) as run:
        address = run.wait_for("Listening on").split()[-1]
        assert invoke("call", address, "one").stdout == "1\n"
        run.wait_for("✓ one")
        (tmp_path / "app.py").write_text(source + "x = = 1\n")
        run.wait_for("cannot be loaded")
        (tmp_path / "app.py").write_text(source.replace("return 1", "return 2"))
        address = run.wait_for("Listening on").split()[-1]
        assert invoke("call", address, "one").stdout == "2\n"
        assert run.end(signal.SIGINT)[0] == 0


def test_dev_warns_once_about_a_sync_function_that_blocks_the_loop(tmp_path: Path) -> None:
    source = (
        "import time\nfrom wirecall import App\napp = App('a')\n@app.query\n"
        "def nap() -> None:\n    time.sleep(0.2)\n"
    )
    (tmp_path / "app.py").write_text(source)
    with running("dev", "app.py", "--http", "127.0.0.1:0", cwd=tmp_path) as run:
        address = run.wait_for("Listening on").split()[-1]
        for _ in range(2):
            invoke("call", address, "nap")
        told = run.wait_for("blocked the event loop")
        assert told.startswith("WARNING  nap has blocked the event loop for ")
        assert "blocking=True" in told
        assert "app.py:4" in told
        for _ in range(2):
            run.wait_for("✓ nap")
        assert run.end(signal.SIGINT)[0] == 0
    assert "".join(run.said).count("blocked the event loop") == 1


# --- servers that do not --------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/rpc", "/mcp"])
def test_server_that_is_not_there(path: str) -> None:
    run = invoke("call", f"http://127.0.0.1:9{path}", "price", "sku=tea", "--timeout", "1s")
    assert run.exit_code == Exit.UNREACHABLE
    assert "cannot be reached" in run.stderr


@pytest.mark.parametrize(
    ("script", "exit", "told"),
    [
        ("import sys; sys.stderr.write('no licence'); sys.exit(3)", Exit.UNREACHABLE, "no licence"),
        (
            "import os, sys; sys.stdin.readline(); os._exit(9)",
            Exit.UNREACHABLE,
            "ended before it answered",
        ),
        (
            "print('Loading model...', flush=True); import time; time.sleep(60)",
            Exit.PROTOCOL,
            "prints text that is not a message",
        ),
        ("import time; time.sleep(60)", Exit.UNREACHABLE, "does not answer"),
    ],
)
def test_process_that_is_not_a_server(script: str, exit: int, told: str) -> None:
    run = wirecall(
        "call", "price", "sku=tea", "--timeout", "1s", "--", sys.executable, "-c", script
    )
    assert run.returncode == exit, run.stderr
    assert told in run.stderr.decode()
    assert b"Traceback" not in run.stderr


def test_program_that_does_not_exist() -> None:
    for verb in (["call", "price"], ["send"], ["list"]):
        run = invoke(*verb, "--", "nosuchprogram", input=b"{}\n")
        assert run.exit_code == Exit.UNREACHABLE
        assert "nosuchprogram" in run.stderr


def test_noise_before_the_answers_is_ignored(tmp_path: Path) -> None:
    command = f"import subprocess, sys; print('hello', flush=True); sys.exit(subprocess.call({STDIO[1:]!r}))"
    run = wirecall("call", "price", "sku=tea", "--", sys.executable, "-c", command)
    assert run.stdout == b"450\n", run.stderr


# An OpenRPC document, and the results of an MCP server, whose members have the wrong types.
OPENRPC = {
    "methods": [
        5,
        {"name": "a", "params": 5, "tags": 7, "result": "x", "summary": [1]},
        {
            "name": "b",
            "params": [
                {"name": "p", "schema": {"properties": [1], "required": 3, "anyOf": 7, "enum": 3}}
            ],
        },
        {
            "name": "c",
            "params": [{"name": "p", "required": True, "schema": 7}],
            "result": {"schema": {"properties": 5}},
        },
    ],
    "components": 4,
}
MCP = {
    "initialize": {
        "protocolVersion": "2025-06-18",
        "capabilities": {"tools": {}, "resources": {}},
        "serverInfo": {},
    },
    "tools/list": {
        "tools": [
            {"name": "t", "inputSchema": {"type": "object", "properties": [1], "required": 3}}
        ]
    },
    "resources/list": {"resources": [{"uri": "x://y", "name": "y"}]},
    "tools/call": {"content": []},
}


class Strange(BaseHTTPRequestHandler):
    """A web server that is not ours: a page, a redirect, or a status, by its path."""

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path in ("/openrpc", "/mcp"):
            self.answer(json.loads(text))
            return
        status, body = {
            "/moved": (302, b""),
            "/page": (200, b"<html>hello</html>"),
            "/missing": (404, b"<html>not here</html>"),
            "/closed": (403, b"go away"),
            "/guarded/mcp": (401, b""),
            "/broken": (500, b""),
            "/garbage": (200, b'{"jsonrpc":"2.0","id":77,"result":1}'),
        }[self.path]
        self.send_response(status)
        if status == 401:
            address = f"http://{self.headers['host']}/metadata"
            self.send_header("www-authenticate", f'Bearer resource_metadata="{address}"')
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        body = (
            b'{"resource": "https://[", "authorization_servers": {"a": 1}, "scopes_supported": 5}'
        )
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def answer(self, request: dict[str, Any]) -> None:
        results = MCP if self.path == "/mcp" else {"rpc.discover": OPENRPC, "a": 1, "b": 1, "c": 1}
        method = request["method"]
        told = (
            {"result": results[method]}
            if method in results
            else {"error": {"code": -32601, "message": "no"}}
        )
        body = (
            json.dumps({"jsonrpc": "2.0", "id": request["id"], **told}).encode()
            if "id" in request
            else b""
        )
        self.send_response(200 if body else 202)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def strange() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Strange) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("path", "names"), [("/openrpc", ["a", "b", "c"]), ("/mcp", ["t", "x://y"])]
)
def test_offers_of_the_wrong_types_are_listed_and_can_be_called(
    strange: str, path: str, names: list[str]
) -> None:
    """The server lists resources and does not have a method for templates, as many servers."""
    listed = invoke("list", strange + path, "--json")
    assert [each["name"] for each in json.loads(listed.stdout)["result"]] == names
    assert invoke("show", strange + path, names[0]).exit_code == Exit.DONE
    assert invoke("call", strange + path, names[0], "--timeout", "5s").exit_code == Exit.DONE


def test_metadata_of_the_wrong_types_are_named(strange: str) -> None:
    run = invoke("probe", f"{strange}/guarded/mcp")
    assert run.exit_code == Exit.AUTH
    assert "authorization_servers: expected a list, got dict" in run.stderr
    assert "scopes_supported: expected a list, got int" in run.stderr
    assert "its metadata describes 'https://['" in run.stderr


def test_server_without_templates_has_a_contract(strange: str, tmp_path: Path) -> None:
    run = invoke("lock", f"{strange}/mcp", "-o", str(tmp_path / "lock.json"))
    assert run.exit_code == Exit.DONE, run.stderr
    assert "x://y" in (tmp_path / "lock.json").read_text()


def test_redirect_is_reported_and_not_followed(strange: str) -> None:
    run = invoke("send", f"{strange}/moved", input="{}")
    assert (run.exit_code, run.stderr) == (Exit.REMOTE, "HTTP 302\n")


def test_server_without_a_login_is_named(
    shop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    run = invoke("login", shop, "--no-browser")
    assert run.exit_code == Exit.AUTH
    assert run.stderr.startswith(f"✗ Cannot log in at {shop}/rpc.")
    assert "next: does this server ask for a login?" in run.stderr


def test_server_without_tasks_is_named() -> None:
    run = invoke("task", "show", SHOP, "786512e2")
    assert run.exit_code == Exit.REMOTE
    assert run.stderr.startswith(
        "✗ The server does not have tasks.\n  why: tasks/get: this server does not offer"
    )


@pytest.mark.parametrize("protocol", ["rpc", "mcp"])
@pytest.mark.parametrize(
    ("path", "exit"),
    [
        ("/page", Exit.PROTOCOL),
        ("/missing", Exit.PROTOCOL),
        ("/garbage", Exit.PROTOCOL),
        ("/closed", Exit.AUTH),
        ("/broken", Exit.REMOTE),
    ],
)
def test_server_that_speaks_another_protocol(
    strange: str, path: str, exit: int, protocol: str
) -> None:
    run = invoke(
        "call", strange + path, "price", "sku=tea", "--as", protocol, "--timeout", "5s", "--json"
    )
    assert run.exit_code == exit, run.stdout
    assert json.loads(run.stdout)["error"]["exit"] == exit


@pytest.mark.parametrize("protocol", ["rpc", "mcp"])
def test_server_that_requires_authentication(slow: str, protocol: str) -> None:
    with serving(f"{slow}:private") as address:
        words = ["call", address, "secret", "--as", protocol]
        run = invoke(*words)
        assert run.exit_code == Exit.AUTH
        assert f"next: wirecall login {address}, or --header" in run.stderr
        assert invoke(*words, "--header", "Authorization: Bearer s3cret").stdout == "42\n"


def test_send_reports_the_status(slow: str) -> None:
    with serving(f"{slow}:private") as address:
        run = invoke("send", address, input=b'{"jsonrpc":"2.0","method":"secret","id":1}\n')
    assert run.exit_code == Exit.AUTH
    assert json.loads(run.stdout)["error"]
    assert "HTTP 401" in run.stderr


def test_answer_that_does_not_arrive(slow: str) -> None:
    with serving(f"{slow}:app", "--grace", "1s") as address:
        run = invoke(
            "call", address, "nap", "seconds=60", "--timeout", "1s", "--key", "k-7", "--json"
        )
        assert run.exit_code == Exit.UNKNOWN
        error = json.loads(run.stdout)["error"]
        assert (error["key"], error["ran"]) == ("k-7", "unknown")
        assert "--key k-7" in error["next"]


def test_https_to_an_http_server_has_a_clear_error(shop: str) -> None:
    run = wirecall("call", shop.replace("http:", "https:"), "price", "sku=tea", "--json")
    error = json.loads(run.stdout)["error"]
    assert (run.returncode, error["type"]) == (Exit.UNREACHABLE, "unreachable")
    assert "it does not agree to TLS (https): " in error["why"]


def test_call_that_is_cut_at_the_end_does_not_print_a_traceback(
    slow: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("wirecall.cli.targets.GRACE", 0.1)
    result = invoke(
        "call", f"{slow}:app", "nap", "seconds=60", "--timeout", "200ms", "--key", "k-7"
    )
    assert result.exit_code == Exit.UNKNOWN
    assert "No answer came in time" in result.stderr
    assert not [record for record in caplog.records if record.exc_info]


# --- Ctrl-C ---------------------------------------------------------------------------------------


def test_ctrl_c_cancels_the_call_and_prints_its_key(slow: str, tmp_path: Path) -> None:
    ledger = ("--ledger", f"sqlite:{tmp_path}/ledger.db")
    with running("call", f"{slow}:app", "nap", "seconds=60", "--key", "k-7", *ledger) as run:
        run.wait_for("napping")
        code, out, err = run.end(signal.SIGINT)
    assert (code, out) == (Exit.INTERRUPTED, "")
    assert "Cancelling" in err
    assert "--key k-7" in err
    assert "Traceback" not in err


def test_second_ctrl_c_stops_at_once(slow: str) -> None:
    with running("call", f"{slow}:app", "block", "seconds=60") as run:
        run.wait_for("blocking")
        run.process.send_signal(signal.SIGINT)
        run.wait_for("Cancelling")
        assert run.end(signal.SIGINT)[0] == Exit.INTERRUPTED


def test_second_ctrl_c_ends_the_server_process_too(tmp_path: Path) -> None:
    """It would ignore the end of its input and live on.

    The end of a pipe that it holds shows its exit.
    """
    os.mkfifo(tmp_path / "held")
    held = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    stubborn = (
        f"import sys, time; f = open({str(tmp_path / 'held')!r}, 'wb'); "
        "print('up', file=sys.stderr); time.sleep(600)"
    )
    try:
        with running("call", "x", "--", sys.executable, "-c", stubborn) as run:
            run.wait_for("up")
            run.process.send_signal(signal.SIGINT)
            run.wait_for("Cancelling")
            assert run.end(signal.SIGINT)[0] == Exit.INTERRUPTED
        assert select.select([held], [], [], 10)[0]
        assert os.read(held, 1) == b""
    finally:
        os.close(held)


@pytest.mark.parametrize("server", ["granian", "uvicorn"])
def test_serve_with_json_logs_writes_only_json(server: str, tmp_path: Path) -> None:
    source = (
        "import logging, warnings\nfrom wirecall import App\napp = App('a')\nwarnings.warn('old')\n"
        "@app.query\ndef one() -> int:\n    logging.getLogger('shop').warning('asked')\n    return 1\n"
    )
    (tmp_path / "app.py").write_text(source)
    with running(
        "serve",
        "app.py",
        "--http",
        "127.0.0.1:0",
        "--server",
        server,
        "--log",
        "json",
        cwd=tmp_path,
    ) as run:
        first = run.wait_for("Listening on")
        address = json.loads(first)["message"].split()[-1]
        invoke("call", address, "one")
        own = json.loads(run.wait_for("asked"))
        ended = json.loads(run.wait_for('"method":"one"'))
        code, _, stderr = run.end(signal.SIGINT)
    assert code == 0
    assert own["call_id"] == ended["call_id"]
    lines = [json.loads(line) for line in [*run.said, *stderr.splitlines()]]
    assert any("old" in line["message"] for line in lines)


def test_serve_with_json_logs_writes_its_failure_as_json(shop: str) -> None:
    run = wirecall("serve", SHOP, "--http", shop.removeprefix("http://"), "--log", "json")
    assert run.returncode == Exit.USAGE
    last = [json.loads(line) for line in run.stderr.splitlines()][-1]
    assert last["level"] == "CRITICAL"
    assert "Cannot listen on" in last["message"]

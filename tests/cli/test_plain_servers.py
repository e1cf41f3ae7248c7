"""The verbs with ordinary servers of JSON-RPC, which have no `rpc.discover`, and each says so in
its own way.

json-rpc is the real package. The other servers answer as aria2, ganache and hardhat do: the code,
the status and the media type of an unknown method, and the path at which they listen.
"""

import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from jsonrpc import Dispatcher, JSONRPCResponseManager

from tests.cli import PATIENCE, ROOT, invoke
from tests.cli.probes import initialized, problems, scripted, verdict

Answer = Callable[[bytes], tuple[int, str, bytes]]  # a body -> status, media type, body


@contextmanager
def listening(answer: Answer, paths: tuple[str, ...]) -> Iterator[str]:
    """The address of a server, without a path.

    It answers at these paths alone, as the real one does.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status, media, text = (
                answer(body) if self.path in paths else (404, "text/plain", b"not found")
            )
            self.send_response(status)
            self.send_header("content-type", media)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def json_rpc(body: bytes) -> tuple[int, str, bytes]:
    """The server of the package json-rpc, as its documentation has it."""
    methods = Dispatcher()
    methods["add"] = lambda a, b: a + b
    response = JSONRPCResponseManager.handle(body.decode(), methods)
    return 200, "application/json", b"" if response is None else response.json.encode()


def fake(code: int, message: str, *, status: int = 200, media: str = "application/json") -> Answer:
    """A server that has the method `add`, and refuses others in its own way."""

    def one(call: Any) -> Any:
        if not isinstance(call, dict) or "method" not in call:
            return {
                "jsonrpc": "2.0",
                "id": None,
                "error": {"code": -32600, "message": "Invalid Request."},
            }
        if call["method"] != "add":
            return {"jsonrpc": "2.0", "id": call["id"], "error": {"code": code, "message": message}}
        params = call["params"]
        numbers = params if isinstance(params, list) else params.values()
        return {"jsonrpc": "2.0", "id": call["id"], "result": sum(numbers)}

    def answer(body: bytes) -> tuple[int, str, bytes]:
        try:
            message = json.loads(body)
        except ValueError:
            refusal = {
                "jsonrpc": "2.0",
                "id": None,
                "error": {"code": -32700, "message": "Parse error."},
            }
            return status, media, json.dumps(refusal).encode()
        is_batch = isinstance(message, list) and bool(message)
        reply = [one(call) for call in message] if is_batch else one(message)
        failed = not is_batch and "error" in reply
        return status if failed else 200, media, json.dumps(reply).encode()

    return answer


SERVERS: dict[str, tuple[Answer, str]] = {
    "json-rpc": (json_rpc, "/jsonrpc"),
    "aria2": (fake(1, "No such method: x", status=400, media="application/json-rpc"), "/jsonrpc"),
    "ganache": (fake(-32700, "Method x not supported."), "/"),
    "hardhat": (fake(-32004, "Method x is not supported"), "/"),
}


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of each server, with its path."""
    answer, path = SERVERS[request.param]
    with listening(answer, (path,)) as url:
        yield url + path


def run(*words: str) -> tuple[int, Any]:
    result = invoke(*words, "--json")
    return result.exit_code, json.loads(result.stdout)


def test_call_works_without_a_description(server: str) -> None:
    code, document = run("call", server, "add", "a:=1", "b:=2")
    assert (code, document["result"]) == (0, 3)
    code, document = run("call", server, "add", "--args", "[1, 2]")
    assert (code, document["result"]) == (0, 3)
    code, document = run("call", server, "nothing", "a:=1")
    assert (code != 0, document["ok"]) == (True, False)


def test_call_of_rpc_discover_shows_the_error_of_the_server(server: str) -> None:
    code, document = run("call", server, "rpc.discover")
    assert code != 0 and document["ok"] is False


@pytest.mark.parametrize(
    "words",
    [("list",), ("lock",), ("client", "-o", "-"), ("show", "add")],
    ids=lambda words: words[0],
)
def test_verbs_that_need_a_description_say_that_there_is_none(
    server: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    verb, *rest = words
    where = rest[1:] if verb == "show" else rest
    name = ["add"] if verb == "show" else []
    target = ["-o", str(tmp_path / "c.json")] if verb == "lock" else []
    code, document = run(verb, server, *name, *where, *target)
    assert (code, document["error"]["type"]) == (5, "no_discovery")
    assert f"wirecall call {server} METHOD still works" in document["error"]["next"]


def test_batch_works_without_a_description(server: str) -> None:
    lines = "\n".join(f'{{"method":"add","params":{{"a":{n},"b":1}}}}' for n in range(3))
    result = invoke("batch", server, "-", "--json", input=lines)
    assert result.exit_code == 0, result.output


def test_probe_finds_the_server(server: str) -> None:
    result = invoke("probe", server, "--json")
    found = verdict(result.stdout)
    assert (result.exit_code, found["jsonrpc"]) == (
        0,
        {"spoken": True, "arrays": True, "methods": None},
    )
    assert not any(found["revisions"].values())
    assert {problem["weight"] for problem in found["problems"]} <= {"warning"}


@pytest.mark.parametrize("name", ["aria2", "ganache", "hardhat"])
def test_probe_warns_of_another_code_and_strict_fails(name: str) -> None:
    answer, path = SERVERS[name]
    with listening(answer, (path,)) as url:
        result = invoke("probe", url + path, "--json", "--strict")
        shown = invoke("probe", url + path)
    assert result.exit_code == 9
    warned = [
        what
        for what in problems(verdict(result.stdout))
        if what.startswith("an unknown method is answered with")
    ]
    assert len(warned) == 1
    assert shown.exit_code == 0 and warned[0] in shown.stderr


def test_probe_keeps_the_path_of_an_address() -> None:
    asked: list[str] = []
    answer, _ = SERVERS["hardhat"]

    class Paths(tuple[str, ...]):
        def __contains__(self, path: object) -> bool:
            asked.append(str(path))
            return path == "/"

    with listening(answer, Paths()) as url:
        assert invoke("probe", f"{url}/", "--json").exit_code == 0
        assert set(asked) == {"/"}
        asked.clear()
        # Without a path it may be a wirecall server.
        found = verdict(invoke("probe", url, "--json").stdout)
        assert set(asked) == {"/mcp", "/rpc", "/"}
    assert found["jsonrpc"]["spoken"] and found["at_root"]
    assert found["addresses"] == [f"{url}/"]
    assert "write the / at the end of its address" in found["advice"][0]


def test_probe_does_not_mistake_other_json_for_json_rpc() -> None:
    for text in (
        b'{"errors":[{"message":"no query"}]}',
        b'{"error":{"code":404,"message":"no"}}',
        b"[]",
        b"7",
    ):
        with listening(lambda _body, text=text: (200, "application/json", text), ("/",)) as url:  # type: ignore[misc]
            result = invoke("probe", f"{url}/", "--json")
        assert (result.exit_code, problems(verdict(result.stdout))[0][:24]) == (
            9,
            "it speaks neither MCP no",
        )


def test_probe_warns_of_a_server_of_2025_03_26_without_arrays(tmp_path: Path) -> None:
    answers = {"initialize": initialized("2025-03-26"), "array": ""}
    code, found = scripted(tmp_path, answers, "--revision", "2025-03-26")
    assert (code, found["arrays"], [each["weight"] for each in found["problems"]]) == (
        0,
        False,
        ["warning"],
    )
    assert "2025-03-26 obliges a server" in problems(found)[0]
    code, _ = scripted(tmp_path, answers, "--revision", "2025-03-26", "--strict")
    assert code == 9


def test_probe_shows_its_progress_on_a_terminal(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    # The server does not answer, so the bar stays.
    script.write_text("import sys\nfor line in sys.stdin: pass\n")
    ours, theirs = pty.openpty()
    words = (
        "probe",
        "--as",
        "mcp",
        "--json",
        "--timeout",
        "600s",
        "--",
        sys.executable,
        str(script),
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "wirecall", *words],
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    watchdog = threading.Timer(PATIENCE, process.kill)
    watchdog.start()
    try:
        seen = ""
        while not ("Asking in MCP 2025-11-25" in seen and "0/5" in seen):
            seen += os.read(ours, 4096).decode()  # ends with an error if the process ends
    finally:
        watchdog.cancel()
        children = psutil.Process(process.pid).children(recursive=True)
        for each in (process, *children):
            each.kill()
        process.communicate()
        os.close(ours)

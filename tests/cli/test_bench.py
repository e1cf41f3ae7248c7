"""`wirecall bench` on real servers: over HTTP, on stdio, in this process; good and bad input."""

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from tests.cli import SHOP, invoke, running, serving, wirecall
from wirecall.cli.failures import Exit

# Short, and far below the rate that any machine reaches.
FAST = ("--rate", "40", "--duration", "500ms", "--warmup", "0", "--connections", "4")
ALONE = (*FAST, "--baseline", "none")

STRICT = """
from wirecall import App

app = App("strict")

@app.command(key="required")
def pay(cents: int) -> int:
    return cents

@app.query
def broken() -> int:
    return 1 // 0
"""


def bench(*words: str, exit: int = Exit.DONE) -> dict[str, Any]:
    """Return the result of the command in JSON, whose stdout is one document."""
    run = invoke("bench", *words, "--json")
    assert run.exit_code == exit, run.output
    assert run.stdout.count("\n") == 1
    document = json.loads(run.stdout)
    assert document["ok"] is True
    found: dict[str, Any] = document["result"]
    return found


def refused(*words: str, exit: int = Exit.USAGE) -> str:
    """Return the error of the command."""
    run = invoke("bench", *words)
    assert run.exit_code == exit, run.output
    assert run.stdout == ""
    return run.stderr


def all_answered(found: dict[str, Any], calls: int) -> None:
    """Check that every call that was sent was answered; a busy machine may not send all of them."""
    counts = found["calls"]
    assert (counts["due"], counts["failed"], found["errors"]) == (calls, 0, [])
    assert counts["answered"] == calls - counts["unsent"] > 0
    assert sum(row["count"] for row in found["histogram"]) == calls


@pytest.fixture(scope="module")
def shop() -> Iterator[str]:
    with serving(SHOP) as url:
        yield url


@pytest.fixture
def strict(tmp_path: Path) -> str:
    (tmp_path / "strict.py").write_text(STRICT)
    return str(tmp_path / "strict.py")


# --- targets --------------------------------------------------------------------------------------


def test_app_in_a_file_is_served_and_compared_with_a_bare_server() -> None:
    found = bench(SHOP, "price", "sku=tea", *FAST, "--fail-if", "ratio>1000", "--fail-if", "late<0")
    all_answered(found, 20)
    assert found["target"] == SHOP
    assert (found["protocol"], found["over"], found["revision"]) == ("rpc", "http", None)
    assert found["methods"] == [{"name": "price", "weight": 1.0}]
    assert (found["connections"], found["batch"], found["sessions"]) == (4, 1, "keep")
    assert found["rate"]["asked"] == 40
    latency = found["latency"]
    assert list(latency) == ["p50", "p95", "p99", "p99.9", "max", "mean"]
    assert 0 < latency["p50"] <= latency["p99"] <= latency["max"]
    baseline = found["baseline"]
    assert baseline["server"] == "bare"
    assert baseline["ratio"] == pytest.approx(latency["p50"] / baseline["latency"]["p50"], rel=0.01)
    assert [check["failed"] for check in found["checks"]] == [False, False]


@pytest.mark.parametrize("words", [("--over", "stdio"), ("--over", "memory"), ("--over", "http")])
@pytest.mark.parametrize("protocol", ["rpc", "mcp"])
def test_app_in_a_file_is_reached_in_three_ways(words: tuple[str, ...], protocol: str) -> None:
    found = bench(SHOP, "price", "sku=tea", *ALONE, *words, "--as", protocol)
    all_answered(found, 20)
    assert (found["over"], found["protocol"]) == (words[1], protocol)
    assert "baseline" not in found


@pytest.mark.parametrize("path", ["", "/rpc", "/mcp"])
def test_address_has_no_baseline_unless_it_is_asked_for(shop: str, path: str) -> None:
    found = bench(f"{shop}{path}", "price", "sku=tea", *FAST)
    all_answered(found, 20)
    assert "baseline" not in found
    assert found["protocol"] == ("mcp" if path == "/mcp" else "rpc")


@pytest.mark.parametrize("revision", ["2024-11-05", "2025-06-18", "2026-07-28"])
def test_address_with_a_baseline_in_each_kind_of_revision(shop: str, revision: str) -> None:
    words = ("--revision", revision, "--baseline", "bare")
    found = bench(shop, "price", "sku=tea", *FAST, *words)
    all_answered(found, 20)
    assert found["revision"] == revision
    assert found["baseline"]["ratio"] > 0


def test_command_line_of_a_server_on_stdio() -> None:
    run = invoke("bench", "price", "sku=tea", *FAST, "--json", "--", sys.executable, SHOP)
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)["result"]
    all_answered(found, 20)
    assert (found["protocol"], found["over"]) == ("mcp", "stdio")


def test_tool_that_only_mcp_has_is_called_over_mcp(tmp_path: Path) -> None:
    source = 'from wirecall import App\napp = App("t")\n@app.tool\ndef hi() -> int:\n    return 1\n'
    (tmp_path / "tool.py").write_text(source)
    assert bench(str(tmp_path / "tool.py"), "hi", *ALONE)["protocol"] == "mcp"


# --- how it calls ---------------------------------------------------------------------------------


def test_rate_is_half_of_the_warm_up_if_it_is_not_given() -> None:
    words = (
        "--over",
        "memory",
        "--duration",
        "200ms",
        "--warmup",
        "1s",
    )  # a busy machine may stall for long
    run = invoke("bench", SHOP, "price", "sku=tea", *words)
    assert run.exit_code == 0, run.output
    assert "half of it is the rate" in run.stderr
    assert "half of the" in run.stdout
    rate = bench(SHOP, "price", "sku=tea", *words)["rate"]
    assert rate["asked"] == pytest.approx(rate["capacity"] / 2, rel=0.01)


def test_batch_sends_arrays_and_counts_calls(shop: str) -> None:
    found = bench(shop, "price", "sku=tea", *FAST, "--batch", "10", "--baseline", "bare")
    all_answered(found, 20)
    assert found["batch"] == 10
    assert found["baseline"]["ratio"] > 0


def test_batch_of_mcp_needs_the_revision_with_arrays(shop: str) -> None:
    words = (shop, "price", "sku=tea", *FAST, "--batch", "5", "--revision")
    all_answered(bench(*words, "2025-03-26"), 20)
    assert "MCP 2025-11-25 has no arrays" in refused(*words, "2025-11-25")


@pytest.mark.parametrize("path", ["/rpc", "/mcp"])
def test_sessions_churn(shop: str, path: str) -> None:
    found = bench(f"{shop}{path}", "price", "sku=tea", *FAST, "--sessions", "churn")
    all_answered(found, 20)
    assert found["sessions"] == "churn"


def test_mix_makes_calls_by_weight(shop: str, tmp_path: Path) -> None:
    lines = (
        '{"method": "price", "params": {"sku": "tea"}, "weight": 9}\n'
        "\n"
        '{"tool": "charge", "params": {"order": "{n}", "cents": 1}}\n'
    )
    (tmp_path / "mix.jsonl").write_text(lines)
    found = bench(shop, "--mix", str(tmp_path / "mix.jsonl"), *FAST, "--arrivals", "random")
    all_answered(found, 20)
    assert found["methods"] == [
        {"name": "price", "weight": 9.0},
        {"name": "charge", "weight": 1.0},
    ]


def test_project_keeps_its_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of a bench are in neither the ledger nor the audit trail of a project."""
    monkeypatch.chdir(tmp_path)
    settings = '[ledger]\nurl = "sqlite:own.db"\n[audit]\nfile = "own.jsonl"\n'
    (tmp_path / "wirecall.toml").write_text(settings)
    all_answered(bench(SHOP, "charge", "order={n}", "cents=1", *ALONE), 20)
    assert [path.name for path in tmp_path.iterdir()] == ["wirecall.toml"]
    bench(SHOP, "charge", "order={n}", "cents=1", *ALONE, "--ledger", "sqlite:named.db")
    assert (tmp_path / "named.db").exists()


# --- keys and cuts --------------------------------------------------------------------------------


def handler(answer: Callable[[str, dict[str, Any]], Any]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            call = json.loads(self.rfile.read(int(self.headers["content-length"])))
            outcome = answer(call["method"], call.get("params") or {})
            body = json.dumps({"jsonrpc": "2.0", "id": call["id"], **outcome}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@pytest.fixture
def careless() -> Iterator[Callable[[Callable[[str, dict[str, Any]], Any]], str]]:
    """Return a function that serves answers of a server that is not wirecall's."""
    servers = []

    def serve(answer: Callable[[str, dict[str, Any]], Any]) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler(answer))
        server.daemon_threads = True
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/rpc"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def described(**kinds: str) -> dict[str, Any]:
    """Return the answer to `rpc.discover` of a server with these methods."""
    named = [{"name": "order", "schema": {"type": "string"}}]
    keyed = [*named, {"name": "idempotency_key", "schema": {"type": "string"}}]
    methods = [
        {"name": name, "params": keyed if kind == "command" else named, "x-kind": kind}
        for name, kind in kinds.items()
    ]
    return {"result": {"openrpc": "1.2.6", "methods": methods}}


class Till:
    """Counts payments by order. It promises keys, and does not keep the promise."""

    def __init__(self) -> None:
        self.paid: dict[str, int] = {}

    def __call__(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if method == "rpc.discover":
            return described(pay="command")
        order = params["order"]
        self.paid[order] = self.paid.get(order, 0) + 1
        return {"result": {"order": order, "paid": self.paid[order]}}


MANY = ("--rate", "200", "--duration", "1s", "--warmup", "0", "--connections", "4")


@pytest.mark.parametrize("words", [(), ("--over", "stdio"), ("--as", "mcp"), ("--batch", "2")])
def test_keys_get_equal_answers_from_wirecall(words: tuple[str, ...]) -> None:
    found = bench(
        SHOP, "charge", "order={n}", "cents=1", *MANY, "--baseline", "none", "--keys", *words
    )
    all_answered(found, 200)
    keys = found["keys"]
    assert keys["compared"] > 0
    assert (keys["differ"], keys["unanswered"], keys["example"]) == (0, 0, None)


BY_NUMBER = """
from wirecall import App

app = App("till")
taken = set()

@app.command(destructive=False)
def pay(order: int, cents: int) -> int:
    if order in taken or not order:
        raise ValueError("a second call has this order")
    taken.add(order)
    return cents
"""


@pytest.mark.parametrize(
    "words",
    [
        ("pay", "order={n}", "cents=1000000"),
        ("pay", "order:={n}", "cents=1"),
        ("pay", "--args", '{"order": "{n}", "cents": 1}'),
        ("--mix", "mix.jsonl"),
    ],
)
def test_number_of_the_call_is_an_argument_that_is_a_number(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("till.py").write_text(BY_NUMBER)
    Path("mix.jsonl").write_text('{"method": "pay", "params": {"order": "{n}", "cents": 1}}')
    found = bench("till.py", *words, *MANY, "--baseline", "none", "--keys")
    all_answered(found, 200)
    assert found["keys"]["differ"] == 0


def test_number_of_the_call_in_a_wrong_place_is_refused() -> None:
    run = invoke("bench", SHOP, "charge", "--args", '{"order": "5", "cents": "x{n}"}')
    assert run.exit_code == Exit.USAGE
    assert "cents must be a whole number" in run.output
    assert 'got "x{n}"' in run.output


def test_keys_that_a_server_ignores_are_found(careless: Any) -> None:
    url = careless(Till())
    found = bench(url, "pay", "order={n}", *MANY, "--keys", exit=Exit.FOUND)
    keys = found["keys"]
    assert keys["compared"] == keys["differ"] > 0
    assert keys["example"]["method"] == "pay"
    assert {keys["example"]["first"][-3:], keys["example"]["second"][-3:]} == {":1}", ":2}"}
    run = invoke("bench", url, "pay", "order=x{n}", *MANY, "--keys")
    assert run.exit_code == Exit.FOUND
    assert "different answers of pay with key " in run.stdout


def test_cut_with_keys_has_one_effect_in_wirecall() -> None:
    words = ("--keys", "--cut", "20%", "--baseline", "none", "--fail-if", "differ>0")
    found = bench(SHOP, "charge", "order={n}", "cents=1", *MANY, *words)
    all_answered(found, 200)
    cut = found["cut"]
    assert cut["cut"] == cut["with_key"] == cut["answered"] > 0
    assert (cut["without_key"], cut["failed"]) == (0, 0)
    assert (cut["compared"], cut["differ"]) == (cut["cut"], 0)
    assert found["keys"]["differ"] == 0
    assert found["keys"]["compared"] >= cut["cut"]


def test_cut_shows_a_server_that_runs_a_command_again(careless: Any) -> None:
    till = Till()
    words = ("--cut", "20%", "--fail-if", "differ>0")
    found = bench(careless(till), "pay", "order={n}", *MANY, *words, exit=Exit.FOUND)
    cut = found["cut"]
    doubled = [order for order, paid in till.paid.items() if paid > 1]
    assert 0 < cut["differ"] <= len(doubled)
    assert cut["without_key"] == cut["cut"] == cut["answered"]
    assert (cut["replayed"], cut["with_key"]) == (0, 0)
    assert found["checks"] == [{"check": "differ>0", "found": cut["differ"], "failed": True}]


def test_cut_says_what_it_cannot_know(careless: Any) -> None:
    run = invoke("bench", careless(Till()), "pay", "order=same", *MANY, "--cut", "20%")
    assert run.exit_code == 0, run.output
    assert "cannot be seen: the answers vary anyway" in run.stdout
    assert "perhaps before it too" in run.stdout


# --- thresholds and errors ------------------------------------------------------------------------


def test_fail_if_sets_the_exit_code(shop: str) -> None:
    words = (shop, "price", "sku=tea", *FAST, "--fail-if", "errors>0", "--fail-if", "p99>1us")
    run = invoke("bench", *words)
    assert run.exit_code == Exit.FOUND
    assert "ok      --fail-if 'errors>0': errors is 0" in run.stdout
    assert "FAILED  --fail-if 'p99>1us': p99 is" in run.stdout
    checks = bench(*words, exit=Exit.FOUND)["checks"]
    assert [(each["check"], each["failed"]) for each in checks] == [
        ("errors>0", False),
        ("p99>1us", True),
    ]


def test_errors_are_listed_by_code(careless: Any) -> None:
    calls = iter(range(1000))

    def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
        if method != "price":
            return {"error": {"code": -32601, "message": "Method not found"}}
        if next(calls) % 2:
            return {"error": {"code": -32050, "message": "out of tea"}}
        return {"result": 5}

    url = careless(answer)
    found = bench(url, "price", *FAST)
    assert found["calls"]["answered"] > 0
    (error,) = found["errors"]
    assert (error["code"], error["exit"]) == (-32050, Exit.REMOTE)
    assert error["count"] == found["calls"]["failed"] > 0
    assert "out of tea" in error["message"]


def test_report_names_each_kind_of_error(careless: Any) -> None:
    calls = iter(range(1000))

    def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
        number = next(calls) if method == "price" else 0
        return {"error": {"code": -32050, "message": "out of tea"}} if number % 2 else {"result": 5}

    run = invoke("bench", careless(answer), "price", *FAST, "--fail-if", "errors>1%")
    assert run.exit_code == Exit.FOUND
    assert " x -32050: out of tea." in run.stdout


def test_run_without_any_answer_is_an_error(careless: Any) -> None:
    calls = iter(range(1000))

    def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
        if method == "price" and next(calls) > 0:
            return {"error": {"code": -32050, "message": "out of tea"}}
        return {"result": 5}

    said = refused(careless(answer), "price", *FAST, exit=Exit.REMOTE)
    assert "No call was answered." in said
    assert "out of tea" in said


def test_first_call_that_fails_ends_the_command(shop: str, strict: str) -> None:
    said = refused(shop, "price", "sku=milk", *FAST, exit=Exit.REMOTE)
    assert "The first call of price failed: there is no article 'milk'." in said
    assert "the server's log" not in refused(SHOP, "price", "sku=milk", *FAST, exit=Exit.REMOTE)
    said = refused(strict, "broken", *FAST, exit=Exit.REMOTE)
    assert "the server's log: broken failed" in said
    assert "ZeroDivisionError" in said


def test_command_that_needs_a_key_gets_one_with_keys(strict: str) -> None:
    said = refused(strict, "pay", "cents=5", *ALONE, exit=Exit.KEY)
    assert "The first call of pay failed" in said
    assert "next: --keys gives every command a key" in said
    all_answered(bench(strict, "pay", "cents=5", *ALONE, "--keys"), 20)


# --- bad input ------------------------------------------------------------------------------------

NOWHERE = "http://127.0.0.1:1/rpc"


@pytest.mark.parametrize(
    ("words", "what", "why", "fix"),
    [
        ([], "Which method?", "got neither", "METHOD name=value"),
        (["price", "--mix", "x"], "Which method?", "got both", ""),
        (["--mix", "x", "--args", "{}"], "--args is for one METHOD", "", "drop --args"),
        (["price", "--rate", "0"], "--rate '0'", "above 0 and at most 100,000, got '0'", "500"),
        (["price", "--rate", "nan"], "--rate 'nan'", "got 'nan'", "--rate 500"),
        (["price", "--rate", "-3"], "--rate '-3'", "got '-3'", "--rate 500"),
        (["price", "--rate", "inf"], "--rate 'inf'", "got 'inf'", "--rate 500"),
        (["price", "--rate", "100001"], "--rate '100001'", "at most 100,000", ""),
        (["price", "--rate", "fast"], "--rate 'fast'", "expected a number", ""),
        (["price", "--duration", "11m"], "--duration '11m'", "at most 10 minutes", "10s"),
        (["price", "--duration", "0"], "'0' is not a time", "", ""),
        (["price", "--warmup", "0"], "There is no rate", "the warm-up finds one", "--rate 500"),
        (["price", "--rate", "0.1", "--duration", "1s"], "no call to make", "less than one", ""),
        (["price", "--connections", "0"], "0 is not in the range 1<=x<=200", "", "--help"),
        (["price", "--batch", "0"], "0 is not in the range", "", ""),
        (["price", "--cut", "1"], "--cut '1'", "above 0% and at most 50%, got '1'", "--cut 1%"),
        (["price", "--cut", "0%"], "--cut '0%'", "got '0%'", "--cut 1%"),
        (["price", "--cut", "nan%"], "--cut 'nan%'", "got 'nan%'", "--cut 1%"),
        (["price", "--cut", "1%", "--sessions", "churn"], "exclude each other", "", "drop one"),
        (["price", "--fail-if", "p99"], "--fail-if 'p99' cannot be read", "expected NAME", "20ms"),
        (["price", "--fail-if", "p98>1ms"], "cannot be read", "got 'p98'", "p99>1ms"),
        (["price", "--fail-if", "ratio>3"], "has no ratio", "bare server", "--baseline bare"),
        (["price", "--over", "memory"], "--over memory is for an app in a file", "over http", ""),
        (["price", "--ledger", "memory:"], "--ledger is for an app in a file", "", ""),
        (["--mix", "nowhere.jsonl"], "nowhere.jsonl cannot be read", "No such file", "--mix"),
        (["price", "--as", "mcp", "--revision", "1999-01-01"], "1999-01-01", "five", "2025-03-26"),
        (["price", "--as", "rpc", "--revision", "2025-03-26"], "has no revisions", "", "drop"),
    ],
)
def test_mistakes_are_refused_before_anything_is_sent(
    words: list[str], what: str, why: str, fix: str
) -> None:
    said = refused(NOWHERE, *words)
    assert what in said
    assert why in said
    assert fix in said


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["price", "--over", "stdio", "--cut", "1%"], "--cut drops connections of HTTP"),
        (["price", "--over", "memory", "--baseline", "bare"], "no bare server to compare with"),
        (["price", "--over", "memory", "--fail-if", "ratio>3"], "has no ratio"),
    ],
)
def test_options_that_need_http_are_refused_for_other_ways(words: list[str], what: str) -> None:
    assert what in refused(SHOP, *words)


@pytest.mark.parametrize("host", ["example.com", "10.0.0.1", "[2001:db8::1]", "localhost.example"])
def test_remote_server_is_refused(host: str) -> None:
    said = refused(f"http://{host}/rpc", "price", *FAST)
    assert "is not on this machine" in said
    assert "load can stop a server" in said
    assert "--allow-remote" in said


def test_server_that_cannot_be_reached_is_exit_4() -> None:
    assert "cannot be reached" in refused(NOWHERE, "price", *FAST, exit=Exit.UNREACHABLE)
    assert "did not start" in refused("x", *FAST, "--", "false", exit=Exit.UNREACHABLE)


def test_app_that_cannot_be_served_is_reported(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import nonsense_module\n")
    assert "cannot be loaded" in refused(str(tmp_path / "bad.py"), "x", *FAST)


@pytest.mark.parametrize(
    ("words", "what", "why"),
    [
        (["prcie", "sku=tea"], "There is no method or tool 'prcie'", "did you mean price?"),
        (["price", "skuu=tea"], "There is no argument 'skuu'", "did you mean sku?"),
        (["price"], "sku is missing", "text"),
        (["price", "sku=tea", "--keys"], "--keys has no command", "got price"),
        (["price", "sku=tea", "--batch", "51"], "does not accept the array", "at most 50 calls"),
    ],
)
def test_mistakes_that_the_server_describes(
    shop: str, words: list[str], what: str, why: str
) -> None:
    said = refused(shop, *words, *FAST)
    assert what in said
    assert why in said


@pytest.mark.parametrize(
    ("lines", "what", "why"),
    [
        ('{"method": "price", "params": {"sku": "tea"}}\noops\n', "line 2 is not a call", "JSON"),
        ('\n\n{"method": "prise"}\n', "line 3: There is no method or tool", "did you mean price?"),
        ('{"method": "price", "wieght": 1}\n', "line 1 is not a call", "wieght"),
        ('{"method": "price", "weight": 0}\n', "line 1 cannot be used", "above 0, got 0"),
        ('{"method": "price", "weight": -1}\n', "line 1 cannot be used", "got -1"),
        ('{"method": "price", "weight": "x"}\n', "line 1 is not a call", "weight"),
        ('{"params": {}}\n', "line 1 is not a call", "method and tool"),
        ('{"method": "price", "tool": "price"}\n', "line 1 is not a call", "method and tool"),
        ('{"method": "price", "params": {"sku": 5}}\n', "line 1: sku must be text", "got 5"),
        ("\n", "is empty", "one call per line"),
    ],
)
def test_mix_with_a_bad_line_names_it(
    shop: str, tmp_path: Path, lines: str, what: str, why: str
) -> None:
    (tmp_path / "mix.jsonl").write_text(lines)
    said = refused(shop, "--mix", str(tmp_path / "mix.jsonl"), *FAST)
    assert what in said
    assert why in said


def test_keys_need_a_server_that_lists_its_methods(careless: Any) -> None:
    url = careless(lambda method, _: {"error": {"code": -32601, "message": "Method not found"}})
    assert "does not list its methods" in refused(url, "pay", *FAST, "--keys")


# --- output and end -------------------------------------------------------------------------------


def test_report_is_for_people_without_json(shop: str) -> None:
    run = wirecall("bench", shop, "price", "sku=tea", *FAST)
    assert run.returncode == 0
    lines = run.stdout.decode().splitlines()
    assert lines[0] == f"price of {shop}: JSON-RPC over HTTP, 4 connections"
    assert lines[1].startswith("rate     40 calls/s asked, ")
    assert lines[2].startswith("calls    20 due, ")
    assert lines[4].startswith("latency  p50 ")
    assert any("####" in line for line in lines[5:])
    assert run.stdout.isascii()
    # No live line in a pipe; a busy machine may cause a warning.
    assert not run.stderr or run.stderr.decode().startswith("! This process was late")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_bench_ends_its_servers(number: signal.Signals) -> None:
    words = ("--duration", "60s", "--warmup", "60s", "--connections", "2")
    with running("bench", SHOP, "price", "sku=tea", *words) as run:
        run.wait_for("Finding a rate")
        children = psutil.Process(run.process.pid).children(recursive=True)
        assert len(children) >= 2
        code, _, said = run.end(number)
        assert code == Exit.INTERRUPTED
        assert "Interrupted." in said
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive


def test_killed_bench_ends_its_servers() -> None:
    words = ("--duration", "60s", "--warmup", "60s", "--connections", "2")
    with running("bench", SHOP, "price", "sku=tea", *words) as run:
        run.wait_for("Finding a rate")
        children = psutil.Process(run.process.pid).children(recursive=True)
        run.process.kill()
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive

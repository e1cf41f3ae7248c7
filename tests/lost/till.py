"""A server of MCP without keys and without records.

    python -m tests.lost.till EFFECTS CONTROL          on stdin and stdout
    python -m tests.lost.till EFFECTS CONTROL PORT     over HTTP

A tool of any name pays: it writes a line into the file EFFECTS. Before and after that it asks the
harness, over the socket CONTROL, whether it may continue (`shop`).
"""

import json
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from tests.lost.shop import Asked, Effect, Point

EFFECTS = sys.argv[1]
CONTROL = sys.argv[2]
REVISIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
LOCK = threading.Lock()


def ask(order: str, at: Point) -> None:
    """Ask whether the tool may continue. A harness that has ended does not answer."""
    asked = Asked(1, order, at, (str(os.getpid()), "", ""))
    with closing(socket.socket(socket.AF_UNIX)) as link:
        link.connect(CONTROL)
        link.sendall(msgspec.json.encode(asked) + b"\n")
        if not link.recv(1 << 10):
            os._exit(1)


def pay(params: dict[str, Any]) -> dict[str, Any]:
    order = params["arguments"]["order"]
    nap = params["arguments"]["nap"]
    ask(order, "entered")
    time.sleep(nap / 2)
    sender = params.get("_meta", {}).get("sender", "")
    effect = Effect(order, sender, "", secrets.token_hex(8))
    file = os.open(EFFECTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(file, msgspec.json.encode(effect) + b"\n")
    finally:
        os.close(file)
    ask(order, "acted")
    time.sleep(nap / 2)
    told = {"order": order, "run": effect.run, "filler": "x" * params["arguments"]["size"]}
    return {"content": [{"type": "text", "text": json.dumps(told)}]}


def initialize(params: dict[str, Any]) -> dict[str, Any]:
    version = params["protocolVersion"]
    return {
        "protocolVersion": version if version in REVISIONS else REVISIONS[-1],
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "till", "version": "1"},
    }


def answer(message: dict[str, Any]) -> bytes | None:
    """Return the answer to a message; None for a notification."""
    if "id" not in message or "method" not in message:
        return None
    method = message["method"]
    told: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
    if method == "initialize":
        told["result"] = initialize(message["params"])
    elif method == "tools/list":
        told["result"] = {"tools": [{"name": "pay", "inputSchema": {"type": "object"}}]}
    elif method == "tools/call":
        told["result"] = pay(message["params"])
    elif method == "ping":
        told["result"] = {}
    else:
        told["error"] = {"code": -32601, "message": "Method not found"}
    return json.dumps(told).encode()


def serve_line(line: str) -> None:
    told = answer(json.loads(line))
    if told is not None:
        with LOCK:
            sys.stdout.buffer.write(told + b"\n")
            sys.stdout.buffer.flush()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        told = answer(json.loads(body))
        self.send_response(202 if told is None else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(told or b"")))
        self.end_headers()
        self.wfile.write(told or b"")

    def do_GET(self) -> None:
        self.send_response(405)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    request_queue_size = 256


def main() -> None:
    if len(sys.argv) > 3:
        Server(("127.0.0.1", int(sys.argv[3])), Handler).serve_forever()
    for line in sys.stdin:
        threading.Thread(target=serve_line, args=[line], daemon=True).start()


if __name__ == "__main__":
    main()

"""A server on stdio without any records, which counts its effects in a file.

    python -m tests.gateway.server FILE [newest]

With "newest" it speaks 2026-07-28 alone, and its tool `ask` asks its client `rounds` times, by the
requests in `questions`, before it pays.

Its tool `pay` writes a line into the file. The argument `then` says what happens next: "die" ends
the process before the answer, "die_before" before the line, "die_half" within the answer, "die_after"
after it, "mute" never answers, "wait" answers when the file FILE.go exists,
"error" and "refuse" answer with errors, "is_error" with a result, "garbage" with text, "wrong_id",
"twice" and "big" with such answers; with `echo` the result has the argument `to`. `look` only
reads. The file FILE.tools has more tools.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

FILE = Path(sys.argv[1])
IS_NEWEST = sys.argv[2:] == ["newest"]
PREFIX = "io.modelcontextprotocol/"
LOCK = threading.Lock()
ASK = {"name": "ask", "inputSchema": {"type": "object"}}
TOOLS: list[dict[str, Any]] = [
    {
        "name": "pay",
        "description": "Pay.",
        "inputSchema": {"type": "object"},
        "annotations": {"readOnlyHint": False, "priority": 0.10},
        "x-unknown": {"kept": 1e2},
    },
    {
        "name": "look",
        "inputSchema": {"type": "object"},
        "annotations": {"readOnlyHint": True},
    },
]


def write(text: str) -> None:
    with LOCK:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def reply(id: Any, **members: Any) -> None:
    write(json.dumps({"jsonrpc": "2.0", "id": id, **members}))


def note(line: str) -> None:
    with LOCK, FILE.open("a") as file:
        file.write(line + "\n")


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def pay(message: dict[str, Any]) -> None:
    id = message["id"]
    arguments = message["params"].get("arguments", {})
    then = arguments.get("then", "")
    if then == "refuse":
        reply(id, error={"code": -32602, "message": "their refusal", "data": {"their": 0.5}})
        return
    if then == "die_before":
        os._exit(3)
    to = arguments.get("to", "")
    note(f"pay {to}")
    token = message["params"].get("_meta", {}).get("progressToken")
    if token is not None:
        for number in range(arguments.get("reports", 1)):
            params = {"progressToken": token, "progress": number, "x": 1}
            write(
                json.dumps({"jsonrpc": "2.0", "method": "notifications/progress", "params": params})
            )
    if then == "die":
        os._exit(3)
    if then == "die_half":
        sys.stdout.write(f'{{"jsonrpc": "2.0", "id": {id}, "resu')
        sys.stdout.flush()
        os._exit(3)
    if then == "mute":
        return
    if then == "wait":
        wait_for(FILE.with_suffix(".go"))
    if then == "error":
        reply(id, error={"code": -32000, "message": "their error", "data": {"their": 0.5}})
        return
    if then == "garbage":
        write("this is not JSON")
        return
    if then == "wrong_id":
        reply(99999, result={"content": []})
        return
    if then == "big":
        reply(id, result={"content": [{"type": "text", "text": "x" * arguments["size"]}]})
        return
    count = len(FILE.read_text().splitlines())
    text = f'{{"content": [{{"type": "text", "text": "paid {count}"}}], "x": 0.10, "isError": %s}}'
    body = text % ("true" if then == "is_error" else "false")
    if arguments.get("echo"):
        body = f'{body[:-1]}, "to": {json.dumps(to)}}}'
    write(f'{{"jsonrpc": "2.0", "id": {id}, "result": {body}}}')
    if then == "die_after":
        os._exit(3)
    if then == "twice":
        reply(id, result={"content": [{"type": "text", "text": "second"}]})


def initialize(message: dict[str, Any]) -> None:
    note(f"initialize {json.dumps(message['params'], sort_keys=True)}")
    reply(
        message["id"],
        result={
            "protocolVersion": message["params"]["protocolVersion"],
            "capabilities": {"tools": {"listChanged": True}, "x-own": {"a": 0.10}},
            "serverInfo": {"name": "counter", "version": "7", "x": 1},
            "instructions": "count",
        },
    )


def discover(message: dict[str, Any]) -> None:
    info = {"name": "counter", "version": "7", "x": 1}
    result = {
        "resultType": "complete",
        "supportedVersions": ["2026-07-28"],
        "capabilities": {"tools": {}},
        "_meta": {f"{PREFIX}serverInfo": info},
    }
    reply(message["id"], result=result)


def ask(message: dict[str, Any]) -> None:
    """Ask the client, in several rounds; then pay."""
    id = message["id"]
    params = message["params"]
    arguments = params.get("arguments", {})
    questions = arguments.get("questions", ["elicitation/create"])
    state = params.get("requestState", "")
    rounds = state.count("their")
    if arguments.get("state") == "none":
        rounds = int("inputResponses" in params)
    note(f"round {state} {json.dumps(params.get('inputResponses'))}")
    declared = params["_meta"][f"{PREFIX}clientCapabilities"]
    note(f"declared {json.dumps(declared, sort_keys=True)}")
    if not all(each.partition("/")[0] in declared for each in questions):
        reply(id, error={"code": -32021, "message": "not declared"})
    elif rounds < int(arguments.get("rounds", 1)):
        asked = {each: {"method": each, "params": {"message": "sure?"}} for each in questions}
        more = {"inputRequests": asked, "requestState": f"{state} their state".strip()}
        if arguments.get("state") == "none":
            del more["requestState"]
        reply(id, result={"resultType": "input_required", **more})
    elif message["method"] == "prompts/get":
        reply(id, result={"resultType": "complete", "messages": [], "x": 0.5})
    else:
        pay(message)


def serve_newest(message: dict[str, Any]) -> None:
    """Serve a message of 2026-07-28; refuse any other."""
    id = message.get("id")
    params = message.get("params", {})
    if f"{PREFIX}protocolVersion" not in params.get("_meta", {}):
        reply(id, error={"code": -32601, "message": "no envelope"})
    elif message["method"] == "server/discover":
        discover(message)
    elif message["method"] in ("tools/call", "prompts/get") and params["name"] == "ask":
        threading.Thread(target=ask, args=[message], daemon=True).start()
    elif message["method"] == "tools/call" and params["name"] == "slow":
        note("pay slowly")
        POLLS.append(params["arguments"]["polls"])
        reply(id, result={"resultType": "task", **task()})
    elif message["method"] == "subscriptions/listen":
        note("listen")
        if FILE.with_suffix(".listen").exists():
            reply(id, result={"resultType": "complete"})  # it ends each stream at once
        else:
            reply(id, error={"code": -32601, "message": "no streams"})
    elif message["method"] == "tasks/get":
        POLLS[-1] -= 1
        reply(id, result={"resultType": "complete", **task()})
    else:
        serve(message)


POLLS: list[int] = []


def task() -> dict[str, Any]:
    """The task of the tool `slow`, which is over after some polls."""
    state: dict[str, Any] = {"taskId": "1", "pollIntervalMs": 1, "status": "working"}
    if POLLS[-1]:
        return {**state, "statusMessage": f"{POLLS[-1]} to go"}
    result = {"content": [{"type": "text", "text": "slowly"}]}
    return {**state, "status": "completed", "result": result}


def ask_client(message: dict[str, Any]) -> None:
    """Ask the client for its roots, and answer with what it says."""
    write('{"jsonrpc": "2.0", "id": "q-1", "method": "roots/list", "params": {"x": 0.10}}')
    ASKED.append(message["id"])


ASKED: list[Any] = []


# complexity: one branch per method of a small server.
def serve(message: dict[str, Any]) -> None:
    method = message.get("method")
    if method is None:
        if ASKED:
            reply(ASKED.pop(), result={"their": message.get("result"), "id": message["id"]})
        else:
            note(f"answered {json.dumps(message.get('result'))}")
    elif method == "initialize":
        initialize(message)
    elif method == "tools/list":
        more = [ASK] if IS_NEWEST else []
        if FILE.with_suffix(".tools").exists():
            more += json.loads(FILE.with_suffix(".tools").read_text())
        kept = {}
        if FILE.with_suffix(".kept").exists():
            kept = json.loads(FILE.with_suffix(".kept").read_text())
        reply(message["id"], result={"tools": [*TOOLS, *more], **kept})
    elif method == "tools/call" and message["params"]["name"] == "look":
        then = message["params"].get("arguments", {}).get("then")
        if then == "die":
            os._exit(3)
        if then == "die_once" and not FILE.with_suffix(".died").exists():
            FILE.with_suffix(".died").touch()
            os._exit(3)
        if then != "mute":
            lines = len(FILE.read_text().splitlines())
            reply(message["id"], result={"content": [], "lines": lines, "pid": os.getpid()})
    elif method == "tools/call":
        threading.Thread(target=pay, args=[message], daemon=True).start()
    elif method == "resources/read":
        code = -32602 if IS_NEWEST else -32002
        reply(message["id"], error={"code": code, "message": "no such", "data": {"their": 0.5}})
    elif method == "x/ask":
        ask_client(message)
    elif method == "x/echo":
        write(f'{{"jsonrpc": "2.0", "id": {message["id"]}, "result": {{"n": 1.50, "e": 1e2}}}}')
    elif "id" in message:
        reply(message["id"], result={})
    else:
        note(f"{method} {json.dumps(message.get('params'))}")
        if method == "x/ask_later":
            write('{"jsonrpc": "2.0", "id": "q-2", "method": "roots/list"}')
        if method == "x/tell":
            write('{"jsonrpc": "2.0", "method": "x/told", "params": {"n": 0.10}}')


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if IS_NEWEST:
            serve_newest(message)
        else:
            serve(message)


if __name__ == "__main__":
    main()

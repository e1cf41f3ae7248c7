"""Servers for `wirecall probe`, and what it prints about them."""

import json
import sys
from pathlib import Path
from typing import Any

from tests.cli import invoke

# A server on stdio that answers as the table `ANSWERS` says: by method, a string with the id put
# in, or nothing.
SCRIPT = """
import json, sys
ANSWERS = {answers}
print({noise}, end="", flush=True)
for line in sys.stdin:
    try:
        message = json.loads(line)
    except ValueError:
        continue
    method = message["method"] if isinstance(message, dict) else "array"
    answer = ANSWERS.get(method, ANSWERS["else"])
    if answer and not (isinstance(message, dict) and "id" not in message and method not in ANSWERS):
        id = message.get("id", 0) if isinstance(message, dict) else 0
        print(answer.replace("ID", str(id)), flush=True)
"""


UNKNOWN = '{"jsonrpc":"2.0","id":ID,"error":{"code":-32601,"message":"Method not found"}}'


EMPTY = '{"jsonrpc":"2.0","id":ID,"result":{}}'


def initialized(revision: str = "2025-11-25", **more: Any) -> str:
    result = {
        "protocolVersion": revision,
        "capabilities": {},
        "serverInfo": {"name": "other", "version": "1"},
        **more,
    }
    return '{"jsonrpc":"2.0","id":ID,"result":RESULT}'.replace("RESULT", json.dumps(result))


def probed(*words: str) -> tuple[int, dict[str, Any]]:
    result = invoke("probe", "--json", *words)
    return result.exit_code, verdict(result.stdout)


def verdict(text: str | bytes) -> dict[str, Any]:
    document = json.loads(text)
    found: dict[str, Any] = document["result"] if document["ok"] else document["error"]
    return found


def scripted(
    tmp_path: Path, answers: dict[str, str], *words: str, noise: str = ""
) -> tuple[int, dict[str, Any]]:
    """The verdict on a server with these answers, at 2025-11-25 by default."""
    path = tmp_path / "server.py"
    table = {"initialize": initialized(), "ping": EMPTY, "else": UNKNOWN, **answers}
    path.write_text(SCRIPT.format(answers=repr(table), noise=repr(noise)))
    words = words or ("--revision", "2025-11-25")
    return probed("--timeout", "20s", *words, "--", sys.executable, str(path))


def problems(found: dict[str, Any]) -> list[str]:
    return [problem["what"] for problem in found["problems"]]

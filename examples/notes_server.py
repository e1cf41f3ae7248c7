"""An MCP server without wirecall: plain Python on stdin and stdout, no retries, no keys.

python examples/notes_server.py FILE                       the server alone
wirecall wrap -- python examples/notes_server.py FILE      the same, with one effect per call
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

TOOLS = [
    {
        "name": "add_note",
        "description": "Write a note into the file, and return its number.",
        "inputSchema": {
            "type": "object",
            "properties": {"text": {"type": "string"}},
            "required": ["text"],
        },
    },
    {
        "name": "process",
        "description": "Return the number of this server's process.",
        "inputSchema": {"type": "object"},
        "annotations": {"readOnlyHint": True},
    },
]


def add_note(file: Path, text: str) -> str:
    with file.open("a") as notes:
        notes.write(f"{text}\n")
    time.sleep(0.5)  # a slow disk: impatient clients give up here
    return f"note {len(file.read_text().splitlines())}"


def answer(file: Path, method: str, params: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a request."""
    if method == "initialize":
        return {
            "protocolVersion": "2025-06-18",
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "notes", "version": "1.0"},
        }
    if method == "tools/list":
        return {"tools": TOOLS}
    if method == "tools/call" and params["name"] == "add_note":
        text = add_note(file, params["arguments"]["text"])
    else:
        text = str(os.getpid())
    return {"content": [{"type": "text", "text": text}]}


def main() -> None:
    file = Path(sys.argv[1])
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        result = answer(file, message["method"], message.get("params", {}))
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)


if __name__ == "__main__":
    main()

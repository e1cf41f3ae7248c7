"""A plain HTTP client gives up too early and sends its call again: one effect, and no key was sent.

python examples/impatient.py                     the client, which starts the server
wirecall serve examples/impatient.py             the server alone
"""

import asyncio
import http.client
import json
import subprocess
import sys
from typing import Any

from wirecall import App

app = App("warehouse")
shipped: list[str] = []


@app.command(destructive=False)
async def ship(order: str) -> str:
    """Ship an order; the carrier takes a moment to confirm it."""
    shipped.append(order)
    await asyncio.sleep(0.5)
    return f"order {order}, parcel {len(shipped)}"


@app.query
def parcels() -> int:
    """Return the number of parcels so far."""
    return len(shipped)


def call(port: int, method: str, timeout: float | None = None, **params: str) -> Any:
    """Call a method as any HTTP client does."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    message = {"jsonrpc": "2.0", "method": method, "params": params, "id": 1}
    try:
        connection.request(
            "POST", "/rpc", json.dumps(message), {"Content-Type": "application/json"}
        )
        return json.load(connection.getresponse())["result"]
    finally:
        connection.close()


def main() -> None:
    command = [sys.executable, "-m", "wirecall", "serve", __file__, "--http", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        line = next(line for line in server.stderr if "Listening on" in line)
        port = int(line.rpartition(":")[2])
        try:
            call(port, "ship", timeout=0.2, order="7")
        except TimeoutError as error:
            print("the answer is lost:", error)
        print("the same call again:", call(port, "ship", order="7"))
        print("another one:", call(port, "ship", order="7"))
        print("parcels:", call(port, "parcels"))
        server.terminate()


if __name__ == "__main__":
    main()

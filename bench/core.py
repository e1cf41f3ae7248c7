"""Bytes in to bytes out, with no network: wirecall beside a bare msgspec loop and beside other
libraries, in one run.

    make bench            or   python bench/core.py [--quick]

Every row is the best of several rounds, and the rows take turns within a round, so that a noisy
neighbour affects all. Nothing here waits, so the measure is processor time. Read the ratios; the
microseconds depend on the machine.

Bare is the minimum that any JSON-RPC server must do: decode the envelope, look up the method,
decode the params by its types, call it, encode the reply. It checks nothing, and a malformed entry
would crash it.
"""

import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from targets import Target, report
from wirecall import App, Context, Limits
from wirecall.server.context import Middleware, Next

Row = tuple[str, int, Callable[[int], float]]

ROUNDS = 3 if "--quick" in sys.argv else 9
BUDGET = 0.02 if "--quick" in sys.argv else 0.1  # seconds a row may take in a round


def call(position: int, method: str = "add") -> dict[str, Any]:
    return {"jsonrpc": "2.0", "method": method, "params": {"a": position, "b": 2}, "id": position}


def message(count: int, method: str = "add") -> bytes:
    entries = [call(i, method) for i in range(count)]
    return msgspec.json.encode(entries if count > 1 else entries[0])


def answer(count: int) -> list[Any]:
    return [{"jsonrpc": "2.0", "result": i + 2, "id": i} for i in range(count)]


# --- bare -----------------------------------------------------------------------------------------


class Envelope(Struct):
    jsonrpc: Literal["2.0"]
    method: str
    params: Raw
    id: int


class Reply(Struct, tag_field="jsonrpc", tag="2.0"):
    result: Any
    id: int


class AddParams(Struct):
    a: int
    b: int


def add(a: int, b: int) -> int:
    return a + b


async def add_async(a: int, b: int) -> int:
    return a + b


decode_one = msgspec.json.Decoder(Envelope).decode
decode_many = msgspec.json.Decoder(list[Envelope]).decode
encode = msgspec.json.Encoder().encode
METHODS = {"add": (add, msgspec.json.Decoder(AddParams).decode)}


def bare_one(data: bytes) -> bytes:
    envelope = decode_one(data)
    function, decode = METHODS[envelope.method]
    params = decode(envelope.params)
    return encode(Reply(function(params.a, params.b), envelope.id))


def bare_many(data: bytes) -> bytes:
    replies = []
    for envelope in decode_many(data):
        function, decode = METHODS[envelope.method]
        params = decode(envelope.params)
        replies.append(Reply(function(params.a, params.b), envelope.id))
    return encode(replies)


class Offset:
    value = 0


OFFSET = Offset()


def add_provided(a: int, b: int, offset: Offset) -> int:
    return a + b + offset.value


# --- wirecall -------------------------------------------------------------------------------------


async def empty(context: Context, call_next: Next) -> object:
    return await call_next(context)


def make_app(*middleware: Middleware) -> App:
    app = App(
        "bench",
        mode="production",
        ledger="memory:",
        limits=Limits(batch=1000),
        middleware=middleware,
    )
    app.query(add)
    app.query(add_async)
    app.command(name="put")(add)

    @app.provide
    def offset() -> Offset:
        return OFFSET

    app.query(add_provided)
    return app


# --- peers ----------------------------------------------------------------------------------------


def json_rpc() -> Callable[[bytes], Any]:
    from jsonrpc import Dispatcher, JSONRPCResponseManager

    dispatcher = Dispatcher({"add": add})
    return lambda data: JSONRPCResponseManager.handle(data.decode(), dispatcher).json


def jsonrpcserver() -> Callable[[bytes], Any]:
    from jsonrpcserver import Success, dispatch

    return lambda data: dispatch(data.decode(), methods={"add": lambda a, b: Success(a + b)})


def ajsonrpc() -> Callable[[bytes], Awaitable[Any]]:
    from ajsonrpc.dispatcher import Dispatcher
    from ajsonrpc.manager import AsyncJSONRPCResponseManager

    dispatcher = Dispatcher()
    dispatcher.add_function(add, name="add")
    manager = AsyncJSONRPCResponseManager(dispatcher)

    async def handle(data: bytes) -> Any:
        return await manager.get_payload_for_payload(data.decode())

    return handle


def pjrpc() -> Callable[[bytes], Any]:
    from pjrpc.server import Dispatcher, MethodRegistry

    registry = MethodRegistry()
    registry.add_method(add, "add")
    dispatcher: Any = Dispatcher()
    dispatcher.add_methods(registry)

    def handle(data: bytes) -> Any:
        dispatched = dispatcher.dispatch(data.decode(), context=None)
        return dispatched and dispatched[0]

    return handle


# --- measuring ------------------------------------------------------------------------------------


def timed(handle: Callable[[bytes], Any], data: bytes) -> Callable[[int], float]:
    """A loop of n messages, in seconds."""

    def run(n: int) -> float:
        started = time.process_time()
        for _ in range(n):
            handle(data)
        return time.process_time() - started

    return run


def timed_async(handle: Callable[[bytes], Awaitable[Any]], data: bytes) -> Callable[[int], float]:
    async def loop(n: int) -> float:
        started = time.process_time()
        for _ in range(n):
            await handle(data)
        return time.process_time() - started

    return lambda n: asyncio.run(loop(n))


def check(name: str, reply: Any, count: int) -> None:
    """Check the answers: a benchmark of wrong ones is worthless."""
    text = reply if isinstance(reply, (str, bytes)) else json.dumps(reply)
    answered = json.loads(text)
    expected = answer(count) if count > 1 else answer(1)[0]
    by_id = sorted(answered, key=lambda entry: entry["id"]) if count > 1 else answered
    if by_id != expected:
        raise SystemExit(f"{name} answers {text[:200]!r}")


def measure(rows: list[Row]) -> dict[str, float]:
    """Microseconds per entry, the best of all rounds."""
    best: dict[str, float] = {}
    for name, count, run in rows:
        seconds = run(1)
        best[name] = max(seconds, 1e-6) / count * 1e6
    for _ in range(ROUNDS):
        for name, count, run in rows:
            n = max(1, int(BUDGET / (best[name] * count / 1e6)))
            best[name] = min(best[name], run(n) / n / count * 1e6)
    return best


def rows() -> list[Row]:
    app = make_app()
    peers: dict[str, Callable[[bytes], Any]] = {
        "json-rpc": json_rpc(),
        "jsonrpcserver": jsonrpcserver(),
        "pjrpc": pjrpc(),
    }
    table: list[Row] = []
    for count, bare in ((1, bare_one), (50, bare_many)):
        data = message(count)
        table.append((f"bare, {count}", count, timed(bare, data)))
        table.append((f"wirecall sync, {count}", count, timed(app.handle_sync, data)))
        table.append(
            (
                f"wirecall async, {count}",
                count,
                timed_async(app.handle, message(count, "add_async")),
            )
        )
        check("bare", bare(data), count)
        check("wirecall", app.handle_sync(data), count)
        for name, handle in peers.items():
            check(name, handle(data), count)
            table.append((f"{name}, {count}", count, timed(handle, data)))
        handle_async = ajsonrpc()
        table.append((f"ajsonrpc, {count}", count, timed_async(handle_async, data)))
    check("a provider", app.handle_sync(message(1, "add_provided")), 1)
    table.append(("wirecall provider, 1", 1, timed(app.handle_sync, message(1, "add_provided"))))
    guarded = make_app(empty)
    check("a middleware", guarded.handle_sync(message(1)), 1)
    table.append(("wirecall middleware, 1", 1, timed(guarded.handle_sync, message(1))))
    table.append(("wirecall sync, 1000", 1000, timed(app.handle_sync, message(1000))))
    return table


def imports() -> tuple[float, float]:
    """Milliseconds of `import wirecall` and `import msgspec`, each over a bare interpreter, the
    best of several starts.
    """
    # The first start writes the bytecode, which an installed package has.
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }

    def start(statement: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", statement], check=True, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    best = {"pass": 1e9, "import msgspec": 1e9, "import wirecall": 1e9}
    for _ in range(10 * ROUNDS // 3):
        for statement in best:
            best[statement] = min(best[statement], start(statement))
    ours, msgspecs = (
        1000 * (best[f"import {name}"] - best["pass"]) for name in ("wirecall", "msgspec")
    )
    return ours, msgspecs


def main() -> int:
    best = measure(rows())
    for count in (1, 50):
        bare = best[f"bare, {count}"]
        print(
            f"\n{'one call' if count == 1 else f'an entry in a batch of {count}'}: bare msgspec {bare:.2f} µs"
        )
        for name, micros in sorted(best.items(), key=lambda item: item[1]):
            if name.endswith(f", {count}"):
                print(
                    f"  {name.removesuffix(f', {count}'):<17} {micros:8.2f} µs   {micros / bare:7.1f} x bare"
                )
    fastest = min(
        micros
        for name, micros in best.items()
        if name.endswith(", 50") and not name.startswith(("bare", "wirecall"))
    )
    one = best["wirecall sync, 1"]
    entry = best["wirecall sync, 50"]
    bare = best["bare, 50"]
    ours, msgspecs = imports()
    targets = [
        Target("one call, sync handler, times bare", "µs", one, "<=", 2.6, bare=best["bare, 1"]),
        Target(
            "an entry in a batch of 50, sync handler, times bare", "µs", entry, "<=", 1.9, bare=bare
        ),
        Target(
            "the same, async handler that does not wait",
            "µs",
            best["wirecall async, 50"],
            "<=",
            2.8,
            bare=bare,
        ),
        Target(
            "faster than the fastest peer, per batch entry",
            "µs",
            entry,
            ">=",
            5.0,
            peer=fastest,
            inverse=True,
        ),
        Target(
            "a query with one provider, times one without",
            "µs",
            best["wirecall provider, 1"],
            "<=",
            1.3,
            own=one,
        ),
        Target(
            "a query with one empty middleware",
            "µs",
            best["wirecall middleware, 1"],
            "<=",
            3.0,
            own=one,
        ),
        Target("import wirecall, times import msgspec", "ms", ours, "<=", 2.0, bare=msgspecs),
        Target(
            "an entry in a batch of 1000, times 50",
            "µs",
            best["wirecall sync, 1000"],
            "<=",
            1.3,
            own=entry,
        ),
    ]
    return report("core", targets, best)


if __name__ == "__main__":
    raise SystemExit(main())

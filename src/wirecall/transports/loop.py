"""The event loop of an HTTP server: uvloop where it is installed, else asyncio's own.

A server on stdio stays with asyncio's: its handlers of signals (signal.signal) must run whatever the loop does, and uvloop
takes Python's wake-up of signals for itself.
"""

import asyncio
from importlib.util import find_spec


def loop_name() -> str:
    """Return the name of the loops that `new_loop` makes."""
    return "asyncio" if find_spec("uvloop") is None else "uvloop"


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a new loop, for `asyncio.Runner(loop_factory=new_loop)`."""
    if loop_name() == "asyncio":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()

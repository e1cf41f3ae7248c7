"""A server with a tool whose answer is long:

`python -m tests.mcp.heavy granian`. It prints its address when it listens.
"""

import sys

from wirecall import App, Context, Limits
from wirecall.mcp.server.http import McpEndpoint
from wirecall.transports.http_server import HttpServer
from wirecall.transports.serve import ServerName, serve

LIMITS = Limits(resume_bytes=24 << 20, resume_bytes_per_caller=12 << 20, resume_time=3)
LONG = 3 << 20  # bytes of an answer


def make_server() -> HttpServer:
    app = App("heavy", ledger="memory:", limits=LIMITS)

    @app.tool
    async def tell(ctx: Context, number: int) -> str:
        await ctx.log("error", "begun")  # the answer becomes a stream, which can be resumed
        return "x" * LONG

    @app.query
    def kept() -> int:
        """Bytes that are kept for readers that come back."""
        endpoint = server.routes["/mcp"]
        assert isinstance(endpoint, McpEndpoint)
        return endpoint.store.size

    server = app.asgi()
    return server


if __name__ == "__main__":
    name: ServerName = "uvicorn" if sys.argv[1] == "uvicorn" else "granian"
    serve(
        make_server(), port=0, server=name, listening=lambda address, _: print(address, flush=True)
    )

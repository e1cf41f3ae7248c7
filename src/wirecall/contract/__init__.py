"""The contract of a server: what callers rely on.

`lock` writes it to a file, `changes` finds breaking changes.

This module is the part of a generated client that is the same for all servers: `wirecall client`
writes subclasses of these two. A generated class names the contract that it was made from.
`check=True` reads the server's contract when the client opens, and refuses a server with another
one. Errors with codes that the contract states are raised as classes of the generated file.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Unpack

from msgspec import UNSET

from wirecall.client.client import Client, Openable
from wirecall.client.connect import McpOptions, Target, connect
from wirecall.client.sync import SyncOpenable
from wirecall.contract.lock import of_client
from wirecall.errors import RpcError, UsageError
from wirecall.mcp.client.client import McpClient


class Caller(Openable):
    """A client of one contract; `async with` opens it. `options` are those of `connect`."""

    PROTOCOL: ClassVar[Literal["rpc", "mcp", "jsonrpc"]]
    DIGEST: ClassVar[str]
    ERRORS: ClassVar[Mapping[int, type[RpcError]]] = {}

    def __init__(
        self, target: Target, *, check: bool = False, **options: Unpack[McpOptions]
    ) -> None:
        self.client: Client = connect(target, protocol=self.PROTOCOL, **options)
        self._check = check

    async def open(self) -> None:
        await self.client.open()
        if not self._check:
            return
        contract = await of_client(self.client)
        digest = None if contract is None else contract.digest
        if digest != self.DIGEST:
            raise UsageError(
                "The server has another contract than this client.",
                f"expected {self.DIGEST}, got {digest or 'no contract: it has no rpc.discover'}",
                "make the client again: wirecall client; or open it without check=True",
            )

    async def aclose(self) -> None:
        await self.client.aclose()

    async def _call(
        self,
        name: str,
        params: Mapping[str, Any],
        returns: Any = None,
        *,
        key: str | bool | None = None,
        timeout: float | None = None,
        query: bool | None = None,
    ) -> Any:
        """Call a method or a tool, without the arguments that are not set."""
        given = {each: value for each, value in params.items() if value is not UNSET}
        try:
            if isinstance(self.client, McpClient):
                return await self.client.call_tool(
                    name, given, type=returns, key=key, timeout=timeout, query=query
                )
            return await self.client.call(
                name, given or None, type=returns, key=key, timeout=timeout, query=query
            )
        except RpcError as error:
            kind = self.ERRORS.get(error.code)
            if kind is None:
                raise
            typed = kind(error.code, error.message, error.data)
            typed.ran = error.ran
            typed.is_remote = error.is_remote
            raise typed from error


class SyncCaller(SyncOpenable):
    """The same for code without an event loop: it opens at once, and `with` closes it."""

    CALLER: ClassVar[type[Caller]]

    def __init__(
        self, target: Target, *, check: bool = False, **options: Unpack[McpOptions]
    ) -> None:
        self._caller = self.CALLER(target, check=check, **options)
        super().__init__(self._caller)

    def _call(
        self, name: str, params: Mapping[str, Any], returns: Any = None, **options: Any
    ) -> Any:
        return self._loop.run(self._caller._call(name, params, returns, **options))

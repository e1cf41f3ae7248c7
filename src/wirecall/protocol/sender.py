"""The sender of a message, as its transport describes it."""

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeAlias

from msgspec import Struct

from wirecall.protocol.receipt import Receipt

if TYPE_CHECKING:
    from wirecall.server.identity import Identity

# The name of an anonymous caller.
ANONYMOUS = ""

# Sends one notification to the client, and waits while it does not read. A client that has left
# gets nothing, and no error reaches the handler.
Push: TypeAlias = Callable[[bytes], Awaitable[None]]


class HttpHeader(Protocol):
    """The header of an HTTP request.

    `transports.headers.Headers` implements it. The server sees only this protocol, since it must
    not depend on a transport.
    """

    def get(self, name: str, /) -> str | None:
        """Return the value of a field, or both values of a field that occurs twice."""
        ...

    def shown(self) -> Mapping[str, str]:
        """Return the fields that a handler may see."""
        ...

    def is_direct(self) -> bool:
        """Return whether the request came over the loopback, without a proxy that says so."""
        ...


class Entry(Struct, frozen=True, eq=False, gc=False):
    """The place of a message in an MCP array, for a tap."""

    # What the rows of the array share (`server.call.Mark`).
    mark: object
    position: int


class Sender(Struct, frozen=True, eq=False):
    """The sender of one message, and the delivery of its answers.

    The transport makes it once. The server hands it through unchanged, from the message to the
    record of a command.
    """

    # The name of the caller, which owns the records of its commands.
    caller: str = ANONYMOUS
    # The verified identity of the caller, if a token named it.
    identity: "Identity | None" = None
    # The name of the session, the pipe or the process that sent the message. It identifies an
    # anonymous sender that is the only one there. None: several senders may share the transport.
    link: str | None = None
    # The header of the HTTP request that carried the message.
    headers: HttpHeader | None = None
    # The delivery of the answers, if the transport watches it.
    receipt: Receipt | None = None
    # Sends notifications to the client that sent the message. None: the transport carries only
    # answers, as HTTP does.
    push: Push | None = None
    # Set if a tap is on and the message came in an array.
    entry: Entry | None = None


# The sender of messages about which a transport knows nothing. All of them share it.
ANYONE = Sender()

"""The limits of messages, connections and calls, each with its default and the reason for it."""

from msgspec import Struct

from wirecall.errors import UsageError
from wirecall.protocol import messages as frames


class Limits(Struct, frozen=True, kw_only=True):
    """Every limit of an app. A message beyond one of them is refused before anything runs (J11)."""

    # Entries in one batch. Fifty calls of a few milliseconds stay within the patience of a proxy.
    batch: int = frames.MAX_BATCH
    # Bytes of one message. A message is held and decoded as a whole; a megabyte of params is a file, not a call.
    bytes_in: int = frames.MAX_BYTES
    # Bytes of one reply. Ten times the message: fifty results of 200 KB, and no more memory per call than that.
    bytes_out: int = 10 << 20
    # Nesting of arrays and objects. Decoders recurse; 64 is deeper than documents people write and a tenth of the stack.
    depth: int = frames.MAX_DEPTH
    # Calls of one app in flight at once. Beyond, a caller loses less time when it is refused and retries.
    in_flight: int = 1024
    # MCP calls of one session that wait for an answer of their client; beyond, `42910`. They are not in flight: a person may
    # take an hour. Twice the entries of one array that run side by side, and more questions than a person keeps in view.
    waiting_per_session: int = 32
    # The same for all sessions of one caller; the anonymous ones count as one caller. Each holds a task and its request.
    waiting_per_caller: int = 256
    # Seconds that a client may take to answer. It asks a person, and a person may be at lunch; no call waits for ever.
    answer_time: float = 3600.0
    # Seconds that a call waits for the answer of a client without any connection. A client that was cut off comes back at
    # once to read the rest (`Last-Event-ID`); one that stays away has left.
    away_time: float = 60.0
    # Entries of one batch in flight side by side. One batch must not take all places of `in_flight`.
    concurrency: int = 16
    # Bytes of the header of an HTTP request. Twice the limit of common proxies; a header is kept until it is judged.
    header_bytes: int = 32 << 10
    # Seconds in which an HTTP request must have arrived, header and body each. A megabyte over a bad telephone line.
    body_time: float = 30.0
    # Seconds in which a client must read the bytes that are written to it. Then it is cut: unread bytes take our memory.
    write_time: float = 30.0
    # Streams (SSE) of one process open at once. Each holds a connection and a task, and a process has few thousand files.
    streams: int = 1000
    # Streams of one caller, or of one session of an anonymous caller. One caller must not take the places of all others;
    # an agent that makes a hundred calls side by side still sees the progress of each.
    streams_per_caller: int = 100
    # Bytes of one stream that its client has not read yet; then the call waits for the client. It times `streams` is all
    # that slow clients can hold: 256 MB.
    unread_bytes: int = 256 << 10

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            if not getattr(self, field) >= 1:
                raise UsageError(f"Limits({field}={getattr(self, field)!r}) admits nothing.", fix="use a number above 0")

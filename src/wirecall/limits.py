"""The limits of an app, each with its reason."""

from typing import Any

import msgspec
from msgspec import Struct

from wirecall.errors import UsageError, no_option


class NamedOptions(msgspec.StructMeta):
    """Turns a wrong argument name of a struct into an error that names the right one."""

    def __call__(self, *args: Any, **values: Any) -> Any:
        for name in values.keys() - {*self.__struct_fields__}:
            raise no_option(self.__name__, name, self.__struct_fields__)
        return super().__call__(*args, **values)


class Limits(Struct, metaclass=NamedOptions, frozen=True, kw_only=True):
    """Every limit of an app. A message beyond one of them is refused before anything runs (J11).

    >>> Limits(batch=100, bytes_in=1 << 16).batch
    100
    """

    # Entries in one batch. Fifty calls of a few milliseconds stay within the timeout of a proxy.
    batch: int = 50
    # Bytes of one message. A message is stored and decoded whole; a megabyte of params is a file,
    # not a call.
    bytes_in: int = 1 << 20
    # Bytes of one reply. Ten times the message: fifty results of 200 KB, and no more memory per
    # call than that.
    bytes_out: int = 10 << 20
    # Nesting of arrays and objects. Decoders recurse; 64 is deeper than documents people write and
    # a tenth of the stack.
    depth: int = 64
    # Calls of one app in flight at once. Above this, a caller loses less time if it is refused and
    # retries.
    in_flight: int = 1024
    # The same for one authenticated caller. It applies only if it is less than `in_flight`: by
    # default one caller may take all places, because most servers have one caller.
    in_flight_per_caller: int = 1024
    # MCP calls of one session that wait for their client's answer; above this, `42910`. They are
    # not in flight: a person may take an hour. Twice the entries of one array that run at once, and
    # more questions than a person keeps in view.
    waiting_per_session: int = 32
    # The same for all sessions of one caller; anonymous ones count as one. Each holds a task and
    # its request.
    waiting_per_caller: int = 256
    # Seconds that a client may take to answer. It asks a person, perhaps at lunch; calls do not
    # wait forever.
    answer_time: float = 3600.0
    # Seconds that a call waits for the answer of a disconnected client. A client that lost its
    # connection reconnects at once to read the rest (`Last-Event-ID`); one that does not has left.
    away_time: float = 60.0
    # Tasks that run in one process at once. The others wait in the ledger for a place: they take
    # hours, and do not count for `in_flight`.
    tasks: int = 100
    # Unfinished tasks of one caller that one process has begun or adopted; above this, `42910`.
    # Each is a row of the ledger with its arguments. Ten times the tasks that run at once, and more
    # than a person starts.
    tasks_per_caller: int = 1000
    # Entries of one batch in flight at once. One batch must not take all places of `in_flight`.
    concurrency: int = 16
    # Bytes of an HTTP request's header. Twice the limit of common proxies; a header is stored until
    # checked.
    header_bytes: int = 32 << 10
    # Seconds in which an HTTP request must have arrived, header and body each. A megabyte over a
    # bad telephone line.
    body_time: float = 30.0
    # Seconds in which a client must read bytes sent to it, or be disconnected: unread bytes take
    # our memory.
    write_time: float = 30.0
    # Streams (SSE) of one process open at once. Each holds a connection and a task, and a process
    # has few thousand files.
    streams: int = 1000
    # Streams of one caller, or of one session of an anonymous caller. One caller must not take the
    # places of all others; an agent that makes a hundred concurrent calls still sees the progress
    # of each.
    streams_per_caller: int = 100
    # Bytes of the URIs of all MCP subscriptions of one caller; above this, `42910`. Anonymous
    # callers count as one. A caller may open any number of sessions, and each is full at 128 KB.
    # This is 60 full ones, or 60,000 common URIs.
    subscribed_bytes: int = 8 << 20
    # Seconds that entering the lifespan of the app may take: a database that does not answer must
    # not look like an app that starts slowly.
    start_time: float = 30.0
    # Unread bytes of one stream; then the call waits for the client. Multiplied by `streams`, it is
    # all that slow clients can hold: 256 MB.
    unread_bytes: int = 256 << 10
    # Bytes of the events that one process keeps for MCP clients that may resume a broken stream.
    # Above this, the oldest streams are dropped. Six of the longest answers, besides those being
    # read.
    resume_bytes: int = 64 << 20
    # The same for all sessions of one caller; anonymous ones count as one. Two of the longest
    # answers.
    resume_bytes_per_caller: int = 20 << 20
    # Seconds for which they are kept after the end of their call. Clients reconnect at once, or
    # after the few seconds that their network takes.
    resume_time: float = 120.0

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value: object = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise UsageError(
                    f"Limits({field}={value!r}): expected a number, got {type(value).__name__}."
                )
            if not value >= 1:
                raise UsageError(
                    f"Limits({field}={value!r}) admits nothing.", fix="use a number above 0"
                )


# The default limits.
LIMITS = Limits()

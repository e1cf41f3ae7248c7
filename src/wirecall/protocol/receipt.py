"""What a transport knows about the answers to one message: written, or lost."""

import enum
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from msgspec import Struct

Listener: TypeAlias = Callable[[bool], None]  # True: written; False: lost


class Arrival(enum.Enum):
    """What a transport knows about the answers to one message."""

    PENDING = enum.auto()
    # The caller disconnected. A resumed stream may still write the answers.
    LOST = enum.auto()
    WRITTEN = enum.auto()


class Receipt(Struct, eq=False):
    """The delivery of one message's answers.

    A transport ends it, and reports that to commands without a key.

    An answer is written when the transport has accepted its last byte without an error, and the
    caller's host has acknowledged it, on systems that report this. It is lost when its caller
    disconnects before that. A resumed stream may still write a lost answer.
    """

    # Begins to watch for a disconnect, which has a cost.
    _watch: Callable[[], None] | None = None
    # The calls that want a report; without any, transports do no extra work.
    listeners: list[Listener] = []
    arrival: Arrival = Arrival.PENDING
    # Whether the sender had left before the message was served, as its transport knows for certain.
    has_left_before: bool = False
    # The session or the pipe that the message came through, in this process. None: there is no
    # session.
    session: object = None
    # Checks now whether the answers are written or lost, if a transport can.
    look: Callable[[], None] | None = None
    # The receipt of the whole stream, if this is that of one record in it.
    whole: "Receipt | None" = None

    @property
    def message(self) -> "Receipt":
        """The receipt of the message: the same for all its answers."""
        return self.whole or self

    def part(self) -> "Receipt":
        """Return the receipt of one record of a stream.

        It ends with the stream, if the transport does not end it before.
        """
        part = Receipt(session=self.session, look=self._look_now, whole=self)
        part._watch = partial(self.listen, part._end)
        return part

    def listen(self, listener: Listener) -> None:
        """Call the listener when the answers are written or lost; now if they are lost already."""
        self.listeners.append(listener)
        if self.arrival is Arrival.LOST:
            listener(False)
        elif self._watch is not None:
            watch = self._watch
            self._watch = None
            watch()

    def written(self) -> None:
        if self.arrival is not Arrival.WRITTEN:
            self.arrival = Arrival.WRITTEN
            self._watch = None
            # No longer needed, and they may refer to this.
            listeners = self.listeners
            self.listeners = []
            for listener in listeners:
                listener(True)

    def lost(self) -> None:
        """Do nothing if the answers are written."""
        if self.arrival is Arrival.PENDING:
            self.arrival = Arrival.LOST
            # No call has begun that needs to know.
            self.has_left_before = not self.listeners
            # A call that continues does not keep its request alive.
            self._watch = None
            for listener in self.listeners:
                listener(False)

    def forfeit(self) -> None:
        """Note that the caller gets something else than the answer, which counts as lost."""
        self.lost()
        self.listeners = []

    def _end(self, written: bool) -> None:
        if written:
            self.written()
        else:
            self.lost()

    def _look_now(self) -> None:
        if self.look is not None:
            self.look()

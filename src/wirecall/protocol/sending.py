"""The sending of answers: how the answers to one message reach their caller, or do not."""

from collections.abc import Callable
from typing import TypeAlias

from msgspec import Struct

Listener: TypeAlias = Callable[[bool], None]  # True: written; False: lost


class Sending(Struct, eq=False):
    """The way of one message's answers. A transport ends it, and commands without a key hear how it ended.

    An answer is written when the transport has taken its last byte without an error. It is lost when its caller has gone
    before that. A stream that is resumed may still write what was lost.
    """

    _watch: Callable[[], None] | None = None  # begins to look whether the caller goes away, which costs something
    _listeners: list[Listener] = []
    is_written: bool = False
    is_lost: bool = False

    @property
    def is_heard(self) -> bool:
        """Whether a call wants to know how its answer ends. For the others, no transport takes any trouble."""
        return bool(self._listeners)

    def listen(self, listener: Listener) -> None:
        """Call the listener when the answers are written or lost, or now if they are lost already."""
        self._listeners.append(listener)
        if self.is_lost:
            listener(False)
        elif self._watch is not None:
            watch, self._watch = self._watch, None
            watch()

    def written(self) -> None:
        if not self.is_written:
            self.is_written, self._watch = True, None
            listeners, self._listeners = self._listeners, []  # they are not needed again, and may refer to this object
            for listener in listeners:
                listener(True)

    def lost(self) -> None:
        """Do nothing if the answers are written."""
        if not self.is_written and not self.is_lost:
            self.is_lost, self._watch = True, None  # a call that goes on does not keep the request of its caller
            for listener in self._listeners:
                listener(False)

"""The sending of answers: how the answers to one message reach their caller, or do not."""

from collections.abc import Callable
from typing import TypeAlias

Listener: TypeAlias = Callable[[bool], None]  # True: written; False: lost


class Sending:
    """The way of one message's answers. A transport ends it, and commands without a key hear how it ended.

    An answer is written when the transport has taken its last byte without an error. It is lost when its caller has gone
    before that. A stream that is resumed may still write what was lost.
    """

    __slots__ = ("_listeners", "_watch", "is_lost", "is_written")

    def __init__(self, watch: Callable[[], None] | None = None) -> None:
        self.is_written = False
        self.is_lost = False
        self._watch = watch  # begins to look whether the caller goes away, which costs something
        self._listeners: list[Listener] = []

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

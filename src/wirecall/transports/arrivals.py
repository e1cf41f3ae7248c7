"""Whether an answer reached its client, as the kernel reports it (`tcp`).

1. While the handler runs, a client that has ended its side of the connection has left. granian does
   not report that if bytes follow the request on the connection. The server still writes the
   answer: a client that has only ended its sending side reads it, and then the answer has arrived.
2. A plain answer has arrived when the client's kernel has acknowledged all of it, and then the
   client sends another request, or closes the connection cleanly, or does neither for
   `CONFIRM_AFTER` seconds. An equal call does not wait for this time to pass.
3. It is lost when the connection is reset before: a client that closes a connection with unread
   bytes resets it. It is also lost when the server has closed its socket before it wrote all of the
   answer, and when the bytes are not acknowledged within the time that a client has to read.
4. A stream has arrived when its last event is acknowledged. Clients close a stream after the event
   that they wait for, and so reset it if they have not read the end of it.
5. A record in the middle of a stream has arrived when it is acknowledged, and then the client
   closes the connection cleanly, or does not reset it for `CONFIRM_AFTER` seconds. A record that
   was acknowledged a moment before a reset may be one that the client did not read, so it is lost.

Only answers to commands without a key are watched; all others cost nothing. If the socket is not
found, or the system reports too little, an answer counts as written when the server has taken it.
"""

import asyncio
import contextlib
import os
import select
import socket
from collections import deque

from msgspec import Struct

from wirecall.protocol.receipt import Receipt
from wirecall.transports.tcp import HAS_TCP_INFO, ClientAddress, Sockets, TcpState, tcp_state

# A client that has received an answer and does not want it resets the connection within these
# seconds. An equal call in another process waits until they have passed; one in this process does
# not.
CONFIRM_AFTER = 1.0
# Seconds between two checks of an answer that has not arrived yet: the first delay, and the
# longest.
FIRST_LOOK = 0.002
LAST_LOOK = 0.1

# The most bytes that servers add to the head of an answer, such as its date.
MOST_ADDED = 256

# The bytes that end a chunked answer.
LAST_CHUNK = 5


class _Handed(Struct, eq=False):
    """A record of a stream that the server has taken."""

    # The bytes that the client must have acknowledged.
    due: int
    receipt: Receipt
    # The loop time at which this was noticed. None: it has not acknowledged them.
    acknowledged_at: float | None = None


class WatchedAnswer:
    """The answer to one request, from the start of its command until its arrival is known."""

    def __init__(
        self,
        arrivals: "Arrivals",
        client: ClientAddress,
        connection: socket.socket,
        file: int,
        now: TcpState,
        receipt: Receipt,
    ) -> None:
        self.client = client
        self.socket = connection
        self.receipt = receipt
        # The bytes that the client must acknowledge; later writes add to it.
        self.due = now.taken
        # Whether the server has the whole answer.
        self.is_handed = False
        self._arrivals = arrivals
        self._file = file
        self._inode = os.fstat(connection.fileno()).st_ino
        # Whether the server still has its own file of the socket.
        self._has_server = True
        self._is_stream = False
        # Whether an equal call waits for this to end, or the client has sent another request.
        self._is_asked = False
        # The bytes received from the client before the answer was handed over.
        self._received = 0
        # The loop time from which a client that does nothing counts as one that has the answer.
        self._until = 0.0
        # The loop time at which an answer that has not arrived is lost.
        self._deadline = 0.0
        self._delay = FIRST_LOOK
        self._timer: asyncio.TimerHandle | None = None
        # Records of the stream that may still be lost, in the order in which they were written.
        self._records: deque[_Handed] = deque()
        # The bytes that were due and that were taken, at the last look.
        self._counted = (0, 0)

    def note_record(self, receipt: Receipt) -> None:
        """Wait for a record of the stream: the server has its last byte."""
        self._records.append(_Handed(self.due, receipt))
        if self._timer is None:
            self._delay = FIRST_LOOK
            self._plan(asyncio.get_running_loop())

    def hand_over(self, *, is_stream: bool, patience: float) -> None:
        """Begin to wait: the server has the last byte of the answer."""
        now = tcp_state(self.socket)
        loop = asyncio.get_running_loop()
        self.is_handed = True
        self._is_stream = is_stream
        if now is not None:
            self._received = now.received
        self._until = loop.time() + CONFIRM_AFTER
        self._deadline = loop.time() + patience
        self._plan(loop)

    @property
    def is_over(self) -> bool:
        """Whether it is no longer watched."""
        return self.socket.fileno() < 0

    def ask(self) -> None:
        """Check now: an equal call has arrived. It waits only until the answer has arrived."""
        self._is_asked = True
        self.look()

    def note_request(self) -> None:
        """Note that another request has arrived on the connection."""
        if self.is_handed:
            now = tcp_state(self.socket)
            # Else the client sent it before the answer.
            if now is not None and now.received > self._received:
                self._is_asked = True
        self.look()

    def look(self) -> None:
        """Query the kernel, and stop watching once it is known whether the answer arrived."""
        now = tcp_state(self.socket)
        if self._records and now is not None:
            self._look_at_records(now)
        if not self.is_handed:
            if now is not None and now.has_peer_ended:
                self.receipt.lost()
            return
        self._let_end()
        if now is None:
            self._end(is_written=True)
            return
        has_arrived = self._has_arrived(now)
        if now.is_reset:
            self._end(is_written=has_arrived and self._is_stream)
        elif has_arrived and self._is_confirmed(now):
            self._end(is_written=True)
        elif not self._has_server and now.taken < self.due:
            self._end(is_written=False)  # the server will not write the rest
        elif asyncio.get_running_loop().time() >= self._deadline:
            self._end(is_written=has_arrived)

    def _learn_added(self) -> None:
        """Learn how many bytes this server adds to the head of a stream.

        All bytes of the stream are taken if nothing has changed since the last look.
        """
        now = tcp_state(self.socket)
        if now is None:
            return
        counted = (self.due, now.taken)
        if counted == self._counted and now.taken > self.due:
            self._arrivals.added = max(self._arrivals.added, now.taken - self.due)
        self._counted = counted

    def _look_at_records(self, now: TcpState) -> None:
        """End the receipts of the records that have arrived."""
        time = asyncio.get_running_loop().time()
        is_confirmed = now.has_peer_ended or self._is_asked
        if now.is_reset:
            return  # the end of the stream, or of the request, decides about the rest
        added = self._arrivals.added or MOST_ADDED
        for record in self._records:
            if now.acknowledged < record.due + added:
                break
            if record.acknowledged_at is None:
                record.acknowledged_at = time
        while self._records:
            since = self._records[0].acknowledged_at
            if since is None or not (is_confirmed or time >= since + CONFIRM_AFTER):
                return
            self._records.popleft().receipt.written()

    def _has_arrived(self, now: TcpState) -> bool:
        """Return whether the client's kernel has acknowledged the answer."""
        unread = now.taken - now.acknowledged
        if self._is_stream:
            return now.acknowledged >= self.due and unread <= LAST_CHUNK
        return now.acknowledged >= self.due and unread <= 0

    def _is_confirmed(self, now: TcpState) -> bool:
        """Return whether a client whose kernel has the answer will not reset the connection.

        A client that ended its side before the answer either has gone, and resets, or acknowledges
        what it reads.
        """
        if now.has_peer_ended or self._is_stream or self._is_asked:
            return True
        return asyncio.get_running_loop().time() >= self._until

    def close(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.receipt.look = None
        self._arrivals.forget(self)
        self.socket.close()

    def settle(self) -> None:
        """Decide without waiting longer, because the server stops.

        Bytes in transit count as written.
        """
        if self.is_handed:
            now = tcp_state(self.socket)
            self._end(is_written=now is None or not now.is_reset)

    def _end(self, *, is_written: bool) -> None:
        receipt = self.receipt
        self.close()
        if is_written:
            receipt.written()
        else:
            receipt.lost()

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(self._delay, self._look_again)
        self._delay = min(2 * self._delay, LAST_LOOK)

    def _look_again(self) -> None:
        self._timer = None
        if not self.is_handed:
            self._learn_added()
        self.look()
        if self._arrivals.has(self) and (self.is_handed or self._records):
            self._plan(asyncio.get_running_loop())

    def _let_end(self) -> None:
        """Shut down our side if the server has closed its file.

        Otherwise this duplicate would keep the connection open.
        """
        if not self._has_server:
            return
        try:
            self._has_server = os.fstat(self._file).st_ino == self._inode
        except OSError:
            self._has_server = False
        if not self._has_server:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)


class Arrivals:
    """The watched answers of one server."""

    def __init__(self) -> None:
        self._sockets = Sockets()
        # All watched answers, by the descriptor of the duplicate.
        self._watched: dict[int, WatchedAnswer] = {}
        # Those that the server has taken, by the address of the client.
        self.handed: dict[ClientAddress, WatchedAnswer] = {}
        # The bytes that the server adds to the head of a stream; 0 as long as that is unknown.
        self.added = 0
        # Reports ended connections; it exists while any are watched.
        self._ends: select.epoll | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def find(self, client: ClientAddress) -> socket.socket | None:
        """Return a duplicate of the socket of a client's connection."""
        found = self._sockets.find(client)
        if found is None:
            return None
        return found[0]

    def attend(
        self, client: ClientAddress, receipt: Receipt, *, is_forwarded: bool = False
    ) -> WatchedAnswer | None:
        """Watch a request's connection.

        Return None if its socket is not found, or the kernel reports too little. A server closes
        its socket when the client has left: then the answer is lost. A proxy may have replaced the
        address of a forwarded request, so its socket is not found in any case.
        """
        if not HAS_TCP_INFO:
            return None
        found = self._sockets.find(client)
        if found is None:
            if self._sockets.has_found and not is_forwarded:
                receipt.lost()
            return None
        connection, file = found
        now = tcp_state(connection)
        if now is None:
            connection.close()
            return None
        arrival = WatchedAnswer(self, client, connection, file, now, receipt)
        self._register(connection)
        self._watched[connection.fileno()] = arrival
        receipt.look = arrival.ask
        arrival.look()
        return arrival

    def hand_over(self, arrival: WatchedAnswer, *, is_stream: bool, patience: float) -> None:
        """Begin to wait for an answer that the server has taken."""
        earlier = self.handed.get(arrival.client)
        if earlier is not None and earlier is not arrival:
            earlier.settle()
        self.handed[arrival.client] = arrival
        arrival.hand_over(is_stream=is_stream, patience=patience)

    def note_request(self, client: ClientAddress) -> None:
        """Note that a request has arrived on the connection of a client."""
        arrival = self.handed.get(client)
        if arrival is not None:
            arrival.note_request()

    def has(self, arrival: WatchedAnswer) -> bool:
        """Return whether it is still watched."""
        return self._watched.get(arrival.socket.fileno()) is arrival

    def forget(self, arrival: WatchedAnswer) -> None:
        """Stop watching an answer."""
        file = arrival.socket.fileno()
        if self._watched.get(file) is not arrival:
            return
        del self._watched[file]
        if self.handed.get(arrival.client) is arrival:
            del self.handed[arrival.client]
        if self._ends is None:
            return
        with contextlib.suppress(OSError):
            self._ends.unregister(file)
        if not self._watched:
            self._close()

    def settle(self) -> None:
        """Settle all of them: the server stops."""
        for arrival in list(self._watched.values()):
            arrival.settle()

    def _register(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        if self._ends is None or self._loop is not loop:
            self._ends = select.epoll()
            self._loop = loop
            loop.add_reader(self._ends.fileno(), self._look_at_ended)
        # Each end is reported once. Bytes that wait to be read are not: the server reads them.
        self._ends.register(connection, select.EPOLLRDHUP | select.EPOLLET)

    def _look_at_ended(self) -> None:
        if self._ends is None:
            return
        for file, _ in self._ends.poll(0):
            arrival = self._watched.get(file)
            if arrival is not None:
                arrival.look()

    def _close(self) -> None:
        if self._ends is None:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._ends.fileno())
        self._ends.close()
        self._ends = None

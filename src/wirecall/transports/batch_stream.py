"""The answers to a batch over HTTP, each written when its entry ends.

1. The answer begins when the first record is ready, and after `FIRST_BYTE` seconds at the latest.
   A batch that has ended by then is sent whole, with its length.
2. The last record is the notification `rpc.end`. A stream without it was cut.
3. A client that does not read for `Limits.write_time` seconds is disconnected. The commands that
   run then run to their end (`server.streaming`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeAlias

from msgspec import Raw

from wirecall.aio import start
from wirecall.answers import Answers
from wirecall.errors import Gone
from wirecall.protocol import messages as frames
from wirecall.protocol.messages import Data
from wirecall.protocol.receipt import Receipt
from wirecall.protocol.sender import Sender
from wirecall.transports.accept import JSON_SEQ, Choice, chosen
from wirecall.transports.request import (
    EVENT_STREAM,
    JSON,
    STREAM_FIELDS,
    HttpError,
    HttpRequest,
    Pairs,
    replayed_mark,
)

# Begins a batch: returns the reply that refuses it as a whole, or the coroutine that runs it and
# fills the queue.
Begin: TypeAlias = Callable[
    [Data, Sender, Answers], Awaitable["bytes | Coroutine[Any, Any, bytes | None] | None"]
]

# Seconds in which a client sees that its batch was accepted.
FIRST_BYTE = 1.0
# Seconds; proxies close connections that are silent for longer.
KEEP_ALIVE = 15.0
# Seconds in which the last records are written when the server stops.
LAST_WORDS = 1.0

# Batches whose clients have left. A loop refers to its tasks only weakly.
_left: "set[asyncio.Task[Any]]" = set()


class Lines:
    """JSON lines: each record is a line, and a silent stream gets empty lines."""

    heartbeat = b"\n"
    opening = b""

    def records(self, lines: bytes) -> bytes:
        """Return answers as they are sent. They come as lines."""
        return lines

    def ending(self, answers: Answers) -> bytes:
        """Return the end of a stream."""
        return self.records(end_record(answers) + b"\n")


class JsonSeq(Lines):
    """RFC 7464: a separator before each record. Repeated separators are ignored."""

    heartbeat = b"\x1e"

    def records(self, lines: bytes) -> bytes:
        return b"".join([b"\x1e%b\n" % line for line in lines.splitlines()])


class Events(Lines):
    """Server-sent events, numbered from 1."""

    heartbeat = b": keep-alive\n\n"

    def __init__(self) -> None:
        self._count = 0

    def records(self, lines: bytes) -> bytes:
        events = []
        for line in lines.splitlines():
            self._count += 1
            events.append(b"id: %d\nevent: message\ndata: %b\n\n" % (self._count, line))
        return b"".join(events)


class Array(Lines):
    """A JSON array in pieces. It has no end record: an array without its bracket was cut."""

    opening = b"["

    def __init__(self) -> None:
        self._separator = b""

    def records(self, lines: bytes) -> bytes:
        if not lines:
            return b""
        written = self._separator + b",".join(lines.splitlines())
        self._separator = b","
        return written

    def ending(self, answers: Answers) -> bytes:
        return b"]"


def _lines(answers: Answers) -> bytes:
    """Take the answers that are ready, and return each as a line."""
    taken = answers.take()
    try:
        return frames.write_lines(taken)
    except Exception:  # such as a number that is too large
        assert answers.seal is not None
        sealed = [each if isinstance(each, Raw) else answers.seal(each) for each in taken]
        return b"".join([b"%b\n" % bytes(each) for each in sealed])


def end_record(answers: Answers) -> bytes:
    """Return the last record of a stream."""
    params = {"answered": answers.answered, "replayed": answers.replayed}
    return frames.encode({"jsonrpc": "2.0", "method": "rpc.end", "params": params})


def form_of(choice: Choice) -> Lines:
    """Return the form of a stream's records. An array has none by its type."""
    if choice.stream is None:
        return Array()
    if choice.stream == JSON_SEQ:
        return JsonSeq()
    if choice.stream == EVENT_STREAM:
        return Events()
    return Lines()


def choice_of(request: HttpRequest, begin: Begin | None, *, chunks_arrays: bool) -> Choice | None:
    """Return how an array is answered in pieces. None: as one array.

    HttpError 406 if its client accepts nothing that there is, and 503 if it accepts only a stream
    and no more can be opened.
    """
    choice = chosen(request.headers.get("accept") or "*/*", streams=begin is not None)
    if choice.stream is None and not chunks_arrays:
        return None
    try:
        request.enter_stream()
    except HttpError:
        if not choice.takes_array:
            raise
        return None
    return choice


async def stream_batch(
    request: HttpRequest, body: bytes, begin: Begin, choice: Choice, silence: int
) -> None:
    """Answer a batch as its entries end.

    `silence` is the status of a batch that gets no answer.
    """
    whole = request.receipt = Receipt(request.attend)
    is_array = choice.stream is None
    answers = Answers(
        whole, in_input_order=choice.in_input_order or is_array, marks_replays=not is_array
    )
    begun = await begin(body, request.sender(), answers)
    if begun is None or isinstance(begun, bytes):
        # The batch is refused as a whole, so nothing ran.
        assert begun is not None
        await request.respond(200, begun)
        return
    run = start(asyncio.get_running_loop(), begun)
    run.add_done_callback(partial(_end_run, answers))
    stream = _BatchStream(request, answers, form_of(choice), choice.stream or JSON)
    try:
        await stream.send(silence, is_array=is_array)
    except asyncio.CancelledError:
        if request.is_cut:  # the server stops
            run.cancel()
            await stream.send_last(run)
        raise
    finally:
        answers.close()
        if not run.done():
            _left.add(run)
            run.add_done_callback(_left.discard)


def _end_run(answers: Answers, run: "asyncio.Task[Any]") -> None:
    """Let the reader end, however the batch has ended."""
    answers.finish()
    if not run.cancelled():
        run.exception()  # it is in the log


class _BatchStream:
    """Writes the answers to one batch."""

    def __init__(self, request: HttpRequest, answers: Answers, form: Lines, media: str) -> None:
        self._request = request
        self._answers = answers
        self._form = form
        self._media = media

    async def send(self, silence: int, *, is_array: bool) -> None:
        """Write the answers. Gone if the client leaves or does not read."""
        request = self._request
        answers = self._answers
        await asyncio.sleep(0)  # entries that do not wait end now
        if not answers.is_finished:
            request.watch(answers.close)
            await self._until_first()
        if answers.is_finished:
            await self._send_whole(silence, is_array=is_array)
            return
        await request.open_stream(media=self._media)
        opening = self._form.opening
        while not answers.is_finished:
            chunk = opening + self._form.records(_lines(answers))
            opening = b""
            await request.write(chunk or self._form.heartbeat)
            for receipt in answers.written():
                request.written_record(receipt)
            await self._until_ready(KEEP_ALIVE)
        await self._close(opening)

    async def send_last(self, run: "asyncio.Task[Any]") -> None:
        """Write the rest within a moment, because the server stops."""
        try:
            async with asyncio.timeout(LAST_WORDS):
                await asyncio.wait([run])
                await self._close(b"")
        except (TimeoutError, Gone):
            pass  # the stream is cut

    async def _until_first(self) -> None:
        """Wait for the first record, at most until the client has to see an answer."""
        if self._answers.owes_answers:
            await self._until_ready(FIRST_BYTE)
        else:
            await self._until_ready(None)

    async def _until_ready(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._answers.until_ready()
        except TimeoutError:
            pass
        if self._answers.is_closed:
            raise Gone("the client has left")

    async def _close(self, opening: bytes) -> None:
        """Write the remaining records, and the end."""
        answers = self._answers
        rest = opening + self._form.records(_lines(answers))
        await self._request.close_stream(rest + self._form.ending(answers))
        answers.written()
        self._request.written()

    async def _send_whole(self, silence: int, *, is_array: bool) -> None:
        """Answer a batch that ended before its first byte was due."""
        answers = self._answers
        request = self._request
        form = self._form
        lines = _lines(answers)
        if not lines:
            await request.respond(silence)
            return
        body = form.opening + form.records(lines) + form.ending(answers)
        fields: Pairs = STREAM_FIELDS
        if is_array:
            fields = ()
            if answers.replayed:
                fields = replayed_mark(answers.replayed, is_array=True)
        await request.respond(200, body, self._media, fields)

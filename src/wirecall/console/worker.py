"""Questions between processes: each worker answers on a Unix socket that only its user can reach.

A server has a folder, with one socket per worker and the file `server.json`, which says what is
served there. A connection takes any number of questions, one JSON document per line, and gets one
line for each.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from wirecall.console.facts import Facts, check_folder
from wirecall.console.source import Refusal
from wirecall.errors import WirecallError
from wirecall.logs import logger
from wirecall.protocol.messages import JsonObject

if TYPE_CHECKING:
    from wirecall.app import App
    from wirecall.console.tap import Tap

SOCKET = ".socket"
SERVER = "server.json"
# Bytes of a line: a page of records with large answers, or a ring with long names.
LONGEST = 64 << 20
# Seconds for a worker to answer. A handler that blocks its loop is slow, not gone.
PATIENCE = 15.0


class Gone(WirecallError):
    """A worker that does not answer any more. `was_asked`: it may have the question."""

    was_asked = False


class Served(Struct):
    """A server whose calls can be watched, as its file describes it."""

    name: str
    pid: int
    started: float
    # The file or the module of the app, as it was named.
    target: str = ""
    # http://HOST:PORT, or the name of the transport.
    address: str = ""
    console: str | None = None
    metrics: str | None = None
    folder: str = ""


def base_folder() -> Path:
    """Return the folder of all servers of this user."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir(), f"wirecall-watch-{user}")


def make_folder(served: Served) -> str:
    """Make the folder of a server, and describe the server in it."""
    base = base_folder()
    check_folder(str(base))
    folder = tempfile.mkdtemp(prefix=f"{served.pid}-", dir=base)
    served.folder = folder
    describe(served)
    return folder


def describe(served: Served) -> None:
    """Write what is served."""
    path = Path(served.folder, SERVER)
    early = path.with_suffix(".new")
    early.write_bytes(msgspec.json.encode(served))
    early.replace(path)


def remove_folder(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def local_servers() -> Iterator[Served]:
    """Yield the servers of this user that run now; forget those that were killed."""
    base = base_folder()
    if not base.is_dir():
        return
    check_folder(str(base))
    for path in sorted(base.glob(f"*/{SERVER}")):
        try:
            served = msgspec.json.decode(path.read_bytes(), type=Served)
        except (OSError, msgspec.DecodeError):
            continue
        try:
            os.kill(served.pid, 0)
        except ProcessLookupError:
            remove_folder(str(path.parent))
            continue
        except PermissionError:
            pass
        yield served


class WorkerServer:
    """Answers questions in one process."""

    def __init__(self, tap: "Tap", app: "App", folder: str) -> None:
        self._facts = Facts(tap, app)
        self._path = Path(folder, f"{tap.name}{SOCKET}")
        self._server: asyncio.AbstractServer | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        early = self._path.with_name(f".{self._path.name}")
        self._server = await asyncio.start_unix_server(self._serve, early, limit=LONGEST)
        # Visible only now: before it listens, it would look dead.
        early.rename(self._path)

    async def aclose(self) -> None:
        self._path.unlink(missing_ok=True)
        if self._server is not None:
            self._server.close()
        for writer in tuple(self._writers):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                question: Any = msgspec.json.decode(line)
                writer.write(msgspec.json.encode(await self._facts.answer(question)) + b"\n")
                await writer.drain()
        except (OSError, ValueError, msgspec.DecodeError) as error:
            logger.debug("a question of the console cannot be answered: %r", error)
        finally:
            self._writers.discard(writer)
            writer.close()


class WorkerLink:
    """Asks one worker."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name.removesuffix(SOCKET)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        # One question at a time: the answers come in their order.
        self._turn = asyncio.Lock()

    async def ask(self, what: str, **rest: Any) -> JsonObject:
        """Return the answer of the worker. `Gone`: it has ended; `Refusal`: it refused."""
        data = await self.ask_raw(what, **rest)
        answer: JsonObject = msgspec.json.decode(data)
        if "document" in answer and "status" in answer:
            raise Refusal(answer["status"], answer["document"])
        return answer

    async def ask_raw(self, what: str, **rest: Any) -> bytes:
        """Return the answer as it was sent."""
        async with self._turn:
            was_asked = False
            try:
                async with asyncio.timeout(PATIENCE):
                    if self._streams is None:
                        self._streams = await asyncio.open_unix_connection(self.path, limit=LONGEST)
                    reader, writer = self._streams
                    was_asked = True
                    writer.write(msgspec.json.encode({"ask": what, **rest}) + b"\n")
                    await writer.drain()
                    line = await reader.readline()
                    if not line.endswith(b"\n"):
                        raise ConnectionResetError("it has ended")
                    return line
            except (OSError, TimeoutError, ValueError) as error:
                self.close()
                gone = Gone(f"worker {self.name} does not answer: {error!r}")
                gone.was_asked = was_asked
                raise gone from error
            except BaseException:
                # Else the next question would get the answer of this one.
                self.close()
                raise

    def close(self) -> None:
        streams = self._streams
        self._streams = None
        if streams is not None:
            with suppress(OSError, RuntimeError):
                streams[1].close()


def links_in(folder: str) -> list[WorkerLink]:
    """Return a link to each worker that listens in a folder."""
    return [WorkerLink(path) for path in sorted(Path(folder).glob(f"[0-9a-f]*{SOCKET}"))]

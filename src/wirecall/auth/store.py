"""Where logins are kept: in files, in memory, or in the keyring of the system.

Only their owner can read the files.

A login is found by the address of its server; issuer and client distinguish two logins at one
server. The process that renews a login holds `lock`: a refresh token may work only once (RFC 9700,
section 4.14.2), so a process that waited reads the store again, and finds the new tokens.
"""

import asyncio
import hashlib
import os
import stat
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from msgspec import Struct

from wirecall.errors import UsageError, extra_fix
from wirecall.files import DescriptorLock, login_folder, real_path, replace_file
from wirecall.protocol.messages import UNREADABLE

T = TypeVar("T")

AGAIN = 0.05  # seconds between two attempts to take a lock that another process holds
OTHERS = stat.S_IRWXG | stat.S_IRWXO
LONGEST = 1 << 20  # bytes of a file with a login
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
SERVICE = "wirecall"  # in the keyring
INDEX = "logins"


class Registration(Struct, kw_only=True):
    """The client, as one authorization server knows it."""

    client_id: str
    client_secret: str | None = None
    # How the client authenticates at the token endpoint (RFC 7591, section 2).
    client_method: str = "none"
    # The scopes that the client is registered for. None: any.
    client_scopes: list[str] | None = None
    # The Unix time at which the registration ends.
    client_expires: float | None = None
    redirect_uri: str | None = None

    def __repr__(self) -> str:
        # Without a secret.
        return f"Registration(client_id={self.client_id!r}, client_method={self.client_method!r})"


class Login(Registration, kw_only=True):
    """The tokens of one client at one server, and the data that their renewal needs.

    >>> [field for field in Login.__struct_fields__ if field.endswith("_token")]
    ['access_token', 'refresh_token']
    """

    # The address that the client connects to.
    server: str
    issuer: str
    resource: str | None = None
    token_endpoint: str
    revocation_endpoint: str | None = None
    # The scopes that the client asked for.
    scopes: list[str] = []
    access_token: str = ""
    token_type: str = "Bearer"
    refresh_token: str | None = None
    # The Unix time at which the token expires.
    expires: float | None = None
    # The key that the token is bound to, as PEM.
    dpop_key: str | None = None
    # The authorization server may be at a private address.
    private: bool = False
    # The Unix time at which the login was saved.
    saved: float = 0.0

    def __repr__(self) -> str:
        # Without a secret.
        return (
            f"Login(server={self.server!r}, issuer={self.issuer!r}, client_id={self.client_id!r})"
        )


class Store(Protocol):
    """The interface of a store of logins.

    A program can have another one: any object with these methods.

    >>> store: Store = MemoryStore()
    """

    async def logins(self, server: str | None = None) -> list[Login]:
        """Return the logins at a server, or all of them; the newest first."""

    async def save(self, login: Login) -> None:
        """Keep a login, and replace an earlier one of the same server, issuer and client."""

    async def remove(self, login: Login) -> None:
        """Forget a login."""

    def lock(self, server: str) -> AbstractAsyncContextManager[None]:
        """Keep other processes from renewing the logins at a server in a block."""


def _newest_first(logins: list[Login], server: str | None) -> list[Login]:
    return sorted(
        (each for each in logins if server in (None, each.server)),
        key=lambda each: each.saved,
        reverse=True,
    )


def _key(login: Login) -> tuple[str, str, str]:
    """Return the parts by which a store distinguishes logins."""
    return login.server, login.issuer, login.client_id


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]


def _decoded(text: str | bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except UNREADABLE as error:
        raise UsageError(
            f"{what} cannot be read.", str(error), "remove it, and log in again"
        ) from None


class MemoryStore(Store):
    """Logins that end with the process.

    >>> client = connect("https://api.example.com/mcp", auth=Stored(store=MemoryStore()))
    """

    def __init__(self) -> None:
        self._logins: dict[tuple[str, str, str], Login] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def logins(self, server: str | None = None) -> list[Login]:
        return _newest_first(list(self._logins.values()), server)

    async def save(self, login: Login) -> None:
        self._logins[_key(login)] = login

    async def remove(self, login: Login) -> None:
        self._logins.pop(_key(login), None)

    def lock(self, server: str) -> AbstractAsyncContextManager[None]:
        return self._locks.setdefault(server, asyncio.Lock())


class FileStore(Store):
    """Logins in their own folder, one file each, which only their owner can read.

    The folder is `wirecall/logins` in the user's data folder (XDG_DATA_HOME) by default. A file is
    written under another name and renamed, so it is complete at any moment and always has the mode
    0600.

    `folder` is another folder.

    >>> client = connect("https://api.example.com/mcp", auth=Stored(store=FileStore("logins")))
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = login_folder() if folder is None else Path(folder)

    async def logins(self, server: str | None = None) -> list[Login]:
        return _newest_first(await asyncio.to_thread(self._read), server)

    async def save(self, login: Login) -> None:
        data = msgspec.json.encode(login)
        name = self._path(login).name
        await asyncio.to_thread(lambda: replace_file(self._folder() / name, data))

    async def remove(self, login: Login) -> None:
        name = self._path(login).name
        await asyncio.to_thread(lambda: (self._folder() / name).unlink(missing_ok=True))

    def lock(self, server: str) -> AbstractAsyncContextManager[None]:
        return _file_lock(self._folder() / f"{_digest(server)}.lock")

    def _path(self, login: Login) -> Path:
        return self.folder / f"{_digest(*_key(login))}.json"

    def _folder(self) -> Path:
        """Return the folder, and create it if needed.

        `real_path` decides whether to follow a link.
        """
        try:
            folder = Path(real_path(self.folder, "the folder of logins"))
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            fix = "let this user create it, or set XDG_DATA_HOME"
            raise UsageError(
                f"The folder of logins, {self.folder}, cannot be created.", str(error.strerror), fix
            ) from None
        _refuse_others(os.stat(folder), folder)
        return folder

    def _read(self) -> list[Login]:
        if not os.path.lexists(self.folder):
            return []
        found = []
        for path in self._folder().glob("*.json"):
            text = _read_private(path)
            if text is not None:
                found.append(_decoded(text, Login, f"The login in {path}"))
        return found


def _open_private(path: Path, flags: int) -> int:
    """Open a regular file that only its owner can reach.

    A FIFO in its place does not block, a link is not followed.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        if path.is_symlink():
            raise _not_a_file(path, "a symbolic link") from None
        if path.is_dir():
            raise _not_a_file(path, "a folder") from None
        raise UsageError(
            f"{path} cannot be opened.", str(error.strerror), "remove it, and log in again"
        ) from None
    status = os.fstat(descriptor)
    try:
        if not stat.S_ISREG(status.st_mode):
            raise _not_a_file(path, _KINDS.get(stat.S_IFMT(status.st_mode), "a special file"))
        _refuse_others(status, path)
    except UsageError:
        os.close(descriptor)
        raise
    return descriptor


def _read_private(path: Path) -> bytes | None:
    """Return the content of a private file; None if it no longer exists."""
    try:
        descriptor = _open_private(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        text = file.read(LONGEST + 1)
    if len(text) > LONGEST:
        raise UsageError(
            f"{path} is too long.",
            f"a login has at most {LONGEST} bytes",
            "remove it, and log in again",
        )
    return text


def _not_a_file(path: Path, kind: str) -> UsageError:
    return UsageError(
        f"{path} is {kind}.", "a login is a regular file", "remove it, and log in again"
    )


def _refuse_others(status: os.stat_result, path: Path) -> None:
    """Refuse a file or folder that another user owns, can read or can write."""
    if status.st_uid != os.geteuid():
        raise UsageError(
            f"{path} belongs to another user.", "it holds tokens", "use a folder of your own"
        )
    if stat.S_IMODE(status.st_mode) & OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        raise UsageError(
            f"Other users can reach {path} (mode {mode:o}).",
            "it holds tokens",
            f"chmod go-rwx {path}",
        )


@asynccontextmanager
async def _file_lock(path: Path) -> AsyncIterator[None]:
    """Hold a lock between processes.

    It ends with its process, so a dead process does not keep it.
    """
    descriptor = _open_private(path, os.O_RDWR | os.O_CREAT)
    try:
        while not DescriptorLock().take(descriptor):  # noqa: ASYNC110  # another process has it
            # Not a blocking wait in a thread, which could not be cancelled.
            await asyncio.sleep(AGAIN)
        yield
    finally:
        os.close(descriptor)


class KeyringStore(Store):
    """Logins in the keyring of the system; they need the extra `keyring`.

    A keyring cannot list its entries, so one entry lists the others.

    >>> from wirecall.auth import KeyringStore
    """

    def __init__(self) -> None:
        try:
            import keyring
        except ImportError:
            raise UsageError(
                "keyring is not installed.", "KeyringStore needs it", extra_fix("keyring")
            ) from None
        self._get = keyring.get_password
        self._set = keyring.set_password
        self._delete = keyring.delete_password
        # A keyring has no locks, so files are locked.
        self._files = FileStore()

    async def logins(self, server: str | None = None) -> list[Login]:
        return _newest_first(await asyncio.to_thread(self._read), server)

    async def save(self, login: Login) -> None:
        async with self._files.lock(INDEX):
            await asyncio.to_thread(self._write, login, True)

    async def remove(self, login: Login) -> None:
        async with self._files.lock(INDEX):
            await asyncio.to_thread(self._write, login, False)

    def lock(self, server: str) -> AbstractAsyncContextManager[None]:
        return self._files.lock(server)

    def _names(self) -> list[str]:
        return _decoded(
            self._get(SERVICE, INDEX) or "[]",
            list[str],
            f"The entry {INDEX!r} of {SERVICE} in the keyring",
        )

    def _read(self) -> list[Login]:
        texts = {name: self._get(SERVICE, name) for name in self._names()}
        return [
            _decoded(text, Login, f"The entry {name!r} of {SERVICE} in the keyring")
            for name, text in texts.items()
            if text
        ]

    def _write(self, login: Login, is_kept: bool) -> None:
        name = _digest(*_key(login))
        names = [each for each in self._names() if each != name]
        if is_kept:
            self._set(SERVICE, name, msgspec.json.encode(login).decode())
            names.append(name)
        elif self._get(SERVICE, name) is not None:
            self._delete(SERVICE, name)
        self._set(SERVICE, INDEX, msgspec.json.encode(names).decode())

"""Where logins are kept: in files that only their owner can read, in memory, in a keyring."""

import asyncio
import os
import socket
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import keyring
import pytest
from keyring.backend import KeyringBackend
from keyring.errors import PasswordDeleteError
from msgspec.structs import replace

from tests.auth.world import World, visit
from wirecall import connect
from wirecall.auth import Browser, FileStore, KeyringStore, Login, MemoryStore, Store
from wirecall.errors import UsageError

PATIENCE = 60.0


class Ring(KeyringBackend):
    """A keyring in memory."""

    def __init__(self) -> None:
        self.entries: dict[tuple[str, str], str] = {}

    def get_password(self, service: str, username: str) -> str | None:
        return self.entries.get((service, username))

    def set_password(self, service: str, username: str, password: str) -> None:
        self.entries[service, username] = password

    def delete_password(self, service: str, username: str) -> None:
        if self.entries.pop((service, username), None) is None:
            raise PasswordDeleteError


@pytest.fixture
def ring() -> Iterator[Ring]:
    before = keyring.get_keyring()
    made = Ring()
    keyring.set_keyring(made)
    yield made
    keyring.set_keyring(before)


@pytest.fixture(params=["file", "memory", "keyring"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ring: Ring
) -> Store:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    made: Store = {"file": FileStore, "memory": MemoryStore, "keyring": KeyringStore}[
        request.param
    ]()
    return made


def login(
    server: str = "https://a.example/mcp", issuer: str = "https://auth.example", saved: float = 1.0
) -> Login:
    return Login(
        server=server,
        issuer=issuer,
        client_id="me",
        client_secret="hush",
        token_endpoint=f"{issuer}/token",
        scopes=["read"],
        access_token=f"access of {saved}",
        refresh_token="refresh",
        expires=5.0,
        saved=saved,
    )


async def test_login_is_kept_found_replaced_and_removed(store: Store) -> None:
    first = login()
    other = login("https://b.example/mcp", saved=2.0)
    assert await store.logins() == []
    await store.save(first)
    await store.save(other)
    assert await store.logins() == [other, first]
    assert await store.logins(first.server) == [first]
    newer = replace(first, access_token="newer", saved=3.0)
    await store.save(newer)
    assert await store.logins() == [newer, other]
    await store.remove(newer)
    await store.remove(newer)
    assert await store.logins() == [other]


async def test_newest_login_at_a_server_is_the_first(store: Store) -> None:
    old = login(saved=1.0)
    new = login(issuer="https://new.example", saved=2.0)
    await store.save(new)
    await store.save(old)
    assert await store.logins(old.server) == [new, old]


async def test_lock_is_held_by_one_at_a_time_and_per_server(store: Store) -> None:
    held: list[str] = []
    free = asyncio.Event()

    async def hold(name: str) -> None:
        async with store.lock("https://a.example/mcp"):
            held.append(name)
            await free.wait()
            held.append(f"{name} ends")

    async with asyncio.TaskGroup() as group:
        group.create_task(hold("a"))
        group.create_task(hold("b"))
        async with store.lock("https://b.example/mcp"):
            free.set()
    first = held[0]
    second = held[2]
    assert held == [first, f"{first} ends", second, f"{second} ends"]
    assert {first, second} == {"a", "b"}


# --- files ----------------------------------------------------------------------------------------


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


async def test_files_are_readable_only_by_their_owner_after_each_write(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = FileStore(tmp_path / "logins")
        for number in range(3):
            await store.save(login(saved=float(number)))
            async with store.lock("x"):
                assert modes(store.folder) == {0o600}
        assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
        assert len(list(store.folder.glob("*.json"))) == 1
        assert not list(store.folder.glob(".*"))
    finally:
        os.umask(before)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
async def test_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    store = FileStore(tmp_path / "logins")
    await store.save(login())
    (path,) = store.folder.glob("*.json")
    path.chmod(mode)
    with pytest.raises(UsageError, match=f"mode {mode:o}") as caught:
        await store.logins()
    assert f"chmod go-rwx {path}" in str(caught.value)
    assert "hush" not in str(caught.value)


async def test_folder_that_others_can_open_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "logins"
    folder.mkdir(mode=0o755)
    for work in (FileStore(folder).save(login()), FileStore(folder).logins()):
        with pytest.raises(UsageError, match="mode 755"):
            await work
    assert not list(folder.iterdir())


def put_link(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def put_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nothing")


def put_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def put_folder(path: Path) -> None:
    path.unlink()
    path.mkdir(mode=0o700)


def put_socket(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(path.parent)  # the path of a socket has at most 107 bytes
        listener.bind(path.name)
    path.chmod(0o600)


def put_long_file(path: Path) -> None:
    path.write_bytes(b" " * ((1 << 20) + 1))


ODD_FILES: list[tuple[Callable[[Path], None], str]] = [
    (put_link, "is a symbolic link"),
    (put_dangling_link, "is a symbolic link"),
    (put_fifo, "is a FIFO"),
    (put_folder, "is a folder"),
    (put_socket, "cannot be opened"),
    (put_long_file, "is too long"),
]


@pytest.mark.parametrize(("put", "text"), ODD_FILES)
async def test_file_store_names_what_is_in_the_place_of_a_login(
    put: Callable[[Path], None], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = FileStore(tmp_path / "logins")
    await store.save(login())
    (path,) = store.folder.glob("*.json")
    put(path)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(UsageError, match=text) as caught:
            await store.logins()
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("put", "text"), ODD_FILES[:5])
async def test_file_store_names_what_is_in_the_place_of_a_lock(
    put: Callable[[Path], None], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = FileStore(tmp_path / "logins")
    async with store.lock("https://a.example/mcp"):
        pass
    (path,) = store.folder.glob("*.lock")
    put(path)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(UsageError, match=text):
            async with store.lock("https://a.example/mcp"):
                pass


@pytest.mark.parametrize("where", ["of this user", "of everybody"])
async def test_file_store_follows_a_link_to_its_folder_by_the_rule_of_its_parents(
    tmp_path: Path, where: str
) -> None:
    places = tmp_path / "places"
    places.mkdir(mode=0o700)
    real = tmp_path / "real"
    (places / "logins").symlink_to(real)
    store = FileStore(places / "logins")
    if where == "of everybody":
        places.chmod(0o777)
        for work in (store.save(login()), store.logins(), store.remove(login())):
            with pytest.raises(UsageError, match="symbolic link that other users can replace"):
                await work
        return
    await store.save(login())  # makes the folder that the link names
    assert [path.suffix for path in real.iterdir()] == [".json"]
    assert await store.logins() == [login()]
    await store.remove(login())
    assert await store.logins() == []


async def test_file_store_names_a_folder_that_links_to_itself(tmp_path: Path) -> None:
    folder = tmp_path / "logins"
    folder.symlink_to(folder)
    for work in (FileStore(folder).save(login()), FileStore(folder).logins()):
        with pytest.raises(UsageError, match="cannot be created"):
            await work


async def test_damaged_file_is_named(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "logins")
    await store.save(login())
    (path,) = store.folder.glob("*.json")
    path.write_bytes(b'{"access_token": "hush')
    with pytest.raises(UsageError, match="cannot be read") as caught:
        await store.logins()
    assert str(path) in str(caught.value)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("entry", ["logins", "a login"])
async def test_damaged_entry_of_the_keyring_is_named(
    entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ring: Ring
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    store = KeyringStore()
    await store.save(login())
    name = next(name for _, name in ring.entries if (name == "logins") == (entry == "logins"))
    ring.entries["wirecall", name] = '{"access_token": "hush'
    with pytest.raises(
        UsageError, match=f"The entry '{name}' of wirecall in the keyring cannot be read"
    ) as caught:
        await store.logins()
    assert "hush" not in str(caught.value)


def test_folder_is_in_the_data_folder_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert FileStore().folder == tmp_path / "wirecall" / "logins"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert FileStore().folder == Path.home() / ".local" / "share" / "wirecall" / "logins"


# --- two processes --------------------------------------------------------------------------------


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with World() as made:
        yield made


CALLER = """
import asyncio, sys
from wirecall import connect
from wirecall.auth import FileStore, Stored

async def main(url, folder):
    async with connect(url, auth=Stored(store=FileStore(folder)), discover=False) as calls:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        for _ in range(3):
            assert await calls.call("price") == "fine"

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("how", ["before its end", "after a refusal"])
async def test_rotating_token_is_refreshed_once_by_two_processes(
    world: World, tmp_path: Path, how: str
) -> None:
    store = FileStore(tmp_path / "logins")
    async with connect(world.url, auth=Browser(visit=visit, store=store), discover=False) as calls:
        await calls.call("price")
    (kept,) = await store.logins()
    if how == "before its end":
        await store.save(replace(kept, expires=time.time() + 5))
    else:
        world.tokens.clear()
    command = (sys.executable, "-c", CALLER, world.url, str(store.folder))
    pipes = asyncio.subprocess.PIPE
    async with asyncio.timeout(PATIENCE):
        both = [
            await asyncio.create_subprocess_exec(*command, stdin=pipes, stdout=pipes, stderr=pipes)
            for _ in range(2)
        ]
        for process in both:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"ready\n"
        ends = await asyncio.gather(*(process.communicate(b"go\n") for process in both))
    assert [
        (process.returncode, error) for process, (_, error) in zip(both, ends, strict=True)
    ] == [(0, b""), (0, b"")]
    refreshes = [
        request
        for request in world.asked("/token")
        if request.form["grant_type"] == "refresh_token"
    ]
    assert len(refreshes) == 1
    (after,) = await store.logins()
    assert after.refresh_token in world.refresh_tokens

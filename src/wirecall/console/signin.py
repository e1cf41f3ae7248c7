"""Sign-in to the console: a link that works once, then a cookie and a value of the tab.

1. The terminal prints a link. Its secret is in the fragment of the address, which browsers do not
   send. The page posts the secret, and removes it from the address.
2. A link works once, within `LINK_LIFE` seconds. A session lasts `SESSION_LIFE` seconds.
3. A session has two secrets, and every request needs both. Cookies ignore ports, so a browser sends
   the cookie to every other program on the loopback, too. The page itself sends the value of the
   tab, in a header.
4. A secret has 256 bits. The server keeps only its digest, and compares digests in constant time.
5. With a file, sessions outlive the process: `wirecall dev` restarts the server at every edit. The
   file has digests alone, and only its owner can read it.
6. Attempts to sign in and requests for another link are limited, together, to `ATTEMPTS` per
   minute.
"""

import hashlib
import hmac
import secrets
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

from wirecall.files import replace_file
from wirecall.logs import logger

Role: TypeAlias = Literal["look", "act"]

LINK_LIFE = 60.0
SESSION_LIFE = 8 * 3600.0
# Sign-ins and requests for a link in one minute.
ATTEMPTS = 5
# The oldest of more sessions or links is dropped.
MOST_SESSIONS = 64
MOST_LINKS = 8


class TooMany(Exception):
    """There were too many attempts; `seconds` is the time until the next one."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"too many attempts; the next one is possible in {seconds:.0f} s")
        self.seconds = seconds


class Session(Struct):
    """One signed-in browser."""

    # A short name for the audit trail; it is not a secret.
    name: str
    role: Role
    cookie: bytes
    tab: bytes
    ends_at: float


class Opened(Struct, frozen=True):
    """A new session and its secrets, which only the browser keeps."""

    session: Session
    cookie: str
    tab: str


class SignIn:
    """The links and the sessions of one console.

    `clock` returns seconds. `file` keeps the sessions for the next process.
    """

    def __init__(self, clock: Callable[[], float] = time.time, file: str | None = None) -> None:
        self._clock = clock
        self._file = None if file is None else Path(file)
        # The digest of each link, when it ends, and its role.
        self._links: deque[tuple[bytes, float, Role]] = deque(maxlen=MOST_LINKS)
        self._sessions: deque[Session] = deque(maxlen=MOST_SESSIONS)
        self._attempts: deque[float] = deque(maxlen=ATTEMPTS)
        if self._file is not None:
            with suppress(OSError, msgspec.MsgspecError):  # there is none yet, or it is torn
                kept = msgspec.json.decode(self._file.read_bytes(), type=list[Session])
                self._sessions.extend(kept)

    def link(self, role: Role) -> str:
        """Return the secret of a new link."""
        secret = secrets.token_urlsafe(32)
        self._links.append((_digest(secret), self._clock() + LINK_LIFE, role))
        return secret

    def attempt(self) -> None:
        """Count an attempt; raise `TooMany` if there were too many within a minute."""
        now = self._clock()
        if len(self._attempts) == ATTEMPTS and now - self._attempts[0] < 60:
            raise TooMany(60 - (now - self._attempts[0]))
        self._attempts.append(now)

    def open(self, secret: str) -> Opened | None:
        """Return a new session for the secret of a link; None if the link does not work."""
        wanted = _digest(secret)
        for link in tuple(self._links):
            digest, ends_at, role = link
            if not hmac.compare_digest(digest, wanted):
                continue
            self._links.remove(link)
            if ends_at < self._clock():
                return None
            cookie = secrets.token_urlsafe(32)
            tab = secrets.token_urlsafe(32)
            session = Session(
                name=f"console-{secrets.token_hex(3)}",
                role=role,
                cookie=_digest(cookie),
                tab=_digest(tab),
                ends_at=self._clock() + SESSION_LIFE,
            )
            self._sessions.append(session)
            self._keep()
            return Opened(session, cookie, tab)
        return None

    def find(self, cookie: str, tab: str) -> Session | None:
        """Return the session that both secrets belong to."""
        wanted = _digest(cookie)
        of_tab = _digest(tab)
        for session in self._sessions:
            is_cookie = hmac.compare_digest(session.cookie, wanted)
            is_tab = hmac.compare_digest(session.tab, of_tab)
            if is_cookie and is_tab:
                if session.ends_at < self._clock():
                    return None
                return session
        return None

    def close(self, session: Session) -> None:
        """End a session."""
        if session in self._sessions:
            self._sessions.remove(session)
            self._keep()

    def _keep(self) -> None:
        if self._file is None:
            return
        try:
            replace_file(self._file, msgspec.json.encode(list(self._sessions)))
        except OSError as error:
            logger.warning("the sessions of the console cannot be kept: %s", error)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()

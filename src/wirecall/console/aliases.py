"""Names of records for the role "look": a record's own name in an address holds its key.

An alias is a keyed digest. It leads to its record as long as this process runs and the alias is
among the last `MOST` that were shown.
"""

import hashlib
import hmac
import secrets
from collections import OrderedDict

from wirecall.console.source import NotFound
from wirecall.protocol.messages import Json

# Aliases that are kept.
MOST = 10_000


class Aliases:
    """The aliases that one console has shown."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._words: OrderedDict[str, str] = OrderedDict()

    def of(self, word: str) -> str:
        """Return the alias of a word."""
        alias = hmac.new(self._secret, word.encode(), hashlib.sha256).hexdigest()[:32]
        self._words[alias] = word
        self._words.move_to_end(alias)
        if len(self._words) > MOST:
            self._words.popitem(last=False)
        return alias

    def word(self, alias: str) -> str:
        """Return the word of an alias."""
        found = self._words.get(alias)
        if found is None:
            raise NotFound(f"record {alias[:100]!r}", "open it from the list")
        return found

    def hide(self, page: str, document: Json) -> None:
        """Replace the names of records in the facts of a page: those of its links, and its own."""
        if not isinstance(document, dict):
            return
        if page == "calls":
            self._replace(document, "record")
        if page != "ledger":
            return
        self._replace(document, "id")
        # The place where a list ends is that of a record.
        self._replace(document, "next")
        for each in document.get("records", ()):
            self._replace(each, "id")

    def _replace(self, members: dict[str, Json], name: str) -> None:
        word = members.get(name)
        if isinstance(word, str):
            members[name] = self.of(word)

"""The five revisions of MCP as one table.

A difference between revisions is a row of `_TABLE`, not a branch in the code: `+` means that the
revision has the feature, `-` that it does not, any other word is its value. Code asks
`revision.has("request ping")` or `revision.value("structured")`, and never compares dates. A
version that is not in the table is unknown, whatever it looks like (V5).

The first word of a row is its topic:

    request, notification    what a client may send
    ask                      what a server may request of its client
    capability               what a server may declare
    content, tool, ...       kinds and members in the schema of the revision
    http                     rules of Streamable HTTP
"""

from typing import Final

from wirecall.errors import (
    BadInput,
    FixedError,
    InternalError,
    InvalidParams,
    KeyInvalid,
    KeyRequired,
    NotCapable,
    ProtocolError,
    RpcError,
)
from wirecall.protocol.messages import JsonObject

# fmt: off
_TABLE: Final = {
    #                                               2024-11-05  2025-03-26  2025-06-18  2025-11-25  2026-07-28
    # --- how a conversation begins, and what one message may hold
    "handshake":                                    "+           +           +           +           -",
    "envelope":                                     "-           -           -           -           +",
    "array":                                        "-           +           -           -           -",
    "id of an unreadable message":                  "null        null        null        -           -",

    # --- what a client may send
    "request initialize":                           "+           +           +           +           -",
    "request server/discover":                      "-           -           -           -           +",
    "request ping":                                 "+           +           +           +           -",
    "request tools/list":                           "+           +           +           +           +",
    "request tools/call":                           "+           +           +           +           +",
    "request prompts/list":                         "+           +           +           +           +",
    "request prompts/get":                          "+           +           +           +           +",
    "request resources/list":                       "+           +           +           +           +",
    "request resources/templates/list":             "+           +           +           +           +",
    "request resources/read":                       "+           +           +           +           +",
    "request resources/subscribe":                  "+           +           +           +           -",
    "request resources/unsubscribe":                "+           +           +           +           -",
    "request subscriptions/listen":                 "-           -           -           -           +",
    "request completion/complete":                  "+           +           +           +           +",
    "request logging/setLevel":                     "+           +           +           +           -",
    "notification notifications/initialized":       "+           +           +           +           -",
    "notification notifications/cancelled":         "+           +           +           +           +",
    "notification notifications/progress":          "+           +           +           +           -",
    "notification notifications/roots/list_changed": "+          +           +           +           -",

    # --- what a server may ask its client
    "ask sampling/createMessage":                   "+           +           +           +           +",
    "ask sampling tools":                           "-           -           -           +           +",
    "ask sampling context":                         "-           -           -           +           +",
    "ask roots/list":                               "+           +           +           +           +",
    "ask elicitation/create":                       "-           -           +           +           +",
    "ask elicitation url":                          "-           -           -           +           +",
    "ask elicitation choices":                      "-           -           -           +           +",

    # --- what a server may declare
    "capability tools":                             "+           +           +           +           +",
    "capability prompts":                           "+           +           +           +           +",
    "capability resources":                         "+           +           +           +           +",
    "capability logging":                           "+           +           +           +           +",
    "capability completions":                       "-           +           +           +           +",
    "capability experimental":                      "+           +           +           +           +",
    "capability extensions":                        "-           -           -           +           +",

    # --- members of its types
    "progress message":                             "-           +           +           +           +",
    "content text":                                 "+           +           +           +           +",
    "content image":                                "+           +           +           +           +",
    "content resource":                             "+           +           +           +           +",
    "content audio":                                "-           +           +           +           +",
    "content resource_link":                        "-           -           +           +           +",
    "tool annotations":                             "-           +           +           +           +",
    "tool outputSchema":                            "-           -           +           +           +",
    "title":                                        "-           -           +           +           +",
    "definition meta":                              "-           -           +           +           +",
    "icons":                                        "-           -           -           +           +",
    "website":                                      "-           -           -           +           +",
    "structured":                                   "-           -           object      object      any",
    "completion context":                           "-           -           +           +           +",
    "result type":                                  "-           -           -           -           +",
    "caching":                                      "-           -           -           -           +",

    # --- what an error looks like
    "resource not found":                           "-32002      -32002      -32002      -32002      -32602",
    "bad arguments":                                "error       error       error       result      result",
    "capability of the client missing":             "result      result      result      result      error",
    "visit required":                               "-           -           -           -32042      -",

    # --- Streamable HTTP
    "http version header":                          "-           -           +           +           +",
    "http session":                                 "+           +           +           +           -",
    "http resume":                                  "-           +           +           +           -",
    "http priming event":                           "-           -           -           +           -",
    "http headers repeat the body":                 "-           -           -           -           +",
    "http disconnect cancels":                      "-           -           -           -           +",
}
# fmt: on

NAMES: Final = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28")


class Revision:
    """One column of the table."""

    def __init__(self, name: str) -> None:
        column = NAMES.index(name)
        self.name = name
        self._cells = {row: cells.split()[column] for row, cells in _TABLE.items()}
        self._has = frozenset(row for row, cell in self._cells.items() if cell != "-")
        # Rows that every message needs:
        self.has_arrays = self.has("array")
        self.is_stateless = self.has("envelope")
        self.has_result_type = self.has("result type")
        self.structured = self.value("structured")
        self.requests = frozenset(
            row.removeprefix("request ") for row in self._has if row.startswith("request ")
        )

    def has(self, row: str) -> bool:
        if row not in _TABLE:
            raise KeyError(row)
        return row in self._has

    def value(self, row: str) -> str | None:
        """Return the word in the cell, or None for a `-`."""
        cell = self._cells[row]
        return None if cell == "-" else cell

    def known(self, content: JsonObject) -> JsonObject:
        """Return content as the revision can carry it: an unknown kind becomes text that names it."""
        if self.has(f"content {content['type']}"):
            return content
        if content["type"] == "resource_link":
            return {"type": "text", "text": f"{content['name']}: {content['uri']}"}
        return {
            "type": "text",
            "text": f"[{content['type']} of type {content.get('mimeType', 'unknown')} left out]",
        }

    def reports_in_result(self, error: RpcError, *, asks_key: bool) -> bool:
        """Return whether a tool reports an error in its result, for the model, and not as a
        protocol error.

        `asks_key`: the model fills in the idempotency key.
        """
        # Errors that a model can fix belong in the result (server/tools, "Error Handling"; SEP-1303
        # for bad arguments). It can fix arguments, and a key only if it is asked for one. It cannot
        # fix a header or an answer.
        if isinstance(error, InvalidParams):
            is_mendable = (
                asks_key
                if isinstance(error, KeyRequired)
                else not isinstance(error, (KeyInvalid, BadInput))
            )
            return is_mendable and self.value("bad arguments") == "result"
        if isinstance(error, NotCapable):
            return self.value("capability of the client missing") == "result"
        return not isinstance(error, (FixedError, ProtocolError)) or isinstance(
            error, InternalError
        )

    def __repr__(self) -> str:
        return f"<revision {self.name}>"


REVISIONS: Final = {name: Revision(name) for name in NAMES}

# The revisions of each era, the newest last: the answer to `initialize` with an unknown version is
# the newest of its era.
HANDSHAKE: Final = [revision for revision in REVISIONS.values() if revision.has("handshake")]
STATELESS: Final = [revision for revision in REVISIONS.values() if revision.is_stateless]

# A message over HTTP without a session, a version header and an envelope comes from a client of
# this revision.
UNSTATED: Final = REVISIONS["2025-03-26"]

# Every method of any revision: on a pipe they distinguish MCP from plain JSON-RPC.
REQUESTS: Final = frozenset().union(*(revision.requests for revision in REVISIONS.values()))
NOTIFICATIONS: Final = frozenset(
    row.removeprefix("notification ") for row in _TABLE if row.startswith("notification ")
)


def offered(version: str) -> Revision:
    """Return the revision that answers `initialize`: the one that the client offers, or the newest
    with a handshake.
    """
    revision = REVISIONS.get(version)
    return revision if revision is not None and revision.has("handshake") else HANDSHAKE[-1]

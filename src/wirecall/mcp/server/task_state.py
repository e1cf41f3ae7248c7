"""The state of a task: the document that the server stores for it, and its status.

`status_of` derives the status from the document and the record, here and nowhere else:

    the document has `final`                  as `final` says
    the record is gone                        failed: the outcome is unknown
    WAITING, with open questions              input_required
    WAITING with all answers, or RUNNING      working
    DONE, with a result                       completed
    DONE, with an error that a model reads    completed, and the result has isError
    DONE with any other error, or UNKNOWN     failed
"""

import os
import re
import time
from base64 import urlsafe_b64encode
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import msgspec
from msgspec import Raw, Struct

from wirecall.commands.outcome import answer, recorded
from wirecall.errors import OutcomeUnknown, RpcError
from wirecall.ledger.base import State, Task
from wirecall.mcp.revisions import REVISIONS
from wirecall.mcp.server.calls import error_result
from wirecall.mcp.server.messages import error_object
from wirecall.protocol.messages import JsonObject, encode
from wirecall.server.identity import Identity

# How often a client should ask: after a tenth of the task's age, within these bounds.
FIRST_POLL_MS = 1_000
LAST_POLL_MS = 10_000

# The id of a task: 32 bytes in base64.
TASK_ID = re.compile(r"[A-Za-z0-9_-]{43}")

_OVER = ("completed", "failed", "cancelled")


class Document(Struct, omit_defaults=True):
    """The state of a task that the server stores besides its record."""

    tool: str
    arguments: Raw
    revision: str
    capabilities: JsonObject
    ttl_ms: int
    # Seconds that the task may run or wait; `ttl_ms` adds the time for which its answer is kept.
    lasts: float
    # Wall-clock times, since people read them.
    created: float
    updated: float
    client: dict[str, str] | None = None
    # The identity of the caller, without the claims of its token.
    identity: Identity | None = None
    message: str | None = None
    is_cancelled: bool = False
    # The digests of all questions, by key.
    asked: dict[str, str] = {}
    answers: dict[str, JsonObject] = {}
    # How often the task has asked.
    leg: int = 0
    # All questions of this leg are answered.
    is_ready: bool = False
    # How the task ended, if its record does not say.
    final: JsonObject | None = None


read_document = msgspec.json.Decoder(Document).decode
_read_questions = msgspec.json.Decoder(dict[str, Any]).decode


# --- the status -----------------------------------------------------------------------------------


def status_of(task: Task) -> JsonObject:
    """Return the status of a task, with the result, error or questions that belong to it."""
    document = read_document(task.document)
    record = task.now
    if document.final is not None:
        return document.final
    # An operator has resolved an unknown outcome before a client asked for the task.
    if record is None:
        return failed(OutcomeUnknown("the record of the task is gone", ran="unknown"))
    if questions := open_questions(task):
        return {"status": "input_required", "inputRequests": questions}
    if record.state in (State.RUNNING, State.WAITING):
        return {"status": "working"}
    try:
        return {"status": "completed", "result": answer(recorded(record), replayed=False)}
    except RpcError as error:
        # A record does not keep a refusal for a missing key, so `asks_key` does not matter.
        return ending(error, document, asks_key=False)


def is_over(task: Task) -> bool:
    """Return whether a task has ended, for good or with an outcome that is still unknown."""
    return status_of(task)["status"] in _OVER


def is_undecided(task: Task) -> bool:
    """Return whether the outcome of a task is unknown, and no client has received that yet."""
    is_unknown = task.now is not None and task.now.state is State.UNKNOWN
    return is_unknown and read_document(task.document).final is None


def is_unanswered(task: Task) -> bool:
    """Return whether a task still waits for answers although its time is over."""
    if task.now is None or task.now.state is not State.WAITING:
        return False
    document = read_document(task.document)
    return document.final is None and is_late(task, document)


def is_late(task: Task, document: Document) -> bool:
    """Return whether the time to run or wait of a task is over.

    The rest of its ttl is for its answer.
    """
    return task.ttl_left <= document.ttl_ms / 1000 - document.lasts


def has_acted(task: Task) -> bool:
    """Return whether a run of a task, now or before a crash, may have made its effect."""
    record = task.now
    return record is not None and record.committed and record.state is State.RUNNING


def open_questions(task: Task) -> JsonObject:
    """Return the questions of a task that are not answered yet, by key."""
    document = read_document(task.document)
    record = task.now
    if document.final is not None or record is None:
        return {}
    if record.state is not State.WAITING or record.outcome is None:
        return {}
    questions = _read_questions(record.outcome.payload or b"{}").get("inputRequests", {})
    return {key: question for key, question in questions.items() if key not in document.answers}


# --- how a task ends ------------------------------------------------------------------------------

CANCELLED: JsonObject = {"status": "cancelled"}


def ending(error: RpcError, document: Document, *, asks_key: bool) -> JsonObject:
    """Return the end of a task whose call has failed.

    An error that the model reads is a result. `asks_key`: the model fills in the idempotency key.
    """
    if not REVISIONS[document.revision].reports_in_result(error, asks_key=asks_key):
        return failed(error)
    return {"status": "completed", "result": Raw(error_result(error, document.tool))}


def failed(error: RpcError) -> JsonObject:
    """Return the end of a task that failed with an error of the protocol."""
    reported = error_object(error)
    return {"status": "failed", "statusMessage": reported.message, "error": reported}


# --- as clients and operators see it --------------------------------------------------------------


def created(id: str, document: Document, meta: JsonObject | None = None) -> bytes:
    """Return the answer to a call that has become a task."""
    result = {"resultType": "task", **members(id, document)}
    if meta:
        result["_meta"] = meta
    return encode(result)


def members(id: str, document: Document) -> JsonObject:
    """Return the members that every form of a task has, with the status "working"."""
    age_ms = (time.time() - document.created) * 1000
    shown: JsonObject = {
        "taskId": id,
        "status": "working",
        "createdAt": _iso(document.created),
        "lastUpdatedAt": _iso(document.updated),
        "ttlMs": document.ttl_ms,
        "pollIntervalMs": int(min(max(age_ms / 10, FIRST_POLL_MS), LAST_POLL_MS)) // 1000 * 1000,
    }
    if document.message is not None:
        shown["statusMessage"] = document.message
    return shown


def summary(task: Task) -> JsonObject:
    """Return a task in short, for an operator, without its questions and its answer."""
    document = read_document(task.document)
    return {
        "id": task.id,
        "status": status_of(task)["status"],
        "message": document.message,
        "created": _iso(document.created),
        "updated": _iso(document.updated),
    }


def _iso(moment: float) -> str:
    written = datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds")
    return written.replace("+00:00", "Z")


# --- ids and digests ------------------------------------------------------------------------------


def new_id() -> str:
    """Return an id that other callers cannot guess.

    It begins with a letter or a digit: a shell takes a word that begins with "-" for an option.
    """
    while True:
        id = urlsafe_b64encode(os.urandom(32)).decode().rstrip("=")
        if id[0].isalnum():
            return id


def digest_of(question: JsonObject) -> str:
    """Return the digest by which a task recognises a question."""
    return sha256(encode([question["method"], question["params"]])).hexdigest()[:16]

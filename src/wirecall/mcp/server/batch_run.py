"""One call of the batch tool: its entries as calls, and its answer.

Every entry is a call of its tool and takes the dispatcher's steps, as if it had come alone:
middleware, limits, binding, ledger, log, audit trail. `server.batch.run_batch` runs the entries of
arrays and of the batch tool, and `server.references` resolves the references of both.

    1 prepare   _prepared   an entry as sent -> its tool, its references, or its error
    2 plan      make_plan   which entry waits for which
    3 confirm   _confirm    one question for all destructive entries, before anything runs
    4 run       run_batch   queries concurrently, commands in order, an entry after its targets
    5 answer    _answer     outcomes -> structured content, the same as text, images and links

1. The key of an entry is its own, or "KEY/ID" with the key of the batch, or none. An entry without
   a key is recognised by its loss, since it has the receipt of the whole answer. So a batch that is
   sent again replays the entries that ran and runs the others, in any process.
2. With a handshake, the questions of entries are requests to the client. At 2026-07-28 an entry that
   asks is parked: its dependants do not run, and no command overtakes a command that is parked. The
   others run. Then the batch asks all questions together. Its next round replays the commands that
   have an outcome, reads again with the queries, and continues.
3. The state between two rounds holds the keys of the commands that ran. So the next round finds
   their records, also those of entries that came without a key.
4. A batch that is a task has a key, and so has each of its commands. If its process dies, another
   one runs the batch again, and the recorded commands are replayed.
"""

import os
from collections.abc import Callable, Coroutine, Sequence
from functools import lru_cache
from logging import INFO
from types import CoroutineType, NoneType
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import (
    BatchInvalid,
    ConfirmRequired,
    EncodeError,
    InternalError,
    InvalidParams,
    KeyInProgress,
    NotCapable,
    RpcError,
    ToolError,
    suggested,
)
from wirecall.logs import logger
from wirecall.mcp.server.batch_tool import (
    BatchMethod,
    BatchTool,
    Form,
    Sent,
    is_destructive,
    read_form,
)
from wirecall.mcp.server.calls import CallResult, Calls, batch_identity, key_required
from wirecall.mcp.server.catalog import is_structured
from wirecall.mcp.server.messages import error_object
from wirecall.mcp.server.peer import (
    RETRY_AFTER_MS,
    STATE_LIFETIME,
    Peer,
    Question,
    check_capability,
)
from wirecall.mcp.types import ENTRY_META, CallTool, Content, Elicited, ToolResult
from wirecall.protocol.messages import UNREADABLE, JsonObject, encode
from wirecall.protocol.secrets import Redactor
from wirecall.server.batch import run_batch
from wirecall.server.call import Call, Frame, InputRequired, log_refusal
from wirecall.server.context import Context, call_of
from wirecall.server.ids import Ids
from wirecall.server.linking import Outcomes, scope_fault
from wirecall.server.method import Method
from wirecall.server.policy import check_key, fingerprint, identify
from wirecall.server.references import (
    LIMITS,
    NAMED,
    NO_LINKS,
    Links,
    Planned,
    Room,
    blocked,
    call_digest,
    extract,
    fill,
    kind_of,
    make_plan,
    reference_digest,
)

if TYPE_CHECKING:
    from wirecall.mcp.server.server import Server
    from wirecall.server.dispatch import Dispatcher

_NO_ARGUMENTS = Raw(b"{}")
# The key of the question about destructive entries. Those of entries have a slash in them.
CONFIRM = "confirm"
# A person accepts or declines; there is nothing to fill in.
_CONSENT: JsonObject = {"type": "object", "properties": {}}
# Characters of the arguments of one entry in that question.
SHOWN = 300
# Bytes that an answer needs beside its results: ids, names and errors of the entries.
OVERHEAD = 64 << 10
# Bytes. Characters that a string escapes are counted in larger results.
COUNTED = 1024
# The beginning of every result of a tool (`CallResult`).
_RESULT = b'{"content":'
# Content of an entry that follows the results: everything but text.
_MEDIA = ("image", "audio", "resource", "resource_link")


class Outcome(Struct, frozen=True):
    """How an entry has ended, or that it waits for an answer of the client."""

    # The result as JSON: structured content, or the text of the tool as a string.
    value: bytes = b"null"
    # Images, audio and resources.
    media: Sequence[JsonObject] = ()
    error: RpcError | None = None
    replayed: bool = False
    # The answer has no room for the result, which references may still use.
    is_too_long: bool = False
    # It waits for an answer of the client, or for an entry that does.
    is_parked: bool = False
    # What the entry asks, by the key of the question.
    questions: JsonObject = {}


class Answered(Struct, omit_defaults=True):
    """The answer to one entry, as it is sent (A4)."""

    id: str
    tool: str
    ok: bool
    result: Raw | UnsetType = UNSET
    error: object = UNSET
    replayed: bool = False


PARKED = Outcome(is_parked=True)
# The plan of an entry that waits for no other.
_FREE = Planned()
Ending: TypeAlias = "Outcome | Coroutine[Any, Any, Outcome]"


class Entry(Struct, eq=False):
    """One entry of a batch, prepared to be called."""

    id: str
    position: int
    # The tool as its caller named it.
    tool: str
    method: Method | None = None
    # The arguments without their references.
    arguments: Raw = _NO_ARGUMENTS
    # The arguments as sent.
    sent: Raw = _NO_ARGUMENTS
    # The key that came with the entry.
    own_key: str | None = None
    # The fingerprint of the arguments, if it is known from the search for the key.
    digest: bytes | None = None
    links: Links = NO_LINKS
    error: RpcError | None = None


class Batches:
    """Runs the calls of a batch tool."""

    def __init__(self, calls: Calls, dispatcher: "Callable[[], Dispatcher]") -> None:
        self.calls = calls
        self.dispatcher = dispatcher
        # Set once, right after this is made: the method calls `run`.
        self.method: BatchMethod

    async def run(self, ctx: Context) -> CallResult:
        """Run a batch, and return its answer."""
        call = call_of(ctx)
        form = read_form(call.params, self.method.most)
        assert isinstance(call.peer, Peer)
        return await BatchRun(self, call, call.peer, form).run()


def add_batch_tool(declared: BatchTool, server: "Server", app: str, most: int) -> None:
    """Add the batch tool of an app to its tools."""
    batches = Batches(server.calls, server.calls.dispatcher)
    method = BatchMethod(declared, batches.run, server.catalog.registry, most)
    method.add(app)
    batches.method = method
    server.catalog.batch = method


class EntryPeer(Peer):
    """The client of one entry: that of the batch, with questions of the entry's own."""

    outer: Peer | None = None
    # Entries that have ended, when this one sends progress.
    ended: Callable[[], int] = lambda: 0
    count: int = 0

    @property
    def _batch(self) -> Peer:
        assert self.outer is not None
        return self.outer

    @property
    def meta(self) -> JsonObject:
        # The span of the batch is the parent of the entry's span.
        meta = self._batch.meta
        return {name: meta[name] for name in meta if name not in ("traceparent", "tracestate")}

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        """Show the progress of the entry as a part of one entry."""
        if not total:
            return
        part = min(max(progress / total, 0.0), 0.99)
        shown = str(self.id)
        if message:
            shown = f"{shown}: {message}"
        await self._batch.progress(self.ended() + part, self.count, shown)

    async def log(self, level: str, data: object, logger: str | None) -> None:
        await self._batch.log(level, data, logger)

    async def hang_up(self, retry: float) -> None:
        await self._batch.hang_up(retry)

    async def ask(self, questions: Sequence[Any]) -> list[Any]:
        for question in questions:
            self._batch.check_question(question)
        return await super().ask(questions)

    async def pause(self, questions: JsonObject) -> bytes:
        """Return the questions of the entry, which its record keeps. The batch asks them."""
        return encode({"entry": str(self.id), "inputRequests": questions})

    def _question(
        self, key: str | None, method: str, params: JsonObject, decode: Callable[[object], Any]
    ) -> Question:
        question = super()._question(key, method, params, decode)
        question.key = f"{self.id}/{question.key}"
        return question


class BatchRun:
    """One call of the batch tool."""

    def __init__(self, batches: Batches, call: Call, peer: Peer, form: Form) -> None:
        self._calls = batches.calls
        self._dispatcher = batches.dispatcher()
        self._tool = batches.method
        self._call = call
        self._peer = peer
        self._wants_progress = peer.wants_progress
        ids = form.ids
        self._wanted = set(ids if form.wanted is None else form.wanted)
        self._key = _key_of(call, peer)
        self._entries = [
            self._prepared(position, id, sent)
            for position, (id, sent) in enumerate(zip(ids, form.calls, strict=True))
        ]
        links = [entry.error or entry.links for entry in self._entries]
        self._plan = [_FREE] * len(ids)
        if any(each is not NO_LINKS for each in links):
            self._plan = [*make_plan(ids, links).entries]
        self._outcomes: Outcomes[Outcome] = Outcomes(self._plan)
        # Bytes that references may still fill in.
        self._room = Room()
        # Bytes that results may still take in the answer.
        most = peer.questions.limits.bytes_out
        self._left = most - min(OVERHEAD, most // 4)
        self._ended = 0
        # A command is parked, so later ones do not run in this round.
        self._lane_is_parked = False
        retentions = [
            entry.method.terms.retention
            for entry in self._entries
            if entry.method is not None and entry.method.is_command
        ]
        peer.lifetime = min([STATE_LIFETIME, *retentions])

    async def run(self) -> CallResult:
        """Run all entries, and return the answer."""
        await self._confirm()
        limits = self._peer.questions.limits
        with self._dispatcher.places(self._peer.caller, len(self._entries)):
            outcomes = await run_batch(
                None, self._entries, self._begin, self._is_in_lane, concurrency=limits.concurrency
            )
        if any(outcome.is_parked for outcome in outcomes):
            await self._ask(outcomes)
        return self._answer(outcomes)

    # --- step 1: entries ----------------------------------------------------------------------------

    def _prepared(self, position: int, id: str, sent: Sent) -> Entry:
        entry = Entry(id, position, sent.tool[:100])
        try:
            entry.method = self._find(sent.tool)
            refs: tuple[Any, ...] = ()
            if sent.arguments is not UNSET and (text := bytes(sent.arguments)) != b"null":
                if not text.startswith(b"{"):
                    got = kind_of(_decode_digits(text))
                    raise InvalidParams(
                        f'arguments: expected an object {{"NAME": VALUE}}, got {got}', ran="no"
                    )
                entry.arguments = entry.sent = sent.arguments
                refs = self._take_references(entry, text)
            if refs or sent.after:
                entry.links = _links_of(entry.method, refs, tuple(sent.after or ()))
            if entry.method.is_command:
                beside = UNSET if sent.idempotency_key is None else sent.idempotency_key
                place = entry.method.key_place
                entry.own_key, digest = identify(entry.sent, beside, place=place)
                if entry.arguments is entry.sent:
                    entry.digest = digest
        except RpcError as error:
            entry.error = error
        return entry

    def _find(self, name: str) -> Method:
        """Return the tool of an entry."""
        tool = self._tool.find(name)
        if tool is None:
            raise self._no_tool(name)
        if tool.task == "required":
            raise InvalidParams(
                f"{tool.tool_name} is always a task: call it without a batch", ran="no"
            )
        return tool

    def _no_tool(self, name: str) -> InvalidParams:
        """Return the error for a tool that the batch does not call (A12)."""
        if name in (self._tool.name, self._tool.tool_name):
            return BatchInvalid(
                "a batch cannot call a batch: put its calls into this one", ran="no"
            )
        # Lists may hide a tool with scopes from the caller.
        known = self._calls.public_tools()
        names = [tool.tool_name for tool in known if self._tool.calls(tool)]
        near = suggested(name, names)
        reason = f"this batch cannot call a tool {name[:100]!r}"
        if near is None:
            offered = ", ".join(map(repr, names[:NAMED]))
            if len(names) > NAMED:
                offered += ", ..."
            if offered:
                reason = f"{reason}; it calls {offered}"
            return InvalidParams(reason, ran="no")
        return InvalidParams(f"{reason}; did you mean {near!r}?", did_you_mean=near, ran="no")

    def _take_references(self, entry: Entry, text: bytes) -> tuple[Any, ...]:
        """Take the references out of the arguments of an entry (A2), whose JSON is `text`."""
        # An escape (\\u) may hide a name. (`in` takes many times as long as `find`.)
        if text.find(b'"$') < 0 and text.find(b"\\u") < 0:
            return ()
        rest, refs = extract(_decode_digits(text))
        entry.arguments = Raw(encode(rest))
        return refs

    # --- step 3: destructive entries ----------------------------------------------------------------

    async def _confirm(self) -> None:
        """Ask a person about all destructive entries, before anything runs (A7)."""
        if self._tool.declared.destructive == "allow":
            return
        asked = [
            entry
            for entry, planned in zip(self._entries, self._plan, strict=True)
            if planned.error is None and entry.method is not None and is_destructive(entry.method)
        ]
        if not asked:
            return
        reason = await self._objection(asked)
        if reason is None:
            return
        for entry in asked:
            entry.error = ConfirmRequired(f"{entry.tool} did not run: {reason}", ran="no")

    async def _objection(self, asked: Sequence[Entry]) -> str | None:
        """Return why destructive entries may not run; None if a person agrees to them."""
        peer = self._peer
        alone = "call it without a batch, where the client can ask its user"
        question: Any = peer.elicit(_question_about(asked), _CONSENT, CONFIRM)
        try:
            check_capability(peer.session, question.method, question.params)
        except NotCapable:
            return f"a person must confirm it, and this client has no elicitation; {alone}"
        try:
            answer: Elicited = (await peer.ask([question]))[0]
        except RpcError as error:
            if not error.is_remote:
                raise
            return f"a person must confirm it, and the client could not ask; {alone}"
        if answer.action == "accept":
            return None
        if answer.action == "decline":
            return "a person has declined it"
        return "no person has agreed to it"

    # --- step 4: running ----------------------------------------------------------------------------

    def _is_in_lane(self, entry: Entry) -> bool:
        return entry.method is not None and self._dispatcher.is_in_lane(entry.method)

    def _begin(self, _frame: None, entry: Entry, position: int) -> Ending:
        """Return the outcome of an entry, or a coroutine of it, as `run_batch` asks."""
        planned = self._plan[position]
        method = entry.method
        error = entry.error or planned.error
        ending: Ending
        if error is not None:
            ending = self._refused(entry, error)
        elif planned.waits_for or method is None or not method.plain:
            # One coroutine, which makes others when it starts: `run_batch` may close it before.
            return self._follow(entry, planned)
        else:
            ending = self._start(entry, entry.arguments, None)
        if type(ending) is CoroutineType or self._wants_progress:
            return self._noted(entry, ending)
        assert isinstance(ending, Outcome)
        self._note(entry, ending)
        return ending

    async def _follow(self, entry: Entry, planned: Planned) -> Outcome:
        if planned.waits_for:
            return await self._noted(entry, self._begin_linked(entry, planned))
        return await self._noted(entry, self._start(entry, entry.arguments, None))

    async def _noted(self, entry: Entry, ending: Ending) -> Outcome:
        """Note the outcome of an entry, and send the progress of the batch (A9)."""
        outcome = ending if isinstance(ending, Outcome) else await ending
        self._note(entry, outcome)
        if not outcome.is_parked and self._wants_progress:
            count = len(self._entries)
            message = f"{self._ended} of {count}: {entry.tool}"
            await self._peer.progress(self._ended, count, message)
        return outcome

    def _note(self, entry: Entry, outcome: Outcome) -> None:
        if not outcome.is_parked:
            self._ended += 1
        if entry.position in self._outcomes.targets:
            self._outcomes.note(entry.position, outcome)

    async def _begin_linked(self, entry: Entry, planned: Planned) -> Outcome:
        """Wait for the targets of an entry, fill in its arguments and call it."""
        await self._outcomes.wait(planned)
        targets = [self._outcomes[target] for target in planned.waits_for]
        for position, target in zip(planned.waits_for, targets, strict=True):
            if target.error is not None:
                return self._refused(entry, blocked(self._entries[position].id, target.error))
        if any(target.is_parked for target in targets):
            return PARKED
        results = [self._outcomes[source].value for source in planned.sources]
        try:
            filled = fill(bytes(entry.arguments), planned.links.refs, results, LIMITS, self._room)
        except RpcError as error:
            return self._refused(entry, error)
        digest = self._digest(entry.position)
        ending = self._start(entry, Raw(filled), digest)
        return ending if isinstance(ending, Outcome) else await ending

    def _digest(self, position: int) -> bytes:
        """Return the fingerprint of the arguments of an entry, as R9 defines it."""
        entry = self._entries[position]
        planned = self._plan[position]
        assert entry.method is not None
        targets = [self._call_digest(source) for source in planned.sources]
        own = fingerprint(entry.arguments, entry.method.key_place)
        return reference_digest(own, planned.links.refs, targets)

    def _call_digest(self, position: int) -> bytes:
        entry = self._entries[position]
        assert entry.method is not None
        return call_digest(entry.method.name, entry.own_key, self._digest(position))

    def _start(self, entry: Entry, arguments: Raw, digest: bytes | None) -> Ending:
        """Call the tool of an entry: at once if it is a plain query, else by a coroutine."""
        method = entry.method
        assert method is not None
        if not method.plain:
            return self._run_entry(entry, method, arguments, digest)
        shape = BareShape(self._calls.shape(method), _is_structured(method))
        try:
            plain = self._dispatcher.plain(method, arguments, shape, entry.id, has_place=True)
        except RpcError as error:
            return Outcome(error=error)
        if plain is None:
            return self._run_entry(entry, method, arguments, digest)
        if isinstance(plain, bytes):
            return self._plain_outcome(entry, plain, shape)
        return self._finish(entry, plain, shape)

    async def _finish(
        self, entry: Entry, coming: Coroutine[Any, Any, bytes], shape: "BareShape"
    ) -> Outcome:
        """Return the outcome of a plain query that waits."""
        try:
            return self._plain_outcome(entry, await coming, shape)
        except RpcError as error:
            return Outcome(error=error)

    def _plain_outcome(self, entry: Entry, data: bytes, shape: "BareShape") -> Outcome:
        if shape.is_bare:
            return self._kept(entry, data, [], replayed=False)
        return self._outcome(entry, data)

    async def _run_entry(
        self, entry: Entry, method: Method, arguments: Raw, digest: bytes | None
    ) -> Outcome:
        """Take an entry through all the steps of a call (A5)."""
        in_lane = self._dispatcher.is_in_lane(method)
        if in_lane and self._lane_is_parked:
            return PARKED
        try:
            key = self._key_for(entry, method)
        except RpcError as error:
            return self._refused(entry, error)
        peer = self._peer_of(entry, arguments, has_references=digest is not None)
        call = Call(
            method,
            Frame(peer.sender),
            id=entry.id,
            params=arguments,
            position=entry.position,
            batch=self._call.ids.call_id,
            key=key,
            keyless=method.is_command and method.key != "off",
            digest=digest or entry.digest,
            record=f"tools/call:{method.record}",
            peer=peer,
            shape=self._calls.shape(method),
            has_references=digest is not None,
        )
        peer.about = method, call.record, arguments, key
        try:
            result = bytes(await self._dispatcher.call(call, has_place=True))
            if not result.startswith(_RESULT):  # the record waits for answers
                return self._parked(result, in_lane=in_lane)
            return self._outcome(entry, result, replayed=call.replayed)
        except InputRequired as pause:
            return self._parked(pause.interim, in_lane=in_lane)
        except RpcError as error:
            if call.key is None and peer.is_committed and error.ran == "no":
                error = error.with_ran("unknown")
            return Outcome(error=error, replayed=call.replayed)
        finally:
            peer.close()
            if call.key is not None:
                self._peer.keys[entry.id] = call.key

    def _key_for(self, entry: Entry, method: Method) -> str | None:
        """Return the key of an entry (A6)."""
        if not method.is_command:
            return None
        known = self._peer.keys.get(entry.id)
        if known is not None:
            return known
        if entry.own_key is not None:
            return entry.own_key
        if self._key is not None:
            return check_key(f"{self._key}/{entry.id}")
        if method.key in ("required", "ask"):
            raise key_required(method)
        # Another entry may ask, and the next round must find what this one has done.
        if method.key == "off" and self._peer.session.revision.is_stateless:
            return os.urandom(16).hex()
        return None

    def _peer_of(self, entry: Entry, arguments: Raw, *, has_references: bool) -> EntryPeer:
        outer = self._peer
        prefix = f"{entry.id}/"
        answers = {key: outer.answers[key] for key in outer.answers if key.startswith(prefix)}
        continues: str | None = None
        if answers:
            # The questions of the round before are in the record. The last answer is to one of them.
            continues = encode([*answers][-1]).decode()
        if has_references:
            # A query may answer differently in this round. A person has answered for the arguments
            # of the round before, so the entry asks again about others.
            filled = fingerprint(arguments).hex()
            if outer.keys.setdefault(f"{prefix}arguments", filled) != filled:
                outer.keys[f"{prefix}arguments"] = filled
                answers = {}
        return EntryPeer(
            outer.session,
            outer.outlet,
            outer.questions,
            entry.id,
            outer.raw,
            CallTool(name=entry.tool, arguments=arguments),
            outer.sender,
            position=entry.position,
            answers=answers,
            continues=continues,
            outer=outer,
            ended=lambda: self._ended,
            count=len(self._entries),
        )

    def _refused(self, entry: Entry, error: RpcError) -> Outcome:
        """Return the outcome of an entry that did not become a call, and log it."""
        if logger.isEnabledFor(INFO):
            kind = None if entry.method is None else entry.method.kind.value
            log_refusal(
                Ids(entry.id, UNSET, self._peer.sender.headers),
                f"tools/call:{entry.tool}",
                error,
                kind=kind,
                position=entry.position,
                batch=self._call.ids.call_id,
                caller=self._peer.caller,
            )
        return Outcome(error=error)

    def _outcome(self, entry: Entry, data: bytes, *, replayed: bool = False) -> Outcome:
        """Return the outcome that the result of a tool is."""
        result = _decode_result(data)
        texts = [str(each["text"]) for each in result.content if each.get("type") == "text"]
        if result.is_error:
            details = None if result.structured is UNSET else result.structured
            return Outcome(error=ToolError("\n".join(texts), details), replayed=replayed)
        value = _value_of(result.structured, texts)
        media: list[JsonObject] = []
        if len(texts) < len(result.content):
            media = [
                {**each, "_meta": {**each.get("_meta", {}), ENTRY_META: entry.id}}
                for each in result.content
                if each.get("type") in _MEDIA
            ]
        return self._kept(entry, value, media, replayed=replayed)

    def _kept(
        self, entry: Entry, value: bytes, media: list[JsonObject], *, replayed: bool
    ) -> Outcome:
        """Return the outcome of an entry with the parts that the answer or references need."""
        is_too_long = False
        if entry.id in self._wanted:
            size = _size(value, media)
            is_too_long = size > self._left
            if not is_too_long:
                self._left -= size
        is_needed = entry.id in self._wanted and not is_too_long
        if not is_needed:
            media = []
            if entry.position not in self._outcomes.targets:
                value = b"null"
        return Outcome(value, media, replayed=replayed, is_too_long=is_too_long)

    def _too_long(self) -> InternalError:
        most = self._peer.questions.limits.bytes_out
        return InternalError(
            f"the answer of the batch is longer than {most} bytes",
            type="limit_exceeded",
            limit="bytes_out",
            max=most,
            ran="yes",
        )

    # --- step 5: questions, or the answer -------------------------------------------------------------

    def _parked(self, interim: bytes, *, in_lane: bool) -> Outcome:
        """Return the outcome of an entry that has asked, now or in an earlier round."""
        asked = msgspec.json.decode(interim)
        is_ours = isinstance(asked, dict) and "entry" in asked
        if not is_ours or not self._peer.session.revision.is_stateless:
            # A call with the same key has asked, without this batch.
            reason = "another call with this key waits for its client"
            busy = KeyInProgress(reason, ran="no", retry_after_ms=RETRY_AFTER_MS)
            return Outcome(error=busy)
        questions: JsonObject = asked["inputRequests"]
        try:
            for question in questions.values():
                check_capability(self._peer.session, question["method"], question["params"])
        except NotCapable as error:
            return Outcome(error=error)
        self._lane_is_parked |= in_lane
        return Outcome(is_parked=True, questions=questions)

    async def _ask(self, outcomes: Sequence[Outcome]) -> None:
        """End this round with the questions of all entries (A10)."""
        questions: JsonObject = {}
        for outcome in outcomes:
            questions |= outcome.questions
        raise InputRequired(await self._peer.pause(questions))

    def _answer(self, outcomes: Sequence[Outcome]) -> CallResult:
        """Return the result of the batch (A4)."""
        results: list[Answered] = []
        media: list[JsonObject] = []
        for entry, outcome in zip(self._entries, outcomes, strict=True):
            if outcome.error is None and entry.id not in self._wanted:
                continue
            error = outcome.error
            if outcome.is_too_long:
                error = self._too_long()
            results.append(_described(entry, outcome, error))
            media += outcome.media
        data = encode({"results": results})
        nothing_ran = all(
            outcome.error is not None and outcome.error.ran == "no" for outcome in outcomes
        )
        text = {"type": "text", "text": data.decode()}
        return CallResult([text, *media], Raw(data), nothing_ran)


def _links_of(method: Method, refs: tuple[Any, ...], after: tuple[str, ...]) -> Links:
    """Return what an entry refers to and waits for, or raise the error that refuses it."""
    if refs and (fault := scope_fault(method)) is not None:
        raise fault
    if len(after) > LIMITS.after:
        raise InvalidParams(
            f"after: expected at most {LIMITS.after} ids, got {len(after)}",
            type="reference_limit",
            limit="after",
            max=LIMITS.after,
            ran="no",
        )
    return Links(refs, after)


class BareShape:
    """Passes a plain value through: as JSON it is the result of its entry.

    It does not become the result of a tool, which would be read again.
    """

    def __init__(self, full: Callable[[Any], CallResult], declared: bool) -> None:
        self._full = full
        self._is_declared = declared
        self.is_bare = False

    def __call__(self, value: Any) -> object:
        kind = type(value)
        self.is_bare = kind in _BARE
        if not self.is_bare and self._is_declared:
            # The types that most tools return first: `isinstance` takes longer.
            self.is_bare = kind in _NUMBERS or not isinstance(value, _MAY_BE_CONTENT)
        if self.is_bare:
            return value
        return self._full(value)


# Content is a whole result, and a list may have content in it.
_MAY_BE_CONTENT = (Content, ToolResult, list, tuple)
# The result of an entry is the same with and without a declared type.
_BARE = frozenset({dict, str, NoneType})
_NUMBERS = frozenset({int, float, bool})
_is_structured = lru_cache(maxsize=None)(is_structured)


class _Result(Struct):
    """The parts of a tool's result that a batch reads."""

    content: list[JsonObject] = []
    structured: Raw | UnsetType = msgspec.field(default=UNSET, name="structuredContent")
    is_error: bool = msgspec.field(default=False, name="isError")


_decode_result = msgspec.json.Decoder(_Result).decode
# Numbers with a fraction keep their digits.
_decode_numbers = msgspec.json.Decoder(float_hook=lambda text: Raw(text.encode())).decode


def _decode_digits(text: bytes) -> Any:
    """Return arguments as plain values. An integer may have too many digits for one."""
    try:
        return _decode_numbers(text)
    except UNREADABLE:
        raise InvalidParams("arguments: number out of range", ran="no") from None


def _value_of(structured: Raw | UnsetType, texts: Sequence[str]) -> bytes:
    """Return the result of an entry as JSON: structured content, or else the text of the tool."""
    if structured is not UNSET:
        return bytes(structured)
    if not texts:
        return b"null"
    if len(texts) == 1:
        return encode(texts[0])
    return encode(texts)


def _size(value: bytes, media: Sequence[JsonObject]) -> int:
    """Return the bytes of a result in the answer, at most: once as it is, once inside a string."""
    size = 3 * len(value)
    if size >= COUNTED:
        size = 2 * len(value) + value.count(b'"') + value.count(b"\\")
    if media:
        size += len(encode(media))
    return size


def _described(entry: Entry, outcome: Outcome, error: RpcError | None) -> Answered:
    """Return the member of `results` that answers an entry."""
    if error is None:
        return Answered(entry.id, entry.tool, True, Raw(outcome.value), replayed=outcome.replayed)
    return Answered(entry.id, entry.tool, False, error=_sendable(error), replayed=outcome.replayed)


def _sendable(error: RpcError) -> object:
    """Return the `error` member of an entry. A handler may have raised data that is not JSON."""
    try:
        return Raw(encode(error_object(error)))
    except EncodeError:
        return error_object(InternalError(ran=error.ran))


def _question_about(entries: Sequence[Entry]) -> str:
    """Return the question that lists destructive entries, without secrets."""
    count = len(entries)
    what = "a call that may destroy" if count == 1 else f"{count} calls that may destroy"
    lines = [f"Run {what} or change something for good?"]
    for entry in entries:
        assert entry.method is not None
        shown = Redactor(entry.method.signature, 1 << 20)(entry.sent).decode()
        if len(shown) > SHOWN:
            shown = f"{shown[:SHOWN]}..."
        lines.append(f"{entry.id}: {entry.tool} {shown}")
    return "\n".join(lines)


def _key_of(call: Call, peer: Peer) -> str | None:
    """Return the key of a batch, wherever the client put it. A task has one in its record."""
    if call.key is not None:
        return call.key
    assert isinstance(call.params, Raw)
    return batch_identity(peer, call.params)[0]

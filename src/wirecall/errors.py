"""Every exception and every code of wirecall.

    WirecallError
    ├── UsageError                 our user's mistake: a registration, an option, a call in the wrong place
    │   ├── Mistake                of a handler or of middleware; in development its text is the answer
    │   ├── CannotWait             a handler tried to wait inside handle_sync
    │   └── OtherLoop              an app is used in a second event loop while the first is alive
    ├── StartFailed                the app cannot start: its lifespan failed or was slow, or a worker ended
    ├── EncodeError                a value that JSON cannot carry
    │   └── ResultMisfit           a result that does not fit the declared type of its function
    ├── Gone                       the other side of a connection has left, and receives nothing more
    ├── Unauthorized               raised by `authenticate` to refuse a caller: 401 and WWW-Authenticate
    ├── CallFailed                 the client's: a call without an answer; `ran` says whether it ran
    │   ├── NotSent                "no": it was not sent, or it did not reach a server
    │   │   └── Declined           "no": `confirm` declined it
    │   ├── Refused                "no": the server took the message and refused it, without JSON-RPC's words
    │   │   └── NotAuthorized      "no": the server asks for a token, and the client cannot get one
    │   │       └── MissingScopes  "no": the token lacks scopes, and the client cannot get them
    │   ├── TimedOut               "unknown": the answer did not come in time
    │   ├── ConnectionLost         "unknown": the connection broke after the call was sent
    │   ├── BadAnswer              "unknown": the reply is not an answer to the call
    │   ├── TaskGone               "unknown": the server does not know the task that the call became
    │   └── TaskCancelled          "unknown": the task that the call became was cancelled
    └── RpcError                   an error as it travels: code, message, data
        ├── DomainError            a handler's own answer "no": sent to the caller, recorded for commands
        │   └── ToolError          the same for a tool, where only the text counts
        ├── ProtocolError          a handler's own answer as an error of the protocol, also for a tool
        ├── ResourceNotFound       raised by the function of a resource; the revision of MCP decides the code
        └── FixedError             code and message given by the class, the rest in data
            ├── ParseError         -32700
            ├── InvalidRequest     -32600
            │   ├── LimitExceeded  -32600  data.type = limit_exceeded, data.limit, data.max
            │   └── ReferencesOff  -32600  data.type = references_off
            ├── MethodNotFound     -32601
            ├── InvalidParams      -32602
            │   ├── KeyRequired    -32602  data.type = idempotency_key_required
            │   ├── KeyInvalid     -32602  data.type = idempotency_key_invalid
            │   ├── BadInput       -32602  data.type = input_invalid
            │   ├── ReferenceInvalid  -32602  data.type = reference_invalid
            │   ├── ReferenceLimit -32602  data.type = reference_limit, data.limit, data.max
            │   └── BatchInvalid   -32602  data.type = batch_invalid
            ├── InternalError      -32603
            ├── HeaderMismatch     -32020  MCP: an HTTP header is missing, or contradicts the body
            ├── NotCapable         -32021  MCP: the client has not declared a capability that the call needs
            ├── UnknownVersion     -32022  MCP: a revision that is not served
            ├── VisitRequired      -32042  MCP 2025-11-25: the user has to visit a page before the call
            ├── KeyInProgress       40910  data.type = idempotency_key_in_progress
            ├── ResultNotRetained   41010  data.type = result_not_retained
            ├── KeyConflict         42210  data.type = idempotency_key_conflict
            ├── DependencyFailed    42410  data.type = dependency_failed, data.id, data.code
            │   ├── DependencyUnknown  42410  data.type = dependency_unknown
            │   └── ReferenceNotFound  42410  data.type = reference_not_found
            ├── ConfirmRequired     42810  data.type = confirm_required
            ├── Busy                42910  data.type = busy
            ├── ResponseTooLarge    42910  data.type = response_too_large, data.limit, data.max
            ├── UpstreamUnavailable 50210  data.type = upstream_unavailable, data.upstream
            ├── LedgerUnavailable   50310  data.type = ledger_unavailable
            ├── AuditUnavailable    50311  data.type = audit_unavailable
            ├── DeadlineExceeded    50410  data.type = deadline_exceeded
            └── OutcomeUnknown      50910  data.type = outcome_unknown

Our own codes are positive and shaped like HTTP statuses, because MCP 2026-07-28 closes the whole
range -32768..-32000 to implementations. Each of them carries `data.type` and `data.ran`: "no",
"yes" or "unknown".
"""

from collections.abc import Iterable
from typing import Any, ClassVar, Literal, cast

Ran = Literal["no", "yes", "unknown"]


class WirecallError(Exception):
    """Anything that wirecall raises.

    >>> issubclass(UsageError, WirecallError), issubclass(RpcError, WirecallError)
    (True, True)
    """


class UsageError(WirecallError):
    """A mistake in the program that uses wirecall: the problem, the reason, and the fix.

    `what` is the problem, `why` the reason, and `fix` what to write instead.

    >>> App("shop", mode="test")
    Traceback (most recent call last):
    wirecall.errors.UsageError: 'test' is not a mode.
      why: mode= has this value
      fix: use "development" or "production"
    """

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(
            "\n".join(filter(None, (what, why and f"  why: {why}", fix and f"  fix: {fix}")))
        )


def extra_fix(extra: str) -> str:
    """Return the fix for a package that comes with an extra of wirecall."""
    return f'install wirecall with the extra {extra}, in a checkout: pip install ".[{extra}]"'


class Mistake(UsageError):
    """A mistake of a handler or of middleware that only a call shows.

    In development the caller gets its text.
    """


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the name that was probably meant."""
    from difflib import get_close_matches  # late: mistakes are rare

    known = list(names)
    # Names that are equal without a router's prefix.
    inner = [each for each in known if each.rpartition(".")[2] == name]
    return next(iter(inner or get_close_matches(name, known, 1, 0.6)), None)


# Names that are compared for one mistake; comparing two takes up to 0.1 ms.
COMPARED = 50


def suggested(name: str, names: Iterable[str]) -> str | None:
    """Return the same for untrusted callers.

    It compares only a few names, those that begin or end alike.
    """
    alike = []
    for each in names:
        has_length = abs(len(each) - len(name)) <= 2
        is_alike = has_length and (each[:2] == name[:2] or each[-2:] == name[-2:])
        if is_alike or each.rpartition(".")[2] == name:
            alike.append(each)
        if len(alike) == COMPARED:
            break
    return nearest(name, alike)


def no_option(
    called: str, name: str, known: Iterable[str], why: str = "", fix: str = ""
) -> UsageError:
    """Return the error for an option that a function does not have.

    It names the option that was probably meant.
    """
    from difflib import get_close_matches  # late: mistakes are rare

    if not fix:
        for meant in get_close_matches(name, list(known), 1):
            fix = f"use {meant}="
    return UsageError(f"{called}() has no option {name!r}.", why, fix)


class CannotWait(UsageError):
    """A handler tried to wait where there is no event loop."""

    def __init__(self) -> None:
        super().__init__(
            "A handler tried to wait inside handle_sync.",
            "there is no event loop to wait in; the handler was stopped",
            "use `await app.handle(...)`",
        )


class OtherLoop(UsageError):
    """An app was used in a second event loop while the first one is still running it."""

    def __init__(self) -> None:
        super().__init__(
            "The app is serving in another event loop.",
            "its commands in flight, its connections and its timers belong to that loop",
            "use one event loop at a time, or close the first: "
            "connect_sync(app) has a loop until its client is closed",
        )


class StartFailed(WirecallError):
    """The lifespan of an app failed or took too long, or a worker cannot start.

    `__cause__` is the exception behind it.
    """

    def __init__(self, reason: str, cause: BaseException | None = None) -> None:
        super().__init__(f"The app cannot start: {reason}")
        self.__cause__ = cause


class EncodeError(WirecallError):
    """A value cannot be encoded as JSON."""


class ResultMisfit(EncodeError):
    """The result of a function does not fit its declared type."""


class Gone(WirecallError):
    """The other side has disconnected, or does not read."""


class Unauthorized(WirecallError):
    """`authenticate` raises it to refuse a request.

    The server answers 401 with its `www_authenticate` header.

    `message` is the reason, which the caller reads.

    >>> def authenticate(headers):
    ...     if headers.get("x-key") != "right":
    ...         raise Unauthorized("the key is wrong")
    ...     return "ada"
    >>> app = App("shop", authenticate=authenticate)
    """

    def __init__(
        self, message: str = "not authenticated", *, www_authenticate: str = "Bearer"
    ) -> None:
        super().__init__(message)
        self.message = message
        self.www_authenticate = www_authenticate


class CallFailed(WirecallError):
    """The client's call got no answer. `ran` reports whether it may have taken effect.

    `message` is the reason, `status` the HTTP status if there was one, and `retry_after` the
    seconds that the server asked to wait.

    >>> with connect_sync("http://127.0.0.1:9/rpc", timeout=5, retry=Retry(attempts=1)) as client:
    ...     try:
    ...         client.call("price")
    ...     except CallFailed as error:
    ...         print(error.ran)
    no
    """

    RAN: ClassVar[Ran] = "unknown"

    def __init__(
        self,
        message: str,
        *,
        ran: Ran | None = None,
        status: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.ran: Ran = ran or self.RAN
        # The HTTP status, if the HTTP request failed.
        self.status = status
        # Seconds that the server asked for.
        self.retry_after = retry_after


class NotSent(CallFailed):
    """The call was not sent, or did not reach the server. It did not run."""

    RAN = "no"


class Declined(NotSent):
    """`confirm` declined the call, so it was not sent."""


class Refused(CallFailed):
    """The server refused the whole message before it read the calls in it."""

    RAN = "no"


class NotAuthorized(Refused):
    """The server asks for a token that the client does not have and cannot get.

    `fix` is the command that gets one.
    """

    def __init__(self, message: str, *, fix: str = "", status: int = 401) -> None:
        text = message
        if fix:
            text = f"{message}; use: {fix}"
        super().__init__(text, status=status)
        self.reason = message
        self.fix = fix


class MissingScopes(NotAuthorized):
    """The operation needs `scopes` that the client's token does not have and that it cannot get."""

    def __init__(self, message: str, scopes: Iterable[str] = (), *, fix: str = "") -> None:
        super().__init__(message, fix=fix, status=403)
        self.scopes = frozenset(scopes)


class TimedOut(CallFailed, TimeoutError):
    """The answer did not arrive in time. The call may have run, or may still run."""


class ConnectionLost(CallFailed):
    """The connection broke between the call and its answer. The call may have run."""


class BadAnswer(CallFailed):
    """The reply is not a valid answer: not JSON-RPC, a wrong id, two answers or none.

    The call may have run.
    """


class TaskGone(CallFailed):
    """MCP: the server does not know the task.

    It has expired, it is another caller's, or there was none with that id.
    """


class TaskCancelled(CallFailed):
    """MCP: the task was cancelled before it had a result. Part of its work may be done."""


# Characters of an error's data in its text.
SHOWN = 1000


class RpcError(WirecallError):
    """An error that reaches the caller: `code`, `message` and, when not None, `data`.

    The client raises it for every error that a server answers with, and handlers may raise it.

    >>> app = App("shop")
    >>> with connect_sync(app) as client:
    ...     try:
    ...         client.call("prize")
    ...     except RpcError as error:
    ...         print(error.code, error.message)
    -32601 Method not found
    """

    # It came as a message, from a called server or a questioned client.
    is_remote = False

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        # Checked here, where the mistake is made: if it were sent, it would break a distant client.
        kinds: tuple[Any, Any] = (code, message)
        if not (isinstance(kinds[0], int) and isinstance(kinds[1], str)):
            raise TypeError(f"an error is a number and a string, not {code!r} and {message!r}")
        super().__init__(code, message, data)
        self.code = code
        self.message = message
        self.data = data
        self._ran: Ran | None = None

    @property
    def ran(self) -> Ran:
        """Whether the call ran, as far as known."""
        if self._ran is not None:
            return self._ran
        if isinstance(self.data, dict):
            stated = self.data.get("ran")
            if stated in ("no", "yes", "unknown"):
                return cast(Ran, stated)
        if self.code in _RAN:
            return _RAN[self.code]
        # Other servers send these codes for failures of any kind, before a call runs and in the
        # middle of it.
        if self.is_remote and self.code in _SERVER_ERRORS:
            return "unknown"
        return "yes"

    @ran.setter
    def ran(self, known: Ran) -> None:
        self._ran = known

    @property
    def states_ran(self) -> bool:
        """Whether the error or its data states `ran`; else `ran` follows from the code alone."""
        return self._ran is not None or (isinstance(self.data, dict) and "ran" in self.data)

    def with_ran(self, ran: Ran) -> "RpcError":
        """Return a copy that reports this `ran`."""
        copy = self.with_members(ran=ran)
        copy.ran = ran
        return copy

    def with_members(self, **members: Any) -> "RpcError":
        """Return a copy whose data have these members too.

        A copy, since the same object may be raised for other calls too. Other data than
        an object become the member `data`.
        """
        data: dict[str, Any] = {}
        if isinstance(self.data, dict):
            data = self.data
        elif self.data is not None:
            data = {"data": self.data}
        copy = rebuilt(type(self), self.code, self.message, {**data, **members})
        copy.is_remote = self.is_remote
        copy._ran = self._ran
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuilt, (type(self), self.code, self.message, self.data)

    def __str__(self) -> str:
        if self.data is None:
            return f"{self.message} ({self.code})"
        try:
            shown = str(self.data)
        except RecursionError:  # a server may nest its data as deep as it likes
            shown = "data nested too deep to show"
        # A server may also send megabytes, and errors end up in logs. `data` is complete.
        if len(shown) > SHOWN:
            shown = f"{shown[:SHOWN]}... ({len(shown):,} characters)"
        return f"{self.message} ({self.code}): {shown}"


# The default for an error that does not state whether the call ran. JSON-RPC's first four codes and
# MCP's four refuse a call before it runs; an internal error may come from anywhere; any other code
# is a method's own.
_RAN: dict[int, Ran] = {
    **dict.fromkeys((-32700, -32600, -32601, -32602, -32020, -32021, -32022, -32042), "no"),
    -32603: "unknown",
}


# "implementation-defined server-errors" (JSON-RPC 2.0, section 5.1).
_SERVER_ERRORS = range(-32099, -31999)


def rebuilt(kind: type[RpcError], code: int, message: str, data: Any) -> RpcError:
    """Return an error that was pickled or received, whatever arguments its class takes."""
    error = kind.__new__(kind)
    RpcError.__init__(error, code, message, data)
    error.is_remote = True
    return error


class DomainError(RpcError):
    """The error that a handler raises on purpose.

    It reaches the caller and, for a command, it is recorded.

    `code` is yours: an integer outside of -32768 to -32000. `message` is for people, and `data` can
    be any JSON.

    >>> @app.command
    ... def charge(cents: int) -> None:
    ...     raise DomainError(4020, "not enough money", {"missing": cents})
    >>> with connect_sync(app) as client:
    ...     try:
    ...         client.call("charge", {"cents": 5})
    ...     except RpcError as error:
    ...         print(error.code, error.data)
    4020 {'missing': 5}
    """


class ToolError(DomainError):
    """A tool's answer "it did not work", in words for the model that called it.

    `message` is what the model reads. `data` and `code` are for callers of JSON-RPC.

    >>> @app.tool
    ... def refund(order: str) -> str:
    ...     raise ToolError(f"Order {order} is older than 30 days; offer a voucher.")
    """

    def __init__(self, message: str, data: Any = None, code: int = 40000) -> None:
        super().__init__(code, message, data)


class ProtocolError(RpcError):
    """The error with which a tool ends its call as JSON-RPC does.

    Without it, the error would be a result that the model reads.

    `code`, `message` and `data` are members of the JSON-RPC error.

    >>> @app.tool
    ... def export(year: int) -> str:
    ...     raise ProtocolError(-32602, "only the last ten years", {"since": 2016})
    """


class ResourceNotFound(RpcError):
    """The error of a resource's function if its arguments do not name a resource.

    The client's revision decides the code.
    """

    def __init__(self, message: str = "Resource not found") -> None:
        super().__init__(-32602, message)


class FixedError(RpcError):
    """An error whose class gives code and message; `reason` and the rest become `data`."""

    CODE: ClassVar[int]
    MESSAGE: ClassVar[str]
    TYPE: ClassVar[str] = ""

    def __init__(self, reason: str = "", **data: Any) -> None:
        whole: dict[str, Any] = {}
        if self.TYPE:
            whole["type"] = self.TYPE
        if reason:
            whole["reason"] = reason
        super().__init__(self.CODE, self.MESSAGE, whole | data or None)


class ParseError(FixedError):
    """The message is not JSON."""

    CODE = -32700
    MESSAGE = "Parse error"


class InvalidRequest(FixedError):
    """The JSON is not a request that may be made.

    `reason` says what was expected and what came.

    >>> InvalidRequest("a message has a method").code
    -32600
    """

    CODE = -32600
    MESSAGE = "Invalid Request"


class LimitExceeded(InvalidRequest):
    """The message is larger than one of `Limits`."""

    TYPE = "limit_exceeded"

    def __init__(self, reason: str, *, limit: str, maximum: int, **data: Any) -> None:
        super().__init__(reason, limit=limit, max=maximum, **data)


class ReferencesOff(InvalidRequest):
    """An entry of a batch has `refs` or `after`, and the server does not allow references there."""

    TYPE = "references_off"


class MethodNotFound(FixedError):
    """The server does not have a method of that name.

    `reason` says which name was asked for.

    >>> MethodNotFound("there is no method 'prize'").code
    -32601
    """

    CODE = -32601
    MESSAGE = "Method not found"


# Problems that an error reports about one value.
MOST_PROBLEMS = 3


class InvalidParams(FixedError):
    """The params do not fit the method.

    `reason` says what was expected and what came.

    >>> InvalidParams("params.sku: expected str, got int").data
    {'reason': 'params.sku: expected str, got int'}
    """

    CODE = -32602
    MESSAGE = "Invalid params"


class KeyRequired(InvalidParams):
    """A command in production mode came without an idempotency key."""

    TYPE = "idempotency_key_required"


class KeyInvalid(InvalidParams):
    """The idempotency key is not 1 to 255 printable ASCII characters, or two values were given."""

    TYPE = "idempotency_key_invalid"


class ReferenceInvalid(InvalidParams):
    """A reference of a batch entry is malformed, or its target is not an earlier request."""

    TYPE = "reference_invalid"


class ReferenceLimit(InvalidParams):
    """The references of a batch take more than the server allows. The entry did not start."""

    TYPE = "reference_limit"


class BatchInvalid(InvalidParams):
    """The arguments of a batch tool are malformed, or an entry of it is a batch."""

    TYPE = "batch_invalid"


class InternalError(FixedError):
    """The handler failed; the reason is in the log, and not on the wire."""

    CODE = -32603
    MESSAGE = "Internal error"


class BadInput(InvalidParams):
    """The answer to a question does not fit it, or the state of a call is not the server's."""

    TYPE = "input_invalid"


class HeaderMismatch(FixedError):
    """MCP 2026-07-28: headers repeat parts of the body for proxies, and they must agree."""

    CODE = -32020
    MESSAGE = "Header mismatch"


class NotCapable(FixedError):
    """MCP: the call needs something of its client that the client has not declared."""

    CODE = -32021
    MESSAGE = "Missing required client capability"


class UnknownVersion(FixedError):
    """MCP: a revision that this server does not speak in this way."""

    CODE = -32022
    MESSAGE = "Unsupported protocol version"


class VisitRequired(FixedError):
    """MCP 2025-11-25: the call needs a visit of the user to a page first.

    `data.elicitations` has the addresses.
    """

    CODE = -32042
    MESSAGE = "URL elicitation required"


class KeyInProgress(FixedError):
    """The first call of this command is still running."""

    CODE = 40910
    MESSAGE = "This command is in progress"
    TYPE = "idempotency_key_in_progress"


class ResultNotRetained(FixedError):
    """The command was done; its result is no longer kept."""

    CODE = 41010
    MESSAGE = "The command was done; its result is not retained"
    TYPE = "result_not_retained"


class KeyConflict(FixedError):
    """The key was used before with other params."""

    CODE = 42210
    MESSAGE = "This idempotency key was used with other params"
    TYPE = "idempotency_key_conflict"


class DependencyFailed(FixedError):
    """An earlier entry that this one refers to has failed, so this one did not run.

    `data.id` and `data.code` name the entry that failed first, and its error.
    """

    CODE = 42410
    MESSAGE = "An entry that this one needs has failed"
    TYPE = "dependency_failed"


class DependencyUnknown(DependencyFailed):
    """The outcome of an earlier entry that this one refers to is unknown. This one did not run."""

    TYPE = "dependency_unknown"


class ReferenceNotFound(DependencyFailed):
    """The pointer of a reference finds nothing in the result of its target."""

    MESSAGE = "A reference finds nothing"
    TYPE = "reference_not_found"


class ConfirmRequired(FixedError):
    """A destructive entry of a batch tool did not run, because no person has agreed to it."""

    CODE = 42810
    MESSAGE = "A person must confirm this call"
    TYPE = "confirm_required"


class Busy(FixedError):
    """More calls are in flight than `Limits` or the ledger's connections admit.

    Or they come faster than a `RateLimit` admits.
    """

    CODE = 42910
    MESSAGE = "Busy"
    TYPE = "busy"


class ResponseTooLarge(FixedError):
    """The answers of a batch are longer than `Limits.bytes_out`, and this entry has not begun."""

    CODE = 42910
    MESSAGE = "The answers of this batch are too long"
    TYPE = "response_too_large"


class UpstreamUnavailable(FixedError):
    """The server behind this one cannot be reached, so the call was not sent to it."""

    CODE = 50210
    MESSAGE = "The server behind this one is unavailable"
    TYPE = "upstream_unavailable"


class LedgerUnavailable(FixedError):
    """The ledger cannot be reached, so no command is run."""

    CODE = 50310
    MESSAGE = "The ledger is unavailable"
    TYPE = "ledger_unavailable"


class AuditUnavailable(FixedError):
    """The audit trail is required and cannot be written, so no command is run."""

    CODE = 50311
    MESSAGE = "The audit trail is unavailable"
    TYPE = "audit_unavailable"


class DeadlineExceeded(FixedError):
    """The method did not answer within its timeout."""

    CODE = 50410
    MESSAGE = "Deadline exceeded"
    TYPE = "deadline_exceeded"


class OutcomeUnknown(FixedError):
    """It is not known whether the command took effect."""

    CODE = 50910
    MESSAGE = "The outcome of this command is unknown"
    TYPE = "outcome_unknown"

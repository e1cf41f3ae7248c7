"""Every exception and every code of wirecall.

    WirecallError
    ├── UsageError                 our user's mistake: a registration, an option, a call in the wrong place
    │   ├── CannotWait             a handler tried to wait inside handle_sync
    │   └── OtherLoop              an app is used in a second event loop while the first is alive
    ├── StartFailed                the app cannot start: its lifespan failed or took too long, or a worker ended
    ├── EncodeError                a value that JSON cannot carry
    │   └── ResultMisfit           a result that does not fit the declared type of its function
    ├── Gone                       the other side of a connection has left, and hears nothing more
    ├── Unauthorized               raised by `authenticate` to refuse a caller: 401, with its own WWW-Authenticate
    ├── CallFailed                 the client's: a call without an answer; `ran` says whether it ran
    │   ├── NotSent                "no": it was not sent, or it did not reach a server
    │   │   └── Declined           "no": `confirm` declined it
    │   ├── Refused                "no": the server took the message and refused it, without JSON-RPC's words
    │   │   └── NotAuthorized      "no": the server asks for a token, and the client cannot get one
    │   │       └── MissingScopes  "no": the token lacks scopes, and the client cannot get them
    │   ├── TimedOut               "unknown": the answer did not come in time
    │   ├── ConnectionLost         "unknown": the connection broke after the call had left
    │   ├── BadAnswer              "unknown": the reply is not an answer to the call
    │   ├── TaskGone               "unknown": the server does not know the task that the call became, or no longer
    │   └── TaskCancelled          "unknown": the task that the call became was cancelled
    └── RpcError                   an error as it travels: code, message, data
        ├── DomainError            a handler's own answer "no": sent to the caller, recorded for commands
        │   └── ToolError          the same for a tool, where only the text counts
        ├── ProtocolError          a handler's own answer as an error of the protocol, also where a tool's would be a result
        ├── ResourceNotFound       raised by the function of a resource; the revision of MCP decides the code
        └── FixedError             code and message given by the class, the rest in data
            ├── ParseError         -32700
            ├── InvalidRequest     -32600
            │   └── LimitExceeded  -32600  data.type = limit_exceeded, data.limit, data.max
            ├── MethodNotFound     -32601
            ├── InvalidParams      -32602
            │   ├── KeyRequired    -32602  data.type = idempotency_key_required
            │   └── KeyInvalid     -32602  data.type = idempotency_key_invalid
            │   └── BadInput       -32602  data.type = input_invalid
            ├── InternalError      -32603
            ├── HeaderMismatch     -32020  MCP: an HTTP header is missing, or says other things than the body
            ├── NotCapable         -32021  MCP: the client has not declared a capability that the call needs
            ├── UnknownVersion     -32022  MCP: a revision that is not served
            ├── VisitRequired      -32042  MCP 2025-11-25: the user has to visit a page before the call
            ├── KeyInProgress       40910  data.type = idempotency_key_in_progress
            ├── ResultNotRetained   41010  data.type = result_not_retained
            ├── KeyConflict         42210  data.type = idempotency_key_conflict
            ├── Busy                42910  data.type = busy
            ├── LedgerUnavailable   50310  data.type = ledger_unavailable
            ├── DeadlineExceeded    50410  data.type = deadline_exceeded
            └── OutcomeUnknown      50910  data.type = outcome_unknown

Our own codes are positive and shaped like HTTP statuses, because MCP 2026-07-28 closes the whole range
-32768..-32000 to implementations. Each of them carries `data.type` and `data.ran`: "no", "yes" or "unknown".
"""

from collections.abc import Iterable
from typing import Any, ClassVar, Literal, cast

Ran = Literal["no", "yes", "unknown"]


class WirecallError(Exception):
    """Anything that wirecall raises."""


class UsageError(WirecallError):
    """A mistake in the program that uses wirecall: the problem, the reason, and the fix."""

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        super().__init__("\n".join(filter(None, (what, why and f"  why: {why}", fix and f"  fix: {fix}"))))


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
            "use one event loop at a time, or close the first: connect_sync(app) has a loop until its client is closed",
        )


class StartFailed(WirecallError):
    """The lifespan of an app failed or took too long, or a worker cannot start; `__cause__` is the reason's exception."""

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
    """`authenticate` raises it to refuse a request; the server answers 401 with its `www_authenticate` header."""

    def __init__(self, message: str = "not authenticated", *, www_authenticate: str = "Bearer") -> None:
        super().__init__(message)
        self.message = message
        self.www_authenticate = www_authenticate


class CallFailed(WirecallError):
    """The client's call got no answer. `ran` reports whether it may have taken effect."""

    RAN: ClassVar[Ran] = "unknown"

    def __init__(
        self, message: str, *, ran: Ran | None = None, status: int | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.ran: Ran = ran or self.RAN
        self.status = status  # of the HTTP answer, if that is what failed
        self.retry_after = retry_after  # seconds, as the server asked for


class NotSent(CallFailed):
    """The call was not sent, or did not reach the server. It did not run."""

    RAN = "no"


class Declined(NotSent):
    """`confirm` declined the call, so it was not sent."""


class Refused(CallFailed):
    """The server refused the whole message before it read the calls in it."""

    RAN = "no"


class NotAuthorized(Refused):
    """The server asks for a token that the client does not have and cannot get. `fix` is the command that gets one."""

    def __init__(self, message: str, *, fix: str = "", status: int = 401) -> None:
        super().__init__(f"{message}; use: {fix}" if fix else message, status=status)
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
    """The reply is not a valid answer: not JSON-RPC, a wrong id, two answers or none. The call may have run."""


class TaskGone(CallFailed):
    """MCP: the server does not know the task: it has expired, it is another caller's, or there was none with that id."""


class TaskCancelled(CallFailed):
    """MCP: the task was cancelled before it had a result. Part of its work may be done."""


SHOWN = 1000  # characters of the data of an error that its text has


class RpcError(WirecallError):
    """An error that reaches the caller: `code`, `message` and, when not None, `data`."""

    is_remote = False  # it came as a message: from a server that was called, or from a client that was asked

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        # Checked here, where the mistake is made: sent as it is, it would break a client far away.
        kinds: tuple[Any, Any] = (code, message)
        if not (isinstance(kinds[0], int) and isinstance(kinds[1], str)):
            raise TypeError(f"an error is a number and a text, not {code!r} and {message!r}")
        super().__init__(code, message, data)
        self.code = code
        self.message = message
        self.data = data
        self._ran: Ran | None = None

    @property
    def ran(self) -> Ran:
        """Whether the call ran, as far as is known."""
        if self._ran is not None:
            return self._ran
        told = self.data.get("ran") if isinstance(self.data, dict) else None
        if told in ("no", "yes", "unknown"):
            return cast(Ran, told)
        return _RAN.get(self.code, "yes")

    @ran.setter
    def ran(self, known: Ran) -> None:
        self._ran = known

    def telling(self, ran: Ran) -> "RpcError":
        """Return a copy that reports this `ran`. A copy, since the same object may be raised for other calls too."""
        told = self.data if isinstance(self.data, dict) else {} if self.data is None else {"data": self.data}
        copy = rebuilt(type(self), self.code, self.message, {**told, "ran": ran})
        copy.is_remote = self.is_remote
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
        # It may send megabytes too, and an error ends up in logs. `data` has all of it.
        shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}... ({len(shown):,} characters)"
        return f"{self.message} ({self.code}): {shown}"


# The default for an error that does not say itself whether the call ran. JSON-RPC's first four codes and MCP's four refuse
# a call before it runs; an internal error may come from anywhere; any other code is a method's own.
_RAN: dict[int, Ran] = {
    **dict.fromkeys((-32700, -32600, -32601, -32602, -32020, -32021, -32022, -32042), "no"),
    -32603: "unknown",
}


def rebuilt(kind: type[RpcError], code: int, message: str, data: Any) -> RpcError:
    """Return an error that was pickled or received, whatever arguments its class takes."""
    error = kind.__new__(kind)
    RpcError.__init__(error, code, message, data)
    error.is_remote = True
    return error


class DomainError(RpcError):
    """The error a handler raises on purpose: it reaches the caller and, for a command, it is recorded."""


class ToolError(DomainError):
    """A tool's answer "it did not work", in words for the model that called it."""

    def __init__(self, message: str, data: Any = None, code: int = 40000) -> None:
        super().__init__(code, message, data)


class ProtocolError(RpcError):
    """The error with which a tool ends its call as JSON-RPC does, instead of a result that its model reads."""


class ResourceNotFound(RpcError):
    """The error of a resource's function if its arguments do not name a resource. The client's revision decides the code."""

    def __init__(self, message: str = "Resource not found") -> None:
        super().__init__(-32602, message)


class FixedError(RpcError):
    """An error whose code and message are given by its class; `reason` and the rest become `data`."""

    CODE: ClassVar[int]
    MESSAGE: ClassVar[str]
    TYPE: ClassVar[str] = ""

    def __init__(self, reason: str = "", **data: Any) -> None:
        named = {"type": self.TYPE} if self.TYPE else {}
        told = {"reason": reason} if reason else {}
        super().__init__(self.CODE, self.MESSAGE, {**named, **told, **data} or None)


class ParseError(FixedError):
    """The message is not JSON."""

    CODE = -32700
    MESSAGE = "Parse error"


class InvalidRequest(FixedError):
    """The JSON is not a request that may be made."""

    CODE = -32600
    MESSAGE = "Invalid Request"


class LimitExceeded(InvalidRequest):
    """The message is larger than one of `Limits`."""

    TYPE = "limit_exceeded"

    def __init__(self, reason: str, *, limit: str, maximum: int, **data: Any) -> None:
        super().__init__(reason, limit=limit, max=maximum, **data)


class MethodNotFound(FixedError):
    """The server does not have a method of that name."""

    CODE = -32601
    MESSAGE = "Method not found"


MOST_PROBLEMS = 3  # that an error about one value reports


class InvalidParams(FixedError):
    """The params do not fit the method."""

    CODE = -32602
    MESSAGE = "Invalid params"


class KeyRequired(InvalidParams):
    """A command in production mode came without an idempotency key."""

    TYPE = "idempotency_key_required"


class KeyInvalid(InvalidParams):
    """The idempotency key is not 1 to 255 printable ASCII characters, or two values were given."""

    TYPE = "idempotency_key_invalid"


class InternalError(FixedError):
    """The handler failed; the reason is in the log, and not on the wire."""

    CODE = -32603
    MESSAGE = "Internal error"


class BadInput(InvalidParams):
    """The answer to a question does not fit it, or the state of a call is not the one that the server gave."""

    TYPE = "input_invalid"


class HeaderMismatch(FixedError):
    """MCP 2026-07-28: headers repeat parts of the body, so that proxies may read them; they must agree."""

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
    """MCP 2025-11-25: the call needs a visit of the user to a page first; `data.elicitations` has the addresses."""

    CODE = -32042
    MESSAGE = "URL elicitation required"


class KeyInProgress(FixedError):
    """The first call with this key is still running."""

    CODE = 40910
    MESSAGE = "A command with this idempotency key is in progress"
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


class Busy(FixedError):
    """More calls are in flight than `Limits` admits, or a caller sends them faster than a `RateLimit` admits."""

    CODE = 42910
    MESSAGE = "Busy"
    TYPE = "busy"


class LedgerUnavailable(FixedError):
    """The ledger cannot be reached, so no command is run."""

    CODE = 50310
    MESSAGE = "The ledger is unavailable"
    TYPE = "ledger_unavailable"


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

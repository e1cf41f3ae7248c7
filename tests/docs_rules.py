"""Generates docs/rules.md: `python -m tests.docs_rules` writes the page, and a test compares it.

The sentence of a rule is written here. The page adds the tests and transcripts that cite its
number. A number that is cited and has no sentence fails, and so does a sentence that no test cites.
"""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "rules.md"

HEAD = """\
# The rules

Comments and tests cite rules by their numbers. This page has one sentence for each rule, and the
files in `tests/` that prove it. A number behind a file counts the tests in it that cite the rule; a
file without one cites it as a whole.
"""

FAMILIES: dict[str, tuple[str, dict[str, str]]] = {
    "J": (
        "JSON-RPC, without a transport",
        {
            "J1": "Builders make requests, notifications, batches, results and errors as bytes on one line.",
            "J2": "Parsers never raise on bad input: "
            "an unreadable message carries the error that answers it.",
            "J3": "`dispatch_line` takes bytes and a plain function, and returns bytes or nothing.",
            "J4": "The answers of a batch come in input order, and a notification gets none.",
            "J5": "A malformed entry of a batch gets an error under its id, if that can be read, "
            "and the others run.",
            "J6": "An empty array is answered with one object, -32600 with id null.",
            "J7": "A batch of notifications runs them all and gets no answer.",
            "J8": "Broken JSON anywhere is one -32700 with id null: syntax outranks shape.",
            "J9": "A program can parse a batch, answer its entries itself, and assemble the reply.",
            "J10": '`"jsonrpc": "2.0"` is required; `strict=False` accepts messages without it.',
            "J11": "Each limit is a named field of `Limits`, "
            "and a message beyond one is refused before anything runs.",
            "J12": "A batch of one entry is answered with an array of one.",
            "J13": "Queries of a batch run side by side and commands in array order, "
            "unless the app says otherwise.",
            "J14": "Ids come back with their JSON type and every digit; "
            "booleans, objects and arrays are not ids.",
            "J15": "A handler's exception is -32603 without details on the wire, is logged, "
            "and harms no other entry.",
            "J16": "`rpc.discover` answers with an OpenRPC document of the registered methods.",
        },
    ),
    "P": (
        "Queries, commands and keys",
        {
            "P1": "Every method is a query or a command.",
            "P2": "A command without an id, or with id null, is answered with -32600 and does not run.",
            "P3": "A command takes its key from `params.idempotency_key`, "
            "and a handler gets it only if it asks for it.",
            "P4": "In production a JSON-RPC command needs a key; in development the key is optional.",
            "P5": "Calls with one caller, method and key are one command: "
            "one effect, and the same outcome for each.",
            "P6": "A notification runs only where the method allows it, "
            "and is answered with -32600 elsewhere.",
            "P7": "A query refuses notifications by default.",
            "P8": "Every log record and span of a call has the request's id as its `correlation_id`.",
            "P9": "A record has a retention by method, "
            "and survives a restart with every ledger but `memory:`.",
            "P10": "The JSON-RPC id is never the key of a command.",
            "P11": "W3C trace context comes in and goes out, and each call and each batch entry has a span.",
        },
    ),
    "V": (
        "Arrays and revisions of MCP",
        {
            "V1": "At 2025-03-26 both sides accept arrays, on stdio and HTTP.",
            "V2": "At every other revision an array is refused whole with -32600 and a sentence "
            "that names the revision.",
            "V3": "`initialize` inside an array is refused before any state exists.",
            "V4": "Tool calls inside an array have results, errors, progress and cancellation by entry.",
            "V5": "The negotiated revision decides, and one table has what each revision allows.",
            "V6": "A line or a body is one message or many, "
            "and the state of a session is right when many arrive together.",
            "V7": "The client sends a batch as one array where the revision allows it, "
            "and as single requests elsewhere.",
            "V8": "The features of each revision work as its specification says.",
            "V9": "The official conformance suite passes on both sides.",
        },
    ),
    "T": (
        "Tools and their annotations",
        {
            "T1": "Every tool has a title and four hints, with the specification's defaults.",
            "T2": "Hints follow from the declaration, and a contradiction is an error at registration.",
            "T3": "A client believes the hints of a server only if the caller trusts that server.",
            "T4": "The client asks before a destructive call, and repeats only what is read-only, "
            "idempotent or has a key.",
            "T5": "Lists of the command line mark destructive and open-world tools.",
            "T6": "The audit trail records each command: "
            "caller, method, time, digest of the arguments, outcome, replay.",
        },
    ),
    "B": (
        "Promises beyond the specifications",
        {
            "B1": "With PostgreSQL or SQLite, the effect and its record commit in one transaction.",
            "B2": "A command whose process died has an unknown outcome, and is not run again in silence.",
            "B4": "The client sends calls of one moment in one array, where that is legal and harmless.",
        },
    ),
    "E": (
        "Effects under faults",
        {
            "E1": "A command has at most as many effects as its mode allows.",
            "E2": "All results of one command are equal.",
            "E3": "Every result names a run whose effect exists.",
            "E4": "After a result, every later call with the same key and params gets the same result.",
            "E5": 'After `ran: "no"`, that attempt has left no effect.',
            "E6": "In a transaction, a result and its effect exist together or not at all.",
        },
    ),
    "A": (
        "The batch tool",
        {
            "A1": "The form of a batch has one meaning, and its schema lists the tools that the caller "
            "may use in words that strict clients and model APIs accept.",
            "A2": "A reference takes a part of the result of an earlier entry; one that is wrong fails "
            "its entry alone.",
            "A3": "Entries run in the order of an array: queries side by side, commands in turn, and "
            "each after the entries that it needs.",
            "A4": "The answer has the outcome of each entry in input order; `return` leaves results "
            "out, and never errors.",
            "A5": "Each entry is a call, with every check of a call that comes alone.",
            "A6": "An entry has its own key, or one made of the outer key, or is recognised by the "
            "loss of the outer answer; a batch that is sent again replays what ran.",
            "A7": "Destructive entries are asked for in one question before anything runs.",
            "A8": "The hints of the tool follow from the tools that it can call.",
            "A9": "Progress counts entries, and a cancel stops those before their commit point.",
            "A10": "Questions of entries are asked under the outer call.",
            "A11": "A batch can become a task, which another process adopts after a crash.",
            "A12": "A batch inside a batch is refused.",
            "A13": "The client uses the tool at revisions without arrays, "
            "and each entry gets what a single call would get.",
        },
    ),
    "R": (
        "References between the entries of a batch",
        {
            "R1": "`refs` fills places of the params from results of other entries, by JSON Pointer; "
            "`after` names entries that must have succeeded.",
            "R2": "The place of a reference is absent in the params, "
            "so a server without references refuses the entry.",
            "R3": "A reference goes to one earlier request of the same array.",
            "R4": "References are limited in number, depth and size, and create no calls.",
            "R5": "An entry starts when its targets are done; commands keep their order.",
            "R6": "A target that failed, is unknown or lacks the value fails its dependants alone.",
            "R7": "Filled params pass the decoder of the method, like all others.",
            "R8": "A value comes from the answer that this caller gets.",
            "R9": "The fingerprint of an entry has the fingerprints of its targets, "
            "and neither their ids nor the values.",
            "R10": "The client sends a lost intent again in the same form and under the same keys.",
            "R11": "Equal entries of one array share one run, also as targets.",
            "R12": "A server announces references; to others the client sends waves.",
            "R13": "Arrays of MCP 2025-03-26 carry references in `_meta`.",
            "R14": "A server without references refuses an entry that has them.",
        },
    ),
    "G": (
        "Servers behind a gateway",
        {
            "G1": "What passes `wirecall wrap` keeps its bytes: only ids, progress tokens, "
            "the envelope and `io.wirecall/*` in `_meta` change.",
            "G2": "A server that ends is started again by the next call, with pauses, "
            "and is greeted as before.",
            "G3": "The ledger of a wrapped server is a file that only its user can read.",
            "G4": "A wrapped server over HTTP gets the stored login of its address.",
            "G5": "A call that is sent again is recognised by its key, by a lost answer or by silence, "
            "and is passed on once.",
            "G6": "Each failure of a server has one meaning: passed on, released, sent again, "
            "recorded or unknown.",
            "G7": "The cancellation of a command is passed on only if a person meant it, "
            "and its answer is recorded.",
            "G8": "Each entry of an array takes all steps of a call.",
            "G10": "`/mcp/NAME` of a gateway is one server as it is, at every revision of a client, "
            "and clients share its process as `share` says.",
            "G11": "`/mcp` is all servers: names stay while one server has them, "
            "and a server that is down harms no other.",
            "G12": "A client and a server of two eras meet: "
            "only the envelope and the members of one era change.",
            "G9": "A server that is missing, mute or wrong gets a clear error, and no process stays.",
            "G20": "A gateway whose settings are wrong does not start; the error has the line of the "
            "file and the fix.",
            "G21": "Secrets of a client's file are imported as references, into a file that only its "
            "owner can read.",
            "G22": "A client's file that cannot be read is named with the reason, and stays as it is.",
            "G23": "`install --wrap` changes the command of an entry and no other byte, and `--undo` "
            "restores every byte.",
            "G24": "The headers and keys of a wrapped address are not in a command line.",
        },
    ),
    "X": (
        "Traps of a gateway",
        {
            "X1": "The ids of two clients may be equal: each answer goes to its own request.",
            "X2": "A report reaches the call that asked for it while that call is open, and no other.",
            "X3": "The cancellation of a client that timed out does not stop a command.",
            "X5": "A call goes by the list that its client has seen, "
            "and never to the next server that has the name.",
            "X6": "No process of a server stays after its clients or after a gateway that is killed.",
            "X7": "At the end of stdin the commands that run are recorded, and then the server ends.",
            "X8": "A large answer is passed on; a repetition that cannot get it again has an error that says "
            "that the call ran.",
            "X9": "A command with a member twice is refused, and nothing is sent.",
            "X10": "A server that dies after a command was written to it leaves an unknown outcome, "
            "which its client sees before an equal call runs again.",
            "X11": "A clock that is set, and a process that sleeps, double no effect.",
            "X12": "Two gateways share a ledger: their clients do not wait for each other's calls, "
            "and take no lost answer but their own.",
            "X13": "Two callers with tokens are never taken for one user.",
            "X14": "An entry of an array takes the same steps as a single call.",
            "X15": "A caller never uses a session of another one unless `share` says so.",
            "X16": "An equal call is a repetition in silence only on one pipe or session, "
            "while the first call runs.",
            "X17": "A tool has one record under all its names, and a name that points elsewhere "
            "another one.",
            "X18": "A connection that the server is about to close is not used for a call.",
            "X19": "A recorded answer is given again in the words of the client's revision.",
            "X20": "Nothing is translated between a client and a server of one era.",
            "X21": "Sessions and states outlive a restart of the gateway.",
        },
    ),
}
SENTENCES = {
    number: sentence for _, rules in FAMILIES.values() for number, sentence in rules.items()
}

# Modules whose comments name the revisions R1 to R5, and no rules.
OF_REVISIONS = {"tests/mcp/asgi.py", "tests/mcp/test_revisions.py"}

_NUMBER = re.compile(r"\b([JPVTBEARGX])(\d{1,2})\b(?: to \1(\d{1,2})\b)?")


def numbers_in(text: str) -> Iterator[str]:
    """Yield the numbers that a string cites; "P3 to P5" cites three."""
    for family, first, last in _NUMBER.findall(text):
        for number in range(int(first), int(last or first) + 1):
            yield f"{family}{number}"


def _citing_names(path: Path) -> Iterator[tuple[str, str]]:
    """Yield a number, and the test that cites it in its docstring; "" stands for the opening
    comment or another place.
    """
    tree = ast.parse(path.read_text())
    owned: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(
            "test_"
        ):
            text = ast.get_docstring(node) or ""
            owned.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            for number in numbers_in(text):
                yield number, node.name
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        is_docstring = token.type == tokenize.STRING and token.string.startswith('"""')
        if (is_docstring or token.type == tokenize.COMMENT) and token.start[0] not in owned:
            for number in numbers_in(token.string):
                yield number, ""


def citations() -> dict[str, dict[str, list[str]]]:
    """Return the tests that cite each rule, by file."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path == Path(__file__):
            continue
        file = path.relative_to(ROOT).as_posix()
        for number, name in _citing_names(path):
            if file in OF_REVISIONS and number.startswith("R"):
                continue
            found[number][file].append(name)
    for path in sorted((ROOT / "tests" / "transcripts").glob("*.txt")):
        for line in path.read_text().splitlines():
            if line.startswith("#"):
                for number in numbers_in(line):
                    found[number][path.relative_to(ROOT).as_posix()].append("")
    return found


def cited_in_source() -> set[str]:
    """Return the numbers that comments and docstrings of the source cite."""
    found: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.COMMENT or (
                token.type == tokenize.STRING and token.string.startswith('"""')
            ):
                found.update(numbers_in(token.string))
    return found


def page() -> str:
    """Return the page."""
    cited = citations()
    unknown = sorted((cited.keys() | cited_in_source()) - SENTENCES.keys())
    assert not unknown, f"give these rules a sentence in tests/docs_rules.py: {unknown}"
    without = [number for number in SENTENCES if number not in cited]
    assert not without, f"no test cites these rules: {without}"
    parts = [HEAD]
    for title, rules in FAMILIES.values():
        parts.append(f"\n## {title}\n\n| Rule | Sentence | Tests |\n| --- | --- | --- |\n")
        for number, sentence in rules.items():
            parts.append(f"| {number} | {sentence} | {_places(cited[number])} |\n")
    return "".join(parts)


def _places(files: dict[str, list[str]]) -> str:
    places = []
    for file, names in files.items():
        tests = len([name for name in dict.fromkeys(names) if name])
        place = f"`{file.removeprefix('tests/')}`"
        if tests:
            place += f" ({tests})"
        places.append(place)
    return ", ".join(places)


if __name__ == "__main__":
    PAGE.write_text(page())

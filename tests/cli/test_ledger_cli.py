"""`wirecall ledger`: an operator's look at the records, and the verdict on an unknown one (P5, P9)."""

import asyncio
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.cli import invoke
from tests.ledger import LEASE, claim_of
from tests.servers import DURABLE, Store
from wirecall.app import App
from wirecall.cli.failures import Exit
from wirecall.cli.targets import parse
from wirecall.errors import InternalError, RpcError
from wirecall.ledger.base import UNKNOWN_AFTER, RecordId, State, open_ledger

APP = """
from wirecall import App, DomainError, ProtocolError

app = App("shop", ledger="sqlite:ledger.db")


@app.command(retention=3600)
def put(value: int) -> int:
    if value < 0:
        raise DomainError(4, "too little")
    return value


@app.command
def crash(value: int) -> dict[str, int]:
    raise ValueError(value)


@app.command(task=True)
async def render(value: int) -> int:
    if value < 0:
        raise DomainError(4, "too little")
    return value


@app.command(task=True)
async def refuse(value: int) -> int:
    raise ProtocolError(4711, "no")
"""
URL = "sqlite:ledger.db"
# Every resolution has a reason.
WHY = ("--reason", "the bank was asked")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("app.py").write_text(APP)
    return tmp_path


def call(method: str, value: int, key: str, caller: str = "") -> Any:
    """Make one call as a server would, and close the app afterwards."""

    async def work(app: App) -> Any:
        async with app:
            message = {
                "jsonrpc": "2.0",
                "id": 1,
                "method": method,
                "params": {"value": value, "idempotency_key": key},
            }
            reply = await app.handle(json.dumps(message), caller=caller)
        return json.loads(reply or b"null")

    return asyncio.run(work(parse("app.py").app()))


def tool(name: str, value: int, key: str) -> Any:
    async def work(app: App) -> Any:
        from wirecall import connect

        async with app, connect(app, protocol="mcp") as client:
            return await client.call_tool(name, {"value": value}, key=key)

    return asyncio.run(work(parse("app.py").app()))


def told(*words: str) -> Any:
    result = invoke(*words, "--json")
    document = json.loads(result.stdout)
    assert document["ok"] is True, document
    return document["result"]


def refused(*words: str) -> dict[str, Any]:
    result = invoke(*words, "--json")
    document = json.loads(result.stdout)
    assert document["ok"] is False
    assert document["error"]["exit"] == result.exit_code
    error: dict[str, Any] = document["error"]
    return error


# --- looking --------------------------------------------------------------------------------------


def test_records_are_listed_page_by_page() -> None:
    for number in range(5):
        call("put", number, f"k{number}")
    keys = []
    cursor = None
    for _ in range(3):
        words = ("--after", cursor) if cursor else ()
        document = json.loads(
            invoke("ledger", "list", URL, "--limit", "2", *words, "--json").stdout
        )
        keys += [record["key"] for record in document["result"]]
        cursor = document["next"]
    assert keys == ["k4", "k3", "k2", "k1", "k0"], "the newest first"
    assert cursor is None


def test_table_prints_the_command_for_the_next_page() -> None:
    for number in range(3):
        call("put", number, f"k{number}")
    result = invoke("ledger", "list", "app.py", "--limit", "2")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0].split() == [
        "STATE",
        "METHOD",
        "KEY",
        "CALLER",
        "STARTED",
        "TRIES",
        "ANSWER",
    ]
    assert result.stdout.splitlines()[1].split()[:3] == ["done", "put", "k2"]
    assert "--after " in result.stderr


def test_list_filters_records_by_state() -> None:
    call("put", 1, "a")
    call("crash", 1, "b")
    assert [record["key"] for record in told("ledger", "list", URL, "--state", "unknown")] == ["b"]


def keys_of(*words: str) -> list[str]:
    return [record["key"] for record in told("ledger", "list", URL, *words)]


def test_list_filters_records_by_method_caller_and_time() -> None:
    call("put", 1, "a", caller="ada")
    call("put", 1, "b")
    call("crash", 1, "c", caller="ada")
    assert keys_of("--method", "put") == ["b", "a"]
    assert keys_of("--caller", "ada") == ["c", "a"]
    assert keys_of("--caller", "") == ["b"]
    assert keys_of("--method", "put", "--caller", "ada", "--state", "done") == ["a"]
    assert keys_of("--since", "1h") == ["c", "b", "a"]
    assert keys_of("--until", "1h") == []
    assert keys_of("--since", "2999-01-01") == []
    assert keys_of("--until", "2999-01-01T00:00:00+02:00", "--limit", "1") == ["c"]


def test_list_refuses_a_moment_that_it_cannot_read() -> None:
    call("put", 1, "a")
    refusal = refused("ledger", "list", URL, "--since", "yesterday")
    assert "is not a moment" in refusal["message"]


def test_ledger_may_be_named_by_url_by_file_and_by_wirecall_toml(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call("put", 1, "a")
    Path("wirecall.toml").write_text('[ledger]\nurl = "sqlite:ledger.db"\n')
    by_toml = told("ledger", "list")
    Path("wirecall.toml").write_text('[server]\napp = "app.py"\n')
    assert (
        by_toml
        == told("ledger", "list")
        == told("ledger", "list", URL)
        == told("ledger", "list", "app.py:app")
    )


def test_ledger_of_the_gateway_in_wirecall_toml_needs_no_name() -> None:
    call("put", 1, "a")
    by_name = told("ledger", "list", URL)
    settings = '[gateway]\nledger = "sqlite:ledger.db"\n[upstream.bank]\ncommand = ["bank"]\n'
    Path("wirecall.toml").write_text(settings)
    assert told("ledger", "list") == by_name


def test_app_that_cannot_be_loaded_does_not_hide_the_ledger() -> None:
    call("put", 1, "a")
    Path("wirecall.toml").write_text(
        '[server]\napp = "app.py"\n[ledger]\nurl = "sqlite:ledger.db"\n'
    )
    Path("app.py").write_text("import nothing_of_that_name\n")
    assert [record["key"] for record in told("ledger", "list")] == ["a"]


def test_record_is_shown_whole_with_its_result_or_error() -> None:
    call("put", 7, "a", caller="ada")
    call("put", -1, "b")
    record = told("ledger", "show", URL, "put", "a", "--caller", "ada")
    assert record["state"] == "done"
    assert record["result"] == 7
    assert told("ledger", "show", URL, "put", "b")["error"] == {"code": 4, "message": "too little"}
    assert "result       7" in invoke("ledger", "show", URL, "put", "a", "--caller", "ada").stdout


def test_list_of_tasks_has_their_ids_and_states() -> None:
    call("put", 1, "a")
    tool("put", 1, "b")
    tool("render", 7, "c")
    for name, value, key in (("render", -1, "d"), ("refuse", 1, "e"), ("crash", 1, "f")):
        with pytest.raises(RpcError):
            tool(name, value, key)
    tasks = told("ledger", "list", URL, "--tasks")
    # A tool's own error is its result (SEP-2663): only what ends a call with a JSON-RPC error fails
    # its task.
    assert [(each["key"], each["task"]["status"]) for each in tasks] == [
        ("e", "failed"),
        ("d", "completed"),
        ("c", "completed"),
    ]
    assert all(
        len(each["task"]["id"]) == 43 and each["task"]["updated"] >= each["task"]["created"]
        for each in tasks
    )
    first, second = (
        invoke("ledger", "list", URL, "--tasks", "--limit", limit) for limit in ("5", "1")
    )
    assert first.stdout.splitlines()[0].split() == [
        "STATUS",
        "METHOD",
        "KEY",
        "CALLER",
        "STARTED",
        "TASK",
    ]
    assert first.stdout.splitlines()[1].split()[:3] == ["failed", "tools/call:refuse", "e"]
    cursor = second.stderr.split("--after ")[1].strip()
    assert [each["key"] for each in told("ledger", "list", URL, "--tasks", "--after", cursor)] == [
        "d",
        "c",
    ]
    assert told("ledger", "list", URL, "--tasks", "--state", "unknown") == []


def test_task_of_a_record_is_shown() -> None:
    tool("render", 7, "c")
    tool("put", 7, "d")
    (task,) = told("ledger", "list", URL, "--tasks")
    assert told("ledger", "show", URL, "tools/call:render", "c")["task"] == task["task"]
    line = next(
        line
        for line in invoke("ledger", "show", URL, "tools/call:render", "c").stdout.splitlines()
        if "task " in line
    )
    assert task["task"]["id"] in line and "completed" in line
    assert "task" not in told("ledger", "show", URL, "tools/call:put", "d")


def test_name_of_a_caller_cannot_forge_a_line_of_a_record() -> None:
    """An operator decides by these lines whether a command took effect."""
    caller = "ada\nstate        done\x1b[2J\x9b2J\u202e"
    call("crash", 1, "k", caller)
    lines = invoke("ledger", "show", URL, "crash", "k", "--caller", caller).stdout.splitlines()
    assert r"caller       ada\u000astate        done\u001b[2J\u009b2J\u202e" in lines
    assert [line for line in lines if line.startswith("state")] == ["state        unknown"]
    settled = invoke(
        "ledger", "resolve", *WHY, URL, "crash", "k", "--caller", caller, "--not-done", "--yes"
    ).stdout
    assert settled.count("\n") == 1 and settled.rstrip("\n").isprintable()


def test_stats_count_by_state() -> None:
    call("put", 1, "a")
    call("crash", 1, "b")
    assert told("ledger", "stats", URL) == {
        "running": 0,
        "waiting": 0,
        "done": 1,
        "unknown": 1,
        "tombstone": 0,
    }
    note = invoke("ledger", "stats", URL).stderr
    line = shlex.split(note.partition("resolve them: ")[2])
    assert line == ["wirecall", "ledger", "list", URL, "--state", "unknown"]
    assert [record["key"] for record in told(*line[1:])] == ["b"]


def test_sweep_prints_how_many_records_it_changed() -> None:
    call("put", 1, "a")
    assert told("ledger", "sweep", URL) == {"changed": 0}


# --- settling -------------------------------------------------------------------------------------


def test_unknown_command_that_was_done_is_replayed_afterwards() -> None:
    call("crash", 1, "b")
    assert call("crash", 1, "b")["error"]["code"] == 50910
    settled = told(
        "ledger", "resolve", *WHY, "app.py", "crash", "b", "--done", "--result", '{"paid": 5}'
    )
    assert settled == {"caller": "", "method": "crash", "key": "b", "state": "done"}
    assert call("crash", 1, "b")["result"] == {"paid": 5}


def test_unknown_command_that_was_not_done_runs_again() -> None:
    call("crash", 1, "b")
    assert told("ledger", "resolve", *WHY, URL, "crash", "b", "--not-done")["state"] == "absent"
    assert call("crash", 1, "b")["error"]["code"] == -32603  # it ran, and crashed again


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "app.py crash b"),
        (("--ledger", "sqlite:ledger.db"), "sqlite:ledger.db crash b"),
        (("--as", "mcp"), "app.py tools/call:crash b"),
    ],
    ids=["file", "ledger", "mcp"],
)
def test_call_of_unknown_outcome_prints_the_command_that_settles_it(
    words: tuple[str, ...], line: str
) -> None:
    again = [
        invoke("call", "app.py", "crash", "value=1", "--key", "b", "--yes", *words)
        for _ in range(2)
    ][1]
    assert again.exit_code == Exit.KEY
    printed = printed_lines(again.stderr)[0]
    assert printed == [
        *("ledger", "resolve", *line.split()[:1], "--not-done"),
        *("--reason", "how you found out", *line.split()[1:]),
    ]
    assert invoke(*printed).exit_code == 0
    assert told("ledger", "stats", URL)["unknown"] == 0


def printed_lines(text: str) -> list[list[str]]:
    """The two lines that resolve a record, as a shell reads them: not done, and done."""
    lines = text.partition("then: ")[2].partition("\n")[0].split(", or: ")
    words = [shlex.split(line) for line in lines]
    assert [each[0] for each in words] == ["wirecall", "wirecall"]
    return [each[1:] for each in words]


CALLERS = [
    "ada",
    "https://login.example.org/ada lovelace",
    "it's",
    "-x",
    "--yes",
    "{}",
    "a/put",
    "$HOME",
    "*",
    "ü",
]
KEYS = ["-b", "a/b", "'", "{0}", "$(id)"]


@pytest.mark.parametrize(
    ("caller", "key"), [*((each, "b") for each in CALLERS), *(("ada", each) for each in KEYS)]
)
def test_resolve_line_of_a_list_runs_as_printed(caller: str, key: str) -> None:
    call("crash", 1, key, caller)
    listed = invoke("ledger", "list", URL, "--state", "unknown")
    not_done, done = printed_lines(listed.stderr)
    assert invoke(*not_done).exit_code == 0
    assert told("ledger", "stats", URL)["unknown"] == 0
    call("crash", 1, key, caller)  # so it runs, and fails again
    assert "--result is not JSON." in invoke(*done).stderr
    assert invoke(*[word.replace("JSON", '{"paid": 5}') for word in done]).exit_code == 0
    assert call("crash", 1, key, caller)["result"] == {"paid": 5}


@pytest.mark.parametrize("caller", ["ada", "a/b c", "crash/it's"])
def test_resolve_line_of_a_call_names_its_caller(caller: str) -> None:
    """As the server's error names it, in one string."""
    from wirecall.cli.call import _record_of
    from wirecall.errors import OutcomeUnknown

    call("crash", 1, "k/7", caller)
    refusal = call("crash", 1, "k/7", caller)["error"]
    error = OutcomeUnknown(ran="unknown", record=refusal["data"]["record"])
    assert _record_of(error, "crash", "k/7") == RecordId(caller, "crash", "k/7")


@pytest.mark.parametrize("target", ["app.py", URL])
def test_resolve_asks_for_the_result_of_what_was_done(target: str) -> None:
    call("crash", 1, "b")
    error = refused("ledger", "resolve", *WHY, target, "crash", "b", "--done")
    assert error["message"] == "Which result did it return?"
    assert "--result null" in error["next"]
    assert ("dict[str, int]" in error["why"]) == (target == "app.py")
    assert told("ledger", "stats", URL)["unknown"] == 1
    told("ledger", "resolve", *WHY, target, "crash", "b", "--done", "--result", "null")
    assert call("crash", 1, "b")["result"] is None


@pytest.mark.parametrize("method", ["crash", "tools/call:crash"])
def test_resolve_refuses_a_result_that_does_not_fit_the_method(method: str) -> None:
    if method == "crash":
        call("crash", 1, "b")
    else:
        with pytest.raises(InternalError):
            tool("crash", 1, "b")
    error = refused(
        "ledger", "resolve", *WHY, "app.py", method, "b", "--done", "--result", '{"paid": "five"}'
    )
    assert error["message"] == "--result does not fit the method."
    assert "expected" in error["why"].lower()
    assert told("ledger", "stats", URL)["unknown"] == 1
    told("ledger", "resolve", *WHY, "app.py", method, "b", "--done", "--result", '{"paid": 5}')


def test_ledger_of_an_app_is_the_one_that_call_and_serve_use() -> None:
    """wirecall.toml overrides the app's file, for `ledger` as for `call`."""
    call("put", 1, "own")
    Path("wirecall.toml").write_text('[ledger]\nurl = "sqlite:other.db"\n')
    missing = invoke("ledger", "list", "app.py")
    assert (
        missing.exit_code,
        "There is no ledger at" in missing.stderr,
        "other.db" in missing.stderr,
    ) == (2, True, True)
    assert "wirecall.toml" in missing.stderr
    assert invoke("call", "app.py", "put", "value=1", "--key", "other").exit_code == 0
    assert [record["key"] for record in told("ledger", "list", "app.py")] == ["other"]
    assert told("ledger", "list", "app.py") == told("ledger", "list")
    assert [record["key"] for record in told("ledger", "list", URL)] == ["own"]


@pytest.mark.parametrize("target", ["app.py", URL])
def test_tools_result_is_kept_as_its_clients_get_it(target: str) -> None:
    with pytest.raises(InternalError):
        tool("crash", 1, "t")
    assert [record["method"] for record in told("ledger", "list", URL, "--state", "unknown")] == [
        "tools/call:crash"
    ]
    told(
        "ledger",
        "resolve",
        *WHY,
        target,
        "tools/call:crash",
        "t",
        "--done",
        "--result",
        '{"paid": 5}',
    )
    replayed = tool("crash", 1, "t")
    assert (replayed.structured, replayed.replayed) == ({"paid": 5}, True)


def test_resolve_settles_only_unknown_records() -> None:
    call("put", 1, "a")
    error = refused("ledger", "resolve", *WHY, URL, "put", "a", "--not-done")
    assert (error["type"], error["why"]) == ("not_unknown", "it is done")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ((), "What did you find out?"),
        (("--done", "--not-done"), "What did you find out?"),
        (("--done", "--result", '"\udcff"'), "--result is not JSON."),
        (("--done", "--result", "{"), "--result is not JSON."),
        (("--not-done", "--result", "1"), "A command that was not done has no result."),
    ],
)
def test_verdict_must_be_clear(words: tuple[str, ...], what: str) -> None:
    call("crash", 1, "b")
    assert refused("ledger", "resolve", *WHY, URL, "crash", "b", *words)["message"] == what
    assert told("ledger", "stats", URL)["unknown"] == 1


def test_resolve_asks_a_person_first(monkeypatch: pytest.MonkeyPatch) -> None:
    call("crash", 1, "b")
    asked: list[str] = []

    def no(question: str) -> bool:
        asked.append(question)
        return False

    monkeypatch.setattr("wirecall.cli.ledger.ask", no)
    result = invoke("ledger", "resolve", *WHY, URL, "crash", "b", "--not-done")
    assert result.exit_code == 130
    assert "The next call with this key will run" in asked[0]
    assert told("ledger", "stats", URL)["unknown"] == 1
    assert (
        invoke("ledger", "resolve", *WHY, URL, "crash", "b", "--not-done", "--yes").exit_code == 0
    )
    assert len(asked) == 1


def test_verdict_that_arrives_too_late_is_refused() -> None:
    call("crash", 1, "b")
    told("ledger", "resolve", *WHY, URL, "crash", "b", "--done", "--result", "null")
    assert (
        refused("ledger", "resolve", *WHY, URL, "crash", "b", "--done", "--result", "null")["type"]
        == "not_unknown"
    )


# --- every store ----------------------------------------------------------------------------------


@pytest.mark.parametrize("store", DURABLE, indirect=True)
def test_records_are_listed_swept_and_resolved_in_every_store(store: Store) -> None:
    Path("app.py").write_text(APP.replace("sqlite:ledger.db", store.url))
    call("put", 1, "old")
    call("put", 2, "new")
    call("crash", 1, "lost")
    assert [record["key"] for record in told("ledger", "list", store.url)] == ["lost", "new", "old"]
    store.age(RecordId("", "put", "old"), 2 * 3600)  # its retention is an hour
    assert told("ledger", "sweep", store.url) == {"changed": 1}
    assert told("ledger", "stats", store.url) == {
        "running": 0,
        "waiting": 0,
        "done": 1,
        "unknown": 1,
        "tombstone": 1,
    }
    told("ledger", "resolve", *WHY, store.url, "crash", "lost", "--done", "--result", '{"paid": 5}')
    assert call("crash", 1, "lost")["result"] == {"paid": 5}


@pytest.mark.parametrize("store", DURABLE, indirect=True)
def test_command_of_a_dead_process_is_unknown_at_once(store: Store) -> None:
    """As soon as its lease is over: every verb says so, and it can be resolved.

    The sweep stores it after a minute.
    """
    ids = [RecordId("", "crash", key) for key in ("a", "b")]

    async def die() -> None:
        ledger = await open_ledger(store.url)
        for id in ids:
            await ledger.claim(claim_of(id))
        await ledger.aclose()

    asyncio.run(die())
    assert told("ledger", "stats", store.url)["running"] == 2
    error = refused("ledger", "resolve", *WHY, store.url, "crash", "a", "--not-done")
    assert (error["type"], "its lease ends in" in error["next"]) == ("not_unknown", True)
    for id in ids:
        store.age(id, LEASE + 1)
    assert told("ledger", "stats", store.url) == {
        "running": 0,
        "waiting": 0,
        "done": 0,
        "unknown": 2,
        "tombstone": 0,
    }
    assert {
        record["key"] for record in told("ledger", "list", store.url, "--state", "unknown")
    } == {"a", "b"}
    assert told("ledger", "list", store.url, "--state", "running") == []
    assert told("ledger", "show", store.url, "crash", "a")["state"] == "unknown"
    assert told("ledger", "sweep", store.url) == {"changed": 0}
    assert (
        told("ledger", "resolve", *WHY, store.url, "crash", "a", "--not-done")["state"] == "absent"
    )
    store.age(ids[1], UNKNOWN_AFTER)
    assert told("ledger", "sweep", store.url) == {"changed": 1}
    assert told("ledger", "show", store.url, "crash", "b")["state"] == "unknown"


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "exit", "what"),
    [
        ("sqlite:gone.db", 2, "There is no ledger at gone.db."),
        ("memory:", 2, "A ledger in memory cannot be inspected."),
        ("nonsense", 2, "'nonsense' is not a ledger."),
        ("gone.py", 2, "There is no file gone.py."),
        ("redis://127.0.0.1:1/0", 4, "The ledger redis://127.0.0.1:1/0 cannot be used."),
        (
            "postgresql://me:secret@127.0.0.1:1/x",
            4,
            "The ledger postgresql://me:***@127.0.0.1:1/x cannot be used.",
        ),
    ],
)
def test_ledger_that_is_not_there(
    target: str, exit: int, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    error = refused("ledger", "list", target)
    assert (error["exit"], error["message"]) == (exit, what)
    assert caplog.text == ""  # no driver says it a second time
    assert "secret" not in json.dumps(error)
    assert not Path("gone.db").exists()


def test_ledger_verbs_without_a_ledger() -> None:
    assert refused("ledger", "stats")["message"] == "Which ledger?"


def test_file_that_is_not_a_ledger_is_reported() -> None:
    Path("other.db").write_text("not a database " * 1000)
    error = refused("ledger", "list", "sqlite:other.db")
    assert error["exit"] in (2, 4)


def test_mistyped_key_and_a_forgotten_caller_are_suggested() -> None:
    call("put", 1, "order-7", caller="ada")
    error = refused("ledger", "show", URL, "put", "order-7")
    assert "'ada'" in error["why"]
    assert error["next"] == "--caller ada"
    near = refused("ledger", "show", URL, "put", "order-77", "--caller", "ada")
    assert near["why"] == "the nearest is put order-7 --caller ada"
    error = refused("ledger", "show", URL, "ada/put", "order-7")
    assert (error["message"], error["why"]) == (
        "There is no record ada/put order-7.",
        "the nearest is put order-7 --caller ada",
    )


@pytest.mark.parametrize(
    "words",
    [
        ("show", "put"),
        ("show", "sqlite:ledger.db", "put"),
        ("show", "app.py", "put"),
        ("resolve", "a", "b", "c", "d", "--done"),
    ],
)
def test_record_is_named_by_method_and_key(words: tuple[str, ...]) -> None:
    assert refused("ledger", *words)["message"] == "Which record?"


def test_cursor_that_is_invalid() -> None:
    call("put", 1, "a")
    assert refused("ledger", "list", URL, "--after", "%%%")["message"] == "'%%%' is not a cursor."


def test_reading_a_ledger_does_not_change_it() -> None:
    call("crash", 1, "b")
    for words in (("list", URL), ("show", URL, "crash", "b"), ("stats", URL)):
        assert invoke("ledger", *words).exit_code == 0

    async def states() -> list[State]:
        ledger = await open_ledger(URL)
        try:
            return [record.state for record in await ledger.list()]
        finally:
            await ledger.aclose()

    assert asyncio.run(states()) == [State.UNKNOWN]

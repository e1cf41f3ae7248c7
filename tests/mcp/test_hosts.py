"""Four servers with four folders for temporary files, one secret and one ledger: what docs/hosts.md
says of several hosts, row by row.
"""

import json
import re
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest

from tests.cli import ROOT
from tests.mcp.hosts import COUNT, PATIENCE, THING, Host, newest, tool
from tests.servers import Postgres, Redis, RedisCluster
from tests.size import sized

_numbers = count(1)

# The kinds of ledger that several hosts can share; and the one that several processes of a host,
# each with its own folder for temporary files, can share.
SHARED = sized(
    small=("postgres", "redis", "sqlite"), full=("postgres", "redis", "cluster", "sqlite")
)
TRANSACTIONAL = ("postgres", "sqlite")


class Hosts(list[Host]):
    """The servers, and the kind and the URL of their ledger."""

    kind = ""
    url = ""


@pytest.fixture(scope="module", params=SHARED)
def hosts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Hosts]:
    kind: str = request.param
    folder: Path = tmp_path_factory.mktemp("hosts")
    url = f"sqlite:{folder}/ledger.db"
    if kind == "postgres":
        server: Postgres = request.getfixturevalue("postgres_server")
        name = f"hosts{next(_numbers)}"
        server.run(f"CREATE DATABASE {name}")
        url = server.url_of(name)
        with psycopg.connect(url, autocommit=True) as db:
            db.execute("CREATE TABLE bookings (account text)")
    elif kind == "redis":
        redis: Redis = request.getfixturevalue("redis_server")
        url = f"{redis.url}?prefix=hosts{next(_numbers)}:"
    elif kind == "cluster":
        cluster: RedisCluster = request.getfixturevalue("cluster_server")
        url = f"{cluster.url}?prefix=hosts{next(_numbers)}:"
    else:
        with closing(apsw.Connection(f"{folder}/ledger.db")) as file:
            file.execute("CREATE TABLE bookings (account text)")
    found = Hosts(Host(url, folder / str(number), folder / "effects") for number in range(COUNT))
    found.kind = kind
    found.url = url
    try:
        for host in found:
            host.ready()
        hear_each_other(found)
        yield found
    finally:
        for host in found:
            host.ask_to_stop()
        for host in found:
            host.stopped()
        if kind == "postgres":
            server.run(f"DROP DATABASE {name} WITH (FORCE)")


def hear_each_other(hosts: Hosts) -> None:
    """Wait until changes of the first host reach all others."""
    token = hosts[0].session()
    for host in hosts[1:]:
        stream = host.listen(token).open()
        end = time.monotonic() + PATIENCE
        with ThreadPoolExecutor(1) as pool:
            heard = pool.submit(stream.next, "notifications/tools/list_changed")
            while not heard.done():
                assert time.monotonic() < end, "a host receives nothing"
                hosts[0].call("grow")
                time.sleep(0.05)
            heard.result()
    assert hosts[0].delete(token) == 204


def until(fact: Callable[[], Any]) -> Any:
    """Return the first value of `fact` that is true."""
    end = time.monotonic() + PATIENCE
    while not (found := fact()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def is_over(host: Host, token: str) -> bool:
    """Return whether a host refuses a session."""
    return host.post(tool("host"), token).status == 404


def new() -> str:
    """Return a name that no other test uses."""
    return secrets.token_hex(8)


def text(answer: Any) -> str:
    return str(answer["result"]["content"][0]["text"])


def on_page() -> list[str]:
    """Return the rows of docs/hosts.md."""
    page = (ROOT / "docs" / "hosts.md").read_text()
    table = page.partition("<!-- features -->\n")[2].partition("\n\n")[0]
    return [re.split(r" *\| *", line)[1] for line in table.splitlines()[2:]]


def test_hosts_page_has_a_test_for_every_row() -> None:
    tests = [value for name, value in globals().items() if name.startswith("test_hosts_")]
    assert on_page() == [test.__doc__.strip().rstrip(".") for test in tests[1:]]


# --- commands and tasks ---------------------------------------------------------------------------


def test_hosts_run_a_command_with_a_key_once(hosts: Hosts) -> None:
    """A command with a key takes effect once."""
    account = new()
    with ThreadPoolExecutor(COUNT) as pool:
        answers = list(
            pool.map(lambda host: host.call("charge", account=account, idempotency_key="k"), hosts)
        )
    assert len({answer["result"] for answer in answers}) == 1
    assert hosts[0].noted(f"charge {account}") == 1


def test_hosts_recognise_a_call_whose_answer_was_lost_elsewhere(hosts: Hosts) -> None:
    """A call without a key is recognised after its answer was lost."""
    a, b, *_ = hosts
    account = new()
    lost = a.connect()
    message = {"jsonrpc": "2.0", "id": 1, "method": "charge_late", "params": {"account": account}}
    lost.request("POST", "/rpc", json.dumps(message), {"Content-Type": "application/json"})
    a.call("wait_for", name=f"charged {account}")
    lost.close()
    a.call("open_gate", name=f"late {account}")
    repeated = b.call("charge_late", account=account)
    assert repeated["result"] == a.pid
    assert a.noted(f"charge {account}") == 1


@pytest.mark.parametrize("hosts", TRANSACTIONAL, indirect=True)
def test_hosts_commit_an_effect_with_its_record(hosts: Hosts) -> None:
    """An effect commits together with its record."""
    account = new()
    with ThreadPoolExecutor(COUNT) as pool:
        answers = list(
            pool.map(lambda host: host.call("book", account=account, idempotency_key="k"), hosts)
        )
    assert len({answer["result"] for answer in answers}) == 1
    query = f"SELECT count(*) FROM bookings WHERE account = '{account}'"
    if hosts.kind == "postgres":
        with psycopg.connect(hosts.url) as db:
            assert db.execute(query.encode()).fetchone() == (1,)
    else:
        with closing(apsw.Connection(hosts.url.removeprefix("sqlite:"))) as file:
            assert file.execute(query).get == 1


def test_hosts_answer_for_tasks_of_each_other(hosts: Hosts) -> None:
    """A task is read, answered and cancelled."""
    a, b, c, d = hosts
    # Step 1: it runs at A, is read at B, and its end reaches a listener at D.
    name = new()
    begun = a.answer(newest("tools/call", name="work", arguments={"name": name}))["result"]
    id = begun["taskId"]
    assert b.answer(newest("tasks/get", taskId=id))["result"]["status"] == "working"
    stream = d.post(newest("subscriptions/listen", notifications={"taskIds": [id]}))
    stream.next("notifications/subscriptions/acknowledged")
    assert stream.next("notifications/tasks")["params"]["status"] == "working"
    a.call("open_gate", name=f"work {name}")
    assert stream.next("notifications/tasks")["params"]["status"] == "completed"
    ended = c.answer(newest("tasks/get", taskId=id))["result"]
    assert text(ended) == f"done by {a.pid}"
    # Step 2: it is cancelled at C before it has done anything.
    name = new()
    begun = a.answer(newest("tools/call", name="work", arguments={"name": name}))["result"]
    a.call("wait_for", name=f"working {name}")
    c.answer(newest("tasks/cancel", taskId=begun["taskId"]))
    a.call("wait_for", name=f"cancelled {name}")
    get = newest("tasks/get", taskId=begun["taskId"])
    until(lambda: b.answer(get)["result"]["status"] == "cancelled")
    assert a.noted(f"work {name}") == 0
    # Step 3: it asks, and the answer comes to D.
    begun = a.answer(newest("tools/call", name="work_asking", arguments={}))["result"]
    get = newest("tasks/get", taskId=begun["taskId"])
    asked = until(lambda: b.answer(get)["result"].get("inputRequests"))
    (key,) = asked
    given = {key: {"action": "accept", "content": {"name": "Ann"}}}
    d.answer(newest("tasks/update", taskId=begun["taskId"], inputResponses=given))
    until(lambda: c.answer(get)["result"]["status"] == "completed")
    assert text(a.answer(get)["result"]) == "done for Ann"


# --- sessions -------------------------------------------------------------------------------------


def test_hosts_serve_the_sessions_of_each_other(hosts: Hosts) -> None:
    """A session is served, also after a restart."""
    a, b, c, d = hosts
    token = a.session()
    ended = a.session()
    assert a.delete(ended) == 204
    answers = [host.answer(tool("host"), token) for host in hosts]
    assert [text(answer) for answer in answers] == [str(host.pid) for host in hosts]
    d.ask_to_stop()
    d.stopped()
    d.start()
    d.ready()
    assert text(d.answer(tool("host"), token)) == str(d.pid)
    # It has not run while the other session ended.
    assert [host.post(tool("host"), ended).status for host in (a, b, c, d)] == [404] * COUNT


def test_hosts_end_the_sessions_of_each_other(hosts: Hosts) -> None:
    """DELETE ends a session."""
    a, b, c, d = hosts
    token = a.session()
    stream = a.listen(token).open()
    b.answer(tool("host"), token)
    assert c.delete(token) == 204
    assert list(stream.messages()) == []  # it ends
    for host in (a, b, c, d):  # D meets it for the first time
        until(partial(is_over, host, token))


def test_hosts_cancel_the_calls_of_each_other(hosts: Hosts) -> None:
    """`notifications/cancelled` cancels a call."""
    a, b, c, _ = hosts
    token = a.session()
    for number, there in enumerate((b, c), start=1):
        account = new()
        stream = a.post(tool("wait", number, account=account), token)
        assert stream.next()["method"] == "notifications/progress"
        cancelled = {
            "jsonrpc": "2.0",
            "method": "notifications/cancelled",
            "params": {"requestId": number},
        }
        assert there.post(cancelled, token).status == 202
        a.call("wait_for", name=f"cancelled {account}")
        assert stream.is_over()
        assert a.noted(f"wait {account}") == 0


ANSWERS: dict[str, tuple[Any, str]] = {
    "ask": ({"action": "accept", "content": {"name": "Ann"}}, "hello Ann"),
    "sample": (
        {"role": "assistant", "model": "m", "content": {"type": "text", "text": "hi " * 5000}},
        "the model: " + "hi " * 5000,
    ),
    "list_roots": ({"roots": [{"uri": "file:///a"}]}, "file:///a"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_hosts_pass_on_answers_to_questions(hosts: Hosts, name: str) -> None:
    """An answer to a question (form, sampling, roots) reaches the call that asked."""
    a, b, *_ = hosts
    token = a.session()
    given, expected = ANSWERS[name]
    stream = a.post(tool(name), token)
    asked = stream.next()
    answer = {"jsonrpc": "2.0", "id": asked["id"], "result": given}
    assert b.post(answer, token).status == 202
    assert text(stream.next()) == expected


def test_hosts_continue_the_rounds_of_each_other(hosts: Hosts) -> None:
    """A call that asks in rounds (2026-07-28) continues."""
    a, b, *_ = hosts
    asked = a.answer(newest("tools/call", name="ask", arguments={}))["result"]
    assert asked["resultType"] == "input_required"
    (key,) = asked["inputRequests"]
    given = {key: {"action": "accept", "content": {"name": "Ann"}}}
    more = {"inputResponses": given, "requestState": asked["requestState"]}
    assert text(b.answer(newest("tools/call", name="ask", arguments={}, **more))) == "hello Ann"


def test_hosts_know_the_subscriptions_and_the_log_level_of_a_session(hosts: Hosts) -> None:
    """`resources/subscribe` and `logging/setLevel` count for a session."""
    a, b, c, d = hosts
    token = a.session()
    subscribe = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "resources/subscribe",
        "params": {"uri": THING},
    }
    stream = a.listen(token).open()
    assert b.answer(subscribe, token)["result"] == {}
    level = {"jsonrpc": "2.0", "id": 2, "method": "logging/setLevel", "params": {"level": "error"}}
    assert b.answer(level, token)["result"] == {}

    def heard() -> list[Any]:
        said = a.post(tool("chatter"), token)
        return [each["params"]["level"] for each in said.messages() if "method" in each]

    until(lambda: heard() == ["error"])
    c.call("touch", uri=THING)
    assert stream.next()["method"] == "notifications/resources/updated"
    # A process that has started since knows them too.
    d.ask_to_stop()
    d.stopped()
    d.start()
    d.ready()
    later = d.listen(token).open()
    said = d.post(tool("chatter"), token)
    assert [each["params"]["level"] for each in said.messages() if "method" in each] == ["error"]
    with ThreadPoolExecutor(1) as pool:
        news = pool.submit(later.next, "notifications/resources/updated")
        end = time.monotonic() + PATIENCE
        while not news.done():  # until it receives the others
            assert time.monotonic() < end, "a host receives nothing"
            c.call("touch", uri=THING)
            time.sleep(0.05)
        assert news.result()["params"] == {"uri": THING}


# --- changes --------------------------------------------------------------------------------------


def test_hosts_report_updated_resources_to_the_listeners_of_each_other(hosts: Hosts) -> None:
    """`app.updated` reaches listeners."""
    a, b, *_ = hosts
    uri = "test://long/" + "x" * 6000  # too long for one message of PostgreSQL
    wanted = {"resourceSubscriptions": [uri]}
    stream = a.post(newest("subscriptions/listen", notifications=wanted))
    stream.next("notifications/subscriptions/acknowledged")
    b.call("touch", uri=uri)
    assert stream.next()["params"]["uri"] == uri


def test_hosts_report_changed_lists_to_the_listeners_of_each_other(hosts: Hosts) -> None:
    """`app.changed` reaches listeners."""
    a, b, c, _ = hosts
    standing = a.listen(a.session()).open()
    stream = b.post(newest("subscriptions/listen", notifications={"toolsListChanged": True}))
    stream.next("notifications/subscriptions/acknowledged")
    c.call("grow")
    for each in (standing, stream):
        assert each.next()["method"] == "notifications/tools/list_changed"


# --- what belongs to one process ------------------------------------------------------------------


def test_hosts_take_the_cursors_of_each_other(hosts: Hosts) -> None:
    """A cursor continues a list."""
    a, b, *_ = hosts
    first = a.answer(newest("resources/list"))["result"]
    rest = b.answer(newest("resources/list", cursor=first["nextCursor"]))["result"]
    names = {each["name"] for each in (*first["resources"], *rest["resources"])}
    assert len(names) == 251


def test_hosts_cancel_calls_of_clients_that_leave(hosts: Hosts) -> None:
    """A client that leaves cancels its call (2026-07-28)."""
    a, *_ = hosts
    account = new()
    message = newest("tools/call", name="wait", arguments={"account": account})
    message["params"]["_meta"]["progressToken"] = 1
    stream = a.post(message)
    assert stream.next()["method"] == "notifications/progress"
    stream.leave()
    a.call("wait_for", name=f"cancelled {account}")
    assert a.noted(f"wait {account}") == 0


def test_hosts_resume_their_own_streams_and_refuse_those_of_others(hosts: Hosts) -> None:
    """An interrupted stream is resumed (`Last-Event-ID`)."""
    a, b, *_ = hosts
    token = a.session()
    stream = a.post(tool("ask"), token)
    asked = stream.next()
    elsewhere = b.listen(token, stream.last)
    assert elsewhere.status == 400
    reason = elsewhere.answer.read().decode()
    assert "began in another process" in reason and "idempotency key" in reason
    stream.leave()
    resumed = a.listen(token, stream.last)
    assert resumed.status == 200
    result = {"action": "accept", "content": {"name": "Ann"}}
    b.post({"jsonrpc": "2.0", "id": asked["id"], "result": result}, token)
    assert text(resumed.next()) == "hello Ann"


def test_hosts_count_calls_together_in_redis(hosts: Hosts) -> None:
    """`RateLimit` counts."""
    answers = [host.call("limited") for host in hosts]
    admitted = sum(answer.get("result") == "admitted" for answer in answers)
    if hosts.kind in ("redis", "cluster"):
        assert admitted == 2
    else:
        assert admitted == COUNT


def test_hosts_count_limits_each_for_itself(hosts: Hosts) -> None:
    """`Limits` count."""
    a, b, *_ = hosts
    token = a.session()
    waiting = [a.post(tool("look_up", id), token) for id in (1, 2)]
    for stream in waiting:
        stream.next()
    refused = a.answer(tool("look_up", 3), token)
    assert "waiting_per_caller" in str(refused)
    elsewhere = b.post(tool("look_up", 4), token)
    assert elsewhere.next()["method"] == "elicitation/create"
    for id in (1, 2, 4):
        params = {"requestId": id}
        cancelled = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
        assert a.post(cancelled, token).status == 202
    for stream in (*waiting, elsewhere):
        assert stream.is_over()


def test_hosts_answer_plain_calls(hosts: Hosts) -> None:
    """A query, a batch or a connection is served."""
    batch = [
        {"jsonrpc": "2.0", "id": 1, "method": "host"},
        {"jsonrpc": "2.0", "id": 2, "method": "host"},
    ]
    for host in hosts:
        assert host.call("host")["result"] == host.pid
        answer = host.send("POST", "/rpc", batch, {"Content-Type": "application/json"})
        assert answer.answer.read().count(str(host.pid).encode()) == 2

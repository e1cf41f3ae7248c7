"""References between the entries of one batch (R1 to R12)."""

import asyncio
import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET, Raw

from tests.servers import Store
from tests.size import sized
from tests.transports import ask
from wirecall import App
from wirecall.errors import (
    DomainError,
    OutcomeUnknown,
    ReferenceInvalid,
    ReferenceLimit,
    ReferenceNotFound,
)
from wirecall.server.references import (
    LIMITS,
    NO_LINKS,
    Links,
    Reference,
    call_digest,
    extract,
    fill,
    find,
    make_plan,
    read_pointer,
    read_references,
    reference_digest,
    write_pointer,
)


def entry(id: object, method: str, params: object = None, **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"jsonrpc": "2.0", "id": id, "method": method}
    if params is not None:
        made["params"] = params
    return {**made, **more}


def ref(id: object, path: str = "") -> dict[str, object]:
    return {"id": id, "path": path}


def make_app(**options: Any) -> App:
    app = App("shop", references=True, **options)

    @app.query
    def orders() -> dict[str, Any]:
        return {"orders": [{"id": 7, "tags": ["a", "b"]}, {"id": 8, "tags": ["c"]}], "none": []}

    @app.query
    def echo(value: Any = None, other: Any = None) -> Any:
        return value

    @app.query
    def large(size: int) -> str:
        return "x" * size

    @app.query
    def typed(value: int) -> int:
        return value

    @app.query
    def fails() -> None:
        raise DomainError(40001, "it fails")

    @app.query
    def unclear() -> None:
        raise OutcomeUnknown(ran="unknown")

    return app


async def send(app: App, *entries: dict[str, Any]) -> list[Any]:
    reply = await app.handle(json.dumps(entries))
    assert reply is not None
    answers: list[Any] = json.loads(reply)
    assert [answer["id"] for answer in answers] == [each["id"] for each in entries]
    return answers


def type_of(answer: Any) -> str:
    found: str = answer["error"]["data"]["type"]
    return found


# --- pointers -------------------------------------------------------------------------------------


@given(st.lists(st.text(), max_size=LIMITS.steps))
def test_pointer_survives_writing_and_reading(tokens: list[str]) -> None:
    """R1."""
    assert read_pointer(write_pointer(tokens), "path") == tuple(tokens)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "0", "*", "~", "/", ""]), inner, max_size=3)
    ),
    max_leaves=12,
)
TOKENS = st.lists(st.sampled_from(["a", "b", "0", "1", "*", "~", "/", "", "00", "-"]), max_size=4)

NOTHING = object()


def slow_find(value: Any, tokens: list[str]) -> Any:
    """Evaluate a pointer on decoded values, as RFC 8620, section 3.7, describes it."""
    if not tokens:
        return value
    first = tokens[0]
    rest = tokens[1:]
    if isinstance(value, dict):
        if first not in value:
            return NOTHING
        return slow_find(value[first], rest)
    if not isinstance(value, list):
        return NOTHING
    if first == "*":
        output: list[Any] = []
        for item in value:
            found = slow_find(item, rest)
            if found is NOTHING:
                return NOTHING
            if isinstance(found, list):
                output += found
            else:
                output.append(found)
        return output
    if first not in [str(index) for index in range(len(value))]:
        return NOTHING
    return slow_find(value[int(first)], rest)


@settings(max_examples=sized(small=200, full=10_000))
@given(JSON, TOKENS)
def test_find_takes_what_slow_evaluation_takes(value: Any, tokens: list[str]) -> None:
    """R1."""
    expected = slow_find(value, tokens)
    result = json.dumps(value).encode()
    found = find(result, tuple(tokens))
    if expected is NOTHING:
        assert found is None
        with pytest.raises(ReferenceNotFound):
            fill(b"{}", [Reference(("a",), 1, tuple(tokens))], [result])
    else:
        assert found is not None
        assert json.loads(found) == expected


@pytest.mark.parametrize("pointer", ["a", "/~", "/~2", "/a~", 1, None, ["a"]])
def test_pointer_that_is_malformed_is_invalid(pointer: object) -> None:
    """R1."""
    with pytest.raises(ReferenceInvalid, match="JSON Pointer"):
        read_pointer(pointer, "path")


def test_fill_keeps_digits_of_numbers() -> None:
    """R8."""
    result = b'{"n":1.2300000000000000000000000001e5}'
    filled = fill(b'{"a":{}}', [Reference(("a", "n"), 1, ("n",))], [result])
    assert filled == b'{"a":%b}' % result


@pytest.mark.parametrize(
    ("result", "pointer", "words"),
    [
        ({"orders": [{"id": 7}]}, "/orders/1/id", "'/orders' is an array, and its length is 1"),
        ({"orders": [{"id": 7}]}, "/orders/0/sum", "'/orders/0' is an object with 'id'"),
        ({"orders": [{"id": 7}]}, "/orders/*/sum", "an item of '/orders' does not have it"),
        ([{"id": 7}], "/*/sum", "an item of the result does not have it"),
        ({}, "/orders", "the result is an object without members"),
        ("R-7", "/receipt", "the result is a string"),
        ({"a": None}, "/a/b", "'/a' is null"),
        ({"a": True}, "/a/b", "'/a' is true"),
        ({"a": 5}, "/a/b", "'/a' is a number"),
        (dict.fromkeys("abcdefghijkl", 1), "/z", "'i', 'j', ..."),
    ],
)
def test_fill_says_how_far_a_pointer_leads(result: Any, pointer: str, words: str) -> None:
    """R6: the error names what is there."""
    path = read_pointer(pointer, "path")
    with pytest.raises(ReferenceNotFound) as refusal:
        fill(b"{}", [Reference(("a",), 1, path)], [json.dumps(result).encode()])
    assert refusal.value.message == "A reference finds nothing"
    reason = refusal.value.data["reason"]
    assert reason.startswith(f"nothing is at {pointer!r}: ")
    assert reason.endswith(words)


def test_fill_describes_a_number_that_python_does_not_read() -> None:
    """R6: a number may have more digits than Python reads."""
    with pytest.raises(ReferenceNotFound, match="'/a' is a number"):
        fill(b"{}", [Reference(("b",), 1, ("a", "b"))], [b'{"a":%b}' % (b"9" * 5000)])


# --- the two notations ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refs", "after", "params"),
    [
        ([], UNSET, b"{}"),
        ({"": ref(1)}, UNSET, b"{}"),
        ({"/a": 1}, UNSET, b"{}"),
        ({"/a": {"path": ""}}, UNSET, b"{}"),
        ({"/a": {"id": 1, "path": "", "more": 1}}, UNSET, b"{}"),
        ({"/a": ref(True)}, UNSET, b"{}"),
        ({"/a": ref(None)}, UNSET, b"{}"),
        ({"/a": ref(1)}, UNSET, b'{"a":null}'),
        ({"/a": ref(1)}, UNSET, b"[]"),
        ({"/a/b": ref(1)}, UNSET, b"{}"),
        ({"/a/0": ref(1)}, UNSET, b'{"a":[1]}'),
        ({"/a": ref(1), "/a/b": ref(1)}, UNSET, b"{}"),
        (UNSET, 1, b"{}"),
        (UNSET, [None], b"{}"),
        (UNSET, [[1]], b"{}"),
    ],
)
def test_references_that_are_malformed_are_invalid(refs: Any, after: Any, params: bytes) -> None:
    """R1, R2."""
    with pytest.raises(ReferenceInvalid) as refusal:
        read_references(refs, after, Raw(params))
    assert refusal.value.ran == "no"


def test_extract_finds_references_in_arguments() -> None:
    """A2."""
    rest, refs = extract(
        {"a": {"$ref": "x#/k~1"}, "b": [1, {"$ref": "x#"}], "c": {"$literal": {"$ref": "x#"}}}
    )
    assert rest == {"b": [1, None], "c": {"$ref": "x#"}}
    assert refs == (Reference(("a",), "x", ("k/",)), Reference(("b", "1"), "x", ()))
    filled = fill(json.dumps(rest).encode(), refs, [b'{"k/":5}', b"[6]"])
    assert json.loads(filled) == {"a": 5, "b": [1, [6]], "c": {"$ref": "x#"}}


@pytest.mark.parametrize("value", [{"$ref": 1}, {"$ref": "x"}, {"$ref": "x#", "b": 1}])
def test_extract_refuses_other_forms_and_names_literal(value: Any) -> None:
    """A2."""
    with pytest.raises(ReferenceInvalid, match="literal"):
        extract({"a": value})


# --- the plan -------------------------------------------------------------------------------------


def test_plan_has_levels_of_longest_chains() -> None:
    """R3."""
    first = Links((), (1,))
    plan = make_plan([1, 2, 3], [NO_LINKS, first, Links((), (1, 2))])
    assert plan.levels == [[0], [1], [2]]


def test_plan_distinguishes_numbers_from_strings() -> None:
    """R3."""
    plan = make_plan([1, "1", 2], [NO_LINKS, NO_LINKS, Links((), ("1",))])
    assert plan.entries[2].waits_for == (1,)


def test_plan_limits_depth() -> None:
    """R4."""
    ids = list(range(LIMITS.depth + 2))
    chain = [NO_LINKS, *(Links((), (id - 1,)) for id in ids[1:])]
    plan = make_plan(ids, chain)
    assert [isinstance(each.error, ReferenceLimit) for each in plan.entries].count(True) == 1
    assert isinstance(plan.entries[-1].error, ReferenceLimit)


# --- the server -----------------------------------------------------------------------------------


async def test_array_fills_params_from_earlier_results() -> None:
    """R1, R5, R14."""
    app = make_app()
    answers = await send(
        app,
        entry(1, "orders"),
        entry("1", "echo", {}, refs={"/value": ref(1, "/orders/*/tags")}),
        entry(2, "echo", {"value": {}}, refs={"/value/id": ref(1, "/orders/1/id")}, after=["1"]),
        entry(3, "echo", refs={"/value": ref(1, "/none")}),
    )
    assert [answer["result"] for answer in answers[1:]] == [["a", "b", "c"], {"id": 8}, []]


def test_array_with_references_needs_no_loop() -> None:
    app = make_app()
    entries = [entry(1, "orders"), entry(2, "echo", refs={"/value": ref(1, "/orders/0/id")})]
    reply = app.handle_sync(json.dumps(entries))
    assert reply is not None
    assert json.loads(reply)[1]["result"] == 7


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (3, "comes later"),
        (9, "no entry of this batch"),
        (2, "refers to itself"),
        (1, "entries have the id"),
    ],
)
@pytest.mark.parametrize("notation", ["refs", "after"])
async def test_array_refuses_targets_that_are_not_one_earlier_entry(
    target: int, reason: str, notation: str
) -> None:
    """R3."""
    app = make_app()
    more: dict[str, Any] = {"after": [target]}
    if notation == "refs":
        more = {"refs": {"/value": ref(target)}}
    answers = await send(
        app,
        entry(1, "orders"),
        entry(1, "orders"),
        entry(2, "echo", **more),
        entry(3, "echo", {"value": 5}),
    )
    assert answers[2]["error"]["code"] == -32602
    assert type_of(answers[2]) == "reference_invalid"
    assert reason in answers[2]["error"]["data"]["reason"]
    assert answers[3]["result"] == 5


async def test_array_cannot_have_a_cycle_through_after() -> None:
    """R3: the entry that refers to a later one is refused, and so is its dependant."""
    answers = await send(make_app(), entry(1, "echo", after=[2]), entry(2, "echo", after=[1]))
    assert [type_of(answer) for answer in answers] == ["reference_invalid", "dependency_failed"]


async def test_array_passes_first_failure_along_the_chain() -> None:
    """R6."""
    answers = await send(
        make_app(),
        entry(1, "fails"),
        entry(2, "echo", refs={"/value": ref(1)}),
        entry(3, "echo", after=[2]),
        entry(4, "echo", {"value": 4}),
    )
    for answer in answers[1:3]:
        assert answer["error"]["code"] == 42410
        data = answer["error"]["data"]
        assert data["type"] == "dependency_failed"
        assert (data["ran"], data["id"], data["code"]) == ("no", 1, 40001)
    assert answers[3]["result"] == 4


async def test_array_says_that_a_target_is_unknown() -> None:
    """R6."""
    answers = await send(
        make_app(), entry(1, "unclear"), entry(2, "echo", after=[1]), entry(3, "echo", after=[2])
    )
    assert [type_of(answer) for answer in answers[1:]] == ["dependency_unknown"] * 2
    assert [answer["error"]["data"]["ran"] for answer in answers[1:]] == ["no", "no"]


async def test_array_reports_pointer_that_finds_nothing() -> None:
    """R6."""
    answers = await send(
        make_app(), entry(1, "orders"), entry(2, "echo", refs={"/value": ref(1, "/orders/2")})
    )
    assert type_of(answers[1]) == ReferenceNotFound.TYPE
    assert answers[1]["error"]["data"]["ran"] == "no"


async def test_array_decodes_filled_params_like_others() -> None:
    """R7."""
    answers = await send(make_app(), entry(1, "orders"), entry(2, "typed", refs={"/value": ref(1)}))
    assert answers[1]["error"]["code"] == -32602


async def test_array_takes_results_after_middleware() -> None:
    """R8."""

    async def hide(context: Any, call_next: Any) -> Any:
        result = await call_next(context)
        if context.method == "orders":
            return {"orders": "hidden"}
        return result

    answers = await send(
        make_app(middleware=[hide]),
        entry(1, "orders"),
        entry(2, "echo", refs={"/value": ref(1, "/orders")}),
    )
    assert answers[1]["result"] == "hidden"


async def test_array_limits_what_references_substitute() -> None:
    """R4."""
    app = make_app()
    size = 200 << 10
    many = [entry(n, "echo", refs={"/value": ref(1)}) for n in range(2, 9)]
    answers = await send(app, entry(1, "large", {"size": size}), *many)
    limits = [each["error"]["data"]["limit"] for each in answers if "error" in each]
    assert limits == ["batch_bytes"] * 2
    twice = {"/value": ref(1), "/other": ref(1)}
    answers = await send(app, entry(1, "large", {"size": size}), entry(2, "echo", refs=twice))
    assert type_of(answers[1]) == "reference_limit"
    assert answers[1]["error"]["data"]["limit"] == "entry_bytes"


async def test_array_limits_references_and_values() -> None:
    """R4."""
    app = make_app()
    refs = {f"/a{number}": ref(1) for number in range(LIMITS.refs + 1)}
    longer = {"value": list(range(LIMITS.values + 1))}
    answers = await send(
        app,
        entry(1, "echo", longer),
        entry(2, "echo", refs=refs),
        entry(3, "echo", after=[1] * (LIMITS.after + 1)),
        entry(4, "echo", refs={"/value": ref(1, "/*")}),
    )
    limits = [answer["error"]["data"]["limit"] for answer in answers[1:]]
    assert limits == ["refs", "after", "values"]


async def test_array_is_refused_where_references_are_off() -> None:
    """R12, R14."""
    app = App("plain")

    @app.query
    def echo(value: int = 0) -> int:
        return value

    members: list[dict[str, Any]] = [{"refs": {}}, {"after": []}, {"refs": None}]
    for more in members:
        answers = await send(app, entry(1, "echo"), entry(2, "echo", **more))
        assert answers[0]["result"] == 0
        assert answers[1]["error"]["code"] == -32600
        assert type_of(answers[1]) == "references_off"
    assert b"x-wirecall" not in (app.handle_sync(json.dumps(entry(1, "rpc.discover"))) or b"")


async def test_single_object_and_notification_cannot_have_references() -> None:
    """R1, R4."""
    app = make_app()
    single = await app.handle(json.dumps(entry(1, "echo", after=[])))
    assert single is not None
    assert type_of(json.loads(single)) == "references_off"
    notification = {"jsonrpc": "2.0", "method": "echo", "after": [1]}
    reply = await app.handle(json.dumps([entry(1, "orders"), notification]))
    assert reply is not None
    assert type_of(json.loads(reply)[1]) == "references_off"


def test_discover_announces_references_and_limits() -> None:
    """R12."""
    reply = make_app().handle_sync(json.dumps(entry(1, "rpc.discover")))
    assert reply is not None
    announced = json.loads(reply)["result"]["x-wirecall"]
    assert announced["references"] == 1
    assert announced["limits"]["batch_bytes"] == 1 << 20


async def test_options_of_rpc_announce_references() -> None:
    """R12: what `rpc.discover` says, without a call. An app without references refuses the method."""
    reply = await ask(make_app().asgi(), "/rpc", method="OPTIONS")
    assert (reply.status, reply.headers["allow"]) == (200, "OPTIONS, POST")
    assert reply.json["x-wirecall"]["references"] == 1
    assert reply.json["x-wirecall"]["limits"]["depth"] == LIMITS.depth
    refusal = await ask(App("plain").asgi(), "/rpc", method="OPTIONS")
    assert (refusal.status, refusal.headers["allow"]) == (405, "POST")


async def test_command_waits_for_targets_and_keeps_order() -> None:
    """R5."""
    app = App("order", references=True)
    begun: list[str] = []
    gate = asyncio.Event()

    @app.query
    async def slow() -> int:
        await gate.wait()
        return 1

    @app.command
    async def act(name: str, value: int = 0) -> int:
        begun.append(name)
        return value

    @app.query
    async def open_gate() -> None:
        assert begun == []
        gate.set()

    answers = await send(
        app,
        entry(1, "slow"),
        entry(2, "act", {"name": "a"}, refs={"/value": ref(1)}),
        entry(3, "act", {"name": "b"}),
        entry(4, "open_gate"),
    )
    assert begun == ["a", "b"]
    assert answers[1]["result"] == 1


# --- all small graphs -----------------------------------------------------------------------------

Graph = tuple[tuple[int, ...], ...]


def all_graphs(size: int) -> list[Graph]:
    """Return every way in which entries can refer to earlier ones."""
    choices = [
        [each for n in range(later + 1) for each in itertools.combinations(range(later), n)]
        for later in range(size)
    ]
    return list(itertools.product(*choices))


async def test_array_gives_results_of_slow_evaluation_on_all_graphs() -> None:
    """R5, R6: entry n adds 1 to the sum of its targets; one entry fails."""
    app = App("sums", references=True)

    @app.query(name="sum")
    async def total(fail: bool, wait: bool, **values: int) -> int:
        if wait:
            await asyncio.sleep(0)
        if fail:
            raise DomainError(40001, "it fails")
        return 1 + sum(values.values())

    chance = random.Random(5)
    graphs = all_graphs(5)
    for graph in chance.sample(graphs, sized(small=150, full=len(graphs))):
        failing = chance.randrange(-1, len(graph))
        entries = []
        expected: list[int | None] = []
        for number, targets in enumerate(graph):
            params = {"fail": number == failing, "wait": chance.random() < 0.5}
            refs = {f"/v{target}": ref(target) for target in targets}
            entries.append(entry(number, "sum", params, refs=refs))
            taken = [expected[target] for target in targets]
            if number == failing or None in taken:
                expected.append(None)
            else:
                expected.append(1 + sum(each for each in taken if each is not None))
        answers = await send(app, *entries)
        assert [answer.get("result") for answer in answers] == expected


# --- sending again --------------------------------------------------------------------------------


def test_digest_ignores_ids_and_values_and_sees_targets() -> None:
    """R9."""
    target = call_digest("find", None, b"1")
    first = reference_digest(b"p", [Reference(("a",), 1, ("x",))], [target])
    assert first == reference_digest(b"p", [Reference(("a",), "new", ("x",))], [target])
    others = [
        reference_digest(b"p", [Reference(("b",), 1, ("x",))], [target]),
        reference_digest(b"p", [Reference(("a",), 1, ("y",))], [target]),
        reference_digest(b"q", [Reference(("a",), 1, ("x",))], [target]),
        reference_digest(b"p", [Reference(("a",), 1, ("x",))], [call_digest("get", None, b"1")]),
        reference_digest(b"p", [Reference(("a",), 1, ("x",))], [call_digest("find", "k", b"1")]),
    ]
    assert len({first, *others}) == 1 + len(others)
    assert reference_digest(b"p", [], []) == b"p"


async def test_array_sent_again_replays_with_new_ids_and_changed_query(store: Store) -> None:
    """R9, on every store."""
    app = App("charges", references=True, ledger=store.url)
    charged: list[int] = []
    price = 100

    @app.query
    def cents() -> int:
        return price

    @app.query
    def discount() -> int:
        return 100

    @app.command
    def charge(amount: int) -> str:
        charged.append(amount)
        return f"charged {amount}"

    @app.command
    def close(text: str) -> str:
        return f"closed: {text}"

    def batch(first: int, path: str = "") -> list[dict[str, Any]]:
        keyed = {"idempotency_key": "k-1"}
        return [
            entry(first, "cents"),
            entry(first + 1, "charge", keyed, refs={"/amount": ref(first, path)}),
            entry(
                first + 2,
                "close",
                {"idempotency_key": "k-2"},
                refs={"/text": ref(first + 1)},
            ),
        ]

    try:
        before = await send(app, *batch(1))
        price = 250
        again = await send(app, *batch(11))
        assert [each["result"] for each in before] == [100, "charged 100", "closed: charged 100"]
        assert [each["result"] for each in again] == [250, "charged 100", "closed: charged 100"]
        assert charged == [100]
        other = batch(21)
        other[0]["method"] = "discount"
        conflict = await send(app, *other)
        assert type_of(conflict[1]) == "idempotency_key_conflict"
        assert charged == [100]
    finally:
        await app.aclose()


async def test_array_runs_equal_commands_with_references_once() -> None:
    """R11."""
    app = App("once", references=True)
    ran: list[int] = []

    @app.query
    def one() -> int:
        return 1

    @app.command
    async def act(value: int) -> int:
        ran.append(value)
        return value

    keyed = {"idempotency_key": "k"}
    answers = await send(
        app,
        entry(1, "one"),
        entry(2, "act", keyed, refs={"/value": ref(1)}),
        entry(3, "act", keyed, refs={"/value": ref(1)}),
        entry(4, "act", {"idempotency_key": "k4"}, refs={"/value": ref(3)}),
    )
    assert [answer["result"] for answer in answers] == [1, 1, 1, 1]
    assert ran == [1, 1]

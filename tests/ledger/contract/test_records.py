"""Records keep every byte of every name and payload, and queries find them."""

import asyncio
import math
import os

import pytest
from msgspec import structs

from tests.ledger import (
    ID,
    LEASE,
    RETENTION,
    claim_of,
    granted,
    in_state,
    outcome_of,
    present,
    same,
)
from tests.ledger.contract import CHANGES
from tests.servers import Store
from wirecall.ledger.base import (
    Ledger,
    LedgerDown,
    Only,
    Outcome,
    Record,
    RecordId,
    State,
    Token,
)

# --- bytes and names ------------------------------------------------------------------------------

PAYLOADS: dict[str, bytes | None] = {
    "null": b"null",
    "false": b"false",
    "zero": b"0",
    "empty string": b'""',
    "empty object": b"{}",
    "empty array": b"[]",
    "nothing at all": b"",
    "too large to keep": None,
    "the word None": b"None",
    "all bytes": bytes(range(256)),
    "line ends": b"\r\n$-1\r\n:0\r\n\n\n",
    "SQL": b"'); DROP TABLE x; -- %s %(a)s $1 ? \\x00 \\\\",
    "half a character": b'"\xff\xfe\xed\xa0\x80"',
    "digits and spaces": b"-1 12 3\n",
    "a megabyte": os.urandom(1 << 20),
    "a megabyte of JSON": b'"' + "ä€😀\\u0000".encode() * 80_000 + b'"',
}


@pytest.mark.parametrize("kind", ["result", "error"])
async def test_outcome_comes_back_byte_for_byte(kind: str, ledger: Ledger) -> None:
    """Outcomes are bytes: nothing looks at whether a result is true, empty or null."""
    kept = {}
    for number, (name, payload) in enumerate(PAYLOADS.items()):
        id = structs.replace(ID, key=f"key-{number}")
        outcome = outcome_of(payload, kind)
        record = await granted(ledger, id)
        assert await ledger.complete(record.token, outcome, RETENTION)
        assert (await present(ledger, id)).outcome == outcome, name
        assert (await ledger.claim(claim_of(id))).outcome == outcome, name
        kept[id] = outcome
    assert {each.id: each.outcome for each in await ledger.list()} == kept


async def test_interim_outcome_and_a_resolved_one_come_back_byte_for_byte(ledger: Ledger) -> None:
    for number, (name, payload) in enumerate(PAYLOADS.items()):
        id = structs.replace(ID, key=f"key-{number}")
        outcome = outcome_of(payload)
        record = await granted(ledger, id)
        assert await ledger.suspend(record.token, outcome, RETENTION)
        assert (await ledger.claim(claim_of(id))).outcome == outcome, name
        record = await granted(ledger, id, continues=True)
        assert await ledger.abandon(record.token)
        assert await ledger.resolve(id, outcome)
        assert (await ledger.claim(claim_of(id))).outcome == outcome, name


@pytest.mark.parametrize(
    "digest", [b"", b"\0", bytes(range(32)), os.urandom(64)], ids=["none", "NUL", "plain", "long"]
)
async def test_digest_without_a_payload_is_kept_also_in_the_tombstone(
    digest: bytes, ledger: Ledger, store: Store
) -> None:
    record = await granted(ledger)
    outcome = Outcome("result", None, digest)
    assert await ledger.complete(record.token, outcome, RETENTION)
    assert (await ledger.claim(claim_of())).outcome == outcome
    store.age(ID, RETENTION + 1)
    buried = await ledger.claim(claim_of())
    assert (buried.state, buried.outcome) == (State.TOMBSTONE, outcome)


async def test_payload_does_not_outlive_its_outcome(ledger: Ledger) -> None:
    """A result without a payload follows an interim one with it: nothing of the older may show."""
    record = await granted(ledger)
    assert await ledger.suspend(record.token, outcome_of(b'"interim"', "error"), RETENTION)
    record = await granted(ledger, continues=True)
    assert (await present(ledger)).outcome is None
    outcome = Outcome("result", None, b"digest")
    assert await ledger.complete(record.token, outcome, RETENTION)
    assert (await present(ledger)).outcome == outcome


@pytest.mark.parametrize(
    "raw", [b"", b"\0" * 16, bytes(range(240, 256)), b"' OR 1=1 --", b"\n\r:\xff"]
)
async def test_fingerprints_and_nonces_are_any_bytes(raw: bytes, ledger: Ledger) -> None:
    record = await granted(ledger, fingerprint=raw, nonce=raw)
    assert (await ledger.claim(claim_of(fingerprint=raw + b"\0"))).nonce == raw
    assert (
        await ledger.complete(
            structs.replace(record.token, nonce=raw + b"\0"), outcome_of(), RETENTION
        )
        is False
    )
    assert await ledger.complete(record.token, outcome_of(), RETENTION)
    assert (await ledger.claim(claim_of(fingerprint=raw))).state is State.DONE


PRINTABLE = "".join(map(chr, range(33, 127)))

ODD = [
    RecordId("", "m", "k"),
    RecordId("", "", "k"),
    RecordId("a", "b:c", "k"),
    RecordId("a:b", "c", "k"),
    RecordId("a:b:c", "", "k"),
    RecordId("a%3Ab", "c", "k"),
    RecordId("a/b", "c", "k"),
    RecordId("a", "b/c", "k"),
    RecordId("a", "b", "c/k"),
    RecordId("a", "b", "c:k"),
    RecordId("a", "b", "c%3Ak"),
    RecordId("a ", "b", "k"),
    RecordId("a", " b", "k"),
    RecordId("A", "b", "k"),
    RecordId("a", "b", "K"),
    RecordId("a", "b", "k"),
    RecordId("a", "tools/call search", "k"),
    RecordId("line\r\nend\t", "m", "k"),
    RecordId("{tag}*?[x]\\", "m*", "*"),
    RecordId("'\"`;--", "$1 %s %(x)s", "?"),
    RecordId("ünï", "größe", "k"),
    RecordId("u\u0308ni\u0308", "größe", "k"),
    RecordId("\uffff", "m", "k"),
    RecordId("\U00010000", "m", "k"),
    RecordId("😀", "メソッド", "k"),
    RecordId("x" * 1000, "y" * 500, "z"),
    RecordId("null", "None", "0"),
    RecordId("a", "b", PRINTABLE),
    RecordId("a", "b", "x" * 255),
    RecordId("a", "b", "x" * 254 + "y"),
    RecordId("a", "b", "!"),
]


async def test_callers_methods_and_keys_of_any_shape_are_distinct(ledger: Ledger) -> None:
    """P5: a record of one caller, method and key is never found under another."""
    assert len(set(ODD)) == len(ODD)
    for number, id in enumerate(ODD):
        record = await granted(ledger, id)
        assert await ledger.complete(record.token, outcome_of(b"%d" % number), RETENTION)
    for number, id in enumerate(ODD):
        record = await ledger.claim(claim_of(id))
        assert (record.id, record.outcome) == (id, outcome_of(b"%d" % number))
        assert same(await ledger.get(id), record)
    assert sorted(record.id for record in await ledger.list()) == sorted(ODD)
    assert (await ledger.counts())[State.DONE] == len(ODD)


async def test_every_transition_finds_a_record_of_any_name(ledger: Ledger, store: Store) -> None:
    for id in ODD:
        record = await granted(ledger, id, committed=False)
        assert await ledger.heartbeat(record.token, LEASE), id
        assert await ledger.commit_point(record.token, LEASE), id
        assert await ledger.suspend(record.token, outcome_of(), RETENTION), id
        record = await granted(ledger, id, continues=True)
        assert await ledger.lapse(record.token), id
        record = await granted(ledger, id, on_crash="rerun")
        assert await ledger.abandon(record.token), id
        assert await ledger.resolve(id, None), id
        record = await granted(ledger, id)
        assert await ledger.release(record.token), id
        record = await granted(ledger, id)
        assert await ledger.complete(record.token, outcome_of(), RETENTION), id
        store.age(id, RETENTION + 1)
        assert await ledger.sweep() == 1, id
        assert (await present(ledger, id)).state is State.TOMBSTONE


@pytest.mark.parametrize(
    "caller", ["nul\0", "half \ud83d", "\udcff"], ids=["NUL", "surrogate", "escaped byte"]
)
async def test_caller_that_a_store_cannot_write_is_refused_without_harm(
    caller: str, ledger: Ledger
) -> None:
    """Kept exactly or refused with the ledger's own error; never mangled, and other records stay
    intact.
    """
    strange = structs.replace(ID, caller=caller)
    others = [structs.replace(ID, key=f"key-{number}") for number in range(5)]
    results = await asyncio.gather(
        *(ledger.claim(claim_of(id)) for id in (*others, strange, ID)), return_exceptions=True
    )
    *fine, answer, last = results
    assert all(
        isinstance(record, Record) and record.state is State.RUNNING for record in (*fine, last)
    )
    assert isinstance(answer, LedgerDown) or (isinstance(answer, Record) and answer.id == strange)
    if isinstance(answer, Record):
        assert same(await ledger.get(strange), answer)
    else:
        for change in CHANGES.values():
            with pytest.raises(LedgerDown):
                await change(ledger, Token(strange, 1, b"n"))
        for look in (
            ledger.get,
            lambda id: ledger.list(after=(1.0, id)),
            lambda id: ledger.resolve(id, None),
        ):
            with pytest.raises(LedgerDown):
                await look(strange)
    assert (await present(ledger)).state is State.RUNNING


async def test_durations_may_be_very_long_or_end_at_once(ledger: Ledger, store: Store) -> None:
    century = 100 * 365 * 86_400.0
    record = await granted(ledger, lease=century, retention=century)
    assert record.lease_left > century / 2
    assert await ledger.complete(record.token, outcome_of(), century)
    store.age(ID, century / 2)
    assert (await ledger.claim(claim_of())).state is State.DONE
    other = structs.replace(ID, key="short")
    record = await granted(ledger, other, lease=1e-6, retention=1e-6, committed=False)
    store.age(other, 1)
    assert await ledger.commit_point(record.token, 1.0) is False
    assert await ledger.complete(record.token, outcome_of(), 0.5)
    store.age(other, 1)
    assert (await ledger.claim(claim_of(other))).state is State.TOMBSTONE


# --- looking --------------------------------------------------------------------------------------


async def test_records_are_listed_in_the_order_of_time_a_page_at_a_time(
    ledger: Ledger, store: Store
) -> None:
    """The newest first, whatever their ids."""
    ids = [
        RecordId(caller, method, key)
        for caller in ("", "b", "a")
        for method in ("y", "x")
        for key in ("3", "20", "1")
    ]
    for number, id in enumerate(ids):
        await granted(ledger, id)
        store.age(id, 100 * number)
    assert [record.id for record in await ledger.list()] == ids
    assert [record.id for record in await ledger.list(limit=4)] == ids[:4]
    pages: list[Record] = []
    while page := await ledger.list(limit=4, after=pages[-1].place if pages else None):
        assert len(page) <= 4
        pages += page
    assert [record.id for record in pages] == ids
    between = pages[4].started_at + 1, RecordId("nobody", "", "none")
    assert [record.id for record in await ledger.list(after=between)] == ids[4:]
    assert await ledger.list(after=pages[-1].place) == []
    assert await ledger.list(limit=0) == []


async def test_records_are_listed_by_method_caller_state_and_time(
    ledger: Ledger, store: Store
) -> None:
    """Each alone and all together, a page at a time, in the order of time."""
    ids = [
        RecordId(caller, method, key)
        for caller in ("", "b", "b:c", "%")
        for method in ("y", "tools/call:x")
        for key in ("3", "1", "2")
    ]
    day = 86_400.0
    for number, id in enumerate(ids):
        record = await granted(ledger, id, lease=day)
        if number % 2:
            assert await ledger.complete(record.token, outcome_of(), day)
        store.age(id, 100 * number)
    begun = {record.id: record.started_at for record in await ledger.list()}
    assert [*begun] == ids
    filters = [
        Only(caller=caller, method=method, since=since, until=until)
        for caller in (None, "b", "nobody")
        for method in (None, "tools/call:x", "none")
        for since in (-math.inf, begun[ids[17]])
        for until in (math.inf, begun[ids[3]])
    ]
    for only in filters:
        for state in (None, State.RUNNING, State.DONE, State.UNKNOWN):
            wanted = [
                id
                for number, id in enumerate(ids)
                if only.names(id)
                and only.since <= begun[id] < only.until
                and state in (None, State.DONE if number % 2 else State.RUNNING)
            ]
            pages: list[Record] = []
            while page := await ledger.list(
                state, limit=2, only=only, after=pages[-1].place if pages else None
            ):
                pages += page
            assert [record.id for record in pages] == wanted, (only, state)


async def test_tasks_are_listed_in_the_order_of_time_with_their_records(
    ledger: Ledger, store: Store
) -> None:
    """The last task of each record that has one; records without a task are not in the list."""
    ids = [RecordId(caller, "tools/call:x", key) for caller in ("a", "b") for key in ("2", "1")]
    for number, id in enumerate(ids):
        record = await granted(ledger, id)
        assert await ledger.begin_task(record.token, f"first-{number}", b"{}", 100)
        assert await ledger.begin_task(record.token, f"task-{number}", b"{}", 100)
        store.age(id, 100 * number)
    await granted(ledger)
    listed = await ledger.list_tasks()
    assert [task.id for task in listed] == [f"task-{number}" for number in range(4)]
    assert [task.now and task.now.id for task in listed] == ids
    newest = listed[0].now
    assert newest is not None
    (second,) = await ledger.list_tasks(limit=1, after=newest.place)
    assert second.id == "task-1"
    only = Only(caller="b")
    assert [task.id for task in await ledger.list_tasks(only=only)] == ["task-2", "task-3"]
    assert list(await ledger.list_tasks(State.DONE)) == []
    assert len(await ledger.list_tasks(State.UNKNOWN)) == 3
    assert list(await ledger.list_tasks(only=Only(since=newest.started_at + 1))) == []


async def test_records_that_began_together_are_listed_once_each(
    ledger: Ledger, store: Store
) -> None:
    """A page may end between them: the id decides, from its end."""
    await asyncio.gather(*(granted(ledger, structs.replace(ID, key=str(key))) for key in range(7)))
    pages: list[Record] = []
    while page := await ledger.list(limit=2, after=pages[-1].place if pages else None):
        pages += page
    places = [record.place for record in pages]
    assert places == sorted(set(places), reverse=True)
    assert len(places) == 7


async def test_listed_record_equals_the_one_from_get(ledger: Ledger, store: Store) -> None:
    for state in State:
        await in_state(state, ledger, store, structs.replace(ID, key=state.value))
    listed = await ledger.list()
    assert {record.id.key for record in listed} == {state.value for state in State}
    for record in listed:
        assert same(record, await ledger.get(record.id))


async def test_records_are_listed_by_state(ledger: Ledger, store: Store) -> None:
    for number in range(3):
        for state in State:
            await in_state(state, ledger, store, RecordId("", state.value, str(number)))
    for state in State:
        listed = await ledger.list(state)
        assert {record.id for record in listed} == {
            RecordId("", state.value, str(number)) for number in range(3)
        }
        assert [record.place for record in listed] == sorted(
            (record.place for record in listed), reverse=True
        )
        ids = [record.id for record in listed]
        assert [record.id for record in await ledger.list(state, limit=2)] == ids[:2]
        assert [
            record.id for record in await ledger.list(state, limit=2, after=listed[1].place)
        ] == ids[2:]
    assert len(await ledger.list(limit=100)) == 15


async def test_records_beyond_one_page_of_any_store_are_listed(ledger: Ledger) -> None:
    ids = [RecordId("caller", "method", f"{number:04}") for number in range(1050)]
    await asyncio.gather(*(ledger.claim(claim_of(id)) for id in ids))
    listed = await ledger.list(limit=2000)
    assert {record.id for record in listed} == set(ids)
    assert [record.place for record in listed] == sorted(
        (record.place for record in listed), reverse=True
    )
    after = await ledger.list(limit=300, after=listed[699].place)
    assert [record.id for record in after] == [record.id for record in listed[700:1000]]
    assert len(await ledger.list()) == 100
    assert (await ledger.counts())[State.RUNNING] == 1050
    assert await ledger.sweep() == 0


@pytest.mark.parametrize("params", [None, b"{}", b'{"order":"7"}', '["\u2028é",1e400]'.encode()])
async def test_params_are_kept_as_they_were_claimed(
    params: bytes | None, ledger: Ledger, store: Store
) -> None:
    record = await granted(ledger, params=params)
    assert record.params == params
    assert (await present(ledger)).params == params
    assert [each.params for each in await ledger.list()] == [params]
    assert (await ledger.claim(claim_of(params=b'"another"'))).params == params
    assert await ledger.complete(record.token, outcome_of(), RETENTION)
    assert (await present(ledger)).params == params
    store.age(ID, RETENTION + 1)
    assert await ledger.sweep() == 1
    assert (await present(ledger)).params is None, "they go with the payload"


async def test_params_are_kept_by_a_successor(ledger: Ledger, store: Store) -> None:
    await granted(ledger, params=b"[1]", on_crash="rerun")
    store.age(ID, LEASE + 1)
    assert (await ledger.claim(claim_of(params=b"[1]", on_crash="rerun"))).params == b"[1]"
    store.age(ID, LEASE + 1)
    assert (await ledger.claim(claim_of(params=b"[1]"))).params == b"[1]", (
        "of an unknown outcome too"
    )


async def test_records_are_counted_by_state(ledger: Ledger, store: Store) -> None:
    assert await ledger.counts() == dict.fromkeys(State, 0)
    for number, state in enumerate(State):
        for key in range(number):
            await in_state(state, ledger, store, RecordId("", state.value, str(key)))
    assert await ledger.counts() == {state: number for number, state in enumerate(State)}


async def test_empty_ledger_lists_and_counts_nothing(ledger: Ledger) -> None:
    assert await ledger.get(ID) is None
    assert await ledger.list() == []
    assert await ledger.list(State.UNKNOWN) == []
    assert await ledger.sweep() == 0

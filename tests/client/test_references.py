"""References between the entries of a client's batch: as `refs` of one array, and in waves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.client.graphs import add_graph, expected, graphs, observed, summing_app
from tests.client.peers import Peer, answers, http, ok, served
from wirecall import App, DomainError, UsageError, connect, connect_sync, testing
from wirecall.client.exchange import Exchange, Link
from wirecall.errors import (
    Busy,
    ConnectionLost,
    DependencyUnknown,
    InvalidParams,
    NotSent,
    OutcomeUnknown,
    ReferenceInvalid,
    ReferenceLimit,
    ReferenceNotFound,
    RpcError,
)
from wirecall.server.references import LIMITS
from wirecall.testing import Faults

FORMS = pytest.mark.parametrize("references", [True, False], ids=["array", "waves"])


class Shop:
    """An app with an order, a command that charges it, and what it was charged."""

    def __init__(self, **options: Any) -> None:
        self.app = App("shop", **options)
        self.charged: list[tuple[int, int]] = []
        self.cents = 500

        @self.app.query
        def find_order(customer: str) -> dict[str, Any]:
            order = {"id": 7, "total": self.cents, "tags": ["a", "b"]}
            return {"orders": [order, {"id": 8, "total": 1, "tags": ["c"]}]}

        @self.app.command
        async def charge(order: int, cents: int) -> str:
            self.charged.append((order, cents))
            return f"charged {cents} for {order}"

        @self.app.query
        def receipt(order: int) -> str:
            return f"receipt of {order}"

        @self.app.query
        def echo(value: Any = None, other: Any = None) -> Any:
            return value

        @self.app.query
        def large(size: int) -> str:
            return "x" * size

        @self.app.query
        def fails() -> None:
            raise DomainError(40001, "it fails")

        @self.app.query
        def unclear() -> None:
            raise OutcomeUnknown(ran="unknown")

        @self.app.query(notification_allowed=True)
        def note(text: Any = None) -> None: ...


def sent_by(client: Any) -> list[Any]:
    """Return the list of the messages that a client will send, decoded."""
    messages: list[Any] = []
    link = client._delivery.link
    exchange_of = link.exchange

    async def watch(exchange: Exchange) -> None:
        messages.append(msgspec.json.decode(exchange.data))
        await exchange_of(exchange)

    link.exchange = watch
    return messages


# --- what a batch does ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("references", "wire", "reason", "messages"),
    [
        (True, "array", "the server resolves references", 1),
        (False, "waves(3)", "the server does not resolve references", 3),
    ],
)
async def test_batch_takes_parts_of_earlier_results(
    references: bool, wire: str, reason: str, messages: int
) -> None:
    """R1, R12."""
    shop = Shop(references=references)
    async with connect(shop.app) as client:
        sent = sent_by(client)
        async with client.batch() as batch:
            order = batch.call("find_order", {"customer": "ada"})
            cents = order.ref("/orders/0/total")
            paid = batch.call("charge", {"order": order.ref("/orders/0/id"), "cents": cents})
            letter = batch.call("receipt", {"order": order.ref("/orders/0/id")}, after=[paid])
            tags = batch.rpc.echo(value=order.ref("/orders/*/tags"))
            nested = batch.call("echo", {"value": {"in": [{"id": order.ref("/orders/1/id")}]}})
            whole = batch.call("echo", {"value": paid.ref()})
    assert (batch.wire, batch.reason) == (wire, reason)
    assert len(sent) == messages
    assert paid.result() == whole.result() == "charged 500 for 7"
    assert letter.result() == "receipt of 7"
    assert tags.result() == ["a", "b", "c"]
    assert nested.result() == {"in": [{"id": 8}]}
    assert shop.charged == [(7, 500)]


@FORMS
async def test_batch_fills_items_of_an_array_in_waves(references: bool) -> None:
    """R2: `refs` names members of objects only, so the client fills the item itself."""
    async with connect(Shop(references=references).app) as client, client.batch() as batch:
        order = batch.call("find_order", {"customer": "ada"})
        ids = [order.ref("/orders/0/id"), 5, order.ref("/orders/1/id")]
        listed = batch.call("echo", {"value": ids})
    assert batch.wire == "waves(2)"
    assert listed.result() == [7, 5, 8]


@FORMS
def test_sync_batch_takes_references(references: bool) -> None:
    """R12."""
    with connect_sync(Shop(references=references).app) as client, client.batch() as batch:
        order = batch.call("find_order", {"customer": "ada"})
        paid = batch.call("charge", {"order": order.ref("/orders/0/id"), "cents": 3})
        last = batch.call("receipt", {"order": 1}, after=[paid])
    assert paid.result() == "charged 3 for 7"
    assert last.ok


@pytest.mark.parametrize("only_after", [False, True], ids=["refs", "after"])
@pytest.mark.parametrize("form", ["array", "waves", "singles"])
async def test_all_small_graphs_have_the_answers_of_the_oracle(form: str, only_after: bool) -> None:
    """R3, R5, R6: equal answers and errors in both forms, also in waves of single calls."""
    app = summing_app(references=form == "array")
    async with connect(app) as client:
        client.arrays.legal = form != "singles"
        for graph in graphs(4):
            for failing in range(-1, len(graph)):
                async with client.batch() as batch:
                    entries = add_graph(
                        batch, graph, failing, call=batch.call, only_after=only_after
                    )
                found = observed(entries, lambda entry: entry.result()["sum"])
                assert found == expected(graph, failing, only_after=only_after), graph


async def test_waves_keep_the_order_of_commands() -> None:
    """R5: a command without references waits for the command before it."""
    shop = Shop()
    async with connect(shop.app) as client, client.batch() as batch:
        order = batch.call("find_order", {"customer": "ada"})
        batch.call("charge", {"order": order.ref("/orders/0/id"), "cents": 1})
        batch.call("charge", {"order": 9, "cents": 2})
    assert batch.wire == "waves(2)"
    assert shop.charged == [(7, 1), (9, 2)]


async def test_waves_keep_the_digits_of_numbers() -> None:
    """R8: the value is cut out of the bytes of the result."""
    number = b"1.2300000000000000000000000001e5"

    def behave(message: Any) -> bytes:
        if isinstance(message, list):
            message = message[0]
        return http(b'{"jsonrpc":"2.0","id":%d,"result":{"n":%b}}' % (message["id"], number))

    bodies: list[bytes] = []

    def watch(link: Link) -> Link:
        class Watched:
            open = link.open
            aclose = link.aclose

            async def exchange(self, exchange: Exchange) -> None:
                bodies.append(exchange.data)
                await link.exchange(exchange)

        return Watched()

    async with (
        Peer(answers(behave)) as peer,
        connect(peer.url, discover=False, wrap=watch) as client,
        client.batch() as batch,
    ):
        first = batch.call("x")
        batch.call("y", {"n": first.ref("/n")})
    assert b'"n":%b' % number in bodies[-1]


async def test_batch_longer_than_an_array_is_sent_in_waves() -> None:
    shop = Shop(references=True)
    async with connect(shop.app) as client:
        client.arrays.chunk = 3
        async with client.batch() as batch:
            order = batch.call("find_order", {"customer": "ada"})
            entries = [batch.call("receipt", {"order": order.ref("/orders/0/id")})] * 1
            entries += [batch.call("receipt", {"order": n}) for n in range(4)]
    assert batch.wire == "waves(2)"
    assert batch.reason == "the server takes 3 entries in an array"
    assert [entry.result() for entry in entries] == [f"receipt of {n}" for n in (7, 0, 1, 2, 3)]


async def test_batch_over_http_learns_from_the_description() -> None:
    """R12: `rpc.discover` announces references, and so does `OPTIONS`."""
    shop = Shop(references=True)
    async with served(shop.app) as url:
        for discover, wire in ((True, "array"), (False, "waves(2)")):
            async with connect(f"{url}/rpc", discover=discover) as client:
                async with client.batch() as batch:
                    order = batch.call("find_order", {"customer": "ada"})
                    letter = batch.call("receipt", {"order": order.ref("/orders/0/id")})
                assert (batch.wire, letter.result()) == (wire, "receipt of 7")


@FORMS
async def test_type_of_the_caller_does_not_change_what_dependants_get(references: bool) -> None:
    async with connect(Shop(references=references).app) as client, client.batch() as batch:
        order = batch.call("find_order", {"customer": "ada"}, type=int)
        letter = batch.call("receipt", {"order": order.ref("/orders/0/id")})
    assert not order.ok
    assert letter.result() == "receipt of 7"


# --- bad input ------------------------------------------------------------------------------------


def later(batch: Any, params: dict[str, Any]) -> None:
    params["value"] = batch.call("echo").ref()


def itself(batch: Any, params: dict[str, Any]) -> None:
    params["value"] = batch.entries[-1].ref()


@FORMS
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (later, 'the entry "3 (echo)" comes later'),
        (itself, 'the entry "2 (echo)" refers to itself'),
    ],
)
async def test_reference_to_an_entry_that_is_not_earlier_is_invalid(
    references: bool, change: Callable[[Any, dict[str, Any]], None], reason: str
) -> None:
    """R3: params that the program changes after it has added the call."""
    async with connect(Shop(references=references).app) as client, client.batch() as batch:
        other = batch.call("echo", {"value": 1})
        params: dict[str, Any] = {}
        wrong = batch.call("echo", params)
        change(batch, params)
        hurt = batch.call("echo", after=[wrong])
    assert isinstance(wrong.error, ReferenceInvalid)
    assert reason in wrong.error.data["reason"]
    assert isinstance(hurt.error, RpcError)
    assert hurt.error.data["type"] == "dependency_failed"
    assert (hurt.error.data["id"], hurt.error.data["code"]) == (wrong.id, -32602)
    assert other.result() == 1


@FORMS
@pytest.mark.parametrize("notation", ["ref", "after", "ref alone"])
async def test_reference_to_an_entry_of_another_batch_is_invalid(
    references: bool, notation: str
) -> None:
    """R3: also if no other entry of the batch has references."""
    async with connect(Shop(references=references).app) as client:
        async with client.batch() as first:
            foreign = first.call("echo", {"value": 1})
        async with client.batch() as batch:
            own = batch.call("echo", {"value": 2})
            if notation == "after":
                wrong = batch.call("echo", after=[foreign])
            else:
                wrong = batch.call("echo", {"value": [foreign.ref()]})
            if notation != "ref alone":
                batch.call("echo", after=[own])
        assert isinstance(wrong.error, ReferenceInvalid)
        assert wrong.error.ran == "no"
        assert "of another batch" in wrong.error.data["reason"]
        assert own.result() == 2
        with pytest.raises(ReferenceInvalid, match="of another batch"):
            await client.call("echo", {"value": foreign.ref()})


@FORMS
async def test_reference_into_an_error_or_to_nothing_has_its_own_error(references: bool) -> None:
    """R6."""
    async with connect(Shop(references=references).app) as client, client.batch() as batch:
        order = batch.call("find_order", {"customer": "ada"})
        nothing = batch.call("echo", {"value": order.ref("/orders/2/id")})
        failed = batch.call("fails")
        hurt = batch.call("echo", {"value": failed.ref("/x")})
        chained = batch.call("echo", after=[hurt])
        unclear = batch.call("unclear")
        waiting = batch.call("echo", {"value": unclear.ref()})
        fine = batch.call("echo", {"value": 1}, after=[order])
    assert isinstance(nothing.error, ReferenceNotFound)
    assert (nothing.error.data["id"], nothing.error.data["path"]) == (order.id, "/orders/2/id")
    for entry in (hurt, chained):
        assert isinstance(entry.error, RpcError)
        assert (entry.error.code, entry.error.data["id"]) == (42410, failed.id)
        assert (entry.error.data["code"], entry.error.ran) == (40001, "no")
    assert isinstance(waiting.error, DependencyUnknown)
    assert fine.result() == 1


@pytest.mark.parametrize("path", ["orders", "/~2", 5])
async def test_ref_refuses_what_is_not_a_pointer(path: Any) -> None:
    """R1."""
    async with connect(Shop().app) as client:
        batch = client.batch()
        entry = batch.call("echo")
        with pytest.raises(UsageError, match="JSON Pointer"):
            entry.ref(path)


async def test_notifications_take_no_part_in_references() -> None:
    """R4."""
    async with connect(Shop().app) as client, client.batch() as batch:
        entry = batch.call("echo", {"value": 1})
        told = batch.notify("note", {"text": entry.ref()})
        with pytest.raises(UsageError, match="a notification has no result"):
            batch.notify("note").ref()
        with pytest.raises(UsageError, match="after= has a notification"):
            batch.call("echo", after=[told])
        wrong: Any = "first"
        with pytest.raises(UsageError, match="after= has str"):
            batch.call("echo", after=[wrong])
    assert isinstance(told.error, ReferenceInvalid)
    assert entry.result() == 1


@FORMS
async def test_references_need_params_by_name(references: bool) -> None:
    """R2."""
    async with connect(Shop(references=references).app) as client, client.batch() as batch:
        entry = batch.call("echo", {"value": 1})
        wrong = batch.call("echo", [entry.ref()])
    assert isinstance(wrong.error, ReferenceInvalid)
    assert "by name" in wrong.error.data["reason"]


@FORMS
async def test_references_have_the_limits_of_the_server(references: bool) -> None:
    """R4."""
    async with connect(Shop(references=references).app) as client, client.batch() as batch:
        first = batch.call("echo", {"value": list(range(LIMITS.values + 1))})
        many = {f"v{number}": first.ref() for number in range(LIMITS.refs + 1)}
        wrong = [
            batch.call("echo", {"value": many}),
            batch.call("echo", after=[first] * (LIMITS.after + 1)),
            batch.call("echo", {"value": first.ref("/*")}),
        ]
        last = first
        for _ in range(LIMITS.depth + 1):
            last = batch.call("echo", after=[last])
        big = batch.call("large", {"size": 200 << 10})
        wrong += [last, batch.call("echo", {"value": big.ref(), "other": big.ref()})]
        many_big = [batch.call("echo", {"value": big.ref()}) for _ in range(6)]
    found = [
        entry.error.data["limit"] for entry in wrong if isinstance(entry.error, ReferenceLimit)
    ]
    assert found == ["refs", "after", "values", "depth", "entry_bytes"]
    beyond = [entry.error for entry in many_big if entry.error is not None]
    assert [error.data["limit"] for error in beyond if isinstance(error, ReferenceLimit)] == [
        "batch_bytes"
    ]


@FORMS
async def test_target_that_cannot_be_written_fails_its_dependants(references: bool) -> None:
    async with connect(Shop(references=references).app) as client, client.batch() as batch:
        bad = batch.call("echo", {"value": object()})
        hurt = batch.call("echo", {"value": bad.ref()})
        good = batch.call("echo", {"value": 1})
    assert isinstance(bad.error, NotSent)
    assert isinstance(hurt.error, RpcError)
    assert (hurt.error.data["type"], hurt.error.data["id"]) == ("dependency_failed", bad.id)
    assert good.result() == 1


async def test_params_that_contain_themselves_are_refused() -> None:
    endless: dict[str, Any] = {}
    endless["value"] = endless
    async with connect(Shop().app) as client, client.batch() as batch:
        bad = batch.call("echo", endless)
        batch.call("echo", after=[bad])
    assert isinstance(bad.error, NotSent)


# --- sending again --------------------------------------------------------------------------------


@FORMS
async def test_lost_batch_is_sent_again_and_charges_once(references: bool) -> None:
    """R9, R10: with references, the same keys and new ids."""
    shop = Shop(references=references)
    faults = Faults(drop_reply=1)
    async with testing.client(shop.app, faults=faults, clock=testing.FakeClock()) as client:
        sent = sent_by(client)
        async with client.batch() as batch:
            order = batch.call("find_order", {"customer": "ada"})
            cents = order.ref("/orders/0/total")
            paid = batch.call("charge", {"order": order.ref("/orders/0/id"), "cents": cents})
    assert shop.charged == [(7, 500)]
    assert paid.result() == "charged 500 for 7"
    assert paid.replayed == references
    if references:
        keys = [message[1]["params"]["idempotency_key"] for message in sent]
        assert keys == [paid.key] * 2
        assert all(message[1]["refs"] for message in sent)
        ids = [entry["id"] for message in sent for entry in message]
        assert len(set(ids)) == len(ids)


async def test_command_whose_target_is_not_sent_again_is_unknown() -> None:
    """R10: a query that loses two connections is not sent again, so its dependant is not either."""
    shop = Shop(references=True)
    faults = Faults(drop_reply=2)
    async with testing.client(shop.app, faults=faults, clock=testing.FakeClock()) as client:
        async with client.batch() as batch:
            order = batch.call("find_order", {"customer": "ada"})
            paid = batch.call("charge", {"order": order.ref("/orders/0/id"), "cents": 5})
        assert isinstance(order.error, ConnectionLost)
    assert isinstance(paid.error, OutcomeUnknown)
    assert shop.charged == [(7, 5)]


class Changing:
    """A link to one app after another: each answer of an app but the last is lost."""

    def __init__(self, link: Link, *apps: App, loses: bool = True) -> None:
        self.open = link.open
        self.aclose = link.aclose
        self._apps = list(apps)
        self._loses = loses
        self.messages: list[Any] = []

    async def exchange(self, exchange: Exchange) -> None:
        self.messages.append(msgspec.json.decode(exchange.data))
        app = self._apps[0]
        exchange.sent = True
        replayed: list[Any] = []
        reply = await app.handle(exchange.data, replayed=replayed)
        if len(self._apps) > 1:
            del self._apps[0]
            if self._loses:
                raise ConnectionLost("the answer was lost")
        if reply is not None:
            exchange.read(reply)
            exchange.replayed(replayed)


async def test_server_that_loses_the_feature_leaves_keys_unknown(tmp_path: Path) -> None:
    """R10: no guess about a command that may have run; the rest is answered."""
    ledger = f"sqlite:{tmp_path}/ledger"
    before = Shop(references=True, ledger=ledger)
    after = Shop(ledger=ledger)
    links: list[Changing] = []

    def wrap(link: Link) -> Link:
        links.append(Changing(link, before.app, after.app))
        return links[0]

    async with testing.client(before.app, wrap=wrap, clock=testing.FakeClock()) as client:
        async with client.batch() as batch:
            order = batch.call("find_order", {"customer": "ada"})
            paid = batch.call("charge", {"order": order.ref("/orders/0/id"), "cents": 5})
            letter = batch.call("receipt", {"order": order.ref("/orders/0/id")})
            plain = batch.call("charge", {"order": 1, "cents": 1})
            last = batch.call("receipt", {"order": 2}, after=[paid])
        async with client.batch() as again:
            order = again.call("find_order", {"customer": "ada"})
            again.call("receipt", {"order": order.ref("/orders/0/id")})
    assert isinstance(paid.error, OutcomeUnknown)
    assert paid.error.ran == "unknown"
    assert "does not resolve references any more" in paid.error.data["reason"]
    assert letter.result() == "receipt of 7"
    assert plain.replayed and plain.result() == "charged 1 for 1"
    assert isinstance(last.error, DependencyUnknown)
    assert (before.charged, after.charged) == ([(7, 5), (1, 1)], [])
    assert again.wire == "waves(2)"
    await before.app.aclose()
    await after.app.aclose()


async def test_server_without_the_announced_feature_gets_waves() -> None:
    """R10: nothing ran with references, so the client may change the form."""
    shop = Shop()
    announced = Shop(references=True)
    links: list[Changing] = []

    def wrap(link: Link) -> Link:
        links.append(Changing(link, shop.app))
        return links[0]

    async with testing.client(announced.app, wrap=wrap) as client, client.batch() as batch:
        order = batch.call("find_order", {"customer": "ada"})
        paid = batch.call("charge", {"order": order.ref("/orders/0/id"), "cents": 5})
        letter = batch.call("receipt", {"order": 3}, after=[paid])
    assert paid.result() == "charged 5 for 7"
    assert letter.result() == "receipt of 3"
    assert shop.charged == [(7, 5)]
    assert batch.wire == "waves(2)"
    assert len(links[0].messages) == 3


async def test_refused_array_with_references_is_sent_in_waves() -> None:
    def behave(message: Any) -> bytes:
        if isinstance(message, list):
            error = b'{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"no arrays"}}'
            return http(error)
        if message["method"] == "rpc.discover":
            return http(msgspec.json.encode(ok(message["id"], {"x-wirecall": {"references": 1}})))
        return http(msgspec.json.encode(ok(message["id"], message.get("params"))))

    async with Peer(answers(behave)) as peer, connect(peer.url) as client, client.batch() as batch:
        first = batch.call("x", {"n": 1})
        second = batch.call("y", {"m": first.ref("/n")})
    assert batch.wire == "waves(2)"
    assert second.result() == {"m": 1}


@FORMS
async def test_dependant_is_sent_again_with_a_target_that_was_busy(references: bool) -> None:
    """R6: a failure that a retry cures is not passed on."""
    app = App("busy", references=references)
    tries: list[int] = []

    @app.query
    def first() -> int:
        tries.append(1)
        if len(tries) < 3:
            raise Busy(ran="no", retry_after_ms=1)
        return 5

    @app.command(key="required")
    def second(value: int) -> int:
        return value

    async with testing.client(app, clock=testing.FakeClock()) as client, client.batch() as batch:
        one = batch.call("first")
        two = batch.call("second", {"value": one.ref()}, key=False)
        three = batch.call("second", {"value": one.ref()})
    assert (one.result(), three.result()) == (5, 5)
    assert len(tries) == 3
    # It has no key, and the server refuses it. It had not run when its target was busy.
    assert isinstance(two.error, InvalidParams)


async def test_dependants_of_a_target_that_stays_busy_fail() -> None:
    """R6."""
    app = App("busy", references=True)

    @app.query
    def first() -> int:
        raise Busy(ran="no", retry_after_ms=1)

    @app.query
    def second(value: int) -> int:
        return value

    async with testing.client(app, clock=testing.FakeClock()) as client, client.batch() as batch:
        one = batch.call("first")
        two = batch.call("second", {"value": one.ref()})
    assert isinstance(one.error, Busy)
    assert isinstance(two.error, RpcError)
    assert (two.error.data["type"], two.error.data["code"]) == ("dependency_failed", 42910)


async def test_reachless_server_fails_targets_and_dependants() -> None:
    """R6: in waves the dependant says that its target was not sent."""
    app = Shop().app
    faults = Faults(cut_after=0)
    clock = testing.FakeClock()
    async with (
        testing.client(app, faults=faults, clock=clock, timeout=2) as client,
        client.batch() as batch,
    ):
        one = batch.call("find_order", {"customer": "ada"})
        two = batch.call("receipt", {"order": one.ref("/orders/0/id")})
    assert isinstance(one.error, NotSent)
    assert isinstance(two.error, RpcError)
    assert (two.error.data["type"], two.error.data["code"]) == ("dependency_failed", None)
    assert two.error.ran == "no"

"""`App.configure`, by which the command line replaces what an app says about itself."""

import json

import pytest

from wirecall import App, Limits, UsageError

CALL = b'{"jsonrpc":"2.0","method":"one","id":1}'


def app() -> App:
    made = App("a")

    @made.query
    def one() -> int:
        return 1

    return made


def test_what_is_given_is_replaced_and_the_rest_stays() -> None:
    made = app()
    made.configure(limits=Limits(bytes_in=10))
    assert made.ledger_url == "memory:"
    assert json.loads(made.handle_sync(CALL) or b"")["error"]["data"]["limit"] == "bytes_in"
    made = app()
    made.configure(ledger="sqlite:x.db")
    assert made.ledger_url == "sqlite:x.db"


def test_after_the_first_call_it_is_too_late() -> None:
    made = app()
    made.handle_sync(CALL)
    with pytest.raises(UsageError, match="serving already"):
        made.configure(ledger="memory:")


def test_a_ledger_that_a_command_cannot_live_with_is_refused() -> None:
    made = App("a", ledger="sqlite:x.db")

    @made.command(on_crash="transactional")
    def write() -> None: ...

    with pytest.raises(UsageError, match="shares transactions"):
        made.configure(ledger="memory:")
    with pytest.raises(UsageError, match="not the URL of a ledger"):
        made.configure(ledger="nowhere")

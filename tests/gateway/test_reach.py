"""How a server behind the gateway is reached: greetings that fail, and what is up by then."""

from pathlib import Path

import pytest

from tests.client.conftest import nothing_is_left as nothing_is_left
from tests.gateway.faulty import called, faulty
from tests.gateway.fronts import introduction, message_of

HELLO = message_of("initialize", introduction(), 1)


@pytest.mark.parametrize(
    ("greeting", "words"),
    [
        ("code -32603", "theirs"),
        ("status 500", "500"),
        ("reset", "connection"),
        ("mute", "did not answer initialize within 0.1 s"),
    ],
)
async def test_command_in_front_of_a_server_that_refuses_another_session_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, greeting: str, words: str
) -> None:
    """G6: the session is gone, and the greeting of the next one is no answer to the command."""
    monkeypatch.setattr("wirecall.gateway.upstream.ATTEMPT_PAUSE", 0.0)
    async with faulty(tmp_path) as (bench, server, session):
        monkeypatch.setattr("wirecall.gateway.session.START_TIME", 0.1)
        server.session, server.greeting = "2", greeting
        error = (await called(bench, session, "pay", "done"))["error"]
        assert (error["code"], error["data"]["ran"]) == (50210, "no"), error
        assert words in error["message"].lower()
        monkeypatch.setattr("wirecall.gateway.session.START_TIME", 60.0)
        server.greeting = ""
        assert "result" in await called(bench, session, "pay", "done")
        assert server.calls == ["pay"]

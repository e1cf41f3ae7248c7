"""`wirecall ledger accept`: an operator accepts a store that servers doubt."""

import asyncio
import json
import shlex
from pathlib import Path

import pytest

from tests.cli import invoke
from tests.ledger import ID, PRINT
from wirecall.audit import verify
from wirecall.ledger.base import RecordId, State, open_ledger
from wirecall.ledger.identity import Doubt, Identity, Lost, identity_of, new_identity, report

REASON = "the backup of 03:00 was restored"
OTHER = RecordId("", "pay", "key 2")


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a ledger that one server doubts; wirecall.toml names it, and a trail."""
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:{tmp_path}/ledger.db"
    text = f'[ledger]\nurl = "{url}"\n[audit]\nfile = "{tmp_path}/audit.jsonl"\n'
    (tmp_path / "wirecall.toml").write_text(text)
    asyncio.run(doubt(url))
    return url


async def doubt(url: str) -> None:
    ledger = await open_ledger(url)
    identity = identity_of((await ledger.see(new_identity())).identity)
    assert identity is not None
    lost = (Lost(ID, PRINT), Lost(OTHER, PRINT))
    met = f"identity {identity.name}, epoch 0"
    doubt = Doubt(
        "other", "identity gone, epoch 0", met, "gone", identity.name, 0, lost, "web-1 process 7"
    )
    await report(ledger, "a", doubt)
    await ledger.aclose()


def state_of(url: str, id: RecordId) -> State | None:
    async def look() -> State | None:
        ledger = await open_ledger(url)
        record = await ledger.get(id)
        await ledger.aclose()
        return None if record is None else record.state

    return asyncio.run(look())


def identity(url: str) -> Identity | None:
    async def look() -> Identity | None:
        ledger = await open_ledger(url)
        seen = await ledger.see()
        await ledger.aclose()
        return identity_of(seen.identity)

    return asyncio.run(look())


def test_accept_prints_what_it_accepts_and_makes_lost_commands_unknown(url: str) -> None:
    done = invoke("ledger", "accept", url, "--reason", REASON, "--yes")
    assert done.exit_code == 0, done.output
    assert "web-1 process 7: expected identity gone, epoch 0; found identity" in done.stdout
    assert "charge key-1 --caller alice" in done.stdout
    assert "pay 'key 2'" in done.stdout
    assert state_of(url, ID) is state_of(url, OTHER) is State.UNKNOWN
    accepted = identity(url)
    assert accepted is not None
    assert (accepted.replaces, accepted.reason) == (("gone",), REASON)
    # The command that it prints shows them.
    (listing,) = [line for line in done.stdout.splitlines() if "wirecall ledger list" in line]
    words = shlex.split(listing[listing.index("wirecall") :])[1:]
    shown = invoke(*words)
    assert shown.exit_code == 0
    assert "key-1" in shown.stdout


def test_accept_adds_a_line_to_the_audit_trail(url: str, tmp_path: Path) -> None:
    assert invoke("ledger", "accept", "--reason", REASON, "--yes").exit_code == 0
    trail = tmp_path / "audit.jsonl"
    line = json.loads(trail.read_text())
    assert line["method"] == "wirecall.ledger.accept"
    assert line["outcome"] == "accepted"
    assert "@" in line["caller"]
    assert line["action"]["reason"] == REASON
    assert line["action"]["unknown"] == ["pay/key 2", "alice/charge/key-1"]
    assert verify(trail).ok
    assert "accepted" in invoke("audit", "list").stdout


def test_accept_of_a_ledger_that_no_server_doubts_changes_nothing(url: str) -> None:
    assert invoke("ledger", "accept", url, "--reason", REASON, "--yes").exit_code == 0
    before = identity(url)
    again = invoke("ledger", "accept", url, "--reason", REASON, "--yes", "--json")
    assert again.exit_code != 0
    assert json.loads(again.stdout)["error"]["type"] == "no_doubt"
    assert identity(url) == before


@pytest.mark.parametrize("words", [(), ("--reason", "x")])
def test_accept_needs_a_reason(url: str, words: tuple[str, ...]) -> None:
    refused = invoke("ledger", "accept", url, "--yes", *words)
    assert refused.exit_code != 0
    assert "--reason" in refused.output
    assert state_of(url, ID) is None


def test_accept_in_json_has_its_facts(url: str) -> None:
    done = invoke("ledger", "accept", url, "--reason", REASON, "--yes", "--json")
    facts = json.loads(done.stdout)["result"]
    assert facts["doubts"] == [{"kind": "other", "process": "web-1 process 7"}]
    assert [each["key"] for each in facts["unknown"]] == ["key 2", "key-1"]
    accepted = identity(url)
    assert accepted is not None
    assert (facts["identity"], facts["epoch"]) == (accepted.name, accepted.epoch)

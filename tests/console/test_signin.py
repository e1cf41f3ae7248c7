"""Requests that the console accepts: the link, both secrets of a session, Host, Origin, roles."""

import asyncio
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.console.browser import Console
from tests.console.requests import Browser
from tests.console.scripted import ScriptedSource
from tests.console.shop import servers
from wirecall.console.listener import POLICY, open_listener, shortened
from wirecall.console.signin import ATTEMPTS, LINK_LIFE, SESSION_LIFE, SignIn, TooMany
from wirecall.console.source import ListenerSettings
from wirecall.errors import UsageError


@pytest.fixture
def browser(console: Console) -> Browser:
    return Browser(console.url)


@pytest.fixture
def signed(browser: Browser, console: Console) -> Browser:
    assert browser.sign_in(console.link())[0] == 200
    return browser


def test_signin_link_works_once(browser: Browser, console: Console) -> None:
    link = console.link()
    status, fields, document = browser.sign_in(link)
    assert status == 200
    assert document["role"] == "act"
    cookie = fields["set-cookie"]
    port = console.url.rpartition(":")[2]
    assert cookie.startswith(f"wc_{port}=")
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and "Path=/" in cookie
    status, fields, document = browser.sign_in(link)
    assert status == 403
    assert document["error"]["type"] == "link"
    assert "set-cookie" not in fields


def test_signin_is_noted(browser: Browser, console: Console, source: ScriptedSource) -> None:
    link = console.link()
    browser.sign_in(link)
    browser.sign_in(link)
    assert [(action, outcome) for _, action, _, outcome in source.actions] == [
        ("sign in", "ok"),
        ("sign in", "refused"),
    ]


def test_signin_is_limited(browser: Browser, console: Console) -> None:
    statuses = [browser.sign_in("x#link=wrong")[0] for _ in range(ATTEMPTS + 1)]
    assert statuses == [403] * ATTEMPTS + [429]
    status, fields, _ = browser.sign_in(console.link())
    assert status == 429
    assert 0 < int(fields["retry-after"]) <= 61


def test_signin_prints_another_link(
    browser: Browser, console: Console, capfd: pytest.CaptureFixture[str]
) -> None:
    assert browser.ask("POST", "/session/link", {})[0] == 200
    line = capfd.readouterr().err.strip()
    assert line.startswith(f"Console: {console.url}/#link=")
    assert browser.sign_in(line)[0] == 200


REFUSED: dict[str, tuple[dict[str, str | None], int]] = {
    "no cookie": ({"Cookie": None}, 401),
    "no tab": ({"X_Wirecall_Tab": None}, 401),
    "other tab": ({"X_Wirecall_Tab": "x" * 43}, 401),
    "other host": ({"Host": "evil.example:8421"}, 403),
    "other site": ({"Sec_Fetch_Site": "cross-site"}, 403),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("path", ["/now.json", "/feed", "/audit.ndjson"])
def test_signin_reading_is_refused(signed: Browser, path: str, name: str) -> None:
    changed, expected = REFUSED[name]
    assert signed.ask("GET", "/now.json")[0] == 200
    status, fields, _ = signed.ask("GET", path, **changed)
    assert status == expected
    assert fields["content-security-policy"] == POLICY
    assert fields["x-content-type-options"] == "nosniff"


CHANGES: dict[str, tuple[dict[str, str | None], int]] = {
    **REFUSED,
    "foreign origin": ({"Origin": "https://evil.example"}, 403),
    "other port": ({"Origin": "http://127.0.0.1:1"}, 403),
    "no origin": ({"Origin": None}, 403),
    "no site": ({"Sec_Fetch_Site": None}, 403),
    "simple form": ({"Content_Type": "text/plain"}, 415),
}


@pytest.mark.parametrize("name", CHANGES)
def test_signin_changing_is_refused(signed: Browser, source: ScriptedSource, name: str) -> None:
    changed, expected = CHANGES[name]
    body = {"params": "{}", "key": None}
    status, fields, _ = signed.ask("POST", "/methods/price/try", body, **changed)
    assert status == expected
    assert fields["content-security-policy"] == POLICY
    assert source.attempts == []
    assert signed.ask("POST", "/methods/price/try", body)[0] == 200
    assert len(source.attempts) == 1


def test_console_refuses_a_body_in_its_own_words(signed: Browser) -> None:
    status, _, document = signed.ask("POST", "/methods/price/try", {}, Content_Type="text/plain")
    assert status == 415
    assert document["error"]["type"] == "request"
    assert document["error"]["message"].startswith("Content-Type: expected application/json")
    status, fields, document = signed.ask("POST", "/capture", {"fill": "x" * (2 << 20)})
    assert (status, document["error"]["type"]) == (413, "request")
    assert fields["x-content-type-options"] == "nosniff"


def test_signin_get_changes_nothing(signed: Browser, source: ScriptedSource) -> None:
    assert signed.ask("GET", "/methods/price/try")[2].startswith(b"<!doctype html>")
    assert signed.ask("GET", "/session/end")[0] == 404
    assert source.attempts == []


def test_signin_ends(signed: Browser) -> None:
    assert signed.ask("POST", "/session/end", {})[0] == 200
    assert signed.ask("GET", "/now.json")[0] == 401


@pytest.mark.parametrize("path", ["/", "/calls", "/ledger/x", "/now.json", "/nowhere"])
def test_console_answers_carry_the_policy(browser: Browser, path: str) -> None:
    _, fields, _ = browser.ask("GET", path)
    policy = fields["content-security-policy"].split("; ")
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "require-trusted-types-for 'script'" in policy
    assert "trusted-types lit-html" in policy
    assert "frame-ancestors 'none'" in policy
    assert fields["x-content-type-options"] == "nosniff"
    assert fields["referrer-policy"] == "no-referrer"
    assert fields["cache-control"] == "no-store"
    assert fields["cross-origin-opener-policy"] == "same-origin"
    assert fields["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in fields


def test_console_files_are_kept_and_compressed(browser: Browser) -> None:
    page = browser.ask("GET", "/")[2].decode()
    address = page.partition('script type="module" src="')[2].partition('"')[0]
    status, fields, plain = browser.ask("GET", address)
    assert status == 200
    assert "immutable" in fields["cache-control"]
    _, fields, packed = browser.ask("GET", address, Accept_Encoding="gzip")
    assert fields["content-encoding"] == "gzip"
    assert gzip.decompress(packed) == plain
    assert browser.ask("GET", address.replace("app.js", "../listener.py"))[0] == 404


@pytest.fixture
def readonly(source: ScriptedSource) -> Iterator[Browser]:
    with Console(source, readonly=True) as made:
        browser = Browser(made.url)
        assert browser.sign_in(made.link())[2]["role"] == "look"
        yield browser


def test_console_readonly_refuses_actions(readonly: Browser, source: ScriptedSource) -> None:
    record = next(iter(source.records))
    paths = ("/methods/price/try", f"/ledger/{record}/resolve", "/capture")
    for path in (*paths, "/upstreams/github/probe"):
        status, _, document = readonly.ask("POST", path, {})
        assert (status, document["error"]["type"]) == (403, "role"), path
    assert readonly.ask("GET", "/calls.json")[0] == 200


def test_console_readonly_shortens_callers_and_keys(readonly: Browser) -> None:
    rows = readonly.ask("GET", "/calls.json")[2]["rows"]
    keys = {row["key"] for row in rows if row["method"] == "invoice"}
    assert keys == {"ord…ice"}
    assert shortened({"caller": "a long name", "x": [{"key": "short"}]}) == {
        "caller": "a l…ame",
        "x": [{"key": "short"}],
    }


def test_console_readonly_exports_and_shows_no_whole_key(readonly: Browser) -> None:
    exported = readonly.ask("GET", "/audit.ndjson?filter=order-12")[2]
    (line,) = map(json.loads, exported.splitlines())
    assert line["key"] == "ord…-12"
    page = readonly.ask("GET", "/calls/a1b2c3-49.json")[2]
    assert page["row"]["key"] == "ord…ice"
    assert "order-7-invoice" not in json.dumps(page)


def test_console_export_has_the_bytes_of_the_trail(signed: Browser, source: ScriptedSource) -> None:
    status, fields, exported = signed.ask("GET", "/audit.ndjson")
    assert (status, fields["content-type"]) == (200, "application/x-ndjson")
    assert fields["content-disposition"] == 'attachment; filename="audit.jsonl"'
    assert fields["cache-control"] == "no-store"
    assert [json.loads(line) for line in exported.splitlines()] == source.trail
    assert source.actions[-1][1:] == ("export", "audit", "ok")
    source.trail.clear()
    status, _, document = signed.ask("GET", "/audit.ndjson")
    assert (status, document["error"]["type"]) == (404, "not_found")


def test_console_probe_of_an_upstream_is_noted(signed: Browser, source: ScriptedSource) -> None:
    source.servers = servers()
    status, _, document = signed.ask("POST", "/upstreams/calendar/probe", {})
    assert status == 200 and not document["ok"]
    assert source.actions[-1][1:] == ("probe", "calendar", "ok")
    assert signed.ask("POST", "/upstreams/nothing/probe", {})[0] == 404


def test_console_numbers_in_addresses_are_checked(signed: Browser) -> None:
    status, _, document = signed.ask("GET", "/calls.json?limit=many")
    assert status == 400
    assert document["error"]["message"] == "limit: expected a number up to 1000, got 'many'"
    assert len(signed.ask("GET", "/calls.json?limit=3")[2]["rows"]) == 3


def test_console_twin_of_every_page(signed: Browser, source: ScriptedSource) -> None:
    record = next(iter(source.records))
    source.servers = servers()
    for path in (
        *(
            "/now",
            "/calls",
            "/calls/a1b2c3-3",
            "/batches/a1b2c3-B4",
            "/ledger",
            f"/ledger/{record}",
        ),
        *("/methods", "/methods/charge", "/methods/charge/try", "/audit", "/settings"),
        *("/upstreams", "/upstreams/github"),
    ):
        status, fields, document = signed.ask("GET", f"{path}.json")
        assert (status, fields["content-type"]) == (200, "application/json"), path
        assert isinstance(document, dict), path
    assert signed.ask("GET", "/calls/none.json")[0] == 404
    assert signed.ask("GET", "/calls.json?filter=metod:x")[0] == 400


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7", "example.com"])
async def test_console_refuses_other_addresses(host: str) -> None:
    with pytest.raises(UsageError, match=r"expected 127\.0\.0\.1 or ::1"):
        await open_listener(ScriptedSource(), ListenerSettings(host=host, port=0))


async def test_console_stops_with_an_open_feed() -> None:
    source = ScriptedSource()
    listener = await open_listener(source, ListenerSettings(port=0))
    port = int(listener.url.rpartition(":")[2])
    opened = listener.signin.open(listener.link().partition("=")[2])
    assert opened is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"GET /feed HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: wc_{port}={opened.cookie}\r\n"
        f"X-Wirecall-Tab: {opened.tab}\r\n\r\n".encode()
    )
    async with asyncio.timeout(60):
        assert b" 200 " in await reader.readuntil(b"\r\n")
        await source.watched.wait()
        await listener.aclose()
        assert b'event: end\ndata: {"reason":"stopping"}' in await reader.read()
    writer.close()
    assert source.watchers == 0


# --- the secrets alone ----------------------------------------------------------------------------


@pytest.fixture
def clock() -> Callable[..., float]:
    now = [1000.0]

    def read(add: float = 0.0) -> float:
        now[0] += add
        return now[0]

    return read


def test_signin_link_is_over_after_a_minute(clock: Callable[..., float]) -> None:
    signin = SignIn(clock)
    link = signin.link("act")
    clock(LINK_LIFE + 1)
    assert signin.open(link) is None


def test_signin_session_is_over_after_its_time(clock: Callable[..., float]) -> None:
    signin = SignIn(clock)
    opened = signin.open(signin.link("look"))
    assert opened is not None
    assert signin.find(opened.cookie, opened.tab) is opened.session
    assert signin.find(opened.cookie, opened.cookie) is None
    clock(SESSION_LIFE + 1)
    assert signin.find(opened.cookie, opened.tab) is None


def test_signin_secrets_of_two_sessions_do_not_mix(clock: Callable[..., float]) -> None:
    signin = SignIn(clock)
    one = signin.open(signin.link("act"))
    other = signin.open(signin.link("act"))
    assert one is not None and other is not None
    assert signin.find(one.cookie, other.tab) is None


def test_signin_session_outlives_the_process(tmp_path: Path) -> None:
    file = tmp_path / "sessions"
    signin = SignIn(file=str(file))
    opened = signin.open(signin.link("act"))
    assert opened is not None
    assert file.stat().st_mode & 0o077 == 0
    assert opened.cookie not in file.read_text()
    later = SignIn(file=str(file))
    found = later.find(opened.cookie, opened.tab)
    assert found == opened.session
    later.close(found)
    assert SignIn(file=str(file)).find(opened.cookie, opened.tab) is None
    file.write_text("[torn")
    assert SignIn(file=str(file)).find(opened.cookie, opened.tab) is None


def test_signin_attempts_are_possible_again_after_a_minute(clock: Callable[..., float]) -> None:
    signin = SignIn(clock)
    for _ in range(ATTEMPTS):
        signin.attempt()
    with pytest.raises(TooMany):
        signin.attempt()
    clock(61)
    signin.attempt()

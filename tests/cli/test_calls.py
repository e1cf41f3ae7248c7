"""`list`, `show` and `call` on an app in a file, by both protocols."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import HELLO, PATIENCE, SHOP, invoke, serving, wirecall
from wirecall.cli.failures import Exit

ODD = '''
from wirecall import App, Context, DomainError, ToolAnnotations
from wirecall.mcp import Image, Text

app = App("odd")

@app.tool(annotations=ToolAnnotations(readOnlyHint=True))
def picture() -> list:
    """A picture and a word."""
    return [Text("look"), Image(b"123", "image/png")]

@app.tool
async def steps(ctx: Context) -> str:
    await ctx.progress(1, total=2, message="half")
    return "done"

@app.command(destructive=True)
def wipe(what: str) -> str:
    """Wipe something."""
    return f"{what} is gone"

@app.query
def broken() -> int:
    return 1 // 0

@app.query
def nothing() -> None:
    """Gives nothing."""

@app.query
def inner(place: dict[str, int], *, tags: list[str] = ["a"]) -> dict[str, object]:
    return {"place": place, "tags": tags}
'''


@pytest.fixture
def odd(tmp_path: Path) -> str:
    (tmp_path / "odd.py").write_text(ODD)
    return str(tmp_path / "odd.py")


def test_the_price_of_tea_from_a_shell() -> None:
    run = wirecall("call", SHOP, "price", "sku=tea", "--json")
    assert run.returncode == 0
    assert run.stdout == b'{"ok":true,"result":450,"method":"price","replayed":false}\n'
    assert run.stderr == b""


def test_for_people_the_payload_is_alone_on_stdout() -> None:
    run = wirecall("call", SHOP, "price", "sku=tea")
    assert run.stdout == b"450\n"
    assert "✓ price" in run.stderr.decode()


def test_marks_are_words_where_there_is_no_unicode() -> None:
    run = wirecall("call", SHOP, "price", "sku=tea", env={"PYTHONIOENCODING": "ascii"})
    assert run.stderr.startswith(b"ok price")


@pytest.mark.parametrize("protocol", ["rpc", "mcp"])
def test_both_protocols_give_the_same(protocol: str) -> None:
    for words, result in ((["price", "sku=tea"], 450), (["charge", "order=7", "cents=5"], {"order": "7", "paid": 5})):
        document = json.loads(invoke("call", SHOP, *words, "--as", protocol, "--json").stdout)
        assert document["result"] == result


@pytest.mark.parametrize("revision", ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28"])
def test_any_revision_can_be_asked_for(revision: str) -> None:
    document = json.loads(invoke("call", SHOP, "price", "sku=tea", "--revision", revision, "--json").stdout)
    assert (document["result"], document["revision"]) in ((450, revision), ("450", revision))


@pytest.mark.parametrize(
    ("words", "exit", "what", "why"),
    [
        (["prcie", "sku=tea"], 2, "There is no method or tool 'prcie'", "did you mean price?"),
        (["price", "skuu=tea"], 2, "There is no argument 'skuu'", "did you mean sku?"),
        (["price"], 2, "sku is missing", "text"),
        (["charge", "order=7", "cents=12.50"], 2, "cents must be a whole number", '"12.50"'),
        (["price", "sku=milk"], 5, "there is no article 'milk'", "4040"),
        (["charge", "order=7", "cents=99999"], 5, "not enough money", "4020"),
        (["price", "--args", "[1]"], 5, "Invalid params", "-32602"),
    ],
)
def test_mistakes_in_a_call_are_reported(words: list[str], exit: int, what: str, why: str) -> None:
    run = invoke("call", SHOP, *words)
    assert run.exit_code == exit
    assert what in run.stderr
    assert why in run.stderr
    document = json.loads(invoke("call", SHOP, *words, "--json").stdout)
    assert document["ok"] is False
    assert document["error"]["exit"] == exit


def test_a_handler_that_fails_is_the_servers_error(odd: str) -> None:
    run = wirecall("call", odd, "broken", "--json")
    assert run.returncode == Exit.REMOTE
    assert json.loads(run.stdout)["error"]["code"] == -32603
    assert b"ZeroDivisionError" in run.stderr  # the log of the app, which is ours to see


def test_results_of_all_kinds(odd: str) -> None:
    assert invoke("call", odd, "picture").stdout == "look\n[image/png, 3 bytes]\n"
    assert [block["type"] for block in json.loads(invoke("call", odd, "picture", "--json").stdout)["result"]] == [
        "text",
        "image",
    ]
    assert invoke("call", odd, "nothing").stdout == "null\n"
    run = invoke("call", odd, "inner", "place.x=1", "tags[]=b", "--json")
    assert json.loads(run.stdout)["result"] == {"place": {"x": 1}, "tags": ["b"]}
    assert "1 of 2  half" in invoke("call", odd, "steps").stderr


def test_all_arguments_at_once_and_by_position() -> None:
    run = wirecall("call", SHOP, "price", "--args", "-", "--json", stdin=b'{"sku": "coffee"}')
    assert json.loads(run.stdout)["result"] == 700
    assert invoke("call", HELLO, "sum", "--args", "[1, 2, 3]").stdout == "6\n"


# --- keys -----------------------------------------------------------------------------------------------------------


def test_a_key_makes_a_call_repeatable(tmp_path: Path) -> None:
    ledger = f"sqlite:{tmp_path / 'ledger.db'}"
    words = ["call", SHOP, "charge", "order=7", "cents=5", "--key", "k-1", "--ledger", ledger]
    first, second = wirecall(*words, "--json"), wirecall(*words)
    assert json.loads(first.stdout) == {
        "ok": True,
        "result": {"order": "7", "paid": 5},
        "method": "charge",
        "replayed": False,
        "key": "k-1",
    }
    assert second.returncode == 0
    assert "↻ charge" in second.stderr.decode()
    assert json.loads(second.stdout) == {"order": "7", "paid": 5}


def test_a_key_that_was_used_otherwise_is_refused(tmp_path: Path) -> None:
    words = ["call", SHOP, "charge", "order=7", "--key", "k-1", "--ledger", f"sqlite:{tmp_path / 'ledger.db'}"]
    assert invoke(*words, "cents=5").exit_code == 0
    run = invoke(*words, "cents=9", "--json")
    assert run.exit_code == Exit.KEY
    error = json.loads(run.stdout)["error"]
    assert (error["type"], error["ran"], error["key"]) == ("idempotency_key_conflict", "no", "k-1")
    assert "use a new key" in error["next"]


def test_a_generated_key_is_printed() -> None:
    run = invoke("call", SHOP, "charge", "order=7", "cents=5", "--key", "auto")
    assert "   key 0" in run.stderr
    assert len(json.loads(invoke("call", SHOP, "charge", "order=7", "cents=5", "--json").stdout)["key"]) == 36


def test_a_key_that_will_be_forgotten_is_warned_about() -> None:
    assert "forgets the key" in invoke("call", SHOP, "charge", "order=7", "cents=5", "--key", "k-1").stderr


def test_a_bad_key_is_not_sent() -> None:
    run = invoke("call", SHOP, "charge", "order=7", "cents=5", "--key", "two words")
    assert run.exit_code == Exit.USAGE
    assert "is not a key" in run.stderr


def test_a_query_has_no_key() -> None:
    assert "key" not in json.loads(invoke("call", SHOP, "price", "sku=tea", "--as", "mcp", "--json").stdout)


# --- destructive calls (T5) -----------------------------------------------------------------------------------------


def on_a_terminal(*words: str, answer: bytes) -> tuple[int, str]:
    """The command with a terminal for stdin and stderr; gives the exit code and what the person sees."""
    person, terminal = pty.openpty()
    command = [sys.executable, "-m", "wirecall", *words]
    process = subprocess.Popen(command, stdin=terminal, stderr=terminal, stdout=subprocess.PIPE)
    os.close(terminal)
    try:
        os.write(person, answer)
        out, _ = process.communicate(timeout=PATIENCE)
        return process.returncode, out.decode() + _seen(person)
    finally:
        process.kill()
        os.close(person)


def _seen(terminal: int) -> str:
    seen = b""
    try:
        while piece := os.read(terminal, 4096):
            seen += piece
    except OSError:  # the other end is closed
        pass
    return seen.decode()


def test_a_destructive_call_asks_first_on_a_terminal(odd: str) -> None:
    code, seen = on_a_terminal("call", odd, "wipe", "what=disk", answer=b"n\n")
    assert code == Exit.INTERRUPTED
    assert "may destroy" in seen
    assert "Nothing was sent" in seen
    assert "gone" not in seen
    code, seen = on_a_terminal("call", odd, "wipe", "what=disk", answer=b"y\n")
    assert (code, "disk is gone" in seen) == (0, True)
    code, seen = on_a_terminal("call", odd, "wipe", "what=disk", "--yes", answer=b"")
    assert (code, "may destroy" in seen) == (0, False)


def test_without_a_terminal_there_is_no_question(odd: str) -> None:
    assert invoke("call", odd, "wipe", "what=disk").stdout == "disk is gone\n"


# --- list and show --------------------------------------------------------------------------------------------------


def test_a_list_has_marks() -> None:
    shown = invoke("list", SHOP).stdout
    rows = {line.split()[1]: line for line in shown.splitlines()}
    assert shown.splitlines()[0].split() == ["KIND", "NAME", "HINTS", "SUMMARY"]
    assert "read-only" in rows["price"]
    assert "! destructive · keyed · ! open-world" in rows["refund"]
    assert "destructive" not in rows["charge"]
    assert rows["shop://articles"].startswith("resource")
    assert rows["shop://articles/{sku}"].startswith("template")
    assert rows["reminder"].startswith("prompt")


BARE = """
from wirecall import App
app = App("bare")
@app.query
def look() -> int: return 1
@app.command
def change() -> int: return 2
@app.command(destructive=False, open_world=False)
def add() -> int: return 3
"""


def test_one_server_has_the_same_marks_however_it_is_asked(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text(BARE)
    with serving(str(tmp_path / "bare.py")) as url:
        lists = [invoke("list", *words, "--json") for words in ([str(tmp_path / "bare.py")], [url], [f"{url}/mcp"])]
    hints = [{each["name"]: each["hints"] for each in json.loads(run.stdout)["result"]} for run in lists]
    assert hints[0] == hints[1] == hints[2]
    assert hints[0]["change"] == {"readOnly": False, "destructive": True, "openWorld": True, "keyed": True}


def test_a_list_on_a_terminal_has_the_same_words() -> None:
    person, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "wirecall", "list", SHOP], stdout=terminal, stdin=subprocess.DEVNULL
    ) as process:
        os.close(terminal)
        seen = _seen(person)
        assert process.wait(PATIENCE) == 0
    os.close(person)
    assert all(word in seen for word in ("KIND", "read-only", "destructive", "open-world"))


@pytest.mark.parametrize("protocol", ["rpc", "mcp"])
def test_a_list_as_json(protocol: str) -> None:
    offers = json.loads(invoke("list", SHOP, "--as", protocol, "--json").stdout)["result"]
    price = next(offer for offer in offers if offer["name"] == "price")
    assert price["hints"]["readOnly"] is True
    assert price["schema"]["required"] == ["sku"]
    assert ("reminder" in [offer["name"] for offer in offers]) == (protocol == "mcp")


def test_missing_hints_are_shown_as_unstated() -> None:
    shown = invoke("list", SHOP, "--revision", "2024-11-05").stdout  # which has no annotations
    assert shown.count("? unstated") == 3


def test_a_list_where_there_is_no_unicode() -> None:
    run = wirecall("list", SHOP, env={"PYTHONIOENCODING": "ascii"})
    assert run.returncode == 0
    assert b"destructive" in run.stdout


def test_a_server_does_not_write_to_the_terminal(tmp_path: Path) -> None:
    """Names and texts come from others: what they would tell a terminal is shown, and not obeyed."""
    app = "from wirecall import App\napp = App('a')\n"
    method = "@app.query(title='\\x1b[2Jgone')\ndef one() -> str:\n    return '\\x1b[2J'\n"
    (tmp_path / "evil.py").write_text(app + method)
    for words in (["list"], ["show"]):
        run = invoke(*words, str(tmp_path / "evil.py"), *(["one"] if words == ["show"] else []))
        assert "\\u001b[2Jgone" in run.stdout
        assert "\x1b" not in run.stdout
    assert invoke("call", str(tmp_path / "evil.py"), "one").stdout == "\x1b[2J\n"  # to a pipe as it is


def test_a_list_can_be_narrowed() -> None:
    assert len(invoke("list", SHOP, "--kind", "query").stdout.splitlines()) == 2
    assert len(invoke("list", SHOP, "--filter", "MONEY").stdout.splitlines()) == 3
    assert invoke("list", SHOP, "--filter", "no such thing").stderr == "None of 6 entries matches.\n"


def test_show_prints_a_command_to_type() -> None:
    shown = invoke("show", SHOP, "charge").stdout
    assert "cents  a whole number  required" in shown
    assert f"wirecall call {SHOP} charge order=... cents=... --key auto" in shown
    assert "application/json" in invoke("show", SHOP, "shop://articles").stdout
    assert "order  text  required" in invoke("show", SHOP, "reminder").stdout
    assert json.loads(invoke("show", SHOP, "charge", "--json").stdout)["result"]["kind"] == "command"


def test_show_of_an_unknown_name() -> None:
    run = invoke("show", SHOP, "chrage")
    assert run.exit_code == Exit.USAGE
    assert "did you mean charge?" in run.stderr


def test_a_name_without_the_prefix_of_its_router_is_found(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "from wirecall import App\napp = App('x')\n"
        "app.query(name='articles.price')(lambda: 1)\napp.query(name='prices')(lambda: 1)\n"
    )
    run = invoke("call", str(tmp_path / "app.py"), "price")
    assert run.exit_code == Exit.USAGE
    assert "did you mean articles.price?" in run.stderr

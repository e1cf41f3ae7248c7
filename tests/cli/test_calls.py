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
def inner(place: dict[str, int], *, tags: tuple[str, ...] = ("a",)) -> dict[str, object]:
    return {"place": place, "tags": tags}
'''


@pytest.fixture
def odd(tmp_path: Path) -> str:
    (tmp_path / "odd.py").write_text(ODD)
    return str(tmp_path / "odd.py")


def test_price_of_tea_from_a_shell() -> None:
    run = wirecall("call", SHOP, "price", "sku=tea", "--json")
    assert run.returncode == 0
    assert run.stdout == b'{"ok":true,"result":450,"method":"price","replayed":false}\n'
    assert run.stderr == b""


def test_call_prints_only_the_payload_on_stdout() -> None:
    run = wirecall("call", SHOP, "price", "sku=tea")
    assert run.stdout == b"450\n"
    assert "✓ price" in run.stderr.decode()


def test_marks_are_words_where_there_is_no_unicode() -> None:
    run = wirecall("call", SHOP, "price", "sku=tea", env={"PYTHONIOENCODING": "ascii"})
    assert run.stderr.startswith(b"ok price")


@pytest.mark.parametrize("protocol", ["rpc", "mcp"])
def test_call_returns_the_same_over_both_protocols(protocol: str) -> None:
    for words, result in (
        (["price", "sku=tea"], 450),
        (["charge", "order=7", "cents=5"], {"order": "7", "paid": 5}),
    ):
        document = json.loads(invoke("call", SHOP, *words, "--as", protocol, "--json").stdout)
        assert document["result"] == result


@pytest.mark.parametrize(
    "revision", ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28"]
)
def test_call_accepts_any_revision(revision: str) -> None:
    document = json.loads(
        invoke("call", SHOP, "price", "sku=tea", "--revision", revision, "--json").stdout
    )
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


def test_handler_that_fails_is_the_servers_error(odd: str) -> None:
    run = wirecall("call", odd, "broken", "--json")
    assert run.returncode == Exit.REMOTE
    assert json.loads(run.stdout)["error"]["code"] == -32603
    assert b"ZeroDivisionError" in run.stderr  # the log of the app, which its user may see


def test_results_of_all_kinds(odd: str) -> None:
    assert invoke("call", odd, "picture").stdout == "look\n[image/png, 3 bytes]\n"
    assert [
        block["type"]
        for block in json.loads(invoke("call", odd, "picture", "--json").stdout)["result"]
    ] == [
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


# --- keys -----------------------------------------------------------------------------------------


def test_key_makes_a_call_repeatable(tmp_path: Path) -> None:
    ledger = f"sqlite:{tmp_path / 'ledger.db'}"
    words = ["call", SHOP, "charge", "order=7", "cents=5", "--key", "k-1", "--ledger", ledger]
    first = wirecall(*words, "--json")
    second = wirecall(*words)
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


def test_key_that_was_used_for_another_call_is_refused(tmp_path: Path) -> None:
    words = [
        "call",
        SHOP,
        "charge",
        "order=7",
        "--key",
        "k-1",
        "--ledger",
        f"sqlite:{tmp_path / 'ledger.db'}",
    ]
    assert invoke(*words, "cents=5").exit_code == 0
    run = invoke(*words, "cents=9", "--json")
    assert run.exit_code == Exit.KEY
    error = json.loads(run.stdout)["error"]
    assert (error["type"], error["ran"], error["key"]) == ("idempotency_key_conflict", "no", "k-1")
    assert "use a new key" in error["next"]


def test_generated_key_is_printed() -> None:
    run = invoke("call", SHOP, "charge", "order=7", "cents=5", "--key", "auto")
    assert "   key 0" in run.stderr
    assert (
        len(
            json.loads(invoke("call", SHOP, "charge", "order=7", "cents=5", "--json").stdout)["key"]
        )
        == 36
    )


def test_key_that_no_ledger_will_keep_prints_a_warning() -> None:
    assert (
        "forgets the key"
        in invoke("call", SHOP, "charge", "order=7", "cents=5", "--key", "k-1").stderr
    )


def test_bad_key_is_not_sent() -> None:
    run = invoke("call", SHOP, "charge", "order=7", "cents=5", "--key", "two words")
    assert run.exit_code == Exit.USAGE
    assert "is not a key" in run.stderr


def test_key_among_the_arguments_names_the_option() -> None:
    words = ("call", SHOP, "charge", "order=7", "cents=5")
    for word in ("idempotency_key=k 1", "meta.idempotency-key=k 1"):
        run = invoke(*words, word)
        assert run.exit_code == Exit.USAGE
        assert "  next: give the key as --key 'k 1'\n" in run.stderr


def test_key_in_a_declared_argument_is_the_key_of_the_call(tmp_path: Path) -> None:
    app = tmp_path / "keyed.py"
    app.write_text(
        "from wirecall import App\n"
        "app = App('keyed', key_at='meta.idempotency-key')\n"
        "@app.command(destructive=False)\n"
        "def buy(sku: str, meta: dict[str, str]) -> str:\n"
        "    return sku\n"
    )
    for protocol in ("rpc", "mcp"):
        words = ("sku=tea", "meta.idempotency-key=k-1", "--as", protocol, "--json")
        run = invoke("call", str(app), "buy", *words)
        assert json.loads(run.stdout)["key"] == "k-1", run.output


def test_query_has_no_key() -> None:
    assert "key" not in json.loads(
        invoke("call", SHOP, "price", "sku=tea", "--as", "mcp", "--json").stdout
    )


# --- destructive calls (T5) -----------------------------------------------------------------------


def on_a_terminal(*words: str, answer: bytes) -> tuple[int, str]:
    """Run the command with a terminal as stdin and stderr; return the exit code and what the person
    sees.
    """
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


def test_destructive_call_asks_first_on_a_terminal(odd: str) -> None:
    code, seen = on_a_terminal("call", odd, "wipe", "what=disk", answer=b"n\n")
    assert code == Exit.INTERRUPTED
    assert "may destroy" in seen
    assert "Nothing was sent" in seen
    assert "gone" not in seen
    code, seen = on_a_terminal("call", odd, "wipe", "what=disk", answer=b"y\n")
    assert (code, "disk is gone" in seen) == (0, True)
    code, seen = on_a_terminal("call", odd, "wipe", "what=disk", "--yes", answer=b"")
    assert (code, "may destroy" in seen) == (0, False)


def test_call_without_a_terminal_does_not_ask(odd: str) -> None:
    assert invoke("call", odd, "wipe", "what=disk").stdout == "disk is gone\n"


# --- list and show --------------------------------------------------------------------------------


def test_list_has_marks() -> None:
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


def test_list_has_the_same_marks_for_every_kind_of_target(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text(BARE)
    with serving(str(tmp_path / "bare.py")) as url:
        lists = [
            invoke("list", *words, "--json")
            for words in ([str(tmp_path / "bare.py")], [url], [f"{url}/mcp"])
        ]
    hints = [
        {each["name"]: each["hints"] for each in json.loads(run.stdout)["result"]} for run in lists
    ]
    assert hints[0] == hints[1] == hints[2]
    assert hints[0]["change"] == {
        "readOnly": False,
        "destructive": True,
        "openWorld": True,
        "keyed": True,
    }


def test_list_marks_open_world_only_where_it_distinguishes(limited: str, tmp_path: Path) -> None:
    """T5: the rows of the first app are all open, one of the second is not."""
    shown = invoke("list", limited)
    assert "! open-world" not in shown.stdout
    assert "open-world" in shown.stderr
    (tmp_path / "bare.py").write_text(BARE)
    other = invoke("list", str(tmp_path / "bare.py"))
    rows = {line.split()[1]: line for line in other.stdout.splitlines()}
    assert "! open-world" in rows["change"]
    assert "! open-world" not in rows["add"]
    assert "open-world" not in other.stderr


LIMITED = '''
import base64, datetime, uuid
from decimal import Decimal
from typing import Annotated, Literal
from msgspec import Meta
from wirecall import App
from wirecall.mcp import Image
app = App("limited")
@app.query(task=3.0)
async def order(
    id: uuid.UUID,
    day: datetime.date,
    count: Annotated[int, Meta(ge=1, le=9)],
    name: Annotated[str, Meta(max_length=20, pattern="^[a-z]+$")],
    price: Decimal,
    size: Literal["small", "large"] = "small",
    weight: Annotated[float, Meta(gt=0)] | None = None,
    tags: Annotated[list[str], Meta(min_length=2)] = (),
    data: bytes = b"",
) -> bytes:
    """Order an article."""
    return data
@app.query
def data(n: int = 1) -> bytes:
    return bytes(range(n))
@app.query
def nested() -> dict[str, list[bytes]]:
    return {}
@app.tool
def draw(count: int = 1) -> list[Image]:
    return [Image(b"picture %d" % n, "image/png") for n in range(count)]
@app.resource("file://logo", mime_type="image/png")
def logo() -> bytes:
    return b"logo"
'''


@pytest.fixture
def limited(tmp_path: Path) -> str:
    file = tmp_path / "limited.py"
    file.write_text(LIMITED)
    return str(file)


def test_show_has_limits_patterns_formats_and_tasks(limited: str) -> None:
    shown = invoke("show", limited, "order").stdout
    for line in (
        "id      text, uuid",
        "day     text, date",
        "count   a whole number, 1 to 9",
        "name    text, matches ^[a-z]+$, at most 20 characters",
        "price   text, decimal",
        "size    one of small, large",
        "weight  a number or null, above 0",
        "tags    a list of text, at least 2 entries",
        "data    text, base64",
        "Returns text, base64",
        "A call becomes a task after 3 s.",
    ):
        assert line in shown, line


@pytest.mark.parametrize("protocol", ["rpc", "mcp"])
def test_call_saves_the_bytes_of_a_result(limited: str, protocol: str, tmp_path: Path) -> None:
    file = tmp_path / "bytes.bin"
    done = invoke("call", limited, "data", "n=4", "--as", protocol, "--save", str(file))
    assert file.read_bytes() == b"\x00\x01\x02\x03"
    assert "4 bytes" in done.stderr


def test_call_saves_images_and_resources(limited: str, tmp_path: Path) -> None:
    one = tmp_path / "one.png"
    invoke("call", limited, "draw", "--save", str(one))
    assert one.read_bytes() == b"picture 0"
    invoke("call", limited, "draw", "count=2", "--save", str(tmp_path / "two.png"))
    assert (tmp_path / "two-1.png").read_bytes() == b"picture 0"
    assert (tmp_path / "two-2.png").read_bytes() == b"picture 1"
    logo = tmp_path / "logo.png"
    invoke("call", limited, "file://logo", "--save", str(logo))
    assert logo.read_bytes() == b"logo"


@pytest.mark.parametrize("protocol", ["rpc", "mcp"])
def test_call_saves_bytes_under_any_name_and_at_any_place(protocol: str, tmp_path: Path) -> None:
    app = tmp_path / "pages.py"
    app.write_text(
        "from wirecall import App\n"
        "app = App('pages')\n"
        "@app.query\n"
        "def named() -> dict[str, bytes]:\n"
        "    return {'a': b'one', 'b': b'2'}\n"
        "@app.query\n"
        "def placed() -> tuple[str, bytes]:\n"
        "    return ('cGxhaW4=', b'three')\n"
    )
    words = (str(app), "--as", protocol, "--save", str(tmp_path / "page"))
    assert "page-2  1 byte\n" in invoke("call", words[0], "named", *words[1:]).stderr
    assert (tmp_path / "page-1").read_bytes() == b"one"
    assert (tmp_path / "page-2").read_bytes() == b"2"
    invoke("call", words[0], "placed", *words[1:])
    assert (tmp_path / "page").read_bytes() == b"three"


def test_call_that_cannot_save_says_why(limited: str, tmp_path: Path) -> None:
    file = str(tmp_path / "price.bin")
    nothing = invoke("call", SHOP, "price", "sku=tea", "--save", file)
    assert nothing.exit_code == Exit.FAULT  # the call was made: its usage was right
    assert "450" in nothing.stdout
    assert "There is nothing to save." in nothing.stderr
    for wrong in (str(tmp_path), str(tmp_path / "none" / "a.bin")):
        refused = invoke("call", limited, "data", "--save", wrong)
        assert refused.exit_code != 0
        assert "folder" in refused.stderr


def test_list_on_a_terminal_has_the_same_words() -> None:
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
def test_list_as_json(protocol: str) -> None:
    offers = json.loads(invoke("list", SHOP, "--as", protocol, "--json").stdout)["result"]
    price = next(offer for offer in offers if offer["name"] == "price")
    assert price["hints"]["readOnly"] is True
    assert price["schema"]["required"] == ["sku"]
    assert ("reminder" in [offer["name"] for offer in offers]) == (protocol == "mcp")


def test_missing_hints_are_shown_as_unstated() -> None:
    shown = invoke("list", SHOP, "--revision", "2024-11-05").stdout  # which has no annotations
    assert shown.count("? unstated") == 3


def test_list_where_there_is_no_unicode() -> None:
    run = wirecall("list", SHOP, env={"PYTHONIOENCODING": "ascii"})
    assert run.returncode == 0
    assert b"destructive" in run.stdout


def test_server_does_not_write_to_the_terminal(tmp_path: Path) -> None:
    """Names and descriptions come from others: their control characters are shown, not obeyed."""
    app = "from wirecall import App\napp = App('a')\n"
    method = "@app.query(title='\\x1b[2Jgone')\ndef one() -> str:\n    return '\\x1b[2J'\n"
    (tmp_path / "evil.py").write_text(app + method)
    for words in (["list"], ["show"]):
        run = invoke(*words, str(tmp_path / "evil.py"), *(["one"] if words == ["show"] else []))
        assert "\\u001b[2Jgone" in run.stdout
        assert "\x1b" not in run.stdout
    # To a pipe as it is.
    assert invoke("call", str(tmp_path / "evil.py"), "one").stdout == "\x1b[2J\n"


def test_list_can_be_narrowed() -> None:
    assert len(invoke("list", SHOP, "--kind", "query").stdout.splitlines()) == 2
    assert len(invoke("list", SHOP, "--filter", "MONEY").stdout.splitlines()) == 3
    assert (
        invoke("list", SHOP, "--filter", "no such thing").stderr == "None of 6 entries matches.\n"
    )


def test_show_prints_a_command_to_type() -> None:
    shown = invoke("show", SHOP, "charge").stdout
    assert "cents  a whole number  required" in shown
    assert f"wirecall call {SHOP} charge order=... cents=... --key auto" in shown
    assert "application/json" in invoke("show", SHOP, "shop://articles").stdout
    assert "order  text  required" in invoke("show", SHOP, "reminder").stdout
    assert (
        json.loads(invoke("show", SHOP, "charge", "--json").stdout)["result"]["kind"] == "command"
    )


def test_show_of_an_unknown_name() -> None:
    run = invoke("show", SHOP, "chrage")
    assert run.exit_code == Exit.USAGE
    assert "did you mean charge?" in run.stderr


def test_name_without_the_prefix_of_its_router_is_found(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "from wirecall import App\napp = App('x')\n"
        "app.query(name='articles.price')(lambda: 1)\napp.query(name='prices')(lambda: 1)\n"
    )
    run = invoke("call", str(tmp_path / "app.py"), "price")
    assert run.exit_code == Exit.USAGE
    assert "did you mean articles.price?" in run.stderr

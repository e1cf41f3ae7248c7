"""`wirecall doctor` about a deployment: the secret, a server behind a proxy, and a unit of systemd
(`--unit`).
"""

import json
import os
from pathlib import Path

import pytest

from tests.cli import ROOT, SHOP, invoke
from tests.ports import free_port

SECRET = "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("WIRECALL_SECRET", "WIRECALL_MODE", "WIRECALL_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WIRECALL_SERVER_HTTP", f"127.0.0.1:{free_port()}")
    return tmp_path


def diagnosis(*words: str) -> tuple[int, dict[str, list[tuple[str, str]]]]:
    """Return the exit code, and the findings by check."""
    result = invoke("doctor", *words, "--json")
    found: dict[str, list[tuple[str, str]]] = {}
    for each in json.loads(result.stdout)["result"]["checks"]:
        found.setdefault(each["name"], []).append((each["level"], each["what"]))
    return result.exit_code, found


def levels(found: list[tuple[str, str]]) -> list[str]:
    return [level for level, _ in found]


@pytest.mark.parametrize(
    ("secret", "level"),
    [
        ("s", "fail"),
        ("password", "fail"),
        ("a" * 64, "fail"),
        ("correct horse battery", "warn"),
        (SECRET, "ok"),
    ],
)
def test_doctor_judges_the_length_of_the_secret(
    secret: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guessed secret signs the sessions of others, also behind a loopback address."""
    monkeypatch.setenv("WIRECALL_SECRET", secret)
    code, found = diagnosis()
    assert (levels(found["secret"]), code) == ([level], 9 if level == "fail" else 0)


# --- behind a proxy -------------------------------------------------------------------------------


def test_doctor_sees_a_proxy_by_the_name_of_the_server() -> None:
    Path("wirecall.toml").write_text('[server]\nhosts = ["api.example.com"]\n')
    _, found = diagnosis()
    assert levels(found["secret"]) == ["warn"]
    assert "X-Forwarded-For" in found["proxy"][0][1]


def test_doctor_warns_of_one_user_behind_a_proxy() -> None:
    Path("wirecall.toml").write_text('[server]\nhosts = ["api.example.com"]\nsingle_user = true\n')
    assert levels(diagnosis()[1]["proxy"]) == ["ok", "warn"]
    Path("wirecall.toml").write_text('[server]\nhosts = ["localhost:8420"]\nsingle_user = true\n')
    assert "proxy" not in diagnosis()[1]


# --- a unit ---------------------------------------------------------------------------------------


@pytest.fixture
def unit(here: Path) -> Path:
    """The unit that we ship, with its folders in a folder of this test."""
    (here / "opt").mkdir()
    text = (ROOT / "deploy" / "wirecall.service").read_text()
    text = (
        text.replace("/opt/shop", str(here / "opt"))
        .replace("/etc/shop", str(here))
        .replace(":8420", f":{free_port()}")
    )
    text = text.replace(
        "ProtectSystem=strict", f"ProtectSystem=strict\nReadWritePaths={here / 'state'}"
    )
    (here / "shop.service").write_text(text)
    (here / "environment").write_text(f"# secrets\nWIRECALL_SECRET='{SECRET}'\n")
    (here / "opt" / "app.py").write_text(Path(SHOP).read_text())
    state_ledger(here / "shop.service", f"sqlite:{here}/state/ledger.db")
    return here / "shop.service"


def state_ledger(unit: Path, url: str) -> None:
    (unit.parent / "opt" / "wirecall.toml").write_text(
        f'[server]\napp = "app.py"\n[ledger]\nurl = "{url}"\n'
    )


def change(unit: Path, old: str, new: str) -> None:
    text = unit.read_text()
    assert old in text
    unit.write_text(text.replace(old, new))


def test_doctor_accepts_the_shipped_unit(unit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of the shell does not count, and is the same afterwards."""
    monkeypatch.setenv("WIRECALL_LEDGER_URL", "sqlite:of-the-shell.db")
    monkeypatch.setenv("WIRECALL_SERVER_HTTP", "0.0.0.0:1")
    before = Path.cwd()
    code, found = diagnosis("--unit", str(unit))
    assert code == 0, found
    assert {level for name, rows in found.items() for level in levels(rows) if name != "files"} == {
        "ok"
    }
    assert "production mode" in found["app"][0][1]
    assert "state/ledger.db" in found["ledger"][0][1]
    assert "127.0.0.1:" in found["port"][0][1]
    assert Path.cwd() == before
    assert os.environ["WIRECALL_LEDGER_URL"] == "sqlite:of-the-shell.db"


@pytest.mark.parametrize("source", ["unit", "quoted", "environment file", "drop-in"])
def test_doctor_finds_two_ledgers_in_every_source_of_a_units_environment(
    unit: Path, source: str
) -> None:
    other = "WIRECALL_LEDGER_URL=sqlite:/var/lib/shop/other.db"
    if source == "unit":
        change(unit, "[Service]\n", f"[Service]\nEnvironment={other}\n")
    elif source == "quoted":
        change(unit, "[Service]\n", f'[Service]\nEnvironment=A=1 \\\n  "{other}"\n')
    elif source == "environment file":
        (unit.parent / "environment").write_text(f"{other}\n")
    else:
        Path(f"{unit}.d").mkdir()
        Path(f"{unit}.d", "local.conf").write_text(f"[Service]\nEnvironment={other}\n")
    code, found = diagnosis("--unit", str(unit))
    assert (code, levels(found["config"])) == (9, ["fail"])
    assert "these are two ledgers" in found["config"][0][1]


def test_doctor_knows_where_a_unit_may_write(unit: Path) -> None:
    folder = Path("/opt/shop-that-does-not-exist")
    state_ledger(unit, f"sqlite:{folder}/ledger.db")
    code, found = diagnosis("--unit", str(unit))
    assert (code, levels(found["ledger"])) == (9, ["fail"])
    assert "does not let its server write" in found["ledger"][0][1]
    change(unit, "ProtectSystem=strict", f"ProtectSystem=strict\nReadWritePaths={folder}")
    assert "does not let its server write" not in diagnosis("--unit", str(unit))[1]["ledger"][0][1]


def test_doctor_treats_a_loopback_unit_as_one_behind_a_proxy(unit: Path) -> None:
    (unit.parent / "environment").unlink()
    change(unit, "MODE=production", "MODE=development")
    change(unit, "--log json", "--single-user")
    code, found = diagnosis("--unit", str(unit))
    assert code == 0, found
    assert levels(found["secret"]) == ["warn"]
    assert found["app"][1] == (
        "warn",
        "other machines can reach it in development mode: commands run without keys",
    )
    assert levels(found["proxy"]) == ["ok", "warn"]


def test_doctor_lets_a_flag_of_a_unit_decide(unit: Path) -> None:
    (unit.parent / "environment").write_text(
        f"WIRECALL_SECRET={SECRET}\nWIRECALL_LEDGER_URL=sqlite:other.db\n"
    )
    change(unit, "--log json", f"--ledger sqlite:{unit.parent}/state/flag.db")
    code, found = diagnosis("--unit", str(unit))
    assert code == 0, found
    assert "state/flag.db" in found["ledger"][0][1]


@pytest.mark.parametrize("text", [None, "[Unit]\nDescription=x\n"])
def test_doctor_refuses_a_file_that_is_not_a_service(text: str | None) -> None:
    if text is not None:
        Path("x.service").write_text(text)
    result = invoke("doctor", "--unit", "x.service")
    assert result.exit_code == 2
    assert "next: name " in result.stderr


def test_doctor_reports_a_missing_folder_and_a_missing_environment_file(unit: Path) -> None:
    change(unit, "EnvironmentFile=-", "EnvironmentFile=")
    change(unit, f"WorkingDirectory={unit.parent}/opt", f"WorkingDirectory={unit.parent}/nowhere")
    (unit.parent / "environment").unlink()
    code, found = diagnosis("--unit", str(unit))
    assert (code, levels(found["unit"])) == (9, ["ok", "warn", "fail"])

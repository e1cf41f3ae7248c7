"""The files of deploy/: a real nginx reads nginx.conf, and the others are read as their programs
would read them.
"""

import http.client
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.cli import SHOP, serving
from tests.ports import free_port
from wirecall.config import check_config

DEPLOY = Path(__file__).parents[1] / "deploy"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
PATIENCE = 60.0

needs_nginx = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")

# As Debian's package ships it, in short.
OTHER_SITE = "server {\n    listen 80 default_server;\n    server_name _;\n    return 204;\n}\n"


def text_of(name: str) -> str:
    return (DEPLOY / name).read_text("utf-8")


# --- nginx ----------------------------------------------------------------------------------------


def write_configuration(folder: Path, sites: str, port: int) -> list[str]:
    """Write a configuration that includes the sites, on a port of the loopback, and return the
    command that reads it.
    """
    assert NGINX is not None
    (folder / "sites.conf").write_text(sites.replace("listen 80", f"listen 127.0.0.1:{port}"))
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"    {kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    head = f"pid {folder}/nginx.pid;\nerror_log stderr;\ndaemon off;\nmaster_process off;\nevents {{}}\n"
    (folder / "nginx.conf").write_text(
        f"{head}http {{\n    access_log off;\n{paths}    include {folder}/sites.conf;\n}}\n"
    )
    return [NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]


@contextmanager
def proxy(folder: Path, sites: str) -> Iterator[int]:
    """Run nginx in front of a server, and return its port."""
    port = free_port()
    with subprocess.Popen(write_configuration(folder, sites, port)) as process:
        try:
            deadline = time.monotonic() + PATIENCE
            while True:
                with suppress(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                assert process.poll() is None and time.monotonic() < deadline
            yield port
        finally:
            process.terminate()


def ask(
    port: int, path: str, host: str = "localhost", body: str | None = None
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        headers = {"Host": host, "Content-Type": "application/json"}
        connection.request("GET" if body is None else "POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@needs_nginx
@pytest.mark.parametrize("other", ["", OTHER_SITE])
def test_nginx_conf_starts_as_shipped(tmp_path: Path, other: str) -> None:
    """On a host without a name `app`, and beside the default site of a distribution."""
    command = write_configuration(tmp_path, other + text_of("nginx.conf"), free_port())
    checked = subprocess.run(
        [*command, "-t"], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert checked.returncode == 0, checked.stderr


@needs_nginx
def test_nginx_conf_forwards_calls_and_refuses_other_names(tmp_path: Path) -> None:
    call = '{"jsonrpc": "2.0", "id": 1, "method": "price", "params": ["tea"]}'
    with serving(SHOP) as address:
        sites = text_of("nginx.conf").replace("127.0.0.1:8420", address.removeprefix("http://"))
        with proxy(tmp_path, sites) as port:
            assert ask(port, "/rpc", body=call) == (200, b'{"jsonrpc":"2.0","result":450,"id":1}')
            assert ask(port, "/healthz")[0] == 200
            assert ask(port, "/readyz")[0] == 404
            # nginx closes the connection without an answer. It has not read the body, so the client
            # may see a reset.
            with pytest.raises(ConnectionResetError):
                ask(port, "/rpc", "attacker.example", call)


def test_nginx_conf_names_the_address_of_the_unit_and_forwards_the_client() -> None:
    assert "--http 127.0.0.1:8420" in text_of("wirecall.service")
    assert "server 127.0.0.1:8420 " in text_of("nginx.conf")
    assert "proxy_set_header X-Forwarded-For" in text_of("nginx.conf")


# --- containers -----------------------------------------------------------------------------------


@pytest.fixture
def compose() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(text_of("compose.yaml"))
    return read


def printed_commands() -> list[str]:
    """Return the command lines of the comment at the top of compose.yaml."""
    comment = text_of("compose.yaml").partition("\nname:")[0]
    return re.findall(r"^#   (.+)$", comment, re.MULTILINE)


def test_compose_makes_its_secrets_once(tmp_path: Path) -> None:
    """The volume of the database keeps the first password, so a second `up` must not make another."""
    make, up = printed_commands()
    (tmp_path / "deploy").mkdir()
    made = []
    for _ in range(2):
        subprocess.run(["sh", "-c", make], cwd=tmp_path, check=True, timeout=PATIENCE)
        made.append((tmp_path / "deploy" / ".env").read_text())
    assert made[0] == made[1]
    assert re.fullmatch(r"WIRECALL_SECRET=[0-9a-f]{64}\nDB_PASSWORD=[0-9a-f]{32}\n", made[0])
    assert (tmp_path / "deploy" / ".env").stat().st_mode & 0o077 == 0
    assert "PASSWORD" not in up and "SECRET" not in up
    assert "deploy/.env" in (DEPLOY.parent / ".gitignore").read_text().splitlines()


def test_compose_asks_for_every_variable_that_it_uses(compose: dict[str, Any]) -> None:
    used = set(re.findall(r"\$\{?(\w+)", yaml.safe_dump(compose)))
    assert used == {"WIRECALL_SECRET", "DB_PASSWORD"}
    assert all(f"${{{name}:?" in text_of("compose.yaml") for name in used)


def test_compose_points_nginx_at_the_containers_of_the_app(
    compose: dict[str, Any], tmp_path: Path
) -> None:
    mount = compose["services"]["proxy"]["volumes"][0]
    assert mount == "./nginx.conf:/etc/nginx/wirecall.conf:ro"
    shell, option, script = compose["services"]["proxy"]["command"]
    (tmp_path / "wirecall.conf").write_text(text_of("nginx.conf"))
    (tmp_path / "conf.d").mkdir()
    local = script.replace("/etc/nginx", str(tmp_path)).replace("exec nginx", "true")
    subprocess.run([shell, option, local], check=True, timeout=PATIENCE)
    written = (tmp_path / "conf.d" / "default.conf").read_text()
    assert written == text_of("nginx.conf").replace("127.0.0.1:8420", "app:8420")
    assert "server app:8420 " in written


def test_containers_have_one_ledger_and_one_file_of_settings(
    compose: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wirecall.toml").write_text(text_of("wirecall.toml"))
    image = dict(re.findall(r"^ENV (WIRECALL_\w+)=(\S+)$", text_of("Dockerfile"), re.MULTILINE))
    assert image["WIRECALL_LEDGER_URL"] == "sqlite:/data/ledger.db"
    environment = {**image, **compose["services"]["app"]["environment"]}
    for each in (image, environment):
        config, problems = check_config(environment=each)
        assert problems == []
        assert config.get("ledger.url") == each["WIRECALL_LEDGER_URL"]


def test_dockerfile_asks_for_health_and_compose_for_readiness(compose: dict[str, Any]) -> None:
    """A container that is not healthy is replaced. That does not help while the ledger is away."""
    check = text_of("Dockerfile").partition("\nHEALTHCHECK")[2]
    assert "/healthz'" in check and "/readyz'" not in check
    assert "/readyz'" in compose["services"]["app"]["healthcheck"]["test"][-1]
    assert compose["services"]["proxy"]["depends_on"]["app"]["condition"] == "service_healthy"


# --- systemd --------------------------------------------------------------------------------------


def test_unit_names_no_ledger() -> None:
    lines = text_of("wirecall.service").splitlines()
    assert not [line for line in lines if "LEDGER" in line and not line.startswith("#")]


def test_deployment_of_the_docs_has_one_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wirecall.toml of deploy.md, and the environment of the unit."""
    monkeypatch.chdir(tmp_path)
    page = (DEPLOY.parent / "docs" / "deploy.md").read_text()
    block = re.search(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert block is not None
    Path("wirecall.toml").write_text(block[1])
    unit = dict(re.findall(r"^Environment=(\w+)=(\S+)$", text_of("wirecall.service"), re.MULTILINE))
    config, problems = check_config(environment=unit)
    assert problems == []
    assert config.values["ledger.url"].origin.startswith("wirecall.toml:")
    assert os.path.isabs(config.get("audit.file"))

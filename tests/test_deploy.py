"""The files of deploy/: a real nginx reads nginx.conf, and the others are read as their programs
would read them.
"""

import http.client
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.cli import SHOP, running, serving, wirecall
from tests.ports import free_port
from tests.servers import Postgres
from wirecall.app import DRAIN
from wirecall.config import check_config

DEPLOY = Path(__file__).parents[1] / "deploy"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
PATIENCE = 60.0

# Variables of the servers that no file has.
SECRETS = {"WIRECALL_LEDGER_URL", "WIRECALL_SECRET", "WIRECALL_SECRET_OTHER"}

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


class Names:
    """A name server on the loopback that knows the address of one name, or none."""

    def __init__(self) -> None:
        self.address = ""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            query, client = self._socket.recvfrom(512)
            if not query:
                return
            # RFC 1035, section 4.1: the header, the question as it came, and perhaps one address.
            question = query[12:]
            count = int(bool(self.address))
            flags = 0x8180 if self.address else 0x8183
            answer = query[:2] + struct.pack("!5H", flags, 1, count, 0, 0) + question
            if self.address:
                answer += struct.pack("!HHHIH", 0xC00C, 1, 1, 1, 4)
                answer += socket.inet_aton(self.address)
            self._socket.sendto(answer, client)

    def close(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
            own.sendto(b"", ("127.0.0.1", self.port))
        self._thread.join()
        self._socket.close()


def pid_of(port: int) -> int | None:
    """Return the process that answers behind nginx, if there is one."""
    status, body = ask(port, "/rpc", body='{"jsonrpc": "2.0", "id": 1, "method": "pid"}')
    assert status in (200, 502, 504)
    if status != 200:
        return None
    found: int = json.loads(body)["result"]
    return found


@needs_nginx
def test_nginx_conf_starts_without_the_name_and_follows_its_address(tmp_path: Path) -> None:
    """As in compose.yaml, where containers come and go."""
    (tmp_path / "app.py").write_text(
        "import os\nfrom wirecall import App\n"
        'app = App("shop", hosts=["*"])\napp.query(name="pid")(os.getpid)\n'
    )
    number = free_port()
    names = Names()
    sites = text_of("nginx.conf").replace("default wirecall;", f"default app.test:{number};")
    sites = sites.replace(
        "resolver 127.0.0.11 valid=2s", f"resolver 127.0.0.1:{names.port} valid=1s"
    )
    assert f"app.test:{number}" in sites and f":{names.port}" in sites
    deadline = time.monotonic() + PATIENCE
    words = ("serve", "app.py", "--http")
    with (
        running(*words, f"127.0.0.2:{number}", cwd=tmp_path) as first,
        running(*words, f"127.0.0.3:{number}", cwd=tmp_path) as second,
        closing(names),
        proxy(tmp_path, sites) as port,
    ):
        first.wait_for("Listening on")
        second.wait_for("Listening on")
        assert pid_of(port) is None
        for address, server in (("127.0.0.2", first), ("127.0.0.3", second)):
            names.address = address
            while pid_of(port) != server.process.pid:
                assert time.monotonic() < deadline


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
    used = set(re.findall(r"\$\{?(\w+(?::[?-])?)", yaml.safe_dump(compose)))
    asked = {"WIRECALL_SECRET:?", "DB_PASSWORD:?"}
    assert used - asked == {
        "WIRECALL_SECRET_OTHER:-",
        "PYTHON_IMAGE:-",
        "POSTGRES_IMAGE:-",
        "NGINX_IMAGE:-",
    }
    assert asked <= used


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
    assert written == text_of("nginx.conf").replace("default wirecall;", "default app:8420;")
    assert written != text_of("nginx.conf")


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


def test_compose_migrates_before_each_start(
    compose: dict[str, Any], postgres_server: Postgres, tmp_path: Path
) -> None:
    """The command of the service `migrate`, on an empty database, and again for a second `up`."""
    services = compose["services"]
    needed = services["app"]["depends_on"]["migrate"]["condition"]
    assert needed == "service_completed_successfully"
    assert services["migrate"]["restart"] == "no"
    assert services["migrate"]["image"] == services["app"]["image"]
    assert "depends_on" in services["migrate"] and "volumes" not in services["migrate"]
    (tmp_path / "wirecall.toml").write_text(text_of("wirecall.toml"))
    program, *words = services["migrate"]["command"]
    assert program == "wirecall"
    environment = {"WIRECALL_LEDGER_URL": postgres_server.url, "WIRECALL_MODE": "production"}
    for _ in range(2):
        done = wirecall(*words, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
    checked = wirecall(*words, "--check", cwd=tmp_path, env=environment)
    assert checked.returncode == 0, checked.stdout


def test_base_images_are_named_by_version_and_digest(compose: dict[str, Any]) -> None:
    """Each is also an argument, so that a newer one can be tried."""
    lines = text_of("Dockerfile").splitlines()
    froms = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert set(froms) == {"${PYTHON_IMAGE}"}
    arguments = compose["services"]["app"]["build"]["args"]
    python = default_of(arguments["PYTHON_IMAGE"])
    assert f"ARG PYTHON_IMAGE={python}" in lines
    images = [default_of(compose["services"][name]["image"]) for name in ("db", "proxy")]
    for image in (python, *images):
        assert re.fullmatch(r"[a-z]+:\d[\w.-]*@sha256:[0-9a-f]{64}", image), image


def default_of(value: str) -> str:
    """Return the default of `${NAME:-default}`."""
    found = re.fullmatch(r"\$\{\w+:-(.+)\}", value)
    assert found is not None, value
    return found[1]


def is_ignored(path: str) -> bool:
    """Return whether .dockerignore keeps a file out of the image's context: the last match counts."""
    ignored = False
    for line in (DEPLOY.parent / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        if not line or line.startswith("#"):
            continue
        names = [path, *map(str, Path(path).parents)]
        if line.startswith("**/"):
            names = list(Path(path).parts)
        if any(fnmatch(name, pattern) for name in names if name != "."):
            ignored = not line.startswith("!")
    return ignored


def test_dockerignore_lets_through_what_is_copied_and_no_secrets() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", text_of("Dockerfile"), re.MULTILINE)
    sources = [source for line in copied for source in line.split()]
    assert "src" in sources and "deploy/wirecall.toml" in sources
    for source in sources:
        assert (DEPLOY.parent / source).exists()
        assert not is_ignored(f"{source}/app.py" if source == "src" else source), source
    for secret in ("deploy/.env", ".git/config", ".venv/bin/python", ".wirecall/secrets.toml"):
        assert is_ignored(secret), secret
    assert is_ignored("src/wirecall/__pycache__/app.cpython-312.pyc")


# --- the time to stop -----------------------------------------------------------------------------


def test_supervisors_wait_longer_than_the_server_takes_to_stop(compose: dict[str, Any]) -> None:
    """The drain, the grace time, and what a server needs after it."""
    least = 5 + 10 + 3
    unit = text_of("wirecall.service")
    assert "--drain 5s --grace 10s" in unit
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(stop) >= least
    settings = tomllib.loads(text_of("wirecall.toml"))["server"]
    assert settings["grace"] == 10 and "drain" not in settings
    assert DRAIN["production"] == 5
    assert int(compose["services"]["app"]["stop_grace_period"].removesuffix("s")) >= least
    pod = manifests()["Deployment"]["spec"]["template"]["spec"]
    own = tomllib.loads(manifests()["ConfigMap"]["data"]["wirecall.toml"])["server"]
    assert pod["terminationGracePeriodSeconds"] >= own["drain"] + own["grace"] + 3
    assert not [each for each in pod["containers"] if "lifecycle" in each]
    # A pod is not ready before the drain is over, and so gets no more requests.
    probe = pod["containers"][0]["readinessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] < own["drain"]


# --- Kubernetes -----------------------------------------------------------------------------------

KUBECTL = shutil.which("kubectl")


def manifests() -> dict[str, Any]:
    """Return the objects of deploy/kubernetes by their kinds."""
    found: dict[str, Any] = {}
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        for each in yaml.safe_load_all(path.read_text()):
            assert each["kind"] not in found
            found[each["kind"]] = each
    return found


def pods() -> list[dict[str, Any]]:
    """Return the pods of the servers, and those that migrate."""
    return [manifests()[kind]["spec"]["template"]["spec"] for kind in ("Deployment", "Job")]


def test_kubernetes_has_every_object_in_its_present_version() -> None:
    assert {kind: each["apiVersion"] for kind, each in manifests().items()} == {
        "ConfigMap": "v1",
        "Deployment": "apps/v1",
        "Job": "batch/v1",
        "PodDisruptionBudget": "policy/v1",
        "Service": "v1",
    }


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")
def test_kubernetes_files_are_read_by_kubectl(tmp_path: Path) -> None:
    """Without a cluster, kubectl can only build them."""
    assert KUBECTL is not None
    names = sorted(path.name for path in (DEPLOY / "kubernetes").glob("*.yaml"))
    for name in names:
        shutil.copy(DEPLOY / "kubernetes" / name, tmp_path)
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump({"resources": names}))
    built = subprocess.run(
        [KUBECTL, "kustomize", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert {each["kind"] for each in yaml.safe_load_all(built.stdout)} == set(manifests())


def test_kubernetes_objects_select_the_pods_of_the_deployment() -> None:
    every = manifests()
    labels = every["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert every["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert every["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert every["Service"]["spec"]["selector"] == labels
    # Requests must not go to a pod that migrates.
    assert every["Job"]["spec"]["template"]["metadata"]["labels"] != labels


def test_kubernetes_never_has_fewer_servers_than_replicas_in_an_upgrade() -> None:
    spec = manifests()["Deployment"]["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert spec["replicas"] > manifests()["PodDisruptionBudget"]["spec"]["maxUnavailable"]


def test_kubernetes_asks_for_liveness_and_readiness_in_different_ways() -> None:
    (container,) = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    asked = {
        name: container[name]["httpGet"]["path"]
        for name in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert asked == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }
    # `/readyz` waits up to 2 s for the ledger.
    assert container["readinessProbe"]["timeoutSeconds"] > 2
    (port,) = container["ports"]
    settings = tomllib.loads(manifests()["ConfigMap"]["data"]["wirecall.toml"])["server"]
    assert settings["http"] == f"0.0.0.0:{port['containerPort']}"
    assert manifests()["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]


def test_kubernetes_pods_have_no_rights_that_they_do_not_need() -> None:
    for pod in pods():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            rights = container["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]
            assert not container["image"].endswith(":latest")


def test_kubernetes_keeps_secrets_out_of_files_and_names_the_variables_that_are_read() -> None:
    text = "".join(path.read_text() for path in (DEPLOY / "kubernetes").glob("*.yaml"))
    (made,) = re.findall(r"kubectl create secret generic shop (.+)", text)
    keys = set(re.findall(r"--from-literal=([\w-]+)=", made))
    for pod in pods():
        for container in pod["containers"]:
            for each in container["env"]:
                reference = each.get("valueFrom", {}).get("secretKeyRef")
                is_secret = each["name"] in SECRETS
                assert (reference is not None) == is_secret, each
                if reference is not None and not reference.get("optional"):
                    assert reference["key"] in keys
    variables = {each["name"] for each in pods()[0]["containers"][0]["env"]}
    assert variables > SECRETS


def test_kubernetes_configuration_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "wirecall.toml"
    path.write_text(manifests()["ConfigMap"]["data"]["wirecall.toml"])
    environment = {"WIRECALL_LEDGER_URL": "postgresql://shop:password@db.internal/shop"}
    _, problems = check_config(path, environment)
    assert problems == []
    (mount,) = [
        each for each in pods()[0]["containers"][0]["volumeMounts"] if each["name"] == "config"
    ]
    variables = {each["name"]: each.get("value") for each in pods()[0]["containers"][0]["env"]}
    assert variables["WIRECALL_CONFIG"] == f"{mount['mountPath']}/wirecall.toml"


def test_kubernetes_migrates_with_a_command_that_exists() -> None:
    command = manifests()["Job"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command == yaml.safe_load(text_of("compose.yaml"))["services"]["migrate"]["command"]


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


ANALYZE = shutil.which("systemd-analyze")


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
def test_unit_gives_its_server_few_rights() -> None:
    """systemd rates the exposure of a service from 0 to 10; 2 is its limit here."""
    assert ANALYZE is not None
    command = [ANALYZE, "security", "--offline=true", "--threshold=20"]
    rated = subprocess.run(
        [*command, str(DEPLOY / "wirecall.service")],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert "Overall exposure level" in rated.stdout, rated.stderr
    assert rated.returncode == 0, rated.stdout


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
def test_unit_is_read_by_systemd_without_a_warning(tmp_path: Path) -> None:
    """Except that this machine has no /opt/shop."""
    assert ANALYZE is not None
    unit = tmp_path / "shop.service"
    program = shutil.which("true")
    assert program is not None
    unit.write_text(text_of("wirecall.service").replace("/opt/shop/.venv/bin/wirecall", program))
    checked = subprocess.run(
        [ANALYZE, "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    about = [line for line in checked.stderr.splitlines() if "shop" in line]
    assert (checked.returncode, about) == (0, []), checked.stderr


def test_unit_reloads_with_the_signal_that_the_server_takes() -> None:
    unit = text_of("wirecall.service")
    assert "\nExecReload=/bin/kill -HUP $MAINPID\n" in unit
    assert "\nKillMode=mixed\n" in unit

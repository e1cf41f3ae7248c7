"""The Grafana dashboard and the alert rules of deploy/, against the metrics of servers that run,
and every command of the runbook.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from msgspec import Struct

from tests.console.processes import Running
from tests.console.samples import parsed
from tests.gateway.fronts import counter
from tests.gateway.process import settings
from tests.ports import free_port
from wirecall.console.metrics import LABELS, METRICS
from wirecall.files import IS_PORTABLE

DEPLOY = Path(__file__).parents[2] / "deploy"
OPERATING = Path(__file__).parents[2] / "docs" / "operating.md"
PROMTOOL = shutil.which("promtool")
APP = """
from wirecall import App

app = App("shop")

@app.command(destructive=False)
def charge(cents: int) -> dict[str, int]:
    raise OSError("the bank did not answer")

@app.query
def fail() -> int:
    raise ValueError("always")
"""
SETTINGS = """
[server]
app = "shop.py"
http = "127.0.0.1:{port}"
[ledger]
url = "sqlite:ledger.db"
[audit]
file = "audit.jsonl"
"""
# Prometheus adds these to every sample that it scrapes, and `up` itself.
ADDED = {"job", "instance"}
OWN = {"up"}
# What an expression may have besides the names of metrics: functions, and words of the language.
WORDS = {
    *("sum", "max", "min", "rate", "increase", "histogram_quantile", "time"),
    *("by", "and", "on", "label_values"),
}


def board() -> Any:
    return json.loads((DEPLOY / "grafana.json").read_text())


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def expressions() -> dict[str, str]:
    """Return every expression by the name of its panel, its variable or its alert."""
    found = {rule["alert"]: str(rule["expr"]) for rule in rules()}
    for panel in board()["panels"]:
        for target in panel.get("targets", ()):
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    for variable in board()["templating"]["list"]:
        if variable["type"] == "query":
            found[variable["name"]] = variable["definition"]
    return found


def names_in(expression: str) -> tuple[set[str], set[str], list[tuple[str, str, str]]]:
    """Return the metrics of an expression, its labels, and what it compares labels with."""
    matchers = []
    labels = set()
    for inside in re.findall(r"\{([^}]*)\}", expression):
        for label, sign, value in re.findall(r'(\w+)\s*(=~|!=|!~|=)\s*"([^"]*)"', inside):
            matchers.append((label, sign, value))
            labels.add(label)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", expression)
    for inside in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", bare):
        labels |= set(re.findall(r"\w+", inside))
    bare = re.sub(r"\b(by|on)\s*\([^)]*\)", r"\1", bare)
    if asked := re.fullmatch(r"label_values\((.*),\s*(\w+)\)", bare.strip()):
        labels.add(asked[2])
        bare = asked[1]
    words = set(re.findall(r"\b[a-z_]\w*", bare)) - WORDS
    return words, labels, matchers


class Machine(Struct):
    """A server and a gateway on one machine, with the same wirecall.toml."""

    folder: Path
    server: Running
    gateway: Running


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    if IS_PORTABLE:
        pytest.skip("there are no Unix sockets")
    folder = tmp_path_factory.mktemp("shop")
    (folder / "shop.py").write_text(APP)
    bank = {"command": counter(folder / "effects")}
    own = SETTINGS.format(port=free_port())
    text = settings({"bank": bank}, ledger="sqlite:gateway.db", http=f"127.0.0.1:{free_port()}")
    (folder / "wirecall.toml").write_text(own + text)
    metrics = ["--metrics", "127.0.0.1:0"]
    with (
        Running(folder, "serve", *metrics) as server,
        Running(folder, "gateway", "run", *metrics) as gateway,
    ):
        for key in ("order-7", "order-8"):
            server.call("charge", cents=500, idempotency_key=key)
        server.call("fail")
        gateway.wait_for("(bank: ready)")
        yield Machine(folder, server, gateway)


@pytest.fixture(scope="module")
def samples(machine: Machine) -> dict[str, list[dict[str, str]]]:
    """Return the labels of every sample of a server and of a gateway, by the name of the sample."""
    found: dict[str, list[dict[str, str]]] = {}
    for each in (machine.server, machine.gateway):
        for name, several in parsed(each.scrape()).items():
            found.setdefault(name, []).extend(labels for labels, _ in several)
    return found


def test_metrics_page_has_every_metric_with_its_labels() -> None:
    found = {
        name: (kind, tuple(re.findall(r"`(\w+)`", labels)), text)
        for name, kind, labels, text in re.findall(
            r"^\| `(wirecall_\w+)` \| (\w+) \| ([^|]*) \| ([^|]+) \|$",
            OPERATING.read_text(),
            re.MULTILINE,
        )
    }
    stated = {name: (kind, LABELS.get(name, ()), text) for name, (kind, text) in METRICS.items()}
    assert found == stated


def test_every_metric_is_among_the_samples_of_servers(
    samples: dict[str, list[dict[str, str]]],
) -> None:
    stated = set(METRICS) - {"wirecall_call_duration_seconds"}
    parts = {f"wirecall_call_duration_seconds_{part}" for part in ("bucket", "sum", "count")}
    assert stated | parts == set(samples)


def test_expressions_ask_for_metrics_and_labels_that_exist(
    samples: dict[str, list[dict[str, str]]],
) -> None:
    for expression in expressions().values():
        _check(expression, samples)


def _check(expression: str, samples: dict[str, list[dict[str, str]]]) -> None:
    metrics, labels, matchers = names_in(expression)
    assert metrics, expression
    assert metrics <= set(samples) | OWN, expression
    known = {label for metric in metrics - OWN for each in samples[metric] for label in each}
    assert labels <= known | ADDED, expression
    for label, sign, value in matchers:
        if label in ADDED or value.startswith("$"):
            continue
        values = {
            each[label] for metric in metrics - OWN for each in samples[metric] if label in each
        }
        pattern = value if "~" in sign else re.escape(value)
        if label != "code":  # most errors are rare
            assert any(re.fullmatch(pattern, found) for found in values), expression


def test_codes_of_the_server_are_those_of_the_errors_page() -> None:
    """An alert about failures counts those that are the fault of the server, and no others."""
    page = (OPERATING.parent / "errors.md").read_text()
    codes = {int(code) for code in re.findall(r"^\| (-?\d+) \|", page, re.MULTILINE)}
    (pattern,) = {
        value
        for expression in expressions().values()
        for label, sign, value in names_in(expression)[2]
        if label == "code" and sign == "=~"
    }
    counted = {code for code in codes if re.fullmatch(pattern, str(code))}
    assert counted == {-32603, *(code for code in codes if 50_000 <= code < 51_000)}
    assert "42910" in {str(code) for code in codes}


def test_panels_do_not_overlap_and_have_a_source() -> None:
    taken = set()
    for panel in board()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, panel["title"]
                taken.add((x, y))
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
    ids = [panel["id"] for panel in board()["panels"]]
    assert len(ids) == len(set(ids))


def test_variables_of_the_dashboard_are_declared() -> None:
    declared = {variable["name"] for variable in board()["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board()["panels"])))
    assert used - declared <= {"__rate_interval"}


def test_alerts_name_a_section_of_the_runbook() -> None:
    headings = re.findall(r"^#+ (.+)$", OPERATING.read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", each.lower()).replace(" ", "-") for each in headings}
    for rule in rules():
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert page == "docs/operating.md"
        assert anchor in anchors, rule["alert"]
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["labels"]["severity"] in ("page", "ticket")


@pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed: apt-get install prometheus"
)
def test_promtool_accepts_the_alerts() -> None:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, "check", "rules", DEPLOY / "alerts.yml"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


# What a server shows minute by minute, and the alerts that it must and must not raise.
SERIES = {
    "wirecall_ledger_records": ('state="unknown"', "0x5 2x30", "WirecallUnknownOutcome"),
    "wirecall_ledger_up": ("", "1x5 0x30", "WirecallLedgerDown"),
    "wirecall_workers": ("", "2x5 0x30", "WirecallNoWorkers"),
    "wirecall_upstream_up": ('upstream="bank"', "1x5 0x30", "WirecallUpstreamDown"),
    "wirecall_queued": ("", "0x5 500x30", "WirecallQueue"),
}


@pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed: apt-get install prometheus"
)
def test_alerts_are_raised_when_a_server_is_ill(tmp_path: Path) -> None:
    """Prometheus' own program computes the expressions over half an hour."""
    assert PROMTOOL is not None
    series: list[dict[str, str]] = []
    checks: list[dict[str, Any]] = []
    by_name = {rule["alert"]: rule for rule in rules()}
    for metric, (label, values, alert) in SERIES.items():
        labels = ",".join(filter(None, ['job="wirecall"', 'instance="a"', label]))
        series.append({"series": f"{metric}{{{labels}}}", "values": values})
        checks.append({"eval_time": "4m", "alertname": alert, "exp_alerts": []})
        kept = {"job": "wirecall", "severity": by_name[alert]["labels"]["severity"]}
        if alert not in ("WirecallUnknownOutcome", "WirecallUpstreamDown"):
            kept["instance"] = "a"
        if "upstream" in label:
            kept["upstream"] = "bank"
        annotations = {
            name: text.replace("{{ $labels.instance }}", "a")
            .replace("{{ $labels.upstream }}", "bank")
            .replace('{{ $value | printf "%.0f" }}', "500" if alert == "WirecallQueue" else "2")
            for name, text in by_name[alert]["annotations"].items()
        }
        raised = [{"exp_labels": kept, "exp_annotations": annotations}]
        checks.append({"eval_time": "30m", "alertname": alert, "exp_alerts": raised})
    # One call in five fails in the server; nothing was lost.
    for name, step in (("wirecall_calls_total", 600), ("wirecall_errors_total", 120)):
        more = 'kind="query"' if "calls" in name else 'code="-32603"'
        labels = f'job="wirecall",instance="a",method="pay",{more}'
        series.append({"series": f"{name}{{{labels}}}", "values": f"0+{step}x40"})
    summary = by_name["WirecallFails"]["annotations"]
    failing = {
        "exp_labels": {"job": "wirecall", "instance": "a", "severity": "page"},
        "exp_annotations": {
            **summary,
            "summary": "20% of the calls of a fail in the server.",
        },
    }
    checks.append({"eval_time": "30m", "alertname": "WirecallFails", "exp_alerts": [failing]})
    checks.append({"eval_time": "30m", "alertname": "WirecallReplays", "exp_alerts": []})
    checks.append({"eval_time": "30m", "alertname": "WirecallAnswersLost", "exp_alerts": []})
    tests = [{"interval": "1m", "input_series": series, "alert_rule_test": checks}]
    document = {"rule_files": [str(DEPLOY / "alerts.yml")], "tests": tests}
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump(document))
    done = subprocess.run([PROMTOOL, "test", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# --- the runbook ----------------------------------------------------------------------------------


def runbook() -> list[str]:
    """Return the commands of the runbook, in their order."""
    text = OPERATING.read_text().partition("## When you are woken\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    # Two sections may have the same command.
    return list(dict.fromkeys(line for block in blocks for line in block.splitlines()))


# What an operator reads in the output, and the exit code if it is not 0.
SHOWN = {
    "curl -sS $SERVER/readyz": ("ready", 0),
    "wirecall doctor": ("the outcome of 2 commands is unknown", 0),
    "curl -sS $METRICS | grep wirecall_workers": ("wirecall_workers 1", 0),
    "wirecall ledger show charge order-7": ("unknown", 0),
    "wirecall gateway status": ("bank", 0),
    # Tools without hints are odd.
    "wirecall gateway check --json > plan.json || true": ("", 0),
    "wirecall watch $SERVER status:error --count 1": ("error", 0),
    "curl -sS $METRICS | grep wirecall_errors_total": ('method="fail",code="-32603"', 0),
}


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_runbook_commands_run_as_they_are_printed(machine: Machine) -> None:
    """In one folder, one after another, as an operator would."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "SERVER": machine.server.wait_for(r"Listening on (\S+)"),
        "METRICS": machine.server.wait_for(r"Metrics: (\S+)"),
    }
    setting, *commands = runbook()
    assert re.findall(r"(\w+)=http", setting) == ["SERVER", "METRICS"]
    assert SHOWN.keys() <= set(commands)
    for command in commands:
        done = subprocess.run(
            command,
            shell=True,
            cwd=machine.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        shown, code = SHOWN.get(command, ("", 0))
        assert done.returncode == code, f"{command}: {done.stdout}{done.stderr}"
        assert shown in done.stdout, command
    # The first retry gets the result that was stated, and the second one runs.
    first = machine.server.call("charge", cents=500, idempotency_key="order-7")
    assert first["result"] == {"paid": 500}
    second = machine.server.call("charge", cents=500, idempotency_key="order-8")
    assert second["error"]["code"] == -32603

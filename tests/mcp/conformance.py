"""The official conformance suite of MCP against `examples/everything.py`, against our client, and
through our gateway (V9): `make conformance`.

    python -m tests.mcp.conformance                                        every set
    python -m tests.mcp.conformance 2026-07-28                             one set
    python -m tests.mcp.conformance 2026-07-28 --scenario server-stateless every check of one
    scenario, in the suite's words
    python -m tests.mcp.conformance --url http://127.0.0.1:8420/mcp        against a server that runs already
    python -m tests.mcp.conformance client                                 the client's scenarios
    python -m tests.mcp.conformance client --scenario sse-retry            one of them, every check
    python -m tests.mcp.conformance gateway                                the same server behind a gateway

A set is what the suite asks of one revision. Exit code 1 if a scenario that counts has a failed
check, did not run, checked nothing, or if the suite itself says that it failed: silence is never a
pass. Warnings are shown and do not count, except for the client: the suite treats those as
failures.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from msgspec import Struct

from tests.gateway.process import GatewayProcess
from tests.mcp.everything import Everything
from tests.mcp.node import installed, node

SUITE = "@modelcontextprotocol/conformance"
VERSION = "0.2.0-alpha.12"
PATIENCE = 600.0  # seconds that one run of the suite may take; it gives up on a scenario after 30

# The options that select the scenarios. The suite has scenarios for the two older revisions, but
# does not require any.
SETS = {
    "2026-07-28": ("--requirements", "2026-07-28"),
    "2025-11-25": ("--requirements", "2025-11-25"),
    "2025-06-18": ("--spec-version", "2025-06-18"),
    "2025-03-26": ("--spec-version", "2025-03-26"),
}
# The suite runs these without counting them, because its own example server fails some. Here they
# count.
ALSO_COUNT = {
    "http-header-validation",
    "http-custom-header-server-validation",
    "json-schema-2020-12",
    "server-session-lifecycle",
    "server-sse-polling",
}
# An extension; the suite always skips the one check of that scenario.
TASKS = re.compile("tasks-(?!status-notifications)")
NOT_OFFERED = re.compile("sep-2640-|tasks-status-notifications")  # wirecall does not have skills

NONE: Mapping[str, str] = {}
STATUSES = {"SUCCESS": "passed", "FAILURE": "failed", "WARNING": "warned"}
RESULT_FOLDER = re.compile(r"(server-)?(?P<scenario>.+)-\d{4}-\d\d-\d\dT[\d-]+Z")
LISTED = re.compile(r"^ +- (?P<scenario>\S+)")


class Verdict(Struct):
    """The result of one scenario."""

    scenario: str
    counts: bool
    checks: list[dict[str, Any]]

    @property
    def tally(self) -> Counter[str]:
        return Counter(check["status"] for check in self.checks)

    @property
    def failed(self) -> bool:
        return bool(self.tally["FAILURE"]) or not self.tally["SUCCESS"]

    @property
    def word(self) -> str:
        if not self.failed:
            return "warn" if self.tally["WARNING"] else "ok"
        return "FAIL" if self.counts else "fail"


def run_set(revision: str, url: str, failing: Mapping[str, str] = NONE) -> bool:
    """Run one set, print its table, and return whether it passed.

    `failing` has scenarios that must fail, each with the reason.
    """
    expected = listed(revision)
    with tempfile.TemporaryDirectory() as folder:
        everything = () if SETS[revision][0] == "--requirements" else ("--suite", "all")
        run = suite("server", "--url", url, *SETS[revision], *everything, "-o", folder)
        found = read_results(Path(folder))
    verdicts = [
        Verdict(scenario, counts, found.get(scenario, [])) for scenario, counts in expected.items()
    ]
    print_table(revision, verdicts)
    for verdict in verdicts:
        if verdict.scenario in failing:
            verdict.counts = False
            print(f"  {verdict.scenario} does not count here: {failing[verdict.scenario]}")
            if not verdict.failed:
                print(f"  {verdict.scenario} passes: take it off the list")
                return False
    failed = [verdict.scenario for verdict in verdicts if verdict.counts and verdict.failed]
    if (
        not found
        or not any(verdict.counts for verdict in verdicts)
        or (run.returncode and not failed)
    ):
        print(
            f"  the suite ended with code {run.returncode}; what it printed last:\n"
            f"{(run.stdout + run.stderr)[-3000:]}"
        )
        return False
    return not failed


def listed(revision: str) -> dict[str, bool]:
    """The scenarios that the suite knows for this set, and whether each counts."""
    found: dict[str, bool] = {}
    scored = server = False
    for line in suite("list", "--server", *SETS[revision]).stdout.splitlines():
        if not line.startswith(" ") and line.strip():
            scored = server = line.startswith("Server scenarios")
            server = server or line.startswith("Run and reported")
        entry = LISTED.match(line)
        if entry and server and not line.endswith("[client]"):
            scenario = entry["scenario"]
            found[scenario] = scored or scenario in ALSO_COUNT or TASKS.match(scenario) is not None
    return found


def read_results(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The checks of every scenario that ran, from the files that the suite wrote."""
    found = {}
    for file in sorted(folder.rglob("checks.json")):
        if name := RESULT_FOLDER.fullmatch(file.parent.relative_to(folder).as_posix()):
            found[name["scenario"]] = json.loads(file.read_bytes())
    return found


def print_table(revision: str, verdicts: Sequence[Verdict]) -> None:
    shown = [
        verdict for verdict in verdicts if verdict.counts or not NOT_OFFERED.match(verdict.scenario)
    ]
    passed = [verdict for verdict in shown if not verdict.failed]
    print(f"\n{revision}: {len(passed)} of {len(shown)} scenarios pass")
    for verdict in shown:
        tally = verdict.tally
        counts = ", ".join(
            f"{tally[status]} {status.lower()}"
            for status in ("SUCCESS", "FAILURE", "WARNING")
            if tally[status]
        )
        print(f"  {verdict.word:4}  {verdict.scenario:48} {counts or 'nothing was checked'}")
        for check in verdict.checks:
            if check["status"] in ("FAILURE", "WARNING"):
                print(f"          {STATUSES[check['status']]} [{check['id']}] {reason(check)}")
    if hidden := len(verdicts) - len(shown):
        print(f"  not offered, or nothing to check: {hidden} scenarios of extensions")


def reason(check: dict[str, Any]) -> str:
    return str(check.get("errorMessage") or check.get("description"))[:400]


def run_scenario(revision: str, scenario: str, url: str) -> bool:
    """Run one scenario and print its checks as they are, with the messages that the suite keeps in
    `details`.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = suite(
            "server",
            "--url",
            url,
            "--scenario",
            scenario,
            "--spec-version",
            revision,
            "--force",
            "-o",
            folder,
        )
        checks = read_results(Path(folder)).get(scenario, [])
    for check in checks:
        print(f"{check['status']:8} [{check['id']}] {check['description']}")
        if check["status"] != "SUCCESS":
            print(
                f"         {check.get('errorMessage')}\n         {json.dumps(check.get('details'), indent=2)}"
            )
    if not checks:
        print(run.stdout + run.stderr)
    return not Verdict(scenario, True, checks).failed and not run.returncode


# --- the gateway ----------------------------------------------------------------------------------

GATEWAY = "gateway"  # the name of this part on the command line
BEHIND = ("2026-07-28", "2025-11-25")  # the sets that run through the gateway
# Scenarios about one hop of the transport. The gateway ends the transport of the client and begins
# another one, so these test the gateway's own hop, and not the server's.
ONE_HOP = {
    "server-sse-polling": "its tool hangs up the stream of its own hop; the gateway reads on there, "
    "and its client has the stream of the other hop, which stays open",
}


def run_gateway(scenario: str | None = None) -> bool:
    """Run the sets of `BEHIND` against the same server behind a gateway.

    All must pass but those in `ONE_HOP`, and those must not pass: else the list is out of date.
    """
    with Everything() as server, tempfile.TemporaryDirectory() as folder:
        upstreams = {"everything": {"url": server.url, "share": "session"}}
        with GatewayProcess(Path(folder) / GATEWAY, upstreams) as gateway:
            url = f"{gateway.url}/mcp/everything"
            print("\nthrough the gateway:")
            if scenario is not None:
                return all(run_scenario(revision, scenario, url) for revision in BEHIND)
            verdicts = [run_set(revision, url, ONE_HOP) for revision in BEHIND]
            passed = all(verdicts)
            if not passed:
                print(f"\nThe gateway's log ends with:\n{gateway.log()}")
    return passed


# --- the client -----------------------------------------------------------------------------------

CLIENT = "client"  # the name of this part on the command line
AT_ONCE = 4  # scenarios
# The scenarios that the suite has beyond those that it scores: each set with the revisions that it
# runs at.
CLIENT_SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "more": {
        "initialize": ("2025-06-18",),
        "tools_call": ("2025-06-18",),
        "json-schema-2020-12-preservation": ("2026-07-28", "2025-11-25"),
    },
    "authorization of 2025-03-26": {
        "auth/2025-03-26-oauth-metadata-backcompat": ("2025-03-26",),
        "auth/2025-03-26-oauth-endpoint-fallback": ("2025-03-26",),
    },
    "extensions of authorization": {
        "auth/client-credentials-jwt": ("2026-07-28",),
        "auth/client-credentials-basic": ("2026-07-28",),
        "auth/enterprise-managed-authorization": ("2026-07-28",),
        "auth/dpop": ("2026-07-28",),
        "auth/dpop-nonce": ("2026-07-28",),
        "auth/wif-jwt-bearer": ("2026-07-28",),
    },
}


def client_sets() -> dict[str, list[tuple[str, str]]]:
    """The scenarios of each set, each with a revision: all that the suite scores, and more."""
    sets = {
        f"scored at {revision}": [(name, revision) for name in scored(revision)]
        for revision in ("2026-07-28", "2025-11-25")
    }
    for title, scenarios in CLIENT_SETS.items():
        sets[title] = [
            (name, revision) for name, revisions in scenarios.items() for revision in revisions
        ]
    return sets


def scored(revision: str) -> list[str]:
    """The client's scenarios that the suite scores at a revision."""
    listing = suite("list", "--client", "--requirements", revision).stdout.partition(
        "Client scenarios"
    )[2]
    return [
        entry["scenario"]
        for line in listing.partition("\n\n")[0].splitlines()
        if (entry := LISTED.match(line))
    ]


def run_client(only: str | None = None) -> bool:
    """Run the client's scenarios, print their tables, and return whether all passed."""
    chosen = {
        title: [run for run in runs if only in (None, run[0])]
        for title, runs in client_sets().items()
    }
    passed = []
    for title, runs in chosen.items():
        with ThreadPoolExecutor(AT_ONCE) as pool:  # each scenario has its own servers
            checked = list(pool.map(lambda run: client_checks(*run), runs))
        results = [(*run, *result) for run, result in zip(runs, checked, strict=True)]
        good = [
            code == 0 and not verdict.failed and not verdict.tally["WARNING"]
            for _, _, code, verdict in results
        ]
        if runs or only is None:
            print(f"\nclient, {title}: {sum(good)} of {len(results)} scenarios pass")
            passed.append(bool(results) and all(good))
        for (name, revision, code, verdict), is_good in zip(results, good, strict=True):
            told = f"{verdict.tally['SUCCESS']} success, code {code}"
            print(f"  {'ok' if is_good else 'FAIL':4}  {f'{name} {revision}':56} {told}")
            for check in verdict.checks:
                if check["status"] in ("FAILURE", "WARNING") or (
                    only and check["status"] == "SUCCESS"
                ):
                    print(f"          {STATUSES[check['status']]} [{check['id']}] {reason(check)}")
    return bool(passed) and all(passed)


def client_checks(scenario: str, revision: str) -> tuple[int, Verdict]:
    """The suite's report on our client, and its exit code."""
    # The suite splits it at its spaces.
    command = f"{sys.executable} -m tests.mcp.conformance_client"
    with tempfile.TemporaryDirectory() as folder:
        # By default the suite does not run extensions at any revision.
        options = ("--scenario", scenario, "--spec-version", revision, "--force", "-o", folder)
        run = suite("client", "--command", command, *options)
        checks = read_results(Path(folder)).get(scenario, [])
    return run.returncode, Verdict(scenario, True, checks)


# --- all of it ------------------------------------------------------------------------------------


def suite(*arguments: str) -> "subprocess.CompletedProcess[str]":
    program = installed(f"{SUITE}@{VERSION}") / SUITE / "dist" / "index.js"
    command = [str(node()), str(program), *arguments]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE
    )


def main() -> int:
    options = argparse.ArgumentParser(
        prog="python -m tests.mcp.conformance", description="The conformance suite of MCP."
    )
    options.add_argument(
        "revision",
        nargs="*",
        help=f"which sets to run: {', '.join(SETS)}, {CLIENT}, {GATEWAY} (all)",
    )
    options.add_argument("--scenario", help="run this scenario only, and print every check")
    options.add_argument(
        "--url", help="an MCP endpoint that runs already, instead of examples/everything.py"
    )
    given = options.parse_args()
    if unknown := set(given.revision) - {*SETS, CLIENT, GATEWAY}:
        options.error(f"no such set: {', '.join(unknown)}")
    everything = not (given.revision or given.url or given.scenario)
    revisions = [name for name in given.revision if name in SETS]
    if not given.revision:
        revisions = list(SETS)
    passed = run_client(given.scenario) if everything or CLIENT in given.revision else True
    if everything or GATEWAY in given.revision:
        passed = run_gateway(given.scenario) and passed
    passed = (run_servers(revisions, given.scenario, given.url) if revisions else True) and passed
    print("\npassed" if passed else "\nFAILED")
    return 0 if passed else 1


def run_servers(revisions: Sequence[str], scenario: str | None, url: str | None) -> bool:
    with nullcontext() if url else Everything() as server:
        passed = run(revisions, scenario, server.url if server else str(url))
        if server and not passed:
            print(f"\nThe server's log ends with:\n{server.log()}")
    return passed


def run(revisions: Sequence[str], scenario: str | None, url: str) -> bool:
    verdicts = [
        run_scenario(revision, scenario, url) if scenario else run_set(revision, url)
        for revision in revisions
    ]
    return all(verdicts)


if __name__ == "__main__":
    sys.exit(main())

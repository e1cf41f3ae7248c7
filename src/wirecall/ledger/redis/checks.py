"""Is this server of Redis fit to be a ledger? What it tells about itself with INFO decides.

A server that cannot keep the contract is refused; one that might not is warned about.
"""

import re
from collections.abc import Iterator
from typing import Any

from wirecall.ledger.base import LedgerDown
from wirecall.logs import logger

OLDEST = (6, 2)


def check_server(where: str, info: dict[str, Any], replicas: int) -> None:
    """Raise or warn. `replicas` is how many of them are to hold a write before it counts."""
    for wrong, why, fix in _faults(info, replicas):
        if wrong:
            raise LedgerDown(f"{where} cannot be a ledger.\n  why: {why}\n  fix: {fix}")
    for doubtful, why in _doubts(info):
        if doubtful:
            logger.warning("the ledger at %s: %s", where, why)


def _faults(info: dict[str, Any], replicas: int) -> Iterator[tuple[bool, str, str]]:
    version = str(info.get("redis_version", "7.0"))
    yield (
        tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST,
        f"it is version {version}",
        f"use {OLDEST[0]}.{OLDEST[1]} or newer",
    )
    yield info.get("role") == "slave", "it is a replica, and takes no writes", "name the primary"
    yield (
        _evicts(info) and info.get("maxmemory", 0) > 0,
        f"it drops records when memory runs out: maxmemory-policy is {info.get('maxmemory_policy')}",
        "CONFIG SET maxmemory-policy noeviction",
    )
    has = info.get("connected_slaves", replicas)
    yield (
        has < replicas,
        f"it has {has} replicas, and with replicas={replicas} a write counts when so many hold it",
        "start the replicas, or take a smaller number",
    )


def _doubts(info: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    unknown = {"redis_version", "role", "maxmemory", "maxmemory_policy", "aof_enabled"} - info.keys()
    yield bool(unknown), f"could not check whether it keeps what it is told: INFO does not tell {', '.join(sorted(unknown))}"
    yield _evicts(info), f"maxmemory-policy is {info.get('maxmemory_policy')}: set noeviction before you set maxmemory"
    yield info.get("aof_enabled") == 0, "appendonly is no; after a crash of the server, commands may run a second time"


def _evicts(info: dict[str, Any]) -> bool:
    return bool(info.get("maxmemory_policy", "noeviction") != "noeviction")

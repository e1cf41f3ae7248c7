"""A ledger in Redis for one test: its own prefix, whose keys are deleted at the end."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from secrets import token_hex
from typing import Any

from redis import Redis, RedisCluster
from redis.exceptions import RedisError

from wirecall.errors import UsageError
from wirecall.ledger.base import without_password
from wirecall.ledger.redis.connection import options_of

# Keys that one step of the search returns.
AT_ONCE = 500
_OURS = ("prefix", "replicas")


@contextmanager
def fresh(url: str) -> Iterator[str]:
    """Yield the URL of an empty ledger in the same server; delete it at the end."""
    options_of(url)  # raises for a URL that the ledger does not take
    base, _, query = url.partition("?")
    fields = [field for field in query.split("&") if field]
    prefix = f"wirecall-test-{token_hex(8)}:"
    kept = [field for field in fields if field.partition("=")[0] != "prefix"]
    plain = [field for field in kept if field.partition("=")[0] not in _OURS]
    try:
        client = _client(f"{re.sub('^valkey:', 'redis:', base)}?{'&'.join(plain)}")
    except (RedisError, OSError) as error:
        raise UsageError(
            f"There is no ledger for tests at {without_password(url)}.",
            str(error),
            "start the server, or pass the URL of another one",
        ) from error
    try:
        yield f"{base}?{'&'.join([*kept, f'prefix={prefix}'])}"
    finally:
        for name in list(client.scan_iter(match=f"{prefix}*", count=AT_ONCE)):
            client.delete(name)
        client.close()


def _client(url: str) -> Any:
    """Return a client of the server, or of the cluster that it belongs to."""
    client: Any = Redis.from_url(url)
    if client.info("cluster").get("cluster_enabled"):
        client.close()
        return RedisCluster.from_url(url)
    return client

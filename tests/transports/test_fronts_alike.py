"""The three fronts answer odd requests alike: about 400 of them, and a reason for each difference."""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.transports import Listening, command
from tests.transports.odd_requests import REQUESTS

FRONTS = ("granian", "granian-asgi", "uvicorn")
SIDE_BY_SIDE = 8


@pytest.fixture(scope="module")
def fronts() -> Iterator[dict[str, Listening]]:
    with ExitStack() as stack:
        found = {}
        for front in FRONTS:
            line = command(front, bytes_in=1000, header_bytes=8192, body_time=2, linger=0.1)
            process = stack.enter_context(
                subprocess.Popen(line, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            _, (address, _) = json.loads(process.stdout.readline())
            found[front] = Listening(int(address.rpartition(":")[2]))
        yield found


async def answered(front: Listening, data: bytes) -> tuple[str, str]:
    """The status, and what the body is: a result, an error with its code, text, or nothing."""
    try:
        answer = await front.raw(data)
    except OSError:
        return "reset", ""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b" ")[1].decode() if head.startswith(b"HTTP/") else "closed"
    if not body:
        return status, ""
    try:
        document = json.loads(body)
    except ValueError:
        return status, "text"
    if "error" in document:
        return status, f"error {document['error']['code']}"
    return status, "result" if "result" in document else "json"


# Each difference in a status, by the end or the beginning of the request's name: the statuses, and
# the reason.
DIFFERENCES: dict[str, tuple[tuple[str, str, str], str]] = {
    # granian, granian-asgi, uvicorn
    "POST http://evil.example/rpc": (("403", "200", "403"), "HOST"),
    "POST http://localhost@evil.example/rpc": (("403", "200", "403"), "HOST"),
    "POST https://evil.example/rpc": (("403", "200", "403"), "HOST"),
    "POST http://localhost:x/rpc": (("403", "200", "400"), "HOST"),
    " http://evil.example/rpc": (("403", "405", "403"), "HOST"),
    " http://localhost@evil.example/rpc": (("403", "405", "403"), "HOST"),
    " https://evil.example/rpc": (("403", "405", "403"), "HOST"),
    " http://localhost:x/rpc": (("403", "405", "400"), "HOST"),
    " http://evil.example": (("403", "404", "400"), "PATH"),
    " http://localhost": (("404", "404", "400"), "PATH"),
    " localhost:80": (("404", "404", "400"), "PATH"),
    " /r\u00c3\u00bcpc": (("404", "404", "400"), "ASCII"),
    "method b'post'": (("405", "405", "400"), "METHOD"),
    "method b'FOO'": (("405", "405", "400"), "METHOD"),
    "method b'P'": (("405", "405", "400"), "METHOD"),
    "version b'HTTP/0.9'": (("400", "400", "200"), "VERSION"),
    "version b'HTTP/2.0'": (("400", "400", "200"), "VERSION"),
    "field b'X: a\\nY: b'": (("200", "200", "400"), "LINE END"),
    "97 fields": (("431", "431", "200"), "FIELDS"),
    "120 fields": (("431", "431", "200"), "FIELDS"),
    "200 fields": (("431", "431", "200"), "FIELDS"),
    "1000 fields": (("431", "431", "200"), "FIELDS"),
    "two lengths": (("200", "200", "400"), "EQUAL LENGTHS"),
    "coding b'chunked' and a length": (("200", "200", "400"), "TWO LENGTHS"),
    "coding b'Chunked' and a length": (("200", "200", "400"), "TWO LENGTHS"),
    "coding b'gzip, chunked' and a length": (("501", "501", "400"), "TWO LENGTHS"),
    "coding b'chunked, chunked'": (("501", "501", "400"), "CODING"),
    "coding b'chunked, chunked' and a length": (("501", "501", "400"), "CODING"),
    "chunks b'5 \\r\\nhello": (("200", "200", "400"), "BLANK"),
    "chunks b'0\\r\\nX: y": (("400", "200", "200"), "TRAILER"),
}
REASONS = {
    "HOST": "Over ASGI, granian gives the path of an absolute target without its host,"
    " so the application cannot judge it.",
    "PATH": "uvicorn's parser refuses a target without a path. The others have an empty path,"
    " which is not an endpoint.",
    "ASCII": "uvicorn's parser refuses a target that is not ASCII. For the others it is a path that"
    " is not an endpoint.",
    "METHOD": "uvicorn's parser has a list of methods and refuses others. The others let the"
    " application decide.",
    "VERSION": "uvicorn's parser (httptools) reads versions 0.9 and 2.0 as it reads 1.1."
    " The answer is one of HTTP/1.1.",
    "LINE END": "granian accepts a line that ends with LF alone, as RFC 9112, section 2.2 allows.",
    "FIELDS": "granian takes up to 100 fields. uvicorn has no such limit; `Limits.header_bytes` bounds both.",
    "EQUAL LENGTHS": "granian takes two equal lengths as one, as RFC 9112, section 6.3 allows.",
    "TWO LENGTHS": "granian drops a length beside a coding and reads chunks,"
    " as RFC 9112, section 6.3 allows.",
    "CODING": "uvicorn's parser refuses the coding itself. For the others the application does, with 501.",
    "BLANK": "granian accepts a blank behind the size of a chunk. The body is not JSON in either case.",
    "TRAILER": "Over RSGI, trailers that no `Trailer` field announces look like malformed chunks.",
}


def explained(name: str) -> str | None:
    """The entry of the table for a request; the most exact one counts."""
    fitting = [
        each for each in DIFFERENCES if name == each or name.startswith(each) or name.endswith(each)
    ]
    return max(fitting, key=len, default=None)


async def test_fronts_answer_odd_requests_alike_except_for_explained_differences(
    fronts: dict[str, Listening],
) -> None:
    """Statuses are compared, and the bodies of requests that the application has seen on all
    fronts.

    A request that a server's own parser refuses gets 400 without a body from granian, and with one
    from uvicorn.
    """
    limit = asyncio.Semaphore(SIDE_BY_SIDE)

    async def one(data: bytes) -> list[tuple[str, str]]:
        async with limit:
            return [await answered(fronts[front], data) for front in FRONTS]

    found = dict(zip(REQUESTS, await asyncio.gather(*map(one, REQUESTS.values())), strict=True))
    unexplained = {}
    used = set()
    for name, answers in found.items():
        statuses = tuple(status for status, _ in answers)
        entry = explained(name)
        if len(set(statuses)) == 1:
            bodies = {body for _, body in answers}
            if statuses[0] != "400" and len(bodies) > 1:
                unexplained[name] = answers
        elif entry is None or DIFFERENCES[entry][0] != statuses:
            unexplained[name] = answers
        else:
            used.add(entry)
    assert unexplained == {}
    assert used == DIFFERENCES.keys(), "a difference is gone: remove it from the table"
    assert {reason for _, reason in DIFFERENCES.values()} == REASONS.keys()
    assert len(found) > 380


async def test_fronts_never_run_a_call_whose_target_names_a_foreign_host(
    fronts: dict[str, Listening],
) -> None:
    """Except over ASGI on granian, which does not show that host."""
    for name in ("POST http://evil.example/rpc", "POST http://localhost@evil.example/rpc"):
        for front in ("granian", "uvicorn"):
            assert (await answered(fronts[front], REQUESTS[name]))[0] == "403"

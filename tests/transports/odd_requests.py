"""About 400 odd requests, each as bytes: what a hostile or a careless client may send."""

from itertools import product

from tests.calls import call

ADD = call("add", {"a": 1, "b": 2})
JSON = b"Content-Type: application/json"
HOST = b"Host: localhost"


def written(
    method: bytes,
    target: bytes,
    fields: list[bytes],
    body: bytes = b"",
    version: bytes = b"HTTP/1.1",
) -> bytes:
    head = b"\r\n".join([method + b" " + target + b" " + version, *fields, b"Connection: close"])
    return head + b"\r\n\r\n" + body


def sized(body: bytes) -> bytes:
    return b"Content-Length: %d" % len(body)


def _targets() -> dict[str, bytes]:
    targets = [
        *(
            b"/rpc",
            b"/rpc?x=1",
            b"/rpc/",
            b"//rpc",
            b"/RPC",
            b"/rpc%2f",
            b"/%72pc",
            b"/rpc#x",
            b"/rpc;x",
            b"/",
            b"/nothing",
        ),
        *(
            b"/../rpc",
            b"/./rpc",
            b"/rpc/..",
            b"/mcp",
            b"/healthz",
            b"/readyz",
            b"/rpc%00",
            b"/rpc%",
            b"/rpc%zz",
            b"/r\xc3\xbcpc",
        ),
        *(
            b"*",
            b"localhost:80",
            b"http://localhost/rpc",
            b"http://localhost",
            b"http://localhost:1/rpc?x",
            b"HTTP://LOCALHOST/rpc",
        ),
        *(
            b"http://evil.example/rpc",
            b"http://localhost@evil.example/rpc",
            b"https://evil.example/rpc",
            b"http://evil.example",
        ),
        *(
            b"http:///rpc",
            b"http://[::1]/rpc",
            b"http://[::1/rpc",
            b"ftp://localhost/rpc",
            b"http://localhost:x/rpc",
        ),
    ]
    methods = (b"POST", b"GET", b"OPTIONS", b"PUT")
    found = {}
    for method, target in product(methods, targets):
        body = ADD if method in (b"POST", b"PUT") else b""
        found[f"{method.decode()} {target.decode('latin-1')}"] = written(
            method, target, [HOST, JSON, sized(body)], body
        )
    return found


def _methods() -> dict[str, bytes]:
    methods = (
        b"HEAD",
        b"DELETE",
        b"PATCH",
        b"TRACE",
        b"CONNECT",
        b"post",
        b"FOO",
        b"P",
        b"PO ST",
        b"POST\t",
        b"",
        b"PO\x00ST",
    )
    targets = (b"/rpc", b"/mcp", b"/healthz")
    return {
        f"method {method!r} {target.decode()}": written(
            method, target, [HOST, JSON, sized(ADD)], ADD
        )
        for method, target in product(methods, targets)
    }


def _versions() -> dict[str, bytes]:
    versions = (
        b"HTTP/1.0",
        b"HTTP/0.9",
        b"HTTP/2.0",
        b"HTTP/1.2",
        b"HTTP/1",
        b"http/1.1",
        b"HTTP/1.1 ",
        b"HTTQ/1.1",
        b"",
    )
    return {
        f"version {each!r}": written(b"POST", b"/rpc", [HOST, JSON, sized(ADD)], ADD, each)
        for each in versions
    }


def _hosts() -> dict[str, bytes]:
    values = [
        *(
            b"localhost",
            b"LOCALHOST",
            b"localhost:99999",
            b"localhost:x",
            b"localhost:",
            b"127.0.0.1",
            b"[::1]",
            b"::1",
            b"",
        ),
        *(
            b"evil.example",
            b"localhost.evil.example",
            b"evil.example@localhost",
            b"localhost/",
            b"localhost, evil.example",
        ),
        *(
            b" localhost ",
            b"\tlocalhost",
            b"local host",
            b"localh\xf6st",
            b"0x7f.1",
            b"127.1",
            b"localhost.",
            b"*",
        ),
    ]
    found = {
        f"Host {each!r}": written(b"POST", b"/rpc", [b"Host: " + each, JSON, sized(ADD)], ADD)
        for each in values
    }
    found["no Host"] = written(b"POST", b"/rpc", [JSON, sized(ADD)], ADD)
    found["two Hosts"] = written(b"POST", b"/rpc", [HOST, HOST, JSON, sized(ADD)], ADD)
    found["two Hosts, one foreign"] = written(
        b"POST", b"/rpc", [HOST, b"Host: evil.example", JSON, sized(ADD)], ADD
    )
    return found


def _fields() -> dict[str, bytes]:
    lines = [
        *(
            b"X: a",
            b"X:a",
            b"X:",
            b"X : a",
            b" X: a",
            b"X\t: a",
            b"X",
            b": a",
            b"X: a\x00b",
            b"X: a\x01b",
            b"X: \xff",
            b"X\xff: a",
        ),
        *(
            b"X: a\r\n b",
            b"X: a\nY: b",
            b"X: a\rY: b",
            b"X(: a",
            b'X": a',
            b"X: " + b"a" * 5000,
            b"X: " + b"a" * 9000,
        ),
        *(
            b"X" * 300 + b": a",
            b"Origin: http://evil.example",
            b"Origin: null",
            b"Origin: http://localhost",
            b"Origin:",
        ),
        *(
            b"Origin: http://localhost\r\nOrigin: http://evil.example",
            b"Expect: 100-continue",
            b"Expect: nonsense",
        ),
        *(
            b"Upgrade: websocket",
            b"Upgrade: h2c",
            b"Content-Encoding: gzip",
            b"Content-Encoding: identity",
            b"TE: trailers",
        ),
        *(
            b"Authorization: a\r\nAuthorization: b",
            b"Idempotency-Key: a",
            b"Idempotency-Key: a\r\nIdempotency-Key: b",
        ),
        *(
            b"Idempotency-Key: \xfc",
            b"Idempotency-Key:",
            b"Cookie: a=b",
            b"Via: 1.1 proxy",
            b"X-Forwarded-Host: evil.example",
        ),
        *(
            b"Forwarded: host=evil.example",
            b"Range: bytes=0-1",
            b"If-Match: *",
            b"Max-Forwards: 0",
            b"Keep-Alive: timeout=5",
        ),
    ]
    return {
        f"field {each[:40]!r}": written(b"POST", b"/rpc", [HOST, JSON, each, sized(ADD)], ADD)
        for each in lines
    }


def _many_fields() -> dict[str, bytes]:
    return {
        f"{count} fields": written(
            b"POST", b"/rpc", [HOST, JSON, *[b"X: a"] * count, sized(ADD)], ADD
        )
        for count in (10, 50, 95, 97, 120, 200, 1000)
    }


def _media() -> dict[str, bytes]:
    values = [
        *(
            b"application/json",
            b"APPLICATION/JSON",
            b"application/json; charset=utf-8",
            b'application/json;charset="UTF-8"',
        ),
        *(
            b"application/json; charset=latin-1",
            b"application/json;",
            b"application/json; x",
            b" application/json ",
        ),
        *(
            b"text/plain",
            b"text/json",
            b"application/jsonp",
            b"application/json, text/plain",
            b"",
            b"a/b",
            b"*/*",
        ),
        *(
            b"application/x-www-form-urlencoded",
            b"multipart/form-data; boundary=x",
            b"application/json; charset=utf-16",
        ),
    ]
    paths = (b"/rpc", b"/mcp")
    return {
        f"media {each!r} {path.decode()}": written(
            b"POST", path, [HOST, b"Content-Type: " + each, sized(ADD)], ADD
        )
        for each, path in product(values, paths)
    }


def _lengths() -> dict[str, bytes]:
    values = [
        *(
            b"0",
            b"00",
            b"+5",
            b"-1",
            b"0x10",
            b"1e1",
            b"5,5",
            b"5, 6",
            b"",
            b" ",
            b"x",
            b"9" * 30,
            b"1001",
            b"18446744073709551616",
        ),
        *(b"%d" % len(ADD), b"0%d" % len(ADD), b" %d " % len(ADD), b"%d" % (len(ADD) - 1)),
    ]
    found = {
        f"length {each!r}": written(b"POST", b"/rpc", [HOST, JSON, b"Content-Length: " + each], ADD)
        for each in values
    }
    found["no length"] = written(b"POST", b"/rpc", [HOST, JSON])
    found["two lengths"] = written(b"POST", b"/rpc", [HOST, JSON, sized(ADD), sized(ADD)], ADD)
    found["two different lengths"] = written(
        b"POST", b"/rpc", [HOST, JSON, sized(ADD), b"Content-Length: 1"], ADD
    )
    return found


def _codings() -> dict[str, bytes]:
    whole = b"%x\r\n%s\r\n0\r\n\r\n" % (len(ADD), ADD)
    found = {}
    for coding in (
        b"chunked",
        b"Chunked",
        b"identity",
        b"gzip",
        b"gzip, chunked",
        b"chunked, gzip",
        b"chunked, chunked",
        b"x",
        b"",
    ):
        line = b"Transfer-Encoding: " + coding
        found[f"coding {coding!r}"] = written(b"POST", b"/rpc", [HOST, JSON, line], whole)
        found[f"coding {coding!r} and a length"] = written(
            b"POST", b"/rpc", [HOST, JSON, line, sized(whole)], whole
        )
    bodies = [
        *(
            b"0\r\n\r\n",
            b"zz\r\n",
            b"-1\r\n{\r\n",
            b"3\r\nhello\r\n0\r\n\r\n",
            b"5 \r\nhello\r\n0\r\n\r\n",
            b"5;x=y\r\nhello\r\n0\r\n\r\n",
        ),
        *(
            b"fffffffffffffffff\r\n",
            b"5\nhello\n0\n\n",
            b"0x5\r\nhello\r\n0\r\n\r\n",
            b"5\r\nhello0\r\n\r\n",
            b"0\r\nX: y\r\n\r\n",
        ),
        *(
            b"0\r\nno field\r\n\r\n",
            b"\r\n\r\n",
            whole.upper(),
            b"00%x\r\n%s\r\n0\r\n\r\n" % (len(ADD), ADD),
        ),
    ]
    for body in bodies:
        found[f"chunks {body[:20]!r}"] = written(
            b"POST", b"/rpc", [HOST, JSON, b"Transfer-Encoding: chunked"], body
        )
    return found


def _bodies() -> dict[str, bytes]:
    bodies = [
        *(
            b"",
            b" ",
            b"{",
            b"}",
            b"[]",
            b"{}",
            b"null",
            b"1",
            b'""',
            b"\xff",
            b"\xef\xbb\xbf" + ADD,
            ADD + b" ",
            ADD + ADD,
            b"\x00",
        ),
        *(
            b"[" * 100,
            b'{"jsonrpc":"2.0","method":"add"}',
            b'[{"jsonrpc":"2.0","method":"add"}]',
            b"x" * 1001,
        ),
    ]
    paths = (b"/rpc", b"/mcp")
    return {
        f"body {body[:20]!r} {path.decode()}": written(
            b"POST", path, [HOST, JSON, sized(body)], body
        )
        for body, path in product(bodies, paths)
    }


REQUESTS = {
    **_targets(),
    **_methods(),
    **_versions(),
    **_hosts(),
    **_fields(),
    **_many_fields(),
    **_media(),
    **_lengths(),
    **_codings(),
    **_bodies(),
}

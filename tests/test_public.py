"""The public surface, by equality: an export is a decision."""

import re
from pathlib import Path

import wirecall
from wirecall import auth, errors, jsonrpc

ROOT = Path(__file__).parents[1]


def test_names_of_wirecall() -> None:
    assert sorted(wirecall.__all__) == [
        "App",
        "BatchTool",
        "CallFailed",
        "CannotTell",
        "Context",
        "DomainError",
        "Done",
        "Header",
        "Kind",
        "Limits",
        "NotDone",
        "ProtocolError",
        "Retry",
        "Router",
        "RpcError",
        "Secret",
        "ToolAnnotations",
        "ToolError",
        "Unauthorized",
        "UsageError",
        "WirecallError",
        "connect",
        "connect_sync",
        "jsonrpc",
    ]
    assert all(hasattr(wirecall, name) for name in wirecall.__all__)


def test_names_of_jsonrpc() -> None:
    assert sorted(jsonrpc.__all__) == [
        "Batch",
        "ErrorObject",
        "InvalidParams",
        "InvalidRequest",
        "MethodNotFound",
        "Request",
        "Response",
        "ResponseBatch",
        "RpcError",
        "dispatch_line",
        "dispatch_line_async",
        "make_batch",
        "make_error",
        "make_notification",
        "make_reply",
        "make_request",
        "make_response",
        "parse_batch",
        "parse_request",
        "parse_response",
        "parse_response_batch",
    ]
    assert all(hasattr(jsonrpc, name) for name in jsonrpc.__all__)


def test_names_of_auth_on_the_server() -> None:
    """`Jwt` and the others are importable without PyJWT: only making one needs it."""
    assert {"Access", "Identity", "Introspection", "Jwt", "Tokens", "Verifier", "digest"} <= {
        *auth.__all__
    }
    assert all(hasattr(auth, name) for name in auth.__all__)


def test_errors_docstring_shows_the_class_tree() -> None:
    drawn = dict.fromkeys(re.findall(r"[├└]── (\w+)", errors.__doc__ or ""))
    defined = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type)
        and issubclass(value, errors.WirecallError)
        and not name.startswith("_")
    }
    assert set(drawn) == set(defined) - {"WirecallError"}
    for name, code in re.findall(r"── (\w+) +(-?\d{5})", errors.__doc__ or ""):
        assert int(code) == getattr(defined[name], "CODE")  # noqa: B009  # only the fixed ones have it


def test_own_error_codes_are_outside_the_reserved_range() -> None:
    """MCP 2026-07-28 closes -32768..-32000; the codes there are JSON-RPC's own, and four of MCP's."""
    codes = {
        value.CODE
        for value in vars(errors).values()
        if isinstance(value, type) and hasattr(value, "CODE")
    }
    assert {code for code in codes if -32768 <= code <= -32000} == {
        *(-32700, -32600, -32601, -32602, -32603),
        *(-32020, -32021, -32022, -32042),
    }


def test_version_and_changelog_agree() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## (\S+) \(\d{4}-\d\d-\d\d\)$", changelog, re.MULTILINE)
    assert released[0] == wirecall.__version__
    headings = re.findall(r"^## (\S+)", changelog, re.MULTILINE)
    assert headings == ["Unreleased", *released]


def test_package_is_typed() -> None:
    assert (Path(wirecall.__file__).parent / "py.typed").exists()

"""`WWW-Authenticate` (RFC 9110, section 11.6.1)."""

import pytest

from wirecall.auth.discovery import Challenge, asked, challenges


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("Bearer", [("bearer", {})]),
        ('Bearer realm="x", scope="a b"', [("bearer", {"realm": "x", "scope": "a b"})]),
        ("BEARER Scope=a", [("bearer", {"scope": "a"})]),
        ('Bearer realm="a, Basic b=\\"c\\""', [("bearer", {"realm": 'a, Basic b="c"'})]),
        ("Basic realm=x, Bearer scope=y", [("basic", {"realm": "x"}), ("bearer", {"scope": "y"})]),
        ("Negotiate abc==, Bearer scope=y", [("negotiate", {}), ("bearer", {"scope": "y"})]),
        ("Bearer,DPoP algs=ES256", [("bearer", {}), ("dpop", {"algs": "ES256"})]),
        (", ,Bearer  a = b ,, c=d", [("bearer", {"a": "b", "c": "d"})]),
        ("Bearer scope=a, scope=b", [("bearer", {"scope": "a"})]),
        ('Bearer scope="open', [("bearer", {}), ("scope", {})]),
        ("", []),
        ("@", []),
    ],
)
def test_challenges_are_parsed(header: str, expected: list[tuple[str, dict[str, str]]]) -> None:
    assert challenges([header]) == [Challenge(scheme, params) for scheme, params in expected]


def test_parameter_is_not_searched_for_in_other_parameters() -> None:
    found = asked(['Bearer x-scope="admin", realm="scope=\\"root\\"", scope="read"'])
    assert found is not None
    assert found.scopes == {"read"}


def test_challenge_for_a_token_is_found_among_several_headers() -> None:
    found = asked(["Basic realm=x", 'DPoP error="use_dpop_nonce"'])
    assert found == Challenge("dpop", {"error": "use_dpop_nonce"})
    assert asked(["Basic realm=x"]) is None

"""The JSON-RPC core alone, without an App."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.size import sized
from tests.values import json_values
from wirecall import UsageError, jsonrpc
from wirecall.errors import EncodeError
from wirecall.protocol.messages import encode

params = (
    st.none()
    | st.lists(json_values, max_size=4)
    | st.dictionaries(st.text(st.characters(codec="utf-8")), json_values)
)
ids = (
    st.none()
    | st.integers()
    | st.text(st.characters(codec="utf-8"))
    | st.floats(allow_nan=False, allow_infinity=False)
)
names = st.text(st.characters(codec="utf-8"))


def echo(method: str, params: Any) -> Any:
    return {"method": method, "params": params}


# --- builders (J1) --------------------------------------------------------------------------------


def test_builders_return_one_line_of_json() -> None:
    assert (
        jsonrpc.make_request("sum", [1, 2], 7)
        == b'{"jsonrpc":"2.0","method":"sum","params":[1,2],"id":7}'
    )
    assert jsonrpc.make_request("now", None, None) == b'{"jsonrpc":"2.0","method":"now","id":null}'
    assert (
        jsonrpc.make_notification("hi", {"a": "x\ny"})
        == b'{"jsonrpc":"2.0","method":"hi","params":{"a":"x\\ny"}}'
    )
    assert jsonrpc.make_notification("hi") == b'{"jsonrpc":"2.0","method":"hi"}'
    assert jsonrpc.make_response("a", None) == b'{"jsonrpc":"2.0","result":null,"id":"a"}'
    assert (
        jsonrpc.make_error(1, 4, "no")
        == b'{"jsonrpc":"2.0","error":{"code":4,"message":"no"},"id":1}'
    )
    assert (
        jsonrpc.make_error(1, 4, "no", [0])
        == b'{"jsonrpc":"2.0","error":{"code":4,"message":"no","data":[0]},"id":1}'
    )
    assert jsonrpc.make_batch([b"{}", b"[]"]) == b"[{},[]]"


def test_empty_batch_cannot_be_made() -> None:
    with pytest.raises(UsageError, match="empty batch"):
        jsonrpc.make_batch([])


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), [{"a": -float("inf")}], object(), "\ud800", {1j}]
)
def test_values_that_json_cannot_hold_are_refused(value: Any) -> None:
    with pytest.raises(EncodeError):
        jsonrpc.make_response(1, value)


@given(names, params, ids)
def test_parse_request_reads_the_output_of_make_request(method: str, params: Any, id: Any) -> None:
    """J2: parse(make(x)) == x."""
    request = jsonrpc.parse_request(jsonrpc.make_request(method, params, id))
    assert (request.method, request.params, request.error_envelope) == (method, params, None)
    assert not request.is_notification
    assert encode(request.id) == encode(id)
    notification = jsonrpc.parse_request(jsonrpc.make_notification(method, params))
    assert (notification.method, notification.params, notification.is_notification) == (
        method,
        params,
        True,
    )


@given(json_values, ids, st.integers(), names)
def test_parse_response_reads_the_output_of_make_response(
    result: Any, id: Any, code: int, message: str
) -> None:
    response = jsonrpc.parse_response(jsonrpc.make_response(id, result))
    assert response.ok
    assert response.result == result
    assert encode(response.id) == encode(id)
    failed = jsonrpc.parse_response(jsonrpc.make_error(id, code, message, result))
    assert failed.error is not None
    assert (failed.error.code, failed.error.message) == (code, message)
    assert not failed.ok


# --- parsers (J2, J9, J10) ------------------------------------------------------------------------


def test_parsed_batch_carries_its_requests_each_with_its_own_error() -> None:
    batch = jsonrpc.parse_batch(
        b'[{"jsonrpc":"2.0","method":"a","id":1},{"id":2},{"jsonrpc":"2.0","method":"b"}]'
    )
    assert batch.is_batch
    assert batch.framing_error is None
    assert [request.method for request in batch.requests] == ["a", "", "b"]
    assert [request.is_notification for request in batch.requests] == [False, False, True]
    assert batch.requests[0].error_envelope is None
    assert json.loads(batch.requests[1].error_envelope or b"") | {"error": 0} == {
        "jsonrpc": "2.0",
        "error": 0,
        "id": 2,
    }


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", -32700),
        (b"{", -32700),
        (b"[]", -32600),
        (b"[1,", -32700),
        (b"7", -32600),
        (b"\xff", -32700),
    ],
)
def test_invalid_message_has_one_framing_error(data: bytes, code: int) -> None:
    batch = jsonrpc.parse_batch(data)
    assert batch.requests == []
    assert json.loads(batch.framing_error or b"")["error"]["code"] == code
    assert json.loads(batch.framing_error or b"")["id"] is None


RAW_IDS = [
    b"7",
    b"-0",
    b"1.50",
    b"1e400",
    b'"a"',
    b'"\\u0061\\/b"',
    b"null",
    b"9" * 4300,
    '"ö\x7f\u2028"'.encode(),
]
RAW_PARAMS = [b'{"b" : 1, "a":[1.0, 1e2 , "\\u00e9"]}', b"[ 1 ]", b"{}", b"[1e400]"]


@pytest.mark.parametrize("id", RAW_IDS)
@pytest.mark.parametrize("params", RAW_PARAMS)
def test_parsed_requests_carry_params_and_id_as_they_were_sent(params: bytes, id: bytes) -> None:
    whole = b'{"jsonrpc":"2.0","method":"a","params": %b ,"id": %b }' % (params, id)
    for request in (
        jsonrpc.parse_request(whole),
        *jsonrpc.parse_batch(b"[%b, %b]" % (whole, whole)).requests,
    ):
        assert (request.params_json, request.id_json) == (params, id)
    request = jsonrpc.parse_batch(whole).requests[0]
    assert (request.params_json, request.id_json) == (params, id)


def test_parsed_requests_without_params_or_id_have_no_raw_bytes() -> None:
    data = (
        b'[{"jsonrpc":"2.0","method":"a"},{},{"id":[]},{"id":"\\u0061"},{"id":null},'
        b'7,{"jsonrpc":"2.0","method":"a","id":1}]'
    )
    requests = jsonrpc.parse_batch(data).requests
    assert [request.id_json for request in requests] == [
        None,
        None,
        None,
        b'"\\u0061"',
        None,
        None,
        b"1",
    ]
    assert [request.params_json for request in requests] == [None] * 7
    plain = jsonrpc.parse_batch(data.replace(b"\\u0061", b"a")).requests
    assert [request.id_json for request in plain] == [None, None, None, b'"a"', None, None, b"1"]


@given(ids, params, st.booleans())
def test_raw_bytes_are_those_that_the_writer_sent(id: Any, params: Any, ascii: bool) -> None:
    def written(value: Any) -> str:
        return json.dumps(value, ensure_ascii=ascii)

    request = jsonrpc.parse_request(
        f'{{"jsonrpc":"2.0","method":"a","params":{written(params or [])},"id":{written(id)}}}'
    )
    assert request.id_json == written(id).encode()
    assert request.params_json == written(params or []).encode()


def test_null_params_are_accepted_only_if_not_strict() -> None:
    data = b'{"jsonrpc":"2.0","method":"a","params":null,"id":1}'
    for parsed in (
        jsonrpc.parse_request(data, strict=False),
        jsonrpc.parse_batch(data, strict=False).requests[0],
    ):
        assert (parsed.params, parsed.params_json, parsed.error_envelope) == (None, None, None)
    assert (
        json.loads(jsonrpc.dispatch_line(data, echo, strict=False) or b"")["result"]["params"]
        is None
    )
    refused = jsonrpc.parse_batch(data).requests[0]
    assert json.loads(refused.error_envelope or b"")["error"]["code"] == -32600
    for other in (b"7", b"true", b'"x"'):
        wrong = jsonrpc.parse_request(data.replace(b"null", other), strict=False)
        assert json.loads(wrong.error_envelope or b"")["error"]["code"] == -32600
        assert wrong.params_json == other


def test_single_request_that_is_an_array_is_refused() -> None:
    request = jsonrpc.parse_request(b'[{"jsonrpc":"2.0","method":"a","id":1}]')
    assert json.loads(request.error_envelope or b"")["error"]["code"] == -32600


def test_manual_mode() -> None:
    """J9: parse, answer the entries oneself, put the reply together."""
    data = (
        b'[{"jsonrpc":"2.0","method":"a","id":1},5,{"jsonrpc":"2.0","method":"n"},'
        b'{"jsonrpc":"2.0","method":"b","id":2}]'
    )
    batch = jsonrpc.parse_batch(data)
    envelopes = [
        request.error_envelope
        or (None if request.is_notification else jsonrpc.make_response(request.id, request.method))
        for request in batch.requests
    ]
    reply = json.loads(jsonrpc.make_reply(envelopes, batch.is_batch) or b"")
    assert [entry.get("result") for entry in reply] == ["a", None, "b"]
    assert [entry["id"] for entry in reply] == [1, None, 2]
    assert jsonrpc.make_reply([None], is_batch=True) is None
    assert jsonrpc.make_reply([b"{}"], is_batch=False) == b"{}"


@pytest.mark.parametrize("version", [b"", b'"jsonrpc":"1.0",', b'"jsonrpc":2,', b'"jsonrpc":null,'])
def test_strict_requires_the_version_and_lax_does_not(version: bytes) -> None:
    """J10."""
    data = b'{%b"method":"a","params":[1],"id":1}' % version
    strict = json.loads(jsonrpc.dispatch_line(data, echo) or b"")
    assert strict["error"]["code"] == -32600
    assert strict["id"] == 1
    lax = json.loads(jsonrpc.dispatch_line(data, echo, strict=False) or b"")
    assert lax == {"jsonrpc": "2.0", "result": {"method": "a", "params": [1]}, "id": 1}
    batch = json.loads(jsonrpc.dispatch_line(b"[%b,{}]" % data, echo, strict=False) or b"")
    assert batch[0] == lax
    assert batch[1]["error"]["code"] == -32600


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "empty"),
        (b"7", "object"),
        (b'{"jsonrpc":"2.0","id":1}', "either"),
        (b'{"jsonrpc":"2.0","result":1,"error":{"code":1,"message":""},"id":1}', "either"),
        (b'{"jsonrpc":"2.0","result":1}', "id"),
        (b'{"result":1,"id":1}', "jsonrpc"),
        (b'{"jsonrpc":"2.0","result":1,"id":true}', "id"),
        (b'{"jsonrpc":"2.0","error":{"message":""},"id":1}', "code"),
        (b'[{"jsonrpc":"2.0","result":1,"id":1}]', "array"),
    ],
)
def test_invalid_response_has_a_reason(data: bytes, why: str) -> None:
    response = jsonrpc.parse_response(data)
    assert not response.ok
    assert response.malformed is not None
    assert why in response.malformed


def test_reply_of_many_responses() -> None:
    reply = jsonrpc.parse_response_batch(
        b'[{"jsonrpc":"2.0","result":1,"id":2},7,{"jsonrpc":"2.0","error":{"code":1,"message":"m","data":null},"id":"x"}]'
    )
    assert reply.is_batch
    assert [response.id for response in reply.responses] == [2, None, "x"]
    assert [response.ok for response in reply.responses] == [True, False, False]
    assert reply.responses[2].error == jsonrpc.ErrorObject(1, "m", None)


# --- dispatch_line (J3) ---------------------------------------------------------------------------


def test_errors_of_a_handler(caplog: pytest.LogCaptureFixture) -> None:
    def handler(method: str, params: Any) -> Any:
        if method == "known":
            raise jsonrpc.RpcError(5, "five", {"x": 1})
        if method == "unsendable":
            raise jsonrpc.RpcError(5, "five", object())
        if method == "nan":
            return float("nan")
        raise ValueError("secret")

    answers = {
        name: json.loads(
            jsonrpc.dispatch_line(jsonrpc.make_request(name, None, 1), handler) or b""
        )["error"]
        for name in ("known", "unsendable", "nan", "broken")
    }
    assert answers["known"] == {"code": 5, "message": "five", "data": {"x": 1}}
    assert (
        answers["unsendable"]
        == answers["nan"]
        == answers["broken"]
        == {"code": -32603, "message": "Internal error"}
    )
    assert "secret" in caplog.text
    assert jsonrpc.dispatch_line(jsonrpc.make_notification("broken"), handler) is None


def test_async_dispatch_line_answers_the_same() -> None:
    async def handler(method: str, params: Any) -> Any:
        await asyncio.sleep(0)
        if method == "broken":
            raise ValueError("secret")
        return echo(method, params)

    data = (
        b'[{"jsonrpc":"2.0","method":"a","params":[1],"id":1},{"jsonrpc":"2.0","method":"n"},{},'
        b'{"jsonrpc":"2.0","method":"broken","id":"b"},{"jsonrpc":"2.0","method":"c","params":[1e400],"id":3},'
        b'{"jsonrpc":"2.0","method":"c","params":[1e400]}]'
    )
    reply = json.loads(asyncio.run(jsonrpc.dispatch_line_async(data, handler)) or b"")
    assert [entry["id"] for entry in reply] == [1, None, "b", 3]
    assert reply[0]["result"] == {"method": "a", "params": [1]}
    assert [entry["error"]["code"] for entry in reply[1:]] == [-32600, -32603, -32602]
    assert asyncio.run(jsonrpc.dispatch_line_async(b"[", handler)) == jsonrpc.dispatch_line(
        b"[", echo
    )


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: data.decode()])
def test_dispatch_line_accepts_every_form_of_bytes_and_str(kind: Any) -> None:
    data = '{"jsonrpc":"2.0","method":"é","params":{"ü":"日"},"id":1}'.encode()
    assert jsonrpc.dispatch_line(kind(data), echo) == jsonrpc.make_response(
        1, {"method": "é", "params": {"ü": "日"}}
    )


# --- any bytes at all -----------------------------------------------------------------------------

entries = st.one_of(
    st.builds(jsonrpc.make_request, names, params, ids),
    st.builds(jsonrpc.make_notification, names, params),
    st.sampled_from(
        [
            b"1",
            b"null",
            b"{}",
            b"[]",
            b'{"id":3}',
            b'{"jsonrpc":"2.0","id":true,"method":"x"}',
            b'"x"',
        ]
    ),
    json_values.map(encode),
)
snippets = st.sampled_from(
    [b"[", b"]", b"{", b"}", b'"', b"\\", b",", b":", b"1", b"e9", b"null", b'"id"', b"\xff", b" "]
)
mangled = st.builds(
    lambda parts: b"".join(parts), st.lists(entries | snippets | st.binary(max_size=3), max_size=8)
)


@settings(max_examples=sized(small=100, full=400))
@given(st.one_of(st.binary(), mangled))
def test_dispatch_line_returns_a_valid_reply_or_nothing_for_any_bytes(data: bytes) -> None:
    reply = jsonrpc.dispatch_line(data, echo)
    if reply is None:
        return
    parsed = jsonrpc.parse_response_batch(reply)
    assert parsed.malformed is None
    assert all(response.malformed is None for response in parsed.responses)


@given(st.lists(entries, min_size=1, max_size=10))
def test_batch_reply_is_the_concatenation_of_its_entries_answers(batch: list[bytes]) -> None:
    """J4, J5: so a malformed entry never changes a neighbour's answer."""
    alone = [jsonrpc.dispatch_line(b"[%b]" % entry, echo) for entry in batch]
    together = jsonrpc.dispatch_line(b"[%b]" % b",".join(batch), echo)
    assert together == jsonrpc.make_reply(
        [answer and answer[1:-1] for answer in alone], is_batch=True
    )

"""Generated clients: they work, they are formatted, and a server's words never become code."""

import ast
import asyncio
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract.contracts import NAMES, contract_of, pets
from tests.contract.schemas import schemas
from tests.size import sized
from wirecall import App, UsageError
from wirecall.contract.generate import MARK, generated
from wirecall.contract.lock import VERSION, Contract, LockedMethod, LockedTool, of_app, sealed

_NUMBERS = count()


def imported(source: str) -> ModuleType:
    """Return the module of a source string, as an import would make it."""
    module = ModuleType(f"generated_{next(_NUMBERS)}")
    sys.modules[module.__name__] = module  # msgspec looks up the names of annotations there
    exec(compile(source, module.__name__, "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("protocol", ["jsonrpc", "mcp"])
def test_generated_clients_call_the_app(protocol: str) -> None:
    app = pets()
    module = imported(generated(of_app(app), protocol))

    async def calls() -> list[Any]:
        async with module.PetsClient(app, check=True) as client:
            found = await client.pets_greet(pet=module.Cat(name="Tom", class_=7))
            bought = [await client.buy(name="Tom", key="k"), await client.buy(name="Tom", key="k")]
            return [found, bought]

    found, bought = asyncio.run(calls())
    assert [each if protocol == "jsonrpc" else each.text for each in bought] == [
        "Tom 0 1",
        "Tom 0 1",
    ]
    assert found == [
        module.Cat(name="Tom", class_=7),
        module.Dog(name="Rex", friends=[module.Dog(name="Max", friends=[])]),
    ]
    with module.SyncPetsClient(app, check=True) as blocking:
        assert blocking.pets_greet(pet=module.Cat(name="Tom", class_=7), size="large") == found
        text = blocking.buy(name="Tom", key_=5)
        assert (text if protocol == "jsonrpc" else text.text) == "Tom 5 2"


def test_client_refuses_a_server_with_another_contract() -> None:
    module = imported(generated(of_app(pets()), "jsonrpc"))
    other = App("pets")

    async def opened() -> None:
        async with module.PetsClient(other, check=True):
            pass

    with pytest.raises(UsageError, match="another contract than this client"):
        asyncio.run(opened())
    with pytest.raises(UsageError, match="another contract than this client"):
        module.SyncPetsClient(other, check=True)
    module.SyncPetsClient(other).close()


def test_stated_errors_are_classes() -> None:
    contract = of_app(pets()).spoken("jsonrpc")
    assert contract.methods is not None
    methods = {
        **contract.methods,
        "forget": msgspec.structs.replace(contract.methods["forget"], errors={"7": "No such pet"}),
    }
    module = imported(
        generated(sealed(msgspec.structs.replace(contract, methods=methods)), "jsonrpc")
    )
    with (
        module.SyncPetsClient(pets()) as client,
        pytest.raises(module.NoSuchPet, match="no such pet") as raised,
    ):
        client.forget()
    assert (raised.value.code, raised.value.ran) == (7, "yes")


def test_equal_contracts_generate_equal_bytes() -> None:
    contract = of_app(pets())
    read = msgspec.json.decode(contract.canonical(), type=Contract)
    assert generated(contract, "jsonrpc") == generated(read, "jsonrpc")
    assert generated(contract, "jsonrpc").startswith(MARK)
    assert contract.spoken("jsonrpc").digest in generated(contract, "jsonrpc")


def is_struct(kind: type) -> bool:
    return issubclass(kind, msgspec.Struct)


def formatted(source: str, tmp_path: Path) -> str:
    file = tmp_path / "client.py"
    file.write_text(source)
    subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--isolated", "-q", str(file)], check=True
    )
    return file.read_text()


@pytest.mark.parametrize("protocol", ["jsonrpc", "mcp"])
def test_module_is_formatted(protocol: str, tmp_path: Path) -> None:
    source = generated(of_app(pets()), protocol)
    assert formatted(source, tmp_path) == source


@pytest.mark.parametrize("protocol", ["jsonrpc", "mcp"])
def test_names_that_python_does_not_have(protocol: str, tmp_path: Path) -> None:
    source = generated(contract_of({name: {"type": "integer"} for name in NAMES}), protocol)
    module = imported(source)
    assert formatted(source, tmp_path) == source
    # The params and the result have the same schema, so they are one class.
    made: list[Any] = [each for each in vars(module).values() if isinstance(each, type)]
    [result] = [each for each in made if each.__module__ == module.__name__ and is_struct(each)]
    fields = dict(zip(result.__struct_encode_fields__, result.__struct_fields__, strict=True))
    assert set(fields) == set(NAMES)
    assert {
        name: fields[name] for name in ("class", "a-b", "1st", "_id", "int", "größe", "ａ", "²", "")
    } == {
        "class": "class_",
        "a-b": "a_b",
        "1st": "x_1st",
        "_id": "id",
        "int": "int_",
        "größe": "größe",
        "ａ": "a",
        "²": "x_2",
        "": "x_",
    }
    assert {fields["a-b"], fields["a.b"], fields["a_b"]} == {"a_b", "a_b_2", "a_b_3"}
    values = dict.fromkeys(NAMES, 1)
    assert msgspec.json.decode(msgspec.json.encode(msgspec.convert(values, result))) == values


ATTACKS = [
    '"""\nimport os\nos.abort()\n"""',
    '\\"""\nimport os\n',
    "'''\nimport os\n'''",
    'x"; import os; "',
    "x'); import os; ('",
    "\\",
    "\\\\\\",
    '"',
    "a\rimport os",
    "a\x0cimport os",
    "a\u2028import os",
    "\u202eimport os",
    "{__import__('os')}",
    "%s {0} \\N{DIGIT ONE} \\x41",
    "# type: ignore",
    "\x00",
    "\ud800",
]


def check_is_tame(source: str) -> None:
    """The module has classes, fields, and methods that call `self._call`, and no other code."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            raise AssertionError(ast.unparse(node))
        if isinstance(node, ast.ImportFrom):
            assert node.module in (
                "__future__",
                "typing",
                "msgspec",
                "wirecall",
                "wirecall.contract",
            ) or (node.module == "wirecall.mcp.client.results")
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) in ("self._call", "field")
        if isinstance(
            node, ast.JoinedStr | ast.Lambda | ast.Global | ast.If | ast.For | ast.With | ast.Delete
        ):
            raise AssertionError(ast.unparse(node))
    assert all(
        isinstance(node, ast.ImportFrom | ast.ClassDef | ast.Assign)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in tree.body
    )


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("protocol", ["jsonrpc", "mcp"])
def test_strings_of_a_server_remain_data(attack: str, protocol: str, tmp_path: Path) -> None:
    readable = attack.encode("utf-8", "replace").decode()  # JSON has no lone surrogates
    schema = {
        "type": "object",
        "properties": {
            readable: {"enum": [readable, f"{readable}2"]},
            "plain": {"const": readable},
        },
    }
    names = {readable: {"$ref": "#/$defs/x", "$defs": {}}, "arg": schema}
    contract = contract_of(names, text=readable, name=readable, errors={"1": readable})
    source = generated(contract, protocol)
    check_is_tame(source)
    imported(source)
    assert formatted(source, tmp_path) == source


words = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    [*ATTACKS[:-1], *NAMES]
)


@settings(max_examples=sized(small=50, full=150), suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(words, schemas(), min_size=1, max_size=4),
    words,
    words,
    st.sampled_from(["jsonrpc", "mcp"]),
)
def test_contract_generates_a_module_that_can_be_imported(
    names: dict[str, Any], text: str, name: str, protocol: str
) -> None:
    source = generated(contract_of(names, text, name, errors={"-5": text}), protocol)
    check_is_tame(source)
    module = imported(source)
    for value in list(vars(module).values()):
        if (
            isinstance(value, type)
            and issubclass(value, msgspec.Struct)
            and value is not msgspec.Struct
        ):
            msgspec.json.Decoder(value)  # msgspec can read each type


def test_contract_without_calls() -> None:
    with pytest.raises(UsageError, match="nothing to call"):
        generated(of_app(App("empty")), "jsonrpc")


def test_type_that_is_nested_too_deep() -> None:
    schema: Any = {"type": "string"}
    for _ in range(400):  # as deep as JSON may be; the walk over it is deeper
        schema = {"type": "array", "items": schema}
    contract = Contract(
        version=VERSION,
        methods={"f": LockedMethod(params={"properties": {"a": schema}}, order=["a"])},
    )
    with pytest.raises(UsageError, match="nested too deep"):
        generated(contract, "jsonrpc")


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": []},
        {"anyOf": []},
        {"type": []},
        {"type": [[], {}]},
        {"type": {}},
        {"enum": [[], {}]},
        {"$ref": []},
    ],
)
@pytest.mark.parametrize("protocol", ["jsonrpc", "mcp"])
def test_odd_schemas_are_any_value(schema: Any, protocol: str) -> None:
    source = generated(contract_of({"a": schema}), protocol)
    imported(source)
    assert "a: Any" in source


def contract_with(output: Any) -> Contract:
    return sealed(Contract(version=VERSION, tools={"t": LockedTool(input={}, output=output)}))


def test_references_that_multiply_are_followed_to_a_limit() -> None:
    parts = {str(at): {"anyOf": [{"$ref": f"#/$defs/{at + 1}"}] * 2} for at in range(50)}
    with pytest.raises(UsageError, match="parts"):
        generated(contract_with(output={"$ref": "#/$defs/0", "$defs": parts}), "mcp")


def test_many_members_with_names_that_python_does_not_have() -> None:
    names = [
        chr(0x2600 + number % 100) * (1 + number // 100)
        for number in range(sized(small=4_000, full=20_000))
    ]
    source = generated(
        contract_with(
            output={"type": "object", "properties": {name: {"type": "string"} for name in names}}
        ),
        "mcp",
    )
    (made,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "TResult"
    )
    fields = {
        node.target.id
        for node in made.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert len(fields) == len(names)

"""Parameters and results whose types are pydantic's.

1. A parameter is pydantic's if its annotation or its default has a model, a pydantic dataclass, a
   type of pydantic's, a `Field(...)` or a constraint of annotated_types anywhere in it
   (`decoder_of`). A model of the parameter then decodes and describes it, with aliases, defaults,
   validators and discriminators. Everything else stays with msgspec.
2. A type that has something of both libraries stays with msgspec if only whole models are
   pydantic's: a hook decodes those. Otherwise one library would ignore the constraints of the
   other, and the registration fails.
3. Values are JSON: "5" is not an int, as everywhere in wirecall. If a model or a field of a
   parameter declares `strict`, true or false, pydantic decides the mode.
4. A result is written and described by its annotation, in pydantic's serialization mode and by
   alias.
5. A client reads a result as its `type=` by the same rules (`wanted`).

pydantic itself is imported when the first such type is registered. This module is imported when the
first function is.
"""

import re
import sys
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Raw, Struct, UnsetType

from wirecall.errors import MOST_PROBLEMS, EncodeError, UsageError
from wirecall.protocol.messages import JsonObject, decode_value, encode

Library: TypeAlias = Literal["msgspec", "pydantic"]

REF_TEMPLATE = "#/$defs/{model}"

# Attributes that identify a Struct, a dataclass, a TypedDict and a NamedTuple.
_WITH_FIELDS = ("__struct_fields__", "__dataclass_fields__", "__total__", "_field_defaults")
_PYDANTIC = ("pydantic", "pydantic_core", "annotated_types")
_UNEXPECTED = re.compile(
    r"Expected `([^`]+)`.*?\[(?:field_name='([^']+)', )?input_value=.*?, input_type=(\w+)\]"
)
# The names of types in JSON; the others have their Python names.
_KINDS = {dict: "object", list: "array", type(None): "null"}


def parts(
    hint: object, seen: set[object], owner: Library | None = None
) -> Iterator[tuple[object, Library | None]]:
    """Yield a type and all types in it: its arguments, and the fields of its classes.

    Each comes with the library that certainly decodes it, because a Struct or a model contains it.
    """
    yield hint, owner
    for part in typing.get_args(hint):
        yield from parts(part, seen, owner)
    # NewType; a `type` statement (3.12).
    behind = getattr(hint, "__supertype__", None) or getattr(hint, "__value__", None)
    if behind is not None and hint not in seen:
        seen.add(hint)
        yield from parts(behind, seen, owner)
    kind = typing.get_origin(hint) or hint  # of a generic class, the class itself
    if not isinstance(kind, type) or (kind, owner) in seen:
        return
    fields = getattr(kind, "__pydantic_fields__", None)
    if isinstance(fields, dict):
        seen.add((kind, owner))
        for field in fields.values():
            whole = field.annotation
            if field.metadata:
                whole = typing.Annotated[(field.annotation, *field.metadata)]
            yield from parts(whole, seen, "pydantic")
    elif any(hasattr(kind, mark) for mark in _WITH_FIELDS):
        seen.add((kind, owner))
        inside = owner
        if hasattr(kind, "__struct_fields__"):
            inside = "msgspec"
        for part in typing.get_type_hints(kind, include_extras=True).values():
            yield from parts(part, seen, inside)


def decoder_of(what: str, hint: object, default: object = None) -> Library:
    """Return the library that decodes and describes a type.

    Raises `UsageError` if each library would ignore a part of it.
    """
    # A part inside a Struct, and one elsewhere, that only pydantic decodes.
    in_struct: object = None
    alone: object = None
    if is_field(default):
        alone = default
    # A part that only msgspec decodes.
    ours: object = None
    has_models = False
    for part, owner in parts(hint, set()):
        has_models = has_models or _is_model(part)
        theirs = _pydantic_mark(part)
        if theirs is not None and owner == "msgspec":
            in_struct = theirs
        elif theirs is not None and owner is None:
            alone = theirs
        found = _msgspec_mark(part)
        if found is not None and owner == "pydantic":
            raise UsageError(
                f"{what} has {found!r} in a pydantic model, which would be ignored.",
                "pydantic decodes its models, and does not know msgspec's types",
                "use a pydantic Field or a pydantic model there",
            )
        ours = ours or found
    if in_struct is not None:
        raise _ignored(what, in_struct, "the Struct around it")
    if alone is not None and ours is not None:
        raise _ignored(what, alone, f"the type, because it has {ours!r}")
    if alone is None and (ours is not None or not has_models):
        return "msgspec"
    try:
        import_module("pydantic")
    except ImportError as error:  # annotated_types can be used without it
        raise UsageError(
            f"{what} has {alone!r}, which pydantic decodes.", str(error), "install pydantic"
        ) from error
    return "pydantic"


def _ignored(what: str, mark: object, decoded: str) -> UsageError:
    return UsageError(
        f"{what} has {mark!r}, which would be ignored.",
        f"msgspec decodes {decoded}",
        "use msgspec.Meta(gt=0) for constraints in msgspec's types, or pydantic for the whole type",
    )


def _is_model(part: object) -> bool:
    kind = typing.get_origin(part) or part
    return isinstance(kind, type) and is_field(kind) and hasattr(kind, "model_validate")


def _pydantic_mark(part: object) -> object:
    """Return the note or the class by which only pydantic decodes a type; None without one.

    A whole model is not one: a hook of msgspec's decoders decodes it.
    """
    for note in getattr(part, "__metadata__", ()):
        if is_field(note):
            return note
    kind = typing.get_origin(part) or part
    if isinstance(kind, type) and is_field(kind) and not hasattr(kind, "model_validate"):
        return kind
    return None


def _msgspec_mark(part: object) -> object:
    """Return the note or the type by which only msgspec decodes a type; None without one."""
    for note in getattr(part, "__metadata__", ()):
        if isinstance(note, msgspec.Meta):
            return note
    kind = typing.get_origin(part) or part
    if isinstance(kind, type) and (issubclass(kind, Struct) or kind in (Raw, UnsetType)):
        return part
    # Pydantic reads only the TypedDicts of typing_extensions.
    is_of_typing = typing.is_typeddict(kind) and type(kind).__module__ == "typing"
    if sys.version_info < (3, 12) and is_of_typing:
        return part
    return None


def described(hint: Any, decoder: Library) -> Any:
    """Return an annotation whose description suits its decoder.

    A description is a string: `Annotated[int, "in cents"]`.
    """
    marks = getattr(hint, "__metadata__", ())
    text = next((mark for mark in marks if isinstance(mark, str)), None)
    if text is None:
        return hint
    if decoder == "msgspec":
        mark: object = msgspec.Meta(description=text)
    else:
        from pydantic import Field  # late, as below

        mark = Field(description=text)
    # It comes first: an explicit description overrides it.
    return typing.Annotated[
        (hint.__origin__, mark, *(each for each in marks if not isinstance(each, str)))
    ]


def is_field(found: object) -> bool:
    """Return whether a type, or a note in an `Annotated`, belongs to pydantic."""
    kind = type(found)
    if isinstance(found, type):
        kind = found
    is_theirs = hasattr(kind, "__get_pydantic_core_schema__") or hasattr(
        kind, "__pydantic_validator__"
    )
    return is_theirs or kind.__module__.partition(".")[0] in _PYDANTIC


def _is_strict(hint: Any) -> bool | None:
    """Return True if no part of a type declares a mode, else None, so that pydantic decides."""
    for part, _ in parts(hint, set()):
        config = (
            getattr(part, "model_config", None) or getattr(part, "__pydantic_config__", None) or {}
        )
        notes = [*getattr(part, "__metadata__", ())]
        notes += [inner for note in notes for inner in getattr(note, "metadata", ())]  # of a Field
        if "strict" in config or any(hasattr(note, "strict") for note in notes):
            return None
    return True


class ModelledParameter:
    """A parameter that pydantic decodes and describes: the only field of a model."""

    def __init__(self, what: str, name: str, index: int, hint: Any, default: object) -> None:
        from pydantic import (
            ConfigDict,
            Field,
            create_model,
        )  # late: only apps that use pydantic load it

        # A user's `Field`, in the annotation or as the default, overrides this one, which has the
        # name.
        bare = hint
        notes: list[object] = []
        if typing.get_origin(hint) is typing.Annotated:
            bare, *notes = typing.get_args(hint)
        named: Any = typing.Annotated[(bare, Field(alias=name), *notes)]
        self._field = f"f{index}"
        fields: Any = {self._field: (named, default)}
        with _complaints(what):
            # Bytes are base64, as everywhere; a model inside has its own configuration.
            config = ConfigDict(val_json_bytes="base64", ser_json_bytes="base64")
            self.model = create_model("Params", __config__=config, **fields)
        field = self.model.model_fields[self._field]
        self.required = field.is_required()
        if not isinstance(field.validation_alias, str):
            raise UsageError(
                f"{what} has {field.validation_alias!r} as its name.",
                "a parameter has one name, the one in its schema",
                'use one text: Field(alias="...")',
            )
        if field.default_factory_takes_validated_data:
            raise UsageError(
                f"{what} has a default_factory that takes other values.",
                "each parameter is decoded separately",
                "use a default_factory without parameters",
            )
        self.name = field.validation_alias
        self._opening = b"{%b:" % encode(self.name)
        # None: pydantic decides, because a model or a field declares a mode.
        self.is_strict = _is_strict(self.model)

    def decode(self, raw: Raw) -> object:
        """Return the value of JSON.

        Raises `ValueError`, which `problems` explains, if it does not fit.
        """
        data = bytes(raw)
        if b"e" in data or b"E" in data:
            # Raises for a number that no float can hold; pydantic would take it as infinity.
            decode_value(raw)
        return getattr(
            self.model.model_validate_json(b"%b%b}" % (self._opening, data), strict=self.is_strict),
            self._field,
        )

    def default(self) -> object:
        """Return the value of a parameter that is not given."""
        return getattr(self.model.model_validate_json(b"{}", strict=self.is_strict), self._field)

    def read_text(self, text: str) -> object:
        """Return an argument that came as a string as JSON.

        It is the string if that fits, else the JSON that it spells.
        """
        for raw in (Raw(encode(text)), Raw(text.encode())):
            try:
                self.decode(raw)
                # This refuses NaN and Infinity, which pydantic reads and JSON does not have.
                return decode_value(raw)
            except ValueError:
                continue
        try:
            return decode_value(text)
        except ValueError:
            return text

    def problems(self, error: Exception, where: str) -> list[str]:
        """Return why a value does not fit."""
        return problems(error, where, skip=1)


_is_strict_model = lru_cache(maxsize=1000)(_is_strict)


def decode_model(type: Any, value: object) -> object:
    """Return a model inside one of msgspec's types: the hook of msgspec's decoders."""
    return type.model_validate_json(encode(value), strict=_is_strict_model(type))


def describe(
    what: str, parameters: Sequence[ModelledParameter]
) -> tuple[dict[str, JsonObject], JsonObject]:
    """Return the schemas of parameters by their names, and the definitions that they share."""
    if not parameters:
        return {}, {}
    from pydantic import create_model

    with _complaints(what):
        whole = create_model("Params", __base__=tuple(each.model for each in parameters))
        schema = model_schema(whole, "validation")
    return schema["properties"], schema.get("$defs", {})


def model_schema(model: Any, mode: Literal["validation", "serialization"]) -> JsonObject:
    """Return the schema of a model. Raises `TypeError` for a type that is not one."""
    if not hasattr(model, "model_json_schema"):
        name = getattr(model, "__qualname__", repr(model))
        raise TypeError(f"{name} is not a type that JSON can carry")
    from wirecall.protocol.model_schemas import ModelSchema  # late: it imports pydantic

    schema: JsonObject = model.model_json_schema(
        mode=mode, ref_template=REF_TEMPLATE, schema_generator=ModelSchema
    )
    return schema


class Modelled:
    """A type that pydantic reads, writes and describes: that of a result, or of a form."""

    def __init__(self, what: str, hint: Any, mode: Literal["validation", "serialization"]) -> None:
        from pydantic import TypeAdapter  # late, as above

        from wirecall.protocol.model_schemas import ModelSchema  # it imports pydantic

        with _complaints(what):
            self._adapter: TypeAdapter[Any] = TypeAdapter(hint)
            self.schema = self._adapter.json_schema(
                mode=mode, ref_template=REF_TEMPLATE, schema_generator=ModelSchema
            )
        self._strict = _is_strict(hint)

    def read(self, value: object) -> object:
        """Return the value of JSON.

        Raises `ValueError`, which `problems` explains, if it does not fit.
        """
        return self._adapter.validate_json(encode(value), strict=self._strict)

    def plain(self, value: object) -> object:
        """Return a value as the JSON that its annotation describes.

        Raises `EncodeError` if there is none.
        """
        try:
            return self._adapter.dump_python(value, mode="json", by_alias=True, warnings=False)
        except Exception as error:  # a property or a serializer of the value may raise anything
            raise EncodeError(f"{type(value).__name__}: {error}") from error

    def misfits(self, value: object, where: str) -> list[str]:
        """Return why a value does not fit its annotation."""
        try:
            self._adapter.validate_python(value, strict=True)
            self._adapter.dump_python(value, mode="json", by_alias=True, warnings="error")
        except Exception as error:  # of a validator, which may raise anything
            if hasattr(error, "errors"):
                return problems(error, where)
            # The serializer also checks instances. It names only a place's last member, and repeats
            # the value.
            found = _UNEXPECTED.findall(str(error))
            texts = [
                f"{where}{member and f'.{member}'}: expected {kind}, got {got}"
                for kind, member, got in found
            ]
            return texts or [f"{where}: {str(error)[:200]}"]
        return []


class ResultType:
    """The type that a client reads a result as.

    Pydantic reads it if it has pydantic types, else msgspec.
    """

    def __init__(self, hint: Any) -> None:
        what = f"type={getattr(hint, '__name__', hint)}"
        self._hint = hint
        self._is_modelled = decoder_of(what, hint) == "pydantic"
        self._decode: Callable[[Any], Any]
        if self._is_modelled:
            from pydantic import TypeAdapter  # late, as above

            with _complaints(what):
                adapter = TypeAdapter(hint)
                strict = _is_strict(hint)
            self._decode = lambda raw: adapter.validate_json(bytes(raw), strict=strict)
            return
        try:
            self._decode = msgspec.json.Decoder(hint, dec_hook=_decode_wanted).decode
        except TypeError as error:
            raise UsageError(f"{what} cannot be read from JSON.", str(error)) from error

    def read(self, raw: Raw | bytes) -> Any:
        """Return the value of JSON. Raises `msgspec.ValidationError` if it does not fit."""
        try:
            return self._decode(raw)
        except (ValueError, msgspec.ValidationError) as error:
            raise _explained(error) from None

    def convert(self, value: object) -> Any:
        """Return a value that was already read from JSON, as `read` does."""
        if self._is_modelled:
            return self.read(encode(value))
        try:
            return msgspec.convert(value, self._hint, dec_hook=_decode_wanted, str_keys=True)
        except (ValueError, msgspec.ValidationError) as error:
            raise _explained(error) from None


def _explained(error: Exception) -> Exception:
    """Return a decoder's error with the problems that pydantic found, if it did."""
    if hasattr(error, "errors"):
        return msgspec.ValidationError("; ".join(problems(error, "result")))
    cause = error.__cause__
    if not isinstance(cause, Exception) or not hasattr(cause, "errors"):
        return error
    # A model inside one of msgspec's types has found them.
    place = str(error).partition(" - at `$")[2].rstrip("`")
    return msgspec.ValidationError("; ".join(problems(cause, f"result{place}")))


def _decode_wanted(type: Any, value: object) -> object:
    if not hasattr(type, "model_validate_json"):
        raise ValueError(f"{type.__name__} is not a type that JSON can carry")
    return decode_model(type, value)


_result_types = lru_cache(maxsize=1000)(ResultType)


def wanted(hint: Any) -> ResultType:
    """Return how a client reads a result as a type.

    Raises `UsageError` if the type cannot be read from JSON.
    """
    try:
        return _result_types(hint)
    except TypeError:  # a note in an `Annotated` cannot be hashed
        return ResultType(hint)


@contextmanager
def _complaints(what: str) -> Iterator[None]:
    """Turn pydantic's errors and warnings about a type at registration into a `UsageError`."""
    from pydantic import PydanticUserError

    with warnings.catch_warnings():
        # A warning is about something that pydantic ignores. The schema only omits a default that
        # is not JSON.
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=r".*\[non-serializable-default\]")
        try:
            yield
        except (PydanticUserError, UserWarning, TypeError, ValueError, NameError) as error:
            raise UsageError(
                f"{what} has a type that pydantic cannot read from JSON and describe.",
                str(error).split("\n\nFor further")[0],
                "use types that JSON can carry, and put aliases and defaults on whole parameters "
                "or on fields of models",
            ) from error


# --- messages -------------------------------------------------------------------------------------


def problems(error: Exception, root: str, skip: int = 0) -> list[str]:
    """Return pydantic's problems in our form: the place first, without the value.

    `skip` omits the first steps of each place, for which `root` stands.
    """
    if not hasattr(error, "errors"):  # msgspec's: a number out of range, or nested too deeply
        return [f"{root}: {str(error).lower()[:200]}"]
    texts = []
    found: list[JsonObject] = error.errors(include_url=False, include_context=False)
    for problem in found[:MOST_PROBLEMS]:
        where = root
        for step in problem["loc"][skip:]:
            where += f"[{step}]" if isinstance(step, int) else f".{step}"
        kind = problem["type"]
        text = str(problem["msg"])
        value = problem["input"]
        if kind == "missing":
            text = "missing"
        elif kind in ("extra_forbidden", "unexpected_keyword_argument"):
            text = "unknown name"
        elif kind in ("value_error", "assertion_error"):  # of a validator
            text = text.partition(", ")[2]
        elif text.startswith("Input should be "):
            words = "expected "
            if kind.startswith(("greater_", "less_")):
                words = "expected a value "
            text = text.replace("Input should be ", words, 1)
            if kind.endswith("_type"):
                text += f", got {_KINDS.get(type(value), type(value).__name__)}"
        else:
            text = text[:1].lower() + text[1:]
        texts.append(f"{where}: {text[:200]}")
    return texts

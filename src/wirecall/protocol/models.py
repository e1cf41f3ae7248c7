"""Parameters and results whose types are pydantic's.

1. A parameter is pydantic's if its annotation or its default has a model, a pydantic dataclass, a type of pydantic's, a
   `Field(...)` or a constraint of annotated_types anywhere in it (`decoder_of`). A model of the parameter then decodes and
   describes it, with aliases, defaults, validators and discriminators. Everything else stays with msgspec.
2. A type that has something of both libraries stays with msgspec if only whole models are pydantic's: a hook decodes those.
   Otherwise one library would ignore the constraints of the other, and the registration fails.
3. Values are JSON: "5" is not an int, as everywhere in wirecall. A parameter in which a model or a field declares `strict`,
   either way, has the mode that pydantic gives it.
4. A result is written and described by its annotation, in pydantic's serialization mode and by alias.
5. A client reads a result as its `type=` by the same rules (`wanted`).

pydantic itself is imported when the first such type is registered. This module is imported when the first function is.
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

# What a Struct, a dataclass, a TypedDict and a NamedTuple have, each of them alone.
_WITH_FIELDS = ("__struct_fields__", "__dataclass_fields__", "__total__", "_field_defaults")
_PYDANTIC = ("pydantic", "pydantic_core", "annotated_types")
_UNEXPECTED = re.compile(r"Expected `([^`]+)`.*?\[(?:field_name='([^']+)', )?input_value=.*?, input_type=(\w+)\]")
_KINDS = {dict: "object", list: "array", type(None): "null"}  # the others have the names that they have in Python


def parts(hint: object, seen: set[object], owner: Library | None = None) -> Iterator[tuple[object, Library | None]]:
    """Yield a type and all types in it: its arguments, and the fields of its classes. With each comes the library that
    decodes it for sure, because a Struct or a model is around it."""
    yield hint, owner
    for part in typing.get_args(hint):
        yield from parts(part, seen, owner)
    behind = getattr(hint, "__supertype__", None) or getattr(hint, "__value__", None)  # NewType; a `type` statement (3.12)
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
            whole = typing.Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
            yield from parts(whole, seen, "pydantic")
    elif any(hasattr(kind, mark) for mark in _WITH_FIELDS):
        seen.add((kind, owner))
        inside: Library | None = "msgspec" if hasattr(kind, "__struct_fields__") else owner
        for part in typing.get_type_hints(kind, include_extras=True).values():
            yield from parts(part, seen, inside)


def decoder_of(what: str, hint: object, default: object = None) -> Library:
    """Return the library that decodes and describes a type. Raises `UsageError` if each would ignore a part of it."""
    alone: object = default if is_field(default) else None  # something of pydantic's that msgspec does not decode
    in_struct = ours = None
    has_models = False
    for part, owner in parts(hint, set()):
        kind = typing.get_origin(part) or part
        notes = getattr(part, "__metadata__", ())
        theirs = [note for note in notes if is_field(note)]
        if isinstance(kind, type) and not theirs and is_field(kind):
            if hasattr(kind, "model_validate"):
                has_models = True
            else:
                theirs = [kind]
        if theirs and owner == "msgspec":
            in_struct = theirs[0]
        elif theirs and owner is None:
            alone = theirs[0]
        is_ours = isinstance(kind, type) and (issubclass(kind, Struct) or kind in (Raw, UnsetType))
        if sys.version_info < (3, 12) and typing.is_typeddict(kind) and type(kind).__module__ == "typing":
            is_ours = True  # pydantic reads only those of typing_extensions
        found = next((note for note in notes if isinstance(note, msgspec.Meta)), part if is_ours else None)
        if found is not None and owner == "pydantic":
            raise UsageError(
                f"{what} has {found!r} in a pydantic model, which would be ignored.",
                "pydantic decodes its models, and does not know msgspec's types",
                "use a pydantic Field or a pydantic model there",
            )
        ours = ours or found
    ignored = in_struct or (alone if ours is not None else None)
    if ignored is not None:
        raise UsageError(
            f"{what} has {ignored!r}, which would be ignored.",
            f"msgspec decodes {'the Struct around it' if in_struct else f'the type, because it has {ours!r}'}",
            "use msgspec.Meta(gt=0) for constraints in msgspec's types, or pydantic for the whole type",
        )
    if alone is None and (ours is not None or not has_models):
        return "msgspec"
    try:
        import_module("pydantic")
    except ImportError as error:  # annotated_types can be used without it
        raise UsageError(f"{what} has {alone!r}, which pydantic decodes.", str(error), "install pydantic") from error
    return "pydantic"


def described(hint: Any, decoder: Library) -> Any:
    """Return an annotation with a description in its decoder's form: `Annotated[int, "in cents"]` has it as a text."""
    marks = getattr(hint, "__metadata__", ())
    text = next((mark for mark in marks if isinstance(mark, str)), None)
    if text is None:
        return hint
    if decoder == "msgspec":
        mark: object = msgspec.Meta(description=text)
    else:
        from pydantic import Field  # late, as below

        mark = Field(description=text)
    # It is the first: a description that is written out wins.
    return typing.Annotated[(hint.__origin__, mark, *(each for each in marks if not isinstance(each, str)))]


def is_field(found: object) -> bool:
    """Return whether a type, or a note in an `Annotated`, belongs to pydantic."""
    kind = found if isinstance(found, type) else type(found)
    is_theirs = hasattr(kind, "__get_pydantic_core_schema__") or hasattr(kind, "__pydantic_validator__")
    return is_theirs or kind.__module__.partition(".")[0] in _PYDANTIC


def _is_strict(hint: Any) -> bool | None:
    """Return True where no part of a type declares a mode, else None, which leaves it to pydantic."""
    for part, _ in parts(hint, set()):
        config = getattr(part, "model_config", None) or getattr(part, "__pydantic_config__", None) or {}
        notes = [*getattr(part, "__metadata__", ())]
        notes += [inner for note in notes for inner in getattr(note, "metadata", ())]  # of a Field
        if "strict" in config or any(hasattr(note, "strict") for note in notes):
            return None
    return True


class ModelledParameter:
    """A parameter that pydantic decodes and describes: the only field of a model."""

    def __init__(self, what: str, name: str, index: int, hint: Any, default: object) -> None:
        from pydantic import Field, create_model  # late: only apps that use pydantic load it

        # A `Field` of the user's, in the annotation or as the default, takes precedence over this one, which has the name.
        bare, *notes = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else (hint,)
        named: Any = typing.Annotated[(bare, Field(alias=name), *notes)]
        self._field = f"f{index}"
        fields: Any = {self._field: (named, default)}
        with _complaints(what):
            self.model = create_model("Params", **fields)
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
                "each parameter is decoded by itself",
                "use a default_factory without parameters",
            )
        self.name = field.validation_alias
        self._opening = b"{%b:" % encode(self.name)
        self._strict = _is_strict(self.model)

    def decode(self, raw: Raw) -> object:
        """Return the value of JSON. Raises `ValueError`, which `problems` explains, if it does not fit."""
        data = bytes(raw)
        if b"e" in data or b"E" in data:
            decode_value(raw)  # raises for a number that no float can hold; pydantic would take it as infinity
        return getattr(self.model.model_validate_json(b"%b%b}" % (self._opening, data), strict=self._strict), self._field)

    def default(self) -> object:
        """Return the value of a parameter that is not given."""
        return getattr(self.model.model_validate_json(b"{}", strict=self._strict), self._field)

    def read_text(self, text: str) -> object:
        """Return an argument that came as a text as JSON: as a string if that fits, else as what is written in the text."""
        for raw in (Raw(encode(text)), Raw(text.encode())):
            try:
                self.decode(raw)
                return decode_value(raw)  # this refuses NaN and Infinity, which pydantic reads and JSON does not have
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


def describe(what: str, parameters: Sequence[ModelledParameter]) -> tuple[dict[str, JsonObject], JsonObject]:
    """Return the schemas of parameters by their names, and the definitions that they share."""
    if not parameters:
        return {}, {}
    from pydantic import create_model

    with _complaints(what):
        whole = create_model("Params", __base__=tuple(each.model for each in parameters))
        schema = whole.model_json_schema(ref_template=REF_TEMPLATE)
    return schema["properties"], schema.get("$defs", {})


class Modelled:
    """A type that pydantic reads, writes and describes: that of a result, or of a form."""

    def __init__(self, what: str, hint: Any, mode: Literal["validation", "serialization"]) -> None:
        from pydantic import TypeAdapter  # late, as above

        with _complaints(what):
            self._adapter: TypeAdapter[Any] = TypeAdapter(hint)
            self.schema = self._adapter.json_schema(mode=mode, ref_template=REF_TEMPLATE)
        self._strict = _is_strict(hint)

    def read(self, value: object) -> object:
        """Return the value of JSON. Raises `ValueError`, which `problems` explains, if it does not fit."""
        return self._adapter.validate_json(encode(value), strict=self._strict)

    def plain(self, value: object) -> object:
        """Return a value as the JSON that its annotation describes. Raises `EncodeError` if there is none."""
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
            # The serializer looks into instances, too. It names the last member of a place alone, and repeats the value.
            found = _UNEXPECTED.findall(str(error))
            texts = [f"{where}{member and f'.{member}'}: expected {kind}, got {got}" for kind, member, got in found]
            return texts or [f"{where}: {str(error)[:200]}"]
        return []


class ResultType:
    """The type that a client reads a result as: by pydantic if one of its types is in it, else by msgspec."""

    def __init__(self, hint: Any) -> None:
        what = f"type={getattr(hint, '__name__', hint)}"
        self._hint = hint
        self._is_modelled = decoder_of(what, hint) == "pydantic"
        self._decode: Callable[[Any], Any]
        if self._is_modelled:
            from pydantic import TypeAdapter  # late, as above

            with _complaints(what):
                adapter, strict = TypeAdapter(hint), _is_strict(hint)
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
        """Return a value that was read from JSON already, as `read` does."""
        if self._is_modelled:
            return self.read(encode(value))
        try:
            return msgspec.convert(value, self._hint, dec_hook=_decode_wanted, str_keys=True)
        except (ValueError, msgspec.ValidationError) as error:
            raise _explained(error) from None


def _explained(error: Exception) -> Exception:
    """Return an error of a decoder, or one of msgspec's with the problems that a model inside of its type has found."""
    theirs = error if hasattr(error, "errors") else error.__cause__
    if not isinstance(theirs, Exception) or not hasattr(theirs, "errors"):
        return error
    _, _, place = str(error).partition(" - at `$") if theirs is not error else ("", "", "")
    return msgspec.ValidationError("; ".join(problems(theirs, f"result{place.rstrip('`')}")))


def _decode_wanted(type: Any, value: object) -> object:
    if not hasattr(type, "model_validate_json"):
        raise ValueError(f"{type.__name__} is not a type that JSON can carry")
    return decode_model(type, value)


_result_types = lru_cache(maxsize=1000)(ResultType)


def wanted(hint: Any) -> ResultType:
    """Return how a client reads a result as a type. Raises `UsageError` if the type cannot be read from JSON."""
    try:
        return _result_types(hint)
    except TypeError:  # a note in an `Annotated` cannot be hashed
        return ResultType(hint)


@contextmanager
def _complaints(what: str) -> Iterator[None]:
    """Turn what pydantic says about a type at registration into a `UsageError`, its warnings included."""
    from pydantic import PydanticUserError

    with warnings.catch_warnings():
        # A warning is about something that pydantic ignores. A default that is not JSON is only left out of the schema.
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=r".*\[non-serializable-default\]")
        try:
            yield
        except (PydanticUserError, UserWarning, TypeError, ValueError, NameError) as error:
            raise UsageError(
                f"{what} has a type that pydantic cannot read from JSON and describe.",
                str(error).split("\n\nFor further")[0],
                "use types that JSON can carry, and put aliases and defaults on whole parameters or on fields of models",
            ) from error


# --- texts -----------------------------------------------------------------------------------------------------------


def problems(error: Exception, root: str, skip: int = 0) -> list[str]:
    """Return pydantic's problems in our form: the place first, no quotation of the value. `skip` leaves out the first steps
    of each place, for which `root` stands."""
    if not hasattr(error, "errors"):  # of msgspec: a number out of range, or nested too deeply
        return [f"{root}: {str(error).lower()[:200]}"]
    texts = []
    found: list[JsonObject] = error.errors(include_url=False, include_context=False)
    for problem in found[:MOST_PROBLEMS]:
        where = root + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in problem["loc"][skip:])
        kind, text, value = problem["type"], str(problem["msg"]), problem["input"]
        if kind == "missing":
            text = "missing"
        elif kind in ("extra_forbidden", "unexpected_keyword_argument"):
            text = "unknown name"
        elif kind in ("value_error", "assertion_error"):  # of a validator
            text = text.partition(", ")[2]
        elif text.startswith("Input should be "):
            is_bound = kind.startswith(("greater_", "less_"))
            text = text.replace("Input should be ", "expected a value " if is_bound else "expected ", 1)
            if kind.endswith("_type"):
                text += f", got {_KINDS.get(type(value), type(value).__name__)}"
        else:
            text = text[:1].lower() + text[1:]
        texts.append(f"{where}: {text[:200]}")
    return texts

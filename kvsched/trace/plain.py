"""Events as plain data, and back: the form that stands in a trace file.

Owns: `to_plain`, `from_plain`, and the errors and warnings of traces.
Knows nothing about: files, lines, what events mean.
Invariants: `from_plain(to_plain(event)) == event`. The plain form is an object with the event's kind and its fields by
name; bytes are hex strings, tuples are lists, frozen sets are sorted lists. A field that was appended to an event
later, with a default, may be missing; anything else that does not fit is refused.

The forms are made once, from the annotations in `events.py`: a new event or field needs no line here. The types of
an event's values are looked at all together, since reading a long trace is mostly this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from itertools import chain, product
from operator import itemgetter
from typing import Any, NamedTuple, get_type_hints

from kvsched.trace.events import EVENT_TYPES, Event


class TraceError(ValueError):
    """A trace that cannot be read or does not make sense; the message names the place and the remedy."""


class TraceCutWarning(UserWarning):
    """The last line of a trace was cut (its writer was killed); everything before it was read."""


class _MisfitError(ValueError):
    """A value is not of its field's type; the message is the type that was expected."""


_Read = Callable[[Any], Any]
_Write = Callable[[Any], Any]


class _Field(NamedTuple):
    """How a field of one type stands in JSON.

    types: what its value may be there. write, read: converters, None where JSON's own value will do.
    """

    types: tuple[type[Any], ...]
    expected: str
    write: _Write | None = None
    read: _Read | None = None


_INT, _JUST_LIST = frozenset({int}), frozenset({list})


def _ints(value: list[Any]) -> tuple[int, ...]:
    if not _INT.issuperset(map(type, value)):
        raise _MisfitError
    return tuple(value)


def _strs(value: list[Any]) -> tuple[str, ...]:
    try:
        return tuple(map(sys.intern, value))
    except TypeError:
        raise _MisfitError from None


def _int_lists(value: list[Any]) -> tuple[tuple[int, ...], ...]:
    if not _JUST_LIST.issuperset(map(type, value)) or not _INT.issuperset(map(type, chain.from_iterable(value))):
        raise _MisfitError
    return tuple(map(tuple, value))


def _bytes(value: list[Any]) -> tuple[bytes, ...]:
    try:
        return tuple(map(bytes.fromhex, value))
    except (TypeError, ValueError):
        raise _MisfitError from None


def _hex(value: tuple[bytes, ...]) -> list[str]:
    return [item.hex() for item in value]


_LIST = (list,)
_FIELDS: dict[Any, _Field] = {
    int: _Field((int,), "an integer"),
    bool: _Field((bool,), "true or false"),
    bool | None: _Field((bool, type(None)), "true, false or null"),
    float: _Field((float, int), "a number"),
    str: _Field((str,), "a string", read=sys.intern),
    tuple[int, ...]: _Field(_LIST, "a list of integers", read=_ints),
    tuple[str, ...]: _Field(_LIST, "a list of strings", read=_strs),
    tuple[bytes, ...]: _Field(_LIST, "a list of hex strings", _hex, _bytes),
    tuple[tuple[int, ...], ...]: _Field(_LIST, "a list of lists of integers", read=_int_lists),
    frozenset[int]: _Field(_LIST, "a list of integers", sorted, lambda value: frozenset(_ints(value))),
    frozenset[str]: _Field(_LIST, "a list of strings", sorted, lambda value: frozenset(_strs(value))),
    Mapping[str, Any]: _Field((dict,), "an object", dict),
}
"""By annotation. A tuple needs no writing of its own: JSON makes a list of it."""


class _Form(NamedTuple):
    """How one kind of event is written and read.

    shapes: the types that the values of all fields may have together; values: takes them, in order, from an object;
    reads: (position, converter) of the fields that are not the same in JSON.
    """

    kind: str
    cls: type[Any]
    fields: tuple[_Field, ...]
    shapes: frozenset[tuple[type[Any], ...]]
    values: Callable[[Any], Any]
    reads: tuple[tuple[int, _Read], ...]


def _form(kind: str, cls: type[Any]) -> _Form:
    hints = get_type_hints(cls)
    for name in cls._fields:
        assert hints[name] in _FIELDS, f"{kind}.{name}: no plain form for {hints[name]}"
    fields = tuple(_FIELDS[hints[name]] for name in cls._fields)
    # Every event has a step and, the kind included, at least two keys: itemgetter gives a tuple.
    return _Form(
        kind,
        cls,
        fields,
        frozenset(product((str,), *(field.types for field in fields))),
        itemgetter("kind", *cls._fields),
        tuple((i, field.read) for i, field in enumerate(fields, 1) if field.read is not None),
    )


_FORMS: dict[str, _Form] = {kind: _form(kind, cls) for kind, cls in EVENT_TYPES.items()}
_FORM_OF: dict[type[Any], _Form] = {form.cls: form for form in _FORMS.values()}


def to_plain(event: Event) -> dict[str, Any]:
    """The event as JSON data: {"kind": …, "step": …, …}; tuples stand for lists."""
    form = _FORM_OF[type(event)]
    plain: dict[str, Any] = {"kind": form.kind}
    for name, field, value in zip(form.cls._fields, form.fields, event, strict=True):
        plain[name] = value if field.write is None else field.write(value)
    return plain


def from_plain(plain: Any) -> Event:
    """The inverse of `to_plain`, for what JSON makes of it (lists, no tuples).

    Raises TraceError naming the kind, the field and what was expected.
    """
    if type(plain) is not dict:
        raise TraceError("an event must be a JSON object with a kind")
    kind = plain.get("kind")
    form = _FORMS.get(kind) if type(kind) is str else None
    if form is None:
        raise TraceError(f"unknown kind of event {kind!r:.60}; this version knows {', '.join(_FORMS)}")
    if len(plain) != len(form.fields) + 1:
        return _from_plain_carefully(form, plain)
    try:
        values = form.values(plain)
        if tuple(map(type, values)) not in form.shapes:
            return _from_plain_carefully(form, plain)
        values = list(values)
        for i, read in form.reads:
            values[i] = read(values[i])
    except (KeyError, _MisfitError):
        return _from_plain_carefully(form, plain)
    event: Event = tuple.__new__(form.cls, values[1:])
    return event


def _from_plain_carefully(form: _Form, plain: dict[str, Any]) -> Event:
    """Field by field: fills defaults in, and finds the field to name in an error."""
    cls = form.cls
    extra = sorted(set(plain) - {*cls._fields, "kind"})
    if extra:
        raise TraceError(f"{form.kind} has no field {', '.join(extra)}; it has {', '.join(cls._fields)}")
    values = []
    for name, field in zip(cls._fields, form.fields, strict=True):
        if name not in plain and name in cls._field_defaults:
            values.append(cls._field_defaults[name])
            continue
        if name not in plain:
            raise TraceError(f"{form.kind} lacks its field {name}")
        value = plain[name]
        try:
            if type(value) not in field.types:
                raise _MisfitError
            values.append(value if field.read is None else field.read(value))
        except _MisfitError:
            raise TraceError(f"{form.kind}.{name} must be {field.expected}, not {_short(value)}") from None
    event: Event = cls._make(values)
    return event


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"

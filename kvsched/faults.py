"""What to break, and when: plans of faults as plain data, and the watch over which of them came to pass.

Owns: the kinds of fault, their JSON form, `FaultPlan`, and `FaultWatch` (which faults have come to pass).
Knows nothing about: how the engine carries a fault out.
Invariants: a plan never changes; a fault that never came to pass is reported. Step n is the n-th call of
`schedule()`, from 1, empty ones included; calls for slots are counted from 1 over the whole run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from kvsched.trace.events import EVENT_TYPES

VERSION = 1


class FaultError(ValueError):
    """A fault or a plan that makes no sense; the message names the field and the remedy."""


class FaultNeverFired(UserWarning):
    """A planned fault did not come to pass in the run."""


@dataclass(frozen=True, slots=True)
class FailCall:
    """The `call`-th call for slots of the run fails."""

    kind: ClassVar[str] = "fail_call"
    call: int


@dataclass(frozen=True, slots=True)
class FailRequest:
    """Every call for slots of `request` fails from step `step` on, up to and including `until_step` if given."""

    kind: ClassVar[str] = "fail_request"
    request: str
    step: int
    until_step: int | None = None


@dataclass(frozen=True, slots=True)
class HoldResult:
    """The result of step `step` lands `steps` engine steps later than it would; later results wait behind it.
    While the pipe is full nothing is scheduled meanwhile."""

    kind: ClassVar[str] = "hold_result"
    step: int
    steps: int


@dataclass(frozen=True, slots=True)
class HoldExecution:
    """Step `step` is not executed, nor any later one, until an event happens whose kind is `until` and whose fields
    equal `where` ({"request": "r2"}, say). What happened before the step was submitted does not count."""

    kind: ClassVar[str] = "hold_execution"
    step: int
    until: str
    where: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Abort:
    """`request` is aborted right before the `step`-th call of `schedule()`."""

    kind: ClassVar[str] = "abort"
    request: str
    step: int


@dataclass(frozen=True, slots=True)
class FailLoad:
    """The `occurrence`-th load of `request` (from 1) is reported as failed from its `block`-th block (from 0) on."""

    kind: ClassVar[str] = "fail_load"
    request: str
    occurrence: int = 1
    block: int = 0


@dataclass(frozen=True, slots=True)
class HoldTransfer:
    """The report of `request`'s load or final save comes `steps` engine steps later than it would."""

    kind: ClassVar[str] = "hold_transfer"
    request: str
    transfer: str
    steps: int


Fault = FailCall | FailRequest | HoldResult | HoldExecution | Abort | FailLoad | HoldTransfer
_TYPES: dict[str, type[Any]] = {t.kind: t for t in Fault.__args__}
_LEAST = {"call": 1, "step": 1, "steps": 1, "occurrence": 1, "block": 0, "until_step": 1}


def fault_to_dict(fault: Fault) -> dict[str, Any]:
    """Plain data for JSON."""
    values = {f.name: getattr(fault, f.name) for f in fields(fault)}
    return {"kind": fault.kind} | {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}


def fault_from_dict(data: Mapping[str, Any]) -> Fault:
    """The inverse of `fault_to_dict`. Raises FaultError for anything that is no fault."""
    kind = data.get("kind")
    fault_type = _TYPES.get(str(kind))
    if fault_type is None:
        raise FaultError(f"unknown kind of fault {kind!r}; known kinds: {', '.join(_TYPES)}")
    given = {key: value for key, value in data.items() if key != "kind"}
    known = [f.name for f in fields(fault_type)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise FaultError(f"{kind}: unknown field {', '.join(unknown)}; fields: {', '.join(known)}")
    try:
        fault: Fault = fault_type(**given)
    except TypeError as error:
        raise FaultError(f"{kind}: a field is missing; fields: {', '.join(known)}") from error
    check_fault(fault)
    return fault


def check_fault(fault: Fault) -> None:
    """Raises FaultError for a field that is out of range or names nothing."""
    for f in fields(fault):
        value = getattr(fault, f.name)
        least = _LEAST.get(f.name)
        may_lack = f.name == "until_step" and value is None
        if least is not None and not may_lack and (type(value) is not int or value < least):
            raise FaultError(f"{fault.kind}: {f.name} is {value!r}; it must be a whole number from {least} on")
        if f.name == "request" and not isinstance(value, str):
            raise FaultError(f"{fault.kind}: request is {value!r}; give a request's id")
    if isinstance(fault, FailRequest) and fault.until_step is not None and fault.until_step < fault.step:
        raise FaultError(f"fail_request: until_step is {fault.until_step}, before step {fault.step}; it comes last")
    if isinstance(fault, HoldExecution):
        if not isinstance(fault.where, Mapping):
            raise FaultError(f"hold_execution: where is {fault.where!r}; give field names and values of the event")
        event_type = EVENT_TYPES.get(fault.until)
        if event_type is None:
            raise FaultError(f"hold_execution: until is {fault.until!r}; name an event: {', '.join(EVENT_TYPES)}")
        unknown = sorted(set(fault.where) - set(event_type._fields))
        if unknown:
            names = ", ".join(event_type._fields)
            raise FaultError(f"hold_execution: {fault.until} has no {', '.join(unknown)}; its fields: {names}")
    if isinstance(fault, HoldTransfer) and fault.transfer not in ("load", "save"):
        raise FaultError(f"hold_transfer: transfer is {fault.transfer!r}; choose 'load' or 'save'")


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Faults to carry out in one run. Raises FaultError if one of them makes no sense."""

    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "faults", tuple(self.faults))
        for fault in self.faults:
            check_fault(fault)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"version": VERSION, "faults": [fault_to_dict(fault) for fault in self.faults]}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> FaultPlan:
        """The inverse of `to_dict`."""
        if data.get("version") != VERSION:
            raise FaultError(f"plan has version {data.get('version')!r}; this kvsched reads version {VERSION}")
        unknown = sorted(set(data) - {"version", "faults"})
        if unknown:
            raise FaultError(f"plan has an unknown entry {', '.join(unknown)}; it holds 'version' and 'faults'")
        faults = data.get("faults")
        if not isinstance(faults, list):
            raise FaultError(f"plan: 'faults' is {faults!r}; give a list of faults")
        for fault in faults:
            if not isinstance(fault, Mapping):
                raise FaultError(f"plan: {fault!r} is no fault; give an object with 'kind' and the kind's fields")
        return FaultPlan(tuple(fault_from_dict(fault) for fault in faults))

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> FaultPlan:
        """Read a plan. Raises FaultError if the file holds none."""
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise FaultError(f"{path}: cannot be read as a plan of faults: {error}") from error
        if not isinstance(data, dict):
            raise FaultError(f"{path}: a plan of faults is a JSON object with 'version' and 'faults'")
        try:
            return FaultPlan.from_dict(data)
        except FaultError as error:
            raise FaultError(f"{path}: {error}") from error


class FaultWatch:
    """The faults of a run, and the step at which each came to pass for the first time."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.faults: list[Fault] = []
        self._fired: dict[int, int] = {}
        self._by_type: dict[type[Any], list[Any]] = {}
        self._fail_calls: set[int] = set()
        for fault in faults:
            self.add(fault)

    def add(self, fault: Fault) -> None:
        """One more fault, from now on. Raises FaultError if it makes no sense."""
        check_fault(fault)
        self.faults.append(fault)
        self._by_type.setdefault(type(fault), []).append(fault)
        if isinstance(fault, FailCall):
            self._fail_calls.add(fault.call)

    def of(self, fault_type: type[Any]) -> list[Any]:
        """The faults of one kind, in the order given."""
        return self._by_type.get(fault_type, [])

    def slots_fault(self, request_id: str, call: int, step: int) -> Fault | None:
        """The fault that makes this call for slots fail, if any."""
        if call in self._fail_calls:
            return FailCall(call)
        for fault in self.of(FailRequest):
            within = fault.step <= step and (fault.until_step is None or step <= fault.until_step)
            if fault.request == request_id and within:
                found: Fault = fault
                return found
        return None

    @property
    def fails_slots(self) -> bool:
        """Whether any fault concerns calls for slots."""
        return bool(self.of(FailCall) or self.of(FailRequest))

    def note(self, fault: Fault, step: int) -> bool:
        """A fault came to pass; True if for the first time."""
        index = self.faults.index(fault)
        first = index not in self._fired
        self._fired.setdefault(index, step)
        return first

    @property
    def fired(self) -> list[tuple[Fault, int]]:
        """Faults that came to pass, with the step at which they first did."""
        return [(self.faults[index], step) for index, step in self._fired.items()]

    @property
    def never_fired(self) -> list[Fault]:
        """Faults that have not come to pass."""
        return [fault for index, fault in enumerate(self.faults) if index not in self._fired]

"""Where to stop: conditions on events and on the state, written as text, or a function.

Owns: the grammar, its checks, `Condition`.
Knows nothing about: sessions, engines, where an answer leads.
Invariants: text is parsed, never run; what passes the parser can be asked of every event of every run. A condition
that names an event, or something of an event, is asked anew at each event; one about the state alone counts when it
becomes true.

    condition   = any { "or" any }          preempted                        an event of that kind
    any         = one { "and" one }         allocation_failed and not injected
    one         = "not" one                 preempted and request == "r3"    of one and the same event
                | "(" condition ")"         block == 17                      an event that names block 17
                | word                      free_blocks < 4 or deferred_blocks > 0
                | name op value             not (free_blocks >= 4 or step < 10)
    op          = "==" | "!=" | "<" | "<=" | ">" | ">="
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvsched.trace.events import EVENT_TYPES, Event
from kvsched.trace.state import State


class Moment(NamedTuple):
    """What a condition is asked about. event: what has just happened (None before the first); state: right after it
    (to be looked at, not changed); num_events: how many there have been."""

    event: Event | None
    state: State
    num_events: int


class ConditionError(ValueError):
    """A condition that cannot be read. column: where, from 0."""

    def __init__(self, text: str, column: int, problem: str) -> None:
        super().__init__(f"column {column + 1}: {problem}\n    {text}\n    {' ' * column}^")
        self.column = column


Test = Callable[[Moment], bool]

_ALIASES = {
    "allocation_failed": "slots_failed",
    "finished": "request_finished",
    "arrived": "request_added",
    "guard": "guard_stopped",
    "delivered": "step_delivered",
    "scheduled": "step_scheduled",
}
_FLAGS = ("injected", "resumed", "dropped", "asynchronous")
_TEXTS = ("request", "victim", "wanted_by", "reason")
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_NUMBERS: dict[str, Callable[[State], int]] = {
    "step": lambda state: state.step,
    "free_blocks": lambda state: state.num_free,
    "deferred_blocks": lambda state: sum(len(entry.block_ids) for entry in state.deferred),
    "fence_lag": lambda state: state.sched_step_seq - state.processed_step_seq,
    "steps_in_flight": lambda state: len(state.flights),
    "running": lambda state: state.num_running,
    "waiting": lambda state: state.num_waiting,
    "loading": lambda state: state.num_loading,
    "num_finished": lambda state: state.num_finished,
    "num_preemptions": lambda state: state.num_preemptions,
}
_BLOCK_FIELDS = ("block_ids", "front", "back", "shared", "evicted")
_DEEPEST = 50
_TOKEN = re.compile(
    r"""\s*(?:(?P<name>[A-Za-z_]\w*)|(?P<number>-?\d+)|(?P<text>"[^"]*"|'[^']*')|(?P<sign>==|!=|<=|>=|<|>|\(|\)))"""
)


@dataclass(frozen=True)
class Condition:
    """A condition ready to be asked. at_events: it is about single events; needs_state: it looks at the state."""

    text: str
    test: Test
    at_events: bool
    needs_state: bool

    @staticmethod
    def of(condition: str | Callable[[Moment], Any] | Condition) -> Condition:
        """From text (see the module), from a function of a `Moment`, or a condition as it is.

        A function is asked at every event, and counts whenever it returns something true.
        Raises ConditionError, pointing at the column, for text that cannot be read.
        """
        if isinstance(condition, Condition):
            return condition
        if isinstance(condition, str):
            return _Parser(condition).parse()
        if not callable(condition):
            raise ValueError(f"a condition is text or a function of a Moment, not {type(condition).__name__}")
        function = condition
        name = getattr(function, "__name__", type(function).__name__)
        return Condition(f"function {name}", lambda moment: bool(function(moment)), True, True)

    def __str__(self) -> str:
        return self.text


def names_block(event: Event, block: int) -> bool:
    """Whether an event names a block."""
    return any(block in getattr(event, name, ()) for name in _BLOCK_FIELDS)


def names_request(event: Event, request: str) -> bool:
    """Whether an event happened to a request (not: whether the request was the reason)."""
    return getattr(event, "request", None) == request or request in getattr(event, "request_ids", ())


def words() -> dict[str, tuple[str, ...]]:
    """All names of the grammar, by what they stand for."""
    return {
        "events": (*_ALIASES, *EVENT_TYPES),
        "flags of events": _FLAGS,
        "texts of events": _TEXTS,
        "blocks": ("block",),
        "numbers of the state": tuple(_NUMBERS),
    }


class _Token(NamedTuple):
    kind: str
    text: str
    column: int


def _tokens(text: str) -> Iterator[_Token]:
    at = 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None:
            column = at + len(text[at:]) - len(text[at:].lstrip())
            raise ConditionError(text, column, _unknown_sign(text, column))
        kind = match.lastgroup or ""
        yield _Token(kind, match[kind], match.start(kind))
        at = match.end()
    yield _Token("end", "", len(text))


def _unknown_sign(text: str, column: int) -> str:
    if text[column] == "=":
        return "a single '='; compare with '=='"
    if text[column] in "'\"":
        return "this text has no closing quote"
    return f"{text[column]!r} means nothing here; use names, numbers, quoted texts, == != < <= > >=, and, or, not, ( )"


class _Parser:
    """One text. Builds tests from the inside out; notes what they look at."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(_tokens(text))
        self.at = self.depth = 0
        self.at_events = False
        self.needs_state = False

    def parse(self) -> Condition:
        test = self.either()
        if self.now.kind != "end":
            self.fail("expected 'and', 'or' or the end")
        return Condition(self.text.strip(), test, self.at_events, self.needs_state)

    @property
    def now(self) -> _Token:
        return self.tokens[self.at]

    def fail(self, problem: str, token: _Token | None = None) -> None:
        raise ConditionError(self.text, (token or self.now).column, problem)

    def take(self) -> _Token:
        token = self.now
        self.at += token.kind != "end"
        return token

    def found(self, word: str) -> bool:
        hit = self.now.kind in ("name", "sign") and self.now.text == word
        self.at += hit
        return hit

    def either(self) -> Test:
        tests = [self.both()]
        while self.found("or"):
            tests.append(self.both())
        return tests[0] if len(tests) == 1 else lambda moment: any(test(moment) for test in tests)

    def both(self) -> Test:
        tests = [self.one()]
        while self.found("and"):
            tests.append(self.one())
        return tests[0] if len(tests) == 1 else lambda moment: all(test(moment) for test in tests)

    def one(self) -> Test:
        self.depth += 1
        if self.depth > _DEEPEST:
            self.fail(f"more than {_DEEPEST} nested 'not' and '('")
        test = self.one_within()
        self.depth -= 1
        return test

    def one_within(self) -> Test:
        if self.found("not"):
            inner = self.one()
            return lambda moment: not inner(moment)
        if self.found("("):
            inner = self.either()
            if not self.found(")"):
                self.fail("expected ')'")
            return inner
        return self.atom()

    def atom(self) -> Test:
        token = self.take()
        if token.kind != "name" or token.text in ("and", "or"):
            self.fail("expected a name such as preempted, request, block or free_blocks", token)
        name = token.text
        compares = self.now.kind == "sign" and self.now.text in _OPERATORS
        if name in _NUMBERS:
            return self.number_test(name, token, compares)
        if name in _TEXTS or name == "block":
            return self.event_value_test(name, token, compares)
        kind = _ALIASES.get(name, name)
        if kind not in EVENT_TYPES and name not in _FLAGS:
            self.fail(_unknown_name(name), token)
        if compares:
            self.fail(f"{name} says what happened and stands alone; it is not compared")
        self.at_events = True
        if name in _FLAGS:
            return lambda moment: bool(getattr(moment.event, name, False))
        event_type = EVENT_TYPES[kind]
        return lambda moment: isinstance(moment.event, event_type)

    def number_test(self, name: str, token: _Token, compares: bool) -> Test:
        if not compares:
            self.fail(f"{name} is a number; compare it, as in {name} < 4", token)
        compare = _OPERATORS[self.take().text]
        value = self.value("number", f"{name} is compared with a whole number, as in {name} < 4")
        self.needs_state = True
        read, limit = _NUMBERS[name], int(value)
        return lambda moment: compare(read(moment.state), limit)

    def event_value_test(self, name: str, token: _Token, compares: bool) -> Test:
        example = "block == 17" if name == "block" else f'{name} == "r3"'
        if not compares:
            self.fail(f"{name} must be compared, as in {example}", token)
        sign = self.take()
        if sign.text not in ("==", "!="):
            self.fail(f"{name} is equal or it is not: use == or !=", sign)
        value = self.value("number" if name == "block" else "text", f"write {example}")
        self.at_events = True
        same = sign.text == "=="
        if name == "block":
            block = int(value)
            return lambda moment: moment.event is not None and names_block(moment.event, block) == same
        if name == "request":
            return lambda moment: moment.event is not None and names_request(moment.event, value) == same
        return lambda moment: hasattr(moment.event, name) and (getattr(moment.event, name) == value) == same

    def value(self, kind: str, remedy: str) -> str:
        token = self.take()
        if token.kind != kind:
            self.fail(f"expected {'a whole number' if kind == 'number' else 'a quoted text'}; {remedy}", token)
        return token.text.strip("\"'") if kind == "text" else token.text


def _unknown_name(name: str) -> str:
    known = [word for group in words().values() for word in group]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]}?" if close else f"; known names: {', '.join(known)}"
    return f"unknown name {name!r}{hint}"

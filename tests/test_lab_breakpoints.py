"""The grammar of breakpoints: what it says yes to, and how it says no."""

from __future__ import annotations

import pytest

from kvsched.trace import events as ev
from kvsched.trace.fold import fold
from kvsched.trace.replay import Replay
from lab.breakpoints import Condition, ConditionError, Moment, names_block, words
from lab.search import Search
from tests.lab_runs import crowd

EVENTS = crowd().events[:]


def hits(text: str, events=EVENTS) -> list[int]:
    """Indexes of all events at which `run` would stop."""
    search = Search(Replay(events), 0, [Condition.of(text)])
    found = []
    while (hit := search.go_to(len(events))) is not None:
        found.append(hit.at)
    return found


VICTIM = next(event.request for event in EVENTS if event.kind == "preempted")


def where(test) -> list[int]:
    return [i for i, event in enumerate(EVENTS) if test(event)]


def test_the_run_has_what_is_asked_for():
    kinds = {event.kind for event in EVENTS}
    assert {"preempted", "guard_stopped", "slots_failed", "fence_advanced", "blocks_hit"} <= kinds


@pytest.mark.parametrize("kind", sorted(ev.EVENT_TYPES))
def test_every_kind_of_event_is_a_condition(kind):
    assert hits(kind) == where(lambda e: e.kind == kind)


def test_aliases_stand_for_events():
    assert hits("allocation_failed") == where(lambda e: isinstance(e, ev.SlotsFailed)) != []
    assert hits("finished") == where(lambda e: isinstance(e, ev.RequestFinished))


def test_request_and_kind_are_about_one_event():
    expected = where(lambda e: isinstance(e, ev.Preempted) and e.request == VICTIM)
    assert expected
    assert expected != hits("preempted")
    assert hits(f'preempted and request == "{VICTIM}"') == expected
    assert hits(f"request == '{VICTIM}' and preempted") == expected


def test_a_request_is_meant_by_itself_and_in_steps_not_as_the_reason():
    stop = ev.GuardStopped(3, "r0", "r3", 2, 1)
    step = ev.StepScheduled(3, 1, ("r3",), (1,), (4,), frozenset(), 1, 0, 0.0)
    events = [EVENTS[0], *EVENTS[1:4]]
    state = fold(events)
    asked = Condition.of('request == "r3"').test
    assert not asked(Moment(stop, state, 4))
    assert asked(Moment(step, state, 4))
    assert Condition.of('victim == "r3"').test(Moment(stop, state, 4))


def test_block_names_an_event_that_moves_it():
    expected = where(lambda e: names_block(e, 7))
    assert len(expected) > 3
    assert hits("block == 7") == expected
    assert hits("block == 7 and blocks_allocated") == [i for i in expected if isinstance(EVENTS[i], ev.BlocksAllocated)]


def test_a_condition_on_the_state_counts_when_it_becomes_true():
    free, low = [], False
    replay = Replay(EVENTS)
    for i in range(1, len(EVENTS) + 1):
        now = replay.state_at(i).num_free < 2
        if now and not low:
            free.append(i - 1)
        low = now
    assert len(free) > 1
    assert hits("free_blocks < 2") == free


def test_a_state_that_holds_at_the_start_must_first_become_false():
    assert hits("free_blocks >= 0") == []


def test_not_binds_tighter_than_and_and_and_tighter_than_or():
    left = hits("preempted or guard_stopped and request == 'r1'")
    assert left == hits("preempted or (guard_stopped and (request == 'r1'))")
    assert left != hits("(preempted or guard_stopped) and request == 'r1'")
    assert hits("not preempted and request == 'r1'") == hits("(not preempted) and request == 'r1'")


def test_a_function_is_asked_at_every_event():
    seen = []
    condition = Condition.of(lambda moment: seen.append(moment.num_events))
    Search(Replay(EVENTS), 5, [condition]).go_to(9)
    assert seen == [6, 7, 8, 9]


@pytest.mark.parametrize(
    ("text", "column", "says"),
    [
        ("", 1, "expected a name"),
        ("free_blocks <", 14, "expected a whole number"),
        ("free_block < 4", 1, "did you mean free_blocks"),
        ("preempted = 3", 11, "compare with '=='"),
        ("preempted == 3", 11, "stands alone"),
        ("request < 'r3'", 9, "use == or !="),
        ("request == r3", 12, "quoted text"),
        ("request == 'r3", 12, "closing quote"),
        ("block == 'r3'", 10, "whole number"),
        ("free_blocks", 1, "is a number; compare it"),
        ("(preempted or guard", 20, "expected ')'"),
        ("preempted guard", 11, "expected 'and', 'or' or the end"),
        ("preempted and", 14, "expected a name"),
        ("preempted @ 3", 11, "means nothing here"),
        ("and preempted", 1, "expected a name"),
        ("__import__('os')", 1, "unknown name"),
        ("free_blocks < 4.5", 16, "means nothing here"),
    ],
)
def test_errors_name_the_column_and_the_remedy(text, column, says):
    with pytest.raises(ConditionError) as caught:
        Condition.of(text)
    assert caught.value.column + 1 == column, str(caught.value)
    message = str(caught.value)
    assert f"column {column}: " in message
    assert says in message
    *_, shown, caret = message.split("\n")
    assert shown.strip() == text.strip()
    assert caret.index("^") == 4 + column - 1


def test_deep_nesting_is_refused_not_a_crash():
    with pytest.raises(ConditionError, match="nested"):
        Condition.of("(" * 5000 + "preempted" + ")" * 5000)


def test_what_is_neither_text_nor_function_is_refused():
    with pytest.raises(ValueError, match="not int"):
        Condition.of(3)


def test_all_words_can_be_used():
    groups = words()
    for word in (*groups["events"], *groups["flags of events"]):
        Condition.of(word)
    for word in groups["numbers of the state"]:
        assert Condition.of(f"{word} >= 1").needs_state
    for word in groups["texts of events"]:
        assert Condition.of(f'{word} != "x"').at_events

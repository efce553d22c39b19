"""Every invariant is silent on sound runs, speaks up when it is broken, and says what it is about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsched.connector.scripted import KvRule
from kvsched.invariants import (
    EVENT_INVARIANTS,
    STATE_INVARIANTS,
    Violation,
    check,
    check_all,
    check_state,
    find_stale_writes,
)
from kvsched.request import RequestStatus
from kvsched.step import Transfers
from kvsched.trace import events as ev
from kvsched.trace.fold import apply, fold
from kvsched.trace.state import Deferred, Queue, State
from tests.drive import Drive
from tests.trace_runs import RandomRun, head, make_head, recorded

# ---- sound runs


@given(seed=st.integers(0, 10**6))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_sound_runs_violate_nothing(seed):
    assert check_all(recorded(seed, defer_block_free=True)) == []


@given(seed=st.integers(0, 10**6))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_without_the_fence_only_loads_are_in_danger(seed):
    """Blocks are reused in compute order all the time, with steps in flight; that alone is no hazard."""
    run = RandomRun(seed, defer_block_free=False, max_in_flight=3)
    run.configure = lambda: False
    for _ in run.play():
        pass
    found = check_all(run.events)
    assert {v.invariant for v in found} <= {"stale_write_hazard"}
    if run.connector is None:
        assert found == []


def test_one_event_at_a_time_finds_the_same():
    events = recorded(10, defer_block_free=True, max_in_flight=3)
    broken = _without(events, lambda e: isinstance(e, ev.FenceAdvanced), 3)
    for run in (events, broken):
        state, found = State(), list[Violation]()
        for event in run:
            before = state.copy()
            apply(state, event)
            found += check(before, event, state) if before.num_blocks else []
        assert found == check_all(run)
    assert check_all(broken)


def test_states_can_be_looked_at_less_often():
    events = recorded(10, defer_block_free=True, max_in_flight=3)
    leak = next(i for i, e in enumerate(events) if isinstance(e, ev.BlocksAllocated))
    broken = events[:leak] + events[leak + 1 :]
    often, seldom = (check_all(broken, every=n) for n in (1, 7))
    adding_up = [sum(v.invariant == "references_add_up" for v in found) for found in (often, seldom)]
    assert adding_up[0] > adding_up[1]


# ---- broken ones


def _without(events: list[Any], is_it: Callable[[Any], bool], nth: int = 1) -> list[Any]:
    index = [i for i, event in enumerate(events) if is_it(event)][nth - 1]
    return events[:index] + events[index + 1 :]


def _change(kind: type[Any], change: Callable[[State, Any], Any]) -> tuple[Violation, ...]:
    """The first event of a kind that `change` can change (it returns None where it cannot), over some runs; what the
    invariants say of the changed event."""
    for seed in range(200):
        state = State()
        for event in recorded(seed, 120, defer_block_free=True, max_in_flight=3):
            changed = change(state, event) if isinstance(event, kind) else None
            if changed is not None:
                after = state.copy()
                apply(after, changed)
                return tuple(check(state, changed, after))
            apply(state, event)
    raise AssertionError(f"no run has a {kind.__name__} that can be changed so")


def _last_free(state: State, e: ev.BlocksAllocated) -> Any:
    queue = state.free_queue()
    return e._replace(block_ids=(queue[-1],), evicted=()) if len(queue) > 1 and len(e.block_ids) == 1 else None


def _held(state: State, e: ev.BlocksAllocated) -> Any:
    held = [block for block in range(1, state.num_blocks) if state.refs(block)]
    return e._replace(block_ids=(held[0],), evicted=()) if held else None


def _uncached(state: State, e: ev.BlocksHit) -> Any:
    bare = [block for block in state.free_queue() if state.hash_of(block) is None]
    return e._replace(block_ids=(bare[0],)) if bare else None


def _held_again(state: State, e: ev.BlocksHit) -> Any:
    holder = next((r.id for r in state.unsettled() if r.num_blocks), None)
    return e._replace(request=holder) if holder else None


def _cached_twice(state: State, e: ev.BlocksCached) -> Any:
    r = state.request(e.request)
    return e._replace(first=0, block_ids=tuple(r.block_ids[:1]), hashes=(b"x",)) if e.first else None


def _no_longer_shared(state: State, e: ev.BlocksFreed) -> Any:
    return e._replace(shared=(*e.shared, *e.front), front=()) if e.front else None


def _freed_too_early(state: State, e: ev.BlocksFreed) -> Any:
    return e._replace(back=(*e.back, *e.shared), shared=()) if e.shared else None


def _wrong_end(state: State, e: ev.BlocksFreed) -> Any:
    return e._replace(front=e.back, back=e.front) if e.back else None


def _freed_again(state: State, e: ev.BlocksFreed) -> Any:
    return e._replace(fence=0, front=(*e.front, state.free_queue()[0]), back=e.back) if state.num_free else None


def _ahead_of_the_fifo(state: State, e: ev.BlocksFreed) -> Any:
    return e._replace(request="somebody") if e.fence else None


def _not_delivered_yet(state: State, e: ev.BlocksReleased) -> Any:
    return e._replace(fence=0) if e.fence else None


def _finished_row(state: State, e: ev.StepDelivered) -> Any:
    done = [i for i, name in enumerate(e.request_ids) if state.request(name).is_finished]
    return e._replace(tokens=tuple((1,) if i in done else t for i, t in enumerate(e.tokens))) if done else None


def _chunk_row(state: State, e: ev.StepDelivered) -> Any:
    chunks = [f.scheduled.prefill_chunks for f in state.flights if f.step == e.delivered]
    if not chunks or not chunks[0]:
        return None
    rows = zip(e.request_ids, e.tokens, strict=True)
    return e._replace(tokens=tuple((1,) if name in chunks[0] else tokens for name, tokens in rows))


def _too_many(state: State, e: ev.StepDelivered) -> Any:
    return e._replace(tokens=tuple((9,) * 99 if t else () for t in e.tokens)) if any(e.tokens) else None


def _newest_first(state: State, e: ev.StepDelivered) -> Any:
    if len(state.flights) < 2:
        return None
    newest = state.flights[-1].scheduled
    return e._replace(delivered=newest.step, request_ids=newest.request_ids, tokens=((),) * len(newest.request_ids))


def _row(**changes: Any) -> Callable[[State, ev.StepScheduled], Any]:
    """Change the first row of a step: n by `num_tokens`, its start by `starts`."""

    def change(_: State, e: ev.StepScheduled) -> Any:
        if not e.request_ids:
            return None
        columns = {name: (getattr(e, name)[0] + by, *getattr(e, name)[1:]) for name, by in changes.items()}
        return e._replace(**columns)

    return change


def _empty_rows(_: State, e: ev.StepScheduled) -> Any:
    return e._replace(num_tokens=(0,) * len(e.num_tokens)) if e.num_tokens else None


def _waiting_row(state: State, e: ev.StepScheduled) -> Any:
    if not e.request_ids or not state.waiting or state.waiting[0] in e.request_ids:
        return None
    return e._replace(request_ids=(state.waiting[0], *e.request_ids[1:]))


def _a_chunk_it_is_not(_: State, e: ev.StepScheduled) -> Any:
    whole = [name for name in e.request_ids if name not in e.prefill_chunks]
    return e._replace(prefill_chunks=e.prefill_chunks | {whole[0]}) if whole else None


def _stale(state: State, e: ev.Admitted) -> Any:
    waiting = state.queue(Queue.WAITING)
    owed = [r.id for r in waiting if r.num_stale_output_tokens and not r.drop_stale_output]
    return e._replace(request=owed[0]) if owed else None


def _running(state: State, e: ev.Admitted) -> Any:
    return e._replace(request=state.running[0]) if state.running else None


def _waiting(state: State, e: ev.Preempted) -> Any:
    return e._replace(request=state.waiting[0]) if state.waiting else None


def _finished(state: State, e: ev.RequestFinished) -> Any:
    return e._replace(request=state.finished[0]) if state.finished else None


_BROKEN: list[tuple[str, type[Any], Callable[[State, Any], Any]]] = [
    ("null_block_is_never_used", ev.BlocksAllocated, lambda s, e: e._replace(block_ids=(0, *e.block_ids[1:]))),
    ("only_free_blocks_are_handed_out", ev.BlocksAllocated, _held),
    ("only_free_blocks_are_handed_out", ev.BlocksAllocated, lambda s, e: e._replace(block_ids=e.block_ids[:1] * 2)),
    ("blocks_go_in_queue_order", ev.BlocksAllocated, _last_free),
    ("eviction_is_told", ev.BlocksAllocated, lambda s, e: e._replace(evicted=()) if e.evicted else None),
    ("hits_are_cached_blocks", ev.BlocksHit, _uncached),
    ("hits_are_cached_blocks", ev.BlocksHit, _held_again),
    ("cached_blocks_are_the_holders", ev.BlocksCached, lambda s, e: e._replace(first=e.first + 1)),
    ("cached_blocks_are_the_holders", ev.BlocksCached, _cached_twice),
    ("a_table_is_released_whole", ev.BlocksReleased, lambda s, e: e._replace(block_ids=e.block_ids[1:])),
    ("a_release_waits_for_its_steps", ev.BlocksReleased, _not_delivered_yet),
    ("no_block_is_freed_twice", ev.BlocksFreed, _freed_again),
    ("no_block_is_freed_twice", ev.BlocksFreed, lambda s, e: e._replace(front=e.front * 2) if e.front else None),
    ("shared_blocks_stay_held", ev.BlocksFreed, _no_longer_shared),
    ("shared_blocks_stay_held", ev.BlocksFreed, _freed_too_early),
    ("hashed_blocks_return_to_the_back", ev.BlocksFreed, _wrong_end),
    ("deferred_frees_return_in_order", ev.BlocksFreed, _ahead_of_the_fifo),
    ("deferred_frees_return_in_order", ev.BlocksFreed, lambda s, e: e._replace(fence=e.fence + 1) if e.fence else None),
    ("the_fence_advances_by_one", ev.FenceAdvanced, lambda s, e: e._replace(processed=e.processed + 1)),
    ("the_guard_has_a_reason", ev.GuardStopped, lambda s, e: e._replace(processed=e.fence)),
    ("loads_fill_own_blocks", ev.LoadStarted, lambda s, e: e._replace(block_ids=(s.num_blocks - 1,))),
    ("the_budget_is_kept", ev.StepScheduled, _row(num_tokens=1000)),
    ("the_budget_is_kept", ev.StepScheduled, _empty_rows),
    ("tokens_are_computed_once_and_in_order", ev.StepScheduled, _row(starts=1)),
    ("tokens_are_computed_once_and_in_order", ev.StepScheduled, _row(num_tokens=1)),
    ("tokens_are_computed_once_and_in_order", ev.StepScheduled, _a_chunk_it_is_not),
    ("only_running_requests_are_scheduled", ev.StepScheduled, _waiting_row),
    ("free_blocks_are_told_right", ev.StepScheduled, lambda s, e: e._replace(free=e.free + 1)),
    ("steps_are_numbered", ev.StepScheduled, lambda s, e: e._replace(seq=e.seq + 1)),
    ("steps_are_numbered", ev.StepScheduled, lambda s, e: e._replace(step=s.flights[-1].step) if s.flights else None),
    ("victims_were_running", ev.Preempted, _waiting),
    ("victims_were_running", ev.Preempted, lambda s, e: e._replace(count=e.count + 1)),
    ("admitted_requests_were_waiting", ev.Admitted, _running),
    ("admitted_requests_were_waiting", ev.Admitted, _stale),
    ("steps_are_processed_in_order", ev.StepDelivered, _newest_first),
    ("steps_are_processed_in_order", ev.StepDelivered, lambda s, e: e._replace(delivered=999) if e.tokens else None),
    ("tokens_go_to_whom_they_belong", ev.StepDelivered, _finished_row),
    ("tokens_go_to_whom_they_belong", ev.StepDelivered, _chunk_row),
    ("tokens_go_to_whom_they_belong", ev.StepDelivered, _too_many),
    ("requests_finish_once", ev.RequestFinished, _finished),
    ("requests_finish_once", ev.RequestFinished, lambda s, e: e._replace(num_output_tokens=e.num_output_tokens + 1)),
]


@pytest.mark.parametrize(("name", "kind", "change"), _BROKEN, ids=[f"{i}-{row[0]}" for i, row in enumerate(_BROKEN)])
def test_a_changed_event_is_found(name, kind, change):
    found = {violation.invariant: violation for violation in _change(kind, change)}
    assert name in found
    assert found[name].message
    assert name in str(found[name])


def test_settings_bound_the_steps():
    settings = {"max_num_seqs": 8, "max_in_flight": 3, "max_num_batched_tokens": 40, "num_blocks": 27}
    events = recorded(3, 120, defer_block_free=True, **settings)
    assert check_all(events) == []
    for setting, name in (("max_num_seqs", "running_is_bounded"), ("max_in_flight", "steps_in_flight_are_bounded")):
        config = dict(events[0].config) | {setting: 1, "seq_slots": "running"}
        found = check_all([events[0]._replace(config=config), *events[1:]])
        assert {violation.invariant for violation in found} == {name}
    config = dict(events[0].config) | {"max_num_seqs": 1, "seq_slots": "scheduled"}
    assert check_all([events[0]._replace(config=config), *events[1:]]) == []


# ---- broken states


def _state_with_steps_in_flight() -> State:
    for seed in range(100):
        state = State()
        for event in recorded(seed, 120, defer_block_free=True, max_in_flight=3):
            apply(state, event)
            crowded = len(state.flights) > 1 and state.deferred and state.waiting and state.running
            if isinstance(event, ev.StepScheduled) and crowded:
                assert check_state(state) == []
                return state
    raise AssertionError("no run has such a state")


def _first(state: State, queue: Queue) -> Any:
    return state.own(state.queue(queue)[0].number)


def _lose_a_reference(s: State) -> None:
    block = next(block for block in range(1, s.num_blocks) if s.refs(block))
    s.places[block] -= 1


def _misplaced(s: State) -> None:
    _first(s, Queue.WAITING).status = RequestStatus.RUNNING


def _hold_twice(s: State) -> None:
    r = _first(s, Queue.RUNNING)
    r.table_log, r.num_blocks = r.table_log[: r.num_blocks] * 2, r.num_blocks * 2


_BROKEN_STATES: list[tuple[str, Callable[[State], Any]]] = [
    ("references_add_up", _lose_a_reference),
    ("references_add_up", lambda s: s.deferred.append(s.deferred[-1])),
    ("free_held_and_fenced_make_the_pool", lambda s: setattr(s, "num_free", s.num_free + 1)),
    ("free_held_and_fenced_make_the_pool", lambda s: s.deferred.clear()),
    ("nobody_holds_a_block_twice", _hold_twice),
    ("requests_stand_where_their_status_says", lambda s: setattr(_first(s, Queue.RUNNING), "queue", Queue.WAITING)),
    ("requests_stand_where_their_status_says", lambda s: setattr(s, "num_waiting", 99)),
    ("requests_stand_where_their_status_says", _misplaced),
    ("counters_are_sound", lambda s: setattr(_first(s, Queue.RUNNING), "num_output_placeholders", -1)),
    ("counters_are_sound", lambda s: setattr(_first(s, Queue.RUNNING), "num_in_flight_tokens", 77)),
    ("counters_are_sound", lambda s: setattr(_first(s, Queue.RUNNING), "num_computed_tokens", 10**6)),
    ("the_fifo_is_in_order", lambda s: s.deferred.insert(0, Deferred(s.sched_step_seq + 1, "x", (), 1))),
    ("the_fifo_is_in_order", lambda s: setattr(s, "processed_step_seq", s.sched_step_seq + 1)),
]


@pytest.mark.parametrize(("name", "breaks"), _BROKEN_STATES, ids=[f"{i}-{b[0]}" for i, b in enumerate(_BROKEN_STATES)])
def test_a_broken_state_is_found(name, breaks):
    state = _state_with_steps_in_flight()
    breaks(state)
    assert name in {violation.invariant for violation in check_state(state)}


def test_every_invariant_is_broken_somewhere_here():
    tested = {name for name, *_ in _BROKEN} | {name for name, _ in _BROKEN_STATES}
    tested |= {"running_is_bounded", "steps_in_flight_are_bounded"}  # test_settings_bound_the_steps
    tested |= {"stale_write_hazard", "no_write_under_a_load"}  # these and the next two: below
    tested |= {"one_transfer_at_a_time", "no_release_under_a_load", "no_save_under_a_load"}
    known = {i.__name__ for invariants in EVENT_INVARIANTS.values() for i in invariants}
    assert known | {i.__name__ for i in STATE_INVARIANTS} == tested


# ---- writers that are not ordered with one another


def stale_write(fence: bool) -> Drive:
    """A prefill chunk of an aborted request, still in flight, and a load into the blocks that it writes.

    schedule 1   a: prompt of 12 tokens, blocks 1 2 3        in flight: a fills 1 2 3 | nobody has seen its output
    abort a      fence off: blocks 3 2 1 are free            fence on: they wait for step 1
    schedule 2   b is parked, its load fills                 fence off: 3 2           fence on: 4 5
    """
    drive = Drive(12, 2, rules={"b": KvRule(8)}, defer_block_free=fence)
    drive.events.insert(0, head(drive.scheduler))
    drive.add("a", 12, 4)
    drive.schedule()
    drive.scheduler.finish_requests(["a"])
    drive.add("b", 11, 4)
    drive.schedule()
    return drive


def test_a_stale_write_is_named():
    drive = stale_write(fence=False)
    (violation,) = find_stale_writes(drive.events)
    assert violation in check_all(drive.events)
    assert (violation.invariant, violation.step) == ("stale_write_hazard", 2)
    assert set(violation.blocks) == {2, 3}
    assert (violation.requests, violation.steps) == (("a", "b"), (1,))
    assert violation.message == (
        "blocks 2, 3 were handed to b and filled by its load in step 2,"
        " while step 1, in flight, can still write there for a"
    )


def test_the_fence_closes_it():
    assert find_stale_writes(stale_write(fence=True).events) == []
    assert check_all(stale_write(fence=True).events) == []


def test_a_load_after_the_step_was_processed_is_harmless():
    drive = Drive(12, 2, rules={"b": KvRule(8)}, defer_block_free=False)
    drive.events.insert(0, head(drive.scheduler))
    drive.add("a", 12, 4)
    drive.schedule()
    drive.scheduler.finish_requests(["a"])
    drive.deliver()
    drive.add("b", 11, 4)
    drive.schedule()
    assert drive.scheduler.requests["b"].block_ids[:2] == [3, 2]
    assert find_stale_writes(drive.events) == check_all(drive.events) == []


def test_blocks_reused_in_compute_order_are_no_hazard():
    """The same blocks, the same step in flight, but the second request computes: steps write in order."""
    drive = Drive(12, 2, rules={}, defer_block_free=False)
    drive.events.insert(0, head(drive.scheduler))
    drive.add("a", 12, 4)
    drive.schedule()
    drive.scheduler.finish_requests(["a"])
    drive.add("b", 11, 4)
    drive.schedule()
    assert drive.scheduler.requests["b"].block_ids == [3, 2, 1]
    assert find_stale_writes(drive.events) == check_all(drive.events) == []


def test_only_the_slots_that_a_step_writes_count():
    """A decode step of a long request writes one block; a load into its other blocks races with nothing."""
    drive = Drive(12, 2, rules={"b": KvRule(8)}, defer_block_free=False)
    drive.events.insert(0, head(drive.scheduler))
    drive.add("a", 12, 8)
    drive.schedule()
    drive.deliver()
    decode = drive.schedule()
    assert decode.num_computed_tokens == (12,)
    assert drive.scheduler.requests["a"].block_ids == [1, 2, 3, 4]
    drive.scheduler.finish_requests(["a"])
    drive.add("b", 11, 4)
    drive.schedule()
    load = drive.connector.loads[0]
    assert load.block_ids == (4, 3)
    (violation,) = find_stale_writes(drive.events)
    assert violation.blocks == (4,)


def test_a_synchronous_load_is_not_ordered_with_earlier_steps_either():
    drive = Drive(12, 2, rules={"b": KvRule(8, asynchronous=False)}, defer_block_free=False)
    drive.events.insert(0, head(drive.scheduler))
    drive.add("a", 12, 4)
    drive.schedule()
    drive.scheduler.finish_requests(["a"])
    drive.add("b", 11, 4)
    drive.schedule()
    assert [v.requests for v in find_stale_writes(drive.events)] == [("a", "b")]


_LOADING = [
    make_head(),
    ev.RequestAdded(0, "a", tuple(range(10)), {}, 0, 0.0, 0.0),
    ev.RequestAdded(0, "b", tuple(range(10)), {}, 0, 1.0, 0.0),
    ev.BlocksAllocated(1, "a", (1, 2), ()),
    ev.Parked(1, "a", (1, 2), 0, 8),
    ev.LoadStarted(1, "a", (1, 2), 8, True),
]


def _found(*more: ev.Event) -> list[tuple[Any, ...]]:
    found = check_all([*_LOADING, *more])
    return [(v.invariant, v.blocks, v.requests) for v in found if "_load" in v.invariant or "transfer" in v.invariant]


def test_a_step_must_not_write_under_a_load():
    written = ev.StepScheduled(2, 0, ("b",), (8,), (0,), frozenset(), 1, 5, 0.0)
    handed_on = (ev.BlocksAllocated(2, "b", (2, 1), ()), ev.Admitted(2, "b", False, 0, 0, 0), written)
    assert _found(*handed_on) == [("no_write_under_a_load", (2, 1), ("b", "a"))]
    assert _found(ev.LoadLanded(2, "a"), *handed_on) == []
    violations = find_stale_writes([*_LOADING, *handed_on])
    assert [v.invariant for v in violations] == ["no_write_under_a_load"]


def test_a_request_waits_for_its_own_synchronous_load():
    load = ev.LoadStarted(1, "b", (3,), 4, False)
    row = ev.StepScheduled(1, 0, ("b",), (7,), (3,), frozenset(), 1, 3, 0.0)
    admitted = (ev.BlocksAllocated(1, "b", (3, 4, 5), ()), ev.Admitted(1, "b", False, 3, 0, 3))
    assert _found(*admitted, load, row) == []
    assert _found(*admitted, load._replace(asynchronous=True), row) == [("no_write_under_a_load", (3,), ("b", "b"))]


def test_blocks_are_not_released_under_a_load():
    release = ev.BlocksReleased(2, "a", (1, 2), 0, "aborted")
    assert _found(release) == [("no_release_under_a_load", (1, 2), ("a",))]
    assert _found(ev.LoadLanded(2, "a"), release) == []


def test_a_block_is_in_one_transfer_at_a_time():
    handed_on = ev.BlocksAllocated(2, "b", (2,), ())
    again = ev.LoadStarted(2, "b", (2,), 4, True)
    assert _found(handed_on, again) == [("one_transfer_at_a_time", (2,), ("a", "b"))]
    assert _found(ev.LoadLanded(2, "a"), handed_on, again) == []
    saved = (ev.LoadLanded(2, "a"), ev.SaveStarted(2, "a", (1, 2)))
    assert _found(*saved, handed_on, again) == [("one_transfer_at_a_time", (2,), ("a", "b"))]
    assert _found(*saved, handed_on, again._replace(after_step=2)) == []  # the load waits for that save


def test_a_block_is_not_saved_while_it_is_filled():
    assert _found(ev.SaveStarted(1, "a", (2, 3))) == [("no_save_under_a_load", (2,), ("a", "a"))]
    assert _found(ev.LoadLanded(2, "a"), ev.SaveStarted(2, "a", (2, 3))) == []
    patient = ev.LoadStarted(1, "a", (1, 2), 8, True, 1)
    assert check_all([*_LOADING[:-1], patient, ev.SaveStarted(1, "b", (2,))]) == []


def test_failed_and_aborted_loads_are_no_hazard_with_the_fence():
    drive = Drive(10, 2, rules={"a": KvRule(8), "b": KvRule(8)}, defer_block_free=True)
    drive.events.insert(0, head(drive.scheduler))
    for name in "ab":
        drive.add(name, 10, 3)
    drive.schedule()
    drive.scheduler.finish_requests(["a"])
    drive.report(recving=("a", "b"), invalid=frozenset(drive.scheduler.requests["b"].block_ids[1:]))
    drive.run()
    assert check_all(drive.events) == []
    assert fold(drive.events).num_free == 10


def test_transfers_and_finishes_of_one_report_are_sound():
    drive = Drive(8, 2, rules={"a": KvRule(4, keeps_blocks=True)}, defer_block_free=True)
    drive.events.insert(0, head(drive.scheduler))
    drive.add("a", 6, 1)
    drive.schedule()
    drive.report(recving=("a",))
    drive.run()
    drive.schedule()
    drive._update(drive.calls[-1], Transfers((), ("a",), frozenset()))
    assert check_all(drive.events) == []
    assert fold(drive.events).num_free == 8

"""Why each request got what it got in a step, in sentences with the numbers.

Owns: `Reason`, `Explanation`, `explain_step`.
Knows nothing about: sessions, the live scheduler: it reads a step's events.
Invariants: every request that runs or waits when the step is decided is spoken of once; a number in a sentence comes
from an event or from the state before the step.

The order is the scheduler's own: the running requests, in order of admission; then, if nobody was preempted, those that
wait while they hold blocks; then the other waiting ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvsched.trace import events as ev
from kvsched.trace.fold import apply
from kvsched.trace.state import Queue, RequestState, State
from lab.words import capital, count, inflected, names, numbers


class Reason(NamedTuple):
    """What became of a request (or of several alike), and why. num_tokens: given in this step."""

    requests: tuple[str, ...]
    outcome: str
    num_tokens: int
    sentence: str


class Explanation(list[str]):
    """Sentences, the step as a whole first. reasons: one for each of the others."""

    def __init__(self, headline: str, reasons: Sequence[Reason]) -> None:
        super().__init__([headline, *(reason.sentence for reason in reasons)])
        self.reasons = tuple(reasons)

    def table(self) -> Any:
        """One row per request, as a pandas DataFrame: request, outcome, tokens, why."""
        import pandas as pd

        rows = [(request, r.outcome, r.num_tokens, r.sentence) for r in self.reasons for request in r.requests]
        return pd.DataFrame(rows, columns=["request", "outcome", "tokens", "why"])

    def __repr__(self) -> str:
        return "\n".join(self)


def explain_step(before: State, events: Sequence[ev.Event]) -> Explanation:
    """before: the state in which the step is decided. events: of that call of `schedule()`, step_scheduled last."""
    facts = _Facts(before, events)
    reasons = [*_running(facts), *_waiting(facts)]
    return Explanation(_headline(facts), reasons)


class _Facts:
    """A step's events, by what they are about. breaker: the running request that got no slots and ended the pass."""

    def __init__(self, before: State, events: Sequence[ev.Event]) -> None:
        self.before = before
        self.config = before.config
        self.failed: dict[str, list[ev.SlotsFailed]] = {}
        self.preempted: dict[str, ev.Preempted] = {}
        self.cause: dict[str, ev.SlotsFailed] = {}
        self.released: dict[str, ev.BlocksReleased] = {}
        self.unscheduled: dict[str, int] = {}
        self.allocated: dict[str, tuple[ev.BlocksAllocated, int]] = {}
        self.hits: dict[str, tuple[int, ...]] = {}
        self.admitted: dict[str, ev.Admitted] = {}
        self.skipped: dict[str, ev.Skipped] = {}
        self.parked: dict[str, ev.Parked] = {}
        self.guard: ev.GuardStopped | None = None
        self.no_progress: ev.NoProgress | None = None
        self.breaker: str | None = None
        last_failure: ev.SlotsFailed | None = None
        state = before.copy()
        for event in events:
            match event:
                case ev.SlotsFailed():
                    last_failure = event
                    self.failed.setdefault(event.request, []).append(event)
                case ev.Preempted():
                    assert last_failure is not None
                    self.preempted[event.request] = event
                    self.cause[event.request] = last_failure
                    self.allocated.pop(event.request, None)
                case ev.BlocksReleased():
                    self.released[event.request] = event
                case ev.Unscheduled():
                    self.unscheduled[event.request] = event.num_tokens
                case ev.BlocksAllocated():
                    self.allocated[event.request] = event, state.num_free
                case ev.BlocksHit():
                    self.hits[event.request] = event.block_ids
                case ev.Admitted():
                    self.admitted[event.request] = event
                case ev.Skipped():
                    self.skipped[event.request] = event
                case ev.Parked():
                    self.parked[event.request] = event
                case ev.GuardStopped():
                    self.guard = event
                case ev.NoProgress():
                    self.no_progress = event
            apply(state, event)
        self.after = state
        end = events[-1]
        assert isinstance(end, ev.StepScheduled)
        self.end = end
        self.given = dict(zip(end.request_ids, end.num_tokens, strict=True))
        self.starts = dict(zip(end.request_ids, end.starts, strict=True))
        running_failures = [event for event in events if isinstance(event, ev.SlotsFailed) and not event.waiting]
        if running_failures and running_failures[-1].request not in self.given:
            self.breaker = running_failures[-1].request

    @property
    def budget(self) -> int:
        """Tokens a step may have."""
        return int(self.config["max_num_batched_tokens"])

    @property
    def total(self) -> int:
        """Tokens the step has."""
        return sum(self.end.num_tokens)


def _headline(f: _Facts) -> str:
    end = f.end
    num_running = sum(1 for request in end.request_ids if request not in f.admitted)
    parts = [f"{num_running} of {f.before.num_running} running {inflected('request', f.before.num_running)}"]
    parts += [f"{len(f.admitted)} admitted"] if f.admitted else []
    parts += [f"{len(f.preempted)} preempted"] if f.preempted else []
    text = (
        f"Step {end.step}: {count(f.total, 'token')} of a budget of {f.budget} for {', '.join(parts)}. "
        f"{count(end.calls, 'call')} for slots; {count(f.before.num_free, 'block')} free before, {end.free} after."
    )
    if f.no_progress is not None and f.no_progress.since_token > 1:
        text += f" No progress: {f.no_progress.since_token} steps since the last token preempted and scheduled nothing."
    return text


# ---- running requests


def _running(f: _Facts) -> Iterable[Reason]:
    ended_at = f.breaker
    is_past_end = False
    unreached: list[str] = []
    running = {r.id: r for r in f.before.queue(Queue.RUNNING)}
    for victim in f.preempted:  # in the order in which it happened
        yield _preempted(f, running[victim])
    for r in running.values():
        if r.id in f.preempted:
            pass  # told above
        elif r.id == ended_at:
            yield _no_slots(f, r)
            is_past_end = True
        elif r.id in f.given:
            yield _scheduled(f, r)
        elif is_past_end:
            unreached.append(r.id)
        else:
            yield _nothing_to_do(f, r)
        is_past_end = is_past_end or r.id == ended_at
    if unreached:
        who = f"{names(unreached)} {inflected('is', unreached)}"
        text = f"{who} not reached: the pass over running requests ended at {ended_at}."
        yield Reason(tuple(unreached), "not reached", 0, text)


def _scheduled(f: _Facts, r: RequestState) -> Reason:
    n, start = f.given[r.id], f.starts[r.id]
    if n > 1 or start < r.num_prompt_tokens:
        what = (
            f"{count(n, 'token')} of its {r.num_tokens} known ones, from position {start} on{_capped(f, r, n, start)}"
        )
    else:
        source = "which the step before it, still in flight, will sample" if r.num_output_placeholders else "its newest"
        what = f"{count(n, 'token')}, {source} (position {start})"
    victims = [v for v, event in f.preempted.items() if event.wanted_by == r.id]
    retried = f", after {names(victims)} lost {inflected('its', victims)} blocks for it" if victims else ""
    return Reason((r.id,), "scheduled", n, f"{r.id} gets {what}; {_blocks(f, r)}{retried}.")


def _capped(f: _Facts, r: RequestState, n: int, start: int) -> str:
    """Why a request gets fewer tokens than it still has to compute."""
    if r.id not in f.end.prefill_chunks:
        return ""
    left = r.num_tokens - start - n
    threshold = int(f.config.get("long_prefill_token_threshold", 0))
    if threshold and n == threshold:
        return f" ({left} are left: long_prefill_token_threshold is {threshold})"
    return f" ({left} are left: the step's budget is used up)"


def _blocks(f: _Facts, r: RequestState) -> str:
    if r.id not in f.allocated:
        return f"its {count(len(_table(f, r)), 'block')} {inflected('has', len(_table(f, r)))} room for that"
    event, free = f.allocated[r.id]
    text = (
        f"new {inflected('block', event.block_ids)} {numbers(event.block_ids)} ({free} {inflected('was', free)} free)"
    )
    if event.evicted:
        text += f", cached content of {numbers(event.evicted)} given up"
    return text


def _table(f: _Facts, r: RequestState) -> list[int]:
    return f.after.requests[r.number].block_ids


def _preempted(f: _Facts, r: RequestState) -> Reason:
    event, cause, released = f.preempted[r.id], f.cause[r.id], f.released.get(r.id)
    parts = [f"{r.id} is preempted: {_shortage(cause)}, and {_why_victim(r, event)}"]
    if r.id in f.unscheduled:
        parts.append(f"{count(f.unscheduled[r.id], 'token')} given to it in this step went back to the budget")
    parts.append(f"{count(event.computed, 'computed token')} {inflected('is', event.computed)} lost")
    if event.stale:
        fate = "dropped" if event.dropped else "delivered all the same"
        parts.append(f"the output of {count(event.stale, 'token')} in flight will be {fate}")
    if released is not None:
        parts.append(_return_of(f, released))
    parts.append(f"preempted {count(event.count, 'time')} now")
    return Reason((r.id,), "preempted", 0, "; ".join(parts) + ".")


def _shortage(event: ev.SlotsFailed) -> str:
    if event.injected:
        return f"a fault makes call {event.call} for slots, by {event.request}, fail"
    needs = f"{event.request} needs {count(event.needed, 'block')}"
    return f"{needs}, {event.free} {inflected('is', event.free)} free (call {event.call})"


def _why_victim(r: RequestState, event: ev.Preempted) -> str:
    itself = " itself" if event.wanted_by == r.id else ""
    if event.reason == "priority":
        rank = f"{r.priority}, {r.arrival_time:g}"
        return f"of those that run it is{itself} the one with the largest (priority, arrival): {rank}"
    return f"of those that run it is{itself} the one admitted last"


def _return_of(f: _Facts, released: ev.BlocksReleased) -> str:
    what = f"its {count(len(released.block_ids), 'block')}"
    if not released.fence:
        return f"{what} {inflected('returns', released.block_ids)} to the pool at once"
    return (
        f"{what} {inflected('returns', released.block_ids)} when the fence has passed {released.fence} "
        f"(it stands at {f.before.processed_step_seq})"
    )


def _no_slots(f: _Facts, r: RequestState) -> Reason:
    failure = f.failed[r.id][-1]
    guard = f.guard
    if guard is None or guard.request != r.id:
        return Reason(
            (r.id,), "no slots", 0, f"{r.id} gets nothing: {_shortage(failure)}, and nobody is left to preempt."
        )
    who = "it is itself the victim" if guard.victim == r.id else f"the victim would be {guard.victim}"
    text = (
        f"{r.id} gets nothing: {_shortage(failure)}. {capital(who)}, but its blocks could not return now: it was "
        f"last scheduled at fence {guard.fence}, and the fence stands at {guard.processed}. The guard ends the retry: "
        f"nobody is preempted, {r.id} stays where it is."
    )
    return Reason((r.id,), "stopped by the guard", 0, text)


def _nothing_to_do(f: _Facts, r: RequestState) -> Reason:
    """A running request that was passed by, or that the budget did not reach."""
    known = r.num_tokens + r.num_output_placeholders
    final = _final_tokens(f, r)
    if r.num_output_placeholders and r.num_computed_tokens + 2 - r.num_output_placeholders >= final:
        steps = numbers(f.before.steps_in_flight(r.id))
        text = f"{r.id} needs no further step: the one that yields its last token is in flight (in flight: {steps})."
        return Reason((r.id,), "nothing to do", 0, text)
    if r.num_computed_tokens >= known:
        text = f"{r.id} has nothing to compute: all its {r.num_tokens} known tokens are computed or in flight."
        return Reason((r.id,), "nothing to do", 0, text)
    if f.total >= f.budget:
        text = f"{r.id} is not reached: the budget of {f.budget} tokens was used up before it."
        return Reason((r.id,), "not reached", 0, text)
    text = f"{r.id} cannot grow: its next position, {r.num_computed_tokens}, lies beyond what it may have ({final})."
    return Reason((r.id,), "nothing to do", 0, text)


def _final_tokens(f: _Facts, r: RequestState) -> int:
    """Known tokens at which a request ends at the latest."""
    slots = (f.before.num_blocks - 1) * f.before.block_size
    return min(r.num_prompt_tokens + r.max_tokens, int(f.config["max_model_len"]), slots + 1)


# ---- waiting requests


def _waiting(f: _Facts) -> Iterable[Reason]:
    unreached: list[RequestState] = []
    refused: str | None = None
    for r in [*f.before.queue(Queue.LOADING), *f.before.queue(Queue.WAITING)]:
        failures = [e for e in f.failed.get(r.id, ()) if e.waiting]
        if r.id in f.admitted:
            yield _admitted(f, r)
        elif r.id in f.parked:
            yield _parked(f, r)
        elif r.id in f.skipped:
            yield _skipped(f, r)
            if f.skipped[r.id].reason == "budget":
                refused = r.id
        elif failures:
            refused = r.id
            yield _refused(f, r, failures[-1])
        else:
            unreached.append(r)
    if unreached:
        ids = [r.id for r in unreached]
        why = _why_unreached(f, unreached[0], refused)
        yield Reason(tuple(ids), "not looked at", 0, f"{names(ids)} {inflected('is', ids)} not looked at: {why}.")


def _admitted(f: _Facts, r: RequestState) -> Reason:
    event = f.admitted[r.id]
    n, start = f.given[r.id], f.starts[r.id]
    found = []
    if event.local:
        found.append(f"{event.local} found in the prefix cache (block {numbers(f.hits.get(r.id, ()))})")
    if event.external:
        found.append(f"{event.external} to be had from outside")
    if event.computed and not found:
        found.append(f"{event.computed} loaded")
    of = f" of its {r.num_tokens} known ones" + (f" ({', '.join(found)})" if found else "")
    word = "resumed" if event.resumed else "admitted"
    text = f"{r.id} is {word} and gets {count(n, 'token')}{of}{_capped(f, r, n, start)}; {_blocks(f, r)}."
    return Reason((r.id,), word, n, text)


def _parked(f: _Facts, r: RequestState) -> Reason:
    event = f.parked[r.id]
    text = (
        f"{r.id} is given {inflected('block', event.block_ids)} {numbers(event.block_ids)} and waits for a load of "
        f"{count(event.external, 'token')} from outside; it computes nothing until that has landed."
    )
    return Reason((r.id,), "parked for a load", 0, text)


def _skipped(f: _Facts, r: RequestState) -> Reason:
    reason = f.skipped[r.id].reason
    if reason == "budget":
        text = (
            f"{r.id} is not admitted: {f.budget - f.total} tokens are left of the budget of {f.budget}, fewer than it "
            f"must compute at once without chunked prefill (it knows {r.num_tokens}). The pass ends here."
        )
        return Reason((r.id,), "not admitted", 0, text)
    why = {
        "load": "its load has not landed",
        "stale": f"output of {count(r.num_stale_output_tokens, 'token')} from before its preemption is still in flight",
        "lookup": "the connector does not know yet what it can load for it",
        "slots": "it lacks blocks, and nothing goes on that could free one, so those behind it are looked at",
    }[reason]
    return Reason((r.id,), "skipped", 0, f"{r.id} is passed over and keeps its place: {why}.")


def _refused(f: _Facts, r: RequestState, failure: ev.SlotsFailed) -> Reason:
    if failure.injected:
        why = _shortage(failure)
    else:
        whole = "its whole sequence needs" if f.config.get("reserve_full_isl") else "it needs"
        why = f"{whole} {count(failure.needed, 'block')} more, {failure.free} may be used (call {failure.call})"
    text = f"{r.id} is not admitted: {why}. Nobody is preempted for a waiting request, and the pass ends here."
    return Reason((r.id,), "not admitted", 0, text)


def _why_unreached(f: _Facts, first: RequestState, refused: str | None) -> str:
    """Why the pass over waiting requests did not get to somebody."""
    if f.preempted:
        return "somebody was preempted in this step, so nobody is admitted"
    if refused is not None:
        return f"the pass ended at {refused}"
    if f.total >= f.budget:
        return f"the budget of {f.budget} tokens is used up"
    limit = int(f.config["max_num_seqs"])
    if f.after.num_running >= limit:
        return (
            f"{count(f.after.num_running, 'request')} {inflected('runs', f.after.num_running)}, max_num_seqs is {limit}"
        )
    left = f.budget - f.total
    return (
        f"{first.id} has {first.num_tokens} tokens to compute, {left} are left in the budget, and prompts are not split"
    )

"""A runner that first tells what was recorded, then hands over to a real one.

Owns: `ReplayRunner`: recorded tokens and times, the hand-over.
Knows nothing about: where the recording comes from; how the cache's content is planned (lab.rebuild).
Invariants: before the hand-over nothing is computed; after it the real runner holds what it would hold had it executed
every step whose output was processed, and has the steps in flight before it; the clock goes on from where it stood.

    recorded    tokens of steps 1 … k, times        | steps in flight k + 1, k + 2
    real        prefills of what the blocks hold,   k + 1, k + 2, then whatever comes
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from kvsched.engine import Engine
from kvsched.runner.base import Gate, Runner
from kvsched.step import ScheduledStep, StepResult
from kvsched.trace.events import Event
from lab.journal import results_of, times_of
from lab.rebuild import Mirror, plan_prefills


class _Submitted(NamedTuple):
    step: ScheduledStep
    gate: Gate | None
    future: Future[StepResult]


class ReplayRunner:
    """A `Runner`. real: a fresh one, taken over (closing this one closes it). events: the recording."""

    def __init__(self, real: Runner, events: Sequence[Event]) -> None:
        self.real = real
        self._results = results_of(events)
        self._times = times_of(events)
        self._now = 0.0
        self._is_live = False
        self._ahead = 0.0
        self._submitted: list[_Submitted] = []
        self._forget: tuple[str, ...] = ()

    @property
    def prompt_vocab_size(self) -> int | None:
        """See `Runner`."""
        return getattr(self.real, "prompt_vocab_size", None)

    def submit(self, step: ScheduledStep, gate: Gate | None = None) -> Future[StepResult]:
        """See `Runner.submit`."""
        future: Future[StepResult] = Future()
        future.set_running_or_notify_cancel()
        if self._is_live:
            self._hand_on(_Submitted(step, gate, future))
            return future
        self._submitted.append(_Submitted(step, gate, future))
        tokens = self._results.get(step.step)
        if tokens is not None:
            future.set_result(StepResult(step.step, tokens, started_at=self._now, finished_at=self._now))
        return future

    def now(self) -> float:
        """The recorded time; after the hand-over the real clock, set so that it goes on from there."""
        if self._is_live:
            return self.real.now() + self._ahead
        self._now = next(self._times, self._now)
        return self._now

    def advance(self, to: float) -> None:
        """See `Runner.advance`."""
        if self._is_live:
            self.real.advance(to - self._ahead)

    def close(self) -> None:
        """Close the real runner."""
        self.real.close()

    def go_live(self, engine: Engine) -> None:
        """Hand over to the real runner, after filling its cache. Waits until that is done; raises what fails there."""
        assert not self._is_live
        num_executed = len(self._submitted) - engine.num_in_flight
        in_flight = self._submitted[num_executed:]
        self._fill_cache(engine, self._submitted[:num_executed], in_flight)
        self._ahead = self._now - self.real.now()
        self._is_live = True
        self._submitted = []
        for submitted in in_flight:
            self._hand_on(submitted)

    def _fill_cache(self, engine: Engine, executed: Sequence[_Submitted], in_flight: Sequence[_Submitted]) -> None:
        scheduler = engine.scheduler
        mirror = Mirror(engine.config.block_size)
        for step, _, _ in executed:
            mirror.execute(step, self._results[step.step])
        living = {request.id for request in scheduler.running}
        living.update(request_id for step, _, _ in in_flight for request_id in step.request_ids)
        hashes = scheduler.kv.pool.hashes
        prefills, self._forget = plan_prefills(mirror, living, hashes, engine.config.max_num_batched_tokens)
        futures = [self.real.submit(step) for step in prefills]
        for future in futures:
            self.real.advance(future.result().finished_at)

    def _hand_on(self, submitted: _Submitted) -> None:
        step, gate, outer = submitted
        if self._forget:
            step = step._replace(finished_request_ids=self._forget + step.finished_request_ids)
            self._forget = ()

        def done(inner: Future[StepResult]) -> None:
            error = inner.exception()
            if error is not None:
                outer.set_exception(error)
                return
            result = inner.result()
            times = result.started_at + self._ahead, result.finished_at + self._ahead
            outer.set_result(result._replace(started_at=times[0], finished_at=times[1]))

        self.real.submit(step, gate).add_done_callback(done)

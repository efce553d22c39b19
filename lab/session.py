"""The debugger: a run that one can step, stop, look into, go back in, break, and let go another way.

Owns: `Session`: where runs come from, changes to them, branches, files. (Moving: lab.walk. What is seen: lab.look.)
Knows nothing about: how widgets draw, how a fork is made (lab.fork), what drives it in the background (lab.live).
Invariants: the history behind the position never changes; a change made in the past makes another branch, and the old
one is kept in `branches`. Position n shows call n of `schedule()` and all that happened before the next; 0 is before
the first.

    position   0   1   2   3   4      step() at 4 asks the engine for call 5
                       ^              step() here goes to 3; inject() here forks: call 3 is decided anew, with the fault
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Self

from kvsched.config import SchedulerConfig
from kvsched.engine import Engine
from kvsched.faults import Fault, check_fault, fault_from_dict, fault_to_dict
from kvsched.request import SamplingParams
from kvsched.runner.synthetic import CostModel
from kvsched.trace.replay import Replay
from kvsched.trace.writer import write_trace
from lab import fork as forks
from lab.journal import Command
from lab.look import SessionError
from lab.run import Remake, Run
from lab.walk import Walk

if TYPE_CHECKING:
    from lab.widgets.base import HistorySource

    def _satisfies_the_widgets(session: Session) -> HistorySource:
        return session


class Session(Walk):
    """A debugger for one engine, or for a recording.

    source: an Engine (which from now on is driven through the session), or the path of a trace, which can be looked
        at, and forked if it tells all inputs.
    remake: makes an engine of the same kind for given settings; needed to fork engines with a KV connector.
    landing: after how many further steps results land. "full": as the engine says, else as many as keep the pipe
        full (max_in_flight - 1); "live": as they come, so that no two runs are alike.
    """

    def __init__(
        self,
        source: Engine | str | PathLike[str],
        *,
        remake: Remake | None = None,
        landing: int | Literal["full", "live"] = "full",
    ) -> None:
        if isinstance(source, Engine):
            _set_landing(source, landing)
            run = Run(source, Replay(), remake)
            run.remake = remake or forks.make_like(source)
        else:
            run = Run(None, Replay.open(source), remake or forks.make_synthetic)
        self._begin(run)

    @classmethod
    def _of(cls, run: Run) -> Self:
        session = cls.__new__(cls)
        session._begin(run)
        return session

    def _begin(self, run: Run) -> None:
        super().__init__(run)
        self._generation = 0
        self._branches: list[Session] = []

    @classmethod
    def synthetic(
        cls,
        num_blocks: int,
        *,
        cost: CostModel | None = None,
        vocab_size: int = 32_000,
        token_fn: Callable[[str, int], int] | None = None,
        landing: int | None = None,
        **settings: Any,
    ) -> Self:
        """A session without a model (see Engine.synthetic). settings: those of SchedulerConfig."""
        engine = Engine.synthetic(
            num_blocks, cost=cost, vocab_size=vocab_size, token_fn=token_fn, landing=landing, **settings
        )
        return cls(engine)

    @classmethod
    def model(
        cls,
        model: Any = "smollm2",
        *,
        dtype: str = "float32",
        seed: int = 0,
        landing: int | None = None,
        **options: Any,
    ) -> Self:
        """A session on a real model (see Engine.from_model for the arguments). Forks share the model's weights."""
        from kvsched.runner.torch_load import load_model

        loaded = load_model(model, dtype=dtype, seed=seed) if isinstance(model, str) else model
        if landing is None:
            landing = options.get("max_in_flight", SchedulerConfig(num_blocks=2).max_in_flight) - 1
        engine = Engine.from_model(loaded, landing=landing, **options)
        kept = {name: options[name] for name in ("device", "connector") if name in options}
        if kept.get("connector") is None:
            return cls(engine)

        def remake(config: SchedulerConfig) -> Engine:
            settings = config.to_dict()
            if config.max_model_len == loaded.max_positions:
                del settings["max_model_len"]  # it is the model's, which need not fit the pool
            return Engine.from_model(loaded, **kept, landing=config.max_in_flight - 1, **settings)

        return cls(engine, remake=remake)

    # ---- what there is

    @property
    def config(self) -> SchedulerConfig:
        """The settings in force at the end."""
        return self._run.config

    @property
    def generation(self) -> int:
        """Goes up when the history becomes another one (a change in the past, a reset)."""
        return self._generation

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while events are added."""
        return self._run.lock

    @property
    def branches(self) -> tuple[Session, ...]:
        """Earlier histories that a change in the past, or a reset, has left, as recordings."""
        return tuple(self._branches)

    @property
    def faults(self) -> list[Fault]:
        """Faults planned so far."""
        return self._run.faults

    # ---- changing

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        at_step: int | None = None,
    ) -> Self:
        """Queue a request (see Engine.add_request). at_step: it arrives right before that call of `schedule()`.

        In the past this forks. Raises RequestRefused for a request that could never be served.
        """
        args = {
            "request": request_id,
            "prompt": prompt if isinstance(prompt, str) else tuple(prompt),
            "sampling": (sampling or SamplingParams()).to_dict(),
            "priority": priority,
            "arrival_time": arrival_time,
        }
        if at_step is None:
            return self._change("add", args)
        if at_step <= self.num_steps:
            raise SessionError(
                f"step {at_step} has been decided; requests can arrive at step {self.num_steps + 1} or later"
            )
        self._must_have_engine()
        self._driver.between(lambda: self._run.plan(Command(0, at_step - 1, "add", args)))
        self._changed()
        return self

    def inject(self, fault: Fault | Mapping[str, Any]) -> Self:
        """Plan a fault (see kvsched.faults), from the position on. In the past this forks. Raises FaultError."""
        if isinstance(fault, Mapping):
            fault = fault_from_dict(fault)
        check_fault(fault)
        return self._change("inject", fault_to_dict(fault))

    def abort(self, *request_ids: str) -> Self:
        """End requests now. In the past this forks; a session that runs ends them before its next step."""
        return self._change("abort", {"requests": request_ids})

    def set_option(self, name: str, value: Any) -> Self:
        """Change a setting: guard, defer_block_free and max_in_flight from the position on (in the past this forks),
        any other by starting again from step 0 with the same inputs. Raises ConfigError."""
        self.config.with_changes(**{name: value})
        if name in forks.ANY_STEP:
            return self._change("configure", {name: value})
        self._must_rest()
        self._become(forks.fork(self._run, 0, forks.Changes.of({name: value})))
        return self

    def reset(self) -> Self:
        """Start again from step 0 with the same requests, at the same steps. A recording goes back to its start."""
        self._must_rest()
        if self._run.engine is None:
            return self.seek(0)
        self._become(forks.fork(self._run, 0, forks.Changes.of({})))
        return self

    def fork(self, step: int | None = None, changes: Mapping[str, Any] | None = None, **more: Any) -> Self:
        """Another session that goes another way from call `step` of `schedule()` on: the first to be decided anew.

        step: the next one if None; 0: from the very start. changes (and keyword arguments): guard,
        defer_block_free, max_in_flight; faults (more of them), drop_faults=True (none from here on), abort (ids);
        at step 0 any setting. Requests and aborts that came later come again at the same steps.
        Raises ForkError, NotEnough (a recording that does not tell its inputs), or what is wrong with a change.
        """
        self._must_rest()
        number = self._position + 1 if step is None else step
        run = forks.fork(self._run, number, forks.Changes.of({**(changes or {}), **more}))
        session = self._of(run)
        session._breakpoints = list(self._breakpoints)
        return session

    def _change(self, do: str, args: Mapping[str, Any]) -> Self:
        """Carry out a change at the position: in the past, on another branch."""
        self._must_have_engine()
        if self.mode == "running":
            self._driver.between(lambda: self._run.do(do, args))
        elif self._position < self.num_steps:
            branch = forks.fork(self._run, self._position + 1, forks.Changes.of({}))
            try:
                branch.do(do, args)
            except ValueError:
                branch.close()
                raise
            self._become(branch)
        else:
            self._do(do, args)
        self._changed()
        return self

    def _become(self, run: Run) -> None:
        """Go on with another history; keep the old one as a recording."""
        old = self._run
        self._branches.append(self._of(Run(None, old.replay, old.remake)))
        with old.lock:
            self._run = run
            self._place(run.num_steps)
            self._generation += 1
            self._search = None
        old.close()
        self._changed()

    def close(self) -> None:
        """End the run in the background, and the engine if the session made it. May be called twice."""
        self._driver.close()
        self._run.close()
        self._callbacks.clear()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Tokens as text; without a tokenizer, their numbers."""
        tokenizer = self._run.engine.tokenizer if self._run.engine is not None else None
        if tokenizer is None:
            return " ".join(map(str, token_ids))
        return tokenizer.decode(list(token_ids), skip_special_tokens=False)

    # ---- files

    def save_trace(self, path: str | PathLike[str]) -> None:
        """Write all events as a trace (.jsonl or .jsonl.gz), which `Session(path)` opens."""
        write_trace(path, self.events)

    def save_scenario(self, path: str | PathLike[str]) -> None:
        """Write the smallest JSON from which the run up to the position can be done again (see lab.scenario)."""
        from lab.scenario import scenario_of, write_scenario

        write_scenario(path, scenario_of(self._run, self._position))

    @classmethod
    def load_scenario(cls, path: str | PathLike[str]) -> Self:
        """The session that `save_scenario` wrote down, done again up to the same step. Raises ScenarioError."""
        from lab.scenario import open_scenario

        return cls._of(open_scenario(path))

    def to_pytest(self, path: str | PathLike[str]) -> None:
        """Write the run up to the position as a test that needs kvsched alone, to attach to a bug report."""
        from lab.scenario import write_pytest

        write_pytest(path, self._run, self._position)


def _set_landing(engine: Engine, landing: int | Literal["full", "live"]) -> None:
    if landing == "live":
        engine.landing = None
    elif landing != "full":
        if landing < 0:
            raise SessionError(f"landing is {landing}; give 0 or more further steps, 'full' or 'live'")
        engine.landing = landing
    elif engine.landing is None and engine.scheduler.connector is None:
        engine.landing = engine.config.max_in_flight - 1

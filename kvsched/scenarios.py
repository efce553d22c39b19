"""Short plays on a real engine that show what a rule is for.

Owns: `stale_write_race`. Knows nothing about: notebooks, tensors.
Invariants: nothing sleeps, nothing depends on the machine's speed: steps are held by faults until a named thing has
happened, so that a play ends the same way every time.

The race, with the fence off (two steps in flight; r1's chunk fills blocks 6 to 9, say):

    compute     step 8: r1's chunk, held ···················│ writes 6 7 8 9 │ step 11: r2 reads 6 7 8 9
    scheduler   8: r1 │ r1 aborted: 6 7 8 9 are free │ 9: r2 gets them
    load                                               fills 6 7 8 9 ┘ landed: step 8 goes

With the fence on, the blocks of r1 return only once step 8 has been processed, so r2 gets others.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvsched.connector.host import HostTier
from kvsched.engine import Engine, chat_text
from kvsched.experiment.prompts import PROMPTS
from kvsched.faults import Abort, HoldExecution
from kvsched.request import SamplingParams
from kvsched.trace.events import BlocksAllocated, LoadStarted

_BLOCK_SIZE = 16
_WARM_UP, _WRITER, _READER = "r0", "r1", "r2"


@dataclass(frozen=True)
class StaleWriteRace:
    """What came of `stale_write_race`.

    writer, reader: the aborted request whose chunk was held, and the request whose load was to be read.
    step: the held step. blocks: blocks that the load filled and the held step wrote afterwards, in the order of the
    reader's table; empty if there are none. expected, got: the reader's tokens, undisturbed and in this run;
    expected_text, got_text: the same as text, None for a model without a tokenizer. events: the whole run.
    """

    model: str
    fence: bool
    writer: str
    reader: str
    step: int
    blocks: tuple[int, ...]
    expected: tuple[int, ...]
    got: tuple[int, ...]
    expected_text: str | None
    got_text: str | None
    events: tuple[Any, ...] = field(repr=False)

    @property
    def first_wrong(self) -> int | None:
        """Index of the reader's first wrong token; None if all are right."""
        for index, (expected, got) in enumerate(zip(self.expected, self.got, strict=True)):
            if expected != got:
                return index
        return None

    def __repr__(self) -> str:
        lines = [
            f"stale write race on {self.model}, fence {'on' if self.fence else 'off'}",
            f"  step {self.step}: a prefill chunk of {self.writer}, held until the load of {self.reader} had landed;"
            f" {self.writer} was aborted meanwhile",
        ]
        if self.blocks:
            blocks = ", ".join(map(str, self.blocks))
            lines.append(f"  blocks {blocks}: filled by the load of {self.reader}, overwritten by step {self.step}")
        else:
            lines.append(f"  the load of {self.reader} filled no block that step {self.step} could still write")
        at = self.first_wrong
        if at is None:
            lines.append(f"  all {len(self.got)} tokens of {self.reader} are right")
        else:
            got, expected = self.got[at], self.expected[at]
            lines.append(f"  first wrong token of {self.reader}: number {at}, {got} instead of {expected}")
        if self.expected_text is not None:
            lines += [f"  expected: {self.expected_text!r}", f"  got:      {self.got_text!r}"]
        return "\n".join(lines)


def stale_write_race(
    *, fence: bool = False, model: Any = "smollm2", max_tokens: int = 12, device: str = "cpu", seed: int = 0
) -> StaleWriteRace:
    """A step that was late overwrites blocks which a load has filled for somebody else; with the fence it cannot.

    First the reader's prompt is served once, undisturbed: that fills the host tier and gives the tokens to expect.
    Then another request's prefill chunk is held, the request aborted, and the reader's prompt comes again: its blocks
    are loaded from the tier.

    fence: whether freed blocks wait for steps in flight. model: as in `Engine.from_model`. seed: of a random model's
    weights and prompts. Raises ValueError as `Engine.from_model` does.
    """
    engine = Engine.from_model(
        model,
        device=device,
        seed=seed,
        num_blocks=40,
        block_size=_BLOCK_SIZE,
        max_model_len=512,
        max_num_batched_tokens=11 * _BLOCK_SIZE,
        enable_prefix_caching=False,
        defer_block_free=fence,
        max_in_flight=2,
        landing=1,
        connector=HostTier(capacity_bytes=2**30),
    )
    with engine:
        reader_prompt, writer_prompt = _prompts(engine, seed)
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        (expected,) = engine.generate([reader_prompt], sampling, request_ids=[_WARM_UP])
        held = engine.scheduler.step + 1
        engine.inject(HoldExecution(held, "load_landed", {"request": _READER}))
        engine.inject(Abort(_WRITER, held + 1))
        engine.add_request(_WRITER, writer_prompt, sampling)
        engine.step()
        (got,) = engine.generate([reader_prompt], sampling, request_ids=[_READER])
        return StaleWriteRace(
            model=engine.events[0].meta["model"],
            fence=fence,
            writer=_WRITER,
            reader=_READER,
            step=held,
            blocks=_overwritten(engine.events, held),
            expected=expected.token_ids,
            got=got.token_ids,
            expected_text=expected.text,
            got_text=got.text,
            events=tuple(engine.events),
        )


def _prompts(engine: Engine, seed: int) -> tuple[list[int], list[int]]:
    """The reader's prompt, several blocks; and the writer's, more than one step computes and with another beginning,
    so that it is computed rather than loaded."""
    if engine.tokenizer is None:
        draw = random.Random(seed)
        return [draw.randrange(256) for _ in range(100)], [draw.randrange(256) for _ in range(300)]
    reader = chat_text(engine.tokenizer, [{"role": "user", "content": PROMPTS[-6]}])
    return list(engine.tokenizer.encode(reader)), list(engine.tokenizer.encode(" ".join(PROMPTS[:-8])))


def _overwritten(events: Sequence[Any], held: int) -> tuple[int, ...]:
    """Blocks that the reader's load filled while the held step could still write them."""
    written: set[int] = set()
    for event in events:
        if isinstance(event, BlocksAllocated) and event.request == _WRITER and event.step == held:
            written.update(event.block_ids)
    (load,) = (event for event in events if isinstance(event, LoadStarted) and event.request == _READER)
    return tuple(block for block in load.block_ids if block in written)

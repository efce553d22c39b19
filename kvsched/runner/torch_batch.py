"""From a ScheduledStep to flat arrays, on the host.

Owns: the requests in the runner's hands (their rows and block tables) and the building of `StepInputs`.
Knows nothing about: tensors on devices, models, results. All arrays are numpy.
Invariants: building a step never looks at a result: a token that an earlier step is still sampling is addressed by
its place in the token buffer, `row x num_columns + position`, and read there by the device when its turn comes.

        row   the request's line in the token buffer, kept from its joining to its end or preemption
        slot  block id x block size + offset: where a position's keys and values lie in the cache
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsched.config import NULL_BLOCK
from kvsched.request import SamplingParams
from kvsched.runner.torch_plan import AttentionPlan, Ints, plan_attention
from kvsched.step import RequestData, ScheduledStep


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the device needs for one step. Places address the token buffer.

    known_places, known_tokens: tokens to enter in the buffer first (requests that join).
    places, positions, slots: per token, padding included (padding: place 0, position 0, slot of the null block).
    sampled: request index of each request that samples; sampled_tokens: index of its last token in the step;
    sampled_positions, sampled_places: where its new token goes. sampling: its parameters.
    buffer_size: places the token buffer must have by now.
    """

    known_places: Ints
    known_tokens: Ints
    places: Ints
    positions: Ints
    slots: Ints
    attention: AttentionPlan
    sampled: Ints
    sampled_tokens: Ints
    sampled_positions: Ints
    sampled_places: Ints
    sampling: tuple[SamplingParams, ...]
    buffer_size: int


@dataclass(slots=True)
class _Held:
    row: int
    num_blocks: int
    sampling: SamplingParams


class RequestTable:
    """The requests in the runner's hands, and the building of steps.

    block_size: tokens per block. max_model_len: longest sequence. vocab_size: tokens lie below it. pad_to: steps
    are padded to a multiple of so many tokens (1: no padding). max_group_blocks: see `plan_attention`.
    """

    def __init__(
        self, block_size: int, max_model_len: int, vocab_size: int, *, pad_to: int = 1, max_group_blocks: int = 4096
    ) -> None:
        if pad_to < 1:
            raise ValueError(f"pad_to is {pad_to}; it must be at least 1 (no padding)")
        self.block_size = block_size
        self.num_columns = max_model_len + 1
        self._vocab_size = vocab_size
        self._pad_to = pad_to
        self._max_group_blocks = max_group_blocks
        self._held: dict[str, _Held] = {}
        self._free_rows: list[int] = []
        self._tables: Ints = np.zeros((0, -(-max_model_len // block_size)), dtype=np.int64)

    def build(self, step: ScheduledStep) -> StepInputs:
        """Take the step's news in, and make its inputs.

        Raises ValueError, naming the request, for a step that does not fit what is known.
        """
        known = self._take_news(step)
        held = self._scheduled(step)
        rows = np.array([h.row for h in held], dtype=np.int64)
        counts = np.array(step.num_scheduled_tokens, dtype=np.int64)
        starts = np.array(step.num_computed_tokens, dtype=np.int64)
        places, positions, slots = self._per_token(rows, starts, counts)
        sampled = np.flatnonzero([request_id not in step.prefill_chunks for request_id in step.request_ids])
        sampled_positions = (starts + counts)[sampled]
        width = -(-int((starts + counts).max(initial=0)) // self.block_size)
        tables = self._tables[rows, :width]
        known_places, known_tokens = self._known_tokens(known)
        return StepInputs(
            known_places=known_places,
            known_tokens=known_tokens,
            places=self._padded(places),
            positions=self._padded(positions),
            slots=self._padded(slots),
            attention=plan_attention(starts, counts, tables, self.block_size, self._max_group_blocks),
            sampled=sampled,
            sampled_tokens=np.cumsum(counts)[sampled] - 1,
            sampled_positions=sampled_positions,
            sampled_places=rows[sampled] * self.num_columns + sampled_positions,
            sampling=tuple(held[i].sampling for i in sampled.tolist()),
            buffer_size=len(self._tables) * self.num_columns,
        )

    def _take_news(self, step: ScheduledStep) -> list[RequestData]:
        """Forget, join, extend block tables. Returns the requests that joined."""
        for request_id in (*step.finished_request_ids, *step.preempted):
            self._forget(request_id)
        for data in step.new_requests:
            self._forget(data.id)
            self._join(data)
        joined = {data.id for data in step.new_requests}
        for request_id, block_ids in step.new_block_ids.items():
            held = self._held.get(request_id)
            # Blocks of a request that is not here yet (it waits for a load) come with its RequestData.
            if held is not None and request_id not in joined:
                self._extend(request_id, held, block_ids)
        return list(step.new_requests)

    def _forget(self, request_id: str) -> None:
        held = self._held.pop(request_id, None)
        if held is not None:
            self._free_rows.append(held.row)

    def _join(self, data: RequestData) -> None:
        if len(data.token_ids) >= self.num_columns:
            raise ValueError(
                f"{data.id} has {len(data.token_ids)} tokens; this runner holds {self.num_columns - 1} a request:"
                " raise max_model_len"
            )
        if not self._free_rows:
            grown = max(16, 2 * len(self._tables))
            self._free_rows = list(range(grown - 1, len(self._tables) - 1, -1))
            self._tables = np.pad(self._tables, ((0, grown - len(self._tables)), (0, 0)))
        held = _Held(self._free_rows.pop(), 0, data.sampling)
        self._held[data.id] = held
        self._extend(data.id, held, data.block_ids)

    def _extend(self, request_id: str, held: _Held, block_ids: tuple[int, ...]) -> None:
        end = held.num_blocks + len(block_ids)
        if end > self._tables.shape[1]:
            raise ValueError(
                f"{request_id} gets {end} blocks of {self.block_size}; a sequence of this runner ends at"
                f" {self.num_columns - 1} tokens: raise its max_model_len"
            )
        if NULL_BLOCK in block_ids:
            raise ValueError(f"the block table of {request_id} holds block {NULL_BLOCK}, which is reserved")
        self._tables[held.row, held.num_blocks : end] = block_ids
        held.num_blocks = end

    def _scheduled(self, step: ScheduledStep) -> list[_Held]:
        held = []
        columns = zip(step.request_ids, step.num_computed_tokens, step.num_scheduled_tokens, strict=True)
        for request_id, start, count in columns:
            one = self._held.get(request_id)
            if one is None:
                raise ValueError(f"step {step.step} schedules {request_id}, which no step has handed over")
            end = start + count
            if count < 1 or end >= self.num_columns or end > one.num_blocks * self.block_size:
                raise ValueError(
                    f"step {step.step} schedules positions [{start}, {end}) of {request_id}, which holds"
                    f" {one.num_blocks} blocks of {self.block_size}; the longest sequence is {self.num_columns - 1}"
                )
            held.append(one)
        return held

    def _per_token(self, rows: Ints, starts: Ints, counts: Ints) -> tuple[Ints, Ints, Ints]:
        """Places, positions and slots of all tokens, request after request."""
        first = np.cumsum(counts) - counts
        row_of_token = np.repeat(rows, counts)
        positions = np.arange(int(counts.sum())) + np.repeat(starts - first, counts)
        block_ids = self._tables[row_of_token, positions // self.block_size]
        return (
            row_of_token * self.num_columns + positions,
            positions,
            block_ids * self.block_size + positions % self.block_size,
        )

    def _padded(self, column: Ints) -> Ints:
        missing = -len(column) % self._pad_to
        return np.pad(column, (0, missing)) if missing else column

    def _known_tokens(self, joined: list[RequestData]) -> tuple[Ints, Ints]:
        """Places and tokens of the requests that join."""
        none: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        places = [self._held[d.id].row * self.num_columns + np.arange(len(d.token_ids)) for d in joined]
        tokens = [np.array(d.token_ids, dtype=np.int64) for d in joined]
        for data, known in zip(joined, tokens, strict=True):
            if known.min(initial=0) < 0 or known.max(initial=0) >= self._vocab_size:
                raise ValueError(f"{data.id} holds a token outside the model's vocabulary of {self._vocab_size} tokens")
        return np.concatenate([none, *places]), np.concatenate([none, *tokens])

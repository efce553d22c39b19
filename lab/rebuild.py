"""How to fill an empty KV cache with what a run had in it: prefills, planned from the steps that were executed. Pure.

Owns: `Mirror` (what a device that executed these steps has in its blocks) and `plan_prefills`.
Knows nothing about: models, engines, why steps are what they are.
Invariants: a block is rebuilt from the same tokens at the same positions, in the very block that holds them. A step in
flight is not executed yet: it is submitted again, behind the prefills.

    executed    prefill r0   decode r0 …   prefill r1 (hits r0's first block)   decode …        | in flight
    rebuilt     [prefill r0, all it computed] [prefill r1, from its hit on] [chains that only the prefix cache holds]

The prefix cache holds blocks that nobody's table has. A chain of them is complete: whoever holds a block holds the ones
before it, and tables are released from their tails, so a block leaves the cache before the one in front of it does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvsched.kv.hashing import ROOT, block_hash
from kvsched.request import SamplingParams
from kvsched.step import RequestData, ScheduledStep

REBUILD_STEP = 0
"""Number of the steps that rebuild: real ones count from 1."""


class _Sequence:
    """Tokens of one request as the device has them, growing; their block hashes, made when asked for."""

    __slots__ = ("hashes", "tokens")

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens = list(tokens)
        self.hashes: list[bytes] = []

    def hash_of(self, index: int, block_size: int) -> bytes | None:
        """Hash of a full block, None if its tokens are not all known."""
        if (index + 1) * block_size > len(self.tokens):
            return None
        for i in range(len(self.hashes), index + 1):
            parent = self.hashes[-1] if self.hashes else ROOT
            self.hashes.append(block_hash(parent, self.tokens[i * block_size : (i + 1) * block_size]))
        return self.hashes[index]


class _Content(NamedTuple):
    """What was written last in a block: block number `number` of a sequence, from 0."""

    sequence: _Sequence
    number: int


class _Held:
    """A request in the device's hands. computed: positions below it have been computed."""

    __slots__ = ("computed", "data", "sequence", "table")

    def __init__(self, data: RequestData) -> None:
        self.data = data
        self.sequence = _Sequence(data.token_ids)
        self.table = list(data.block_ids)
        self.computed = data.num_computed_tokens


class Mirror:
    """What a device has after executing steps in order. requests: in its hands, by id."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.requests: dict[str, _Held] = {}
        self.contents: dict[int, _Content] = {}

    def execute(self, step: ScheduledStep, tokens: Sequence[Sequence[int]]) -> None:
        """A step was computed. tokens: what each of its requests was given."""
        for request_id in (*step.finished_request_ids, *step.preempted):
            self.requests.pop(request_id, None)
        for data in step.new_requests:
            self.requests[data.id] = _Held(data)
        joined = {data.id for data in step.new_requests}
        for request_id, blocks in step.new_block_ids.items():
            if request_id in self.requests and request_id not in joined:
                self.requests[request_id].table += blocks
        columns = zip(step.request_ids, step.num_computed_tokens, step.num_scheduled_tokens, tokens, strict=True)
        for request_id, start, count, given in columns:
            held = self.requests[request_id]
            for index in range(start // self.block_size, -(-(start + count) // self.block_size)):
                self.contents[held.table[index]] = _Content(held.sequence, index)
            held.computed = start + count
            if len(held.sequence.tokens) == start + count:
                held.sequence.tokens += given

    def holds(self, block: int, sequence: _Sequence, index: int) -> bool:
        """Whether a block's content is that block of that sequence."""
        found = self.contents.get(block)
        if found is None or found.number != index:
            return False
        if found.sequence is sequence:
            return True
        wanted = sequence.hash_of(index, self.block_size)
        return wanted is not None and found.sequence.hash_of(index, self.block_size) == wanted

    def cached(self, hashes: Iterable[tuple[int, bytes | None]]) -> dict[int, _Content]:
        """Those of the blocks the prefix cache knows whose content is what it says, the heads of chains first.

        The others are written by steps in flight.
        """
        found = {}
        for block, content_hash in hashes:
            content = self.contents.get(block)
            if content_hash is None or content is None:
                continue
            if content.sequence.hash_of(content.number, self.block_size) == content_hash:
                found[block] = content
        return dict(sorted(found.items(), key=lambda item: item[1].number))


class _Wanted(NamedTuple):
    """One prefill: positions [start, end) of these tokens into this table."""

    id: str
    tokens: Sequence[int]
    table: Sequence[int]
    end: int
    num_prompt_tokens: int
    sampling: SamplingParams


def plan_prefills(
    mirror: Mirror, living: Collection[str], hashes: Sequence[bytes | None], max_tokens: int
) -> tuple[list[ScheduledStep], tuple[str, ...]]:
    """Steps that fill a fresh device's cache, and the ids it must forget afterwards.

    living: requests whose tables are wanted. hashes: by block, what the prefix cache knows it as. max_tokens: most
    tokens in one step (a single sequence may need more).
    """
    wanted = [_of_request(held) for held in _whole(mirror, living)]
    chains = _of_chains(mirror, {block for w in wanted for block in w.table}, hashes)
    size = mirror.block_size
    steps: list[ScheduledStep] = []
    batch: list[tuple[_Wanted, int]] = []
    filled: set[int] = set()
    fresh: set[int] = set()
    for one in [*wanted, *chains]:
        start = _start(one, filled | fresh, size)
        needs_batch = any(block in fresh for block in one.table[: start // size])
        full = sum(w.end - s for w, s in batch) + one.end - start > max_tokens
        if batch and (needs_batch or full):
            steps.append(_step(batch))
            batch, filled, fresh = [], filled | fresh, set()
        batch.append((one, start))
        fresh.update(one.table[start // size : one.end // size])
    if batch:
        steps.append(_step(batch))
    return steps, tuple(chain.id for chain in chains)


def _whole(mirror: Mirror, living: Collection[str]) -> list[_Held]:
    """The requests whose blocks still hold what they computed. A preemption in an empty step never reaches the
    device: it goes on holding a request whose blocks have become others'."""
    size = mirror.block_size
    found = []
    for request_id, held in mirror.requests.items():
        blocks = held.table[: -(-held.computed // size)]
        if request_id in living and all(mirror.holds(b, held.sequence, i) for i, b in enumerate(blocks)):
            found.append(held)
    return found


def _of_request(held: _Held) -> _Wanted:
    """Tokens that were dropped before anybody saw them are not known; what is computed from them is dropped too."""
    data, tokens = held.data, held.sequence.tokens
    missing = held.computed + 1 - len(tokens)
    if missing > 0:
        tokens = [*tokens, *[tokens[-1]] * missing]
    return _Wanted(data.id, tokens, held.table, held.computed, data.num_prompt_tokens, data.sampling)


def _of_chains(mirror: Mirror, held: Collection[int], hashes: Sequence[bytes | None]) -> list[_Wanted]:
    """One prefill per cached block that nobody holds, behind the block in front of it."""
    cached = mirror.cached(enumerate(hashes))
    by_hash: dict[bytes, int] = {}
    for block in sorted(cached, key=lambda block: block not in held):
        content_hash = hashes[block]
        assert content_hash is not None
        by_hash.setdefault(content_hash, block)
    chains = []
    size = mirror.block_size
    for block, (sequence, index) in cached.items():
        if block in held:
            continue
        before = []
        for i in range(index):
            content_hash = sequence.hash_of(i, size)
            assert content_hash in by_hash, f"block {block} is cached, block {i} of its chain is not"
            before.append(by_hash[content_hash])
        tokens = sequence.tokens[: (index + 1) * size]
        chains.append(
            _Wanted(f"cached block {block}", tokens, [*before, block], len(tokens), len(tokens), SamplingParams())
        )
    return chains


def _start(one: _Wanted, filled: Collection[int], block_size: int) -> int:
    """Positions whose blocks have been filled; the last position is computed in any case."""
    num_full = 0
    while num_full < (one.end - 1) // block_size and one.table[num_full] in filled:
        num_full += 1
    return num_full * block_size


def _step(batch: Sequence[tuple[_Wanted, int]]) -> ScheduledStep:
    new_blocks: Mapping[str, tuple[int, ...]] = {}
    return ScheduledStep(
        step=REBUILD_STEP,
        seq=0,
        request_ids=tuple(w.id for w, _ in batch),
        num_scheduled_tokens=tuple(w.end - start for w, start in batch),
        num_computed_tokens=tuple(start for _, start in batch),
        prefill_chunks=frozenset(w.id for w, _ in batch),
        new_block_ids=new_blocks,
        new_requests=tuple(
            RequestData(w.id, tuple(w.tokens), tuple(w.table), start, w.num_prompt_tokens, w.sampling, False)
            for w, start in batch
        ),
        preempted=(),
        finished_request_ids=(),
        allocate_calls=0,
    )

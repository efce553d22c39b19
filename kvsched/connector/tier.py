"""The scheduler's half of every store that blocks go out to and come back from.

Owns: which blocks are saved when, which are found and loaded, what is evicted.
Knows nothing about: tensors, where the store lies (memory, a disk), when bytes move.
Invariants: a decision depends on earlier decisions and processed steps only, never on how fast bytes move; a key is
found from the call on in which its save is decided, and `Load.after_step` keeps a load behind the saves it needs.

When is a block saved? With step k go the blocks that were computed, in compute order, before step k runs:

    step k - 1 computes [32, 48)         step k computes [48, 64)
                                         its Save: the block of [32, 48), copied out right before step k runs

So the content is right even if the scheduler hands the block on in step k. Nothing is saved that rests on a
synchronous load whose step has not been processed: the load may yet turn out to have failed.

A load fills blocks beside the compute stream. What still writes them is the fence's business (kv/fence); what still
reads them, a save in flight, is this module's: the load starts after that save (`Load.after_step`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvsched.connector.base import Lookup
from kvsched.connector.store import StoreIndex
from kvsched.kv.hashing import request_block_hashes
from kvsched.request import Request, RequestStatus
from kvsched.step import Load, Save, ScheduledStep, StepResult

_NORMAL_FINISH = (RequestStatus.STOPPED, RequestStatus.LENGTH_CAPPED, RequestStatus.POOL_CAPPED)


class _Tracked:
    """An admitted request. num_seen: leading blocks of its table that were saved or need not be."""

    __slots__ = ("num_seen", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.num_seen = 0


class _Saves(NamedTuple):
    """What a step in flight copies out."""

    step: int
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]


class TierConnector:
    """A `SchedulerConnector` over a store.

    block_size: tokens per block. block_bytes: what one stored block takes. capacity_bytes: bound of the store.
    asynchronous: whether requests wait for their loads outside `running`, or their step waits for the load.
    min_tokens_to_load: a shorter run of stored blocks is computed rather than loaded.
    key_of: content hash of a block -> key in the store.
    stored: (key, bytes) of what the store holds at the start, the longest unused first.

    Raises ValueError if the capacity does not hold one block.
    """

    can_load = True

    def __init__(
        self,
        block_size: int,
        block_bytes: int,
        capacity_bytes: int,
        *,
        asynchronous: bool = True,
        min_tokens_to_load: int = 0,
        key_of: Callable[[bytes], bytes] = bytes,
        stored: Iterable[tuple[bytes, int]] = (),
    ) -> None:
        if capacity_bytes < block_bytes:
            raise ValueError(
                f"capacity_bytes is {capacity_bytes}, but one stored block takes {block_bytes} bytes; raise it"
            )
        if min_tokens_to_load < 0:
            raise ValueError(f"min_tokens_to_load is {min_tokens_to_load}; give 0 (load whatever is found) or more")
        self.block_size = block_size
        self.block_bytes = block_bytes
        self.asynchronous = asynchronous
        self.min_tokens_to_load = min_tokens_to_load
        self.index = StoreIndex(capacity_bytes)
        self._key_of = key_of
        self._tracked: dict[str, _Tracked] = {}
        self._new_loads: list[Load] = []
        self._new_saves: list[Save] = []
        self._loading: dict[str, Load] = {}  # asynchronous ones; a synchronous one ends with the step that carries it
        self._unverified: dict[int, int] = {}
        self._in_flight: deque[_Saves] = deque()
        self._saved_in: dict[bytes, int] = {}
        self._read_in: dict[int, int] = {}
        self._to_evict: list[bytes] = []
        for key, num_bytes in stored:
            evicted = self.index.add(key, num_bytes)
            self._to_evict += [key] if evicted is None else evicted

    def take_evicted(self) -> tuple[bytes, ...]:
        """Keys that must leave the store and have not been named in a save yet."""
        taken, self._to_evict = tuple(self._to_evict), []
        return taken

    # ---- looking up and loading

    def lookup(self, request: Request, num_local_tokens: int) -> Lookup:
        """The longest run of stored blocks behind the local hit. The last known token is always left to compute."""
        first = num_local_tokens // self.block_size
        last = (request.num_tokens - 1) // self.block_size
        found = 0
        for content_hash in request_block_hashes(request, last, self.block_size)[first:last]:
            if self._key_of(content_hash) not in self.index:
                break
            found += 1
        num_tokens = found * self.block_size
        if num_tokens < self.min_tokens_to_load:
            num_tokens = 0
        return Lookup(num_tokens, self.asynchronous)

    def load_admitted(self, request: Request, block_ids: Sequence[int], num_local: int, num_external: int) -> None:
        """From now on the request's blocks are saved; and its load, if any, starts with this step."""
        self._tracked[request.id] = _Tracked(request)
        if not num_external:
            return
        first, last = num_local // self.block_size, (num_local + num_external) // self.block_size
        chain = self._keys(request, last)
        keys = tuple(chain[first:])
        self.index.use(chain)
        self.index.pin(keys)
        blocks = tuple(block_ids[first:last])
        load = Load(request.id, blocks, keys, num_local, num_external, self.asynchronous)
        self._new_loads.append(load)

    def _keys(self, request: Request, num_blocks: int) -> list[bytes]:
        hashes = request_block_hashes(request, num_blocks, self.block_size)
        return [self._key_of(content_hash) for content_hash in hashes[:num_blocks]]

    # ---- with each step

    def step_transfers(self, step: ScheduledStep) -> tuple[tuple[Load, ...], tuple[Save, ...]]:
        """Loads of requests admitted in this pass; saves of blocks computed before this step."""
        joined = {data.id for data in step.new_requests}
        size = self.block_size
        for request_id, start in zip(step.request_ids, step.num_computed_tokens, strict=True):
            tracked = self._tracked[request_id]
            # What a request that joins now counts as computed may be a block that this very step computes.
            if start >= (tracked.num_seen + 1) * size and request_id not in joined:
                self._plan_save(tracked, start, final=False)
        saves, self._new_saves = tuple(self._new_saves), []
        self._note_saves(step.step, saves)
        loads = tuple(load._replace(after_step=self._after(load)) for load in self._new_loads)
        self._new_loads = []
        for load in loads:
            if load.asynchronous:
                self._loading[load.request_id] = load
            else:
                self._unverified |= dict.fromkeys(load.block_ids, step.step)
        return loads, saves

    def _plan_save(self, tracked: _Tracked, num_computed: int, final: bool) -> bool:
        """Decide to save the request's full blocks among its first `num_computed` tokens. Returns whether any is."""
        request = tracked.request
        num_full = self._num_sound(request, min(num_computed, request.num_tokens) // self.block_size)
        chain = self._keys(request, num_full)
        self.index.pin(chain)  # a block is not worth the loss of the beginning that it builds on
        blocks, keys = [], []
        evicted, self._to_evict = self._to_evict, []
        for i in range(tracked.num_seen, num_full):
            if chain[i] in self.index:
                continue
            gone = self.index.add(chain[i], self.block_bytes)
            if gone is not None:
                evicted += gone
                blocks.append(request.block_ids[i])
                keys.append(chain[i])
        self.index.unpin(chain)
        self.index.use(chain)
        tracked.num_seen = max(tracked.num_seen, num_full)
        if not blocks:
            self._to_evict = evicted
            return False
        for key in evicted:
            self._saved_in.pop(key, None)
        self._new_saves.append(Save(request.id, tuple(blocks), tuple(keys), final, tuple(evicted)))
        return True

    def _num_sound(self, request: Request, num_full: int) -> int:
        """How many of the leading blocks rest on no load that may yet turn out to have failed."""
        if self._unverified:
            for i, block in enumerate(request.block_ids[:num_full]):
                if block in self._unverified:
                    return i
        return num_full

    def _note_saves(self, step: int, saves: Sequence[Save]) -> None:
        keys = tuple(key for save in saves for key in save.keys)
        blocks = tuple(block for save in saves for block in save.block_ids)
        if keys:
            self._in_flight.append(_Saves(step, keys, blocks))
            self._saved_in |= dict.fromkeys(keys, step)
            self._read_in |= dict.fromkeys(blocks, step)

    def _after(self, load: Load) -> int:
        """The newest step in flight that writes one of the load's keys or reads one of its blocks; 0 if none."""
        written = (self._saved_in.get(key, 0) for key in load.keys)
        read = (self._read_in.get(block, 0) for block in load.block_ids)
        return max(0, *written, *read)

    # ---- what became of it

    def step_processed(self, step: ScheduledStep, result: StepResult) -> None:
        """Steps are computed in order, so the saves up to this step have been copied out; its loads have ended."""
        invalid = result.transfers.invalid_block_ids
        for request_id in result.transfers.finished_recving:
            self._load_ended(self._loading.pop(request_id), invalid)
        if step.is_empty:
            return
        for load in step.loads:
            if not load.asynchronous:
                self._load_ended(load, invalid)
        if self._unverified:
            self._unverified = {block: at for block, at in self._unverified.items() if at > step.step}
        while self._in_flight and self._in_flight[0].step <= step.step:
            done = self._in_flight.popleft()
            for key in done.keys:
                if self._saved_in.get(key) == done.step:
                    del self._saved_in[key]
            for block in done.block_ids:
                if self._read_in.get(block) == done.step:
                    del self._read_in[block]

    def _load_ended(self, load: Load, invalid: frozenset[int]) -> None:
        """What could not be loaded is not offered again; it is stored anew once it has been computed."""
        self.index.unpin(load.keys)
        for block, key in zip(load.block_ids, load.keys, strict=True):
            if block in invalid and self.index.drop(key):
                self._saved_in.pop(key, None)
                self._to_evict.append(key)

    def load_failed(self, request: Request, block_ids: Sequence[int]) -> None:
        """The request computes from its first bad block on; from there its blocks are looked at again."""
        tracked = self._tracked.get(request.id)
        if tracked is not None and block_ids:
            first = min(request.block_ids.index(block) for block in block_ids)
            tracked.num_seen = min(tracked.num_seen, first)

    def request_preempted(self, request: Request, block_ids: Sequence[int]) -> bool:
        """Its computed blocks are copied out before the next step runs, which may overwrite them."""
        self._plan_save(self._tracked.pop(request.id), request.num_computed_tokens, final=False)
        return False

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        """After a normal finish its blocks are kept until those not yet saved have been sent."""
        tracked = self._tracked.pop(request.id, None)
        if tracked is None or request.status not in _NORMAL_FINISH:
            return False
        return self._plan_save(tracked, request.num_computed_tokens, final=True)

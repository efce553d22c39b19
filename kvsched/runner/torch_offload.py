"""The worker's half of a store of blocks: moves them between the cache and a medium, beside the compute stream.

Owns: `OffloadWorker`, its copy thread and (CUDA) copy stream; the protocol of a `Medium`.
Knows nothing about: which blocks, why, requests' tokens, scheduling.
Invariants: a save reads its blocks in compute order; one copy thread does everything else, in the order in which it
was handed over, so that nothing in the medium is read before it is written, or overwritten while it is read.

    engine    start_loads ────────┐
    runner        before_step: snapshot ─┐    compute …
    copy thread                  load │ save │ load …      ended, told by the next `poll`

An asynchronous load fills its blocks from the copy thread, whatever the compute stream does at that moment: that is
the hazard which the fence closes. A synchronous load is fetched and checked there too, but its blocks are filled in
compute order, right before the step that waits for it.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from kvsched.runner.torch_cache import PagedCache
from kvsched.step import Load, Save, ScheduledStep, Transfers

_MOST_QUEUED = 64
"""Snapshots that may wait for the copy thread; a step that carries more saves waits until there is room."""


class StoreWarning(UserWarning):
    """Something in a store could not be used; the request computes instead."""


class Medium(Protocol):
    """Where stored blocks lie. Called from the copy thread only, except `close` and `take_warnings`."""

    def put(self, keys: Sequence[bytes], data: Tensor) -> None:
        """Store blocks, [n, *block] on the cache's device, each with its checksum; replaces what is there."""
        ...

    def get(self, key: bytes) -> Tensor | None:
        """One block on the host; None if it is not there, or does not match its checksum."""
        ...

    def evict(self, keys: Sequence[bytes]) -> None:
        """Forget keys; unknown ones are ignored."""
        ...

    def take_warnings(self) -> list[str]:
        """What went wrong since the last call, for people."""
        ...

    def close(self) -> None:
        """Let go of what it holds. May be called twice."""
        ...


class _Copies:
    """How copies are ordered. On the CPU there is nothing to it: a copy is done when it returns."""

    def snapshot_taken(self, data: Tensor) -> Any:
        """This point of the compute stream, at which `data` is complete; handed to `copying`."""
        return None

    @contextmanager
    def copying(self, taken: Any = None) -> Iterator[None]:
        """Copies of the copy thread, behind a snapshot if one is given; they have ended when this ends."""
        with torch.inference_mode():
            yield


class _CudaCopies(_Copies):
    """A GPU: copies run on a stream of their own, unordered with the compute stream but for snapshots."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def snapshot_taken(self, data: Tensor) -> Any:
        """See `_Copies`."""
        data.record_stream(self._stream)
        return torch.cuda.current_stream(data.device).record_event()

    @contextmanager
    def copying(self, taken: Any = None) -> Iterator[None]:
        """See `_Copies`."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if taken is not None:
                self._stream.wait_event(taken)
            yield
            self._stream.synchronize()


class OffloadWorker:
    """A `WorkerConnector` between a paged cache and a medium, which it closes at the end."""

    def __init__(self, cache: PagedCache, medium: Medium) -> None:
        self._cache = cache
        self._medium = medium
        self._copies = _CudaCopies(cache.device) if cache.device.type == "cuda" else _Copies()
        self._thread = ThreadPoolExecutor(1, "kvsched-copy")
        self._room = threading.BoundedSemaphore(_MOST_QUEUED)
        self._changed = threading.Condition()  # guards everything below
        self._copied_step = 0
        self._behind: deque[Load] = deque()
        self._fetched: dict[str, Future[list[Tensor | None]]] = {}
        self._filling: set[int] = set()
        self._received: list[str] = []
        self._sent: list[str] = []
        self._invalid: set[int] = set()
        self._error: BaseException | None = None
        self._closed = False

    # ---- called by the engine

    def start_loads(self, loads: Sequence[Load]) -> None:
        """See `WorkerConnector`."""
        with self._changed:
            for load in loads:
                if not load.asynchronous:
                    self._fetched[load.request_id] = Future()
                if load.after_step > self._copied_step:
                    self._behind.append(load)
                else:
                    self._start(load)

    def poll(self) -> Transfers:
        """See `WorkerConnector`. Raises what went wrong in the copy thread."""
        self._tell_trouble()
        with self._changed:
            ended = Transfers(tuple(self._received), tuple(self._sent), frozenset(self._invalid))
            for told in (self._received, self._sent, self._invalid):
                told.clear()
        return ended

    def _tell_trouble(self) -> None:
        for message in self._medium.take_warnings():
            warnings.warn(message, StoreWarning, stacklevel=3)
        error, self._error = self._error, None
        if error is not None:
            raise RuntimeError(f"the copy thread failed: {error}") from error

    def wait(self, request_id: str) -> None:
        """See `WorkerConnector`."""
        with self._changed:
            self._changed.wait_for(
                lambda: request_id in self._received or request_id in self._sent or self._error or self._closed
            )

    def close(self) -> None:
        """Cancel loads, finish saves, end the thread. Raises what went wrong in it and has not been told by `poll`."""
        with self._changed:
            self._closed = True
            for load in self._behind:
                if not load.asynchronous:
                    self._fetched[load.request_id].set_exception(CancelledError("the connector was closed"))
            self._behind.clear()
            self._changed.notify_all()
        self._thread.shutdown(wait=True)
        self._medium.close()
        self._tell_trouble()

    # ---- called by the runner, in compute order

    def before_step(self, step: ScheduledStep) -> frozenset[int]:
        """See `WorkerConnector`."""
        for save in step.saves:
            self._snapshot(save)
        with self._changed:
            self._copied_step = step.step
            ready = [load for load in self._behind if load.after_step <= step.step]
            self._behind = deque(load for load in self._behind if load.after_step > step.step)
            for load in ready:
                self._start(load)
        bad: set[int] = set()
        for load in step.loads:
            if not load.asynchronous:
                with self._changed:
                    fetched = self._fetched.pop(load.request_id)
                bad |= self._fill(load, fetched.result())
        return frozenset(bad)

    def _snapshot(self, save: Save) -> None:
        with self._changed:
            both = self._filling.intersection(save.block_ids)
        assert not both, f"blocks {sorted(both)} of {save.request_id} are saved while a load fills them"
        self._room.acquire()
        data = torch.stack([self._cache.kv[block] for block in save.block_ids])  # needs no ids on the device: no wait
        taken = self._copies.snapshot_taken(data)

        def send() -> None:
            try:
                with self._copies.copying(taken):
                    self._medium.evict(save.evicted)
                    self._medium.put(save.keys, data)
            finally:
                self._room.release()
            if save.final:
                self._tell(self._sent, save.request_id)

        self._hand_over(send)

    # ---- the copy thread

    def _start(self, load: Load) -> None:
        """Hand a load to the copy thread. The caller holds the lock."""
        if load.asynchronous:
            self._filling.update(load.block_ids)
            self._hand_over(lambda: self._load(load))
            return
        fetched = self._fetched[load.request_id]

        def fetch() -> None:
            try:
                with self._copies.copying():
                    fetched.set_result(self._get(load))
            except BaseException as error:
                fetched.set_exception(error)
                raise

        self._hand_over(fetch)

    def _hand_over(self, job: Callable[[], None]) -> None:
        def run() -> None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 - raised by the next `poll`
                with self._changed:
                    self._error = self._error or error
                    self._changed.notify_all()

        self._thread.submit(run)

    def _load(self, load: Load) -> None:
        if self._closed:
            return
        with self._copies.copying():
            bad = self._fill(load, self._get(load))
        with self._changed:
            self._invalid |= bad
            self._filling.difference_update(load.block_ids)
        self._tell(self._received, load.request_id)

    def _get(self, load: Load) -> list[Tensor | None]:
        return [self._medium.get(key) for key in load.keys]

    def _fill(self, load: Load, data: Sequence[Tensor | None]) -> set[int]:
        """Write what was found into its blocks, in the order of the current stream. Returns blocks without data."""
        bad = set()
        for block, one in zip(load.block_ids, data, strict=True):
            if one is None:
                bad.add(block)
            else:
                self._cache.kv[block].copy_(one, non_blocking=True)
        return bad

    def _tell(self, ended: list[str], request_id: str) -> None:
        with self._changed:
            ended.append(request_id)
            self._changed.notify_all()

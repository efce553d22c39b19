"""Where steps run and how their tokens come back: one class per kind of device.

Owns: the compute stream, the copy stream and their events (CUDA); the same roles played by one thread (CPU).
Knows nothing about: steps, requests, models.
Invariants: work is launched by one thread, in order. `land` never keeps that thread waiting on a GPU: the tokens
travel on the copy stream, and a thread of its own waits for them.

        compute stream   |--- step 1 ---|--- step 2 ---|--- step 3 ---|
        copy stream                     |tok 1|        |tok 2|        |tok 3|
        landing thread                        done(1)        done(2)        done(3)
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

Put = Callable[[NDArray[Any]], Tensor]
"""Brings an array of the host to the device, in the order of the compute stream."""
Done = Callable[[list[int], float, float], None]
"""(tokens, started at, finished at), seconds of `now`."""
Failed = Callable[[BaseException], None]

_cuda: Any = torch.cuda  # its constructors carry no types


class Streams(Protocol):
    """What a runner asks of a device."""

    device: torch.device

    def now(self) -> float:
        """Seconds since these streams were made."""
        ...

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Within it, this thread launches work on the compute stream, without autograd."""
        ...

    def put(self, array: NDArray[Any]) -> Tensor:
        """Bring an array of the host to the device, in the order of the compute stream."""
        ...

    def mark(self) -> Any:
        """This point of the compute stream; handed to `land` as the start of a step."""
        ...

    def land(self, start: Any, tokens: Tensor, done: Done, failed: Failed) -> None:
        """The step ends here: bring its tokens ([n] int64) to the host, then call `done`, in order of the calls."""
        ...

    def close(self) -> None:
        """Wait for everything that was launched, stop threads. May be called twice."""
        ...


def open_streams(device: torch.device) -> Streams:
    """The streams for a device."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams(device)


def choose_device(name: str) -> torch.device:
    """The device called "cpu", "cuda", "cuda:N" or "auto" (CUDA where there is one). Raises ValueError for others."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ValueError(f"device is {name!r}; choose 'auto', 'cpu' or 'cuda'")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices; choose 'cpu'")
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(index) if index else torch.cuda.current_device())


class HostStreams:
    """The CPU: the launching thread computes, so a step is done when it has been launched."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._born = time.perf_counter()

    def now(self) -> float:
        """See `Streams`."""
        return time.perf_counter() - self._born

    @contextmanager
    def computing(self) -> Iterator[None]:
        """See `Streams`."""
        with torch.inference_mode():
            yield

    def put(self, array: NDArray[Any]) -> Tensor:
        """See `Streams`. Shares the array's memory."""
        return torch.from_numpy(array)

    def mark(self) -> float:
        """See `Streams`."""
        return self.now()

    def land(self, start: float, tokens: Tensor, done: Done, failed: Failed) -> None:
        """See `Streams`."""
        done(tokens.tolist(), start, self.now())

    def close(self) -> None:
        """See `Streams`."""


class _Landing(NamedTuple):
    start: torch.cuda.Event
    end: torch.cuda.Event
    copied: torch.cuda.Event
    tokens: Tensor
    done: Done
    failed: Failed


class CudaStreams:
    """A GPU: a compute stream, a copy stream, and a thread in which tokens land."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._compute = _cuda.Stream(device)
        self._copy = _cuda.Stream(device)
        self._origin = _cuda.Event(enable_timing=True)
        self._origin.record(self._compute)
        _cuda.synchronize(device)  # also for what was made on the default stream: model and cache
        self._born = time.perf_counter()
        self._landings: queue.SimpleQueue[_Landing | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._land_all, name="kvsched-landing", daemon=True)
        self._thread.start()

    def now(self) -> float:
        """See `Streams`."""
        return time.perf_counter() - self._born

    @contextmanager
    def computing(self) -> Iterator[None]:
        """See `Streams`."""
        with torch.inference_mode(), torch.cuda.stream(self._compute):
            yield

    def put(self, array: NDArray[Any]) -> Tensor:
        """See `Streams`. Copies through pinned memory, without waiting."""
        if array.size == 0:
            return torch.from_numpy(array).to(self.device)
        return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        """See `Streams`."""
        event: torch.cuda.Event = _cuda.Event(enable_timing=True)
        event.record(self._compute)
        return event

    def land(self, start: torch.cuda.Event, tokens: Tensor, done: Done, failed: Failed) -> None:
        """See `Streams`."""
        end = self.mark()
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        copied = _cuda.Event(blocking=True)
        with torch.cuda.stream(self._copy):
            self._copy.wait_event(end)
            host.copy_(tokens, non_blocking=True)
            tokens.record_stream(self._copy)
            copied.record(self._copy)
        self._landings.put(_Landing(start, end, copied, host, done, failed))

    def close(self) -> None:
        """See `Streams`."""
        self._landings.put(None)
        self._thread.join()

    def _land_all(self) -> None:
        while (landing := self._landings.get()) is not None:
            try:
                landing.copied.synchronize()
                started, finished = (self._origin.elapsed_time(e) / 1e3 for e in (landing.start, landing.end))
            except RuntimeError as error:  # an error of the device surfaces here
                landing.failed(error)
            else:
                landing.done(landing.tokens.tolist(), started, finished)

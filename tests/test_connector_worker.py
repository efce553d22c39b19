"""The worker's half of a store: bytes that leave the cache and come back, in the right order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvsched.connector.host import HostTier
from kvsched.runner.torch_offload import OffloadWorker
from kvsched.runner.torch_tiers import HostMedium, open_tier
from kvsched.step import Load, RequestData, Save, ScheduledStep, Transfers
from tests.runner_torch import running
from tests.tier_media import SHAPE, StoppableMedium, numbered_cache

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])]


def step(number: int, *, saves: tuple[Save, ...] = (), loads: tuple[Load, ...] = ()) -> ScheduledStep:
    """A step of which only the transfers matter."""
    none: tuple[RequestData, ...] = ()
    return ScheduledStep(number, 0, (), (), (), frozenset(), {}, none, (), (), 0, loads, saves)


def save(block: int, key: bytes, *, final: bool = False, evicted: tuple[bytes, ...] = (), request: str = "a") -> Save:
    return Save(request, (block,), (key,), final, evicted)


def load(*pairs: tuple[int, bytes], request: str = "a", asynchronous: bool = True, after_step: int = 0) -> Load:
    blocks, keys = zip(*pairs, strict=True)
    return Load(request, blocks, keys, 0, 4 * len(blocks), asynchronous, after_step)


@contextmanager
def worker_on(cache, num_slots: int = 4) -> Iterator[tuple[OffloadWorker, StoppableMedium]]:
    medium = StoppableMedium(cache.shape, num_slots, cache.device)
    worker = OffloadWorker(cache, medium)
    yield worker, medium
    medium.go.set()
    worker.close()


def content(cache, block: int) -> float:
    """The number a block is full of."""
    (value,) = cache.kv[block].float().unique().tolist()
    return value


def landed(worker: OffloadWorker, request: str = "a") -> Transfers:
    worker.wait(request)
    return worker.poll()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_come_back_to_the_bit(device, dtype):
    cache = numbered_cache(device=device, dtype=dtype)
    cache.kv[1:4].view(torch.uint8).random_(0, 256, generator=torch.Generator(device).manual_seed(1))
    before = cache.kv[1:4].view(torch.uint8).clone()
    with worker_on(cache) as (worker, _):
        worker.before_step(step(1, saves=(Save("a", (1, 2, 3), (b"k1", b"k2", b"k3"), True),)))
        assert landed(worker) == Transfers((), ("a",), frozenset())
        cache.poison()
        worker.start_loads([load((7, b"k3"), (5, b"k1"), (6, b"k2"))])
        assert landed(worker) == Transfers(("a",), (), frozenset())
    assert torch.equal(cache.kv[5:8].view(torch.uint8), before)
    assert cache.kv[4].float().isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_save_is_a_snapshot_in_compute_order(device):
    """C45: the block is overwritten right after `before_step`, while the store has not begun to write."""
    cache = numbered_cache(device=device)
    with worker_on(cache) as (worker, medium):
        medium.go.clear()
        worker.before_step(step(1, saves=(save(3, b"k"),)))
        cache.kv[3] = 99
        medium.go.set()
        worker.start_loads([load((5, b"k"))])
        landed(worker)
    assert (content(cache, 3), content(cache, 5)) == (99, 3)


def test_a_load_waits_for_the_save_it_is_behind():
    cache = numbered_cache()
    with worker_on(cache) as (worker, _):
        worker.start_loads([load((3, b"k"), after_step=2)])  # the block itself is still to be copied out
        worker.start_loads([load((4, b"none"), request="b")])
        assert landed(worker, "b") == Transfers(("b",), (), frozenset({4}))  # not kept up by the one before
        worker.before_step(step(1))
        assert worker.poll() == Transfers()
        worker.before_step(step(2, saves=(save(3, b"k"),)))
        assert landed(worker) == Transfers(("a",), (), frozenset())
    assert content(cache, 3) == 3


def test_evicted_blocks_are_gone_and_their_slots_used_again():
    cache = numbered_cache()
    with worker_on(cache, num_slots=2) as (worker, _):
        worker.before_step(step(1, saves=(save(1, b"k1"), save(2, b"k2"))))
        worker.before_step(step(2, saves=(save(3, b"k3", evicted=(b"k1", b"unknown")),)))
        worker.before_step(step(3, saves=(save(4, b"k2", evicted=(b"k2",)),)))  # dropped and stored anew
        worker.start_loads([load((5, b"k1"), (6, b"k2"), (7, b"k3"))])
        assert landed(worker).invalid_block_ids == {5}
    assert (content(cache, 6), content(cache, 7)) == (4, 3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("half", [0, 1])
def test_one_flipped_bit_is_a_failed_load(device, layer, half):
    """Whichever layer it hits, keys or values; the other blocks of the load are filled."""
    cache = numbered_cache(device=device)
    with worker_on(cache) as (worker, medium):
        worker.before_step(step(1, saves=(Save("a", (1, 2), (b"k1", b"k2"), True),)))
        landed(worker)
        medium.memory[medium.slot_of(b"k1"), layer, 3, half].view(torch.int32)[0, 5] ^= 1
        worker.start_loads([load((5, b"k1"), (6, b"k2"))])
        assert landed(worker) == Transfers(("a",), (), frozenset({5}))
    assert (content(cache, 5), content(cache, 6)) == (5, 2)


@pytest.mark.parametrize("device", DEVICES)
def test_a_synchronous_load_fills_its_blocks_right_before_its_step(device):
    cache = numbered_cache(device=device)
    with worker_on(cache) as (worker, _):
        worker.before_step(step(1, saves=(Save("a", (1, 2), (b"k1", b"k2"), True),)))
        landed(worker)
        wanted = load((5, b"k1"), (6, b"none"), (7, b"k2"), asynchronous=False)
        worker.start_loads([wanted, load((4, b"k1"), request="b")])
        landed(worker, "b")  # the copy thread has done what was handed over before
        assert [content(cache, block) for block in (4, 5, 6, 7)] == [1, 5, 6, 7]
        assert worker.before_step(step(2, loads=(wanted,))) == {6}
        assert [content(cache, block) for block in (5, 6, 7)] == [1, 6, 2]
        assert worker.poll() == Transfers()  # it is told by the step


def test_a_synchronous_load_may_need_what_a_step_right_before_saves():
    cache = numbered_cache()
    with worker_on(cache) as (worker, _):
        wanted = load((5, b"k"), asynchronous=False, after_step=1)
        worker.start_loads([wanted])
        worker.before_step(step(1, saves=(save(3, b"k"),)))
        assert worker.before_step(step(2, loads=(wanted,))) == frozenset()
    assert content(cache, 5) == 3


def test_a_block_is_never_saved_while_a_load_fills_it():
    cache = numbered_cache()
    with worker_on(cache) as (worker, medium):
        medium.go.clear()
        worker.before_step(step(1, saves=(save(1, b"k"),)))  # keeps the copy thread busy
        worker.start_loads([load((3, b"k"))])
        with pytest.raises(AssertionError, match=r"blocks \[3\] of a are saved while a load fills them"):
            worker.before_step(step(2, saves=(save(3, b"other"),)))
        medium.go.set()
        landed(worker)
        worker.before_step(step(3, saves=(save(3, b"other"),)))


def test_an_error_in_the_copy_thread_is_raised_and_wakes_who_waits():
    class Broken(HostMedium):
        def get(self, key):
            raise ZeroDivisionError("broken medium")

    worker = OffloadWorker(numbered_cache(), Broken(SHAPE, 2, torch.device("cpu")))
    worker.start_loads([load((3, b"k"))])
    worker.wait("a")
    with pytest.raises(RuntimeError, match="broken medium"):
        worker.poll()
    synchronous = load((4, b"k"), asynchronous=False, request="b")
    worker.start_loads([synchronous])
    with pytest.raises(ZeroDivisionError):
        worker.before_step(step(1, loads=(synchronous,)))
    with pytest.raises(RuntimeError, match="broken medium"):
        worker.close()  # nobody has polled since
    worker.close()


def test_closing_finishes_saves_and_cancels_loads():
    cache = numbered_cache()
    with worker_on(cache) as (worker, medium):
        worker.before_step(step(1, saves=(save(1, b"k"),)))
        worker.start_loads([load((5, b"k"), after_step=9)])
        waiting = threading.Thread(target=worker.wait, args=("a",))
        waiting.start()
        worker.close()
        waiting.join(timeout=60)
        assert not waiting.is_alive()
        assert medium.get(b"k") is not None
        worker.close()
    assert content(cache, 5) == 5


def test_many_saves_do_not_pile_up():
    """The copy thread stands still: after 64 snapshots the next one waits until there is room."""
    cache = numbered_cache()
    with worker_on(cache) as (worker, medium):
        medium.go.clear()
        for number in range(1, 65):
            worker.before_step(step(number, saves=(save(1, b"k"),)))
        late = threading.Thread(target=worker.before_step, args=(step(65, saves=(save(2, b"k"),)),))
        late.start()
        assert not worker._room.acquire(blocking=False)
        medium.go.set()
        late.join(timeout=60)
        assert not late.is_alive()


def test_a_tier_too_small_for_one_block_is_refused():
    with running() as runner, pytest.raises(ValueError, match="one stored block takes"):
        open_tier(HostTier(capacity_bytes=100), runner)

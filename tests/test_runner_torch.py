"""The torch runner, driven by hand-made steps on the CPU."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import CancelledError

import pytest
import torch

from kvsched.engine import Engine
from kvsched.request import RequestRefused, SamplingParams
from kvsched.runner.base import Gate, Runner
from kvsched.runner.torch_runner import StepFailed, create_runner
from kvsched.step import Load, ScheduledStep
from tests.runner_steps import HandHost
from tests.runner_torch import ARCHITECTURES, loaded, prompt_of, reference, running

LLAMA = "random:llama-tiny"


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("depth", [1, 3])
def test_greedy_tokens_equal_generate_with_steps_in_flight(name, depth):
    """With three steps in flight, the token of step k feeds step k + 1 before the host has seen it."""
    name = f"random:{name}"
    prompt = prompt_of(13)
    with running(name) as runner:
        host = HandHost(runner)
        host.add("a", prompt)
        assert host.generate("a", 20, depth) == reference(name, prompt, 20)


def test_it_is_a_runner():
    with running() as runner:
        assert isinstance(runner, Runner)
        assert runner.device.type == "cpu"
        before = runner.now()
        runner.advance(1e9)
        assert before <= runner.now() < 1e6


def test_fresh_runners_share_the_weights_and_nothing_else():
    """Three at once, with steps of all of them in flight, on pools of their own."""
    prompts = [prompt_of(13, seed) for seed in (1, 2, 3)]
    with running() as first:
        others = [first.fresh(num_blocks=20, block_size=8), first.fresh()]
        assert [r.num_blocks for r in others] == [20, 64]
        assert [r.block_size for r in others] == [8, 4]
        assert len({r.cache.kv.data_ptr() for r in (first, *others)}) == 3
        assert all(r._worker.model is first._worker.model for r in others)
        assert all(r.weights_id() == first.weights_id() for r in others)
        hosts = [HandHost(runner) for runner in (first, *others)]
        for host, prompt in zip(hosts, prompts, strict=True):
            host.add("a", prompt)
        futures = [[host.submit({"a": n}) for host in hosts] for n in [13] + [1] * 11]
        tokens = [[f.result(60).sampled_token_ids[0][0] for f in of_host] for of_host in zip(*futures, strict=True)]
        assert tokens == [reference(LLAMA, prompt, 12) for prompt in prompts]
        for runner in others:
            runner.close()


def test_submit_returns_before_the_result_and_a_gate_holds_all_later_steps():
    with running() as runner:
        host = HandHost(runner)
        host.add("a", prompt_of(6))
        gate = Gate("the test says so")
        first = host.submit({"a": 6}, gate)
        second, third = host.submit({"a": 1}), host.submit({"a": 1})
        with pytest.raises(TimeoutError):
            first.result(0.5)
        assert [f.done() for f in (first, second, third)] == [False] * 3
        gate.open()
        results = [f.result(60) for f in (first, second, third)]
        assert [r.step for r in results] == [1, 2, 3]
        assert results[0].started_at <= results[0].finished_at <= results[1].started_at
        tokens = [r.sampled_token_ids[0][0] for r in results]
        assert tokens == reference(LLAMA, prompt_of(6), 3)


def test_tokens_do_not_depend_on_batch_mates_chunks_or_padding():
    prompts = {name: prompt_of(length, seed=length) for name, length in (("a", 9), ("b", 17), ("c", 4))}
    expected = {name: reference(LLAMA, prompt, 4) for name, prompt in prompts.items()}
    one_each = {"a": 1, "b": 1, "c": 1}
    schedules = [
        [{"a": 9, "b": 17, "c": 4}, one_each, one_each, one_each],
        [{"b": 5}, {"a": 9, "b": 5}, {"b": 7, "a": 1}, {"c": 3, "b": 1}, {"c": 1, "a": 1, "b": 1}, one_each],
    ]
    for schedule in schedules:
        for pad_to in (1, 8):
            with running(pad_to=pad_to) as runner:
                host = HandHost(runner)
                for name, prompt in prompts.items():
                    host.add(name, prompt)
                for counts in schedule:
                    host.run(counts)
            for name, tokens in host.outputs.items():
                assert len(tokens) >= 2
                assert tokens == expected[name][: len(tokens)]


def test_a_prefill_chunk_samples_nothing():
    with running() as runner:
        host = HandHost(runner)
        host.add("a", prompt_of(6))
        assert host.run({"a": 2}).sampled_token_ids == ((),)
        assert host.run({"a": 4}).sampled_token_ids == ((reference(LLAMA, prompt_of(6), 1)[0],),)


def test_a_preempted_request_comes_back_with_other_blocks_and_the_same_tokens():
    prompt = prompt_of(10)
    with running() as runner:
        host = HandHost(runner)
        host.add("a", prompt)
        host.generate("a", 5)
        host.preempt("a")
        host.add("b", prompt_of(12, seed=5))
        host.run({"b": 12})  # takes the blocks that a had
        host.run({"a": 15, "b": 1})
        for _ in range(4):
            host.run({"a": 1})
        assert host.outputs["a"] == reference(LLAMA, prompt, 10)
        assert host.outputs["b"] == reference(LLAMA, prompt_of(12, seed=5), 2)


def test_a_request_may_recompute_from_a_cut_while_it_runs():
    """As after a failed load: the step in flight is dropped, positions from the cut on are computed again."""
    prompt = prompt_of(10)
    with running() as runner:
        host = HandHost(runner)
        host.add("a", prompt)
        host.generate("a", 3)
        runner.cache.kv[host.tables["a"][1]] = float("nan")  # positions 4 to 7 are lost
        host.submit({"a": 1}).result()
        host.in_flight.clear()  # computed on a bad block, and dropped
        host.computed["a"] = 4
        host.run({"a": 9})
        host.run({"a": 1})
        assert host.outputs["a"] == reference(LLAMA, prompt, 5)


def test_lines_of_finished_requests_are_used_again():
    with running(num_blocks=400) as runner:
        host = HandHost(runner)
        for i in range(40):  # more than the token buffer holds at first, and twice over
            host.add(f"r{i}", prompt_of(5, seed=i))
            host.run({f"r{i}": 5})
        for i in range(40):
            host.finish(f"r{i}")
        for i in range(40, 80):
            host.add(f"r{i}", prompt_of(5, seed=i))
        host.run({f"r{i}": 5 for i in range(40, 80)})
        assert len(runner._table._tables) == 64
        for i in (0, 39, 40, 79):
            assert host.outputs[f"r{i}"] == reference(LLAMA, prompt_of(5, seed=i), 1)


def test_sampled_tokens_do_not_depend_on_the_schedule():
    params = SamplingParams(max_tokens=9, temperature=1.0, top_p=0.95, seed=3)
    outputs = []
    for schedule in ([{"a": 6}] + [{"a": 1}] * 5, [{"b": 3, "a": 4}, {"a": 2, "b": 3}] + [{"b": 1, "a": 1}] * 5):
        with running() as runner:
            host = HandHost(runner)
            host.add("a", prompt_of(6), params)
            host.add("b", prompt_of(6, seed=1), SamplingParams(max_tokens=9, temperature=2.0, seed=5))
            for counts in schedule:
                host.run(counts)
        outputs.append(host.outputs["a"])
    assert outputs[0] == outputs[1]
    assert outputs[0] != reference(LLAMA, prompt_of(6), 6)


class Recorder:
    """A worker connector that looks at the cache before each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bool]] = []
        self.threads: set[str] = set()
        self.runner = None

    def before_step(self, step: ScheduledStep) -> frozenset[int]:
        self.threads.add(threading.current_thread().name)
        written = not self.runner.cache.kv[1, :, 0].isnan().any()
        self.seen.append((step.step, bool(written)))
        return frozenset(block for load in step.loads for block in load.block_ids)


def test_the_connector_is_called_in_compute_order_before_each_step():
    recorder = Recorder()
    with running() as runner:
        recorder.runner = runner
        runner.attach_connector(recorder)
        host = HandHost(runner)
        host.add("a", prompt_of(6))
        gate = Gate("all submitted")
        first = host.submit({"a": 6}, gate)
        empty = runner.submit(host.decide({}, loads=(Load("b", (9,), (b"",), 0, 4, asynchronous=False),)))
        host.submit({"a": 1})
        assert recorder.seen == []
        gate.open()
        assert first.result(60).transfers.invalid_block_ids == frozenset()
        result = empty.result(60)
        assert result.sampled_token_ids == ()
        assert result.transfers.invalid_block_ids == {9}
        host.land(), host.land()
    assert recorder.seen == [(1, False), (2, True), (3, True)]
    assert recorder.threads == {"kvsched-runner"}


class Breaks:
    def before_step(self, step: ScheduledStep) -> frozenset[int]:
        if step.step == 2:
            raise OSError("disk gone")
        return frozenset()


def test_a_step_that_fails_fails_all_later_ones():
    with running(connector=Breaks()) as runner:
        host = HandHost(runner)
        host.add("a", prompt_of(6))
        futures = [host.submit({"a": 6}), host.submit({"a": 1}), host.submit({"a": 1})]
        assert futures[0].result(60).step == 1
        with pytest.raises(OSError, match="disk gone"):
            futures[1].result(60)
        with pytest.raises(StepFailed, match=r"step 3 cannot run: step 2 failed \(disk gone\)"):
            futures[2].result(60)


def test_closing_cancels_what_is_held():
    with running() as runner:
        host = HandHost(runner)
        host.add("a", prompt_of(6))
        gate = Gate("never")
        futures = [host.submit({"a": 6}, gate), host.submit({"a": 1})]
        runner.close()
        runner.close()
        for number, future in enumerate(futures, start=1):
            with pytest.raises(CancelledError, match=f"closed before step {number} ran"):
                future.result(0)
        with pytest.raises(RuntimeError, match="closed"):
            host.submit({"a": 1})


def test_a_forgotten_runner_is_collected_and_ends_its_thread():
    runner = create_runner(loaded(LLAMA), num_blocks=8, device="cpu")
    host = HandHost(runner, block_size=16)
    host.add("a", prompt_of(6))
    host.run({"a": 6})
    host.submit({"a": 1}, Gate("never"))
    thread, cache = runner._thread, weakref.ref(runner.cache)
    del runner, host
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    del thread
    gc.collect()
    assert cache() is None


def test_steps_that_do_not_fit_are_refused_by_name():
    with running(max_model_len=16) as runner:
        host = HandHost(runner)
        host.add("a", prompt_of(6))
        host.add("long", prompt_of(17))
        host.add("odd", [3, 512])
        with pytest.raises(ValueError, match="schedules b, which no step has handed over"):
            runner.submit(host.decide({"a": 6})._replace(request_ids=("b",)))
        with pytest.raises(ValueError, match=r"gets 5 blocks of 4; .* ends at 16 tokens: raise its max_model_len"):
            runner.submit(host.decide({"a": 14}))
        with pytest.raises(ValueError, match=r"long has 17 tokens; this runner holds 16 a request"):
            runner.submit(host.decide({"long": 16}))
        with pytest.raises(ValueError, match="odd holds a token outside the model's vocabulary of 512"):
            runner.submit(host.decide({"odd": 2}))


def test_settings_that_contradict_each_other_are_refused():
    model = loaded(LLAMA)
    with pytest.raises(ValueError, match="num_blocks and kv_cache_memory both size the pool"):
        create_runner(model, num_blocks=8, kv_cache_memory=1, device="cpu")
    with pytest.raises(ValueError, match="kv_cache_memory is 1 bytes"):
        create_runner(model, kv_cache_memory=1, device="cpu")
    with pytest.raises(ValueError, match="max_model_len is 5000; random:llama-tiny can do 1 to 2048"):
        create_runner(model, max_model_len=5000, device="cpu")
    with pytest.raises(ValueError, match="num_blocks is 1; it must be at least 2"):
        create_runner(model, num_blocks=1, device="cpu")
    with pytest.raises(ValueError, match="block_size is 0"):
        create_runner(model, num_blocks=8, block_size=0, device="cpu")
    with pytest.raises(ValueError, match="pad_to is 0"):
        create_runner(model, num_blocks=8, pad_to=0, device="cpu")
    with pytest.raises(ValueError, match="device is 'tpu'; choose"):
        create_runner(model, num_blocks=8, device="tpu")


def test_a_missing_gpu_is_named():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="torch sees 0 CUDA devices; choose 'cpu'"):
        create_runner(loaded(LLAMA), num_blocks=8, device="cuda")


def test_the_pool_is_as_large_as_the_memory_given():
    with running(num_blocks=None, kv_cache_memory=100_000) as runner:
        assert runner.num_blocks == 100_000 // runner.cache.shape.block_bytes
        assert runner.cache.kv.nbytes <= 100_000
        assert runner.weights_id() == loaded(LLAMA).weights_id


def test_a_token_beyond_the_vocabulary_is_refused_at_the_door_and_others_go_on():
    engine = Engine.from_model(loaded(LLAMA), device="cpu", num_blocks=20, block_size=4)
    with engine:
        engine.add_request("a", prompt_of(6), SamplingParams(max_tokens=4))
        engine.step()
        with pytest.raises(RequestRefused, match="'b': token 1 of the prompt is 512; give token ids of 0 to 511"):
            engine.add_request("b", [5, 512])
        engine.drain()
        assert list(engine.output("a").token_ids) == reference(LLAMA, prompt_of(6), 4)

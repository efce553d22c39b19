"""The engine's loop: when steps are scheduled and results land, streaming, aborts at any moment, the end."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

import pytest

from kvsched.config import ConfigError, SchedulerConfig
from kvsched.engine import Engine, EngineStuck
from kvsched.faults import FailRequest, FaultPlan
from kvsched.request import RequestRefused, SamplingParams
from kvsched.runner.base import Gate
from kvsched.runner.synthetic import SyntheticRunner
from kvsched.step import ScheduledStep, StepResult

PROMPTS = [list(range(7 * i, 7 * i + 7)) for i in range(6)]
EIGHT = SamplingParams(max_tokens=8)


def small(depth: int = 2, **settings: object) -> Engine:
    return Engine.synthetic(12, block_size=4, max_in_flight=depth, enable_prefix_caching=False, **settings)


class ManualRunner(SyntheticRunner):
    """Its results come when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: deque[tuple[ScheduledStep, Future[StepResult]]] = deque()

    def submit(self, step: ScheduledStep, gate: Gate | None = None) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        self.waiting.append((step, future))
        return future

    def finish_oldest(self, error: Exception | None = None) -> None:
        step, future = self.waiting.popleft()
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(super().submit(step).result())


def manual(depth: int) -> tuple[Engine, ManualRunner]:
    runner = ManualRunner()
    config = SchedulerConfig(num_blocks=13, block_size=4, max_in_flight=depth, max_model_len=40)
    return Engine(config, runner), runner


# ---- when results land


@pytest.mark.parametrize("landing", [0, 1, 2, 3])
def test_a_result_lands_after_the_stated_number_of_further_steps(landing):
    engine = Engine.synthetic(40, max_in_flight=4, landing=landing)
    engine.add_request("r", PROMPTS[0], SamplingParams(max_tokens=30))
    for turn in range(1, 11):
        engine.step()
        assert engine.num_in_flight == min(turn, landing)
        delivered = [event.delivered for event in engine.events if event.kind == "step_delivered"]
        assert delivered == list(range(1, turn - landing + 1))


def test_a_full_pipe_lands_its_oldest_step_earlier_than_stated():
    engine = Engine.synthetic(40, max_in_flight=2, landing=9)
    engine.add_request("r", PROMPTS[0], SamplingParams(max_tokens=30))
    for turn in range(1, 8):
        engine.step()
        assert engine.num_in_flight == 1
        assert sum(event.kind == "step_delivered" for event in engine.events) == turn - 1


def test_what_cannot_be_scheduled_lands_the_oldest_step():
    engine = Engine.synthetic(40, max_in_flight=4, landing=3)
    engine.add_request("r", PROMPTS[0], SamplingParams(max_tokens=1))
    engine.step()
    assert engine.num_in_flight == 1
    outputs = engine.step()
    assert [(row.request_id, row.finish_reason) for row in outputs] == [("r", "length")]


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_two_runs_are_equal_event_by_event(depth):
    runs = []
    for _ in range(2):
        engine = small(depth)
        engine.generate(PROMPTS, EIGHT)
        runs.append(engine.events)
    assert runs[0] == runs[1]
    assert {"preempted"} <= {event.kind for event in runs[0]}


def test_tokens_do_not_depend_on_depth_or_landing():
    outputs = {
        (depth, landing): [output.token_ids for output in small(depth, landing=landing).generate(PROMPTS, EIGHT)]
        for depth in (1, 2, 3, 4)
        for landing in range(depth)
    }
    assert len(set(map(tuple, outputs.values()))) == 1


def test_live_results_land_as_they_come():
    engine, runner = manual(depth=3)
    engine.add_request("r", PROMPTS[0], EIGHT)
    assert engine.step() == []
    assert engine.step() == []
    assert engine.num_in_flight == 2
    runner.finish_oldest()
    runner.finish_oldest()
    outputs = engine.step()
    assert [row.request_id for row in outputs] == ["r", "r"]
    assert engine.num_in_flight == 1
    assert [event.delivered for event in engine.events if event.kind == "step_delivered"] == [1, 2]


def test_live_a_full_pipe_waits_for_the_oldest_result():
    engine, runner = manual(depth=1)
    engine.add_request("r", PROMPTS[0], EIGHT)

    class Late(Future):
        def result(self, timeout=None):
            if not self.done():
                runner.finish_oldest()
            return super().result(timeout)

    runner.submit = lambda step, gate=None: runner.waiting.append((step, future := Late())) or future
    outputs = engine.step()
    assert [len(row.token_ids) for row in outputs] == [1]


def test_a_failure_in_a_step_reaches_the_caller():
    engine, runner = manual(depth=2)
    engine.add_request("r", PROMPTS[0], EIGHT)
    engine.step()
    runner.finish_oldest(RuntimeError("the device is gone"))
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()


# ---- the two halves of a turn


def test_schedule_and_deliver_refuse_when_there_is_nothing_to_do():
    engine = small(1)
    with pytest.raises(ValueError, match="nothing is in flight; schedule a step first"):
        engine.deliver()
    engine.add_request("r", PROMPTS[0], EIGHT)
    engine.schedule()
    with pytest.raises(ValueError, match="1 steps are in flight, max_in_flight is 1: deliver one"):
        engine.schedule()
    assert [row.request_id for row in engine.deliver()] == ["r"]


def test_landing_below_zero_is_refused():
    with pytest.raises(ValueError, match="landing is -1; give 0 or more further steps, or None"):
        small(1, landing=-1)


@pytest.mark.parametrize("new", [1, 2])
def test_a_lowered_depth_lets_the_pipe_run_down(new):
    engine = small(4)
    for i, prompt in enumerate(PROMPTS[:3]):
        engine.add_request(f"r{i}", prompt, EIGHT)
    for _ in range(3):
        engine.step()
    assert engine.num_in_flight == 3
    engine.scheduler.configure(max_in_flight=new)
    engine.step()
    assert engine.num_in_flight <= new
    engine.drain()
    reference = small(1).generate(PROMPTS[:3], EIGHT)
    assert [engine.output(f"r{i}").token_ids for i in range(3)] == [output.token_ids for output in reference]


def test_a_raised_depth_is_used():
    engine = Engine.synthetic(40, max_in_flight=1, landing=9)
    engine.add_request("r", PROMPTS[0], SamplingParams(max_tokens=30))
    engine.step()
    assert engine.num_in_flight == 0
    engine.scheduler.configure(max_in_flight=3)
    engine.step()
    engine.step()
    assert engine.num_in_flight == 2


# ---- serving


def test_stream_yields_every_token_once_and_reasons_at_the_end():
    engine = small(2)
    rows = list(engine.stream(PROMPTS, EIGHT))
    for i in range(len(PROMPTS)):
        mine = [row for row in rows if row.request_id == f"r{i}"]
        assert tuple(token for row in mine for token in row.token_ids) == engine.output(f"r{i}").token_ids
        assert [row.finish_reason for row in mine] == [None] * (len(mine) - 1) + ["length"]


def test_stream_refuses_before_the_first_token_and_leaves_nothing_behind():
    engine = small(2)
    with pytest.raises(RequestRefused, match=r"'r1'.*prompt is empty"):
        engine.stream([PROMPTS[0], []], EIGHT)
    assert not engine.has_unfinished_requests()
    for no_prompt in (["x"], [1.5], 7, None):
        with pytest.raises(RequestRefused, match=r"'r1': the prompt must be text or a sequence of token ids"):
            engine.stream([PROMPTS[0], no_prompt], EIGHT)
        assert not engine.has_unfinished_requests()


def test_generate_takes_one_sampling_per_prompt_and_names_what_does_not_fit():
    engine = small(2)
    outputs = engine.generate(PROMPTS[:2], [SamplingParams(max_tokens=1), EIGHT], request_ids=["a", "b"])
    assert [(output.request_id, len(output.token_ids)) for output in outputs] == [("a", 1), ("b", 8)]
    with pytest.raises(ValueError, match="sampling has 1 entries for 2 prompts; give one per prompt"):
        engine.generate(PROMPTS[:2], [EIGHT])
    with pytest.raises(ValueError, match="priorities has 3 entries for 2 prompts"):
        engine.generate(PROMPTS[:2], EIGHT, priorities=[1, 2, 3])
    with pytest.raises(ValueError, match="prompts is one text; give a list of prompts"):
        engine.generate("hello", EIGHT)
    with pytest.raises(RequestRefused, match=r"'a'.*prompt is text, but this engine has no tokenizer"):
        engine.generate(["hello"], EIGHT, request_ids=["a"])
    with pytest.raises(ValueError, match="no tokenizer, hence no chat template"):
        engine.chat([[{"role": "user", "content": "hello"}]])


def test_priorities_order_admission():
    engine = Engine.synthetic(40, policy="priority", max_num_seqs=1)
    engine.generate(PROMPTS[:3], SamplingParams(max_tokens=2), priorities=[2, 0, 1])
    assert [event.request for event in engine.events if event.kind == "request_finished"] == ["r1", "r2", "r0"]


def test_output_of_what_has_not_ended_or_is_not_known():
    engine = small(1)
    engine.add_request("r", PROMPTS[0], EIGHT)
    with pytest.raises(ValueError, match="'r' has not ended; call step"):
        engine.output("r")
    with pytest.raises(ValueError, match="'q' is unknown"):
        engine.output("q")


class Letters:
    """A tokenizer: one token a letter; 0 ends a text."""

    def encode(self, text):
        return [ord(letter) for letter in text]

    def decode(self, token_ids, *, skip_special_tokens):
        return "".join(chr(token) for token in token_ids if token or not skip_special_tokens)

    def apply_chat_template(self, conversation, **options):
        assert options == {"add_generation_prompt": True, "tokenize": False}
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in conversation) + "<assistant>"


def with_text(tokens: list[int]) -> Engine:
    options = {"tokenizer": Letters(), "eos_token_ids": (0,)}
    return Engine.synthetic(40, token_fn=lambda _, position: tokens[position % len(tokens)], options=options)


def test_prompts_and_outputs_as_text():
    engine = with_text([ord("c"), ord("d"), 0])  # by position: prompt "ab", then position 2 is 0
    (output,) = engine.generate(["ab"], EIGHT)
    assert (output.prompt, output.prompt_token_ids, output.text, output.finish_reason) == ("ab", (97, 98), "", "stop")
    (output,) = engine.generate(["ab"], SamplingParams(max_tokens=4, ignore_eos=True))
    assert (output.text, output.finish_reason) == ("cd", "length")
    assert output.token_ids == (0, 99, 100, 0)
    (output,) = engine.chat([[{"role": "user", "content": "x"}]], EIGHT)
    assert output.prompt == "<user>x<assistant>"


# ---- aborts


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_an_abort_at_any_moment_leaves_the_others_exact_and_the_pool_whole(depth):
    reference = {output.request_id: output.token_ids for output in small(depth).generate(PROMPTS, EIGHT)}
    moment = 0
    while True:
        engine = small(depth)
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(f"r{i}", prompt, EIGHT)
        for _ in range(moment):
            engine.step()
        if not engine.abort("r2", "r4", "nobody"):
            break
        engine.drain()
        for request_id, tokens in reference.items():
            output = engine.output(request_id)
            if output.finish_reason == "abort":
                assert request_id in ("r2", "r4")
                assert output.token_ids == tokens[: len(output.token_ids)]
            else:
                assert output.token_ids == tokens
        assert engine.scheduler.kv.pool.num_free == 11
        moment += 1
    assert moment > 8, "both requests lived through several steps"


# ---- no progress


def test_nothing_that_can_move_is_an_error_that_says_so_and_no_endless_loop():
    engine = small(2, options={"faults": FaultPlan((FailRequest("r0", 1),))})
    engine.add_request("r0", PROMPTS[0], EIGHT)
    with pytest.raises(EngineStuck, match=r"requests: r0;.*FailRequest\(request='r0'.*until_step"):
        engine.drain()
    assert engine.ticks < 1100
    assert engine.abort("r0") == ["r0"]
    engine.drain()


def test_the_door_of_the_configuration():
    with pytest.raises(ConfigError, match="raise num_blocks to 6 or lower max_model_len to 16"):
        Engine.synthetic(5, block_size=4, max_model_len=17)
    assert Engine.synthetic(5, block_size=4).config.max_model_len == 4096, "not asked for: bounded one by one"


def test_what_is_recorded():
    engine = Engine.synthetic(40, options={"record": False})
    engine.generate(PROMPTS[:1], EIGHT)
    assert engine.events == []
    seen: list = []
    engine = Engine.synthetic(40, options={"record": False, "on_event": seen.append})
    engine.generate(PROMPTS[:1], EIGHT)
    assert engine.events == []
    assert seen[0].kind == "run_started"
    assert seen[0].config["defers_frees"] is False
    assert "request_finished" in {event.kind for event in seen}


def test_closing_twice_and_after_use():
    with small(2) as engine:
        engine.generate(PROMPTS[:2], EIGHT)
    engine.close()
    with pytest.raises(RuntimeError, match="the runner is closed"):
        engine.generate(PROMPTS[:1], EIGHT)

"""Metrics for Prometheus: what they count, what they cost, and that each engine has its own."""

from __future__ import annotations

import gc
import math
from collections import Counter

import pytest
from prometheus_client import generate_latest

from kvsched.connector.scripted import KvRule
from kvsched.engine import Engine
from kvsched.request import SamplingParams
from kvsched.runner.synthetic import CostModel
from kvsched.trace import events as ev
from kvsched.trace.log import EventLog
from kvsched.trace.metrics import RequestMetrics, run_metrics
from kvsched.trace.prometheus import EngineMetrics
from tests.drive import Drive
from tests.test_frame_layers import loaded_after
from tests.test_trace_metrics import clock_of_c49
from tests.trace_runs import RandomRun, head, make_head, recorded

NORMAL = ("stop", "length", "pool")


def samples(registry, name: str) -> dict[str, float]:
    """All samples of one scrape whose name begins with kvsched:`name`, by the rest of the name and, if there is one,
    the label besides model_name and engine."""
    found: dict[str, float] = {}
    for sample in (sample for family in registry.collect() for sample in family.samples):
        if sample.name.startswith(f"kvsched:{name}"):
            other = [value for key, value in sample.labels.items() if key not in ("model_name", "engine")]
            found[" ".join([sample.name.removeprefix(f"kvsched:{name}"), *other])] = sample.value
    return found


def value(registry, name: str) -> float:
    return samples(registry, name)[""]


def total(registry, name: str) -> float:
    return samples(registry, name)["_total"]


def histogram(registry, name: str) -> tuple[float, float]:
    """(number of observations, their sum)."""
    found = samples(registry, name)
    return found["_count"], found["_sum"]


def of_events(events, **options) -> EngineMetrics:
    return EngineMetrics(events, "a-model", **options)


def crowded(**settings) -> Engine:
    """Nine blocks for four requests, two steps in flight: preemptions are sure."""
    return Engine.synthetic(
        9,
        cost=CostModel(0.01, 1e-4),
        block_size=4,
        enable_prefix_caching=False,
        max_in_flight=2,
        async_scheduling=True,
        defer_block_free=True,
        **settings,
    )


def serve(engine: Engine) -> None:
    engine.generate([[1, 2, 3, 4, 5, 6, 7]] * 4, SamplingParams(max_tokens=8))


# ---- what is counted


def test_counts_of_a_run_with_preemptions():
    engine = crowded()
    serve(engine)
    run = run_metrics(engine.events)
    registry = engine.registry
    assert total(registry, "num_preemptions") == run.num_preemptions == 2
    assert total(registry, "num_guard_stops") == run.num_guard_stops == 1
    assert total(registry, "num_failed_slot_calls") == run.num_failed_calls == 9
    assert total(registry, "prompt_tokens") == 4 * 7
    assert total(registry, "generation_tokens") == 4 * 8
    assert histogram(registry, "iteration_tokens_total")[1] == 4 * 7 + 4 * 8
    assert histogram(registry, "request_prompt_tokens") == (4, 4 * 7)
    assert histogram(registry, "request_generation_tokens") == (4, 4 * 8)
    assert histogram(registry, "request_num_preemptions") == (4, 2)
    ends = {name: count for name, count in samples(registry, "request_success").items() if name.startswith("_total")}
    assert ends == {f"_total {reason}": 4 if reason == "length" else 0 for reason in (*NORMAL, "abort", "error")}


def check_latencies(events) -> int:
    """Every latency against those of kvsched.trace.metrics. Returns how many requests ended normally."""
    run, found = run_metrics(events), samples(of_events(events).registry, "")
    done = run.completed

    def expect(name: str, values: list[float]) -> None:
        seen = found[f"{name}_count"], found[f"{name}_sum"]
        assert seen == (len(values), pytest.approx(math.fsum(values))), name

    expect("time_to_first_token_seconds", [r.ttft for r in run.requests if r.ttft is not None])
    expect("inter_token_latency_seconds", [gap for r in run.requests for gap in r.itl])
    expect("e2e_request_latency_seconds", [r.e2el for r in done])
    expect("request_queue_time_seconds", [r.queue for r in done])
    expect("request_prefill_time_seconds", [r.prefill for r in done])
    expect("request_decode_time_seconds", [r.decode for r in done])
    expect("request_inference_time_seconds", [r.inference for r in done])
    expect("request_time_per_output_token_seconds", [r.tpot or 0.0 for r in done])
    expect("request_num_preemptions", [r.num_preemptions for r in done])
    expect("request_generation_tokens", [r.num_output_tokens for r in done])
    assert found["num_preemptions_total"] == run.num_preemptions
    assert found["generation_tokens_total"] == run.num_output_tokens
    reasons = Counter(r.finish_reason for r in run.requests if r.finish_reason)
    ends = {r: found[f"request_success_total {r}"] for r in (*NORMAL, "abort", "error")}
    assert {r: n for r, n in ends.items() if n} == reasons
    return len(done)


def test_latencies_are_those_of_trace_metrics():
    engine = crowded()
    serve(engine)
    assert check_latencies(engine.events) == 4
    assert histogram(engine.registry, "e2e_request_latency_seconds")[1] > 0


@pytest.mark.parametrize("seed", range(6))
def test_latencies_of_random_runs(seed):
    """With aborts, failed loads, resets and settings changed on the way."""
    assert check_latencies(recorded(seed, 400)) > 0


def test_c49_a_preemption_restarts_no_clock_and_counts_once():
    registry = of_events(clock_of_c49()).registry
    expected = {
        "request_queue_time_seconds": 1.0,
        "request_prefill_time_seconds": 1.0,
        "time_to_first_token_seconds": 2.0,
        "request_decode_time_seconds": 8.0,
        "request_inference_time_seconds": 9.0,
        "e2e_request_latency_seconds": 10.0,
        "request_time_per_output_token_seconds": 1.0,
        "request_num_preemptions": 1.0,
    }
    assert {name: histogram(registry, name) for name in expected} == {n: (1, v) for n, v in expected.items()}
    assert total(registry, "num_preemptions") == 1
    assert total(registry, "num_guard_stops") == 1
    in_time = samples(registry, "time_to_first_token_seconds")
    assert (in_time["_bucket 1.0"], in_time["_bucket 2.5"]) == (0, 1)


def test_prefix_cache_is_asked_once_per_request_and_not_again_after_a_preemption():
    added = ev.RequestAdded(0, "r", tuple(range(20)), {}, 0, 0.0, 0.0)
    first, lost = ev.Admitted(1, "r", False, 8, 8, 0), ev.Preempted(2, "r", "r", 9, 0, False, 1, "kv_full")
    events = [make_head(), added, first, lost, ev.Admitted(3, "r", True, 16, 16, 0)]
    registry = of_events(events).registry
    assert (total(registry, "prefix_cache_queries"), total(registry, "prefix_cache_hits")) == (20, 8)
    assert total(registry, "external_prefix_cache_queries") == 0
    without = make_head(enable_prefix_caching=False)
    registry = of_events([without, added, ev.Admitted(1, "r", False, 0, 0, 0)]).registry
    assert (total(registry, "prefix_cache_queries"), total(registry, "prefix_cache_hits")) == (0, 0)


def test_prefix_cache_hits_of_an_engine_and_the_prompt_tokens_they_save():
    engine = Engine.synthetic(50, block_size=4)
    for name in ("first", "second"):
        engine.generate([list(range(1, 14))], SamplingParams(max_tokens=1), request_ids=[name])
    registry = engine.registry
    assert (total(registry, "prefix_cache_queries"), total(registry, "prefix_cache_hits")) == (26, 12)
    assert total(registry, "prompt_tokens") == 26
    assert histogram(registry, "iteration_tokens_total") == (2, (13 + 1) + (1 + 1))
    assert histogram(registry, "request_time_per_output_token_seconds") == (2, 0.0)
    assert histogram(registry, "inter_token_latency_seconds") == (0, 0.0)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_tokens_found_outside(asynchronous):
    """One request of 10 tokens finds 8 of them outside, another none; a load that lands is no second look-up."""
    rules = {"there": KvRule(8, asynchronous)}
    drive = Drive(20, rules=rules, enable_prefix_caching=True)
    drive.events.insert(0, head(drive.scheduler))
    registry = of_events(drive.events, has_connector=True).registry
    drive.add("there", 10, 2)
    drive.turn()
    if asynchronous:
        assert value(registry, "num_requests_waiting") == 1
        assert value(registry, "kv_cache_usage_perc") == 2 / 20
        drive.report(recving=("there",))
    drive.run()
    drive.add("new", 10, 2)
    drive.run()
    assert total(registry, "external_prefix_cache_queries") == 20
    assert total(registry, "external_prefix_cache_hits") == 8
    assert total(registry, "prefix_cache_queries") == 20
    assert total(registry, "prefix_cache_hits") == 0
    assert total(registry, "prompt_tokens") == 20
    assert histogram(registry, "iteration_tokens_total")[1] == (2 + 2) + (10 + 2)


# ---- gauges


def check_gauges(registry, scheduler) -> set[str]:
    """All gauges against the scheduler. Returns those that are not 0."""
    usable, pool, fence = scheduler.config.num_blocks - 1, scheduler.kv.pool, scheduler.kv.fence
    expected = {
        "num_requests_running": len(scheduler.running),
        "num_requests_waiting": len(list(scheduler.waiting)) + len(list(scheduler.kv_holding_waiting)),
        "kv_cache_usage_perc": (usable - pool.num_free) / usable,
        "num_blocks_behind_fence": sum(len(entry.block_ids) for entry in fence.deferred),
        "num_steps_in_flight": len(scheduler.in_flight),
    }
    found = samples(registry, "")
    assert {name: found[name] for name in expected} == expected
    return {name for name, number in expected.items() if number}


def test_gauges_in_the_middle_of_a_run_are_the_schedulers_own():
    engine = crowded(guard="none")  # so that victims' blocks go behind the fence
    for i in range(4):
        engine.add_request(f"r{i}", [1, 2, 3, 4, 5, 6, 7], SamplingParams(max_tokens=8))
    seen = set()
    while engine.has_unfinished_requests():
        step = engine.schedule()
        seen |= check_gauges(engine.registry, engine.scheduler)
        if engine.num_in_flight == 2 or (step.is_empty and engine.num_in_flight):
            engine.deliver()
            seen |= check_gauges(engine.registry, engine.scheduler)
    while engine.num_in_flight:
        engine.deliver()
    assert check_gauges(engine.registry, engine.scheduler) == set()
    assert len(seen) == 5, seen


@pytest.mark.parametrize("seed", range(4))
def test_gauges_of_random_runs(seed):
    run = RandomRun(seed)
    registry = of_events(run.events).registry
    for _ in run.play(150):
        check_gauges(registry, run.scheduler)


# ---- scraping


def without_times_of_creation(registry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_scraping_twice_counts_nothing_twice():
    often, once = crowded(), crowded()
    for engine in (often, once):
        for i in range(4):
            engine.add_request(f"r{i}", [1, 2, 3, 4, 5, 6, 7], SamplingParams(max_tokens=8))
        while engine.has_unfinished_requests():
            engine.step()
            if engine is often:
                generate_latest(engine.registry)
    assert without_times_of_creation(often.registry) == without_times_of_creation(often.registry)
    assert without_times_of_creation(often.registry) == without_times_of_creation(once.registry)


def test_a_scrape_of_one_name_folds_too():
    engine = crowded()
    serve(engine)
    narrow = engine.registry.restricted_registry(["kvsched:num_preemptions_total"])
    assert "kvsched:num_preemptions_total{" in generate_latest(narrow).decode()
    assert samples(narrow, "num_preemptions") == {"_total": 2}


def test_a_log_of_events_serves_as_well():
    events = recorded(3, 400)
    registries = [of_events(sequence).registry for sequence in (events, EventLog(events))]
    assert without_times_of_creation(registries[0]) == without_times_of_creation(registries[1])


def test_two_engines_count_apart():
    first, second = crowded(), crowded()
    serve(first)
    assert total(first.registry, "generation_tokens") == 32
    assert total(second.registry, "generation_tokens") == 0
    assert first.registry is first.registry is not second.registry


def test_finished_requests_are_let_go():
    def num_held() -> int:
        gc.collect()
        return sum(type(thing) is RequestMetrics for thing in gc.get_objects())

    before = num_held()
    engine = Engine.synthetic(50, block_size=4, max_in_flight=2)
    engine.generate([[i] * 5 for i in range(100)], SamplingParams(max_tokens=3))
    engine.add_request("living", [1, 2, 3], SamplingParams(max_tokens=50))
    for _ in range(5):
        engine.step()
    assert value(engine.registry, "num_requests_running") == 1
    assert samples(engine.registry, "request_success")["_total length"] == 100
    assert num_held() - before == 1


# ---- names and errors


def test_names_carry_the_prefix_and_every_metric_its_labels():
    families = list(crowded().registry.collect())
    assert len({family.name for family in families}) == len(families) == 27
    for family in families:
        assert family.name.startswith("kvsched:")
        assert family.documentation
        assert family.samples
        for sample in family.samples:
            assert sample.labels.items() >= {"model_name": "SyntheticRunner", "engine": "0"}.items()


def test_buckets_of_token_counts_end_at_the_longest_sequence():
    registry = Engine.synthetic(50, max_model_len=100).registry
    names = samples(registry, "request_prompt_tokens_bucket")
    assert list(names) == [f" {size}" for size in ("1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "+Inf")]


def test_an_engine_without_events_says_what_to_do():
    engine = Engine.synthetic(9, options={"record": False})
    with pytest.raises(ValueError, match="record=True"):
        engine.registry  # noqa: B018


def test_events_that_are_not_the_whole_run_are_refused():
    events = recorded(1)
    for part in ([], events[1:]):
        with pytest.raises(ValueError, match="run_started"):
            of_events(part)


def test_events_taken_away_are_noticed():
    events = recorded(1)
    for rest in ([], events[1:], [make_head(num_blocks=77), *events[1:]]):
        given = list(events)
        registry = of_events(given).registry
        generate_latest(registry)
        given[:] = rest
        with pytest.raises(ValueError, match="taken away"):
            generate_latest(registry)


def test_importing_kvsched_and_its_engine_does_not_load_prometheus():
    assert "prometheus_client" not in loaded_after("import kvsched\nfrom kvsched import Engine\nEngine.synthetic(9)")

"""Plots: the numbers behind them, by hand and against the state; the figures, drawn."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvsched.trace.replay import Replay
from lab import plot_data as data
from lab import plots
from tests.lab_runs import crowd
from tests.lab_scenes import busy, c01

SESSION = crowd()
EVENTS = SESSION.events[:]
REPLAY = Replay(EVENTS)


def test_the_pool_is_the_states():
    series = data.pool(EVENTS)
    assert series.steps == list(range(1, SESSION.num_steps + 1))
    states = [REPLAY.state_at_step(step) for step in series.steps]
    assert series.free == [state.num_free for state in states]
    assert series.deferred == [sum(len(d.block_ids) for d in state.deferred) for state in states]
    assert max(series.deferred) > 0
    assert series.usable == 12


def test_preemptions_are_counted_where_they_happen():
    series = data.preemptions(EVENTS)
    for kind, column in (
        ("preempted", series.preempted),
        ("guard_stopped", series.guard_stops),
        ("slots_failed", series.failed_calls),
    ):
        steps = [e.step for e in EVENTS if e.kind == kind]
        assert [steps.count(step) for step in series.steps] == column
        assert sum(column) > 0


@pytest.mark.parametrize("num_bins", [1, 7, 60, 1000])
def test_throughput_loses_no_token(num_bins):
    delivered = sum(len(tokens) for e in EVENTS if e.kind == "step_delivered" for tokens in e.tokens)
    series = data.throughput(EVENTS, num_bins)
    assert series.clock == "second"
    assert sum(series.tokens) * series.width == pytest.approx(delivered)
    assert len(series.starts) == len(series.tokens) <= num_bins


def test_without_a_clock_steps_stand_for_time():
    still = c01()
    still.run()
    series = data.throughput(still.events[:])
    assert (series.clock, series.width) == ("step", 1.0)
    assert sum(series.tokens) == 32
    assert data.throughput([EVENTS[0]]).tokens == []
    with pytest.raises(ValueError, match="num_bins is 0"):
        data.throughput(EVENTS, 0)


def test_spans_of_a_request_follow_each_other():
    spans = data.gantt(EVENTS)
    for request in {span.request for span in spans}:
        own = [span for span in spans if span.request == request]
        assert own[0].doing == "waiting"
        for one, next_one in pairwise(own):
            assert (one.last_step, one.end) == (next_one.first_step, next_one.start)
        finished = next(e for e in EVENTS if e.kind == "request_finished" and e.request == request)
        assert (own[-1].last_step, own[-1].end) == (finished.step, finished.time)
        lost = sum(1 for e in EVENTS if e.kind == "preempted" and e.request == request)
        assert sum(1 for span in own if span.doing == "preempted") == lost
    assert any(span.doing == "preempted" for span in spans)


def test_spans_by_hand():
    session = c01()
    session.run("preempted")
    doing = [(s.request, s.doing, s.first_step, s.last_step) for s in data.gantt(session.seen())]
    assert doing == [
        ("r0", "waiting", 0, 1),
        ("r0", "running", 1, 4),
        ("r1", "waiting", 0, 1),
        ("r1", "running", 1, 4),
        ("r2", "waiting", 0, 1),
        ("r2", "running", 1, 4),
        ("r2", "preempted", 4, 4),
        ("r3", "waiting", 0, 1),
        ("r3", "running", 1, 4),
        ("r3", "preempted", 4, 4),
    ]


def test_the_fences_lag_is_the_states():
    series = data.fence_lag(EVENTS)
    for index, lag, waiting in zip(series.events, series.lag, series.waiting, strict=True):
        state = REPLAY.state_at(index + 1)
        assert lag == state.sched_step_seq - state.processed_step_seq
        assert waiting == len(state.deferred)
    assert max(series.lag) > 1


def test_the_recompute_tax():
    series = data.recompute(EVENTS)
    assert sum(series.first) + sum(series.again) == sum(sum(e.num_tokens) for e in EVENTS if e.kind == "step_scheduled")
    session = c01(guard="none")
    session.run()
    off = data.recompute(session.events[:])
    assert sum(off.again) == 32
    assert off.tax == pytest.approx(32 / (sum(off.first) + 32))
    assert data.RecomputeSeries([], [], []).tax == 0.0


def test_latencies_are_the_metrics():
    session = busy()
    session.run()
    series = data.latencies(session.events[:])
    assert len(series.ttft) == 6
    assert len(series.tpot) == 6
    assert min(series.ttft) > 0


MANY = [plots.free_blocks, plots.preemptions, plots.throughput, plots.latencies, plots.fence_lag, plots.recompute_tax]


@pytest.mark.parametrize("plot", [*MANY, plots.gantt], ids=lambda plot: plot.__name__)
def test_figures_are_drawn_and_the_same_each_time(plot):
    figure = plot(SESSION)
    assert figure.data
    assert figure.layout.title.text
    assert figure.to_json() == plot(EVENTS).to_json()
    assert sum(len(trace.x if trace.x is not None else trace.y) for trace in figure.data) > 0


@pytest.mark.parametrize("plot", MANY, ids=lambda plot: plot.__name__)
def test_several_runs_lie_over_one_another_and_differ_in_more_than_colour(plot):
    figure = plot({"off": crowd(guard="none"), "on": SESSION})
    names = [trace.name for trace in figure.data]
    assert len(set(names)) == len(names)
    looks = [(trace.line.color, trace.line.dash) for trace in figure.data if trace.type == "scatter"]
    assert len(set(looks)) == len(looks)
    dashes = [trace.line.dash for trace in figure.data if trace.type == "scatter"]
    assert len(set(dashes)) == len(dashes)
    with pytest.raises(ValueError, match="nothing to plot"):
        plot({})


def test_a_plot_shows_what_is_seen_at_the_position():
    session = c01()
    session.run()
    session.seek(5)
    assert max(plots.free_blocks(session).data[0].x) == 5


def test_the_gantt_knows_two_clocks():
    by_step, by_time = plots.gantt(SESSION), plots.gantt(SESSION, clock="time")
    assert by_step.to_json() != by_time.to_json()
    with pytest.raises(ValueError, match="'step' or 'time'"):
        plots.gantt(SESSION, clock="event")

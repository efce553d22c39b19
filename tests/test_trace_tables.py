"""Recordings as pandas tables and Parquet files."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvsched.trace import events as ev
from kvsched.trace import tables
from kvsched.trace.fold import fold
from kvsched.trace.metrics import request_metrics
from kvsched.trace.replay import Replay
from tests.conftest import repository
from tests.drive import Drive
from tests.trace_runs import head, make_head, recorded

pd = pytest.importorskip("pandas", reason="tables need pandas: pip install -e '.[lab]'")


@pytest.fixture(scope="module")
def run() -> list[ev.Event]:
    return recorded(9, 300, defer_block_free=True, max_in_flight=3)


def test_traces_are_read_without_pandas_and_torch():
    modules = "reader, writer, replay, diff, metrics, perfetto, tables"
    script = f"from kvsched.trace import {modules}; from kvsched import invariants; import sys"
    check = "heavy = {'pandas', 'numpy', 'pyarrow', 'torch', 'jupyterlab'} & set(sys.modules); assert not heavy, heavy"
    subprocess.run([sys.executable, "-c", f"{script}\n{check}"], cwd=repository(), check=True)


def test_requests_are_measured(run):
    table = tables.requests(run)
    measured = request_metrics(run)
    assert list(table["request"]) == [r.request for r in measured]
    for name in ("ttft", "tpot", "e2el", "queue"):
        assert [None if pd.isna(v) else v for v in table[name]] == [getattr(r, name) for r in measured]
    assert table["num_output_tokens"].sum() == sum(r.num_output_tokens for r in measured)


def test_steps_tell_the_state_as_each_call_ended(run):
    table = tables.steps(run)
    replay = Replay(run)
    assert list(table["step"]) == list(range(1, replay.num_steps + 1))
    for row in table.itertuples():
        state = replay.state_at_step(row.step)
        assert (row.running, row.waiting, row.loading) == (state.num_running, state.num_waiting, state.num_loading)
        assert (row.free, row.sched_step_seq) == (state.num_free, state.sched_step_seq)
    assert table["preempted"].sum() == sum(isinstance(e, ev.Preempted) for e in run)
    delivered = [e for e in run if isinstance(e, ev.StepDelivered) and e.request_ids]
    assert table["delivered_in"].notna().sum() == len(delivered)
    assert table["num_output_tokens"].sum() == sum(len(t) for e in delivered for t in e.tokens)


def test_events_of_one_kind_keep_their_places(run):
    table = tables.events_of_kind(run, "blocks_allocated")
    assert len(table) > 0
    for row in table.itertuples(index=False):
        assert tuple(row)[1:] == tuple(run[row.event])
    with pytest.raises(ValueError, match="no kind of event 'alloc'; there are run_started,"):
        tables.events_of_kind(run, "alloc")


def test_the_fence_table_pairs_releases_and_returns(run):
    table = tables.fence(run)
    assert len(table) == sum(isinstance(e, ev.BlocksReleased) and e.fence > 0 for e in run) > 3
    waiting = fold(run).deferred
    assert list(table[table["returned_event"].isna()]["block_ids"]) == [entry.block_ids for entry in waiting]
    for row in table[table["returned_event"].notna()].itertuples():
        freed = run[row.returned_event]
        assert sorted((*freed.front, *freed.back, *freed.shared)) == sorted(row.block_ids)
        assert row.waited_steps == freed.step - run[row.released_event].step >= 0
        assert row.fence == freed.fence


def test_the_life_of_a_block_is_told():
    """Held by a, released behind the fence with a step in flight, returned, handed on to b."""
    drive = Drive(3, 2, defer_block_free=True)
    drive.events.insert(0, head(drive.scheduler))
    drive.add("a", 7, 4)
    drive.schedule()
    drive.scheduler.finish_requests(["a"])
    drive.add("b", 6, 1)
    drive.schedule()
    drive.deliver()
    drive.schedule()
    table = tables.block_history(drive.events, 2)
    rows = table[["what", "request", "fence", "refs", "held_by"]].astype(object).where(table.notna(), None)
    assert [tuple(row) for row in rows.itertuples(index=False)] == [
        ("allocated", "a", None, 1, ("a",)),
        ("released", "a", 1, 1, ()),
        ("freed", "a", 1, 0, ()),
        ("allocated", "b", None, 1, ("b",)),
    ]
    assert [drive.events[i].kind for i in table["event"]] == [
        "blocks_allocated",
        "blocks_released",
        "blocks_freed",
        "blocks_allocated",
    ]


def test_histories_agree_with_the_state_at_every_row(run):
    replay = Replay(run)
    words = set()
    for block in range(1, replay.state_at(1).num_blocks):
        for row in tables.block_history(run, block).itertuples():
            state = replay.state_at(row.event + 1)
            assert row.refs == state.refs(block)
            assert sorted(row.held_by) == sorted(state.owners().get(block, []))
            words.add(row.what)
    assert {"allocated", "hit", "cached", "evicted", "released", "freed", "shared"} <= words


def test_a_block_that_is_not_there_is_refused(run):
    with pytest.raises(IndexError, match="block 999 is not in the pool"):
        tables.block_history(run, 999)


def test_empty_tables_have_their_columns():
    for table in (tables.requests, tables.steps, tables.fence):
        frame = table([make_head()])
        assert len(frame) == 0
        assert list(frame.columns) == list(table(recorded(1)).columns)
    assert list(tables.block_history([make_head()], 1).columns)[:3] == ["event", "step", "what"]


def test_parquet_holds_the_same(tmp_path, run):
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow: pip install -e '.[lab]'")
    files = tables.write_parquet(tmp_path / "out", run)
    assert {f.name for f in files} == {"requests.parquet", "steps.parquet", "fence.parquet"} | {
        f"events-{kind}.parquet" for kind in {event.kind for event in run}
    }
    steps = pd.read_parquet(tmp_path / "out" / "steps.parquet")
    pd.testing.assert_frame_equal(steps, tables.steps(run), check_dtype=False)
    delivered = pd.read_parquet(tmp_path / "out" / "events-step_delivered.parquet")
    told = [event for event in run if event.kind == "step_delivered"]
    assert [tuple(tuple(t) for t in row) for row in delivered["tokens"]] == [event.tokens for event in told]
    hashes = pd.read_parquet(tmp_path / "out" / "events-blocks_cached.parquet")["hashes"]
    assert bytes.fromhex(hashes[0][0]) == next(e for e in run if isinstance(e, ev.BlocksCached)).hashes[0]

"""What is said and drawn of a moment without a browser: headlines, queues, blocks, still pictures, pages, colours."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from itertools import combinations

import pytest

from kvsched.request import SamplingParams
from kvsched.trace.replay import Replay
from lab.columns import MARKS, PALETTE, PATTERNS, ROW_FIELDS, Row, browser_constants
from lab.history import History
from lab.pack import pack
from lab.page import export_html
from lab.picture import snapshot
from lab.session import Session
from lab.views import block_looks, headline, in_flight, queue_rows
from tests.lab_runs import crowd
from tests.lab_scenes import c01
from tests.trace_runs import recorded

HOSTILE = "<b>r</b><img src=x onerror=alert(1)>"


def history_of(session: Session) -> History:
    return History(pack(session.events[:]))


# ---- words and rows


def test_the_headline_of_a_known_case():
    """C01 with the fence: the first call of step 3 fails, the guard stops: nobody is scheduled."""
    session = c01()
    session.step(3)
    history = history_of(session)
    last = len(history.frames) - 1
    assert headline(history, last) == "step 3 of 3 · 4 running · 0 waiting · 0 of 8 blocks free · fence at 2, newest 2"
    assert headline(history, 0) == "step 0 of 3 · 0 running · 4 waiting · 8 of 8 blocks free · fence at 0, newest 0"


def test_with_the_fence_off_the_steps_in_flight_are_named():
    session = c01(defer_block_free=False)
    session.schedule()
    history = history_of(session)
    assert headline(history, len(history.frames) - 1).endswith("fence off, step 1 in flight")
    session.schedule()
    history = history_of(session)
    assert headline(history, len(history.frames) - 1).endswith("fence off, steps 1, 2 in flight")


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_queue_rows_stand_in_the_order_of_the_queues(policy):
    events = recorded(11, policy=policy)
    history, replay = History(pack(events)), Replay(events)
    for frame, read in enumerate(history.frames):
        state, rows = replay.state_at(read.at), queue_rows(history, frame)
        for section, ids in (("running", state.running), ("loading", state.loading), ("waiting", state.waiting)):
            assert [row.request for row in rows if row.section == section] == ids
        assert {row.request for row in rows if row.section == "finished"} == set(state.finished)


def test_blocks_behind_the_fence_are_told_from_held_ones():
    session = crowd()
    history = history_of(session)
    seen = 0
    for frame in range(len(history.frames)):
        waiting = [wait for wait in history.waits if wait.released <= frame < (wait.returned or 10**9)]
        looks = block_looks(history, frame)
        fenced = [look for look in looks if look.fence]
        assert len(fenced) <= sum(wait.num_blocks for wait in waiting), "a shared block is still held by another"
        assert {look.fence for look in fenced} <= {wait.fence for wait in waiting}
        assert not any(look.stale for look in looks), "the fence is there so that this never is"
        seen += len(fenced)
    assert seen


def test_a_block_written_for_a_request_that_lost_it_is_stale():
    """With the fence off, c01 takes r3's blocks while step 2 still writes them:

    step 2   writes r0 r1 r2 r3
    step 3        r3 preempted, its blocks to r0; step 2 is still in flight
    """
    session = c01(defer_block_free=False)
    session.schedule()
    session.schedule()
    session.deliver()
    session.schedule()
    history = history_of(session)
    frame = len(history.frames) - 1
    assert in_flight(history, frame) == [2, 3]
    stale = [look for look in block_looks(history, frame) if look.stale]
    lost = {e.request for e in session.events if e.kind == "preempted"}
    assert lost
    assert stale
    for look in stale:
        writers = {w.request for n in look.writing for w in history.steps[n].written if look.block in w.blocks}
        assert look.owner not in writers or len(writers) > 1
        assert lost & {history.requests[w].id for w in writers}


# ---- still pictures


def test_a_snapshot_says_the_same_in_words_every_time():
    session = c01()
    session.step(2)
    assert repr(snapshot(session)) == (
        "step 2 of 2 · 4 running · 0 waiting · 0 of 8 blocks free · fence at 1, newest 2\n"
        "  r0: running, 8 of 8 tokens, 2 blocks, 1 in flight\n"
        "  r1: running, 8 of 8 tokens, 2 blocks, 1 in flight\n"
        "  r2: running, 8 of 8 tokens, 2 blocks, 1 in flight\n"
        "  r3: running, 8 of 8 tokens, 2 blocks, 1 in flight\n"
        "  held by r0: blocks 1–2\n"
        "  held by r1: blocks 3–4\n"
        "  held by r2: blocks 5–6\n"
        "  held by r3: blocks 7–8"
    )
    again = c01()
    again.step(2)
    assert snapshot(again)._repr_mimebundle_() == snapshot(session)._repr_mimebundle_()


@pytest.mark.parametrize("step", [0, 9, 25, None])
def test_a_snapshot_is_a_picture_that_stands_alone(step):
    session = crowd()
    svg = snapshot(session, step).svg
    root = ET.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    filled = set(re.findall(r"url\(#(r\d+)\)", svg))
    assert filled <= {pattern.get("id") for pattern in root.iter("{http://www.w3.org/2000/svg}pattern")}
    assert "href" not in svg
    assert "<script" not in svg


def test_a_snapshot_of_ten_thousand_blocks_is_drawn():
    session = Session.synthetic(10_001)
    session.add_request("r0", range(500), SamplingParams(max_tokens=4))
    session.step(2)
    svg = snapshot(session).svg
    assert svg.count("<rect") > 10_000
    ET.fromstring(svg)


def test_a_step_that_is_not_there_is_refused():
    session = c01()
    session.step(2)
    with pytest.raises(ValueError, match="there is no step 3; this history has steps 0 to 2"):
        snapshot(session, 3)


def hostile_session() -> Session:
    session = Session.synthetic(9, block_size=4)
    session.add_request(HOSTILE, range(7), SamplingParams(max_tokens=4))
    session.step(3)
    return session


def test_ids_are_text_in_pictures_and_pages(tmp_path):
    session = hostile_session()
    root = ET.fromstring(snapshot(session).svg)
    assert not list(root.iter("{http://www.w3.org/2000/svg}img"))
    assert any((text.text or "").startswith("<b>r</b>") for text in root.iter("{http://www.w3.org/2000/svg}text"))
    assert HOSTILE in snapshot(session).text
    page = export_html(session, tmp_path / "page.html", title=HOSTILE).read_text(encoding="utf-8")
    assert not re.search(r"<img|<b>r", page)
    assert not re.search(r"<[a-z][^>]*\son\w+=", page)


# ---- pages


def test_a_page_needs_nothing_from_elsewhere(tmp_path):
    page = export_html(crowd(), tmp_path / "page.html").read_text(encoding="utf-8")
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'`)\\\\]*", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(script|link|img|iframe)[^>]*\s(src|href)=", page)


def test_a_page_holds_the_history_and_its_sentences(tmp_path):
    session = crowd()
    page = export_html(session, tmp_path / "page.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="lab-data">(.*?)</script>', page, re.DOTALL)[1])
    assert sorted(map(int, data["why"])) == list(range(session.num_steps + 1))
    assert data["why"]["3"] == list(session.explain(3))
    assert data["opening"]["status"]["can_step"] is False


# ---- what Python and the browser share


def test_constants_are_plain_data():
    assert json.loads(json.dumps(browser_constants())) is not None
    assert set(ROW_FIELDS) == set(Row)
    assert set(MARKS) <= set(Row)
    assert len({sign for sign, _, _ in MARKS.values()}) == len(MARKS), "two marks have one sign"


def test_requests_in_a_row_differ_in_colour_and_in_pattern():
    looks = [(i % len(PALETTE), i % len(PATTERNS)) for i in range(len(PALETTE) * len(PATTERNS))]
    assert len(set(looks)) == len(looks)


# Viénot, Brettel and Mollon's matrices on linear RGB: what dichromats see.
DICHROMATS = {
    "protanope": ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0)),
    "deuteranope": ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0)),
}


def linear(colour: str) -> list[float]:
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def lab_colour(rgb: list[float]) -> tuple[float, float, float]:
    """CIE L*a*b* of linear RGB (D65)."""
    r, g, b = (min(1.0, max(0.0, c)) for c in rgb)
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883,
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("eyes", DICHROMATS)
def test_colours_stay_apart_for_colour_blind_eyes(eyes):
    seen = {}
    for colour in PALETTE:
        rgb = linear(colour)
        seen[colour] = lab_colour([sum(m * c for m, c in zip(row, rgb, strict=True)) for row in DICHROMATS[eyes]])
    distances = {
        (a, b): sum((x - y) ** 2 for x, y in zip(seen[a], seen[b], strict=True)) ** 0.5
        for a, b in combinations(PALETTE, 2)
    }
    closest = min(distances, key=distances.__getitem__)
    print(f"{eyes}: closest {closest}, distance {distances[closest]:.1f}")
    assert distances[closest] > 10, f"{closest} look alike to a {eyes}"

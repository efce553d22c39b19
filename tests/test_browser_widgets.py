"""The widgets in a real JupyterLab: they draw, follow, take keys, survive restarts and leave nothing behind."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from lab.history import History
from lab.pack import pack
from lab.page import export_html
from lab.views import headline
from tests.browser import ROOT
from tests.lab_runs import crowd

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=alert(1)>"
SETUP = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import gc, threading, weakref
import ipywidgets
import lab
from kvsched.request import SamplingParams
from tests.lab_runs import crowd, large
from tests.lab_scenes import c01
"""
STORE = "document.querySelector('.lab-show, .lab-compare').labStore"
CANVAS = {
    "Transport": ".lab-strip canvas",
    "BlockMap": ".lab-blockmap .lab-sheet canvas",
    "FenceTimeline": ".lab-timeline canvas",
    "Queues": ".lab-queues .lab-row:not(.lab-is-section) .lab-swatch",
}
DIGEST = """canvas => {
    const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    const colours = new Set();
    let sum = 0;
    for (let i = 0; i < data.length; i += 4) {
        const value = data[i] | (data[i + 1] << 8) | (data[i + 2] << 16);
        colours.add(value);
        sum = (sum * 31 + value) | 0;
    }
    return { sum, colours: colours.size };
}"""


def digest(locator: Any) -> dict[str, int]:
    """What is in a canvas: a sum over its pixels, and how many colours there are."""
    return locator.evaluate(DIGEST)


def headline_of(lab: Any) -> str:
    return lab.page.locator("[data-testid=headline]").first.inner_text().strip()


def see(lab: Any) -> None:
    """Bring the lab on the screen, and let it draw."""
    lab.wait_for("document.querySelector('[data-testid=headline]')?.textContent.includes('step')")
    lab.page.evaluate("document.querySelector('.lab').closest('.jp-Cell').scrollIntoView()")
    lab.page.wait_for_timeout(200)


def changed(lab: Any, locator: Any, before: dict[str, int]) -> bool:
    """Whether a canvas has come to show something else; gives it ten seconds."""
    for _ in range(100):
        if digest(locator) != before:
            return True
        lab.page.wait_for_timeout(100)
    return False


def store(lab: Any, expression: str) -> Any:
    return lab.page.evaluate(f"() => {{ const store = {STORE}; return {expression}; }}")


def test_each_widget_draws(open_notebook):
    """Alone in a cell, each draws something, and something else at another moment."""
    kinds = ["Transport", "Queues", "BlockMap", "FenceTimeline", "InjectPanel", "WhyPanel", "Live"]
    lab = open_notebook([SETUP + "session = crowd()\nsession.seek(6)", *(f"lab.{kind}(session)" for kind in kinds)])
    lab.run_all()
    lab.wait_quiet()
    before = {}
    for number, kind in enumerate(kinds, 1):
        lab.scroll_to(number)
        cell = lab.cell(number)
        if kind in CANVAS:
            canvas = cell.locator(CANVAS[kind]).first
            canvas.wait_for()
            lab.page.wait_for_timeout(150)
            before[kind] = digest(canvas)
            assert before[kind]["sum"] != 0, f"{kind} is blank"
            assert kind == "Queues" or before[kind]["colours"] > 3, f"{kind} is blank"
    assert lab.cell(5).get_by_role("button", name="Inject").is_enabled()
    lab.wait_for("document.querySelector('.lab-why li')")
    assert lab.cell(6).locator("li").first.inner_text().startswith("Step 6")
    assert lab.cell(7).locator(".lab-trend").count() == 3
    lab.kernel_eval("session.seek(14)")
    lab.wait_quiet()
    for number, kind in enumerate(kinds, 1):
        if kind in ("Transport", "BlockMap", "FenceTimeline"):
            lab.scroll_to(number)
            assert changed(lab, lab.cell(number).locator(CANVAS[kind]).first, before[kind]), f"{kind} did not follow"
    lab.scroll_to(6)
    lab.wait_for("document.querySelector('.lab-why li').textContent.startsWith('Step 14')")
    lab.assert_clean()


def test_keys_move_the_lab_and_not_the_notebook(open_notebook):
    lab = open_notebook([SETUP + "session = crowd()\nsession.seek(0)", "lab.show(session)", "'below'"])
    lab.run_all()
    see(lab)
    cells = "jupyterapp.shell.currentWidget.content.widgets.length"
    active = "jupyterapp.shell.currentWidget.content.activeCellIndex"
    strip = lab.page.locator(CANVAS["Transport"])
    strip.focus()
    where = lab.page.evaluate(active)
    press = lab.page.keyboard.press
    press("Home")
    seen = [headline_of(lab)]
    for key in ("ArrowRight", "ArrowRight", "Shift+ArrowRight", "]", "]", "[", "ArrowLeft", "End", "Home"):
        press(key)
        lab.page.wait_for_timeout(60)
        seen.append(headline_of(lab))
    assert seen[0] == seen[-1] and seen[0].startswith("step 0")
    assert len(set(seen)) >= 7, seen
    assert seen[8].startswith("step 49 of 49")
    marked = store(lab, "store.history.rows.frame.at(store.history.marks.at(0))")
    press("]")
    lab.page.wait_for_timeout(60)
    assert store(lab, "store.position") == marked
    press("Home")
    press(" ")
    lab.page.wait_for_timeout(900)
    press(" ")
    assert store(lab, "store.position") >= 2
    for selector in (*CANVAS.values(), ".lab-scroller", ".lab-sentences"):
        if selector != CANVAS["Queues"]:
            lab.page.locator(selector).first.focus()
            for key in ("b", "d", "d", "a", "x", "ArrowDown", "ArrowUp", "Enter"):
                press(key)
    lab.wait_quiet()
    assert lab.page.evaluate(cells) == 3
    assert lab.page.evaluate(active) == where
    assert int(lab.kernel_eval("session.position")) == store(lab, "store.step")
    lab.assert_clean()


def test_the_map_the_table_and_the_timeline_follow_one_another(open_notebook):
    lab = open_notebook([SETUP + "session = crowd()\nsession.seek(12)", "panel = lab.show(session)\npanel"])
    lab.run_all()
    see(lab)
    row = lab.page.locator(".lab-rows .lab-row:not(.lab-is-section):visible").first
    name = row.locator(".lab-name").inner_text()
    plain = digest(lab.page.locator(CANVAS["BlockMap"]).first), digest(lab.page.locator(CANVAS["FenceTimeline"]))
    row.click()
    lab.page.wait_for_timeout(300)
    chosen = digest(lab.page.locator(CANVAS["BlockMap"]).first), digest(lab.page.locator(CANVAS["FenceTimeline"]))
    assert chosen[0] != plain[0] and chosen[1] != plain[1]
    assert row.get_attribute("aria-selected") == "true"
    lab.page.locator(CANVAS["BlockMap"]).first.click(position={"x": 20, "y": 20})
    lab.wait_quiet()
    assert lab.kernel_eval("panel.of.request") == repr(name)
    assert lab.kernel_eval("panel.of.block") == "1"
    assert lab.page.locator("[data-testid=about-block]").inner_text().startswith("block 1 · ")
    chips = lab.page.locator(".lab-chip")
    frames = store(lab, "store.history.lineage(1).map(p => [p.owner, p.fence])")
    assert chips.count() == len(frames) > 3
    assert any(fence for _, fence in frames), "block 1 never waited behind the fence"
    lab.assert_clean()


def test_words_in_the_browser_are_those_of_python(open_notebook):
    """The two readers of a history, and the two makers of headlines, agree at every moment."""
    lab = open_notebook([SETUP + "session = crowd()", "lab.show(session)"])
    lab.run_all()
    see(lab)
    history = History(pack(crowd().events[:]))
    spoken = lab.page.evaluate(f"""async () => {{
        const store = {STORE}, seen = [];
        for (let frame = 0; frame < store.history.numFrames; frame++) {{
            store.moveTo(frame);
            await new Promise(requestAnimationFrame);
            await new Promise(requestAnimationFrame);
            seen.push(document.querySelector('[data-testid=headline]').textContent);
        }}
        return seen;
    }}""")
    assert spoken == [headline(history, frame) for frame in range(len(history.frames))]
    cells = lab.page.evaluate(f"""() => {{
        const {{ history }} = {STORE}, seen = [];
        for (const frame of [history.numFrames - 1, 3, 40, 17, 0]) {{
            const state = history.seek(frame), used = history.requests.length;
            seen.push([frame, state.blockCells.map(c => [...c]), state.requestCells.map(c => [...c.slice(0, used)])]);
        }}
        return seen;
    }}""")
    for frame, blocks, requests in cells:
        at = history.at(frame)
        assert blocks == at.blocks.tolist()
        assert requests == at.requests.tolist()


def test_ids_are_shown_as_text(open_notebook):
    make = f"""session = lab.Session.synthetic(9, block_size=4)
session.add_request({HOSTILE!r}, range(7), SamplingParams(max_tokens=6))
session.step(3)"""
    lab = open_notebook([SETUP + make, "lab.show(session, live=True)", "lab.snapshot(session)"])
    dialogs: list[str] = []
    lab.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    lab.run_all()
    see(lab)
    lab.page.locator(CANVAS["BlockMap"]).first.click(position={"x": 20, "y": 20})
    lab.page.wait_for_timeout(300)
    assert HOSTILE in lab.page.locator("[data-testid=about-block]").inner_text()
    assert lab.page.locator(".lab-rows .lab-name", has_text=HOSTILE).count() == 1
    assert lab.page.locator(".lab-chip-name", has_text=HOSTILE).count() >= 1
    assert lab.page.locator(".lab img").count() == 0
    lab.scroll_to(2)
    lab.page.wait_for_timeout(200)
    assert dialogs == []
    lab.assert_clean()


def test_a_change_in_the_past_forks_and_a_bad_one_is_explained(open_notebook):
    lab = open_notebook([SETUP + "session = crowd()\nsession.seek(6)", "lab.show(session)"])
    lab.run_all()
    see(lab)
    assert lab.page.locator(".lab-inject .lab-aside").inner_text() == "a change here, after step 6, forks the run"
    lab.page.get_by_role("button", name="Inject").click()
    lab.wait_for("document.querySelector('.lab-inject .lab-note').textContent.startsWith('Planned')")
    assert headline_of(lab).startswith("step 6 of 6 ")
    step = lab.page.get_by_role("button", name="step: on by one moment")
    step.click()
    lab.wait_for(f"{STORE}.history.lastStep === 7")
    failed = store(lab, "store.history.rowsOf(store.position).filter(row => row.kind === 5 && row.injected).length")
    assert failed == 1
    depth = lab.page.get_by_label("depth")
    depth.fill("0")
    depth.press("Enter")
    lab.wait_for("document.querySelector('.lab-inject .lab-note').dataset.kind === 'error'")
    assert "max_in_flight is 0; it must be at least 1" in lab.page.locator(".lab-inject .lab-note").inner_text()
    lab.assert_clean()


AGAIN = "session = c01()\nsession.step(2)\nengines.append(weakref.ref(session.engine))\nlab.show(session)"
COUNTS = "(len(ipywidgets.widget._instances), len(comm.get_comm_manager().comms), threading.active_count())"


def test_running_again_and_restarting_leave_a_working_page(open_notebook):
    """Case C56: six runs of a cell cost what one does. Then the kernel restarts, and all runs again."""
    lab = open_notebook([SETUP + "import comm\nengines = []", AGAIN])
    lab.run_all()
    see(lab)
    first, text = lab.kernel_eval(COUNTS), headline_of(lab)
    for _ in range(5):
        lab.run_cell(1)
    see(lab)
    assert lab.kernel_eval(COUNTS) == first
    alive = "(gc.collect(), [engine() is not None for engine in engines])[1]"
    assert lab.kernel_eval(alive) == repr([False] * 5 + [True])
    assert lab.page.locator(".lab-show").count() == 1

    lab.restart_kernel()
    lab.run_all()
    see(lab)
    assert headline_of(lab) == text
    lab.page.locator(CANVAS["Transport"]).focus()
    lab.page.keyboard.press("ArrowRight")
    lab.wait_for(f"{STORE}.history.lastStep === 3")
    lab.assert_clean()


@pytest.mark.parametrize("size", [(1400, 900), (700, 900)], ids=["wide", "narrow"])
def test_it_fits_the_screen_in_both_themes(open_notebook, size):
    lab = open_notebook([SETUP + "session = crowd()\nsession.seek(20)", "lab.show(session)"], size=size)
    lab.set_sidebar(visible=size[0] > 1000)
    lab.run_all()
    see(lab)
    box = lab.page.locator(".lab-show").bounding_box()
    panel = lab.page.locator(".jp-NotebookPanel-notebook").bounding_box()
    for name, of in (("lab", box), ("notebook's panel", panel)):
        print(f"the {name} is {of['width']:.0f} x {of['height']:.0f} pixels")
    if size[0] > 1000:
        assert box["y"] >= panel["y"]
        assert box["y"] + box["height"] <= panel["y"] + panel["height"]
    assert lab.page.locator(".lab-show").evaluate("lab => lab.scrollWidth - lab.clientWidth") <= 0
    light = digest(lab.page.locator(CANVAS["BlockMap"]).first)
    lab.screenshot(f"lab-{size[0]}-light")
    lab.set_theme("dark")
    assert changed(lab, lab.page.locator(CANVAS["BlockMap"]).first, light)
    lab.page.wait_for_timeout(500)
    lab.screenshot(f"lab-{size[0]}-dark")
    lab.assert_clean()


def test_scrubbing_through_ten_thousand_blocks_and_two_thousand_steps(open_notebook):
    """Measured and printed: what is sent, how long a frame takes. Only the bytes are asserted."""
    lab = open_notebook([SETUP + "session = large()", "lab.show(session)"])
    lab.run_all(timeout=240)
    see(lab)
    measured = lab.page.evaluate(f"""async () => {{
        const store = {STORE}, times = [], gaps = [];
        const move = async frame => {{
            store.frameTimes.length = 0;
            const start = performance.now();
            store.moveTo(frame);
            await new Promise(requestAnimationFrame);
            await new Promise(requestAnimationFrame);
            times.push(store.frameTimes[0]);
            gaps.push(performance.now() - start);
        }};
        for (let i = 0; i < 300; i++) await move(1200 + 5 * i);
        for (let i = 0; i < 100; i++) await move((i * 1543) % store.history.numFrames);
        const p = (all, share) => [...all].sort((a, b) => a - b)[Math.floor(share * all.length)];
        return {{ bytes: store.history.size, steps: store.history.numSteps, blocks: store.history.numBlocks - 1,
                 p50: p(times, 0.5), p95: p(times, 0.95), gap: p(gaps, 0.95) }};
    }}""")
    print("scrubbing:", json.dumps(measured))
    assert (measured["blocks"], measured["steps"]) == (10_000, 2_000)
    assert measured["bytes"] <= 5_000_000
    lab.page.locator(CANVAS["BlockMap"]).first.hover(position={"x": 200, "y": 60})
    lab.page.wait_for_timeout(300)
    assert re.match(r"block [\d,]+ · ", lab.page.locator("[data-testid=about-block]").inner_text())
    lab.screenshot("lab-large")
    lab.assert_clean()


def test_live_sends_at_most_twenty_messages_a_second_and_stops_at_once(open_notebook):
    make = """session = lab.Session.synthetic(65, block_size=4, max_num_seqs=8, max_num_batched_tokens=64,
    max_model_len=256, defer_block_free=True)
for i in range(40):
    session.add_request(f"r{i}", range(i, i + 10 + i % 7), SamplingParams(max_tokens=200, ignore_eos=True))"""
    lab = open_notebook([SETUP + make, "lab.show(session, live=True)"])
    lab.run_all()
    see(lab)
    lab.page.get_by_role("button", name="Run", exact=True).click()
    lab.page.wait_for_timeout(2500)
    messages = store(lab, "store.messages")
    span = (messages[-1] - messages[0]) / 1000
    rate = (len(messages) - 1) / span
    print(f"live: {rate:.1f} messages a second, {store(lab, 'store.history.lastStep')} steps")
    assert span > 1
    assert rate <= 22, "20 from the session, and the answers to commands"
    assert lab.kernel_eval("1 + 1") == "2"
    assert lab.page.locator(".lab-stream:visible").count() > 0
    lab.screenshot("lab-live")
    lab.page.get_by_role("button", name="Pause").click()
    lab.wait_for("document.querySelector('[data-testid=live-state]').textContent.startsWith('paused')")
    stopped = int(lab.kernel_eval("session.num_steps"))
    time.sleep(0.3)
    assert int(lab.kernel_eval("session.num_steps")) == stopped == store(lab, "store.history.lastStep")
    lab.page.get_by_role("button", name="Abort all").click()
    lab.wait_for("!document.querySelector('.lab-live-controls button:last-child:enabled')")
    assert lab.kernel_eval("session.state.num_running + session.state.num_waiting") == "0"
    lab.assert_clean()


def test_two_sessions_move_together(open_notebook):
    cell = "both = lab.compare(crowd(), crowd(guard='none'), names=('guard on', 'guard off'))\nlab.show(both)"
    lab = open_notebook([SETUP, cell])
    lab.run_all()
    see(lab)
    text = lab.page.locator("[data-testid=difference]").inner_text()
    found = re.match(r"First difference in step (\d+)\nguard on: (.+)\nguard off: (.+)", text)
    assert found, text
    assert "the guard stops" in found[2] and "is preempted" in found[3]
    lab.page.get_by_role("button", name="go there").click()
    lab.page.wait_for_timeout(300)
    assert headline_of(lab).startswith(f"step {found[1]} of ")
    maps = lab.page.locator(CANVAS["BlockMap"])
    assert maps.count() == 2
    lab.page.locator(CANVAS["Transport"]).focus()
    before = [digest(maps.nth(i)) for i in range(2)]
    for _ in range(6):
        lab.page.keyboard.press("ArrowRight")
    lab.page.wait_for_timeout(300)
    after = [digest(maps.nth(i)) for i in range(2)]
    assert before[0] != after[0] and before[1] != after[1]
    lab.screenshot("lab-compare")
    lab.assert_clean()


def test_a_page_opens_from_disk_without_a_network(browser, tmp_path):
    path = export_html(crowd(), tmp_path / "page.html")
    context = browser.new_context(viewport={"width": 1100, "height": 860}, offline=True)
    page = context.new_page()
    asked, errors = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_selector(".lab-why li")
    assert page.locator("[data-testid=headline]").inner_text().startswith("step 49 of 49")
    page.locator(CANVAS["Transport"]).focus()
    before = digest(page.locator(CANVAS["BlockMap"]).first)
    page.keyboard.press("[")
    page.keyboard.press("[")
    page.wait_for_timeout(300)
    assert digest(page.locator(CANVAS["BlockMap"]).first) != before
    assert [url for url in asked if not url.startswith(("file:", "blob:", "data:"))] == []
    assert errors == []
    context.close()

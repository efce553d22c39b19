"""The widgets' Python side: what is sent and when, commands and their refusals, and that nothing is left behind."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from pathlib import Path
from typing import Any

import ipywidgets
import pytest

from lab.comparison import compare
from lab.pack import HEADER, Packer
from lab.session import Session
from lab.widgets import (
    BlockMap,
    Compare,
    FenceTimeline,
    Hub,
    InjectPanel,
    Live,
    Queues,
    Show,
    Transport,
    WhyPanel,
    cells,
    show,
)
from lab.widgets.base import script, styles
from lab.widgets.throttle import Throttle
from lab.widgets.tokens import TAIL, TokenTails
from tests.lab_runs import crowd
from tests.lab_scenes import c01

VIEWS = (Transport, Queues, BlockMap, FenceTimeline, InjectPanel, WhyPanel, Live)
FOLDER = Path("lab/widgets")


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Every test ends with as many widgets as it began with."""
    before = set(ipywidgets.widget._instances)
    yield
    for model_id in set(ipywidgets.widget._instances) - before:
        if widget := ipywidgets.widget._instances.get(model_id):
            widget.close()


class Wire:
    """What a hub sends. messages: dicts; pieces: the bytes that came with each."""

    def __init__(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hub = hub
        self.messages: list[dict[str, Any]] = []
        self.pieces: list[bytes] = []
        self.num_full = 0
        monkeypatch.setattr(hub, "send", self._send)
        monkeypatch.setattr(hub, "send_state", self._send_state)

    def _send(self, content: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        self.messages.append(content)
        self.pieces += buffers or []

    def _send_state(self, key: object = None) -> None:
        self.num_full += 1

    def ask(self, **message: Any) -> list[dict[str, Any]]:
        """Let the browser send a message; what came back."""
        before = len(self.messages)
        self.hub._receive(self.hub, message, [])
        return self.messages[before:]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["kind"] == kind]


def unhurried(hub: Hub) -> None:
    """Let every change be sent at once."""
    hub._throttle._interval = 0.0


@pytest.fixture
def session() -> Session:
    return c01()


@pytest.fixture
def wire(session, monkeypatch) -> Wire:
    hub = Hub(session)
    unhurried(hub)
    return Wire(hub, monkeypatch)


# ---- what the browser is told


def test_the_pieces_sent_are_the_history(session, wire):
    data = bytearray(wire.hub.packer.data)
    for _ in range(6):
        session.step()
    data += b"".join(wire.pieces)
    whole = Packer()
    whole.feed(session.events[:])
    assert len(wire.of("append")) >= 6
    assert data.startswith(HEADER)
    assert bytes(data) == bytes(wire.hub.packer.data)
    assert whole.frames[-1] == wire.hub.packer.frames[-1]


def test_each_piece_says_where_it_belongs(session, wire):
    size = len(wire.hub.packer.data)
    session.step()
    session.step()
    for message, piece in zip(wire.of("append"), wire.pieces, strict=True):
        assert message["offset"] == size
        assert message["generation"] == 0
        size += len(piece)


def test_state_asked_for_later_is_the_state_of_then(session, wire):
    """A page that opens after a while gets all of it."""
    session.step(3)
    state = wire.hub.get_state(["packed", "opening"])
    assert state["packed"] == bytes(wire.hub.packer.data)
    assert state["opening"]["position"] == len(wire.hub.packer.frames) - 1
    assert state["opening"]["status"]["can_step"] is True


def test_another_past_is_sent_whole(session, wire):
    session.step(4)
    session.seek(2)
    before = wire.num_full
    session.inject({"kind": "fail_call", "call": 9})
    assert session.generation == wire.hub.generation == 1
    assert wire.num_full == before + 1
    assert wire.hub.step == session.position


def test_nothing_new_sends_nothing(session, wire):
    wire.hub.push()
    wire.hub.push()
    assert wire.messages == []


def test_where_the_kernel_goes_the_browser_is_told_to_go(session, wire):
    session.step(4)
    session.seek(2)
    assert wire.messages[-1]["position"] == wire.hub.packer.frame_of_step(2)
    session.back()
    assert wire.hub.step == 1


def test_where_the_browser_goes_the_kernel_goes_and_says_nothing(session, wire):
    session.step(4)
    frame = wire.hub.packer.frame_of_step(2)
    assert wire.ask(do="look", position=frame, request="r1", block=3) == []
    assert session.position == 2
    assert (wire.hub.request, wire.hub.block) == ("r1", 3)


def test_half_a_step_back_at_the_end_is_left_alone(session, wire):
    """The browser looks at the moment at which the last step is decided; the session is at that step all the same."""
    session.step(4)
    session.deliver()
    last = len(wire.hub.packer.frames) - 1
    assert wire.hub.packer.frames[last].step == wire.hub.packer.frames[last - 1].step
    assert wire.ask(do="look", position=last - 1, request="", block=-1) == []
    assert wire.hub.frame == last - 1
    wire.hub.push()
    assert wire.hub.frame == last - 1


def test_the_kernel_knows_where_the_browser_is_when_it_goes_along_by_itself(session, wire):
    session.step(3)
    assert wire.hub.frame == len(wire.hub.packer.frames) - 1
    before = len(wire.hub.packer.frames)
    wire.ask(do="step")
    assert wire.hub.frame == before


def test_a_step_asked_for_by_the_browser_does_not_move_it(session, wire):
    """It goes to the first new moment by itself."""
    answers = wire.ask(do="step")
    assert [message["kind"] for message in answers] == ["append", "done"]
    assert "position" not in answers[0]
    assert session.num_steps == 1


# ---- commands


def test_commands_reach_the_session(session, wire):
    session.step(2)
    assert wire.ask(do="explain", step=2, upTo=5) == [
        {"kind": "why", "step": 2, "upTo": 5, "lines": session.explain(2)}
    ]
    wire.ask(do="inject", fault={"kind": "fail_call", "call": 12})
    assert [fault.call for fault in session.faults] == [12]
    wire.ask(do="set_option", name="guard", value="none")
    assert session.config.guard == "none"
    wire.ask(do="abort", request="r2")
    assert session.state.request("r2").status.finish_reason == "abort"
    wire.ask(do="back")
    wire.ask(do="seek", step=1)
    assert session.position == 1
    assert not wire.of("refused")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({}, "unknown command None"),
        ({"do": "rm -rf"}, "unknown command 'rm -rf'; known: look, "),
        ({"do": ["step"]}, "unknown command"),
        ({"do": "seek"}, "seek: step is None; it must be a whole number"),
        ({"do": "seek", "step": 99}, "there is no step 99"),
        ({"do": "seek", "step": True}, "must be a whole number"),
        ({"do": "look", "position": 10**6, "request": "", "block": -1}, "there is no moment 1000000"),
        ({"do": "look", "position": 0, "request": 7, "block": -1}, "request is 7; it must be a text"),
        ({"do": "inject", "fault": "all"}, "fault is 'all'; it must be an object"),
        ({"do": "inject", "fault": {"kind": "explode"}}, "unknown kind of fault 'explode'"),
        ({"do": "inject", "fault": {"kind": "fail_call", "call": 0}}, "call is 0"),
        ({"do": "set_option", "name": "speed", "value": 3}, "unknown setting speed"),
        ({"do": "set_option", "name": "max_in_flight", "value": "two"}, "max_in_flight must be an int"),
        ({"do": "explain", "step": 77, "upTo": 0}, "there is no step 77"),
    ],
)
def test_what_cannot_be_done_is_said_in_words(wire, message, text):
    answers = wire.ask(**message)
    assert [answer["kind"] for answer in answers] == ["refused"]
    assert text in answers[0]["text"]


def test_a_recording_says_that_it_is_one(session, monkeypatch, tmp_path):
    session.step(3)
    session.seek(1)
    session.inject({"kind": "fail_call", "call": 50})
    old = session.branches[0]
    wire = Wire(Hub(old), monkeypatch)
    assert wire.hub.describe()["status"]["mode"] == "recording"
    assert wire.hub.describe()["status"]["can_step"] is False
    assert wire.ask(do="step")[0]["kind"] == "refused"


# ---- at most so many messages


class Clock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_burst_is_two_calls_and_the_last_is_never_lost():
    clock, done = Clock(), threading.Event()
    calls: list[float] = []
    throttle = Throttle(0.02, lambda: (calls.append(clock.now), len(calls) == 2 and done.set()), clock)
    for _ in range(1000):
        throttle.poke()
    assert calls == [100.0]
    clock.now += 0.02
    assert done.wait(10)
    assert calls == [100.0, 100.02]
    throttle.poke()
    clock.now += 0.02
    throttle.close()
    throttle.poke()
    assert len(calls) == 2


def test_calls_that_come_slowly_are_made_at_once():
    clock, calls = Clock(), []
    throttle = Throttle(0.05, lambda: calls.append(clock.now), clock)
    for _ in range(5):
        throttle.poke()
        clock.now += 0.05
    assert calls == pytest.approx([100.0, 100.05, 100.1, 100.15, 100.2])


def test_a_session_in_the_background_is_sent_from_its_own_thread(session, wire):
    session.resume()
    assert session.wait(30)
    session.pause()
    wire.hub.push()
    assert wire.hub.packer.num_events == len(session.events)
    assert wire.messages[-1]["kind"] == "append"
    assert any("tails" in message for message in wire.of("append"))


def test_tails_are_short_and_few():
    session = crowd()
    tails = TokenTails()
    tails.note(session.events[:])
    texts = tails.take(session.decode)
    assert set(texts) == {f"r{i}" for i in range(8)}
    assert tails.take(session.decode) == {}
    assert tails.all() == texts
    assert all(len(text.split()) <= TAIL for text in texts.values())


# ---- nothing is left behind


def test_closing_lets_the_session_go(session):
    panel = Show(session)
    assert len(session._callbacks) == 1
    panel.close()
    panel.close()
    assert session._callbacks == []
    widgets = [panel, panel.of, *panel.views.values()]
    assert all(widget.comm is None and widget.layout.comm is None for widget in widgets)
    assert panel.of.source is None


def test_the_engine_dies_with_the_panel_that_was_replaced(monkeypatch):
    """Case C56: counts after the sixth run of a cell equal those after the first; the old engine is collected."""
    counts, engines = [], []
    for run in range(6):
        monkeypatch.setattr(cells, "running_cell", lambda run=run: ("cell-7", f"message-{run}"))
        session = c01()
        session.step(2)
        panel = show(session, live=True)
        engines.append(weakref.ref(session.engine))
        counts.append((len(ipywidgets.widget._instances), len(session._callbacks), threading.active_count()))
        del session
        gc.collect()
    assert counts[0] == counts[-1]
    assert [reference() is None for reference in engines] == [True] * 5 + [False]
    panel.close()


def test_all_that_one_run_of_a_cell_makes_stays(session, monkeypatch):
    monkeypatch.setattr(cells, "running_cell", lambda: ("cell-1", "message-1"))
    first, second = BlockMap(session), Queues(session)
    assert first.comm is not None
    monkeypatch.setattr(cells, "running_cell", lambda: ("cell-2", "message-2"))
    third = Transport(session)
    assert all(widget.comm is not None for widget in (first, second, third))
    monkeypatch.setattr(cells, "running_cell", lambda: ("cell-1", "message-3"))
    fourth = WhyPanel(session)
    assert [widget.comm is None for widget in (first, second, third, fourth)] == [True, True, False, False]


def test_no_cell_runs_in_a_test():
    assert cells.running_cell() is None


# ---- how they read as text


@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_reads_the_same_in_every_run(kind):
    texts = []
    for _ in range(2):
        session = c01()
        session.step(3)
        view = kind(session)
        texts.append((repr(view), view._repr_mimebundle_()[0]["text/plain"]))
        view.close()
    assert texts[0] == texts[1] == (f"{kind.__name__}(step 3 of 3)",) * 2


def test_the_whole_reads_the_same_in_every_run(session):
    session.step(3)
    assert repr(show(session)) == "lab.show(step 3 of 3)"
    assert repr(Hub(session)) == "Hub(step 3 of 3)"
    both = show(compare(session, c01(guard="none"), names=("on", "off")))
    assert isinstance(both, Compare)
    assert repr(both) == "lab.compare(on: step 17 of 17, off: step 17 of 17)"


# ---- the files


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.js")), ids=lambda path: path.name)
def test_text_is_never_html(path):
    source = path.read_text(encoding="utf-8")
    for door in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert door not in source, f"{path.name} uses {door}"
    addresses = re.findall(r"https?://[^\s\"'`]+", source)
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("kind", [*VIEWS, Show, Compare, Hub])
def test_every_widget_has_its_own_files(kind):
    name = {FenceTimeline: "timeline", InjectPanel: "inject", WhyPanel: "why"}.get(kind, kind.__name__.lower())
    assert kind._esm == (script("history", name) if kind is Hub else script(name))
    assert kind._css == styles(name)
    assert kind._esm.startswith("const LAB = {")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.js")), ids=lambda path: path.name)
def test_canvases_have_a_role_and_a_label(path):
    """Every canvas that is looked at is made by Sheet, with a label; the others are marked as decoration."""
    source = path.read_text(encoding="utf-8")
    for made in re.findall(r"el\(\"canvas\", \{[^}]*\}", source):
        assert "aria-hidden" in made or "role" in made, made
    for made in re.findall(r"new Sheet\([^;]*;", source):
        assert "aria-label" in made, made


def test_a_hub_that_is_closed_while_it_tells_what_is_new_does_so_in_peace(session, wire):
    """The throttle's thread has just begun to `push` when the cell runs again and closes the hub."""
    hub, source = wire.hub, wire.hub.source

    class ClosesTheHub:
        def __getattr__(self, name):
            if name == "lock":
                hub.close()
            return getattr(source, name)

    session.step()
    hub.source = ClosesTheHub()
    hub.push()
    assert hub.source is None

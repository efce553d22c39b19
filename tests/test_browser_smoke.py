"""The browser helpers work: a notebook with a small anywidget opens, runs, answers a click and survives a restart."""

from __future__ import annotations

import pytest

COUNTER = '''
import anywidget, traitlets

class Counter(anywidget.AnyWidget):
    _esm = """
    export default { render({ model, el }) {
      const button = document.createElement("button");
      const show = () => { button.textContent = `clicked ${model.get("count")}`; };
      button.onclick = () => { model.set("count", model.get("count") + 1); model.save_changes(); };
      model.on("change:count", show);
      el.appendChild(button);
      show();
    } };
    """
    count = traitlets.Int(0).tag(sync=True)
'''
THROW = """
from IPython.display import Javascript
Javascript("setTimeout(() => { throw new Error('planted') })")
"""
SHOW = "counter = Counter()\ncounter"


@pytest.mark.browser
def test_a_widget_is_drawn_answers_and_survives_a_restart(open_notebook):
    lab = open_notebook([COUNTER, SHOW])
    lab.run_all()
    button = lab.cell(1).get_by_role("button", name="clicked")
    for _ in range(3):
        button.click()
    lab.wait_quiet()
    assert button.text_content() == "clicked 3"
    assert lab.kernel_eval("counter.count") == "3"

    light = lab.screenshot("smoke-light", of=lab.cell(1)).read_bytes()
    lab.set_theme("dark")
    assert lab.screenshot("smoke-dark", of=lab.cell(1)).read_bytes() != light

    lab.restart_kernel()
    lab.run_all()
    assert lab.cell(1).get_by_role("button", name="clicked").text_content() == "clicked 0"
    lab.assert_clean()


@pytest.mark.browser
def test_errors_are_not_overlooked(open_notebook):
    lab = open_notebook(["1 / 0", THROW])
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        lab.run_cell(0)
    lab.run_cell(1)
    lab.wait_quiet()
    with pytest.raises(AssertionError, match="planted"):
        lab.assert_clean()
    with pytest.raises(AssertionError, match=r"not within 0\.2 s"):
        lab.wait_for("false", timeout=0.2)

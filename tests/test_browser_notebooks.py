"""Every notebook in a real browser: it runs from top to bottom, its lab views draw and step, nothing reports an error.

Screenshots of the views land in out/browser, for a person to look at.
"""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
ALL_CELLS_S = 600.0


def show_cells(path: Path) -> list[int]:
    """Indices of the cells that show a lab view."""
    cells = nbformat.read(path, as_version=4).cells
    return [i for i, cell in enumerate(cells) if cell.cell_type == "code" and "lab.show(" in cell.source]


def test_there_are_notebooks_and_each_shows_the_lab():
    assert [path.name[:2] for path in NOTEBOOKS] == ["00", "05", "06", "10"]
    assert all(show_cells(path) for path in NOTEBOOKS)


@pytest.mark.browser
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_a_browser(open_notebook, path):
    lab = open_notebook(path)
    lab.run_all(timeout=ALL_CELLS_S)
    for number, index in enumerate(show_cells(path)):
        lab.scroll_to(index)
        lab.wait_quiet()
        view = lab.output(index)
        canvas = view.locator("canvas").first
        canvas.wait_for()
        before = view.screenshot()
        target = view.locator("[data-lm-suppress-shortcuts]").first
        target.focus()
        lab.page.keyboard.press("Home")
        lab.wait_quiet()
        assert view.screenshot() != before, f"cell {index}: the view does not follow the Home key"
        lab.screenshot(f"{path.stem}-{number}", of=lab.cell(index))
    lab.assert_clean()

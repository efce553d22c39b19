"""Fixtures shared by all tests: a JupyterLab server, a browser, and a notebook open in it.

Playwright's synchronous interface leaves a running event loop in its thread, in which nothing else may start one. It is
therefore started for one test module at a time, and ended with it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.browser import Content, JupyterServer, LabPage

OpenNotebook = Callable[..., "LabPage"]


@pytest.fixture(scope="session")
def jupyter_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JupyterServer]:
    """One JupyterLab server for all browser tests of this process."""
    from tests.browser import start_server

    server = start_server(tmp_path_factory.mktemp("jupyter"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless browser. Skips where there is none; with KVSCHED_REQUIRE_BROWSER=1 (as in CI) that is an error."""
    try:
        from playwright.sync_api import sync_playwright

        from tests.browser import find_browser, launch
    except ModuleNotFoundError as error:
        _no_browser(f"{error.name} is not installed: pip install -e '.[lab,dev]'")
    executable = find_browser()
    if executable is None:
        _no_browser("no Chromium, Chrome or Edge found: install one, or name it in KVSCHED_BROWSER")
    with sync_playwright() as playwright:
        chromium = launch(playwright, executable)
        yield chromium
        chromium.close()


def _no_browser(reason: str) -> None:
    if os.environ.get("KVSCHED_REQUIRE_BROWSER") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture
def open_notebook(
    request: pytest.FixtureRequest, browser: Browser, jupyter_server: JupyterServer
) -> Iterator[OpenNotebook]:
    """`open_notebook(content, size=(1400, 900), theme="light")` -> LabPage, closed after the test.

    content: code cells as a list of strings, a NotebookNode, or the Path of a notebook. A test that fails leaves a
    picture of each page it had open in out/browser.
    """
    from tests.browser import open_page, save_notebook

    pages: list[LabPage] = []
    numbers = itertools.count()
    with ExitStack() as stack:

        def open_one(content: Content, **options: Any) -> LabPage:
            path = save_notebook(jupyter_server, content, f"{request.node.name}-{next(numbers)}.ipynb")
            pages.append(stack.enter_context(open_page(browser, jupyter_server, path, **options)))
            return pages[-1]

        yield open_one
        if request.node.stash.get(FAILED, False):
            for number, lab in enumerate(pages):
                print("picture:", lab.screenshot(f"failed-{request.node.name}-{number}"))


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Tell the fixtures of a test that it failed."""
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report


def repository() -> Path:
    """The checkout's root."""
    return Path(__file__).resolve().parent.parent

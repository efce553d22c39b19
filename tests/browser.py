"""JupyterLab in a real browser, for tests.

Owns: finding a browser, a JupyterLab server of its own (temporary settings, port, token and folder), and `LabPage`, one
notebook open in one page. Fixtures that hand these out are in `conftest.py`.
Knows nothing about: what the notebooks show.
Invariants: nothing of the user's is read or written (settings, workspaces, kernels, history). A page keeps every
error the browser reported; a test that does not call `assert_clean` has not looked at them. A wait always has an
end, and says what it saw when it ends.

A test reads:

    @pytest.mark.browser
    def test_counter(open_notebook):
        lab = open_notebook(["import mywidgets", "mywidgets.Counter()"])    # cells, a NotebookNode or a path
        lab.run_all()
        lab.output(1).get_by_role("button").click()
        lab.wait_idle()
        lab.screenshot("counter")                                          # out/browser/counter.png
        lab.assert_clean()
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import nbformat
from playwright.sync_api import Browser, ConsoleMessage, Error, Locator, Page, Playwright
from playwright.sync_api import TimeoutError as PlaywrightTimeout

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "out" / "browser"
SIZE = (1400, 900)

BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "microsoft-edge",
    "msedge",
)
BROWSER_PLACES = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Microsoft Edge.app/Contents/MacOS/Microsoft Edge",
    r"C:\Program Files\Google\Chrome\Application\chrome.exe",
    r"C:\Program Files (x86)\Microsoft\Edge\Application\msedge.exe",
)
FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-color-profile=srgb",
)
Content = Sequence[str] | nbformat.NotebookNode | Path
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def find_browser() -> str | None:
    """Path of an installed Chromium, Chrome or Edge; KVSCHED_BROWSER names one by hand. None: there is none.

    Raises FileNotFoundError when KVSCHED_BROWSER names nothing that can be run.
    """
    chosen = os.environ.get("KVSCHED_BROWSER")
    if chosen:
        found = shutil.which(chosen)
        if found is None:
            raise FileNotFoundError(f"KVSCHED_BROWSER={chosen!r} cannot be run: name an installed browser or unset it")
        return found
    on_path = (shutil.which(name) for name in BROWSERS)
    in_place = (place for place in BROWSER_PLACES if Path(place).is_file())
    return next((path for path in (*on_path, *in_place) if path), None)


def launch(playwright: Playwright, executable: str) -> Browser:
    """A headless browser with nothing to phone home about."""
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    sandbox = ("--no-sandbox",) if is_root else ()
    return playwright.chromium.launch(executable_path=executable, args=[*FLAGS, *sandbox])


# ---------------------------------------------------------------------------------------------------------------------
# The server


@dataclass
class JupyterServer:
    """A JupyterLab server of the test's own, on loopback. `folder` is what it shows."""

    folder: Path
    url: str
    token: str
    process: subprocess.Popen[bytes]
    log: Path

    def api(self, method: str, path: str) -> Any:
        """Call the server's REST interface; the parsed answer, None where it is empty."""
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(self.url + path, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def shut_down_kernels(self) -> None:
        for session in self.api("GET", "api/sessions"):
            self.api("DELETE", f"api/sessions/{session['id']}")

    def stop(self) -> None:
        """End the server and its kernels."""
        if self.process.poll() is None:
            self.shut_down_kernels()
            self.process.terminate()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_server(home: Path) -> JupyterServer:
    """Start JupyterLab under `home` (an empty folder) and wait until it answers.

    Raises RuntimeError with the server's log when it ends early or does not come up within a minute.
    """
    folder, runtime, log = home / "notebooks", home / "runtime", home / "server.log"
    for made in (folder, runtime):
        made.mkdir(parents=True)
    _write_settings(home / "settings")
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--expose-app-in-browser"]
    command += ["--ServerApp.ip=127.0.0.1", "--ServerApp.port=0"]
    command += [f"--ServerApp.root_dir={folder}", f"--IdentityProvider.token={token}"]
    command += ["--LabApp.extension_manager=readonly"]
    command += ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(runtime),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "IPYTHONDIR": str(home / "ipython"),
    }
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, cwd=folder, env=environment)
    server = JupyterServer(folder, "", token, process, log)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        # The server writes this file once it holds its port (0 above: any free one), just before it answers.
        for note in runtime.glob("jpserver-*.json"):
            server.url = _read_url(note)
            if server.url and _answers(server):
                return server
        time.sleep(0.1)
    process.kill()
    process.wait()
    text = log.read_text()[-4000:]
    raise RuntimeError(f"JupyterLab did not come up (exit code {process.returncode}); its log:\n{text}")


def _write_settings(folder: Path) -> None:
    """No news, no update check, no dialogue about either: all of them ask hosts outside."""
    plugin = folder / "@jupyterlab" / "apputils-extension"
    plugin.mkdir(parents=True)
    settings = {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True}
    (plugin / "notification.jupyterlab-settings").write_text(json.dumps(settings))


def _read_url(note: Path) -> str:
    try:
        return str(json.loads(note.read_text())["url"])
    except json.JSONDecodeError:
        return ""  # half written: asked again


def _answers(server: JupyterServer) -> bool:
    try:
        server.api("GET", "api/status")
    except OSError:
        return False
    return True


# ---------------------------------------------------------------------------------------------------------------------
# The page

NOTEBOOK = "jupyterapp.shell.currentWidget"
KERNEL = f"{NOTEBOOK}.sessionContext?.session?.kernel"

EXPECTED_NOISE = (
    # JupyterLab asks for files that a fresh folder does not have, and tells the console.
    "Failed to load resource: the server responded with a status of 404",
)


@dataclass
class LabPage:
    """One notebook, open in JupyterLab, in one browser page.

    page: Playwright's page, for everything that has no method here.
    page_errors, console_errors: what the browser reported, in order, the expected noise left out.
    """

    page: Page
    server: JupyterServer
    path: str
    page_errors: list[str] = field(default_factory=list)
    console_errors: list[str] = field(default_factory=list)

    # -- the notebook

    def cell(self, index: int) -> Locator:
        """The index-th cell, counted from 0. Cells out of sight may be empty shells; `scroll_to` fills them."""
        return self.page.locator(f'.jp-Notebook .jp-Cell[data-windowed-list-index="{index}"]')

    def output(self, index: int) -> Locator:
        """The output area of the index-th cell."""
        return self.cell(index).locator(".jp-OutputArea-output, .jp-OutputArea-child").first

    def scroll_to(self, index: int) -> None:
        self.page.evaluate(f"async i => {{ await {NOTEBOOK}.content.scrollToItem(i, 'start') }}", index)

    def run_all(self, *, timeout: float = 60.0, allow_errors: bool = False) -> None:
        """Run every cell and wait until the kernel is idle again. timeout: seconds.

        Raises AssertionError with the traceback when a cell fails, unless `allow_errors`.
        """
        self.command("notebook:run-all-cells", timeout=timeout)
        self.wait_idle(timeout=timeout)
        if not allow_errors:
            errors = self.cell_errors()
            assert not errors, "a cell failed:\n" + "\n".join(errors)

    def run_cell(self, index: int, *, timeout: float = 60.0) -> None:
        """Run the index-th cell alone and wait until the kernel is idle again. timeout: seconds."""
        self.page.evaluate(f"i => {{ {NOTEBOOK}.content.activeCellIndex = i }}", index)
        self.command("notebook:run-cell", timeout=timeout)
        self.wait_idle(timeout=timeout)
        errors = self.cell_errors(index)
        assert not errors, f"cell {index} failed:\n" + "\n".join(errors)

    def cell_errors(self, index: int | None = None) -> list[str]:
        """Tracebacks in the outputs, of one cell or of all."""
        found: list[list[dict[str, Any]]] = self.page.evaluate(
            f"""() => (window.jupyterapp && {NOTEBOOK}?.content?.model?.sharedModel.cells || []).map(
                cell => (cell.toJSON().outputs || []).filter(o => o.output_type === 'error'))"""
        )
        chosen = found if index is None else [found[index]]
        return [ANSI.sub("", "\n".join(output["traceback"])) for outputs in chosen for output in outputs]

    # -- the kernel

    def wait_idle(self, *, timeout: float = 60.0) -> None:
        """Wait until the kernel has answered everything the notebook sent so far. timeout: seconds.

        Asks the kernel itself rather than read its status, which may still be that of before: requests are answered in
        order on one channel, so that the answer to ours stands behind all that was sent before it. Messages of widgets
        take another way (a thread of their own in the kernel, with JupyterLab 4.4 and ipykernel 7): after a click wait
        for what it shows, or `wait_quiet`.
        """
        self.wait_for(f"{KERNEL}?.connectionStatus === 'connected'", timeout=timeout)
        self._await(f"{KERNEL}.requestKernelInfo()", timeout)
        self.wait_for(f"{KERNEL}.status === 'idle'", timeout=timeout)

    def wait_quiet(self, *, quiet: float = 0.2, timeout: float = 60.0) -> None:
        """Wait until nothing has crossed between page and kernel, either way, for `quiet` seconds. timeout: seconds."""
        script = f"""new Promise(done => {{
            const kernel = {KERNEL};
            let timer = null;
            const rest = () => {{ kernel.anyMessage.disconnect(heard); done(); }};
            const heard = () => {{ clearTimeout(timer); timer = setTimeout(rest, {quiet * 1000}); }};
            kernel.anyMessage.connect(heard);
            heard();
        }})"""
        self._await(script, timeout)

    def restart_kernel(self, *, timeout: float = 60.0) -> None:
        """Restart the kernel, without the question, and wait until it is idle. The page stays as it is."""
        self._await(f"{NOTEBOOK}.sessionContext.restartKernel()", timeout)
        self.wait_idle(timeout=timeout)

    def kernel_eval(self, expression: str, *, timeout: float = 60.0) -> str:
        """`repr` of an expression in the notebook's kernel, outside of any cell. timeout: seconds."""
        script = f"""{KERNEL}.requestExecute({{code: '', silent: true, store_history: false,
            user_expressions: {{value: {json.dumps(expression)}}}}}).done
            .then(reply => JSON.stringify(reply.content.user_expressions.value))"""
        value = json.loads(self._await(script, timeout))
        assert value["status"] == "ok", f"{expression} failed in the kernel: {value}"
        return str(value["data"]["text/plain"])

    # -- the application

    def command(self, name: str, arguments: dict[str, Any] | None = None, *, timeout: float = 60.0) -> None:
        """Run one of JupyterLab's commands and wait for its end. timeout: seconds."""
        self._await(f"jupyterapp.commands.execute({json.dumps(name)}, {json.dumps(arguments or {})})", timeout)

    def set_theme(self, theme: str) -> None:
        """theme: "light" or "dark"."""
        names = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
        attribute = f"document.body.dataset.jpThemeLight === '{str(theme == 'light').lower()}'"
        if not self.page.evaluate(attribute):
            self.command("apputils:change-theme", {"theme": names[theme]})
            self.wait_for(attribute)
            self.page.wait_for_timeout(300)  # the style sheet is swapped after the attribute

    def set_sidebar(self, *, visible: bool) -> None:
        """Show or hide the left sidebar (the file browser)."""
        shown = self.page.evaluate("() => !jupyterapp.shell.leftCollapsed")
        if shown != visible:
            self.command("application:toggle-left-area")

    # -- waiting, seeing

    def wait_for(self, condition: str, *, timeout: float = 60.0) -> None:
        """Wait until a JavaScript expression holds. timeout: seconds. Raises AssertionError when it does not come."""
        try:
            self.page.wait_for_function(condition, timeout=timeout * 1000)
        except PlaywrightTimeout:
            raise AssertionError(f"not within {timeout} s: {condition}\n{self.describe()}") from None

    def _await(self, promise: str, timeout: float) -> Any:
        """What a JavaScript promise gives if that is a string, else None. timeout: seconds (`evaluate` has none)."""
        script = f"""() => Promise.race([
            Promise.resolve({promise}).then(value => typeof value === 'string' ? value : null),
            new Promise((_, fail) => setTimeout(() => fail(new Error('not within {timeout} s')), {timeout * 1000}))])"""
        try:
            return self.page.evaluate(script)
        except Error as error:
            raise AssertionError(f"{promise}: {error.message}\n{self.describe()}") from None

    def describe(self) -> str:
        """What one wants to know when a wait did not end: errors in cells, in the page, in the console."""
        parts = [*self.cell_errors(), *self.page_errors, *self.console_errors]
        return "what the page reported:\n" + ("\n".join(parts) or "nothing")

    def screenshot(self, name: str, *, of: Locator | None = None) -> Path:
        """Save a picture of the page, or of one element, as out/browser/NAME.png."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        path = PICTURES / f"{name}.png"
        (of or self.page).screenshot(path=path)
        return path

    def assert_clean(self) -> None:
        """No error in the page and none in the console since the last call."""
        errors = [*self.page_errors, *self.console_errors]
        self.page_errors.clear()
        self.console_errors.clear()
        assert not errors, "the browser reported:\n" + "\n".join(errors)


def save_notebook(server: JupyterServer, content: Content, name: str) -> str:
    """Put a notebook where the server shows it; its path there. content: cells of code, a notebook, or a file."""
    if isinstance(content, Path):
        shutil.copy(content, server.folder / content.name)
        return content.name
    if not isinstance(content, nbformat.NotebookNode):
        content = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in content])
    content.metadata.setdefault("kernelspec", {"name": "python3", "display_name": "Python 3", "language": "python"})
    nbformat.write(content, server.folder / name)
    return name


@contextmanager
def open_page(
    browser: Browser, server: JupyterServer, path: str, *, size: tuple[int, int] = SIZE, theme: str = "light"
) -> Iterator[LabPage]:
    """Open one of the server's notebooks in a page of its own; leaving ends its kernel. size: pixels."""
    context = browser.new_context(viewport={"width": size[0], "height": size[1]})
    lab = LabPage(context.new_page(), server, path)
    _hear(lab)
    try:
        # A workspace nobody has used, reset: tabs of an earlier test would otherwise come back.
        workspace = f"test-{secrets.token_hex(4)}"
        lab.page.goto(f"{server.url}lab/workspaces/{workspace}/tree/{quote(path)}?reset&token={server.token}")
        lab.wait_for(f"window.jupyterapp && {NOTEBOOK}?.content?.model && {KERNEL}")
        lab.wait_idle()
        lab.set_theme(theme)
        yield lab
    finally:
        context.close()
        server.shut_down_kernels()


def _hear(lab: LabPage) -> None:
    def on_console(message: ConsoleMessage) -> None:
        if message.type == "error" and not message.text.startswith(EXPECTED_NOISE):
            lab.console_errors.append(f"{message.text} ({message.location.get('url', '')})")

    lab.page.on("pageerror", lambda error: lab.page_errors.append(error.stack or str(error)))
    lab.page.on("console", on_console)

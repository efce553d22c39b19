"""`kvsched-lab`: the copies it makes, what it keeps, and that JupyterLab comes up on the first notebook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from lab import launch


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    folder = tmp_path / "shipped"
    (folder / "data").mkdir(parents=True)
    (folder / ".ipynb_checkpoints").mkdir()
    for name in ("00-start-here.ipynb", "05-the-fence.ipynb", "data/trace.jsonl", ".ipynb_checkpoints/old.ipynb"):
        (folder / name).write_text(f"first {name}")
    return folder


def test_a_new_folder_gets_every_file_but_hidden_ones(shipped, tmp_path):
    folder = tmp_path / "new" / "deep"
    outcomes = launch.copy_notebooks(shipped, folder)
    assert outcomes == dict.fromkeys(("00-start-here.ipynb", "05-the-fence.ipynb", "data/trace.jsonl"), "copied")
    assert (folder / "data" / "trace.jsonl").read_text() == "first data/trace.jsonl"
    assert set(launch.copy_notebooks(shipped, folder).values()) == {"same"}


def test_a_changed_notebook_is_kept_and_that_is_said(shipped, tmp_path, capsys):
    folder = tmp_path / "mine"
    launch.copy_notebooks(shipped, folder)
    (folder / "00-start-here.ipynb").write_text("my own notes")
    for name in ("00-start-here.ipynb", "05-the-fence.ipynb"):
        (shipped / name).write_text("second version")
    for expected in ("updated", "same"):
        outcomes = launch.copy_notebooks(shipped, folder)
        assert outcomes["00-start-here.ipynb"] == "kept"
        assert outcomes["05-the-fence.ipynb"] == expected
    assert (folder / "00-start-here.ipynb").read_text() == "my own notes"
    assert (folder / "05-the-fence.ipynb").read_text() == "second version"
    launch.say(outcomes, folder)
    assert "kept yours: 00-start-here.ipynb" in capsys.readouterr().out


def test_a_file_that_was_there_before_us_is_kept(shipped, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "00-start-here.ipynb").write_text("mine")
    assert launch.copy_notebooks(shipped, folder)["00-start-here.ipynb"] == "kept"
    assert launch.copy_notebooks(shipped, folder)["00-start-here.ipynb"] == "kept"
    assert (folder / "00-start-here.ipynb").read_text() == "mine"


@pytest.mark.parametrize("content", ["{", '["a"]', '{"a": 1}'])
def test_a_damaged_record_is_an_error_that_names_it(shipped, tmp_path, content):
    (tmp_path / launch.RECORD).write_text(content)
    with pytest.raises(ValueError, match=r"\.kvsched-lab\.json.*delete it"):
        launch.copy_notebooks(shipped, tmp_path)


def test_a_folder_that_is_a_file_ends_with_one_line(tmp_path, capsys, monkeypatch, shipped):
    monkeypatch.setattr(launch, "shipped_notebooks", lambda: shipped)
    target = tmp_path / "file"
    target.write_text("")
    assert launch.main([str(target)]) == 2
    assert str(target) in capsys.readouterr().err


def test_an_install_without_notebooks_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "PACKAGED", tmp_path / "a")
    monkeypatch.setattr(launch, "CHECKOUT", tmp_path / "b")
    with pytest.raises(FileNotFoundError, match="install it again"):
        launch.shipped_notebooks()


def test_without_jupyterlab_the_remedy_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jupyterlab.labapp", None)
    assert launch.main([]) == 2
    assert "pip install 'kvsched[lab,torch]'" in capsys.readouterr().err


def test_jupyterlab_comes_up_on_the_first_notebook(tmp_path, shipped):
    """The real server, on a free port, asked over loopback for the page and for the notebook behind it."""
    runtime = tmp_path / "runtime"
    private = {f"JUPYTER_{name}_DIR": str(tmp_path / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    start = f"import sys; from pathlib import Path; from lab import launch; launch.PACKAGED = Path({str(shipped)!r}); "
    start += "sys.exit(launch.main(sys.argv[1:]))"
    command = [sys.executable, "-c", start, str(tmp_path / "folder"), "--no-browser", "--port", "0"]
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | private)
    try:
        server = _wait_for_server(runtime, process)
        page = _get(server["url"], server["token"])
        assert page.url.partition("?")[0] == f"{server['url']}lab/tree/00-start-here.ipynb"
        assert b"jupyter-config-data" in page.read()
        content = _get(f"{server['url']}api/contents/00-start-here.ipynb?content=0", server["token"])
        assert json.load(content)["name"] == "00-start-here.ipynb"
    finally:
        process.terminate()
        process.wait(timeout=20)
    log.seek(0)
    assert "3 files, 3 of them new" in log.read()


def _wait_for_server(runtime: Path, process: subprocess.Popen[bytes]) -> dict[str, str]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        for note in runtime.glob("jpserver-*.json"):
            try:
                server = json.loads(note.read_text())
                _get(server["url"] + "api/status", server["token"])
            except (ValueError, OSError):
                continue  # half written, or not answering yet
            return dict(server)
        time.sleep(0.1)
    raise AssertionError(f"no server within a minute; exit code {process.poll()}")


def _get(url: str, token: str):
    return urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": f"token {token}"}), timeout=30)

"""The README keeps up with the house: its map of modules, its commands, its links."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from lab.launch import FIRST
from tests.house import ROOT, modules

README = (ROOT / "README.md").read_text(encoding="utf-8")
MAP = re.search(r"<!-- map -->\n```text\n(.*?)```", README, re.DOTALL)


def paths_in_map(text: str) -> dict[str, str]:
    """Path -> its line's text, from a tree in which each level stands two spaces further in."""
    paths: dict[str, str] = {}
    folders: list[str] = []
    for line in text.splitlines():
        if not line.strip():
            continue
        name, _, about = line.strip().partition(" ")
        depth = (len(line) - len(line.lstrip())) // 2
        folders[depth:] = [name] if name.endswith("/") else []
        path = "".join(folders if name.endswith("/") else [*folders, name])
        assert path not in paths, f"{path} stands twice in the map"
        paths[path] = about.strip()
    return paths


def expected_in_map() -> set[str]:
    """A package stands for its __init__.py."""
    files = {path.relative_to(ROOT).as_posix() for package in ("kvsched", "lab") for path in modules(package)}
    return {name.removesuffix("__init__.py") for name in files}


def test_the_map_reader_reads_a_tree():
    tree = "a/   top\n  b.py  one\n  c/  sub\n    d.py  two\n  e.py  three\nf/  other\n"
    assert list(paths_in_map(tree)) == ["a/", "a/b.py", "a/c/", "a/c/d.py", "a/e.py", "f/"]


def test_every_module_is_in_the_map_and_the_map_names_nothing_else():
    assert MAP, "README.md has no map: a ```text block under the line <!-- map -->"
    named = paths_in_map(MAP[1])
    missing = expected_in_map() - set(named)
    gone = {path for path in named if not (ROOT / path).exists()}
    silent = {path for path, about in named.items() if not about}
    assert (missing, gone, silent) == (set(), set(), set())


def test_links_to_files_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    files = [link for link in links if "://" not in link]
    assert files
    assert [link for link in files if not (ROOT / link).exists()] == []


def test_the_readme_gives_the_commands_that_make_runs():
    """For machines without make: the same pip commands, in the same order."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    from_make, from_readme = pip_installs(makefile), pip_installs(README)
    assert len(from_make) == 2
    assert from_readme[: len(from_make)] == from_make
    for command in ("make lab", "make test"):
        assert command in README


def pip_installs(text: str) -> list[list[str]]:
    commands = re.findall(r"-m pip install (.+)", text)
    return [[word for word in command.split() if word != "--quiet"] for command in commands]


def test_the_example_prints_what_the_readme_says():
    """Those with their output beside them; the one on a real model is the first notebook's business."""
    examples = re.findall(r"```python\n([^`]*)```\n[^`]*```text\n([^`]*)```", README)
    assert examples
    for code, said in examples:
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout == said


def test_every_notebook_is_in_the_readme_and_the_first_one_is_the_first():
    notebooks = sorted(path.name for path in Path(ROOT / "notebooks").glob("*.ipynb"))
    assert notebooks[:1] == [FIRST]
    assert [name for name in notebooks if f"(notebooks/{name})" not in README] == []

"""The layers hold: notebooks -> lab -> kvsched, and torch only under `kvsched/runner/torch_*`.

Read from the source, not from one import, so that an import inside a function counts too.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.house import ROOT, dotted_name, modules

NOTEBOOK_SIDE = {"lab", "notebooks", "IPython", "ipykernel", "ipywidgets", "anywidget", "traitlets", "nbformat", "comm"}
TENSOR_SIDE = {"torch", "transformers", "accelerate", "safetensors", "gguf", "tokenizers"}
TORCH_MODULES = "kvsched.runner.torch_"


@dataclass(frozen=True)
class Import:
    """One imported module. at_load: it happens when the importing module is loaded, rather than later or never."""

    path: Path
    line: int
    target: str
    at_load: bool

    @property
    def root(self) -> str:
        return self.target.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.target}"


def imports_of(path: Path) -> list[Import]:
    found: list[Import] = []

    def visit(node: ast.AST, at_load: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(path, node.lineno, alias.name, at_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are written from the root (from kvsched.…)"
            found.append(Import(path, node.lineno, str(node.module), at_load))
            found.extend(Import(path, node.lineno, f"{node.module}.{alias.name}", at_load) for alias in node.names)
        elif isinstance(node, ast.Call) and _named_module(node):
            found.append(Import(path, node.lineno, _named_module(node), at_load))
        later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            types_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and child in node.body
            visit(child, at_load and not later and not types_only)

    visit(ast.parse(path.read_text(encoding="utf-8")), at_load=True)
    return found


def _named_module(call: ast.Call) -> str:
    """The module in `import_module("…")` or `__import__("…")`; empty for any other call, or a name not spelled out."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    first = call.args[0] if call.args else None
    return str(first.value) if name in ("import_module", "__import__") and isinstance(first, ast.Constant) else ""


@cache
def all_imports(package: str) -> list[Import]:
    return [one for path in modules(package) for one in imports_of(path)]


def may_use_torch(path: Path) -> bool:
    return dotted_name(path).startswith(TORCH_MODULES)


def is_jupyter(one: Import) -> bool:
    return one.root in NOTEBOOK_SIDE or one.root.startswith("jupyter")


def test_the_reader_of_imports_sees_all_kinds(tmp_path):
    source = """
import a
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import b
else:
    import c
def f():
    import d
    importlib.import_module("e.x")
class C:
    from g import h
"""
    path = tmp_path / "m.py"
    path.write_text(source)
    seen = {one.target: one.at_load for one in imports_of(path)}
    assert {name: seen[name] for name in ("a", "b", "c", "d", "e.x", "g", "g.h")} == {
        "a": True,
        "b": False,
        "c": True,
        "d": False,
        "e.x": False,
        "g": True,
        "g.h": True,
    }


def test_kvsched_knows_no_notebook():
    assert [str(one) for one in all_imports("kvsched") if is_jupyter(one)] == []


def test_lab_knows_no_notebook_file_and_no_torch():
    wrong = [one for one in all_imports("lab") if one.root == "notebooks" or one.root in TENSOR_SIDE]
    assert [str(one) for one in wrong] == []


def test_torch_stays_under_the_torch_runner():
    wrong = [one for one in all_imports("kvsched") if one.root in TENSOR_SIDE and not may_use_torch(one.path)]
    assert [str(one) for one in wrong] == []


def test_the_torch_runner_is_loaded_only_when_used():
    """Outside of it, an import of kvsched.runner.torch_* stands in a function or under TYPE_CHECKING."""
    outside = [one for package in ("kvsched", "lab") for one in all_imports(package) if not may_use_torch(one.path)]
    wrong = [one for one in outside if one.at_load and one.target.startswith(TORCH_MODULES)]
    assert [str(one) for one in wrong] == []


def loaded_after(statements: str) -> set[str]:
    """Names of the top-level modules loaded once `statements` have run in a fresh interpreter."""
    code = f"import sys, json\n{statements}\nprint(json.dumps([name.partition('.')[0] for name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def heavy(names: set[str]) -> set[str]:
    return {name for name in names if name in NOTEBOOK_SIDE | TENSOR_SIDE or name.startswith("jupyter")}


def test_importing_kvsched_and_a_scheduler_takes_in_neither_torch_nor_jupyter_nor_numpy():
    names = loaded_after("import kvsched\nfrom kvsched.sched.scheduler import Scheduler")
    assert heavy(names) == set()
    assert "numpy" not in names


def test_all_of_kvsched_but_the_torch_runner_loads_without_torch_or_jupyter():
    names = [dotted_name(path) for path in modules("kvsched") if not may_use_torch(path)]
    assert heavy(loaded_after("\n".join(f"import {name}" for name in names))) == set()


def test_the_lab_loads_without_torch():
    names = [dotted_name(path) for path in modules("lab")]
    assert loaded_after("\n".join(f"import {name}" for name in names)) & TENSOR_SIDE == set()


@pytest.mark.parametrize("statement", ["import kvsched", "from kvsched.sched.scheduler import Scheduler"])
def test_import_takes_under_300_ms(statement):
    """CPU time, best of three: the promise is about the code, not about what else the machine does."""
    seconds = min(import_seconds(statement) for _ in range(3))
    print(f"{statement}: {seconds * 1000:.0f} ms")
    assert seconds < 0.3


def import_seconds(statement: str) -> float:
    """CPU seconds that `statement` takes in a fresh interpreter, its start-up not counted."""
    code = f"import time; start = time.process_time(); {statement}; print(time.process_time() - start)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout)

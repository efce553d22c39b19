"""What the checkout holds: shared by the tests of the frame."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def modules(package: str) -> list[Path]:
    """Every Python file of a package, in order of path."""
    return sorted((ROOT / package).rglob("*.py"))


def dotted_name(path: Path) -> str:
    """kvsched/kv/pool.py -> kvsched.kv.pool; a package's __init__.py -> the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

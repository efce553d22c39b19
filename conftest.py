"""What must stand before the first test: the default model, converted, if notebooks are to be run.

The conversion (half a minute, once) says on stderr what it does; in a cell that would be output which the notebook does
not hold.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

_CONVERT = "from kvsched.runner.torch_load import smollm2_folder; smollm2_folder()"


def pytest_configure(config: pytest.Config) -> None:
    """Convert the model in the process that starts the others. If that fails, the notebooks say why."""
    wants_notebooks = config.getoption("nbval", default=False) or config.getoption("nbval_lax", default=False)
    if wants_notebooks and not hasattr(config, "workerinput"):
        subprocess.run([sys.executable, "-c", _CONVERT], check=False)

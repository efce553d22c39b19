"""The command `kvsched`: its table of subcommands, and how errors reach the user."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types

import pytest

from kvsched import __version__, cli
from tests.house import ROOT


def test_help_lists_every_command_and_loads_none():
    code = "import sys; from kvsched import cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([c.module for c in cli.COMMANDS.values() if c.module in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in cli.COMMANDS)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_is_there_and_has_help(name, capsys):
    module = importlib.import_module(cli.COMMANDS[name].module)
    assert callable(module.add_arguments)
    assert callable(module.run)
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert f"kvsched {name}" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"kvsched {__version__}\n"


@pytest.fixture
def command(monkeypatch):
    """A command `probe` whose `run` the test gives."""

    def install(run):
        module = types.ModuleType("probe_command")
        module.add_arguments = lambda parser: parser.add_argument("--n", type=int, default=0)
        module.run = run
        monkeypatch.setitem(sys.modules, "probe_command", module)
        monkeypatch.setitem(cli.COMMANDS, "probe", cli.Command("probe_command", "a probe"))

    return install


def raising(error):
    def run(args):
        raise error

    return run


def test_the_exit_code_is_the_commands(command):
    command(lambda args: args.n)
    assert cli.main(["probe", "--n", "1"]) == 1


@pytest.mark.parametrize("error", [ValueError("block_size 0: give at least 1"), FileNotFoundError("no such file: x")])
def test_bad_input_ends_as_one_line(command, capsys, error):
    command(raising(error))
    assert cli.main(["probe"]) == 2
    assert capsys.readouterr().err == f"kvsched probe: {error}\n"


def test_a_bug_keeps_its_traceback(command):
    command(raising(AssertionError("broken invariant")))
    with pytest.raises(AssertionError, match="broken invariant"):
        cli.main(["probe"])


def test_an_interrupt_ends_quietly(command):
    command(raising(KeyboardInterrupt()))
    assert cli.main(["probe"]) == 130


@pytest.mark.parametrize("arguments", [[], ["nonsense"]])
def test_no_or_an_unknown_command_ends_with_code_2(arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2

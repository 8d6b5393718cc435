# Every target sets up what it needs first: a fresh clone needs no other command.
PYTHON ?= python3
BIN := .venv/bin
# Files of unit tests side by side. End-to-end tests keep every core busy by themselves.
JOBS ?= 2
UNIT := $(BIN)/python -m pytest -q -m "not prove" -n $(JOBS) --dist loadfile tests/unit

.DEFAULT_GOAL := help
.PHONY: help setup lock metrics quickstart quickstart-qlora quickstart-agent ladder test prove check lint unit bench coverage clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

setup:  ## .venv with everything for this machine (CPU or GPU), then vlmrl doctor; nothing to do the second time
	@$(PYTHON) vlmrl/startup/install.py

lock: setup  ## the versions and hashes that setup installs, anew, as pyproject.toml allows
	@$(BIN)/python assets/lock.py

metrics: setup  ## the tables of metrics in vlmrl/observe/README.md, from the registry
	@$(BIN)/python assets/metrics_guide.py

quickstart: setup  ## a tiny Qwen2.5-VL learns visual math on this machine: sft, then GRPO, in minutes
	@$(BIN)/python -m vlmrl.commands.quickstart

quickstart-qlora: setup  ## the same with a base of 4 bits and adapters that train beside it
	@$(BIN)/python -m vlmrl.commands.quickstart qlora

quickstart-agent: setup  ## the same model learns to steer by pictures, turn by turn, in an environment: sft, then GRPO
	@$(BIN)/python -m vlmrl.commands.quickstart agent

ladder: setup  ## every stage on a tiny model: sft, a reward model, PPO against it, dpo, eval; one picture
	@$(BIN)/python -m vlmrl.commands.ladder

test: unit  ## every test: unit, and end to end on the real stack
	$(BIN)/python -m pytest -q -m "not prove" tests/end_to_end tests/gpu

prove: setup  ## the long proofs that `make test` leaves out: models learn, sweeps of kills, full matrices
	$(BIN)/python -m pytest -q -m prove tests

check: lint unit  ## what to run before a commit: lint and unit tests, about five minutes

lint: setup  ## ruff, mypy, import rules
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: setup  ## unit tests only
	$(UNIT)

bench: setup  ## a weight sync, rollouts, an optimizer step in each layout and the log-probs alone, as JSON lines
	@test -d runs/bench/model || $(BIN)/python -m vlmrl.models.tiny --family qwen2_5_vl --out runs/bench/model
	$(BIN)/vlmrl bench sync --actor.model_name_or_path runs/bench/model --ds.param_dtype fp32
	$(BIN)/vlmrl bench rollout --actor.model_name_or_path runs/bench/model --ds.param_dtype fp32 \
		--data.prompt_dataset visual_math --rollout.batch_size 16 --rollout.max_new_tokens 64
	$(BIN)/vlmrl bench step --actor.model_name_or_path runs/bench/model --ds.param_dtype fp32 --bench.image_size 336
	$(BIN)/vlmrl bench logprobs --bench.tokens 1024 --bench.hidden 256

coverage: setup  ## unit tests with line and branch coverage
	$(UNIT) --cov --cov-report=term-missing

clean:  ## caches and build products; keeps .venv and runs/
	rm -rf build dist *.egg-info .coverage coverage.xml .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find vlmrl processors datasets tests -name __pycache__ -type d -prune -exec rm -rf {} +

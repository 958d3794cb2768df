PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
STAMP := .venv/.installed
READY := .venv/.prepared
SOURCES := $(wildcard autopar kernels benchmarks)

.DEFAULT_GOAL := help
.PHONY: help .venv demo lint format docs test checks pytest slow matrix bench clean

help: ## list the targets
	@sed -n 's/^\([.a-z]*\):.*## /\1\t/p' Makefile | sort | expand -t 10

.venv: $(READY) ## install autopar and its tools into .venv

# torch first and by its exact version, so that an installed or a local build of it is taken as is.
$(STAMP): pyproject.toml setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	touch $@

# Apart, so that lint and documentation run while the planner is compiled.
$(READY): $(STAMP)
	$(BIN)/autopar prepare gpt2
	touch $@

demo: $(READY) ## train a small model on four processes of this machine
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 4 \
		examples/demo.py

lint: $(STAMP) ## style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(SOURCES)
	$(BIN)/lint-imports

format: $(STAMP) ## rewrite the files in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP) ## build the documentation into build/site; a broken link or reference fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

# Lint and documentation fill the time in which ranks of tests wait for one another.
test: $(STAMP) ## lint, documentation, and every test but the slow ones, side by side
	$(MAKE) -j 3 checks pytest

checks: # prints lint and documentation in one piece each
	$(MAKE) -O lint docs

# A file stays in one process, so that its fixtures and captured models are made once. A process that
# crashes is not replaced: pytest-xdist 3.8 hands finished files to the new one, which then waits forever
# (https://github.com/pytest-dev/pytest-xdist/issues/1323).
pytest: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

slow: $(READY) ## the slow tests
	$(BIN)/python -m pytest -m slow

matrix: $(READY) ## some tests under every Python and torch at hand; says which are not
	$(BIN)/python -m tests.version_matrix

bench: $(READY) ## run the benchmarks; rows go to benchmarks/results
	$(BIN)/python -m benchmarks

clean: ## remove what was built, .venv included
	rm -rf .venv .matrix build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache .grimp_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# make serve   start the server with the default model (makes .venv, fetches the model on the first run)
# make test    lint, types and tests
# make failed  lint, types and the tests that failed last, one by one, if they were at most ten
# make docs    the documentation as a website, in build/site
# make chaos   break the server in every way there is a case for, and print what came of it (some minutes)
PYTHON ?= python3
SEED ?= 1
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check

FAILED := .pytest_cache/v/cache/lastfailed

.PHONY: serve test failed chaos lint types format bench docs clean

serve: $(VENV)/.serve
	$(PY) -m lightserve.server.api_server $(ARGS)

# Many tests wait for servers, so three processes keep two cores busy. Types are checked beside them.
# Compiled modules are cached even where the environment says not to: the tests start over a thousand processes.
test: export PYTHONDONTWRITEBYTECODE :=
test: lint
	@$(PY) -m mypy > $(VENV)/types.log 2>&1 & types=$$!; \
	$(PY) -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder $(ARGS); tests=$$?; \
	wait $$types; types=$$?; cat $(VENV)/types.log; exit $$((tests | types))

failed: lint types
	@test $$(grep --count '::' $(FAILED)) -le 10
	$(PY) -m pytest --last-failed --last-failed-no-failures none

chaos: $(VENV)/.test
	$(PY) -m test.faults --seed $(SEED) $(ARGS)

lint: $(VENV)/.test
	$(PY) -m ruff check lightserve benchmark test setup.py
	$(PY) -m ruff format --check lightserve benchmark test setup.py

types: $(VENV)/.test
	$(PY) -m mypy

format: $(VENV)/.test
	$(PY) -m ruff check --fix lightserve benchmark test setup.py
	$(PY) -m ruff format lightserve benchmark test setup.py

bench: $(VENV)/.test
	$(PY) -m lightserve.bench.offline $(ARGS)

docs: $(VENV)/.test
	$(PY) -m mkdocs build --strict

clean:
	rm -rf $(VENV) *.egg-info .mypy_cache .pytest_cache .ruff_cache

$(VENV)/.serve: requirements.txt constraints.txt setup.py
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements.txt
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.test: $(VENV)/.serve requirements-test.txt
	$(PIP) -r requirements-test.txt
# Without what they ask for: text-generation an older huggingface_hub than transformers does, Liger (operators, for
# test/operator_packages) a triton. That is the one of the GPU machines we measure on; torch with CUDA asks for a later one.
	$(PIP) --no-deps text-generation==0.7.0 liger-kernel==0.8.5 'triton==3.6.0; platform_system == "Linux"'
	@touch $@

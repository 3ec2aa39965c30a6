# Everything runs in .venv, which the first call creates; later calls reuse it until pyproject.toml or constraints.txt change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PLAUSIBLE_DATA ?= $(abspath $(wildcard ../shared/data))

.PHONY: setup demo test test-slow test-long lint bench docs links reproduce clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "plausible needs Python 3.11 or newer; run make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

setup: $(STAMP)

demo: $(STAMP)
	$(BIN)/plausible demo --out demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations=10

test-slow: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m slow

test-long: $(STAMP)
	$(BIN)/python -m pytest -m long

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python docs/typed.py

bench: $(STAMP)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) demo build dist .pytest_cache .ruff_cache .mypy_cache

# The site in build/site: first what is generated from the classes, then Sphinx, which refuses links that lead nowhere.
SITE := $(VENV)/.docs-installed
$(SITE): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $(SITE)

docs: $(SITE)
	$(BIN)/python docs/generate.py
	$(BIN)/sphinx-build -W --keep-going -q -c docs -b html . build/site
	@echo open build/site/index.html in a browser

# Links to other sites; needs a network.
links: $(SITE)
	$(BIN)/sphinx-build -q -c docs -b linkcheck . build/links

reproduce: $(STAMP)
	$(BIN)/python -m experiments $(NAME)

# make demo   the main job on a real model and text: a table, and a page to open, out/demo/report.html
# make test   the whole suite
# make quick  a part of every test of the library, in a minute: for while one works
# make docs   the site, strictly: out/site
# make wheels dist/: wheels for Linux with the compiled kernels of every instruction set
# make campaign   a hostile test of everything, for an hour: out/campaign
# All create .venv on the first run and reuse it until pyproject.toml or constraints.txt changes.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# `make demo TEXT=my.txt SLOTS=32,64` compares on a text of your own instead of the demo's.
TEXT  ?=
SLOTS ?= 16,32,64,128
OUT   ?= out/demo

.NOTPARALLEL:
.PHONY: help demo test quick browser docs families figures sets wheels qemu audit broken campaign lint types clean

help:
	@sed -n 's/^# make/make/p' Makefile
	@echo 'make browser   the page of fewkeys report in Chromium, which must be installed'
	@echo 'make sets   the kernels agree with the reference, by every instruction set of this machine'
	@echo 'make qemu   the same on an emulated aarch64'
	@echo 'make broken break kernels and promises on purpose; do the tests notice? most of an hour'
	@echo 'make figures  every figure of the pages anew, from the JSON of its run'
	@echo 'make families every type of model that transformers knows, under an exact plan: some minutes; docs/families.md'
	@echo 'make audit  known vulnerabilities of the pinned packages'
	@echo 'make lint   ruff: rules and format'
	@echo 'make types  mypy --strict on src'
	@echo 'make clean  remove .venv, out and every cache'

demo: $(VENV)/.installed-demo
	$(BIN)/fewkeys compare --demo $(foreach file,$(TEXT),--text $(file)) --slots $(SLOTS) --out $(OUT)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n auto --dist worksteal

quick: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n auto --quick --ignore=tests/experiments

# Debian: apt-get install chromium. CHROMIUM=/path/to/another names another one.
browser: $(VENV)/.installed-browser
	$(BIN)/python -m pytest -n0 tests/browser/page.py

# The highest set is the one that `make test` takes.
AGREE := tests/kernels/test_native.py -k 'it_is_the_reference or statistics_clusters or head_sizes or instruction_set'
SETS   = $(shell $(BIN)/python -c 'from fewkeys.native.sets import possible; print(*possible()[:-1])')

sets: $(VENV)/.installed-dev
	set -e; for name in $(SETS); do FEWKEYS_ISA=$$name $(BIN)/python -m pytest -n auto $(AGREE); done

wheels: $(VENV)/.installed-wheels
	for machine in x86_64 aarch64; do FEWKEYS_WHEEL=$$machine $(BIN)/python -m hatchling build -t wheel || exit 1; done

qemu: wheels
	PYTHON=$(BIN)/python tests/qemu/run out/qemu tests/qemu/results.json $(AGREE)

broken: $(VENV)/.installed-dev
	cd tests && PYTHONPATH=. ../$(BIN)/python -m broken.run --out broken/results.json

# `make campaign MINUTES=5` takes a part of the hour.
MINUTES ?= 60

campaign: $(VENV)/.installed-dev
	cd tests && PYTHONPATH=.:.. ../$(BIN)/python -m campaign --minutes $(MINUTES) --sanitize --out ../out/campaign/campaign.json

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

figures: $(VENV)/.installed-dev
	$(BIN)/python -m docs.figures

families: $(VENV)/.installed-dev
	$(BIN)/python -m experiments.families.run

# Known vulnerabilities of what is pinned; asks a public database.
audit: $(VENV)/.installed-audit
	$(BIN)/pip-audit --no-deps --disable-pip -r constraints.txt

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

clean:
	rm -rf $(VENV) out build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written only after its step succeeded, so an interrupted set-up is taken up again.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "fewkeys needs Python 3.11 or newer, but '$(PYTHON)' is: $$($(PYTHON) --version 2>&1 | tail -n 1)." >&2; \
	  echo "Name another one: make PYTHON=python3.12 $(firstword $(MAKECMDGOALS))" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed-%: pyproject.toml constraints.txt | $(VENV)/.created
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[$*]"
	@touch $@

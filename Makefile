# One verb a job. Every verb sets up what it needs: a virtual environment, pinned packages, the
# build; a second run does only what changed.
#
#   make demo               train an autoencoder with TNT, SGD-m and Adam, no download
#   make demo DATA=DIR      the same on MNIST's IDX files in DIR
#   make test               lint, native tests, Python tests
#   make lint               ruff, mypy, clang-format
#   make format             rewrites the sources as lint wants them
#   make native-test        the C++ tests, plain and under sanitizers
#   make fuzz               every operator on 10,000 random calls; EXAMPLES=N for another number
#   make bench              every kernel benchmark and the complexity table, to bench/results;
#                           some 15 minutes on two cores that nothing else uses
#   make bench-quick        a few of them in two minutes, to build/bench
#   make clean              removes what the other verbs made

PYTHON ?= python3
VENV ?= .venv
EXAMPLES ?= 10000
CMAKE_BUILDS = build/native build/native-address build/native-thread

BIN = $(VENV)/bin
PY = $(BIN)/python
# For tools that others look up on the PATH: PyTorch its ninja, CMake its Python.
IN_VENV = . "$(if $(filter /%,$(VENV)),,./)$(BIN)/activate" &&
CPP_SOURCES = $(shell find csrc tests/native -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
EXTENSION_SOURCES = setup.py $(shell find csrc -type f)

.PHONY: demo test lint format native-test python-test fuzz bench bench-quick build clean

demo: build
	$(PY) -m bench.experiments.demo $(if $(DATA),--data "$(DATA)")

test: lint native-test python-test

python-test: build
	$(IN_VENV) python -m pytest

fuzz: build
	$(IN_VENV) TNT_FUZZ_EXAMPLES=$(EXAMPLES) python -m pytest tests/test_properties.py

lint: $(VENV)/.packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP_SOURCES)

format: $(VENV)/.packages
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_SOURCES)

native-test: $(CMAKE_BUILDS:=/.configured)
	for build in $(CMAKE_BUILDS); do \
		$(BIN)/cmake --build $$build --parallel && \
		$(BIN)/ctest --test-dir $$build --output-on-failure --no-tests=error || exit 1; \
	done

bench: build
	$(PY) -m bench.kernels

bench-quick: build
	$(PY) -m bench.kernels --quick

build: $(VENV)/.built

clean:
	rm -rf build $(VENV) *.egg-info tnt_kernels/_C.*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.packages: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

# Installed once, editable; after that only the extension is brought up to date.
$(VENV)/.installed: $(VENV)/.packages pyproject.toml
	$(IN_VENV) python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $@

$(VENV)/.built: $(VENV)/.installed $(EXTENSION_SOURCES)
	$(IN_VENV) python setup.py --quiet build_ext --inplace
	$(PY) -m tnt_kernels
	touch $@

build/native/.configured: FLAGS =
build/native-address/.configured: FLAGS = -DTNT_SANITIZE=address,undefined
build/native-thread/.configured: FLAGS = -DTNT_SANITIZE=thread
$(CMAKE_BUILDS:=/.configured): CMakeLists.txt $(VENV)/.packages
	$(IN_VENV) cmake -S . -B $(@D) -G Ninja -DCMAKE_MAKE_PROGRAM="$$(command -v ninja)" \
		-DPython3_EXECUTABLE="$$(command -v python)" -DCMAKE_BUILD_TYPE=RelWithDebInfo $(FLAGS)
	touch $@

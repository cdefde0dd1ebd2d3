# SPDX-License-Identifier: Apache-2.0
# `make train` and `make test` do all the set-up themselves; `make help` lists the rest.
# Variables: PYTHON (3.10 or newer), TORCH (pip's requirement for torch), CXX, USBYTE_CUDA, WERROR
# (ON: warnings in the package and the C++ tests are errors), TEST_JOBS (number of parallel tests).

PYTHON ?= python3
TORCH ?= torch==2.13.0
SHELL := bash
MAKEFLAGS += --no-print-directory
.DELETE_ON_ERROR:
# Parallel targets would write to the same environment and build folder; ninja is parallel by itself.
.NOTPARALLEL:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
# cmake and ninja may exist only in the virtual environment.
export PATH := $(CURDIR)/$(BIN):$(PATH)

VENV_STAMP := $(VENV)/.stamp-venv
SYSTEM_STAMP := $(VENV)/.stamp-system
TORCH_STAMP := $(VENV)/.stamp-torch-$(firstword $(shell echo '$(TORCH)' | cksum))
BUILD_STAMP := $(VENV)/.stamp-build
PACKAGE_STAMP := $(VENV)/.stamp-package
LINT_STAMP := $(VENV)/.stamp-lint
DOCS_STAMP := $(VENV)/.stamp-docs

# The list includes folders, because their time changes when a file is removed.
SOURCES := $(shell find csrc python cmake \( -name __pycache__ -o -name '*.egg-info' \) -prune \
  -o -print) CMakeLists.txt CMakePresets.json setup.py pyproject.toml
# Newer releases of ruff also format code in Markdown, where comments are aligned on purpose.
RUFF_FORMAT = $(BIN)/ruff format --exclude '*.md'
CXX_FILES = $(shell find csrc tests/cpp -name '*.h' -o -name '*.cc' -o -name '*.cu')

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | expand -t 10

train: $(PACKAGE_STAMP) ## train under DDP and usbyte over an emulated network, and draw a step of each
	$(BIN)/usbyte demo --output build/usbyte-demo.svg

# Three jobs for two cores: most tests wait for processes, limits and faults half of their time.
TEST_JOBS ?= $(shell echo $$(( ($$(getconf _NPROCESSORS_ONLN) * 3 + 1) / 2 )))
PYTEST = $(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal
test: $(SYSTEM_STAMP) $(PACKAGE_STAMP) ## build and run the C++ tests, then pytest
	@status=0; rm -rf build/reports && mkdir -p build/reports; \
	$(MAKE) ctest PRESET=release || status=1; \
	$(PYTEST) --junitxml=build/reports/pytest.xml || status=1; \
	$(BIN)/python tools/test_counts.py build/reports/ctest.xml build/reports/pytest.xml || status=1; \
	exit $$status

evidence: $(PACKAGE_STAMP) ## check published figures and the tools that write pages of results
	$(PYTEST) -m evidence

soak: $(PACKAGE_STAMP) $(SYSTEM_STAMP) ## run the long tests
	$(BIN)/python -m pytest -m soak

# Without parallel tests, which would change what each rank reports, and when.
reliability: $(PACKAGE_STAMP) ## provoke every fault and write docs/reliability.md
	$(BIN)/python -m pytest tests/python/test_reliability.py -p no:xdist --reliability docs/reliability.md

asan: ## run the C++ tests under the address and undefined-behaviour sanitizers
	@$(MAKE) ctest PRESET=asan

# ThreadSanitizer cannot place its shadow memory if the kernel randomizes addresses too much. setarch
# covers the build, too, as it runs the test binary to list the tests.
tsan: ## run the C++ tests under the thread sanitizer
	@if setarch -R true 2>/dev/null; then setarch -R $(MAKE) ctest PRESET=tsan; \
	else $(MAKE) ctest PRESET=tsan; fi

# FUZZ_S: seconds of `make fuzz` and `make fuzz-programs`, and of each target of `make fuzz-python`.
# New inputs of `make fuzz` are written to build/fuzz/found; copy useful ones to tests/fuzz/corpus.
FUZZ_S ?= 300
fuzz: $(VENV_STAMP) ## fuzz the parsers of plans, profiles, networks, topologies and costs
	tools/bootstrap.sh $(PYTHON) $(VENV) fuzz
	$(MAKE) cpp PRESET=fuzz CXX=$$(command -v clang++-16 || command -v clang++-19 || command -v clang++)
	mkdir -p build/fuzz/found
	build/fuzz/tests/fuzz/usbyte_fuzz_parsers -max_total_time=$(FUZZ_S) -max_len=65536 -timeout=10 \
	  -artifact_prefix=build/fuzz/ -print_final_stats=1 build/fuzz/found tests/fuzz/corpus

fuzz-python: $(PACKAGE_STAMP) ## fuzz the Python code that reads external input
	$(PIP) $$($(BIN)/python tools/requirements.py fuzz)
	$(BIN)/python tests/fuzz/python/run.py --seconds $(FUZZ_S)

fuzz-programs: $(PACKAGE_STAMP) ## compare random training programs with plain averages of gradients
	$(BIN)/python tests/python/_programs.py --seconds $(FUZZ_S)

# COVERED: arguments of pytest. COVERED_CXX: filter of the C++ tests; the default leaves out a test
# that takes minutes without optimization.
COVERED ?= -n $(TEST_JOBS) --dist worksteal
COVERED_CXX ?= -PolicyProperties.ThousandsOfTensors
coverage: $(PACKAGE_STAMP) $(SYSTEM_STAMP) ## measure line coverage: C++ engine, plan and policy, and Python
	$(PIP) 'coverage>=7.10' gcovr
	$(MAKE) cpp PRESET=coverage
	find build/coverage -name '*.gcda' -delete
	build/coverage/tests/cpp/usbyte_tests --gtest_brief=1 --gtest_filter='$(COVERED_CXX)'
	cd build/coverage && set -o pipefail && for part in engine plan policy; do \
	  ../../$(BIN)/gcovr --root ../.. --filter ../../csrc/$$part/ --gcov-suspicious-hits-threshold 0 \
	  --txt ../coverage-$$part.txt --print-summary . 2>/dev/null \
	  | sed -n "s/^lines/csrc\/$$part lines/p" || exit 1; done
	rm -f build/.coverage*
	COVERAGE_FILE=$(CURDIR)/build/.coverage $(BIN)/python -m coverage run -m pytest $(COVERED)
	COVERAGE_FILE=$(CURDIR)/build/.coverage $(BIN)/python -m coverage combine -q || test -s build/.coverage
	COVERAGE_FILE=$(CURDIR)/build/.coverage $(BIN)/python -m coverage report -m >build/coverage.txt
	tail -n 1 build/coverage.txt

# Only the tests of threaded code, so that it is short enough for every change. Undefined behaviour
# traps, which compiles much faster than messages, and the vptr check is off; `make asan` has both.
# The NcclLibrary tests depend on their order, so they are not sharded.
sanitize: ## run the C++ tests of threaded code under the address and the thread sanitizer
	@export ASAN_OPTIONS=handle_sigill=1:$$ASAN_OPTIONS; aslr=; if setarch -R true 2>/dev/null; then aslr='setarch -R'; fi; status=0; \
	for kind in asan tsan; do \
	  $$aslr $(MAKE) cpp PRESET=threaded-$$kind || { status=1; continue; }; \
	  tests="$$aslr build/threaded-$$kind/tests/cpp/usbyte_tests --gtest_brief=1 --gtest_filter"; \
	  $$tests='NcclLibrary.*' || status=1; \
	  halves=(); trap 'kill $${halves[@]} 2>/dev/null' EXIT; \
	  for half in 0 1; do \
	    GTEST_TOTAL_SHARDS=2 GTEST_SHARD_INDEX=$$half $$tests='-NcclLibrary.*' & halves+=($$!); \
	  done; \
	  for half in $${halves[@]}; do wait $$half || status=1; done; halves=(); \
	done; exit $$status

PRESET ?= release
WERROR ?= OFF
ctest: cpp
	@mkdir -p build/reports
	ctest --preset $(PRESET) --parallel $$(getconf _NPROCESSORS_ONLN) \
	  --output-junit $(CURDIR)/build/reports/ctest.xml

cpp: $(SYSTEM_STAMP)
	cmake --preset $(PRESET) -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	  $(if $(filter release,$(PRESET)),-DUSBYTE_WERROR=$(WERROR)) >build/$(PRESET).log 2>&1 \
	  || { cat build/$(PRESET).log; exit 1; }
	cmake --build --preset $(PRESET)

bench: cpp ## run the C++ benchmarks that need no GPU
	@set -e; for name in codec collective engine plan sparse; do \
	  echo "# usbyte_bench_$$name"; build/$(PRESET)/csrc/bench/usbyte_bench_$$name; done

# INTERPRETERS: those to build for; the default is each of python3.10 to python3.14 on PATH.
wheels: $(VENV_STAMP) ## build dist/*.tar.gz and wheels for glibc 2.28 and newer
	tools/wheels.sh $(BIN)/python dist $(INTERPRETERS)

# Uses PYTHON's own torch, which must see a GPU. Other missing packages are installed into
# build/gpu/site. Variables: WHEELS (folder of wheels, for a machine without a package index), OUT_DIR
# (folder of the report), ONLY (parts to run, separated by commas), REVISION (revision of the sources,
# if git cannot tell it).
OUT_DIR ?= docs/gpu
gpu-test: ## build, test and measure on this machine's GPU; writes docs/gpu/<gpu>.md
	@PYTHONPATH=$(CURDIR)/tools$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m gpu_report --out '$(OUT_DIR)' \
	  --wheels '$(WHEELS)' --only '$(ONLY)' --revision '$(REVISION)'

docs: $(DOCS_STAMP) ## build the site in build/site, and check its links
	rm -rf build/site
	$(BIN)/python tools/docs_site.py
	$(BIN)/zensical build >build/site.log 2>&1 || { cat build/site.log; exit 1; }
	$(BIN)/python tools/docs_site.py --check

docs-check: $(PACKAGE_STAMP) ## check that the figures of the pages are those of docs/data, and not old
	$(BIN)/python tools/docs_data.py check

lint: $(LINT_STAMP) ## check style and types
	@status=0; \
	$(BIN)/ruff check || status=1; \
	$(RUFF_FORMAT) --check || status=1; \
	$(BIN)/mypy || status=1; \
	$(BIN)/python tools/check_factory_calls.py python/usbyte || status=1; \
	mkdir -p build; PYTHONPATH=python $(BIN)/lint-imports --no-cache >build/imports.log \
	  || { cat build/imports.log; status=1; }; \
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES) || status=1; \
	$(MAKE) thread-safety || status=1; \
	exit $$status

# Only clang reads the annotations of csrc/support/thread_annotations.h; nothing is compiled.
thread-safety: $(BUILD_STAMP) ## check with clang that data is used under the lock that guards it
	@tools/bootstrap.sh $(PYTHON) $(VENV) lint
	@clang=$$(command -v clang++-16 || command -v clang++-19 || command -v clang++) || \
	  { echo "thread-safety: NOT CHECKED, because there is no clang++"; exit 0; }; \
	json=$$($(BIN)/python -c 'import nlohmann_json as n; print(n.__path__[0])')/include; \
	for file in csrc/comm/*.cc csrc/engine/*.cc csrc/engine/*/*.cc; do echo $$file; done | \
	  xargs -P $$(getconf _NPROCESSORS_ONLN) -n 8 $$clang -std=c++20 -fsyntax-only -Wthread-safety \
	  -Werror -Icsrc -Icsrc/include -isystem $$json && \
	echo "thread-safety: csrc/comm and csrc/engine are clean"

format: $(LINT_STAMP) ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix
	$(RUFF_FORMAT)
	$(BIN)/clang-format -i $(CXX_FILES)

clean: ## remove build outputs and the virtual environment
	rm -rf build dist python/*.egg-info $(VENV)

$(VENV_STAMP): tools/bootstrap.sh
	tools/bootstrap.sh $(PYTHON) $(VENV) train
	@touch $@

$(SYSTEM_STAMP): $(BUILD_STAMP)
	tools/bootstrap.sh $(PYTHON) $(VENV) test
	@touch $@

# Installs cmake, ninja and headers.
$(BUILD_STAMP): $(VENV_STAMP) pyproject.toml
	@mkdir -p build
	$(PIP) $$($(BIN)/python tools/requirements.py build)
	@touch $@

# Installed before the package, which requires any torch: pip would otherwise choose another build.
$(TORCH_STAMP): $(VENV_STAMP)
	$(PIP) $(TORCH)
	@rm -f $(VENV)/.stamp-torch-* && touch $@

# setuptools would copy old files in build/lib, such as removed modules, into the wheel. The C++ core
# is compiled in the build folder of the C++ tests, so that both share objects and later builds are
# incremental. That needs the tools of this environment, since pip's isolated one is deleted after the
# build.
$(PACKAGE_STAMP): $(TORCH_STAMP) $(BUILD_STAMP) $(SOURCES)
	rm -rf build/lib* build/bdist*
	$(PIP) $$($(BIN)/python tools/requirements.py test examples)
	USBYTE_PRESET=release USBYTE_WERROR=$(WERROR) $(PIP) --no-build-isolation --no-deps .
	@touch $@

$(DOCS_STAMP): $(PACKAGE_STAMP)
	$(PIP) $$($(BIN)/python tools/requirements.py docs)
	@touch $@

# Lint does not depend on the package, so it needs no build.
$(LINT_STAMP): $(TORCH_STAMP) pyproject.toml
	$(PIP) $$($(BIN)/python tools/requirements.py lint)
	@touch $@

.PHONY: help train test evidence soak reliability asan tsan sanitize coverage fuzz fuzz-python fuzz-programs ctest cpp bench wheels gpu-test docs docs-check lint thread-safety format clean

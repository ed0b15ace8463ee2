# Everything by make: `make` lists the commands. harness/bootstrap.py makes the environment (.venv) on first use.

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory

PYTHON ?= python3

# LANG is the locale variable of every shell as well: it names a language only where make's own command line gave it,
# and in neither meaning does it reach a child. Values go to the commands as KIT_*, unexpanded, never pasted into shell text.
VARIABLES := TASK LANG SUITE CASES DEVICE CONFIG FILE VARIANT JSON COUNTS JOBS REPEAT NOTIME ROW PLAN BUDGET OUT BASELINE OURS GRID API POINTS TOOL PYTHON EXTRA
ifneq ($(origin LANG),command line)
LANG :=
endif
$(foreach name,$(VARIABLES),$(eval export KIT_$(name) := $$(value $(name))))
unexport $(VARIABLES) MAKEFLAGS MFLAGS MAKEOVERRIDES
MAKEOVERRIDES :=
# Files and paths are UTF-8 in every child, whatever the locale.
export PYTHONUTF8 := 1

# A misspelt TASK= would otherwise run everything.
GIVEN := $(foreach name,$(.VARIABLES),$(if $(findstring command line,$(origin $(name))),$(name)))
UNKNOWN := $(filter-out $(VARIABLES) -%,$(GIVEN))
ifneq ($(UNKNOWN),)
$(if $(JSON),$(info {"error": "$(firstword $(UNKNOWN))=: no such variable", "exit_code": 2}))
$(error $(firstword $(UNKNOWN))=: no such variable; known are $(VARIABLES))
endif

no_python = { echo "PYTHON=$$KIT_PYTHON: no such program; name a Python 3.10 or newer." >&2; \
  [ -z "$$KIT_JSON" ] || echo '{"error": "PYTHON names no program", "exit_code": 14}'; exit 14; }
bootstrap = command -v -- "$$KIT_PYTHON" >/dev/null || $(no_python); \
  "$$KIT_PYTHON" -m harness.bootstrap $${KIT_JSON:+--json}
python := .venv/bin/python

.PHONY: help check bench sanitize accept traffic counts mutants report tune lint lint-compat test lint-code env clean

help: ## this list
	@echo "make COMMAND [VARIABLE=value ...]"
	@sed -n 's/^\([a-z-]*\): *## */  \1\t/p' Makefile | expand -t 14
	@echo "Variables of check:"
	@sed -n 's/^#: /  /p' Makefile

#: TASK=name        one task (all of them without it)
#: LANG=name        cuda, triton or tilelang (all three without it); only from this command line
#: SUITE=name       judge, live, tiny or demo (judge on a GPU, tiny without one)
#: CASES=1,3-5      these cases only
#: DEVICE=kind      maca, cuda or cpu (what the machine has)
#: CONFIG=file      a problem package of your own instead of a suite; needs TASK
#: FILE=file        a submission of your own instead of the kit's; needs TASK and LANG
#: VARIANT=name     plain: the file to paste; hopper: hopper.* beside it, for compute capability 9.x; all: both
#:                  (plain for check, all for bench and accept)
#: JSON=1           one JSON document on standard output and nothing else
#: COUNTS=1         the simulator's counters under each C++ case
#: JOBS=n           worker processes at a time (one per core without a GPU, one on a GPU)
#: REPEAT=n         judge each case n times, each time on other data
#: NOTIME=1         on a GPU: check only, time nothing (JOBS may then be more than one)
#: ROW=name         for tune: c500 or sm90, the row of the tuning table (the device's own)
#: PLAN=1           for tune: list the candidates and what rules them out, run nothing; needs no GPU
#:                  for accept: list what is missing, run nothing
#: BUDGET=seconds   for bench: of repetition per case (10); for tune: per candidate and case (1.5); for accept: in all
#: OUT=folder       for bench: keep the records there as well as in results/journal
#: BASELINE=1       for bench: time FlashInfer and flash-attn on the tutorial's grids instead, into results/tutorial/*.csv
#: OURS=1           for bench: time our kernels on those grids; takes TASK and LANG
#: GRID=name        for BASELINE and OURS: which grids (tutorial)
#: API=name         for BASELINE and OURS: one CSV, as its file's name begins
#: POINTS=1-5       for BASELINE and OURS: these rows only
#: TOOL=name        for sanitize: memcheck, racecheck, initcheck or synccheck (the first two)
#: PYTHON=path      the Python to make .venv with, for every command (python3)
#: EXTRA=name       for env: flashinfer, flash-attn, test, lint or report
check: ## run the submissions against a suite, both verdicts per case
	@$(bootstrap)
	@$(python) -m harness check $${KIT_TASK:+"--task=$$KIT_TASK"} $${KIT_LANG:+"--lang=$$KIT_LANG"} \
	  $${KIT_SUITE:+"--suite=$$KIT_SUITE"} $${KIT_CASES:+"--cases=$$KIT_CASES"} $${KIT_DEVICE:+"--device=$$KIT_DEVICE"} \
	  $${KIT_CONFIG:+"--config=$$KIT_CONFIG"} $${KIT_FILE:+"--file=$$KIT_FILE"} \
	  $${KIT_VARIANT:+"--variant=$$KIT_VARIANT"} $${KIT_JOBS:+"--jobs=$$KIT_JOBS"} \
	  $${KIT_REPEAT:+"--repeat=$$KIT_REPEAT"} $${KIT_NOTIME:+--no-time} $${KIT_JSON:+--json} $${KIT_COUNTS:+--counts}

bench: ## on a GPU: time submissions beside their baselines; takes what check takes but COUNTS, JOBS, REPEAT, NOTIME
	@$(bootstrap)
	@$(python) -m harness bench $${KIT_TASK:+"--task=$$KIT_TASK"} $${KIT_LANG:+"--lang=$$KIT_LANG"} \
	  $${KIT_SUITE:+"--suite=$$KIT_SUITE"} $${KIT_CASES:+"--cases=$$KIT_CASES"} $${KIT_DEVICE:+"--device=$$KIT_DEVICE"} \
	  $${KIT_CONFIG:+"--config=$$KIT_CONFIG"} $${KIT_FILE:+"--file=$$KIT_FILE"} \
	  $${KIT_VARIANT:+"--variant=$$KIT_VARIANT"} $${KIT_BUDGET:+"--budget=$$KIT_BUDGET"} \
	  $${KIT_OUT:+"--out=$$KIT_OUT"} $${KIT_JSON:+--json} $${KIT_BASELINE:+--baseline} $${KIT_OURS:+--ours} \
	  $${KIT_GRID:+"--grid=$$KIT_GRID"} $${KIT_API:+"--api=$$KIT_API"} $${KIT_POINTS:+"--points=$$KIT_POINTS"}

sanitize: ## on an NVIDIA GPU: the C++ submissions under compute-sanitizer; takes TASK, SUITE, CASES, VARIANT, TOOL
	@$(bootstrap)
	@$(python) -m harness sanitize $${KIT_TASK:+"--task=$$KIT_TASK"} $${KIT_SUITE:+"--suite=$$KIT_SUITE"} \
	  $${KIT_CASES:+"--cases=$$KIT_CASES"} $${KIT_VARIANT:+"--variant=$$KIT_VARIANT"} $${KIT_TOOL:+"--tool=$$KIT_TOOL"}

accept: ## on a GPU: whatever the files as they are have not been seen to pass; takes TASK, LANG, VARIANT, JOBS, BUDGET, PLAN
	@$(bootstrap)
	@$(python) -m harness accept $${KIT_TASK:+"--task=$$KIT_TASK"} $${KIT_LANG:+"--lang=$$KIT_LANG"} \
	  $${KIT_VARIANT:+"--variant=$$KIT_VARIANT"} $${KIT_DEVICE:+"--device=$$KIT_DEVICE"} \
	  $${KIT_JOBS:+"--jobs=$$KIT_JOBS"} $${KIT_BUDGET:+"--budget=$$KIT_BUDGET"} $${KIT_PLAN:+--plan}

traffic: ## on an NVIDIA GPU: bytes to and from DRAM by ncu, beside the floor; takes TASK, LANG, SUITE, CASES, CONFIG, VARIANT
	@$(bootstrap)
	@$(python) -m harness traffic $${KIT_TASK:+"--task=$$KIT_TASK"} $${KIT_LANG:+"--lang=$$KIT_LANG"} \
	  $${KIT_SUITE:+"--suite=$$KIT_SUITE"} $${KIT_CASES:+"--cases=$$KIT_CASES"} $${KIT_CONFIG:+"--config=$$KIT_CONFIG"} \
	  $${KIT_VARIANT:+"--variant=$$KIT_VARIANT"}

counts: ## the simulator's counts of the C++ submissions, into the task READMEs; takes TASK
	@$(bootstrap)
	@$(python) -m harness counts $${KIT_TASK:+"--task=$$KIT_TASK"}

mutants: ## run submissions that are wrong on purpose: each must be rejected by name
	@$(bootstrap)
	@$(python) -m harness mutants $${KIT_TASK:+"--task=$$KIT_TASK"} $${KIT_LANG:+"--lang=$$KIT_LANG"} \
	  $${KIT_DEVICE:+"--device=$$KIT_DEVICE"} $${KIT_JOBS:+"--jobs=$$KIT_JOBS"}

report: ## the measured tables and plots of the task READMEs, from results/*.json
	@$(bootstrap) report
	@$(python) -m harness report

tune: ## time other values of a kernel's parameters on this GPU, print the row to paste; needs TASK, LANG; takes ROW, PLAN
	@$(bootstrap)
	@$(python) -m harness tune $${KIT_TASK:+"--task=$$KIT_TASK"} $${KIT_LANG:+"--lang=$$KIT_LANG"} \
	  $${KIT_SUITE:+"--suite=$$KIT_SUITE"} $${KIT_CASES:+"--cases=$$KIT_CASES"} $${KIT_DEVICE:+"--device=$$KIT_DEVICE"} \
	  $${KIT_ROW:+"--row=$$KIT_ROW"} $${KIT_BUDGET:+"--budget=$$KIT_BUDGET"} $${KIT_PLAN:+--plan}

lint: ## what the judge's sandbox or a C500 would refuse, and what the c500 rows need; takes TASK, LANG, FILE, JSON, JOBS
	@$(bootstrap)
	@$(python) -m harness lint $${KIT_TASK:+"--task=$$KIT_TASK"} $${KIT_LANG:+"--lang=$$KIT_LANG"} \
	  $${KIT_FILE:+"--file=$$KIT_FILE"} $${KIT_JOBS:+"--jobs=$$KIT_JOBS"} $${KIT_JSON:+--json}

lint-compat: ## compile under Triton 3.0.0, TileLang 0.1.10, CUTLASS 3.3 and 4.1 (fetched once); takes TASK, LANG, JSON, JOBS
	@$(bootstrap)
	@$(python) -m harness lint-compat $${KIT_TASK:+"--task=$$KIT_TASK"} $${KIT_LANG:+"--lang=$$KIT_LANG"} \
	  $${KIT_JOBS:+"--jobs=$$KIT_JOBS"} $${KIT_JSON:+--json}

test: ## the kit's own tests
	@$(bootstrap) test
	@$(python) -m pytest tests -n auto --maxprocesses=4 --dist=loadfile

lint-code: ## ruff, mypy, clang-format and shellcheck over the kit's own code
	@$(bootstrap) lint
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .
	@$(python) -m mypy
	@export PATH="$$PWD/.venv/bin:$$PATH"; \
	  git ls-files -z -- '*.cu' '*.cuh' '*.hpp' '*.h' | xargs -0 --no-run-if-empty clang-format --dry-run -Werror; \
	  git ls-files -z -- .ci/run '*.sh' | xargs -0 --no-run-if-empty shellcheck

env: ## make or mend .venv now, with EXTRA=name in it
	@$(bootstrap) --retry $${KIT_EXTRA:+"$$KIT_EXTRA"}

clean: ## remove caches (not .venv, not results)
	@rm -rf .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find harness tasks tests -name __pycache__ -type d -prune -exec rm -rf {} +

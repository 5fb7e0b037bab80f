# Two commands set everything up: `make demo` and `make test`. Each makes the virtual environment if there is none.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What is imported is compiled once, and kept; all of the packages would take another half a minute. Each process would compile anew
# where Python is set to keep nothing.
unexport PYTHONDONTWRITEBYTECODE
IMPORTS := import torch, torch._dynamo, torch.distributed.pipelining, torch.profiler, pandas, polars, plotly.express, dash, distributed
RANKS := $(shell n=$$(getconf _NPROCESSORS_ONLN); if [ $$n -gt 4 ]; then echo 4; elif [ $$n -lt 2 ]; then echo 2; else echo $$n; fi)
DEMO := pptrace_runs/demo

.PHONY: demo test test-all check browser bench table samples pictures docs dist pythons gpu gpu-wheels clean

demo: $(STAMP)
	@rm -rf $(DEMO)
	$(BIN)/pptrace run -n $(RANKS) -o $(DEMO) instrument/examples/train_gpt.py

test: $(STAMP)
	@$(MAKE) --no-print-directory -j2 check browser
	$(BIN)/pytest -n $(RANKS) --own-cores --dist loadfile

test-all: export PPTRACE_ALL = 1
test-all: test
	$(BIN)/python tools/recognition_table.py
	$(BIN)/python tools/mutants.py --jobs $(RANKS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy --num-workers 2

browser: $(STAMP)
	$(BIN)/python tools/get_browser.py

bench: $(STAMP)
	@for script in tools/bench/bench_*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

table: $(STAMP)
	$(BIN)/python tools/report_page.py --write docs/report.md
	$(BIN)/python tools/schedule_table.py --write docs/schedules.md
	$(BIN)/python tools/coverage_table.py --write docs/coverage.md

samples: $(STAMP)
	$(BIN)/python sample_traces/make.py

pictures: $(STAMP)
	$(BIN)/python tools/pictures.py

docs: $(STAMP)
	$(BIN)/python -m sphinx -b html -n -W --keep-going -q docs docs/_build/html
	@echo "docs/_build/html/index.html"

dist: $(STAMP)
	$(BIN)/python tools/check_dist.py

pythons: dist
	$(BIN)/python tools/try_pythons.py
	$(BIN)/python tools/try_pythons.py --oldest $(PYTHON)

# Where there is a GPU and no network; see docs/gpu.md. DRY=1 tries every part on CPUs.
GPU_VENV := .venv-gpu
GPU_WHEELS := gpu_wheels
GPU_PYTHON ?= 3.12
GPU_OPTIONS := $(if $(PARTS),--parts $(PARTS)) $(if $(BUDGET),--budget $(BUDGET))

gpu: $(if $(DRY),$(STAMP))
ifdef DRY
	$(BIN)/python tools/gpu/run.py --dry-run $(GPU_OPTIONS)
else
	@$(PYTHON) tools/gpu/offline_venv.py make $(GPU_VENV) $(GPU_WHEELS)
	@$(GPU_VENV)/bin/python tools/gpu/run.py $(GPU_OPTIONS)
endif

gpu-wheels:
	$(PYTHON) tools/gpu/offline_venv.py collect $(GPU_WHEELS) --python $(GPU_PYTHON)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than Python 3.11; run make with PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/install_packages.py
	@$(BIN)/python -c '$(IMPORTS)'
	@touch $(STAMP)

clean:
	rm -rf $(VENV) $(GPU_VENV) $(GPU_WHEELS) pptrace_runs docs/_build dist build

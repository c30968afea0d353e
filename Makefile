# Two commands do all set-up: `make demo` and `make test`. Both create .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_OUT := build/demo-export

.PHONY: demo test test-all lint clean
demo: $(VENV)/installed
	$(BIN)/adtp-export demo/student --trt --openvino --out $(DEMO_OUT) --force
	$(BIN)/adtp-run $(DEMO_OUT) --kept \
		--text "The hotel was near the station, the room was small, and the breakfast was truly wonderful."
	$(BIN)/adtp-bench $(DEMO_OUT) --seconds 2
	@echo "Exported to $(DEMO_OUT); read $(DEMO_OUT)/report.md"

test: $(VENV)/installed lint
	$(BIN)/pytest --numprocesses 2 --dist worksteal

test-all: $(VENV)/installed lint
	$(BIN)/pytest --numprocesses 2 --dist worksteal --slow

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p build/as-installed/adtp_export
	ln -sfn $(CURDIR)/adtp_export/* $(CURDIR)/calibration $(CURDIR)/plugins build/as-installed/adtp_export/
	$(BIN)/mypy

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt setuptools torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[export,cpu,openvino,rtx,kernels,train,dev]'
	touch $@

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis

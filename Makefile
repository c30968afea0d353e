# Two commands do all set-up: `make demo` and `make test`. Both create .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_OUT := build/demo-export
RELEASE := build/release
WORKERS ?= 2
THREADS ?= 1
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"$$/\1/p' adtp_export/contract.py)

unexport PYTHONDONTWRITEBYTECODE # tests start hundreds of processes, which read compiled modules

.PHONY: demo test quick test-all triton-server deepsparse llamacpp coverage lint style types release-check clean
demo: $(VENV)/installed
	$(BIN)/adtp-export demo/student --trt --openvino --out $(DEMO_OUT) --force
	$(BIN)/adtp-run $(DEMO_OUT) --kept \
		--text "The hotel was near the station, the room was small, and the breakfast was truly wonderful."
	$(BIN)/adtp-bench $(DEMO_OUT) --seconds 2
	@echo "Read the report:       $(DEMO_OUT)/report.md, or report.html in a browser"
	@echo "Export your own model: $(BIN)/adtp-export MODEL_DIR"
	@echo "Serve it:              adtp_export.load(\"$(DEMO_OUT)\") in Python; docs/deployment.md has more"

# Types are checked while tests are collected and the first of them run.
test: $(VENV)/installed style
	$(MAKE) --no-print-directory --jobs=2 types quick

quick: $(VENV)/installed
	OMP_NUM_THREADS=$(THREADS) $(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal

test-all: $(VENV)/installed lint
	$(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal --slow

# Triton Inference Server without a container, for its tests and benchmarks. This one, 24.10, reads arrays of NumPy 1 alone.
TRITON := build/triton
TRITON_WHEEL := nvidia-pytriton==0.7.0
triton-server: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[triton-test]'
	rm -rf $(TRITON)
	mkdir -p $(TRITON)/backends
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --dest $(TRITON) $(TRITON_WHEEL)
	$(BIN)/python -m zipfile -e $(TRITON)/*.whl $(TRITON)
	rm $(TRITON)/*.whl
	cp -r $(TRITON)/pytriton/tritonserver/backends/python $(TRITON)/backends/
	cp $(TRITON)/pytriton/tritonserver/python_backend_stubs/$$($(BIN)/python -c \
		'import sys; print("%d.%d" % sys.version_info[:2])')/triton_python_backend_stub $(TRITON)/backends/python/
	chmod +x $(TRITON)/pytriton/tritonserver/bin/tritonserver $(TRITON)/backends/python/triton_python_backend_stub
	$(BIN)/python -m venv $(TRITON)/venv
	grep -v '^numpy==' constraints.txt > $(TRITON)/constraints.txt
	$(TRITON)/venv/bin/pip install --quiet --disable-pip-version-check -c $(TRITON)/constraints.txt -e '.[cpu]' 'numpy<2'
	@echo "A server is in $(TRITON): pytest tests/integrations/triton --slow"

# DeepSparse for its benchmark: its last version wants older packages than this project, so it has an environment of its own.
deepsparse:
	$(PYTHON) -m venv build/deepsparse
	build/deepsparse/bin/pip install --quiet --disable-pip-version-check deepsparse==1.8.0
	@echo "DeepSparse is in build/deepsparse: $(BIN)/python -m benchmarks.cpu.sparse_weights"

# llama.cpp as a peer of adtp-bench, from npm: that build has a library for each generation of processors, as wheels have not.
llamacpp: $(VENV)/installed
	npm install --silent --no-audit --no-fund --prefix build/llamacpp @node-llama-cpp/linux-$$(node -p process.arch)@3.22.1
	@echo "llama.cpp is in build/llamacpp: $(BIN)/adtp-bench --shape bert-base --peers llamacpp-bf16"

coverage: $(VENV)/installed
	mkdir -p build
	$(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal --cov --cov-report= --cov-report=json:build/coverage.json
	$(BIN)/python tests/coverage_by_room.py build/coverage.json $(RAISE)

lint: style types

style: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	mkdir -p build/as-installed/adtp_export
	ln -sfn $(CURDIR)/adtp_export/* $(CURDIR)/calibration $(CURDIR)/plugins build/as-installed/adtp_export/
	$(BIN)/mypy

# What is published, as its users get it. A tag is vVERSION, and then the changelog begins with VERSION (a date).
release-check: $(VENV)/installed
	@test -z "$$(git status --porcelain)" || { git status --short; echo "release-check: commit these changes first"; exit 1; }
	@tag="$$(git tag --points-at HEAD)"; heading="$$(grep -m1 '^## ' CHANGELOG.md)"; case "$$tag:$$heading" in \
		":## $(VERSION) ("*|"v$(VERSION):## $(VERSION) ("[0-9]*) ;; \
		*) echo "release-check: version $(VERSION), tag '$$tag' and '$$heading' of CHANGELOG.md do not agree"; exit 1;; esac
	$(MAKE) lint
	rm -rf $(RELEASE)
	$(PYTHON) -m venv $(RELEASE)/tools
	$(RELEASE)/tools/bin/pip install --quiet --disable-pip-version-check -c constraints.txt build twine
	$(RELEASE)/tools/bin/python -m build --outdir $(RELEASE)/dist
	$(RELEASE)/tools/bin/twine check --strict $(RELEASE)/dist/*
	$(PYTHON) -m venv $(RELEASE)/venv
	wheel=$$(echo $(RELEASE)/dist/*.whl) && $(RELEASE)/venv/bin/pip install --quiet --disable-pip-version-check \
		-c constraints.txt "$$wheel[export,cpu,openvino,rtx]"
	$(RELEASE)/venv/bin/adtp-export demo/student --trt --openvino --out $(RELEASE)/demo-export
	$(RELEASE)/venv/bin/adtp-run $(RELEASE)/demo-export --kept --text "a wonderful film"
	$(RELEASE)/venv/bin/adtp-bench $(RELEASE)/demo-export --seconds 1
	$(BIN)/pytest --slow -m slow
	$(MAKE) coverage
	@echo "adtp-export $(VERSION) can be released: $(RELEASE)/dist"

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt setuptools torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[export,cpu,openvino,rtx,kernels,peers,strings,images,ray,train,dev]'
	touch $@

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Every target makes the environment it needs on first use. PYTHON may be any Python >= 3.10.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

CORE := .venv/.core
# The distribution's former name: an environment that has both finds each plug-in twice.
FORGET := $(BIN)/python -m pip uninstall --quiet --yes inferscope 2>/dev/null

.PHONY: install install-core demo test thorough quick check coverage test-engines test-docs bench lab dashboards docs reference sbom clean

install: $(READY)

# Both install into the same environment, and neither removes anything: the larger one completes it.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	@$(FORGET)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[all,dev]"
	touch $(CORE) $(READY)

# What the pure rooms and their tests need: no torch, a few seconds of downloads.
install-core: $(CORE)

$(CORE): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	@$(FORGET)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[core]"
	touch $(CORE)

demo: $(READY)
	$(BIN)/inferscope demo $(ARGS)

# What is marked `thorough` takes seconds each and is left to `make thorough` and CI.
MARKS := not slow and not thorough

# Each worker, and each of a hundred processes that tests start, would compile our modules anew.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(READY)
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "$(MARKS)" $(ARGS)

# All tests but those of other engines, with all examples of the property tests: `make test` draws a third.
thorough: export TEST_THOROUGH := 1
thorough: MARKS := not slow
thorough: test

# The tests that need no torch and start no process, in half a minute: tests/pure.py holds them to it.
PURE := $(addprefix tests/,attribution cost metrics_page probe ring slo \
	test_calibration.py test_records.py)
quick: $(CORE)
	$(BIN)/python -m pytest -p tests.pure -n 2 --dist worksteal $(ARGS) $(PURE)

# BASE is the commit that added lines are counted from: the merge base with origin/main without it.
check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.word_check $(BASE)

# The suite's line coverage, of this process and not of those that tests start.
coverage: export COVERAGE_FILE := out/.coverage
coverage: $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt pytest-cov
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "$(MARKS)" \
		--cov=inferscope --cov-report=term --cov-report=html:out/coverage $(ARGS)

# INFERSCOPE_PEERS names a folder of environments of other engines and clients, .engines without it;
# what is not there is skipped, with the reason. What was seen to work goes into the table of the docs.
# With VERSIONS="vllm@0.30.0 sgl@0.5.21 tf@5.16.1" one server of each of these is tested, and no more;
# INFERSCOPE_SETUP names the program that builds what is missing: PROGRAM FOLDER vllm@0.30.0.
test-engines: export INFERSCOPE_CONFORMANCE := docs/conformance.md
test-engines: $(READY)
	$(if $(VERSIONS),INFERSCOPE_VERSIONS="$(VERSIONS)") $(BIN)/python -m pytest -m slow \
		$(if $(VERSIONS),tests/engines_real/test_each_version.py) $(ARGS)

bench: $(READY)
	$(BIN)/python benchmarks/probe_cost.py
	$(BIN)/python benchmarks/collector_speed.py
	$(BIN)/python benchmarks/counters_speed.py
	$(BIN)/python benchmarks/screen_cost.py
	$(BIN)/python benchmarks/otlp_cost.py
	$(BIN)/python benchmarks/scrape_cost.py
	$(BIN)/python benchmarks/parquet_cost.py
	$(BIN)/python benchmarks/fleet_speed.py

# The lab's curves, figures and comparisons, or some of them: make lab LAB="measure plot". llama-cpp-python needs ARGS="--gguf FILE".
LAB ?= measure plot compare
lab: $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[lab]"
	$(foreach each,$(LAB),$(BIN)/python samples/lab/$(each).py $(if $(filter measure,$(each)),$(ARGS)) &&) true

dashboards: $(READY)
	$(BIN)/python -m dashboards.generate

# What --json prints, from the types of the documents, and the tables of the exporter's metrics.
reference: $(READY)
	$(BIN)/python -m docs.json_reference
	$(BIN)/python -m docs.metrics_reference

# The documentation site in out/docs. A broken link or anchor fails; it has an environment of its own.
docs: $(READY)
	$(PYTHON) -m venv out/docs-environment
	out/docs-environment/bin/python -m pip install --quiet -c constraints.txt \
		-r docs/requirements.txt -e ".[core]"
	$(BIN)/python -m docs.command_reference
	out/docs-environment/bin/sphinx-build -W --keep-going --quiet -b html docs out/docs

# What an environment holds, with versions and licences, as CycloneDX; OF is its Python. The tool has
# an environment of its own, so that it is not on the list.
OF ?= $(BIN)/python
sbom: $(READY)
	$(PYTHON) -m venv out/sbom
	out/sbom/bin/python -m pip install --quiet "cyclonedx-bom>=7,<8"
	out/sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		--output-file out/sbom.json $(OF)

# Each command of the README, docs and samples, executed; those that need what is not here, with the reason.
test-docs: $(READY)
	$(BIN)/python -m pytest -m slow -rs tests/test_documented_commands.py $(ARGS)

clean:
	rm -rf .venv .engines .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

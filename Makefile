# Every target makes the environment it needs on first use. PYTHON may be any Python >= 3.10.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: install demo test check test-engines bench dashboards sbom clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[all,dev]"
	touch $(READY)

demo: $(READY)
	$(BIN)/inferscope demo $(ARGS)

# Each worker, and each of a hundred processes that tests start, would compile our modules anew.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(READY)
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# INFERSCOPE_PEERS names a folder of environments of other engines and clients, .engines without it;
# what is not there is skipped, with the reason. What was seen to work goes into the table of the docs.
test-engines: $(READY)
	INFERSCOPE_CONFORMANCE=docs/conformance.md $(BIN)/python -m pytest -m slow $(ARGS)

bench: $(READY)
	$(BIN)/python benchmarks/probe_cost.py
	$(BIN)/python benchmarks/collector_speed.py
	$(BIN)/python benchmarks/counters_speed.py
	$(BIN)/python benchmarks/attribution_speed.py
	$(BIN)/python benchmarks/screen_cost.py
	$(BIN)/python benchmarks/otlp_cost.py
	$(BIN)/python benchmarks/scrape_cost.py
	$(BIN)/python benchmarks/parquet_cost.py
	$(BIN)/python benchmarks/fleet_speed.py

dashboards: $(READY)
	$(BIN)/python -m dashboards.generate

# What an environment holds, with versions and licences, as CycloneDX; OF is its Python. The tool has
# an environment of its own, so that it is not on the list.
OF ?= $(BIN)/python
sbom: $(READY)
	$(PYTHON) -m venv out/sbom
	out/sbom/bin/python -m pip install --quiet "cyclonedx-bom>=7,<8"
	out/sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		--output-file out/sbom.json $(OF)

clean:
	rm -rf .venv .engines .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `make demo` runs the main job, `make test` the tests, `make test-frameworks` the tests that need other frameworks,
# `make docs` makes the site, `make torture` the long checks; each sets itself up in .venv, without root.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CONSTRAINTS ?= constraints.txt

EXTRAS ?= dev

# The folder of images for the demo; drawn if none is given.
DRAWN := build/demo/images
IMAGES ?= $(DRAWN)

# The long checks that CONTRIBUTING.md lists, in the full forms that are their defaults.
ATTACKS := fail_convert kill_convert race_convert race_stage lose_power break_nodes kill_train kill_trainer hold_batches truncate_shards storm_close mutate_images damage_set change_sets off_path replay_training
TORTURES := $(ATTACKS:%=tools/chaos/%.py) tools/check_order.py

FRAMEWORKS = tests/recipes $(wildcard tests/conversion/test_dask_*.py tests/conversion/test_failed_start.py \
	tests/sets/test_storage.py tests/sets/test_catalogue.py)
PYTEST = $(BIN)/python -m pytest -n auto --dist worksteal

.PHONY: demo test test-frameworks check lint docs torture clean

demo: $(INSTALLED)
ifeq ($(IMAGES),$(DRAWN))
	$(BIN)/python tools/draw_images.py $(DRAWN) --images 2000
endif
	rm -rf build/demo/shards
	$(BIN)/python examples/demo.py "$(IMAGES)" --out build/demo/shards

test: $(INSTALLED)
	$(PYTEST) $(ARGS)

# These need Lightning, Accelerate, transformers, torchdata, SPDL, Dask, or a server of S3's protocol; `make test` skips
# the ones whose package is not there.
test-frameworks: $(VENV)/.frameworks
	$(PYTEST) $(FRAMEWORKS) $(ARGS)

$(VENV)/.frameworks: $(INSTALLED)
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e ".[frameworks]"
	touch $@

check: lint
	$(PYTEST) $$($(BIN)/python tests/support/affected.py) $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A link that leads nowhere, or a docstring that cannot be set, is an error. The site is in build/docs. All of it is made
# anew: Sphinx would not say again what is wrong with a page that has not changed since.
docs: $(VENV)/.docs
	rm -rf build/docs
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -c docs . build/docs

$(VENV)/.docs: $(INSTALLED)
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e ".[docs]"
	touch $@

# All of them run, also when one has failed.
torture: $(INSTALLED)
	@failed=; for check in $(TORTURES); do \
	    echo "== $$check"; $(BIN)/python $$check || failed="$$failed $$check"; \
	done; test -z "$$failed" || { echo "FAILED:$$failed"; exit 1; }

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e ".[$(EXTRAS)]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache

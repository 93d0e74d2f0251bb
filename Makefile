# `make demo` runs the main job, `make test` the tests; both set themselves up in .venv, without root.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# The folder of images for the demo; drawn if none is given.
DRAWN := build/demo/images
IMAGES ?= $(DRAWN)

.PHONY: demo test lint clean

demo: $(INSTALLED)
ifeq ($(IMAGES),$(DRAWN))
	$(BIN)/python tools/draw_images.py $(DRAWN)
endif
	rm -rf build/demo/shards
	$(BIN)/shardio demo "$(IMAGES)" --out build/demo/shards

test: $(INSTALLED)
	$(BIN)/python -m pytest $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache

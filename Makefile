# Everything here is a command that can be typed as it stands. Variables: make demo MINUTES=5 WORKLOAD=d64_f16_causal

# A ready environment's interpreter takes the place of .venv, and nothing is installed: make demo PYTHON=python3
PYTHON = .venv/bin/python
# sm_80, sm_90a, cpu, ...; auto: the GPU if there is one, else the CPU.
TARGET = auto
# A preset such as d128_f16_causal or a name such as fwd_d192_dv128_f16_full; auto: what suits the target.
WORKLOAD = auto
# How long the demo tunes.
MINUTES = 3
# Extras of pyproject.toml that .venv gets; bench adds PyTorch to compare with, examples what scripts/examples want.
EXTRAS = test,cuda

comma = ,
READY = $(if $(filter .venv/bin/python,$(PYTHON)),.venv/ready-$(subst $(comma),-,$(EXTRAS)))
WHAT = --target $(TARGET) --workload $(WORKLOAD)

# Of all tests these alone: files, and options of pytest.
ONLY =
OF_EXAMPLES = tests/test_examples.py tests/test_training.py tests/test_relax_examples.py tests/test_bench.py -m examples

.PHONY: help demo setup test test-quick test-examples test-gpu clean

help: ## this text
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(READY) ## tune for MINUTES on what is there, export, run without a compiler, and compare: ends in a table
	mkdir -p build/demo
	$(PYTHON) -m scripts.tune $(WHAT) --logs build/demo/logs --minutes $(MINUTES)
	$(PYTHON) -m scripts.export $(WHAT) --logs build/demo/logs --output build/demo/attention.so
	$(PYTHON) -m scripts.run build/demo/attention.so
	$(PYTHON) -m scripts.bench $(WHAT) --logs build/demo/logs

test: $(READY) ## all tests, by two workers; those that need a GPU are skipped without one
	$(PYTHON) -m pytest -n 2 --dist loadgroup --no-loadscope-reorder $(ONLY)

test-quick: $(READY) ## without the files that take half a minute or more
	$(PYTHON) -m pytest -m "not slow and not gpu"

# Apart from the others: where PyTorch is installed TVM imports it, and each of many processes takes twice as long to start.
test-examples: ## those that want PyTorch, JAX and CMake, which .venv gets
	$(MAKE) --no-print-directory test EXTRAS=test,cuda,examples ONLY='$(OF_EXAMPLES)'

test-gpu: $(READY) ## the tests that need a GPU, which must be there
	$(PYTHON) -m pytest -m gpu --gpu

setup: $(READY) ## the local environment .venv, which the others make when they need it

.venv/ready-%: pyproject.toml
	python3 -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	touch $@

clean: ## remove .venv and build
	rm -rf .venv build

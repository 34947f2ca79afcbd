# PageONE. `make demo` shows it working, `make test` proves that it works; both install what they need first.
# Everything that takes longer, or needs a place of its own, is a lane: `scripts/lane` names them, and `make LANE` runs one.

CARGO ?= cargo
MAKEFLAGS += --no-print-directory
LANES := $(shell scripts/lane names)

.PHONY: demo build book build-tests check test lint lint-texts lint-code lint-aarch64 test-unit test-loom test-stress stress \
    test-sabotage test-e2e test-functional test-hazards test-rates test-soak test-behaviour deb rpm clean $(LANES)

# Real guests, merged live. DEMO='--guests 8 --seconds 300' and the like are passed on.
demo: deps-demo build
	target/release/pageone demo $(DEMO)

build: deps-build
	$(CARGO) build --release --workspace

# The Debian packages: target/debian/*.deb; and with rpmbuild an RPM: target/rpm.
deb: deps-deb build
	packaging/deb.sh $(or $(CARGO_TARGET_DIR),target)/release

rpm: build
	@if command -v rpmbuild > /dev/null; then packaging/rpm.sh; else echo 'rpm: SKIPPED: there is no rpmbuild (Debian: package rpm)'; fi

# docs/ as a book: target/book.
book: deps-book
	PATH="$$PATH:$${PAGEONE_CACHE:-$${XDG_CACHE_HOME:-$$HOME/.cache}/pageone}/mdbook/bin" mdbook build docs

deps-%:
	@scripts/deps.sh $*

$(LANES):
	@scripts/lane $@

# Before a commit: format, lint, and the unit tests of the crates that changed.
check:
	scripts/check.sh

# BESIDE: functional tests that look at no process but their own, so that others may run at the same time.
BESIDE = attach:: checkpoint:: snapshot::
# All that CI runs. What mostly waits runs beside what mostly computes, and that at a lower priority.
test: deps-test build-tests
	scripts/side-by-side.sh '$(MAKE) test-unit' 'nice -n 5 $(MAKE) lint-texts'
	-@scripts/deps.sh ppr
	scripts/side-by-side.sh '$(MAKE) test-functional WHICH="$(BESIDE:%=--skip %)"' '$(MAKE) test-functional WHICH="$(BESIDE)"' \
	    '$(MAKE) test-hazards && nice -n 5 $(MAKE) test-behaviour && $(MAKE) test-soak' \
	    'nice -n 15 $(MAKE) lint-code test-loom test-stress STRESS_SECONDS=40 CLIPPY_DIR=target/clippy && nice -n 5 $(MAKE) test-sabotage'
	$(MAKE) test-rates

lint: lint-texts lint-code

lint-texts:
	$(CARGO) fmt --all --check
	scripts/floors.sh
	$(CARGO) run --quiet --package house
	scripts/licences.sh

# CLIPPY_DIR: a place of its own, so that other builds need not wait.
CLIPPY_DIR ?= $(or $(CARGO_TARGET_DIR),target)
lint-code:
	$(CARGO) clippy --workspace --all-targets --target-dir $(CLIPPY_DIR) -- -D warnings

# The workspace's libraries and programs compile for aarch64. Nothing is linked; the crate ring (TLS) compiles some C, for
# which scripts/deps.sh installs a cross compiler. Without rustup and its server there is no library to check with; that is
# said, and no error.
lint-aarch64:
	@if scripts/deps.sh aarch64; then $(CARGO) clippy --workspace --target aarch64-unknown-linux-gnu -- -D warnings; \
	else echo 'lint: SKIPPED: whether the workspace compiles for aarch64'; fi

# All that the tests run. Every step selects the whole workspace: of a part of it, or without tests, cargo enables
# fewer features of the crates below, and compiles those and all above them anew. The unit tests alone may leave out e2e.
build-tests:
	$(CARGO) build --workspace --all-targets

test-unit:
	$(CARGO) test --workspace --exclude e2e

test-loom:
	RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=3 $(CARGO) test --profile loom --target-dir target/loom -p sdtree -p pageone-one -p pageone-dirty -p ppr --lib loom

# Threads that change one SD tree and check each answer, with debug assertions. STRESS_SECONDS=36000 for a night.
STRESS_SECONDS ?= 120
test-stress stress:
	SDTREE_STRESS_SECONDS=$(STRESS_SECONDS) $(CARGO) test --workspace --lib for_hours -- --ignored --nocapture

# Each guard of the agent is switched off in turn, to see that the tests notice.
test-sabotage:
	$(CARGO) test -p agent --features sabotage --target-dir target/sabotage --test sabotage --test in_flight --test taking

# Real daemons, real clients, real guests.
test-e2e: build-tests
	-@scripts/deps.sh ppr
	$(MAKE) test-functional test-hazards test-rates test-soak

# WHICH: some of the tests, as libtest takes them.
test-functional test-hazards test-rates: test-%:
	$(CARGO) test --workspace --test $* -- --test-threads=1 $(WHICH)

test-soak:
	PAGEONE_SOAK_SECONDS=120 $(CARGO) test --workspace --test soak -- --nocapture

# Programs that do to marked memory whatever they can, two minutes: two fixed seeds and one of the clock, which is printed.
test-behaviour: build-tests
	target/debug/pageone-behaviour-fuzz --seed 1,2,time --seconds 40

clean:
	$(CARGO) clean

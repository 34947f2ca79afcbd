# PageONE. `make demo` shows it working, `make test` proves that it works; both install what they need first.

CARGO ?= cargo

# The rules that scripts/floors.sh checks.
export FLOORS = hosts

.PHONY: demo build check test test-unit test-loom test-stress test-e2e test-kernels test-tsan stress fuzz fuzz-mpool soak lint clean

# Real guests, merged live. DEMO='--guests 8 --seconds 300' and the like are passed on.
demo: deps-demo build
	target/release/pageone demo $(DEMO)

build: deps-build
	$(CARGO) build --release --workspace

deps-%:
	@scripts/deps.sh $*

# Before a commit: format, lint, and the unit tests of the crates that changed.
check:
	scripts/check.sh

# All that CI runs.
test: deps-test lint test-unit test-loom test-stress test-e2e

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	scripts/floors.sh $(FLOORS)
	scripts/licences.sh

test-unit:
	$(CARGO) test --workspace --exclude e2e

test-loom:
	RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=3 $(CARGO) test --release --target-dir target/loom -p sdtree -p one -p dirty -p ppr --lib loom

# The guards are also taken out one by one, to see that the tests notice.
test-e2e:
	$(CARGO) test -p agent --features sabotage --target-dir target/sabotage
	$(CARGO) build --workspace
	-@scripts/deps.sh ppr
	$(CARGO) test -p e2e -- --test-threads=1
	PAGEONE_SOAK_SECONDS=180 $(CARGO) test -p e2e --test soak -- --nocapture

# The library-level tests inside guests of other kernels.
test-kernels: deps-test deps-kernels
	$(CARGO) build --workspace
	scripts/test-kernels.sh

# The lock-free parts under ThreadSanitizer; needs a nightly toolchain with rust-src.
test-tsan:
	scripts/tsan.sh

# The SD tree's threads against what they know, with all checks on. STRESS_SECONDS=36000 for a night.
STRESS_SECONDS ?= 120
test-stress stress:
	SDTREE_STRESS_SECONDS=$(STRESS_SECONDS) CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS=true $(CARGO) test --release --target-dir target/stress -p sdtree --lib for_hours -- --ignored --nocapture

# The fuzz targets; what is found, and the corpus, is kept below fuzz/.
FUZZ_SECONDS ?= 60
fuzz: deps-fuzz
	$(CARGO) +nightly fuzz run --target-dir target/fuzz sdtree -- -max_total_time=$(FUZZ_SECONDS) -max_len=2048 -len_control=10

# Half an hour of guests under load and daemons killed; ten minutes of guests whose free pages are taken.
soak: deps-test
	$(CARGO) build --workspace
	PAGEONE_SOAK_SECONDS=1800 $(CARGO) test -p e2e --test soak -- --nocapture
	PAGEONE_SOAK_SECONDS=600 $(CARGO) test -p e2e --test ppr -- --test-threads=1 --nocapture

# The on-disk structures of mpool, and the checkpoints in a pool, each target for FUZZ_SECONDS.
fuzz-mpool: deps-fuzz
	cd crates/mpool && for target in decode records files; do \
	    $(CARGO) +nightly fuzz run $$target -- -max_total_time=$(FUZZ_SECONDS) -max_len=8192 -len_control=0 || exit 1; done
	cd crates/pageone && $(CARGO) +nightly fuzz run catalog -- -max_total_time=$(FUZZ_SECONDS)

clean:
	$(CARGO) clean

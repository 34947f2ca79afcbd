# PageONE. `make demo` shows it working, `make test` proves that it works; both install what they need first.

CARGO ?= cargo

.PHONY: demo build test test-unit test-loom test-e2e test-kernels test-tsan soak lint clean

# Real guests, merged live. DEMO='--guests 8 --seconds 300' and the like are passed on.
demo: deps-demo build
	target/release/pageone demo $(DEMO)

build: deps-build
	$(CARGO) build --release --workspace

deps-%:
	@scripts/deps.sh $*

# All that CI runs.
test: deps-test lint test-unit test-loom test-e2e

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	scripts/licences.sh

test-unit:
	$(CARGO) test --workspace --exclude e2e

test-loom:
	RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=3 $(CARGO) test --release --target-dir target/loom -p sdtree --lib loom

# The guards are also taken out one by one, to see that the tests notice.
test-e2e:
	$(CARGO) test -p agent --features sabotage --target-dir target/sabotage
	$(CARGO) build --workspace
	$(CARGO) test -p e2e -- --test-threads=1
	PAGEONE_SOAK_SECONDS=180 $(CARGO) test -p e2e --test soak -- --nocapture

# The library-level tests inside guests of other kernels.
test-kernels: deps-test deps-kernels
	$(CARGO) build --workspace
	scripts/test-kernels.sh

# The lock-free parts under ThreadSanitizer; needs a nightly toolchain with rust-src.
test-tsan:
	scripts/tsan.sh

# Half an hour of guests under load and daemons killed.
soak: deps-test
	$(CARGO) build --workspace
	PAGEONE_SOAK_SECONDS=1800 $(CARGO) test -p e2e --test soak -- --nocapture

clean:
	$(CARGO) clean

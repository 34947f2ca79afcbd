# PageONE. `make demo` shows it working, `make test` proves that it works; both install what they need first.

CARGO ?= cargo
MAKEFLAGS += --no-print-directory

# The rules that scripts/floors.sh checks: all of them.
export FLOORS = imports modules widths sentences files hosts

.PHONY: demo build book build-tests check test lint lint-aarch64 test-unit test-loom test-stress test-sabotage test-e2e test-functional \
    test-hazards test-rates test-soak test-behaviour test-hostile test-kernels test-pageonefs test-pageonefs-debug \
    fuzz-pageonefs soak-pageonefs lint-pageonefs test-pageonefs-users bench-pageonefs bench-module test-pool-medium \
    test-pool-crashes test-kvm test-kvm-runs test-module test-libvirt bench-libvirt bench-snapshots test-selinux debug-kernel test-debug-kernel \
    test-packages test-upgrade test-attach test-pausing pictures deb rpm test-tsan stress fuzz fuzz-behaviour fuzz-sabotage soak soak-snapshots clean

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
book:
	command -v mdbook > /dev/null || $(CARGO) install --locked mdbook@0.4.52
	mdbook build docs

deps-%:
	@scripts/deps.sh $*

# Before a commit: format, lint, and the unit tests of the crates that changed.
check:
	scripts/check.sh

# BESIDE: functional tests that look at no process but their own, so that others may run at the same time.
BESIDE = attach:: checkpoint:: snapshot::
# All that CI runs. Steps that mostly wait run beside steps that mostly compute; these run at a lower priority.
test: deps-test build-tests
	scripts/side-by-side.sh '$(MAKE) test-unit' 'nice -n 5 $(MAKE) lint'
	-@scripts/deps.sh ppr
	scripts/side-by-side.sh '$(MAKE) test-functional WHICH="$(BESIDE:%=--skip %)"' \
	    '$(MAKE) test-hazards && $(MAKE) test-functional WHICH="$(BESIDE)" && nice -n 5 $(MAKE) test-behaviour'
	$(MAKE) test-rates
	scripts/side-by-side.sh '$(MAKE) test-soak' 'nice -n 5 $(MAKE) test-loom test-stress test-sabotage STRESS_SECONDS=40'

# clippy comes last: it keeps other builds waiting, and beside it the unit tests must have begun.
lint:
	$(CARGO) fmt --all --check
	scripts/floors.sh $(FLOORS)
	$(CARGO) run --quiet --package house
	scripts/licences.sh
	$(CARGO) clippy --workspace --all-targets -- -D warnings

# The workspace's libraries and programs compile for aarch64. No cross compiler is needed: nothing is linked, and no crate
# here has C code. Without rustup and its server there is no library to check with; that is said, and no error.
AARCH64 = aarch64-unknown-linux-gnu
lint-aarch64:
	@if scripts/deps.sh aarch64; then $(CARGO) clippy --workspace --target $(AARCH64) -- -D warnings; \
	else echo 'lint: SKIPPED: whether the workspace compiles for aarch64'; fi

# All that the tests run. Every step selects the whole workspace: of a part of it, or without tests, cargo enables
# fewer features of the crates below, and compiles those and all above them anew. The unit tests alone may leave out e2e.
build-tests:
	$(CARGO) build --workspace --all-targets

test-unit:
	$(CARGO) test --workspace --exclude e2e

test-loom:
	RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=3 $(CARGO) test --profile loom --target-dir target/loom -p sdtree -p one -p dirty -p ppr --lib loom

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
BEHAVIOUR = target/debug/pageone-behaviour-fuzz
test-behaviour: build-tests
	$(BEHAVIOUR) --seed 1,2,time --seconds 40

# Ten minutes of a client that does nothing but attack, while another user's memory is merged; and what each of its
# attacks costs (HOSTILE_ATTACKS names some, HOSTILE_SEED repeats their order).
HOSTILE_SECONDS ?= 600
HOSTILE_ATTACKS ?= all
test-hostile: deps-test build-tests
	HOSTILE_SECONDS=$(HOSTILE_SECONDS) HOSTILE_ATTACKS=$(HOSTILE_ATTACKS) $(CARGO) test --workspace --test hazards hostile -- --test-threads=1 --nocapture

# The library-level tests inside guests of other kernels.
test-kernels: deps-test deps-kernels
	$(CARGO) build --workspace
	scripts/test-kernels.sh

# The host's file system, host/linux/pageonefs, in guests of Debian's 6.1 and 6.12; and compared with KSM.
test-pageonefs: deps-test deps-ppr
	scripts/test-pageonefs.sh

bench-pageonefs: deps-test deps-ppr
	scripts/bench-pageonefs.sh

# The same in guests whose kernels check themselves, with failing allocations; KASAN=kasan: they check every access, too.
test-pageonefs-debug: deps-test deps-debug-kernel
	scripts/test-pageonefs-debug.sh '$(SERIES)' $(KASAN)

# The fuzzer on files of it while pages merge, for FUZZ_SECONDS; and rounds of that with mounts and the
# module that come and go, for SOAK_SECONDS. SERIES=6.1: on that kernel.
fuzz-pageonefs: deps-test deps-debug-kernel
	FUZZ_SECONDS=$(if $(filter file,$(origin FUZZ_SECONDS)),3600,$(FUZZ_SECONDS)) scripts/fuzz-pageonefs.sh $(or $(SERIES),6.12) $(KASAN)

soak-pageonefs: deps-test deps-debug-kernel
	scripts/soak-pageonefs.sh $(or $(SERIES),6.12) $(KASAN)

# Guests under KVM whose RAM lies in it, with virtiofsd and a vhost-user disk, in an emulated host.
test-pageonefs-users: deps-test deps-module
	scripts/test-pageonefs-users.sh

# checkpatch.pl and sparse.
lint-pageonefs:
	scripts/lint-pageonefs.sh

# From nothing to merged guests under libvirt, in a container: what the guide's three commands take. RELEASE: trixie, too.
RELEASE ?= bookworm
bench-libvirt: deps-test deps-libvirt build
	scripts/bench-libvirt.sh $(RELEASE)

# How long a guest stands while it is stored, how soon clones answer and what they take, beside other ways; 25 GiB of disk.
bench-snapshots: deps-test deps-ppr build
	$(CARGO) test --release -p e2e --test functional snapshot_figures -- --ignored --nocapture --test-threads=1

# The packages in a fresh root of Debian 12: installed, upgraded, downgraded, removed, purged. PROGRAMS: what is packed.
PROGRAMS ?= $(or $(CARGO_TARGET_DIR),target)/debug
test-packages: deps-test deps-packages
	$(CARGO) build --workspace
	scripts/test-packages.sh $(PROGRAMS)

# The alert rules for Prometheus, with series that raise each.
test-alerts: deps-alerts
	scripts/test-alerts.sh

# The pictures of the documents: guests are booted, and screens and a report of them drawn.
pictures: deps-test build
	scripts/pictures.sh $(or $(CARGO_TARGET_DIR),target)/release

# 1,000 rounds of attach and detach, on a busy program and on a guest. ATTACH_ROUNDS: as many.
ATTACH_ROUNDS ?= 1000
test-attach: deps-test build-tests
	PAGEONE_ATTACH_ROUNDS=$(ATTACH_ROUNDS) $(CARGO) test --workspace --test functional many_rounds_of_attach -- --test-threads=1 --nocapture

# 20 rounds of unplugging and plugging the device of free pages, in guests under load. PLUG_ROUNDS: as many.
PLUG_ROUNDS ?= 20
test-pausing: deps-test deps-ppr build-tests
	PAGEONE_PLUG_ROUNDS=$(PLUG_ROUNDS) $(CARGO) test --workspace --test functional comes_and_goes -- --test-threads=1 --nocapture

# The daemon exchanged under running guests for that of the build before, and back. BEFORE: its commit, instead of the last one
# with an earlier version of the protocol.
test-upgrade: deps-test
	$(CARGO) build --workspace
	scripts/test-upgrade.sh

# A pool on devices that fail, in a guest: every state that a power failure leaves, under ext4, XFS and btrfs. MEDIUM='seed=2
# steps=200' and the like are passed on.
test-pool-medium: deps-test deps-medium
	$(CARGO) build -p e2e --bin pageone-pool-medium
	scripts/test-pool-medium.sh $(or $(CARGO_TARGET_DIR),target)/debug $(MEDIUM)

# A pool on a simulated medium on which several things go wrong: 100,000 seeds. MPOOL_SEED repeats one.
MPOOL_CRASHES ?= 100000
test-pool-crashes:
	MPOOL_CRASHES=$(MPOOL_CRASHES) $(CARGO) test --release -p mpool --lib many_random_crashes

# Tests on KVM guests: here where a guest boots with KVM, else in an emulated host.
test-kvm: deps-test deps-kernels deps-kvm-host
	$(CARGO) build --workspace
	scripts/test-kvm.sh

# 120 guests on KVM, with merging, without and under KSM: none may die.
KVM_RUNS = pageone=5 nothing=5 ksm=2
test-kvm-runs: deps-test deps-kernels deps-kvm-host
	$(CARGO) build --workspace
	PAGEONE_KVM_RUNS='$(KVM_RUNS)' scripts/test-kvm.sh

# The daemon with the host's module, in an emulated host with KVM: guests whose RAM lies in pageonefs.
test-module: deps-test deps-module deps-ppr
	$(CARGO) build --workspace
	scripts/test-module.sh

# What such guests get done, beside guests under nothing and under KSM. BENCH_MODULE: options of
# `pageone-bench module`; HUGE=: without huge pages in the mount.
HUGE ?= advise
bench-module: deps-test deps-module deps-ppr build
	HUGE='$(HUGE)' scripts/bench-module.sh $(BENCH_MODULE)

# Guests of libvirt, as Debian's packages have it, with AppArmor, in an emulated host: two tenants, and what libvirt does with
# guests.
LIBVIRT_RELEASES = bookworm trixie
test-libvirt: deps-test deps-deb deps-libvirt
	$(CARGO) build -p pageone -p agent -p template -p qemu-wrapper
	for release in $(LIBVIRT_RELEASES); do scripts/test-libvirt.sh $$release || exit 1; done

# The same with SELinux, enforcing: the policy module is loaded, and a guest that libvirt confines is merged.
test-selinux: deps-test deps-deb deps-selinux
	$(CARGO) build -p pageone -p agent -p template -p qemu-wrapper
	scripts/test-libvirt.sh selinux

# A kernel that checks itself, built once into the cache.
debug-kernel: deps-debug-kernel
	scripts/debug-kernel.sh

# The hazards, broken memory, failed allocations and the behaviour fuzzer, in a guest of this kernel.
test-debug-kernel: deps-test debug-kernel
	$(CARGO) build --workspace
	scripts/test-debug-kernel.sh

# The lock-free parts under ThreadSanitizer; needs a nightly toolchain with rust-src.
test-tsan:
	scripts/tsan.sh

# Threads that change one SD tree and check each answer, with debug assertions. STRESS_SECONDS=36000 for a night.
STRESS_SECONDS ?= 120
test-stress stress:
	SDTREE_STRESS_SECONDS=$(STRESS_SECONDS) $(CARGO) test --workspace --lib for_hours -- --ignored --nocapture

# The fuzz targets, each for FUZZ_SECONDS; FUZZ names some of them. Findings and corpora are kept below fuzz/.
FUZZ_SECONDS ?= 60
FUZZ ?= sdtree decode records files catalog recording
fuzz: deps-fuzz $(FUZZ:%=fuzz-%)

fuzz-sdtree: FUZZ_OPTIONS = -max_len=2048 -len_control=10
fuzz-decode fuzz-records fuzz-files fuzz-recording: FUZZ_OPTIONS = -max_len=8192 -len_control=0
fuzz-%:
	$(CARGO) +nightly fuzz run --target-dir target/fuzz $* -- -max_total_time=$(FUZZ_SECONDS) $(FUZZ_OPTIONS)

# The same programs, FUZZ_SECONDS for a seed of the clock or SEED; an hour if nothing is said.
SEED ?= time
fuzz-behaviour: FUZZ_SECONDS := $(if $(filter file,$(origin FUZZ_SECONDS)),3600,$(FUZZ_SECONDS))
fuzz-behaviour: deps-test build-tests
	$(BEHAVIOUR) --seed $(SEED) --seconds $(FUZZ_SECONDS)

# The behaviour fuzzer must find each guard that is switched off.
fuzz-sabotage: deps-test
	$(CARGO) build --target-dir target/sabotage -p pageone -p agent -p e2e --features agent/sabotage
	scripts/fuzz-sabotage.sh target/sabotage/debug/pageone-behaviour-fuzz

# Half an hour of guests under load while daemons are killed; ten minutes of guests whose free pages are recycled.
soak: deps-test build-tests
	PAGEONE_SOAK_SECONDS=1800 $(CARGO) test --workspace --test soak -- --nocapture
	PAGEONE_SOAK_SECONDS=600 $(CARGO) test --workspace --test functional recycling -- --test-threads=1 --nocapture

# A source and eight clones for half an hour, while page servers and daemons are killed. SNAPSHOT_SECONDS: as many.
SNAPSHOT_SECONDS ?= 1800
soak-snapshots: deps-test build-tests
	PAGEONE_SOAK_SECONDS=$(SNAPSHOT_SECONDS) $(CARGO) test --workspace --test functional a_source_and_eight_clones -- --ignored --nocapture

clean:
	$(CARGO) clean

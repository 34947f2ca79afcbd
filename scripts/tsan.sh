#!/bin/bash
# The lock-free parts under ThreadSanitizer. Needs a nightly toolchain with rust-src, since the standard library has to be
# built with it too: rustup toolchain install nightly --component rust-src
set -euo pipefail
cd "$(dirname "$0")/.."
source=$(rustc +nightly --print sysroot 2>/dev/null || true)/lib/rustlib/src/rust/library/Cargo.lock
if [ ! -e "$source" ]; then
    echo 'SKIPPED: no nightly toolchain with rust-src; rustup toolchain install nightly --component rust-src'
    exit 0
fi
export RUSTFLAGS='-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer'
exec cargo +nightly test -Zbuild-std --target x86_64-unknown-linux-gnu --target-dir target/tsan -p sdtree -p one -p dirty --lib

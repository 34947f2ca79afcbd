#!/bin/bash
# The lock-free parts under ThreadSanitizer. Needs a nightly toolchain: rustup toolchain install nightly
set -euo pipefail
cd "$(dirname "$0")/.."
cargo +nightly --version >/dev/null 2>&1 || { echo 'SKIPPED: no nightly toolchain; rustup toolchain install nightly'; exit 0; }
export RUSTFLAGS='-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer'
exec cargo +nightly test --release --target x86_64-unknown-linux-gnu --target-dir target/tsan -p sdtree --lib stress

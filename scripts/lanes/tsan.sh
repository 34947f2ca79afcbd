#!/bin/bash
# The lock-free parts, the pool and the index of checkpoints under ThreadSanitizer. Needs a nightly toolchain: rustup toolchain
# install nightly. With its component rust-src the standard library is built with it too; without, what that library does with
# memory of its own is not seen.
set -euo pipefail
cd "$(dirname "$0")/../.."
if ! sysroot=$(rustc +nightly --print sysroot 2>/dev/null); then
    echo 'SKIPPED: no nightly toolchain; rustup toolchain install nightly --component rust-src'
    exit 0
fi
std=()
if [ -e "$sysroot/lib/rustlib/src/rust/library/Cargo.lock" ]; then
    std=(-Zbuild-std)
else
    echo 'the standard library is as it comes: no rust-src (rustup component add rust-src --toolchain nightly)'
    export TSAN_OPTIONS="suppressions=$PWD/scripts/tsan.suppressions"
fi
export RUSTFLAGS='-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer'
# Crashes and lost sectors need no threads: few of the former, and none of the latter.
export MPOOL_CRASHES=${MPOOL_CRASHES:-50}
exec cargo +nightly test "${std[@]}" --target x86_64-unknown-linux-gnu --target-dir target/tsan \
    -p sdtree -p pageone-one -p pageone-dirty -p mpool -p checkpoint --lib --no-fail-fast -- --skip tests::sectors

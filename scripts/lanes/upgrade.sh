#!/bin/sh
# The daemon is exchanged under running guests for that of the build before, and back, with agents of both builds.
# BEFORE: the commit of the build before; if unset, the last one with an earlier version of the protocol.
set -eu
cd "$(dirname "$0")/../.."

version=$(sed -n 's/^pub const VERSION: u16 = \([0-9]*\);$/\1/p' crates/wire/src/version.rs)
if [ -z "${BEFORE:-}" ]; then
    # Where it is not committed yet: the last commit.
    changed=$(git log -1 --format=%H -S"pub const VERSION: u16 = $version;" -- crates/wire/src)
    BEFORE=${changed:+$changed^}
fi
before=$(git rev-parse --verify --quiet "${BEFORE:-HEAD}^{commit}") || {
    echo "there is no commit ${BEFORE:-HEAD} here: fetch more history (git fetch --unshallow), or set BEFORE" >&2
    exit 1
}

target=$(realpath "${CARGO_TARGET_DIR:-target}")
builds=$target/before
if [ ! -e "$builds/$before/pageone" ]; then
    tree=$(mktemp -d)
    trap 'git worktree remove --force "$tree"' EXIT
    git worktree add --quiet --detach "$tree" "$before"
    (cd "$tree" && CARGO_TARGET_DIR=$builds cargo build -p pageone -p agent)
    mkdir -p "$builds/$before"
    cp "$builds/debug/libpageone_agent.so" "$builds/debug/pageone" "$builds/$before"
fi
echo "the build before: $(git log -1 --format='%h %s' "$before")"
PAGEONE_BEFORE=$builds/$before cargo test -p e2e --test functional upgrade -- --ignored --nocapture

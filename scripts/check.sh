#!/bin/bash
# The quick check before a commit: format, lint, and the unit tests of the crates that changed since the branch left
# main, committed or not. Where nothing changed, or what all crates share did, all are tested.
#
#   scripts/check.sh [CRATE...]     tests these crates
set -euo pipefail
cd "$(dirname "$0")/.."

cargo fmt --all --check
cargo clippy --workspace --all-targets -- -D warnings
scripts/floors.sh ${FLOORS:-}

crates=("$@")
if [ $# -eq 0 ]; then
    base=$(git merge-base HEAD main 2>/dev/null || git merge-base HEAD origin/main 2>/dev/null || echo HEAD)
    changed=$({ git diff --name-only "$base"; git ls-files --others --exclude-standard; } | sort -u)
    while read -r directory; do
        # Gone, or the end-to-end tests, which `make test-e2e` runs.
        if [ ! -e "$directory/Cargo.toml" ] || [ "$directory" = tests ]; then continue; fi
        crates+=("$(sed -n 's/^name = "\(.*\)"/\1/p' "$directory/Cargo.toml" | head -n 1)")
    done < <(sed -n 's#^\(crates/[^/]*\|bench/[^/]*\|tests\)/.*#\1#p' <<< "$changed" | sort -u)
    if grep -qE '^Cargo\.(toml|lock)$' <<< "$changed"; then crates=(); fi
fi

if [ ${#crates[@]} -eq 0 ]; then
    exec cargo test --quiet --workspace --exclude e2e
fi
echo "check: unit tests of ${crates[*]}"
exec cargo test --quiet "${crates[@]/#/--package=}"

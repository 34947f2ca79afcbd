#!/bin/bash
# Switches guards of the agent off, one after the other: the behaviour fuzzer must find each. It needs a build with the
# agent's feature `sabotage` (`make fuzz-sabotage`).
#
#   scripts/lanes/fuzz-sabotage.sh PROGRAM [GUARD]...      FUZZ_SECONDS: for each guard [default: 120]
#
# Exit: 0 all were found; 1 some were not, and they are named.
set -uo pipefail
program=$1
shift
[ $# -gt 0 ] || set -- no-protect no-dontneed-guard no-mremap-unmerge no-pin-check no-fork-count no-sticky-advice
missed=()
for guard in "$@"; do
    begin=$SECONDS
    # Pages that were never merged are compared again when nobody reaches them: only copies need writers to wait. They
    # merge often where no device has to be waited for.
    case $guard in
        no-protect) more=(--direct-io 0 --only mergeable,poke,same --without checkpoint,dirty) ;;
        *) more=() ;;
    esac
    out=$("$program" --sabotage "$guard" "${more[@]}" --seed 1,2,3 --seconds $((${FUZZ_SECONDS:-120} / 3)) 2>&1)
    if [ $? -eq 1 ]; then
        echo "$guard: found after $((SECONDS - begin)) s: $(grep -m1 -o 'FINDING.*' <<< "$out")"
    else
        missed+=("$guard")
        echo "$guard: not found"
    fi
done
[ ${#missed[@]} -eq 0 ] || { echo "fuzz-sabotage: not found: ${missed[*]}" >&2; exit 1; }

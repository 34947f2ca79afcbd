#!/bin/bash
# Runs commands side by side. The first one's output comes at once, the others' when each has ended. An interrupt ends
# all of them. Each says how long it took, by the clock and of a CPU (user and system).
#
#   scripts/side-by-side.sh COMMAND...      each COMMAND is one word, run by a shell
#
# Exit: 0 all succeeded; 1 otherwise, and the commands that failed are named.
set -uo pipefail
logs=$(mktemp -d) || exit 1
pids=()
cleanup() {
    # Each command leads a process group, so that what it started ends too.
    for pid in "${pids[@]:1}"; do kill -TERM -- "-$pid" 2>/dev/null; done
    rm -rf "$logs"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

took() {
    local cpu=$logs/cpu-$BASHPID
    # By way of a file: in a substitution the shell would be another process, which has used nothing.
    times > "$cpu"
    echo "side-by-side: $SECONDS s ($(awk 'NR == 2 { print $1, $2 }' "$cpu") of a CPU): $1"
}

set -m
pids+=(0)
for command in "${@:2}"; do
    (sh -c "$command"; code=$?; took "$command"; exit "$code") > "$logs/${#pids[@]}" 2>&1 < /dev/null &
    pids+=($!)
done
set +m

failed=0
sh -c "$1" || { failed=1; echo "side-by-side: failed: $1" >&2; }
took "$1"
for ((n = 1; n < ${#pids[@]}; n++)); do
    wait "${pids[n]}"
    code=$?
    echo "== ${*:n+1:1}"
    cat "$logs/$n"
    [ "$code" -eq 0 ] || { failed=1; echo "side-by-side: failed: ${*:n+1:1}" >&2; }
done
pids=(0)
exit "$failed"

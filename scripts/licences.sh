#!/bin/bash
# Every dependency must have a licence that goes with MIT OR Apache-2.0. Exit 1 names those that do not.
set -euo pipefail
cd "$(dirname "$0")/.."
allowed='^(MIT|Apache-2\.0|Apache-2\.0 WITH LLVM-exception|BSD-2-Clause|BSD-3-Clause|BSL-1\.0|ISC|Unicode-3\.0|Unlicense|Zlib|0BSD|CC0-1\.0)$'
bad=0
while IFS='|' read -r package licence; do
    ok=no
    # One allowed alternative is enough; of "A AND B" each part must be allowed.
    while IFS= read -r alternative; do
        all=yes
        while IFS= read -r part; do
            part=$(echo "$part" | tr -d '()' | sed 's/^ *//; s/ *$//')
            [[ $part =~ $allowed ]] || all=no
        done < <(echo "$alternative" | sed 's/ AND /\n/g')
        [ "$all" = no ] || ok=yes
    done < <(echo "$licence" | sed 's, */ *, OR ,g; s/ OR /\n/g')
    if [ "$ok" = no ]; then
        echo "licences: $package has '$licence'" >&2
        bad=1
    fi
done < <(cargo tree --workspace --edges normal,build,dev --prefix none --format '{p}|{l}' | sed 's/ (\*)//; s/ ([^|]*)|/|/' | sort -u | grep -v '^$')
[ "$bad" -eq 0 ] && echo 'licences: all dependencies are fine'
exit "$bad"

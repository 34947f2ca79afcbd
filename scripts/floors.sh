#!/bin/bash
# Checks the house rules that no compiler knows. Each error names a file, a line and the rule.
#
#   scripts/floors.sh [imports|modules|widths|sentences|files|outputs|hosts]...      all of them if none is named
#
#   imports   modules and crates use only what stands below them in the tables of this file
#   modules   files of the kernel modules include and call only what stands below them; how often the walks from a fault and
#             from pofs_merge() climb all the same is printed: at most 4 times
#   widths    comments within 100 columns in Rust and C, prose within 120 in Markdown
#   sentences at most 25 words in Markdown, which has the commands' help too, and in errors' messages
#   files     no #[path], no mod.rs, at most 500 lines
#   outputs   files are made and replaced by the crate output alone, or are no output that a person names
#   hosts     no package host and no path of one machine in the tree
#
# Exit: 0 all rules are kept; 1 some are not, and each place is named; 2 wrong usage.
set -euo pipefail
cd "$(dirname "$0")/.."
export LC_ALL=C.UTF-8
bad=0
report() { while IFS= read -r line; do echo "floors: $line" >&2; bad=1; done; }

# Floors of a crate from the top down. Modules of one line may not use each other; `crate::` paths may
# only name a module of a lower line, or the file's own.
floors() {
    case $1 in
        engine) printf '%s\n' report daemon backend/lend 'backend/agent backend/module' world access client core/recycle core/ledger store core/merge core/content 'pace users tenants' 'config sync' ;;
        agent) printf '%s\n' interface intercept service daemon recycle window runtime ;;
        mpool) printf '%s\n' fuzzing map pool objects sim scratch disk finding error ;;
        # As pageonefs.h draws them.
        pageonefs) printf '%s\n' main control super names 'file punch' 'fault merge scan lend' 'read holders' huge inode adopt frame \
            'mapping vector payer' account tmpfs guards pageonefs 'uapi versions' ;;
        ppr) printf '%s\n' main 'hooks stats' pool versions ;;
    esac
}

# The crates from the top down: each depends only on crates of lower lines.
crates() {
    printf '%s\n' 'e2e bench-system bench-structures house' 'pageone qemu-wrapper bench-common' snapshot 'engine agent template attach checkpoint estimate exporter testguest vmm monitor' \
        'control mpool track one' 'wire ppr qmp sdtree dirty governor guard guests' 'output claims' kmem
}

# FILE LINE USER USED lines in; those that do not go down the table on file descriptor 3 come out.
# Names that the table does not have (types of the crate's root, macros) pass, unknown users do not.
climbing() {
    awk -v rule="$1" '
        NR == FNR { for (i = 1; i <= NF; i++) level[$i] = NR; next }
        $3 == $4 { next }
        !($3 in level) { print $1 ":" $2 ": " $3 " has no floor: add it to scripts/floors.sh"; next }
        $4 in level && level[$4] <= level[$3] { print $1 ":" $2 ": " $3 " uses " $4 ", which is not below it (" rule ")" }
    ' /dev/fd/3 -
}

imports() {
    local crate
    for crate in engine agent mpool; do
        report < <(find "crates/$crate/src" -name '*.rs' ! -name lib.rs ! -name tests.rs ! -path '*/tests/*' -print0 | sort -z |
            xargs -0 awk -f scripts/floors.awk |
            awk -v root="crates/$crate/src/" '{ user = substr($1, length(root) + 1); sub(/\.rs$/, "", user); if (!sub(/^(core|backend)\/[^\/]*/, "&\n", user)) sub(/\//, "\n", user); sub(/\n.*/, "", user); print $1, $2, user, $3 }' |
            climbing "floors of $crate" 3< <(floors "$crate"))
    done
    report < <(for manifest in crates/*/Cargo.toml bench/*/Cargo.toml scripts/*/Cargo.toml tests/Cargo.toml; do
        awk '/^name = / && !name { gsub(/"|pageone-/, "", $3); name = $3 }
            /^\[/ { used = $0 == "[dependencies]" }
            used && match($0, /^[a-z0-9-]+/) { at = substr($0, 1, RLENGTH); sub(/^pageone-/, "", at); print FILENAME, FNR, name, at }' "$manifest"
    done | climbing 'order of the crates' 3< <(crates))
}

# calls MODULE MODE [ROOT...]: see scripts/calls.awk. Roots are named as files are.
calls() {
    awk -v mode="$2" -v roots="${*:3}" -f scripts/calls.awk /dev/fd/3 */linux/"$1"/*.[ch] 3< <(floors "$1")
}

# walk NAME FILE:FUNCTION...
walk() {
    local name=$1 reached stay down climb
    shift
    read -r reached stay down climb < <(calls pageonefs walk "${@/#/host/linux/pageonefs/}")
    echo "floors: $name reaches $reached functions of pageonefs: $stay calls stay in their file, $down go down, $climb climb"
    [ "${climb:-99}" -le 4 ] || report <<< "host/linux/pageonefs: $name climbs $climb times (at most 4)"
}

modules() {
    local module
    for module in pageonefs ppr; do
        report < <({
            grep -n '^#include "' */linux/"$module"/*.[ch] | sed -E 's|(.*/([a-z]+)\.[ch]):([0-9]+):.*"([a-z]+)\.h"|\1 \3 \2 \4|'
            calls "$module" uses
        } | climbing "floors of $module" 3< <(floors "$module"))
    done
    walk 'a fault' fault.c:{fault,map_pages,page_mkwrite}
    walk pofs_merge merge.c:pofs_merge
}

# Tables are left out. grep counts characters, some awks bytes.
widths() {
    report < <({ git ls-files '*.rs' | xargs grep -nHE '^ *//'; git ls-files '*.c' '*.h' | xargs grep -nHE '^\s*(//|/?\*)'; } |
        grep -E '^[^:]*:[0-9]*:.{101,}' | grep -vE '^[^:]*:[0-9]*: *//[/!] *\|' |
        sed -E 's/^([^:]*:[0-9]+):.*/\1: a comment beyond column 100/')
    # Tables, code and lines that a link makes long are left out.
    report < <(git ls-files '*.md' | xargs awk '
        FNR == 1 { code = 0 }
        /^ *```/ { code = !code; next }
        code || /^ *\|/ || /\]\([^)]*\)|https?:/ { next }
        { print FILENAME ":" FNR ":" $0 }' | grep -E '^[^:]*:[0-9]*:.{121,}' |
        sed -E 's/^([^:]*:[0-9]+):.*/\1: prose beyond column 120/')
}

sentences() {
    report < <(git ls-files '*.md' | grep -vxF docs/reference/errors.md | xargs awk -f scripts/sentences.awk)
    report < <(git ls-files '*.rs' | xargs awk -f scripts/messages.awk)
}

# Files that may be longer than 500 lines, with the reason.
long() {
    cat << 'LIST'
LIST
}

files() {
    report < <(git ls-files '*.rs' | xargs grep -nE '^ *#!?\[path *=' | sed 's/:#.*/: #[path] (a module stands where its name says)/')
    report < <(git ls-files '*mod.rs' | grep -E '(^|/)mod\.rs$' | grep -v '/tests/support/mod\.rs$' | sed 's/$/:1: mod.rs (x.rs stands beside the folder x)/')
    report < <(git ls-files '*.rs' '*.c' '*.h' '*.sh' | xargs awk 'FNR == 501 { print FILENAME }' |
        grep -vxF -f <(long | cut -d' ' -f1) | sed 's/$/:501: more than 500 lines/')
}

# Files that make or replace others than a person names, with what they make.
makers() {
    cat << 'LIST'
crates/engine/src/world/state_file.rs the daemon's own state
crates/guard/src/alone.rs a setting of its own process
crates/guard/src/mark.rs notes in the daemon's directory
crates/kmem/src/ksm.rs settings of the kernel
crates/mpool/src/disk/file_system.rs a pool's own files
crates/mpool/src/fuzzing.rs pools of the fuzzers
crates/mpool/src/pool/registry.rs a pool's name
crates/pageone/src/cmd/ksm/kept.rs notes in /run
crates/pageone/src/reference.rs pages of the reference, in a test
crates/snapshot/src/clone/directory.rs a clone's directory
crates/snapshot/src/names.rs names of a guest's images
crates/snapshot/src/qcow2.rs images beside a guest's, with their owner
crates/snapshot/src/reflink.rs images beside a guest's, with their owner
crates/snapshot/src/undo.rs locks in the daemon's directory
LIST
}

outputs() {
    report < <(git ls-files 'crates/*/src/*.rs' | grep -vE '/tests(\.rs|/)|^crates/(output|testguest)/' | grep -vxF -f <(makers | cut -d' ' -f1) | xargs awk '
        FNR == 1 { is_test = 0 }
        /^mod tests \{/ { is_test = 1 }
        !is_test && !/^ *\/\// && /(^|[^[:alnum:]_])File::create\(|fs::(write|copy|rename)\(|\.create(_new)?\(true\)|renameat/ {
            print FILENAME ":" FNR ": makes or replaces a file by itself: output::file does that"
        }')
}

hosts() {
    report < <(git ls-files | grep -vE '^(scripts/floors\.sh|.*Cargo\.lock)$' |
        xargs grep -nIE 'deb\.debian\.org|security\.debian\.org|archive\.ubuntu\.com|pypi\.org|(static|index)\.crates\.io|(^|[^[:alnum:]_/}])/(work|root)/' |
        sed -E 's/^([^:]*:[0-9]+):.*/\1: a package host or a path of one machine/')
}

[ $# -gt 0 ] || set -- imports modules widths sentences files outputs hosts
for rule in "$@"; do
    case $rule in
        imports | modules | widths | sentences | files | outputs | hosts) "$rule" ;;
        *) sed -n '2,/^set -e/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2 ;;
    esac
done
[ "$bad" -eq 0 ] && echo "floors: $* hold"
exit "$bad"

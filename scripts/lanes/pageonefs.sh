#!/bin/bash
# Tests the host's file system, host/linux/pageonefs, in guests of Debian's 6.1 and 6.12 cloud kernels: files, hazards, and that
# the tests notice each guard that is off. Needs no hardware virtualisation; takes some minutes for a kernel.
#
#   scripts/lanes/pageonefs.sh [KERNEL-PREFIX [TEST-NAME...]]      e.g. 6.12 lengths; all if nothing is named;
#                                                                 daemon: the daemon alone; accounts: the fuzzer of accounts
#   FULL=SECONDS                                                  how long the daemon works on a full mount (10; a release: 600)
#
# Exit: 0 all tests passed on every kernel; 1 otherwise, also when a guest crashed or hung or its kernel warned.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=scripts/lib/kernel-guest.sh
. scripts/lib/kernel-guest.sh
# shellcheck source=scripts/lib/pageonefs-guest.sh
. scripts/lib/pageonefs-guest.sh
prefix=${1:-6.}
tests=$(IFS=,; echo "${*:2}")
if [ -z "$tests" ]; then kmem_tests; fi
case $tests in '' | daemon) daemon_tests ;; esac
failed=0 ran=0
for kernel in "$cache"/kernels/"$prefix"*/vmlinuz; do
    [ -e "$kernel" ] || continue
    version=$(basename "$(dirname "$kernel")")
    case $version in 6.1.* | 6.12.*) ;; *) continue ;; esac
    ran=$((ran + 1))
    pack_guest "$version"
    case $tests in
        '') settings='ROUNDS=10 ACCOUNTS=30' ;;
        accounts) settings='TESTS=none ACCOUNTS=30' ;;
        *) settings=TESTS=$tests ;;
    esac
    boot "Linux $version" "$kernel" $((900 + ${FULL:-0})) "$settings FULL=${FULL:-10}" || failed=1
    [ -z "$tests" ] || continue
    # Each guard off: the test of its hazard must fail.
    daemon= pack_guest "$version" y
    boot "Linux $version, pages that others hold are merged" "$kernel" 300 'OPTIONS=no_pin_check=1 TESTS=held MUST_FAIL=1' || failed=1
    boot "Linux $version, a disk's writes are not seen" "$kernel" 300 'OPTIONS=no_pin_bits=1 TESTS=dirty_disk MUST_FAIL=1' || failed=1
    # On 6.1 a fault that is under way holds its page, whose bit is kept for that alone.
    boot "Linux $version, a harvest does not wait" "$kernel" 300 'OPTIONS=no_handshake=1,no_pin_bits=1,slow=300 TESTS=dirty MUST_FAIL=1' || failed=1
    boot "Linux $version, holes have no bits before their calls end" "$kernel" 300 'OPTIONS=no_cut_bits=1,slow=3000 TESTS=dirty_cuts MUST_FAIL=1' || failed=1
    boot "Linux $version, pages that are pinned are punched" "$kernel" 300 'OPTIONS=no_punch_check=1 TESTS=punch_pins MUST_FAIL=1' || failed=1
    boot "Linux $version, a huge page has one dirty bit" "$kernel" 300 'OPTIONS=no_huge_bits=1 TESTS=huge_mapped MUST_FAIL=1' || failed=1
    boot "Linux $version, huge pages are split in the midst of merges" "$kernel" 300 'OPTIONS=slow=3000 TESTS=huge_walk' || failed=1
    complains='WARNING: .*merge.c' boot "Linux $version, the next page after a huge one is another's" "$kernel" 300 'OPTIONS=no_huge_walk=1,slow=3000 TESTS=huge_walk' || failed=1
    # SKIPPED where the kernel does not write-protect such mappings.
    boot "Linux $version, a frame is mapped when its entry has gone" "$kernel" 300 'OPTIONS=no_frame_wait=1,slow=3000 TESTS=private_hammer MUST_FAIL=1' || failed=1
    complains='BUG: Bad page cache' boot "Linux $version, lent pages leave their store as others do" "$kernel" 300 'OPTIONS=no_recall=1 TESTS=lend_cut MUST_FAIL=1' || failed=1
    boot "Linux $version, a copy needs room as a new page does" "$kernel" 300 'OPTIONS=no_copy_room=1 TESTS=full_idle MUST_FAIL=1' || failed=1
    boot "Linux $version, nobody waits for pages that count twice" "$kernel" 300 'OPTIONS=no_room_wait=1 TESTS=full_holes MUST_FAIL=1' || failed=1
    boot "Linux $version, all wait while one waits for room" "$kernel" 300 'OPTIONS=no_lone_wait=1 TESTS=full_waits MUST_FAIL=1' || failed=1
    boot "Linux $version, an allocation has room at its start only" "$kernel" 300 'OPTIONS=no_range_room=1 TESTS=allocate_race MUST_FAIL=1' || failed=1
    boot "Linux $version, an allocation that ends early leaves its pages" "$kernel" 300 'OPTIONS=no_take_back=1 TESTS=allocate_ends MUST_FAIL=1' || failed=1
    boot "Linux $version, no length is committed" "$kernel" 300 'OPTIONS=no_commit=1 TESTS=commit MUST_FAIL=1' || failed=1
    boot "Linux $version, a length commits fewer pages than none" "$kernel" 300 'OPTIONS=no_length_bound=1 TESTS=commit_far MUST_FAIL=1' || failed=1
    boot "Linux $version, pages beyond the end merge" "$kernel" 300 'OPTIONS=no_end_check=1 TESTS=beyond_end MUST_FAIL=1' || failed=1
    boot "Linux $version, a file becomes private in one call" "$kernel" 300 'OPTIONS=no_plain_bound=1 TESTS=plain_pieces MUST_FAIL=1' || failed=1
    boot "Linux $version, a punch waits for a fault that sleeps" "$kernel" 300 'OPTIONS=no_bounded_wait=1 TESTS=throttled MUST_FAIL=1' || failed=1
    boot "Linux $version, a harvest waits for a task that is throttled" "$kernel" 300 'OPTIONS=no_bounded_wait=1 TESTS=throttled_writes MUST_FAIL=1' || failed=1
    boot "Linux $version, a sealed file is punched before it is refused" "$kernel" 300 'OPTIONS=no_first_check=1 TESTS=sealed MUST_FAIL=1' || failed=1
    boot "Linux $version, requests change something before they are refused" "$kernel" 300 'OPTIONS=no_first_check=1 TESTS=wrong_values MUST_FAIL=1' || failed=1
    boot "Linux $version, pages become private in the midst of faults" "$kernel" 300 'OPTIONS=slow_around=1500 TESTS=whole_pages' || failed=1
    boot "Linux $version, who merges pays" "$kernel" 300 'OPTIONS=no_payer=1 TESTS=memcg MUST_FAIL=1' || failed=1
    boot "Linux $version, the daemon pays for a store" "$kernel" 300 'OPTIONS=no_payer=1 TESTS=memcg_lent MUST_FAIL=1' || failed=1
    boot "Linux $version, a copy waits for room that others have taken" "$kernel" 300 'OPTIONS=no_sure_charge=1,slow=300 TESTS=memcg_race MUST_FAIL=1' || failed=1
    boot "Linux $version, who has left a frame pays" "$kernel" 300 'OPTIONS=no_adopt=1 TESTS=memcg_left MUST_FAIL=1' || failed=1
    boot "Linux $version, who comes to pay keeps no room" "$kernel" 300 'OPTIONS=no_reserve=1 TESTS=memcg_room MUST_FAIL=1' || failed=1
    boot "Linux $version, each harvest looks at what nobody has room for" "$kernel" 300 'OPTIONS=no_rest=1 TESTS=memcg_rest MUST_FAIL=1' || failed=1
    boot "Linux $version, what was left is looked for among all frames" "$kernel" 300 'OPTIONS=no_left_list=1 TESTS=memcg_far MUST_FAIL=1' || failed=1
    boot "Linux $version, caches are no room" "$kernel" 300 'OPTIONS=no_cache_room=1 TESTS=memcg_cache MUST_FAIL=1' || failed=1
    boot "Linux $version, who owes a frame joins none" "$kernel" 300 'OPTIONS=no_small_debt=1 TESTS=memcg_debt MUST_FAIL=1' || failed=1
    boot "Linux $version, caches that cannot be taken are room" "$kernel" 300 'OPTIONS=no_stuck_debt=1 TESTS=memcg_stuck MUST_FAIL=1' || failed=1
    boot "Linux $version, a frame takes the room that its keeper needs next" "$kernel" 300 'OPTIONS=no_real_room=1 TESTS=memcg_stuck MUST_FAIL=1' || failed=1
    boot "Linux $version, caches that cannot be taken are tried for each frame" "$kernel" 300 'OPTIONS=no_one_try=1 TESTS=memcg_stuck MUST_FAIL=1' || failed=1
    boot "Linux $version, who is above high owes" "$kernel" 300 'OPTIONS=no_high_wait=1 TESTS=memcg_high MUST_FAIL=1' || failed=1
    boot "Linux $version, groups above both keep frames where they are" "$kernel" 300 'OPTIONS=no_common_high=1 TESTS=memcg_common MUST_FAIL=1' || failed=1
    boot "Linux $version, who has left a frame owes it" "$kernel" 300 'OPTIONS=no_settled=1 TESTS=memcg_settled MUST_FAIL=1' || failed=1
    boot "Linux $version, who has no room joins what nobody pays for" "$kernel" 300 'OPTIONS=no_debt_bound=1 TESTS=memcg_debt MUST_FAIL=1' || failed=1
    boot "Linux $version, who has no room owes as much as it likes" "$kernel" 300 'OPTIONS=no_debt_bound=1 TESTS=memcg_turns MUST_FAIL=1' || failed=1
    # SKIPPED where the kernel has no version 1 for memory.
    boot "Linux $version, charges stay that version 1 may move" "$kernel" 300 'TESTS=memcg_version' || failed=1
    boot "Linux $version, charges move that version 1 may move, too" "$kernel" 300 'OPTIONS=no_version_check=1 TESTS=memcg_version MUST_FAIL=1' || failed=1
    boot "Linux $version, frames are in no figures" "$kernel" 300 'OPTIONS=no_figures=1 TESTS=figures MUST_FAIL=1' || failed=1
    boot "Linux $version, fork copies what is mapped" "$kernel" 300 'OPTIONS=no_fork_bound=1 TESTS=references MUST_FAIL=1' || failed=1
    boot "Linux $version, a frame has any number of users" "$kernel" 300 'OPTIONS=no_user_bound=1 TESTS=full MUST_FAIL=1' || failed=1
    boot "Linux $version, what others hold and may write is not dirty" "$kernel" 300 'OPTIONS=no_pin_bits=1 TESTS=dirty_held MUST_FAIL=1' || failed=1
    boot "Linux $version, a page is in its file before it is whole" "$kernel" 300 'OPTIONS=no_whole_page=1,slow=3000,slow_around=1500 TESTS=whole_pages MUST_FAIL=1' || failed=1
    boot "Linux $version, contents are not compared" "$kernel" 300 'OPTIONS=no_compare=1 TESTS=hammer MUST_FAIL=1' || failed=1
    # The fuzzer of accounts finds each of these, too.
    # That no_room_wait is off `full_holes` finds, that no_adopt is `memcg_left`, and the fuzzer does not.
    for guard in no_copy_room no_commit no_first_check no_payer no_figures no_user_bound no_fork_bound; do
        boot "Linux $version, $guard" "$kernel" 300 "OPTIONS=$guard=1 TESTS=none ACCOUNTS=60 MUST_FAIL=1" || failed=1
    done
done
[ "$ran" -gt 0 ] || fail "no kernel of 6.1 or 6.12 in $cache/kernels: 'scripts/deps.sh ppr' fetches them"
exit "$failed"

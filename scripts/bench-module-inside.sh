#!/bin/bash
# The bench of scripts/bench-module.sh, on a machine that may load the module. Its variables: BIN
# (the built programs), MODULE, HUGE, THP, WORDS.
set -uo pipefail
# What lies in this host's root cannot be written.
mount -t tmpfs none /mnt && insmod "$MODULE" && mkdir -p /mnt/pageone &&
    mount -t pageonefs -o "domain=bench,size=90%,mode=0700,uid=0${HUGE:+,huge=$HUGE}" none /mnt/pageone || exit 1
echo "$THP" > /sys/kernel/mm/transparent_hugepage/enabled
read -ra words <<< "$WORDS"
"$BIN/pageone-bench" module "${words[@]}"
code=$?
umount /mnt/pageone && rmmod pageonefs || { echo "the module does not go: something uses it still"; code=1; }
exit "$code"

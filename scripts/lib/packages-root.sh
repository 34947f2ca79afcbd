# shellcheck shell=bash
# What scripts/lanes/packages.sh and scripts/lanes/packages-dkms.sh share: a root, commands in it, and checks. Before it is sourced
# `name` is what to say results by, and `tar` the root's archive.
cache=${PAGEONE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pageone}
[ -e "$cache/$tar" ] || { echo "$name: there is no root: run 'scripts/deps.sh packages'" >&2; exit 2; }
work=$(mktemp -d /tmp/pageone-packages.XXXXXX)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
passed=0 failed=0
# holds WHAT COMMAND...: a check.
holds() {
    local what=$1
    shift
    if "$@" > "$work/said" 2>&1; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "$name: does not hold: $what"
        sed 's/^/    /' "$work/said"
    fi
}
not() { ! "$@"; }

root=$work/root
mkdir "$root" && tar -xf "$cache/$tar" -C "$root" --exclude='./dev/*'
mknod -m 666 "$root/dev/null" c 1 3
inside() { unshare --mount --pid --fork --mount-proc="$root/proc" chroot "$root" env PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 "$@"; }
# Debian's slim roots leave documents out; here they are looked at.
dpkg_inside() { inside dpkg --path-include='/usr/share/*' --force-downgrade --force-confold "$@"; }

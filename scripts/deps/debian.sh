# shellcheck shell=bash
# Sourced by scripts/deps.sh: packages of Debian that are unpacked or made into roots, and never installed here.

scratch_dir() {
    [ -z "$scratch" ] || return 0
    scratch=$(mktemp -d /tmp/pageone-deps.XXXXXX)
    # apt downloads as the user _apt where it can.
    chmod 755 "$scratch"
    if [ "$(id -u)" -eq 0 ] && id _apt >/dev/null 2>&1; then chown _apt "$scratch"; fi
}

need_debian_amd64() {
    local tool
    for tool in apt-get apt-cache dpkg-deb; do
        have "$tool" >/dev/null ||
            fail "$tool is missing, so Debian's kernels cannot be fetched: give 'pageone demo --kernel FILE'"
    done
    [ "$(dpkg --print-architecture)" = amd64 ] ||
        fail "the guests are x86-64: on $(dpkg --print-architecture) give 'pageone demo --kernel FILE'"
}

# debian_mirror: sets `mirror` to the one that apt is set to use for Debian's own packages.
debian_mirror() {
    [ -e "$keyring" ] || fail "$keyring is missing, so packages cannot be verified: install debian-archive-keyring"
    # shellcheck disable=SC2016  # apt expands these
    mirror=$(apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' 'Created-By: Packages' 2>/dev/null |
        sed -n 's/^Debian \(.*\)/\1/p' | grep -v security | head -n 1) || true
    [ -n "$mirror" ] ||
        yours "name a mirror of Debian in /etc/apt/sources.list (apt has no source of Debian's packages, so there is none to" \
            "take them from), run '${sudo_prefix}apt-get update', and run this again"
}

# Debian 12 has 6.12 in bookworm-backports. The host's own apt configuration stays as it is: lists
# and sources are private to this run. Sets `private` to apt's options for it.
private=()
backports() {
    [ ${#private[@]} -eq 0 ] || return 0
    need_debian_amd64
    scratch_dir
    debian_mirror
    mkdir -p "$scratch/lists/partial" "$scratch/archives/partial"
    if [ "$(id -u)" -eq 0 ] && id _apt >/dev/null 2>&1; then
        chown -R _apt "$scratch/lists" "$scratch/archives"
    fi
    echo "deb [signed-by=$keyring] $mirror bookworm-backports main" > "$scratch/sources.list"
    private=(
        -o "Dir::Etc::sourcelist=$scratch/sources.list" -o Dir::Etc::sourceparts=-
        -o "Dir::State::Lists=$scratch/lists" -o "Dir::Cache=$scratch"
        -o "Dir::Cache::archives=$scratch/archives" -o Acquire::Languages=none
    )
    say "reads the package list of bookworm-backports from $mirror (into a private, temporary place)"
    apt-get -qq "${private[@]}" update ||
        fail "cannot read bookworm-backports from $mirror: check the network, or that the mirror has it"
}

# shellcheck shell=bash
# Sourced by scripts/deps.sh: tools of tests, benches and packaging.

# Debian's qemu-guest-agent with its libraries, as an archive behind a guest's initramfs: $cache/guest-agent.cpio. It is
# not installed, since it would start a service. QEMU needs the same libraries, so they are here.
guest_agent() {
    local archive=$cache/guest-agent.cpio root library without='a test of clones is skipped'
    [ ! -e "$archive" ] || { say "$archive is there"; return; }
    if ! have apt-get >/dev/null || ! have dpkg-deb >/dev/null; then say "there is no apt-get here: $without"; return; fi
    scratch_dir
    root=$scratch/guest-agent
    say "fetches qemu-guest-agent and unpacks it to $archive (nothing is installed)"
    if ! (cd "$scratch" && { apt-get -qq download qemu-guest-agent || { refresh && apt-get -qq download qemu-guest-agent; }; }) ||
        ! dpkg-deb -x "$scratch"/qemu-guest-agent_*.deb "$scratch/unpacked"; then
        say "cannot fetch qemu-guest-agent: $without" && return
    fi
    mkdir -p "$root/usr/sbin" "$cache" && cp "$scratch/unpacked/usr/sbin/qemu-ga" "$root/usr/sbin/"
    if LC_ALL=C ldd "$root/usr/sbin/qemu-ga" | grep 'not found'; then say "qemu-guest-agent lacks these libraries: $without"; return; fi
    for library in $(ldd "$root/usr/sbin/qemu-ga" | grep -o '/[^ ]*'); do
        mkdir -p "$root/${library%/*}" && cp -L "$library" "$root/$library"
    done
    (cd "$root" && find . | busybox cpio -o -H newc 2>/dev/null) > "$archive.part" && mv "$archive.part" "$archive" || fail "cannot write $archive"
}

deps_deb() {
    want dpkg-dev 'finds the libraries that the packages depend on' have dpkg-shlibdeps
    want binutils 'strips the programs' have strip
    install_missing
}

deps_medium() {
    want dmsetup 'sets up devices that log what is written, and devices that fail' test -x /usr/sbin/dmsetup
    want e2fsprogs 'makes ext4 in the guest' test -x /usr/sbin/mkfs.ext4
    want xfsprogs 'makes XFS in the guest' test -x /usr/sbin/mkfs.xfs
    want btrfs-progs 'makes btrfs in the guest' test -x /usr/sbin/mkfs.btrfs
    install_missing
    deps_kvm_host
}

deps_bench() {
    want fio "mpool's sequential bench compares with it" have fio
    install_missing
    if [ -e /usr/sbin/ksmtuned ] || [ -e "$cache/ksmtuned/usr/sbin/ksmtuned" ]; then return; fi
    have apt-get >/dev/null || fail "there is no apt-get here: the benches run without ksmtuned, and say so"
    scratch_dir
    say "fetches ksmtuned and unpacks it to $cache/ksmtuned"
    (cd "$scratch" && apt-get -qq download ksmtuned) || fail "cannot download ksmtuned: run '${sudo_prefix}apt-get update'"
    mkdir -p "$cache/ksmtuned" && dpkg-deb -x "$scratch"/ksmtuned_*.deb "$cache/ksmtuned" ||
        fail "cannot unpack ksmtuned to $cache/ksmtuned"
}

deps_aarch64() {
    local target=aarch64-unknown-linux-gnu
    if [ ! -d "$(rustc --print target-libdir --target "$target")" ]; then
        have rustup >/dev/null ||
            yours "install the standard library of Rust for $target (rustup is not here, which would add it)"
        say "runs: rustup target add $target (150 MB in this toolchain)"
        rustup target add "$target" || fail "rustup could not add $target: check the network"
    fi
    want gcc-aarch64-linux-gnu 'compiles the C of the crate ring' have aarch64-linux-gnu-gcc
    want libc6-dev-arm64-cross 'has its headers' test -e /usr/aarch64-linux-gnu/include/stdint.h
    install_missing
}

# Debian's promtool, unpacked: $cache/promtool. The package would start a Prometheus here.
deps_alerts() {
    if [ -x "$cache/promtool" ]; then say "$cache/promtool is there"; return; fi
    need_debian_amd64
    scratch_dir
    say "fetches prometheus and unpacks its promtool to $cache/promtool (nothing is installed)"
    (cd "$scratch" && { apt-get -qq download prometheus || { refresh && apt-get -qq download prometheus; }; }) ||
        fail "cannot download prometheus: run '${sudo_prefix}apt-get update' and check the network"
    dpkg-deb --fsys-tarfile "$scratch"/prometheus_*.deb | tar -xO ./usr/bin/promtool > "$scratch/promtool" &&
        chmod 755 "$scratch/promtool" && mkdir -p "$cache" && mv "$scratch/promtool" "$cache/promtool" ||
        fail "cannot write $cache/promtool: is the disk full?"
}

# mdbook, compiled into the cache: $cache/mdbook/bin.
deps_book() {
    ! have mdbook >/dev/null && [ ! -x "$cache/mdbook/bin/mdbook" ] || return 0
    say "runs: cargo install mdbook, into $cache/mdbook"
    cargo install --quiet --locked --no-default-features --root "$cache/mdbook" mdbook@0.4.52 ||
        fail 'cargo could not install mdbook: check the network'
}

# Debian packages neither, and both go into the user's home directory, so the user decides.
deps_fuzz() {
    rustc +nightly --version >/dev/null 2>&1 ||
        yours "rustup toolchain install nightly    (fuzzing needs a nightly compiler's sanitizers)"
    have cargo-fuzz >/dev/null || yours "cargo install cargo-fuzz    (it drives libFuzzer)"
}

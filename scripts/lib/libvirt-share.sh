# shellcheck shell=bash
# Sourced by scripts that test in a host with libvirt: what that host sees of this machine. $work and $cache are set.

# libvirt_share SCRIPT PROGRAMS: fills $work/share with the script that runs there, guests, and packages of the programs.
libvirt_share() {
    local guest=$work/guest share=$work/share bytes=0 number=0 file size slice
    # The guests': the demo's, with 16 MiB of this machine's libraries. Each guest has the same.
    mkdir -p "$guest"/{bin,data/00,data/01,ref,modules}
    cp "$(command -v busybox)" "$guest/bin/"
    cp guest/demo/init "$guest/init"
    chmod 755 "$guest/init"
    cp "$cache"/kernels/6.1.*/modules/virtio*.ko "$guest/modules/"
    rm -f "$guest/modules/virtio_net.ko"
    for file in /usr/lib/x86_64-linux-gnu/*.so.*; do
        [ -f "$file" ] && [ ! -L "$file" ] || continue
        size=$(stat -c %s "$file")
        [ "$size" -gt 65536 ] && [ "$size" -lt 4000000 ] || continue
        cp "$file" "$guest/data/0$((number % 2))/$number"
        bytes=$((bytes + size)) number=$((number + 1))
        [ "$bytes" -lt $((16 << 20)) ] || break
    done
    for slice in 00 01; do (cd "$guest/data" && md5sum "$slice"/* > "$guest/ref/$slice"); done
    cat "$guest"/ref/0? > "$guest/ref/all"

    mkdir -p "$share/guest" "$share/packages"
    cp "$cache"/kernels/6.1.*/vmlinuz "$share/guest/"
    (cd "$guest" && find . | sort | busybox cpio -o -H newc 2>/dev/null) > "$share/guest/initrd"
    cp "$1" "$share/inside.sh"
    cp scripts/lib/libvirt-guests.sh "$share/common.sh"
    # What users install: packages, of the programs here.
    DEB_OUT=$work/debian packaging/deb.sh "$2" > "$work/deb.log" 2>&1 || { cat "$work/deb.log" >&2; exit 1; }
    cp "$work"/debian/{pageone,libpageone-agent,pageone-libvirt}_*.deb "$share/packages/"
    printf 'export %s=%q\n' STEPS "${PAGEONE_LIBVIRT_STEPS:-}" > "$share/variables"
}

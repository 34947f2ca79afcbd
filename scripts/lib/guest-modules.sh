# shellcheck shell=bash
# What scripts/lib/kvm-host.sh and scripts/lanes/pool-medium.sh share: modules of the kernel that `scripts/deps.sh kvm-host` unpacks.

# guest_modules KERNEL INTO MODULE...: puts the modules, and those that they need, into a directory. Their names are in the order
# in which they are to be loaded.
guest_modules() {
    local kernel=$1 into=$2 version module number=10
    shift 2
    version=$(ls "$kernel/lib/modules")
    for module in "$@"; do
        modprobe -d "$kernel" -S "$version" --show-depends "$module"
    done | awk '/^insmod/ && !seen[$2]++ { print $2 }' | while read -r file; do
        number=$((number + 1))
        case $file in
            *.xz) xz -dc "$file" > "$into/$number-$(basename "$file" .xz)" ;;
            *) cp "$file" "$into/$number-$(basename "$file")" ;;
        esac
    done
}

#!/bin/bash
# Builds target/rpm/*.rpm from programs that are built.
#
#   packaging/rpm.sh [DIRECTORY]      DIRECTORY: where the programs are (default: target/release)
#
# RPM_OUT: another place than target/rpm.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
programs=$(realpath "${1:-$target/release}")
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rpmbuild -bb --quiet --define "_topdir $work" --define "pageone_version $version" --define "pageone_source $PWD" \
    --define "pageone_programs $programs" packaging/pageone.spec
out=${RPM_OUT:-$target/rpm}
mkdir -p "$out"
rm -f "$out"/*.rpm
cp "$work"/RPMS/*/*.rpm "$out/"
ls "$out"/*.rpm

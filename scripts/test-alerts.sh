#!/bin/bash
# The alert rules for Prometheus: each is raised by the series that it is for, and not before. That the exporter has the metrics
# that they name is a test of crate `control`.
#
#   scripts/test-alerts.sh
#
# promtool comes from `scripts/deps.sh alerts`. Exit: 0 all is right; 1 otherwise.
set -euo pipefail
cd "$(dirname "$0")/.."
promtool=${PAGEONE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pageone}/promtool
[ -x "$promtool" ] || { echo "test-alerts: $promtool is missing: run 'scripts/deps.sh alerts'" >&2; exit 1; }
"$promtool" check rules packaging/prometheus/alerts.yml
"$promtool" test rules packaging/prometheus/alerts.test.yml

//! `metrics.md`, from the table of metrics.

use std::fmt::Write;

use control::{ALIASES, ClientState, GovernorMode, Kind, METRICS, OTHER_SAMPLES, Reason, RecyclerState, Scope, Unit};

use super::{head, wrap};

pub(super) fn page() -> String {
    let mut out = head("Metrics", "the table of metrics in `crates/control/src/table.rs`");
    let intro = "`pageone status --json` prints one JSON object. Its keys are the metrics below; beside them stand names, \
                 states and reasons. A counter only grows while the daemon runs; a gauge may grow and shrink. A page has \
                 4096 bytes. A metric that has no value at present is `null`. Its sample is what `pageone metrics` calls \
                 it, in seconds, bytes and ratios. Samples of domains have the label `sharing_domain`, too. Those of \
                 clients have `guest`, `uuid`, `pid` and `sharing_domain`.";
    let _ = writeln!(out, "\n{}", wrap(intro, "", ""));
    for scope in Scope::ALL {
        let (title, text) = about(scope);
        let _ = writeln!(out, "\n## {title}\n\n{}\n", wrap(text, "", ""));
        let _ = writeln!(out, "| metric | sample | type | unit | meaning |\n|---|---|---|---|---|");
        for metric in METRICS.iter().filter(|metric| metric.is_in(scope)) {
            let sum = if metric.is_sum_in(scope) { " (a sum)" } else { "" };
            let kind = match metric.kind {
                Kind::Counter => "counter",
                Kind::Gauge => "gauge",
            };
            let _ = writeln!(
                out,
                "| `{}` | `{}` | {kind}{sum} | {} | {} |",
                metric.name,
                metric.sample(scope),
                unit(metric.unit),
                metric.help()
            );
        }
    }
    let _ = writeln!(out, "\n## Other samples\n\n| sample | type | meaning |\n|---|---|---|");
    for (name, kind, meaning) in OTHER_SAMPLES {
        let _ = writeln!(out, "| `{name}` | {kind} | {meaning} |");
    }
    for (old, metric) in ALIASES {
        let _ = writeln!(
            out,
            "| `{old}` | gauge | An old name of the sample of `{metric}`, which goes with version 0.2. |"
        );
    }
    let states = [
        ("`state` of a client", ClientState::ALL.iter().map(|state| state.1).collect::<Vec<_>>()),
        ("`code` in a client's `why`", Reason::ALL.iter().map(|state| state.1).collect()),
        ("`state` of a recycler", RecyclerState::ALL.iter().map(|state| state.1).collect()),
        ("`mode` of the governor", GovernorMode::ALL.iter().map(|state| state.1).collect()),
    ];
    let _ = writeln!(out, "\n## States\n");
    for (what, texts) in states {
        let _ = writeln!(out, "{}", wrap(&format!("{what}: `{}`.", texts.join("`, `")), "* ", "  "));
    }
    out
}

fn about(scope: Scope) -> (&'static str, &'static str) {
    match scope {
        Scope::Host => (
            "The daemon and its host",
            "At the top of the object. A sum is over all domains or all clients, also those of other users. Beside the \
             metrics: `governor` and `domains`.",
        ),
        Scope::Governor => (
            "The governor",
            "In `governor`. A scan begins when the kernel is asked what was written, and ends when every page that was \
             due then has been looked at. Beside the metrics: `mode` and `reason`, the last decision in words.",
        ),
        Scope::Domain => (
            "A domain",
            "In each element of `domains`. A sum is over all of its clients. Beside the metrics: `name`, `paused` (why no \
             frames can be made at present, or `null`) and `clients`.",
        ),
        Scope::Client => (
            "A client",
            "In each element of a domain's `clients`. Beside the metrics: `pid`, `name` (of the program), `uid` \
             and `state`. These may be `null`: `manager` (what manages it), `guest` and `guest_name` (as the manager \
             knows them), `own_name` and `own_uuid` (by its own command line). So may `unknown` (why the guest is not known), `recycling`, `refused` (why nothing of it is \
             merged at present) and `why` (why not more is). `rule` gave its domain.",
        ),
        Scope::Recycler => (
            "A client's recycler",
            "In a client's `recycling`, if its guest marks free pages (`pageone run --ppr`). Beside the metrics: `state` \
             and `why` (why it does not recycle, or `null`).",
        ),
    }
}

fn unit(unit: Unit) -> &'static str {
    match unit {
        Unit::Seconds => "seconds",
        Unit::Microseconds => "microseconds",
        Unit::Bytes => "bytes",
        Unit::Pages => "pages",
        Unit::PagesPerSecond => "pages a second",
        Unit::BytesPerSecond => "bytes a second",
        Unit::Percent => "percent of one CPU",
        Unit::Ratio => "a part, 0 to 1",
        Unit::Count => "a number",
        Unit::Bool => "true or false",
    }
}

//! The status in the OpenMetrics text format, which Prometheus reads.
//!
//! Every metric of the table becomes a sample; names follow Prometheus' rules, so the base units
//! are seconds, bytes and ratios:
//!
//! ```text
//! pages_shared of the host            pageone_pages{state="shared"}
//!              of a domain            pageone_domain_pages{sharing_domain=…, state="shared"}
//!              of a client            pageone_client_pages{guest=…, uuid=…, pid=…, …, state=…}
//! general_profit                      pageone_general_profit_bytes
//! agent_cpu_seconds, daemon_…         pageone_cpu_seconds_total{part="agent"}
//! cpu_percent of the governor         pageone_governor_cpu_ratio
//! window_max_us of a client           pageone_client_window_max_seconds
//! ```
//!
//! [`Metric::sample`] is that rule. States, reasons and histograms have samples beside
//! ([`OTHER_SAMPLES`]); old names stay for a version ([`ALIASES`]).
//!
//! The label is `sharing_domain`, since exporters for libvirt call a guest a `domain`. At most
//! [`MOST_CLIENTS`] clients and [`MOST_DOMAINS`] domains have samples, the largest; the host's
//! samples count all, and `pageone_unlisted` says how many have none. Who is not entitled to names
//! gets the samples of the host alone ([`Rows`]).
//!
//! Sources: the OpenMetrics specification, version 1.0.0; Prometheus' text format 0.0.4 and advice
//! on names.

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use output::text::shown;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use crate::histogram::Histogram;
use crate::metrics::{Kind, Metric, Scope, Unit, Value};
use crate::status::{ClientStatus, DomainStatus, Source, Status};

/// Whose samples a text has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rows {
    /// The host's, the domains' and the clients'.
    All,
    /// The host's.
    Host,
}

/// A text format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// OpenMetrics 1.0.0.
    OpenMetrics,
    /// Prometheus' own, 0.0.4.
    Prometheus,
}

impl Format {
    /// Its media type.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// Clients that have samples of their own: those with the most memory.
pub const MOST_CLIENTS: usize = 512;
/// Domains that have samples of their own: those with the largest stores.
pub const MOST_DOMAINS: usize = 256;

/// Samples beside the table's metrics: name, type, meaning.
pub const OTHER_SAMPLES: [(&str, &str, &str); 8] = [
    ("pageone_build_info", "gauge", "Version of the exporter, and of the daemon (`version`, `daemon`)."),
    (
        "pageone_unlisted",
        "gauge",
        "Clients and domains without samples of their own (`what`): small ones beyond the limit, or all, where the \
         exporter asks for no password.",
    ),
    ("pageone_domain_paused", "gauge", "Whether no frames can be made at present."),
    ("pageone_client_refused", "gauge", "Whether nothing of the client is merged at present."),
    ("pageone_client_state", "gauge", "1 for the state of the client's connection (`state`)."),
    (
        "pageone_client_why",
        "gauge",
        "1 for the reason why not more of the client is merged (`why`); none if there is none.",
    ),
    ("pageone_writer_stall_seconds", "histogram", "How long writers can have waited in merge windows."),
    (
        "pageone_client_writer_stall_seconds",
        "histogram",
        "How long the client's writers can have waited in merge windows.",
    ),
];
/// Old names of samples, which go with version 0.2, and the metrics of clients that have them.
pub const ALIASES: [(&str, &str); 2] =
    [("pageone_client_maps", "mappings"), ("pageone_client_maps_limit", "mappings_limit")];

type Labels = Vec<(&'static str, String)>;

/// All samples of one name.
#[derive(Debug)]
struct Family {
    kind: MetricType,
    help: &'static str,
    samples: Vec<(Labels, Sampled)>,
}

#[derive(Debug)]
enum Sampled {
    Counter(f64),
    Gauge(f64),
    Histogram(Histogram),
}

/// What a metric's sample is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Its name. The encoder ends counters with `_total`.
    family: String,
    /// The label that tells it from others of its name.
    label: Option<(&'static str, &'static str)>,
    kind: Kind,
}

impl fmt::Display for Sample {
    /// `pageone_client_pages{state="merged"}`; labels that every client has are left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = if self.kind == Kind::Counter { "_total" } else { "" };
        write!(f, "{}{end}", self.family)?;
        self.label.map_or(Ok(()), |(label, value)| write!(f, "{{{label}=\"{value}\"}}"))
    }
}

impl Metric {
    /// Its sample in a scope.
    pub fn sample(&self, scope: Scope) -> Sample {
        let scope = match scope {
            Scope::Host => "",
            Scope::Governor => "governor_",
            Scope::Domain => "domain_",
            Scope::Client => "client_",
            Scope::Recycler => "recycler_",
        };
        let unit = match self.unit {
            Unit::Microseconds => "_seconds",
            Unit::Percent | Unit::Ratio => "_ratio",
            Unit::Bytes => "_bytes",
            _ => "",
        };
        let ends = ["_total", "_us", "_percent", "_bytes", "_ratio"];
        let base = ends.iter().fold(self.name, |name, end| name.strip_suffix(end).unwrap_or(name));
        let labelled = match (self.kind, self.unit) {
            (Kind::Gauge, Unit::Pages) => base.strip_prefix("pages_").map(|state| ("pages", ("state", state))),
            (Kind::Counter, _) => base.strip_suffix("_cpu_seconds").map(|part| ("cpu_seconds", ("part", part))),
            _ => None,
        };
        let (family, label) = match labelled {
            Some((base, label)) => (format!("pageone_{scope}{base}"), Some(label)),
            None => (format!("pageone_{scope}{base}{unit}"), None),
        };
        Sample { family, label, kind: self.kind }
    }
}

#[derive(Debug, Default)]
struct Families(BTreeMap<String, Family>);

/// The text of a daemon's status. `version`: of the program that asks.
pub fn exposition(status: &Status, version: &str, rows: Rows, format: Format) -> String {
    let mut families = Families::default();
    let build = vec![("version", version.into()), ("daemon", status.version.clone())];
    families.add_other("pageone_build_info", build, Sampled::Gauge(1.0));
    families.add_other("pageone_writer_stall_seconds", Vec::new(), Sampled::Histogram(status.writer_stall));
    let mut domains: Vec<_> = status.domains.iter().collect();
    domains.sort_by_key(|domain| std::cmp::Reverse(domain.metrics.store_bytes));
    let mut clients: Vec<_> = status.clients().collect();
    clients.sort_by_key(|client| std::cmp::Reverse(client.metrics.region_bytes));
    let (most_clients, most_domains) = match rows {
        Rows::All => (MOST_CLIENTS, MOST_DOMAINS),
        Rows::Host => (0, 0),
    };
    for (what, unlisted) in [
        ("clients", clients.len().saturating_sub(most_clients)),
        ("domains", domains.len().saturating_sub(most_domains)),
    ] {
        families.add_other("pageone_unlisted", vec![("what", what.into())], Sampled::Gauge(unlisted as f64));
    }
    domains.truncate(most_domains);
    clients.truncate(most_clients);
    let domains: HashSet<_> = domains.into_iter().map(std::ptr::from_ref).collect();
    let clients: HashSet<_> = clients.into_iter().map(std::ptr::from_ref).collect();
    let is_listed = |source: &Source<'_>| match *source {
        Source::Host | Source::Governor => true,
        Source::Domain(domain) => domains.contains(&std::ptr::from_ref(domain)),
        Source::Client(_, client) | Source::Recycler(_, client) => clients.contains(&std::ptr::from_ref(client)),
    };
    status.for_each_metric(&mut |source, metric, value| {
        if is_listed(&source) {
            families.add_metric(&source, metric, value);
        }
    });
    for domain in status.domains.iter().filter(|domain| domains.contains(&std::ptr::from_ref(*domain))) {
        let paused = Sampled::Gauge(u8::from(domain.paused.is_some()).into());
        families.add_other("pageone_domain_paused", of_domain(domain), paused);
    }
    for domain in &status.domains {
        for client in domain.clients.iter().filter(|client| clients.contains(&std::ptr::from_ref(*client))) {
            families.add_client(&of_client(domain, client), client);
        }
    }
    let mut registry = Registry::default();
    registry.register_collector(Box::new(families));
    let mut text = String::new();
    // Cannot fail: a string takes everything.
    let _ = encode(&mut text, &registry);
    match format {
        Format::OpenMetrics => text,
        Format::Prometheus => prometheus(&text),
    }
}

/// The same in the older format: there a counter's type and help stand under its sample's name,
/// which ends with `_total`.
fn prometheus(text: &str) -> String {
    let counters: HashSet<&str> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter")).collect();
    let mut out = String::with_capacity(text.len());
    for line in text.lines().filter(|line| *line != "# EOF") {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some(what), Some(name), Some(rest)) if counters.contains(name) => {
                out += &format!("# {what} {name}_total {rest}\n");
            }
            _ => out.extend([line, "\n"]),
        }
    }
    out
}

fn of_domain(domain: &DomainStatus) -> Labels {
    vec![("sharing_domain", domain.name.clone())]
}

fn of_client(domain: &DomainStatus, client: &ClientStatus) -> Labels {
    let (guest, uuid) = (client.called().to_owned(), client.identity().unwrap_or_default().to_owned());
    vec![("guest", guest), ("uuid", uuid), ("pid", client.pid.to_string()), ("sharing_domain", domain.name.clone())]
}

impl Families {
    fn add(&mut self, name: String, help: &'static str, mut labels: Labels, value: Sampled) {
        // As on standard output, so that a guest has one name.
        labels.iter_mut().for_each(|(_, text)| *text = shown(text).into_owned());
        let kind = match value {
            Sampled::Counter(_) => MetricType::Counter,
            Sampled::Gauge(_) => MetricType::Gauge,
            Sampled::Histogram(_) => MetricType::Histogram,
        };
        let new = || Family { kind, help, samples: Vec::new() };
        self.0.entry(name).or_insert_with(new).samples.push((labels, value));
    }

    /// Adds one of [`OTHER_SAMPLES`].
    fn add_other(&mut self, name: &str, labels: Labels, value: Sampled) {
        let help = OTHER_SAMPLES.iter().find(|(other, ..)| *other == name).map_or("", |(.., help)| help);
        self.add(name.to_owned(), help, labels, value);
    }

    /// Adds what is no metric of a client.
    fn add_client(&mut self, labels: &Labels, client: &ClientStatus) {
        let and = |label, value: &str| [labels.as_slice(), &[(label, value.to_owned())]].concat();
        let refused = Sampled::Gauge(u8::from(client.remarks.refused.is_some()).into());
        self.add_other("pageone_client_refused", labels.clone(), refused);
        self.add_other("pageone_client_state", and("state", client.state.text()), Sampled::Gauge(1.0));
        if let Some(why) = &client.why {
            self.add_other("pageone_client_why", and("why", why.code.text()), Sampled::Gauge(1.0));
        }
        let stalls = Sampled::Histogram(client.writer_stall);
        self.add_other("pageone_client_writer_stall_seconds", labels.clone(), stalls);
    }

    fn add_metric(&mut self, source: &Source<'_>, metric: &Metric, value: Value) {
        let mut labels = match *source {
            Source::Host | Source::Governor => Vec::new(),
            Source::Domain(domain) => of_domain(domain),
            Source::Client(domain, client) | Source::Recycler(domain, client) => of_client(domain, client),
        };
        let value = match metric.unit {
            Unit::Microseconds => value.real() / 1e6,
            Unit::Percent => value.real() / 100.0,
            _ => value.real(),
        };
        let sampled = |value| match metric.kind {
            Kind::Counter => Sampled::Counter(value),
            Kind::Gauge => Sampled::Gauge(value),
        };
        let scope = source.scope();
        let sample = metric.sample(scope);
        if let Some((old, _)) = ALIASES.iter().find(|(_, name)| *name == metric.name && scope == Scope::Client) {
            let help = "An old name, which goes with version 0.2.";
            self.add((*old).to_owned(), help, labels.clone(), sampled(value));
        }
        let help = match sample.label {
            Some(("state", _)) => "Pages by their state.",
            Some(_) => "CPU time by part.",
            None => metric.help(),
        };
        labels.extend(sample.label.map(|(label, value)| (label, value.to_owned())));
        self.add(sample.family, help, labels, sampled(value));
    }
}

impl Collector for Families {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for (name, family) in &self.0 {
            // The encoder ends the text with a point.
            let help = family.help.trim_end_matches('.');
            let mut samples = encoder.encode_descriptor(name, help, None, family.kind)?;
            for (labels, value) in &family.samples {
                match labels.is_empty() {
                    true => sample(&mut samples, value)?,
                    false => sample(&mut samples.encode_family(labels)?, value)?,
                }
            }
        }
        Ok(())
    }
}

fn sample(encoder: &mut MetricEncoder<'_>, value: &Sampled) -> Result<(), fmt::Error> {
    match value {
        Sampled::Counter(value) => encoder.encode_counter::<NoLabelSet, f64, u64>(value, None),
        Sampled::Gauge(value) => encoder.encode_gauge(value),
        Sampled::Histogram(all) => {
            // The encoder adds the counts up.
            let buckets: Vec<(f64, u64)> = all.buckets().collect();
            encoder.encode_histogram::<NoLabelSet>(all.sum_seconds, all.count(), &buckets, None)
        }
    }
}

#[cfg(test)]
mod tests;

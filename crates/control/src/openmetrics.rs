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
//! samples count all, and `pageone_unlisted` says how many have none.
//!
//! Source: the OpenMetrics specification, version 1.0.0; Prometheus' advice on names.

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

/// The media type of the text.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Clients that have samples of their own: those with the most memory.
pub const MOST_CLIENTS: usize = 512;
/// Domains that have samples of their own: those with the largest stores.
pub const MOST_DOMAINS: usize = 256;

/// Samples beside the table's metrics: name, type, meaning.
pub const OTHER_SAMPLES: [(&str, &str, &str); 8] = [
    ("pageone_build_info", "gauge", "Version of the exporter, and of the daemon (`version`, `daemon`)."),
    ("pageone_unlisted", "gauge", "Clients and domains that have no samples of their own (`what`)."),
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
pub fn openmetrics(status: &Status, version: &str) -> String {
    let mut families = Families::default();
    let build = vec![("version", version.into()), ("daemon", status.version.clone())];
    families.add_other("pageone_build_info", build, Sampled::Gauge(1.0));
    families.add_other("pageone_writer_stall_seconds", Vec::new(), Sampled::Histogram(status.writer_stall));
    let mut domains: Vec<_> = status.domains.iter().collect();
    domains.sort_by_key(|domain| std::cmp::Reverse(domain.metrics.store_bytes));
    let mut clients: Vec<_> = status.clients().collect();
    clients.sort_by_key(|client| std::cmp::Reverse(client.metrics.region_bytes));
    for (what, unlisted) in [
        ("clients", clients.len().saturating_sub(MOST_CLIENTS)),
        ("domains", domains.len().saturating_sub(MOST_DOMAINS)),
    ] {
        families.add_other("pageone_unlisted", vec![("what", what.into())], Sampled::Gauge(unlisted as f64));
    }
    domains.truncate(MOST_DOMAINS);
    clients.truncate(MOST_CLIENTS);
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
    text
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
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::states::{ClientState, Reason};
    use crate::status::{RecycleStatus, Why};
    use crate::table::{HostMetrics, METRICS};

    fn status() -> Status {
        let mut status = Status::default();
        (status.metrics.pages_shared, status.metrics.general_profit) = (7, -4096);
        (status.metrics.agent_cpu_seconds, status.governor.metrics.cpu_percent) = (1.5, 12.0);
        let mut client = ClientStatus { pid: 42, name: "qemu".into(), ..ClientStatus::default() };
        (client.own_name, client.own_uuid) = (Some("we\"b\n\\".into()), Some("1-A".into()));
        client.metrics.window_max_us = 1500;
        client.metrics.full_scans = 3;
        (client.metrics.mappings, client.metrics.mappings_limit) = (77, 65530);
        (client.metrics.general_profit, client.metrics.faults_total) = (-3, 5);
        client.state = ClientState::Stalled;
        client.why = Some(Why { code: Reason::New, text: String::new() });
        status.version = "1.2.2".into();
        (status.metrics.scans_total, status.metrics.store_bytes) = (9, 8192);
        status.metrics.cpu_pressure_ratio = Some(0.25);
        status.writer_stall.add(100e-6);
        status.writer_stall.add(0.4999);
        client.recycling = Some(RecycleStatus::default());
        let mut domain = DomainStatus { name: "uid-0".into(), ..DomainStatus::default() };
        domain.paused = Some("no memory".into());
        domain.clients.push(client);
        status.domains.push(domain);
        status
    }

    #[test]
    fn names_and_units_are_those_that_prometheus_wants() {
        let text = openmetrics(&status(), "1.2.3");
        let client = r#"guest="we\"b\n\\",uuid="1-A",pid="42",sharing_domain="uid-0""#;
        for line in [
            "pageone_build_info{version=\"1.2.3\",daemon=\"1.2.2\"} 1.0",
            "pageone_scans_total 9.0",
            "pageone_store_bytes 8192.0",
            "# TYPE pageone_writer_stall_seconds histogram",
            "pageone_writer_stall_seconds_sum 0.5",
            "pageone_writer_stall_seconds_count 2",
            "pageone_writer_stall_seconds_bucket{le=\"0.0001\"} 1",
            "pageone_writer_stall_seconds_bucket{le=\"1.0\"} 2",
            "pageone_writer_stall_seconds_bucket{le=\"+Inf\"} 2",
            "pageone_cpu_pressure_ratio 0.25",
            &format!("pageone_client_mappings{{{client}}} 77.0"),
            &format!("pageone_client_mappings_limit{{{client}}} 65530.0"),
            &format!("pageone_client_state{{{client},state=\"stalled\"}} 1.0"),
            &format!("pageone_client_why{{{client},why=\"new\"}} 1.0"),
            // Old names.
            &format!("pageone_client_maps{{{client}}} 77.0"),
            &format!("pageone_client_maps_limit{{{client}}} 65530.0"),
            &format!("pageone_client_general_profit_bytes{{{client}}} -3.0"),
            &format!("pageone_client_faults_total{{{client}}} 5.0"),
            &format!("pageone_client_writer_stall_seconds_count{{{client}}} 0"),
            "# TYPE pageone_pages gauge",
            "pageone_pages{state=\"shared\"} 7.0",
            "pageone_general_profit_bytes -4096.0",
            "# TYPE pageone_cpu_seconds counter",
            "pageone_cpu_seconds_total{part=\"agent\"} 1.5",
            "pageone_governor_cpu_ratio 0.12",
            "pageone_domain_paused{sharing_domain=\"uid-0\"} 1.0",
            &format!("pageone_client_window_max_seconds{{{client}}} 0.0015"),
            &format!("pageone_client_full_scans_total{{{client}}} 3.0"),
            "# EOF",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\nis not in\n{text}");
        }
    }

    /// A status in which every metric has a value.
    fn complete() -> Status {
        let mut status = status();
        status.metrics = HostMetrics {
            unmerge_headroom_bytes: Some(0),
            unmerge_headroom_seconds: Some(0.0),
            memory_total_bytes: Some(0),
            memory_available_bytes: Some(0),
            swap_free_bytes: Some(0),
            memory_pressure_ratio: Some(0.0),
            cpu_pressure_ratio: Some(0.0),
            ..HostMetrics::default()
        };
        status.governor.metrics.scan_time_seconds = Some(0.0);
        status.governor.metrics.pages_per_second = Some(0.0);
        status
    }

    #[test]
    fn every_metric_of_every_scope_has_its_sample_and_nothing_else_is_told() {
        let text = openmetrics(&complete(), "");
        let mut expected: BTreeSet<String> = OTHER_SAMPLES.iter().map(|(name, ..)| (*name).to_owned()).collect();
        expected.extend(ALIASES.map(|(old, _)| old.to_owned()));
        for scope in Scope::ALL {
            for metric in METRICS.iter().filter(|metric| metric.is_in(scope)) {
                let sample = metric.sample(scope);
                let name = sample.to_string();
                let (name, label) = name.strip_suffix('}').map_or((&*name, ""), |name| name.split_once('{').unwrap());
                let is_it = |line: &str| {
                    line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']) && rest.contains(label))
                };
                assert!(text.lines().any(is_it), "{sample} is not in\n{text}");
                expected.insert(sample.family);
            }
        }
        let told = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
        assert_eq!(told.map(str::to_owned).collect::<BTreeSet<_>>(), expected);
    }

    #[test]
    fn the_alert_rules_and_the_dashboard_name_metrics_that_there_are() {
        let text = openmetrics(&complete(), "");
        let rules = include_str!("../../../packaging/prometheus/alerts.yml");
        let dashboard = include_str!("../../../packaging/grafana/pageone.json");
        let json: serde_json::Value = serde_json::from_str(dashboard).unwrap();
        let mut queries = vec![rules.to_owned()];
        for target in
            json["panels"].as_array().unwrap().iter().flat_map(|p| p["targets"].as_array().into_iter().flatten())
        {
            queries.push(target["expr"].as_str().unwrap().to_owned());
        }
        assert!(queries.len() > 20);
        for query in &queries {
            let words = query.split(|c: char| !c.is_ascii_lowercase() && c != '_');
            let names: Vec<_> = words.filter(|word| word.starts_with("pageone_")).collect();
            assert!(!names.is_empty(), "{query}");
            for name in names {
                let is_it = |line: &str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']));
                assert!(text.lines().any(is_it), "{name} is not in\n{text}");
            }
        }
    }

    #[test]
    fn a_name_is_the_same_in_a_terminal_and_over_the_network() {
        let mut status = status();
        status.domains[0].clients[0].own_name = Some("a\x1b[2J\u{202e}".into());
        status.domains[0].name = "b\u{9b}".into();
        let text = openmetrics(&status, "");
        assert!(text.contains("guest=\"a\\\\u001b[2J\\\\u202e\""), "{text}");
        assert!(text.contains("sharing_domain=\"b\\\\u009b\""), "{text}");
        assert_eq!(shown(&text), text);
    }

    #[test]
    fn the_number_of_samples_is_bounded() {
        let mut status = status();
        let client = status.domains[0].clients[0].clone();
        status.domains[0].clients = (0..2000).map(|pid| ClientStatus { pid, ..client.clone() }).collect();
        status.domains[0].clients[1999].metrics.region_bytes = 1;
        let domain = DomainStatus { clients: Vec::new(), ..status.domains[0].clone() };
        status.domains.extend((0..999).map(|n| DomainStatus { name: n.to_string(), ..domain.clone() }));
        let text = openmetrics(&status, "");
        let of = |name: &str| text.lines().filter(|line| line.starts_with(name)).count();
        assert_eq!(of("pageone_client_refused{"), MOST_CLIENTS);
        assert_eq!(of("pageone_domain_paused{"), MOST_DOMAINS);
        assert!(text.contains("pid=\"1999\""), "the largest is listed");
        assert!(text.contains("pageone_unlisted{what=\"clients\"} 1488.0"), "{text}");
        assert!(text.contains("pageone_unlisted{what=\"domains\"} 744.0"));
    }
}

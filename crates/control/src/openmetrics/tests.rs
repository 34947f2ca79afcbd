//! Names, units and help, and that all of the table is told.

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
    let text = exposition(&status(), "1.2.3", Rows::All, Format::OpenMetrics);
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
    let text = exposition(&complete(), "", Rows::All, Format::OpenMetrics);
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
    let text = exposition(&complete(), "", Rows::All, Format::OpenMetrics);
    let rules = include_str!("../../../../packaging/prometheus/alerts.yml");
    let dashboard = include_str!("../../../../packaging/grafana/pageone.json");
    let json: serde_json::Value = serde_json::from_str(dashboard).unwrap();
    let mut queries = vec![rules.to_owned()];
    for target in json["panels"].as_array().unwrap().iter().flat_map(|p| p["targets"].as_array().into_iter().flatten())
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
    let text = exposition(&status, "", Rows::All, Format::OpenMetrics);
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
    let text = exposition(&status, "", Rows::All, Format::OpenMetrics);
    let of = |name: &str| text.lines().filter(|line| line.starts_with(name)).count();
    assert_eq!(of("pageone_client_refused{"), MOST_CLIENTS);
    assert_eq!(of("pageone_domain_paused{"), MOST_DOMAINS);
    assert!(text.contains("pid=\"1999\""), "the largest is listed");
    assert!(text.contains("pageone_unlisted{what=\"clients\"} 1488.0"), "{text}");
    assert!(text.contains("pageone_unlisted{what=\"domains\"} 744.0"));
}

#[test]
fn who_is_not_entitled_gets_figures_of_the_host_and_no_name() {
    for format in [Format::OpenMetrics, Format::Prometheus] {
        let text = exposition(&complete(), "", Rows::Host, format);
        for hidden in ["pageone_client_", "pageone_domain_", "pageone_recycler_", r#"we\"b"#, "1-A", "\"42\"", "uid-0"]
        {
            assert!(!text.contains(hidden), "{hidden} is in\n{text}");
        }
        for told in ["pageone_pages{state=\"shared\"} 0.0", "pageone_governor_cpu_ratio 0.12"] {
            assert!(text.contains(told), "{told} is not in\n{text}");
        }
        assert!(text.contains("pageone_unlisted{what=\"clients\"} 1.0"), "{text}");
    }
}

#[test]
fn in_the_older_format_type_and_help_of_a_counter_bear_the_name_of_its_sample() {
    let text = exposition(&status(), "", Rows::All, Format::Prometheus);
    for line in ["# TYPE pageone_scans_total counter", "pageone_scans_total 9.0", "# TYPE pageone_pages gauge"] {
        assert!(text.lines().any(|found| found == line), "{line}\nis not in\n{text}");
    }
    assert!(text.contains("# HELP pageone_scans_total Scans of clients so far"), "{text}");
    let open = exposition(&status(), "", Rows::All, Format::OpenMetrics);
    assert!(open.contains("# TYPE pageone_scans counter\n") && open.ends_with("# EOF\n"), "{open}");
    let samples =
        |text: &str| text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(samples(&text), samples(&open), "samples are the same");
    assert!(!text.contains("# EOF"));
}

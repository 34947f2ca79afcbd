use std::collections::BTreeSet;

use super::*;
use crate::{METRICS, Scope};

fn keys(value: &serde_json::Value) -> BTreeSet<String> {
    value.as_object().into_iter().flatten().map(|(key, _)| key.clone()).collect()
}

fn full() -> Status {
    let recycling = Some(RecycleStatus { state: RecyclerState::Recycling, ..RecycleStatus::default() });
    let client = ClientStatus { pid: 7, recycling, ..ClientStatus::default() };
    let domain = DomainStatus { name: "uid 0".into(), clients: vec![client], ..DomainStatus::default() };
    Status { domains: vec![domain], ..Status::default() }
}

#[test]
fn a_status_survives_json_and_keeps_its_keys() {
    let mut status = full();
    status.metrics.uptime_seconds = 1.0;
    status.metrics.general_profit = -7;
    status.governor.metrics.scan_time_seconds = Some(0.5);
    status.domains[0].clients[0].metrics.max_map_count_binds = true;
    let text = serde_json::to_string(&status).unwrap();
    assert_eq!(serde_json::from_str::<Status>(&text).unwrap(), status);

    let json = serde_json::to_value(&status).unwrap();
    let expect = |value: &serde_json::Value, words: &str| {
        assert_eq!(keys(value), words.split_whitespace().map(str::to_owned).collect::<BTreeSet<_>>());
    };
    let pages = "pages_unshared pages_volatile pages_zero pages_recycled";
    expect(
        &json,
        &format!(
            "version uptime_seconds merge_period_seconds daemon_cpu_seconds agent_cpu_seconds governor \
             pages_merged_total pages_recycled_total reclaim_period_seconds pages_shared pages_sharing general_profit \
             store_bytes frame_bytes frames_doubted_total unmerge_bytes unmerge_headroom_bytes unmerge_bytes_per_second unmerge_headroom_seconds \
             headroom_is_short scans_total memory_total_bytes memory_available_bytes swap_free_bytes \
             memory_pressure_ratio cpu_pressure_ratio paused no_agents writer_stall domains refused refused_left_out {pages}"
        ),
    );
    expect(
        &json["governor"],
        "mode target_scan_time_seconds scan_time_seconds scan_pages scan_cpu_seconds pages_due pages_per_second \
         cpu_percent max_cpu_percent memory_is_short reason",
    );
    expect(
        &json["domains"][0],
        &format!(
            "name pages_shared pages_sharing general_profit segments store_bytes frame_bytes pages_pinned pages_dead slots_free slots_quarantined frames_doubted_total \
             pages_compacted_total known_contents paused clients {pages}"
        ),
    );
    expect(
        &json["domains"][0]["clients"][0],
        &format!(
            "pid name uid manager guest guest_name own_name own_uuid rule unknown regions region_bytes pages_merged recycling pages_kept_huge pages_pending \
             pages_copied_total pages_discarded_total pages_differed_total pages_unreadable_total pages_retained_total full_scans mappings max_map_count_binds window_max_us \
             agent_cpu_seconds state refused cooling limited outdated why writer_stall general_profit mappings_limit \
             faults_total dirty_pages_per_second {pages}"
        ),
    );
    expect(
        &json["domains"][0]["clients"][0]["recycling"],
        "state why managed_bytes pool_bytes reclaim_period_seconds pages_recycled_total pages_recycled_per_second \
         runs_total pages_lost_total sweeps_total sweep_seconds claim_max_us",
    );
    assert!(json["governor"]["pages_per_second"].is_null(), "a metric without a value is null");
}

#[test]
fn sums_add_what_the_table_says_and_nothing_else() {
    let mut client = ClientMetrics { pages_merged: 1, pages_zero: 2, agent_cpu_seconds: 0.5, ..Default::default() };
    client.full_scans = 9;
    let mut domain = DomainMetrics { store_bytes: 4096, ..Default::default() };
    domain += &client;
    domain += &client;
    assert_eq!(domain, DomainMetrics { pages_zero: 4, store_bytes: 4096, ..Default::default() });
    domain.general_profit = -5;
    let recycler = RecyclerMetrics { pages_recycled_total: 3, reclaim_period_seconds: 2.0, ..Default::default() };
    let mut host = HostMetrics { pages_recycled_total: 10, reclaim_period_seconds: 1.0, ..Default::default() };
    host += &domain;
    host += &client;
    host += &recycler;
    let expected = HostMetrics {
        store_bytes: 4096,
        pages_zero: 4,
        general_profit: -5,
        agent_cpu_seconds: 0.5,
        pages_recycled_total: 13,
        reclaim_period_seconds: 1.0,
        ..Default::default()
    };
    assert_eq!(host, expected);
}

#[test]
fn every_metric_is_visited_in_every_scope_that_has_it() {
    let mut status = full();
    status.governor.metrics.scan_time_seconds = Some(1.0);
    status.governor.metrics.pages_per_second = Some(1.0);
    status.metrics = HostMetrics {
        unmerge_headroom_bytes: Some(1),
        unmerge_headroom_seconds: Some(1.0),
        memory_total_bytes: Some(1),
        memory_available_bytes: Some(1),
        swap_free_bytes: Some(1),
        memory_pressure_ratio: Some(0.0),
        cpu_pressure_ratio: Some(0.0),
        ..HostMetrics::default()
    };
    let mut seen = BTreeSet::new();
    status.for_each_metric(&mut |source, metric, _| {
        let scope = source.scope();
        assert!(metric.is_in(scope), "{}", metric.name);
        assert!(seen.insert((metric.name, scope as usize)), "{} twice", metric.name);
    });
    let scopes = |metric: &Metric| Scope::ALL.into_iter().filter(|&scope| metric.is_in(scope)).count();
    assert_eq!(seen.len(), METRICS.iter().map(scopes).sum::<usize>());
}

#[test]
fn every_metric_is_defined_once_and_explained() {
    let names: BTreeSet<_> = METRICS.iter().map(|metric| metric.name).collect();
    assert_eq!(names.len(), METRICS.len(), "a name stands twice");
    for metric in METRICS {
        assert!(metric.help().ends_with('.') && !metric.help().contains("  "), "{}: {}", metric.name, metric.help());
        assert!(Scope::ALL.into_iter().any(|scope| metric.is_in(scope)), "{}", metric.name);
        for scope in Scope::ALL {
            assert!(!metric.is_sum_in(scope) || metric.is_in(scope), "{}", metric.name);
        }
    }
}

/// The name is the field, the key in JSON and the column in CSV, since the table makes these.
#[test]
fn every_way_of_a_metric_is_made_of_its_stem() {
    let json = serde_json::to_value(full()).unwrap();
    let client = &json["domains"][0]["clients"][0];
    for metric in METRICS {
        let stem = metric.stem();
        assert!(metric.name.contains(stem) && !stem.is_empty(), "{}", metric.name);
        for scope in Scope::ALL.into_iter().filter(|&scope| metric.is_in(scope)) {
            let sample = metric.sample(scope).to_string();
            // The part is a label of CPU time: `agent_cpu` is `cpu_seconds{part="agent"}`.
            let mut words = stem.split('_');
            assert!(words.all(|word| sample.contains(word)), "{}: {sample}", metric.name);
            let at = match scope {
                Scope::Host => &json,
                Scope::Governor => &json["governor"],
                Scope::Domain => &json["domains"][0],
                Scope::Client => client,
                Scope::Recycler => &client["recycling"],
            };
            assert!(at.get(metric.name).is_some(), "{}", metric.name);
        }
        let title = metric.title.to_lowercase();
        let begins = |word: &str| word.starts_with(&title) && title.len() >= 3;
        assert!(title.is_empty() || stem.split('_').any(begins), "{} is not of {stem}", metric.title);
        assert!(metric.heading().len() <= metric.width || title.is_empty(), "{} is too wide", metric.title);
    }
}

#[test]
fn what_a_daemon_of_another_build_does_not_tell_has_no_value() {
    let mut json = serde_json::to_value(full()).unwrap();
    for key in ["memory_total_bytes", "scans_total", "writer_stall", "paused", "version", "store_bytes"] {
        assert!(json.as_object_mut().unwrap().remove(key).is_some(), "{key}");
    }
    for key in ["why", "general_profit", "mappings_limit", "writer_stall", "own_name", "own_uuid"] {
        let client = json["domains"][0]["clients"][0].as_object_mut().unwrap();
        assert!(client.remove(key).is_some(), "{key}");
    }
    json["new"] = "what this build does not know".into();
    assert_eq!(serde_json::from_value::<Status>(json).unwrap(), full());
}

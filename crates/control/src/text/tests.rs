use super::*;
use crate::{ClientMetrics, ClientState, HostMetrics, Remarks, Why};

#[test]
fn the_text_names_what_keeps_memory_from_merging() {
    let dropped =
        RecycleStatus { state: RecyclerState::Dropped, why: Some("overwritten".into()), ..RecycleStatus::default() };
    let metrics = ClientMetrics { max_map_count_binds: true, pages_kept_huge: 1280, ..ClientMetrics::default() };
    let client = ClientStatus {
        recycling: Some(dropped),
        pid: 42,
        name: "qemu".into(),
        remarks: Remarks {
            refused: Some("its memory is locked".into()),
            unknown: Some("no file".into()),
            outdated: Some("it is older".into()),
            ..Remarks::default()
        },
        manager: Some("libvirt".into()),
        guest: Some("123".into()),
        guest_name: Some("web\n1".into()),
        own_uuid: Some("1-A\u{1b}".into()),
        rule: "default: by slice".into(),
        why: Some(Why { code: crate::Reason::Volatile, text: "it changes".into() }),
        metrics,
        ..ClientStatus::default()
    };
    let domain = DomainStatus { paused: Some("no room".into()), clients: vec![client], ..DomainStatus::default() };
    let refused = RefusedStatus { uid: 7, pid: 43, name: "bad\u{1b}".into(), reason: "it lied".into(), times: 3 };
    let out = Status { domains: vec![domain], refused: vec![refused], ..Status::default() }.to_string();
    for part in [
        "dropped: overwritten",
        "PAUSED: no room",
        "not merged: its memory is locked",
        "vm.max_map_count",
        "5 MiB more could be merged",
        "42 web1  ",
        "program qemu, UUID 1-A\n",
        "libvirt web1 123: default: by slice\n",
        "guest not known: no file",
        "its agent is of another build: it is older",
        "volatile: it changes",
        "43 bad                  uid 7: it lied (3 times)\n",
    ] {
        assert!(out.contains(part), "{part} in {out}");
    }
}

#[test]
fn a_narrow_terminal_has_the_first_columns_and_no_longer_line() {
    let remarks = Remarks { refused: Some("its memory is locked ".repeat(20)), ..Remarks::default() };
    let client =
        ClientStatus { name: "n".repeat(20), state: ClientState::Disconnected, remarks, ..ClientStatus::default() };
    let domain = DomainStatus { clients: vec![client], ..DomainStatus::default() };
    let status = Status { domains: vec![domain], ..Status::default() };
    let all: Vec<_> = columns().take(COLUMNS).map(|metric| metric.title).collect();
    let titles = |text: &str| {
        let line = text.lines().find(|line| line.contains("PID")).unwrap().to_owned();
        let line = line.trim_start().trim_end_matches("state").replace("PID guest", "");
        line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(titles(&status.to_string()), all);
    for (width, shown) in [(60, 2), (80, 5), (100, 7), (120, COLUMNS), (250, COLUMNS)] {
        let text = status.within(width);
        assert_eq!(titles(&text), all[..shown], "{width}");
        assert!(text.lines().all(|line| line.chars().count() <= width), "{width}: {text}");
    }
    assert_eq!(titles(&status.within(20)), [""; 0]);
}

#[test]
fn the_summary_lists_what_the_host_sums_over_its_domains() {
    let metrics = HostMetrics { pages_sharing: 7, general_profit: -(3 << 20), ..HostMetrics::default() };
    let headroom = |left| {
        let metrics = HostMetrics { unmerge_headroom_bytes: left, unmerge_bytes: 9 << 20, ..HostMetrics::default() };
        Status { metrics, ..Status::default() }.to_string()
    };
    assert!(
        headroom(Some(5 << 20)).contains("headroom 5 MiB: if all that is merged were written, it would take 9 MiB\n")
    );
    let short = HostMetrics {
        unmerge_headroom_seconds: Some(90.0),
        unmerge_bytes_per_second: 3.0 * f64::from(1 << 20),
        ..HostMetrics::default()
    };
    let (paused, no_agents) = (Some("it is short".into()), Some("it is old".into()));
    let paused = Status { metrics: short, paused, no_agents, ..Status::default() }.to_string();
    assert!(
        paused
            .contains("3 MiB/s, as over the last minute: memory for 90 s\nPAUSED: it is short\nno agents: it is old\n"),
        "{paused}"
    );
    assert!(headroom(Some(-(5 << 20))).contains("headroom SHORT of 5 MiB: "));
    assert!(!headroom(None).contains("headroom"));
    let out = Status { metrics, ..Status::default() }.to_string();
    assert!(
        out.contains(
            "pages_shared 0 · pages_sharing 7 · pages_zero 0 · pages_recycled 0 · pages_unshared 0 · \
             pages_volatile 0 · general_profit -3 MiB · store_bytes 0 B · frame_bytes 0 B · frames_doubted_total 0\n"
        ),
        "{out}"
    );
    let refused = vec![RefusedStatus { uid: 7, ..RefusedStatus::default() }];
    let out = Status { refused, refused_left_out: 5, ..Status::default() }.to_string();
    assert!(out.contains("uid 7") && out.ends_with("  and 5 more\n"), "{out}");
}

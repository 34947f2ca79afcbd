use control::{
    ClientStatus, Content, DomainSharing, DomainStatus, Histogram, Pair, Sharer, SharingMatrix, Status, Why,
};

use super::*;
use crate::moment::{Depth, Moment};
use crate::recording::Writer;

/// Two minutes of `guests` guests, one of which has an evil name; the daemon is away for a while.
fn recording(guests: i32) -> Recording {
    let mut writer = Writer::new(Vec::new()).unwrap();
    for second in 0..120 {
        let time = 1_700_000_000_000 + second * 1000;
        let mut status = Status::default();
        status.metrics.memory_total_bytes = Some(16 << 30);
        status.metrics.memory_available_bytes = Some(4 << 30);
        status.metrics.general_profit = second << 24;
        status.governor.metrics.cpu_percent = 2.5;
        let mut stalls = Histogram::default();
        (0..second).for_each(|at| stalls.add(at as f64 * 1e-5));
        status.writer_stall = stalls;
        let client = |pid: i32| {
            let name = if pid == 1 { "=<script>alert(1)</script>,\"x".into() } else { format!("web-{pid}") };
            let why = Some(Why { code: control::Reason::Budget, text: "vm.max_map_count binds & more".into() });
            let mut client = ClientStatus { pid, name, why, ..ClientStatus::default() };
            client.metrics.general_profit = i64::from(pid) << 20;
            client
        };
        let clients = (1..=guests).map(client).collect();
        status.domains = vec![DomainStatus { name: "uid-0".into(), clients, ..DomainStatus::default() }];
        let is_away = (50..60).contains(&second);
        writer.append(&Moment { time, status: (!is_away).then_some(status), away: None }).unwrap();
    }
    writer.append_depth(&depth(guests)).unwrap();
    Recording::from_bytes(writer.into_inner()).unwrap()
}

/// Who shares with whom, of so many guests.
fn depth(guests: i32) -> Depth {
    let sharer = |pid: i32| Sharer { pid, name: format!("web-{pid}"), alone: 5, frames: 100 };
    let domain = DomainSharing {
        name: "uid-0".into(),
        clients: (1..=guests).map(sharer).collect(),
        pairs: vec![Pair { a: 0, b: 1, pages: 40 }, Pair { a: 9999, b: 1, pages: 1 }],
        contents: vec![Content { pages: 500, frames: 1, hint: "zeros <b>".into(), example: Some((7, 0x7f00)) }],
        sampled: 4,
        ..DomainSharing::default()
    };
    Depth { time: 0, sharing: SharingMatrix { domains: vec![domain] }, ..Depth::default() }
}

#[test]
fn the_page_has_every_plot_and_nothing_from_elsewhere() {
    let page = html(&mut recording(12), "host & co").unwrap();
    for part in [
        "<h1>host &amp; co</h1>",
        "aria-label=\"Memory over time\"",
        "aria-label=\"Saving by guest over time\"",
        "aria-label=\"Memory of the guests\"",
        "aria-label=\"Who shares with whom\"",
        "aria-label=\"CPU time\"",
        "aria-label=\"Pressure\"",
        "aria-label=\"Stalls\"",
        "4 others",
        "zeros &lt;b&gt;",
        "budget: vm.max_map_count binds &amp; more",
        "Estimated from one of 4 pages",
        "No daemon answered at 10 of the times",
        "web-1 and web-2: 160 KiB",
        "&lt;script&gt;",
    ] {
        assert!(page.contains(part), "{part}");
    }
    for foreign in ["<script", "http:", "https:", "url(", "NaN", "inf"] {
        assert!(!page.contains(foreign), "{foreign}");
    }
    assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
    assert_eq!(page.matches("<section>").count(), 7);
}

#[test]
fn an_almost_empty_recording_has_a_page_too() {
    let mut writer = Writer::new(Vec::new()).unwrap();
    writer.append(&Moment { time: 5, status: None, away: Some("away".into()) }).unwrap();
    let page = html(&mut Recording::from_bytes(writer.into_inner()).unwrap(), "x").unwrap();
    assert!(page.contains("Nothing was shared") && !page.contains("NaN"), "{page}");
}

#[test]
fn tables_have_a_line_for_each_moment_and_guest() {
    let dir = tempfile::tempdir().unwrap();
    let mut files = export::names().map(|name| std::fs::File::create(dir.path().join(name)).unwrap());
    export::csv(&mut recording(3), &mut files).unwrap();
    let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
    let (host, guests) = (read("host.csv"), read("guests.csv"));
    assert_eq!((host.lines().count(), guests.lines().count()), (1 + 110, 1 + 3 * 110));
    let columns = |line: &str| line.split(',').count();
    assert!(host.lines().all(|line| columns(line) == columns(host.lines().next().unwrap())), "{host}");
    let at = host.lines().next().unwrap().split(',').position(|name| name == "general_profit").unwrap();
    assert_eq!(host.lines().last().unwrap().split(',').nth(at), Some((119u64 << 24).to_string().as_str()));
    assert!(host.lines().nth(1).unwrap().starts_with("2023-11-14T22:13:20.000Z,"));
    assert!(guests.contains(",1,\"'=<script>alert(1)</script>,\"\"x\",budget,"), "a name is no formula");
    assert!(read("domains.csv").lines().nth(1).unwrap().contains(",uid-0,"));
}

#[test]
fn everything_is_in_the_json() {
    let mut out = Vec::new();
    let mut recording = recording(2);
    export::json(&mut recording, &mut out).unwrap();
    let value: serde_json::Value = serde_json::from_slice(&out).unwrap();
    assert_eq!(value["moments"].as_array().unwrap().len(), 120);
    assert_eq!(value["moments"][7]["status"]["general_profit"], 7 << 24);
    assert_eq!(value["depth"]["sharing"]["domains"][0]["pairs"][0]["pages"], 40);
}

#[test]
fn a_matrix_of_more_guests_than_a_daemon_tells_of_is_cut_when_it_is_read() {
    let mut writer = Writer::new(Vec::new()).unwrap();
    writer.append(&Moment::default()).unwrap();
    writer.append_depth(&depth(3000)).unwrap();
    let mut recording = Recording::from_bytes(writer.into_inner()).unwrap();
    let depth = recording.depth(i64::MAX).unwrap().unwrap();
    let domain = &depth.sharing.domains[0];
    assert_eq!((domain.clients.len(), domain.clients_unlisted), (64, 3000 - 64));
    assert!(domain.pairs.iter().all(|pair| pair.a.max(pair.b) < 64));
    let page = html(&mut recording, "x").unwrap();
    assert_eq!(page.matches("class=\"cell\"").count(), 64 * 64);
    // And of more domains.
    let mut many = self::depth(2);
    many.sharing.domains = vec![many.sharing.domains.remove(0); 70];
    let mut writer = Writer::new(Vec::new()).unwrap();
    writer.append(&Moment::default()).unwrap();
    writer.append_depth(&many).unwrap();
    let page = html(&mut Recording::from_bytes(writer.into_inner()).unwrap(), "x").unwrap();
    assert_eq!(page.matches("class=\"cell\"").count(), 64 * 4);
    assert!(page.contains("Left out: 6 domains with less."));
}

#[test]
fn guests_that_come_and_go_without_end_are_added_up() {
    let mut writer = Writer::new(Vec::new()).unwrap();
    for at in 0..3 {
        let client = |pid: i32| {
            let mut client = ClientStatus { pid, name: "n".into(), ..ClientStatus::default() };
            client.metrics.general_profit = 1;
            client
        };
        let clients = (1..=2000).map(|n| client(at * 2000 + n)).collect();
        let domains = vec![DomainStatus { clients, ..DomainStatus::default() }];
        let status = Some(Status { domains, ..Status::default() });
        writer.append(&Moment { time: i64::from(at), status, away: None }).unwrap();
    }
    let data = data::Data::gather(&mut Recording::from_bytes(writer.into_inner()).unwrap()).unwrap();
    assert_eq!(data.guests.len(), 4096);
    assert_eq!(data.others, [0.0, 0.0, 6000.0 - 4096.0]);
}

#[test]
fn what_cannot_be_written_is_not_said_to_be_unreadable() {
    let mut full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    for error in [
        export::json(&mut recording(1), &mut full).unwrap_err(),
        export::csv(&mut recording(1), &mut [full.try_clone().unwrap()]).unwrap_err(),
    ] {
        assert!(error.to_string().starts_with("No space left"), "{error}");
    }
}

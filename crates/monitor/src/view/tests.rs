use control::{ClientStatus, DomainStatus, Status, Why};

use super::*;
use crate::Recording;
use crate::moment::Moment;

fn client(pid: i32, name: &str, faults: u64) -> ClientStatus {
    let mut client = ClientStatus { pid, name: name.into(), ..ClientStatus::default() };
    client.metrics.region_bytes = 1 << 30;
    client.metrics.pages_merged = 256;
    client.metrics.faults_total = faults;
    client.metrics.agent_cpu_seconds = faults as f64 / 1000.0;
    client.metrics.mappings = 6553;
    client.metrics.mappings_limit = 65_530;
    client
}

fn moment(time: i64, clients: Vec<ClientStatus>) -> Moment {
    let mut status = Status::default();
    status.metrics.memory_total_bytes = Some(8 << 30);
    status.metrics.memory_available_bytes = Some(2 << 30);
    status.domains = vec![DomainStatus { name: "uid-0".into(), clients, ..DomainStatus::default() }];
    Moment { time, status: Some(status), away: None }
}

#[test]
fn a_row_has_the_guests_name_and_rates_since_the_moment_before() {
    let before = moment(10_000, vec![client(1, "qemu", 100)]);
    let mut named = client(1, "qemu", 300);
    (named.own_name, named.own_uuid) = (Some("web\u{1b}-1".into()), Some("1-A".into()));
    named.why = Some(Why { code: control::Reason::Pinned, text: "its memory is locked".into() });
    let now = moment(12_000, vec![named, client(2, "new", 5)]);
    let rows = rows(&now, Some(&before));
    let values = |row: &Row| ["faults_total", "pages_merged"].map(|name| row.value(name));
    assert_eq!((rows[0].name.as_str(), values(&rows[0])), ("web-1", [Some(100.0), Some(256.0)]));
    assert!(rows[0].matches("qemu web-1") && rows[0].matches("1-a") && !rows[1].matches("1-a"));
    assert_eq!((rows[0].why.as_str(), rows[0].domain.as_str()), ("pinned", "uid-0"));
    let cells =
        ["faults_total", "agent_cpu_seconds", "pages_merged", "mappings"].map(|name| Column::of(name).cell(&rows[0]));
    assert_eq!(cells, ["100", "10", "1.00M", "6.55k"]);
    assert_eq!((rows[1].name.as_str(), values(&rows[1])[0], rows[1].why.as_str()), ("new", None, "-"));
    // A process number that was used again.
    let fewer = super::rows(&moment(14_000, vec![client(1, "other", 2)]), Some(&now));
    assert_eq!(fewer[0].value("faults_total"), None);
}

#[test]
fn rows_are_sorted_and_filtered() {
    let row = |name: &str, pid, memory: u64, faults: Option<f64>| {
        let mut values = vec![None; control::columns().count()];
        for (metric, value) in [("region_bytes", Some(memory as f64)), ("faults_total", faults)] {
            values[control::columns().position(|column| column.name == metric).unwrap()] = value;
        }
        Row { name: name.into(), pid, values, why: "-".into(), ..Row::default() }
    };
    let mut rows = [row("b", 1, 5, None), row("a", 2, 9, Some(1.0)), row("c", 3, 5, Some(2.0))];
    let names = |rows: &[Row]| rows.iter().map(|row| row.name.as_str()).collect::<String>();
    for (order, expected) in [
        (Sort::By(Column::of("region_bytes")), "abc"),
        (Sort::Reversed(Column::of("region_bytes")), "cba"),
        (Sort::By(Column::Name), "abc"),
        (Sort::By(Column::of("faults_total")), "cab"),
        (Sort::By(Column::Pid), "bac"),
    ] {
        order.sort(&mut rows);
        assert_eq!(names(&rows), expected, "{order:?}");
    }
    assert!(rows[0].matches("") && rows[0].matches("B 1") && !rows[0].matches("b 7"));
}

#[test]
fn a_screen_has_the_columns_that_fit_and_the_others_are_scrolled_to() {
    for screen in [60, 80, 100, 160, 300] {
        let mut seen = Vec::new();
        for skipped in 0..Column::all().count() {
            let (places, hidden) = layout(screen, skipped);
            let width: usize = places.iter().map(|place| place.width + 1).sum::<usize>() - 1;
            assert_eq!(width, screen, "{places:?}");
            assert_eq!((places[0].column, places.last().unwrap().column), (Column::Name, Column::Why));
            assert!(hidden < Column::all().count());
            seen.extend(places.iter().map(|place| place.column));
        }
        assert!(Column::all().all(|column| seen.contains(&column)), "{screen}");
    }
    let (places, hidden) = layout(80, 0);
    assert_eq!(places.len(), 9, "{places:?}");
    assert_eq!(hidden, 10);
    assert_eq!(layout(160, 0).1, 0);
    assert!(layout(10, 0).0.len() == 2, "no room for more");
    let fit = |column, width, text| Place { column, width }.fit(text);
    assert_eq!((fit(Column::Name, 4, "abcdef"), fit(Column::Pid, 4, "ab")), ("abc…".into(), "  ab".into()));
}

#[test]
fn cells_are_no_wider_than_their_column() {
    let mut large = client(4_194_304, "a", 0);
    let metrics = &mut large.metrics;
    (metrics.region_bytes, metrics.pages_merged) = (u64::MAX >> 10, 999 << 28);
    (metrics.general_profit, metrics.dirty_pages_per_second) = (-(999 << 30), 1e12);
    (metrics.mappings_limit, metrics.window_max_us) = (1_048_576, 123_456);
    let before = moment(0, vec![client(4_194_304, "a", 0)]);
    (metrics.faults_total, metrics.agent_cpu_seconds) = (123_456, 1.014);
    let row = &rows(&moment(1000, vec![large]), Some(&before))[0];
    for screen in [80, 160] {
        for place in layout(300, 0).0.iter().filter(|place| !place.column.is_text()) {
            let (width, cell) = (place.column.width(screen), place.column.cell(row));
            assert!(cell.chars().count() <= width && cell != "-", "{:?} {cell}", place.column);
            assert!(place.column.title().len() <= width, "{:?}", place.column);
        }
    }
    for name in ["region_bytes", "general_profit", "dirty_pages_per_second", "agent_cpu_seconds"] {
        assert!(matches!(Column::of(name), Column::Metric(_)), "rows are sorted by {name}");
    }
}

#[test]
fn the_host_says_what_is_wrong() {
    let mut moment = moment(0, vec![client(1, "a", 0)]);
    let status = moment.status.as_mut().unwrap();
    status.metrics.unmerge_headroom_bytes = Some(-(1 << 30));
    status.metrics.unmerge_headroom_seconds = Some(600.0);
    status.metrics.unmerge_bytes_per_second = f64::from(1 << 20);
    status.metrics.memory_pressure_ratio = Some(0.034);
    status.domains[0].paused = Some("no room".into());
    let host = Host::new(status);
    assert_eq!(host.memory, ["6 GiB of 8 GiB", "0 B", "0 B"].map(String::from));
    assert_eq!((host.cpu.as_str(), host.cpu_part), ("0 %, no limit", None));
    assert_eq!(host.pressure, "memory 3.4 %, CPU ?   Headroom -1 GiB, 10 min at 1 MiB/s");
    assert_eq!(host.guests, "1 guest, 1 domain");
    assert_eq!(host.warnings.len(), 2, "{:?}", host.warnings);
    assert!(host.warnings[0].contains("domain uid-0 paused: no room"));
    status.paused = Some("the headroom is short".into());
    assert_eq!(Host::new(status).warnings[0], "paused: the headroom is short");
}

#[test]
fn a_graph_has_gaps_where_the_daemon_was_away() {
    let mut recording = Recording::live();
    for second in 0..60 {
        let mut moment = moment(second * 1000, vec![]);
        moment.status.as_mut().unwrap().metrics.general_profit = second;
        if (20..40).contains(&second) {
            moment.status = None;
        }
        recording.push(&moment);
    }
    let graph = |end: i64, width| graph(&recording, end, Span::default().change(-1), width, |summary| summary.saved);
    let points = graph(59_999, 6);
    assert_eq!(points, [Some(4.5), Some(14.5), None, None, Some(44.5), Some(54.5)]);
    // Before the first moment there is nothing; more columns than moments repeat one.
    assert_eq!(graph(29_999, 6), [None, None, None, Some(4.5), Some(14.5), None]);
    assert_eq!(graph(59_999, 240).iter().flatten().count(), 160);
    assert_eq!(Span::default().change(-9).change(1), Span::default());
}

use control::{DomainStatus, Status, Why};

use super::*;
use crate::Recording;

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
fn a_row_has_the_managers_name_and_rates_since_the_moment_before() {
    let before = moment(10_000, vec![client(1, "qemu", 100)]);
    let mut named = client(1, "qemu", 300);
    named.guest_name = Some("web\u{1b}-1".into());
    named.why = Some(Why { code: control::Reason::Pinned, text: "its memory is locked".into() });
    let now = moment(12_000, vec![named, client(2, "new", 5)]);
    let rows = rows(&now, Some(&before));
    assert_eq!((rows[0].name.as_str(), rows[0].faults, rows[0].cpu), ("web-1", Some(100.0), Some(10.0)));
    assert_eq!((rows[0].shared, rows[0].why.as_str(), rows[0].domain.as_str()), (1 << 20, "pinned", "uid-0"));
    assert_eq!((rows[1].name.as_str(), rows[1].faults, rows[1].why.as_str()), ("new", None, "-"));
    // A process number that was used again.
    let fewer = super::rows(&moment(14_000, vec![client(1, "other", 2)]), Some(&now));
    assert_eq!(fewer[0].faults, None);
}

#[test]
fn rows_are_sorted_and_filtered() {
    let row = |name: &str, pid, memory, faults| Row {
        name: name.into(),
        pid,
        memory,
        faults,
        why: "-".into(),
        ..Row::default()
    };
    let mut rows = [row("b", 1, 5, None), row("a", 2, 9, Some(1.0)), row("c", 3, 5, Some(2.0))];
    let names = |rows: &[Row]| rows.iter().map(|row| row.name.as_str()).collect::<String>();
    for (column, reversed, expected) in [
        (Column::Memory, false, "abc"),
        (Column::Memory, true, "cba"),
        (Column::Name, false, "abc"),
        (Column::Faults, false, "cab"),
        (Column::Pid, false, "bac"),
    ] {
        sort(&mut rows, column, reversed);
        assert_eq!(names(&rows), expected, "{column:?} {reversed}");
    }
    assert!(rows[0].matches("") && rows[0].matches("B 1") && !rows[0].matches("b 7"));
}

#[test]
fn a_screen_has_the_columns_that_fit_and_the_others_are_scrolled_to() {
    for screen in [60, 80, 100, 160, 300] {
        let mut seen = Vec::new();
        for skipped in 0..Column::ALL.len() {
            let (places, hidden) = layout(screen, skipped);
            let width: usize = places.iter().map(|place| place.width + 1).sum::<usize>() - 1;
            assert_eq!(width, screen, "{places:?}");
            assert_eq!((places[0].column, places.last().unwrap().column), (Column::Name, Column::Why));
            assert!(hidden < Column::ALL.len());
            seen.extend(places.iter().map(|place| place.column));
        }
        assert!(Column::ALL.iter().all(|column| seen.contains(column)), "{screen}");
    }
    let (places, hidden) = layout(80, 0);
    assert_eq!(places.len(), 10, "{places:?}");
    assert_eq!(hidden, 7);
    assert_eq!(layout(160, 0).1, 0);
    assert!(layout(10, 0).0.len() == 2, "no room for more");
}

#[test]
fn cells_are_no_wider_than_their_column() {
    let row = Row {
        memory: u64::MAX >> 10,
        shared: 999 << 40,
        dirty: 1e12,
        profit: -(999 << 30),
        mappings: 65_530,
        mappings_limit: 1_048_576,
        faults: Some(123_456.0),
        stall: 0.123_456,
        cpu: Some(101.4),
        pid: 4_194_304,
        ..Row::default()
    };
    for screen in [80, 160] {
        for place in layout(300, 0).0.iter().filter(|place| !place.column.is_text()) {
            let width = place.column.width(screen);
            let cell = place.column.cell(&row, width);
            let room = if place.column == Column::Maps { width.max(13) } else { width };
            assert!(cell.chars().count() <= room, "{:?} {cell}", place.column);
            assert!(place.column.title().len() <= width, "{:?}", place.column);
        }
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
    assert_eq!(host.memory, Some((6 << 30, 8 << 30)));
    assert_eq!(host.pressure, "memory 3.4 %, CPU ?   Headroom -1.00G, 10 min at 1.00M/s");
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

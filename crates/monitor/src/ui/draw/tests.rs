use control::{
    Cell, ClientMap, ClientState, ClientStatus, DomainStatus, GovernorMode, HotRange, Reason, RegionMap, Status, Why,
};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::style::Color;

use super::*;
use crate::moment::Moment;
use crate::recording::{Recording, Writer};
use crate::sampler::Found;
use crate::ui::style::Theme;

fn client(pid: i32, megabytes: u64) -> ClientStatus {
    let mut client =
        ClientStatus { pid, name: format!("guest-{pid}"), state: ClientState::Merging, ..ClientStatus::default() };
    client.metrics.region_bytes = megabytes << 20;
    client.metrics.general_profit = (megabytes << 19) as i64;
    client.metrics.mappings_limit = 65_530;
    client.why =
        Some(Why { code: Reason::Pinned, text: "A device may write to its memory; use cache=writeback.".into() });
    client
}

fn moment(time: i64, clients: i32) -> Moment {
    let mut status = Status::default();
    status.metrics.memory_total_bytes = Some(16 << 30);
    status.metrics.memory_available_bytes = Some(4 << 30);
    status.metrics.general_profit = 3 << 30;
    status.metrics.unmerge_headroom_bytes = Some(2 << 30);
    status.governor.mode = GovernorMode::Target;
    status.governor.reason =
        "scan took 1.2 s for a target of 20 s; lowered 9000 → 8000 pages a second; CPU 3.1 % of 20 %".into();
    status.governor.metrics.cpu_percent = 3.1;
    status.governor.metrics.max_cpu_percent = 20.0;
    let clients = (1..=clients).map(|pid| client(pid, 100 * pid as u64)).collect();
    status.domains = vec![DomainStatus { name: "uid-0".into(), clients, ..DomainStatus::default() }];
    Moment { time, status: Some(status), away: None }
}

fn away(time: i64) -> Moment {
    Moment { time, status: None, away: Some("no daemon answers in /run/pageone".into()) }
}

fn live(clients: i32) -> App {
    let mut app = App::live(Theme::Colour);
    for second in 0..5 {
        app.found(Found::Moment(Box::new(moment(1_700_000_000_000 + second * 1000, clients))));
    }
    app
}

fn press(app: &mut App, keys: &str) {
    keys.chars().for_each(|c| app.key(KeyEvent::new(KeyCode::Char(c), KeyModifiers::NONE)));
}

fn code(app: &mut App, code: KeyCode) {
    app.key(KeyEvent::new(code, KeyModifiers::NONE));
}

fn screen(app: &mut App, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(app, frame)).unwrap();
    let buffer = terminal.backend().buffer();
    (0..height).map(|y| (0..width).map(|x| buffer[(x, y)].symbol()).collect()).collect()
}

fn row_of<'a>(screen: &'a [String], text: &str) -> Option<&'a String> {
    screen.iter().find(|line| line.contains(text))
}

#[test]
fn the_small_screen_has_everything_that_matters() {
    let mut app = live(30);
    let lines = screen(&mut app, 80, 24);
    assert!(lines[0].contains("30 guests, 1 domain"), "{lines:#?}");
    for text in [
        "Used 12 GiB of 16 GiB",
        "Saved 3 GiB",
        "Could be saved 0 B",
        "CPU 3.1 % of 20 % [||",
        "Headroom 2 GiB",
        "Store 0 B",
        "Governor target: scan took 1.2 s",
        "F1 Help",
        "q Quit",
    ] {
        assert!(row_of(&lines, text).is_some(), "{text}: {lines:#?}");
    }
    // Sorted by profit, the largest first; the reason in a word.
    let first = lines.iter().position(|line| line.starts_with("guest-30")).unwrap();
    assert!(lines[first - 1].starts_with("GUEST") && lines[first - 1].contains("PROFIT▼"), "{lines:#?}");
    assert!(lines[first].contains("pinned") && lines[first].contains("1.46G"), "{}", lines[first]);
    assert!(lines[first + 1].starts_with("guest-29"));
    assert!(lines.iter().filter(|line| line.starts_with("guest-")).count() >= 12, "{lines:#?}");
}

#[test]
fn a_wide_screen_has_all_columns_and_the_sentence() {
    let lines = screen(&mut live(3), 220, 50);
    let head = row_of(&lines, "GUEST").unwrap();
    for column in Column::all() {
        assert!(head.contains(&column.title()), "{head}");
    }
    assert!(row_of(&lines, "pinned: A device may write").is_some(), "{lines:#?}");
}

#[test]
fn keys_choose_sort_filter_and_scroll() {
    let mut app = live(30);
    code(&mut app, KeyCode::Down);
    assert_eq!(app.table.selected, Some(29));
    code(&mut app, KeyCode::End);
    let lines = screen(&mut app, 80, 24);
    assert!(lines[22].starts_with("guest-1 "), "the last is scrolled to: {lines:#?}");
    press(&mut app, "NI");
    assert!(row_of(&screen(&mut app, 80, 24), "▲").is_some());
    press(&mut app, "/guest-7");
    assert!(row_of(&screen(&mut app, 80, 24), "Filter: guest-7_").is_some());
    code(&mut app, KeyCode::Enter);
    let lines = screen(&mut app, 80, 24);
    assert_eq!(lines.iter().filter(|line| line.starts_with("guest-")).count(), 1);
    assert!(lines[23].starts_with("filter: guest-7 F1 Help"), "{}", lines[23]);
    assert_eq!(app.table.selected, Some(7));
    code(&mut app, KeyCode::Esc);
    assert_eq!(app.visible().count(), 30);
    assert!(row_of(&screen(&mut app, 80, 24), "DOMAIN").is_none());
    (0..20).for_each(|_| {
        code(&mut app, KeyCode::Right);
        screen(&mut app, 80, 24);
    });
    assert!(row_of(&screen(&mut app, 80, 24), "DOMAIN").is_some());
    press(&mut app, "/nothing has this");
    code(&mut app, KeyCode::Enter);
    assert!(row_of(&screen(&mut app, 80, 24), "no guest matches 'nothing has this'").is_some());
    press(&mut app, "q");
    assert!(app.is_over());
}

#[test]
fn freeze_keeps_the_moment_and_one_can_go_back() {
    let mut app = live(2);
    press(&mut app, " ");
    app.found(Found::Moment(Box::new(moment(1_700_000_005_000, 9))));
    assert!(screen(&mut app, 80, 24)[0].contains("FROZEN at"));
    assert_eq!(app.table.rows.len(), 2);
    press(&mut app, "T");
    assert_eq!(app.time(), 1_700_000_003_000);
    press(&mut app, "tt");
    assert_eq!((app.time(), app.table.rows.len()), (1_700_000_005_000, 9));
    press(&mut app, "J");
    assert_eq!(app.time(), 1_700_000_000_000);
    press(&mut app, "g+2s");
    code(&mut app, KeyCode::Enter);
    assert_eq!(app.time(), 1_700_000_002_000);
    press(&mut app, "gnever");
    code(&mut app, KeyCode::Enter);
    assert!(row_of(&screen(&mut app, 80, 24), "'never' is no time").is_some());
    code(&mut app, KeyCode::Esc);
    press(&mut app, " ");
    assert!(app.is_live() && app.table.rows.len() == 9);
}

#[test]
fn a_daemon_that_goes_is_named_and_what_was_known_stays() {
    let mut app = live(4);
    for second in 5..8 {
        app.found(Found::Moment(Box::new(away(1_700_000_000_000 + second * 1000))));
    }
    let lines = screen(&mut app, 120, 24);
    let since = clock::clock(1_700_000_005_000);
    assert!(lines[0].contains(&format!("NO DAEMON since {since}; trying again: no daemon answers")), "{}", lines[0]);
    assert!(row_of(&lines, "guest-4").is_some());
    app.found(Found::Moment(Box::new(moment(1_700_000_008_000, 4))));
    assert!(!screen(&mut app, 120, 24)[0].contains("NO DAEMON"));
    // And none from the beginning.
    let mut app = App::live(Theme::Colour);
    assert!(screen(&mut app, 80, 24)[0].contains("asking the daemon"));
    app.found(Found::Moment(Box::new(away(1_700_000_000_000))));
    assert!(screen(&mut app, 80, 24)[0].contains("NO DAEMON"));
}

#[test]
fn the_detail_has_the_sentence_the_map_and_the_hottest_ranges() {
    for (width, height) in [(80, 24), (160, 50)] {
        let mut app = live(3);
        code(&mut app, KeyCode::Enter);
        assert_eq!(app.whose_memory(), Some(3));
        assert!(row_of(&screen(&mut app, width, height), "asking for a map").is_some());
        let merged = Cell { merged: 16, ..Cell::default() };
        let mixed = Cell { volatile: 9, zero: 7, ..Cell::default() };
        let regions =
            vec![RegionMap { start: 0x7f00_0000_0000, pages: 64, cells: vec![merged, merged, mixed, Cell::default()] }];
        let hottest = vec![HotRange { start: 0x7f00_0000_2000, pages: 4, writes: 77 }];
        let map = ClientMap { pid: 3, cell_pages: 16, regions, hottest, ..ClientMap::default() };
        app.found(Found::Map(3, Ok(map)));
        let lines = screen(&mut app, width, height);
        for text in [
            "guest-3 (process 3)",
            "Why not more: pinned: A device may write",
            "7f0000000000 ██~",
            "█ merged",
            "each 64 KiB",
            "Hottest: 7f0000002000  16 KiB, written 77 times",
            "guest-2",
        ] {
            assert!(row_of(&lines, text).is_some(), "{text}: {lines:#?}");
        }
    }
}

#[test]
fn a_recording_is_shown_from_the_time_asked_for() {
    let mut writer = Writer::new(Vec::new()).unwrap();
    for second in 0..100 {
        writer.append(&moment(1_700_000_000_000 + second * 1000, 1 + second as i32 / 10)).unwrap();
    }
    let recording = Recording::from_bytes(writer.into_inner()).unwrap();
    let mut app = App::replay(recording, "day.rec".into(), 1_700_000_055_000, Theme::Plain);
    let lines = screen(&mut app, 100, 24);
    assert!(lines[0].contains("day.rec") && lines[0].contains(&clock::date(1_700_000_055_000)), "{}", lines[0]);
    assert_eq!(app.table.rows.len(), 6);
    press(&mut app, "L");
    assert_eq!(app.table.rows.len(), 10);
    press(&mut app, "B");
    assert_eq!(app.table.rows.len(), 1);
}

#[test]
fn without_colours_there_are_none() {
    let mut app = live(3);
    app.theme = Theme::Plain;
    code(&mut app, KeyCode::Enter);
    let mut terminal = Terminal::new(TestBackend::new(120, 40)).unwrap();
    for help in [false, true] {
        app.has_help = help;
        terminal.draw(|frame| draw(&mut app, frame)).unwrap();
        let cells = &terminal.backend().buffer().content;
        assert!(cells.iter().all(|cell| cell.fg == Color::Reset && cell.bg == Color::Reset));
    }
    assert!(row_of(&screen(&mut app, 80, 24), "why not more is merged").is_some());
}

#[test]
fn no_size_is_too_small_to_draw() {
    let mut app = live(5);
    for has_detail in [false, true] {
        app.detail = has_detail.then_some(0);
        for (width, height) in [(1, 1), (10, 3), (40, 12), (41, 13), (79, 23), (300, 100)] {
            screen(&mut app, width, height);
        }
    }
    let text = screen(&mut app, 30, 10).join(" ");
    assert!(text.contains("30 by 10 is too") && text.contains("40 by 12"), "{text}");
}

#[test]
fn text_is_wrapped_between_words_and_cut_with_a_mark() {
    assert_eq!(wrap("one two three", 7), ["one two", "three"]);
    assert_eq!((bar(0.5, 4), bar(9.0, 2), bar(-1.0, 2)), ("[||  ]".into(), "[||]".into(), "[  ]".into()));
}

/// Every number as large as its field takes.
fn extreme(moment: &Moment) -> Moment {
    fn each(value: &mut serde_json::Value, change: &mut dyn FnMut(&mut serde_json::Value)) {
        match value {
            serde_json::Value::Array(items) => items.iter_mut().for_each(|item| each(item, change)),
            serde_json::Value::Object(fields) => fields.values_mut().for_each(|field| each(field, change)),
            leaf => change(leaf),
        }
    }
    let mut value = serde_json::to_value(moment).unwrap();
    let mut leaves = 0;
    each(&mut value, &mut |_| leaves += 1);
    for which in 0..leaves {
        for large in [serde_json::json!(u64::MAX), i64::MIN.into(), i64::MAX.into(), u32::MAX.into(), i32::MAX.into()] {
            let mut tried = value.clone();
            let mut at = 0;
            each(&mut tried, &mut |leaf| {
                if at == which && (leaf.is_number() || leaf.is_null()) {
                    *leaf = large.clone();
                }
                at += 1;
            });
            if serde_json::from_value::<Moment>(tried.clone()).is_ok() {
                value = tried;
                break;
            }
        }
    }
    Moment { time: moment.time, ..serde_json::from_value(value).unwrap() }
}

#[test]
fn numbers_at_their_limits_end_nothing() {
    let mut writer = Writer::new(Vec::new()).unwrap();
    for second in 0..3 {
        let moment = extreme(&moment(1_700_000_000_000 + second * 1000, 3));
        assert_eq!(moment.status.as_ref().unwrap().domains[0].clients[0].metrics.pages_merged, u64::MAX);
        writer.append(&moment).unwrap();
    }
    let bytes = writer.into_inner();
    let mut recording = Recording::from_bytes(bytes.clone()).unwrap();
    let (first, second) = (recording.moment(0).unwrap(), recording.moment(1).unwrap());
    assert!(crate::view::text(&second, Some(&first)).contains("guest"));
    assert!(crate::report::html(&mut recording, "x").unwrap().contains("</html>"));
    let mut app = App::replay(recording, "x".into(), i64::MAX, Theme::Colour);
    code(&mut app, KeyCode::Enter);
    press(&mut app, "JjTt++++");
    for (width, height) in [(80, 24), (200, 60)] {
        screen(&mut app, width, height);
    }
}

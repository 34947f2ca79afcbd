//! `pageone top`, `record`, `replay` and `report`, on a real terminal (tmux) and in a real browser
//! (Chromium).

mod names;
mod report;
mod terminal;

use std::time::Duration;

use e2e::{Client, Daemon, eventually, skipped};

use terminal::Terminal;

const PAGES: u64 = 1024;

/// A daemon with this many clients that share everything.
fn merged(clients: usize) -> (Daemon, Vec<Client>) {
    let daemon = Daemon::start();
    let clients: Vec<_> = (0..clients)
        .map(|_| {
            let mut client = daemon.scenario(&["hold", &PAGES.to_string(), "1", "3"]);
            client.expect("ready");
            client
        })
        .collect();
    clients.iter().for_each(|client| daemon.wait_merged(client.pid(), PAGES));
    (daemon, clients)
}

#[test]
fn top_on_a_terminal() {
    let Some(tmux) = terminal::find() else { return skipped("there is no tmux (Debian: package tmux)") };
    let (mut daemon, clients) = merged(2);
    let top = Terminal::start(tmux, (80, 24), &daemon.pageone(&["top", "--every", "0.2"]), "");
    let rows = |text: &str| text.lines().filter(|line| line.starts_with("pageone-test-c")).count();
    let screen = top.wait("both clients", |text| rows(text) == 2);
    for part in [
        "2 guests, 1 domain",
        "Used ",
        "Saved ",
        "Could be saved",
        "CPU ",
        "Pressure memory",
        "Store ",
        "Governor ",
        "WHY NOT MORE",
        "F1 Help",
        "q Quit",
    ] {
        assert!(screen.contains(part), "{part} is missing:\n{screen}");
    }
    assert!(!screen.contains("DOMAIN"), "no room for it in 80 columns:\n{screen}");
    assert!(top.colours().contains("\x1b["), "colours by default");

    top.keys(&["?"]);
    top.wait("the help", |text| text.contains("any key closes this") && text.contains("why not more is merged"));
    top.keys(&["x", "Enter"]);
    top.wait("the detail", |text| text.contains("Why not more") && text.contains("(process "));
    top.keys(&["Down"]);
    top.wait("the other client", |text| {
        clients.iter().any(|client| text.contains(&format!("(process {})", client.pid())))
    });
    // Esc and a key that are read at once are another key.
    top.keys(&["Escape"]);
    top.wait("the table", |text| !text.contains("Why not more"));
    top.keys(&["N"]);
    top.wait("sorted by name", |text| text.contains("GUEST          ▼"));
    let other = clients[1].pid().to_string();
    top.keys(&["/", &other, "Enter"]);
    top.wait("one of them", |text| rows(text) == 1 && text.contains(&format!("filter: {other}")));
    top.keys(&["Escape"]);
    top.wait("both again", |text| rows(text) == 2);
    top.keys(&["Space"]);
    top.wait("it is frozen, with all rows", |text| rows(text) == 2 && text.contains("FROZEN at"));
    top.keys(&["T", "T", "g", "-1h", "Enter", "Space"]);
    top.wait("it goes on", |text| !text.contains("FROZEN"));

    top.resize(160, 50);
    top.wait("all columns", |text| text.contains("DOMAIN") && text.contains("uid-0") && text.contains("FAULT/s"));
    top.resize(39, 10);
    top.wait("a sentence", |text| text.contains("too small"));
    top.resize(80, 24);
    top.wait("everything again", |text| rows(text) == 2);

    daemon.kill();
    let screen = top.wait("the daemon is missed", |text| text.contains("NO DAEMON since"));
    assert_eq!(rows(&screen), 2, "what was known stays:\n{screen}");
    daemon.restart();
    top.wait("the daemon is back", |text| !text.contains("NO DAEMON") && rows(text) == 2);
    top.keys(&["q"]);
    top.wait("the end", |text| text.contains("ended 0"));
}

#[test]
fn top_without_colours_and_on_terminals_that_cannot_show_it() {
    let Some(tmux) = terminal::find() else { return skipped("there is no tmux (Debian: package tmux)") };
    let (daemon, _clients) = merged(2);
    let top = Terminal::start(tmux, (100, 30), &daemon.pageone(&["top"]), "NO_COLOR=1");
    top.wait("the screen", |text| text.contains("pageone-test-c"));
    top.keys(&["Enter"]);
    top.wait("the detail", |text| text.contains("Why not more"));
    let escapes = top.colours();
    let has_colour = |sequence: &str| {
        let codes = sequence.split('m').next().unwrap_or_default();
        codes
            .split(';')
            .filter_map(|code| code.parse::<u32>().ok())
            .any(|code| matches!(code, 30..=38 | 40..=48 | 90..=107))
    };
    assert!(!escapes.split("\x1b[").skip(1).any(has_colour), "{escapes:?}");
    assert!(escapes.contains("\x1b[7m") || escapes.contains(";7m"), "reversed text instead: {escapes:?}");

    let dumb = Terminal::start(tmux, (100, 30), &daemon.pageone(&["top"]), "TERM=dumb");
    dumb.wait("what to do instead", |text| {
        text.contains("a terminal of type 'dumb' cannot show it")
            && text.contains("--batch")
            && text.contains("ended 1")
    });
    let piped = daemon.pageone(&["top"]).output().unwrap();
    assert_eq!(piped.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&piped.stderr).contains("this needs a terminal; `pageone top --batch`"));
    let batch = daemon.pageone(&["top", "--batch", "--count", "2", "--every", "0.2"]).output().unwrap();
    let text = String::from_utf8_lossy(&batch.stdout);
    assert!(batch.status.success() && text.matches("2 guests, 1 domain").count() == 2, "{text}");
    assert_eq!(text.lines().filter(|line| line.starts_with("pageone-test-client")).count(), 4, "{text}");
    assert!(!text.contains('\x1b'));
}

#[test]
fn a_recording_is_replayed_at_any_moment() {
    let (mut daemon, clients) = merged(2);
    let file = daemon.dir.path().join("day.rec");
    let path = file.to_str().unwrap();
    let mut recorder = daemon.pageone(&["record", "-o", path, "--every", "0.1"]).spawn().unwrap();
    let size = || file.metadata().map_or(0, |meta| meta.len());
    eventually("something is recorded", Duration::from_secs(20), || (size() > 8000).then_some(()));
    daemon.kill();
    std::thread::sleep(Duration::from_millis(500));
    daemon.restart();
    // The last moments are to have them.
    clients.iter().for_each(|client| daemon.wait_merged(client.pid(), PAGES));
    let so_far = size();
    eventually("the recorder goes on", Duration::from_secs(20), || (size() > so_far + 6000).then_some(()));
    recorder.kill().unwrap();
    recorder.wait().unwrap();
    // The last moment may be written in part: cut the file there.
    std::fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(size() - 7).unwrap();

    let replay = |args: &[&str]| daemon.pageone(&[&["replay", path, "--batch"], args].concat()).output().unwrap();
    let first = replay(&[]);
    let text = String::from_utf8_lossy(&first.stdout).into_owned();
    assert!(text.contains("2 guests, 1 domain") && text.contains(&clients[0].pid().to_string()), "{text}");
    let said = String::from_utf8_lossy(&first.stderr).into_owned();
    assert!(said.contains("cannot be read") && said.contains("the rest is shown"), "{said}");
    let last = replay(&["--at", "-0.1s"]);
    assert!(last.status.success() && String::from_utf8_lossy(&last.stdout).contains("2 guests"), "{last:?}");
    let wrong = replay(&["--at", "noon"]);
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("--at: 'noon' is no time: write 14:05"), "{wrong:?}");

    let again = daemon.pageone(&["record", "-o", path, "--for", "1"]).output().unwrap();
    assert!(
        !again.status.success() && String::from_utf8_lossy(&again.stderr).contains("--force replaces it"),
        "{again:?}"
    );
    let other = daemon.pageone(&["replay", "/etc/hostname"]).output().unwrap();
    assert!(String::from_utf8_lossy(&other.stderr).contains("this is no recording of `pageone record`"), "{other:?}");

    if let Some(tmux) = terminal::find() {
        let screen = Terminal::start(tmux, (80, 24), &daemon.pageone(&["replay", path]), "");
        screen.wait("the first moment", |text| text.contains("day.rec") && text.contains("2 guests"));
        screen.keys(&["t", "L"]);
        screen.wait("the last moment", |text| text.contains("2 guests"));
        screen.keys(&["g", "nonsense", "Enter"]);
        screen.wait("what is understood", |text| text.contains("'nonsense' is no time"));
        screen.keys(&["Escape"]);
        screen.wait("no question", |text| !text.contains("is no time"));
        screen.keys(&["q"]);
        screen.wait("the end", |text| text.contains("ended 0"));
    }
}

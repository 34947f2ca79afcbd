//! The report, in a browser.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use e2e::{eventually, skipped};

use super::merged;

/// Runs Chromium without a window on a page. `None`: it is not installed.
fn chromium(profile: &Path, page: &Path, args: &[&str]) -> Option<Output> {
    let program = ["chromium", "chromium-browser"]
        .into_iter()
        .find(|name| Command::new(name).arg("--version").output().is_ok_and(|out| out.status.success()))?;
    let mut command = Command::new(program);
    // Tests run as root, often in containers that let it make no sandbox.
    command.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]);
    command.arg(format!("--user-data-dir={}", profile.display())).args(["--enable-logging=stderr", "--log-level=0"]);
    command.args(args).arg(format!("file://{}", page.display()));
    Some(command.output().unwrap())
}

#[test]
fn a_report_is_one_page_that_a_browser_shows_and_prints() {
    let (daemon, clients) = merged(3);
    let dir = daemon.dir.path();
    let (file, page) = (dir.join("day.rec"), dir.join("report.html"));
    let (tables, json) = (dir.join("tables"), dir.join("day.json"));
    let run = |args: &[&str]| {
        let out = daemon.pageone(args).output().unwrap();
        assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    };
    let paths = [&file, &page, &tables, &json].map(|path| path.to_str().unwrap());
    let recorded = || -> serde_json::Value {
        run(&["record", "-o", paths[0], "--every", "0.2", "--for", "3", "--force"]);
        run(&["report", paths[0], "--json", paths[3], "--force"]);
        serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap()
    };
    // On a busy machine few moments of three seconds are recorded.
    let value = eventually("five moments are recorded", Duration::from_secs(60), || {
        Some(recorded()).filter(|value| value["moments"].as_array().unwrap().len() >= 5)
    });
    assert!(value["moments"][0]["status"]["pages_sharing"].as_u64().unwrap() > 0);
    let nothing = daemon.pageone(&["report", file.to_str().unwrap()]).output().unwrap();
    assert!(String::from_utf8_lossy(&nothing.stderr).contains("say what to write: -o report.html"), "{nothing:?}");
    run(&["report", paths[0], "-o", paths[1], "--csv", paths[2], "--json", paths[3], "--force"]);

    let guests = std::fs::read_to_string(tables.join("guests.csv")).unwrap();
    let lines =
        |pid: i32| guests.lines().filter(|line| line.contains(&format!(",uid-0,{pid},pageone-test-client,"))).count();
    assert!(clients.iter().all(|client| lines(client.pid()) >= 5), "{guests}");

    let html = std::fs::read_to_string(&page).unwrap();
    for foreign in ["<script", "http:", "https:", "url("] {
        assert!(!html.contains(foreign), "{foreign}: the page needs nothing from elsewhere");
    }
    let profile = dir.join("profile");
    let Some(dom) = chromium(&profile, &page, &["--dump-dom"]) else {
        return skipped("there is no Chromium (Debian: package chromium): the page was not opened in a browser");
    };
    let (dom, said) = (String::from_utf8_lossy(&dom.stdout), String::from_utf8_lossy(&dom.stderr));
    let plots = [
        "Memory over time",
        "Saving by guest over time",
        "Memory of the guests",
        "Who shares with whom",
        "CPU time",
        "Pressure",
        "Stalls",
    ];
    for plot in plots {
        assert!(dom.contains(&format!("aria-label=\"{plot}\"")), "{plot} is missing");
    }
    assert!(dom.matches("<path").count() >= 10 && dom.contains("</html>"), "{dom}");
    assert!(!said.contains("CONSOLE"), "an error in the console: {said}");

    let pdf = dir.join("report.pdf");
    let print = format!("--print-to-pdf={}", pdf.display());
    chromium(&profile, &page, &[&print, "--no-pdf-header-footer"]);
    let bytes = std::fs::read(&pdf).unwrap();
    let pages = bytes.windows(11).filter(|bytes| bytes == b"/Type /Page").count();
    // The tree of pages is one of them.
    assert!(bytes.starts_with(b"%PDF") && pages >= 3, "{pages} pages in {} bytes", bytes.len());
    let picture = dir.join("report.png");
    let shot = format!("--screenshot={}", picture.display());
    chromium(&profile, &page, &[&shot, "--window-size=1000,2400"]);
    assert!(std::fs::metadata(&picture).unwrap().len() > 20_000, "an empty picture");
}

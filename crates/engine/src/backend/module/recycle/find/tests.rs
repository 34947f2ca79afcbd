use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use rustix::fs::SealFlags;

use super::*;
use crate::backend::module::tests::Fake;
use crate::core::ledger::free_pages::tests::{guest_side, pool};

#[test]
fn what_a_process_has_instead_of_pool_and_monitor_is_refused() {
    let (fd, map) = pool(SealFlags::SHRINK | SealFlags::GROW);
    guest_side(&map).initialise();
    let (monitor, _qemu) = UnixStream::pair().unwrap();
    let (number, monitor) = (fd.as_raw_fd() as u32, monitor.as_raw_fd() as u32);
    let look = |pool, qmp| inherited(&Owner::this().process, Words { pool, qmp, period_ms: 0 }, &|| false);
    assert!(matches!(look(1 << 20, monitor), Err(FindError::Descriptor(_))));
    assert!(matches!(look(number, number), Err(FindError::NoMonitor)));
    assert!(matches!(look(monitor, monitor), Err(FindError::Pool(TakeError::Marks(_)))));
    let _other = super::super::pool::tests::take(&fd);
    assert!(matches!(look(number, monitor), Err(FindError::Over)), "it has ended, and waits for nobody");
}

#[test]
fn a_guest_whose_ram_is_no_managed_file_is_refused() {
    let (monitor, qemu) = UnixStream::pair().unwrap();
    // It ends with the monitor.
    std::thread::spawn(move || {
        for line in BufReader::new(&qemu).lines().map_while(Result::ok) {
            let asked: serde_json::Value = serde_json::from_str(&line).unwrap();
            let answer = match asked["execute"].as_str().unwrap() {
                "human-monitor-command" => serde_json::json!(""),
                _ => serde_json::json!([]),
            };
            writeln!(&qemu, "{}", serde_json::json!({ "return": answer, "id": asked["id"] })).unwrap();
        }
    });
    let kept = Arc::new(crate::backend::module::mounts::Files::default());
    let file = crate::backend::module::tests::file(Arc::new(Fake(Mutex::default())), 1);
    let subject = Subject { owner: Owner::this(), file };
    let why = locate(&*kept, &subject, &monitor.into(), &|| true).err().unwrap();
    assert!(matches!(why, FindError::Unmanaged), "{why}");
}

#[test]
fn an_environment_says_where_pool_and_monitor_are_or_nothing() {
    let parse = |text: &str| Words::parse(text.replace(' ', "\0").as_bytes());
    let both = parse("PATH=/bin PAGEONE_PPR_FILE_POOL=7 PAGEONE_PPR_FILE_QMP=9 ");
    assert_eq!(both, Some(Words { pool: 7, qmp: 9, period_ms: 0 }));
    let period = parse("PAGEONE_PPR_PERIOD_MS=500 PAGEONE_PPR_FILE_POOL=7 PAGEONE_PPR_FILE_QMP=9");
    assert_eq!(period.map(|words| words.period_ms), Some(500));
    for text in [
        "",
        "PAGEONE_PPR_FILE_POOL=7",
        "PAGEONE_PPR_FILE_POOL=-1 PAGEONE_PPR_FILE_QMP=9",
        "XPAGEONE_PPR_FILE_POOL=7 PAGEONE_PPR_FILE_QMP=9",
    ] {
        assert_eq!(parse(text), None, "{text}");
    }
}

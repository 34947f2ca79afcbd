//! Memory of processes.

use super::*;

#[test]
fn chunks_hold_all_pages_once() {
    let pages = [Range::new(0x1000, 0x1000), Range::new(0x3000, 0x2000), Range::new(0x9000, 0x1000)];
    assert_eq!(widen(&pages, 4096), pages);
    assert_eq!(widen(&pages, 0x4000), [Range::new(0, 0xc000)]);
    assert_eq!(widen(&pages[..1], 0x2000), [Range::new(0, 0x2000)]);
    assert_eq!(widen(&pages, 0x2000), [Range::new(0, 0x6000), Range::new(0x8000, 0x2000)]);
}

#[test]
fn a_thread_of_ours_has_pages_and_they_can_be_cut() {
    let memory = vec![7u8; 1 << 20];
    let process = Process::open(std::process::id() as i32, Part::All, 8192).unwrap();
    let whole = Range::new(memory.as_ptr().addr().next_multiple_of(8192), 512 << 10);
    assert!(process.spans.iter().any(|span| span.contains(&whole)));
    let pieces = process.pieces(64 << 10);
    assert_eq!(pieces.iter().flatten().map(|range| range.len as u64).sum::<u64>(), process.bytes());
    assert!(pieces.iter().all(|piece| piece.iter().map(|range| range.len).sum::<usize>() <= 64 << 10));
    assert!(pieces.iter().flatten().all(|range| range.start % 8192 == 0 && range.len % 8192 == 0));
}

#[test]
fn what_is_no_process_says_so() {
    let error = Process::open(i32::MAX, Part::All, 4096).unwrap_err().to_string();
    assert!(error.contains("no process") && error.contains("./"), "{error}");
    // A process of its own: what other tests allocate in this one may be as large as a guest.
    let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let open = || Process::open(child.id() as i32, Part::Guest, 4096);
    while procfs::status(Some(child.id() as i32)).unwrap().name != "sleep" {
        std::thread::yield_now();
    }
    let error = open().unwrap_err().to_string();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(error.contains("guest memory"), "{error}");
}

#[test]
fn threads_and_processes_without_memory_say_so() {
    let (tell, thread) = std::sync::mpsc::channel();
    let (held, end) = std::sync::mpsc::channel::<()>();
    let other = std::thread::spawn(move || {
        tell.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
        let _ = end.recv();
    });
    let error = Process::open(thread.recv().unwrap(), Part::All, 4096).unwrap_err();
    assert_eq!(error.to_string(), "it is a thread; give the number of its process");
    drop(held);
    other.join().unwrap();
    // What has ended and was not waited for has a number, and no memory any more.
    let mut child = std::process::Command::new("true").spawn().unwrap();
    let pid = child.id() as i32;
    while !std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") Z ") {
        std::thread::yield_now();
    }
    let error = Process::open(pid, Part::All, 4096).unwrap_err();
    child.wait().unwrap();
    assert!(error.to_string().starts_with("it has no private memory"), "{error}");
}

/// Also when its number is another process's by then: what counts is the process that was
/// opened.
#[test]
fn a_process_that_has_ended_is_not_counted() {
    let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let process = loop {
        // Until it has become `sleep`.
        let process = Process::open(child.id() as i32, Part::All, 4096).unwrap();
        if process.name == "sleep" {
            break process;
        }
    };
    child.kill().unwrap();
    child.wait().unwrap();
    let index = crate::index::Index::new(1 << 24);
    let mut counter = Counter::new(&index, 0, 0, 4096);
    let error = process.read(&process.spans, 4096, &mut Vec::new(), &mut counter, |_| {}).unwrap_err().to_string();
    assert!(error.contains("has ended"), "{error}");
    assert_eq!(counter.tally.chunks, 0);
}

//! Programs that give up privileges, change their root directory, or choose their tracer after they
//! became clients.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]
#![allow(clippy::unwrap_used)] // In tests.

mod support;

use std::os::unix::fs::PermissionsExt;
use support::client;
use support::daemon::{Daemon, MERGES, PAGES, Program, Store, kernel_can, managed};
use wire::{Outcome, ToAgent, ToDaemon};

/// The user that programs become.
const NOBODY: u32 = 65534;

/// Not a test: what the client runs.
#[test]
fn client() {
    client::run_if_asked();
}

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("SKIPPED: only root may become another user, or change the root directory");
    }
    root
}

/// Merged memory of a program whose copies cool down for a moment, after it did this.
fn merged_then(change: &str) -> (Daemon, Program, Store) {
    let mut daemon = Daemon::new();
    daemon.direct_io_ms = 50;
    let mut program = Program::start_with(&daemon.socket, [("PAGEONE_LOG", "1")]);
    let store = daemon.manage(&mut program, PAGES);
    daemon.merge_all(&store);
    assert_eq!(program.ask(change), "0", "{change}");
    (daemon, program, store)
}

/// Pages of the test's store that the program maps, in private mappings.
fn frames_mapped(program: &Program) -> usize {
    let mut pages = 0;
    kmem::procfs::for_each_map(Some(program.pid()), |line| {
        if line.path.starts_with("/memfd:pageone-test") && !line.perms.shared {
            pages += line.range.len / support::PAGE;
        }
    })
    .unwrap();
    pages
}

#[test]
fn a_program_that_drops_privileges_or_loses_proc_merges_on_and_detaches() {
    if !kernel_can(MERGES) || !is_root() {
        return;
    }
    for change in [format!("become {NOBODY}"), "chroot".into()] {
        println!("{change}");
        let (mut daemon, mut program, store) = merged_then(&change);
        assert!(frames_mapped(&program) > 1500);
        assert_eq!(program.ask(&format!("check 0 {PAGES}")), "0", "{change}");
        // What was written merges again, and what differs is left alone.
        assert_eq!(program.ask("write 500 7"), "0");
        assert_eq!(daemon.merge(1, &store.runs(500..501)), [(500, Outcome::Differs)], "{change}");
        assert_eq!(program.ask("write 500 0"), "0");
        assert_eq!(daemon.merge(1, &store.runs(500..501)), [(500, Outcome::Merged)], "{change}");
        // Discarded, protected and inherited memory is right.
        assert_eq!(program.ask(&format!("advise 100 50 {}", libc::MADV_DONTNEED)), "0", "{change}");
        assert_eq!(program.ask("zeros 100 50"), "0", "{change}");
        assert_eq!(program.ask("protect 200 8 1"), "0", "{change}");
        assert_eq!(program.ask("fork-raw-here 200 300"), "0", "{change}");
        // A lock is seen, and nothing is merged past it.
        assert_eq!(program.ask("write 600 0"), "0");
        assert_eq!(program.ask("raw-lock 1000 1"), "0");
        assert_eq!(daemon.merge(1, &store.runs(600..601)), [(600, Outcome::Locked)], "{change}");
        assert_eq!(program.ask("unlock 1000 1"), "0");
        daemon.send(&ToAgent::Detach, &[]);
        daemon.wait_for(|message| match message {
            ToDaemon::DetachFailed { errno } => panic!("{change}: {errno}"),
            message => matches!(message, ToDaemon::Detached),
        });
        // The protected pages left before: they stayed where they were.
        assert!(frames_mapped(&program) <= 8, "{change}: {} pages are left", frames_mapped(&program));
        assert_eq!(program.ask(&format!("check 150 {}", PAGES - 150)), "0", "{change}");
        assert_eq!(program.ask("zeros 100 50"), "0", "{change}");
    }
}

#[test]
fn a_program_that_drops_privileges_connects_again() {
    if !kernel_can(MERGES) || !is_root() {
        return;
    }
    let (mut daemon, mut program, store) = merged_then(&format!("become {NOBODY}"));
    let directory = daemon.socket.parent().unwrap();
    std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o755)).unwrap();
    daemon.close();
    daemon.accept();
    daemon.welcome();
    assert_eq!(program.ask("write 500 0"), "0");
    assert_eq!(daemon.merge(1, &store.runs(500..501)), [(500, Outcome::Merged)]);
    assert_eq!(program.ask(&format!("check 0 {PAGES}")), "0");
}

#[test]
fn locked_memory_is_seen_when_the_first_thread_has_ended() {
    let Some((mut daemon, mut program, store)) = managed(&[]) else { return };
    assert_eq!(program.ask("end-first-thread"), "0");
    assert_eq!(daemon.merge(1, &store.runs(1..2)), [(1, Outcome::Merged)]);
    assert_eq!(program.ask("raw-lock 1000 1"), "0");
    assert_eq!(daemon.merge(1, &store.runs(2..3)), [(2, Outcome::Locked)]);
    assert_eq!(program.ask(&format!("check 0 {PAGES}")), "0");
}

/// A daemon of that user, where this process may make one.
fn daemon_of(uid: u32) -> Daemon {
    let made = std::thread::spawn(move || {
        // The kernel tells clients whom the thread was that listened.
        #[allow(unsafe_code)]
        // SAFETY: takes numbers. Without the C library's wrapper it is for this thread alone.
        let _ = unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) };
        Daemon::new()
    });
    made.join().unwrap()
}

#[test]
fn a_program_chooses_its_tracer_and_the_agent_leaves_that_alone() {
    if !kernel_can(MERGES) || !is_root() {
        return;
    }
    let own = std::process::id();
    for chosen_before in [false, true] {
        let mut daemon = daemon_of(NOBODY);
        let mut program = Program::start(&daemon.socket, None);
        assert_eq!(program.ask("watch-tracers"), "0");
        if chosen_before {
            assert_eq!(program.ask("tracer 7"), "0");
        }
        program.ask(&format!("map {PAGES}"));
        // The daemon is one of its own user, which needs the permission. The capabilities are for
        // the userfaultfd.
        assert_eq!(program.ask(&format!("become-capable {NOBODY}")), "0");
        assert_eq!(program.ask("mark"), "0");
        daemon.accept();
        daemon.close();
        daemon.accept();
        let until_then = program.ask("tracers");
        if chosen_before {
            assert_eq!(until_then, "[7]");
            continue;
        }
        assert_eq!(until_then, format!("[{own}, 0, {own}]"), "permitted, withdrawn, and permitted again");
        assert_eq!(program.ask("tracer 7"), "0");
        daemon.close();
        daemon.accept();
        assert_eq!(program.ask("tracers"), format!("[{own}, 0, {own}, 7]"));
    }
}

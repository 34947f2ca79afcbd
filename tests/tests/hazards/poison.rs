//! Memory that cannot be read any more harms nobody but its users.
//!
//! What is in swap cannot be looked at either, and is no less the program's.
//!
//! `UFFDIO_POISON` makes one page of one process unreadable, on any machine. Real errors of memory
//! are made in guests only, because a machine never gets such a page back: `make test-kernels` and
//! `make test-debug-kernel` set `PAGEONE_TEST_HWPOISON=1`.

#![allow(unsafe_code)] // swapon(2).

use std::io::Write;
use std::time::Duration;

use e2e::{Client, Daemon, eventually, skipped};

/// Pages of each client; all of one client are unlike each other.
const PAGES: u64 = 2048;

/// How a page is made unreadable here: words of the client's.
fn ways() -> &'static [&'static str] {
    if breaks_memory() { &["lose", "break"] } else { &["lose"] }
}

fn breaks_memory() -> bool {
    std::env::var("PAGEONE_TEST_HWPOISON").is_ok_and(|v| v == "1")
}

/// A client whose pages equal those of every other client with this number.
fn client(daemon: &Daemon, number: u64) -> Client {
    let mut client = daemon.scenario(&["poison", &PAGES.to_string(), &number.to_string()]);
    client.expect("ready");
    client
}

/// The same, marked.
fn marked(daemon: &Daemon, number: u64) -> Client {
    let mut client = client(daemon, number);
    told(&mut client, "mark", "ok");
    client
}

fn told(client: &mut Client, step: &str, answer: &str) {
    client.tell(step);
    let heard = client.hear();
    assert_eq!(heard, answer, "client {} was told: {step}", client.pid());
}

/// Makes a page unreadable; false if this kernel cannot.
fn spoil(client: &mut Client, way: &str, page: u64) -> bool {
    client.tell(&format!("{way} {page}"));
    let heard = client.hear();
    if heard == "ok" {
        return true;
    }
    assert!(heard.starts_with("SKIPPED"), "{way}: {heard}");
    skipped(&format!("no page can be made unreadable by `{way}`: {heard}"));
    false
}

/// So many pages of a client cannot be read; all others are right.
fn check(client: &mut Client, lost: u64) {
    told(client, "go", &format!("ok, {lost} lost"));
}

/// Two marked clients whose pages are merged with each other.
fn merged_pair(daemon: &Daemon, number: u64) -> [Client; 2] {
    let pair = [(); 2].map(|()| marked(daemon, number));
    pair.iter().for_each(|client| daemon.wait_merged(client.pid(), PAGES));
    pair
}

#[test]
fn a_page_that_cannot_be_read_keeps_no_other_from_merging() {
    for way in ways() {
        let daemon = Daemon::start();
        let mut spoilt = client(&daemon, 1);
        if !spoil(&mut spoilt, way, 1000) {
            continue;
        }
        told(&mut spoilt, "mark", "ok");
        let mut other = marked(&daemon, 1);
        daemon.wait_merged(spoilt.pid(), PAGES - 1);
        daemon.wait_merged(other.pid(), PAGES - 1);
        check(&mut spoilt, 1);
        check(&mut other, 0);
        // The program gets a new page in its place, and that one merges.
        told(&mut spoilt, "renew 1000", "ok");
        daemon.wait_merged(spoilt.pid(), PAGES);
        check(&mut spoilt, 0);
        check(&mut other, 0);
    }
}

#[test]
fn a_page_that_breaks_after_it_was_seen_keeps_no_other_from_merging() {
    for way in ways() {
        let daemon = Daemon::start();
        let mut spoilt = marked(&daemon, 1);
        eventually("its pages are known", Duration::from_secs(30), || {
            (daemon.client(spoilt.pid())?["pages_unshared"] == PAGES).then_some(())
        });
        if !spoil(&mut spoilt, way, 1000) {
            continue;
        }
        let mut other = marked(&daemon, 1);
        daemon.wait_merged(spoilt.pid(), PAGES - 1);
        daemon.wait_merged(other.pid(), PAGES - 1);
        check(&mut spoilt, 1);
        check(&mut other, 0);
    }
}

#[test]
fn a_merged_page_that_cannot_be_read_outlasts_restarts_of_the_daemon() {
    for way in ways() {
        let mut daemon = Daemon::start();
        let mut bystanders = merged_pair(&daemon, 2);
        let [mut spoilt, mut other] = merged_pair(&daemon, 1);
        if !spoil(&mut spoilt, way, 1000) {
            continue;
        }
        // A broken frame is lost to all that map it, and to nobody else.
        let lost = u64::from(*way == "break");
        check(&mut spoilt, 1);
        check(&mut other, lost);
        for _ in 0..2 {
            daemon.kill();
            daemon.restart();
            daemon.wait_merged(spoilt.pid(), PAGES - 1);
            daemon.wait_merged(other.pid(), PAGES - 1);
        }
        let mut new = marked(&daemon, 1);
        daemon.wait_merged(new.pid(), PAGES - 1);
        check(&mut new, 0);
        check(&mut spoilt, 1);
        check(&mut other, lost);
        bystanders.iter_mut().for_each(|client| {
            daemon.wait_merged(client.pid(), PAGES);
            check(client, 0);
        });
    }
}

#[test]
fn a_client_that_arrives_after_a_frame_broke_is_not_harmed_by_it() {
    if !breaks_memory() {
        return skipped("memory of this machine must not be broken; `make test-kernels` does it in a guest");
    }
    let daemon = Daemon::start();
    let mut bystanders = merged_pair(&daemon, 2);
    let [mut spoilt, mut other] = merged_pair(&daemon, 1);
    // One only: the kernel ends users of a huge page that it cannot split.
    if !spoil(&mut spoilt, "break", 1000) {
        return;
    }
    let lost = 1;
    let mut new = [(); 2].map(|()| marked(&daemon, 1));
    new.iter().for_each(|client| daemon.wait_merged(client.pid(), PAGES - lost));
    std::thread::sleep(Duration::from_secs(1));
    new.iter_mut().for_each(|client| check(client, 0));
    bystanders.iter_mut().for_each(|client| check(client, 0));
    check(&mut spoilt, lost);
    check(&mut other, lost);
    // Users that leave take nothing with them.
    spoilt.kill();
    other.kill();
    std::thread::sleep(Duration::from_secs(1));
    let mut last = marked(&daemon, 1);
    daemon.wait_merged(last.pid(), PAGES - lost);
    check(&mut last, 0);
    new.iter_mut().for_each(|client| check(client, 0));
}

/// Tells a client whose merged page became unreadable to do something with all of its memory.
fn survives(act: impl Fn(&Daemon, &mut Client)) {
    for way in ways() {
        let daemon = Daemon::start();
        let [mut spoilt, mut other] = merged_pair(&daemon, 1);
        if !spoil(&mut spoilt, way, 1000) {
            continue;
        }
        act(&daemon, &mut spoilt);
        check(&mut spoilt, 1);
        check(&mut other, u64::from(*way == "break"));
        told(&mut spoilt, "renew 1000", "ok");
        check(&mut spoilt, 0);
    }
}

#[test]
fn a_merged_page_that_cannot_be_read_outlasts_a_detach() {
    survives(|daemon, client| {
        let out = daemon.pageone(&["detach", &client.pid().to_string()]).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    });
}

#[test]
fn a_merged_page_that_cannot_be_read_outlasts_a_change_of_protection() {
    survives(|_, client| told(client, "protect", "ok"));
}

#[test]
fn a_child_inherits_an_unreadable_page_and_all_others() {
    survives(|_, client| told(client, "fork", "ok, 1 lost"));
}

/// Swap space in a file, for as long as this lives.
struct Swap {
    file: tempfile::NamedTempFile,
}

impl Swap {
    /// `None`: this host cannot have it.
    fn new() -> Option<Self> {
        const PAGES: u32 = 4096;
        let mut file = tempfile::NamedTempFile::new().unwrap();
        // include/linux/swap.h, union swap_header: version, last page, number of bad pages.
        let mut header = [0; 4096];
        header[1024..1028].copy_from_slice(&1u32.to_ne_bytes());
        header[1028..1032].copy_from_slice(&(PAGES - 1).to_ne_bytes());
        header[4086..].copy_from_slice(b"SWAPSPACE2");
        file.write_all(&header).unwrap();
        // Written, since swap space has no holes.
        (1..PAGES).for_each(|_| file.write_all(&[0; 4096]).unwrap());
        file.as_file().sync_all().unwrap();
        let path = std::ffi::CString::new(file.path().as_os_str().as_encoded_bytes()).unwrap();
        // SAFETY: a path that ends with zero, and no flags.
        let result = unsafe { libc::swapon(path.as_ptr(), 0) };
        (result == 0).then_some(Self { file })
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        let path = std::ffi::CString::new(self.file.path().as_os_str().as_encoded_bytes()).unwrap();
        // SAFETY: a path that ends with zero.
        let _ = unsafe { libc::swapoff(path.as_ptr()) };
    }
}

#[test]
fn a_copy_that_is_swapped_out_before_a_scan_sees_it_leaves_its_frame() {
    let daemon = Daemon::start();
    let [mut writer, mut other] = merged_pair(&daemon, 3);
    let Some(_swap) = Swap::new() else { return skipped("there is no swap space here") };
    for page in 100..200 {
        told(&mut writer, &format!("swap {page}"), "ok");
    }
    // None is left out: pages that stay as they are merge again.
    eventually("copies leave their frames", Duration::from_secs(20), || {
        (daemon.client(writer.pid())?["pages_copied_total"].as_u64()? >= 90).then_some(())
    });
    check(&mut writer, 0);
    check(&mut other, 0);
}

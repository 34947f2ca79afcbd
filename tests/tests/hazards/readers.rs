//! Reading a client: never another program, never for long.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use e2e::{Client, Daemon, eventually, program, skipped};
use rustix::fs::{Mode, OFlags};

/// A file that does not answer reads until it is told to: a FUSE file system of one file
/// (include/uapi/linux/fuse.h).
struct HungFile {
    path: PathBuf,
    answers: Arc<AtomicBool>,
    /// A read has come.
    asked: Arc<AtomicBool>,
}

impl HungFile {
    /// Mounts it; or why not.
    fn mount(dir: &std::path::Path) -> Result<Self, std::io::Error> {
        let device = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())?;
        let path = dir.join("hung");
        std::fs::write(&path, b"")?;
        let options = format!("fd={},rootmode=100644,user_id=0,group_id=0,allow_other", device.as_raw_fd());
        let options = std::ffi::CString::new(options)?;
        let target = std::ffi::CString::new(path.to_str().unwrap())?;
        #[allow(unsafe_code)]
        // SAFETY: four strings that end with zero.
        let result = unsafe {
            libc::mount(c"pageone-test".as_ptr(), target.as_ptr(), c"fuse".as_ptr(), 0, options.as_ptr().cast())
        };
        if result != 0 {
            return Err(std::io::Error::last_os_error());
        }
        let file = Self { path, answers: Arc::default(), asked: Arc::default() };
        let (answers, asked) = (file.answers.clone(), file.asked.clone());
        std::thread::spawn(move || serve(&device, &answers, &asked));
        Ok(file)
    }
}

impl Drop for HungFile {
    fn drop(&mut self) {
        self.answers.store(true, SeqCst);
        let target = std::ffi::CString::new(self.path.to_str().unwrap()).unwrap();
        #[allow(unsafe_code)]
        // SAFETY: a string that ends with zero.
        let _ = unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) };
    }
}

/// Answers everything but reads; these too once `answers` is set.
fn serve(device: &OwnedFd, answers: &AtomicBool, asked: &AtomicBool) {
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>();
    let answer = |unique: u64, error: i32, body: &[u8]| {
        let mut packet = (16 + body.len() as u32).to_ne_bytes().to_vec();
        packet.extend(error.to_ne_bytes());
        packet.extend(unique.to_ne_bytes());
        packet.extend(body);
        let _ = rustix::io::write(device, &packet);
    };
    let (mut request, mut held) = (vec![0u8; 1 << 17], Vec::new());
    loop {
        if answers.load(SeqCst) {
            held.drain(..).for_each(|(unique, len)| answer(unique, 0, &vec![7; len]));
        }
        match rustix::io::read(device, &mut request[..]) {
            Ok(_) => {}
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::NOENT | rustix::io::Errno::INTR) => {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            Err(_) => return,
        }
        let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
        let unique = u64::from_ne_bytes(request[8..16].try_into().unwrap());
        match word(4) {
            // INIT: major, minor, max_readahead, flags, max_background and congestion_threshold,
            // max_write, time_gran, unused.
            26 => answer(unique, 0, &words(&[7, 31, 0, 0, 0x0010_0010, 4096, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0])),
            // GETATTR: attr_valid, its nanoseconds, dummy; ino, size, blocks, three times, their
            // nanoseconds, mode, nlink, uid, gid, rdev, blksize, flags.
            3 => {
                let mut attr = [0u32; 26];
                (attr[4], attr[6], attr[19], attr[20]) = (1, 8 << 20, 0o100644, 1);
                answer(unique, 0, &words(&attr));
            }
            // OPEN: fh, open_flags (`FOPEN_NOFLUSH`), padding.
            14 => answer(unique, 0, &words(&[1, 0, 1 << 5, 0])),
            // READ: size behind header, fh and offset.
            15 => {
                asked.store(true, SeqCst);
                held.push((unique, word(56) as usize));
            }
            // FORGET, INTERRUPT, BATCH_FORGET take no answer.
            2 | 36 | 42 => {}
            _ => answer(unique, -libc::ENOSYS, &[]),
        }
    }
}

/// A client without an agent that speaks for itself; see `tests/src/bin/client/raw.rs`.
fn raw(daemon: &Daemon, scenario: &str, words: &[&str]) -> Client {
    let mut command = Command::new(program("pageone-test-client"));
    command.arg(scenario).arg(daemon.dir.path().join("agent.sock")).args(words);
    Client::spawn(command)
}

#[test]
fn a_program_that_a_client_becomes_is_never_read() {
    const PAGES: u64 = 1024;
    // Slow reading: the program changes after its pages were found clean, and before all are read.
    let daemon = Daemon::with(&["--merge-period", "3"]);
    let mut holder = daemon.scenario(&["hold", "1024", "1", "6"]);
    holder.expect("ready");
    eventually("the holder's pages are known", Duration::from_secs(30), || {
        (daemon.client(holder.pid())?["pages_unshared"] == PAGES).then_some(())
    });
    let mut client = raw(&daemon, "exec", &["1024", "6"]);
    client.expect("ready");
    eventually("the client is being read", Duration::from_secs(30), || {
        (daemon.client(client.pid())?["pages_unshared"].as_u64()? >= 1).then_some(())
    });
    client.tell("exec");
    client.expect("other");
    std::thread::sleep(Duration::from_secs(6));
    let status = daemon.status();
    assert_eq!(status["pages_shared"], 0, "what another program holds became frames: {status:#}");
    client.go();
    holder.go();
}

#[test]
fn a_process_that_shares_a_clients_memory_and_outlives_it_keeps_its_frames() {
    let daemon = Daemon::start();
    let mut client = daemon.scenario(&["sibling", "4096", "4"]);
    client.expect("ready");
    let pid = client.pid();
    daemon.wait_merged(pid, 4096);
    client.tell("go");
    client.expect("alone");
    let other = || {
        // Its pages need frames, and take those that are free.
        let mut other = daemon.scenario(&["hold", "4096", "4", "9"]);
        other.expect("ready");
        daemon.wait_merged(other.pid(), 4096);
        other
    };
    let mut others = [other(), other()];
    let merged = daemon.client(pid).map(|client| (client["pages_merged"].clone(), client["state"].clone()));
    assert_eq!(merged, Some((4096.into(), "disconnected".into())), "its memory is in use");
    client.go();
    others.iter_mut().for_each(Client::go);
    // The sibling ends with its input.
    client.finish();
    eventually("the client is gone with its memory", Duration::from_secs(30), || {
        daemon.client(pid).is_none().then_some(())
    });
}

#[test]
fn a_file_that_does_not_answer_holds_up_nobody_but_its_user() {
    if !rustix::process::geteuid().is_root() {
        return skipped("clients of two users need root");
    }
    let daemon = Daemon::with(&["--merge-period", "3", "--target-scan-time", "0.1"]);
    std::fs::set_permissions(daemon.dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    // Dropped after the file, for which the daemon's threads wait, and so the ends of clients.
    let mut stuck: Vec<Client> = Vec::new();
    let file = match HungFile::mount(daemon.dir.path()) {
        Ok(file) => file,
        Err(why) => return skipped(&format!("a FUSE file system cannot be mounted: {why}")),
    };
    let path = file.path.to_str().unwrap().to_string();
    stuck.extend((0..3).map(|_| raw(&daemon, "stuck", &["1024", &path])));
    stuck.iter_mut().for_each(|client| client.expect("ready"));
    for client in &mut stuck {
        eventually("it was scanned", Duration::from_secs(30), || {
            (daemon.client(client.pid())?["full_scans"].as_u64()? >= 1).then_some(())
        });
        client.tell("map");
        client.expect("mapped");
    }
    eventually("a worker waits for the file", Duration::from_secs(30), || file.asked.load(SeqCst).then_some(()));
    // Both workers may be held up by now.
    let begin = Instant::now();
    let mut holders: Vec<Client> = (0..2).map(|_| daemon.scenario(&["hold", "4096", "4", "6"])).collect();
    holders.iter_mut().for_each(|holder| holder.expect("ready"));
    holders.iter().for_each(|holder| daemon.wait_merged(holder.pid(), 4096));
    println!("merged beside a hung file in {:?}", begin.elapsed());
    holders.iter_mut().for_each(Client::go);
    for client in &stuck {
        eventually("status says why", Duration::from_secs(30), || {
            daemon.client(client.pid())?["refused"].as_str()?.contains("does not end").then_some(())
        });
    }
    let log = std::fs::read_to_string(daemon.dir.path().join("log")).unwrap();
    let held_up = |line: &str| line.split_once("of this user for ")?.1.split_once(" ms")?.0.parse::<u64>().ok();
    let times: Vec<u64> = log.lines().filter_map(held_up).collect();
    println!("workers were held up for {times:?} ms");
    assert!((1..=2).contains(&times.len()), "one for each worker at most: {times:?}");
    // It answers: the user's clients are read again.
    file.answers.store(true, SeqCst);
    for client in &stuck {
        eventually("it is read again", Duration::from_secs(30), || {
            daemon.client(client.pid())?["refused"].is_null().then_some(())
        });
    }
}

#[test]
fn a_new_client_whose_memory_does_not_answer_keeps_no_other_from_connecting() {
    let daemon = Daemon::start();
    // Dropped after the file.
    let mut liars: Vec<Client> = Vec::new();
    let file = match HungFile::mount(daemon.dir.path()) {
        Ok(file) => file,
        Err(why) => return skipped(&format!("a FUSE file system cannot be mounted: {why}")),
    };
    let path = file.path.to_str().unwrap().to_string();
    liars.extend((0..3).map(|_| raw(&daemon, "misplaced", &[&path])));
    // To open a file waits for those who read it: all have it open before the daemon looks.
    liars.iter_mut().for_each(|liar| liar.expect("ready"));
    for liar in &mut liars {
        liar.tell("go");
        liar.expect("said");
    }
    eventually("the daemon looks there", Duration::from_secs(30), || file.asked.load(SeqCst).then_some(()));
    let mut holder = daemon.scenario(&["hold", "4096", "4", "6"]);
    holder.expect("ready");
    daemon.wait_merged(holder.pid(), 4096);
    holder.go();
    assert!(liars.iter().all(|liar| daemon.client(liar.pid()).is_none()));
}

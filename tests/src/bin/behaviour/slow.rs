//! A file whose direct reads and writes take a while: a FUSE file system of one file
//! (include/uapi/linux/fuse.h).

#![allow(unsafe_code)] // Mounts.

use std::collections::HashMap;
use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};

use crate::arena::{ALPHABET, PAGE, content};
use crate::random::Random;

const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const INIT: u32 = 26;
/// These take no answer: `FORGET`, `INTERRUPT`, `BATCH_FORGET`.
const SILENT: [u32; 3] = [2, 36, 42];
/// `FOPEN_DIRECT_IO | FOPEN_NOFLUSH | FOPEN_PARALLEL_DIRECT_WRITES`
const DIRECT: u32 = 1 | 1 << 5 | 1 << 6;
/// Bytes of a request's header, and of those of `READ` and `WRITE` with it.
const HEADER: usize = 40;
const WRITE_HEADER: usize = 80;
/// Requests that are under way at a time.
const SERVERS: usize = 6;
/// The longest time that a request takes, in milliseconds. The daemon's `direct_io_seconds` is far
/// above it.
const SLOWEST_MS: u64 = 250;

/// Pages that were written, by number.
type Written = Arc<Mutex<HashMap<u64, Vec<u8>>>>;

/// The mounted file.
pub(crate) struct SlowFile {
    pub(crate) path: PathBuf,
}

impl SlowFile {
    /// Mounts it; `None` where that is not allowed.
    pub(crate) fn mount(dir: &Path) -> Option<Self> {
        let device = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok()?;
        let path = dir.join("slow");
        std::fs::write(&path, b"").ok()?;
        let options = format!("fd={},rootmode=100644,user_id=0,group_id=0,allow_other", device.as_raw_fd());
        let (options, target) = (CString::new(options).ok()?, CString::new(path.to_str()?).ok()?);
        // SAFETY: four strings that end with zero.
        let result = unsafe {
            libc::mount(c"pageone-fuzz".as_ptr(), target.as_ptr(), c"fuse".as_ptr(), 0, options.as_ptr().cast())
        };
        if result != 0 {
            return None;
        }
        let (device, written) = (Arc::new(device), Written::default());
        for number in 0..SERVERS as u64 {
            let (device, written) = (device.clone(), written.clone());
            std::thread::spawn(move || serve(&device, &written, Random::new(number)));
        }
        Some(Self { path })
    }
}

impl Drop for SlowFile {
    fn drop(&mut self) {
        let Ok(target) = CString::new(self.path.as_os_str().as_encoded_bytes()) else { return };
        // SAFETY: a string that ends with zero.
        let _ = unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) };
    }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Answers until the file is unmounted.
fn serve(device: &OwnedFd, written: &Written, mut random: Random) {
    let mut request = vec![0u8; (1 << 17) + 4096];
    loop {
        // A write's pages are only read when the request is.
        std::thread::sleep(Duration::from_millis(random.below(SLOWEST_MS) / 2));
        let len = match rustix::io::read(device, &mut request[..]) {
            Ok(len) if len >= HEADER => len,
            // One that was interrupted before it was read.
            Ok(_) | Err(rustix::io::Errno::NOENT | rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => continue,
            Err(_) => return,
        };
        let word = |at: usize| request[at..at + 4].try_into().map_or(0, u32::from_ne_bytes);
        let long = |at: usize| request[at..at + 8].try_into().map_or(0, u64::from_ne_bytes);
        let (kind, unique) = (word(4), long(8));
        if SILENT.contains(&kind) {
            continue;
        }
        let mut done = Ok(Vec::new());
        match kind {
            // major, minor, max_readahead, flags, max_background and congestion_threshold,
            // max_write, time_gran, max_pages and map_alignment, unused.
            INIT => done = Ok(words(&[7, 31, 0, 0, 0x0010_0010, 1 << 17, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0])),
            // attr_valid, its nanoseconds, dummy; ino, size, blocks, three times, their
            // nanoseconds, mode, nlink, uid, gid, rdev, blksize, flags.
            GETATTR => {
                let mut attr = [0u32; 26];
                (attr[4], attr[7], attr[19], attr[20]) = (1, 1 << 12, 0o100666, 1);
                done = Ok(words(&attr));
            }
            OPEN => done = Ok(words(&[1, 0, DIRECT, 0])),
            READ => {
                std::thread::sleep(Duration::from_millis(random.below(SLOWEST_MS)));
                done = Ok(read(written, long(HEADER + 8) / PAGE as u64, word(HEADER + 16) as usize / PAGE));
            }
            WRITE => {
                let first = long(HEADER + 8) / PAGE as u64;
                if let Ok(mut written) = written.lock() {
                    let pages = request[WRITE_HEADER..len].chunks(PAGE).enumerate();
                    written.extend(pages.map(|(n, bytes)| (first + n as u64, bytes.to_vec())));
                }
                std::thread::sleep(Duration::from_millis(random.below(SLOWEST_MS)));
                done = Ok(words(&[word(HEADER + 16), 0]));
            }
            _ => done = done.and(Err(libc::ENOSYS)),
        }
        let (error, body) = match done {
            Ok(body) => (0, body),
            Err(errno) => (-errno, Vec::new()),
        };
        let mut packet = (16 + body.len() as u32).to_ne_bytes().to_vec();
        packet.extend(error.to_ne_bytes());
        packet.extend(unique.to_ne_bytes());
        packet.extend(body);
        // A request that was interrupted takes no answer.
        let _ = rustix::io::write(device, &packet);
    }
}

/// Pages of the file: first the contents, further on what was written, which is read once.
fn read(written: &Written, first: u64, count: usize) -> Vec<u8> {
    let pages = (first..first + count as u64).map(|page| {
        if page < 2 * ALPHABET {
            return content(page).to_vec();
        }
        written.lock().ok().and_then(|mut written| written.remove(&page)).unwrap_or_else(|| vec![0; PAGE])
    });
    pages.flatten().collect()
}

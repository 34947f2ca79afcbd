//! A file system on a block device that fails when it is told to: a loop device on a file that this
//! process serves through FUSE.
//!
//! The device has a cache, as disks have: what is written is durable after the next flush. When its
//! power fails, each block in the cache is there later, or what was there before it, by chance.
//! dm-flakey and dm-log-writes lose less, and many kernels have neither.
//!
//! Source: the kernel's include/uapi/linux/fuse.h, protocol 7.31.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::io::{IoSlice, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::goes_on::Random;
use super::*;

/// Bytes of a device: XFS takes no fewer than 300 MiB.
const SIZE: u64 = 512 << 20;
/// Of what is there or not after the power failed.
const BLOCK: usize = 4096;
/// Of a request, at most.
const MOST: usize = 1 << 20;

/// Numbers of requests.
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const RELEASE: u32 = 18;
const FSYNC: u32 = 20;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;

/// How a device fails.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Fault {
    /// Writes and flushes fail.
    Writes,
    /// Reads fail.
    Reads,
    /// All fails.
    All,
    /// Each fourth request fails.
    Some,
}

/// The power of some devices.
#[derive(Clone, Default)]
pub(super) struct Power(Arc<AtomicBool>);

impl Power {
    /// All devices fail at once, and what is in their caches is lost, or not.
    pub(super) fn cut(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_cut(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    pub(super) fn is_back(&self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// What is in the device.
struct Content {
    durable: File,
    cache: BTreeMap<u64, [u8; BLOCK]>,
    fault: Option<Fault>,
    power: Power,
    /// Writes and flushes after which the power fails.
    left: Option<u64>,
    random: Random,
}

impl Content {
    fn block(&self, number: u64) -> [u8; BLOCK] {
        self.cache.get(&number).copied().unwrap_or_else(|| {
            let mut bytes = [0; BLOCK];
            self.durable.read_exact_at(&mut bytes, number * BLOCK as u64).unwrap();
            bytes
        })
    }

    fn read(&self, at: u64, len: usize) -> Vec<u8> {
        let (first, within) = (at / BLOCK as u64, (at % BLOCK as u64) as usize);
        let count = (within + len).div_ceil(BLOCK) as u64;
        let bytes: Vec<u8> = (first..first + count).flat_map(|number| self.block(number)).collect();
        bytes[within..within + len].to_vec()
    }

    fn write(&mut self, mut at: u64, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (number, within) = (at / BLOCK as u64, (at % BLOCK as u64) as usize);
            let (now, rest) = bytes.split_at(bytes.len().min(BLOCK - within));
            let mut block = self.block(number);
            block[within..within + now.len()].copy_from_slice(now);
            self.cache.insert(number, block);
            (at, bytes) = (at + now.len() as u64, rest);
        }
    }

    fn flush(&mut self) {
        for (number, block) in std::mem::take(&mut self.cache) {
            self.durable.write_all_at(&block, number * BLOCK as u64).unwrap();
        }
    }

    fn fails(&mut self, kind: u32) -> bool {
        if matches!(kind, WRITE | FSYNC) {
            self.left = self.left.and_then(|left| {
                left.checked_sub(1).or_else(|| {
                    self.power.cut();
                    None
                })
            });
        }
        match self.fault {
            _ if !matches!(kind, READ | WRITE | FSYNC) => false,
            _ if self.power.is_cut() => true,
            None => false,
            Some(Fault::Writes) => kind != READ,
            Some(Fault::Reads) => kind == READ,
            Some(Fault::Some) => self.random.below(4) == 0,
            Some(Fault::All) => true,
        }
    }

    /// The answer to a request, or the number of an error.
    fn answer(&mut self, kind: u32, body: &[u8]) -> Result<Vec<u8>, i32> {
        let u32_at = |at: usize| u32::from_ne_bytes(body[at..at + 4].try_into().unwrap());
        let u64_at = |at: usize| u64::from_ne_bytes(body[at..at + 8].try_into().unwrap());
        let words = |all: &[u32]| all.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>();
        if self.fails(kind) {
            return Err(libc::EIO);
        }
        Ok(match kind {
            // Asynchronous reads and direct I/O, large writes, and as many pages as these have.
            INIT => {
                let flags = u32_at(12) & (1 | 1 << 5 | 1 << 15 | 1 << 22);
                let pages = (MOST / BLOCK) as u32;
                let mut all = words(&[7, 31, u32_at(8), flags, 12 << 16 | 16, MOST as u32, 1, pages]);
                all.resize(64, 0);
                all
            }
            // Valid for ever; number, size, times of 1970, mode, one name, root's.
            GETATTR => {
                let mut all = words(&[1 << 30, 0, 0, 0, 1, 0, SIZE as u32, 0, (SIZE / 512) as u32, 0]);
                all.extend(words(&[0; 9]));
                all.extend(words(&[libc::S_IFREG | 0o600, 1, 0, 0, 0, BLOCK as u32, 0]));
                all
            }
            // The kernel caches nothing.
            OPEN => words(&[0, 0, 1, 0]),
            READ => self.read(u64_at(8), u32_at(16) as usize),
            WRITE => {
                let len = u32_at(16);
                self.write(u64_at(8), &body[40..40 + len as usize]);
                words(&[len, 0])
            }
            FSYNC => {
                self.flush();
                Vec::new()
            }
            FLUSH | RELEASE => Vec::new(),
            _ => return Err(libc::ENOSYS),
        })
    }
}

/// Answers the kernel until the file is unmounted.
fn serve(mut fuse: File, content: &Mutex<Content>) {
    let mut request = vec![0; MOST + 4096];
    while let Ok(len) = fuse.read(&mut request) {
        let kind = u32::from_ne_bytes(request[4..8].try_into().unwrap());
        if matches!(kind, FORGET | BATCH_FORGET | INTERRUPT) {
            continue;
        }
        let answer = content.lock().unwrap().answer(kind, &request[40..len]);
        let (bytes, error) = answer.map_or_else(|error| (Vec::new(), -error), |bytes| (bytes, 0));
        let head = [&(16 + bytes.len() as u32).to_ne_bytes()[..], &error.to_ne_bytes(), &request[8..16]].concat();
        // Whoever asked may be gone.
        let _ = rustix::io::writev(&fuse, &[IoSlice::new(&head), IoSlice::new(&bytes)]);
    }
}

/// A file system on such a device.
pub(super) struct Medium {
    content: Arc<Mutex<Content>>,
    file: PathBuf,
    device: String,
    pub(super) fs: &'static str,
    /// Where it is mounted.
    pub(super) at: PathBuf,
}

fn run(program: &str, words: &[&str]) -> Result<String, String> {
    let out = Command::new(program).args(words).output().map_err(|why| format!("{program}: {why}"))?;
    let text = String::from_utf8_lossy(&out.stdout).trim().to_owned();
    out.status.success().then_some(text).ok_or_else(|| String::from_utf8_lossy(&out.stderr).into_owned())
}

impl Medium {
    /// `Err`: it cannot be made here, and why.
    pub(super) fn new(
        place: &Place,
        name: &str,
        fs: &'static str,
        power: &Power,
        random: Random,
    ) -> Result<Self, String> {
        let (file, at) = (place.path(&format!("{name}.device")), place.path(name));
        std::fs::create_dir(&at).unwrap();
        File::create(&file).unwrap();
        let durable = tempfile::tempfile().unwrap();
        durable.set_len(SIZE).unwrap();
        let content = Arc::new(Mutex::new(Content {
            durable,
            cache: BTreeMap::new(),
            fault: None,
            power: power.clone(),
            left: None,
            random,
        }));
        let fuse = File::options().read(true).write(true).open("/dev/fuse").map_err(|why| why.to_string())?;
        let words = format!("fd={},rootmode=100000,user_id=0,group_id=0", fuse.as_raw_fd());
        let words = CString::new(words).unwrap();
        mount("pageone-test", &file, "fuse", MountFlags::NODEV, words.as_c_str()).map_err(|why| why.to_string())?;
        let served = Arc::clone(&content);
        std::thread::spawn(move || serve(fuse, &served));
        let mut medium = Self { content, file, device: String::new(), fs, at };
        medium.device = run("losetup", &["--find", "--show", medium.file.to_str().unwrap()])?;
        let options = match fs {
            "ext4" => &["-q", "-F", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"][..],
            _ => &["-q", "-f", "-K"],
        };
        run(&format!("mkfs.{fs}"), &[options, &[medium.device.as_str()]].concat())?;
        medium.mount()?;
        Ok(medium)
    }

    pub(super) fn mount(&self) -> Result<(), String> {
        run("mount", &["-t", self.fs, "-o", "noatime", &self.device, self.at.to_str().unwrap()]).map(drop)
    }

    /// From now on it fails.
    pub(super) fn fail(&self, fault: Fault) {
        self.content.lock().unwrap().fault = Some(fault);
    }

    /// From now on it does not fail.
    pub(super) fn be_well(&self) {
        self.content.lock().unwrap().fault = None;
    }

    /// The power fails after this number of its writes and flushes.
    pub(super) fn cut_after(&self, requests: u64) {
        self.content.lock().unwrap().left = Some(requests);
    }

    /// When the power has failed: gives the number of blocks that are lost.
    pub(super) fn lose(&self) -> usize {
        let content = &mut *self.content.lock().unwrap();
        let before = content.cache.len();
        content.left = None;
        content.cache.retain(|_, _| content.random.below(2) == 0);
        let lost = before - content.cache.len();
        content.flush();
        lost
    }

    /// Whether a file can be made.
    pub(super) fn is_writable(&self) -> bool {
        let file = self.at.join("written");
        let made = File::create(&file).and_then(|file| file.sync_all());
        std::fs::remove_file(&file).and(made).is_ok()
    }

    pub(super) fn unmount(&self) {
        // Processes that were killed may not have ended yet.
        let done = || unmount(&self.at, UnmountFlags::empty()).ok();
        eventually("nothing uses it", Duration::from_secs(60), done);
    }
}

impl Drop for Medium {
    fn drop(&mut self) {
        self.be_well();
        self.content.lock().unwrap().power.is_back();
        let _ = run("umount", &["-l", self.at.to_str().unwrap()]);
        let _ = run("losetup", &["-d", &self.device]);
        let _ = run("umount", &["-l", self.file.to_str().unwrap()]);
    }
}

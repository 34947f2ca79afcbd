//! The slow device: a FUSE file opened for direct input, whose server answers when it is told.

use rustix::fs::{Mode, OFlags};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

/// A file system that is one file (include/uapi/linux/fuse.h).
pub struct SlowFile {
    device: OwnedFd,
    pub path: PathBuf,
    _dir: tempfile::TempDir,
}

const INIT: u32 = 26;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const IOCTL: u32 = 39;
/// `FOPEN_DIRECT_IO | FOPEN_NOFLUSH`
const DIRECT: u32 = 1 | 1 << 5;

impl SlowFile {
    /// Mounts it; an error where this process may not.
    pub fn mount() -> Result<SlowFile, rustix::io::Errno> {
        let device = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("slow");
        std::fs::write(&path, b"").unwrap();
        let options = format!("fd={},rootmode=100644,user_id=0,group_id=0", device.as_raw_fd());
        let options = std::ffi::CString::new(options).unwrap();
        let target = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        #[allow(unsafe_code)]
        // SAFETY: four strings that end with zero.
        let result = unsafe {
            libc::mount(c"pageone-test".as_ptr(), target.as_ptr(), c"fuse".as_ptr(), 0, options.as_ptr().cast())
        };
        match result {
            0 => Ok(SlowFile { device, path, _dir: dir }),
            _ => Err(rustix::io::Errno::from_io_error(&std::io::Error::last_os_error()).unwrap()),
        }
    }

    /// Answers until somebody reads; returns the reader's request.
    pub fn serve_until_read(&self) -> u64 {
        loop {
            let mut request = vec![0u8; 1 << 17];
            let len = rustix::io::read(&self.device, &mut request[..]).unwrap();
            assert!(len >= 40);
            let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
            let unique = u64::from_ne_bytes(request[8..16].try_into().unwrap());
            match word(4) {
                // major, minor, max_readahead, flags, max_background and congestion_threshold,
                // max_write, time_gran, unused.
                INIT => self.answer(unique, 0, &words(&[7, 31, 0, 0, 0x0010_0010, 4096, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0])),
                // attr_valid, its nanoseconds, dummy; ino, size, blocks, three times, their
                // nanoseconds, mode, nlink, uid, gid, rdev, blksize, flags.
                GETATTR => {
                    let mut attr = [0u32; 26];
                    (attr[4], attr[6], attr[19], attr[20]) = (1, 1 << 20, 0o100644, 1);
                    self.answer(unique, 0, &words(&attr));
                }
                // fh, open_flags, padding.
                OPEN => self.answer(unique, 0, &words(&[1, 0, DIRECT, 0])),
                READ | IOCTL => return unique,
                _ => self.answer(unique, -libc::ENOSYS, &[]),
            }
        }
    }

    /// Answers a request.
    pub fn answer(&self, unique: u64, error: i32, body: &[u8]) {
        let mut packet = (16 + body.len() as u32).to_ne_bytes().to_vec();
        packet.extend(error.to_ne_bytes());
        packet.extend(unique.to_ne_bytes());
        packet.extend(body);
        // A request that was interrupted takes no answer.
        let _ = rustix::io::write(&self.device, &packet);
    }
}

impl Drop for SlowFile {
    fn drop(&mut self) {
        let target = std::ffi::CString::new(self.path.to_str().unwrap()).unwrap();
        #[allow(unsafe_code)]
        // SAFETY: a string that ends with zero.
        let _ = unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) };
    }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

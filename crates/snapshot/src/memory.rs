//! A snapshot's RAM as a file that the kernel asks for page by page (FUSE).
//!
//! Each clone maps the file privately. A page that no clone has touched yet is read from the pool
//! and checked. From then on it lies in the kernel's page cache, once for all clones, and can be
//! evicted. A page that a clone writes is its own.
//!
//! The file system is not mounted in any directory: it consists of one file, whose descriptor the
//! clones inherit. It ends with the last of them.
//!
//! When the pool's bytes are damaged, or when this process has ended, the kernel cannot read a
//! page. Then it ends the clone that asked for it (SIGBUS). It never gives other bytes, or zeros.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, UNIX_EPOCH};

use checkpoint::{Image, ReadError};
use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner, OpenFlags,
    ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, Request, Session, SessionACL,
};
use mpool::{AlignedBuf, BLOCK};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};

/// The file's name and number.
const NAME: &str = "ram";
const NUMBER: INodeNo = INodeNo(2);
/// How long the kernel may keep what it was told of the file: for ever.
const FOR_EVER: Duration = Duration::from_secs(1 << 30);
/// Threads that read.
const THREADS: usize = 2;

/// Called with what cannot be read.
pub type Report = Box<dyn Fn(ReadError) + Send + Sync>;

struct Ram {
    image: Image,
    report: Report,
}

impl Ram {
    fn attributes(&self, number: INodeNo) -> FileAttr {
        let is_file = number == NUMBER;
        let size = if is_file { self.image.pages() * BLOCK as u64 } else { 0 };
        FileAttr {
            ino: number,
            size,
            blocks: size / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if is_file { FileType::RegularFile } else { FileType::Directory },
            // QEMU opens it for writing too, and maps it privately.
            perm: if is_file { 0o600 } else { 0o500 },
            nlink: 1,
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            rdev: 0,
            blksize: BLOCK as u32,
            flags: 0,
        }
    }
}

impl Filesystem for Ram {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if parent == INodeNo::ROOT && name == NAME {
            reply.entry(&FOR_EVER, &self.attributes(NUMBER), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&FOR_EVER, &self.attributes(number));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // When this process is killed the kernel closes its own descriptor of the file. It would
        // wait for an answer to the flush, for ever, and the clones would hang.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let end = (offset + u64::from(size)).min(self.image.pages() * BLOCK as u64);
        let Some(len) = end.checked_sub(offset) else { return reply.data(&[]) };
        let first = offset / BLOCK as u64;
        let before = (offset % BLOCK as u64) as usize;
        let mut bytes = AlignedBuf::zeroed((before + len as usize).next_multiple_of(BLOCK));
        match self.image.read(first, &mut bytes) {
            Ok(()) => reply.data(&bytes[before..before + len as usize]),
            Err(error) => {
                (self.report)(error);
                reply.error(Errno::EIO);
            }
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }
}

/// Serves an image in threads of this process until nobody has the file open or mapped any more.
/// Gives the file.
///
/// # Errors
/// If the kernel has no FUSE, or this account may not mount.
pub fn serve(image: Image, report: Report) -> io::Result<File> {
    let device = File::options().read(true).write(true).open("/dev/fuse")?;
    let context = rustix::mount::fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    for (key, value) in [
        ("fd", device.as_raw_fd().to_string()),
        ("rootmode", "40500".into()),
        ("user_id", uid.as_raw().to_string()),
        ("group_id", gid.as_raw().to_string()),
    ] {
        rustix::mount::fsconfig_set_string(&context, key, value)?;
    }
    rustix::mount::fsconfig_create(&context)?;
    let safe = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let root = rustix::mount::fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, safe)?;
    let mut config = Config::default();
    config.n_threads = Some(THREADS);
    let session = Session::from_fd(Ram { image, report }, device.into(), SessionACL::Owner, config)?;
    std::thread::Builder::new().name("ram".into()).spawn(move || session.run())?;
    let file = rustix::fs::openat(&root, NAME, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    Ok(file.into())
}

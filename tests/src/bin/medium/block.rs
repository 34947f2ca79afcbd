//! Block devices and file systems: loop devices on sparse files, the device mapper, mounts.

use std::ffi::{CStr, OsStr};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// Bytes of a sector, as the device mapper counts them.
pub(crate) const SECTOR: u64 = 512;

/// A file system that the lane runs on.
#[derive(Clone, Copy)]
pub(crate) struct FileSystem {
    pub(crate) name: &'static str,
    /// Bytes of its device: XFS and btrfs have a least size, 300 MiB and 109 MiB.
    pub(crate) bytes: u64,
    make: &'static [&'static str],
}

pub(crate) const FILE_SYSTEMS: [FileSystem; 3] = [
    // Blocks as large as on a disk of usual size. Nothing is left to be initialized while it is
    // mounted.
    FileSystem {
        name: "ext4",
        bytes: 96 << 20,
        make: &["mkfs.ext4", "-q", "-F", "-b", "4096", "-E", "lazy_itable_init=0,lazy_journal_init=0"],
    },
    FileSystem { name: "xfs", bytes: 320 << 20, make: &["mkfs.xfs", "-q", "-f"] },
    FileSystem { name: "btrfs", bytes: 256 << 20, make: &["mkfs.btrfs", "-q", "-f"] },
];

impl FileSystem {
    pub(crate) fn make(&self, device: &Path) -> Result<()> {
        let (program, options) = self.make.split_first().context("no program")?;
        let words = options.iter().map(OsStr::new).chain([device.as_os_str()]);
        run(program, words).map(drop)
    }

    pub(crate) fn mount<'a>(&self, device: &Path, at: &'a Path) -> Result<Mounted<'a>> {
        mount(device, at, self.name, MountFlags::NOATIME, None::<&CStr>)
            .with_context(|| format!("{} on {} does not mount", self.name, device.display()))?;
        Ok(Mounted { at, done: false })
    }
}

/// A mounted file system.
pub(crate) struct Mounted<'a> {
    at: &'a Path,
    done: bool,
}

impl Mounted<'_> {
    pub(crate) fn unmount(mut self) -> Result<()> {
        self.done = true;
        // The kernel may give up files some moments after they were closed.
        for _ in 0..50 {
            match unmount(self.at, UnmountFlags::empty()) {
                Err(Errno::BUSY) => std::thread::sleep(Duration::from_millis(100)),
                result => return result.with_context(|| format!("{} does not unmount", self.at.display())),
            }
        }
        bail!("{} does not unmount: it is in use", self.at.display())
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        if !self.done {
            // An error is on its way.
            let _ = unmount(self.at, UnmountFlags::DETACH);
        }
    }
}

fn run<S: AsRef<OsStr>>(program: &str, words: impl IntoIterator<Item = S>) -> Result<String> {
    // Without udev the device mapper's library makes the nodes itself.
    let mut command = Command::new(program);
    command.args(words).env("DM_DISABLE_UDEV", "1");
    let output = command.output().with_context(|| format!("{program} cannot be run"))?;
    if !output.status.success() {
        bail!("{program}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Makes an empty sparse file.
pub(crate) fn sparse(path: &Path, bytes: u64) -> Result<File> {
    let file = File::options().read(true).write(true).create(true).truncate(true).open(path);
    let file = file.with_context(|| format!("{} cannot be made", path.display()))?;
    file.set_len(bytes)?;
    Ok(file)
}

/// Makes `to` the same as `from`. Only data are copied, and no zeros.
pub(crate) fn copy(from: &File, to: &File) -> Result<()> {
    let (len, mut at) = (from.metadata()?.len(), 0);
    to.set_len(0)?;
    to.set_len(len)?;
    let mut buffer = vec![0; 1 << 20];
    let mut end = 0;
    while at < len {
        if at >= end {
            at = match rustix::fs::seek(from, SeekFrom::Data(at)) {
                Ok(data) => data,
                Err(Errno::NXIO) => break,
                Err(e) => return Err(e.into()),
            };
            end = rustix::fs::seek(from, SeekFrom::Hole(at))?;
        }
        let part = &mut buffer[..(end - at).min(1 << 20) as usize];
        from.read_exact_at(part, at)?;
        if part.iter().any(|&byte| byte != 0) {
            to.write_all_at(part, at)?;
        }
        at += part.len() as u64;
    }
    Ok(())
}

/// A loop device.
pub(crate) struct Loop(PathBuf);

impl Loop {
    pub(crate) fn attach(file: &Path) -> Result<Self> {
        // Finding a free one and taking it are two steps.
        static ONE: Mutex<()> = Mutex::new(());
        let _one = ONE.lock().map_err(|_| anyhow::anyhow!("another file system's thread panicked"))?;
        let device = PathBuf::from(run("losetup", ["-f"])?.trim());
        run("losetup", [&device, &file.to_path_buf()])?;
        Ok(Self(device))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = run("losetup", [OsStr::new("-d"), self.0.as_os_str()]);
    }
}

/// A device of the device mapper.
pub(crate) struct Mapped {
    name: String,
    path: PathBuf,
}

impl Mapped {
    pub(crate) fn create(name: String, table: &str) -> Result<Self> {
        run("dmsetup", ["create", &name, "--table", table])?;
        Ok(Self { path: Path::new("/dev/mapper").join(&name), name })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Gives it another table; `meanwhile` runs while no request gets through.
    pub(crate) fn switch<T>(&self, table: &str, meanwhile: impl FnOnce() -> T) -> Result<T> {
        run("dmsetup", ["load", &self.name, "--table", table])?;
        // Nothing is written or waited for first, as when the power fails.
        run("dmsetup", ["suspend", "--noflush", "--nolockfs", &self.name])?;
        let result = meanwhile();
        run("dmsetup", ["resume", &self.name])?;
        Ok(result)
    }

    pub(crate) fn remove(mut self) -> Result<()> {
        let name = std::mem::take(&mut self.name);
        run("dmsetup", ["remove", &name]).map(drop)
    }

    /// Messages to its target.
    pub(crate) fn messages(&self) -> Result<Messages> {
        let control = File::options().read(true).write(true).open("/dev/mapper/control")?;
        Ok(Messages { control, name: self.name.clone() })
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if !self.name.is_empty() {
            let _ = run("dmsetup", ["remove", "--force", &self.name]);
        }
    }
}

/// Sends messages to a device's target, quicker than a program that is started for each.
pub(crate) struct Messages {
    control: File,
    name: String,
}

/// Bytes of `struct dm_ioctl` (linux/dm-ioctl.h).
const HEAD: usize = 312;
/// Where its field `name` begins.
const NAME: usize = 48;
/// `DM_TARGET_MSG`: `_IOWR(DM_IOCTL, 14, struct dm_ioctl)`.
const TARGET_MSG: Opcode = opcode::from_components(rustix::ioctl::Direction::ReadWrite, 0xfd, 14, HEAD);
/// Bytes of the request with its message.
const REQUEST: usize = 512;

impl Messages {
    pub(crate) fn send(&self, message: &str) -> Result<()> {
        let mut request = [0u8; REQUEST];
        // The interface's version, the bytes of the request, and where the message begins.
        for (i, word) in [4, 0, 0, REQUEST as u32, HEAD as u32].into_iter().enumerate() {
            request[i * 4..][..4].copy_from_slice(&word.to_ne_bytes());
        }
        request[NAME..][..self.name.len()].copy_from_slice(self.name.as_bytes());
        // The message is for the target at sector 0, and ends with a zero.
        request[HEAD + 8..][..message.len()].copy_from_slice(message.as_bytes());
        // SAFETY: the kernel reads and writes at most `data_size` bytes from the address on, which
        // are the `REQUEST` bytes of the array; it keeps no reference. Any bytes are a valid array.
        // `TARGET_MSG` is defined to take such a request.
        unsafe { ioctl(&self.control, Updater::<TARGET_MSG, _>::new(&mut request)) }
            .with_context(|| format!("the device {} does not take '{message}'", self.name))
    }
}

/// The lines that the kernel has said last.
pub(crate) fn kernel_says() -> String {
    let Ok(all) = run("dmesg", ["-r"]) else { return String::new() };
    let lines: Vec<&str> = all.lines().collect();
    lines[lines.len().saturating_sub(12)..].iter().map(|line| format!("    kernel said: {line}\n")).collect()
}

/// Makes an empty directory.
pub(crate) fn directory(path: PathBuf) -> Result<PathBuf> {
    fs::create_dir_all(&path).with_context(|| format!("{} cannot be made", path.display()))?;
    Ok(path)
}

//! The guests' initramfs: busybox, an init script, and ordinary files of this machine.
//!
//! The files come from `/usr/bin`, `/usr/lib` and `/usr/share`, a third of the budget each, in
//! sorted order: the same machine gives the same archive. They are laid out in slices of up to
//! 4 MiB, `/data/00`, `/data/01`, ..., each with its checksum list `/ref/NN`; `/ref/all` lists all.
//! The checksums are computed on the host, with the busybox that the guest will use.
//!
//! The archive is not compressed: under emulation, unpacking is the longest part of booting. It is
//! kept in the cache under a name that contains a hash of its inputs.

use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::cpio::Cpio;
use crate::find::{self, FindError};

const INIT: &str = include_str!("../../../guest/demo/init");
const SOURCES: [&str; 3] = ["/usr/bin", "/usr/lib", "/usr/share"];
/// Sizes of the files taken, bytes: a page at least, so that contents outweigh bookkeeping, and at
/// most a slice.
const FILE_SIZE: std::ops::RangeInclusive<u64> = 4096..=SLICE_BYTES;
/// Bytes of a slice: what a guest copies in one round.
const SLICE_BYTES: u64 = 4 << 20;

/// Why an initramfs was not built.
#[derive(Debug, thiserror::Error)]
pub enum InitramfsError {
    /// Busybox is missing.
    #[error(transparent)]
    Find(#[from] FindError),
    /// No file of this machine fits.
    #[error("found no files to give to guests below {}", SOURCES.join(", "))]
    NoFiles,
    /// The cache directory cannot be created.
    #[error("cannot create {}: set PAGEONE_CACHE", path.display())]
    CreateCache {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The recycler's module cannot be read.
    #[error("cannot read {}", path.display())]
    Module {
        /// The module.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The archive cannot be written.
    #[error("cannot write {} (disk full? set PAGEONE_CACHE)", path.display())]
    Write {
        /// The archive.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// An ordinary file of this machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Input {
    path: PathBuf,
    bytes: u64,
    /// Modification time: seconds and nanoseconds.
    mtime: (i64, i64),
}

impl Input {
    /// `None` unless it is a readable regular file of a size in [`FILE_SIZE`], with a name that a
    /// checksum list can hold.
    fn new(path: PathBuf) -> Option<Self> {
        let meta = path.symlink_metadata().ok()?;
        let plain = path.to_str()?.bytes().all(|b| (b' '..=b'~').contains(&b) && b != b'\\');
        (meta.is_file() && FILE_SIZE.contains(&meta.len()) && plain && File::open(&path).is_ok()).then(|| Self {
            bytes: meta.len(),
            mtime: (meta.mtime(), meta.mtime_nsec()),
            path,
        })
    }
}

/// The path of an archive with up to `data_mib` MiB of files; builds it unless `cache` has it.
///
/// # Errors
/// If busybox is missing, or the cache cannot be written.
pub(crate) fn initramfs(cache: &Path, data_mib: u64) -> Result<PathBuf, InitramfsError> {
    let sources: Vec<_> = SOURCES.iter().map(Path::new).collect();
    archive(find::find_busybox()?, &sources, cache, data_mib)
}

/// The same, of files below `sources`.
fn archive(busybox: PathBuf, sources: &[&Path], cache: &Path, data_mib: u64) -> Result<PathBuf, InitramfsError> {
    let inputs = select(sources, data_mib << 20);
    if inputs.is_empty() {
        return Err(InitramfsError::NoFiles);
    }
    let mut hash = DefaultHasher::new();
    (INIT, &inputs, Input::new(busybox.clone()), SLICE_BYTES).hash(&mut hash);
    let prefix = format!("initramfs-{data_mib}-");
    let path = cache.join(format!("{prefix}{:016x}.cpio", hash.finish()));
    if path.exists() {
        return Ok(path);
    }
    std::fs::create_dir_all(cache).map_err(|source| InitramfsError::CreateCache { path: cache.to_owned(), source })?;
    let part = cache.join(format!("{prefix}{}.part", std::process::id()));
    write_whole(&part, &path, || build(&part, &busybox, &inputs))?;
    remove_older(cache, &prefix, &path);
    Ok(path)
}

/// Renames `part` to `path` after `write` has written `part`, so that `path` is never incomplete.
fn write_whole(part: &Path, path: &Path, write: impl FnOnce() -> io::Result<()>) -> Result<(), InitramfsError> {
    let written = write().and_then(|()| std::fs::rename(part, path));
    written.map_err(|error| {
        let _ = std::fs::remove_file(part);
        InitramfsError::Write { path: path.to_owned(), source: error }
    })
}

/// The path of `archive` with the recycler's module added: a second archive behind the first, which
/// the kernel allows.
///
/// # Errors
/// If the module cannot be read, or the cache cannot be written.
pub(crate) fn with_recycler(archive: &Path, module: &Path) -> Result<PathBuf, InitramfsError> {
    let contents =
        std::fs::read(module).map_err(|source| InitramfsError::Module { path: module.to_owned(), source })?;
    let mut hash = DefaultHasher::new();
    contents.hash(&mut hash);
    let path = archive.with_extension(format!("{:016x}.cpio", hash.finish()));
    if path.exists() {
        return Ok(path);
    }
    let part = archive.with_extension(format!("{}.part", std::process::id()));
    write_whole(&part, &path, || {
        std::fs::copy(archive, &part)?;
        let mut cpio = Cpio::new(BufWriter::new(File::options().append(true).open(&part)?));
        cpio.directory("modules")?;
        cpio.file("modules/ppr.ko", 0o644, &contents)?;
        cpio.finish()?.flush()
    })?;
    Ok(path)
}

/// Removes earlier archives. A running QEMU has its archive open, so removing the name is safe.
fn remove_older(cache: &Path, prefix: &str, keep: &Path) {
    for entry in std::fs::read_dir(cache).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(prefix) && name.ends_with(".cpio") && path != keep {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Regular files below each of `sources` in sorted order; from each source an equal share of
/// `budget` bytes.
fn select(sources: &[&Path], budget: u64) -> Vec<Input> {
    let mut inputs = Vec::new();
    for source in sources {
        // Only the sources themselves may be links: below them, a link is a file's second name.
        let mut left = budget / sources.len() as u64;
        walk(source, &mut left, &mut inputs);
    }
    inputs
}

/// Walks depth first. Leaves out files that do not fit, and ends when no file can fit.
fn walk(dir: &Path, left: &mut u64, inputs: &mut Vec<Input>) {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return;
    };
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        if *left < *FILE_SIZE.start() {
            return;
        }
        if path.symlink_metadata().is_ok_and(|meta| meta.is_dir()) {
            walk(&path, left, inputs);
        } else if let Some(input) = Input::new(path).filter(|input| input.bytes <= *left) {
            *left -= input.bytes;
            inputs.push(input);
        }
    }
}

/// Consecutive inputs of up to [`SLICE_BYTES`] together.
fn slices(inputs: &[Input]) -> Vec<&[Input]> {
    let mut bytes = 0;
    let mut cuts = vec![0];
    for (n, input) in inputs.iter().enumerate() {
        if bytes + input.bytes > SLICE_BYTES {
            cuts.push(n);
            bytes = 0;
        }
        bytes += input.bytes;
    }
    cuts.push(inputs.len());
    cuts.windows(2).map(|cut| &inputs[cut[0]..cut[1]]).filter(|slice| !slice.is_empty()).collect()
}

/// Writes the archive to `part`.
fn build(part: &Path, busybox: &Path, inputs: &[Input]) -> io::Result<()> {
    let mut cpio = Cpio::new(BufWriter::with_capacity(1 << 20, File::create(part)?));
    cpio.directory("bin")?;
    cpio.file("bin/busybox", 0o755, &std::fs::read(busybox)?)?;
    cpio.file("init", 0o755, INIT.as_bytes())?;
    cpio.directory("dev")?;
    cpio.console("dev/console")?;
    cpio.directory("ref")?;
    let mut all = String::new();
    for (n, slice) in slices(inputs).into_iter().enumerate() {
        let mut list = String::new();
        for input in slice {
            let name = format!("{n:02}{}", input.path.display());
            let bytes = std::fs::read(&input.path)?;
            list.push_str(&format!("{}  {name}\n", checksum(busybox, &bytes)?));
            let name = format!("data/{name}");
            let parents: Vec<_> = Path::new(&name).ancestors().skip(1).collect();
            for parent in parents.into_iter().rev().filter(|parent| *parent != Path::new("")) {
                cpio.directory(&parent.to_string_lossy())?;
            }
            cpio.file(&name, 0o644, &bytes)?;
        }
        cpio.file(&format!("ref/{n:02}"), 0o644, list.as_bytes())?;
        all.push_str(&list);
    }
    cpio.file("ref/all", 0o644, all.as_bytes())?;
    cpio.finish()?.flush()
}

/// The MD5 of some bytes, by the busybox that the guest verifies with.
fn checksum(busybox: &Path, bytes: &[u8]) -> io::Result<String> {
    let failed = |what: &str| io::Error::other(format!("{} {what}", busybox.display()));
    let mut child = Command::new(busybox)
        .arg("md5sum")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| io::Error::other(format!("cannot run {}: {error}", busybox.display())))?;
    // It prints nothing before it has read everything. Dropping the pipe ends its input.
    let written = child.stdin.take().map_or(Ok(()), |mut input| input.write_all(bytes));
    let output = child.wait_with_output()?;
    if !output.status.success() {
        return Err(failed(&format!("md5sum: {}", output.status)));
    }
    written?;
    let line = String::from_utf8(output.stdout).map_err(io::Error::other)?;
    line.get(..32).map(str::to_owned).ok_or_else(|| failed("md5sum printed no checksum"))
}

#[cfg(test)]
mod tests;

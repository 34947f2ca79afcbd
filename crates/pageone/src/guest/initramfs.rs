//! The demo guests' initramfs: busybox, an init script, and ordinary files of this machine.
//!
//! The files are taken from `/usr/bin`, `/usr/lib` and `/usr/share`, a third of the budget each,
//! in sorted order: the same machine gives the same archive. They are laid out in slices of up to
//! 4 MiB, `/data/00`, `/data/01`, ..., each with its checksum list `/ref/NN`; `/ref/all` lists all.
//! The checksums are made here, on the host, with the busybox that the guest will use.
//!
//! The archive is cpio's "newc" format, uncompressed: under emulation unpacking is the longest part
//! of booting. It lies in the cache under a name that holds a hash of all that went into it.

use super::find;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufWriter, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const INIT: &str = include_str!("../../../../guest/demo/init");
const SOURCES: [&str; 3] = ["/usr/bin", "/usr/lib", "/usr/share"];
/// A page at least, so that contents outweigh bookkeeping; and small enough for a slice.
const FILE_SIZE: std::ops::RangeInclusive<u64> = 4096..=SLICE_BYTES;
/// What a guest copies in one round.
const SLICE_BYTES: u64 = 4 << 20;

/// An ordinary file of this machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Input {
    path: PathBuf,
    bytes: u64,
    /// Modification time, nanoseconds.
    mtime: (i64, i64),
}

impl Input {
    /// `None` for whatever is no regular file of a fitting size that we may read, or whose name a
    /// checksum list cannot hold.
    fn new(path: PathBuf) -> Option<Input> {
        let meta = path.symlink_metadata().ok()?;
        let plain = path.to_str()?.bytes().all(|b| (b' '..=b'~').contains(&b) && b != b'\\');
        (meta.is_file() && FILE_SIZE.contains(&meta.len()) && plain && File::open(&path).is_ok()).then(|| Input {
            bytes: meta.len(),
            mtime: (meta.mtime(), meta.mtime_nsec()),
            path,
        })
    }
}

/// The archive's path, building it if need be.
///
/// # Errors
/// If busybox is missing, or the cache cannot be written.
pub fn initramfs(cache: &Path, data_mib: u64) -> Result<PathBuf> {
    let busybox = find::find_busybox()?;
    let sources: Vec<_> = SOURCES.iter().map(Path::new).collect();
    let inputs = select(&sources, data_mib << 20);
    ensure!(!inputs.is_empty(), "found no files to give to guests below {}", SOURCES.join(", "));

    let mut hash = DefaultHasher::new();
    (INIT, &inputs, Input::new(busybox.clone()), SLICE_BYTES).hash(&mut hash);
    let prefix = format!("initramfs-{data_mib}-");
    let path = cache.join(format!("{prefix}{:016x}.cpio", hash.finish()));
    if path.exists() {
        return Ok(path);
    }
    std::fs::create_dir_all(cache).with_context(|| format!("cannot create {}: set PAGEONE_CACHE", cache.display()))?;
    // Built beside and renamed into place: nobody sees half an archive.
    let part = cache.join(format!("{prefix}{}.part", std::process::id()));
    let built = build(&part, &busybox, &inputs)
        .and_then(|()| Ok(std::fs::rename(&part, &path)?))
        .with_context(|| format!("cannot write {} (disk full? set PAGEONE_CACHE)", path.display()));
    if built.is_err() {
        let _ = std::fs::remove_file(&part);
    }
    built?;
    remove_older(cache, &prefix, &path);
    Ok(path)
}

/// The archive with the recycler's module in it: a second archive behind the first, as the kernel
/// allows.
///
/// # Errors
/// If the module cannot be read, or the cache cannot be written.
pub fn with_recycler(archive: &Path, module: &Path) -> Result<PathBuf> {
    let contents = std::fs::read(module).with_context(|| format!("cannot read {}", module.display()))?;
    let mut hash = DefaultHasher::new();
    contents.hash(&mut hash);
    let path = archive.with_extension(format!("{:016x}.cpio", hash.finish()));
    if path.exists() {
        return Ok(path);
    }
    let part = archive.with_extension(format!("{}.part", std::process::id()));
    let build = || -> Result<()> {
        std::fs::copy(archive, &part)?;
        let mut cpio = Cpio::new(BufWriter::new(File::options().append(true).open(&part)?));
        cpio.directory("modules")?;
        cpio.file("modules/ppr.ko", 0o644, &contents)?;
        cpio.finish()?.flush()?;
        Ok(std::fs::rename(&part, &path)?)
    };
    let built = build().with_context(|| format!("cannot write {} (disk full? set PAGEONE_CACHE)", path.display()));
    if built.is_err() {
        let _ = std::fs::remove_file(&part);
    }
    built.map(|()| path)
}

/// A running QEMU keeps the archive that it has open, so removing is safe.
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

/// Regular files below each of `sources` in sorted order, an equal share of `budget` bytes from
/// each.
fn select(sources: &[&Path], budget: u64) -> Vec<Input> {
    let mut inputs = Vec::new();
    for source in sources {
        // Links such as /bin are one file's second name: only the sources themselves are followed.
        let mut left = budget / sources.len() as u64;
        walk(source, &mut left, &mut inputs);
    }
    inputs
}

/// Depth first; a file that does not fit is left out, and the walk ends when nothing more can fit.
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

fn build(part: &Path, busybox: &Path, inputs: &[Input]) -> Result<()> {
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
        for (input, sum) in slice.iter().zip(checksums(busybox, slice)?) {
            let name = format!("{n:02}{}", input.path.display());
            list.push_str(&format!("{sum}  {name}\n"));
            let contents = std::fs::read(&input.path)?;
            ensure!(
                Input::new(input.path.clone()).as_ref() == Some(input),
                "{} changed while it was read: try again",
                input.path.display()
            );
            let name = format!("data/{name}");
            let parents: Vec<_> = Path::new(&name).ancestors().skip(1).collect();
            for parent in parents.into_iter().rev().filter(|parent| *parent != Path::new("")) {
                cpio.directory(&parent.to_string_lossy())?;
            }
            cpio.file(&name, 0o644, &contents)?;
        }
        cpio.file(&format!("ref/{n:02}"), 0o644, list.as_bytes())?;
        all.push_str(&list);
    }
    cpio.file("ref/all", 0o644, all.as_bytes())?;
    cpio.finish()?.flush()?;
    Ok(())
}

/// The MD5 of each input, by busybox itself: whatever the guest's verification will compute.
fn checksums(busybox: &Path, inputs: &[Input]) -> Result<Vec<String>> {
    let mut sums = Vec::with_capacity(inputs.len());
    // At most 500 names in one command line: far below the kernel's limit (execve(2)).
    for batch in inputs.chunks(500) {
        let output = Command::new(busybox)
            .arg("md5sum")
            .args(batch.iter().map(|input| &input.path))
            .output()
            .with_context(|| format!("cannot run {}", busybox.display()))?;
        ensure!(output.status.success(), "{} md5sum: {}", busybox.display(), output.status);
        let lines = String::from_utf8(output.stdout)?;
        sums.extend(lines.lines().filter_map(|line| Some(line.get(..32)?.to_owned())));
    }
    ensure!(sums.len() == inputs.len(), "{} md5sum left files out", busybox.display());
    Ok(sums)
}

/// Writer of cpio archives in "newc" format (cpio(5); the kernel's
/// Documentation/driver-api/early-userspace/buffer-format.rst). All owned by root, all of 1970: the
/// same contents give the same bytes.
struct Cpio<W: Write> {
    out: W,
    inode: u32,
    directories: BTreeSet<String>,
}

impl<W: Write> Cpio<W> {
    fn new(out: W) -> Self {
        Cpio { out, inode: 0, directories: BTreeSet::new() }
    }

    /// A directory, once, however often it is asked for.
    fn directory(&mut self, name: &str) -> Result<()> {
        if self.directories.insert(name.to_owned()) {
            self.entry(name, 0o040_755, (0, 0), &[])?;
        }
        Ok(())
    }

    fn file(&mut self, name: &str, permissions: u32, contents: &[u8]) -> Result<()> {
        self.entry(name, 0o100_000 | permissions, (0, 0), contents)
    }

    /// The console that the kernel opens for init: character device 5, 1.
    fn console(&mut self, name: &str) -> Result<()> {
        self.entry(name, 0o020_600, (5, 1), &[])
    }

    fn finish(mut self) -> Result<W> {
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        Ok(self.out)
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), contents: &[u8]) -> Result<()> {
        self.inode += 1;
        let size = u32::try_from(contents.len())?;
        let name_size = u32::try_from(name.len() + 1)?;
        // inode, mode, uid, gid, links, mtime, size, device, rdevice, name size, checksum
        let fields = [self.inode, mode, 0, 0, 1, 0, size, 0, 0, device.0, device.1, name_size, 0];
        write!(self.out, "070701")?;
        for field in fields {
            write!(self.out, "{field:08x}")?;
        }
        self.out.write_all(name.as_bytes())?;
        // Header and name together, and the contents, are padded to multiples of four.
        self.out.write_all(&[0; 4][..1 + (4 - (110 + name.len() + 1) % 4) % 4])?;
        self.out.write_all(contents)?;
        self.out.write_all(&[0; 3][..(4 - contents.len() % 4) % 4])?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(name: &str, bytes: u64) -> Input {
        Input { path: name.into(), bytes, mtime: (0, 0) }
    }

    #[test]
    fn slices_hold_everything_once_and_are_bounded() {
        let inputs: Vec<_> = (1..200).map(|n| input("x", (n * 7919 * 131) % SLICE_BYTES + 1)).collect();
        let slices = slices(&inputs);
        assert_eq!(slices.concat(), inputs);
        for slice in &slices {
            assert!(slice.iter().map(|input| input.bytes).sum::<u64>() <= SLICE_BYTES);
        }
        assert!(slices.len() > 50);
        assert!(super::slices(&[]).is_empty());
    }

    #[test]
    fn selection_is_sorted_within_budget_and_of_plain_files_only() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir(at("b")).unwrap();
        for (name, bytes) in [("c", 5000), ("a", 6000), ("b/x", 4096), ("b/small", 4095), ("b/new\nline", 5000)] {
            std::fs::write(at(name), vec![1; bytes]).unwrap();
        }
        std::os::unix::fs::symlink(at("a"), at("b/link")).unwrap();
        let names = |budget| {
            select(&[dir.path()], budget)
                .into_iter()
                .map(|input| input.path.strip_prefix(dir.path()).unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(names(1 << 20), ["a", "b/x", "c"].map(PathBuf::from));
        assert_eq!(names(6000 + 4999), ["a", "b/x"].map(PathBuf::from));
        assert_eq!(names(5999), ["b/x"].map(PathBuf::from));
    }

    #[test]
    fn the_archive_is_what_cpio_reads() {
        let Ok(busybox) = find::find_busybox() else {
            eprintln!("SKIPPED: no static busybox here to read the archive back with");
            return;
        };
        let dir = tempfile::tempdir().unwrap();
        let mut cpio = Cpio::new(Vec::new());
        let mut expected = Vec::new();
        cpio.directory("d").unwrap();
        cpio.directory("d").unwrap(); // a second time: left out
        for length in 0..9usize {
            let name = format!("d/{}", "n".repeat(length + 1));
            let contents: Vec<u8> = (0..length * 1000 + length).map(|n| n as u8).collect();
            cpio.file(&name, 0o644, &contents).unwrap();
            expected.push((name, contents));
        }
        let archive = cpio.finish().unwrap();
        std::fs::write(dir.path().join("archive"), archive).unwrap();
        let status =
            Command::new(busybox).args(["cpio", "-i", "-F", "archive"]).current_dir(dir.path()).status().unwrap();
        assert!(status.success());
        assert_eq!(std::fs::read_dir(dir.path().join("d")).unwrap().count(), expected.len());
        for (name, contents) in expected {
            assert_eq!(std::fs::read(dir.path().join(&name)).unwrap(), contents, "{name}");
        }
    }
}

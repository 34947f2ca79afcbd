//! Archives in cpio's "newc" format (cpio(5); the kernel's
//! Documentation/driver-api/early-userspace/buffer-format.rst).

use std::collections::BTreeSet;
use std::io::{self, Write};

/// Writes an archive. All files belong to root and date from 1970: equal contents give equal bytes.
pub(crate) struct Cpio<W: Write> {
    out: W,
    inode: u32,
    directories: BTreeSet<String>,
}

impl<W: Write> Cpio<W> {
    /// An empty archive.
    pub(crate) fn new(out: W) -> Self {
        Self { out, inode: 0, directories: BTreeSet::new() }
    }

    /// Adds a directory, unless the archive has it.
    pub(crate) fn directory(&mut self, name: &str) -> io::Result<()> {
        if self.directories.insert(name.to_owned()) {
            self.entry(name, 0o040_755, (0, 0), &[])?;
        }
        Ok(())
    }

    /// Adds a file.
    pub(crate) fn file(&mut self, name: &str, permissions: u32, contents: &[u8]) -> io::Result<()> {
        self.entry(name, 0o100_000 | permissions, (0, 0), contents)
    }

    /// Adds the console that the kernel opens for init: character device 5, 1.
    pub(crate) fn console(&mut self, name: &str) -> io::Result<()> {
        self.entry(name, 0o020_600, (5, 1), &[])
    }

    /// Adds the trailer that ends an archive.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        Ok(self.out)
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), contents: &[u8]) -> io::Result<()> {
        self.inode += 1;
        let size = u32::try_from(contents.len()).map_err(io::Error::other)?;
        let name_size = u32::try_from(name.len() + 1).map_err(io::Error::other)?;
        // inode, mode, uid, gid, links, mtime, size, device, rdevice, name size, checksum
        let fields = [self.inode, mode, 0, 0, 1, 0, size, 0, 0, device.0, device.1, name_size, 0];
        write!(self.out, "070701")?;
        for field in fields {
            write!(self.out, "{field:08x}")?;
        }
        self.out.write_all(name.as_bytes())?;
        // Header and name together are padded to a multiple of four, and so are the contents.
        self.out.write_all(&[0; 4][..1 + (4 - (110 + name.len() + 1) % 4) % 4])?;
        self.out.write_all(contents)?;
        self.out.write_all(&[0; 3][..(4 - contents.len() % 4) % 4])?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::find;

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

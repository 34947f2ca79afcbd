//! Where `pageonefs` is mounted.
//!
//! Source: `proc_pid_mountinfo(5)`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// A mount of `pageonefs`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountInfo {
    /// Where it is mounted.
    pub path: PathBuf,
    /// The number of its device, as `stat(2)` has it.
    pub device: u64,
    /// Its option `domain`; empty if it shares with no other mount.
    pub domain: String,
}

/// Whether the module is for kernels of this release, such as `6.12.95-amd64`: for Debian's 6.1 and
/// 6.12.
pub fn is_for(release: &str) -> bool {
    ["6.1.", "6.12."].iter().any(|series| release.starts_with(series))
}

/// Whether the module is loaded.
pub fn is_loaded() -> bool {
    Path::new("/sys/module/pageonefs").exists()
}

/// The mounts of `pageonefs` that this process sees, each device once.
///
/// # Errors
///
/// Those of reading `/proc/self/mountinfo`.
pub fn mounts() -> std::io::Result<Vec<MountInfo>> {
    mounts_in(Path::new("/proc/self/mountinfo"))
}

/// The same by the `mountinfo` of a process, which may see others.
///
/// # Errors
///
/// Those of reading the file.
pub fn mounts_in(mountinfo: &Path) -> std::io::Result<Vec<MountInfo>> {
    Ok(parse(&std::fs::read_to_string(mountinfo)?))
}

/// `id parent major:minor root mountpoint options [optional...] - type source superoptions`
fn parse(text: &str) -> Vec<MountInfo> {
    let mut mounts: Vec<MountInfo> = Vec::new();
    for line in text.lines() {
        let Some((mount, file_system)) = line.split_once(" - ") else { continue };
        let mut words = mount.split(' ').skip(2);
        let (Some(device), Some(root), Some(path)) = (words.next(), words.next(), words.next()) else { continue };
        // A bind mount of a directory has no control interface.
        if !file_system.starts_with("pageonefs ") || root != "/" {
            continue;
        }
        let number = |word: &str| word.parse::<u32>().ok();
        let Some((Some(major), Some(minor))) = device.split_once(':').map(|(a, b)| (number(a), number(b))) else {
            continue;
        };
        let device = rustix::fs::makedev(major, minor);
        if mounts.iter().all(|other| other.device != device) {
            let options = file_system.rsplit(' ').next().unwrap_or_default();
            let domain = options.split(',').find_map(|option| option.strip_prefix("domain=")).unwrap_or_default();
            mounts.push(MountInfo { path: unescaped(path), device, domain: domain.into() });
        }
    }
    mounts
}

/// A path of which blanks, tabs, newlines and backslashes are written in octal.
fn unescaped(text: &str) -> PathBuf {
    let bytes = text.as_bytes();
    let (mut path, mut at) = (Vec::with_capacity(bytes.len()), 0);
    while let Some(&byte) = bytes.get(at) {
        let octal = bytes.get(at + 1..at + 4).and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.filter(|_| byte == b'\\').and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                path.push(byte);
                at += 4;
            }
            None => {
                path.push(byte);
                at += 1;
            }
        }
    }
    OsString::from_vec(path).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_found_among_others() {
        let text = "22 1 0:20 / /proc rw - proc proc rw\n\
                    40 22 0:51 / /dev/page\\040one rw,relatime shared:3 - pageonefs none rw,domain=a\n\
                    41 22 0:51 / /mnt/again rw - pageonefs none rw,domain=a\n\
                    42 22 0:52 /guests /mnt/part rw - pageonefs none rw\n\
                    43 22 0:53 / /mnt/b rw - tmpfs pageonefs rw\n";
        let device = rustix::fs::makedev(0, 51);
        assert_eq!(parse(text), [MountInfo { path: "/dev/page one".into(), device, domain: "a".into() }]);
        assert!(parse("nonsense\n - pageonefs x\n").is_empty());
        assert!(mounts().is_ok());
    }
}

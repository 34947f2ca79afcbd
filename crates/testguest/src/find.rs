//! Finding the parts of a guest: QEMU, a static busybox, a kernel, and the cache directory.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

/// Why a part was not found. The messages name the remedy.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// The environment names no directory for the cache.
    #[error("no place for the cache: none of PAGEONE_CACHE, XDG_CACHE_HOME and HOME is set; set one")]
    NoCache,
    /// A program is not installed.
    #[error("{name} is not on PATH: install Debian's package {package} (scripts/deps.sh demo does)")]
    NotOnPath {
        /// The program.
        name: String,
        /// Debian's package with the program.
        package: String,
    },
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The busybox on `PATH` needs libraries.
    #[error(
        "{} is dynamically linked and cannot run in a guest: install Debian's package busybox-static \
         (scripts/deps.sh demo does)", .0.display()
    )]
    Dynamic(PathBuf),
    /// The kernel that the user named cannot be read.
    #[error("cannot read the guest kernel {} ({origin})", path.display())]
    Kernel {
        /// The kernel.
        path: PathBuf,
        /// The option or variable that named it.
        origin: &'static str,
        /// Why.
        source: io::Error,
    },
    /// No kernel is installed.
    #[error(
        "no guest kernel in {} nor /boot/vmlinuz-*-cloud-amd64: run scripts/deps.sh demo, or give --kernel FILE",
        .0.display()
    )]
    NoKernel(PathBuf),
    /// The recycler's module is not built for the kernel.
    #[error(
        "there is no {}: run 'scripts/deps.sh ppr' and then 'scripts/lib/ppr-archive.sh', which builds it",
        .0.display()
    )]
    NoRecycler(PathBuf),
}

/// The directory for what is built or fetched once: `$PAGEONE_CACHE`, else `pageone` below
/// `$XDG_CACHE_HOME`, else below `~/.cache`.
///
/// # Errors
/// If none of the variables is set.
pub fn cache_dir() -> Result<PathBuf, FindError> {
    cache_by(|name| std::env::var_os(name))
}

/// The same, by the values that `variable` gives.
fn cache_by(variable: impl Fn(&str) -> Option<OsString>) -> Result<PathBuf, FindError> {
    let set = |name| variable(name).filter(|value| !value.is_empty());
    if let Some(dir) = set("PAGEONE_CACHE") {
        return Ok(dir.into());
    }
    if let Some(dir) = set("XDG_CACHE_HOME") {
        return Ok(Path::new(&dir).join("pageone"));
    }
    let home = set("HOME").ok_or(FindError::NoCache)?;
    Ok(Path::new(&home).join(".cache/pageone"))
}

/// A program on `PATH`.
///
/// # Errors
/// If `PATH` has no such program; the message names Debian's `package` that contains it.
pub fn find_program(name: &str, package: &str) -> Result<PathBuf, FindError> {
    std::env::var_os("PATH")
        .iter()
        .flat_map(std::env::split_paths)
        .map(|dir| dir.join(name))
        .find(|path| is_executable(path))
        .ok_or_else(|| FindError::NotOnPath { name: name.into(), package: package.into() })
}

fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// A busybox that needs no libraries.
///
/// # Errors
/// If `PATH` has no busybox, or a dynamically linked one.
pub fn find_busybox() -> Result<PathBuf, FindError> {
    ensure_static(find_program("busybox", "busybox-static")?)
}

/// The program, unless it needs libraries.
fn ensure_static(path: PathBuf) -> Result<PathBuf, FindError> {
    let image = std::fs::read(&path).map_err(|source| FindError::Read { path: path.clone(), source })?;
    if needs_interpreter(&image) { Err(FindError::Dynamic(path)) } else { Ok(path) }
}

/// Whether an ELF64 little-endian image has a `PT_INTERP` program header (elf(5)), which names a
/// dynamic loader. `false` for anything else.
fn needs_interpreter(image: &[u8]) -> bool {
    const PT_INTERP: u64 = 3;
    let number = |at: usize, len: usize| -> Option<u64> {
        let bytes = image.get(at..at.checked_add(len)?)?;
        Some(bytes.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b)))
    };
    let scan = || -> Option<bool> {
        let table = usize::try_from(number(0x20, 8)?).ok()?;
        let entry = usize::try_from(number(0x36, 2)?).ok()?;
        let count = usize::try_from(number(0x38, 2)?).ok()?;
        Some((0..count).any(|n| number(table.saturating_add(n * entry), 4) == Some(PT_INTERP)))
    };
    image.starts_with(b"\x7fELF\x02\x01") && scan().unwrap_or(false)
}

/// The kernel to boot guests with: `explicit`, else `$PAGEONE_GUEST_KERNEL`, else from the cache
/// the newest 6.1 (the reference), else the cache's newest, else the newest
/// `/boot/vmlinuz-*-cloud-amd64`.
///
/// # Errors
/// If no kernel is installed, or the named one cannot be read.
pub fn find_kernel(explicit: Option<&Path>) -> Result<PathBuf, FindError> {
    let named = explicit.map(|path| (path.to_owned(), "--kernel")).or_else(|| {
        let path = std::env::var_os("PAGEONE_GUEST_KERNEL").filter(|path| !path.is_empty())?;
        Some((path.into(), "PAGEONE_GUEST_KERNEL"))
    });
    if let Some((path, origin)) = named {
        return match std::fs::File::open(&path) {
            Ok(_) => Ok(path),
            Err(source) => Err(FindError::Kernel { path, origin, source }),
        };
    }
    let cache = cache_dir()?.join("kernels");
    installed_kernel(cache, Path::new("/boot"))
}

/// The best kernel of the cache, else of the host's own.
fn installed_kernel(cache: PathBuf, boot: &Path) -> Result<PathBuf, FindError> {
    newest(&cache, "", "/vmlinuz", |version| version.starts_with("6.1."))
        .or_else(|| newest(&cache, "", "/vmlinuz", |_| true))
        .or_else(|| newest(boot, "vmlinuz-", "", |version| version.ends_with("-cloud-amd64")))
        .ok_or(FindError::NoKernel(cache))
}

/// The recycler's module for a kernel: `modules/ppr.ko` beside it.
///
/// # Errors
/// If it is not built; the message says how to build it.
pub fn find_recycler(kernel: &Path) -> Result<PathBuf, FindError> {
    let path = kernel.with_file_name("modules").join("ppr.ko");
    if std::fs::File::open(&path).is_ok() { Ok(path) } else { Err(FindError::NoRecycler(path)) }
}

/// The readable file `dir/<prefix>VERSION<suffix>` of the highest accepted version.
fn newest(dir: &Path, prefix: &str, suffix: &str, accept: impl Fn(&str) -> bool) -> Option<PathBuf> {
    std::fs::read_dir(dir)
        .ok()?
        .filter_map(|entry| {
            let name = entry.ok()?.file_name().into_string().ok()?;
            let version = name.strip_prefix(prefix)?;
            let path = PathBuf::from(format!("{}/{name}{suffix}", dir.display()));
            (accept(version) && std::fs::File::open(&path).is_ok()).then(|| (version_key(version), path))
        })
        .max()
        .map(|(_, path)| path)
}

/// The numbers in a version, in order, so that 6.1.0-56 sorts after 6.1.0-9.
fn version_key(version: &str) -> Vec<u64> {
    version.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}

#[cfg(test)]
mod tests;

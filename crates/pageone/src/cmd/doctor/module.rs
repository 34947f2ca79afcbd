//! The host's module, `pageonefs`: whether this kernel has it and may load it, and its mounts.
//! The agent is the default, so a host without the module lacks nothing.

mod mounts;

#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use kmem::pageonefs::{MountInfo, is_for};

use super::process::read;
use super::report::Check;

/// The package that has its source, for dkms.
const PACKAGE: &str = "pageone-pageonefs-dkms";
/// dkms's certificate, DER (dkms(8)).
const CERTIFICATE: &str = "var/lib/dkms/mok.pub";

/// The checks.
pub(super) fn checks(root: &Path, directories: &[PathBuf]) -> Vec<Check> {
    let module = Module::look(root);
    let mut checks = vec![module.kernel()];
    if module.is_anywhere() {
        checks.extend(module.interface());
        checks.extend(module.signature());
        checks.extend(mounts::checks(root, &mounts(root), control::client::process(directories)));
    }
    checks
}

/// Whether this kernel has the module, loaded or to be loaded by the first mount.
pub(super) fn can_merge(root: &Path) -> bool {
    let module = Module::look(root);
    module.loaded.is_some() || module.file.is_some()
}

/// The mounts that this process sees.
pub(super) fn mounts(root: &Path) -> Vec<MountInfo> {
    kmem::pageonefs::mounts_in(&root.join("proc/self/mountinfo")).unwrap_or_default()
}

/// What is known of the module on this host.
#[derive(Debug)]
struct Module<'a> {
    root: &'a Path,
    /// The kernel that runs.
    release: String,
    /// How it taints the kernel, if it is loaded: letters (tainted-kernels.rst).
    loaded: Option<String>,
    /// The file that modprobe(8) loads on this kernel.
    file: Option<PathBuf>,
    /// Other kernels that have one.
    others: Vec<String>,
    /// The package's version, and that of the interface that its source has.
    source: Option<(String, Option<u32>)>,
}

impl<'a> Module<'a> {
    fn look(root: &'a Path) -> Self {
        let release = read(&root.join("proc/sys/kernel/osrelease")).unwrap_or_default().trim().to_owned();
        let directory = root.join("sys/module/pageonefs");
        let loaded = directory.exists().then(|| read(&directory.join("taint")).unwrap_or_default().trim().to_owned());
        let names = |path: &str| {
            let entries = std::fs::read_dir(root.join(path)).into_iter().flatten().flatten();
            let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
            names.sort();
            names
        };
        let mut others = names("lib/modules");
        others.retain(|other| *other != release && installed(root, other).is_some());
        let source = names("usr/src").into_iter().rev().find_map(|name| {
            let version = name.strip_prefix("pageonefs-")?;
            root.join("usr/src").join(&name).join("dkms.conf").exists().then(|| version.to_owned())
        });
        let source = source.map(|version| {
            let text = read(&root.join(format!("usr/src/pageonefs-{version}/uapi.h"))).unwrap_or_default();
            let line = text.lines().find_map(|line| line.strip_prefix("#define PAGEONEFS_VERSION"));
            (version, line.and_then(|number| number.trim().parse().ok()))
        });
        Self { root, loaded, file: installed(root, &release), others, source, release }
    }

    /// Whether the host has it for any kernel, so that more is worth saying.
    fn is_anywhere(&self) -> bool {
        self.loaded.is_some() || self.file.is_some() || self.source.is_some()
    }

    /// Whether this kernel has it.
    fn kernel(&self) -> Check {
        let (name, release) = ("module", &self.release);
        match (&self.loaded, &self.file, &self.source) {
            (Some(taint), Some(_), _) => Check::ok(name, format!("pageonefs is loaded{}", tainted(taint))),
            (Some(taint), None, _) => Check::note(
                name,
                format!("pageonefs is loaded{}, and not installed for {release}", tainted(taint)),
                format!("it is gone after the next boot: install the package {PACKAGE}"),
            ),
            (None, Some(_), _) => Check::note(
                name,
                format!("pageonefs is installed for {release}, and not loaded"),
                "the first mount loads it, for `run --backend module`; it taints the kernel (O: built outside of it; E: \
                 not signed)",
            )
            .fix("modprobe pageonefs"),
            (None, None, Some(_)) if !is_for(&self.release) => Check::note(
                name,
                format!("pageonefs is not for Linux {release}"),
                format!("Debian's 6.1 and 6.12 have it{}; the agent merges on this one, too", self.elsewhere()),
            ),
            (None, None, Some(_)) if !self.root.join(format!("lib/modules/{release}/build")).exists() => Check::note(
                name,
                format!("pageonefs is not built for {release}{}: its headers are missing", self.elsewhere()),
                format!("install linux-headers-{release}; dkms builds it then"),
            )
            .fix(format!("apt-get install linux-headers-{release}")),
            (None, None, Some((version, _))) => Check::note(
                name,
                format!("pageonefs is not built for {release}{}, and the headers are here", self.elsewhere()),
                format!("dkms builds it; if that fails, /var/lib/dkms/pageonefs/{version}/build/make.log says why"),
            )
            .fix(format!("dkms autoinstall -k {release}")),
            (None, None, None) if is_for(&self.release) => Check::note(
                name,
                format!("pageonefs is not installed{}", self.elsewhere()),
                format!("the agent does without; memory that several processes map merges with the package {PACKAGE}"),
            ),
            (None, None, None) => Check::note(
                name,
                format!("pageonefs is not installed, and not for Linux {release}"),
                "the agent does without; the module is for Debian's kernels 6.1 and 6.12",
            ),
        }
    }

    /// Which other kernels have it.
    fn elsewhere(&self) -> String {
        if self.others.is_empty() { String::new() } else { format!(" (it is there for {})", self.others.join(", ")) }
    }

    /// Whether the package's module and this program understand each other. What a loaded one
    /// speaks, only a mount can tell.
    fn interface(&self) -> Option<Check> {
        let (package, version) = self.source.as_ref()?;
        let (name, own, version) = ("module: interface", kmem::pageonefs::VERSION, (*version)?);
        if version == own {
            return Some(Check::ok(name, format!("version {own}, by the source of {package}")));
        }
        Some(Check::note(
            name,
            format!("the source of {package} has version {version}, this program {own}"),
            format!("install pageone and {PACKAGE} of one version: no mount of that module is managed"),
        ))
    }

    /// Whether the kernel takes modules without a signature; if not, whether this one has one that
    /// counts. `None`: it is loaded.
    fn signature(&self) -> Option<Check> {
        if self.loaded.is_some() {
            return None;
        }
        let name = "module: signature";
        const IMPORT: &str = "mokutil --import /var/lib/dkms/mok.pub";
        const ENROLL: &str = "`mokutil --import /var/lib/dkms/mok.pub`, and confirm at the next boot";
        let why = match self.demands_signature() {
            Ok(Some(why)) => why,
            Ok(None) => return Some(Check::ok(name, "this kernel takes modules without one")),
            Err(why) => return Some(Check::note(name, why, "run this as root; with Secure Boot it must be signed")),
        };
        let Some(file) = &self.file else {
            let remedy = format!("dkms signs what it builds, if openssl is installed: {ENROLL}");
            return Some(Check::note(name, format!("this kernel takes signed modules only ({why})"), remedy));
        };
        Some(match (is_signed(file), self.is_enrolled()) {
            (Some(false), _) => Check::note(
                name,
                format!("this kernel takes signed modules only ({why}), and pageonefs is not signed"),
                format!(
                    "install openssl, build it again (`dkms build --force`, `dkms install --force` with the version that \
                     `dkms status` says); then {ENROLL}"
                ),
            ),
            (_, Some(false)) => {
                Check::note(name, format!("the firmware does not know dkms's key ({why})"), ENROLL).fix(IMPORT)
            }
            (Some(true), Some(true)) => {
                Check::ok(name, format!("it is signed, and the firmware knows dkms's key ({why})"))
            }
            (_, _) => Check::note(
                name,
                format!("this kernel takes signed modules only ({why}); whether it takes pageonefs can't be seen"),
                "run this as root; `modinfo -F signer pageonefs` says whose key it is, `modprobe pageonefs` whether that \
                 counts",
            ),
        })
    }

    /// Why the kernel takes signed modules only; `None`: it does not.
    fn demands_signature(&self) -> Result<Option<&'static str>, String> {
        /// Attributes, 4 bytes, and then 1 where it is on (UEFI 2.10, 3.3).
        const SECURE_BOOT: &str = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c";
        let text = |path: &str| read(&self.root.join(path)).unwrap_or_default();
        if text("sys/module/module/parameters/sig_enforce").trim() == "Y" {
            return Ok(Some("module.sig_enforce"));
        }
        // The list, with the one that counts in brackets.
        let lockdown = text("sys/kernel/security/lockdown");
        if lockdown.contains("[integrity]") || lockdown.contains("[confidentiality]") {
            return Ok(Some("lockdown, as with Secure Boot"));
        }
        if !lockdown.is_empty() || !self.root.join("sys/firmware/efi").exists() {
            return Ok(None);
        }
        match std::fs::read(self.root.join(SECURE_BOOT)) {
            Ok(bytes) if bytes.get(4) == Some(&1) => Ok(Some("Secure Boot")),
            Ok(_) => Ok(None),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(format!("whether Secure Boot is on can't be seen: {e}")),
        }
    }

    /// Whether the firmware's list of the owner's keys has dkms's certificate. `None`: one of the
    /// two cannot be read.
    fn is_enrolled(&self) -> Option<bool> {
        let certificate = std::fs::read(self.root.join(CERTIFICATE)).ok().filter(|bytes| !bytes.is_empty())?;
        let lists: Vec<Vec<u8>> = ["sys/firmware/efi/mok-variables", "sys/firmware/efi/efivars"]
            .iter()
            .flat_map(|directory| std::fs::read_dir(self.root.join(directory)).into_iter().flatten().flatten())
            .filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"MokListRT"))
            .filter_map(|entry| std::fs::read(entry.path()).ok())
            .collect();
        if lists.is_empty() {
            return None;
        }
        Some(lists.iter().any(|list| list.windows(certificate.len()).any(|bytes| bytes == certificate)))
    }
}

/// The module's file for a kernel, by what depmod(8) wrote.
fn installed(root: &Path, release: &str) -> Option<PathBuf> {
    let directory = root.join("lib/modules").join(release);
    let is_it = |path: &&str| path.rsplit('/').next().is_some_and(|name| name.starts_with("pageonefs.ko"));
    let table = std::fs::read_to_string(directory.join("modules.dep")).ok()?;
    let path = table.lines().filter_map(|line| Some(line.split_once(':')?.0)).find(is_it)?;
    Some(directory.join(path))
}

fn tainted(taint: &str) -> String {
    if taint.is_empty() { String::new() } else { format!(", and taints the kernel ({taint})") }
}

/// Whether a module's file ends with a signature. `None`: it is compressed, or cannot be read.
fn is_signed(file: &Path) -> Option<bool> {
    /// What sign-file(1) of the kernel's tree appends.
    const MARK: &[u8] = b"~Module signature appended~\n";
    if file.extension()? != "ko" {
        return None;
    }
    let mut file = File::open(file).ok()?;
    let mut end = vec![0; MARK.len()];
    file.seek(SeekFrom::End(-(MARK.len() as i64))).ok()?;
    file.read_exact(&mut end).ok()?;
    Some(end == MARK)
}

//! `pageone run --backend module`: a QEMU whose RAM is a file of `pageonefs`.
//!
//! The words come before the user's. QEMU makes a file without a name in the mount, and maps it
//! shared, so vhost-user, virtiofsd and other processes may map it too. No agent is loaded. The
//! daemon finds the file by itself.

use std::borrow::Cow;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use guests::is_qemu;
use guests::words::{options, written};
use kmem::pageonefs::{MountInfo, is_for};
use rustix::fs::Access;

use super::Start;
use crate::paths;

/// How a mount is made, for messages. Those who may make files in it share with each other: so it
/// is one user's.
pub(crate) const MOUNT: &str = "install the package pageone-pageonefs-dkms, mkdir -p /mnt/pageone, mount -t pageonefs -o \
                                domain=guests,huge=advise,size=SUM-OF-RAM,mode=0700,uid=USER none /mnt/pageone";

/// Adds words to `command`, which starts the program. `domain`: of the mount that is to be taken.
/// `dir`: the daemon's directory, if it was named.
pub(super) fn prepare(
    command: &mut Command,
    program: &[OsString],
    domain: Option<&str>,
    dir: Option<PathBuf>,
    start: Start,
) -> Result<()> {
    let name = Path::new(&program[0]).file_name().unwrap_or(&program[0]).to_string_lossy();
    ensure!(
        is_qemu(&program[0]),
        "--backend module is for QEMU's x86-64 guests, and {name} is not QEMU; give another program a file of the mount \
         as its memory"
    );
    let mounts = kmem::pageonefs::mounts().context("cannot read which file systems are mounted")?;
    let mount = choose(&mounts, domain, &kmem::procfs::kernel_release().2)?;
    let writable = rustix::fs::access(&mount.path, Access::WRITE_OK | Access::EXEC_OK);
    writable.with_context(|| {
        format!(
            "cannot make a file in {}; mount another one with this user's uid= and a domain of its own",
            mount.path.display()
        )
    })?;
    let text = |word: &OsString| {
        word.clone()
            .into_string()
            .ok()
            .context("a word of its command line is no text; use UTF-8 in options and file names")
    };
    let words = program[1..].iter().map(text).collect::<Result<Vec<String>>>()?;
    if let Some(word) = obstacle(&words, &mount.path) {
        bail!("{word}: the guest's RAM must be described by -m alone, or lie in {} already", mount.path.display());
    }
    if !is_in(&words, &mount.path) {
        let bytes = snapshot::memory(&words)?;
        let path = mount.path.to_string_lossy();
        let path = written(&path);
        // Aligned for huge pages, which a mount may have.
        command.args([
            "-object",
            &format!("memory-backend-file,id=pageone-ram,size={bytes},mem-path={path},share=on,align=2M"),
            "-machine",
            "memory-backend=pageone-ram",
        ]);
    }
    start_daemon(dir, start)
}

/// The mount of this domain; the only one if none is named.
fn choose<'a>(mounts: &'a [MountInfo], domain: Option<&str>, release: &str) -> Result<&'a MountInfo> {
    let known = || {
        let names = mounts.iter().map(|mount| format!("{} (domain {:?})", mount.path.display(), mount.domain));
        names.collect::<Vec<_>>().join(", ")
    };
    match (mounts, domain) {
        ([], _) if is_for(release) => bail!("pageonefs is not mounted; as root: {MOUNT}"),
        ([], _) => bail!(
            "pageonefs is for Debian's kernels 6.1 and 6.12, and this is {release}: leave out --backend module, and the \
             agent merges the guest"
        ),
        (_, Some(domain)) => {
            let found = mounts.iter().find(|mount| mount.domain == domain);
            found.with_context(|| format!("no mount of pageonefs has domain {domain:?}: there are {}", known()))
        }
        ([one], None) => Ok(one),
        (_, None) => bail!("there are several mounts of pageonefs: name one by --domain: {}", known()),
    }
}

/// The first word that describes the guest's RAM otherwise.
fn obstacle(words: &[String], mount: &Path) -> Option<String> {
    let found = options(words).find(|option| match option.name {
        "mem-path" | "readconfig" => true,
        "object" => option.first().starts_with("memory-backend-") && !lies_in(option.part("mem-path"), mount),
        "numa" => option.part("memdev").is_some() && !is_in(words, mount),
        "machine" | "M" => option.part("memory-backend").is_some() && !is_in(words, mount),
        _ => false,
    });
    found.map(|option| format!("-{} {}", option.name, option.value))
}

fn lies_in(path: Option<Cow<'_, str>>, mount: &Path) -> bool {
    path.is_some_and(|path| Path::new(&*path).starts_with(mount))
}

/// Whether the command line puts RAM into the mount by itself.
fn is_in(words: &[String], mount: &Path) -> bool {
    options(words).any(|option| option.name == "object" && lies_in(option.part("mem-path"), mount))
}

/// Starts a daemon where none answers and this account may: files are managed by root's.
fn start_daemon(dir: Option<PathBuf>, start: Start) -> Result<()> {
    let candidates = paths::candidates(dir);
    if super::running(&candidates, kmem::peer::is_trusted).is_some() || start == Start::Never {
        return Ok(());
    }
    ensure!(
        rustix::process::geteuid().is_root(),
        "no daemon answers, and only root's merges files of pageonefs; as root: systemctl start pageone, or pageone daemon"
    );
    let own = if candidates.len() == 1 { candidates[0].clone() } else { paths::own_directory() };
    super::start_daemon(&own)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(path: &str, domain: &str) -> MountInfo {
        MountInfo { path: path.into(), device: 1, domain: domain.into() }
    }

    #[test]
    fn the_mount_of_the_domain_is_taken_or_the_only_one() {
        let (a, b) = (mount("/dev/a", "a"), mount("/dev/b", "b"));
        assert!(
            choose(&[], None, "6.12.1-amd64")
                .unwrap_err()
                .to_string()
                .contains("pageonefs is not mounted; as root: install the package pageone-pageonefs-dkms")
        );
        assert_eq!(choose(std::slice::from_ref(&a), None, "6.18.1").unwrap(), &a);
        let both = [a, b];
        assert_eq!(choose(&both, Some("b"), "6.18.1").unwrap(), &both[1]);
        assert!(
            choose(&both, None, "6.18.1")
                .unwrap_err()
                .to_string()
                .contains("there are several mounts of pageonefs: name one by --domain: /dev/a")
        );
        assert!(
            choose(&both, Some("c"), "6.18.1")
                .unwrap_err()
                .to_string()
                .contains("no mount of pageonefs has domain \"c\"")
        );
    }

    #[test]
    fn ram_that_is_described_otherwise_is_seen() {
        let words = |line: &str| line.split(' ').map(String::from).collect::<Vec<_>>();
        let mount = Path::new("/mnt/pageone");
        for line in ["-m 1G", "-object rng-random,id=r", "-object memory-backend-file,id=m,mem-path=/mnt/pageone/x"] {
            assert_eq!(obstacle(&words(line), mount), None, "{line}");
        }
        for line in ["-mem-path /x", "-object memory-backend-ram,id=m", "-machine q35,memory-backend=m"] {
            assert!(obstacle(&words(line), mount).is_some(), "{line}");
        }
        assert!(is_in(&words("-object memory-backend-file,mem-path=/mnt/pageone"), mount));
        assert!(!is_in(&words("-object memory-backend-file,mem-path=/mnt/pageone2"), mount));
        assert!(is_in(&words("-object memory-backend-file,mem-path=/mnt/a,,b"), Path::new("/mnt/a,b")));
    }

    #[test]
    fn another_program_and_words_without_text_are_refused() {
        let refuse = |program: &[&str]| {
            let program: Vec<OsString> = program.iter().map(OsString::from).collect();
            prepare(&mut Command::new("true"), &program, None, None, Start::Never).unwrap_err().to_string()
        };
        assert!(refuse(&["/bin/sh"]).contains("--backend module is for QEMU's x86-64 guests, and sh is not QEMU"));
    }
}

//! Whether guests run with KVM on this machine.
//!
//! That `/dev/kvm` can be opened proves little: a virtual machine may offer it, and still run no
//! Linux. So a kernel is started, without a file system, until it prints its first line.

use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::guest::{Guest, StartError};
use crate::spec::{Accelerator, Spec};

/// How long a kernel may be silent before its first line: hardware needs a tenth of a second, an
/// emulated processor with virtualisation seconds.
const PATIENCE: Duration = Duration::from_secs(15);
/// Time between two looks at the console.
const NAP: Duration = Duration::from_millis(20);
/// How the first line of every Linux begins, behind the time stamp.
const FIRST_LINE: &str = "Linux version";

/// Why guests do not run with KVM here.
#[derive(Debug, thiserror::Error)]
pub enum NoKvm {
    /// The processor has no virtualisation, or the kernel no KVM.
    #[error("there is no {}: load kvm-intel or kvm-amd, or turn virtualisation on in the firmware", .0.display())]
    Missing(PathBuf),
    /// This user may not use it.
    #[error("{} cannot be opened ({source}): join the group kvm", .device.display())]
    Refused {
        /// The device.
        device: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// QEMU cannot be run.
    #[error(transparent)]
    Start(#[from] StartError),
    /// QEMU ended.
    #[error("QEMU ends: {0}")]
    Ended(String),
    /// The kernel printed nothing.
    #[error("a kernel that was started with it was silent for {} s; leave --accel at auto, or say --accel tcg", PATIENCE.as_secs())]
    Silent,
}

impl Spec {
    /// Boots the spec's kernel with KVM until its first line.
    ///
    /// # Errors
    /// No guest runs with KVM here; the message says why.
    pub fn probe_kvm(&self) -> Result<(), NoKvm> {
        try_kvm()?;
        let mut guest = Guest::start_with_stderr(self.with_accelerator(Accelerator::Kvm).kernel_alone())?;
        wait_for_kernel(&mut guest, PATIENCE)
    }
}

/// Whether KVM's device can be used, which alone does not say that a kernel boots with it.
///
/// # Errors
/// It is not there, or this user may not use it.
pub fn try_kvm() -> Result<(), NoKvm> {
    try_device(Path::new("/dev/kvm"))
}

fn try_device(device: &Path) -> Result<(), NoKvm> {
    match OpenOptions::new().read(true).write(true).open(device) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(NoKvm::Missing(device.into())),
        Err(source) => Err(NoKvm::Refused { device: device.into(), source }),
    }
}

/// Waits for the first line of a guest's kernel.
fn wait_for_kernel(guest: &mut Guest, patience: Duration) -> Result<(), NoKvm> {
    let begin = Instant::now();
    loop {
        // Asked first: lines that come before the end are read then.
        let ended = guest.has_ended();
        let lines = guest.console();
        if lines.iter().any(|line| line.contains(FIRST_LINE)) {
            return Ok(());
        }
        if ended {
            let last = lines.into_iter().next_back();
            return Err(NoKvm::Ended(last.unwrap_or_else(|| "it says nothing".to_owned())));
        }
        if begin.elapsed() > patience {
            return Err(NoKvm::Silent);
        }
        std::thread::sleep(NAP);
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn probe(script: &str, patience: Duration) -> Result<(), NoKvm> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        wait_for_kernel(&mut Guest::start_with_stderr(command).unwrap(), patience)
    }

    #[test]
    fn a_kernel_has_started_when_it_says_its_version() {
        let long = Duration::from_secs(60);
        probe("echo Booting; echo '[    0.000000] Linux version 6.1.0'; exec sleep 600", long).unwrap();
        let ended = probe("echo 'qemu: failed to initialize kvm' >&2; sleep 0.2; exit 1", long).unwrap_err();
        assert_eq!(ended.to_string(), "QEMU ends: qemu: failed to initialize kvm");
        let silent = probe("echo Probing EDD; exec sleep 600", Duration::from_millis(100)).unwrap_err();
        assert!(matches!(silent, NoKvm::Silent), "{silent}");
    }

    #[test]
    fn a_device_that_is_not_there_or_cannot_be_used_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = |device: &Path| try_device(device).unwrap_err().to_string();
        let missing = error(&dir.path().join("kvm"));
        assert!(missing.contains("/kvm: load kvm-intel or kvm-amd, or turn virtualisation on"), "{missing}");
        let refused = error(dir.path());
        assert!(refused.contains("cannot be opened (") && refused.ends_with("join the group kvm"), "{refused}");
    }
}

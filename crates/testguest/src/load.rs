//! Guests that boot nothing but the load (`guest/load`), for the recycler's tests and benches.

use std::process::Command;

use crate::spec::{Accelerator, DEVICES};

macro_rules! script {
    () => {
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/lib/ppr-archive.sh")
    };
}

/// Makes the archives. That it is there is seen when this is compiled: tests skip what it cannot
/// make.
const SCRIPT: &str = script!();
const _: &[u8] = include_bytes!(script!());

/// A kernel, and the archive to boot it with.
pub type Boot = (String, String);

/// What can be booted: for each kernel of the cache whose headers are there.
///
/// # Errors
/// Why nothing can be; the message names the remedy.
pub fn boots() -> Result<Vec<Boot>, String> {
    let out = Command::new(SCRIPT).output().map_err(|error| format!("cannot run {SCRIPT}: {error}"))?;
    if !out.status.success() {
        return Err(String::from_utf8_lossy(&out.stderr).trim().to_owned());
    }
    let text = String::from_utf8_lossy(&out.stdout);
    let pair = |line: &str| line.split_once(' ').map(|(kernel, archive)| (kernel.to_owned(), archive.to_owned()));
    Ok(text.lines().filter_map(pair).collect())
}

/// The words that start QEMU, the program first; the console is QEMU's standard output. `work`:
/// parameters for `guest/load/init`.
pub fn words((kernel, archive): &Boot, accelerator: Accelerator, memory_mib: u64, work: &str) -> Vec<String> {
    let append = format!("console=ttyS0 quiet panic=-1 nokaslr no_timer_check mitigations=off {work}");
    let (accelerator, cpu) = match accelerator {
        Accelerator::Tcg => ("tcg,tb-size=16", "qemu64,-cx16"),
        Accelerator::Kvm => ("kvm", "host"),
    };
    let machine = format!("qemu-system-x86_64 -accel {accelerator} -cpu {cpu} -m {memory_mib}");
    let boot = ["-kernel", kernel, "-initrd", archive, "-append", &append];
    machine.split(' ').chain(boot).chain(DEVICES.split(' ')).map(str::to_owned).collect()
}

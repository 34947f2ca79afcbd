//! Guests that boot nothing but the load (`guest/load`), and what their memory takes on the host.

#![allow(unsafe_code)] // A step between fork and exec.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kmem::procfs;
use kmem::range::Range;
use parking_lot::Mutex;
use rustix::process::Signal;

use crate::subjects::ksm::Rival;
use crate::subjects::pageone::PageOne;
use bench_common::interrupt::Interrupt;

/// How long a guest may take to say something that it is waited for.
const LIMIT: Duration = Duration::from_secs(300);

/// A kernel, the archive to boot it with, and how.
pub(crate) struct Archive {
    kernel: String,
    archive: String,
    kvm: bool,
}

impl Archive {
    /// Makes the archives, or finds them; takes that of the 6.1 kernel, the reference. `kvm`: it
    /// boots on KVM. `Err` with the reason in the inner result: it cannot be measured on this host.
    pub(crate) fn find(kvm: bool) -> Result<Result<Self, String>> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/ppr-archive.sh");
        let out = Command::new(&script).output().with_context(|| format!("cannot run {}", script.display()))?;
        if !out.status.success() {
            return Ok(Err(String::from_utf8_lossy(&out.stderr).trim().to_string()));
        }
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        let line = text.lines().find(|line| line.contains("/6.1.")).or_else(|| text.lines().next());
        let (kernel, archive) = line.and_then(|line| line.split_once(' ')).context("ppr-archive.sh printed nothing")?;
        Ok(Ok(Self { kernel: kernel.into(), archive: archive.into(), kvm }))
    }

    /// The command that boots it; `parameters` are for `guest/load/init`.
    pub(crate) fn qemu(&self, memory_mib: u64, parameters: &str) -> Command {
        let append = format!("console=ttyS0 quiet panic=-1 nokaslr no_timer_check mitigations=off STAY=1 {parameters}");
        let mut qemu = Command::new("qemu-system-x86_64");
        let (accelerator, processor) = if self.kvm { ("kvm", "host") } else { ("tcg,tb-size=16", "qemu64,-cx16") };
        qemu.args(["-accel", accelerator, "-cpu", processor, "-m", &memory_mib.to_string()]);
        qemu.args(["-kernel", &self.kernel, "-initrd", &self.archive, "-append", &append]);
        qemu.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-monitor", "none"]);
        qemu.args(["-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"]);
        qemu
    }
}

/// How a guest gives memory back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Not at all.
    Nothing,
    /// Free page reporting of the balloon, as the kernel has it.
    Reporting,
    /// The same with `page_reporting_order=0`.
    ReportingSingly,
    /// The recycler.
    Ppr,
    /// The recycler, with huge pages under the guest as far as the host has them.
    PprHuge,
}

/// The command line of QEMU.
fn qemu(archive: &Archive, way: Way, memory_mib: u64, parameters: &str) -> Command {
    let more = match way {
        Way::Nothing => "",
        Way::Reporting => "BALLOON=1",
        Way::ReportingSingly => "BALLOON=1 REPORTING_ORDER=0",
        Way::Ppr | Way::PprHuge => "PPR=1",
    };
    let mut qemu = archive.qemu(memory_mib, &format!("{more} {parameters}"));
    if matches!(way, Way::Reporting | Way::ReportingSingly) {
        qemu.args(["-device", "virtio-balloon-pci,free-page-reporting=on"]);
    }
    qemu
}

/// A running guest; it ends with this value.
pub(crate) struct Guest {
    child: Child,
    lines: Arc<Mutex<Vec<(Instant, String)>>>,
    ram: Range,
}

impl Guest {
    /// Starts one; `parameters` are for `guest/load/init`.
    pub(crate) fn start(
        pageone: &PageOne,
        archive: &Archive,
        way: Way,
        memory_mib: u64,
        parameters: &str,
    ) -> Result<Self> {
        let qemu = qemu(archive, way, memory_mib, parameters);
        let mut command = match way {
            Way::Ppr => pageone.launch_with(&qemu, &["--ppr"])?,
            Way::PprHuge => pageone.launch_with(&qemu, &["--ppr", "--huge-pages", "keep"])?,
            _ => Rival::launch(&qemu),
        };
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        // Should this program be killed, its guests end too.
        // SAFETY: between fork and exec the closure makes one system call and touches no memory
        // that another thread may have locked.
        unsafe {
            command.pre_exec(|| Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?));
        }
        let mut child = command.spawn().with_context(|| format!("cannot start {}", command.get_program().display()))?;
        let out = child.stdout.take().context("a guest has no console")?;
        let lines: Arc<Mutex<Vec<(Instant, String)>>> = Arc::default();
        let heard = lines.clone();
        // Ends with the guest.
        std::thread::spawn(move || {
            for line in BufReader::new(out).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).trim().to_string();
                heard.lock().push((Instant::now(), line));
            }
        });
        let mut guest = Self { child, lines, ram: Range::new(0, 0) };
        // At once: merging cuts the mapping into many.
        guest.find_ram(memory_mib)?;
        Ok(guest)
    }

    /// Waits for the mapping of the guest's memory.
    fn find_ram(&mut self, memory_mib: u64) -> Result<()> {
        let end = Instant::now() + LIMIT;
        loop {
            if let Some(ram) = find_ram(self.pid(), memory_mib)? {
                self.ram = ram;
                return Ok(());
            }
            ensure!(Instant::now() < end, "QEMU has no mapping of the size of the guest's memory");
            self.check()?;
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// The process.
    pub(crate) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// When it first said something that begins so, if it has, and the whole line.
    pub(crate) fn said(&self, beginning: &str) -> Option<(Instant, String)> {
        let lines = self.lines.lock();
        lines.iter().find(|(_, line)| line.starts_with(beginning)).cloned()
    }

    /// Waits until it says something that begins so.
    pub(crate) fn wait(&mut self, beginning: &str, interrupt: &Interrupt) -> Result<(Instant, String)> {
        interrupt.until_each(Duration::from_millis(20), beginning, LIMIT, || {
            self.check()?;
            Ok(self.said(beginning))
        })
    }

    /// Whether it lives and every byte was right so far.
    ///
    /// # Errors
    ///
    /// When not.
    pub(crate) fn check(&mut self) -> Result<()> {
        let lines = self.lines.lock();
        let bad = ["CORRUPT", "Kernel panic", "PPR refused"];
        let found = lines.iter().find(|(_, line)| bad.iter().any(|bad| line.contains(bad)));
        ensure!(found.is_none(), "guest {}: {found:?}", self.child.id());
        if let Some(end) = self.child.try_wait()? {
            let tail: Vec<_> = lines.iter().rev().take(5).map(|(_, line)| line.as_str()).collect();
            bail!("guest {} ended, {end}: {tail:?}", self.child.id());
        }
        Ok(())
    }

    /// Rounds of the load, all right.
    pub(crate) fn rounds(&self) -> usize {
        let lines = self.lines.lock();
        lines.iter().filter(|(_, line)| line.starts_with("PAGEONE-ROUND") && line.contains("PASS")).count()
    }

    /// A figure of the module's statistics, once it has printed them.
    pub(crate) fn stat(&self, name: &str) -> Option<u64> {
        let (_, line) = self.said(&format!("PPR-STAT {name} "))?;
        line.rsplit_once(' ')?.1.parse().ok()
    }

    /// Bytes of the host's memory that the guest's RAM takes, without frames shared in a store. A
    /// page of KSM counts in parts.
    pub(crate) fn resident(&self) -> Result<u64> {
        let text = fs::read_to_string(format!("/proc/{}/smaps", self.pid())).context("cannot read a guest's smaps")?;
        Ok(sum(&text, self.ram) << 10)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The mapping that is as large as the guest's memory.
fn find_ram(pid: i32, memory_mib: u64) -> Result<Option<Range>> {
    let mut found = None;
    procfs::for_each_map(Some(pid), |map| {
        if map.range.len == (memory_mib as usize) << 20 {
            found = Some(map.range);
        }
    })?;
    Ok(found)
}

/// KiB of the mappings inside: the process's own pages, and its share of KSM's pages.
fn sum(smaps: &str, ram: Range) -> u64 {
    let (mut inside, mut file, mut sum) = (false, false, 0);
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let Some(first) = words.next() else { continue };
        if let Some((start, _)) = first.split_once('-')
            && let Ok(start) = usize::from_str_radix(start, 16)
        {
            inside = start >= ram.start && start < ram.end();
            // Protection, offset, device, inode.
            file = words.nth(3).is_some_and(|inode| inode != "0");
            continue;
        }
        let counted = if file { "Anonymous:" } else { "Pss:" };
        if inside && first == counted {
            sum += words.next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0);
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_summed_up_inside_ram_only() {
        let smaps = "1000-3000 rw-p 00000000 00:00 0 \nRss: 8 kB\nPss: 7 kB\nAnonymous: 8 kB\n\
                     3000-4000 rw-p 00000000 00:01 77 /memfd:pageone (deleted)\nPss: 2 kB\nAnonymous: 4 kB\n\
                     9000-a000 rw-p 00000000 00:00 0 \nPss: 100 kB\n";
        assert_eq!(sum(smaps, Range::new(0x1000, 0x3000)), 11);
    }
}

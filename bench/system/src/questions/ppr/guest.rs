//! Guests that boot nothing but the load (`guest/load`), and what their memory takes on the host.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kmem::procfs;
use kmem::range::Range;
use testguest::Accelerator;
use testguest::load::{self, Boot};

use crate::subjects::ksm::Rival;
use crate::subjects::pageone::PageOne;
use bench_common::interrupt::Interrupt;

/// How long a guest may take to say something that it is waited for.
const LIMIT: Duration = Duration::from_secs(300);

/// What is booted, and how.
pub(crate) struct Archive {
    boot: Boot,
    accelerator: Accelerator,
}

impl Archive {
    /// The archive of the 6.1 kernel, the reference, or another one. `Err` with the reason in the
    /// inner result: it cannot be measured on this host.
    pub(crate) fn find(accelerator: Accelerator) -> Result<Result<Self, String>> {
        let boots = match load::boots() {
            Ok(boots) => boots,
            Err(why) => return Ok(Err(why)),
        };
        let boot = boots.iter().find(|(kernel, _)| kernel.contains("/6.1.")).or(boots.first());
        Ok(Ok(Self { boot: boot.context("there is no archive to boot")?.clone(), accelerator }))
    }

    /// The command that boots it; `parameters` are for `guest/load/init`.
    pub(crate) fn qemu(&self, memory_mib: u64, parameters: &str) -> Command {
        let words = load::words(&self.boot, self.accelerator, memory_mib, &format!("STAY=1 {parameters}"));
        let mut qemu = Command::new(&words[0]);
        qemu.args(&words[1..]);
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
    guest: testguest::Guest,
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
        let command = match way {
            Way::Ppr => pageone.launch_with(&qemu, &["--ppr"])?,
            Way::PprHuge => pageone.launch_with(&qemu, &["--ppr", "--huge-pages", "keep"])?,
            _ => Rival::launch(&qemu),
        };
        let mut guest = Self { guest: testguest::Guest::start(command)?, ram: Range::new(0, 0) };
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
        self.guest.pid()
    }

    /// Waits until it says something that begins so; when that was seen, and the whole line.
    pub(crate) fn wait(&mut self, beginning: &str, interrupt: &Interrupt) -> Result<(Instant, String)> {
        interrupt.until_each(Duration::from_millis(2), beginning, LIMIT, || {
            self.check()?;
            Ok(self.guest.said(|line| line.starts_with(beginning)).map(|line| (Instant::now(), line)))
        })
    }

    /// Whether it lives and every byte was right so far.
    ///
    /// # Errors
    ///
    /// When not.
    pub(crate) fn check(&mut self) -> Result<()> {
        let found = self.guest.said(|line| line.contains("CORRUPT") || line.contains("PPR refused"));
        ensure!(found.is_none(), "guest {}: {found:?}", self.pid());
        Ok(self.guest.check()?)
    }

    /// Rounds of the load, all right.
    pub(crate) fn rounds(&self) -> usize {
        let is_one = |line: &&String| line.starts_with("PAGEONE-ROUND") && line.contains("PASS");
        self.guest.console().iter().filter(is_one).count()
    }

    /// A figure of the module's statistics, once it has printed them.
    pub(crate) fn stat(&self, name: &str) -> Option<u64> {
        let beginning = format!("PPR-STAT {name} ");
        self.guest.said(|line| line.starts_with(&beginning))?.rsplit_once(' ')?.1.parse().ok()
    }

    /// Bytes of the host's memory that the guest's RAM takes, without frames shared in a store. A
    /// page of KSM counts in parts.
    pub(crate) fn resident(&self) -> Result<u64> {
        let text = fs::read_to_string(format!("/proc/{}/smaps", self.pid())).context("cannot read a guest's smaps")?;
        Ok(sum(&text, self.ram) << 10)
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

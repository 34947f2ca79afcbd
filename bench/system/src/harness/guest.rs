//! The guests of `pageone demo`, started by the bench: they check their own files for ever and
//! count the rounds.

#![allow(unsafe_code)] // A step between fork and exec.

use std::fs;
use std::io::{BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kmem::{PAGE_SIZE, procfs};
use rustix::process::{Pid, Signal, kill_process};

use crate::harness::dump;
use crate::harness::interrupt::Interrupt;
use crate::subjects::pageone::PageOne;

/// Memory of a guest that is dumped, in MiB.
pub(crate) const MEMORY_MIB: usize = 512;
/// How long booting and a first round of checks may take: under emulation, minutes.
const BOOT_LIMIT: Duration = Duration::from_secs(900);

/// A running guest; it ends with this value.
pub(crate) struct Guest {
    child: Child,
    heard: Arc<Heard>,
}

#[derive(Default)]
struct Heard {
    rounds: Mutex<Vec<Instant>>,
    /// Rounds that found a wrong file, and kernel panics.
    bad: AtomicU64,
}

impl Guest {
    /// Starts `command`, which ends up as QEMU with its console on standard output.
    pub(crate) fn start(mut command: Command) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        // Should this program be killed, its guests end too.
        // SAFETY: between fork and exec the closure makes one system call and touches no memory that
        // another thread may have locked.
        unsafe {
            command.pre_exec(|| Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?));
        }
        let mut child = command.spawn().with_context(|| format!("cannot start {}", command.get_program().display()))?;
        let out = child.stdout.take().context("a guest has no console")?;
        let heard = Arc::new(Heard::default());
        let guest = Self { child, heard: heard.clone() };
        // Ends with the guest.
        std::thread::spawn(move || {
            let mut lines = BufReader::new(out);
            let mut line = Vec::new();
            while lines.read_until(b'\n', &mut line).is_ok_and(|len| len > 0) {
                heard.line(&String::from_utf8_lossy(&line));
                line.clear();
            }
        });
        Ok(guest)
    }

    /// The process.
    pub(crate) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Rounds of checks done.
    fn rounds(&self) -> usize {
        self.heard.rounds.lock().map_or(0, |rounds| rounds.len())
    }

    /// Rounds a second, from the first to the last that ended since.
    pub(crate) fn rounds_a_second(&self, since: Instant) -> f64 {
        let rounds = self.heard.rounds.lock().map(|rounds| rounds.clone()).unwrap_or_default();
        let rounds: Vec<Instant> = rounds.into_iter().filter(|&at| at >= since).collect();
        match rounds[..] {
            [first, .., last] => (rounds.len() - 1) as f64 / (last - first).as_secs_f64(),
            // Too few to tell times between them.
            _ => rounds.len() as f64 / since.elapsed().as_secs_f64(),
        }
    }

    /// Whether it lives and every file was right so far.
    ///
    /// # Errors
    ///
    /// When not.
    pub(crate) fn check(&mut self) -> Result<()> {
        ensure!(self.heard.bad.load(Ordering::Relaxed) == 0, "guest {} found wrong bytes, or panicked", self.pid());
        match self.child.try_wait()? {
            None => Ok(()),
            Some(end) => bail!("guest {} ended, {end}", self.pid()),
        }
    }

    /// Writes a dump of its memory, stopped.
    fn dump(&self, number: usize) -> Result<()> {
        let directory = dump::directory()?;
        fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
        let pid = Pid::from_raw(self.pid()).context("a guest has no number")?;
        kill_process(pid, Signal::STOP).context("cannot stop a guest")?;
        let mut start = None;
        procfs::for_each_map(Some(self.pid()), |map| {
            if map.range.len == MEMORY_MIB << 20 {
                start = Some(map.range.start);
            }
        })?;
        let start = start.context("QEMU has no mapping of the size of the guest's memory")?;
        let open = |file| fs::File::open(format!("/proc/{}/{file}", self.pid())).context("cannot read a guest");
        let (memory, mut pagemap) = (open("mem")?, open("pagemap")?);
        pagemap.seek(SeekFrom::Start((start / PAGE_SIZE * 8) as u64))?;
        let mut pagemap = BufReader::new(pagemap);
        let [index, pages] = dump::files(&directory, number);
        let mut out = BufWriter::new(fs::File::create(&pages)?);
        let (mut numbers, mut entry, mut bytes) = (Vec::new(), [0; 8], vec![0; PAGE_SIZE]);
        for page in 0..(MEMORY_MIB << 20) / PAGE_SIZE {
            pagemap.read_exact(&mut entry)?;
            // Present (Documentation/admin-guide/mm/pagemap.rst).
            if u64::from_le_bytes(entry) >> 63 == 1 {
                memory.read_exact_at(&mut bytes, (start + page * PAGE_SIZE) as u64)?;
                out.write_all(&bytes)?;
                numbers.extend((page as u32).to_le_bytes());
            }
        }
        out.flush()?;
        // Last, and under its name at once: where it is, the pages are complete.
        let unfinished = index.with_extension("new");
        fs::write(&unfinished, numbers)?;
        Ok(fs::rename(unfinished, index)?)
    }
}

impl Heard {
    fn line(&self, line: &str) {
        let Some((_, round)) = line.split_once("PAGEONE-ROUND ") else {
            if line.contains("Kernel panic") {
                self.bad.fetch_add(1, Ordering::Relaxed);
            }
            return;
        };
        if round.contains(" PASS ") {
            self.rounds.lock().unwrap_or_else(PoisonError::into_inner).push(Instant::now());
        } else {
            self.bad.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until every guest has checked all of its files once.
pub(crate) fn wait_checked(guests: &mut [Guest], interrupt: &Interrupt) -> Result<()> {
    interrupt.until("every guest has checked its files", BOOT_LIMIT, || {
        guests.iter_mut().try_for_each(Guest::check)?;
        Ok(guests.iter().all(|guest| guest.rounds() > 0).then_some(()))
    })
}

/// Makes the dumps of guests 0 to `guests` where they are not there yet.
pub(crate) fn make_dumps(guests: usize, interrupt: &Interrupt) -> Result<()> {
    let directory = dump::directory()?;
    if (0..guests).all(|guest| dump::files(&directory, guest)[0].exists()) {
        return Ok(());
    }
    eprintln!("pageone-bench: {guests} guests boot, once, and their memory goes to {}", directory.display());
    let program = PageOne::find()?.guest_command(MEMORY_MIB, &[])?;
    let mut running = Vec::new();
    for _ in 0..guests {
        let mut command = Command::new(program.get_program());
        command.args(program.get_args());
        running.push(Guest::start(command)?);
    }
    let start = Instant::now();
    wait_checked(&mut running, interrupt)?;
    running.iter().enumerate().try_for_each(|(number, guest)| guest.dump(number).context("cannot dump a guest"))?;
    eprintln!("pageone-bench: dumped after {:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}

/// The words of a shell command in which every word is in single quotes.
pub(crate) fn words(command: &str) -> Vec<String> {
    let quoted = command.trim().trim_start_matches('\'').trim_end_matches('\'');
    quoted.split("' '").map(|word| word.replace(r"'\''", "'")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_split_into_words() {
        assert_eq!(words("'qemu' '-append' 'a=1 b=2' 'it'\\''s'\n"), ["qemu", "-append", "a=1 b=2", "it's"]);
    }

    #[test]
    fn rounds_and_failures_are_heard() {
        let heard = Heard::default();
        for line in ["PAGEONE-BOOTED files=3", "PAGEONE-ROUND 0 PASS checks=3\r\n", "x PAGEONE-ROUND 1 PASS checks=3"] {
            heard.line(line);
        }
        let counts = || (heard.rounds.lock().unwrap().len(), heard.bad.load(Ordering::Relaxed));
        assert_eq!(counts(), (2, 0));
        heard.line("PAGEONE-ROUND 2 CORRUPT checks=3 failures=1 file=a");
        heard.line("[ 1.0] Kernel panic - not syncing");
        assert_eq!(counts(), (2, 2));
    }
}

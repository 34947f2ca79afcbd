//! The guests of `pageone demo`, as the benches start them: they check their own files forever and
//! count the rounds.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use testguest::{Guest, Options, Spec};

use crate::dump;
use crate::interrupt::Interrupt;

/// Memory of a guest that is dumped, MiB.
pub const MEMORY_MIB: usize = 512;
/// How long booting and a first round of checks may take: under emulation, minutes.
const BOOT_LIMIT: Duration = Duration::from_secs(900);

/// The command that starts such a guest.
///
/// # Errors
///
/// Those of [`Spec::prepare`].
pub fn command(options: &Options) -> Result<Command> {
    Ok(Spec::prepare(options)?.command(&[]))
}

/// Waits until every guest has checked all of its files once.
///
/// # Errors
///
/// When a guest found a wrong byte or ended, when a signal comes, and after [`BOOT_LIMIT`].
pub fn wait_checked(guests: &mut [Guest], interrupt: &Interrupt) -> Result<()> {
    interrupt.until("every guest has checked its files", BOOT_LIMIT, || {
        guests.iter_mut().try_for_each(Guest::check)?;
        Ok(guests.iter().all(|guest| guest.rounds() > 0).then_some(()))
    })
}

/// Makes the dumps of guests 0 to `guests`, unless all are there.
///
/// # Errors
///
/// When a guest cannot be started or dumped, and as [`wait_checked`].
pub fn make_dumps(guests: usize, interrupt: &Interrupt) -> Result<()> {
    let directory = dump::directory()?;
    if (0..guests).all(|guest| dump::files(&directory, guest)[0].exists()) {
        return Ok(());
    }
    eprintln!("pageone-bench: {guests} guests boot, once, and their memory goes to {}", directory.display());
    let start = Instant::now();
    let options = Options { memory_mib: u32::try_from(MEMORY_MIB)?, ..Options::default() };
    let mut running = (0..guests).map(|_| Ok(Guest::start(command(&options)?)?)).collect::<Result<Vec<_>>>()?;
    wait_checked(&mut running, interrupt)?;
    for (number, guest) in running.iter().enumerate() {
        dump::write(guest.pid(), MEMORY_MIB, number).context("cannot dump a guest")?;
    }
    eprintln!("pageone-bench: dumped after {:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}

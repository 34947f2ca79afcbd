//! `start`: how much later QEMU answers when libvirt's wrapper starts it.
//!
//! QEMU is started with a machine of 512 MiB that does not run yet, alone and by the wrapper with
//! the agent in it, in turns. The time ends when its monitor has greeted and has answered
//! `query-status` (QMP): then libvirt goes on. A daemon runs all the while.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::subjects::pageone::PageOne;
use bench_common::interrupt::Interrupt;
use bench_common::report::{Row, Sheet, medians};

/// The real QEMU.
const QEMU: &str = "/usr/bin/qemu-system-x86_64";
/// Of a machine whose processors do not run yet.
const MACHINE: &str = "-S -machine q35,accel=tcg -m 512 -nodefaults -no-user-config -display none -qmp stdio";
/// What is asked, and begins the second of the two answers.
const ASK: &[u8] = b"{\"execute\":\"qmp_capabilities\"}\n{\"execute\":\"query-status\"}\n";
const STATUS: &str = "\"status\"";
/// Merge period of the daemon, in seconds.
const PERIOD: f64 = 20.0;

/// Runs the bench.
pub(crate) fn run(quick: bool) -> Result<Vec<Row>> {
    let rounds = if quick { 5 } else { 41 };
    ensure!(Path::new(QEMU).exists(), "{QEMU} is missing: install qemu-system-x86");
    let interrupt = Interrupt::watch()?;
    let pageone = PageOne::find()?;
    let _daemon = pageone.daemon(PERIOD, &interrupt)?;
    let mut rows = Vec::new();
    for _ in 0..rounds {
        for subject in ["qemu", "wrapper"] {
            let command = match subject {
                "qemu" => Command::new(QEMU),
                _ => pageone.wrapper(QEMU)?,
            };
            let mut sheet = Sheet {
                bench: "start",
                case: "512 MiB, until QMP answers".into(),
                subject,
                threads: 1,
                rows: Vec::new(),
            };
            sheet.add("milliseconds", time(command)?.as_secs_f64() * 1e3, "ms");
            rows.append(&mut sheet.rows);
            interrupt.sleep(Duration::ZERO)?;
        }
    }
    Ok(medians(&rows))
}

/// From the start of QEMU to its answer.
fn time(mut command: Command) -> Result<Duration> {
    command.args(MACHINE.split(' ')).stdin(Stdio::piped()).stdout(Stdio::piped());
    let start = Instant::now();
    let mut qemu = command.spawn().context("QEMU cannot be started")?;
    let (mut ask, answers) = (qemu.stdin.take().context("no input")?, qemu.stdout.take().context("no output")?);
    ask.write_all(ASK).context("QEMU's monitor does not listen")?;
    let answer = BufReader::new(answers).lines().map_while(Result::ok).find(|line| line.contains(STATUS));
    let time = start.elapsed();
    qemu.kill().context("QEMU cannot be ended")?;
    qemu.wait().context("QEMU does not end")?;
    answer.context("QEMU's monitor did not answer")?;
    Ok(time)
}

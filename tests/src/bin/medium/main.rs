//! A pool on devices that fail: states that a power failure may leave, over ext4, XFS and btrfs.
//!
//! `pageone-pool-medium DIRECTORY [NAME=VALUE…]`, as root, on a kernel with the device mapper's
//! targets log-writes and flakey; `make test-pool-medium` runs it in a guest. DIRECTORY holds the
//! devices' files, some hundred MiB: a `tmpfs`. Settings, with their defaults:
//!
//! | `fs=ext4,xfs,btrfs` | file systems |
//! | `steps=40` | of the workload, a few operations each |
//! | `every=1` | flushes: 1 replays up to each |
//! | `rounds=24` | of a device that fails |
//! | `seed=1` | of everything |
//!
//! It ends with a line for each file system and lane.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]

#[allow(unsafe_code, reason = "messages to the device mapper are an ioctl")]
mod block;
mod flakey;
mod log;
mod promise;
mod replay;
mod work;

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use block::{FILE_SYSTEMS, FileSystem, directory};

/// Random numbers that a seed repeats.
#[derive(Clone)]
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit.max(1)
    }
}

/// How much is done.
struct Settings {
    steps: u64,
    every: u64,
    rounds: u64,
    seed: u64,
}

fn settings(words: &[String]) -> Result<(Settings, Vec<FileSystem>)> {
    let mut settings = Settings { steps: 40, every: 1, rounds: 24, seed: 1 };
    let mut file_systems = FILE_SYSTEMS.to_vec();
    for word in words {
        let (name, value) = word.split_once('=').with_context(|| format!("'{word}' is no NAME=VALUE"))?;
        let number = || value.parse::<u64>().with_context(|| format!("'{word}': a number is needed"));
        match name {
            "steps" => settings.steps = number()?,
            "every" => settings.every = number()?.max(1),
            "rounds" => settings.rounds = number()?,
            "seed" => settings.seed = number()?,
            "fs" => {
                let named: Vec<&str> = value.split(',').collect();
                file_systems.retain(|fs| named.contains(&fs.name));
                if file_systems.len() != named.len() {
                    bail!("'{word}': the file systems are ext4, xfs and btrfs");
                }
            }
            _ => bail!("'{word}': the settings are fs, steps, every, rounds and seed"),
        }
    }
    Ok((settings, file_systems))
}

/// Both lanes on one file system. Returns whether all is well.
fn lanes(fs: &FileSystem, work: &Path, settings: &Settings) -> bool {
    let report = |lane: &str, began: Instant, result: Result<(String, usize)>| {
        let (what, seconds) = (format!("{}, {lane}", fs.name), began.elapsed().as_secs());
        match &result {
            Ok((said, _)) => println!("PAGEONE-REPORT {what}: {said}; {seconds} s"),
            Err(e) => println!("PAGEONE-REPORT {what}: FAILED after {seconds} s: {e:#}"),
        }
        matches!(result, Ok((_, 0)))
    };
    let work = work.join(fs.name);
    let began = Instant::now();
    let prepared = directory(work.clone());
    let replayed = prepared.and_then(|work| replay::run(fs, &work, settings));
    let first = report("log-writes", began, replayed.map(|done| (done.to_string(), done.losses.len())));
    let began = Instant::now();
    let failed = flakey::run(fs, &work, settings);
    report("flakey", began, failed.map(|done| (done.to_string(), done.losses.len()))) && first
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let Some((work, words)) = words.split_first() else {
        eprintln!("usage: pageone-pool-medium DIRECTORY [NAME=VALUE…]");
        return ExitCode::from(2);
    };
    let (settings, file_systems) = match settings(words) {
        Ok(found) => found,
        Err(e) => {
            eprintln!("pageone-pool-medium: {e:#}");
            return ExitCode::from(2);
        }
    };
    let (work, settings) = (Path::new(work), &settings);
    let passed = std::thread::scope(|scope| {
        let threads: Vec<_> = file_systems.iter().map(|fs| scope.spawn(move || lanes(fs, work, settings))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or(false)).filter(|passed| *passed).count()
    });
    println!("PAGEONE-REPORT tests: {passed} passed, {} FAILED", file_systems.len() - passed);
    ExitCode::from(u8::from(passed < file_systems.len()))
}

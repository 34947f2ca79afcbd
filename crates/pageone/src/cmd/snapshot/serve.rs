//! `pageone snapshot serve`: a snapshot's memory for programs that ask for it by userfaultfd.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Result;
use checkpoint::Image;
use output::Socket;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::{SIGINT, SIGTERM};
use snapshot::memory::uffd;

use super::Which;

/// Time between two looks whether a signal has come.
const NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Options of `pageone snapshot serve`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    snapshot: Which,
    /// Unix socket, which is made: a program connects, and sends its mappings and its userfaultfd
    /// as Firecracker does
    #[arg(long, value_name = "SOCKET")]
    uffd: PathBuf,
}

/// Serves each program that connects, until a signal comes.
pub(super) fn run(args: &Args) -> Result<()> {
    // A checkpoint without devices will do: they are the monitor's.
    let (pool, catalog) = args.snapshot.open_soon()?;
    let lease = catalog.image(catalog.find(&args.snapshot.name)?)?.lease(&pool)?;
    drop((catalog, pool));
    // The lease is held by this process as long as it serves.
    let image = Arc::new(Image::of_lease(&lease)?);
    let ends = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, ends.clone())?;
    }
    let socket = Socket::listen(&args.uffd)?;
    output::note!("serves {} to programs that connect to {}", args.snapshot.name, args.uffd.display());
    while !ends.load(Ordering::Relaxed) {
        let mut one = [PollFd::new(&socket, PollFlags::IN)];
        if !matches!(poll(&mut one, Some(&NAP)), Ok(count) if count > 0) {
            continue;
        }
        let Ok(stream) = socket.accept() else {
            // No descriptor is free, for example.
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        let image = image.clone();
        std::thread::spawn(move || {
            if let Err(error) = uffd::serve(&image, &stream) {
                output::note!("{error}");
            }
        });
    }
    Ok(())
}

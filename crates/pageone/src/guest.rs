//! Guests to try merging on: Debian's cloud kernel under QEMU, checksumming its own files for ever.
//!
//! A guest has no disk and no network: kernel, initramfs and a serial console, which is QEMU's
//! standard output. [`Spec`] says how one is made, [`Guest`] is one that runs.
//!
//! What lies in a guest's memory, and what of it is the same in all guests:
//!
//! - its files, in a ramfs: the same bytes, on pages of their own;
//! - the kernel. It would be relocated to a random address at each boot, so that no page with an
//!   absolute address in it were like another guest's; [`KERNEL_PARAMETERS`] has `nokaslr`. With
//!   it, guests booted alike lay out nearly all of their memory alike, which long runs need;
//! - the loaded archive, freed after unpacking: the kernel fills it with one byte (0xcc), and all
//!   of it is one page. A host's guests are full of such leftovers; whoever merges finds them;
//! - what it writes again and again: 4 MiB random and 4 MiB copied each round; nobody can merge
//!   that.
//!
//! QEMU itself marks guest RAM `MADV_MERGEABLE` (`mem-merge=on` is its default), so the same guests
//! serve the kernel's KSM.

mod console;
pub(crate) mod find;
mod initramfs;
mod process;

pub use process::{Guest, Verdict};

use anyhow::{Result, ensure};
use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;

/// `panic=-1` with QEMU's `-no-reboot`: a panic ends the guest. `mitigations=off`: nothing hostile
/// runs here, and emulation makes mitigations dear. `rootfstype=ramfs`: a tmpfs would be limited to
/// half of what is free while the archive still lies in memory, too little to unpack it.
const KERNEL_PARAMETERS: &str = "console=ttyS0 quiet panic=-1 nokaslr mitigations=off rootfstype=ramfs";

/// What the kernel and init need of a guest's memory; the archive and the unpacked files, which are
/// there at the same time, share the rest.
const SYSTEM_MIB: u32 = 96;
const DATA_SHARE: f64 = 0.45;
const DATA_MIB_MAX: u64 = 150;
const MEMORY_MIB_MIN: u32 = 192;

/// What QEMU may spend on translated code, MiB. It counts as memory used on the host, in each
/// guest; QEMU's own default is up to 1 GiB. When it is full, translation starts over.
const TRANSLATION_CACHE_MIB: u32 = 16;

/// Without cmpxchg16b: under QEMU 7.2's emulation Linux 6.12 failed to boot in 15 of 24 tries with
/// it and in none of 24 without. The one looked at closely was a double fault right after that
/// instruction in the slab allocator, with impossible flags.
const EMULATED_CPU: &str = "qemu64,-cx16";

/// What a person may choose about the guests.
#[derive(Clone, Debug, clap::Args)]
pub struct GuestOptions {
    /// Memory of each guest, MiB
    #[arg(long, value_name = "MIB", default_value_t = 512)]
    pub memory: u32,
    /// Kernel image to boot [default: from the cache, see scripts/deps.sh]
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// QEMU's accelerator
    #[arg(long, value_name = "NAME", default_value = "tcg", value_parser = ["tcg", "kvm"])]
    pub accel: String,
    /// Guests mark what they free, and it is taken back: they load the recycler's module (see
    /// `scripts/deps.sh ppr`)
    #[arg(long)]
    pub ppr: bool,
    /// Further kernel parameters, such as PAGEONE_ROUNDS=3 (see guest/demo/init)
    #[arg(long, value_name = "WORDS", hide = true)]
    pub append: Option<String>,
}

/// All that is needed to start a guest; every guest of one spec boots the same.
#[derive(Clone, Debug)]
pub struct Spec {
    qemu: PathBuf,
    kernel: PathBuf,
    initramfs: PathBuf,
    options: GuestOptions,
}

impl Spec {
    /// Finds QEMU and a kernel, and builds the initramfs where the cache does not have it yet.
    ///
    /// # Errors
    /// If anything is missing; the message names it and the remedy.
    pub fn prepare(options: &GuestOptions) -> Result<Spec> {
        ensure!(
            options.memory >= MEMORY_MIB_MIN,
            "--memory {}: a guest needs at least {MEMORY_MIB_MIN} MiB",
            options.memory
        );
        let data_mib = DATA_MIB_MAX.min((f64::from(options.memory - SYSTEM_MIB) * DATA_SHARE) as u64);
        let kernel = find::find_kernel(options.kernel.as_deref())?;
        let mut initramfs = initramfs::initramfs(&find::cache_dir()?, data_mib)?;
        if options.ppr {
            initramfs = initramfs::with_recycler(&initramfs, &find::find_recycler(&kernel)?)?;
        }
        let qemu = find::find_program("qemu-system-x86_64", "qemu-system-x86")?;
        Ok(Spec { qemu, kernel, initramfs, options: options.clone() })
    }

    /// The arguments that start QEMU, the program first. Its console is standard output; it reads
    /// no input.
    pub fn command_line(&self) -> Vec<OsString> {
        let (accel, cpu) = match self.options.accel.as_str() {
            "tcg" => (format!("tcg,tb-size={TRANSLATION_CACHE_MIB}"), EMULATED_CPU),
            other => (other.to_owned(), "host"),
        };
        let mut append = KERNEL_PARAMETERS.to_owned();
        if let Some(more) = &self.options.append {
            append = format!("{append} {more}");
        }
        let words: [OsString; 24] = [
            self.qemu.clone().into(),
            "-accel".into(),
            accel.into(),
            "-cpu".into(),
            cpu.into(),
            "-m".into(),
            self.options.memory.to_string().into(),
            "-kernel".into(),
            self.kernel.clone().into(),
            "-initrd".into(),
            self.initramfs.clone().into(),
            "-append".into(),
            append.into(),
            "-nodefaults".into(),
            "-no-user-config".into(),
            "-no-reboot".into(),
            "-display".into(),
            "none".into(),
            // Unlike `-serial stdio`: Ctrl-C and the terminal's settings are left alone.
            "-chardev".into(),
            "stdio,id=console,signal=off".into(),
            "-serial".into(),
            "chardev:console".into(),
            "-monitor".into(),
            "none".into(),
        ];
        words.into()
    }
}

/// Prints [`Spec::command_line`], quoted for a shell, for tests that start guests by themselves.
///
/// # Errors
/// As [`Spec::prepare`], or if `out` cannot be written.
pub fn print_command_line(options: &GuestOptions, out: &mut impl Write) -> Result<()> {
    let words: Vec<String> = Spec::prepare(options)?
        .command_line()
        .iter()
        .map(|word| format!("'{}'", word.to_string_lossy().replace('\'', r"'\''")))
        .collect();
    writeln!(out, "{}", words.join(" "))?;
    Ok(())
}

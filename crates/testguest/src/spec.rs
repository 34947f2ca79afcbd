//! How a guest is made: its memory, its kernel, and QEMU's command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use crate::find::{self, FindError};
use crate::initramfs::{self, InitramfsError};

/// `panic=-1` with QEMU's `-no-reboot`: a panic ends the guest. `mitigations=off`: nothing hostile
/// runs here, and emulation makes mitigations expensive. `rootfstype=ramfs`: a tmpfs is limited to
/// half of the free memory while the archive still occupies it, too little to unpack the archive.
/// `no_timer_check`: a busy host delivers too few ticks in the time of that check, and the kernel
/// would panic.
const KERNEL_PARAMETERS: &str = "console=ttyS0 quiet panic=-1 nokaslr no_timer_check mitigations=off rootfstype=ramfs";

/// MiB of a guest's memory that the kernel and init need. The archive and the unpacked files, which
/// exist at the same time, share the rest.
const SYSTEM_MIB: u32 = 96;
/// Share of the rest that the files take: less than half, because the archive holds them too.
const DATA_SHARE: f64 = 0.45;
/// Upper limit of the files, MiB: a round of checks takes seconds under emulation.
const DATA_MIB_MAX: u64 = 150;
/// Least memory of a guest, MiB: with less it has too few files to be worth merging.
pub const MEMORY_MIB_MIN: u32 = 192;

/// QEMU's cache of translated code, MiB. It counts as used memory of the host, once a guest; QEMU's
/// own default is up to 1 GiB. When the cache is full, translation starts over.
const TRANSLATION_CACHE_MIB: u32 = 16;

/// Without cmpxchg16b: under QEMU 7.2's emulation Linux 6.12 failed to boot in 15 of 24 attempts
/// with it and in none of 24 without. The failure that was examined was a double fault right after
/// that instruction in the slab allocator, with impossible flags.
const EMULATED_CPU: &str = "qemu64,-cx16";

/// Nothing but a console on standard output. Unlike `-serial stdio`, this leaves Ctrl-C and the
/// terminal's settings alone.
pub(crate) const DEVICES: &str = "-nodefaults -no-user-config -no-reboot -display none \
    -chardev stdio,id=console,signal=off -serial chardev:console -monitor none";

/// QEMU's accelerator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Accelerator {
    /// Emulation; runs anywhere.
    #[default]
    Tcg,
    /// Hardware virtualisation; needs `/dev/kvm`.
    Kvm,
}

/// The guests' properties; [`Default`] is a guest of 512 MiB under emulation.
#[derive(Clone, Debug)]
pub struct Options {
    /// Memory of each guest, MiB; at least [`MEMORY_MIB_MIN`].
    pub memory_mib: u32,
    /// Kernel image to boot; `None`: see [`find::find_kernel`].
    pub kernel: Option<PathBuf>,
    /// QEMU's accelerator.
    pub accelerator: Accelerator,
    /// Whether guests load the recycler's module, which marks the pages that they free.
    pub ppr: bool,
    /// Further kernel parameters, such as `PAGEONE_ROUNDS=3` (see `guest/demo/init`).
    pub append: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self { memory_mib: 512, kernel: None, accelerator: Accelerator::Tcg, ppr: false, append: None }
    }
}

/// Why [`Spec::prepare`] failed.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// The guest's memory is too small.
    #[error("a guest needs at least {MEMORY_MIB_MIN} MiB")]
    MemoryTooSmall,
    /// A part of the guest is missing.
    #[error(transparent)]
    Find(#[from] FindError),
    /// The initramfs could not be built.
    #[error(transparent)]
    Initramfs(#[from] InitramfsError),
}

/// All that is needed to start a guest. Every guest of one spec boots the same.
#[derive(Clone, Debug)]
pub struct Spec {
    qemu: PathBuf,
    kernel: PathBuf,
    initramfs: PathBuf,
    options: Options,
}

impl Spec {
    /// Finds QEMU and a kernel, and builds the initramfs unless the cache has it.
    ///
    /// # Errors
    /// If the memory is too small or a part is missing. The message names the part and the remedy.
    pub fn prepare(options: &Options) -> Result<Self, PrepareError> {
        if options.memory_mib < MEMORY_MIB_MIN {
            return Err(PrepareError::MemoryTooSmall);
        }
        let data_mib = DATA_MIB_MAX.min((f64::from(options.memory_mib - SYSTEM_MIB) * DATA_SHARE) as u64);
        let kernel = find::find_kernel(options.kernel.as_deref())?;
        let mut initramfs = initramfs::initramfs(&find::cache_dir()?, data_mib)?;
        if options.ppr {
            initramfs = initramfs::with_recycler(&initramfs, &find::find_recycler(&kernel)?)?;
        }
        let qemu = find::find_program("qemu-system-x86_64", "qemu-system-x86")?;
        Ok(Self { qemu, kernel, initramfs, options: options.clone() })
    }

    /// The words that start QEMU, the program first. The console is QEMU's standard output; QEMU
    /// reads no input.
    pub fn words(&self) -> Vec<OsString> {
        let (accelerator, cpu) = match self.options.accelerator {
            Accelerator::Tcg => (format!("tcg,tb-size={TRANSLATION_CACHE_MIB}"), EMULATED_CPU),
            Accelerator::Kvm => ("kvm".to_owned(), "host"),
        };
        let mut append = KERNEL_PARAMETERS.to_owned();
        if let Some(more) = &self.options.append {
            append = format!("{append} {more}");
        }
        let machine: [(&str, OsString); 6] = [
            ("-accel", accelerator.into()),
            ("-cpu", cpu.into()),
            ("-m", self.options.memory_mib.to_string().into()),
            ("-kernel", self.kernel.clone().into()),
            ("-initrd", self.initramfs.clone().into()),
            ("-append", append.into()),
        ];
        let machine = machine.into_iter().flat_map(|(name, value)| [name.into(), value]);
        std::iter::once(self.qemu.clone().into()).chain(machine).chain(DEVICES.split(' ').map(Into::into)).collect()
    }

    /// The same guests on another accelerator.
    #[must_use]
    pub fn with_accelerator(&self, accelerator: Accelerator) -> Self {
        Self { options: Options { accelerator, ..self.options.clone() }, ..self.clone() }
    }

    /// The command that starts a guest whose kernel tells everything, and ends for lack of a file
    /// system.
    pub(crate) fn kernel_alone(&self) -> Command {
        let mut words = self.words();
        for (option, value) in
            [("-append", KERNEL_PARAMETERS.replace(" quiet", " earlyprintk=ttyS0")), ("-m", "256".into())]
        {
            if let Some(at) = words.iter().position(|word| word == option) {
                words[at + 1] = value.into();
            }
        }
        if let Some(at) = words.iter().position(|word| word == "-initrd") {
            words.drain(at..at + 2);
        }
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        command
    }

    /// The command that starts QEMU through `launcher`, the words put before [`Spec::words`]; an
    /// empty `launcher` starts QEMU directly.
    pub fn command(&self, launcher: &[OsString]) -> Command {
        let mut words = launcher.iter().cloned().chain(self.words());
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words);
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(options: Options) -> Spec {
        Spec { qemu: "/bin/qemu".into(), kernel: "/k".into(), initramfs: "/i".into(), options }
    }

    fn after<'a>(words: &'a [OsString], option: &str) -> &'a str {
        let at = words.iter().position(|word| word == option).unwrap();
        words[at + 1].to_str().unwrap()
    }

    #[test]
    fn parameters_are_appended_to_the_kernels_own() {
        let words = spec(Options { append: Some("A=1 B=2".into()), ..Options::default() }).words();
        assert_eq!(after(&words, "-append"), format!("{KERNEL_PARAMETERS} A=1 B=2"));
        assert_eq!((after(&words, "-m"), after(&words, "-cpu")), ("512", EMULATED_CPU));
        let words = spec(Options { accelerator: Accelerator::Kvm, ..Options::default() }).words();
        assert_eq!((after(&words, "-accel"), after(&words, "-cpu")), ("kvm", "host"));
        let alone = spec(Options::default()).with_accelerator(Accelerator::Kvm).kernel_alone();
        let words: Vec<OsString> = alone.get_args().map(Into::into).collect();
        assert_eq!((after(&words, "-accel"), after(&words, "-m")), ("kvm", "256"));
        assert!(after(&words, "-append").contains("earlyprintk") && !words.contains(&"-initrd".into()), "{words:?}");
    }

    #[test]
    fn a_launcher_stands_before_qemu() {
        let spec = spec(Options::default());
        assert_eq!(spec.command(&[]).get_program(), "/bin/qemu");
        let command = spec.command(&["pageone".into(), "run".into()]);
        assert_eq!(command.get_program(), "pageone");
        let words: Vec<_> = command.get_args().take(3).collect();
        assert_eq!(words, ["run", "/bin/qemu", "-accel"]);
    }

    #[test]
    fn too_small_a_guest_is_an_error() {
        let error = Spec::prepare(&Options { memory_mib: MEMORY_MIB_MIN - 1, ..Options::default() }).unwrap_err();
        assert!(matches!(error, PrepareError::MemoryTooSmall));
    }
}

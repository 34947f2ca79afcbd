//! Who is measured: PageONE and the kernel's KSM, started and read as an operator would.

pub(crate) mod engine;
pub(crate) mod guests;
pub(crate) mod ksm;
pub(crate) mod pageone;

use engine::Subject;

/// What merges guests while they are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Who {
    /// Nothing: the control.
    Nothing,
    Ksm,
    Pageone,
}

impl Who {
    pub(crate) const ALL: [Self; 3] = [Who::Nothing, Who::Ksm, Who::Pageone];

    /// How it is set: KSM as the kernel has it, PageONE with a thread for each CPU.
    pub(crate) fn subject(self) -> Subject {
        match self {
            Who::Pageone => Subject::PageOne { threads: std::thread::available_parallelism().map_or(1, usize::from) },
            Who::Nothing | Who::Ksm => Subject::Ksm { smart_scan: true },
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Who::Nothing => "nothing",
            Who::Ksm => "ksm",
            Who::Pageone => "pageone",
        }
    }
}

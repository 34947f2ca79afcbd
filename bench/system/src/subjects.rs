//! Who is measured: PageONE and the kernel's KSM, started and read as an operator would.

pub(crate) mod engine;
pub(crate) mod ksm;
pub(crate) mod pageone;

/// What merges guests while they are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Who {
    /// Nothing: the control.
    Nothing,
    Ksm,
    Pageone,
}

impl Who {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Who::Nothing => "nothing",
            Who::Ksm => "ksm",
            Who::Pageone => "pageone",
        }
    }
}

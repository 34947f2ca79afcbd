//! Who is measured: PageONE and the kernel's KSM, started and read as an operator would.

pub(crate) mod engine;
pub(crate) mod ksm;
pub(crate) mod pageone;

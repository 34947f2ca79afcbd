//! The subcommands of `pageone`, a file each: its options, and a function that runs it.

pub(crate) mod daemon;
pub(crate) mod detach;
pub(crate) mod doctor;
pub(crate) mod run;
pub(crate) mod status;

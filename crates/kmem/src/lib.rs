//! The kernel's memory interfaces, typed.

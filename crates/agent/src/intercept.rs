//! The calls of the program that the agent sees, and what it does before it lets them through.

pub mod fork;
pub mod guard;
pub mod interpose;
pub mod mark;
pub mod probe;
pub mod watch;

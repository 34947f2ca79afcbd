//! What runs by itself: the agent's two threads, and the fork handlers.

pub(crate) mod calls;
pub(crate) mod events;
pub(crate) mod fork;
pub(crate) mod start;

//! The Per-Page Recycler's shared layout and both of its sides.

//! A small program that marks its memory, and a small daemon that merges it.
//!
//! The test executable starts itself again with the library preloaded and a role in its
//! environment; the program then obeys commands, one a line, and answers each with one line.

#![allow(unsafe_code)] // Maps and marks memory.
#![allow(clippy::print_stdout, clippy::print_stderr)] // Prints for who runs it.
#![allow(dead_code)] // Each test file uses its part.
#![allow(clippy::unwrap_used)] // In tests.

pub mod client;
pub mod daemon;
pub mod descriptors;
pub mod forks;
pub mod limits;
pub mod places;
pub mod slow_file;
pub mod threads;

/// Bytes in a page.
pub const PAGE: usize = 4096;

/// Distinct contents that pages start with; 0 is zeros.
pub const PATTERNS: u32 = 512;

/// What page `index` of the client's memory starts with.
pub fn pattern_of(index: usize) -> u32 {
    // Runs of eight pages that repeat, so that there are long and short runs.
    ((index / 8 * 7 + index % 8) as u32) % PATTERNS
}

/// The words of a pattern. The last word is left zero: it is the writers'.
pub fn pattern(number: u32) -> [u64; PAGE / 8] {
    let mut words = [0; PAGE / 8];
    if number > 0 {
        let mut seed = u64::from(number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        for word in &mut words[..PAGE / 8 - 1] {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            *word = seed;
        }
    }
    words
}

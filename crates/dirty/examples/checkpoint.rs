//! Threads write to pages, and each checkpoint copies only the pages that were written since the
//! last one.
#![allow(clippy::print_stdout)] // A program prints.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use dirty::{DirtyTree, NewError};

const PAGES: u64 = 1 << 20;
const WRITERS: u64 = 4;

/// A memory, of which each page is one number here.
struct Memory {
    pages: Vec<AtomicU64>,
    dirty: DirtyTree,
}

impl Memory {
    /// The page is written first and noted then: whoever takes the note sees the write.
    fn write(&self, page: u64, value: u64) {
        self.pages[page as usize].store(value, Relaxed);
        self.dirty.insert(page);
    }

    /// Copies what was written since the last time; returns how many pages that are.
    fn checkpoint(&self, copy: &mut [u64]) -> usize {
        let (mut left, mut copied, mut frames) = (0..PAGES, 0, [0; 512]);
        while !left.is_empty() {
            let taken = self.dirty.take_frames(&mut left, &mut frames);
            for &page in &frames[..taken] {
                copy[page as usize] = self.pages[page as usize].load(Relaxed);
            }
            copied += taken;
        }
        copied
    }
}

fn main() -> Result<(), NewError> {
    let pages = (0..PAGES).map(|_| AtomicU64::new(0)).collect();
    let memory = Memory { pages, dirty: DirtyTree::new(PAGES)? };
    let mut copy = vec![0; PAGES as usize];
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let memory = &memory;
            scope.spawn(move || (1..=5000).for_each(|n| memory.write((n * 7919 + writer * 31) % PAGES, n)));
        }
        println!("{} pages while they were written", memory.checkpoint(&mut copy));
    });
    println!("{} pages afterwards", memory.checkpoint(&mut copy));
    assert!(copy.iter().zip(&memory.pages).all(|(copy, page)| *copy == page.load(Relaxed)), "no write is lost");
    assert_eq!(memory.checkpoint(&mut copy), 0);
    Ok(())
}

#[test]
fn checkpoints_lose_no_write() {
    main().unwrap();
}

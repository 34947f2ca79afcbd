//! `dedup [FILE]`: how many of a file's 4 KiB blocks are different ones. Without a file it looks at
//! its own program.
//!
//! The tree has no copy of a block: its handle is the block's number, by which [`Blocks`] finds the
//! bytes.
#![allow(clippy::print_stdout)] // A program prints.

use std::path::PathBuf;

use sdtree::{Handle, Insert, KeySource, SdTree};

const BLOCK: usize = 4096;

/// The bytes of a file. Its last block may be shorter.
struct Blocks(Vec<u8>);

impl KeySource for Blocks {
    fn with_key<R>(&self, handle: Handle, f: impl FnOnce(Option<&[u8]>) -> R) -> R {
        f(self.0.chunks(BLOCK).nth(handle.0 as usize))
    }
}

/// For each block of the file the first one that is equal.
fn firsts(file: Vec<u8>) -> Vec<u64> {
    let tree = SdTree::new(Blocks(file));
    let first = |(number, block)| match tree.insert(block, Handle(number)) {
        Insert::Inserted => number,
        Insert::Exists(first) => first.0,
    };
    (0..).zip(tree.keys().0.chunks(BLOCK)).map(first).collect()
}

fn main() -> std::io::Result<()> {
    report(std::env::args_os().nth(1).map_or_else(std::env::current_exe, |path| Ok(PathBuf::from(path)))?)
}

fn report(path: PathBuf) -> std::io::Result<()> {
    let firsts = firsts(std::fs::read(&path)?);
    let different = (0..).zip(&firsts).filter(|(number, first)| number == *first).count();
    println!("{}: {} blocks, {different} of them different", path.display(), firsts.len());
    Ok(())
}

#[test]
fn each_block_leads_to_the_first_equal_one() {
    let file: Vec<u8> = [1, 2, 1, 3, 2].iter().flat_map(|&byte| [byte; BLOCK]).chain([1]).collect();
    assert_eq!(firsts(file), [0, 1, 0, 3, 1, 5]);
    report(std::env::current_exe().unwrap()).unwrap();
}

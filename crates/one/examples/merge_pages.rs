//! Two memories whose equal pages are kept once, and copied when one of them is written to.
#![allow(clippy::print_stdout)] // A program prints.

use std::convert::Infallible;

use one::{MemoryStore, ObjectId, ObjectStore, One};

const PAGE: usize = 4096;

/// A memory: for each page the object that has its bytes. It holds a reference for each.
struct Memory<'o> {
    one: &'o One<MemoryStore>,
    pages: Vec<ObjectId>,
}

impl<'o> Memory<'o> {
    fn new(one: &'o One<MemoryStore>, bytes: &[u8]) -> Result<Self, Infallible> {
        let pages = bytes.chunks(PAGE).map(|page| one.put(page).map(|put| put.id)).collect::<Result<_, _>>()?;
        Ok(Self { one, pages })
    }

    fn read(&self, page: usize) -> Vec<u8> {
        let copy = |bytes: Option<&[u8]>| bytes.expect("a page whose reference is held is there").to_vec();
        self.one.store().with_object(self.pages[page], copy)
    }

    /// The other memories keep their page.
    fn write(&mut self, page: usize, bytes: &[u8]) -> Result<(), Infallible> {
        let before = std::mem::replace(&mut self.pages[page], self.one.put(bytes)?.id);
        self.one.release(before).expect("its reference was held");
        Ok(())
    }
}

fn main() -> Result<(), Infallible> {
    let one = One::new(MemoryStore::new());
    let image: Vec<u8> = (0..16).flat_map(|page| [page % 4; PAGE]).collect();
    let (mut first, second) = (Memory::new(&one, &image)?, Memory::new(&one, &image)?);
    println!("two memories of 16 pages are kept in {} pages", one.len());
    assert_eq!((one.len(), one.references(first.pages[0])), (4, 8));
    first.write(5, &[9; PAGE])?;
    println!("one page was written: {} pages", one.len());
    assert_eq!((one.len(), first.read(5), second.read(5)), (5, vec![9; PAGE], vec![1; PAGE]));
    first.write(5, &[1; PAGE])?;
    assert_eq!(one.len(), 4, "it is equal again");
    Ok(())
}

#[test]
fn equal_pages_are_kept_once() {
    main().unwrap();
}

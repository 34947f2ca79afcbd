//! Which pages of this process's memory were written since the last look. Needs Linux 6.7, and
//! userfaultfd (`vm.unprivileged_userfaultfd`, or access to `/dev/userfaultfd`).
#![allow(clippy::print_stdout)] // A program prints.

use std::error::Error;

use dirty::DirtyTree;
use kmem::pagemap::Pagemap;
use kmem::uffd::{Features, Uffd};
use kmem::{PAGE_SIZE, Range};
use track::{Extent, PagemapSource, Source};

const PAGES: usize = 256;

fn main() -> Result<(), Box<dyn Error>> {
    // One page more, since the allocator aligns to less.
    let mut bytes = vec![0u8; (PAGES + 1) * PAGE_SIZE];
    let start = bytes.as_ptr().addr().next_multiple_of(PAGE_SIZE);
    let memory = Range::new(start, PAGES * PAGE_SIZE);
    let offset = start - bytes.as_ptr().addr();

    let uffd = match Uffd::new(Features::WP | Features::WP_ASYNC | Features::WP_UNPOPULATED) {
        Ok(uffd) => uffd,
        Err(why) => {
            println!("SKIPPED: {why}");
            return Ok(());
        }
    };
    uffd.register_wp(memory)?;
    let mut source = PagemapSource::new(Pagemap::open_self()?, vec![Extent { memory, first: 0 }]);
    let written = DirtyTree::new(PAGES as u64)?;
    // The first look protects the memory. It may report pages that were populated before.
    source.collect(&written)?;

    for round in 0..3 {
        let mut frames = [0; PAGES];
        written.take_frames(&mut (0..PAGES as u64), &mut frames);
        for page in [round, 10 * round + 9] {
            bytes[offset + page * PAGE_SIZE] = 1;
        }
        source.collect(&written)?;
        println!("round {round}: pages {:?} were written", written.iter().collect::<Vec<_>>());
        assert!(written.iter().eq([round as u64, 10 * round as u64 + 9]));
    }
    Ok(())
}

#[test]
fn a_look_shows_what_was_written_since_the_last_one() {
    main().unwrap();
}

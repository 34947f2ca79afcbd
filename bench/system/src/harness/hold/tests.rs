use super::*;
use clap::Parser;

const PAGES: usize = 4096;

#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    holding: Holding,
}

#[test]
fn a_client_is_told_what_to_hold() {
    let holding = Holding { pages: PAGES, case: content::Case::ZeroPrefix, client: 3, spread: 2 };
    let command = holding.command(std::path::Path::new("bench"));
    let holding = Arguments::try_parse_from(command.get_args()).unwrap().holding;
    assert_eq!((holding.pages, holding.case, holding.client, holding.spread), (PAGES, content::Case::ZeroPrefix, 3, 2));
}

#[test]
fn a_wrong_page_is_seen() {
    let holding = Holding { pages: PAGES, case: content::Case::Zero, client: 1, spread: 2 };
    let content = holding.content().unwrap();
    let memory = Memory::map(PAGES, 2).unwrap();
    memory.fill(&content);
    assert_eq!(memory.wrong(&content), 0);
    let target = memory.target(&content);
    assert_eq!((target.loads.len(), target.stores.len()), (PAGES, PAGES / 64));
    // SAFETY: words of pages of this mapping, which no other code uses.
    unsafe {
        assert!(target.stores.iter().all(|&(address, value)| *(address as *const u64) == value));
        let word = memory.word(7, 7);
        word.write_volatile(!word.read_volatile());
    }
    assert_eq!(memory.wrong(&content), 1);
    // SAFETY: mapped above, not used again.
    unsafe { libc::munmap(memory.start.cast(), 2 * memory.pages * PAGE_SIZE) };
}

//! The client of the benches: a process that holds memory as an idle guest does.
//!
//! In this process ([`run`]) it fills its memory, prints `ready`, and obeys lines on its standard input until that ends:
//! `mark` marks the memory as mergeable, `check` reads every page and compares one word of it. Seen from the bench it is
//! a [`Client`].
//!
//! Content: every page is distinct and every client has the same in the same order; of each 16 MiB the last 2 are zero pages.

#![allow(unsafe_code)] // mmap(2) and madvise(2) through the C library, where the agent sees them; raw memory.

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use kmem::PAGE_SIZE;

const WORDS: usize = PAGE_SIZE / 8;
/// Of so many pages …
const STRETCH: usize = 4096;
/// … so many, the last, are zero.
const ZERO: usize = STRETCH / 8;

fn is_zero(page: usize) -> bool {
    page % STRETCH >= STRETCH - ZERO
}

/// How many of `pages` are zero pages.
pub(crate) fn zero_pages(pages: usize) -> usize {
    pages / STRETCH * ZERO + (pages % STRETCH).saturating_sub(STRETCH - ZERO)
}

fn content(page: usize, word: usize) -> u64 {
    if is_zero(page) { 0 } else { ((page as u64 + 1) << 16 ^ word as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) }
}

struct Memory {
    start: *mut u64,
    pages: usize,
}

impl Memory {
    fn map(pages: usize) -> Result<Self> {
        let len = pages * PAGE_SIZE;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a fresh mapping replaces nothing.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
        ensure!(start != libc::MAP_FAILED, "cannot map {len} bytes: {}", std::io::Error::last_os_error());
        let memory = Self { start: start.cast(), pages };
        memory.advise(libc::MADV_DONTFORK)?;
        Ok(memory)
    }

    fn advise(&self, advice: i32) -> Result<()> {
        // SAFETY: the mapping is this one's own, and neither of the two advices used changes its content.
        let result = unsafe { libc::madvise(self.start.cast(), self.pages * PAGE_SIZE, advice) };
        ensure!(result == 0, "madvise {advice}: {}", std::io::Error::last_os_error());
        Ok(())
    }

    fn word(&self, page: usize, word: usize) -> *mut u64 {
        assert!(page < self.pages && word < WORDS);
        self.start.wrapping_add(page * WORDS + word)
    }

    fn fill(&self) {
        for page in 0..self.pages {
            for word in 0..WORDS {
                // SAFETY: in bounds, as `word` asserts; volatile, since zeros must be written too, to make the page resident.
                unsafe { self.word(page, word).write_volatile(content(page, word)) }
            }
        }
    }

    /// How many pages are not as filled, going by one word of each; every page is mapped afterwards.
    fn wrong(&self) -> usize {
        let differs = |&page: &usize| {
            let word = page % WORDS;
            // SAFETY: in bounds; volatile, since the memory under it is exchanged while this runs.
            unsafe { self.word(page, word).read_volatile() != content(page, word) }
        };
        (0..self.pages).filter(differs).count()
    }
}

/// Is the client, until standard input ends.
pub(crate) fn run(pages: usize) -> Result<()> {
    let memory = Memory::map(pages)?;
    memory.fill();
    say("ready")?;
    for line in std::io::stdin().lines() {
        match line?.as_str() {
            "mark" => memory.advise(libc::MADV_MERGEABLE).and_then(|()| say("ok"))?,
            "check" => match memory.wrong() {
                0 => say("ok")?,
                wrong => say(&format!("{wrong} pages are wrong"))?,
            },
            other => bail!("{other:?} is no command"),
        }
    }
    Ok(())
}

fn say(line: &str) -> Result<()> {
    println!("{line}");
    Ok(std::io::stdout().flush()?)
}

/// A client process; it is killed with this value, and ends by itself when the bench does.
pub(crate) struct Client {
    child: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Client {
    /// Starts `command`, which ends up as `pageone-bench hold-memory PAGES`; see [`Client::wait_ready`].
    pub(crate) fn start(mut command: Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(orders), Some(out)) => Ok(Self { child, orders, answers: BufReader::new(out).lines() }),
            _ => bail!("a client has no pipes"),
        }
    }

    /// The process.
    pub(crate) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Waits until its memory is filled.
    pub(crate) fn wait_ready(&mut self) -> Result<()> {
        self.answer("ready")
    }

    /// Gives an order without waiting for its end.
    pub(crate) fn order(&mut self, order: &str) -> Result<()> {
        writeln!(self.orders, "{order}").with_context(|| format!("client {} is gone", self.pid()))
    }

    /// Waits until an order is done.
    pub(crate) fn done(&mut self) -> Result<()> {
        self.answer("ok")
    }

    fn answer(&mut self, wanted: &str) -> Result<()> {
        let pid = self.pid();
        let line = self.answers.next().with_context(|| format!("client {pid} ended"))??;
        ensure!(line == wanted, "client {pid}: {line}");
        Ok(())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Gives all clients an order, then waits for all.
pub(crate) fn order_all(clients: &mut [Client], order: &str) -> Result<()> {
    clients.iter_mut().try_for_each(|client| client.order(order))?;
    clients.iter_mut().try_for_each(Client::done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn pages_are_distinct_but_for_an_eighth_of_zeros() {
        let pages = 3 * STRETCH + STRETCH - 1;
        let first: HashSet<u64> = (0..pages).filter(|&page| !is_zero(page)).map(|page| content(page, 0)).collect();
        assert_eq!(first.len() + zero_pages(pages), pages);
        assert_eq!(zero_pages(8 * STRETCH), STRETCH);
        assert!((0..WORDS).all(|word| content(STRETCH - 1, word) == 0 && content(0, word) != 0));
    }

    #[test]
    fn a_wrong_page_is_seen() {
        let memory = Memory::map(STRETCH).unwrap();
        memory.fill();
        assert_eq!(memory.wrong(), 0);
        // SAFETY: a page of this mapping.
        unsafe { memory.word(7, 7).write_volatile(1) };
        assert_eq!(memory.wrong(), 1);
        // SAFETY: mapped above, not used again.
        unsafe { libc::munmap(memory.start.cast(), memory.pages * PAGE_SIZE) };
    }
}

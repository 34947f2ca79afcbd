//! The client of the benches: a process that holds memory as a guest does.
//!
//! In this process ([`run`]) it fills its memory ([`crate::harness::content`]), prints `ready`, and
//! obeys lines on its standard input until that ends; each is answered by a line:
//!
//! | order | |
//! |---|---|
//! | `mark` | marks the memory as mergeable |
//! | `check` | reads every page and compares one word of it |
//! | `probe`, `end-probe` | starts and ends timing of its own accesses ([`crate::harness::probe`]) |
//! | `rewrite N`, `end-rewrite` | starts and ends writing something new into N pages a second |
//! | `duplicate FIRST COUNT SEED` | gives pages the content of a seed |
//! | `where PAGE` | says at which address a page lies |
//!
//! Seen from the bench it is a [`Client`].

#![allow(unsafe_code)] // mmap(2) and madvise(2) through the C library, where the agent sees them; raw memory.

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use bench_common::own_program;
use kmem::PAGE_SIZE;

use crate::harness::content::{self, Content, WORDS};
use crate::harness::probe::{Probe, Target};
use crate::harness::rewrite::Rewriting;

/// What a client is to hold.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct Holding {
    /// Pages to fill
    pub(crate) pages: usize,
    /// With what
    #[arg(long, value_enum)]
    pub(crate) case: content::Case,
    /// Number of this client, from 0
    #[arg(long)]
    pub(crate) client: usize,
    /// Only each so many pages is there
    #[arg(long, default_value_t = 1)]
    pub(crate) spread: usize,
}

impl Holding {
    /// The command that runs the client.
    pub(crate) fn command(&self, program: &std::path::Path) -> Command {
        let mut command = Command::new(program);
        command.args(["hold-memory", &self.pages.to_string(), "--case", &self.case.name()]);
        command.args(["--client", &self.client.to_string(), "--spread", &self.spread.to_string()]);
        command
    }

    fn content(&self) -> Result<Content> {
        Content::new(self.case, self.client, self.pages)
    }
}

struct Memory {
    start: *mut u64,
    pages: usize,
    /// From one to the next, in pages.
    spread: usize,
}

impl Memory {
    fn map(pages: usize, spread: usize) -> Result<Self> {
        let len = pages * spread * PAGE_SIZE;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | if spread > 1 { libc::MAP_NORESERVE } else { 0 };
        // SAFETY: a fresh mapping replaces nothing.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
        ensure!(start != libc::MAP_FAILED, "cannot map {len} bytes: {}", std::io::Error::last_os_error());
        let memory = Self { start: start.cast(), pages, spread };
        memory.advise(libc::MADV_DONTFORK)?;
        if spread > 1 {
            memory.advise(libc::MADV_NOHUGEPAGE)?;
        }
        Ok(memory)
    }

    fn advise(&self, advice: i32) -> Result<()> {
        // SAFETY: the mapping is this one's own, and none of the advices used changes its
        // content.
        let result = unsafe { libc::madvise(self.start.cast(), self.pages * self.spread * PAGE_SIZE, advice) };
        ensure!(result == 0, "madvise {advice}: {}", std::io::Error::last_os_error());
        Ok(())
    }

    fn word(&self, page: usize, word: usize) -> *mut u64 {
        assert!(page < self.pages);
        self.start.wrapping_add(page * self.spread * WORDS + word % WORDS)
    }

    fn fill(&self, content: &Content) {
        (0..self.pages).for_each(|page| self.put(content, page));
    }

    fn put(&self, content: &Content, page: usize) {
        // SAFETY: in bounds, as `word` asserts; volatile, since zeros must be written too, to make
        // the page resident.
        content.write(page, |word, value| unsafe { self.word(page, word).write_volatile(value) });
    }

    /// How many pages are not as filled, going by one word of each; every page is mapped
    /// afterwards.
    fn wrong(&self, content: &Content) -> usize {
        let differs = |&page: &usize| {
            // SAFETY: in bounds; volatile, since the memory under it is exchanged while this runs.
            unsafe { self.word(page, page).read_volatile() != content.word(page, page % WORDS) }
        };
        (0..self.pages).filter(differs).count()
    }

    /// Loads go to every resident page, stores to the written ones.
    fn target(&self, content: &Content) -> Target {
        let resident = |&page: &usize| content.is_resident(page);
        let address = |page: usize, word| self.word(page, word) as usize;
        Target {
            loads: (0..self.pages).filter(resident).map(|page| address(page, page)).collect(),
            stores: content::written(self.pages)
                .filter(resident)
                .map(|page| (address(page, 0), content.word(page, 0)))
                .collect(),
        }
    }
}

/// Is the client, until standard input ends.
pub(crate) fn run(holding: &Holding) -> Result<()> {
    let content = holding.content()?;
    let memory = Memory::map(holding.pages, holding.spread)?;
    memory.fill(&content);
    say("ready")?;
    let mut server = Server { memory, content, probe: None, rewriting: None };
    std::io::stdin().lines().try_for_each(|line| say(&server.obey(&line?)?))
}

struct Server {
    memory: Memory,
    content: Content,
    probe: Option<Probe>,
    rewriting: Option<Rewriting>,
}

impl Server {
    /// Carries out an order, and returns the answer.
    fn obey(&mut self, line: &str) -> Result<String> {
        let ok = || "ok".to_owned();
        let words: Vec<&str> = line.split(' ').collect();
        Ok(match words[..] {
            ["mark"] => self.memory.advise(libc::MADV_MERGEABLE).map(|()| ok())?,
            ["check"] => match self.memory.wrong(&self.content) {
                0 => ok(),
                wrong => format!("{wrong} pages are wrong"),
            },
            ["probe"] => {
                // SAFETY: the memory stays mapped until this process ends, and nothing else here
                // writes to those words.
                self.probe = Some(unsafe { Probe::start(self.memory.target(&self.content)) }?);
                ok()
            }
            ["end-probe"] => {
                let [loads, stores] = self.probe.take().context("no probe is under way")?.end()?;
                format!("{} {}", loads.say(), stores.say())
            }
            ["rewrite", a_second] => {
                let words = (content::UNIQUE..self.memory.pages).map(|page| self.memory.word(page, page + 1) as usize);
                // SAFETY: as for the probe; `check` looks at other words.
                self.rewriting = Some(unsafe { Rewriting::start(words.collect(), a_second.parse()?) }?);
                ok()
            }
            ["end-rewrite"] => {
                self.rewriting.take().context("nothing is being rewritten")?.end()?;
                ok()
            }
            ["duplicate", first, count, seed] => {
                let first: usize = first.parse()?;
                let pages = first..first + count.parse::<usize>()?;
                self.content.duplicate(pages.clone(), seed.parse()?);
                pages.for_each(|page| self.memory.put(&self.content, page));
                ok()
            }
            ["where", page] => (self.memory.word(page.parse()?, 0) as usize).to_string(),
            _ => bail!("{line:?} is no order"),
        })
    }
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
    /// Starts `command`, which ends up as `pageone-bench hold-memory PAGES`.
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

    /// Gives an order and waits until it is done.
    pub(crate) fn obey(&mut self, order: &str) -> Result<()> {
        self.order(order)?;
        self.done()
    }

    /// Gives an order and waits for the answer.
    pub(crate) fn ask(&mut self, order: &str) -> Result<String> {
        self.order(order)?;
        self.line()
    }

    fn answer(&mut self, wanted: &str) -> Result<()> {
        let line = self.line()?;
        ensure!(line == wanted, "client {}: {line}", self.pid());
        Ok(())
    }

    fn line(&mut self) -> Result<String> {
        let pid = self.pid();
        Ok(self.answers.next().with_context(|| format!("client {pid} ended"))??)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts clients, by the command that `launch` makes of theirs, and waits until all have filled
/// their memory.
pub(crate) fn start_all(
    clients: usize,
    pages: usize,
    case: content::Case,
    launch: impl Fn(&Command) -> Result<Command>,
) -> Result<Vec<Client>> {
    start_each((0..clients).map(|client| Holding { pages, case, client, spread: 1 }), launch)
}

/// The same, each with what it is to hold.
pub(crate) fn start_each(
    holdings: impl Iterator<Item = Holding>,
    launch: impl Fn(&Command) -> Result<Command>,
) -> Result<Vec<Client>> {
    let program = own_program()?;
    let mut clients =
        holdings.map(|holding| Client::start(launch(&holding.command(&program))?)).collect::<Result<Vec<_>>>()?;
    clients.iter_mut().try_for_each(Client::wait_ready)?;
    Ok(clients)
}

/// The clients' processes.
pub(crate) fn pids(clients: &[Client]) -> Vec<i32> {
    clients.iter().map(Client::pid).collect()
}

/// Gives all clients an order, then waits for all.
pub(crate) fn order_all(clients: &mut [Client], order: &str) -> Result<()> {
    clients.iter_mut().try_for_each(|client| client.order(order))?;
    clients.iter_mut().try_for_each(Client::done)
}

#[cfg(test)]
mod tests;

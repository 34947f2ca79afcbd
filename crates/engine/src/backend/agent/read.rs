//! Reading: the candidates that come next, as chunks of pages whose bytes or digests are at hand.
//!
//! Bytes are read from outside, through a descriptor of the client's address space, with one system
//! call for each run of pages. Where most contents of the last chunk were new, the agent is asked
//! for the digests of the next pages instead ([`crate::client::digests`]): a first sighting needs
//! nothing else. The bytes of such a page are read when it becomes a frame after all
//! ([`Chunk::bytes`]).

use std::collections::VecDeque;

use kmem::PAGE_SIZE;
use kmem::procmem::Gone;
use rustix::io::Errno;
use wire::{PageNo, RegionId, Run};

use super::Stop;
use crate::client::Client;
use crate::core::ledger::Region;
use crate::world::stall::touch;

const CHUNK: usize = 128;
/// Pages that the agent is asked about at a time.
const ASK: usize = 512;
/// Requests for digests under way at a time.
pub(super) const AHEAD: usize = 2;
/// Fewer pages than this are read from outside: asking the agent would not pay.
const FEW: usize = 64;
/// Pages read behind predicted ones.
const PROBE: usize = 4;

pub(crate) struct Buffers {
    bytes: Vec<u8>,
    page: Box<[u8; PAGE_SIZE]>,
    /// What was picked.
    pub(super) pages: Vec<PageNo>,
    addresses: Vec<usize>,
    /// Of the first pages; those of the others are not known yet.
    digests: Vec<u64>,
}

impl Buffers {
    pub(crate) fn new() -> Self {
        Self {
            bytes: vec![0; CHUNK * PAGE_SIZE],
            page: Box::new([0; PAGE_SIZE]),
            pages: Vec::new(),
            addresses: Vec::new(),
            digests: Vec::new(),
        }
    }
}

/// Pages of one region whose bytes or digests are at hand.
pub(super) struct Chunk<'b> {
    pub(super) region: RegionId,
    pub(super) pages: &'b [PageNo],
    /// Digests of the pages, one for one; the look-up makes keys of them. None for a page that
    /// cannot be read, which is alone in its chunk.
    pub(super) keys: &'b mut [u64],
    /// The NUMA nodes that the pages lie on, one for one; empty where nodes are not kept apart.
    nodes: Vec<Option<u32>>,
    source: Source<'b>,
}

/// Where the bytes of a chunk are.
enum Source<'b> {
    Read(&'b [[u8; PAGE_SIZE]]),
    /// Not read yet: the digests are the agent's.
    Client {
        addresses: &'b [usize],
        buffer: &'b mut [u8; PAGE_SIZE],
    },
}

#[cfg(test)]
impl<'b> Chunk<'b> {
    /// Pages that were read.
    pub(super) fn read(pages: &'b [PageNo], keys: &'b mut [u64], bytes: &'b [[u8; PAGE_SIZE]]) -> Self {
        Self { region: RegionId(0), pages, keys, nodes: Vec::new(), source: Source::Read(bytes) }
    }
}

impl Chunk<'_> {
    /// The NUMA node of a page, where nodes are kept apart. `None` there: it is not known.
    pub(super) fn node(&self, at: usize) -> Option<u32> {
        self.nodes.get(at).copied().flatten()
    }

    pub(super) fn read_bytes(&self) -> &[[u8; PAGE_SIZE]] {
        match self.source {
            Source::Read(pages) => pages,
            Source::Client { .. } => &[],
        }
    }

    /// The bytes of a page, read now if not before. `None`: unreadable, or not what its agent said.
    pub(super) fn bytes(&mut self, client: &Client, at: usize) -> Option<&[u8; PAGE_SIZE]> {
        let (node, key) = (self.node(at), *self.keys.get(at)?);
        match &mut self.source {
            Source::Read(pages) => pages.get(at),
            Source::Client { addresses, buffer } => {
                let page = &addresses[at..at + 1];
                let read = || client.memory.read_pages(page, &mut buffer[..]);
                let read = touch(client.user.owner, read);
                let domain = &client.domain;
                // A frame under a wrong key would keep others from merging that content.
                (read == Some(Ok(1)) && domain.key_of(domain.digest(&buffer[..]), node) == Some(key))
                    .then_some(&**buffer)
            }
        }
    }
}

/// The NUMA nodes of a client's pages, one for one; empty where nodes are not kept apart. The
/// kernel takes a process number only: of another program the nodes are wrong, and nothing is read.
pub(super) fn nodes_of(client: &Client, addresses: &[usize]) -> Result<Vec<Option<u32>>, Stop> {
    let mut nodes = Vec::new();
    if client.domain.store.by_node
        && let Err(e) =
            touch(client.user.owner, || kmem::numa::nodes_of(client.pid, addresses, &mut nodes)).ok_or(Stop::Client)?
    {
        return Err(match Errno::from_io_error(&e) {
            Some(Errno::SRCH) => Stop::Client,
            _ => Stop::Fatal(format!(
                "the kernel does not tell the NUMA nodes of its pages (move_pages: {e}), and merge_across_nodes = false keeps \
                 nodes apart; run the daemon with CAP_SYS_PTRACE and without a filter on that call, or set merge_across_nodes \
                 = true"
            )),
        });
    }
    Ok(nodes)
}

/// Pages whose digests the agent was asked for.
struct Ahead {
    request: u64,
    pages: Vec<PageNo>,
}

/// The candidates that come next; the pages themselves are in [`Buffers`].
pub(super) struct Picked {
    /// The last page that was looked at for candidates. `None`: there are no more.
    pub(super) last: Option<PageNo>,
    /// The request for digests that the pages were in, and which of its pages they are.
    asked: Option<(Ahead, Vec<usize>)>,
    /// What to ask the agent about now.
    to_ask: Vec<Vec<PageNo>>,
}

pub(super) struct Reader<'a> {
    client: &'a Client,
    /// What the agent was asked about, in the order of the pages.
    ahead: VecDeque<Ahead>,
    /// Whether most contents that were picked last were new: then digests are enough for the next.
    digests_suffice: bool,
}

impl<'a> Reader<'a> {
    pub(super) fn new(client: &'a Client) -> Self {
        Self { client, ahead: VecDeque::new(), digests_suffice: false }
    }

    /// Drops what the agent was asked about.
    pub(super) fn forget_ahead(&mut self) {
        self.ahead.clear();
        self.client.answers.forget();
    }

    /// Picks the next candidates of a region in `range`, behind those that were just `predicted`:
    /// what the agent was asked about, or a chunk to read. `ahead`: how many
    /// requests for digests may be under way.
    pub(super) fn pick(
        &mut self,
        region: &mut Region,
        range: Run,
        predicted: u32,
        ahead: usize,
        buffers: &mut Buffers,
    ) -> Picked {
        if predicted > 0 && !self.ahead.is_empty() {
            self.forget_ahead();
        }
        let asked = self.ahead.pop_front().map(|asked| {
            // Some may have been written, discarded or recycled by now.
            let wanted: Vec<usize> =
                (0..asked.pages.len()).filter(|&at| region.ages.is_candidate(asked.pages[at])).collect();
            (asked, wanted)
        });
        let Buffers { pages, addresses, .. } = buffers;
        let last = match &asked {
            Some((asked, wanted)) => {
                pages.clear();
                pages.extend(wanted.iter().map(|&at| asked.pages[at]));
                asked.pages.last()
            }
            None => {
                let most = if predicted > 0 { PROBE } else { CHUNK };
                region.candidates(range.page + predicted, most, pages);
                pages.retain(|&page| page < range.end());
                pages.last()
            }
        };
        let last = last.copied();
        addresses.clear();
        addresses.extend(pages.iter().map(|&page| region.address(page)));
        let to_ask = match last.filter(|_| self.digests_suffice && predicted == 0) {
            Some(last) => self.to_ask(region, Run::between(last + 1, range.end()), ahead),
            None => Vec::new(),
        };
        Picked { last, asked, to_ask }
    }

    /// What to ask the agent about: candidates that follow what it was asked about last.
    fn to_ask(&self, region: &mut Region, range: Run, ahead: usize) -> Vec<Vec<PageNo>> {
        let mut from = self.ahead.back().and_then(|last| last.pages.last()).map_or(range.page, |&last| last + 1);
        let mut to_ask = Vec::new();
        while self.ahead.len() + to_ask.len() < ahead {
            let mut pages = Vec::new();
            region.candidates(from, ASK, &mut pages);
            pages.retain(|&page| page < range.end());
            let Some(&last) = pages.last().filter(|_| pages.len() >= FEW) else { break };
            from = last + 1;
            to_ask.push(pages);
        }
        to_ask
    }

    /// Asks the agent for what is to be asked, and takes its answer on what was picked. Waits for
    /// the answer; without one the pages are read from outside.
    pub(super) fn exchange(&mut self, id: RegionId, picked: Picked, buffers: &mut Buffers) {
        for pages in picked.to_ask {
            let seed = self.client.domain.seed.get();
            let Some(request) = self.client.answers.ask(&self.client.conn, id, seed, &pages) else { break };
            self.ahead.push_back(Ahead { request, pages });
        }
        buffers.digests.clear();
        if let Some((asked, wanted)) = picked.asked {
            match self.client.answers.wait(asked.request) {
                Some(digests) => buffers.digests.extend(wanted.iter().map_while(|&at| digests.get(at).copied())),
                None => self.forget_ahead(),
            }
        }
    }

    /// The next chunk of what was picked; `done`: pages of earlier chunks. First the pages with
    /// digests of the agent's, then the others, read from outside.
    pub(super) fn next_chunk<'b>(
        &self,
        region: RegionId,
        done: &mut usize,
        buffers: &'b mut Buffers,
    ) -> Result<Option<Chunk<'b>>, Stop> {
        let Buffers { bytes, page: buffer, pages, addresses, digests } = buffers;
        let first = *done;
        if first == 0 && !digests.is_empty() {
            *done = digests.len();
            let (pages, addresses) = (&pages[..*done], &addresses[..*done]);
            let nodes = nodes_of(self.client, addresses)?;
            return Ok(Some(Chunk {
                region,
                pages,
                keys: digests,
                nodes,
                source: Source::Client { addresses, buffer },
            }));
        }
        if first >= pages.len() {
            return Ok(None);
        }
        let addresses = &addresses[first..(first + CHUNK).min(pages.len())];
        let client = self.client;
        let read = touch(client.user.owner, || client.memory.read_pages(addresses, bytes));
        if read.is_none() {
            client.memory.held_up();
        }
        let read = read.ok_or(Stop::Client)?.map_err(|Gone| Stop::Client)?;
        let (read_pages, _) = bytes[..read * PAGE_SIZE].as_chunks::<PAGE_SIZE>();
        digests.clear();
        digests.extend(read_pages.iter().map(|bytes| self.client.domain.digest(bytes)));
        let nodes = nodes_of(self.client, &addresses[..read])?;
        // Where not even the first can be read it was unmapped just now; it is passed over, and the
        // next scan will tell.
        *done += read.max(1);
        Ok(Some(Chunk { region, pages: &pages[first..*done], keys: digests, nodes, source: Source::Read(read_pages) }))
    }

    /// All that was picked has been looked up; `firsts` contents of it were new.
    pub(super) fn were_new(&mut self, firsts: usize, buffers: &Buffers) {
        self.digests_suffice = firsts * 4 > buffers.pages.len() * 3;
    }
}

#[cfg(test)]
mod tests {
    use kmem::pidfd::PidFd;

    use super::*;
    use crate::client::scanning::tests::{client_of, keep_nodes_apart};

    #[test]
    fn nodes_that_the_kernel_does_not_tell_are_named_with_the_remedy() {
        if !rustix::process::geteuid().is_root() {
            return println!("SKIPPED: only root can become a user who may not ask");
        }
        crate::testing::alone(|| {
            let mut process = std::process::Command::new("sleep").arg("60").spawn().unwrap();
            let pid = process.id() as i32;
            let (mut client, _agent) = client_of(pid, PidFd::open(pid).unwrap());
            assert_eq!(nodes_of(&client, &[0]).unwrap(), [], "nodes are not kept apart");
            keep_nodes_apart(&mut client);
            let as_nobody = || {
                let nobody = rustix::process::Uid::from_raw(65534);
                rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
                nodes_of(&client, &[0]).unwrap_err()
            };
            let why = std::thread::scope(|scope| scope.spawn(as_nobody).join()).unwrap();
            assert!(matches!(&why, Stop::Fatal(why) if why.contains("set merge_across_nodes = true")), "{why:?}");
            process.kill().unwrap();
            process.wait().unwrap();
            assert!(matches!(nodes_of(&client, &[0]), Err(Stop::Client)));
        });
    }
}

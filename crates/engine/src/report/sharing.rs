//! Who shares with whom: for each pair of clients of a domain, how many frames both map; and which
//! contents most pages have.
//!
//! Every client's ledger is walked once, a slice at a time. A bit for each client is set in a word
//! of each frame that is looked at. Of large stores only a part of the frames is, drawn by a hash
//! of their numbers, and counts are multiplied; so memory and time are bounded. Clients that time
//! does not suffice for are left out.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use control::{Content, DomainSharing, MOST_CONTENTS, MOST_SHARERS, Pair, Sharer, SharingMatrix};
use kmem::PAGE_SIZE;
use wire::{PageNo, RegionId, Run};

use crate::access::Access;
use crate::client::Client;
use crate::core::content::frame::Frame;
use crate::core::ledger::Entry;
use crate::store::domain::Domain;
use crate::world::shared::Shared;

/// Frames of a domain that are looked at, about: a few MiB of words.
const MOST_FRAMES: u64 = 1 << 17;
/// Pages that are looked at while a client is locked: under a millisecond.
const SLICE: u32 = 1 << 16;
/// After this time, further clients are left out.
const TIME: Duration = Duration::from_secs(1);
/// Frames that are read for the list of contents: replicas of one content count together.
const CANDIDATES: usize = 8 * MOST_CONTENTS;
/// The longest hint, in characters.
const HINT: usize = 40;

/// Who shares with whom, of those that the peer has access to. What pages hold is told to those
/// who see everything.
pub(super) fn sharing(shared: &Shared, access: &Access) -> SharingMatrix {
    let deadline = Instant::now() + TIME;
    let all = shared.clients();
    let mut domains = Vec::new();
    for domain in shared.domains() {
        let is_shown = |client: &&Arc<Client>| Arc::ptr_eq(&client.domain, &domain) && access.covers_client(client);
        let shown: Vec<_> = all.iter().filter(is_shown).collect();
        if !shown.is_empty() {
            let candidates = if *access == Access::All { CANDIDATES } else { 0 };
            domains.push(of_one_domain(&domain, &shown, candidates, deadline));
        }
    }
    SharingMatrix { domains }
}

/// What is found on the way through the ledgers.
struct Walk {
    /// One frame in this number is looked at.
    every: u32,
    /// For each frame that is looked at: who maps it.
    mappers: HashMap<u32, u64>,
    /// A page that maps each of these frames.
    examples: HashMap<u32, Option<(i32, u64)>>,
    /// By number: frames with an example to find.
    wanted: Vec<u64>,
}

impl Walk {
    fn is_looked_at(&self, frame: Frame) -> bool {
        // Frames side by side often have the same mappers: a hash scatters them.
        frame.0.wrapping_mul(0x9e37_79b9) >> 16 & (self.every - 1) == 0
    }

    fn is_wanted(&self, frame: Frame) -> bool {
        self.wanted.get(frame.0 as usize / 64).is_some_and(|word| word >> (frame.0 % 64) & 1 != 0)
    }

    /// Walks through one client's ledgers; `bit` stands for it.
    fn client(&mut self, client: &Client, bit: u64) {
        let regions: Vec<(RegionId, u32)> = client.state().regions.iter().map(|(&id, r)| (id, r.pages)).collect();
        for (id, pages) in regions {
            for from in (0..pages).step_by(SLICE as usize) {
                let state = client.state();
                let Some(region) = state.regions.get(&id) else { break };
                for page in region.known(Run::new(PageNo(from), SLICE.min(pages - from))) {
                    let Entry::Merged(frame) = region.entry(page) else { continue };
                    if self.is_looked_at(frame) {
                        *self.mappers.entry(frame.0).or_default() |= bit;
                    }
                    if self.is_wanted(frame)
                        && let Some(example) = self.examples.get_mut(&frame.0)
                    {
                        example.get_or_insert((client.pid, region.address(page) as u64));
                    }
                }
            }
        }
    }
}

/// `candidates`: how many frames are read for the list of contents; 0: there is none.
fn of_one_domain(domain: &Domain, clients: &[&Arc<Client>], candidates: usize, deadline: Instant) -> DomainSharing {
    let merged = |client: &Client| client.state().regions.values().map(|region| region.counts().merged).sum::<u64>();
    let mut ranked: Vec<(u64, &Arc<Client>)> = clients.iter().map(|client| (merged(client), *client)).collect();
    ranked.sort_by_key(|&(merged, _)| std::cmp::Reverse(merged));
    ranked.truncate(MOST_SHARERS);
    let frames = domain.store.usage().frames;
    let top = if candidates > 0 { domain.store.most_used(candidates) } else { Vec::new() };
    let mut walk = Walk {
        every: (frames / MOST_FRAMES).max(1).next_power_of_two().min(1 << 15) as u32,
        mappers: HashMap::new(),
        examples: top.iter().map(|&(frame, _)| (frame.0, None)).collect(),
        wanted: Vec::new(),
    };
    for &(frame, _) in &top {
        let word = frame.0 as usize / 64;
        walk.wanted.resize(walk.wanted.len().max(word + 1), 0);
        walk.wanted[word] |= 1 << (frame.0 % 64);
    }
    let mut listed = Vec::new();
    for (at, &(_, client)) in ranked.iter().enumerate() {
        if at > 0 && Instant::now() > deadline {
            break;
        }
        walk.client(client, 1 << at);
        listed.push(Sharer { pid: client.pid, name: client.called().to_owned(), ..Sharer::default() });
    }
    let pairs = pairs(&walk, &mut listed);
    let zeros = clients.iter().map(|c| c.state().regions.values().map(|r| r.counts().zero).sum::<u64>()).sum();
    DomainSharing {
        name: domain.key.to_string(),
        clients_unlisted: clients.len() - listed.len(),
        clients: listed,
        pairs,
        contents: if candidates > 0 { contents(domain, &top, &walk, zeros) } else { Vec::new() },
        sampled: walk.every,
    }
}

fn pairs(walk: &Walk, clients: &mut [Sharer]) -> Vec<Pair> {
    let n = clients.len();
    let mut counts = vec![0; n * n];
    // Many frames have the same mappers.
    let mut sets: HashMap<u64, u64> = HashMap::new();
    walk.mappers.values().for_each(|&set| *sets.entry(set).or_default() += u64::from(walk.every));
    for (set, frames) in sets {
        let members: Vec<usize> = (0..n).filter(|at| set >> at & 1 != 0).collect();
        for (place, &a) in members.iter().enumerate() {
            clients[a].frames += frames;
            clients[a].alone += if members.len() == 1 { frames } else { 0 };
            members[place + 1..].iter().for_each(|&b| counts[a * n + b] += frames);
        }
    }
    let all = counts.into_iter().enumerate().filter(|&(_, pages)| pages > 0);
    all.map(|(at, pages)| Pair { a: at / n, b: at % n, pages }).collect()
}

/// The contents that most pages have. `top`: the frames with the most users.
fn contents(domain: &Domain, top: &[(Frame, u32)], walk: &Walk, zeros: u64) -> Vec<Content> {
    let mut by_bytes: HashMap<u64, Content> = HashMap::new();
    let mut bytes = [0; PAGE_SIZE];
    for &(frame, users) in top {
        // One whose memory has failed has no content.
        if !domain.store.read(frame, &mut bytes) {
            continue;
        }
        let content = by_bytes
            .entry(domain.digest(&bytes))
            .or_insert_with(|| Content { hint: hint(&bytes), ..Content::default() });
        content.pages += u64::from(users);
        content.frames += 1;
        content.example = content.example.or(walk.examples.get(&frame.0).copied().flatten());
    }
    let mut all: Vec<Content> = by_bytes.into_values().collect();
    if zeros > 0 {
        all.push(Content { pages: zeros, hint: "zeros".into(), ..Content::default() });
    }
    all.sort_by(|a, b| b.pages.cmp(&a.pages).then_with(|| a.hint.cmp(&b.hint)));
    all.truncate(MOST_CONTENTS);
    all
}

/// What a page holds, for people.
fn hint(page: &[u8; PAGE_SIZE]) -> String {
    if page.iter().all(|&byte| byte == page[0]) {
        return format!("{:#04x} repeated", page[0]);
    }
    if page.starts_with(b"\x7fELF") {
        return "the beginning of an ELF file".into();
    }
    let is_text = |byte: &u8| byte.is_ascii_graphic() || *byte == b' ';
    let longest = page.split(|byte| !is_text(byte)).max_by_key(|text| text.len()).unwrap_or_default();
    if longest.len() < 8 {
        return "bytes".into();
    }
    String::from_utf8_lossy(&longest[..longest.len().min(HINT)]).trim().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn walk(mappers: &[(u32, u64)], every: u32) -> Walk {
        Walk { every, mappers: mappers.iter().copied().collect(), examples: HashMap::new(), wanted: Vec::new() }
    }

    #[test]
    fn frames_are_counted_by_pair_and_alone() {
        let mut clients = vec![Sharer::default(); 3];
        let found = pairs(&walk(&[(1, 0b111), (2, 0b011), (3, 0b100), (9, 0b011)], 1), &mut clients);
        assert_eq!(
            found,
            [Pair { a: 0, b: 1, pages: 3 }, Pair { a: 0, b: 2, pages: 1 }, Pair { a: 1, b: 2, pages: 1 }]
        );
        let of = |at: usize| (clients[at].frames, clients[at].alone);
        assert_eq!((of(0), of(1), of(2)), ((3, 0), (3, 0), (2, 1)));
    }

    #[test]
    fn a_part_of_the_frames_stands_for_all() {
        let sampled = walk(&[], 8);
        let looked_at = (0..80_000).filter(|&frame| sampled.is_looked_at(Frame(frame))).count();
        assert!((9_000..11_000).contains(&looked_at), "{looked_at}");
        let mut clients = vec![Sharer::default(); 2];
        assert_eq!(pairs(&walk(&[(1, 0b11)], 8), &mut clients), [Pair { a: 0, b: 1, pages: 8 }]);
    }

    #[test]
    fn a_hint_is_readable() {
        let page = |start: &[u8]| {
            let mut page = [0; PAGE_SIZE];
            page[..start.len()].copy_from_slice(start);
            hint(&page)
        };
        assert_eq!(hint(&[0xaa; PAGE_SIZE]), "0xaa repeated");
        assert_eq!(page(b"\x7fELF\x02"), "the beginning of an ELF file");
        assert_eq!(page(b"\x01ab\x02/usr/lib/locale\x1b[31m"), "/usr/lib/locale");
        assert_eq!(page(b"\x01\x02short"), "bytes");
        assert_eq!(page(&[b'x'; 500]).len(), HINT);
    }
}

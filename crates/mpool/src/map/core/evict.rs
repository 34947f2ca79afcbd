//! Which pages go, and how their uses are seen.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Weak};

use kmem::Range;
use kmem::pagemap::{Categories, Pagemap, Query};

use super::Core;
use crate::BLOCK;
use crate::map::state::{HUGE_PAGES, MapState, Temperature};

/// The greatest weighted heat.
const MAX_HEAT: usize = 256 * 100;
/// Pages that are taken out of the page tables at a time: others wait for the lock meanwhile.
const WATCH_STEP: usize = 2048;

/// Words of pages that the reaper drops before it lets others run: the kernel itself checks only
/// every few milliseconds whether another thread should run. Of anonymous memory all of them are
/// dropped at once, with one flush; a memfd takes one for each range, some 17 microseconds.
const STEP: usize = 64;
const STEP_MEMFD: usize = 8;
/// The fewest pages that a thread in need of memory evicts at a time.
const DIRECT: usize = 64;
/// Pages chosen at a time for threads in need of memory; less when there are few, as chosen pages
/// are dropped later.
const QUEUE: usize = 512;

/// Pages of one word of a map's resident bits that are to go. A map that is gone by then is let go.
pub(super) struct Chosen {
    map: Weak<MapState>,
    word: usize,
    mask: u64,
}

/// Where the last choice among pages of the same heat ended, and the chosen pages not dropped yet.
#[derive(Default)]
pub(super) struct Hand {
    map: usize,
    word: usize,
    queue: Vec<Chosen>,
}

/// Calls `each` for the resident pages of words `from..to`.
fn each_resident(map: &MapState, words: std::ops::Range<usize>, mut each: impl FnMut(usize)) {
    for word in words {
        let mut bits = map.resident[word].load(Ordering::Relaxed);
        while bits != 0 {
            each(word * 64 + bits.trailing_zeros() as usize);
            bits &= bits - 1;
        }
    }
}

/// Adds the first page and the length of each run of ones in a word of the bits.
fn add_runs(word: usize, mut bits: u64, runs: &mut Vec<(usize, usize)>) {
    while bits != 0 {
        let first = bits.trailing_zeros() as usize;
        let run = (!(bits >> first)).trailing_zeros().min(64 - first as u32) as usize;
        runs.push((word * 64 + first, run));
        bits &= if first + run == 64 { 0 } else { u64::MAX << (first + run) };
    }
}

/// Drops a huge page whole. Gives how many pages there were.
fn drop_huge(map: &MapState, word: usize) -> usize {
    let huge = word * 64 / HUGE_PAGES;
    let first = huge * HUGE_PAGES;
    let words = &map.resident[first / 64..][..HUGE_PAGES / 64];
    let had = words.iter().map(|word| word.swap(0, Ordering::AcqRel).count_ones() as usize).sum();
    // If it does not work it is one still, and found there when it is loaded again.
    if map.window.drop_pages(first, HUGE_PAGES).is_ok() {
        map.huge[huge].store(false, Ordering::Release);
    }
    had
}

/// For each part of the size of a huge page the heat of its hottest page, which stands for all; 0
/// for parts that are not one.
fn hottest(map: &MapState) -> Vec<u8> {
    let parts = map.huge.iter().zip(map.heat.chunks(HUGE_PAGES));
    let heat = |heats: &[AtomicU8]| heats.iter().map(|heat| heat.load(Ordering::Relaxed)).max().unwrap_or(0);
    parts.map(|(huge, heats)| if huge.load(Ordering::Relaxed) { heat(heats) } else { 0 }).collect()
}

/// How much a page of such a map weighs against one of a cold map; `None`: it never goes.
fn weight(temperature: Temperature) -> Option<usize> {
    match temperature {
        Temperature::Pinned => None,
        Temperature::Hot => Some(100),
        Temperature::Warm => Some(10),
        Temperature::Cold => Some(1),
    }
}

impl Core {
    /// Drops pages of these words of the resident bits, and all of the huge pages that they are
    /// part of. Gives how many there were.
    fn drop_words(&self, map: &MapState, words: &[(usize, u64)]) -> usize {
        let _shape = map.shape.read();
        let most: usize = words.iter().map(|&(_, mask)| mask.count_ones() as usize).sum();
        self.dropping.fetch_add(most, Ordering::AcqRel);
        let (mut count, mut runs) = (0, Vec::new());
        for &(word, mask) in words {
            if map.is_huge(word * 64) {
                count += drop_huge(map, word);
                continue;
            }
            let had = map.resident[word].fetch_and(!mask, Ordering::AcqRel) & mask;
            count += had.count_ones() as usize;
            add_runs(word, had, &mut runs);
        }
        map.window.drop_runs(&self.process, &runs);
        map.resident_pages.fetch_sub(count, Ordering::Relaxed);
        self.resident.fetch_sub(count, Ordering::AcqRel);
        self.dropping.fetch_sub(most, Ordering::AcqRel);
        count
    }

    /// Drops pages, whatever their temperature.
    pub(crate) fn drop_pages(&self, map: &MapState, first: usize, count: usize) {
        let end = first + count;
        let mut at = first;
        let mut words = Vec::new();
        while at < end {
            let (word, bit) = (at / 64, at % 64);
            let n = (64 - bit).min(end - at);
            let mask = (u64::MAX >> (64 - n)) << bit;
            if map.resident[word].load(Ordering::Relaxed) & mask != 0 {
                words.push((word, mask));
            }
            at += n;
        }
        words.chunks(STEP).for_each(|words| _ = self.drop_words(map, words));
    }

    /// Chooses about `want` pages, the coldest first, as words of the resident bits.
    fn choose(&self, hand: &mut Hand, want: usize) -> Vec<Chosen> {
        let maps: Vec<(Arc<MapState>, usize)> = {
            let maps = self.maps();
            maps.values().filter_map(|map| Some((map.clone(), weight(map.temperature)?))).collect()
        };
        let maps: Vec<_> = maps.into_iter().map(|(map, weight)| (hottest(&map), map, weight)).collect();
        let mut chosen = Vec::new();
        if maps.is_empty() || want == 0 {
            return chosen;
        }
        let heat = |(hottest, map, weight): &(Vec<u8>, Arc<MapState>, usize), page: usize| {
            let heat = map.heat[page].load(Ordering::Relaxed).max(*hottest.get(page / HUGE_PAGES).unwrap_or(&0));
            // The one more is for pages that were loaded and not used yet: they too stay the longer
            // the warmer their map is.
            ((usize::from(heat) + 1) * weight).min(MAX_HEAT - 1)
        };
        let mut counts = vec![0u32; MAX_HEAT];
        for entry in &maps {
            each_resident(&entry.1, 0..entry.1.resident.len(), |page| counts[heat(entry, page)] += 1);
        }
        let (mut below, mut limit) = (0, 0);
        while limit < MAX_HEAT && below + (counts[limit] as usize) < want {
            below += counts[limit] as usize;
            limit += 1;
        }
        // All that are colder than `limit`, and of those that are as warm only as many as it takes,
        // in turn.
        let mut at_limit = want.saturating_sub(below);
        let (start, split) = (hand.map % maps.len(), hand.word);
        for i in 0..=maps.len() {
            let entry = &maps[(start + i) % maps.len()];
            let map = &entry.1;
            let words = map.resident.len();
            // Of the first map, first the part behind the hand; last, the part before it.
            let from = if i == 0 { split.min(words) } else { 0 };
            let to = if i == maps.len() { split.min(words) } else { words };
            for word in from..to {
                let mut mask = 0u64;
                each_resident(map, word..word + 1, |page| {
                    let heat = heat(entry, page);
                    let goes = heat < limit || (heat == limit && at_limit > 0);
                    at_limit -= usize::from(goes && heat == limit);
                    mask |= u64::from(goes) << (page % 64);
                });
                if mask != 0 {
                    chosen.push(Chosen { map: Arc::downgrade(map), word, mask });
                    if at_limit > 0 {
                        (hand.map, hand.word) = ((start + i) % maps.len(), word + 1);
                    }
                }
            }
        }
        chosen
    }

    /// Evicts pages, the coldest first, until the high mark is reached. Gives how many.
    pub(super) fn evict(&self) -> usize {
        let chosen = {
            // The lock is for choosing; giving the memory back takes longer.
            let mut hand = self.hand.lock();
            // Looked at again, as others may have evicted by now.
            let missing = self.look_at_memory().missing_to(self.settings.high);
            self.choose(&mut hand, (missing / BLOCK as u64) as usize)
        };
        let mut gone = 0;
        for chosen in chosen.chunk_by(|a, b| a.map.ptr_eq(&b.map)) {
            let is_shared = chosen[0].map.upgrade().is_some_and(|map| map.window.is_shared());
            for some in chosen.chunks(if is_shared { STEP_MEMFD } else { STEP }) {
                gone += self.drop_chosen(some);
                std::thread::yield_now();
            }
        }
        gone
    }

    fn drop_chosen(&self, chosen: &[Chosen]) -> usize {
        let drop_of_one = |chosen: &[Chosen]| {
            let map = chosen[0].map.upgrade()?;
            let words: Vec<(usize, u64)> = chosen.iter().map(|chosen| (chosen.word, chosen.mask)).collect();
            map.enter().map(|_entered| self.drop_words(&map, &words))
        };
        chosen.chunk_by(|a, b| a.map.ptr_eq(&b.map)).filter_map(drop_of_one).sum()
    }

    /// Evicts some pages in the thread that needs `pages` of them, as many as are missing by
    /// now. With a reaper: the coldest, as it would; without: in the order of addresses.
    pub(super) fn evict_directly(&self, pages: usize) -> usize {
        let gone = if self.settings.reaper { self.evict_from_queue(pages) } else { self.evict_in_turn(pages) };
        self.stats.direct.fetch_add(gone as u64, Ordering::Relaxed);
        gone
    }

    /// Choosing costs the same for few and for many: many are chosen, and the next threads that
    /// need memory find them.
    fn evict_from_queue(&self, pages: usize) -> usize {
        let mut gone = 0;
        while gone < DIRECT || (gone < pages && self.excess(pages) > 0) {
            let next = {
                let mut hand = self.hand.lock();
                if hand.queue.is_empty() {
                    let some = QUEUE.min(self.resident.load(Ordering::Relaxed) / 32);
                    hand.queue = self.choose(&mut hand, self.excess(pages).min(pages).max(some));
                }
                let (mut from, mut some) = (hand.queue.len(), 0);
                while from > 0 && some + gone < DIRECT {
                    from -= 1;
                    some += hand.queue[from].mask.count_ones() as usize;
                }
                hand.queue.split_off(from)
            };
            if next.is_empty() {
                break;
            }
            gone += self.drop_chosen(&next);
        }
        gone
    }

    fn evict_in_turn(&self, pages: usize) -> usize {
        let mut hand = self.hand.lock();
        let want = self.excess(pages).min(pages).max(DIRECT);
        let maps: Vec<Arc<MapState>> = {
            let maps = self.maps();
            maps.values().filter(|map| weight(map.temperature).is_some()).cloned().collect()
        };
        let mut gone = 0;
        // Once around, and the start of the first map again.
        for _ in 0..=maps.len() {
            let Some(map) = maps.get(hand.map % maps.len().max(1)) else { break };
            let entered = map.enter();
            while entered.is_some() && hand.word < map.resident.len() {
                if gone >= want {
                    return gone;
                }
                let (mut words, mut some) = (Vec::new(), 0);
                while some < want - gone && words.len() < STEP && hand.word < map.resident.len() {
                    some += map.resident[hand.word].load(Ordering::Relaxed).count_ones() as usize;
                    words.push((hand.word, u64::MAX));
                    hand.word += 1;
                }
                gone += self.drop_words(map, &words);
            }
            (hand.map, hand.word) = (hand.map + 1, 0);
        }
        gone
    }

    /// Lets the pages of every map cool down, `half_lives` having passed since the reaper began.
    pub(super) fn age(&self, half_lives: u64) {
        for map in self.maps().values() {
            let Some(weight) = weight(map.temperature) else { continue };
            // What is warmer ages slower.
            let due = half_lives / weight as u64;
            let before = map.aged.swap(due, Ordering::Relaxed);
            let shift = due.saturating_sub(before).min(8) as u32;
            // A new map has not lived through the halvings before it.
            if shift > 0 && before > 0 {
                for heat in &map.heat {
                    let now = heat.load(Ordering::Relaxed);
                    if now > 0 {
                        heat.store(now.checked_shr(shift).unwrap_or(0), Ordering::Relaxed);
                    }
                }
            }
        }
    }

    /// The heat of all pages that can be evicted, in memory or not.
    pub(super) fn heat(&self) -> u64 {
        let maps = self.maps();
        let some = maps.values().filter(|map| weight(map.temperature).is_some());
        some.flat_map(|map| &map.heat).map(|heat| u64::from(heat.load(Ordering::Relaxed))).sum()
    }

    /// Counts the pages that are in the page tables as used, and takes them out.
    pub(super) fn watch(&self) {
        let maps: Vec<Arc<MapState>> = self.maps().values().cloned().collect();
        let Ok(pagemap) = Pagemap::open_self() else { return };
        let query = Query { required: Categories::PRESENT, ..Query::default() };
        for map in maps {
            if weight(map.temperature).is_none() || !map.window.is_shared() {
                continue;
            }
            let base = map.window.range().start;
            for first in (0..map.pages).step_by(WATCH_STEP) {
                let count = WATCH_STEP.min(map.pages - first);
                let range = Range::new(base + first * BLOCK, count * BLOCK);
                let mut seen = 0;
                let _ = pagemap.scan(range, &query, &mut |run| {
                    for page in (run.start - base) / BLOCK..(run.end - base) / BLOCK {
                        map.warm(page, 1);
                        seen += 1;
                    }
                });
                if seen > 0 {
                    map.window.forget_accesses(first, count);
                    self.stats.seen.fetch_add(seen, Ordering::Relaxed);
                    std::thread::yield_now();
                }
            }
        }
    }
}

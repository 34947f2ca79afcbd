//! RAM in the tree of memory regions that QEMU's `info mtree` prints.
//!
//! Regions overlap: the one with the highest priority is what a CPU sees. So the tree is painted as
//! QEMU does it itself: children by priority, each where nothing has been painted yet, and then the
//! region they lie in. An alias shows a part of another region, which is printed on its own.
//!
//! ```text
//! address-space: memory
//!   0000000000000000-ffffffffffffffff (prio 0, i/o): system
//!     0000000000000000-000000007fffffff (prio 0, ram): alias low @pc.ram 0000000000000000-…
//!     00000000000a0000-00000000000bffff (prio 1, i/o): alias smram @pci 00000000000a0000-…
//!
//! memory-region: pc.ram
//!   0000000000000000-000000007fffffff (prio 0, ram): pc.ram
//! ```
//!
//! `info mtree -f` prints what QEMU has painted, but must not be asked. QEMU 7.2 never frees a view
//! that was listed so and that several address spaces share, and so no device's memory in that view
//! (`mtree_info_flatview_free` in its memory.c).

use std::ops::Range;

/// Regions nest to this depth at most, aliases included.
const DEPTH: usize = 32;

/// A line, with the lines below it. Addresses are as printed; `end` is the first one behind.
#[derive(Debug, Default)]
struct Region {
    range: Range<i128>,
    priority: i64,
    is_ram: bool,
    alias: Option<Alias>,
    children: Vec<Region>,
}

#[derive(Debug)]
struct Alias {
    target: String,
    /// Offset in the target.
    start: i128,
}

/// A tree, and what it is printed as: `address-space: NAME` or `memory-region: NAME`.
type Section = (Vec<String>, Region);

/// RAM that CPUs see, by address in bytes. Memory of devices has another priority than 0.
pub(super) fn find(text: &str) -> Vec<Range<u64>> {
    let sections = parse(text);
    let mut painted = Vec::new();
    for (titles, root) in &sections {
        if titles.iter().any(|title| title == "address-space: memory") {
            paint(&sections, root, 0, &root.range, &mut painted, DEPTH);
        }
    }
    painted.sort_by_key(|(range, _)| range.start);
    let number = |address| u64::try_from(address).ok();
    let ram = painted.into_iter().filter(|(_, is_ram)| *is_ram);
    ram.filter_map(|(range, _)| Some(number(range.start)?..number(range.end)?)).collect()
}

/// Paints a region, whose addresses are `shift` less than those that CPUs see, inside of `window`.
fn paint(
    sections: &[Section],
    region: &Region,
    shift: i128,
    window: &Range<i128>,
    painted: &mut Vec<(Range<i128>, bool)>,
    depth: usize,
) {
    let (start, end) = (region.range.start + shift, region.range.end + shift);
    let window = start.max(window.start)..end.min(window.end);
    if window.is_empty() || depth == 0 {
        return;
    }
    let mut is_ram = region.is_ram && region.priority == 0;
    if let Some(alias) = &region.alias {
        let title = format!("memory-region: {}", alias.target);
        let mut targets = sections.iter().filter(|(titles, _)| titles.contains(&title));
        if let (Some((_, target)), None) = (targets.next(), targets.next()) {
            let shift = start - alias.start - target.range.start;
            return paint(sections, target, shift, &window, painted, depth - 1);
        }
        // Which region is meant is not known.
        is_ram = false;
    }
    let mut children: Vec<_> = region.children.iter().collect();
    children.sort_by_key(|child| std::cmp::Reverse(child.priority));
    for child in children {
        paint(sections, child, shift, &window, painted, depth - 1);
    }
    if is_ram || region.children.is_empty() {
        let free = unpainted(window, painted);
        painted.extend(free.into_iter().map(|range| (range, is_ram)));
    }
}

fn unpainted(range: Range<i128>, painted: &[(Range<i128>, bool)]) -> Vec<Range<i128>> {
    let mut free = vec![range];
    for (taken, _) in painted {
        free = free
            .into_iter()
            .flat_map(|part| [part.start..part.end.min(taken.start), part.start.max(taken.end)..part.end])
            .filter(|part| !part.is_empty())
            .collect();
    }
    free
}

fn parse(text: &str) -> Vec<Section> {
    let mut sections: Vec<Section> = Vec::new();
    for line in text.lines() {
        let line = line.trim_end();
        if line.starts_with("address-space: ") || line.starts_with("memory-region: ") {
            // Address spaces with the same tree are printed one below the other.
            match sections.last_mut() {
                Some((titles, root)) if root.range.is_empty() => titles.push(line.to_owned()),
                _ => sections.push((vec![line.to_owned()], Region::default())),
            }
        } else if let (Some((_, root)), Some((depth, region))) = (sections.last_mut(), parse_line(line)) {
            insert(root, depth, region);
        }
    }
    sections
}

/// Puts a region below the last one that is printed less far to the right.
fn insert(root: &mut Region, depth: usize, region: Region) {
    let mut parent = root;
    if depth <= 1 {
        *parent = region;
        return;
    }
    for _ in 2..depth {
        if parent.children.is_empty() {
            break;
        }
        let last = parent.children.len() - 1;
        parent = &mut parent.children[last];
    }
    parent.children.push(region);
}

/// A region, and how far to the right it is printed.
fn parse_line(line: &str) -> Option<(usize, Region)> {
    let rest = line.trim_start();
    let depth = (line.len() - rest.len()) / 2;
    let (addresses, rest) = rest.split_once(" (prio ")?;
    let (priority, rest) = rest.split_once(", ")?;
    let (kind, name) = rest.split_once("): ")?;
    let target = || {
        let (_, target) = name.strip_prefix("alias ")?.rsplit_once(" @")?;
        let (target, shown) = target.split_once(' ')?;
        let shown = shown.split(' ').next()?;
        Some(Alias { target: target.to_owned(), start: parse_range(shown)?.start })
    };
    let region = Region {
        range: parse_range(addresses)?,
        priority: priority.parse().ok()?,
        is_ram: kind == "ram",
        alias: target(),
        children: Vec::new(),
    };
    Some((depth, region))
}

fn parse_range(text: &str) -> Option<Range<i128>> {
    let (start, last) = text.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok().map(i128::from);
    Some(number(start)?..number(last)? + 1)
}

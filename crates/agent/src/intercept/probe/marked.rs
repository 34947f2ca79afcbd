//! The memory that a program has marked before the agent came: the kernel shows the mark (`mg`).

use std::io::BufRead;

use kmem::range::Range;

use super::{Unfit, header, smaps};

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Marked {
    /// Marked memory: neighbours of one kind are one range.
    pub(crate) ranges: Vec<Range>,
    /// The largest memory that other processes may map too: its bytes, and its name.
    pub(crate) shared: Option<(usize, String)>,
}

pub(crate) fn marked() -> Result<Marked, Unfit> {
    marked_in(smaps()?)
}

fn marked_in(smaps: impl BufRead) -> Result<Marked, Unfit> {
    let mut found = Marked::default();
    let mut current = Range::new(0, 0);
    // How the last marked mapping was advised, and mapped.
    let (mut kind, mut last) = (String::new(), (String::new(), String::new()));
    for line in smaps.lines() {
        let line = line.map_err(|_| Unfit::Unknown)?;
        if let Some((start, end, fields)) = header(&line) {
            current = Range::new(start, end.saturating_sub(start));
            let mut words = fields.split_ascii_whitespace();
            let (permissions, name) =
                (words.next().unwrap_or_default(), words.nth(3).unwrap_or("memory without a name"));
            let is_shared = permissions.starts_with("rw") && permissions.ends_with('s');
            if is_shared && found.shared.as_ref().is_none_or(|(len, _)| *len < current.len) {
                found.shared = Some((current.len, name.into()));
            }
            kind = format!("{permissions} {}", words.next().unwrap_or_default());
        } else if let Some(flags) = line.strip_prefix("VmFlags:")
            && flags.split_ascii_whitespace().any(|flag| flag == "mg")
        {
            let this = (std::mem::take(&mut kind), flags.to_owned());
            match found.ranges.last_mut() {
                Some(before) if before.end() == current.start && last == this => before.len += current.len,
                _ => found.ranges.push(current),
            }
            last = this;
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marked_neighbours_of_one_kind_are_one_range() {
        const MAPS: &str = "\
10000-20000 rw-p 00000000 00:00 0
VmFlags: rd wr mg
20000-30000 rw-p 00000000 00:00 0
VmFlags: rd wr mg
30000-40000 rw-p 00000000 00:00 0
VmFlags: rd wr dc mg
50000-60000 rw-p 00000000 00:00 0
VmFlags: rd wr
60000-80000 rw-s 00000000 00:01 77                         /memfd:ram (deleted)
VmFlags: rd wr sh
80000-90000 rw-s 00000000 00:01 78                         /dev/shm/x
VmFlags: rd wr sh
";
        let found = marked_in(MAPS.as_bytes()).unwrap();
        assert_eq!(found.ranges, [Range::new(0x10000, 0x20000), Range::new(0x30000, 0x10000)]);
        assert_eq!(found.shared, Some((0x20000, "/memfd:ram".into())));
        assert_eq!(marked_in(&b""[..]).unwrap(), Marked::default());
    }
}

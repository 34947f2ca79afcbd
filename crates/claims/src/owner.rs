//! Whose a uid is: users have subordinate uids (`subuid(5)`), 65,536 each on Debian, and can be any
//! of them. What one user may take is counted by [`Owner`], and never by uid.
//!
//! | uid | owner |
//! |---|---|
//! | root's, this process's own | itself; no other uid counts for those who are believed |
//! | in a range of `/etc/subuid` | the user named there, or, if `/etc/passwd` lacks him, his first uid |
//! | … of root or this process's user | its line there: containers that root maps are not root |
//! | any other | itself |
//!
//! It is for bounds alone. What a process may see and do, and whose memory it shares, is asked of
//! its uid: a user's containers may be different tenants.
//!
//! The files are read up to a bound, and again when they change. A line that is none is left out,
//! and a uid in two ranges belongs to the first.

use std::collections::{BTreeMap, HashMap};
use std::fmt::{self, Display, Formatter};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use kmem::peer::is_trusted;

use crate::{ClaimError, open};

/// Subordinate uids, and the users who have them.
const FILES: [&str; 2] = ["/etc/subuid", "/etc/passwd"];
/// Bytes of each that are read: more than 100,000 lines.
const MOST: u64 = 4 << 20;
/// How often the files are looked at.
const LOOK: Duration = Duration::from_secs(1);

static KNOWN: Mutex<Option<Known>> = Mutex::new(None);

/// A user with all of its subordinate uids. The default is root.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owner(u32);

impl Owner {
    /// Root, without the containers that it maps.
    pub const ROOT: Self = Self(0);

    /// Whose this uid is.
    pub fn of(uid: u32) -> Self {
        if is_trusted(uid) {
            return Self(uid);
        }
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let known = known.get_or_insert_with(|| Known::of_files(FILES.map(Path::new)));
        known.look(Instant::now());
        known.ranges.owner(uid)
    }

    /// A number that no other owner has: a uid of its own.
    pub fn number(self) -> u32 {
        self.0
    }

    /// The owner with this [`Owner::number`].
    pub const fn numbered(number: u32) -> Self {
        Self(number)
    }
}

/// Its number.
impl Display for Owner {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// What tells that a file was changed or replaced: device, inode, length, and two times.
type Version = (u64, u64, u64, [(i64, i64); 2]);

/// What the files say.
struct Known {
    paths: [&'static Path; 2],
    looked: Option<Instant>,
    versions: [Option<Version>; 2],
    ranges: Ranges,
}

impl Known {
    fn of_files(paths: [&'static Path; 2]) -> Self {
        Self { paths, looked: None, versions: [None; 2], ranges: Ranges::default() }
    }

    /// Reads the files again if they have changed, and nobody has looked lately. What cannot be
    /// read is as it was.
    fn look(&mut self, now: Instant) {
        if self.looked.is_some_and(|looked| now.saturating_duration_since(looked) < LOOK) {
            return;
        }
        self.looked = Some(now);
        let versions = self.paths.map(version);
        if versions != self.versions
            && let [Ok(subuid), Ok(passwd)] = self.paths.map(read)
        {
            self.ranges = Ranges::parse(&subuid, &passwd);
            self.versions = versions;
        }
    }
}

fn version(path: &Path) -> Option<Version> {
    let meta = std::fs::metadata(path).ok()?;
    let times = [(meta.mtime(), meta.mtime_nsec()), (meta.ctime(), meta.ctime_nsec())];
    Some((meta.dev(), meta.ino(), meta.len(), times))
}

/// The beginning of a file; nothing of one that is not there.
fn read(path: &Path) -> Result<Vec<u8>, ClaimError> {
    let mut bytes = Vec::new();
    match open(path) {
        Err(ClaimError::Io(e)) if e.kind() == ErrorKind::NotFound => {}
        file => _ = file?.take(MOST).read_to_end(&mut bytes)?,
    }
    // A line that was cut off may name another number.
    if bytes.len() as u64 == MOST {
        let end = bytes.iter().rposition(|&byte| byte == b'\n').unwrap_or(0);
        bytes.truncate(end);
    }
    Ok(bytes)
}

/// Ranges of uids that have no uid in common.
#[derive(Debug, Default)]
struct Ranges {
    /// By its first uid: the first behind it, and whose it is.
    ranges: BTreeMap<u32, (u32, Owner)>,
}

impl Ranges {
    fn parse(subuid: &[u8], passwd: &[u8]) -> Self {
        let user = |line| Some((fields(line).next()?, number(fields(line).nth(2)?)?));
        let mut uids = HashMap::from([(&b"root"[..], 0)]);
        lines(passwd).filter_map(user).for_each(|(name, uid)| _ = uids.entry(name).or_insert(uid));
        let (mut all, mut unknown) = (Self::default(), HashMap::new());
        for (name, first, count) in lines(subuid).filter_map(range) {
            let free = all.free(first, first.saturating_add(count));
            let Some(&(own, _)) = free.first() else { continue };
            let owner = match number(name).or_else(|| uids.get(name).copied()) {
                Some(uid) if is_trusted(uid) => Owner(own),
                Some(uid) => Owner(uid),
                None => *unknown.entry(name).or_insert(Owner(own)),
            };
            all.ranges.extend(free.into_iter().map(|(first, end)| (first, (end, owner))));
        }
        all
    }

    /// The parts of a range that are nobody's yet.
    fn free(&self, mut first: u32, end: u32) -> Vec<(u32, u32)> {
        let mut free = Vec::new();
        while first < end {
            if let Some((taken, _)) = self.at(first) {
                first = taken;
                continue;
            }
            let next = self.ranges.range(first..end).next().map_or(end, |(&next, _)| next);
            free.push((first, next));
            first = next;
        }
        free
    }

    /// The range that has this uid.
    fn at(&self, uid: u32) -> Option<(u32, Owner)> {
        self.ranges.range(..=uid).next_back().map(|(_, &range)| range).filter(|&(end, _)| uid < end)
    }

    fn owner(&self, uid: u32) -> Owner {
        self.at(uid).map_or(Owner(uid), |(_, owner)| owner)
    }
}

fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|&byte| byte == b'\n').map(<[u8]>::trim_ascii)
}

fn fields(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(|&byte| byte == b':')
}

fn number(field: &[u8]) -> Option<u32> {
    str::from_utf8(field).ok()?.parse().ok()
}

/// The name, the first uid, and how many there are.
fn range(line: &[u8]) -> Option<(&[u8], u32, u32)> {
    let mut fields = fields(line);
    let range = (fields.next().filter(|name| !name.is_empty())?, number(fields.next()?)?, number(fields.next()?)?);
    fields.next().is_none().then_some(range)
}

#[cfg(test)]
mod tests;

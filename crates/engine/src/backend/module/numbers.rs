//! Numbers of files, and of segments that are lent to them: there are 65,536.
//!
//! Only a file with pages has one. When none is left, a file gives way of whoever has the most: of
//! the mounts first, and in a mount of the users. So whoever comes later finds one.

use std::collections::{BTreeMap, BTreeSet};

use claims::Owner;

use crate::core::content::index::{ClientId, MAX_CLIENTS};

/// Numbers that files do not get: for segments.
const OWN: u32 = 1 << 12;

/// A file with a number, and whose share it is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Holder {
    /// Its mount's device.
    pub(super) mount: u64,
    pub(super) user: Owner,
    pub(super) id: u64,
}

/// How many each has, and who has the most.
#[derive(Default)]
struct Shares<K> {
    has: BTreeMap<K, u32>,
    order: BTreeSet<(u32, K)>,
}

impl<K: Copy + Ord> Shares<K> {
    fn of(&self, who: K) -> u32 {
        self.has.get(&who).copied().unwrap_or_default()
    }

    fn add(&mut self, who: K, more: i32) {
        let before = self.has.remove(&who).unwrap_or_default();
        self.order.remove(&(before, who));
        let has = before.saturating_add_signed(more);
        if has > 0 {
            self.has.insert(who, has);
            self.order.insert((has, who));
        }
    }

    fn most(&self) -> Option<(u32, K)> {
        self.order.last().copied()
    }
}

#[derive(Default)]
pub(super) struct Numbers {
    /// Those below were given out once.
    next: u32,
    free: Vec<ClientId>,
    holders: BTreeMap<u32, Holder>,
    files: BTreeSet<Holder>,
    mounts: Shares<u64>,
    users: BTreeMap<u64, Shares<Owner>>,
}

/// Why there is no number.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// Nobody has more.
    ForGood,
    /// Unless this file gives its own back.
    By(Holder),
}

impl Numbers {
    /// `None`: it is for a segment.
    pub(super) fn take(&mut self, holder: Option<Holder>) -> Result<ClientId, Taken> {
        let left = MAX_CLIENTS - self.next + self.free.len() as u32;
        if left <= holder.map_or(0, |_| OWN) {
            let gives_way = holder.and_then(|holder| self.gives_way(holder));
            return Err(gives_way.map_or(Taken::ForGood, Taken::By));
        }
        let number = self.free.pop().unwrap_or_else(|| {
            self.next += 1;
            ClientId(self.next - 1)
        });
        if let Some(holder) = holder {
            self.holders.insert(number.0, holder);
            self.files.insert(holder);
            self.count(holder, 1);
        }
        Ok(number)
    }

    pub(super) fn give_back(&mut self, number: ClientId) {
        self.free.push(number);
        if let Some(holder) = self.holders.remove(&number.0) {
            self.files.remove(&holder);
            self.count(holder, -1);
        }
    }

    fn count(&mut self, Holder { mount, user, .. }: Holder, more: i32) {
        self.mounts.add(mount, more);
        let users = self.users.entry(mount).or_default();
        users.add(user, more);
        if users.has.is_empty() {
            self.users.remove(&mount);
        }
    }

    /// The newest file of whoever has more than the other would then.
    fn gives_way(&self, other: Holder) -> Option<Holder> {
        let (most, mount) = self.mounts.most()?;
        let mount = if most > self.mounts.of(other.mount) + 1 { mount } else { other.mount };
        let users = self.users.get(&mount)?;
        let (most, user) = users.most()?;
        if mount == other.mount && most <= users.of(other.user) + 1 {
            return None;
        }
        let of_user = |id| Holder { mount, user, id };
        self.files.range(of_user(0)..=of_user(u64::MAX)).next_back().copied()
    }
}

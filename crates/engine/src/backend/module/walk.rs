//! The walk over all processes, for those that have files open: a part in each round.
//!
//! Whoever has many descriptors, or processes, holds up neither the rounds nor what is found of
//! others: a round looks at so many descriptors, and users have their turns.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use claims::Owner;

use super::owner::{Key, Looked, Turn};

/// Descriptors that are looked at in a turn, and in all turns of a round. A process counts as one
/// more.
const TURN: usize = 1024;
const ROUND: usize = 8 * TURN;
/// Rounds between the beginnings of two walks, at most, for files that nobody has open.
const LONG_PAUSE: u32 = 8;

#[derive(Default)]
pub(super) struct Walk {
    /// Who is still to be looked at: users in the order of their turns, and their processes.
    users: VecDeque<(Owner, VecDeque<Turn>)>,
    /// Files whose owner was not known in the last round.
    missing: BTreeSet<Key>,
    /// Rounds between the last beginning and the next one, and how many of these are left.
    pause: u32,
    rest: u32,
}

impl Walk {
    /// A round. `missing`: the files whose owner is not known; `processes`: all that there are,
    /// with their users.
    pub(super) fn go_on(
        &mut self,
        missing: BTreeSet<Key>,
        processes: impl FnOnce() -> Vec<(Owner, i32)>,
        mut look: impl FnMut(&Turn) -> Looked,
        stopping: impl Fn() -> bool,
    ) {
        // Once begun it goes on: a file's owner may be found before the guest that uses the file,
        // too.
        if missing.is_empty() && self.users.is_empty() {
            *self = Self::default();
            return;
        }
        if !missing.is_subset(&self.missing) {
            (self.pause, self.rest) = (1, 0);
        }
        self.missing = missing;
        if self.rest == 0 && !self.missing.is_empty() {
            self.begin(processes());
            (self.pause, self.rest) = ((2 * self.pause).min(LONG_PAUSE), self.pause);
        }
        self.rest = self.rest.saturating_sub(1);
        let mut left = ROUND;
        while left > 0
            && !stopping()
            && let Some((user, mut turns)) = self.users.pop_front()
        {
            if let Some(turn) = turns.pop_front() {
                let looked = look(&Turn { most: TURN.min(left), ..turn });
                left = left.saturating_sub(looked.descriptors + 1);
                turns.extend(looked.next.map(|from| Turn { from, ..turn }));
            }
            if !turns.is_empty() {
                self.users.push_back((user, turns));
            }
        }
    }

    /// Users of whom nobody is still to be looked at begin anew. The others go on.
    fn begin(&mut self, processes: Vec<(Owner, i32)>) {
        let busy: BTreeSet<Owner> = self.users.iter().map(|&(user, _)| user).collect();
        let mut new: BTreeMap<Owner, VecDeque<Turn>> = BTreeMap::new();
        for (user, pid) in processes.into_iter().filter(|(user, _)| !busy.contains(user)) {
            new.entry(user).or_default().push_back(Turn { pid, from: 0, most: 0 });
        }
        self.users.extend(new);
    }
}

#[cfg(test)]
mod tests;

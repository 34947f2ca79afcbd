//! Pages that an agent has reported empty since some moment: discarded or recycled.

use wire::Run;

/// Runs that are noted at most: 512 KiB; honest agents report far fewer between two scans.
const MOST: usize = 1 << 16;

/// Runs of pages, in the order of the reports.
#[derive(Default)]
pub(crate) struct Emptied(Vec<Run>);

impl Emptied {
    pub(crate) fn add(&mut self, run: Run) {
        match self.0.last_mut().filter(|last| last.end() == run.page) {
            Some(last) => last.len += run.len,
            None => self.0.push(run),
        }
        // All of it counts then. The pages between are this client's own.
        if self.0.len() > MOST {
            let start = self.0.iter().map(|run| run.page).min().unwrap_or_default();
            let end = self.0.iter().map(|run| run.end()).max().unwrap_or_default();
            self.0 = vec![Run::between(start, end)];
        }
    }

    /// The pages noted until now: ascending, disjoint. None is noted afterwards.
    pub(crate) fn take(&mut self) -> Vec<Run> {
        let mut runs = std::mem::take(&mut self.0);
        runs.sort_unstable_by_key(|run| run.page);
        runs.dedup_by(|next, last| {
            let joins = next.page <= last.end();
            if joins {
                *last = Run::between(last.page, last.end().max(next.end()));
            }
            joins
        });
        runs
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.capacity() * size_of::<Run>()
    }
}

#[cfg(test)]
mod tests {
    use wire::PageNo;

    use super::*;

    #[test]
    fn too_many_runs_become_one() {
        let mut emptied = Emptied::default();
        (0..=MOST as u32).rev().for_each(|page| emptied.add(Run::new(PageNo(5 + 2 * page), 1)));
        assert!(emptied.bytes() < 1 << 20);
        assert_eq!(emptied.take(), [Run::new(PageNo(5), 2 * MOST as u32 + 1)]);
        assert_eq!(emptied.take(), []);
    }
}

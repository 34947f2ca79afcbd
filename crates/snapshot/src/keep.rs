//! Which snapshots a rule keeps: the last ones, and the last one of each hour, day, week and month.
//!
//! Each part of the rule looks at the snapshots of one guest from the newest to the oldest, and
//! keeps the newest of each of its periods, until it has as many as it says. A snapshot that any
//! part keeps stays. Periods without a snapshot do not count. Days begin by the host's clock.

use std::collections::BTreeSet;

use jiff::tz::TimeZone;
use jiff::{Timestamp, ZonedDateTime};

/// How many are kept; all 0: nothing is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// Of the newest.
    pub last: usize,
    /// Of hours.
    pub hourly: usize,
    /// Of days.
    pub daily: usize,
    /// Of weeks, which begin on Monday.
    pub weekly: usize,
    /// Of months.
    pub monthly: usize,
}

impl Rule {
    /// The positions of the snapshots that stay. `created`: seconds since 1970, in any order.
    pub fn keeps(&self, created: &[u64]) -> BTreeSet<usize> {
        self.keeps_in(created, &TimeZone::system())
    }

    fn keeps_in(&self, created: &[u64], zone: &TimeZone) -> BTreeSet<usize> {
        let mut order: Vec<usize> = (0..created.len()).collect();
        order.sort_by_key(|&at| std::cmp::Reverse((created[at], at)));
        let day = |time: &ZonedDateTime| time.date().to_string();
        let week = |time: &ZonedDateTime| {
            let week = time.date().iso_week_date();
            format!("{}-{}", week.year(), week.week())
        };
        type Period<'a> = &'a dyn Fn(&ZonedDateTime) -> String;
        let parts: [(usize, Period<'_>); 4] = [
            (self.hourly, &|time| format!("{} {} {}", time.date(), time.hour(), time.offset())),
            (self.daily, &day),
            (self.weekly, &week),
            (self.monthly, &|time| format!("{}-{}", time.year(), time.month())),
        ];
        let mut kept: BTreeSet<usize> = order.iter().take(self.last).copied().collect();
        for (count, period) in parts {
            let mut seen = BTreeSet::new();
            for &at in &order {
                let time = Timestamp::from_second(created[at] as i64)
                    .unwrap_or(Timestamp::MAX)
                    .to_zoned_datetime(zone.clone());
                let is_new = seen.len() < count && seen.insert(period(&time));
                if is_new {
                    kept.insert(at);
                }
            }
        }
        kept
    }
}

#[cfg(test)]
mod tests;

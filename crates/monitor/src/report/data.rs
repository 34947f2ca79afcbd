//! What the page shows, gathered from a recording.

use std::collections::HashMap;

use control::{Histogram, Status};

use crate::moment::{Depth, Moment, could_be_saved, used};
use crate::recording::{Damage, Error, Recording};
use crate::view::{self, Column, Row, Sort};

/// Moments that are looked at: more would not be seen.
const MOST_POINTS: usize = 480;

/// Guests whose profit over time is kept; that of others, who come later, is added up.
const MOST_GUESTS: usize = 4096;

/// By what guests are compared.
const PROFIT: &str = "general_profit";

/// Values over time; `None`: not known, as while no daemon answered.
pub(super) type Series = Vec<Option<f64>>;

/// What is plotted over time: bytes, and percent.
#[derive(Clone, Copy)]
pub(super) enum Plotted {
    Total,
    Used,
    Saved,
    CouldBeSaved,
    Headroom,
    Cpu,
    CpuLimit,
    MemoryPressure,
    CpuPressure,
}

/// Where the values of each are in a status, in the order of [`Plotted`].
const PLOTTED: [fn(&Status) -> Option<f64>; 9] = [
    |status| Some(status.metrics.memory_total_bytes? as f64),
    |status| Some(used(status)? as f64),
    |status| Some(status.metrics.general_profit as f64),
    |status| Some(could_be_saved(status) as f64),
    |status| Some(status.metrics.unmerge_headroom_bytes? as f64),
    |status| Some(status.governor.metrics.cpu_percent),
    |status| Some(status.governor.metrics.max_cpu_percent).filter(|limit| *limit > 0.0),
    |status| Some(100.0 * status.metrics.memory_pressure_ratio?),
    |status| Some(100.0 * status.metrics.cpu_pressure_ratio?),
];

#[derive(Default)]
pub(super) struct Data {
    /// Times of all points, in milliseconds since 1970.
    pub(super) times: Vec<i64>,
    pub(super) moments: usize,
    pub(super) damage: Vec<Damage>,
    series: [Series; PLOTTED.len()],
    /// Each guest's profit.
    pub(super) guests: Vec<(String, Series)>,
    /// That of the others together.
    pub(super) others: Vec<f64>,
    /// The last status.
    pub(super) last: Option<Status>,
    pub(super) rows: Vec<Row>,
    /// Stalls of writers within the recording.
    pub(super) stalls: Histogram,
    pub(super) depth: Option<Depth>,
}

impl std::ops::Index<Plotted> for Data {
    type Output = Series;

    fn index(&self, of: Plotted) -> &Series {
        &self.series[of as usize]
    }
}

impl Data {
    pub(super) fn gather(recording: &mut Recording) -> Result<Self, Error> {
        let count = recording.len();
        let stride = count.div_ceil(MOST_POINTS).max(1);
        let mut data = Data {
            moments: count,
            damage: recording.damage.clone(),
            depth: recording.depth(i64::MAX)?,
            ..Data::default()
        };
        let mut guests: HashMap<(i32, String), Series> = HashMap::new();
        let mut first = None;
        let mut before: Option<Moment> = None;
        // The last moment is always among them.
        for at in (0..count).filter(|at| (count - 1 - at).is_multiple_of(stride)) {
            let moment = recording.moment(at)?;
            data.add(&moment, &mut guests);
            if let Some(status) = &moment.status {
                data.rows = view::rows(&moment, before.as_ref());
                first.get_or_insert(status.writer_stall);
                data.last = Some(status.clone());
                before = Some(moment);
            }
        }
        data.guests = guests.into_iter().map(|((pid, name), series)| (format!("{name} ({pid})"), series)).collect();
        let mut names: Vec<&str> = data.guests.iter().map(|(name, _)| base(name)).collect();
        names.sort_unstable();
        if names.windows(2).all(|names| names[0] != names[1]) {
            data.guests.iter_mut().for_each(|(name, _)| *name = base(name).to_owned());
        }
        let most = |series: &Series| series.iter().flatten().fold(f64::MIN, |most, &value| most.max(value));
        data.guests.sort_by(|a, b| most(&b.1).total_cmp(&most(&a.1)).then_with(|| a.0.cmp(&b.0)));
        Sort::By(Column::of(PROFIT)).sort(&mut data.rows);
        if let (Some(first), Some(last)) = (first, &data.last) {
            data.stalls = since(&last.writer_stall, &first);
        }
        Ok(data)
    }

    fn add(&mut self, moment: &Moment, guests: &mut HashMap<(i32, String), Series>) {
        self.times.push(moment.time);
        let values = PLOTTED.map(|of| moment.status.as_ref().and_then(of));
        self.series.iter_mut().zip(values).for_each(|(series, value)| series.push(value));
        let points = self.times.len();
        self.others.push(0.0);
        for row in view::rows(moment, None) {
            let profit = row.value(PROFIT);
            let (key, is_full) = ((row.pid, row.name), guests.len() >= MOST_GUESTS);
            if is_full && !guests.contains_key(&key) {
                self.others[points - 1] += profit.unwrap_or(0.0).max(0.0);
                continue;
            }
            let series = guests.entry(key).or_default();
            series.resize(points - 1, None);
            series.push(profit);
        }
        guests.values_mut().for_each(|series| series.resize(points, None));
    }
}

/// A name without the process that was added to it.
fn base(name: &str) -> &str {
    name.rsplit_once(" (").map_or(name, |(name, _)| name)
}

/// What a histogram counted since an earlier one; all of it if it began anew.
fn since(now: &Histogram, then: &Histogram) -> Histogram {
    if now.count() < then.count() {
        return *now;
    }
    let mut out = *now;
    out.counts.iter_mut().zip(then.counts).for_each(|(now, then)| *now = now.saturating_sub(then));
    out.sum_seconds = (now.sum_seconds - then.sum_seconds).max(0.0);
    out
}

//! The measuring: each subject in turn, several rounds, medians.
//!
//! A thread looks at the clock every [`SLICE`] calls, and the median of these slices counts: what
//! other programs on the machine take is not in it. Before each row of calls other memory is read,
//! so that no subject finds the keys of the one before it in the caches. Of several threads,
//! only slices count during which all the others were running too.

use std::collections::BTreeMap;
use std::sync::Barrier;
use std::time::Instant;

use super::pages::{Key, Layout, Pages};
use super::subjects::{BATCH, Session, Subject};

/// Calls between two looks at the clock. A multiple of ten, for the mix, and of the batch.
const SLICE: usize = 320;

/// More than the caches hold.
const CACHES: usize = 64 << 20;

/// How much is measured.
#[derive(Clone, Copy)]
pub(super) struct Plan {
    pub(super) layout: Layout,
    pub(super) rounds: usize,
    /// Calls of each kind that a thread makes in a round.
    pub(super) calls: usize,
    pub(super) threads: usize,
}

/// A kind of call, and the names of its figures.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Metric {
    order: usize,
    pub(super) name: &'static str,
    /// Calls a second with all threads, over those with one.
    pub(super) scaling: &'static str,
    /// The rivals' metric that it is compared with.
    pub(super) rival: &'static str,
    /// The best ordered rival's time over ours.
    pub(super) to_ordered: &'static str,
    /// The hash map's time over ours.
    pub(super) to_hash_map: &'static str,
}

macro_rules! metric {
    ($order:literal, $name:literal, $rival:literal) => {
        Metric {
            order: $order,
            name: concat!($name, "_ns"),
            scaling: concat!($name, "_scaling"),
            rival: concat!($rival, "_ns"),
            to_ordered: concat!($name, "_to_best_ordered"),
            to_hash_map: concat!($name, "_to_hash_map"),
        }
    };
}

const INSERT: Metric = metric!(0, "insert", "insert");
const HIT: Metric = metric!(1, "query_hit", "query_hit");
const MISS: Metric = metric!(2, "query_miss", "query_miss");
const DELETE: Metric = metric!(3, "delete", "delete");
const MIX: Metric = metric!(4, "mix_80_10_10", "mix_80_10_10");
const INSERT_BATCHED: Metric = metric!(5, "insert_batched", "insert");
const HIT_BATCHED: Metric = metric!(6, "query_hit_batched", "query_hit");
const MISS_BATCHED: Metric = metric!(7, "query_miss_batched", "query_miss");

/// All of them.
pub(super) const METRICS: [Metric; 8] = [INSERT, HIT, MISS, DELETE, MIX, INSERT_BATCHED, HIT_BATCHED, MISS_BATCHED];

/// Nanoseconds per call and thread, all rounds: by metric, threads, subject.
pub(super) type Times = BTreeMap<(Metric, usize, usize), Vec<f64>>;

/// Stores the keys that are always there, with all threads.
pub(super) fn build(subject: &dyn Subject, pages: &Pages, plan: Plan) {
    let share = plan.layout.fixed.div_ceil(plan.threads);
    std::thread::scope(|scope| {
        for t in 0..plan.threads {
            scope.spawn(move || {
                let mut session = subject.session();
                for i in t * share..((t + 1) * share).min(plan.layout.fixed) {
                    assert!(session.insert(pages.key(i), i as u32), "{}: key {i} twice", subject.name());
                }
            });
        }
    });
}

/// Measures all subjects in turn, with one thread and with all.
pub(super) fn rounds(subjects: &[Box<dyn Subject + '_>], pages: &Pages, plan: Plan) -> Times {
    let mut times = Times::new();
    let caches: Vec<u64> = (0..CACHES as u64 / 8).collect();
    for round in 0..plan.rounds {
        for (number, subject) in subjects.iter().enumerate() {
            for threads in [1, plan.threads] {
                let mut note = |metric, ns| times.entry((metric, threads, number)).or_default().push(ns);
                one(&**subject, pages, plan, round, threads, &caches, &mut note);
                if plan.threads == 1 {
                    break;
                }
            }
        }
    }
    times
}

/// What a thread works on at a time.
#[derive(Clone)]
struct Share<'a> {
    pages: &'a Pages,
    layout: Layout,
    fresh: std::ops::Range<usize>,
    queries: std::ops::Range<usize>,
}

impl Share<'_> {
    /// The same in pieces.
    fn slices(&self) -> impl Iterator<Item = Self> {
        (0..self.fresh.len()).step_by(SLICE).map(|at| {
            let end = (at + SLICE).min(self.fresh.len());
            let part = |range: &std::ops::Range<usize>| range.start + at..range.start + end;
            Share { fresh: part(&self.fresh), queries: part(&self.queries), ..self.clone() }
        })
    }
    fn fresh(&self) -> impl Iterator<Item = (Key, u32)> {
        self.fresh.clone().map(|i| (self.pages.key(i), i as u32))
    }
    fn hits(&self) -> impl Iterator<Item = Key> {
        self.queries.clone().map(|i| self.pages.key(self.layout.hit(i)))
    }
    fn misses(&self) -> impl Iterator<Item = Key> {
        self.queries.clone().map(|i| self.pages.key(self.layout.miss(i)))
    }
}

/// Some calls of one thread, in nanoseconds of a common clock.
struct Slice {
    begin: f64,
    end: f64,
    calls: f64,
    /// Whether every call had the expected result.
    right: bool,
}

impl Slice {
    fn each(&self) -> f64 {
        (self.end - self.begin) / self.calls
    }
}

/// Nanoseconds per call: the median of the slices of every thread during which the others were
/// running; the mean over threads. NaN if there are none.
fn per_call(threads: &[&[Slice]]) -> f64 {
    let typical = |slices: &[Slice]| median(&slices.iter().map(Slice::each).collect::<Vec<_>>());
    // A thread that lost its processor made one long slice.
    let ran = |slices: &[Slice], part: &Slice| {
        let most = 1.5 * typical(slices);
        let common = |s: &Slice| (s.end.min(part.end) - s.begin.max(part.begin)).max(0.0);
        let ran: f64 = slices.iter().filter(|s| s.each() <= most).map(common).sum();
        ran >= 0.8 * (part.end - part.begin)
    };
    let others = |me: usize| (0..threads.len()).filter(move |&other| other != me);
    let times = threads.iter().enumerate().map(|(me, slices)| {
        let counted = slices.iter().filter(|part| others(me).all(|other| ran(threads[other], part)));
        median(&counted.map(Slice::each).collect::<Vec<_>>())
    });
    times.sum::<f64>() / threads.len() as f64
}

fn one(
    subject: &dyn Subject,
    pages: &Pages,
    plan: Plan,
    round: usize,
    threads: usize,
    caches: &[u64],
    note: &mut dyn FnMut(Metric, f64),
) {
    let (layout, calls) = (plan.layout, plan.calls);
    let shares: Vec<Share<'_>> = (0..threads)
        .map(|t| {
            let query = (round * plan.threads + t) * calls;
            let fresh = layout.fixed + t * calls;
            Share { pages, layout, fresh: fresh..fresh + calls, queries: query..query + calls }
        })
        .collect();
    let steps = steps(subject);
    let (line, clock) = (Barrier::new(threads + 1), Instant::now());
    let all: Vec<Vec<Vec<Slice>>> = std::thread::scope(|scope| {
        let workers: Vec<_> = shares
            .iter()
            .enumerate()
            .map(|(t, share)| {
                let (steps, line, clock) = (&steps, &line, &clock);
                // As long as a round lasts, since a program's threads mostly live long.
                scope.spawn(move || {
                    stay_on(t);
                    let mut session = subject.session();
                    let mut step = |calls: &Calls| {
                        line.wait();
                        let time = |part: Share<'_>| {
                            let begin = clock.elapsed().as_nanos() as f64;
                            let done = calls(&mut *session, &part);
                            let right = done == part.fresh.len();
                            Slice { begin, end: clock.elapsed().as_nanos() as f64, calls: done as f64, right }
                        };
                        let slices = share.slices().map(time).collect();
                        line.wait();
                        slices
                    };
                    steps.iter().map(|(_, calls)| step(calls)).collect::<Vec<Vec<Slice>>>()
                })
            })
            .collect();
        for _ in &steps {
            std::hint::black_box(caches.iter().fold(0, |sum, &word| sum ^ word));
            line.wait();
            line.wait();
        }
        workers.into_iter().map(|w| w.join().unwrap_or_else(|e| std::panic::resume_unwind(e))).collect()
    });
    for (number, (metric, _)) in steps.iter().enumerate() {
        let slices: Vec<&[Slice]> = all.iter().map(|thread| &thread[number][..]).collect();
        assert!(slices.iter().all(|thread| thread.iter().all(|slice| slice.right)), "{}", subject.name());
        if let Some(metric) = metric {
            note(*metric, per_call(&slices));
        }
    }
}

/// Calls for a part of a share; returns how many had the expected result.
type Calls = dyn Fn(&mut dyn Session, &Share<'_>) -> usize + Sync;

/// The operations of a round, and their metrics.
fn steps(subject: &dyn Subject) -> Vec<(Option<Metric>, Box<Calls>)> {
    let hits: Box<Calls> = Box::new(|s, share| share.hits().filter(|&key| s.query(key).is_some()).count());
    if subject.only_hits() {
        return vec![(Some(HIT), hits)];
    }
    let remove =
        |s: &mut dyn Session, share: &Share<'_>| share.fresh().filter(|&(key, handle)| s.remove(key, handle)).count();
    let mut steps: Vec<(Option<Metric>, Box<Calls>)> = vec![
        (Some(INSERT), Box::new(|s, share| share.fresh().filter(|&(key, handle)| s.insert(key, handle)).count())),
        (Some(HIT), hits),
        (Some(MISS), Box::new(|s, share| share.misses().filter(|&key| s.query(key).is_none()).count())),
        (Some(DELETE), Box::new(remove)),
        (Some(MIX), Box::new(mixed)),
    ];
    if subject.session().batched() {
        fn batches(keys: impl Iterator<Item = Key>, s: &mut dyn Session) -> usize {
            keys.collect::<Vec<_>>().chunks(BATCH).map(|keys| s.query_many(keys)).sum()
        }
        steps.push((
            Some(INSERT_BATCHED),
            Box::new(|s, share| {
                let items: Vec<(Key, u32)> = share.fresh().collect();
                items.chunks(BATCH).map(|items| s.insert_many(items)).sum()
            }),
        ));
        steps.push((Some(HIT_BATCHED), Box::new(|s, share| batches(share.hits(), s))));
        let misses = |s: &mut dyn Session, share: &Share<'_>| share.queries.len() - batches(share.misses(), s);
        steps.push((Some(MISS_BATCHED), Box::new(misses)));
        steps.push((None, Box::new(remove)));
    }
    steps
}

/// 80 % queries, 10 % insertions, 10 % removals of inserted keys.
fn mixed(s: &mut dyn Session, share: &Share<'_>) -> usize {
    let mut fresh = share.fresh();
    let mut inserted = None;
    let step = |(i, key): (usize, Key)| match i % 10 {
        2 => {
            inserted = fresh.next();
            inserted.is_some_and(|(key, handle)| s.insert(key, handle))
        }
        7 => inserted.take().is_some_and(|(key, handle)| s.remove(key, handle)),
        _ => s.query(key).is_some(),
    };
    share.hits().enumerate().map(step).filter(|&done| done).count()
}

/// Keeps this thread on one processor, the same for the same share of the keys, so that what it
/// wrote before is in its own cache. Where that is not allowed, times scatter a little more.
fn stay_on(processor: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(processor);
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

/// The median of the numbers among them; NaN if there are none.
pub(super) fn median(values: &[f64]) -> f64 {
    let mut values: Vec<f64> = values.iter().copied().filter(|value| !value.is_nan()).collect();
    values.sort_by(f64::total_cmp);
    if values.is_empty() {
        return f64::NAN;
    }
    (values[(values.len() - 1) / 2] + values[values.len() / 2]) / 2.0
}

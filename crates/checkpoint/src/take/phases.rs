//! How the time of a checkpoint is divided.

use std::time::Instant;

/// The seconds of each phase.
#[derive(Debug)]
pub struct Phases {
    since: Instant,
    all: Vec<(&'static str, f64)>,
}

impl Phases {
    /// The first phase starts now.
    #[expect(clippy::new_without_default, reason = "it notes the time")]
    pub fn new() -> Self {
        Self { since: Instant::now(), all: Vec::new() }
    }

    /// Ends a phase; the next one starts. A phase that ends several times counts all of its
    /// seconds.
    pub fn end(&mut self, name: &'static str) {
        let now = Instant::now();
        let seconds = (now - self.since).as_secs_f64();
        match self.all.iter_mut().find(|(known, _)| *known == name) {
            Some((_, sum)) => *sum += seconds,
            None => self.all.push((name, seconds)),
        }
        self.since = now;
    }

    /// Name and seconds of each phase, in the order of their first ends.
    pub fn seconds(&self) -> &[(&'static str, f64)] {
        &self.all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_that_comes_again_is_one() {
        let mut phases = Phases::new();
        ["a", "b", "a"].into_iter().for_each(|name| phases.end(name));
        let names: Vec<_> = phases.seconds().iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["a", "b"]);
        assert!(phases.seconds().iter().all(|(_, seconds)| *seconds >= 0.0));
    }
}

//! Waiting that a signal ends: SIGINT and SIGTERM become an error, so that every value on the stack
//! is dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use signal_hook::consts::{SIGINT, SIGTERM};

/// Time between two checks for a signal.
const STEP: Duration = Duration::from_millis(100);

/// Notices SIGINT and SIGTERM.
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Catches the signals from here on.
    pub fn watch() -> Result<Self> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            signal_hook::flag::register(signal, flag.clone()).context("cannot catch signals")?;
        }
        Ok(Self(flag))
    }

    /// Waits for this time.
    ///
    /// # Errors
    ///
    /// If a signal comes.
    pub fn sleep(&self, time: Duration) -> Result<()> {
        let end = Instant::now() + time;
        loop {
            ensure!(!self.0.load(Ordering::Relaxed), "interrupted");
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(STEP));
        }
    }

    /// Calls `ask` twice a second until it returns an answer. `what`: the answer's meaning, for the
    /// error.
    ///
    /// # Errors
    ///
    /// If a signal comes, `ask` fails, or there is no answer within `limit`.
    pub fn until<T>(&self, what: &str, limit: Duration, ask: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        self.until_each(Duration::from_millis(500), what, limit, ask)
    }

    /// Like [`Interrupt::until`], with another interval.
    ///
    /// # Errors
    ///
    /// If a signal comes, `ask` fails, or there is no answer within `limit`.
    pub fn until_each<T>(
        &self,
        step: Duration,
        what: &str,
        limit: Duration,
        mut ask: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        let end = Instant::now() + limit;
        loop {
            if let Some(answer) = ask()? {
                return Ok(answer);
            }
            if Instant::now() >= end {
                bail!("not within {limit:?}: {what}");
            }
            self.sleep(step)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_ends_waiting() {
        let interrupt = Interrupt(Arc::new(AtomicBool::new(false)));
        interrupt.sleep(Duration::from_millis(1)).unwrap();
        let late = interrupt.until("never", Duration::ZERO, || Ok(None::<()>)).unwrap_err();
        assert!(late.to_string().contains("never"));
        interrupt.0.store(true, Ordering::Relaxed);
        let start = Instant::now();
        assert!(interrupt.sleep(Duration::from_secs(60)).is_err());
        assert!(start.elapsed() < Duration::from_secs(30));
    }
}

//! What is not here while others have the pool, and who they are.

use std::error::Error;
use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use mpool::Pool;

/// Those who wait for a pool in which a checkpoint is stored.
pub trait Others {
    /// Whether somebody waits for the pool, which is open, and is to have it.
    fn wait(&self, pool: &Pool) -> bool;

    /// Opens the pool, which was closed for them, when they are done.
    ///
    /// # Errors
    /// If it cannot be opened.
    fn again(&self) -> Result<Pool, Box<dyn Error + Send + Sync>>;

    /// The least time between two turns of theirs.
    fn least(&self) -> Duration;
}

/// How a writer takes turns.
pub(super) struct Turns<'a> {
    pub(super) others: &'a dyn Others,
    /// Not before.
    pub(super) next: Instant,
}

/// What is here but while others have the pool, and behind a failure to open it again: then nothing
/// is stored any more.
pub(super) struct Here<T>(pub(super) Option<T>);

impl<T> Here<T> {
    pub(super) fn new(here: T) -> Self {
        Self(Some(here))
    }

    pub(super) fn if_here(&mut self) -> Option<&mut T> {
        self.0.as_mut()
    }

    pub(super) fn into_inner(self) -> T {
        let Some(here) = self.0 else { unreachable!("others have the pool") };
        here
    }
}

impl<T> Deref for Here<T> {
    type Target = T;

    fn deref(&self) -> &T {
        let Some(here) = &self.0 else { unreachable!("others have the pool") };
        here
    }
}

impl<T> DerefMut for Here<T> {
    fn deref_mut(&mut self) -> &mut T {
        let Some(here) = &mut self.0 else { unreachable!("others have the pool") };
        here
    }
}

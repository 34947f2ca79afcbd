//! Digests that a client's agent computes of its own pages.
//!
//! To read a page from outside, the kernel walks page tables and copies it; its own process reads
//! it in place. So where most contents are new, a worker asks the agent for the digests of the
//! next pages, some chunks ahead, and takes the answers in order. Elsewhere bytes are needed for
//! frames, or predictions overtake the answers.
//!
//! *An agent can be slow, stopped or a liar.* A worker waits for [`PATIENCE`] at most, then reads
//! from outside, and asks nothing for [`PAUSE`]. The daemon hashes the bytes of a frame itself,
//! and the window compares bytes: a wrong digest costs a missed merge of the liar's own page.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use kmem::seqpacket::Conn;
use wire::{Digest, Digests, PageNo, RegionId, Run, ToAgent};

use crate::sync::{Condvar, Mutex};

/// How long an answer may take. Then the worker reads the pages from outside.
const PATIENCE: Duration = Duration::from_millis(20);
/// How long nothing is asked after an answer that took longer.
const PAUSE: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(crate) struct Answers {
    state: Mutex<State>,
    news: Condvar,
}

#[derive(Default)]
struct State {
    next: u64,
    asked: VecDeque<u64>,
    answers: VecDeque<Digests>,
    resume: Option<Instant>,
    closed: bool,
}

impl Answers {
    /// Asks for the digests of at most [`wire::MAX_DIGESTS`] ascending pages. `None`: not now.
    pub(crate) fn ask(&self, conn: &Conn, region: RegionId, seed: u64, pages: &[PageNo]) -> Option<u64> {
        let mut state = self.state.lock();
        if state.closed || state.resume.is_some_and(|resume| Instant::now() < resume) {
            return None;
        }
        let request = state.next;
        let message = ToAgent::Digest(Digest { request, region, seed, runs: runs(pages) });
        conn.send(&wire::encode(&message), &[]).ok()?;
        state.next += 1;
        state.asked.push_back(request);
        Some(request)
    }

    /// Waits for the digests of a request, as far as pages could be read. `None`: not in time.
    pub(crate) fn wait(&self, request: u64) -> Option<Vec<u64>> {
        let deadline = Instant::now() + PATIENCE;
        let mut state = self.state.lock();
        loop {
            if let Some(at) = state.answers.iter().position(|answer| answer.request == request) {
                state.asked.retain(|&asked| asked != request);
                return state.answers.remove(at).map(|answer| answer.digests);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if state.closed || left.is_zero() {
                state.resume = Some(Instant::now() + PAUSE);
                return None;
            }
            self.news.wait_for(&mut state, left);
        }
    }

    /// An answer has come. It is dropped if its request was forgotten. Returns whether it is kept.
    pub(crate) fn put(&self, answer: Digests) -> bool {
        let mut state = self.state.lock();
        let wanted = state.asked.contains(&answer.request);
        let kept = wanted && state.answers.iter().all(|earlier| earlier.request != answer.request);
        if kept {
            state.answers.push_back(answer);
            self.news.notify_all();
        }
        kept
    }

    pub(crate) fn forget(&self) {
        let mut state = self.state.lock();
        state.asked.clear();
        state.answers.clear();
    }

    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.news.notify_all();
    }
}

fn runs(pages: &[PageNo]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for &page in pages {
        match runs.last_mut() {
            Some(last) if last.end() == page => last.len += 1,
            _ => runs.push(Run::one(page)),
        }
    }
    runs
}

#[cfg(test)]
mod tests;

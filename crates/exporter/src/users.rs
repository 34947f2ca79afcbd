//! Passwords of basic authentication (RFC 7617), as bcrypt's hashes.
//!
//! A check is slow by design. So
//!
//! * one is made at a time, and after a wrong password the next waits three times as long: guessing
//!   takes at most a fourth of a CPU;
//! * [`WAITING`] wait for it at most; more are told to come again;
//! * a right password is known from then on by a digest with a key of this process. Scrapers that
//!   are known wait for nobody.
//!
//! A name that nobody has is checked like any other, against the slowest hash, and a wrong answer
//! never comes before that would: how long it takes says nothing of who exists.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bcrypt::HashParts;
use hyper::header::HeaderValue;
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::{Digest, Sha256};
use tokio::sync::{Mutex, Semaphore};
use tokio::task::spawn_blocking;

/// Checks that may wait for others.
const WAITING: usize = 8;
/// A wrong password takes as many times the time of a check.
const REST: u32 = 4;
/// The time of a check at most, as far as others wait for it: a busy host makes one slow.
const LONGEST: Duration = Duration::from_secs(1);
/// Digests that are kept; there is one for each user, and more only after passwords change.
const MOST_KNOWN: usize = 1024;
/// bcrypt's cost at most: a check takes about a second.
const MOST_COST: u32 = 14;

/// What came of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Right,
    Wrong,
    /// Too many wait already.
    Busy,
}

/// Users and the hashes of their passwords.
#[derive(Debug, Default)]
pub(crate) struct Users {
    /// None: no password is asked for.
    pub(crate) hashes: BTreeMap<String, String>,
    /// Who has the hash with the highest cost.
    slowest: String,
}

impl Users {
    /// Takes users whose hashes are bcrypt's, or says of which one it is not.
    pub(crate) fn new(hashes: BTreeMap<String, String>) -> Result<Self, String> {
        let mut slowest = (0, String::new());
        for (user, hash) in &hashes {
            match hash.parse::<HashParts>().map(|parts| parts.get_cost()) {
                Ok(cost) if cost <= MOST_COST => slowest = slowest.max((cost, user.clone())),
                Ok(cost) => {
                    return Err(format!(
                        "{user} has a hash of cost {cost}, and at most {MOST_COST} is taken: `htpasswd -nBC 10 {user}`"
                    ));
                }
                Err(_) => return Err(format!("{user} has no hash of bcrypt: `htpasswd -nBC 10 {user}` makes one")),
            }
        }
        Ok(Self { hashes, slowest: slowest.1 })
    }
}

/// Checks of passwords.
#[derive(Debug)]
pub(crate) struct Checks {
    /// Of the digests; nobody else knows it.
    key: [u8; 32],
    known: Arc<parking_lot::Mutex<HashSet<[u8; 32]>>>,
    waiting: Arc<Semaphore>,
    /// The time that the slowest has taken.
    check: Arc<Mutex<Duration>>,
}

impl Checks {
    pub(crate) fn new() -> io::Result<Self> {
        let mut key = [0; 32];
        getrandom(&mut key, GetRandomFlags::empty())?;
        Ok(Self { key, known: Arc::default(), waiting: Arc::new(Semaphore::new(WAITING)), check: Arc::default() })
    }

    /// Whether a request is of one of these users. `authorization`: its header field.
    pub(crate) async fn verdict(&self, users: &Users, authorization: Option<&HeaderValue>) -> Verdict {
        let Some((user, password)) = authorization.and_then(credentials) else { return Verdict::Wrong };
        let found = users.hashes.get(&user);
        let Some(hash) = found.or_else(|| users.hashes.get(&users.slowest)).cloned() else { return Verdict::Wrong };
        let is_user = found.is_some();
        let digest = Sha256::new()
            .chain_update(self.key)
            .chain_update([user.as_bytes(), hash.as_bytes(), &password].join(&0))
            .finalize()
            .into();
        if is_user && self.known.lock().contains(&digest) {
            return Verdict::Right;
        }
        let Ok(place) = self.waiting.clone().try_acquire_owned() else { return Verdict::Busy };
        let (known, mut slowest) = (self.known.clone(), self.check.clone().lock_owned().await);
        // Place and lock go with the thread: who goes away meanwhile makes room for nobody.
        let work = spawn_blocking(move || {
            let begin = Instant::now();
            let is_right = bcrypt::verify(&password, &hash).unwrap_or(false) && is_user;
            *slowest = begin.elapsed().max(*slowest).min(LONGEST);
            if is_right {
                let mut known = known.lock();
                if known.len() >= MOST_KNOWN {
                    known.clear();
                }
                known.insert(digest);
            } else {
                sleep((*slowest * REST).saturating_sub(begin.elapsed()));
            }
            drop((place, slowest));
            if is_right { Verdict::Right } else { Verdict::Wrong }
        });
        work.await.unwrap_or(Verdict::Wrong)
    }
}

/// User and password of a header field.
fn credentials(authorization: &HeaderValue) -> Option<(String, Vec<u8>)> {
    let (scheme, encoded) = authorization.to_str().ok()?.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let mut user = BASE64_STANDARD.decode(encoded.trim()).ok()?;
    let colon = user.iter().position(|&byte| byte == b':')?;
    let password = user.split_off(colon + 1);
    user.pop();
    Some((String::from_utf8(user).ok()?, password))
}

#[cfg(test)]
mod tests;

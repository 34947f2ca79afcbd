//! A user that uses its subordinate uids.

use e2e::user::FIRST_SUBORDINATE;

use super::processes::{become_user, fork, reap_all};
use super::{Attack, Host, Random, connections, control};

/// The name of the attack: it is root's process at first, which alone can become all of them.
pub(super) const NAME: &str = "subordinate-uids";
/// Uids at a time.
const UIDS: u32 = 24;

/// Silent connections, and refused ones, of many uids at once.
pub(super) fn subordinates(host: &Host, mut random: Random) {
    let attacks: [Attack; 4] = [control::silent, connections::silent, connections::nonsense, connections::domains];
    for (uid, attack) in (FIRST_SUBORDINATE..FIRST_SUBORDINATE + UIDS).zip(attacks.into_iter().cycle()) {
        let random = Random::new(random.below(u64::MAX));
        fork(|| {
            become_user(uid);
            attack(host, random);
        });
    }
    reap_all();
}

use super::super::free::{Fill, SLACK};
use super::*;
use crate::config::Config;
use crate::core::content::index::{Place, Seen};
use crate::store::domain::DomainKey;

const PERIOD: Duration = Duration::from_secs(1);

fn bytes(n: u32) -> [u8; PAGE_SIZE] {
    let mut bytes = [1; PAGE_SIZE];
    bytes[..4].copy_from_slice(&n.to_le_bytes());
    bytes
}

/// A frame of a test, with what the index knows of it.
struct Held {
    n: u32,
    frame: Frame,
    handle: u32,
}

/// A domain with enough frames for compaction, of which one in `keep` has a user.
fn fragmented(keep: u32) -> (Domain, Vec<Held>) {
    let domain = Domain::new(DomainKey::named(None, "test"), &Config::default());
    let mut cursor = Cursor::new(&domain.store, None);
    let mut held = Vec::new();
    for n in 0..SLACK as u32 + 8192 {
        let frame = cursor.put(&bytes(n), 1).unwrap();
        let Some(Seen::First(handle)) = domain.index.see(n.into(), Place::Frame(frame)) else { panic!("known") };
        domain.store.set_handle(frame, handle);
        held.push(Held { n, frame, handle });
    }
    drop(cursor);
    let (live, dead): (Vec<Held>, Vec<Held>) = held.into_iter().partition(|held| held.n % keep == 0);
    dead.iter().for_each(|held| domain.release(held.frame));
    domain.tidy(Instant::now() + Duration::from_secs(100), PERIOD);
    (domain, live)
}

#[test]
fn a_quarter_of_the_live_frames_and_the_slack_may_be_dead() {
    assert_eq!(Fill { live: 4000, dead: SLACK + 1000 }.excess(), 0);
    assert_eq!(Fill { live: 4000, dead: SLACK + 1001 }.excess(), 1);
}

#[test]
fn frames_of_the_emptiest_pieces_move_until_the_bound_is_kept() {
    let (domain, mut live) = fragmented(64);
    let mut now = Instant::now();
    assert!(domain.store.fill().excess() > 0);
    for _ in 0..6 {
        domain.compact(now).unwrap();
        for held in &mut live {
            let Some(new) = domain.compaction.with_moves(|moves| moves.of(held.frame)) else { continue };
            let mut copy = bytes(0);
            assert!(domain.store.read(new, &mut copy) && copy == bytes(held.n), "{new:?}");
            assert_eq!(domain.index.place(held.handle, held.n.into()), Some(Place::Frame(new)));
            // As a client's pass and its agent's report do.
            assert!(domain.store.try_ref(new));
            domain.release(held.frame);
            held.frame = new;
        }
        now += Duration::from_secs(100);
        domain.tidy(now, PERIOD);
    }
    let fill = domain.store.fill();
    assert_eq!((fill.excess(), fill.live), (0, live.len() as u64), "{fill:?}");
    assert!(!domain.compaction.is_active() && domain.compaction.copied.load(Relaxed) > 0);
    assert!(live.iter().all(|held| domain.store.users(held.frame) == 1));
    if domain.store.segment(live[0].frame).unwrap().can_punch() {
        let usage = domain.store.usage();
        let most = (fill.live + fill.live / 4 + SLACK + 2 * 512) * PAGE_SIZE as u64;
        assert!(usage.resident_bytes <= most, "{usage:?}");
    }
    // The last users leave, and nothing is left.
    live.iter().for_each(|held| domain.release(held.frame));
    domain.tidy(now + Duration::from_secs(100), PERIOD);
    assert_eq!((domain.store.usage().segments, domain.index.len()), (0, 0));
}

#[test]
fn an_evacuation_that_nobody_follows_ends_and_is_not_tried_again_at_once() {
    let (domain, live) = fragmented(64);
    let now = Instant::now();
    domain.compact(now).unwrap();
    let copied = domain.compaction.copied.load(Relaxed);
    assert!(copied > 0 && domain.compaction.is_active());
    let later = now + PERIOD * (LONGEST + 1);
    domain.tidy(later, PERIOD);
    domain.compact(later).unwrap();
    assert!(!domain.compaction.is_active());
    assert!(live.iter().all(|held| domain.store.users(held.frame) == 1), "each is where it was");
    assert_eq!(domain.store.usage().frames, live.len() as u64, "the copies are gone");
    assert_eq!(domain.compaction.copied.load(Relaxed), copied, "the same pieces are left alone");
}

#[test]
fn pieces_with_a_pinned_frame_are_not_evacuated() {
    let (domain, live) = fragmented(512);
    live.iter().for_each(|held| domain.store.pin(held.frame));
    domain.compact(Instant::now()).unwrap();
    assert!(!domain.compaction.is_active());
    assert_eq!(domain.compaction.copied.load(Relaxed), 0);
}

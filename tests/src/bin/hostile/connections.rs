//! Connections: silent ones, short ones, talkative ones.

use std::time::Duration;

use wire::{Digests, ToDaemon};

use super::memory::{PAGE, map};
use super::peer::Peer;
use super::processes::{fork, wait_for};
use super::{Host, Random};

/// Descriptors that an ordinary process may open.
const MANY: usize = 900;

/// As many connections as can be had, which never say anything; others take the place of those that
/// the daemon ends.
pub(super) fn silent(host: &Host, _: Random) {
    let mut kept: Vec<Peer> = Vec::new();
    loop {
        while kept.len() < MANY {
            host.step();
            kept.push(Peer::connect(host));
        }
        kept.retain(Peer::is_kept);
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Processes that connect, introduce themselves or not, and end.
pub(super) fn die(host: &Host, mut random: Random) {
    loop {
        let say = random.below(3);
        let child = fork(|| match say {
            0 => drop(Peer::connect(host)),
            1 => drop(Peer::hello(host)),
            _ => drop(Peer::client(host, &[(map(16 * PAGE), 16 * PAGE)])),
        });
        wait_for(child);
        host.step();
    }
}

/// Packets that are no messages, and messages in the wrong order.
pub(super) fn nonsense(host: &Host, mut random: Random) {
    let mut bytes = vec![0; wire::MAX_MESSAGE + 100];
    loop {
        bytes.fill_with(|| random.below(256) as u8);
        let len = 1 + random.below(bytes.len() as u64) as usize;
        match random.below(5) {
            0 => drop(Peer::connect(host).send_bytes(&bytes[..len], &[])),
            1 => drop(Peer::hello(host).send_bytes(&bytes[..len], &[])),
            2 => drop(Peer::connect(host).send(&ToDaemon::Ready)),
            3 => {
                let hello = ToDaemon::Hello { version: 9999, domain: None, name: "old".into(), forks: 0 };
                let half = wire::encode(&hello);
                drop(Peer::connect(host).send_bytes(&half[..half.len() / 2], &[]));
                drop(Peer::connect(host).send(&hello));
            }
            _ => {
                if let Ok(peer) = Peer::client(host, &[]) {
                    let _ = peer.send_bytes(&bytes[..len], &[]);
                }
            }
        }
        host.step();
    }
}

/// Messages that are allowed, as fast as the socket takes them.
pub(super) fn packets(host: &Host, _: Random) {
    let start = map(64 * PAGE);
    loop {
        let Ok(peer) = Peer::client(host, &[(start, 64 * PAGE)]) else { continue };
        let digests = Digests { request: u64::MAX, digests: vec![7; wire::MAX_DIGESTS as usize], cpu_ns: 0 };
        let long = wire::encode(&ToDaemon::Digests(digests));
        let short = wire::encode(&ToDaemon::Ready);
        while peer.send_bytes(&long, &[]).is_ok() && peer.send_bytes(&short, &[]).is_ok() && peer.is_kept() {
            host.step();
        }
    }
}

/// Clients of domains with ever new names.
pub(super) fn domains(host: &Host, mut random: Random) {
    loop {
        let name = format!("domain-{}", random.below(u64::MAX));
        let peer = Peer::hello_as(host, Some(name));
        let _ = peer.send(&ToDaemon::Ready);
        host.step();
    }
}

/// Names of domains and programs as long as a packet can be.
pub(super) fn huge_names(host: &Host, mut random: Random) {
    loop {
        let long = char::from(b'a' + random.below(26) as u8).to_string().repeat(31_000);
        let hello = ToDaemon::Hello { version: wire::VERSION, domain: Some(long.clone()), name: long, forks: 0 };
        let peer = Peer::connect(host);
        let _ = peer.send(&hello);
        let _ = peer.send(&ToDaemon::Ready);
        host.step();
    }
}

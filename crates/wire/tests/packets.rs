//! The bytes of every message. Builds of other versions read and write them, so a line here never
//! changes; a new message gets a line of its own.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fmt::Debug;

use serde::Serialize;
use wire::recycle::{Extent, Pool, Recycled, Refusal, Sweep};
use wire::{
    Detaching, Digest, Digests, Merge, MergeRun, OLDEST, Outcome, PageNo, RegionId, Report, Run, RunOutcome, Slot,
    Target, ToAgent, ToDaemon, VERSION,
};

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn run(page: u32, len: u32) -> Run {
    Run::new(PageNo(page), len)
}

/// Whether all messages have these bytes, one of each number in their order.
fn check<M: Serialize + Debug + PartialEq>(
    packets: Vec<(M, &str)>,
    number: impl Fn(&M) -> usize,
    decode: impl Fn(&[u8]) -> M,
) {
    let mut numbers: Vec<usize> = Vec::new();
    for (message, bytes) in packets {
        assert_eq!(hex(&wire::encode(&message)), bytes, "{message:?}");
        assert_eq!(decode(&wire::encode(&message)), message);
        numbers.push(number(&message));
    }
    numbers.dedup();
    assert!(numbers.iter().copied().eq(0..numbers.len()), "each message has its line: {numbers:?}");
}

/// The number of a message in its packet. A new message does not compile until it is here.
fn number_to_daemon(message: &ToDaemon) -> usize {
    match message {
        ToDaemon::Hello { .. } => 0,
        ToDaemon::RegionAdded { .. } => 1,
        ToDaemon::SegmentHeld { .. } => 2,
        ToDaemon::Ready => 3,
        ToDaemon::RegionShrunk { .. } => 4,
        ToDaemon::Discarded { .. } => 5,
        ToDaemon::Report(_) => 6,
        ToDaemon::Digests(_) => 7,
        ToDaemon::Retained { .. } => 8,
        ToDaemon::SegmentLeftOut { .. } => 9,
        ToDaemon::Detaching(_) => 10,
        ToDaemon::DetachFailed { .. } => 11,
        ToDaemon::Detached => 12,
        ToDaemon::Pool(_) => 13,
        ToDaemon::Recycled(_) => 14,
        ToDaemon::Swept(_) => 15,
        ToDaemon::Mapped { .. } => 16,
        ToDaemon::Library { .. } => 17,
        ToDaemon::PoolRenewed { .. } => 18,
        ToDaemon::CpuTime { .. } => 19,
        ToDaemon::Zeros(_) => 20,
    }
}

/// The same of a message to an agent.
fn number_to_agent(message: &ToAgent) -> usize {
    match message {
        ToAgent::Welcome { .. } => 0,
        ToAgent::Refused { .. } => 1,
        ToAgent::Segment { .. } => 2,
        ToAgent::DropSegment { .. } => 3,
        ToAgent::Merge(_) => 4,
        ToAgent::Digest(_) => 5,
        ToAgent::Detach => 6,
        ToAgent::Ram(_) => 7,
        ToAgent::Recycle { .. } => 8,
        ToAgent::RenewPool => 9,
    }
}

#[test]
fn messages_to_the_daemon_keep_their_bytes() {
    let region = RegionId(300);
    let outcomes = {
        use Outcome::*;
        let all = [Merged, Differs, Gone, Pinned, Locked, NoMaps, Failed, Unreadable];
        all.iter().zip(1..).map(|(&outcome, page)| RunOutcome { run: run(page, 1), outcome }).collect()
    };
    let report = Report { batch: 7, last: true, outcomes, cpu_ns: 1 << 32, window_ns: 200, maps: 70_000 };
    let sweep = |refused| {
        let (sweep_ns, cpu_ns) = (1 << 20, 1 << 21);
        let sweep = Sweep { pages: 1, runs: 2, lost: 3, longest_ns: 4, sweep_ns, cpu_ns, more: false, refused };
        ToDaemon::Swept(sweep)
    };
    let packets = vec![
        (ToDaemon::Hello { version: 5, domain: None, name: "a".into(), forks: 3 }, "000500016103"),
        (
            ToDaemon::Hello { version: 300, domain: Some("web".into()), name: "qemu".into(), forks: 0 },
            "00ac0201037765620471656d7500",
        ),
        (ToDaemon::RegionAdded { region, start: 1 << 30, len: 8192 }, "01ac0280808080048040"),
        (ToDaemon::SegmentHeld { segment: 1 << 40 }, "02808080808020"),
        (ToDaemon::Ready, "03"),
        (ToDaemon::RegionShrunk { region, run: run(5, 1000) }, "04ac0205e807"),
        (ToDaemon::Discarded { region, run: run(1 << 20, 1) }, "05ac0280804001"),
        (ToDaemon::Report(report), "060701080101000201010301020401030501040601050701060801078080808010c801f0a204"),
        (
            ToDaemon::Digests(Digests { request: 9, digests: vec![1, u64::MAX], cpu_ns: 128 }),
            "07090201ffffffffffffffffff018001",
        ),
        (ToDaemon::Retained { region, run: run(1, 2) }, "08ac020102"),
        (ToDaemon::SegmentLeftOut { segment: 77, most: 3 }, "094d03"),
        (ToDaemon::Detaching(Detaching { cooling: 4, wait_ms: 5000 }), "0a048827"),
        (ToDaemon::DetachFailed { errno: 12 }, "0b18"),
        (ToDaemon::Detached, "0c"),
        (
            ToDaemon::Pool(Pool { extents: vec![Extent { frame: 256, region, run: run(0, 9) }], period_ms: 500 }),
            "0d018002ac020009f403",
        ),
        (ToDaemon::Recycled(Recycled { region, runs: vec![run(1, 2), run(8, 1)] }), "0eac020201020801"),
        (sweep(None), "0f01020304808040808080010000"),
        (sweep(Some(Refusal::Pinned)), "0f0102030480804080808001000100"),
        (sweep(Some(Refusal::Locked)), "0f0102030480804080808001000101"),
        (sweep(Some(Refusal::Kernel)), "0f0102030480804080808001000102"),
        (sweep(Some(Refusal::Header)), "0f0102030480804080808001000103"),
        (sweep(Some(Refusal::NoPool)), "0f0102030480804080808001000104"),
        (ToDaemon::Mapped { address: 0x7fff_0000_1000 }, "1080a08080f0ff1f"),
        (ToDaemon::Library { version: "0.1.0".into() }, "1105302e312e30"),
        (ToDaemon::PoolRenewed { descriptor: 1000 }, "12e807"),
        (ToDaemon::CpuTime { cpu_ns: 1 << 32 }, "138080808010"),
        (ToDaemon::Zeros(Recycled { region, runs: vec![run(1, 2), run(8, 1)] }), "14ac020201020801"),
    ];
    check(packets, number_to_daemon, |packet| wire::decode_to_daemon(packet, VERSION).unwrap());
}

#[test]
fn messages_to_the_agent_keep_their_bytes() {
    let region = RegionId(300);
    let runs = vec![
        MergeRun { run: run(0, 4), target: Target::Frames { segment: 1 << 33, slot: Slot(200) } },
        MergeRun { run: run(9, 1), target: Target::Zero },
    ];
    let packets = vec![
        (ToAgent::Welcome { version: 5, direct_io_ms: 30_000 }, "0005b0ea01"),
        (ToAgent::Refused { reason: "no".into() }, "01026e6f"),
        (ToAgent::Segment { segment: 1 << 40 }, "02808080808020"),
        (ToAgent::DropSegment { segment: 1 }, "0301"),
        (ToAgent::Merge(Merge { batch: 7, region, runs, calm: true }), "0407ac02020004008080808020c80109010101"),
        (
            ToAgent::Digest(Digest { request: 1, region, seed: u64::MAX, runs: vec![run(0, 4), run(6, 1)] }),
            "0501ac02ffffffffffffffffff010200040601",
        ),
        (ToAgent::Detach, "06"),
        (ToAgent::Ram(vec![Extent { frame: 256, region, run: run(0, 9) }]), "07018002ac020009"),
        (ToAgent::Recycle { budget_ns: 1_000_000 }, "08c0843d"),
        (ToAgent::RenewPool, "09"),
    ];
    check(packets, number_to_agent, |packet| wire::decode_to_agent(packet).unwrap());
}

#[test]
fn a_later_message_ends_a_connection_of_an_earlier_version() {
    let later = wire::encode(&ToDaemon::CpuTime { cpu_ns: 3 });
    assert!(wire::decode_to_daemon(&later, VERSION).is_ok());
    let why = wire::decode_to_daemon(&later, OLDEST).unwrap_err().to_string();
    assert_eq!(why, "a message of protocol 8 on a connection that speaks 7");
    assert!(wire::decode_to_daemon(&wire::encode(&ToDaemon::Ready), OLDEST).is_ok());
}

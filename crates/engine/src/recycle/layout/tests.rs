use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::*;

const MTREE: &str = r#"FlatView #0
 AS "I/O", root: io
 Root memory region: io
  0000000000000000-000000000000ffff (prio 0, ram): no such RAM

FlatView #1
 AS "memory", root: system
 AS "cpu-memory-0", root: system
 Root memory region: system
  0000000000000000-00000000000bffff (prio 0, ram): a KVM
  00000000000c0000-00000000000dffff (prio 1, rom): pc.rom
  0000000000100000-000000007fffffff (prio 0, ram): a @0000000000100000 KVM
  00000000fec00000-00000000fec00fff (prio 0, i/o): ioapic
  00000000fd000000-00000000fdffffff (prio 1, ram): vga.vram
  00000000fffc0000-00000000ffffffff (prio 0, romd): pflash
  0000000100000000-00000001bfffffff (prio 0, ram): b

FlatView #2
 AS "cpu-smm-0", root: memory
  0000000000100000-000000007fffffff (prio 0, ram): a @0000000000100000
"#;

#[test]
fn ram_is_found_on_both_sides_of_the_hole() {
    let found = parse_mtree(MTREE);
    assert_eq!(found, [0x10_0000..0x8000_0000, 0x1_0000_0000..0x1_c000_0000]);
    assert!(parse_mtree("").is_empty());
}

#[test]
fn memory_that_may_be_unplugged_is_known() {
    let answer = json!([
        { "type": "dimm", "data": { "addr": 0x1_0000_0000u64, "size": 0x1000_0000 } },
        { "type": "virtio-mem", "data": { "memaddr": 0x2_0000_0000u64, "size": 0, "max-size": 0x4000_0000 } }
    ]);
    assert_eq!(removable(&answer), [0x1_0000_0000..0x1_1000_0000, 0x2_0000_0000..0x2_4000_0000]);
}

/// Asks a QEMU that has each page of the guest at this address.
fn ask(host: impl Fn(u64) -> Option<u64> + Send + 'static) -> Result<Vec<Ram>, LayoutError> {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let qemu = std::thread::spawn(move || {
        let mut lines = BufReader::new(theirs.try_clone().unwrap()).lines();
        let mut out = theirs;
        while let Some(Ok(line)) = lines.next() {
            let asked: Value = serde_json::from_str(&line).unwrap();
            let text = asked["arguments"]["command-line"].as_str().unwrap_or("");
            let answer = match asked["execute"].as_str().unwrap() {
                "qmp_capabilities" => json!({ "return": {}, "id": asked["id"] }),
                "query-memory-devices" => json!({ "return": [], "id": asked["id"] }),
                _ if text.starts_with("gpa2hva ") => {
                    let guest = u64::from_str_radix(&text[10..], 16).unwrap();
                    let said = match host(guest) {
                        Some(host) => format!("Host virtual address for 0x0 (a) is {host:#x}"),
                        None => format!("Memory at address {guest:#x} is not RAM"),
                    };
                    json!({ "return": said, "id": asked["id"] })
                }
                _ => json!({ "return": MTREE, "id": asked["id"] }),
            };
            writeln!(out, "{answer}").unwrap();
        }
    });
    let mut qmp = Qmp::open(ours, Duration::from_secs(20), &|| true).unwrap();
    let found = find_ram(&mut qmp);
    drop(qmp);
    qemu.join().unwrap();
    found
}

#[test]
fn ram_is_found_by_three_commands() {
    let found = ask(|guest| Some(guest + (7 << 40))).unwrap();
    assert_eq!(found.len(), 2);
    assert!(found.iter().all(|ram| ram.host == ram.start + (7 << 40)));
}

#[test]
fn ram_that_is_not_one_piece_is_not_taken() {
    const HOLE: u64 = 0x1_0000_0000;
    for host in [
        |guest: u64| Some(if guest > HOLE { guest + PAGE } else { guest } + (7 << 40)),
        |guest| (guest < HOLE).then_some(guest),
        |guest| Some(if guest < HOLE { guest } else { guest + 5 }),
    ] {
        assert!(matches!(ask(host), Err(LayoutError::Torn(HOLE))));
    }
}

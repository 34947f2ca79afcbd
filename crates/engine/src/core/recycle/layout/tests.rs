use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::*;

/// A guest of 6 GiB on a `pc`, as QEMU 7.2 prints it.
const MTREE: &str = "\
address-space: I/O
  0000000000000000-000000000000ffff (prio 0, i/o): io

address-space: cpu-memory-0
address-space: memory
  0000000000000000-ffffffffffffffff (prio 0, i/o): system
    0000000000000000-00000000bfffffff (prio 0, ram): alias ram-below-4g @pc.ram 0000000000000000-00000000bfffffff
    0000000000000000-ffffffffffffffff (prio -1, i/o): pci
      00000000000a0000-00000000000bffff (prio 1, i/o): vga-lowmem
      00000000000c0000-00000000000dffff (prio 1, rom): pc.rom
      00000000fd000000-00000000fdffffff (prio 1, ram): vga.vram
      00000000febf0000-00000000febf0fff (prio 1, i/o): vga.mmio
        00000000febf0000-00000000febf017f (prio 0, i/o): edid
      00000000fffc0000-00000000ffffffff (prio 0, rom): pc.bios
    00000000000a0000-00000000000bffff (prio 1, i/o): alias smram-region @pci 00000000000a0000-00000000000bffff
    00000000000c0000-00000000000c3fff (prio 1, ram): alias pam-rom @pc.ram 00000000000c0000-00000000000c3fff
    00000000fec00000-00000000fec00fff (prio 0, i/o): ioapic
    00000000fee00000-00000000feefffff (prio 4096, i/o): apic-msi
    0000000100000000-00000001bfffffff (prio 0, ram): alias ram-above-4g @pc.ram 00000000c0000000-000000017fffffff

memory-region: pc.ram
  0000000000000000-000000017fffffff (prio 0, ram): pc.ram

memory-region: pci
  0000000000000000-ffffffffffffffff (prio -1, i/o): pci
    00000000000a0000-00000000000bffff (prio 1, i/o): vga-lowmem
";

fn found(text: &str) -> Vec<Range<u64>> {
    tree::find(text).into_iter().filter_map(whole_pages).collect()
}

#[test]
fn ram_is_found_on_both_sides_of_the_hole() {
    assert_eq!(found(MTREE), [0x10_0000..0xc000_0000, 0x1_0000_0000..0x1_c000_0000]);
    assert!(found("").is_empty());
    // Of two regions with one name it is not known which is meant.
    let twice = format!("{MTREE}\nmemory-region: pc.ram\n  0000000000000000-000000017fffffff (prio 0, i/o): pc.ram\n");
    assert!(found(&twice).is_empty());
    assert!(found(&MTREE.replace("memory-region: pc.ram", "memory-region: other")).is_empty());
}

#[test]
fn ram_of_several_nodes_lies_in_a_region_of_its_own() {
    let text = "\
address-space: memory
  0000000000000000-ffffffffffffffff (prio 0, container): system
    0000000000000000-000000007fffffff (prio 0, container): alias ram-below-4g @pc.ram 0000000000000000-000000007fffffff
    0000000100000000-000000013fffffff (prio 0, container): alias ram-above-4g @pc.ram 0000000080000000-00000000bfffffff

memory-region: pc.ram
  0000000000000000-00000000bfffffff (prio 0, container): pc.ram
    0000000000000000-000000005fffffff (prio 0, ram): a
    0000000060000000-00000000bfffffff (prio 0, ram): b
";
    assert_eq!(found(text), [0x10_0000..0x6000_0000, 0x6000_0000..0x8000_0000, 0x1_0000_0000..0x1_4000_0000]);
}

#[test]
fn what_lies_over_ram_hides_it() {
    let tree = |over: &str| {
        format!(
            "address-space: memory\n  0000000000000000-ffffffffffffffff (prio 0, i/o): system\n    \
             0000000000000000-000000000fffffff (prio 0, ram): ram\n{over}"
        )
    };
    let all = 0x10_0000..0x1000_0000;
    assert_eq!(found(&tree("")), std::slice::from_ref(&all));
    let cut = [0x10_0000..0x800_0000, 0x900_0000..0x1000_0000];
    // The memory of system management mode, a device's, and one in a container; in part.
    assert_eq!(found(&tree("    0000000008000000-0000000008ffffff (prio 1, i/o): tseg-blackhole\n")), cut);
    assert_eq!(found(&tree("    0000000008000000-0000000008ffffff (prio 1, ram): vga.vram\n")), cut);
    let inside = "    0000000000000000-00000000ffffffff (prio 2, i/o): box\n      0000000008000000-0000000008ffffff (prio 0, rom): x\n";
    assert_eq!(found(&tree(inside)), cut);
    // What lies below it does not.
    assert_eq!(found(&tree("    0000000008000000-0000000008ffffff (prio -1, i/o): pci\n")), std::slice::from_ref(&all));
}

#[test]
fn an_alias_shows_the_part_that_it_names_and_a_loop_ends() {
    let text = "\
address-space: memory
  0000000000000000-ffffffffffffffff (prio 0, i/o): system
    0000000010000000-000000001fffffff (prio 0, ram): alias part of it @ram 0000000008000000-0000000017ffffff
    0000000040000000-000000004fffffff (prio 0, i/o): alias again @system 0000000040000000-000000004fffffff

memory-region: ram
  0000000070000000-000000008fffffff (prio 0, ram): ram

memory-region: system
  0000000000000000-ffffffffffffffff (prio 0, i/o): system
    0000000040000000-000000004fffffff (prio 0, i/o): alias again @system 0000000040000000-000000004fffffff
";
    let part = 0x1000_0000..0x2000_0000;
    assert_eq!(found(text), std::slice::from_ref(&part));
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

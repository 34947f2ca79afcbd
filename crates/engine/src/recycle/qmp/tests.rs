use std::os::unix::net::UnixStream;

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
    assert_eq!(
        parse_gpa2hva("Host virtual address for 0x100000 (pc.ram) is 0x7f0bbbf00000\r\n"),
        Some(0x7f0b_bbf0_0000)
    );
    assert_eq!(parse_gpa2hva("No memory is mapped at address 0x100000000\r\n"), None);
}

#[test]
fn memory_that_may_be_unplugged_is_known() {
    let answer = json!([
        { "type": "dimm", "data": { "addr": 0x1_0000_0000u64, "size": 0x1000_0000 } },
        { "type": "virtio-mem", "data": { "memaddr": 0x2_0000_0000u64, "size": 0, "max-size": 0x4000_0000 } }
    ]);
    assert_eq!(removable(&answer), [0x1_0000_0000..0x1_1000_0000, 0x2_0000_0000..0x2_4000_0000]);
}

#[test]
fn a_session_skips_what_is_not_its_answer() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let qemu = std::thread::spawn(move || {
        let mut lines = BufReader::new(theirs.try_clone().unwrap()).lines();
        let mut out = theirs;
        writeln!(out, r#"{{"QMP": {{}}}}"#).unwrap();
        while let Some(Ok(line)) = lines.next() {
            let asked: Value = serde_json::from_str(&line).unwrap();
            let text = asked["arguments"]["command-line"].as_str().unwrap_or("");
            let answer = match asked["execute"].as_str().unwrap() {
                "qmp_capabilities" => json!({ "error": { "desc": "already complete" }, "id": asked["id"] }),
                "query-memory-devices" => json!({ "return": [], "id": asked["id"] }),
                _ if text.starts_with("gpa2hva ") => {
                    let guest = u64::from_str_radix(&text[10..], 16).unwrap();
                    let host = format!("Host virtual address for 0x0 (a) is {:#x}", guest + (7 << 40));
                    json!({ "return": host, "id": asked["id"] })
                }
                _ => json!({ "return": MTREE, "id": asked["id"] }),
            };
            writeln!(out, r#"{{"event": "RTC_CHANGE"}}"#).unwrap();
            writeln!(out, r#"{{"return": {{}}, "id": "pageone-1-1"}}"#).unwrap();
            writeln!(out, "{answer}").unwrap();
        }
    });
    let found = find_ram(ours.into(), Duration::from_secs(20), &|| true).unwrap();
    qemu.join().unwrap();
    assert_eq!(found.len(), 2);
    assert!(found.iter().all(|ram| ram.host == ram.start + (7 << 40)));
}

#[test]
fn a_socket_without_an_answer_is_an_error_in_time() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let begin = Instant::now();
    assert!(find_ram(ours.into(), Duration::from_millis(50), &|| true).is_err());
    assert!(begin.elapsed() < Duration::from_secs(10));
    drop(theirs);
}

#[test]
fn an_answer_that_comes_byte_by_byte_ends_with_the_time_or_with_the_client() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    // The client has our end, too, and changes its settings.
    ours.set_read_timeout(None).unwrap();
    let trickle = std::thread::spawn(move || {
        while theirs.write_all(b" ").is_ok() {
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    let begin = Instant::now();
    assert!(find_ram(ours.try_clone().unwrap().into(), Duration::from_millis(100), &|| true).is_err());
    let asked = std::cell::Cell::new(0);
    let goes_on = || asked.replace(asked.get() + 1) < 10;
    assert!(find_ram(ours.into(), Duration::from_secs(600), &goes_on).is_err());
    assert!(begin.elapsed() < Duration::from_secs(60));
    trickle.join().unwrap();
}

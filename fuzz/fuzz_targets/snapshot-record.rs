//! What lies beside a checkpoint: a snapshot's record, of arbitrary bytes or with changes of a
//! whole one.

#![no_main]

use snapshot::record::Record;

const DESCRIPTION: &[u8] = br#"{"program":"/q","directory":"/","words":["-m","1","-name","web"],"facts":{"qemu":"7","machine":"pc","cpu":"c","features":["1"],"cpus":1,"ram":65536,"devices":["e1000"]},"disks":[{"word":"/d","image":"/x","raw":false}]}"#;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some((how, input)) = input.split_first() else { return };
    let bytes = if how % 4 == 0 {
        [b"PGSNAP01".as_slice(), input].concat()
    } else {
        // 4 bytes a hit: an offset (2), and what is there (2).
        let mut description = DESCRIPTION.to_vec();
        for hit in input.chunks_exact(4) {
            let at = usize::from(u16::from_le_bytes([hit[0], hit[1]])) % description.len();
            description.splice(at..at + usize::from(hit[2] % 2), [hit[3]]);
        }
        [b"PGSNAP01", &(description.len() as u32).to_le_bytes()[..], &description, b"devices"].concat()
    };
    if let Ok(record) = Record::decode(&bytes) {
        let again = Record::decode(&record.encode()).expect("what was written is read");
        assert!(again == record);
        let _ = record.description.guest("a process");
    }
});

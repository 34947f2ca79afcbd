//! Every decoder of the on-disk format on arbitrary bytes, and on damaged ones that were whole:
//! none may panic or loop.

use proptest::prelude::*;

use crate::MediaClass;
use crate::disk::record::Record;
use crate::disk::superblock::{Opening, State, Superblock};
use crate::fuzzing::{closed_log, decode_all, key_file};

proptest! {
    #[test]
    fn arbitrary_bytes(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        decode_all(&bytes);
    }

    #[test]
    fn damaged_structures(
        payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..60), 1..6),
        hits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        // A log of generation 1, its generation in front.
        let payloads: Vec<&[u8]> = payloads.iter().map(Vec::as_slice).collect();
        let frames = closed_log(1, &payloads);
        let log = [&[1], &frames[..]].concat();
        let opening = Opening { epoch: 1, random: 2, before: 3, home: 4, state: State::Open };
        let superblock = Superblock { version: 2, class: MediaClass::Memory, pool: [3; 16], created: 9, opening, serial: 4 };
        let record = Record::Name("damaged".into()).encode();
        let payloads = payloads.concat();
        for whole in [log, superblock.encode(), record, key_file(1, &payloads), key_file(2, &payloads)] {
            let mut bytes = whole;
            for (at, value) in &hits {
                let at = at.index(bytes.len());
                bytes[at] = *value;
            }
            decode_all(&bytes);
        }
    }
}

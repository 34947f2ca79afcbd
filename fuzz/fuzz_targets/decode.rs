//! Every decoder of the on-disk format on arbitrary bytes.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| mpool::fuzzing::decode_all(bytes));

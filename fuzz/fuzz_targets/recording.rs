//! A recording of arbitrary bytes: what can be read of it, and what is shown of that.

#![no_main]

use monitor::{Recording, report, view};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // Every input has the right beginning.
    let bytes = [b"PageONE record 1".as_slice(), bytes].concat();
    let Ok(mut recording) = Recording::from_bytes(bytes) else { return };
    for at in (0..recording.len().min(8)).rev() {
        if let Ok(moment) = recording.moment(at) {
            view::text(&moment, None);
        }
    }
    let _ = recording.depth(i64::MAX);
    let _ = report::html(&mut recording, "fuzz");
});

use control::{ClientStatus, DomainStatus, Status};

use super::*;

/// Moment `number` of a host with `clients` clients.
pub(crate) fn moment(number: i64, clients: usize) -> Moment {
    let mut status = Status::default();
    status.metrics.uptime_seconds = number as f64;
    status.metrics.memory_total_bytes = Some(8 << 30);
    status.metrics.memory_available_bytes = Some((5 << 30) + number as u64 * 4096);
    status.metrics.general_profit = number << 20;
    let client = |at: usize| {
        let mut client = ClientStatus { pid: 100 + at as i32, name: format!("guest {at}"), ..ClientStatus::default() };
        client.metrics.faults_total = (number * 7) as u64;
        client.metrics.agent_cpu_seconds = number as f64 / 8.0;
        client
    };
    status.domains = vec![DomainStatus {
        name: "uid-0".into(),
        clients: (0..clients).map(client).collect(),
        ..DomainStatus::default()
    }];
    Moment { time: 1_000 * number, status: Some(status), away: None }
}

/// A recording of moments 0 to `count`, and where each frame begins.
fn written(count: i64) -> (Vec<u8>, Vec<usize>) {
    let mut writer = Writer::new(Vec::new()).unwrap();
    let mut starts = Vec::new();
    for number in 0..count {
        starts.push(writer.out.len());
        writer.append(&moment(number, 3)).unwrap();
    }
    (writer.out, starts)
}

#[test]
fn every_moment_is_found_again_in_any_order() {
    let (bytes, _) = written(200);
    let mut recording = Recording::from_bytes(bytes).unwrap();
    assert_eq!((recording.len(), recording.damage.len()), (200, 0));
    for at in [0, 199, 61, 60, 59, 100, 101, 3] {
        assert_eq!(recording.moment(at).unwrap(), moment(at as i64, 3), "{at}");
        assert_eq!(recording.find(at as i64 * 1000 + 999), at);
    }
    assert_eq!(recording.find(-5), 0);
    assert_eq!(recording.summary(9).unwrap().saved, 9.0 * f64::from(1 << 20));
    assert!(recording.moment(200).is_err());
}

#[test]
fn a_recorder_that_is_killed_loses_only_what_it_was_writing() {
    let (bytes, starts) = written(100);
    for cut in [starts[99] + 1, starts[99] + HEAD, bytes.len() - 1] {
        let mut recording = Recording::from_bytes(bytes[..cut].to_vec()).unwrap();
        assert_eq!(recording.len(), 99);
        assert_eq!(recording.moment(98).unwrap(), moment(98, 3));
        let bytes = (cut - starts[99]) as u64;
        assert_eq!(recording.damage, [Damage { offset: starts[99] as u64, bytes, moments: 0 }]);
    }
}

#[test]
fn damage_is_named_and_reading_goes_on_at_the_next_key() {
    let (mut bytes, starts) = written(200);
    bytes[starts[70] + HEAD + 2] ^= 0x40;
    let mut recording = Recording::from_bytes(bytes.clone()).unwrap();
    // 70 is damaged, 71 to 119 rely on it, 120 is a key.
    let size = (starts[71] - starts[70]) as u64;
    assert_eq!(recording.damage, [Damage { offset: starts[70] as u64, bytes: size, moments: 49 }]);
    assert_eq!(recording.len(), 150);
    assert_eq!(recording.moment(69).unwrap(), moment(69, 3));
    assert_eq!(recording.moment(70).unwrap(), moment(120, 3));
    assert_eq!(recording.find(90_000), 69);
    // A frame that is missing whole, without a trace.
    bytes.drain(starts[130]..starts[131]);
    let mut recording = Recording::from_bytes(bytes).unwrap();
    assert_eq!(recording.damage.len(), 1);
    assert_eq!(recording.damage[0].moments, 49 + 49);
    let last = recording.len() - 1;
    assert_eq!(recording.moment(last).unwrap(), moment(199, 3));
}

#[test]
fn other_files_are_refused_with_a_sentence() {
    let error = |bytes: &[u8]| Recording::from_bytes(bytes.to_vec()).err().unwrap().to_string();
    assert_eq!(error(b""), "this is no recording of `pageone record`");
    assert_eq!(error(b"\x7fELF............................"), "this is no recording of `pageone record`");
    assert!(error(b"PageONE record 2.....").contains("format 2, and this build reads format 1"));
    assert_eq!(error(&MAGIC), "the recording has no moment that can be read; record again");
}

#[test]
fn a_file_that_is_cut_later_and_a_frame_of_something_else_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("recording");
    std::fs::write(&path, written(3).0).unwrap();
    let mut recording = Recording::open(File::open(&path).unwrap()).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(MAGIC.len() as u64).unwrap();
    assert_eq!(recording.moment(0).unwrap_err().to_string(), "cannot read the recording");
    // Its checksum is right.
    let frame = frame::encode(Kind::Key, 1, 0, &Summary::AWAY, &leaves::deflate(b"[7]"));
    let mut recording = Recording::from_bytes([&MAGIC[..], &frame].concat()).unwrap();
    let error = recording.moment(0).unwrap_err().to_string();
    assert!(error.starts_with("the moment does not have the form of one"), "{error}");
}

#[test]
fn clients_come_and_go_and_so_does_the_daemon() {
    let mut moments = vec![moment(0, 1), moment(1, 2), moment(2, 2)];
    moments.push(Moment { time: 3000, status: None, away: Some("no daemon answers".into()) });
    moments.push(moment(4, 2));
    let mut writer = Writer::new(Vec::new()).unwrap();
    moments.iter().for_each(|moment| writer.append(moment).unwrap());
    let depth = Depth { time: 2500, ..Depth::default() };
    writer.append_depth(&depth).unwrap();
    assert_eq!(writer.bytes, writer.out.len() as u64);
    let mut recording = Recording::from_bytes(writer.out).unwrap();
    for (at, moment) in moments.iter().enumerate() {
        assert_eq!(recording.moment(at).unwrap(), *moment);
    }
    assert!(recording.summary(3).unwrap().clients.is_nan());
    assert_eq!(recording.depth(2499).unwrap(), None);
    assert_eq!(recording.depth(9999).unwrap(), Some(depth));
}

#[test]
fn a_live_recording_keeps_the_last_hour() {
    let mut live = Recording::live();
    for number in 0..MOST_MOMENTS as i64 + 100 {
        live.push(&moment(number, 1));
        if number % 500 == 0 {
            assert_eq!(live.moment(live.len() - 1).unwrap(), moment(number, 1));
        }
    }
    let newest = MOST_MOMENTS as i64 + 99;
    assert!((MOST_MOMENTS - 60..=MOST_MOMENTS).contains(&live.len()), "{}", live.len());
    let oldest = newest - live.len() as i64 + 1;
    for at in [0, 1, live.len() / 2, live.len() - 1] {
        assert_eq!(live.moment(at).unwrap(), moment(oldest + at as i64, 1));
    }
}

#[test]
fn a_small_file_cannot_make_a_moment_of_endless_deltas_or_texts() {
    let mut writer = Writer::new(Vec::new()).unwrap();
    let mut one = moment(0, 1);
    one.away = Some("x".repeat(100_000));
    writer.append(&one).unwrap();
    // No writer puts so many behind one key.
    for number in 1..KEY_EVERY + 5 {
        writer.out.extend(frame::encode(Kind::Delta, number + 1, 0, &Summary::AWAY, &leaves::deflate(&[])));
    }
    let mut recording = Recording::from_bytes(writer.out).unwrap();
    assert_eq!(recording.len(), KEY_EVERY as usize);
    assert_eq!(recording.damage.iter().map(|damage| damage.moments).sum::<usize>(), 5);
    assert_eq!(recording.moment(0).unwrap().away.unwrap().len(), 4096);
}

#[test]
fn frames_that_overlap_are_not_read_again_and_again() {
    let (mut bytes, _) = written(1);
    const LENGTH: usize = 512 << 10;
    for _ in 0..4000 {
        let mut wrong = frame::encode(Kind::Key, 1, 0, &Summary::AWAY, &[]);
        wrong[5..9].copy_from_slice(&(LENGTH as u32).to_le_bytes());
        bytes.extend(wrong);
    }
    bytes.resize(bytes.len() + LENGTH, 0);
    let length = bytes.len();
    let recording = Recording::from_bytes(bytes).unwrap();
    let read = recording.damage.len() * LENGTH;
    assert!(recording.len() == 1 && read < WRONG as usize + 9 * length, "{read}");
}

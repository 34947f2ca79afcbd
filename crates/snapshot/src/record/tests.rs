use super::*;

#[test]
fn a_guest_is_known_by_its_uuid_or_name() {
    let guest = |line: &str| {
        let words = line.split(' ').map(String::from).collect();
        let (program, directory) = ("/q".into(), "/".into());
        let description = Description { program, directory, words, facts: Facts::default(), disks: Vec::new() };
        description.guest().map(Cow::into_owned)
    };
    assert_eq!(guest("-m 1 -name guest=web,debug-threads=on"), Some("web".into()));
    assert_eq!(guest("-m 1 --name web"), Some("web".into()));
    assert_eq!(guest("-name web -uuid 1-2"), Some("1-2".into()));
    assert_eq!(guest("-name shop,,one"), Some("shop,one".into()));
    assert_ne!(guest("-name shop,,one"), guest("-name shop,,two"));
    assert_eq!(guest("-m name"), None);
}

#[test]
fn a_record_is_read_as_it_was_written_and_nothing_else_is_one() {
    let disks = vec![Disk { word: "a.qcow2".into(), image: "/b.qcow2".into(), raw: false }];
    let (program, directory, words) = ("/q".into(), "/".into(), vec!["-S".into()]);
    let description = Description { program, directory, words, facts: Facts::default(), disks };
    let record = Record { description, stream: vec![1, 2, 3] };
    let bytes = record.encode();
    assert_eq!(Record::decode(&bytes).unwrap(), record);
    for len in 0..bytes.len() - 3 {
        assert!(Record::decode(&bytes[..len]).is_err(), "{len}");
    }
    let error = Record::decode(b"PGSNAP02....").unwrap_err().to_string();
    assert_eq!(
        error,
        "what is kept beside it is no snapshot that this version of PageONE understands; use \
                       the version that took it, or take a new one"
    );
}

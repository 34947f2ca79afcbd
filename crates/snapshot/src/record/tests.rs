//! What lies beside a snapshot, and whose guest it is of.

use super::*;

#[test]
fn a_guest_is_known_by_its_uuid_or_name() {
    let guest = |line: &str| {
        let words = line.split(' ').map(String::from).collect();
        Description { words, ..Description::default() }.guest("q 1")
    };
    let called = |line| guest(line).called().to_owned();
    assert_eq!(called("-m 1 -name guest=web,debug-threads=on"), "web");
    assert_eq!((called("--name web"), called("-uuid 1-2")), ("web".into(), "1-2".into()));
    assert_eq!((called("-name web -uuid 1-2"), called("-name shop,,one")), ("web".into(), "shop,one".into()));
    assert_eq!(called("-m name"), "q 1");
    assert_eq!(guest("-name we\nb\u{1b}").to_string(), "web", "one line of a list, which no name ends");
    assert_ne!(guest("-name shop,,one"), guest("-name shop,,two"));
    assert_ne!(guest("-name web -uuid 1-2"), guest("-name web"));
}

/// Any tenant may call a guest as another's is called: neither removes the other's last snapshot.
#[test]
fn a_name_counts_for_whose_guest_it_is() {
    let own = Source::of(std::process::id()).unwrap();
    let of = |words: &[&str], source: Option<Source>, imported| {
        let words = words.iter().copied().map(String::from).collect();
        Description { words, source, imported, ..Description::default() }.guest("q 1")
    };
    let web = |source: Source| of(&["-name", "web"], Some(source), false);
    let all = [
        web(own.clone()),
        web(Source { uid: own.uid + 1, ..own.clone() }),
        web(Source { elsewhere: !own.elsewhere, ..own.clone() }),
        of(&["-name", "web"], None, false),
        of(&["-name", "web"], Some(own.clone()), true),
        // What is written alike is not the same.
        of(&["-name", "web", "-uuid", "1"], None, false),
        of(&["-name", "web 1"], None, false),
        // Without a name the number of a process is not enough: another gets it.
        of(&[], Some(own.clone()), false),
        of(&[], Some(Source { started: own.started + 1, ..own.clone() }), false),
        of(&[], Some(Source { boot: "another".into(), ..own.clone() }), false),
    ];
    assert_eq!(all.iter().collect::<std::collections::BTreeSet<_>>().len(), all.len());
    // Another process of the same guest is the same guest.
    let again = Source { pid: 1, started: 1, boot: "another".into(), ..own.clone() };
    assert_eq!(web(again), web(own.clone()));
    let said = of(&["-name", "web"], Some(Source { uid: 7, elsewhere: true, ..own }), true).to_string();
    assert_eq!(said, "web, uid 7, in a container, imported");
}

#[test]
fn a_record_is_read_as_it_was_written_and_nothing_else_is_one() {
    let disks = vec![Disk { word: "a.qcow2".into(), image: "/b.qcow2".into(), ..Disk::default() }];
    let (program, words, source) = ("/q".into(), vec!["-S".into()], Source::of(std::process::id()).ok());
    assert!(source.as_ref().is_some_and(Source::runs));
    let other = |source: Source| {
        !Source { started: 0, ..source.clone() }.runs() && !Source { boot: "".into(), ..source }.runs()
    };
    assert!(other(source.clone().unwrap()));
    let description = Description { program, words, disks, source, ..Description::default() };
    let record = Record { description, stream: vec![1, 2, 3] };
    let bytes = record.encode();
    assert_eq!(Record::decode(&bytes).unwrap(), record);
    // One that was stored by an earlier version.
    let old = br#"{"program":"/q","directory":"/","words":[],"facts":{"qemu":"","machine":"","cpu":"","features":[],"cpus":1,"ram":1,"devices":[]},"disks":[]}"#;
    let old = Record::decode(&[MAGIC, &(old.len() as u32).to_le_bytes()[..], old].concat()).unwrap().description;
    assert!(old.source.is_none() && !old.imported && !old.reseeds);
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

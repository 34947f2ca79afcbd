use super::*;

const PASSWD: &[u8] = b"root:x:0:0::/root:/bin/sh\nbroken\nalice:x:1000:1000::/:\nbob:x:1001:1001::/:\n";

#[track_caller]
fn owners(subuid: &[u8], of: &[(u32, u32)]) {
    let ranges = Ranges::parse(subuid, PASSWD);
    of.iter().for_each(|&(uid, owner)| assert_eq!(ranges.owner(uid), Owner(owner), "{uid} of {ranges:?}"));
}

#[test]
fn a_user_and_its_subordinates_are_one_however_many_these_are() {
    owners(
        b"alice:100000:65536\n1001:165536:65536\nalice:4000000000:500000000\ncarol:300000:10\ncarol:400000:10\n",
        &[
            (999, 999),
            (1000, 1000),
            (99_999, 99_999),
            (100_000, 1000),
            (165_535, 1000),
            (165_536, 1001),
            (231_072, 231_072),
            (4_000_000_000, 1000),
            (u32::MAX - 1, 1000),
            // Of another source of names: one user all the same.
            (300_000, 300_000),
            (400_009, 300_000),
            (400_010, 400_010),
        ],
    );
}

#[test]
fn containers_that_root_maps_are_not_root_and_nobody_elses_either() {
    let own = rustix::process::geteuid().as_raw();
    let lines = format!("root:100000:65536\n0:200000:65536\nroot:300000:65536\nalice:0:10\n{own}:400000:10\n");
    owners(
        lines.as_bytes(),
        &[(100_000, 100_000), (165_535, 100_000), (200_001, 200_000), (365_535, 300_000), (400_009, 400_000)],
    );
    assert_eq!((Owner::of(0), Owner::of(own)), (Owner::ROOT, Owner(own)));
    // Though the user database lacks it.
    assert_eq!(Ranges::parse(b"root:100000:10", b"").owner(100_009), Owner(100_000));
}

#[test]
fn a_uid_of_two_ranges_belongs_to_the_first() {
    owners(
        b"alice:100:10\nbob:105:10\nbob:90:40\nalice:95:60\nghost:100:5\nghost:50:5\n",
        &[(89, 89), (90, 1001), (99, 1001), (100, 1000), (109, 1000), (110, 1001), (129, 1001), (130, 1000), (50, 50)],
    );
}

#[test]
fn a_line_that_is_none_costs_nothing_but_itself() {
    owners(
        b"# none\nalice:1:\n:70:5\nalice:5\nalice:-5:5\nalice:60:5:5\n\xff\xfe:80:2\nbob:7x:5\nbob:4294967296:1\n\nalice:20:0\n  bob:30:1 ",
        &[(1, 1), (5, 5), (7, 7), (20, 20), (30, 1001), (60, 60), (70, 70), (80, 80), (81, 80)],
    );
}

#[test]
fn what_changes_is_read_again_and_what_cannot_be_read_is_as_it_was() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name| &*Box::leak(directory.path().join(name).into_boxed_path());
    let (subuid, passwd) = (path("subuid"), path("passwd"));
    let mut known = Known::of_files([subuid, passwd]);
    let mut now = Instant::now();
    let mut owner = |uid| {
        now += LOOK;
        known.look(now);
        known.ranges.owner(uid).number()
    };
    assert_eq!(owner(100_000), 100_000, "there are no files");
    std::fs::write(subuid, "alice:99990:65536\n").unwrap();
    assert_eq!(owner(100_000), 99_990);
    std::fs::write(passwd, PASSWD).unwrap();
    assert_eq!(owner(100_000), 1000);
    // As the tools do that change it.
    std::fs::write(path("new"), "bobby:99990:65536\nbob:99990:65536").unwrap();
    std::fs::rename(path("new"), subuid).unwrap();
    assert_eq!(owner(100_000), 99_990);
    std::fs::remove_file(subuid).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, subuid, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
    assert_eq!(owner(100_000), 99_990);
    std::fs::remove_file(subuid).unwrap();
    // Beyond the bound a line is cut, and "bob:5:60000" is not what it says.
    let line = "# a line that says nothing\n";
    let mut long = line.repeat(MOST as usize / line.len());
    long.push_str(&"#".repeat(MOST as usize - long.len() - "\nalice:5:60".len()));
    long.push_str("\nalice:5:60000\n");
    std::fs::write(subuid, &long).unwrap();
    assert_eq!((owner(6), owner(100_000)), (6, 100_000));
    now += LOOK / 2;
    std::fs::remove_file(subuid).unwrap();
    std::fs::write(subuid, "alice:5:60000\n").unwrap();
    known.look(now);
    assert_eq!(known.ranges.owner(6).number(), 6, "looked at a moment ago");
}

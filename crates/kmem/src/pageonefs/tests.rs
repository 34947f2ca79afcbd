use std::fs::OpenOptions;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::*;

/// A mount to test with. `scripts/lanes/pageonefs.sh` runs these tests in guests that have one.
fn mount() -> Option<(PathBuf, Mount)> {
    let Some(path) = std::env::var_os("PAGEONEFS_MOUNT").map(PathBuf::from) else {
        println!("SKIPPED: PAGEONEFS_MOUNT names no mount: scripts/lanes/pageonefs.sh has guests with one");
        return None;
    };
    let mount = Mount::open(&path).expect("the mount opens");
    Some((path, mount))
}

#[test]
fn another_file_system_is_refused_with_a_reason() {
    let error = Mount::open(Path::new("/proc")).expect_err("no mount of pageonefs");
    assert!(error.to_string().contains("/proc as a mount of pageonefs"), "{error}");
}

#[test]
fn what_the_kernel_did_not_come_to_is_not_taken_for_merged() {
    let entry = Entry::new(7, Some(3));
    assert_eq!((entry.result(), entry.frame), (Err(Errno::AGAIN), 3));
    assert_eq!((entry.with(Ok(4)).result(), entry.with(Ok(4)).frame), (Ok(()), 4));
    assert_eq!(entry.with(Err(Errno::STALE)).result(), Err(Errno::STALE));
}

#[test]
fn words_say_what_a_page_is() {
    assert_eq!(Page::from_word(0), Page::None);
    assert_eq!(Page::from_word(2), Page::Away);
    assert_eq!(Page::from_word(4), Page::Digest(4));
    assert_eq!(Page::from_word(15), Page::Frame(7));
}

/// A number generator's bytes, another page for each number but 0.
fn page_of(number: u64) -> Vec<u8> {
    let mut state = number;
    let mut word = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..crate::PAGE_SIZE / 8).flat_map(|_| word().to_le_bytes()).collect()
}

#[test]
fn digests_are_those_that_the_daemon_computes() {
    assert_eq!((digest_of(0), digest_of(5), digest_of(6), digest_of(9)), (6, 6, 6, 8));
    let Some((path, mount)) = mount() else { return };
    let name = path.join("kmem-digests");
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&name).expect("a file");
    std::fs::remove_file(&name).expect("the name goes, the file stays");
    // Pages that begin, or end, with zeros are no zeros.
    let mut pages: Vec<Vec<u8>> = (0..100).map(page_of).collect();
    pages[1][..4088].fill(0);
    pages[2][..8].fill(0);
    pages[3][8..].fill(0);
    pages[4].fill(0xff);
    for (index, page) in pages.iter().enumerate() {
        file.write_all_at(page, (index * crate::PAGE_SIZE) as u64).expect("a page");
    }
    let inode = file.metadata().expect("its inode").ino();
    let id = mount.files().expect("the list").into_iter().find(|file| file.inode == inode).expect("it is listed").id;
    for seed in [0, 7, u64::MAX, 0x9e37_79b9_7f4a_7c15] {
        let mut words = vec![0; pages.len()];
        assert_eq!(mount.digest(&Ask { id, seed, ..Ask::default() }, &mut words), Ok(pages.len() as u64));
        assert_eq!(words[0], ZEROS);
        for (index, page) in pages.iter().enumerate().skip(1) {
            let xxh3 = xxhash_rust::xxh3::xxh3_64_with_seed(page, seed);
            assert_eq!(words[index], digest_of(xxh3), "page {index}, seed {seed}");
        }
    }
}

#[test]
fn pages_of_equal_content_share_a_frame_until_one_is_written() {
    let Some((path, mount)) = mount() else { return };
    let name = path.join("kmem-test");
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&name).expect("a file");
    std::fs::remove_file(&name).expect("the name goes, the file stays");
    for page in 0..64 {
        file.write_all_at(&[7; crate::PAGE_SIZE], page * crate::PAGE_SIZE as u64).expect("a page");
    }
    let inode = file.metadata().expect("its inode").ino();
    let listed = mount.files().expect("the list").into_iter().find(|file| file.inode == inode).expect("it is listed");
    assert_eq!((listed.size, listed.private_pages, listed.plain()), (64 * 4096, 64, None));

    let mut bits = [0];
    let found = |dirty| Ok(Harvest { dirty, next: 64 });
    assert_eq!(mount.harvest(listed.id, 0, Bits::Written, &mut bits), found(64));
    assert_eq!((mount.harvest(listed.id, 0, Bits::Written, &mut bits), bits), (found(0), [0]));
    assert_eq!((mount.harvest(listed.id, 0, Bits::All, &mut bits), bits), (found(64), [!0]));
    let ask = Ask { id: listed.id, seed: 3, ..Ask::default() };
    let mut words = [0; 64];
    assert_eq!(mount.digest(&Ask { only: Some(&[0b11]), ..ask }, &mut words), Ok(2));
    assert!(matches!(Page::from_word(words[0]), Page::Digest(_)) && words[0] == words[1] && words[2] == 0);

    let digest = words[0];

    // Pages that were just made are in batches of the processor, which hold them for a moment.
    let mut frame = None;
    for index in 0..64 {
        let mut entry = [Entry::new(index, frame)];
        while mount.merge(listed.id, &mut entry) == Ok(0) {
            assert_eq!(entry[0].result(), Err(Errno::BUSY));
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        assert_eq!(entry[0].result(), Ok(()));
        frame = Some(entry[0].frame);
    }
    assert_eq!(mount.digest(&ask, &mut words), Ok(0));
    assert!(words.iter().all(|&word| Page::from_word(word) == Page::Frame(frame.expect("a frame"))));
    // What they hold has the digest that it had before.
    let mut all = [0; 64];
    assert_eq!(mount.digest(&Ask { only: Some(&[0b100]), frames: true, ..ask }, &mut all), Ok(1));
    assert_eq!((all[2], all[3]), (digest, 0));
    let again = mount.merge(listed.id, &mut [Entry::new(5, None)]);
    assert_eq!(again, Ok(0));
    file.write_all_at(&[8], 5 * 4096 + 9).expect("a write");
    assert_eq!((mount.harvest(listed.id, 0, Bits::Written, &mut bits), bits), (found(1), [1 << 5]));
    let mut page = [0; 4096];
    file.read_exact_at(&mut page, 5 * 4096).expect("the page");
    assert!(page[9] == 8 && page[8] == 7 && page[10] == 7);
    let files = mount.files().expect("the list");
    assert_eq!(files.iter().find(|file| file.id == listed.id).map(|file| file.merged_pages), Some(63));

    mount.make_plain(listed.id).expect("it becomes plain");
    let files = mount.files().expect("the list");
    let plain = files.iter().find(|file| file.id == listed.id).expect("it is listed");
    assert_eq!((plain.merged_pages, plain.plain()), (0, Some(Plain::Asked)));
    assert!(mount.stats().expect("the counts").merges >= 64);
    assert_eq!(mount.harvest(u64::MAX, 0, Bits::Written, &mut bits), Err(Errno::SRCH));
}

#[test]
fn pages_are_punched_unless_the_file_is_plain() {
    let Some((path, mount)) = mount() else { return };
    let name = path.join("kmem-punch");
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&name).expect("a file");
    std::fs::remove_file(&name).expect("the name goes, the file stays");
    file.write_all_at(&[7; 100 * crate::PAGE_SIZE], 0).expect("its pages");
    let inode = file.metadata().expect("its inode").ino();
    let id = mount.files().expect("the list").into_iter().find(|file| file.inode == inode).expect("it is listed").id;
    assert_eq!(mount.punch(id, 0, 65, &mut [0]), Err(Errno::INVAL), "too short");
    let mut held = [!0; 2];
    assert_eq!((mount.punch(id, 10, 80, &mut held), held), (Ok(0), [0, 0]));
    let mut byte = [1];
    for (page, expected) in [(9, 7), (10, 0), (89, 0), (90, 7)] {
        file.read_exact_at(&mut byte, page * crate::PAGE_SIZE as u64).expect("a byte");
        assert_eq!(byte, [expected], "page {page}");
    }
    assert_eq!(mount.make_plain(id), Ok(()));
    assert_eq!(mount.punch(id, 90, 1, &mut held), Err(Errno::BUSY));
    assert_eq!(mount.punch(u64::MAX, 90, 1, &mut held), Err(Errno::SRCH));
}

#[test]
fn a_file_that_comes_and_goes_is_told() {
    let Some((path, mount)) = mount() else { return };
    let flags = rustix::event::EventfdFlags::NONBLOCK | rustix::event::EventfdFlags::CLOEXEC;
    let news = rustix::event::eventfd(0, flags).expect("an eventfd");
    let told = || {
        let mut count = [0; 8];
        rustix::io::read(&news, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
    };
    assert_eq!(mount.notify(Some(mount.root.as_fd())), Err(Errno::INVAL));
    assert_eq!((mount.notify(Some(news.as_fd())), told()), (Ok(()), 0));
    let name = path.join("kmem-news");
    let file = OpenOptions::new().write(true).create_new(true).open(&name).expect("a file");
    assert!(told() > 0);
    std::fs::remove_file(&name).expect("its name goes");
    drop(file);
    assert!(told() > 0);
    assert_eq!(mount.notify(None), Ok(()));
}

#[test]
fn a_stores_pages_are_lent_and_stay_in_its_file() {
    let Some((_, other)) = mount() else { return };
    if other.domain().is_empty() {
        assert_eq!(Store::new(&other).err(), Some(StoreError::Make(Errno::INVAL)));
        return println!("SKIPPED: the mount has no domain");
    }
    let store = Store::new(&other).expect("a store");
    let file = crate::memfd::create_store_in(store.dir(), "pageone:a/b", crate::memfd::HUGE_PAGE_SIZE).expect("a file");
    let mut paths = Vec::new();
    let inode = crate::memfd::identity(&file.reader).expect("its inode").ino;
    let listed = store.mount().files().expect("the list").into_iter().find(|file| file.inode == inode);
    let listed = listed.expect("it is listed");
    assert_eq!((listed.plain(), store.mount().domain()), (Some(Plain::Store), other.domain()));
    let payer = Payer::Process(std::process::id() as i32);
    assert_eq!(store.make(listed.id, 3, Payer::Page { id: listed.id, index: 3 }), Err(Errno::SRCH), "there is none");
    assert_eq!(store.make(listed.id, 1 << 40, payer), Err(Errno::INVAL));
    assert_eq!((store.make(listed.id, 3, payer), store.make(listed.id, 3, payer)), (Ok(()), Ok(())));
    assert_eq!(store.make(listed.id, 4, Payer::Page { id: listed.id, index: 3 }), Ok(()));
    file.map.write_page(3, &[7; crate::PAGE_SIZE]);
    let mapped = crate::procfs::for_each_map(None, |line| {
        paths.extend((line.inode == inode && line.perms.shared).then(|| line.path.to_string()));
    });
    assert_eq!((mapped.is_ok(), paths), (true, vec!["/memfd:pageone:a_b (deleted)".to_string()]));
    let mut entry = [Entry::new(3, None)];
    while store.mount().merge(listed.id, &mut entry) == Ok(0) {
        assert!(matches!(entry[0].result(), Err(Errno::BUSY | Errno::AGAIN)), "{entry:?}");
        entry = [Entry::new(3, None)];
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let frame = entry[0].frame;
    assert_eq!((entry[0].result(), frame != 0), (Ok(()), true));
    let mut again = [Entry::new(3, None)];
    assert_eq!(store.mount().merge(listed.id, &mut again), Ok(0));
    assert_eq!((again[0].result(), again[0].frame), (Err(Errno::EXIST), frame));
    let mut words = [0; 64];
    let ask = Ask { id: listed.id, seed: 3, ..Ask::default() };
    assert_eq!(store.mount().digest(&ask, &mut words), Ok(1));
    assert!(matches!(Page::from_word(words[3]), Page::Digest(_)), "a lent page is digested");
    let mut bytes = [0; crate::PAGE_SIZE];
    crate::memfd::read_page(&file.reader, 3, &mut bytes).expect("its bytes");
    assert_eq!(bytes, [7; crate::PAGE_SIZE]);
}

//! Snapshots as archives, also of somebody who lies.

use std::io::{Cursor, Write};
use std::sync::Arc;

use checkpoint::test::Memory;
use checkpoint::{Catalog, Store, hash};
use mpool::{BLOCK, Pool};
use output::{Progress, Shown};

use super::*;
use crate::qcow2;
use crate::record::{Disk, Layer, Record};
use crate::rights::Account;

/// A guest can write anything into a raw disk, also the header of an image above a file of the
/// host's.
#[test]
fn the_bytes_of_a_raw_image_are_never_taken_for_a_header() {
    let dir = tempfile::tempdir().unwrap();
    let (secret, raw) = (dir.path().join("secret"), dir.path().join("disk.raw"));
    qcow2::create(&secret, 1 << 20, None, 0o600).unwrap();
    qcow2::create_over(&raw, &secret, false).unwrap();
    let disk = |raw_image: bool| Disk { word: "disk".into(), image: raw.clone(), raw: raw_image, ..Disk::default() };
    let chain = |disk: &Disk| -> io::Result<Vec<PathBuf>> {
        let layers = disk.layers_by_headers().map_err(|(_, error)| error)?;
        Ok(layers.into_iter().map(|layer| layer.image).collect())
    };
    assert_eq!(chain(&disk(false)).unwrap(), [raw.clone(), secret.clone()]);
    assert_eq!(chain(&disk(true)).unwrap(), std::slice::from_ref(&raw));
    let over = dir.path().join("over.qcow2");
    qcow2::create_over(&over, &raw, true).unwrap();
    let len = std::fs::metadata(&raw).unwrap().len();
    assert_eq!(qcow2::disk_size(&over).unwrap(), len, "it shows the file, not what its header says");
    let layers = chain(&Disk { word: "disk".into(), image: over.clone(), ..Disk::default() }).unwrap();
    assert_eq!(layers, [over.clone(), raw.clone()], "a raw image is the lowest, whatever it begins with");
    let header = std::fs::read(&over).unwrap();
    assert!(header[..200].windows(8).any(|bytes| bytes == b"\0\0\0\x03raw\0"), "QEMU is told so");
}

fn record(disks: Vec<Disk>) -> Record {
    let (program, directory) = ("/q".into(), "/".into());
    let description = Description { program, directory, words: vec!["-S".into()], disks, ..Description::default() };
    Record { description, stream: b"devices".to_vec() }
}

/// The archive of a snapshot of four pages, with an image over another one.
fn archive(directory: &Path) -> Vec<u8> {
    let mut out = Vec::new();
    archive_to(directory, &mut out).unwrap();
    out
}

fn archive_to(directory: &Path, out: impl Write) -> Result<(), ArchiveError> {
    let (base, over) = (directory.join("base"), directory.join("over"));
    qcow2::create(&base, 1 << 20, None, 0o600).unwrap();
    qcow2::create_over(&over, &base, false).unwrap();
    let record = record_over(over, &base);
    export_one(&stored(directory, &record), &record, &own(), out)
}

/// A pool with a snapshot of four pages.
fn stored(directory: &Path, record: &Record) -> Store {
    let pool = Pool::create(&directory.join("from"), "from").unwrap();
    let store = Store::new(Catalog::open(&pool).unwrap());
    let mut writer = store.begin("one").unwrap();
    writer.set_pages(4);
    let bytes = [[1; BLOCK], [2; BLOCK]].concat();
    let hashes: Vec<_> = bytes.chunks(BLOCK).map(|page| hash(page, writer.seed())).collect();
    writer.put(&[0, 3], &bytes, &hashes).unwrap();
    writer.keep_beside(record.encode());
    let regions = vec![(0, 4 * BLOCK as u64)];
    writer.commit("q 1".into(), regions).unwrap();
    store
}

fn own() -> Account {
    Account::of(std::process::id()).unwrap()
}

/// The record of a guest with this image over that one.
fn record_over(image: PathBuf, base: &Path) -> Record {
    let layers = [&image, base].map(|image| Layer::of(image).unwrap()).to_vec();
    record(vec![Disk { word: "over".into(), image, layers, ..Disk::default() }])
}

fn export_one(store: &Store, record: &Record, account: &Account, out: impl Write) -> Result<(), ArchiveError> {
    let regions = vec![(0, 4 * BLOCK as u64)];
    let view = store.view();
    let image = view.image(view.find("one").unwrap()).unwrap();
    let what = Exported { name: "one", created: 1, source: "q 1", regions: &regions, record, image: &image, account };
    export(&what, out, &Progress::new(Shown::Never))
}

#[test]
fn what_was_imported_is_exported_and_imported_again() {
    let from = tempfile::tempdir().unwrap();
    let mut bytes = archive(from.path());
    for _ in 0..3 {
        let to = Place::new();
        to.import(&bytes[..]).unwrap();
        let image = |number| to.directory.path().join(format!("disks/one.disk-0-{number}"));
        bytes.clear();
        export_one(&to.store, &record_over(image(0), &image(1)), &own(), &mut bytes).unwrap();
    }
}

/// Has an image show this file, by a header that is written anew, and sets its time back.
fn turn(image: &Path, to: &Path) {
    let (before, lie) = (std::fs::metadata(image).unwrap(), image.with_extension("lie"));
    qcow2::create_over(&lie, to, true).unwrap();
    std::fs::write(image, std::fs::read(&lie).unwrap()).unwrap();
    std::fs::remove_file(lie).unwrap();
    assert_eq!(before.len(), std::fs::metadata(image).unwrap().len());
    std::fs::File::open(image).unwrap().set_modified(before.modified().unwrap()).unwrap();
}

/// Whoever has a stored image can write another header, and set its time back.
#[test]
fn an_image_that_shows_another_file_by_now_is_not_copied() {
    let dir = tempfile::tempdir().unwrap();
    let [base, over, secret] = ["base", "over", "secret"].map(|name| dir.path().join(name));
    std::fs::write(&secret, "a secret of the host's").unwrap();
    qcow2::create(&base, 1 << 20, None, 0o600).unwrap();
    qcow2::create_over(&over, &base, false).unwrap();
    let record = record_over(over.clone(), &base);
    let store = stored(dir.path(), &record);
    export_one(&store, &record, &own(), io::sink()).unwrap();
    // The base's own header, which had named none, and then that of the image over it.
    for turned in [&base, &over] {
        turn(turned, &secret);
        let mut bytes = Vec::new();
        let error = export_one(&store, &record, &own(), &mut bytes).unwrap_err().to_string();
        let says = format!("the image {} shows other files than when it was stored", turned.display());
        assert!(error.starts_with(&says) && bytes.is_empty(), "{error}");
        let error = crate::clone::check_image(&record.description.disks[0]).unwrap_err();
        assert!(matches!(error, CloneError::Shows(_)), "clones and `verify` look, too: {error}");
    }
}

/// An earlier version has not noted the images, and a save notes what the headers say: a guest's
/// lead to no file that it could not read.
#[test]
fn a_header_leads_to_no_file_that_the_guest_could_not_read() {
    use std::os::unix::fs::{PermissionsExt, chown};
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: only root reads as others");
        return;
    }
    let nobody = Account { uid: 65534, gid: 65534, groups: Vec::new(), capabilities: 0 };
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o711)).unwrap();
    let [base, over] = ["base", "over"].map(|name| dir.path().join(name));
    qcow2::create(&base, 1 << 20, None, 0o600).unwrap();
    qcow2::create_over(&over, &base, false).unwrap();
    chown(&over, Some(65534), None).unwrap();
    let mut record = record_over(over, &base);
    record.description.disks[0].layers.clear();
    let store = stored(dir.path(), &record);
    let mut export = || {
        let noted = record.description.disks[0].note_layers(&nobody).map_err(|(image, _)| image);
        record.description.disks[0].layers.clear();
        let mut bytes = Vec::new();
        (noted, export_one(&store, &record, &nobody, &mut bytes).map_err(|error| error.to_string()), bytes.len())
    };
    let (noted, exported, len) = export();
    assert!(noted == Err(base.clone()) && len == 0, "{noted:?}");
    assert!(exported.unwrap_err().contains("base can't be used"));
    chown(&base, Some(65534), None).unwrap();
    let (noted, exported, _) = export();
    assert_eq!((noted, exported), (Ok(()), Ok(())));
}

/// While it is written, somebody writes to an image.
struct Meanwhile<'a>(Vec<u8>, &'a Path);

impl Write for Meanwhile<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.is_empty() {
            std::fs::OpenOptions::new().append(true).open(self.1)?.write_all(b"other")?;
        }
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn an_archive_of_an_image_that_changes_meanwhile_is_not_whole() {
    let (from, to) = (tempfile::tempdir().unwrap(), Place::new());
    let base = from.path().join("base");
    let mut out = Meanwhile(Vec::new(), &base);
    let error = archive_to(from.path(), &mut out).unwrap_err().to_string();
    assert!(error.contains("base"), "{error}");
    // Who reads it from a pipe does not see how the command ended.
    assert!(to.refuses(&out.0[..]).contains("damaged"));
}

/// Reads an archive with a pool and `disks` in this directory, and stores it.
fn import(from: impl Read, directory: &Path, store: &Store) -> Result<About, ArchiveError> {
    let is_taken = |name: &str| store.view().find(name).is_ok();
    let place =
        super::Place { pool: directory, disks: Some(&directory.join("disks")), name: None, is_taken: &is_taken };
    receive(from, &place)?.store((store, None), &Progress::new(Shown::Never), || {})
}

/// A pool and a directory for images into which archives are read.
struct Place {
    directory: tempfile::TempDir,
    store: Store,
}

impl Place {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let pool = Pool::create(&directory.path().join("pool"), "to").unwrap();
        Self { directory, store: Store::new(Catalog::open(&pool).unwrap()) }
    }

    fn import(&self, from: impl Read) -> Result<About, ArchiveError> {
        import(from, self.directory.path(), &self.store)
    }

    /// Why an archive is refused. Nothing of it is left.
    fn refuses(&self, from: impl Read) -> String {
        let error = self.import(from).map(drop).unwrap_err().to_string();
        assert!(self.store.view().checkpoints().is_empty(), "{error}");
        let left: Vec<_> = std::fs::read_dir(self.directory.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["pool"], "{error}");
        error
    }
}

/// An entry whose header announces `len` bytes.
fn entry(name: &str, kind: u8, len: u64, content: &[u8]) -> Vec<u8> {
    let mut header = tar::Header::new_gnu();
    header.set_path(name).unwrap();
    header.set_entry_type(tar::EntryType::new(kind));
    header.set_size(len);
    header.set_cksum();
    let mut bytes = [&header.as_bytes()[..], content].concat();
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

fn plain(name: &str, content: &[u8]) -> Vec<u8> {
    entry(name, b'0', content.len() as u64, content)
}

/// The description of a guest with this much memory.
fn about(bytes: u64) -> Vec<u8> {
    let description = record(Vec::new()).description;
    let (name, source) = ("one".into(), "q 1".into());
    let about = About {
        format: FORMAT,
        name,
        created: 1,
        source,
        regions: vec![(0, bytes)],
        description,
        images: vec![],
        allocated: 0,
    };
    plain("snapshot.json", &serde_json::to_vec(&about).unwrap())
}

#[test]
fn a_snapshot_comes_back_with_its_memory_and_its_images() {
    let (from, to) = (tempfile::tempdir().unwrap(), Place::new());
    let about = to.import(&archive(from.path())[..]).unwrap();
    let view = to.store.view();
    let image = view.image(view.find("one").unwrap()).unwrap();
    assert_eq!(image.filled().collect::<Vec<_>>(), [0, 3]);
    let disk = &about.description.disks[0];
    let below = to.directory.path().join("disks/one.disk-0-1");
    assert_eq!(qcow2::backing(&disk.image).unwrap(), Some(qcow2::Backing { image: below, raw: false }));
    assert_eq!(qcow2::disk_size(&disk.image).unwrap(), 1 << 20);
}

/// Whoever makes an archive may name any file of the host as the one below its lowest image.
#[test]
fn an_image_that_shows_a_file_of_the_host_is_refused() {
    let (from, to) = (tempfile::tempdir().unwrap(), Place::new());
    let mut bytes = archive(from.path());
    let base = std::fs::read(from.path().join("base")).unwrap();
    let at = bytes.windows(104).position(|part| part == &base[..104]).unwrap();
    let (secret, lie) = (from.path().join("secret"), from.path().join("lie"));
    qcow2::create(&secret, 1 << 20, None, 0o600).unwrap();
    qcow2::create_over(&lie, &secret, false).unwrap();
    bytes[at..at + 512].copy_from_slice(&std::fs::read(lie).unwrap()[..512]);
    let error = to.refuses(&bytes[..]);
    assert!(error.contains("its image disk-0-1: it shows files that are not in the archive"), "{error}");
}

#[test]
fn an_archive_that_is_cut_short_anywhere_leaves_nothing_and_says_where_it_ends() {
    let (from, to) = (tempfile::tempdir().unwrap(), Place::new());
    let whole = archive(from.path());
    // The last entry may end with a block of zeros, and the archive ends with two.
    for len in (0..whole.len() - 3 * 512).step_by(1000) {
        let error = to.refuses(&whole[..len]);
        assert!(!error.contains("fill whole buffer"), "{len}: {error}");
        let expected = if len < 2048 { "this is no archive of" } else { "the archive is damaged: " };
        assert!(error.starts_with(expected) || len < 4096, "{len}: {error}");
    }
    let ram = whole.windows(4).position(|word| word == b"ram\0").unwrap();
    assert!(to.refuses(&whole[..ram + 1024]).contains("it ends too early, in ram. Nothing was stored"));
}

/// Names of any length, attributes and holes are said by entries before or inside of others.
#[test]
fn an_entry_that_speaks_of_another_one_is_refused_unread() {
    let to = Place::new();
    for (name, kind) in [("././@LongLink", b'L'), ("snapshot.json", b'x'), ("snapshot.json", b'S'), ("pax", b'g')] {
        let mut lie = Cursor::new(entry(name, kind, 4 << 30, b"")).chain(std::io::repeat(b'a').take(4 << 30));
        let error = to.refuses(&mut lie);
        assert!(error.contains("in the place of the plain file snapshot.json"), "{error}");
        let (_, rest) = lie.into_inner();
        assert_eq!(rest.limit(), 4 << 30, "{name} was read");
    }
    let sparse = [about(8192), entry("devices", b'S', 1 << 50, b"")].concat();
    assert!(to.refuses(&sparse[..]).contains("of kind 'S' in the place of the plain file devices"));
}

#[test]
fn a_length_that_cannot_be_is_refused_before_anything_is_read() {
    let to = Place::new();
    let error = to.refuses(&entry("snapshot.json", b'0', 1 << 40, b"{}")[..]);
    assert!(error.contains("it has 1099511627776 bytes, and at most 2097152 are read"), "{error}");
    let before = [about(8192), plain("devices", b"")].concat();
    for (more, why) in [
        (entry("pages", b'0', 24, &[0; 24]), "it has 24 bytes, and at most 16 are read"),
        (plain("pages", &2_u64.to_le_bytes()), "its pages are none that the guest has"),
        (
            [plain("pages", &[0; 8]), entry("ram", b'0', 1 << 50, b"")].concat(),
            "its part ram: it has 1125899906842624 bytes, and at most 4096",
        ),
    ] {
        let error = to.refuses(&[&before[..], &more].concat()[..]);
        assert!(error.contains(why), "{error}");
    }
    let few = [&before[..], &plain("pages", &[0; 8]), &plain("ram", &[0; 512])].concat();
    assert!(to.refuses(&few[..]).contains("it lists 1 pages, and 512 bytes of them"));
    // Memory that no guest has.
    for bytes in [1 << 44, !4095, 4097] {
        assert!(to.refuses(&about(bytes)[..]).contains("its regions cannot be"), "{bytes}");
    }
    assert!(to.refuses(&about((1 << 44) - 4096)[..]).contains("has 16383 GiB of RAM, more than 32 times what"));
}

#[test]
fn what_there_is_no_room_for_is_refused_with_both_figures() {
    let to = Place::new();
    let mut about: About = serde_json::from_slice(about(8192)[512..].split(|byte| *byte == 0).next().unwrap()).unwrap();
    about.description.disks = vec![Disk { word: "d".into(), image: "/d".into(), raw: true, ..Disk::default() }];
    (about.images, about.allocated) = (vec![1], 1 << 60);
    let bytes = [plain("snapshot.json", &serde_json::to_vec(&about).unwrap()), plain("devices", b"")].concat();
    let error = to.refuses(&[bytes, plain("pages", b""), plain("ram", b"")].concat()[..]);
    assert!(
        error.starts_with("1099511627776 MiB are needed in ") && error.contains(" MiB are free: free some"),
        "{error}"
    );
}

#[test]
fn an_image_is_sparse_and_its_directory_is_its_owners_and_a_file_that_is_there_stays() {
    use std::os::unix::fs::MetadataExt;
    let (from, to) = (tempfile::tempdir().unwrap(), Place::new());
    let bytes = archive(from.path());
    to.import(&bytes[..]).unwrap();
    let disks = to.directory.path().join("disks");
    let meta = |name: &str| std::fs::metadata(disks.join(name)).unwrap();
    let base = meta("one.disk-0-1");
    assert!(base.blocks() * 512 < base.len(), "zeros are holes");
    assert_eq!((std::fs::metadata(&disks).unwrap().mode() & 0o777, base.mode() & 0o777), (0o700, 0o400));
    let error = to.import(&bytes[..]).map(drop).unwrap_err();
    assert!(matches!(error, ArchiveError::Begin(checkpoint::BeginError::Exists(_))), "{error}");
    let other = Place::new();
    std::fs::create_dir(other.directory.path().join("disks")).unwrap();
    let there = other.directory.path().join("disks/one.disk-0-1");
    rustix::fs::mknodat(rustix::fs::CWD, &there, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
    let error = other.import(&bytes[..]).map(drop).unwrap_err().to_string();
    assert!(error.contains("one.disk-0-1 is there already, and stays: give another name with --name"), "{error}");
    assert_eq!(std::fs::read_dir(other.directory.path().join("disks")).unwrap().count(), 1);
}

/// Images go when the snapshot is known not to be there, and only then.
#[test]
fn the_images_of_a_snapshot_that_may_be_there_stay() {
    let dir = tempfile::tempdir().unwrap();
    let archive = archive(dir.path());
    let mut unknown = 0;
    for (change, made) in (0..).flat_map(|change| [(change, false), (change, true)]) {
        let (memory, disks) = (Memory::default(), tempfile::tempdir().unwrap());
        let pool = Pool::create_on(Arc::new(memory.clone()), Path::new("/pool"), "to").unwrap();
        let store = Store::new(Catalog::open(&pool).unwrap());
        let before = memory.changes();
        memory.fail(before + change..u64::MAX, made);
        let outcome = import(&archive[..], disks.path(), &store);
        let is_over = memory.changes() <= before + change;
        drop(store);
        drop(pool);
        let pool = Pool::open_on(Arc::new(memory.copy()), Path::new("/pool"), mpool::OpenOptions::default()).unwrap();
        let there = Catalog::open(&pool).unwrap().find("one").is_ok();
        let images = std::fs::read_dir(disks.path().join("disks")).map_or(0, |all| all.count());
        match outcome {
            Ok(_) => assert!(there && images == 2),
            Err(ArchiveError::Store(error)) if error.is_unknown() => {
                unknown += 1;
                assert_eq!(images, 2, "{error}");
            }
            Err(error) => assert!(!there && images == 0, "{error}"),
        }
        if is_over {
            break;
        }
    }
    assert!(unknown > 0);
}

//! Archives and pools that somebody made who lies: each costs a sentence, little memory and little
//! time, and nothing is written where it does not belong.

#![allow(unsafe_code)] // Limits and usage of children.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use mpool::{BLOCK, OpenOptions, Pool, ROOT_MDC};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde::Serialize;
use serde_json::{Value, json};

/// Memory that a command may take, in KiB.
const MEMORY: i64 = 64 << 10;
/// Seconds of a CPU.
const SECONDS: u64 = 5;
const IMPORTED: &str = "snap";

/// Runs the test in a process of its own: what a child takes is counted with what its parent had.
fn alone(test: &str) -> bool {
    if std::env::var_os("PAGEONE_ALONE").is_some() {
        return true;
    }
    let own = std::env::current_exe().unwrap();
    let run = Command::new(own).args([test, "--exact", "--nocapture"]).env("PAGEONE_ALONE", "1").output().unwrap();
    assert!(run.status.success(), "{}{}", String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    print!("{}", String::from_utf8_lossy(&run.stdout));
    false
}

/// What a command said, with its exit code.
struct Said {
    code: i32,
    errors: String,
    /// What is wrong with how it ended.
    wrong: Option<String>,
}

/// Runs a command within its limits. `more`: bytes of zeros behind `input`.
#[allow(clippy::zombie_processes, reason = "wait4(2) waits for it, and gives its memory, too")]
fn pageone(place: &Path, words: &[&str], input: &[u8], more: u64) -> Said {
    let errors = place.join("errors");
    let mut command = Command::new(e2e::program("pageone"));
    command.args(words).env("PAGEONE_POOLS", place.join("names")).env("PAGEONE_DIR", place.join("run"));
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(File::create(&errors).unwrap());
    // SAFETY: a system call.
    unsafe {
        command.pre_exec(|| {
            let limit = libc::rlimit { rlim_cur: SECONDS, rlim_max: SECONDS + 1 };
            libc::setrlimit(libc::RLIMIT_CPU, &limit);
            Ok(())
        })
    };
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let (input, pid) = (input.to_vec(), child.id() as i32);
    let writes = std::thread::spawn(move || {
        let _ = stdin.write_all(&input);
        let zeros = [0; 1 << 16];
        let _ = (0..more).step_by(zeros.len()).try_for_each(|_| stdin.write_all(&zeros));
    });
    let start = Instant::now();
    let mut status = 0;
    // SAFETY: all fields are numbers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes to two local variables.
    while unsafe { libc::wait4(pid, &mut status, libc::WNOHANG, &mut usage) } == 0 {
        if start.elapsed() > Duration::from_secs(120) * e2e::patience() {
            child.kill().unwrap();
            panic!("{words:?} does not end");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    writes.join().unwrap();
    let errors = String::from_utf8_lossy(&fs::read(errors).unwrap()).into_owned();
    let (code, kib) = (libc::WEXITSTATUS(status), usage.ru_maxrss);
    let last = errors.lines().last().unwrap_or_default();
    let is_sentence = last.starts_with("pageone: ") && last.len() > 15 && !errors.contains("panicked");
    let is_well = libc::WIFEXITED(status) && kib <= MEMORY && (code == 0 || (code <= 8 && is_sentence));
    let wrong = (!is_well).then(|| format!("{words:?}: {status:#x}, {kib} KiB: {errors}"));
    Said { code, errors, wrong }
}

/// All names below a directory, but for those in `but`.
fn names(directory: &Path, but: &[&str]) -> Vec<PathBuf> {
    let (mut left, mut all) = (vec![directory.to_owned()], Vec::new());
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(directory).unwrap().flatten() {
            if !but.iter().any(|but| entry.file_name() == *but) {
                all.push(entry.path());
                left.extend(entry.file_type().unwrap().is_dir().then(|| entry.path()));
            }
        }
    }
    all.sort();
    all
}

/// An entry of an archive; its header says `len`.
fn entry(name: &str, kind: u8, len: u64, content: &[u8]) -> Vec<u8> {
    let mut header = [0; 512];
    header[..name.len()].copy_from_slice(name.as_bytes());
    header[100..107].copy_from_slice(b"0000600");
    // Base 256, as GNU's tar writes what is too large for octal digits.
    header[124] = 0x80;
    header[128..136].copy_from_slice(&len.to_be_bytes());
    header[136..147].copy_from_slice(b"00000000000");
    header[156] = kind;
    header[257..265].copy_from_slice(b"ustar  \0");
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let mut bytes = [&header[..], content].concat();
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

/// What a whole archive is made of.
struct Parts {
    about: Value,
    pages: Vec<u8>,
    images: Vec<Vec<u8>>,
}

fn parts() -> Parts {
    let facts = json!({ "qemu": "7.2.0", "machine": "pc", "cpu": "qemu64", "features": [], "cpus": 1, "ram": 65536, "devices": [] });
    let disk = json!({ "word": "/d", "image": "/x", "raw": false });
    let description = json!({ "program": "/nonexistent/qemu", "directory": "/", "words": ["-m", "1"], "facts": facts, "disks": [disk] });
    let about = json!({ "format": 1, "name": IMPORTED, "created": 1, "source": "q 1", "regions": [[0, 65536]], "description": description, "images": [1] });
    let place = tempfile::tempdir().unwrap();
    snapshot::qcow2::create(&place.path().join("d"), 1 << 20, None, 0o600).unwrap();
    Parts { about, pages: 1_u64.to_le_bytes().to_vec(), images: vec![fs::read(place.path().join("d")).unwrap()] }
}

/// The entries of an archive, and its sum.
fn entries(parts: &Parts) -> Vec<(String, Vec<u8>)> {
    let ram = vec![7; parts.pages.len() / 8 * BLOCK];
    let mut all = vec![
        ("snapshot.json".into(), serde_json::to_vec(&parts.about).unwrap()),
        ("devices".into(), b"devices".to_vec()),
        ("pages".into(), parts.pages.clone()),
        ("ram".into(), ram),
    ];
    all.extend(parts.images.iter().enumerate().map(|(at, image)| (format!("disk-0-{at}"), image.clone())));
    let sum = xxhash_rust::xxh3::xxh3_128(&all.iter().flat_map(|(_, bytes)| bytes.clone()).collect::<Vec<_>>());
    all.push(("xxh3".into(), format!("{sum:032x}").into_bytes()));
    all
}

fn archive(parts: &Parts) -> Vec<u8> {
    let plain = |(name, content): &(String, Vec<u8>)| entry(name, b'0', content.len() as u64, content);
    [entries(parts).iter().flat_map(plain).collect(), vec![0; 1024]].concat()
}

/// An archive that lies: what it is called here, its bytes, and how many zeros follow.
type Lie = (String, Vec<u8>, u64);

fn archives() -> Vec<Lie> {
    let mut all = Vec::new();
    let all_entries = entries(&parts());
    let before = |at: usize| -> Vec<u8> {
        let plain = |(name, content): &(String, Vec<u8>)| entry(name, b'0', content.len() as u64, content);
        all_entries[..at].iter().flat_map(plain).collect()
    };
    for (at, (name, content)) in all_entries.iter().enumerate() {
        for len in [1 << 33, 1 << 50, i64::MAX as u64, u64::MAX] {
            all.push((
                format!("{name} of {len} bytes"),
                [before(at), entry(name, b'0', len, content)].concat(),
                1 << 26,
            ));
        }
        for kind in *b"LKxgS12346" {
            let lie = [before(at), entry(name, kind, 4 << 30, b"a")].concat();
            all.push((format!("{name} of kind {}", char::from(kind)), lie, 4 << 30));
        }
        all.push((
            format!("it ends in {name}"),
            [before(at), entry(name, b'0', content.len() as u64, content)[..515].to_vec()].concat(),
            0,
        ));
        all.push((format!("it ends before {name}"), before(at), 0));
    }
    for name in ["../disk-0-0", "/etc/passwd", "disk-0-1", "disk-0-0/", "", "xxh3"] {
        all.push((format!("an image called {name:?}"), [before(4), entry(name, b'0', 9, b"some text")].concat(), 0));
    }
    let mut lie = |what: &str, change: &dyn Fn(&mut Parts)| {
        let mut lying = parts();
        change(&mut lying);
        all.push((what.into(), archive(&lying), 0));
    };
    for regions in [
        json!([[0, 1_u64 << 44]]),
        json!([[0, (1_u64 << 44) - 4096]]),
        json!([[0, 8_u64 << 40]]),
        json!([[0, u64::MAX], [0, 4097]]),
        json!([[0, 1_u64 << 57]]),
        json!([[0, 65537]]),
        json!([[0, -4096]]),
        json!([]),
    ] {
        lie(&format!("RAM {regions}"), &|parts| parts.about["regions"] = regions.clone());
    }
    for images in [json!([u64::MAX]), json!([0]), json!([2]), json!([]), json!([1, 1]), json!([1_u64 << 40])] {
        lie(&format!("images {images}"), &|parts| parts.about["images"] = images.clone());
    }
    for name in [String::new(), "n".repeat(128), "a\nb".into(), "a\u{1b}[2J".into()] {
        lie(&format!("a name {name:?}"), &|parts| parts.about["name"] = name.clone().into());
    }
    lie("many features", &|parts| parts.about["description"]["facts"]["features"] = json!(vec![""; 900_000]));
    lie("a long word", &|parts| parts.about["description"]["words"] = json!(["w".repeat(4 << 20)]));
    lie("room that nobody has", &|parts| parts.about["allocated"] = (1_u64 << 62).into());
    lie("pages in no order", &|parts| parts.pages = [2_u64, 1].iter().flat_map(|page| page.to_le_bytes()).collect());
    lie("one page twice", &|parts| parts.pages = [1_u64, 1].iter().flat_map(|page| page.to_le_bytes()).collect());
    lie("a page that is not there", &|parts| parts.pages = u64::MAX.to_le_bytes().to_vec());
    for (what, at, bytes) in [
        ("a disk of 2^63 bytes", 24, &(1_u64 << 63).to_be_bytes()[..]),
        ("clusters of 2^255 bytes", 20, &255_u32.to_be_bytes()),
        ("clusters of a byte", 20, &0_u32.to_be_bytes()),
        ("an L1 table behind the end", 40, &(1_u64 << 62).to_be_bytes()),
        ("a long L1 table", 36, &u32::MAX.to_be_bytes()),
        ("refcounts behind the end", 48, &u64::MAX.to_be_bytes()),
        ("many refcounts", 56, &u32::MAX.to_be_bytes()),
        ("a backing name behind the end", 8, &u64::MAX.to_be_bytes()),
        ("a backing name in the header", 8, &40_u64.to_be_bytes()),
        ("data in another file", 72, &4_u64.to_be_bytes()),
        ("no qcow2", 0, b"QED\0"),
    ] {
        lie(what, &|parts| parts.images[0][at..at + bytes.len()].copy_from_slice(bytes));
    }
    for below in ["/etc/passwd", "snap.disk-0-1", "json:{\"driver\":\"file\",\"filename\":\"/etc/passwd\"}", "nbd:host"]
    {
        lie(&format!("above {below}"), &|parts| {
            let place = tempfile::tempdir().unwrap();
            let image = place.path().join("d");
            snapshot::qcow2::create(&image, 1 << 20, Some((Path::new(below), false)), 0o600).unwrap();
            parts.images[0] = fs::read(image).unwrap();
        });
    }
    lie("an empty image", &|parts| parts.images[0].clear());
    let deep = format!("{}{}", "[".repeat(1 << 20), "]".repeat(1 << 20));
    all.push(("deep JSON".into(), entry("snapshot.json", b'0', deep.len() as u64, deep.as_bytes()), 0));
    all.push(("zeros".into(), Vec::new(), 1 << 30));
    all
}

/// A copy of a pool's directory.
fn copy(from: &Path, to: &Path) {
    let _ = fs::remove_dir_all(to);
    let done = Command::new("cp").arg("-r").args([from, to]).status().unwrap();
    assert!(done.success());
}

/// Puts something else in the place of a file.
fn replace(file: &Path, kind: &str, place: &Path) {
    let _ = fs::remove_file(file);
    let node = |kind, device| mknodat(CWD, file, kind, Mode::RUSR | Mode::WUSR, device).unwrap();
    match kind {
        "a FIFO" => node(FileType::Fifo, 0),
        "/dev/zero" => node(FileType::CharacterDevice, rustix::fs::makedev(1, 5)),
        "a socket" => drop(UnixListener::bind(file).unwrap()),
        "a link to a device" => std::os::unix::fs::symlink("/dev/zero", file).unwrap(),
        "a link to a file" => std::os::unix::fs::symlink(place.join("secret"), file).unwrap(),
        "a directory" => fs::create_dir(file).unwrap(),
        "nothing" => {}
        "an empty file" => drop(File::create(file).unwrap()),
        "a file of 8 TiB" => File::create(file).unwrap().set_len(8 << 40).unwrap(),
        other => fs::write(file, other.repeat(1 << 12)).unwrap(),
    }
}

/// An entry of the index.
type Found = (u64, u32, u64);

/// Records of the list of checkpoints, laid out as the catalogue's own (`list.rs`).
#[derive(Serialize)]
enum Record {
    _Format(u32),
    Data(Vec<(u64, u32)>),
    Checkpoint(Checkpoint, (Vec<(u64, u32)>, Vec<u64>)),
    Gone(String),
    DataGone(Vec<u64>),
    Index(Vec<(u8, Vec<Found>)>, u64),
    Attached(u64, (Vec<u64>, u64)),
    Compressed(Vec<(u64, u32)>),
}

#[derive(Serialize)]
struct Checkpoint {
    name: String,
    created: u64,
    source: String,
    regions: Vec<(u64, u64)>,
    new_pages: u64,
    map_pages: u64,
    root: u64,
    number: u64,
}

/// Lists that lie about the mblocks with these numbers.
fn records(ids: &[u64]) -> Vec<(String, Vec<Record>)> {
    let checkpoint = |name: &str, root: u64, len: u64, needs| {
        let regions = vec![(0, len)];
        let (name, source) = (name.into(), "\u{1b}[2Jq".into());
        let one = Checkpoint {
            name,
            created: u64::MAX,
            source,
            regions,
            new_pages: if len == u64::MAX { len } else { len >> 12 },
            map_pages: 9,
            root,
            number: root,
        };
        Record::Checkpoint(one, needs)
    };
    let every = vec![(0, u32::MAX), (1 << 32, u32::MAX), (u64::MAX, u32::MAX)];
    let mut all = Vec::new();
    for &id in ids {
        for len in [1 << 44, 1 << 56, u64::MAX, 1 << 30] {
            let lie = vec![checkpoint(IMPORTED, id, len, (every.clone(), vec![id; 1000]))];
            all.push((format!("{len} bytes with the root {id:#x}"), lie));
        }
        all.push((format!("{id:#x} is removed"), vec![Record::DataGone(vec![id])]));
        all.push((format!("{id:#x} has pages"), vec![Record::Data(vec![(id, u32::MAX)])]));
        all.push((format!("{id:#x} is compressed"), vec![Record::Compressed(vec![(id, u32::MAX)])]));
        all.push((
            format!("{id:#x} is an index"),
            vec![Record::Index(vec![(255, vec![(id, u32::MAX, 0); 100])], u64::MAX)],
        ));
        let beside =
            |len| (0..1 << 10).map(|number| Record::Attached(number, (vec![id; 100], len))).collect::<Vec<_>>();
        all.push((format!("{id:#x} beside all, many times"), beside(u64::MAX)));
        all.push((
            format!("{id:#x} is everything"),
            vec![
                Record::Data(vec![(id, 8192)]),
                checkpoint(IMPORTED, id, 1 << 30, (vec![(id, 1)], vec![id])),
                Record::Attached(id, (vec![id], 4096)),
            ],
        ));
    }
    all.push((
        "names".into(),
        (0..2000)
            .map(|at| checkpoint(&format!("\u{1b}{at}{}", "n".repeat(1000)), at, 4096, (Vec::new(), Vec::new())))
            .collect(),
    ));
    all.push(("removed".into(), vec![Record::Gone(IMPORTED.into()), Record::Gone("other".into())]));
    all
}

fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| (sum >> 1) ^ (0x82f6_3b78 & (sum & 1).wrapping_neg()))
    })
}

#[test]
fn archives_of_anybody_cost_a_sentence_and_leave_nothing() {
    if !alone("hostile::archives_of_anybody_cost_a_sentence_and_leave_nothing") {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let (pool, disks) =
        (place.path().join("pool").display().to_string(), place.path().join("disks").display().to_string());
    let import = ["snapshot", "import", &pool, "--disks", &disks];
    let run = |input: &[u8], more| pageone(place.path(), &import, input, more);
    assert_eq!(pageone(place.path(), &["pool", "create", "store", "--capacity", &pool], b"", 0).code, 0);
    let before = names(place.path(), &["errors"]);
    let all = archives();
    let mut wrong = Vec::new();
    for (what, bytes, more) in &all {
        let said = run(bytes, *more);
        let left = names(place.path(), &["errors"]);
        wrong.extend(said.wrong.map(|wrong| format!("{what}: {wrong}")));
        wrong.extend((said.code != 1 || left != before).then(|| format!("{what}: {left:?}: {}", said.errors)));
        let _ = fs::remove_dir_all(&disks);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(all.len() >= 100);
    println!("{} archives were refused", all.len());
    // What all of them are made of is no lie.
    let said = run(&archive(&parts()), 0);
    assert_eq!(said.code, 0, "{}", said.errors);
}

#[test]
fn pools_of_anybody_cost_a_sentence_and_nothing_outside_is_touched() {
    if !alone("hostile::pools_of_anybody_cost_a_sentence_and_nothing_outside_is_touched") {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name).display().to_string();
    let run = |words: &[&str]| pageone(place.path(), words, b"", 0);
    for (name, key) in [("whole", None), ("sealed", Some(path("key")))] {
        let key = key.iter().flat_map(|key| ["--key-file", key]).collect::<Vec<_>>();
        let mut random = [0; 32];
        File::open("/dev/urandom").unwrap().read_exact(&mut random).unwrap();
        fs::write(place.path().join("key"), random).unwrap();
        fs::set_permissions(place.path().join("key"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        assert_eq!(run(&[&["pool", "create", name, "--capacity", &path(name)][..], &key].concat()).code, 0);
        let input = archive(&parts());
        let said = pageone(
            place.path(),
            &["snapshot", "import", &path(name), "--disks", &path(&format!("{name}-disks"))],
            &input,
            0,
        );
        assert_eq!(said.code, 0, "{}", said.errors);
    }
    fs::write(place.path().join("secret"), "secret").unwrap();
    let pool = path("pool");
    let is_lane = std::env::var_os("PAGEONE_HOSTILE_POOLS").is_some();
    let changing = ["errors", "pool", "out.tar", "clones", "names"];
    let before = names(place.path(), &changing);
    let (mut count, mut failed, mut wrong) = (0, 0, Vec::new());
    let mut try_all = |what: &str| {
        count += 1;
        for words in [
            &["snapshot", "ls", &pool][..],
            &["snapshot", "verify", &pool, IMPORTED, "--read-only"],
            &["snapshot", "export", &pool, IMPORTED, "-o", &path("out.tar"), "--force"],
            &["snapshot", "run", &pool, IMPORTED, "--trust", "--files", &path("clones")],
            &["pool", "check", &pool],
            &["snapshot", "rm", &pool, IMPORTED],
        ] {
            let said = run(words);
            failed += usize::from(said.code != 0);
            let left = names(place.path(), &changing);
            let is_touched = left != before || fs::read(place.path().join("secret")).unwrap() != b"secret";
            wrong.extend(said.wrong.map(|wrong| format!("{what}: {wrong}")));
            wrong.extend(is_touched.then(|| format!("{what}: {words:?}: {left:?}")));
        }
    };
    let kinds = [
        "a FIFO",
        "/dev/zero",
        "a socket",
        "a link to a device",
        "a link to a file",
        "a directory",
        "nothing",
        "an empty file",
        "a file of 8 TiB",
        "x",
    ];
    for from in ["whole", "sealed"] {
        let mut files: Vec<_> = fs::read_dir(path(from)).unwrap().flatten().map(|entry| entry.file_name()).collect();
        files.retain(|name| from == "whole" || name.to_string_lossy().starts_with("wrapped"));
        // Copies are opened as what they are of.
        files.retain(|name| !name.to_string_lossy().ends_with(".copy"));
        files.push("lease-0000000000000001".into());
        files.sort();
        for (at, file) in files.iter().enumerate() {
            // Each file is one of each kind in the lane; a few of them elsewhere.
            for kind in
                kinds.iter().enumerate().filter(|(kind, _)| is_lane || (at + kind).is_multiple_of(4)).map(|kind| kind.1)
            {
                copy(Path::new(&path(from)), Path::new(&pool));
                replace(&Path::new(&pool).join(file), kind, place.path());
                try_all(&format!("{from}: {kind} as {}", file.display()));
            }
        }
    }
    // A wrapped key that names another file as the user's.
    for named in ["/dev/zero", "/etc/shadow", "/proc/self/mem", &path("names"), "\0"] {
        copy(Path::new(&path("sealed")), Path::new(&pool));
        for file in ["wrapped-key", "wrapped-key.copy"] {
            let file = Path::new(&pool).join(file);
            let mut block = fs::read(&file).unwrap();
            block[12..16].copy_from_slice(&(named.len() as u32).to_le_bytes());
            block[120..120 + named.len()].copy_from_slice(named.as_bytes());
            let sum = crc32c(&block[..4092]);
            block[4092..4096].copy_from_slice(&sum.to_le_bytes());
            fs::write(file, block).unwrap();
        }
        try_all(&format!("the key {named:?}"));
    }
    let ids: Vec<u64> =
        Pool::open(Path::new(&path("whole")), OpenOptions::default()).unwrap().mblocks().iter().map(|m| m.id).collect();
    for (what, lies) in records(&ids) {
        copy(Path::new(&path("whole")), Path::new(&pool));
        {
            let pool = Pool::open(Path::new(&pool), OpenOptions::default()).unwrap();
            let mut list = pool.mdc_open(ROOT_MDC).unwrap();
            lies.iter().for_each(|lie| list.append(&[&postcard::to_allocvec(lie).unwrap()], true).unwrap());
        }
        try_all(&what);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(count >= if is_lane { 100 } else { 40 } && failed > count, "{count} {failed}");
    println!("{count} pools, {failed} refusals");
}

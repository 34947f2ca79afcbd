//! `pageone estimate`: right figures, nothing changed, and bad targets named while the others go
//! on.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, PoisonError};

use e2e::{Guest, program, skipped};
use serde_json::Value;

const PAGE: usize = 4096;
const LEFT_OUT: i32 = 8;

/// Tests that fill much of this process's memory, or look at it, run one at a time.
static MEMORY: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    MEMORY.lock().unwrap_or_else(PoisonError::into_inner)
}

fn estimate(args: &[&str]) -> Output {
    Command::new(program("pageone")).arg("estimate").args(args).output().unwrap()
}

/// The report, and the exit code.
fn report(args: &[&str]) -> (Value, i32) {
    let out = estimate(&[args, &["--json"]].concat());
    let report = serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {out:?}"));
    (report, out.status.code().unwrap())
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// chunks, zero, shared within, shared with others, unique.
fn columns(target: &Value) -> [u64; 5] {
    ["chunks", "zero", "shared_within", "shared_with_others", "unique"].map(|name| number(&target[name]))
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&self.next().to_le_bytes()));
    }
}

/// Content number `n` of `len` bytes: 0 is zero, odd ones differ from the next even one in the last
/// byte alone.
fn content(n: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    if n > 0 {
        Random(n.div_ceil(2)).fill(&mut bytes);
        bytes[len - 1] = (n % 2) as u8;
    }
    bytes
}

/// Files of random contents against a plain model, for several sizes of chunks and threads.
#[test]
fn figures_are_those_of_a_plain_model() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    for (chunk, threads) in [(512, "1"), (4096, "1"), (4096, "3"), (1 << 20, "2")] {
        let mut random = Random(chunk as u64);
        let mut model: Vec<BTreeMap<u64, u64>> = Vec::new();
        let mut paths = Vec::new();
        for file in 0..4 {
            let chunks = if chunk > PAGE { 20 } else { 3000 };
            let numbers: Vec<u64> = (0..chunks).map(|_| random.next() % (chunks / 2) + file * chunks / 8).collect();
            let mut counts = BTreeMap::new();
            numbers.iter().for_each(|&n| *counts.entry(n).or_insert(0) += 1);
            let mut bytes: Vec<u8> = numbers.iter().flat_map(|&n| content(n, chunk)).collect();
            // The last chunk is filled up with zeros: cut one that ends so.
            bytes.extend([7; 100]);
            *counts.entry(u64::MAX).or_insert(0) += 1;
            model.push(counts);
            let path = dir.path().join(format!("{chunk}-{threads}-{file}"));
            std::fs::write(&path, bytes).unwrap();
            paths.push(path);
        }
        let mut args: Vec<&str> = paths.iter().map(|path| text(path)).collect();
        let chunk = chunk.to_string();
        args.extend(["--chunk", &chunk, "--threads", threads]);
        let (report, code) = report(&args);
        assert_eq!(code, 0);
        assert_eq!(report["sampled_one_in"], 1);
        let mut all: BTreeMap<u64, u64> = BTreeMap::new();
        for (i, counts) in model.iter().enumerate() {
            let mut expected = [0; 5];
            for (n, &count) in counts {
                *all.entry(*n).or_default() += count;
                expected[0] += count;
                let elsewhere = model.iter().enumerate().any(|(j, other)| j != i && other.contains_key(n));
                expected[match (n, elsewhere, count) {
                    (0, ..) => 1,
                    (_, true, _) => 3,
                    (_, false, 1) => 4,
                    _ => 2,
                }] += count;
            }
            assert_eq!(columns(&report["targets"][i]), expected, "file {i}, chunk {chunk}");
        }
        for pair in report["pairs"].as_array().unwrap() {
            let index = |name: &Value| paths.iter().position(|path| text(path) == name).unwrap();
            let (a, b) = (&model[index(&pair["a"])], &model[index(&pair["b"])]);
            let common = a.keys().filter(|n| **n > 0 && b.contains_key(n)).count() as u64;
            assert_eq!(number(&pair["chunks"]), common);
        }
        let zero = all.remove(&0).unwrap_or(0);
        let total = &report["total"];
        let sharing: u64 = all.values().map(|count| count - 1).sum();
        assert_eq!(number(&total["pages_zero"]), zero);
        assert_eq!(number(&total["pages_sharing"]), sharing);
        assert_eq!(number(&total["pages_shared"]), all.values().filter(|&&count| count > 1).count() as u64);
        assert_eq!(number(&total["pages_unshared"]), all.values().filter(|&&count| count == 1).count() as u64);
        assert_eq!(report.get("ksm").is_some(), chunk == "4096");
    }
}

/// Private memory of a process and a file with the same pages. The process is only looked at.
#[test]
fn a_process_is_seen_and_not_changed() {
    const PAGES: usize = 4096;
    let _alone = alone();
    let mut memory = vec![0u8; (PAGES + 1) * PAGE];
    let start = memory.as_ptr().align_offset(PAGE);
    Random(77).fill(&mut memory[start..start + PAGES * PAGE]);
    let untouched = vec![0u8; 256 << 20]; // never written: must stay so
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("same");
    std::fs::write(&path, &memory[start..start + PAGES * PAGE]).unwrap();
    let pid = std::process::id().to_string();
    for chunk in ["512", "4096", "65536"] {
        let before = kmem::procfs::smaps_rollup(None).unwrap().anonymous;
        let (report, code) = report(&[&pid, text(&path), "--chunk", chunk]);
        let after = kmem::procfs::smaps_rollup(None).unwrap().anonymous;
        assert_eq!(code, 0);
        assert!(after < before + (16 << 10), "{before} KiB before, {after} after");
        let per_page = PAGE as f64 / chunk.parse::<f64>().unwrap();
        let chunks = (PAGES as f64 * per_page) as u64;
        let file = columns(&report["targets"][1]);
        assert_eq!(file[0], chunks);
        // At the ends of the memory, larger chunks hold something else too; or lie otherwise in the
        // file.
        if chunk != "65536" {
            assert_eq!(file[3], chunks, "{chunk}");
            assert!(number(&report["pairs"][0]["chunks"]) >= chunks);
        }
        let process = &report["targets"][0];
        assert_eq!((&process["kind"], &process["program"]), (&"process".into(), &program_name().into()));
        assert!(number(&process["chunks"]) >= chunks);
        let bytes = number(&process["chunks"]) * chunk.parse::<u64>().unwrap();
        // The tests before this one leave some memory, and the program is looked at too.
        let most = (after << 10) + (64 << 20);
        assert!(bytes < most, "{bytes} of {most}: memory that was never written is not looked at");
    }
    assert_eq!(std::fs::read(&path).unwrap(), &memory[start..start + PAGES * PAGE]);
    assert!(untouched.iter().step_by(PAGE).all(|&byte| byte == 0));
}

/// The name of this program as the kernel has it: 15 bytes.
fn program_name() -> String {
    std::fs::read_to_string("/proc/self/comm").unwrap().trim_end().into()
}

#[test]
fn holes_are_zero_without_being_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sparse");
    let file = File::create(&path).unwrap();
    if file.set_len(1 << 40).is_err() {
        return skipped("no file of 1 TiB fits here");
    }
    file.write_all_at(&[1; 2 * PAGE], 1 << 39).unwrap();
    let (report, code) = report(&[text(&path)]);
    assert_eq!(code, 0);
    assert_eq!(columns(&report["targets"][0]), [1 << 28, (1 << 28) - 2, 2, 0, 0]);
    assert!(number(&report["bytes_read"]) < 1 << 20, "{}", report["bytes_read"]);
}

#[test]
fn a_directory_counts_each_file_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    std::fs::create_dir_all(path("a/b/c")).unwrap();
    for (i, name) in ["a/1", "a/b/2", "a/b/c/3", "own"].into_iter().enumerate() {
        std::fs::write(path(name), [&content(50, PAGE)[..], &content(10 + 2 * i as u64, PAGE)].concat()).unwrap();
    }
    std::fs::write(path("empty"), "").unwrap();
    std::fs::hard_link(path("a/1"), path("a/b/again")).unwrap();
    symlink(path("a/1"), path("link")).unwrap();
    symlink(path("a"), path("loop")).unwrap();
    // The directory, a file in it and a directory in it: each counts in its own line.
    let (top, own, inner) = (path(""), path("own"), path("a/b/c"));
    let (report, code) = report(&[text(&top), text(&own), text(&inner), text(&own)]);
    assert_eq!(code, 0, "{report}");
    assert_eq!(columns(&report["targets"][0]), [4, 0, 0, 2, 2]);
    assert_eq!(columns(&report["targets"][1]), [2, 0, 0, 1, 1]);
    assert_eq!(columns(&report["targets"][2]), [2, 0, 0, 1, 1]);
    let notes = report["notes"].as_array().unwrap();
    assert!(notes.iter().any(|note| note.as_str().unwrap().contains("twice")), "{notes:?}");
}

#[test]
fn bad_targets_are_named_and_the_others_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    std::fs::write(path("good"), content(2, PAGE)).unwrap();
    std::fs::write(path("empty"), "").unwrap();
    assert!(Command::new("mkfifo").arg(path("fifo")).status().unwrap().success());
    let _socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
    let (good, empty, fifo, socket, none) = (path("good"), path("empty"), path("fifo"), path("socket"), path("none"));
    let all = [text(&none), text(&fifo), text(&socket), "/dev/null", "2147483647", text(&good), text(&empty), "2"];
    let (report, code) = report(&all);
    assert_eq!(code, LEFT_OUT);
    let targets = report["targets"].as_array().unwrap();
    assert_eq!(targets.len(), 2, "{report}");
    assert_eq!(columns(&targets[0]), [1, 0, 0, 0, 1]);
    assert_eq!(columns(&targets[1]), [0; 5], "an empty file is no error");
    let left_out = report["left_out"].as_array().unwrap();
    let reason = |target: &str| {
        let one = left_out.iter().find(|one| one["target"] == target).unwrap_or_else(|| panic!("{target}: {report}"));
        one["reason"].as_str().unwrap().to_string()
    };
    for (target, word) in [
        (text(&none), "no such file"),
        (text(&fifo), "a FIFO"),
        (text(&socket), "a socket"),
        ("/dev/null", "a character device"),
        ("2147483647", "no process"),
        ("2", "kernel thread"),
    ] {
        assert!(reason(target).contains(word), "{target}: {}", reason(target));
    }
    assert_eq!(left_out.len(), 6);
    // In a directory too, and on standard error when a person reads.
    let out = estimate(&[text(dir.path())]);
    let error = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(LEFT_OUT));
    assert!(error.contains("fifo: it is a FIFO") && error.contains("socket: it is a socket"), "{error}");
    assert!(String::from_utf8_lossy(&out.stdout).contains("pages_unshared 1"));
    // Nothing at all.
    let out = estimate(&[text(&none)]);
    assert_eq!((out.status.code(), out.stdout.len()), (Some(LEFT_OUT), 0));
    // Wrong usage.
    for args in [&[][..], &["x", "--chunk", "1000"], &["x", "--chunk", "256"], &["x", "--limit-memory", "0"]] {
        assert_eq!(estimate(args).status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn without_permission_a_target_is_left_out() {
    if !rustix::process::geteuid().is_root() {
        return skipped("only root can become nobody");
    }
    if !Command::new("setpriv").arg("--version").output().is_ok_and(|out| out.status.success()) {
        return skipped("no setpriv (util-linux)");
    }
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    let set = |path: &Path, mode| std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    set(dir.path(), 0o755);
    let copy = dir.path().join("pageone");
    std::fs::copy(program("pageone"), &copy).unwrap();
    let (open, closed, closed_dir) = (dir.path().join("open"), dir.path().join("closed"), dir.path().join("dir"));
    std::fs::write(&open, content(2, PAGE)).unwrap();
    std::fs::write(&closed, content(2, PAGE)).unwrap();
    std::fs::create_dir(&closed_dir).unwrap();
    set(&open, 0o644);
    set(&closed, 0o600);
    set(&closed_dir, 0o700);
    let pid = std::process::id().to_string();
    let out = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"])
        .arg(&copy)
        .args(["estimate", "--json", &pid, text(&open), text(&closed), text(&closed_dir)])
        .output()
        .unwrap();
    assert_eq!(out.status.code(), Some(LEFT_OUT), "{out:?}");
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(report["targets"].as_array().unwrap().len(), 1);
    let left_out = report["left_out"].as_array().unwrap();
    assert_eq!(left_out.len(), 3);
    assert!(left_out.iter().all(|one| one["reason"].as_str().unwrap().contains("no permission")), "{left_out:?}");
}

/// Two files of 400,000 distinct chunks, of which a quarter is in both, in the memory of a few.
#[test]
fn memory_is_bounded_and_the_rest_is_estimated() {
    const CHUNKS: u64 = 400_000;
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let mut paths = Vec::new();
    for file in 0..2u64 {
        let path = dir.path().join(file.to_string());
        let bytes: Vec<u8> = (0..CHUNKS).flat_map(|i| content(2 * (1 + i + file * CHUNKS * 3 / 4), 512)).collect();
        std::fs::write(&path, bytes).unwrap();
        paths.push(path);
    }
    let (report, code) = report(&[text(&paths[0]), text(&paths[1]), "--chunk", "512", "--limit-memory", "2"]);
    assert_eq!(code, 0);
    assert!(number(&report["sampled_one_in"]) >= 8, "{report}");
    assert!(number(&report["index_bytes"]) <= 2 << 20, "{report}");
    // The program itself, its threads' blocks, and what an allocator keeps.
    assert!(number(&report["peak_bytes"]) < 24 << 20, "{report}");
    let common = (CHUNKS / 4) as f64;
    let error = number(&report["targets"][0]["shared_with_others_plus_minus"]) as f64;
    assert!(error > 0.0 && error < common / 5.0, "{report}");
    // Twice as far as one time in 20 it is: once in ten thousand.
    let found = number(&report["targets"][0]["shared_with_others"]) as f64;
    assert!((found - common).abs() < 2.0 * error, "{found} ± {error} for {common}");
    assert_eq!(number(&report["total"]["chunks"]), 2 * CHUNKS, "what is counted without an index is exact");
}

#[test]
fn guests_are_found_and_their_memory_is_compared() {
    const MEMORY: u64 = 192;
    let words = match Guest::words(MEMORY as u32) {
        Ok(words) => words,
        Err(why) => return skipped(&why),
    };
    let mut guests: Vec<Guest> = (0..2)
        .map(|_| {
            let mut command = Command::new(&words[0]);
            command.args(&words[1..]);
            Guest::start(command)
        })
        .collect();
    guests.iter_mut().for_each(|guest| guest.pass_rounds(1));
    let (report, _) = report(&["--qemu"]); // other guests of this host may come and go
    let ours: BTreeSet<String> = guests.iter().map(|guest| guest.pid().to_string()).collect();
    let targets: Vec<&Value> = report["targets"].as_array().unwrap().iter().collect();
    let targets = targets.into_iter().filter(|t| ours.contains(t["target"].as_str().unwrap())).collect::<Vec<_>>();
    assert_eq!(targets.len(), 2, "{report}");
    for target in targets {
        assert_eq!(target["kind"], "guest");
        let [chunks, _, _, others, _] = columns(target);
        let all = MEMORY * 256;
        assert!(chunks > all / 2 && chunks <= all, "guest RAM and nothing else: {target}");
        assert!(others > chunks / 4, "booted alike, they share much: {target}");
    }
    guests.iter_mut().for_each(|guest| guest.pass_rounds(1));
}

//! Clones of one command are copies of one QEMU that is loaded once.

use std::collections::BTreeSet;
use std::fs::{File, read, read_link, read_to_string};
use std::os::fd::{AsFd, AsRawFd};

use e2e::program;
use snapshot::clone::Template;
use snapshot::rights::Rights;

use super::clones::{place_with_a_machines_snapshot, place_with_a_snapshot};
use super::*;

/// A process's file in `/proc`.
fn proc(pid: i32, name: &str) -> String {
    String::from_utf8_lossy(&read(format!("/proc/{pid}/{name}")).unwrap()).into_owned()
}

/// The process that has started this one.
fn parent(pid: i32) -> i32 {
    let status = proc(pid, "status");
    status.lines().find_map(|line| line.strip_prefix("PPid:")).unwrap().trim().parse().unwrap()
}

/// Where the program lies.
fn address(pid: i32) -> String {
    proc(pid, "maps").split('-').next().unwrap().to_owned()
}

/// KiB of its files' mappings that are its own alone.
fn own(pid: i32) -> u64 {
    let (mut of_file, mut sum) = (false, 0);
    for line in proc(pid, "smaps").lines() {
        if let Some(kib) = line.strip_prefix("Private_Dirty:") {
            sum += if of_file { kib.trim().trim_end_matches(" kB").parse().unwrap() } else { 0 };
        } else if line.contains('-') && !line.contains(" kB") {
            of_file = line.contains("/usr/");
        }
    }
    sum
}

fn rights() -> Rights {
    Rights::own().unwrap()
}

#[test]
fn clones_of_one_command_share_a_loaded_qemu_and_are_as_if_each_had_been_started() {
    let Some(place) = place_with_a_machines_snapshot() else { return };
    let lone = place.clones_with("one", "lone", 1, &[], &[]);
    let several = place.clones_with("one", "several", 3, &[], &[]);
    let (command, lone, run) = (lone.server.id() as i32, lone.clones[0].pid, several.server.id() as i32);
    let pids: Vec<i32> = several.clones.iter().map(|clone| clone.pid).collect();
    // They are copies: one address, one process that has made them.
    assert_eq!(parent(lone), command);
    let of_all = |of: &dyn Fn(i32) -> String| pids.iter().map(|&pid| of(pid)).collect::<BTreeSet<_>>();
    assert_eq!(of_all(&address).len(), 1);
    assert_eq!(of_all(&|pid| parent(pid).to_string()).len(), 1);
    let template = parent(pids[0]);
    assert_eq!(parent(template), run);
    println!("own: {} KiB of {}", own(pids[0]), own(lone));
    assert!(own(pids[0]) < own(lone) / 4, "{} KiB of {}", own(pids[0]), own(lone));
    // Nothing shows it.
    let words = |pid: i32| proc(pid, "cmdline").split('\0').map(String::from).collect::<Vec<_>>();
    let variables = |pid: i32| proc(pid, "environ").split('\0').map(String::from).collect::<BTreeSet<_>>();
    for (clone, pid) in several.clones.iter().zip(&pids) {
        let (all, alone) = (words(*pid), words(lone));
        assert_eq!((all.len(), &all[0], all.last()), (alone.len(), &alone[0], alone.last()), "{all:?}");
        assert!(all.iter().any(|word| word.contains(&clone.directory.display().to_string())), "{all:?}");
        assert_eq!(variables(*pid), variables(lone));
        for link in ["cwd", "exe", "root"] {
            let of = |pid: i32| read_link(format!("/proc/{pid}/{link}")).unwrap();
            assert_eq!(of(*pid), of(lone), "{link}");
        }
        assert_eq!(read_link(format!("/proc/{pid}/fd/1")).unwrap(), clone.directory.join("output.log"));
        assert_eq!(status(&mut clone.qmp("monitor.qmp")), "running");
    }
    // They do not need it.
    e2e::signal_process(template, libc::SIGKILL);
    eventually("the template is gone", Duration::from_secs(20), || {
        (!Path::new(&format!("/proc/{template}/maps")).exists() || proc(template, "maps").is_empty()).then_some(())
    });
    several.clones.iter().for_each(|clone| assert_eq!(status(&mut clone.qmp("monitor.qmp")), "running"));
    // The command still ends them.
    e2e::signal_process(run, libc::SIGTERM);
    eventually("they are ended", Duration::from_secs(60), || {
        several.clones.iter().all(|one| !one.runs()).then_some(())
    });
}

#[test]
fn the_guests_kernel_is_in_memory_once_for_all_clones() {
    let Some(place) = place_with_a_snapshot() else { return };
    let both = place.clones("one", 2, &[]);
    for clone in &both.clones {
        clone.pass_rounds(1);
        let words = proc(clone.pid, "cmdline");
        let kernel = words.split('\0').skip_while(|word| *word != "-kernel").nth(1).unwrap();
        let kernel = read(kernel).unwrap();
        let maps = proc(clone.pid, "maps");
        let line = maps.lines().find(|line| line.contains("pageone-read")).expect("it is mapped");
        let number = |text: &str| u64::from_str_radix(text, 16).unwrap();
        let (start, rest) = line.split_once('-').unwrap();
        let (end, rest) = rest.split_once(' ').unwrap();
        let offset = number(rest.split(' ').nth(1).unwrap()) as usize;
        let mapped = memory(clone.pid, number(start), (number(end) - number(start)) as usize);
        assert!(mapped.len() > kernel.len() * 9 / 10, "{} of {}", mapped.len(), kernel.len());
        let shift = (0..4096).find(|shift| kernel[offset + shift..].starts_with(&mapped));
        assert!(shift.is_some(), "the bytes are the file's");
    }
}

#[test]
fn where_qemu_cannot_be_copied_each_clone_loads_it() {
    let Some(place) = place_with_a_machines_snapshot() else { return };
    // An installation without the library.
    let bin = place.path("bin");
    std::fs::create_dir(&bin).unwrap();
    let agent = bin.join("libpageone_agent.so");
    std::fs::copy(program("libpageone_agent.so"), &agent).unwrap();
    let files = place.path("f").display().to_string();
    let mut run =
        place.command(&["snapshot", "run", "store", "one", "--count", "2", "--same-random", "--files", &files, "--rm"]);
    let mut run = run.env("PAGEONE_AGENT", &agent).stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(run.stderr.take().unwrap()).lines().map_while(Result::ok);
    let lines: Vec<_> = said.by_ref().take(3).collect();
    let why = "pageone: each guest loads QEMU for itself: libpageone_template.so is not beside the agent's library";
    assert_eq!(lines[0], why, "{lines:?}");
    let pid = |line: &String| line.strip_prefix("pageone: guest ")?.split(' ').next()?.parse::<i32>().ok();
    let pids: Vec<i32> = lines[1..].iter().filter_map(pid).collect();
    assert_eq!(pids.len(), 2, "{lines:?}");
    assert!(said.next().unwrap().contains("of 2 guests the clock stands at the snapshot's time"));
    e2e::signal_process(pids[0], libc::SIGSEGV);
    let line = said.next().unwrap();
    assert!(line.starts_with(&format!("pageone: guest {} has ended, signal: 11 (SIGSEGV)", pids[0])), "{line}");
    // Nobody reads what it says any more. It still ends its guests.
    drop(said);
    e2e::signal_process(run.id() as i32, libc::SIGTERM);
    assert_eq!(run.wait().unwrap().code(), Some(1));
    assert!(pids.iter().all(|pid| !Path::new(&format!("/proc/{pid}/maps")).exists()), "they are ended");
    // Without the library the program says its version, and ends.
    let template = Template::start(Path::new("/nonexistent"), Path::new("/bin/sh"), Path::new("/"), &rights()).unwrap();
    assert!(template.wait().unwrap_err().to_string().contains("begins without waiting"));
}

#[test]
fn a_copy_has_its_words_and_descriptors_or_there_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| File::create(dir.path().join(name)).unwrap();
    let (library, shell) = (program("libpageone_template.so"), Path::new("/bin/sh"));
    // The program inherits it, as if a library of its had opened it.
    let taken = rustix::io::dup(file("taken")).unwrap();
    let template = Template::start(&library, shell, dir.path(), &rights()).unwrap();
    template.wait().unwrap();
    let words = |script: &str| ["sh", "-c", script, "zero", "a word", ""].map(Into::into);
    // It does not end before its process is known.
    let (begin, begins) = std::io::pipe().unwrap();
    let script = "read none; pwd; echo \"$0:$1:$2:$#\"; tr '\\0' , < /proc/$$/cmdline; env | grep -c -e PAGEONE_TEMPLATE -e LD_PRELOAD -e LD_BIND; echo nine >&9; exit 3";
    let (out, nine) = (file("out"), file("nine"));
    let given = [(begin.as_fd(), 0), (out.as_fd(), 1), (nine.as_fd(), 9)];
    let mut copy = template.copy(&words(script), &given).unwrap();
    drop(begins);
    assert_eq!(eventually("it ends", Duration::from_secs(20), || copy.ended()).code(), Some(3));
    let text = read_to_string(dir.path().join("out")).unwrap();
    let expected = format!("{}\nzero:a word::2\nsh,-c,{script},zero,a word,,0\n", dir.path().display());
    assert_eq!(text, expected);
    assert_eq!(read_to_string(dir.path().join("nine")).unwrap(), "nine\n");
    // No words; a word with a zero; a number beyond all, and one that the program has already.
    let refused = |words: &[std::ffi::OsString], number| template.copy(words, &[(out.as_fd(), number)]).map(drop);
    assert!(refused(&[], 1).is_err());
    assert!(refused(&["sh\0".into()], 1).is_err());
    assert!(refused(&words("exit"), 1 << 30).is_err());
    assert!(refused(&words("exit"), taken.as_raw_fd()).unwrap_err().to_string().contains("exists"));
    // It makes copies still, and one that ends leaves nothing behind.
    let mut last = template.copy(&words("exec sleep 1000"), &[]).unwrap();
    assert!(last.ended().is_none());
    drop(template);
    assert!(last.ended().is_none(), "it does not need the template");
    last.kill();
    assert!(last.ended().is_some());
}

#[test]
fn a_file_that_copies_read_is_mapped_into_large_buffers_of_malloc_and_nowhere_else() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let bytes: Vec<u8> = (0..5_000_003_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    std::fs::write(&path, &bytes).unwrap();
    let client = program("pageone-test-client");
    let template = Template::start(&program("libpageone_template.so"), &client, dir.path(), &rights()).unwrap();
    template.wait().unwrap();
    for round in 0..3 {
        let out = File::create(dir.path().join("out")).unwrap();
        let words = [client.clone().into(), "fread".into(), path.clone().into()];
        let mut copy = template.copy(&words, &[(out.as_fd(), 1), (out.as_fd(), 2)]).unwrap();
        eventually("it ends", Duration::from_secs(20), || copy.ended());
        let text = read_to_string(dir.path().join("out")).unwrap();
        assert_eq!(text, "mapped [true, true, false, false]\nok\n", "{round}");
    }
    // The last one wrote into its buffer.
    assert_eq!(read(&path).unwrap(), bytes);
}

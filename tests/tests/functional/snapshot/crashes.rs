//! Commands on snapshots that are killed, stopped, frozen or let fail at random moments, one after
//! the other, beside a guest that says what it has written.
//!
//! One guest is Linux with databases ([`super::database`]), the other a boot sector. It counts:
//! each number goes into two sectors of each disk and onto 64 pages of RAM, and is then told at
//! the serial port (`D`). Before that it looks whether all of RAM has the number before, and
//! whether the place on the disk has an older one. If not, RAM or disk are of another moment
//! (`X`). When it starts, it tells the number of each disk (`B`, `S`).

#![allow(unsafe_code, reason = "bytes that the assembler makes")]

use std::arch::global_asm;
use std::collections::BTreeMap;

use super::goes_on::{Random, Times, What, end_of};
use super::*;

// 0x500 number, 0x504 last disk, 0x508 whether it has written since the start, 0x600 request of the
// BIOS, which changes its count when it fails, 0x800 sector, 0x10000 the pages. 20 reads sector 1,
// 21 reads or writes a sector, 30 tells a number, 40 fills the pages, 50 is a number's place.
global_asm!(
    r#"
    .pushsection .rodata
    .globl pageone_writer
    .globl pageone_writer_end
    .code16
    pageone_writer:
        cli
        cld
        xor ax, ax
        mov ds, ax
        mov es, ax
        mov ss, ax
        mov sp, 0x7c00
        sti
        mov word ptr [0x600], 16
        mov word ptr [0x604], 0x800
        mov word ptr [0x606], 0
        mov dword ptr [0x60c], 0
        mov byte ptr [0x504], 0x82
        mov byte ptr [0x508], 0
        mov dl, 0x82
        call 20f
        jnc 6f
        mov byte ptr [0x504], 0x81
    6:  mov al, 'S'
        mov ebx, dword ptr [0x800]
        call 30f
        mov dl, 0x81
        call 20f
        mov ebx, dword ptr [0x800]
        mov ebp, ebx
        mov al, 'B'
        call 30f
        call 40f
    2:  mov eax, dword ptr [0x500]
        mov cx, 0x1000
    3:  mov es, cx
        cmp dword ptr es:[0], eax
        jne 9f
        add cx, 0x100
        cmp cx, 0x5000
        jb 3b
        mov ebp, eax
        inc ebp
        mov dl, 0x81
    4:  call 50f
        mov ah, 0x42
        call 21f
        jc 8f
        cmp byte ptr [0x508], 0
        je 5f
        cmp dword ptr [0x800], ebp
        jae 9f
    5:  xor ax, ax
        mov es, ax
        mov di, 0x800
        mov cx, 128
        mov eax, ebp
        rep stosd
        call 50f
        mov ah, 0x43
        call 21f
        jc 8f
        mov ecx, 1
        mov ah, 0x43
        call 21f
        jc 8f
        inc dl
        cmp dl, byte ptr [0x504]
        jbe 4b
        call 40f
        mov byte ptr [0x508], 1
        mov al, 'D'
        mov ebx, ebp
        call 30f
        jmp 2b
    8:  mov byte ptr [0x508], 0
        mov al, 'E'
        mov ebx, ebp
        call 30f
        jmp 2b
    9:  mov al, 'X'
        mov ebx, dword ptr [0x800]
        call 30f
        mov al, 'X'
        mov ebx, dword ptr [0x500]
        call 30f
        cli
        hlt
        jmp 9b
    20: mov dword ptr [0x800], 0
        mov ecx, 1
        mov ah, 0x42
    21: mov dword ptr [0x608], ecx
        mov word ptr [0x602], 1
        mov si, 0x600
        mov al, 0
        pushad
        int 0x13
        popad
        ret
    30: mov dx, 0x3f8
        out dx, al
        mov al, ' '
        out dx, al
        mov cx, 8
    31: rol ebx, 4
        mov al, bl
        and al, 15
        add al, '0'
        cmp al, '9'
        jbe 32f
        add al, 39
    32: out dx, al
        loop 31b
        mov al, 10
        out dx, al
        ret
    40: mov cx, 0x1000
    41: mov es, cx
        mov dword ptr es:[0], ebp
        add cx, 0x100
        cmp cx, 0x5000
        jb 41b
        mov dword ptr [0x500], ebp
        ret
    50: mov ecx, ebp
        and ecx, 1023
        shl ecx, 6
        add ecx, 64
        ret
    pageone_writer_end:
    .code64
    .popsection
    "#
);

unsafe extern "C" {
    static pageone_writer: u8;
    static pageone_writer_end: u8;
}

/// What is booted.
fn boot_sector() -> Vec<u8> {
    // SAFETY: the assembler has put all bytes between the two symbols into this program.
    let mut bytes = unsafe {
        let (begin, end) = (&raw const pageone_writer, &raw const pageone_writer_end);
        std::slice::from_raw_parts(begin, end.addr() - begin.addr()).to_vec()
    };
    assert!(bytes.len() <= 510);
    bytes.resize(510, 0);
    bytes.extend([0x55, 0xaa]);
    // The BIOS boots from no disk of one sector.
    bytes.resize(1 << 20, 0);
    bytes
}

/// What a writer has told: letters and numbers.
fn told(log: &Path) -> Vec<(char, u32)> {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let line = |line: &str| Some((line.chars().next()?, u32::from_str_radix(line.get(2..10)?, 16).ok()?));
    let said: Vec<_> = text.lines().filter_map(line).collect();
    assert!(!said.iter().any(|(letter, _)| *letter == 'X'), "RAM and disk are of different moments: {text}");
    said
}

/// The last number with this letter.
fn last(log: &Path, letter: char) -> Option<u32> {
    told(log).iter().rev().find(|(found, _)| *found == letter).map(|(_, number)| *number)
}

/// A guest that tells what it has written.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    BootSector,
    Databases,
}

impl Kind {
    /// The words of its QEMU up to its disks. `None`: it cannot run here.
    pub(super) fn words(self, place: &Place) -> Option<Vec<String>> {
        let Kind::BootSector = self else { return database::words(place) };
        std::fs::write(place.path("boot"), boot_sector()).unwrap();
        let words = "qemu-system-x86_64 -accel tcg,tb-size=16 -cpu qemu64,-cx16 -m 32 -display none -nodefaults \
                     -no-user-config -chardev stdio,id=console,signal=off -serial chardev:console -device \
                     virtio-blk-pci,drive=boot,bootindex=1 -drive";
        let boot = format!("file={},if=none,id=boot,format=raw,readonly=on", place.path("boot").display());
        Some(words.split_whitespace().map(String::from).chain([boot]).collect())
    }
}

pub(super) struct Writer {
    /// Of its QEMU, up to its disks.
    words: Vec<String>,
    pub(super) machine: Machine,
    disks: Vec<PathBuf>,
    starts: usize,
    log: PathBuf,
}

impl Writer {
    pub(super) fn boot(place: &Place, base: Vec<String>, disks: Vec<PathBuf>, starts: usize) -> Self {
        let monitor = place.path("source.qmp");
        let mut words = base.clone();
        for (at, disk) in disks.iter().enumerate() {
            let format = if disk.extension().is_some_and(|end| end == "qcow2") { "qcow2" } else { "raw" };
            let (name, file) = (format!("d{at}"), disk.display());
            words.extend([
                "-device".into(),
                format!("virtio-blk-pci,drive={name},bootindex={}", at + 2),
                "-drive".into(),
            ]);
            // An error is the guest's: QEMU does not stop it.
            let rest = "cache=writethrough,werror=report,rerror=report";
            words.push(format!("file={file},if=none,id={name},format={format},{rest}"));
        }
        words.extend(Qmp::words(&monitor));
        let log = place.path(&format!("told-{starts}"));
        let out = std::fs::File::create(&log).unwrap();
        let child = place.prepared(&words).stdin(Stdio::null()).stdout(out).process_group(0).spawn().unwrap();
        let writer = Self { words: base, machine: Machine { child, monitor }, disks, starts, log };
        eventually("the guest writes", Duration::from_secs(60), || last(&writer.log, 'D'));
        let pid = writer.machine.pid();
        eventually("the daemon knows it", Duration::from_secs(20), || place.daemon.client(pid));
        writer
    }

    pub(super) fn told(&self) -> u32 {
        last(&self.log, 'D').unwrap()
    }

    pub(super) fn told_an_error(&self) -> bool {
        last(&self.log, 'E').is_some()
    }

    /// Ends the guest without warning, and starts it again by its own words.
    pub(super) fn restart(&mut self, place: &Place) {
        let notes = place.daemon.dir.path().join("stopped");
        eventually("all is put back", Duration::from_secs(60), || {
            let _ = place.run(&["status"]);
            std::fs::read_dir(&notes).map_or(true, |all| all.count() == 0).then_some(())
        });
        runs(self);
        self.end();
        self.start_again(place);
    }

    pub(super) fn end(&mut self) {
        self.machine.child.kill().unwrap();
        self.machine.child.wait().unwrap();
    }

    /// Starts a guest that has ended by its own words: its disks have what it told.
    pub(super) fn start_again(&mut self, place: &Place) {
        let before = self.told();
        *self = Self::boot(place, self.words.clone(), self.disks.clone(), self.starts + 1);
        let (first, second) = (last(&self.log, 'B').unwrap(), last(&self.log, 'S').unwrap());
        assert!(first >= before, "{before} was told, and the disk has {first}");
        if self.disks.len() > 1 {
            assert!(second >= before && first - second < 2, "{before} was told, the disks have {first} and {second}");
        }
    }
}

/// What a snapshot may hold: the numbers told when it was begun and when it had ended.
pub(super) type Bounds = (u32, u32);

/// Lets a clone of a snapshot go on, and looks at what it tells.
pub(super) fn look_at(place: &Place, name: &str, (from, to): Bounds) {
    // The output of one alone is the command's.
    // What was imported is taken for what it says, as what was not.
    let clones = place.clones_with(name, name, 2, &["--trust"], &[]);
    let log = clones.clones[0].directory.join("output.log");
    let first = eventually("the clone writes", Duration::from_secs(180), || {
        let all: Vec<u32> = told(&log).iter().filter(|(letter, _)| *letter == 'D').map(|(_, number)| *number).collect();
        all.get(2).and(all.first()).copied()
    });
    assert!((from..=to + 1).contains(&first), "snapshot {name} is of {from} to {to}, and goes on with {first}");
}

/// Kills all processes in whose words or environment a path is, and says how many they were.
pub(super) fn end_all_in(path: &Path) -> usize {
    let (name, mut count) = (path.display().to_string(), 0);
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let has =
            |file| String::from_utf8_lossy(&std::fs::read(entry.path().join(file)).unwrap_or_default()).contains(&name);
        let Ok(pid) = entry.file_name().to_string_lossy().parse() else { continue };
        if has("cmdline") || has("environ") {
            e2e::signal_process(pid, libc::SIGKILL);
            count += 1;
        }
    }
    count
}

/// `PAGEONE_CRASH_ROUNDS`, or a few.
pub(super) fn rounds() -> u64 {
    std::env::var("PAGEONE_CRASH_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(4)
}

/// Rounds with the same guest and pool: each snapshot makes the chain of images longer.
pub(super) const ROUNDS_OF_A_PLACE: u64 = 20;

#[test]
fn nothing_told_is_lost_and_each_snapshot_is_of_one_moment_whatever_happens_to_the_commands() {
    crashes(Kind::BootSector, rounds());
}

#[test]
fn databases_keep_what_was_committed_and_each_snapshot_is_of_one_moment() {
    // It takes five times as long for each.
    crashes(Kind::Databases, rounds().div_ceil(4));
}

fn crashes(kind: Kind, rounds: u64) {
    if !can_run() {
        return;
    }
    let (mut random, mut times, mut counts) = (Random::new(), Times::default(), BTreeMap::new());
    let mut left = rounds;
    while left > 0 {
        let some = left.min(ROUNDS_OF_A_PLACE);
        if crash(kind, some, &mut random, &mut times, &mut counts).is_none() {
            return;
        }
        left -= some;
        println!("CRASHES {} rounds, {counts:?}, 0 lost, 0 mixed", rounds - left);
    }
    times.say(rounds);
}

/// `None`: the guest cannot run here.
fn crash(
    kind: Kind,
    rounds: u64,
    random: &mut Random,
    times: &mut Times,
    counts: &mut BTreeMap<&'static str, usize>,
) -> Option<()> {
    let place = Place::new();
    let words = kind.words(&place)?;
    let mut disks = vec![place.path("disk.qcow2")];
    let xfs = disks::Mounted::xfs(&place);
    e2e::qmp::make_disk(&disks[0]);
    if let Some(xfs) = &xfs {
        disks.push(xfs.0.join("disk.img"));
        std::fs::File::create(&disks[1]).unwrap().set_len(64 << 20).unwrap();
    }
    let mut writer = Writer::boot(&place, words, disks, 0);
    let mut known: BTreeMap<String, Bounds> = BTreeMap::new();
    let from = writer.told();
    place.save(writer.machine.pid(), "first");
    known.insert("first".into(), (from, writer.told()));
    for round in 0..rounds {
        let names = place.names();
        let some = names[random.below(names.len() as u64) as usize].clone();
        let new = format!("s{round}");
        let op = ["save", "save", "save", "save", "run", "prune", "repack", "compress", "export", "import", "restart"]
            [random.below(11) as usize];
        println!("round {round}: {op} ({some}), {} told", writer.told());
        *counts.entry(op).or_default() += 1;
        if op == "restart" {
            writer.restart(&place);
            continue;
        }
        let from = writer.told();
        let words =
            words_of(op, &place, writer.machine.pid(), (&some, &new), &place.path(&format!("imported-{round}")));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let what = disturbed(&place, &words, random, times, &writer);
        if op == "run" {
            end_all_in(&place.path("run"));
        }
        let bounds = if op == "import" { known[&some] } else { (from, writer.told()) };
        if matches!(op, "save" | "import") {
            known.insert(new, bounds);
        }
        // What is listed is there, whole.
        let names = place.names();
        assert!(!names.is_empty() && names.iter().all(|name| known.contains_key(name)), "{what}: {names:?}");
        let some = &names[random.below(names.len() as u64) as usize];
        look_at(&place, some, known[some]);
        let before = writer.told();
        eventually("the guest writes on", Duration::from_secs(60), || (writer.told() > before).then_some(()));
    }
    place.ok(&["pool", "check", "store"]);
    let names = place.names();
    for name in &names {
        look_at(&place, name, known[name]);
    }
    // Each can go to another host, also if it has come from one.
    let some = &names[random.below(names.len() as u64) as usize];
    let words = words_of("import", &place, writer.machine.pid(), (some, "again"), &place.path("again"));
    place.ok(&words.iter().map(String::as_str).collect::<Vec<_>>());
    look_at(&place, "again", known[some]);
    writer.restart(&place);
    Some(())
}

/// The words of a command with a snapshot that is there, and the name of one that is to be.
/// `images`: where those of an imported one are to lie.
pub(super) fn words_of(op: &str, place: &Place, pid: i32, (some, new): (&str, &str), images: &Path) -> Vec<String> {
    let path = |name: &str| place.path(name).display().to_string();
    let (pid, tar, files, images) = (pid.to_string(), path("tar"), path("run"), images.display().to_string());
    if op == "import" {
        place.ok(&["snapshot", "export", "store", some, "-o", &tar, "--force"]);
    }
    let words = match op {
        "save" => vec!["snapshot", "save", &pid, "--to", "store", "--name", new, "--max-pause", "60000"],
        "checkpoint" => vec!["checkpoint", &pid, "--to", "store", "--name", new],
        "run" => vec!["snapshot", "run", "store", some, "--trust", "--same-random", "--files", &files],
        "prune" => vec!["snapshot", "prune", "store", "--keep-last", "4"],
        "repack" => vec!["pool", "repack", "store"],
        "compress" => vec!["pool", "repack", "store", "--compress"],
        "export" => vec!["snapshot", "export", "store", some, "-o", &tar, "--force"],
        _ => vec!["snapshot", "import", "store", &tar, "--name", new, "--disks", &images],
    };
    words.into_iter().map(String::from).collect()
}

/// Runs a command, to which something happens at a random moment, or some of whose system calls
/// fail. Then the guest runs.
fn disturbed(place: &Place, words: &[&str], random: &mut Random, times: &mut Times, writer: &Writer) -> String {
    let kind = random.below(What::ALL.len() as u64 + 3) as usize;
    let Some(what) = What::ALL.get(kind) else {
        let call =
            ["pwrite64", "fdatasync", "fsync", "openat", "ftruncate", "io_uring_enter"][random.below(6) as usize];
        let error = ["EIO", "ENOSPC"][random.below(2) as usize];
        let inject = format!("inject={call}:error={error}:when={}", 1 + random.below(40));
        println!("  {inject}");
        if words[1] != "run" {
            refused::with_failing_calls(place, &["-e", &format!("trace={call}"), "-e", &inject], words);
        }
        runs(writer);
        return inject;
    };
    let mut command = place.command(words);
    let mut running = command.stdout(Stdio::null()).stderr(Stdio::null()).process_group(0).spawn().unwrap();
    std::thread::sleep(Duration::from_micros(random.below(if words[1] == "run" { 2_000_000 } else { 600_000 })));
    println!("  {what:?}");
    let since = what.happen(&running, &|| drop(place.run(&["status"])));
    runs(writer);
    times.add(*what, since.elapsed());
    if words[1] == "run" {
        let _ = running.kill();
    }
    end_of(&mut running);
    runs(writer);
    format!("{what:?}")
}

pub(super) fn runs(writer: &Writer) {
    let mut qmp = writer.machine.qmp();
    eventually("the guest runs", Duration::from_secs(30), || (status(&mut qmp) == "running").then_some(()));
}

//! Dumps of guests' memory.

use std::process::{Child, Command, Stdio};

use super::*;

const MEMORY: &str = "PAGEONE_TEST_MEMORY";
const MIB: usize = 3;

/// The process that is dumped, in place of a guest's: it maps a file of the size of the memory.
#[test]
fn memory_for_the_other_test() {
    let Some(path) = std::env::var_os(MEMORY) else { return };
    let file = File::options().read(true).write(true).open(path).unwrap();
    let (protection, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
    // SAFETY: the address is null, so the kernel chooses a free range and replaces no mapping.
    let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), MIB << 20, protection, flags, &file, 0) }.unwrap();
    for page in [1, 5] {
        // SAFETY: the pages are among those mapped for reading, and the file keeps its length.
        let byte = unsafe { start.cast::<u8>().add(page * PAGE_SIZE).read_volatile() };
        assert_eq!(byte, page as u8);
    }
    println!("mapped");
    let _ = io::stdin().read(&mut [0]);
}

struct Mapped(Child);

impl Mapped {
    fn start(memory: &Path) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "dump::tests::memory_for_the_other_test", "--nocapture"]).env(MEMORY, memory);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        let mut text = Vec::new();
        while !text.ends_with(b"mapped") {
            let mut byte = [0];
            said.read_exact(&mut byte).unwrap();
            text.extend(byte);
        }
        Self(child)
    }

    fn pid(&self) -> i32 {
        self.0.id() as i32
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_dump_has_the_present_pages_and_what_is_in_the_way_of_one_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let memory = dir.path().join("memory");
    let bytes: Vec<u8> = (0..MIB << 20).map(|at| (at / PAGE_SIZE) as u8).collect();
    fs::write(&memory, bytes).unwrap();
    let mapped = Mapped::start(&memory);
    let place = dir.path().join("bench");
    let write = |directory: &Path, pid, mib| write_to(directory, pid, mib, 0).unwrap_err().to_string();
    let error = write(&memory.join("bench"), mapped.pid(), MIB);
    assert!(error.starts_with("cannot create "), "{error}");
    assert_eq!(write(&place, i32::MAX, MIB), format!("cannot stop guest {}", i32::MAX));
    let error = write(&place, mapped.pid(), MIB + 4096);
    assert_eq!(
        error,
        "QEMU has no mapping of the size of the guest's memory; give the size of QEMU's -m, \
                       and memory in one piece"
    );
    let [index, pages] = files(&place, 0);
    fs::create_dir(&pages).unwrap();
    assert_eq!(write(&place, mapped.pid(), MIB), format!("cannot copy the memory of guest {}", mapped.pid()));
    fs::remove_dir(&pages).unwrap();
    let open = || Dump::open_in(&place, 0);
    let error = open().err().unwrap().to_string();
    assert_eq!(error, format!("cannot read {}", index.display()));

    write_to(&place, mapped.pid(), MIB, 0).unwrap();
    let dump = open().unwrap();
    for page in [1, 5] {
        let word = u64::from_ne_bytes([page as u8; 8]);
        assert!(dump.words(page).unwrap().iter().all(|&found| found == word), "page {page}");
    }
    drop(dump);
    // Lengths as of one page: of a file that is shorter, and of one that cannot be mapped.
    fs::write(&index, 0u32.to_le_bytes()).unwrap();
    fs::write(&pages, "short").unwrap();
    let error = open().err().unwrap().to_string();
    assert_eq!(error, format!("{} is cut off; remove it", pages.display()));
    fs::remove_file(&pages).unwrap();
    std::os::unix::fs::symlink("/sys/kernel/uevent_seqnum", &pages).unwrap();
    let error = open().err().unwrap().to_string();
    assert_eq!(error, format!("cannot map {}", pages.display()));
}

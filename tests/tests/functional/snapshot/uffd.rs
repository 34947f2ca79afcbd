//! `pageone snapshot serve --uffd`: a program asks for a snapshot's memory as Firecracker does.
#![allow(unsafe_code)] // The test's memory is mapped, and filled by another process.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;

use kmem::uffd::{Features, Uffd};
use kmem::{PAGE_SIZE, Range, procmem};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::*;

/// Bytes of the machine's memory.
const BYTES: usize = 64 << 20;

/// Memory whose pages come from a server: what a monitor of virtual machines has.
struct Client {
    memory: Range,
    /// It must stay open.
    _uffd: Uffd,
    _stream: UnixStream,
}

impl Client {
    fn connect(socket: &Path) -> Self {
        let uffd = Uffd::new(Features::EVENT_REMOVE).unwrap();
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: the address is null, so the kernel chooses a free range.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), BYTES, protection, flags) }.unwrap();
        let memory = Range::new(start.expose_provenance(), BYTES);
        uffd.register_missing(memory).unwrap();
        // In two parts, the second one first.
        let half = BYTES / 2;
        let part = |at: usize| json!({ "base_host_virt_addr": memory.start + at, "size": half, "offset": at, "page_size": 4096, "page_size_kib": 4096 });
        let message = json!([part(half), part(0)]).to_string();
        let stream = UnixStream::connect(socket).unwrap();
        send(&stream, message.as_bytes(), Some(&uffd));
        Self { memory, _uffd: uffd, _stream: stream }
    }

    /// Bytes from this offset on; `None`: they cannot be read.
    fn read(&self, at: usize, len: usize) -> Option<Vec<u8>> {
        let addresses: Vec<usize> =
            (0..len / PAGE_SIZE).map(|page| self.memory.start + at + page * PAGE_SIZE).collect();
        let mut bytes = vec![0; len];
        let own = std::process::id() as i32;
        let read = procmem::read_pages(own, &addresses, &mut bytes).unwrap();
        (read == addresses.len()).then_some(bytes)
    }

    fn give_back(&self, at: usize, len: usize) {
        let start = std::ptr::with_exposed_provenance_mut::<std::ffi::c_void>(self.memory.start + at);
        // SAFETY: the range lies in this value's mapping, into which there are no references.
        unsafe { madvise(start, len, Advice::LinuxDontNeed) }.unwrap();
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let start = std::ptr::with_exposed_provenance_mut(self.memory.start);
        // SAFETY: this value's mapping, into which there are no references.
        unsafe { munmap(start, BYTES) }.unwrap();
    }
}

fn send(stream: &UnixStream, message: &[u8], uffd: Option<&Uffd>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = uffd.map(|uffd| [uffd.as_fd()]);
    if let Some(fds) = &fds {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    sendmsg(stream, &[IoSlice::new(message)], &mut control, SendFlags::empty()).unwrap();
}

/// A server that is ready; gives it, and what it says from then on.
fn serve(place: &Place, socket: &Path) -> (Child, std::sync::mpsc::Receiver<String>) {
    let socket = socket.display().to_string();
    let mut command = place.command(&["snapshot", "serve", "store", "one", "--uffd", &socket]);
    let mut server = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(server.stderr.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().contains("serves one to programs that connect to"));
    let (said, hears) = std::sync::mpsc::channel();
    std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| drop(said.send(line))));
    (server, hears)
}

/// The snapshot's memory, by an archive of it.
fn memory_of(place: &Place) -> Vec<u8> {
    let path = place.path("one.tar");
    place.ok(&["snapshot", "export", "store", "one", "-o", &path.display().to_string()]);
    let part = |name: &str| {
        let out = Command::new("tar").arg("-xOf").arg(&path).arg(name).output().unwrap();
        assert!(out.status.success());
        out.stdout
    };
    let (numbers, pages) = (part("pages"), part("ram"));
    let mut memory = vec![0; BYTES];
    for (number, page) in numbers.as_chunks::<8>().0.iter().zip(pages.chunks(PAGE_SIZE)) {
        memory[u64::from_le_bytes(*number) as usize * PAGE_SIZE..][..PAGE_SIZE].copy_from_slice(page);
    }
    memory
}

#[test]
fn a_program_gets_a_snapshots_memory_as_firecracker_asks_for_it() {
    let Some(place) = clones::place_with_a_machines_snapshot() else { return };
    let memory = memory_of(&place);
    assert!(memory.iter().filter(|byte| **byte != 0).count() > 100_000);
    let socket = place.path("uffd");
    let (mut server, said) = serve(&place, &socket);
    // Another server cannot take its socket.
    let again = ["snapshot", "serve", "store", "one", "--uffd", &socket.display().to_string()].map(str::to_owned);
    assert!(place.fails(&again.each_ref().map(String::as_str)).contains("somebody listens on "));
    // Two programs at once, while the snapshot is removed.
    let clients = [(); 2].map(|()| Client::connect(&socket));
    place.ok(&["snapshot", "rm", "store", "one"]);
    let step = 1 << 20;
    std::thread::scope(|scope| {
        for client in &clients {
            scope.spawn(|| {
                for at in (0..BYTES).step_by(step).rev() {
                    assert!(client.read(at, step).unwrap() == memory[at..at + step], "at {at:#x}");
                }
            });
        }
    });
    // What was given back is zeros, in this program alone.
    clients[0].give_back(0, step);
    assert!(clients[0].read(0, 2 * step).unwrap() == [&vec![0; step], &memory[step..2 * step]].concat()[..]);
    assert!(clients[1].read(0, step).unwrap() == memory[..step]);
    // Programs that say something else.
    for (message, part) in [
        (
            json!([{ "base_host_virt_addr": 4096, "size": BYTES * 2, "offset": 0, "page_size": 4096 }]),
            "beyond the snapshot",
        ),
        (json!({ "hello": 1 }), "is not served"),
    ] {
        let stream = UnixStream::connect(&socket).unwrap();
        let uffd = Uffd::new(Features::empty()).unwrap();
        send(&stream, message.to_string().as_bytes(), Some(&uffd));
        let line = said.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(line.contains(part), "{line}");
    }
    // It ends with its socket.
    e2e::signal_process(server.id() as i32, libc::SIGTERM);
    assert!(server.wait().unwrap().success());
    assert!(!socket.exists());
}

#[test]
fn a_page_that_cannot_be_read_is_an_error_to_the_program_and_no_other_bytes() {
    if !can_run() {
        return;
    }
    if !Uffd::supported_features().unwrap().contains(Features::POISON) {
        return skipped("this kernel cannot poison pages (Linux 6.6)");
    }
    let place = Place::new();
    let machine = place.machine("source", &[]);
    place.save(machine.pid(), "one");
    drop(machine);
    let memory = memory_of(&place);
    // All that the pool has is damaged.
    let data = place.path("capacity").join("data");
    let mut bytes = Vec::new();
    std::fs::File::open(&data).unwrap().read_to_end(&mut bytes).unwrap();
    let socket = place.path("uffd");
    let (mut server, _said) = serve(&place, &socket);
    let damaged: Vec<u8> = bytes.chunks(PAGE_SIZE).flat_map(|page| [&[page[0] ^ 1], &page[1..]].concat()).collect();
    std::fs::write(&data, damaged).unwrap();
    let client = Client::connect(&socket);
    let filled = memory.chunks(PAGE_SIZE).position(|page| page.iter().any(|byte| *byte != 0)).unwrap();
    let empty = memory.chunks(PAGE_SIZE).position(|page| page.iter().all(|byte| *byte == 0)).unwrap();
    assert_eq!(client.read(filled * PAGE_SIZE, PAGE_SIZE), None);
    assert_eq!(client.read(empty * PAGE_SIZE, PAGE_SIZE).unwrap(), [0; PAGE_SIZE]);
    drop(client);
    e2e::signal_process(server.id() as i32, libc::SIGTERM);
    server.wait().unwrap();
}

use super::*;
use crate::testing::{Child, Memory, become_nobody, forking, is_root, refusing};

#[test]
fn reads_a_child_up_to_the_first_hole() {
    let _forking = forking();
    let memory = Memory::new(6);
    for page in 0..6 {
        memory.write(page, 100 + page as u64);
    }
    memory.unmap(3).unwrap();
    let child = Child::idle();
    for page in [0, 1, 2, 4, 5] {
        memory.write(page, 0); // What comes back below is the child's.
    }
    let address = |page| memory.pages(page, 1).start;
    let read = |pages: &[usize]| {
        let addresses: Vec<usize> = pages.iter().copied().map(address).collect();
        let mut out = vec![0xee; pages.len() * PAGE_SIZE];
        let count = read_pages(child.0, &addresses, &mut out).unwrap();
        let first = |page: &[u8]| u64::from_ne_bytes(page[..8].try_into().unwrap());
        (count, out.chunks(PAGE_SIZE).map(first).collect::<Vec<_>>())
    };
    assert_eq!(read(&[0, 1, 2]), (3, vec![100, 101, 102]));
    assert_eq!(read(&[5, 0, 4]), (3, vec![105, 100, 104]), "any order");
    assert_eq!(read(&[2, 2, 2]), (3, vec![102, 102, 102]), "again and again");
    let (count, words) = read(&[1, 2, 3, 4]);
    assert_eq!((count, &words[..2]), (2, &[101, 102][..]), "a hole inside of a piece");
    let (count, words) = read(&[4, 3, 5]);
    assert_eq!((count, words[0]), (1, 104), "a hole between pieces");
    assert_eq!(read(&[3, 4]).0, 0, "a hole in front");
    assert_eq!(read(&[]).0, 0);
}

#[test]
fn more_pieces_than_one_call_takes() {
    let memory = Memory::new(2500);
    for page in 0..2500 {
        memory.write(page, page as u64);
    }
    let backwards: Vec<usize> = (0..2500).rev().map(|page| memory.pages(page, 1).start).collect();
    let mut out = vec![0; 2500 * PAGE_SIZE];
    assert_eq!(read_pages(std::process::id() as i32, &backwards, &mut out), Ok(2500));
    for (page, bytes) in (0..2500u64).rev().zip(out.chunks(PAGE_SIZE)) {
        assert_eq!(bytes[..8], page.to_ne_bytes());
    }
    memory.unmap(1000).unwrap();
    assert_eq!(read_pages(std::process::id() as i32, &backwards, &mut out), Ok(1499), "in the second call");
}

#[test]
fn errors_tell_who_and_why() {
    let _forking = forking();
    let memory = Memory::new(1);
    memory.write(0, 1);
    let mut out = [0; PAGE_SIZE];
    let child = Child::idle();
    let pid = child.0;
    assert_eq!(read_pages(pid, &[memory.0.start], &mut out), Ok(1));
    drop(child);
    assert_eq!(read_pages(pid, &[memory.0.start], &mut out), Err(ReadError::Gone { pid }));

    if !is_root() {
        println!("SKIPPED: the rest needs root");
        return;
    }
    let parent = std::process::id() as i32;
    let nobody = Child::fork(|| {
        become_nobody();
        u8::from(read_pages(parent, &[memory.0.start], &mut out) == Err(ReadError::NoPermission { pid: parent }))
    });
    assert_eq!(nobody.code(), 1);
    assert!(ReadError::NoPermission { pid: 1 }.to_string().contains("ptrace_scope"));
}

#[test]
fn a_call_that_is_not_to_be_had_is_said() {
    let (memory, pid) = (Memory::new(1), std::process::id() as i32);
    let read = || read_pages(pid, &[memory.0.start], &mut [0; PAGE_SIZE]).unwrap_err();
    let error = refusing(libc::SYS_process_vm_readv, None, libc::ENOSYS, read);
    assert!(error.to_string().starts_with(&format!("reading the memory of process {pid}")), "{error}");
    assert_eq!(error, ReadError::Other { pid, errno: Errno::NOSYS });
}

#[test]
#[should_panic(expected = "room for 2 pages")]
fn too_little_room_is_refused() {
    let _ = read_pages(1, &[0, 4096], &mut [0; 2 * PAGE_SIZE - 1]);
}

#[test]
fn parts_of_own_memory_are_read_up_to_one_that_cannot_be() {
    let start = crate::mm::map_anonymous(4 * PAGE_SIZE).unwrap();
    // SAFETY: mapped above, and nobody else knows it.
    unsafe {
        (0..4).for_each(|page| ((start + page * PAGE_SIZE) as *mut [u8; PAGE_SIZE]).write([page as u8; PAGE_SIZE]));
        crate::raw::mprotect(start + 2 * PAGE_SIZE, PAGE_SIZE, libc::PROT_NONE).unwrap();
    }
    let read = |pages: &[usize]| {
        let mut out = vec![9; 3 * pages.len()];
        let count = read_own_parts(pages.iter().map(|page| start + page * PAGE_SIZE + 700), 3, &mut out).unwrap();
        (count, out)
    };
    assert_eq!(read(&[3, 0, 1, 0]), (4, vec![3, 3, 3, 0, 0, 0, 1, 1, 1, 0, 0, 0]));
    assert_eq!(read(&[1, 2, 3]), (1, vec![1, 1, 1, 9, 9, 9, 9, 9, 9]), "protected");
    // SAFETY: mapped above; nothing refers to it.
    unsafe { crate::raw::munmap(start, 4 * PAGE_SIZE).unwrap() };
    assert_eq!(read(&[1, 2]).0, 0, "unmapped");
    assert_eq!(read(&[]).0, 0);
    assert_eq!(read(&[0; OWN_PARTS]).0, 0);
}

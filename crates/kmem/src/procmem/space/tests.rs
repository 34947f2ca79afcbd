use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Instant;

use super::*;
use crate::pagemap::Pagemap;
use crate::procmem::read_pages;
use crate::testing::{Child, Memory, forking};
use crate::uffd::{Features, Uffd};

fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks(PAGE_SIZE).map(|page| u64::from_ne_bytes(page[..8].try_into().unwrap())).collect()
}

#[test]
fn pages_of_a_child_are_read_up_to_the_first_hole() {
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
    let space = AddressSpace::open(child.0).unwrap();
    let read = |pages: &[usize]| {
        let addresses: Vec<usize> = pages.iter().map(|&page| memory.pages(page, 1).start).collect();
        let mut out = vec![0xee; pages.len() * PAGE_SIZE];
        let count = space.read_pages(&addresses, &mut out).unwrap();
        (count, words(&out[..count * PAGE_SIZE]))
    };
    assert_eq!(read(&[0, 1, 2]), (3, vec![100, 101, 102]));
    assert_eq!(read(&[5, 0, 4]), (3, vec![105, 100, 104]), "any order");
    assert_eq!(read(&[2, 2, 1]), (3, vec![102, 102, 101]), "again and again");
    assert_eq!(read(&[1, 2, 3, 4]), (2, vec![101, 102]), "a hole inside of a piece");
    assert_eq!(read(&[4, 3, 5]), (1, vec![104]), "a hole between pieces");
    assert_eq!(read(&[3, 4]).0, 0, "a hole in front");
    assert_eq!(read(&[]).0, 0);
}

#[test]
fn the_descriptor_stays_with_its_address_space() {
    let _forking = forking();
    let memory = Memory::new(1);
    memory.write(0, 7);
    let mut out = [0; PAGE_SIZE];

    // The end of the process.
    let child = Child::idle();
    let (space, pagemap) = (AddressSpace::open(child.0).unwrap(), Pagemap::open(child.0).unwrap());
    assert_eq!(space.read_pages(&[memory.0.start], &mut out), Ok(1));
    assert!(!pagemap.is_gone());
    drop(child);
    assert_eq!(space.read_pages(&[memory.0.start], &mut out), Err(Gone));
    assert!(pagemap.is_gone());

    // Another program: the number lives, the address space does not.
    let shell = "read line; exec sh -c 'echo other; read line'";
    let mut command = Command::new("sh");
    let mut program = command.arg("-c").arg(shell).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let pid = program.id() as i32;
    let (space, pagemap) = (AddressSpace::open(pid).unwrap(), Pagemap::open(pid).unwrap());
    let stack = |pid: i32| {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        let line = maps.lines().find(|line| line.ends_with("[stack]")).unwrap();
        usize::from_str_radix(line.split(['-', ' ']).nth(1).unwrap(), 16).unwrap() - PAGE_SIZE
    };
    assert_eq!(space.read_pages(&[stack(pid)], &mut out), Ok(1));
    use std::io::Write;
    program.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    let mut line = String::new();
    BufReader::new(program.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "other\n");
    assert_eq!(read_pages(pid, &[stack(pid)], &mut out), Ok(1), "by number, the other program is read");
    assert_eq!(space.read_pages(&[stack(pid)], &mut out), Err(Gone));
    assert!(pagemap.is_gone());
    program.kill().unwrap();
    program.wait().unwrap();
}

#[test]
fn a_page_that_a_userfaultfd_keeps_away_is_not_waited_for() {
    let _forking = forking();
    let Ok(uffd) = Uffd::new(Features::WP).inspect_err(|why| println!("SKIPPED: {why}")) else { return };
    let memory = Memory::new(2);
    memory.write(0, 1);
    uffd.register_missing_wp(memory.0).unwrap();
    let space = AddressSpace::open(std::process::id() as i32).unwrap();
    let mut out = [0; 2 * PAGE_SIZE];
    let begin = Instant::now();
    let addresses = [0, 1].map(|page| memory.pages(page, 1).start);
    assert_eq!(space.read_pages(&addresses, &mut out), Ok(1), "the second page is missing");
    assert!(begin.elapsed().as_secs() < 5);
}

//! NUMA nodes: how many there are, and on which one a page lies.
//!
//! Sources: numa(7), `move_pages(2)`.

#![allow(unsafe_code)] // The system call writes through pointers.

use std::io;

use crate::raw::syscall;

/// The number of this machine's nodes that have memory; 1 where the kernel does not tell.
pub fn nodes() -> usize {
    let list = std::fs::read_to_string("/sys/devices/system/node/has_memory").unwrap_or_default();
    count(&list).max(1)
}

/// The number of nodes in a list such as `0,2-3`.
fn count(list: &str) -> usize {
    let of_part = |part: &str| match part.split_once('-') {
        Some((first, last)) => Some((last.parse::<usize>().ok()? + 1).saturating_sub(first.parse().ok()?)),
        None => part.parse::<usize>().ok().map(|_| 1),
    };
    list.trim().split(',').filter_map(of_part).sum()
}

/// Puts the node of each of these pages of a process into `nodes`, in their order. `None`: the page
/// has no memory now, or is the kernel's zero page. `addresses` are the pages' first bytes.
///
/// # Errors
///
/// `EPERM`: no permission to look at the process (ptrace(2)); `ESRCH`: there is no such process;
/// `ENOSYS`: the kernel was built without NUMA.
pub fn nodes_of(pid: i32, addresses: &[usize], nodes: &mut Vec<Option<u32>>) -> io::Result<()> {
    nodes.clear();
    let mut status = vec![-1i32; addresses.len()];
    let pages = addresses.as_ptr().expose_provenance();
    let args = [pid as usize, addresses.len(), pages, 0, status.as_mut_ptr().expose_provenance(), 0];
    // SAFETY: the kernel reads `addresses.len()` addresses and writes as many numbers to `status`,
    // which is as long. Both outlive the call. Without a list of nodes the call moves no page.
    unsafe { syscall(libc::SYS_move_pages, args) }?;
    nodes.extend(status.into_iter().map(|node| u32::try_from(node).ok()));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PAGE_SIZE;

    #[test]
    fn lists_are_counted() {
        for (list, nodes) in [("0\n", 1), ("0-1", 2), ("0,2-3,7", 4), ("", 0), ("3-1", 0), ("nonsense", 0)] {
            assert_eq!(count(list), nodes, "{list:?}");
        }
    }

    #[test]
    fn pages_in_memory_have_a_node_and_others_none() {
        let mut memory = vec![0u8; 4 * PAGE_SIZE];
        let first = memory.as_ptr().addr().next_multiple_of(PAGE_SIZE);
        memory.fill(1);
        let mut found = vec![None; 7];
        nodes_of(std::process::id() as i32, &[first, first + PAGE_SIZE, PAGE_SIZE], &mut found).unwrap();
        assert!(found[0].is_some() && found[1].is_some());
        assert_eq!((found.len(), found[2]), (3, None), "nothing is mapped there");
        assert!(nodes_of(i32::MAX, &[first], &mut found).is_err());
    }
}

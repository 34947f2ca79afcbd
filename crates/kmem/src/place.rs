//! The place of a process: its namespaces, its control groups, and its label (AppArmor, SELinux).
//! Another program is started there, and with it ends all that it has started.
//!
//! Sources: namespaces(7); pid_namespaces(7); cgroup-v2.rst; proc_pid_attr(5).

#![allow(unsafe_code)] // Command::pre_exec; unshare(2).

use std::ffi::{CStr, CString};
use std::fs::{File, read_link, read_to_string};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use rustix::fs::{Mode, OFlags};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use crate::cgroup::MemoryGroups;

/// Bytes of memory that control groups must have left for one more program: a QEMU without its
/// guest's memory takes less. In a full one the kernel would end what is there.
const ROOM: u64 = 256 << 20;
/// Namespaces that names of files, accounts, numbers of processes, and addresses are of.
const NAMESPACES: [&str; 4] = ["mnt", "user", "pid", "net"];
/// A program that is ended first when memory is short.
const FIRST: &[u8] = b"1000";

/// Whether names in a process are of other things than in this one: it has mounts, users, numbers
/// of processes or networks of its own, as in a container.
///
/// # Errors
///
/// If it has ended, or is another user's.
pub fn is_elsewhere(pid: u32) -> io::Result<bool> {
    let of = |pid: u32, name: &str| read_link(format!("/proc/{pid}/ns/{name}"));
    for name in NAMESPACES {
        if of(pid, name)? != of(std::process::id(), name)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The control groups and the label of a process, for a program that root starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Files by which a process enters a group.
    groups: Vec<CString>,
    /// If it is not this process's: the file by which a process asks for it, and what it says.
    label: Option<(&'static CStr, String)>,
}

/// A process's label, as another one asks for it.
fn label(pid: u32) -> Option<(&'static CStr, String)> {
    let all = [("apparmor/", c"/proc/self/attr/apparmor/exec", "exec "), ("", c"/proc/self/attr/exec", "")];
    all.into_iter().find_map(|(kind, file, word)| {
        let text = read_to_string(format!("/proc/{pid}/attr/{kind}current")).ok()?;
        Some((file, format!("{word}{}", without_mode(&text))))
    })
}

/// A label without the mode that AppArmor says with it.
fn without_mode(text: &str) -> &str {
    let text = text.trim_end_matches(['\0', '\n']);
    text.split_once(" (").map_or(text, |(label, _)| label)
}

impl Place {
    /// That of a process.
    ///
    /// # Errors
    ///
    /// If it has ended.
    pub fn of(pid: u32) -> io::Result<Self> {
        let all = MemoryGroups::of(pid as i32)?;
        let has_room = all.headroom().is_none_or(|bytes| bytes >= ROOM);
        let enter =
            |directory: &std::path::Path| CString::new(directory.join("cgroup.procs").into_os_string().into_vec());
        let groups = all.directories().filter(|_| has_room).map(enter).collect::<Result<_, _>>()?;
        let label = label(pid).filter(|theirs| Some(theirs) != label(std::process::id()).as_ref());
        Ok(Self { groups, label })
    }

    /// Has a command start its program there. To be called before another account forgets how. A
    /// group that cannot be entered is left out, a label never.
    pub fn start(&self, command: &mut Command) {
        let place = self.clone();
        // SAFETY: the child opens and writes files by names that are there, and allocates nothing.
        unsafe { command.pre_exec(move || place.enter()) };
    }

    fn enter(&self) -> io::Result<()> {
        let write = |file: &CStr, bytes: &[u8]| -> io::Result<()> {
            let file = rustix::fs::open(file, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
            Ok(rustix::io::write(file, bytes).map(drop)?)
        };
        for group in &self.groups {
            let _ = write(group, b"0");
        }
        let _ = write(c"/proc/self/oom_score_adj", FIRST);
        self.label.as_ref().map_or(Ok(()), |(file, label)| write(file, label.as_bytes()))
    }
}

/// Starts a program that has numbers of processes of its own. When it ends, the kernel ends all
/// that it has started.
///
/// # Errors
///
/// Those of starting it. `EPERM`: this process may not, which takes `CAP_SYS_ADMIN`.
pub fn spawn_alone(command: &mut Command) -> io::Result<Child> {
    let own = File::open("/proc/self/ns/pid")?;
    // SAFETY: this changes nothing but the numbers of processes that this thread starts.
    unsafe { unshare_unsafe(UnshareFlags::NEWPID) }?;
    let started = command.spawn();
    // Else this thread could start no thread any more.
    let back = move_into_link_name_space(own.as_fd(), Some(LinkNameSpaceType::ProcessID));
    let mut child = started?;
    if let Err(error) = back {
        child.kill().and_then(|()| child.wait())?;
        return Err(error.into());
    }
    Ok(child)
}

#[cfg(test)]
mod tests;

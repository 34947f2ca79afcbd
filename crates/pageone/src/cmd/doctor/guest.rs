//! What holds for one guest: whether it is merged, with whom, and what keeps it from that.

mod checks;
#[cfg(test)]
mod tests;

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use control::{ClientState, ClientStatus, DomainStatus, RefusedStatus, Status};
use guests::words::property;
use guests::{Guest as Found, Kind, Names};
use kmem::pageonefs::MountInfo;

use super::denied::{self, Denial};
use super::memory::{self, Memory};
use super::process::{self, Identity, Process};
use super::report::{Check, Guest, Verdict};
use crate::cmd::quoted;

/// Most characters of a socket's name, see unix(7).
const LONGEST: usize = 107;

/// What is known of the host, once for all guests.
pub(super) struct World<'a> {
    root: &'a Path,
    /// Where the daemon was looked for.
    directories: &'a [PathBuf],
    status: Option<&'a Status>,
    /// `None`: no log can be read.
    denials: Option<Vec<Denial>>,
    ksm_runs: bool,
    /// Of the host's module.
    mounts: Vec<MountInfo>,
}

impl<'a> World<'a> {
    /// `status`: what the daemon in one of these directories says, if one runs.
    pub(super) fn new(root: &'a Path, directories: &'a [PathBuf], status: Option<&'a Status>) -> Self {
        let ksm = process::read(&root.join("sys/kernel/mm/ksm/run"));
        let ksm_runs = ksm.is_ok_and(|run| run.trim() == "1");
        let mounts = super::module::mounts(root);
        Self { root, directories, status, denials: denied::all(root), ksm_runs, mounts }
    }
}

/// What is known of a guest.
struct Facts<'a> {
    world: &'a World<'a>,
    process: Process<'a>,
    kind: Kind,
    identity: io::Result<Identity>,
    arguments: Vec<String>,
    /// How it calls itself.
    own: Names,
    memory: io::Result<Memory>,
    client: Option<(&'a DomainStatus, &'a ClientStatus)>,
    refused: Option<&'a RefusedStatus>,
    /// The security module's label.
    label: Option<String>,
    /// What its own log says, and which log that is.
    said: Option<(String, PathBuf)>,
}

/// Looks at a guest.
pub(super) fn examine(world: &World<'_>, found: &Found) -> Guest {
    let facts = Facts::gather(world, found);
    let mut checks = facts.others();
    checks.insert(0, facts.merging(&checks));
    if facts.client.is_none() && facts.opts_out() {
        // Nothing is in the way of what nobody wants.
        checks
            .iter_mut()
            .filter(|check| check.verdict == Verdict::Blocks)
            .for_each(|check| check.verdict = Verdict::Note);
    }
    Guest { pid: found.pid, name: facts.name(), by: found.by.join(", "), checks }
}

impl<'a> Facts<'a> {
    fn gather(world: &'a World<'a>, found: &Found) -> Self {
        let process = Process::new(world.root, found.pid);
        let domains = world.status.into_iter().flat_map(|status| &status.domains);
        let mut clients = domains.flat_map(|domain| domain.clients.iter().map(move |client| (domain, client)));
        let refused = world.status.and_then(|status| status.refused.iter().find(|refused| refused.pid == found.pid));
        let labels = ["attr/apparmor/current", "attr/current"].iter().filter_map(|file| process.text(file).ok());
        let labels = labels.map(|label| label.trim_end_matches(['\n', '\0']).to_owned());
        let mut facts = Self {
            world,
            process,
            kind: found.kind,
            identity: process.identity(),
            arguments: process.arguments(),
            own: Names::of(world.root, found.pid),
            memory: memory::of(&process),
            client: clients.find(|(_, client)| client.pid == found.pid),
            refused,
            label: labels.into_iter().find(|label| !label.is_empty()),
            said: None,
        };
        facts.said = denied::said(world.root, &process, facts.given_name());
        facts
    }

    /// The name that its manager or its command line gives it.
    fn given_name(&self) -> Option<&str> {
        let called = self.client.filter(|(_, client)| client.called() != client.name);
        called.map(|(_, client)| client.called()).or(self.own.name.as_deref())
    }

    fn name(&self) -> String {
        let program = || self.process.text("comm").unwrap_or_default().trim().to_owned();
        self.given_name().map_or_else(program, str::to_owned)
    }

    fn has_agent(&self) -> bool {
        self.memory.as_ref().is_ok_and(|memory| memory.agent.is_some())
    }

    /// Whether the daemon merges it now, so that nothing it needs can be denied.
    fn merges(&self) -> bool {
        self.client.is_some_and(|(_, client)| {
            client.state == ClientState::Merging && client.remarks.refused.is_none() && client.metrics.regions > 0
        })
    }

    /// The mount of the host's module that its RAM lies in. The agent is not needed then.
    fn mount(&self) -> Option<&'a MountInfo> {
        let memory = self.memory.as_ref().ok().filter(|memory| memory.shared * 2 > memory.total())?;
        self.world.mounts.iter().find(|mount| mount.device == memory.device)
    }

    /// Whether its owner does not want it merged: `<nosharepages/>`, Proxmox' `allow-ksm`.
    fn opts_out(&self) -> bool {
        let value = property(&self.arguments, "machine", "mem-merge");
        self.kind == Kind::Qemu && matches!(value.as_deref(), Some("off" | "no" | "n" | "false"))
    }

    fn is_of_libvirt(&self) -> bool {
        let by_group = || {
            self.process
                .text("cgroup")
                .is_ok_and(|text| text.contains(r"/machine-qemu\x2d") || text.contains(".libvirt-qemu"))
        };
        self.label.as_ref().is_some_and(|label| label.starts_with("libvirt-")) || by_group()
    }

    /// Whether it is merged; if not, why. `others`: what else was found.
    fn merging(&self, others: &[Check]) -> Check {
        let name = "merging";
        if let Some((_, client)) = self.client {
            return of_client(client);
        }
        if let Some(refused) = self.refused {
            return Check::blocks(name, format!("the daemon refuses it: {}", refused.reason), "as it says");
        }
        if let Some(mount) = self.mount() {
            return Check::blocks(
                name,
                format!("its RAM lies in {}, and no daemon that answers manages its file", mount.path.display()),
                "as the host's line `module: daemon` says; a file that was just made is known after a merge period",
            );
        }
        if self.opts_out() {
            return Check::note(
                name,
                "it is not to be merged (mem-merge=off)",
                "none: <nosharepages/> or allow-ksm says so",
            );
        }
        if self.has_agent() {
            return self.not_known();
        }
        let found = "the agent is not in it";
        let Some(remedy) = self.without_agent(others) else {
            return Check::blocks(name, found, "none while what follows is in the way");
        };
        let check = Check::blocks(name, found, remedy);
        match self.given_name().filter(|_| self.is_of_libvirt()) {
            Some(guest) => check.fix(format!(
                "virt-xml {} --edit --xml ./devices/emulator=/usr/bin/qemu-system-x86_64-pageone",
                quoted(guest)
            )),
            None => check,
        }
    }

    /// The agent is in it, and no daemon that was asked knows it.
    fn not_known(&self) -> Check {
        let name = "merging";
        let socket = self.process.variable(wire::ENV_SOCKET).unwrap_or_else(|| "/run/pageone/agent.sock".into());
        // Anybody's process may have one of any length.
        let socket: String = socket.chars().take(LONGEST).collect();
        let directory = Path::new(&socket).parent().unwrap_or(Path::new("/"));
        let looks_elsewhere = !self.world.directories.iter().any(|asked| asked == directory);
        let is_there = self.process.path("root").join(socket.trim_start_matches('/')).exists();
        let found = match self.world.status {
            None => "the agent is in it, and no daemon answers",
            Some(_) => "the agent is in it, and the daemon does not know it",
        };
        if !is_there {
            let remedy =
                format!("its agent looks for a daemon at {socket}, and nothing is there: start one; the guest runs on");
            return Check::blocks(name, found, remedy);
        }
        if looks_elsewhere {
            let (directory, pid) = (quoted(&directory.display().to_string()), self.process.pid);
            let remedy = format!("`pageone --dir {directory} doctor {pid}` asks the daemon that its agent looks for");
            return Check::note(name, format!("the agent is in it, for another daemon ({socket})"), remedy);
        }
        Check::blocks(
            name,
            found,
            "start the daemon if it does not run; else the guest marks no memory, or its log says what was denied",
        )
    }

    /// What brings the agent into it. `None`: nothing does, as it is.
    fn without_agent(&self, others: &[Check]) -> Option<String> {
        let binds =
            |check: &Check| matches!(check.check, "program" | "memory" | "pins") && check.verdict == Verdict::Blocks;
        if others.iter().any(binds) {
            return None;
        }
        let restart = if self.is_contained() {
            "start it again with the agent in its LD_PRELOAD: its container must have the library and the daemon's \
             socket"
                .to_owned()
        } else if self.is_of_libvirt() {
            "make qemu-system-x86_64-pageone its emulator, and start it again".to_owned()
        } else {
            "start it again with `pageone run`, or with the wrapper qemu-system-x86_64-pageone as its program"
                .to_owned()
        };
        let attach = self.attach(others).map(|attach| format!("; or while it runs: `{attach}`"));
        Some(restart + &attach.unwrap_or_default())
    }

    /// The command that brings the agent into a program that runs, where it can: into QEMU, with
    /// nothing in the way, no filter but its own and nothing that KSM has merged, where it sees the
    /// host's files.
    fn attach(&self, others: &[Check]) -> Option<String> {
        let is_free = |check: &Check| match check.check {
            "sandbox" => check.verdict == Verdict::Ok,
            _ => check.verdict != Verdict::Blocks,
        };
        let is_fit = self.kind == Kind::Qemu && !self.is_contained() && self.merged_by_ksm() == 0;
        (is_fit && others.iter().all(is_free)).then(|| format!("pageone attach {}", self.process.pid))
    }

    /// Whether its root directory is not the host's. libvirt gives its guests a `/dev` of their own
    /// only.
    fn is_contained(&self) -> bool {
        let identity = |path: &Path| std::fs::metadata(path).map(|meta| (meta.dev(), meta.ino())).ok();
        identity(&self.process.path("root")) != identity(self.world.root)
    }
}

/// What the daemon says of a client.
fn of_client(client: &ClientStatus) -> Check {
    let (name, metrics) = ("merging", &client.metrics);
    let mib = |pages: u64| (pages * kmem::PAGE_SIZE as u64) >> 20;
    if let Some(why) = &client.remarks.refused {
        return Check::blocks(name, format!("nothing of it is merged: {why}"), "as it says");
    }
    let found = format!(
        "{}: {} of {} MiB share, {} MiB are zero",
        client.state,
        mib(metrics.pages_merged),
        metrics.region_bytes >> 20,
        mib(metrics.pages_zero)
    );
    match client.state {
        ClientState::Merging if metrics.regions == 0 => {
            Check::note(name, "connected, and it has marked no memory", "QEMU marks its memory unless mem-merge=off")
        }
        ClientState::Merging => match &client.remarks.limited {
            Some(why) => Check::note(name, found, format!("merged in part: {why}")),
            None => Check::ok(name, found),
        },
        ClientState::Detached => Check::note(name, found, "`pageone detach` did this; start it again to merge it"),
        _ => Check::blocks(
            name,
            found,
            "its agent does not answer: let the program go on if it is stopped, else start it again",
        ),
    }
}

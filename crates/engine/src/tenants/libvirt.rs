//! libvirt: its state of each running guest, `/run/libvirt/qemu/NAME.xml`.
//!
//! libvirtd writes that file, as root, before the guest's QEMU begins to run. It names the process,
//! the guest's number, name and UUID, and the metadata. A file may be stale, and its process number
//! may belong to another process by now. So the kernel must agree: the number in the cgroup's name
//! is the guest's, and the AppArmor label, where there is one, has its UUID.
//!
//! From libvirt 11 on the directory belongs to the user that guests run as: they may rename or
//! remove libvirt's files there, and so keep one beyond its time. There a file counts only if it
//! was written after the process had started.

use std::path::Path;

use roxmltree::{Document, Node, ParsingOptions};

use super::file::{self, FileError, read_kernel};
use super::process;
use crate::config::TenantBy;

/// Where libvirt keeps the state of running guests.
const STATE: &str = "run/libvirt/qemu";
/// Most nodes of an XML file.
const NODES: u32 = 100_000;
/// Namespaces of nova's metadata begin so; a version follows.
const NOVA: &str = "http://openstack.org/xmlns/libvirt/nova/";

#[derive(Debug, thiserror::Error)]
pub(super) enum LibvirtError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("no file of /{STATE} names process {0}; see that libvirt runs, and start the guest by it")]
    NotThere(i32),
    #[error(
        "/{STATE} says that process {pid} is guest {uuid}, and its cgroup or AppArmor label says another; restart \
         libvirtd, which writes the file anew"
    )]
    Contradicts { pid: i32, uuid: String },
}

/// The UUID in the AppArmor label of a process (`libvirt-UUID`), if it has such a label.
pub(super) fn label(root: &Path, pid: i32) -> Option<String> {
    // The first is there where several security modules run.
    let files = ["apparmor/current", "current"];
    let labels = files.iter().filter_map(|file| read_kernel(&root.join(format!("proc/{pid}/attr/{file}"))).ok());
    let uuid = labels.filter_map(|label| Some(label.strip_prefix("libvirt-")?.get(..36)?.to_owned())).next()?;
    is_uuid(&uuid).then_some(uuid)
}

/// What libvirt knows of a process. `id`: the number in its cgroup's name.
pub(super) fn values(root: &Path, pid: i32, id: Option<u32>) -> Result<Vec<(TenantBy, String)>, LibvirtError> {
    let state = state(root, pid)?;
    let label = label(root, pid);
    // The kernel must say it in one way, and in no other.
    let agrees = id.is_none_or(|id| id == state.id)
        && label.as_ref().is_none_or(|uuid| *uuid == state.uuid)
        && (id.is_some() || label.is_some());
    if !agrees {
        return Err(LibvirtError::Contradicts { pid, uuid: state.uuid });
    }
    let mut values = vec![(TenantBy::Guest, state.uuid), (TenantBy::Name, state.name)];
    values.extend(state.project.map(|project| (TenantBy::Project, project)));
    Ok(values)
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct State {
    id: u32,
    name: String,
    uuid: String,
    project: Option<String>,
}

/// The state of the guest whose process this is.
fn state(root: &Path, pid: i32) -> Result<State, LibvirtError> {
    let directory = root.join(STATE);
    let entries = std::fs::read_dir(&directory).map_err(|e| FileError::io(&directory, e))?;
    let started = process::started(root, pid);
    let mut why = LibvirtError::NotThere(pid);
    for entry in entries.flatten().map(|entry| entry.path()) {
        if entry.extension().is_none_or(|extension| extension != "xml") {
            continue;
        }
        match file::read_since(&entry, started) {
            Ok(text) => match parse(&text, pid) {
                Some(state) => return Ok(state),
                None => continue,
            },
            Err(e) => why = e.into(),
        }
    }
    Err(why)
}

/// Reads one file; `None`: it is of another process, or no XML of libvirt.
pub(super) fn parse(text: &str, pid: i32) -> Option<State> {
    let of_pid = |quote| text.contains(&format!("pid={quote}{pid}{quote}"));
    // Quick: there are as many files as guests.
    if !of_pid('\'') && !of_pid('"') {
        return None;
    }
    let options = ParsingOptions { nodes_limit: NODES, ..ParsingOptions::default() };
    let document = Document::parse_with_options(text, options).ok()?;
    let status = document.root_element();
    if !status.has_tag_name("domstatus") || status.attribute("pid")?.parse() != Ok(pid) {
        return None;
    }
    let domain = only_child(status, "domain")?;
    let uuid = only_child(domain, "uuid")?.text()?.trim().to_ascii_lowercase();
    let project = only_child(domain, "metadata").and_then(project);
    Some(State {
        id: domain.attribute("id")?.parse().ok()?,
        name: only_child(domain, "name")?.text()?.to_owned(),
        uuid: Some(uuid).filter(|uuid| is_uuid(uuid))?,
        project,
    })
}

/// nova's project id in the metadata.
fn project(metadata: Node<'_, '_>) -> Option<String> {
    let is_nova = |node: &Node<'_, '_>| node.tag_name().namespace().is_some_and(|name| name.starts_with(NOVA));
    let mut instances = metadata.children().filter(|node| is_nova(node) && node.tag_name().name() == "instance");
    let (Some(instance), None) = (instances.next(), instances.next()) else { return None };
    let project = only_child(only_child(instance, "owner")?, "project")?;
    project.attribute("uuid").filter(|uuid| !uuid.is_empty()).map(str::to_owned)
}

/// The child of this name, in any namespace; `None`: there is none, or more than one.
fn only_child<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    let mut children = node.children().filter(|child| child.is_element() && child.tag_name().name() == name);
    let child = children.next()?;
    children.next().is_none().then_some(child)
}

fn is_uuid(text: &str) -> bool {
    text.len() == 36 && text.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-')
}

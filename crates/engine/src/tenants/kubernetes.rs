//! Kubernetes: the namespace of a pod. The cgroup knows only the pod's uid; kubelet makes a
//! directory `/var/log/pods/NAMESPACE_NAME_UID` for each, whatever the container runtime.

use std::path::Path;

use super::file::{FileError, is_trusted};
use crate::config::TenantBy;

/// Where kubelet keeps the logs of pods.
const PODS: &str = "var/log/pods";

#[derive(Debug, thiserror::Error)]
pub(super) enum KubernetesError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(
        "no directory /{PODS}/NAMESPACE_NAME_{0} of root's is there, or several are, so its namespace is not known: \
         kubelet makes it unless --pod-log-dir or podLogsDir names another place: link that to /{PODS}"
    )]
    NotThere(String),
}

pub(super) fn values(root: &Path, uid: &str) -> Result<Vec<(TenantBy, String)>, KubernetesError> {
    let directory = root.join(PODS);
    let cannot = |e| FileError::io(&directory, e);
    if !is_trusted(&directory.metadata().map_err(cannot)?) {
        return Err(FileError::Writable { path: directory }.into());
    }
    let mut pods = std::fs::read_dir(&directory).map_err(cannot)?.flatten().filter_map(|entry| {
        let name = entry.file_name();
        let (namespace, pod) = parse(name.to_str()?, uid)?;
        let meta = entry.metadata().ok()?;
        (meta.is_dir() && is_trusted(&meta)).then_some((namespace, pod))
    });
    match (pods.next(), pods.next()) {
        (Some((namespace, pod)), None) => Ok(vec![(TenantBy::Namespace, namespace), (TenantBy::Name, pod)]),
        _ => Err(KubernetesError::NotThere(uid.into())),
    }
}

/// Namespace and name in the directory's name, if it is that of the pod. Neither holds a `_`.
pub(super) fn parse(directory: &str, uid: &str) -> Option<(String, String)> {
    let mut parts = directory.split('_');
    let (namespace, pod, of) = (parts.next()?, parts.next()?, parts.next()?);
    let is_it = of == uid && parts.next().is_none() && !namespace.is_empty();
    is_it.then(|| (namespace.into(), pod.into()))
}

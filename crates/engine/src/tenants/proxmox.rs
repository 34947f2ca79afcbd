//! Proxmox: tags and name of a guest in `/etc/pve/qemu-server/VMID.conf`, its pool in
//! `/etc/pve/user.cfg`.

use std::path::Path;

use super::file::{self, FileError};
use crate::config::TenantBy;

pub(super) fn values(root: &Path, vmid: &str) -> Result<Vec<(TenantBy, String)>, FileError> {
    let mut values = of_guest(&file::read(&root.join(format!("etc/pve/qemu-server/{vmid}.conf")))?);
    values.extend(pool(&file::read(&root.join("etc/pve/user.cfg"))?, vmid).map(|pool| (TenantBy::Pool, pool)));
    Ok(values)
}

/// Name and tags. The first section is the guest as it runs; snapshots follow.
pub(super) fn of_guest(text: &str) -> Vec<(TenantBy, String)> {
    let mut values = Vec::new();
    for line in text.lines().take_while(|line| !line.starts_with('[')) {
        match line.split_once(':') {
            Some(("name", name)) => values.push((TenantBy::Name, name.trim().to_owned())),
            Some(("tags", tags)) => {
                let tags = tags.split([';', ',', ' ', '\t']).filter(|tag| !tag.is_empty());
                values.extend(tags.map(|tag| (TenantBy::Tag, tag.to_owned())));
            }
            _ => {}
        }
    }
    values
}

/// The pool of a guest: `pool:NAME:comment:VMIDs:storages:`. `None`: it is in none, or in several.
pub(super) fn pool(text: &str, vmid: &str) -> Option<String> {
    let mut pools = text.lines().filter_map(|line| {
        let mut fields = line.split(':').map(str::trim);
        let is_pool = fields.next()? == "pool";
        let (name, _, vmids) = (fields.next()?, fields.next()?, fields.next()?);
        let has = vmids.split([',', ';', ' ']).any(|other| other.trim() == vmid);
        (is_pool && has && !name.is_empty()).then(|| name.to_owned())
    });
    let pool = pools.next()?;
    pools.next().is_none().then_some(pool)
}

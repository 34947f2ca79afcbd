//! Accounts by their names.

use std::path::Path;

use snapshot::rights::Account;

/// User and groups of an account, by `/etc/passwd` and `/etc/group`. A number that is nobody's is
/// that of a user and of its only group.
pub(crate) fn account(root: &Path, name: &str) -> Option<Account> {
    let lines = |file: &str| -> Vec<Vec<String>> {
        let text = claims::text(&root.join(file), 16 << 20).unwrap_or_default();
        let fields = |line: &str| line.split(':').map(String::from).collect::<Vec<_>>();
        text.lines().map(fields).filter(|fields| fields.len() > 3).collect()
    };
    let capabilities = u64::MAX;
    let all = lines("etc/passwd");
    let Some(entry) = all.iter().find(|fields| fields[0] == name || fields[2] == name) else {
        let uid = name.parse().ok()?;
        return Some(Account { uid, gid: uid, groups: Vec::new(), capabilities });
    };
    let groups = lines("etc/group").into_iter().filter(|fields| fields[3].split(',').any(|member| member == entry[0]));
    let groups = groups.filter_map(|fields| fields[2].parse().ok()).collect();
    Some(Account { uid: entry[2].parse().ok()?, gid: entry[3].parse().ok()?, groups, capabilities })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_account_is_known_by_its_name_and_number() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("etc")).unwrap();
        std::fs::write(root.path().join("etc/passwd"), "root:x:0:0::/:/bin/sh\nqemu:x:64055:993::/:/bin/false\n")
            .unwrap();
        std::fs::write(root.path().join("etc/group"), "kvm:x:108:qemu,other\ndisk:x:6:other\n").unwrap();
        let of = |name: &str| account(root.path(), name).map(|one| (one.uid, one.gid, one.groups));
        for name in ["qemu", "64055"] {
            assert_eq!(of(name), Some((64055, 993, vec![108])));
        }
        assert_eq!((of("7"), of("nobody here")), (Some((7, 7, Vec::new())), None));
    }
}

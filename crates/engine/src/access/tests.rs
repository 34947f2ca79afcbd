use kmem::pidfd::PidFd;

use super::*;

#[test]
fn tenants_of_one_user_see_nothing_of_each_other() {
    let tenant = |value: &str| Tenant { source: "project", value: value.into() };
    let (a, b) = (tenant("a"), tenant("b"));
    let of_a = Access::Of(64055, Some(Part(a.clone())));
    assert!(of_a.covers(64055, Some(&a)));
    assert!(!of_a.covers(64055, Some(&b)) && !of_a.covers(64055, None) && !of_a.covers(1000, Some(&a)));
    let unmanaged = Access::Of(64055, None);
    assert!(unmanaged.covers(64055, None) && !unmanaged.covers(64055, Some(&a)) && !unmanaged.covers(0, None));
    assert!(!Access::Nobody.covers(64055, None) && !Access::Nobody.covers(64055, Some(&a)));
    assert!(Access::All.covers(64055, Some(&a)) && Access::All.covers(1000, None));
}

#[test]
fn a_process_has_the_access_of_its_user_and_tenant_while_it_lives() {
    let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let pid = child.id() as i32;
    let peer = |uid| Peer { uid, pid, process: PidFd::open(pid).ok() };
    let own = tenants::verdict(&[], pid).tenant.map(Part);
    let (root, living, unknown) = (peer(0), peer(12345), Peer { process: None, ..peer(12345) });
    assert_eq!(Access::of(&[], &root), Access::All);
    assert_eq!(Access::of(&[], &living), Access::Of(12345, own));
    assert_eq!(Access::of(&[], &unknown), Access::Nobody);
    let (process, access) = (PidFd::open(pid).unwrap(), Access::of(&[], &living));
    let covers = |uid| access.covers_process(&[], uid, pid, || !process.has_exited());
    assert!(covers(12345) && !covers(0));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(Access::of(&[], &living), Access::Nobody, "its number may be another's");
    assert!(!covers(12345), "and so may the other process's");
}

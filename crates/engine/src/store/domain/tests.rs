use std::sync::atomic::Ordering::Relaxed;

use super::*;
use crate::config::DomainConfig;
use crate::core::content::index::Seen;

#[test]
fn a_frame_whose_memory_has_failed_is_pinned_and_leaves_the_index() {
    let domain = Domain::new(DomainKey::named(None, "test"), &Config::default());
    let frame = Cursor::new(&domain.store, None).put(&[7; kmem::PAGE_SIZE], 1).unwrap();
    let Some(Seen::First(handle)) = domain.index.see(42, Place::Frame(frame)) else { panic!("known") };
    domain.store.set_handle(frame, handle);
    domain.give_up(frame);
    assert_eq!((domain.index.place(handle, 42), domain.store.usage().pinned), (None, 1));
    assert_eq!(domain.store.doubted.load(Relaxed), 1);
    domain.release(frame);
    assert_eq!((domain.store.users(frame), domain.store.usage().pinned), (0, 1));
}

#[test]
fn a_content_has_a_key_for_each_node_but_zeros_have_one() {
    let key = DomainKey::named(None, "test");
    let mut domain = Domain::new(key, &Config::default());
    let digest = domain.digest(&[7; kmem::PAGE_SIZE]);
    for node in [None, Some(0), Some(1)] {
        assert_eq!(domain.key_of(digest, node), Some(digest), "nodes are not kept apart");
    }
    domain.store.by_node = true;
    let keys = [Some(0), Some(1)].map(|node| domain.key_of(digest, node).unwrap());
    assert!(keys[0] != digest && keys[1] != digest && keys[0] != keys[1]);
    assert_eq!(domain.key_of(digest, None), None, "it may be on either");
    for node in [None, Some(1)] {
        assert_eq!(domain.key_of(domain.zero_digest, node), Some(domain.zero_digest));
    }
}

#[test]
fn a_name_that_a_client_asks_for_is_never_a_tenants_domain() {
    let config = Config { domains: [("web".into(), DomainConfig { uids: vec![7] })].into(), ..Config::default() };
    let of = |tenant: Option<&str>, name| {
        let tenant = tenant.map(|value| Tenant { source: "pool", value: value.into() });
        DomainKey::of(&config, 7, tenant, name).unwrap().to_string()
    };
    assert_eq!(
        (of(None, None), of(None, Some("")), of(None, Some("a b"))),
        ("uid-7".into(), "uid-7".into(), "a b@7".into())
    );
    assert_eq!((of(None, Some("web")), of(Some("acme"), None)), ("web".into(), "pool:acme@7".into()));
    assert_eq!(of(Some("acme"), Some("web")), "pool:acme/web@7", "a part of the tenant's");
    assert_eq!(of(None, Some("pool:acme")), "pool%3Aacme@7");
    assert_eq!(of(Some("acme/web"), None), "pool:acme%2Fweb@7", "no part of the tenant acme");
    assert_eq!(of(None, Some("x\n12 uid-0")), "x%0A12 uid-0@7", "no line of the state file");
    let refused = DomainKey::of(&config, 8, None, Some("web")).unwrap_err();
    assert!(refused.to_string().contains("uid 8 may not join domain \"web\""), "{refused}");
}

#[test]
fn keys_and_their_texts_are_one_for_one() {
    use proptest::prelude::*;
    let part = || proptest::option::of("[ab:/@%\n]{1,3}");
    let key = || {
        (part(), part(), 0u32..2).prop_map(|(tenant, name, uid)| {
            let tenant = tenant.map(|value| Tenant { source: "pool", value });
            DomainKey::of(&Config::default(), uid, tenant, name.as_deref()).unwrap()
        })
    };
    proptest!(|(a in key(), b in key())| {
        prop_assert_eq!(a == b, a.to_string() == b.to_string());
        prop_assert!(!a.to_string().contains('\n'));
    });
}

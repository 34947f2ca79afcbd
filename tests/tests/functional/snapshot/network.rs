//! The network of clones: who hears of them, and how they are called.

use std::net::UdpSocket;

use super::*;

#[test]
fn a_clone_without_links_says_nothing_in_its_network() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    // All that the guest sends arrives here.
    let network = UdpSocket::bind("127.0.0.1:0").unwrap();
    let free = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let netdev = format!("socket,id=n0,udp={},localaddr={free}", network.local_addr().unwrap());
    let source = place.machine("source", &["-name", "web", "-netdev", &netdev, "-device", "e1000,netdev=n0"]);
    place.save(source.pid(), "one");
    drop(source);
    let heard = || {
        network.set_nonblocking(true).unwrap();
        let mut bytes = [0; 2048];
        std::iter::from_fn(|| network.recv(&mut bytes).ok()).count()
    };
    heard();
    place.ok(&["snapshot", "verify", "store", "one", "--files", &place.path("f").display().to_string()]);
    assert_eq!(heard(), 0, "a clone that is tried is not heard");
    let quiet = place.clones_with("one", "quiet", 1, &["--links-down"], &[]);
    let called = quiet.clones[0].qmp("source.qmp").execute("query-name", json!({}));
    assert!(called["name"].as_str().unwrap().starts_with("web-one-"), "{called}");
    assert_eq!(heard(), 0);
    drop(quiet);
    // QEMU announces the others.
    let _loud = place.clones("one", 1, &[]);
    eventually("it is heard", Duration::from_secs(60), || (heard() > 0).then_some(()));
}

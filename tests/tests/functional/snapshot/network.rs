//! The network of clones: who hears of them, and how they are called.

use std::collections::HashSet;
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

/// The addresses of a machine's network cards.
fn addresses(qmp: &mut Qmp) -> Vec<String> {
    let text = qmp.execute("human-monitor-command", json!({ "command-line": "info qtree" }));
    let of = |line: &str| Some(line.trim().strip_prefix("mac = \"")?.trim_end_matches('"').to_owned());
    text.as_str().unwrap().lines().filter_map(of).collect()
}

/// In one network two guests with one address lose their packets to each other.
#[test]
fn each_card_of_each_clone_has_an_address_of_its_own() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let several = "-nodefaults -nic user,model=e1000 -nic user,model=tulip,mac=52:54:00:12:34:77 -net nic,model=ne2k_pci \
                   -net user -netdev user,id=n -device virtio-net-pci,netdev=n,addr=8,mac=52:54:00:12:34:78 -device pcnet";
    let several: Vec<&str> = several.split_whitespace().collect();
    // QEMU makes one unasked.
    // And some refuse what had another address.
    let kept: Vec<&str> =
        "-nodefaults -netdev user,id=n -device e1000e,netdev=n -nic user,model=vmxnet3".split(' ').collect();
    for (name, words, count, new) in
        [("default", &[][..], 1, 1), ("several", &several, 5, 5), ("kept", &kept, 2, 0), ("q35", &["-M", "q35"], 1, 0)]
    {
        let source = place.machine_of(name, words);
        let mut all = addresses(&mut source.qmp());
        assert_eq!(all.len(), count, "{all:?}");
        place.save(source.pid(), name);
        let clones = place.clones(name, 2, &[]);
        for clone in &clones.clones {
            let mut qmp = clone.qmp(&format!("{name}.qmp"));
            assert_eq!(status(&mut qmp), "running");
            all.extend(addresses(&mut qmp));
        }
        let different = all.iter().collect::<HashSet<_>>().len();
        assert_eq!((all.len(), different), (3 * count, count + 2 * new), "{all:?}");
    }
}

//! Words of a clone.

use super::*;

fn rewritten(line: &str) -> String {
    rewritten_in("/c", line)
}

fn rewritten_in(own: &str, line: &str) -> String {
    // Else QEMU makes a card of its own.
    let words = line.split(' ').chain(["-nodefaults"]).map(String::from).collect();
    let disks = vec![
        Disk { word: "a/d.qcow2".into(), image: "/x.qcow2".into(), ..Disk::default() },
        Disk { word: "r.img".into(), image: "/r.one.raw".into(), raw: true, ..Disk::default() },
        Disk { word: "a,b".into(), image: "/y.qcow2".into(), ..Disk::default() },
    ];
    let description = Description { words, disks, ..Description::default() };
    let mut words = rewrite(&description, Path::new(own));
    let named = words.split_off(words.len() - 2);
    assert_eq!(name(&named).as_deref(), own.strip_prefix('/'));
    assert_eq!(words.pop().as_deref(), Some("-nodefaults"));
    words.join(" ")
}

#[test]
fn each_clone_has_a_name_of_its_own() {
    for (line, want) in [
        ("-m 1", "one-7-1"),
        ("-name web,debug-threads=on -m 1", "web-one-7-1"),
        ("-name guest=shop,,two", "shop,two-one-7-1"),
        ("-name a -name guest=b", "b-one-7-1"),
    ] {
        let words = line.split(' ').map(String::from).collect();
        let description = Description { words, ..Description::default() };
        let clone = rewrite(&description, Path::new("/clones/one-7-1"));
        assert_eq!(name(&clone).as_deref(), Some(want), "{line}");
        let of_clone = Description { words: clone, ..description.clone() };
        assert_ne!(of_clone.guest("q 1"), description.guest("q 1"), "prune counts each for itself");
    }
}

#[test]
fn what_two_guests_cannot_both_have_is_made_new() {
    for (line, want) in [
        ("-drive file=a/d.qcow2,if=virtio -m 1", "-drive file=/c/disk-0.qcow2,if=virtio -m 1"),
        ("-hda a/d.qcow2", "-hda /c/disk-0.qcow2"),
        (
            "-blockdev qcow2,node-name=n,file.filename=a/d.qcow2",
            "-blockdev qcow2,node-name=n,file.filename=/c/disk-0.qcow2",
        ),
        ("-drive file=r.img,if=none,format=raw", "-drive file=/c/disk-1.qcow2,if=none,format=qcow2"),
        ("-drive file=other.iso,media=cdrom", "-drive file=other.iso,media=cdrom"),
        ("-daemonize -pidfile /run/x.pid", "-pidfile /c/x.pid"),
        ("-chardev socket,id=a,path=/run/a.sock,server=on", "-chardev socket,id=a,path=/c/a.sock,server=on,wait=off"),
        ("-chardev stdio,id=a -serial chardev:a", "-chardev stdio,id=a -serial chardev:a"),
        ("-serial unix:/t/s,server=on,wait=off", "-serial unix:/c/s,server=on,wait=off"),
        ("-vnc :1", "-vnc :1,to=999"),
        ("-netdev user,id=n,hostfwd=tcp:127.0.0.1:2222-:22", "-netdev user,id=n,hostfwd=tcp:127.0.0.1:0-:22"),
        ("-device vmgenid,guid=1", "-device vmgenid,guid=auto"),
        ("-qmp tcp:127.0.0.1:4444,server=on,wait=off", "-qmp tcp:127.0.0.1:0,server=on,wait=off"),
        ("-serial telnet::5555,server", "-serial telnet::0,server,wait=off"),
        ("-serial tcp::5555,server,nowait", "-serial tcp::0,server,nowait"),
        ("-gdb tcp::1234 -s -runas bin -m 1", "-gdb tcp::0 -m 1"),
        ("-chardev socket,id=a,host=h,port=1,server=on", "-chardev socket,id=a,host=h,port=0,server=on,wait=off"),
        ("-chardev socket,id=a,host=h,port=1,reconnect=1", "-chardev socket,id=a,host=h,port=1,reconnect=1"),
        ("-chardev null,id=a,logfile=/var/log/x", "-chardev null,id=a,logfile=/c/x"),
    ] {
        assert_eq!(rewritten(line), want);
    }
    for (line, want) in [
        ("-drive id=a,,b,file=a,,b", "-drive id=a,,b,file=/c,,d/disk-2.qcow2"),
        ("-hda a,b", "-hda /c,d/disk-2.qcow2"),
        ("-chardev socket,id=a,path=/r/a,,b", "-chardev socket,id=a,path=/c,,d/a,,b"),
        ("-serial unix:/t/s,,t,server=on", "-serial unix:/c,,d/s,,t,server=on,wait=off"),
        ("-serial file:/t/s,t", "-serial file:/c,d/s,t"),
        ("-vnc unix:/t/s,,t,password=on", "-vnc unix:/c,,d/s,,t,password=on"),
        ("-netdev user,hostfwd=tcp::22-:22,tftp=/a,,b", "-netdev user,hostfwd=tcp::0-:22,tftp=/a,,b"),
    ] {
        assert_eq!(rewritten_in("/c,d", line), want);
    }
    assert_ne!(rewritten("-device vhost-vsock-pci,guest-cid=3"), rewritten("-device vhost-vsock-pci,guest-cid=3"));
    assert_eq!(rewritten("-net none -nic none -device pcie-root-port"), "-net none -nic none -device pcie-root-port");
    let card = rewritten("-device virtio-net-pci,netdev=n,mac=52:54:00:12:34:56");
    assert!(card.starts_with("-device virtio-net-pci,netdev=n,mac=52:54:00:") && !card.ends_with("12:34:56"));
}

/// QEMU gives the first card of each guest one address, where its words name none.
#[test]
fn each_card_has_an_address_of_its_own() {
    let addresses_in = |machine: &str, line: &str| {
        let words: Vec<String> = line.split_whitespace().map(String::from).collect();
        let facts = crate::Facts { machine: machine.into(), ..Default::default() };
        let clone = rewrite(&Description { words, facts, ..Description::default() }, Path::new("/c"));
        let of = |word: &String| {
            let set =
                |part: std::borrow::Cow<'_, str>| part.split_once('=').map(|(key, to)| [key, to].map(String::from));
            parts(word).filter_map(set).filter(|[key, _]| matches!(&**key, "mac" | "macaddr")).collect::<Vec<_>>()
        };
        clone.iter().flat_map(of).collect::<Vec<_>>()
    };
    let addresses = |line: &str| addresses_in("pc-i440fx-7.2-machine", line);
    // These refuse another when they are loaded, and QEMU numbers those without one.
    let of_source = ["mac", "52:54:00:12:34:56"].map(String::from);
    let line = "-nodefaults -device virtio-net-pci,netdev=m -device e1000e,netdev=n,mac=52:54:00:12:34:56";
    assert!(matches!(&addresses(line)[..], [new, kept] if *new != of_source && *kept == of_source));
    let line = "-nodefaults -device e1000,mac=52:54:00:12:34:56 -device vmxnet3,netdev=n";
    assert_eq!(addresses(line), std::slice::from_ref(&of_source));
    for line in ["", "-nic user", "-net nic -net user", "-nic tap -nic user,model=e1000"] {
        assert!(addresses_in("pc-q35-7.2-machine", line).is_empty(), "{line}");
    }
    assert_eq!(addresses_in("pc-q35-7.2-machine", "-nic user,model=e1000").len(), 1);
    for (line, keys) in [
        ("", &["macaddr"][..]),
        ("-nodefaults", &[]),
        ("-m 1 -device e1000", &["mac", "macaddr"]),
        ("-net none", &[]),
        ("-nic none", &[]),
        ("-netdev user,id=n", &[]),
        ("-nic user,model=virtio-net-pci", &["mac"]),
        ("-nic user,mac=52:54:00:12:34:56 -nic type=tap,id=x", &["mac", "mac"]),
        ("-net nic -net user -net type=nic,macaddr=52:54:00:12:34:56,model=e1000", &["macaddr", "macaddr"]),
        ("-netdev user,id=n -device i82559er,netdev=n,mac=52:54:00:12:34:56", &["mac"]),
        (
            "-nodefaults -device driver=tulip -device ne2k_isa -device usb-net,netdev=n -device new,netdev=n",
            &["mac"; 4],
        ),
    ] {
        let [one, other] = [addresses(line), addresses(line)];
        assert_eq!(one.iter().map(|[key, _]| &**key).collect::<Vec<_>>(), keys, "{line}");
        let all = [&one[..], &other].concat().into_iter().map(|[_, to]| to).collect::<std::collections::HashSet<_>>();
        assert!(all.len() == 2 * keys.len() && !all.contains("52:54:00:12:34:56"), "{line}: {all:?}");
    }
}

#[test]
fn what_others_wrote_listens_for_this_host_alone() {
    for (line, want) in [
        ("-vnc :1,to=999", "-vnc 127.0.0.1:1,to=999"),
        ("-vnc [::]:1,password=on", "-vnc 127.0.0.1:1,password=on"),
        ("-netdev user,id=n,hostfwd=tcp::0-:22", "-netdev user,id=n,hostfwd=tcp:127.0.0.1:0-:22"),
        ("-nic user,hostfwd=::0-:22", "-nic user,hostfwd=:127.0.0.1:0-:22"),
        ("-nic user,hostfwd=udp:0.0.0.0:0-10.0.2.15:22", "-nic user,hostfwd=udp:127.0.0.1:0-10.0.2.15:22"),
        ("-chardev socket,id=c,host=0.0.0.0,port=0,server=on", "-chardev socket,id=c,host=127.0.0.1,port=0,server=on"),
        ("-qmp tcp::0,server=on,wait=off -gdb tcp::0", "-qmp tcp:127.0.0.1:0,server=on,wait=off -gdb tcp:127.0.0.1:0"),
    ] {
        let words: Vec<String> = line.split(' ').map(String::from).collect();
        assert_eq!(reached_from_here(&words).join(" "), want);
        let want: Vec<String> = want.split(' ').map(String::from).collect();
        assert_eq!(reached_from_here(&want), want);
    }
    let line =
        "-vnc none -vnc unix:/v -vnc localhost:1 -vnc 10.0.0.1:1,reverse=on -m 1 -serial tcp:10.0.0.1:1,reconnect=1";
    let words: Vec<String> = line.split(' ').map(String::from).collect();
    assert_eq!(reached_from_here(&words), words);
}

use super::*;
use crate::facts::Facts;

fn rewritten(line: &str) -> String {
    rewritten_in("/c", line)
}

fn rewritten_in(own: &str, line: &str) -> String {
    let words = line.split(' ').map(String::from).collect();
    let disks = vec![
        Disk { word: "a/d.qcow2".into(), image: "/x.qcow2".into(), raw: false },
        Disk { word: "r.img".into(), image: "/r.one.raw".into(), raw: true },
        Disk { word: "a,b".into(), image: "/y.qcow2".into(), raw: false },
    ];
    let (program, directory) = ("/q".into(), "/".into());
    let description = Description { program, directory, words, facts: Facts::default(), disks };
    rewrite(&description, Path::new(own)).join(" ")
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
        ("-chardev socket,id=a,path=/run/a.sock,server=on", "-chardev socket,id=a,path=/c/a.sock,server=on"),
        ("-chardev stdio,id=a -serial chardev:a", "-chardev stdio,id=a -serial chardev:a"),
        ("-serial unix:/t/s,server=on,wait=off", "-serial unix:/c/s,server=on,wait=off"),
        ("-vnc :1", "-vnc :1,to=999"),
        ("-netdev user,id=n,hostfwd=tcp:127.0.0.1:2222-:22", "-netdev user,id=n,hostfwd=tcp:127.0.0.1:0-:22"),
        ("-device vmgenid,guid=1", "-device vmgenid,guid=auto"),
    ] {
        assert_eq!(rewritten(line), want);
    }
    for (line, want) in [
        ("-drive id=a,,b,file=a,,b", "-drive id=a,,b,file=/c,,d/disk-2.qcow2"),
        ("-hda a,b", "-hda /c,d/disk-2.qcow2"),
        ("-chardev socket,id=a,path=/r/a,,b", "-chardev socket,id=a,path=/c,,d/a,,b"),
        ("-serial unix:/t/s,,t,server=on", "-serial unix:/c,,d/s,,t,server=on"),
        ("-serial file:/t/s,t", "-serial file:/c,d/s,t"),
        ("-vnc unix:/t/s,,t,password=on", "-vnc unix:/c,,d/s,,t,password=on"),
        ("-netdev user,hostfwd=tcp::22-:22,tftp=/a,,b", "-netdev user,hostfwd=tcp::0-:22,tftp=/a,,b"),
    ] {
        assert_eq!(rewritten_in("/c,d", line), want);
    }
    let card = rewritten("-device virtio-net-pci,netdev=n,mac=52:54:00:12:34:56");
    assert!(card.starts_with("-device virtio-net-pci,netdev=n,mac=52:54:00:") && !card.ends_with("12:34:56"));
    assert_ne!(rewritten("-device e1000,netdev=n"), rewritten("-device e1000,netdev=n"));
}

//! Options that are taken from anybody, and others.

use super::*;

fn refused_in(line: &str) -> Option<String> {
    let words: Vec<String> = line.split(' ').map(String::from).collect();
    refused(&words, &[Disk { word: "/d/a.qcow2".into(), image: "/x".into(), ..Disk::default() }])
}

#[test]
fn what_a_clone_has_for_itself_is_taken() {
    for line in [
        "-nodefaults -no-user-config -display none -m 64 -smp 2 -cpu qemu64,-cx16 -accel tcg,tb-size=16",
        "-machine q35,accel=kvm -device virtio-blk-pci,drive=d0,bootindex=1 -device vmgenid,guid=auto",
        "-drive file=/d/a.qcow2,if=none,id=d0,format=qcow2 -hda /d/a.qcow2 -drive media=cdrom,if=ide",
        "-blockdev qcow2,node-name=n,file.driver=file,file.filename=/d/a.qcow2",
        "-netdev hubport,hubid=0,id=h -netdev user,id=n,net=10.0.0.0/24,hostfwd=tcp::22-:22,hostfwd=tcp::80-:80 -device virtio-net-pci,netdev=n",
        "-chardev socket,id=q,path=/run/x/q,server=on,wait=off -qmp unix:/run/y,server=on -serial file:/var/log/x",
        "-name guest=web,process=x -uuid 1 -pidfile /run/x.pid -vnc :3 -vnc unix:/run/v -monitor none",
        "-object rng-random,id=r,filename=/dev/urandom -device virtio-rng-pci,rng=r -smbios type=1,serial=x",
    ] {
        assert_eq!(refused_in(line), None);
    }
}

#[test]
fn what_may_reach_the_host_is_refused_by_name() {
    for line in [
        "-netdev bridge,id=n,br=x,helper=/bin/id",
        "-netdev bridge,id=n,br=x,helper=id",
        "-netdev tap,id=n,script=/x",
        "-netdev user,id=n,guestfwd=tcp:10.0.2.1:80-cmd:id",
        "-netdev user,id=n,smb=/",
        "-netdev user,id=n,hostfwd=unix:/run/x-:22",
        "-netdev user,id=n,type=tap",
        "-nic tap",
        "-chardev pipe,id=c,path=/x",
        "-chardev socket,id=c,path=/run/docker.sock",
        "-chardev socket,id=c,host=10.0.0.1,port=1,server=on",
        "-chardev socket,id=c,path=/a,server=on,backend=pipe",
        "-chardev null,id=c,logfile=/etc/x",
        "-serial unix:/a",
        "-serial mon:unix:/a,server=on",
        "-serial /dev/ttyS0",
        "-serial tcp:10.0.0.1:1",
        "-readconfig x",
        "-plugin x.so",
        "-fsdev local,id=f,path=/",
        "-virtfs local,path=/",
        "-incoming exec:id",
        "-runas root",
        "-chroot /x",
        "-gdb tcp::1",
        "-kernel /boot/x",
        "-machine pc,kernel=/etc/shadow",
        "-drive file=/etc/shadow,format=raw",
        "-drive file=/d/a.qcow2,file.driver=nbd",
        "-drive driver=nbd,host=x",
        "-hda /etc/shadow",
        "/etc/shadow",
        "-blockdev qcow2,node-name=n,file.driver=file,file.filename=/etc/shadow",
        "-blockdev raw,node-name=n,file.driver=host_device,file.filename=/d/a.qcow2",
        "-blockdev {\"driver\":\"file\"}",
        "-device vfio-pci,host=01:00.0",
        "-device virtio-input-host-pci,evdev=/dev/input/event0",
        "-device loader,file=x",
        "-device virtio-net-pci,romfile=/etc/shadow",
        "-device virtio-net-pci,driver=loader",
        "-device virtio-net-device-pci",
        "-object memory-backend-file,id=m,mem-path=/x",
        "-object rng-random,id=r,filename=/dev/sda",
        "-object rng-random,id=r,filename=/dev/urandom,filename=/dev/sda",
        "-drive file=/d/a.qcow2,file=/etc/shadow",
        "-blockdev qcow2,node-name=n,file.driver=file,file.driver=nbd,file.filename=/d/a.qcow2",
        "-object iothread,id=i,qom-type=filter-dump,file=x",
        "-object secret,id=s,file=/etc/shadow",
        "-fw_cfg name=opt/x,file=/etc/shadow",
        "-append -hda /etc/shadow",
    ] {
        assert!(refused_in(line).is_some(), "{line}");
    }
}

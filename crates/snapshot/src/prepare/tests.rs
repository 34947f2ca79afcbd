use super::*;

fn words(line: &str) -> Vec<String> {
    line.split(' ').map(String::from).collect()
}

#[test]
fn what_would_find_an_empty_file_is_refused_by_a_sentence() {
    for (line, part) in [
        ("-m 512 -device ivshmem-plain,memdev=x", "find it empty"),
        ("-netdev vhost-user,chardev=c", "find it empty"),
        ("-netdev vhost-vdpa,vhostdev=x", "find it empty"),
        ("-device vhost-user-fs-pci,chardev=c", "find it empty"),
        ("-object memory-backend-memfd,id=m,size=1G,share=on", "by -m alone"),
        ("-machine q35,memory-backend=m", "by -m alone"),
        ("-m 512,maxmem=4G,slots=2", "plugged in later"),
        ("-m much", "not understood"),
        ("-incoming tcp:0:1", "migrates here"),
    ] {
        let error = prepare(Path::new("/bin/qemu-system-x86_64"), &words(line), Path::new("/tmp/s")).unwrap_err();
        assert!(error.to_string().contains(part), "{line}: {error}");
    }
    let error = prepare(Path::new("/bin/sh"), &[], Path::new("/tmp/s")).unwrap_err();
    assert!(error.to_string().contains("is not QEMU"), "{error}");
    let long = Path::new("/").join("x".repeat(LONGEST));
    let error = prepare(Path::new("kvm"), &[], &long).unwrap_err();
    assert!(matches!(error, PrepareError::Socket(_)), "{error}");
    assert!(error.to_string().ends_with("is too long: use a shorter --dir"), "{error}");
    let make = || prepare(Path::new("kvm"), &[], Path::new("/tmp/s")).unwrap_err();
    let error = kmem::testing::refusing(libc::SYS_memfd_create, None, libc::EMFILE, make);
    assert!(matches!(error, PrepareError::Make(_)), "{error}");
    assert_eq!(error.to_string(), "cannot make what the guest needs");
}

#[test]
fn a_prepared_guest_is_known_by_its_words_and_they_can_be_taken_away() {
    let own = words("-machine q35 -m 1G -netdev user,id=n -device virtio-net-pci,netdev=n,vhost=on");
    let prepared = prepare(Path::new("kvm"), &own, Path::new("/run/s")).unwrap();
    let all = [&prepared.words[..], &own[..]].concat();
    assert_eq!(socket(&all).unwrap(), Path::new("/run/s"));
    assert!(all.iter().any(|word| word.contains("size=1073741824,")), "{all:?}");
    assert_eq!(without_ours(&all), [&words("-device vmgenid,guid=auto")[..], &own[..]].concat());
    assert!(socket(&own).is_none());
    assert_eq!(socket(&monitor_words(MONITOR, Path::new("/run/a,b"))).unwrap(), Path::new("/run/a,b"));
    let clone = words("-chardev socket,id=pageone-clone,fd=5 -mon chardev=pageone-clone,mode=control -incoming defer");
    let plain = [&monitor_words(CLONE, Path::new("/run/c"))[..], &clone, &own].concat();
    assert_eq!((socket(&plain), own_monitor(&plain, Path::new("/"))), (None, Some("/run/c".into())));
    assert_eq!(without_ours(&plain), own);
    assert_eq!(without_ours(&[&prepared.words[..4], &prepared.words[4..8], &clone, &own].concat()), own);
    assert_eq!(without_ours(&words("-incoming defer")), words("-incoming defer"));
    let port = words("-device pcie-root-port,id=pageone-ppr-port,chassis=239 -action panic=none");
    let recycled = words(
        "-object memory-backend-file,id=pageone-ppr-pool-0,share=on -device ivshmem-plain,id=pageone-ppr \
         -blockdev driver=null-co,node-name=pageone-ppr-pause-first -chardev socket,id=pageone-qmp,fd=3 -mon \
         chardev=pageone-qmp,mode=control -action reboot=shutdown",
    );
    assert_eq!(without_ours(&[&port[..], &recycled].concat()), port);
    assert!(is_recycled(&recycled) && !is_recycled(&port));
    assert_eq!(without_ours(&recycled[10..]), recycled[10..], "the user's own");
    for (line, path) in [
        ("-m 1 -qmp unix:q.sock,server=on,wait=off", Some("/d/q.sock")),
        ("-chardev socket,id=m,path=/run/q,server=on -mon chardev=m,mode=control", Some("/run/q")),
        ("-chardev socket,id=m,path=/run/q,server=on -mon m,mode=control", Some("/run/q")),
        ("-chardev socket,id=m,path=/run/q,server=on -mon m", None),
        ("-m 1 -qmp unix:q,,r.sock,server=on,wait=off", Some("/d/q,r.sock")),
        ("-chardev socket,id=m,fd=7,server=on -mon m,mode=control", None),
        ("-monitor unix:/run/q,server=on -qmp tcp:localhost:1", None),
    ] {
        assert_eq!(own_monitor(&words(line), Path::new("/d")), path.map(PathBuf::from), "{line}");
    }
    assert!(!takes_vmgenid(&words("-machine microvm,accel=kvm")) && takes_vmgenid(&words("-M pc-q35-7.2")));
}

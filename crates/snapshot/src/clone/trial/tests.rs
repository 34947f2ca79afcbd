use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::names::make_read_only;
use crate::record::Source;

fn words(line: &str) -> Vec<String> {
    line.split(' ').map(String::from).collect()
}

#[test]
fn values_of_json_are_read_as_others_are() {
    let node = r#"-blockdev {"node-name":"n","driver":"qcow2","read-only":false,"file":{"driver":"file","filename":"/a,b","n":1}}"#;
    assert_eq!(
        plain(words(node)),
        words("-blockdev qcow2,file.driver=file,file.filename=/a,,b,file.n=1,node-name=n,read-only=off")
    );
    let device = r#"-device {"driver":"virtio-net-pci","mac":"1:2","x":[true,null]} -name {"x":1}"#;
    assert_eq!(plain(words(device)), words(r#"-device virtio-net-pci,mac=1:2,x.0=on -name {"x":1}"#));
}

/// The program of a tenant's words leaves a process behind.
#[test]
fn what_a_tried_clone_has_started_ends_with_it() {
    if !rustix::process::geteuid().is_root() {
        return println!("SKIPPED: only root tries clones of others' guests");
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let program = dir.path().join("qemu-system-x86_64");
    // A child of another test may have open what this process writes: then it cannot be run.
    let script = "printf '#!/bin/sh\\nsetsid sleep 61.4712 &\\nsleep 0.2\\n' > \"$0\" && chmod 755 \"$0\"";
    assert!(std::process::Command::new("sh").args(["-c", script]).arg(&program).status().unwrap().success());
    let source = Source { uid: 65_534, gid: 65_534, elsewhere: false, ..Source::of(std::process::id()).unwrap() };
    let description = Description { program, directory: "/".into(), source: Some(source), ..Description::default() };
    let tried = run(&description, &[], &Asked::default());
    assert!(matches!(tried, Err(CloneError::Qmp { .. })), "{tried:?}");
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let words = all.filter_map(|entry| std::fs::read_to_string(entry.path().join("cmdline")).ok());
    assert_eq!(words.filter(|words| words == "sleep\x0061.4712\0").count(), 0);
}

#[test]
fn what_connects_is_known_from_what_listens() {
    for line in [
        "-chardev socket,id=t,path=/run/swtpm",
        "-chardev socket,id=t,host=h,port=1,server=off",
        "-serial tcp:h:1",
        "-qmp unix:/x",
        "-serial mon:telnet:h:1",
    ] {
        assert_eq!(connects(&words(line)).as_deref(), Some(line));
    }
    let line = "-chardev socket,id=t,path=/x,server=on -chardev socket,id=u,path=/x,reconnect=1 -serial stdio -qmp \
                tcp::1,server=on -monitor unix:/x,server,nowait -chardev stdio,id=x -serial chardev:x -serial file:/x";
    assert_eq!(connects(&words(line)), None);
}

#[test]
fn networks_of_the_host_are_not_asked_for_twice() {
    let line =
        "-netdev tap,id=n,,m,ifname=tap0,script=/x -nic tap,model=e1000,ifname=x -netdev user,id=u -drive file=tap";
    let want = "-netdev hubport,hubid=0,id=n,,m -nic user,model=e1000 -netdev user,id=u -drive file=tap";
    assert_eq!(alone(&words(line)), words(want));
}

#[test]
fn an_image_that_a_snapshot_has_is_known_where_a_guest_would_write_to_it() {
    let dir = tempfile::tempdir().unwrap();
    let [live, stored] = ["live,1", "stored"].map(|name| dir.path().join(name));
    for image in [&live, &stored] {
        std::fs::write(image, "x").unwrap();
    }
    make_read_only(&stored).unwrap();
    let (live, at) = (live.display().to_string().replace(',', ",,"), stored.display());
    let found = |line: String| stored_image(&line.split(' ').map(String::from).collect::<Vec<_>>());
    for line in [
        format!("-drive file={live},if=none -hda {at}"),
        format!("-drive if=virtio,file={at},format=qcow2"),
        format!("-blockdev qcow2,node-name=n,file.driver=file,file.filename={at}"),
        format!(r#"-blockdev {{"driver":"file","node-name":"n","filename":"{at}"}}"#),
    ] {
        assert_eq!(found(line.clone()), Some(stored.clone()), "{line}");
    }
    for line in [
        format!("-drive file={live} -hdb /dev/null -hdc /nonexistent -cdrom {at}"),
        format!("-drive file={at},media=cdrom -drive readonly=on,file={at} -drive file={at},if=pflash"),
        format!(r#"-blockdev {{"driver":"file","node-name":"n","filename":"{at}","read-only":true}}"#),
        format!("-hda {at} -snapshot"),
    ] {
        assert_eq!(found(line.clone()), None, "{line}");
    }
}

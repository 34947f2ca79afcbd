use super::*;

fn mount(path: &str, domain: &str) -> MountInfo {
    MountInfo { path: path.into(), device: 1, domain: domain.into() }
}

#[test]
fn the_mount_of_the_domain_is_taken_or_the_only_one() {
    let (a, b) = (mount("/dev/a", "a"), mount("/dev/b", "b"));
    assert!(
        choose(&[], None)
            .unwrap_err()
            .to_string()
            .contains("pageonefs is not mounted; as root: install the package pageone-pageonefs-dkms")
    );
    assert_eq!(choose(std::slice::from_ref(&a), None).unwrap(), &a);
    let both = [a, b];
    assert_eq!(choose(&both, Some("b")).unwrap(), &both[1]);
    assert!(
        choose(&both, None)
            .unwrap_err()
            .to_string()
            .contains("there are several mounts of pageonefs: name one by --domain: /dev/a")
    );
    assert!(choose(&both, Some("c")).unwrap_err().to_string().contains("no mount of pageonefs has domain \"c\""));
}

#[test]
fn ram_that_is_described_otherwise_is_seen() {
    let words = |line: &str| line.split(' ').map(String::from).collect::<Vec<_>>();
    let mount = Path::new("/mnt/pageone");
    for line in ["-m 1G", "-object rng-random,id=r", "-object memory-backend-file,id=m,mem-path=/mnt/pageone/x"] {
        assert_eq!(obstacle(&words(line), mount), None, "{line}");
    }
    for line in ["-mem-path /x", "-object memory-backend-ram,id=m", "-machine q35,memory-backend=m"] {
        assert!(obstacle(&words(line), mount).is_some(), "{line}");
    }
    assert!(is_in(&words("-object memory-backend-file,mem-path=/mnt/pageone"), mount));
    assert!(!is_in(&words("-object memory-backend-file,mem-path=/mnt/pageone2"), mount));
    assert!(is_in(&words("-object memory-backend-file,mem-path=/mnt/a,,b"), Path::new("/mnt/a,b")));
}

#[test]
fn another_program_and_words_without_text_are_refused() {
    let refuse = |program: &[&str]| {
        let program: Vec<OsString> = program.iter().map(OsString::from).collect();
        prepare(&mut Command::new("true"), &program, None, None, Start::Never).unwrap_err().to_string()
    };
    assert!(refuse(&["/bin/sh"]).contains("--backend module is for QEMU's x86-64 guests, and sh is not QEMU"));
}
